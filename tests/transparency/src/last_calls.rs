//! The last calls of a process, written out when a signal ends it: a crash inside of the driver
//! says nothing else of where it was.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use shim_ffi::{SYMBOLS, Symbol};

const KEPT: usize = 8;
const NONE: u32 = u32::MAX;

static CALLS: [AtomicU32; KEPT] = [const { AtomicU32::new(NONE) }; KEPT];
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A call is about to be made. Threads take turns, so the order is known.
pub fn note(symbol: Symbol) {
    let at = COUNT.fetch_add(1, Ordering::Relaxed);
    // PANIC: a remainder is less than the length. CAST: there are fewer than a thousand symbols.
    CALLS[at % KEPT].store(symbol as u32, Ordering::Relaxed);
}

/// From now on a signal that ends the process for a fault writes a line to standard output first.
pub fn tell_if_ended() {
    for signal in [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGABRT,
    ] {
        // SAFETY: a zeroed structure is a valid one; the handler makes only calls that a handler
        // may make.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_fault as *const () as usize;
            action.sa_flags = libc::SA_RESETHAND;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// Writes the line and comes back: the fault happens again, and ends the process this time.
extern "C" fn on_fault(signal: libc::c_int) {
    say(b"\ndied in");
    let count = COUNT.load(Ordering::Relaxed);
    for at in count.saturating_sub(KEPT)..count {
        // PANIC: as above.
        let symbol = CALLS[at % KEPT].load(Ordering::Relaxed) as usize;
        if let Some(symbol) = SYMBOLS.get(symbol) {
            say(b" ");
            say(symbol.entry().symbol.to_bytes());
        }
    }
    say(b"\n");
    if signal == libc::SIGABRT {
        // SAFETY: no preconditions. The handler is gone by now.
        unsafe { libc::raise(signal) };
    }
}

fn say(text: &[u8]) {
    // SAFETY: a slice and its length. Nothing depends on its arrival.
    let _ = unsafe { libc::write(1, text.as_ptr().cast(), text.len()) };
}
