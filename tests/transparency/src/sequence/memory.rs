//! Allocation families, and what the driver says of pointers.

use shim_ffi::*;

use super::world::{BUFFERS, Buffer, Kind, Queue, SCRATCH_BYTES, World};
use super::{call, call_on, stream};
use crate::transcript::Word::{Hidden, Name, New, Raw};

/// A size: mostly small, sometimes around the device's granule, seldom large.
pub fn size(world: &mut World) -> usize {
    match world.rng.below(20) {
        0..=11 => world.rng.between(1, 64) * 64,
        12..=15 => world.rng.between(1, 40_000),
        16 | 17 => world.rng.between(60_000, 200_000),
        18 => (1 << 20) + world.rng.between(0, 2) * 512 - 512,
        _ => world.rng.between(1, 3 << 20),
    }
}

/// Adds a buffer and gives its first bytes a known value: fresh memory holds anything.
pub fn keep(world: &mut World, buffer: Buffer) {
    let queue = buffer.queue;
    world.context().buffers.push(buffer);
    let (value, bytes) = (world.rng.word() as u8, buffer.bytes);
    let (handle, by_thread) = world.form(queue);
    let at = CUdeviceptr(buffer.at);
    let _ = call_on!(world, by_thread, cuMemsetD8Async | cuMemsetD8Async_ptsz(at, value, bytes, stream(handle))
        [Name(at.0), Raw(value.into()), Raw(bytes as u64), Name(handle)] => []);
}

fn full(world: &mut World) -> bool {
    world.context().buffers.len() >= BUFFERS
}

pub fn allocate(world: &mut World) {
    if full(world) {
        return free(world);
    }
    let bytes = size(world);
    let mut at = CUdeviceptr(0);
    let (result, bytes, kind) = match world.rng.below(8) {
        0..=4 => {
            let result =
                call!(world, cuMemAlloc_v2(&raw mut at, bytes) [Raw(bytes as u64)] => [New(at.0)]);
            (result, bytes, Kind::Plain)
        }
        5 | 6 => {
            let (width, height) = (world.rng.between(1, 3000), world.rng.between(1, 24));
            let element = world.rng.pick(&[4, 8, 16]);
            let mut pitch = 0;
            let result = call!(world,
                cuMemAllocPitch_v2(&raw mut at, &raw mut pitch, width, height, element)
                [Raw(width as u64), Raw(height as u64), Raw(element.into())] => [New(at.0), Raw(pitch as u64)]);
            (result, pitch * height, Kind::Pitched { pitch, height })
        }
        _ => {
            let flags = world.rng.pick(&[1, 1, 2]);
            let bytes = bytes.min(256 << 10);
            let result = call!(world, cuMemAllocManaged(&raw mut at, bytes, flags)
                [Raw(bytes as u64), Raw(flags.into())] => [New(at.0)]);
            (result, bytes, Kind::Managed)
        }
    };
    if !result.is_ok() {
        return;
    }
    let host = if kind == Kind::Managed { at.0 } else { 0 };
    let queue = world.any_queue();
    keep(
        world,
        Buffer {
            at: at.0,
            host,
            bytes,
            kind,
            queue,
            before: [None; 2],
        },
    );
}

pub fn free(world: &mut World) {
    let Some(at) = world.any_buffer() else {
        return;
    };
    free_at(world, at);
}

/// Frees one buffer as its family wants it.
pub fn free_at(world: &mut World, which: usize) {
    let buffer = world.context().buffers[which];
    let at = CUdeviceptr(buffer.at);
    match buffer.kind {
        Kind::Plain | Kind::Pitched { .. } | Kind::Managed => {
            let _ = call!(world, cuMemFree_v2(at) [Name(at.0)] => []);
        }
        Kind::Async => {
            if world.rng.one_in(4) {
                world.settle(which);
                let _ = call!(world, cuMemFree_v2(at) [Name(at.0)] => []);
            } else {
                let queue = world.any_queue();
                world.order(which, queue);
                let (handle, by_thread) = world.form(queue);
                let _ = call_on!(world, by_thread, cuMemFreeAsync | cuMemFreeAsync_ptsz(at, stream(handle))
                    [Name(at.0), Name(handle)] => []);
            }
        }
        Kind::Mapped { .. } => {
            world.settle(which);
            super::vmm::unmap(world, buffer);
        }
        Kind::Pinned => {
            world.settle(which);
            let _ =
                call!(world, cuMemFreeHost(buffer.host as *mut c_void) [Name(buffer.host)] => []);
        }
        Kind::Registered => {
            world.settle(which);
            let _ = call!(world, cuMemHostUnregister(buffer.host as *mut c_void) [Name(buffer.host)] => []);
        }
    }
    world.context().buffers.swap_remove(which);
    if buffer.kind != Kind::Registered {
        world.gone(buffer.at);
    }
}

