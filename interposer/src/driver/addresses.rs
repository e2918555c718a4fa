//! Where calls go, by row of the table.

use std::ffi::c_void;
use std::sync::atomic::AtomicPtr;

use shim_ffi::COUNT;

/// Where calls of each symbol go: the real function, or the thunk that counts and goes there while
/// a diagnosis runs ([`trace`](super::trace)). Null until it is first needed.
pub(crate) static SLOTS: [AtomicPtr<c_void>; COUNT] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];
/// Address of each real function, for comparing; null until it is first needed.
pub(crate) static DRIVER: [AtomicPtr<c_void>; COUNT] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];
