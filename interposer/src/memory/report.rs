//! What the program is shown about memory: its quota, never more than the device has.

use channel::NO_LIMIT;
use shim_ffi::*;

use crate::driver::real;
use crate::metering::Meter;
use crate::residency;

/// Free and total bytes as the quota of the calling thread's device allows; `None`: the driver is
/// to answer.
#[inline]
fn within_quota() -> Option<(u64, u64)> {
    let meter = Meter::here().ok()?;
    let limit = meter.attached().limit_bytes(meter.device());
    if limit == NO_LIMIT {
        return None;
    }
    let grant = meter.attached().end.arbiter.device(meter.device())?;
    let (physical, physical_free) = (grant.physical_total_bytes(), grant.physical_free_bytes());
    let total = if physical == 0 {
        limit
    } else {
        limit.min(physical)
    };
    if meter.others_hold() {
        meter.attached().credit_the_dead_lately();
    }
    let mut used = meter.account().used_bytes(meter.device());
    if residency::active() {
        // Charged, and there for the next allocation; or charged, and not on the device.
        let elsewhere = meter.beyond_limit_bytes();
        used = used.saturating_sub(residency::spare_bytes(meter.device()) + elsewhere);
        // What the device has left says little to a job whose memory comes when it is needed.
        return Some((total.saturating_sub(used), total));
    }
    let free = total.saturating_sub(used).min(physical_free);
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
    Meter::of(device.0).map_or(NO_LIMIT, |meter| {
        meter.attached().limit_bytes(meter.device())
    })
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

// What the driver says of addresses, pointers and graph memory is true, but for memory that can be
// moved.

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemGetAddressRange_v2(
    base: *mut CUdeviceptr,
    bytes: *mut usize,
    at: CUdeviceptr,
) -> CUresult {
    if let Some(found) = residency::address_range(at.0) {
        return found.map_or_else(
            |status| status,
            |(start, length)| {
                // SAFETY: each null, or the caller's to write to.
                unsafe {
                    if let Some(base) = base.as_mut() {
                        *base = CUdeviceptr(start);
                    }
                    if let Some(bytes) = bytes.as_mut() {
                        *bytes = length as usize;
                    }
                }
                CUresult::CUDA_SUCCESS
            },
        );
    }
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
    // SAFETY: the caller's own arguments, in both.
    let call = || unsafe {
        residency::attribute(data, attribute, pointer.0)
            .unwrap_or_else(|| real::cuPointerGetAttribute(data, attribute, pointer))
    };
    if !residency::active() {
        return call();
    }
    let given = |_| true;
    // SAFETY: the driver writes there.
    unsafe { remembering(&[attribute], |_| data, pointer, call, given) }
}

/// What another device's driver gets at memory by.
const TOKENS: CUpointer_attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_P2P_TOKENS;

/// A call that writes what is `asked` of the memory at an address. If it has `given` tokens out,
/// the memory stays where it is from then on; its numbers stay what the program was shown first.
///
/// # Safety
/// Where the call succeeds it has written to what `data` says.
unsafe fn remembering(
    asked: &[CUpointer_attribute],
    data: impl Fn(usize) -> *mut c_void,
    pointer: CUdeviceptr,
    call: impl FnOnce() -> CUresult,
    given: impl Fn(*mut c_void) -> bool,
) -> CUresult {
    let tokens = asked.iter().position(|attribute| *attribute == TOKENS);
    let is_mapped = residency::is_mapped(pointer.0);
    if tokens.is_none() && !is_mapped {
        return call();
    }
    let _pass = match residency::pass() {
        Ok(pass) => pass,
        Err(status) => return status,
    };
    let result = call();
    if !result.is_ok() {
        return result;
    }
    if tokens.is_some_and(|at| given(data(at))) {
        residency::stay(pointer.0, 1);
    }
    if is_mapped {
        for (at, attribute) in asked.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { residency::keep_number(data(at), *attribute, pointer.0) };
        }
    }
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuPointerGetAttributes(
    count: u32,
    attributes: *mut CUpointer_attribute,
    data: *mut *mut c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's own arguments, in both.
    let call = || unsafe {
        residency::attributes(count, attributes, data, pointer.0)
            .unwrap_or_else(|| real::cuPointerGetAttributes(count, attributes, data, pointer))
    };
    if !residency::active() || attributes.is_null() || data.is_null() {
        return call();
    }
    // SAFETY: an array of `count` elements, the caller's.
    let asked = unsafe { std::slice::from_raw_parts(attributes, count as usize) };
    // SAFETY: as many elements.
    let data = |at: usize| unsafe { *data.add(at) };
    // SAFETY: the driver has just written a token there, or 0 where it gives none.
    let given = |data: *mut c_void| unsafe { data.cast::<u64>().read_unaligned() } != 0;
    // SAFETY: the driver writes to each of them.
    unsafe { remembering(asked, data, pointer, call, given) }
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
