//! Contexts: made, made current, stacked, configured, destroyed with everything in them.

use shim_ffi::*;

use super::call;
use super::world::{CONTEXTS, Context, World};
use crate::transcript::Word::{Name, New, Raw};

/// Creates or destroys a context, or turns to another one.
pub fn change(world: &mut World) {
    match world.rng.below(8) {
        0 => create(world),
        1 if world.contexts.len() > 1 => {
            let which = world.rng.between(1, world.contexts.len() - 1);
            world.enter(which);
            // With memory still in it, most of the time.
            if world.rng.one_in(4) {
                while !world.context().buffers.is_empty() {
                    super::memory::free_at(world, 0);
                }
            }
            destroy(world, which);
        }
        2 if world.rng.one_in(6) => reset(world),
        3 => retain(world),
        _ => {
            let which = world.rng.below(world.contexts.len());
            world.enter(which);
        }
    }
}

fn create(world: &mut World) {
    if world.contexts.len() > CONTEXTS {
        return;
    }
    let mut handle = CUcontext::NULL;
    let (flags, device) = (world.rng.pick(&[0, 4, 8, 1]), CUdevice(world.device));
    let none = std::ptr::null_mut::<c_void>();
    let (f, d) = (Raw(u64::from(flags)), Raw(device.0 as u64));
    let result = match world.rng.below(4) {
        0 => {
            call!(world, cuCtxCreate_v2(&raw mut handle, flags, device) [f, d] => [New(handle.0 as u64)])
        }
        1 => {
            call!(world, cuCtxCreate_v3(&raw mut handle, none.cast(), 0, flags, device) [f, d] => [New(handle.0 as u64)])
        }
        2 => {
            call!(world, cuCtxCreate_v4(&raw mut handle, none.cast(), flags, device) [f, d] => [New(handle.0 as u64)])
        }
        _ => {
            call!(world, cuCtxCreate(&raw mut handle, flags, device) [f, d] => [New(handle.0 as u64)])
        }
    };
    if result.is_ok() {
        world.contexts.push(Context {
            handle: handle.0 as u64,
            ..Context::default()
        });
        world.here = world.contexts.len() - 1;
        world.furnish();
    }
}

/// What has to go before its context does: what lives outside of it, or is not freed with it.
fn empty(world: &mut World) {
    use super::world::Kind;
    let outlives =
        |kind: Kind| matches!(kind, Kind::Mapped { .. } | Kind::Async | Kind::Registered);
    while let Some(at) = world
        .context()
        .buffers
        .iter()
        .position(|buffer| outlives(buffer.kind))
    {
        super::memory::free_at(world, at);
    }
    while let Some(pool) = world.context().pools.pop() {
        let _ =
            call!(world, cuMemPoolDestroy(CUmemoryPool(pool as *mut c_void)) [Name(pool)] => []);
        world.gone(pool);
    }
}

fn forget(world: &mut World) {
    let context = std::mem::take(world.context());
    for buffer in &context.buffers {
        world.gone(buffer.at);
    }
    for number in context
        .events
        .iter()
        .chain(&context.functions)
        .chain([&context.module])
    {
        world.gone(*number);
    }
    for queue in &context.streams {
        if let super::world::Queue::Created { handle, .. } = queue {
            world.gone(*handle);
        }
    }
    world.gone(context.handle);
}

/// Destroys the context that this turn works in.
pub fn destroy(world: &mut World, which: usize) {
    empty(world);
    let _ = call!(world, cuCtxSynchronize() [] => []);
    let handle = world.contexts[which].handle;
    if world.contexts[which].primary {
        let device = CUdevice(world.device);
        if world.rng.one_in(2) {
            let _ = call!(world, cuDevicePrimaryCtxRelease_v2(device) [Raw(device.0 as u64)] => []);
        } else {
            let _ = call!(world, cuDevicePrimaryCtxRelease(device) [Raw(device.0 as u64)] => []);
        }
        state(world);
        forget(world);
        return;
    }
    if world.rng.one_in(2) {
        let _ =
            call!(world, cuCtxDestroy_v2(CUcontext(handle as *mut c_void)) [Name(handle)] => []);
    } else {
        let _ = call!(world, cuCtxDestroy(CUcontext(handle as *mut c_void)) [Name(handle)] => []);
    }
    forget(world);
    world.contexts.remove(which);
    let next = world.rng.below(world.contexts.len());
    world.enter(next);
}

