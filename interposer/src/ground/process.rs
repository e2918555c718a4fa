//! What happens to the process we live in: fork and exit.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use crate::attachment::client;
use crate::gate::follow;
use crate::ground::errno::Preserve;
use crate::ground::thread::thread;
use crate::{nvml, residency};

/// Set once exit has begun: from then on we only forward.
static EXITING: AtomicBool = AtomicBool::new(false);
/// 0: not yet, 1: handlers are registered.
static REGISTERED: AtomicU32 = AtomicU32::new(0);

/// Whether exit has begun.
pub(crate) fn exiting() -> bool {
    EXITING.load(Relaxed)
}

/// Registers for fork and exit, once per process image.
pub(crate) fn register() {
    if REGISTERED.swap(1, Relaxed) != 0 {
        return;
    }
    let _errno = Preserve::new();
    // A panic is caught at the entry it happened in; this copy of the standard library must not
    // print it either.
    std::panic::set_hook(Box::new(|_| {}));
    // SAFETY: the handlers are functions of this library, which is never unloaded (it is preloaded,
    // or pinned by TLS).
    unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
        libc::atexit(at_exit);
    }
}

/// In a forked child: nothing of the parent's attachment is ours. The child is unattached until it
/// calls `cuInit` itself.
extern "C" fn in_child() {
    client::forget();
    nvml::forget();
    thread().forget();
}

extern "C" fn at_exit() {
    EXITING.store(true, Relaxed);
    client::stop();
    residency::stop();
    follow::stop();
}
