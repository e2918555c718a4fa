//! `cuMemAlloc` and its family, and `cuMemFree`.

use shim_ffi::*;

use crate::driver::real;
use crate::metering::{Meter, freed, metered, metered_apart};
use crate::residency;

/// Row pitch that current devices give at least (`CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT` and
/// up); corrected by what the driver answers.
const PITCH: u64 = 512;

/// # Safety
/// As the driver's function.
#[inline]
pub(crate) unsafe fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytes: usize) -> CUresult {
    if residency::active()
        && !dptr.is_null()
        && let Some(result) = Meter::here()
            .ok()
            .and_then(|meter| residency::allocate(&meter, bytes as u64))
    {
        return result.map_or_else(
            |status| status,
            |address| {
                // SAFETY: not null, and the caller's to write to.
                unsafe { *dptr = CUdeviceptr(address) };
                CUresult::CUDA_SUCCESS
            },
        );
    }
    residency::with_space(bytes as u64, |short| {
        // SAFETY: the caller's own arguments; on success the driver has written the address.
        unsafe {
            metered(
                bytes as u64,
                || short.note(real::cuMemAlloc_v2(dptr, bytes)),
                || ((*dptr).0, bytes as u64),
            )
        }
    })
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemAlloc(dptr: *mut CUdeviceptr_v1, bytes: u32) -> CUresult {
    residency::with_space(u64::from(bytes), |short| {
        // SAFETY: the caller's own arguments; on success the driver has written the address.
        unsafe {
            metered(
                u64::from(bytes),
                || short.note(real::cuMemAlloc(dptr, bytes)),
                || (u64::from((*dptr).0), u64::from(bytes)),
            )
        }
    })
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemAllocManaged(
    dptr: *mut CUdeviceptr,
    bytes: usize,
    flags: u32,
) -> CUresult {
    // Managed memory may oversubscribe a device and then thrashes everybody's: all of it counts.
    residency::with_space(bytes as u64, |short| {
        // SAFETY: the caller's own arguments; on success the driver has written the address.
        unsafe {
            metered_apart(
                bytes as u64,
                || short.note(real::cuMemAllocManaged(dptr, bytes, flags)),
                || ((*dptr).0, bytes as u64),
            )
        }
    })
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemAllocPitch_v2(
    dptr: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: u32,
) -> CUresult {
    if residency::active()
        && !dptr.is_null()
        && !pitch.is_null()
        && matches!(element, 4 | 8 | 16)
        && let Some(row) = (width as u64).checked_next_multiple_of(PITCH)
        && let Some(bytes) = row.checked_mul(height as u64)
        && let Some(result) = Meter::here()
            .ok()
            .and_then(|meter| residency::allocate(&meter, bytes))
    {
        return result.map_or_else(
            |status| status,
            |address| {
                // SAFETY: not null, both, and the caller's to write to.
                unsafe {
                    *dptr = CUdeviceptr(address);
                    *pitch = row as usize;
                }
                CUresult::CUDA_SUCCESS
            },
        );
    }
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real::cuMemAllocPitch_v2(dptr, pitch, width, height, element) };
    // SAFETY: read after success only, when the driver has written both.
    let made = || unsafe { ((*dptr).0, *pitch as u64) };
    pitched(width as u64, height as u64, call, made)
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemAllocPitch(
    dptr: *mut CUdeviceptr_v1,
    pitch: *mut u32,
    width: u32,
    height: u32,
    element: u32,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real::cuMemAllocPitch(dptr, pitch, width, height, element) };
    // SAFETY: read after success only, when the driver has written both.
    let made = || unsafe { (u64::from((*dptr).0), u64::from(*pitch)) };
    pitched(u64::from(width), u64::from(height), call, made)
}

fn pitched(
    width: u64,
    height: u64,
    call: impl Fn() -> CUresult,
    made: impl Fn() -> (u64, u64),
) -> CUresult {
    let rows = width.div_ceil(PITCH).saturating_mul(PITCH);
    let bytes = rows.saturating_mul(height);
    residency::with_space(bytes, |short| {
        metered(
            bytes,
            || short.note(call()),
            || {
                let (address, pitch) = made();
                (address, pitch.saturating_mul(height))
            },
        )
    })
}

/// # Safety
/// As the driver's function.
#[inline]
pub(crate) unsafe fn cuMemFree_v2(dptr: CUdeviceptr) -> CUresult {
    if let Some(result) = residency::free(dptr.0) {
        return result;
    }
    // SAFETY: the caller's own argument.
    freed(dptr.0, || unsafe { real::cuMemFree_v2(dptr) })
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemFree(dptr: CUdeviceptr_v1) -> CUresult {
    // SAFETY: the caller's own argument.
    freed(u64::from(dptr.0), || unsafe { real::cuMemFree(dptr) })
}
