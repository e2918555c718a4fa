//! Copies and memsets of all shapes. What they did is read back and compared by a hash.

use shim_ffi::*;

use super::world::{Buffer, Kind, SCRATCH_BYTES, World};
use super::{call, call_on, stream};
use crate::rng::mix;
use crate::transcript::Word::{Name, Raw};

/// A part of a buffer.
fn part(world: &mut World, buffer: &Buffer, most: usize) -> (u64, usize) {
    let bytes = world.rng.between(1, buffer.bytes.min(most));
    let offset = world.rng.below(buffer.bytes - bytes + 1);
    (buffer.at + offset as u64, bytes)
}

/// Two parts of the same length, in different buffers.
fn two_parts(world: &mut World) -> Option<(usize, usize, u64, u64, usize)> {
    let (to, from) = (world.any_buffer()?, world.any_buffer()?);
    if to == from {
        return None;
    }
    let (a, b) = (world.context().buffers[to], world.context().buffers[from]);
    let (source, bytes) = part(world, &b, a.bytes.min(16 << 10));
    let target = a.at + world.rng.below(a.bytes - bytes + 1) as u64;
    Some((to, from, target, source, bytes))
}

fn hash(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let all = words.iter().fold(bytes.len() as u64, |state, word| {
        (state.rotate_left(5) ^ u64::from_le_bytes(*word)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    });
    mix(rest
        .iter()
        .fold(all, |state, byte| mix(state ^ u64::from(*byte))))
}

/// One-dimensional copies.
pub fn linear(world: &mut World) {
    match world.rng.below(10) {
        0..=4 => between(world),
        5..=7 => to_device(world),
        _ => peer(world),
    }
}

fn between(world: &mut World) {
    let Some((to, from, target, source, bytes)) = two_parts(world) else {
        return;
    };
    let queue = world.any_queue();
    world.order(from, queue);
    world.order(to, queue);
    let (a, b) = (CUdeviceptr(target), CUdeviceptr(source));
    let (handle, by_thread) = world.form(queue);
    let noted = [
        Name(world.contexts[world.here].buffers[to].at),
        Raw(target - world.contexts[world.here].buffers[to].at),
        Name(world.contexts[world.here].buffers[from].at),
        Raw(source - world.contexts[world.here].buffers[from].at),
        Raw(bytes as u64),
        Name(handle),
    ];
    let [n0, n1, n2, n3, n4, n5] = noted;
    // The calls without a stream work in the default one.
    let implicit = handle == 0 && world.rng.one_in(2);
    match (implicit, world.rng.one_in(2)) {
        (true, true) => {
            let _ = call_on!(world, by_thread, cuMemcpy | cuMemcpy_ptds(a, b, bytes) [n0, n1, n2, n3, n4] => []);
        }
        (true, false) => {
            let _ = call_on!(world, by_thread, cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds(a, b, bytes)
                [n0, n1, n2, n3, n4] => []);
        }
        (false, true) => {
            let _ = call_on!(world, by_thread, cuMemcpyAsync | cuMemcpyAsync_ptsz(a, b, bytes, stream(handle))
                [n0, n1, n2, n3, n4, n5] => []);
        }
        (false, false) => {
            let _ = call_on!(world, by_thread, cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz(
                a, b, bytes, stream(handle)) [n0, n1, n2, n3, n4, n5] => []);
        }
    }
}

fn to_device(world: &mut World) {
    let Some(which) = world.any_buffer() else {
        return;
    };
    let buffer = world.context().buffers[which];
    let (at, bytes) = part(world, &buffer, 16 << 10);
    let queue = world.any_queue();
    world.order(which, queue);
    let (handle, by_thread) = world.form(queue);
    let offset = world.rng.below(SCRATCH_BYTES - bytes + 1);
    // The source is never written to, so the copy may take its time.
    let from = world.source[offset..].as_ptr().cast::<c_void>();
    let (target, distance) = (CUdeviceptr(at), at - buffer.at);
    if handle == 0 && world.rng.one_in(2) {
        let _ = call_on!(world, by_thread, cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds(target, from, bytes)
            [Name(buffer.at), Raw(distance), Raw(offset as u64), Raw(bytes as u64)] => []);
    } else {
        let _ = call_on!(world, by_thread, cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz(
            target, from, bytes, stream(handle))
            [Name(buffer.at), Raw(distance), Raw(offset as u64), Raw(bytes as u64), Name(handle)] => []);
    }
}

fn peer(world: &mut World) {
    let Some((to, from, target, source, bytes)) = two_parts(world) else {
        return;
    };
    let queue = world.any_queue();
    world.order(from, queue);
    world.order(to, queue);
    let (handle, by_thread) = world.form(queue);
    let context = CUcontext(world.context().handle as *mut c_void);
    let (a, b) = (CUdeviceptr(target), CUdeviceptr(source));
    let (n0, n1) = (
        Raw(target - world.context().buffers[to].at),
        Raw(source - world.context().buffers[from].at),
    );
    if handle == 0 && world.rng.one_in(2) {
        let _ = call_on!(world, by_thread, cuMemcpyPeer | cuMemcpyPeer_ptds(a, context, b, context, bytes)
            [n0, n1, Raw(bytes as u64)] => []);
    } else {
        let _ = call_on!(world, by_thread, cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz(
            a, context, b, context, bytes, stream(handle)) [n0, n1, Raw(bytes as u64), Name(handle)] => []);
    }
}

/// Pitches and windows of a two-dimensional copy inside two buffers.
fn window(world: &mut World, to: &Buffer, from: &Buffer) -> Option<CUDA_MEMCPY2D> {
    let pitch_of = |world: &mut World, buffer: &Buffer| match buffer.kind {
        Kind::Pitched { pitch, .. } => pitch,
        _ => world.rng.between(16, 512),
    };
    let (dst, src) = (pitch_of(world, to), pitch_of(world, from));
    let rows = (to.bytes / dst).min(from.bytes / src).min(16);
    if rows == 0 {
        return None;
    }
    let width = world.rng.between(1, dst.min(src));
    let height = world.rng.between(1, rows);
    Some(CUDA_MEMCPY2D {
        srcMemoryType: CUmemorytype(2),
        srcDevice: CUdeviceptr(from.at),
        srcPitch: src,
        srcXInBytes: world.rng.below(src - width + 1),
        srcY: world.rng.below(rows - height + 1),
        dstMemoryType: CUmemorytype(2),
        dstDevice: CUdeviceptr(to.at),
        dstPitch: dst,
        dstXInBytes: world.rng.below(dst - width + 1),
        dstY: world.rng.below(rows - height + 1),
        WidthInBytes: width,
        Height: height,
        ..CUDA_MEMCPY2D::default()
    })
}

/// Two- and three-dimensional copies.
pub fn rectangle(world: &mut World) {
    let (Some(to), Some(from)) = (world.any_buffer(), world.any_buffer()) else {
        return;
    };
    if to == from {
        return;
    }
    let (a, b) = (world.context().buffers[to], world.context().buffers[from]);
    let Some(mut copy) = window(world, &a, &b) else {
        return;
    };
    if a.host != 0 && world.rng.one_in(3) {
        copy.dstMemoryType = CUmemorytype(1);
        copy.dstHost = a.host as *mut c_void;
    } else if b.host != 0 && world.rng.one_in(3) {
        copy.srcMemoryType = CUmemorytype(1);
        copy.srcHost = b.host as *const c_void;
    } else if world.rng.one_in(4) {
        (copy.srcMemoryType, copy.dstMemoryType) = (CUmemorytype(4), CUmemorytype(4));
    }
    let queue = world.any_queue();
    world.order(from, queue);
    world.order(to, queue);
    let (handle, by_thread) = world.form(queue);
    let noted = mix(copy.srcXInBytes as u64
        ^ mix(copy.srcY as u64 ^ mix(copy.dstXInBytes as u64 ^ mix(copy.dstY as u64))));
    let shape = [
        Name(a.at),
        Name(b.at),
        Raw(copy.WidthInBytes as u64),
        Raw(copy.Height as u64),
        Raw(noted),
    ];
    let [n0, n1, n2, n3, n4] = shape;
    if world.rng.one_in(2) {
        cube(world, &copy, handle, by_thread, shape);
        return;
    }
    let pointer = &raw const copy;
    if handle == 0 && world.rng.one_in(2) {
        if world.rng.one_in(2) {
            let _ = call_on!(world, by_thread, cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds(pointer)
                [n0, n1, n2, n3, n4] => []);
        } else {
            let _ = call_on!(world, by_thread, cuMemcpy2DUnaligned_v2 | cuMemcpy2DUnaligned_v2_ptds(pointer)
                [n0, n1, n2, n3, n4] => []);
        }
    } else {
        let _ = call_on!(world, by_thread, cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz(pointer, stream(handle))
            [n0, n1, n2, n3, n4, Name(handle)] => []);
    }
}

/// The same copy as a box of one layer, or of a layer per row.
fn cube(
    world: &mut World,
    flat: &CUDA_MEMCPY2D,
    handle: u64,
    by_thread: bool,
    shape: [crate::transcript::Word; 5],
) {
    let layers = world.rng.one_in(2) && flat.srcY == 0 && flat.dstY == 0;
    let (height, depth) = if layers {
        (1, flat.Height)
    } else {
        (flat.Height, 1)
    };
    let copy = CUDA_MEMCPY3D {
        srcXInBytes: flat.srcXInBytes,
        srcY: flat.srcY,
        srcMemoryType: flat.srcMemoryType,
        srcHost: flat.srcHost,
        srcDevice: flat.srcDevice,
        srcPitch: flat.srcPitch,
        srcHeight: if layers { 1 } else { 0 },
        dstXInBytes: flat.dstXInBytes,
        dstY: flat.dstY,
        dstMemoryType: flat.dstMemoryType,
        dstHost: flat.dstHost,
        dstDevice: flat.dstDevice,
        dstPitch: flat.dstPitch,
        dstHeight: if layers { 1 } else { 0 },
        WidthInBytes: flat.WidthInBytes,
        Height: height,
        Depth: depth,
        ..CUDA_MEMCPY3D::default()
    };
    let [n0, n1, n2, n3, n4] = shape;
    let pointer = &raw const copy;
    if world.rng.one_in(4) {
        let context = CUcontext(world.context().handle as *mut c_void);
        let peer = CUDA_MEMCPY3D_PEER {
            srcXInBytes: copy.srcXInBytes,
            srcY: copy.srcY,
            srcMemoryType: copy.srcMemoryType,
            srcHost: copy.srcHost,
            srcDevice: copy.srcDevice,
            srcPitch: copy.srcPitch,
            srcHeight: copy.srcHeight,
            srcContext: context,
            dstXInBytes: copy.dstXInBytes,
            dstY: copy.dstY,
            dstMemoryType: copy.dstMemoryType,
            dstHost: copy.dstHost,
            dstDevice: copy.dstDevice,
            dstPitch: copy.dstPitch,
            dstHeight: copy.dstHeight,
            dstContext: context,
            WidthInBytes: copy.WidthInBytes,
            Height: copy.Height,
            Depth: copy.Depth,
            ..CUDA_MEMCPY3D_PEER::default()
        };
        let pointer = &raw const peer;
        if handle == 0 && world.rng.one_in(2) {
            let _ = call_on!(world, by_thread, cuMemcpy3DPeer | cuMemcpy3DPeer_ptds(pointer)
                [n0, n1, n2, n3, n4] => []);
        } else {
            let _ = call_on!(world, by_thread, cuMemcpy3DPeerAsync | cuMemcpy3DPeerAsync_ptsz(
                pointer, stream(handle)) [n0, n1, n2, n3, n4, Name(handle)] => []);
        }
    } else if handle == 0 && world.rng.one_in(2) {
        let _ = call_on!(world, by_thread, cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds(pointer) [n0, n1, n2, n3, n4] => []);
    } else {
        let _ = call_on!(world, by_thread, cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz(pointer, stream(handle))
            [n0, n1, n2, n3, n4, Name(handle)] => []);
    }
}

/// Memsets of every width, in one and two dimensions.
pub fn set(world: &mut World) {
    let Some(which) = world.any_buffer() else {
        return;
    };
    let buffer = world.context().buffers[which];
    let queue = world.any_queue();
    world.order(which, queue);
    let (handle, by_thread) = world.form(queue);
    let implicit = handle == 0 && world.rng.one_in(2);
    let value = world.rng.word();
    let element = world.rng.pick(&[1usize, 2, 4]);
    let most = buffer.bytes / element;
    if most == 0 {
        return;
    }
    let flat = world.rng.one_in(2);
    let count = world.rng.between(1, most.min(16 << 10));
    let pitch = world.rng.between(1, 64) * 8;
    let (width, height) = (
        world.rng.between(1, pitch / element),
        (buffer.bytes / pitch).min(12),
    );
    let n = [
        Name(buffer.at),
        Raw(value),
        Raw(count as u64),
        Raw(pitch as u64),
        Raw(width as u64),
        Name(handle),
    ];
    if !flat && height == 0 {
        return;
    }
    let (at, s) = (CUdeviceptr(buffer.at), stream(handle));
    macro_rules! one {
        ($value:ty: $flat:ident $flat_t:ident $flat_a:ident $flat_at:ident $two:ident $two_t:ident $two_a:ident $two_at:ident) => {
            match (flat, implicit) {
                (true, true) => call_on!(world, by_thread, $flat | $flat_t(at, value as $value, count)
                    [n[0], n[1], n[2]] => []),
                (true, false) => call_on!(world, by_thread, $flat_a | $flat_at(at, value as $value, count, s)
                    [n[0], n[1], n[2], n[5]] => []),
                (false, true) => call_on!(world, by_thread, $two | $two_t(at, pitch, value as $value, width, height)
                    [n[0], n[1], n[3], n[4]] => []),
                (false, false) => call_on!(world, by_thread, $two_a | $two_at(
                    at, pitch, value as $value, width, height, s) [n[0], n[1], n[3], n[4], n[5]] => []),
            }
        };
    }
    let _ = match element {
        1 => one!(u8: cuMemsetD8_v2 cuMemsetD8_v2_ptds cuMemsetD8Async cuMemsetD8Async_ptsz
            cuMemsetD2D8_v2 cuMemsetD2D8_v2_ptds cuMemsetD2D8Async cuMemsetD2D8Async_ptsz),
        2 => one!(u16: cuMemsetD16_v2 cuMemsetD16_v2_ptds cuMemsetD16Async cuMemsetD16Async_ptsz
            cuMemsetD2D16_v2 cuMemsetD2D16_v2_ptds cuMemsetD2D16Async cuMemsetD2D16Async_ptsz),
        _ => one!(u32: cuMemsetD32_v2 cuMemsetD32_v2_ptds cuMemsetD32Async cuMemsetD32Async_ptsz
            cuMemsetD2D32_v2 cuMemsetD2D32_v2_ptds cuMemsetD2D32Async cuMemsetD2D32Async_ptsz),
    };
}

/// The first bytes of a buffer, whose hash goes into the transcript. Fresh bytes beyond what was
/// written hold anything on a real device, but every buffer is set as a whole when it is made.
pub fn read_back(world: &mut World) {
    let Some(which) = world.any_buffer() else {
        return;
    };
    let buffer = world.context().buffers[which];
    let (from, bytes) = part(world, &buffer, 8 << 10);
    let distance = Raw(from - buffer.at);
    if buffer.host != 0 && world.rng.one_in(2) {
        world.settle(which);
        let host = (buffer.host + (from - buffer.at)) as *const u8;
        // SAFETY: pinned, registered or managed memory of at least this many bytes, at rest.
        let seen = hash(unsafe { std::slice::from_raw_parts(host, bytes) });
        let _ = call!(world, cuCtxSynchronize() [] => [Raw(seen)]);
        return;
    }
    let to = world.scratch.as_mut_ptr().cast::<c_void>();
    let source = CUdeviceptr(from);
    let queue = world.any_queue();
    world.order(which, queue);
    let (handle, by_thread) = world.form(queue);
    if handle == 0 && world.rng.one_in(2) {
        let _ = call_on!(world, by_thread, cuMemcpyDtoH_v2 | cuMemcpyDtoH_v2_ptds(to, source, bytes)
            [Name(buffer.at), distance, Raw(bytes as u64)] => [Raw(hash(&world.scratch[..bytes]))]);
    } else {
        let _ = call_on!(world, by_thread, cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz(
            to, source, bytes, stream(handle)) [Name(buffer.at), distance, Raw(bytes as u64), Name(handle)] => []);
        let (handle, by_thread) = world.form(queue);
        let _ = call_on!(world, by_thread, cuStreamSynchronize | cuStreamSynchronize_ptsz(stream(handle))
            [Name(handle)] => [Raw(hash(&world.scratch[..bytes]))]);
    }
}
