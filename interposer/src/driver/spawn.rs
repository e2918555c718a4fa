//! Threads of our own.

use std::ffi::c_void;

use crate::driver::loader;

/// What a thread of ours does.
pub(crate) type Thread = extern "C" fn(*mut c_void) -> *mut c_void;

/// A thread with every signal blocked: the program's signals are for the program's threads. By
/// hand, because the standard library's way asks for a newer C library than we may (see
/// `old_libc`).
pub(crate) fn spawn(main: Thread) -> bool {
    type Create = unsafe extern "C" fn(
        *mut libc::pthread_t,
        *const c_void,
        Thread,
        *mut c_void,
    ) -> libc::c_int;
    type Detach = unsafe extern "C" fn(libc::pthread_t) -> libc::c_int;
    let (create, detach) = (
        loader::in_c_library(c"pthread_create"),
        loader::in_c_library(c"pthread_detach"),
    );
    if create.is_null() || detach.is_null() {
        return false;
    }
    /// Bytes of the kernel's set of signals.
    const SET: usize = 8;
    let (all, mut before, mut thread) = (u64::MAX, 0u64, 0);
    // SAFETY: valid pointers to locals of the kernel's size; the mask of this thread is put back.
    // The functions are the C library's of these names.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const all,
            &raw mut before,
            SET,
        );
        let create = std::mem::transmute::<*mut c_void, Create>(create);
        let detach = std::mem::transmute::<*mut c_void, Detach>(detach);
        let started = create(
            &raw mut thread,
            std::ptr::null(),
            main,
            std::ptr::null_mut(),
        ) == 0;
        if started {
            detach(thread);
        }
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const before,
            std::ptr::null_mut::<u64>(),
            SET,
        );
        started
    }
}
