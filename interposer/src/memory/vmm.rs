//! Physical memory by handle: `cuMemCreate`, `cuMemUnmap`, other processes' handles.

use shim_ffi::*;

use crate::attachment::client;
use crate::driver::real;
use crate::gate::capture;
use crate::metering::{Meter, granules, physical};
use crate::residency::{self, Needs};

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemImportFromShareableHandle(
    handle: *mut CUmemGenericAllocationHandle,
    os_handle: *mut c_void,
    kind: CUmemAllocationHandleType,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real::cuMemImportFromShareableHandle(handle, os_handle, kind) };
    if handle.is_null() || kind != physical::DESCRIPTOR {
        return call();
    }
    // CAST: a descriptor travels as a pointer.
    let import = match physical::import(os_handle as usize as i32) {
        Ok(Some(import)) => import,
        Ok(None) => return call(),
        Err(refusal) => return refusal,
    };
    let result = call();
    // SAFETY: read after success only, when the driver has written the handle.
    import.made(result.is_ok().then(|| unsafe { (*handle).0 }));
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: u64,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real::cuMemCreate(handle, bytes, properties, flags) };
    if properties.is_null() {
        return call();
    }
    // SAFETY: not null; the driver is about to read the same structure.
    let location = unsafe { (*properties).location };
    if location.r#type != CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE {
        return call();
    }
    if let Some(status) = client::kept_off(location.id) {
        return status;
    }
    let Some(meter) = Meter::of(location.id) else {
        return call();
    };
    // Drivers take multiples of the granule only.
    let whole = granules(bytes as u64);
    // SAFETY: as above.
    let properties = unsafe { &*properties };
    let elsewhere = || {
        let made = residency::create_on_host(properties.location.id, whole)?;
        // SAFETY: not null below, and the caller's to write to.
        unsafe { (*handle).0 = made };
        Some(CUresult::CUDA_SUCCESS)
    };
    // What the driver would refuse it is to refuse: that is for the call itself.
    let is_plain = !handle.is_null() && flags == 0 && bytes != 0 && whole == bytes as u64;
    let attempt = |short: &residency::Short| {
        let prepaid = match meter.prepay_for(whole, bytes as u64) {
            Ok(prepaid) => prepaid,
            Err(refusal) => return refusal,
        };
        let may_be_elsewhere = residency::active()
            && is_plain
            && residency::is_capped(meter.device())
            && can_be_on_host(properties)
            && !capture::any();
        let mut placed = (may_be_elsewhere && residency::cap_is_reached(meter.device(), whole))
            .then(elsewhere)
            .flatten();
        let mut on_device = placed.is_none();
        if on_device {
            let mut result = call();
            if may_be_elsewhere && result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                placed = elsewhere();
                on_device = placed.is_none();
            }
            if on_device {
                result = short.note(result);
                placed = Some(result);
            }
        }
        let result = placed.unwrap_or(CUresult::CUDA_ERROR_UNKNOWN);
        if result.is_ok() {
            if residency::active() {
                // SAFETY: as below.
                unsafe { own(handle, whole, meter.device(), properties, on_device) };
            }
            // SAFETY: the driver has written the handle.
            let handle = unsafe { (*handle).0 };
            physical::created(handle, whole, meter.device());
        }
        // What is not taken is not held while the device has no space for it.
        meter.settle(prepaid, if result.is_ok() { whole } else { 0 });
        result
    };
    residency::with_space_on(&meter, Needs::Bytes(whole), attempt)
}

/// Gives the program a number of ours for a handle that may have to be made anew, where its memory
/// may be moved. Tiles of sparse arrays have no address of their own.
///
/// # Safety
/// `handle` holds a handle just made with these properties.
unsafe fn own(
    handle: *mut CUmemGenericAllocationHandle,
    bytes: u64,
    device: usize,
    properties: &CUmemAllocationProp,
    on_device: bool,
) {
    if properties.allocFlags.usage == 0 {
        // SAFETY: the caller's promise.
        unsafe {
            (*handle).0 = residency::adopt((*handle).0, bytes, device, properties, on_device);
        }
    }
}

/// Whether memory of these properties is used by its address alone. What is to be exported, or
/// reached by a network adapter, is what its properties say.
fn can_be_on_host(properties: &CUmemAllocationProp) -> bool {
    properties.r#type == CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED
        && properties.allocFlags.usage == 0
        && properties.allocFlags.gpuDirectRDMACapable == 0
        && properties.requestedHandleTypes == CUmemAllocationHandleType::default()
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> CUresult {
    let result = if residency::is_owned(handle.0) {
        match residency::pass_to_end() {
            Ok(_pass) => residency::release(handle.0),
            Err(status) => status,
        }
    } else {
        // SAFETY: the caller's own argument.
        unsafe { real::cuMemRelease(handle) }
    };
    if result.is_ok() && client::current().is_some() {
        physical::released(handle.0);
    }
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemUnmap(start: CUdeviceptr, bytes: usize) -> CUresult {
    let end = start.0.saturating_add(bytes as u64);
    let mut pass = match residency::pass_to_end() {
        Ok(pass) => pass,
        Err(status) => return status,
    };
    // The program may map again what it keeps the handle of.
    if residency::active() && residency::is_kept_away(start.0, end) {
        drop(pass);
        pass = match residency::pass() {
            Ok(pass) => pass,
            Err(status) => return status,
        };
    }
    if residency::owns(start.0) {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: the caller's own arguments, or whole mappings among them.
    let call = |from, to: u64| unsafe { real::cuMemUnmap(CUdeviceptr(from), (to - from) as usize) };
    let result = if residency::active() {
        residency::unmap(start.0, end, call)
    } else {
        call(start.0, end)
    };
    drop(pass);
    if result.is_ok() && client::current().is_some() {
        physical::unmapped(start.0, end);
    }
    result
}
