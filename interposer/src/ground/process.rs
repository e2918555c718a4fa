//! What happens to the process we live in: fork and exit.

use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use crate::ground::errno::Preserve;

/// What is to be done at a fork and at exit, by those who know what there is: see `lifecycle`.
pub(crate) struct Handlers {
    /// In a forked child.
    pub(crate) in_child: fn(),
    pub(crate) at_exit: fn(),
}

static HANDLERS: AtomicPtr<Handlers> = AtomicPtr::new(std::ptr::null_mut());
/// Set once exit has begun: from then on we only forward.
static EXITING: AtomicBool = AtomicBool::new(false);
/// How many forks lie between the program's start and this process, as far as they were watched.
static FORKS: AtomicU32 = AtomicU32::new(0);
static WATCHED: AtomicBool = AtomicBool::new(false);

/// Whether exit has begun.
pub(crate) fn exiting() -> bool {
    EXITING.load(Relaxed)
}

/// A number that is another one in a forked child than in its parent.
pub(crate) fn forks() -> u32 {
    FORKS.load(Relaxed)
}

/// The calling thread, by the kernel's number.
pub(crate) fn own_tid() -> u32 {
    rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .unsigned_abs()
}

/// Whether a thread of this process has ended, by the kernel's number. Another one may have the
/// number by now: then it is taken for that.
pub(crate) fn has_ended(tid: u32) -> bool {
    let _errno = Preserve::new();
    // SAFETY: numbers; signal 0 is none.
    let there = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, 0) } == 0;
    // SAFETY: the calling thread's own word.
    !there && unsafe { *libc::__errno_location() } == libc::ESRCH
}

/// From here on `handlers` are called, beside what [`exiting`] and [`forks`] say.
pub(crate) fn handle(handlers: &'static Handlers) {
    HANDLERS.store(std::ptr::from_ref(handlers).cast_mut(), Release);
    watch();
}

/// Watches for forks and exit, once per process image.
pub(crate) fn watch() {
    if WATCHED.swap(true, Relaxed) {
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

fn handlers() -> Option<&'static Handlers> {
    // SAFETY: null, or from a reference that lives as long as the process.
    unsafe { HANDLERS.load(Acquire).as_ref() }
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Relaxed);
    if let Some(handlers) = handlers() {
        (handlers.in_child)();
    }
}

extern "C" fn at_exit() {
    EXITING.store(true, Relaxed);
    if let Some(handlers) = handlers() {
        (handlers.at_exit)();
    }
}
