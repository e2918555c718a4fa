//! The environment, as the program was started with it.

use std::ffi::CStr;

/// An environment variable. Read by the C library's function: the standard library's takes a lock
/// that a forking thread may hold.
pub(crate) fn variable(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: NUL-terminated name; the answer is a NUL-terminated string of the environment, looked
    // at and copied at once. Most are asked for inside the program's own first driver call. What
    // says which job a process is of may be asked for in any thread that reads NVML, so that is
    // found once per process (`attachment::job`): a program that changes its environment in another
    // thread at that moment races with every library that reads it, NVML among them.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null())
            .then(|| CStr::from_ptr(value).to_bytes())
            .filter(|value| !value.is_empty())
    }
}
