//! The few functions for which the C library that this is built with would be asked for by a newer
//! version than the hosts have that we mean to run on (glibc 2.28): answered here, by system calls
//! or by looking the function up wherever the host's C library has it. Hidden, so that nobody but
//! this library finds them.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};

use crate::driver::loader;

/// Defines a hidden symbol that jumps to a function of ours.
macro_rules! hidden {
    ($($name:literal => $function:ident;)*) => {
        $(std::arch::global_asm!(
            concat!(".globl ", $name),
            concat!(".hidden ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            "jmp {function}",
            function = sym $function,
        );)*
    };
}

hidden! {
    // Since 2.30; before, there was only the system call.
    "gettid" => thread_id;
    // Since 2.33; before, inline functions around __xstat64. The standard library's way where statx
    // is not allowed.
    "stat64" => stat;
    "fstat64" => fstat;
    // Since 2.34 in libc itself, before in libpthread. The standard library's way where there is no
    // __cxa_thread_atexit_impl, which is nowhere.
    "pthread_key_create" => key_create;
    "pthread_key_delete" => key_delete;
    "pthread_setspecific" => set_specific;
}

extern "C" fn thread_id() -> c_int {
    // SAFETY: takes nothing, cannot fail.
    // CAST: thread ids are ints.
    unsafe { libc::syscall(libc::SYS_gettid) as c_int }
}

unsafe extern "C" fn stat(path: *const c_char, to: *mut c_void) -> c_int {
    // SAFETY: the caller's own arguments; the kernel's structure is the C library's on x86-64.
    // CAST: 0 or -1.
    unsafe { libc::syscall(libc::SYS_stat, path, to) as c_int }
}

unsafe extern "C" fn fstat(file: c_int, to: *mut c_void) -> c_int {
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_fstat, c_long::from(file), to) as c_int }
}

fn threads(name: &CStr) -> Option<*mut c_void> {
    let at = loader::in_c_library(name);
    (!at.is_null()).then_some(at)
}

unsafe extern "C" fn key_create(
    key: *mut c_uint,
    destructor: Option<unsafe extern "C" fn(*mut c_void)>,
) -> c_int {
    type Create =
        unsafe extern "C" fn(*mut c_uint, Option<unsafe extern "C" fn(*mut c_void)>) -> c_int;
    match threads(c"pthread_key_create") {
        // SAFETY: the C library's function of this name, with the caller's own arguments.
        Some(at) => unsafe { std::mem::transmute::<*mut c_void, Create>(at)(key, destructor) },
        None => libc::EAGAIN,
    }
}

unsafe extern "C" fn key_delete(key: c_uint) -> c_int {
    type Delete = unsafe extern "C" fn(c_uint) -> c_int;
    match threads(c"pthread_key_delete") {
        // SAFETY: as above.
        Some(at) => unsafe { std::mem::transmute::<*mut c_void, Delete>(at)(key) },
        None => libc::EINVAL,
    }
}

unsafe extern "C" fn set_specific(key: c_uint, value: *const c_void) -> c_int {
    type Set = unsafe extern "C" fn(c_uint, *const c_void) -> c_int;
    match threads(c"pthread_setspecific") {
        // SAFETY: as above.
        Some(at) => unsafe { std::mem::transmute::<*mut c_void, Set>(at)(key, value) },
        None => libc::EINVAL,
    }
}
