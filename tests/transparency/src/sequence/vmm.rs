//! Physical memory by handle: created, mapped, retained, released in any order.

use shim_ffi::*;

use super::call;
use super::world::{BUFFERS, Buffer, Kind, World};
use crate::transcript::Word::{Name, New, Raw};

fn properties(world: &World) -> CUmemAllocationProp {
    CUmemAllocationProp {
        r#type: CUmemAllocationType(1),
        location: CUmemLocation {
            r#type: CUmemLocationType(1),
            id: world.device,
        },
        ..CUmemAllocationProp::default()
    }
}

/// A mapped buffer, with references given back early now and then.
pub fn physical(world: &mut World) {
    if world.context().buffers.len() >= BUFFERS {
        return super::memory::free(world);
    }
    let properties = properties(world);
    let which = world.rng.below(2) as u32;
    let mut granularity = 0;
    let _ = call!(world, cuMemGetAllocationGranularity(
        &raw mut granularity, &raw const properties, CUmemAllocationGranularity_flags(which)) [Raw(which.into())]
        => [Raw(granularity as u64)]);
    let granularity = granularity.max(2 << 20);
    let bytes = granularity * world.rng.between(1, 3);
    let mut handle = CUmemGenericAllocationHandle(0);
    let odd = if world.rng.one_in(12) { 4096 } else { 0 };
    let created = call!(world, cuMemCreate(&raw mut handle, bytes + odd, &raw const properties, 0)
        [Raw((bytes + odd) as u64)] => [New(handle.0 | 1 << 59)]);
    if !created.is_ok() {
        return;
    }
    let h = Name(handle.0 | 1 << 59);
    if world.rng.one_in(6) {
        let mut seen = CUmemAllocationProp::default();
        let _ = call!(world, cuMemGetAllocationPropertiesFromHandle(&raw mut seen, handle) [h]
            => [Raw(seen.r#type.0.into()), Raw(seen.location.id as u64)]);
    }
    if world.rng.one_in(8) {
        release(world, handle);
        return;
    }
    let mut at = CUdeviceptr(0);
    let reserved = bytes + granularity * world.rng.below(2);
    let taken = call!(world, cuMemAddressReserve(&raw mut at, reserved, 0, CUdeviceptr(0), 0) [Raw(reserved as u64)]
        => [New(at.0)]);
    if !taken.is_ok() {
        return release(world, handle);
    }
    let mapped =
        call!(world, cuMemMap(at, bytes, 0, handle, 0) [Name(at.0), Raw(bytes as u64), h] => []);
    let access = CUmemAccessDesc {
        location: properties.location,
        flags: CUmemAccess_flags(3),
    };
    let _ = call!(world, cuMemSetAccess(at, bytes, &raw const access, 1) [Name(at.0), Raw(bytes as u64)] => []);
    let mut flags = 0;
    let _ = call!(world, cuMemGetAccess(&raw mut flags, &raw const properties.location, at) [Name(at.0)] => [Raw(flags)]);
    if world.rng.one_in(3) {
        let mut again = CUmemGenericAllocationHandle(0);
        let retained = call!(world, cuMemRetainAllocationHandle(&raw mut again, at.0 as *mut c_void) [Name(at.0)]
            => [Name(again.0 | 1 << 59)]);
        if retained.is_ok() {
            let _ = call!(world, cuMemRelease(again) [Name(again.0 | 1 << 59)] => []);
        }
    }
    if !mapped.is_ok() {
        let _ = call!(world, cuMemAddressFree(at, reserved) [Name(at.0)] => []);
        return release(world, handle);
    }
    // Memory lives on in its mapping.
    let early = world.rng.one_in(2);
    if early {
        release(world, handle);
    }
    let queue = world.any_queue();
    super::memory::keep(
        world,
        Buffer {
            at: at.0,
            host: 0,
            bytes: bytes.min(256 << 10),
            kind: Kind::Mapped {
                handle: if early { 0 } else { handle.0 },
                reserved,
            },
            queue,
            before: [None; 2],
        },
    );
}

fn release(world: &mut World, handle: CUmemGenericAllocationHandle) {
    let _ = call!(world, cuMemRelease(handle) [Name(handle.0 | 1 << 59)] => []);
    world.gone(handle.0 | 1 << 59);
}

/// Unmaps a buffer and gives its range back.
pub fn unmap(world: &mut World, buffer: Buffer) {
    let Kind::Mapped { handle, reserved } = buffer.kind else {
        return;
    };
    let at = CUdeviceptr(buffer.at);
    let mut bytes = 0;
    let mut base = CUdeviceptr(0);
    let _ = call!(world, cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, at) [Name(at.0)]
        => [Name(base.0), Raw(bytes as u64)]);
    let first = world.rng.one_in(2);
    let handle = (handle != 0).then_some(CUmemGenericAllocationHandle(handle));
    if let (true, Some(handle)) = (first, handle) {
        release(world, handle);
    }
    let _ = call!(world, cuMemUnmap(at, bytes) [Name(at.0), Raw(bytes as u64)] => []);
    if let (false, Some(handle)) = (first, handle) {
        release(world, handle);
    }
    let _ = call!(world, cuMemAddressFree(at, reserved) [Name(at.0), Raw(reserved as u64)] => []);
}
