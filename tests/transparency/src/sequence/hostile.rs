//! Calls that are wrong: null pointers, sizes of zero and beyond all measure, values that no
//! enumeration has, and, for drivers that check their handles, handles that were destroyed or never
//! made.

use shim_ffi::*;

use super::world::{Queue, World};
use super::{call, stream};
use crate::transcript::Word::{Name, New, Raw};

/// A number that no driver gives away as a handle.
const NEVER: u64 = 0x7ff0_dead_0000;
const HUGE: usize = 1 << 60;

/// One wrong call.
pub fn wrong(world: &mut World) {
    if world.plan.hostile && world.rng.one_in(2) {
        handles(world);
    } else if world.rng.one_in(2) {
        nulls(world);
    } else {
        values(world);
    }
}

fn nulls(world: &mut World) {
    let device = CUdevice(world.device);
    let z = std::ptr::null_mut::<c_void>();
    let _ = match world.rng.below(22) {
        0 => call!(world, cuMemAlloc_v2(z.cast(), 512) [] => []),
        1 => call!(world, cuMemAllocPitch_v2(z.cast(), z.cast(), 64, 4, 4) [] => []),
        2 => call!(world, cuMemAllocManaged(z.cast(), 64, 1) [] => []),
        3 => call!(world, cuMemAllocHost_v2(z.cast(), 64) [] => []),
        4 => call!(world, cuMemAllocAsync(z.cast(), 64, stream(0)) [] => []),
        5 => call!(world, cuMemFree_v2(CUdeviceptr(0)) [] => []),
        6 => call!(world, cuMemFreeHost(z.cast()) [] => []),
        7 => call!(world, cuMemGetInfo_v2(z.cast(), z.cast()) [] => []),
        8 => call!(world, cuDeviceTotalMem_v2(z.cast(), device) [] => []),
        9 => call!(world, cuStreamCreate(z.cast(), 0) [] => []),
        10 => call!(world, cuEventCreate(z.cast(), 0) [] => []),
        11 => call!(world, cuCtxGetCurrent(z.cast()) [] => []),
        12 => call!(world, cuCtxGetDevice(z.cast()) [] => []),
        13 => call!(world, cuMemCreate(z.cast(), 2 << 20, z.cast(), 0) [] => []),
        14 => call!(world, cuMemAddressReserve(z.cast(), 2 << 20, 0, CUdeviceptr(0), 0) [] => []),
        15 => call!(world, cuModuleLoadData(z.cast(), z.cast()) [] => []),
        16 => call!(world, cuModuleGetFunction(z.cast(), CUmodule::NULL, z.cast()) [] => []),
        17 => {
            call!(world, cuLaunchKernel(CUfunction::NULL, 1, 1, 1, 1, 1, 1, 0, stream(0), z.cast(), z.cast())
            [] => [])
        }
        18 => call!(world, cuMemcpy2D_v2(z.cast()) [] => []),
        19 => call!(world, cuLaunchHostFunc(stream(0), None, z.cast()) [] => []),
        20 => call!(world, cuDevicePrimaryCtxRetain(z.cast(), device) [] => []),
        _ => {
            call!(world, cuPointerGetAttribute(z.cast(), CUpointer_attribute(2), CUdeviceptr(0)) [] => [])
        }
    };
}

fn values(world: &mut World) {
    let mut at = CUdeviceptr(0);
    let (mut word, mut long) = (0i32, 0usize);
    let (mut other, mut text) = (CUdevice(0), std::ptr::null());
    let device = CUdevice(world.device);
    let wrong_device = CUdevice(world.rng.pick(&[-1, 9999]));
    let queue = world.any_queue();
    let (handle, _) = world.form(queue);
    let (s, n) = (stream(handle), Name(handle));
    let mut context = CUcontext::NULL;
    let mut made = CUstream::NULL;
    let mut event = CUevent::NULL;
    let mut handle_made = CUmemGenericAllocationHandle(0);
    let f = CUfunction(world.context().functions.first().copied().unwrap_or(0) as *mut c_void);
    let (z, w) = (std::ptr::null_mut::<c_void>(), Raw(wrong_device.0 as u64));
    let mut properties = CUmemAllocationProp {
        r#type: CUmemAllocationType(1),
        location: CUmemLocation {
            r#type: CUmemLocationType(1),
            id: wrong_device.0,
        },
        ..CUmemAllocationProp::default()
    };
    let bytes = world.rng.pick(&[0usize, HUGE, usize::MAX]);
    let b = Raw(bytes as u64);
    let _ = match world.rng.below(26) {
        0 | 1 => call!(world, cuMemAlloc_v2(&raw mut at, bytes) [b] => [New(at.0)]),
        2 => call!(world, cuMemAllocPitch_v2(&raw mut at, &raw mut long, bytes, 4, 4) [b] => []),
        3 => call!(world, cuMemAllocPitch_v2(&raw mut at, &raw mut long, 64, 4, 5) [] => []),
        4 => call!(world, cuMemAllocManaged(&raw mut at, 64, 77) [] => []),
        5 => call!(world, cuMemAllocAsync(&raw mut at, bytes, s) [b, n] => []),
        6 => {
            call!(world, cuMemCreate(&raw mut handle_made, 2 << 20, &raw const properties, 0) [w] => [])
        }
        7 => {
            properties.location.id = device.0;
            call!(world, cuMemCreate(&raw mut handle_made, bytes, &raw const properties, 0) [b] => [])
        }
        8 => call!(world, cuMemAddressReserve(&raw mut at, 4096, 0, CUdeviceptr(0), 0) [] => []),
        9 => {
            call!(world, cuDeviceGetAttribute(&raw mut word, CUdevice_attribute(99_999), device) [] => [])
        }
        10 => {
            call!(world, cuDeviceGetAttribute(&raw mut word, CUdevice_attribute(1), wrong_device) [w] => [])
        }
        11 => call!(world, cuCtxCreate_v2(&raw mut context, 0xffff, device) [] => []),
        12 => call!(world, cuCtxCreate_v2(&raw mut context, 0, wrong_device) [w] => []),
        13 => call!(world, cuStreamCreate(&raw mut made, 99) [] => []),
        14 => call!(world, cuEventCreate(&raw mut event, 0xff00) [] => []),
        15 => call!(world, cuDevicePrimaryCtxRetain(&raw mut context, wrong_device) [w] => []),
        16 => call!(world, cuDeviceGet(&raw mut other, wrong_device.0) [w] => []),
        17 => call!(world, cuDeviceTotalMem_v2(&raw mut long, wrong_device) [w] => []),
        18 => call!(world, cuInit(7) [Raw(7)] => []),
        // A block too large, a grid of nothing, no arguments.
        19 => {
            call!(world, cuLaunchKernel(f, 1, 1, 1, 4096, 1, 1, 0, s, z.cast(), z.cast()) [n] => [])
        }
        20 => {
            call!(world, cuLaunchKernel(f, 0, 1, 1, 32, 1, 1, 0, s, z.cast(), z.cast()) [n] => [])
        }
        21 => call!(world, cuMemHostAlloc((&raw mut long).cast(), 0, 0) [] => []),
        22 => call!(world, cuMemHostRegister_v2(z, 4096, 0) [] => []),
        23 => call!(world, cuCtxGetLimit(&raw mut long, CUlimit(999)) [] => []),
        24 => call!(world, cuGetErrorName(CUresult(31_337), &raw mut text) [] => []),
        _ => call!(world, cuPointerGetAttribute((&raw mut long).cast(), CUpointer_attribute(9_999),
            CUdeviceptr(0)) [] => []),
    };
    // Nothing above may succeed; where one does, it is in the transcript.
}