/// Pinned and registered host memory.
pub fn host(world: &mut World) {
    if full(world) {
        return free(world);
    }
    let bytes = world.rng.between(1, 64 << 10);
    let mut host = std::ptr::null_mut();
    let (result, kind) = match world.rng.below(4) {
        0 | 1 => {
            let result = call!(world, cuMemAllocHost_v2(&raw mut host, bytes) [Raw(bytes as u64)]
                => [New(host as u64)]);
            (result, Kind::Pinned)
        }
        2 => {
            let flags = world.rng.pick(&[0, 1, 2, 3]);
            let result = call!(world, cuMemHostAlloc(&raw mut host, bytes, flags)
                [Raw(bytes as u64), Raw(flags.into())] => [New(host as u64)]);
            (result, Kind::Pinned)
        }
        _ => {
            // Pages of its own for each of the four ranges.
            let range = world.rng.below(4);
            let base =
                (world.registrable.as_mut_ptr() as usize + range * 65536).next_multiple_of(4096);
            host = base as *mut c_void;
            let flags = world.rng.pick(&[0, 1, 2]);
            let result = call!(world, cuMemHostRegister_v2(host, 8192, flags)
                [Name(host as u64), Raw(8192), Raw(flags.into())] => []);
            (result, Kind::Registered)
        }
    };
    if !result.is_ok() {
        return;
    }
    let bytes = if kind == Kind::Registered {
        8192
    } else {
        bytes
    };
    let mut at = CUdeviceptr(0);
    let mapped = call!(world, cuMemHostGetDevicePointer_v2(&raw mut at, host, 0) [Name(host as u64), Raw(0)]
        => [Name(at.0)]);
    let mut flags = 0;
    let _ = call!(world, cuMemHostGetFlags(&raw mut flags, host) [Name(host as u64)] => [Raw(flags.into())]);
    let at = if mapped.is_ok() { at.0 } else { host as u64 };
    let queue = world.any_queue();
    keep(
        world,
        Buffer {
            at,
            host: host as u64,
            bytes,
            kind,
            queue,
            before: [None; 2],
        },
    );
}

