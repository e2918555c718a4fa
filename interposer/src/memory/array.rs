//! Arrays and mipmapped arrays. Their layout is the driver's secret, and they have no address:
//! charged by what the driver says that they require, else by their elements, in whole granules.

use shim_ffi::*;

use crate::driver::real;
use crate::metering::{self, Kind, Live, Meter, freed, granules, unmetered};
use crate::residency;

/// Bytes of one channel of an element.
fn channel_bytes(format: CUarray_format) -> u64 {
    match format {
        CUarray_format::CU_AD_FORMAT_UNSIGNED_INT8 | CUarray_format::CU_AD_FORMAT_SIGNED_INT8 => 1,
        CUarray_format::CU_AD_FORMAT_UNSIGNED_INT16
        | CUarray_format::CU_AD_FORMAT_SIGNED_INT16
        | CUarray_format::CU_AD_FORMAT_HALF => 2,
        // 32-bit formats, and a safe guess for the packed and compressed ones.
        _ => 4,
    }
}

/// Rows of an array start at multiples of this at least, as far as anybody has seen.
const ROW: u64 = 512;

fn bytes_of(width: u64, height: u64, depth: u64, format: CUarray_format, channels: u32) -> u64 {
    let row = width
        .saturating_mul(channel_bytes(format))
        .saturating_mul(u64::from(channels.max(1)));
    row.div_ceil(ROW)
        .saturating_mul(ROW)
        .saturating_mul(height.max(1))
        .saturating_mul(depth.max(1))
}

/// All levels of a mipmap pyramid: each holds a quarter (an eighth) of the one below, never less
/// than one element.
fn pyramid_bytes(descriptor: &CUDA_ARRAY3D_DESCRIPTOR, levels: u32) -> u64 {
    (0..levels.min(32)).fold(0, |sum: u64, level| {
        let at = |length: usize| {
            if length == 0 {
                0
            } else {
                (length as u64 >> level).max(1)
            }
        };
        let (width, height, depth) = (
            at(descriptor.Width),
            at(descriptor.Height),
            at(descriptor.Depth),
        );
        sum.saturating_add(bytes_of(
            width,
            height,
            depth,
            descriptor.Format,
            descriptor.NumChannels,
        ))
    })
}

/// As [`metering::metered`], for what has a handle and no address. `exact`: what the driver says
/// that it takes.
fn metered(
    bytes: u64,
    call: impl FnOnce() -> CUresult,
    key: impl FnOnce() -> u64,
    exact: impl FnOnce(u64) -> Option<u64>,
) -> CUresult {
    let meter = match Meter::here() {
        Ok(meter) => meter,
        Err(reason) => return unmetered(reason, call),
    };
    let guess = granules(bytes);
    let prepaid = match meter.prepay_for(guess, bytes) {
        Ok(prepaid) => prepaid,
        Err(refusal) => return refusal,
    };
    let result = call();
    if !result.is_ok() {
        meter.settle(prepaid, 0);
        return result;
    }
    let handle = key();
    let bytes = exact(handle).map_or(guess, granules);
    meter.settle(prepaid, bytes);
    let live = Live {
        kind: Kind::Whole,
        ..meter.live(bytes)
    };
    metering::insert(handle, live);
    result
}

/// What an array requires. Drivers answer for some arrays only.
fn required(array: u64) -> Option<u64> {
    let (mut device, mut requirements) = (
        CUdevice::default(),
        CUDA_ARRAY_MEMORY_REQUIREMENTS::default(),
    );
    // SAFETY: the array that the driver has just made; outputs are locals.
    unsafe {
        real::cuCtxGetDevice(&raw mut device).ok().ok()?;
        let array = CUarray(array as *mut c_void);
        real::cuArrayGetMemoryRequirements(&raw mut requirements, array, device)
            .ok()
            .ok()?;
    }
    (requirements.size != 0).then_some(requirements.size as u64)
}

macro_rules! array {
    ($($name:ident($descriptor:ty) [$d:ident, $bytes:expr];)*) => {$(
        /// # Safety
        /// As the driver's function.
        pub(crate) unsafe fn $name(array: *mut CUarray, descriptor: *const $descriptor) -> CUresult {
            // SAFETY: the caller's own arguments.
            let call = || unsafe { real::$name(array, descriptor) };
            if descriptor.is_null() {
                return call();
            }
            // SAFETY: not null; the driver is about to read the same structure.
            let $d = unsafe { &*descriptor };
            // SAFETY: read after success only, when the driver has written the handle.
            let key = || unsafe { (*array).0 as u64 };
            residency::with_space($bytes, |short| {
                metered($bytes, || short.note(call()), key, required)
            })
        }
    )*};
}

array! {
    cuArrayCreate_v2(CUDA_ARRAY_DESCRIPTOR)
        [d, bytes_of(d.Width as u64, d.Height as u64, 1, d.Format, d.NumChannels)];
    cuArrayCreate(CUDA_ARRAY_DESCRIPTOR_v1)
        [d, bytes_of(u64::from(d.Width), u64::from(d.Height), 1, d.Format, d.NumChannels)];
    cuArray3DCreate_v2(CUDA_ARRAY3D_DESCRIPTOR)
        [d, bytes_of(d.Width as u64, d.Height as u64, d.Depth as u64, d.Format, d.NumChannels)];
    cuArray3DCreate(CUDA_ARRAY3D_DESCRIPTOR_v1)
        [d, bytes_of(u64::from(d.Width), u64::from(d.Height), u64::from(d.Depth), d.Format, d.NumChannels)];
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMipmappedArrayCreate(
    array: *mut CUmipmappedArray,
    descriptor: *const CUDA_ARRAY3D_DESCRIPTOR,
    levels: u32,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real::cuMipmappedArrayCreate(array, descriptor, levels) };
    if descriptor.is_null() {
        return call();
    }
    // SAFETY: not null; the driver is about to read the same structure.
    let bytes = pyramid_bytes(unsafe { &*descriptor }, levels);
    // SAFETY: read after success only, when the driver has written the handle.
    let key = || unsafe { (*array).0 as u64 };
    residency::with_space(bytes, |short| {
        metered(bytes, || short.note(call()), key, |_| None)
    })
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuArrayDestroy(array: CUarray) -> CUresult {
    // SAFETY: the caller's own argument.
    freed(array.0 as u64, || unsafe { real::cuArrayDestroy(array) })
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMipmappedArrayDestroy(array: CUmipmappedArray) -> CUresult {
    // SAFETY: the caller's own argument.
    freed(array.0 as u64, || unsafe {
        real::cuMipmappedArrayDestroy(array)
    })
}
