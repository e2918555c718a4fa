//! `cuGetProcAddress`: the driver answers, and what it answers is swapped for ours *by address*.
//!
//! The first thing that the runtime asks for is `cuGetProcAddress` itself, and it uses that answer
//! for everything else.

use std::ffi::CStr;

use shim_ffi::counts::Note;
use shim_ffi::*;

use crate::driver::own::own;
use crate::driver::{real, trace};

/// Our function for the real one at `address`, if it is one that we stand in front of. `name`,
/// `version` and `flags` are what was asked for: they say where to look first.
fn swap(address: *mut c_void, name: &CStr, version: i32, flags: u64) -> Option<*mut c_void> {
    let is = |symbol: Symbol| real::exported(symbol) && real::driver_address(symbol) == address;
    // CAST: a version below zero is nonsense that no row satisfies.
    let version = u32::try_from(version).unwrap_or(0);
    let expected = resolve::select(name.to_bytes(), version, flags, real::exported)
        .filter(|symbol| is(*symbol));
    // A driver with another rule, or another name for it: look through all that it exports.
    let symbol = expected.or_else(|| SYMBOLS.iter().copied().find(|symbol| is(*symbol)))?;
    Some(own(symbol))
}

fn answer(
    result: CUresult,
    name: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> CUresult {
    if !result.is_ok() || name.is_null() || function.is_null() {
        return result;
    }
    let _errno = crate::ground::errno::Preserve::new();
    // SAFETY: the driver has read the name and written the answer.
    unsafe {
        let (name, address) = (CStr::from_ptr(name), *function);
        if !address.is_null() {
            match swap(address, name, version, flags) {
                Some(own) => {
                    *function = own;
                    trace::note(Note::Answers);
                }
                // A function that we know nothing of; nothing stands in front of it.
                None if real::is_refused() => *function = real::refused as *mut c_void,
                None => trace::note(Note::LeftAsIs),
            }
        }
    }
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuGetProcAddress(
    name: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    answer(
        unsafe { real::cuGetProcAddress(name, function, version, flags) },
        name,
        function,
        version,
        flags,
    )
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuGetProcAddress_v2(
    name: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
    status: *mut CUdriverProcAddressQueryResult,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real::cuGetProcAddress_v2(name, function, version, flags, status) };
    answer(result, name, function, version, flags)
}