/// What the driver says of an address inside, at the end of, or outside a buffer.
pub fn attributes(world: &mut World) {
    let Some(which) = world.any_buffer() else {
        return;
    };
    let buffer = world.context().buffers[which];
    let offset = match world.rng.below(4) {
        0 => 0,
        1 => buffer.bytes as u64 - 1,
        _ => world.rng.below(buffer.bytes) as u64,
    };
    let at = CUdeviceptr(buffer.at + offset);
    if world.rng.one_in(3) {
        let (mut base, mut bytes) = (CUdeviceptr(0), 0);
        let _ = call!(world, cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, at)
            [Name(buffer.at), Raw(offset)] => [Name(base.0), Raw(bytes as u64)]);
        return;
    }
    // (attribute, bytes, whether the value is an address or handle)
    const ATTRIBUTES: &[(u32, usize, bool)] = &[
        (1, 8, true),
        (2, 4, false),
        (3, 8, true),
        (4, 8, true),
        (6, 4, false),
        (7, 8, true),
        (8, 4, false),
        (9, 4, false),
        (10, 4, false),
        (11, 8, true),
        (12, 8, false),
        (13, 4, false),
        (17, 8, true),
        (77, 8, false),
    ];
    let (attribute, bytes, named) = world.rng.pick(ATTRIBUTES);
    let mut value = 0u64;
    let data = (&raw mut value).cast::<c_void>();
    let _ = bytes;
    let shown = |value: u64| match named {
        // Nothing was written.
        true if value == 0 => Raw(0),
        // An address inside the buffer shows as its distance from the start.
        true if attribute == 3 || attribute == 4 => {
            Raw(value.wrapping_sub(if attribute == 4 && buffer.host != 0 {
                buffer.host
            } else {
                buffer.at
            }))
        }
        // Ids count from one in a space of their own.
        true if attribute == 7 => Name(value | 1 << 60),
        true => Name(value),
        false => Raw(value),
    };
    if world.rng.one_in(2) {
        let _ = call!(world, cuPointerGetAttribute(data, CUpointer_attribute(attribute), at)
            [Raw(attribute.into()), Name(buffer.at), Raw(offset)] => [shown(value)]);
    } else {
        let (mut kinds, mut places) = ([CUpointer_attribute(attribute)], [data]);
        let _ = call!(world, cuPointerGetAttributes(1, kinds.as_mut_ptr(), places.as_mut_ptr(), at)
            [Raw(attribute.into()), Name(buffer.at), Raw(offset)] => [shown(value)]);
    }
    if world.rng.one_in(8) {
        let mut on = world.rng.below(2) as u32;
        let attribute = CUpointer_attribute(6);
        let _ = call!(world, cuPointerSetAttribute((&raw mut on).cast(), attribute, CUdeviceptr(buffer.at))
            [Raw(on.into()), Name(buffer.at)] => []);
    }
    if world.rng.one_in(8) && buffer.kind == Kind::Plain {
        let mut handle = CUipcMemHandle::default();
        // Opaque bytes.
        let _ = call!(world, cuIpcGetMemHandle(&raw mut handle, CUdeviceptr(buffer.at)) [Name(buffer.at)]
            => [Hidden]);
    }
}

/// Managed memory: advice, prefetch, and access from the host.
pub fn advise(world: &mut World) {
    let Some(which) = world.buffer_where(|buffer| buffer.kind == Kind::Managed) else {
        return;
    };
    let buffer = world.context().buffers[which];
    let (at, bytes) = (CUdeviceptr(buffer.at), buffer.bytes);
    let device = CUdevice(world.rng.pick(&[world.device, -1]));
    let location = CUmemLocation {
        r#type: CUmemLocationType(if device.0 < 0 { 2 } else { 1 }),
        id: device.0.max(0),
    };
    match world.rng.below(4) {
        0 => {
            let advice = world.rng.between(1, 6) as u32;
            let _ = call!(world, cuMemAdvise(at, bytes, CUmem_advise(advice), device)
                [Name(at.0), Raw(bytes as u64), Raw(advice.into()), Raw(device.0 as u64)] => []);
        }
        1 => {
            let advice = world.rng.between(1, 6) as u32;
            let _ = call!(world, cuMemAdvise_v2(at, bytes, CUmem_advise(advice), location)
                [Name(at.0), Raw(bytes as u64), Raw(advice.into()), Raw(device.0 as u64)] => []);
        }
        2 => {
            let queue = world.any_queue();
            world.order(which, queue);
            let (handle, by_thread) = world.form(queue);
            if world.rng.one_in(2) {
                let _ = call_on!(world, by_thread, cuMemPrefetchAsync | cuMemPrefetchAsync_ptsz(
                    at, bytes, device, stream(handle)) [Name(at.0), Raw(device.0 as u64), Name(handle)] => []);
            } else {
                let _ = call_on!(world, by_thread, cuMemPrefetchAsync_v2 | cuMemPrefetchAsync_v2_ptsz(
                    at, bytes, location, 0, stream(handle)) [Name(at.0), Raw(device.0 as u64), Name(handle)] => []);
            }
        }
        _ => {
            let _ = call!(world, cuCtxSynchronize() [] => []);
            let count = bytes.min(64).min(SCRATCH_BYTES);
            // SAFETY: managed memory of this many bytes, at rest: the context has been
            // synchronised.
            unsafe {
                let bytes = std::slice::from_raw_parts_mut(buffer.host as *mut u8, count);
                bytes
                    .iter_mut()
                    .for_each(|byte| *byte = byte.wrapping_add(3));
            }
            let buffer = &mut world.context().buffers[which];
            (buffer.queue, buffer.before) = (Queue::Legacy, [None; 2]);
        }
    }
}
