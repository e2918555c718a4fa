//! Entry points that are not written: how often a process called which.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shim_ffi::{COUNT, CUresult, SYMBOLS, Symbol};

use crate::settings::env;

static CALLS: [AtomicU64; COUNT] = [const { AtomicU64::new(0) }; COUNT];

/// What an entry point that is not written answers; counted.
pub extern "C" fn call(symbol: Symbol) -> CUresult {
    CALLS[symbol as usize].fetch_add(1, Relaxed);
    CUresult::CUDA_ERROR_NOT_SUPPORTED
}

/// How often this process called entry points that are not written.
pub fn counts() -> Vec<(Symbol, u64)> {
    SYMBOLS
        .iter()
        .map(|symbol| (*symbol, CALLS[*symbol as usize].load(Relaxed)))
        .filter(|(_, count)| *count > 0)
        .collect()
}

/// Appends the counts to the file named by `SUBLET_SIM_UNSUPPORTED`, one line `PID SYMBOL COUNT`
/// each.
pub fn dump() {
    let Some(path) = env("SUBLET_SIM_UNSUPPORTED") else {
        return;
    };
    let lines: String = counts()
        .iter()
        .map(|(symbol, count)| {
            format!("{} {} {count}\n", std::process::id(), symbol.entry().name())
        })
        .collect();
    if let Ok(mut file) = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
    {
        // The process ends; there is nobody left to tell.
        let _ = file.write_all(lines.as_bytes());
    }
}
