//! The environment, as the program was started with it.

use std::ffi::CStr;

/// An environment variable. Read by the C library's function: the standard library's takes a lock
/// that a forking thread may hold.
pub(crate) fn variable(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: NUL-terminated name; the answer is a NUL-terminated string of the environment, copied
    // before it can change (this runs inside the program's own first driver call).
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null())
            .then(|| CStr::from_ptr(value).to_bytes())
            .filter(|value| !value.is_empty())
    }
}