fn handles(world: &mut World) {
    let stale = if world.stale.is_empty() || world.rng.one_in(2) {
        NEVER
    } else {
        let which = world.rng.below(world.stale.len());
        world.stale[which]
    };
    // A freed number may have been given away again.
    let number = stale;
    let in_use = world.contexts.iter().any(|context| {
        let queues =
            |queue: &Queue| matches!(queue, Queue::Created { handle, .. } if *handle == number);
        context
            .buffers
            .iter()
            .any(|buffer| buffer.at == number || buffer.host == number)
            || context.streams.iter().any(queues)
            || context.events.contains(&number)
            || context.functions.contains(&number)
            || context.pools.contains(&number)
            || context.handle == number
            || context.module == number
    });
    let number = if in_use || number < 3 { NEVER } else { number };
    let p = number as *mut c_void;
    // Freed addresses may lie inside what lives now.
    let at = CUdeviceptr(NEVER);
    let mut base = CUdeviceptr(0);
    let (mut word, mut long) = (0, 0usize);
    let _ = match world.rng.below(24) {
        0 => call!(world, cuStreamSynchronize(CUstream(p)) [] => []),
        1 => call!(world, cuStreamQuery(CUstream(p)) [] => []),
        2 => call!(world, cuStreamDestroy_v2(CUstream(p)) [] => []),
        3 => call!(world, cuEventRecord(CUevent(p), stream(0)) [] => []),
        4 => call!(world, cuEventSynchronize(CUevent(p)) [] => []),
        5 => call!(world, cuEventDestroy_v2(CUevent(p)) [] => []),
        6 => call!(world, cuStreamWaitEvent(stream(0), CUevent(p), 0) [] => []),
        7 => call!(world, cuMemFree_v2(at) [] => []),
        8 => call!(world, cuMemFreeAsync(at, stream(0)) [] => []),
        9 => call!(world, cuMemFreeHost(p) [] => []),
        10 => call!(world, cuMemHostUnregister(p) [] => []),
        11 => call!(world, cuMemRelease(CUmemGenericAllocationHandle(number)) [] => []),
        12 => call!(world, cuMemUnmap(at, 2 << 20) [] => []),
        13 => call!(world, cuMemAddressFree(at, 2 << 20) [] => []),
        14 => call!(world, cuMemPoolDestroy(CUmemoryPool(p)) [] => []),
        15 => call!(world, cuMemPoolTrimTo(CUmemoryPool(p), 0) [] => []),
        16 => call!(world, cuModuleUnload(CUmodule(p)) [] => []),
        17 => call!(world, cuLibraryUnload(CUlibrary(p)) [] => []),
        18 => {
            call!(world, cuFuncGetAttribute(&raw mut word, CUfunction_attribute(0), CUfunction(p)) [] => [])
        }
        19 => {
            let z = std::ptr::null_mut::<c_void>();
            call!(world, cuLaunchKernel(CUfunction(p), 1, 1, 1, 32, 1, 1, 0, stream(0), z.cast(), z.cast()) [] => [])
        }
        20 => call!(world, cuMemcpyDtoD_v2(at, at, 64) [] => []),
        21 => call!(world, cuMemsetD8_v2(at, 1, 64) [] => []),
        22 => call!(world, cuMemGetAddressRange_v2(&raw mut base, &raw mut long, at) [] => []),
        _ => {
            let result = call!(world, cuCtxSetCurrent(CUcontext(p)) [] => []);
            let here = world.here;
            world.enter(here);
            result
        }
    };
}
