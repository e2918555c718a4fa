//! Prints what the simulated devices say of themselves, one JSON object: an account that owes nothing to the arbiter.
//! Where the devices live is told by `SUBLET_SIM_STATE`, as to every program that uses them.

use std::process::ExitCode;

use simgpu::observe::{DeviceView, snapshot};

fn main() -> ExitCode {
    match snapshot() {
        Ok(devices) => {
            let devices: Vec<_> = devices.iter().map(device).collect();
            println!("{{\"devices\":[{}]}}", devices.join(","));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("usage: {error}");
            ExitCode::FAILURE
        }
    }
}

fn device(device: &DeviceView) -> String {
    let processes: Vec<_> = device
        .processes
        .iter()
        .map(|process| {
            format!(
                "{{\"pid\":{},\"used_bytes\":{},\"compute_ns\":{},\"copy_ns\":{},\"launches\":{}}}",
                process.pid,
                process.used_bytes,
                process.compute_ns,
                process.copy_ns,
                process.launches
            )
        })
        .collect();
    // Names come from profiles, which hold plain text; Rust's escapes of it are JSON's.
    format!(
        "{{\"name\":{:?},\"usable_bytes\":{},\"used_bytes\":{},\"switches\":{},\"processes\":[{}]}}",
        device.name,
        device.usable_bytes,
        device.used_bytes,
        device.switches,
        processes.join(",")
    )
}
