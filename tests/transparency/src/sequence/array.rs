//! Arrays: made, described, copied to and from, destroyed within one step.

use shim_ffi::*;

use super::call;
use super::world::World;
use crate::rng::mix;
use crate::transcript::Word::{Hidden, Name, New, Raw};

/// Makes an array or a pyramid of them.
pub fn array(world: &mut World) {
    let (width, height) = (world.rng.between(1, 96), world.rng.pick(&[0, 1, 16, 40]));
    let format = CUarray_format(world.rng.pick(&[1, 2, 3, 16, 32, 77]));
    let channels = world.rng.pick(&[1, 2, 4, 3]);
    let shape = [
        Raw(width as u64),
        Raw(height as u64),
        Raw(format.0.into()),
        Raw(channels.into()),
    ];
    let [n0, n1, n2, n3] = shape;
    if world.rng.one_in(4) {
        let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
            Width: width,
            Height: height,
            Depth: 0,
            Format: format,
            NumChannels: channels,
            ..CUDA_ARRAY3D_DESCRIPTOR::default()
        };
        let levels = world.rng.between(1, 4) as u32;
        let mut pyramid = CUmipmappedArray::NULL;
        let made = call!(world, cuMipmappedArrayCreate(&raw mut pyramid, &raw const descriptor, levels)
            [n0, n1, n2, n3, Raw(levels.into())] => [New(pyramid.0 as u64)]);
        if made.is_ok() {
            let mut level = CUarray::NULL;
            let _ = call!(world, cuMipmappedArrayGetLevel(&raw mut level, pyramid, levels - 1) [Name(pyramid.0 as u64)]
                => [Name(level.0 as u64)]);
            let _ = call!(world, cuMipmappedArrayDestroy(pyramid) [Name(pyramid.0 as u64)] => []);
            world.gone(level.0 as u64);
            world.gone(pyramid.0 as u64);
        }
        return;
    }
    let mut array = CUarray::NULL;
    let descriptor = CUDA_ARRAY_DESCRIPTOR {
        Width: width,
        Height: height,
        Format: format,
        NumChannels: channels,
    };
    let made = call!(world, cuArrayCreate_v2(&raw mut array, &raw const descriptor) [n0, n1, n2, n3]
        => [New(array.0 as u64)]);
    if !made.is_ok() {
        return;
    }
    let a = Name(array.0 as u64);
    let mut seen = CUDA_ARRAY_DESCRIPTOR::default();
    let _ = call!(world, cuArrayGetDescriptor_v2(&raw mut seen, array) [a]
        => [Raw(seen.Width as u64), Raw(seen.Height as u64), Raw(seen.Format.0.into())]);
    let mut requirements = CUDA_ARRAY_MEMORY_REQUIREMENTS::default();
    let _ = call!(world, cuArrayGetMemoryRequirements(&raw mut requirements, array, CUdevice(world.device)) [a]
        => [Hidden]);
    let bytes = width;
    let source = world.source.as_ptr().cast::<c_void>();
    let _ = call!(world, cuMemcpyHtoA_v2(array, 0, source, bytes) [a, Raw(bytes as u64)] => []);
    let to = world.scratch.as_mut_ptr().cast::<c_void>();
    world.scratch[..bytes].fill(0);
    let fold = |bytes: &[u8]| {
        bytes
            .iter()
            .fold(7, |state, byte| mix(state ^ u64::from(*byte)))
    };
    let _ = call!(world, cuMemcpyAtoH_v2(to, array, 0, bytes) [a, Raw(bytes as u64)]
        => [Raw(fold(&world.scratch[..bytes]))]);
    let _ = call!(world, cuArrayDestroy(array) [a] => []);
    world.gone(array.0 as u64);
}
