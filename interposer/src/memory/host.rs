//! Pinned host memory: counted, not limited.

use shim_ffi::*;

use crate::attachment::client::{self, Attached};
use crate::driver::real;
use crate::metering::{self, Kind, Live, Meter, freed};

fn pinned(bytes: u64, call: impl FnOnce() -> CUresult, key: impl FnOnce() -> u64) -> CUresult {
    let result = call();
    if result.is_ok()
        && let Some(account) = client::current().and_then(Attached::account)
    {
        account.pin(bytes);
        metering::insert(
            key(),
            Live {
                bytes,
                // It goes with its context, too.
                context: Meter::here().map_or(0, |meter| meter.context()),
                device: 0,
                kind: Kind::Host,
                overtaken: 0,
            },
        );
    }
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize) -> CUresult {
    // SAFETY: the caller's own arguments; on success the driver has written the address.
    unsafe {
        pinned(
            bytes as u64,
            || real::cuMemAllocHost_v2(pointer, bytes),
            || *pointer as u64,
        )
    }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemAllocHost(pointer: *mut *mut c_void, bytes: u32) -> CUresult {
    // SAFETY: the caller's own arguments; on success the driver has written the address.
    unsafe {
        pinned(
            u64::from(bytes),
            || real::cuMemAllocHost(pointer, bytes),
            || *pointer as u64,
        )
    }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemHostAlloc(
    pointer: *mut *mut c_void,
    bytes: usize,
    flags: u32,
) -> CUresult {
    // SAFETY: the caller's own arguments; on success the driver has written the address.
    unsafe {
        pinned(
            bytes as u64,
            || real::cuMemHostAlloc(pointer, bytes, flags),
            || *pointer as u64,
        )
    }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemHostRegister_v2(
    pointer: *mut c_void,
    bytes: usize,
    flags: u32,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    unsafe {
        pinned(
            bytes as u64,
            || real::cuMemHostRegister_v2(pointer, bytes, flags),
            || pointer as u64,
        )
    }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemHostRegister(pointer: *mut c_void, bytes: usize, flags: u32) -> CUresult {
    // SAFETY: the caller's own arguments.
    unsafe {
        pinned(
            bytes as u64,
            || real::cuMemHostRegister(pointer, bytes, flags),
            || pointer as u64,
        )
    }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemFreeHost(pointer: *mut c_void) -> CUresult {
    // SAFETY: the caller's own argument.
    freed(pointer as u64, || unsafe { real::cuMemFreeHost(pointer) })
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemHostUnregister(pointer: *mut c_void) -> CUresult {
    // SAFETY: the caller's own argument.
    freed(pointer as u64, || unsafe {
        real::cuMemHostUnregister(pointer)
    })
}
