//! Prints what the simulated devices say of themselves, one JSON object: an account that owes
//! nothing to the arbiter. `SUBLET_SIM_STATE` says where the devices live, as to every program that
//! uses them.
//!
//!     usage [MILLISECONDS]
//!
//! With an interval it goes on, a line each, until its output is closed.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use simgpu::observe::{DeviceView, now_ns, snapshot};

fn main() -> ExitCode {
    let every = match std::env::args().nth(1).map(|word| word.parse::<u64>()) {
        None => None,
        Some(Ok(ms)) if ms > 0 => Some(Duration::from_millis(ms)),
        Some(_) => {
            eprintln!("usage: the interval is a whole number of milliseconds, at least 1");
            return ExitCode::from(64);
        }
    };
    loop {
        let devices = match snapshot() {
            Ok(devices) => devices,
            Err(error) => {
                eprintln!("usage: {error}");
                return ExitCode::FAILURE;
            }
        };
        let devices: Vec<_> = devices.iter().map(device).collect();
        let line = format!(
            "{{\"mono_ns\":{},\"devices\":[{}]}}\n",
            now_ns(),
            devices.join(",")
        );
        let mut out = std::io::stdout().lock();
        if out
            .write_all(line.as_bytes())
            .and_then(|()| out.flush())
            .is_err()
        {
            return ExitCode::SUCCESS;
        }
        drop(out);
        let Some(every) = every else {
            return ExitCode::SUCCESS;
        };
        std::thread::sleep(every);
    }
}

fn device(device: &DeviceView) -> String {
    let processes: Vec<_> = device
        .processes
        .iter()
        .map(|process| {
            format!(
                "{{\"pid\":{},\"used_bytes\":{},\"compute_ns\":{},\"turn_ns\":{},\"copy_ns\":{},\"launches\":{},\
                 \"pinned_bytes\":{},\"handles\":{},\"host_located_bytes\":{}}}",
                process.pid,
                process.used_bytes,
                process.compute_ns,
                process.turn_ns,
                process.copy_ns,
                process.launches,
                process.pinned_bytes,
                process.handles,
                process.host_located_bytes
            )
        })
        .collect();
    // Names come from profiles, which hold plain text; Rust's escapes of it are JSON's.
    format!(
        "{{\"name\":{:?},\"usable_bytes\":{},\"used_bytes\":{},\"switches\":{},\"busy_ns\":{},\"processes\":[{}]}}",
        device.name,
        device.usable_bytes,
        device.used_bytes,
        device.switches,
        device.busy_ns,
        processes.join(",")
    )
}
