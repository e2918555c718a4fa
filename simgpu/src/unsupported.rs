//! Entry points that are not written: how often a process called which.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shim_ffi::{COUNT, CUresult, SYMBOLS, Symbol};

use crate::lock::Mutex;
use crate::settings::env;

static CALLS: [AtomicU64; COUNT] = [const { AtomicU64::new(0) }; COUNT];

/// What an entry point that is not written answers; counted.
pub extern "C" fn call(symbol: Symbol) -> CUresult {
    CALLS[symbol as usize].fetch_add(1, Relaxed);
    CUresult::CUDA_ERROR_NOT_SUPPORTED
}

/// The same by name, for libraries whose functions have no number.
static NAMED: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// Counts a call of a function that is not written, by its name. What was counted is reported at
/// the end of the process, as for entry points.
pub fn named(name: &'static str) {
    static AT_EXIT: Once = Once::new();
    extern "C" fn exited() {
        dump();
    }
    AT_EXIT.call_once(|| {
        // SAFETY: the function only appends to a file; the library that it is in is never
        // unloaded.
        unsafe { libc::atexit(exited) };
    });
    *NAMED.lock().entry(name).or_default() += 1;
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
    let named: Vec<_> = std::mem::take(&mut *NAMED.lock()).into_iter().collect();
    let lines: String = counts()
        .iter()
        .map(|(symbol, count)| (symbol.entry().name(), *count))
        .chain(named)
        .map(|(name, count)| format!("{} {name} {count}\n", std::process::id()))
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
