//! What the program is told about memory: its quota, never more than the device has.

use channel::NO_LIMIT;
use shim_ffi::*;

use super::Meter;
use crate::real;

/// Free and total bytes as the quota of the calling thread's device allows; `None`: the driver is to answer.
#[inline]
fn within_quota() -> Option<(u64, u64)> {
    let meter = Meter::here()?;
    let limit = meter.limit_bytes();
    if limit == NO_LIMIT {
        return None;
    }
    let grant = meter.attached.end.arbiter.device(meter.device)?;
    let (physical, physical_free) = (grant.physical_total_bytes(), grant.physical_free_bytes());
    let total = if physical == 0 {
        limit
    } else {
        limit.min(physical)
    };
    let free = total
        .saturating_sub(meter.account.used_bytes(meter.device))
        .min(physical_free);
    Some((free, total))
}

/// # Safety
/// As the driver's function.
#[inline]
pub(crate) unsafe fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    if !free.is_null()
        && !total.is_null()
        && let Some((free_bytes, total_bytes)) = within_quota()
    {
        // SAFETY: not null, and the caller's to write to.
        unsafe {
            *free = free_bytes as usize;
            *total = total_bytes as usize;
        }
        return CUresult::CUDA_SUCCESS;
    }
    // SAFETY: the caller's own arguments.
    unsafe { real::cuMemGetInfo_v2(free, total) }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemGetInfo(free: *mut u32, total: *mut u32) -> CUresult {
    if !free.is_null()
        && !total.is_null()
        && let Some((free_bytes, total_bytes)) = within_quota()
    {
        // SAFETY: not null, and the caller's to write to. This ABI saturates at 32 bits.
        unsafe {
            *free = u32::try_from(free_bytes).unwrap_or(u32::MAX);
            *total = u32::try_from(total_bytes).unwrap_or(u32::MAX);
        }
        return CUresult::CUDA_SUCCESS;
    }
    // SAFETY: the caller's own arguments.
    unsafe { real::cuMemGetInfo(free, total) }
}

fn limit_of(device: CUdevice) -> u64 {
    Meter::of(device.0).map_or(NO_LIMIT, |meter| meter.limit_bytes())
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real::cuDeviceTotalMem_v2(bytes, device) };
    if result.is_ok() {
        // SAFETY: the driver has just written there.
        unsafe { *bytes = (*bytes).min(usize::try_from(limit_of(device)).unwrap_or(usize::MAX)) };
    }
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuDeviceTotalMem(bytes: *mut u32, device: CUdevice) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real::cuDeviceTotalMem(bytes, device) };
    if result.is_ok() {
        // SAFETY: the driver has just written there.
        unsafe { *bytes = (*bytes).min(u32::try_from(limit_of(device)).unwrap_or(u32::MAX)) };
    }
    result
}

// Allocations are the driver's own as long as no tenant is evictable: what it says of addresses, pointers and graph memory
// is true. The hooks stand here because their answers will change with residency.

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemGetAddressRange_v2(
    base: *mut CUdeviceptr,
    bytes: *mut usize,
    at: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    unsafe { real::cuMemGetAddressRange_v2(base, bytes, at) }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemGetAddressRange(
    base: *mut CUdeviceptr_v1,
    bytes: *mut u32,
    at: CUdeviceptr_v1,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    unsafe { real::cuMemGetAddressRange(base, bytes, at) }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: CUpointer_attribute,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    unsafe { real::cuPointerGetAttribute(data, attribute, pointer) }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuPointerGetAttributes(
    count: u32,
    attributes: *mut CUpointer_attribute,
    data: *mut *mut c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    unsafe { real::cuPointerGetAttributes(count, attributes, data, pointer) }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuDeviceGetGraphMemAttribute(
    device: CUdevice,
    attribute: CUgraphMem_attribute,
    value: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    unsafe { real::cuDeviceGetGraphMemAttribute(device, attribute, value) }
}
