//! Prints what the simulated devices say of themselves, one JSON object: an account that owes nothing to the arbiter.
//! Where the devices live is told by `SUBLET_SIM_STATE`, as to every program that uses them.

use std::process::ExitCode;

use serde_json::json;

fn main() -> ExitCode {
    let devices = match simgpu::observe::snapshot() {
        Ok(devices) => devices,
        Err(error) => {
            eprintln!("sim_usage: {error}");
            return ExitCode::FAILURE;
        }
    };
    let devices: Vec<_> = devices
        .iter()
        .map(|device| {
            let processes: Vec<_> = device
                .processes
                .iter()
                .map(|process| {
                    json!({
                        "pid": process.pid,
                        "used_bytes": process.used_bytes,
                        "compute_ns": process.compute_ns,
                        "copy_ns": process.copy_ns,
                        "launches": process.launches,
                    })
                })
                .collect();
            json!({
                "name": device.name,
                "usable_bytes": device.usable_bytes,
                "used_bytes": device.used_bytes,
                "switches": device.switches,
                "processes": processes,
            })
        })
        .collect();
    println!("{}", json!({ "devices": devices }));
    ExitCode::SUCCESS
}
