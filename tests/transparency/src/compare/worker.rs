//! One run in a process of its own: what the parent starts bare and interposed. It writes lines to
//! standard output.
//!
//! | line | what |
//! |---|---|
//! | `device NAME` | the device's name |
//! | `block HASH` | the hash of the next thousand calls |
//! | `calls COUNT SYMBOL` | how often a symbol was called |
//! | `at INDEX` | a probe is about to be made |
//! | `probe INDEX STATUS` | what it answered |
//! | `answer ...` | what `cuGetProcAddress` says of one symbol |
//! | `shown ...` | a call written out |
//! | `died in ...` | the last calls of a process that a signal ends, the latest last |
//! | `end` | nothing is missing |

use std::io::Write;
use std::ops::Range;

use shim_ffi::*;

use super::Task;
use crate::api::Api;
use crate::transcript::Transcript;
use crate::{last_calls, probe, sequence};

/// Seconds after which a probe that has not come back ends the process.
const PROBE_SECONDS: u32 = 20;

fn say(out: &mut impl Write, line: std::fmt::Arguments<'_>) {
    // The parent has gone away: nobody to tell.
    if writeln!(out, "{line}").is_err() {
        std::process::exit(1);
    }
}

/// Does `task`, writing out the calls of `shown`. `preloaded`: whether the preload library has to
/// be there; `governed`: whether an arbiter has to.
///
/// # Errors
/// The driver cannot be opened, or is not the one that it should be.
pub fn run(task: Task, shown: Range<u64>, preloaded: bool, governed: bool) -> Result<(), String> {
    let mut api = Api::open()?;
    if api.preloaded() != preloaded {
        return Err(format!(
            "the preload library is {} in this process: SUBLET_DRIVER, LD_PRELOAD or its SONAME are wrong",
            if preloaded { "not" } else { "there" }
        ));
    }
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    match task {
        Task::Resolve => {
            for (symbol, result, status, at) in api.resolve() {
                say(
                    &mut out,
                    format_args!(
                        "answer {} {} {status} {at:?}",
                        symbol.entry().name(),
                        result.0
                    ),
                );
            }
        }
        Task::Probe { round, from } => {
            drop(out);
            let mut raw = std::io::stdout();
            probe::run(&api, round, from, |event| {
                match event {
                    probe::Event::About(symbol) => {
                        // SAFETY: no preconditions; a hanging call ends the process.
                        unsafe { libc::alarm(PROBE_SECONDS) };
                        say(&mut raw, format_args!("at {}", symbol as usize));
                    }
                    probe::Event::Answered(symbol, result) => {
                        say(
                            &mut raw,
                            format_args!("probe {} {}", symbol as usize, result.0),
                        );
                    }
                }
                let _ = raw.flush();
            });
            say(&mut raw, format_args!("end"));
            return Ok(());
        }
        Task::Walk { plan } | Task::Random { plan } => {
            last_calls::tell_if_ended();
            let _ = api.resolve();
            let name = device_name(&api);
            if governed && !attached() {
                return Err("this job's process is not attached to the arbiter".to_owned());
            }
            say(&mut out, format_args!("device {name}"));
            let walk = matches!(task, Task::Walk { .. });
            let log = sequence::run(api, Transcript::new(shown), plan, walk);
            let (blocks, counts, text) = log.end();
            for block in blocks {
                say(&mut out, format_args!("block {block:016x}"));
            }
            for (symbol, count) in SYMBOLS.iter().zip(counts).filter(|(_, count)| *count > 0) {
                say(
                    &mut out,
                    format_args!("calls {count} {}", symbol.entry().name()),
                );
            }
            for line in text.lines() {
                say(&mut out, format_args!("shown {line}"));
            }
        }
    }
    say(&mut out, format_args!("end"));
    let _ = out.flush();
    Ok(())
}

/// Whether the preload library has mapped its tenant's page: it has found the arbiter.
fn attached() -> bool {
    std::fs::read_to_string("/proc/self/maps")
        .is_ok_and(|maps| maps.contains("memfd:sublet-tenant"))
}

fn device_name(api: &Api) -> String {
    let mut name = [0 as c_char; 128];
    let mut device = CUdevice(0);
    // SAFETY: outputs are locals of the lengths given.
    let result = unsafe {
        let _ = api.cuInit(0);
        let _ = api.cuDeviceGet(&raw mut device, 0);
        api.cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device)
    };
    if !result.is_ok() {
        return "none".to_owned();
    }
    // SAFETY: the driver has written a terminated string.
    unsafe { std::ffi::CStr::from_ptr(name.as_ptr()) }
        .to_string_lossy()
        .into_owned()
}