fn state(world: &mut World) {
    let (mut flags, mut active) = (99, 99);
    let device = CUdevice(world.device);
    let _ = call!(world, cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) [Raw(device.0 as u64)]
        => [Raw(flags.into()), Raw(active as u64)]);
}

/// Resets the primary context: everything in it goes.
fn reset(world: &mut World) {
    world.enter(0);
    empty(world);
    let _ = call!(world, cuCtxSynchronize() [] => []);
    let device = CUdevice(world.device);
    if world.rng.one_in(2) {
        let _ = call!(world, cuDevicePrimaryCtxReset_v2(device) [Raw(device.0 as u64)] => []);
    } else {
        let _ = call!(world, cuDevicePrimaryCtxReset(device) [Raw(device.0 as u64)] => []);
    }
    state(world);
    forget(world);
    world.retain_primary();
}

/// Retains and releases the primary context; it stays.
fn retain(world: &mut World) {
    let device = CUdevice(world.device);
    let mut handle = CUcontext::NULL;
    let _ = call!(world, cuDevicePrimaryCtxRetain(&raw mut handle, device) [Raw(device.0 as u64)]
        => [Name(handle.0 as u64)]);
    state(world);
    let _ = call!(world, cuDevicePrimaryCtxRelease_v2(device) [Raw(device.0 as u64)] => []);
    let flags = world.rng.pick(&[0u32, 4, 99]);
    let _ = call!(world, cuDevicePrimaryCtxSetFlags_v2(device, flags) [Raw(flags.into())] => []);
    state(world);
}

/// The calling thread's stack of contexts.
pub fn stack(world: &mut World) {
    let which = world.rng.below(world.contexts.len());
    let other = world.contexts[which].handle;
    let mut seen = CUcontext::NULL;
    if world.rng.one_in(2) {
        let _ =
            call!(world, cuCtxPushCurrent_v2(CUcontext(other as *mut c_void)) [Name(other)] => []);
    } else {
        let _ = call!(world, cuCtxPushCurrent(CUcontext(other as *mut c_void)) [Name(other)] => []);
    }
    let _ = call!(world, cuCtxGetCurrent(&raw mut seen) [] => [Name(seen.0 as u64)]);
    let mut device = CUdevice(-1);
    let _ = call!(world, cuCtxGetDevice(&raw mut device) [] => [Raw(device.0 as u64)]);
    if world.rng.one_in(3) {
        // An allocation that belongs to the pushed context.
        let mut at = CUdeviceptr(0);
        let allocated = call!(world, cuMemAlloc_v2(&raw mut at, 4096) [Raw(4096)] => [New(at.0)]);
        if allocated.is_ok() {
            let _ = call!(world, cuMemFree_v2(at) [Name(at.0)] => []);
            world.gone(at.0);
        }
    }
    if world.rng.one_in(2) {
        let _ = call!(world, cuCtxPopCurrent_v2(&raw mut seen) [] => [Name(seen.0 as u64)]);
    } else {
        let _ = call!(world, cuCtxPopCurrent(&raw mut seen) [] => [Name(seen.0 as u64)]);
    }
    let _ = call!(world, cuCtxGetCurrent(&raw mut seen) [] => [Name(seen.0 as u64)]);
    if world.rng.one_in(6) {
        // Down to nothing, and a call that needs a context.
        let _ = call!(world, cuCtxPopCurrent_v2(&raw mut seen) [] => [Name(seen.0 as u64)]);
        let _ = call!(world, cuCtxPopCurrent_v2(&raw mut seen) [] => []);
        let mut at = CUdeviceptr(0);
        let _ = call!(world, cuMemAlloc_v2(&raw mut at, 64) [Raw(64)] => [New(at.0)]);
        let _ = call!(world, cuCtxSynchronize() [] => []);
    }
    let here = world.here;
    world.enter(here);
}
