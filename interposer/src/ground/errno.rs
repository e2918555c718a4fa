//! The host's `errno`, left as it was.

/// Puts `errno` back when dropped. Around every call of ours into the C library.
pub(crate) struct Preserve(libc::c_int);

impl Preserve {
    pub(crate) fn new() -> Self {
        // SAFETY: the C library's per-thread errno location is always valid.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl Drop for Preserve {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = self.0 }
    }
}
