//! Arrays and mipmapped arrays. Their layout is the driver's secret: charged by their elements.

use shim_ffi::*;

use super::{freed, metered};
use crate::real;

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

fn bytes_of(width: u64, height: u64, depth: u64, format: CUarray_format, channels: u32) -> u64 {
    width
        .saturating_mul(height.max(1))
        .saturating_mul(depth.max(1))
        .saturating_mul(channel_bytes(format))
        .saturating_mul(u64::from(channels.max(1)))
}

/// All levels of a mipmap pyramid: each holds a quarter (an eighth) of the one below, never less than one element.
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
            metered($bytes, call, || unsafe { (*array).0 as u64 })
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
    metered(bytes, call, || unsafe { (*array).0 as u64 })
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
