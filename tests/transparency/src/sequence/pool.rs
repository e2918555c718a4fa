//! Stream-ordered allocation and pools.

use shim_ffi::*;

use super::world::{BUFFERS, Buffer, Kind, World};
use super::{call, call_on, stream};
use crate::transcript::Word::{Hidden, Name, New, Raw};

/// Allocates from a pool; the free comes with [`super::memory::free`].
pub fn asynchronous(world: &mut World) {
    if world.context().buffers.len() >= BUFFERS {
        return super::memory::free(world);
    }
    let bytes = super::memory::size(world);
    let queue = world.any_queue();
    let (handle, by_thread) = world.form(queue);
    let mut at = CUdeviceptr(0);
    let pools = world.context().pools.len();
    let result = if pools > 0 && world.rng.one_in(2) {
        let which = world.rng.below(pools);
        let pool = CUmemoryPool(world.context().pools[which] as *mut c_void);
        call_on!(world, by_thread, cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz(
            &raw mut at, bytes, pool, stream(handle))
            [Raw(bytes as u64), Name(pool.0 as u64), Name(handle)] => [New(at.0)])
    } else {
        call_on!(world, by_thread, cuMemAllocAsync | cuMemAllocAsync_ptsz(&raw mut at, bytes, stream(handle))
            [Raw(bytes as u64), Name(handle)] => [New(at.0)])
    };
    if result.is_ok() {
        super::memory::keep(
            world,
            Buffer {
                at: at.0,
                host: 0,
                bytes,
                kind: Kind::Async,
                queue,
                before: [None; 2],
            },
        );
    }
}

/// Makes, asks, sets, trims and destroys pools.
pub fn manage(world: &mut World) {
    let pools = world.context().pools.len();
    let device = CUdevice(world.device);
    if pools == 0 || (pools < 3 && world.rng.one_in(6)) {
        let properties = CUmemPoolProps {
            allocType: CUmemAllocationType(1),
            location: CUmemLocation {
                r#type: CUmemLocationType(1),
                id: device.0,
            },
            ..CUmemPoolProps::default()
        };
        let mut pool = CUmemoryPool::NULL;
        let made = call!(world, cuMemPoolCreate(&raw mut pool, &raw const properties) [] => [New(pool.0 as u64)]);
        if made.is_ok() {
            world.context().pools.push(pool.0 as u64);
        }
        return;
    }
    let which = world.rng.below(pools);
    let own = world.context().pools[which];
    let mut pool = CUmemoryPool(own as *mut c_void);
    if world.rng.one_in(3) {
        let _ = call!(world, cuDeviceGetDefaultMemPool(&raw mut pool, device) [] => [Name(pool.0 as u64)]);
    }
    let n = Name(pool.0 as u64);
    match world.rng.below(8) {
        0 => {
            // What is in use lives on until it is freed.
            let _ =
                call!(world, cuMemPoolDestroy(CUmemoryPool(own as *mut c_void)) [Name(own)] => []);
            world.context().pools.swap_remove(which);
            world.gone(own);
        }
        1 => {
            let keep = world.rng.pick(&[0, 1 << 20, 1 << 30]);
            let _ = call!(world, cuMemPoolTrimTo(pool, keep) [n, Raw(keep as u64)] => []);
        }
        2 | 3 => {
            let mut bytes = world.rng.pick(&[0u64, 4 << 20, u64::MAX]);
            let attribute = CUmemPool_attribute(4);
            let _ = call!(world, cuMemPoolSetAttribute(pool, attribute, (&raw mut bytes).cast()) [n, Raw(bytes)] => []);
            let _ = call!(world, cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) [n] => [Raw(bytes)]);
        }
        4 => {
            let attribute = world.rng.between(0, 12) as _;
            let mut value = 0u64;
            // Reserved and used bytes depend on when frees took effect.
            let shown = |value| {
                if (5..=8).contains(&attribute) {
                    Hidden
                } else {
                    Raw(value)
                }
            };
            let _ = call!(world, cuMemPoolGetAttribute(pool, CUmemPool_attribute(attribute), (&raw mut value).cast())
                [n, Raw(attribute.into())] => [shown(value)]);
        }
        5 => {
            let mut location = CUmemLocation {
                r#type: CUmemLocationType(1),
                id: device.0,
            };
            let mut access = CUmemAccess_flags::default();
            let _ = call!(world, cuMemPoolGetAccess(&raw mut access, pool, &raw mut location) [n]
                => [Raw(access.0.into())]);
        }
        6 => {
            let _ = call!(world, cuDeviceSetMemPool(device, pool) [n] => []);
            let mut default = CUmemoryPool::NULL;
            let _ = call!(world, cuDeviceGetDefaultMemPool(&raw mut default, device) [] => [Name(default.0 as u64)]);
            let _ =
                call!(world, cuDeviceSetMemPool(device, default) [Name(default.0 as u64)] => []);
        }
        _ => {
            let mut value = 0u64;
            let attribute = world.rng.below(4) as _;
            let _ = call!(world, cuDeviceGetGraphMemAttribute(device, CUgraphMem_attribute(attribute), (&raw mut value).cast())
                [Raw(attribute.into())] => [Hidden]);
            let _ = call!(world, cuDeviceGraphMemTrim(device) [] => []);
        }
    }
}
