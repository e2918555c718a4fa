//! Copies.

use std::ffi::c_void;
use std::sync::Arc;

use shim_ffi::{
    CUDA_MEMCPY2D, CUDA_MEMCPY3D, CUDA_MEMCPY3D_PEER, CUcontext, CUdeviceptr, CUmemorytype,
    CUresult, CUstream,
};

use super::Done;
use crate::driver::{Driver, driver};
use crate::entry::{In, api};
use crate::exec::work::{Copy, Direction, Side, Work};
use crate::memory::Kind;
use crate::memory::sparse::is_private;
use crate::stream::{Default, Stream};

const HOST: CUmemorytype = CUmemorytype(1);
const DEVICE: CUmemorytype = CUmemorytype(2);
const ARRAY: CUmemorytype = CUmemorytype(3);
const UNIFIED: CUmemorytype = CUmemorytype(4);
/// Larger pageable sources are read while the call waits.
const STAGED_BYTES: u64 = 64 << 10;

/// What an address is to a copy.
enum Place {
    Device(usize),
    Pinned,
    Pageable,
}

fn place(
    driver: &Driver,
    address: u64,
    bytes: u64,
    must_be_device: bool,
) -> Result<Place, CUresult> {
    match driver.memory.region(address) {
        Some(region) => {
            driver
                .memory
                .translate(address, bytes, None)
                .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
            let mapped = matches!(region.kind, Kind::Mapping { .. });
            if region.is_over_the_link() && (mapped || !must_be_device) {
                Ok(Place::Pinned)
            } else {
                Ok(Place::Device(region.device))
            }
        }
        None if must_be_device || driver.memory.is_device_address(address) || address == 0 => {
            Err(CUresult::CUDA_ERROR_INVALID_VALUE)
        }
        None => Ok(Place::Pageable),
    }
}

/// A copy as the program asked for it: sides, whether each must be device memory, and the box.
pub(crate) struct Request {
    pub from: Side,
    pub to: Side,
    pub from_device: bool,
    pub to_device: bool,
    pub width: u64,
    pub height: u64,
    pub depth: u64,
}

impl Request {
    fn linear(from: u64, from_device: bool, to: u64, to_device: bool, bytes: usize) -> Self {
        let (from, to) = (Side::linear(from), Side::linear(to));
        Self {
            from,
            to,
            from_device,
            to_device,
            width: bytes as u64,
            height: 1,
            depth: 1,
        }
    }

    fn span(side: &Side, width: u64, height: u64, depth: u64) -> Option<u64> {
        let rows = side.pitch.checked_mul(height - 1)?;
        side.slice
            .checked_mul(depth - 1)?
            .checked_add(rows)?
            .checked_add(width)
    }

    /// Checks the sides and finds the engine. None where nothing is to be copied.
    pub(crate) fn check(self, driver: &Driver) -> Result<Option<(Copy, bool)>, CUresult> {
        if self.width == 0 || self.height == 0 || self.depth == 0 {
            return Ok(None);
        }
        let bad = CUresult::CUDA_ERROR_INVALID_VALUE;
        if self.height > 1 && (self.from.pitch < self.width || self.to.pitch < self.width) {
            return Err(bad);
        }
        let from_span = Self::span(&self.from, self.width, self.height, self.depth).ok_or(bad)?;
        let to_span = Self::span(&self.to, self.width, self.height, self.depth).ok_or(bad)?;
        let from = place(driver, self.from.address, from_span, self.from_device)?;
        let to = place(driver, self.to.address, to_span, self.to_device)?;
        let (direction, pageable, to_host) = match (from, to) {
            (Place::Device(a), Place::Device(b)) if a == b => (Direction::Within, false, false),
            (Place::Device(_), Place::Device(_)) => (Direction::Peer, false, false),
            (Place::Device(_), Place::Pinned) => (Direction::Out, false, true),
            (Place::Device(_), Place::Pageable) => (Direction::Out, true, true),
            (Place::Pinned, Place::Device(_)) => (Direction::In, false, false),
            (Place::Pageable, Place::Device(_)) => (Direction::In, true, false),
            (_, Place::Pageable) | (Place::Pageable, _) => (Direction::In, true, true),
            (Place::Pinned, Place::Pinned) => (Direction::In, false, true),
        };
        let private = pageable
            && [(&self.from, from_span), (&self.to, to_span)]
                .iter()
                .all(|(side, span)| {
                    driver.memory.region(side.address).is_some() || is_private(side.address, *span)
                });
        let Self {
            from,
            to,
            width,
            height,
            depth,
            ..
        } = self;
        Ok(Some((
            Copy {
                from,
                to,
                width,
                height,
                depth,
                direction,
                pageable,
                private,
            },
            to_host,
        )))
    }
}

/// Submits a copy. A synchronous one returns when it is done; an asynchronous one when pageable
/// memory, if any, is no longer needed.
pub(super) fn copy(
    stream: CUstream,
    default: Default,
    asynchronous: bool,
    request: Request,
) -> Done {
    let (driver, context, stream) = Stream::of(stream, default)?;
    let Some((mut copy, to_host)) = request.check(driver)? else {
        return Ok(());
    };
    let within = matches!(copy.direction, Direction::Within | Direction::Peer);
    let mut wait = !asynchronous && !within;
    if asynchronous && copy.pageable && !stream.is_capturing() {
        if !to_host && copy.height == 1 && copy.depth == 1 && copy.bytes() <= STAGED_BYTES {
            // SAFETY: the program vouches for this many readable bytes, as for any copy.
            let bytes = unsafe {
                std::slice::from_raw_parts(copy.from.address as *const u8, copy.width as usize)
            };
            copy.from.staged = Some(Arc::new(bytes.to_vec()));
        } else {
            wait = true;
        }
    }
    if wait {
        stream.forbid_capture(driver)?;
    }
    // Said at once where it can be: what fails on the device ends the context.
    copy.may_fill_all(&driver.memory)?;
    stream.submit(driver, Work::Copy(Box::new(copy)))?;
    if wait {
        stream.synchronize(driver, &context)
    } else {
        Ok(())
    }
}

/// Base, pitch and height of an array.
fn array_layout(array: u64) -> Result<(u64, usize, usize), CUresult> {
    let array = driver()?
        .arrays
        .get(array)
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    Ok((array.address, array.pitch, array.descriptor.Height.max(1)))
}

fn side(
    kind: CUmemorytype,
    host: u64,
    device: CUdeviceptr,
    array: u64,
    (x, y, z): (usize, usize, usize),
    (pitch, height): (usize, usize),
) -> Result<(Side, bool), CUresult> {
    let (base, pitch, height, must_be_device) = match kind {
        HOST => (host, pitch, height, false),
        DEVICE => (device.0, pitch, height, true),
        UNIFIED => (device.0, pitch, height, false),
        ARRAY => {
            let (base, pitch, height) = array_layout(array)?;
            (base, pitch, height, true)
        }
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    };
    let (pitch, slice) = (pitch as u64, (pitch * height.max(1)) as u64);
    let address = base + x as u64 + y as u64 * pitch + z as u64 * slice;
    Ok((
        Side {
            address,
            pitch,
            slice,
            staged: None,
        },
        must_be_device,
    ))
}

/// A two-dimensional copy's sides and box.
pub(crate) fn plane(of: &CUDA_MEMCPY2D) -> Result<Request, CUresult> {
    let (from, from_device) = side(
        of.srcMemoryType,
        of.srcHost as u64,
        of.srcDevice,
        of.srcArray.0 as u64,
        (of.srcXInBytes, of.srcY, 0),
        (of.srcPitch, 0),
    )?;
    let (to, to_device) = side(
        of.dstMemoryType,
        of.dstHost as u64,
        of.dstDevice,
        of.dstArray.0 as u64,
        (of.dstXInBytes, of.dstY, 0),
        (of.dstPitch, 0),
    )?;
    Ok(Request {
        from,
        to,
        from_device,
        to_device,
        width: of.WidthInBytes as u64,
        height: of.Height as u64,
        depth: 1,
    })
}

/// A three-dimensional copy's sides and box.
pub(crate) fn volume(of: &CUDA_MEMCPY3D) -> Result<Request, CUresult> {
    if of.srcLOD != 0 || of.dstLOD != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let (from, from_device) = side(
        of.srcMemoryType,
        of.srcHost as u64,
        of.srcDevice,
        of.srcArray.0 as u64,
        (of.srcXInBytes, of.srcY, of.srcZ),
        (of.srcPitch, of.srcHeight),
    )?;
    let (to, to_device) = side(
        of.dstMemoryType,
        of.dstHost as u64,
        of.dstDevice,
        of.dstArray.0 as u64,
        (of.dstXInBytes, of.dstY, of.dstZ),
        (of.dstPitch, of.dstHeight),
    )?;
    let (width, height, depth) = (of.WidthInBytes as u64, of.Height as u64, of.Depth as u64);
    Ok(Request {
        from,
        to,
        from_device,
        to_device,
        width,
        height,
        depth,
    })
}

fn peer_volume(of: &CUDA_MEMCPY3D_PEER) -> Result<Request, CUresult> {
    volume(&CUDA_MEMCPY3D {
        srcXInBytes: of.srcXInBytes,
        srcY: of.srcY,
        srcZ: of.srcZ,
        srcLOD: of.srcLOD,
        srcMemoryType: of.srcMemoryType,
        srcHost: of.srcHost,
        srcDevice: of.srcDevice,
        srcArray: of.srcArray,
        srcPitch: of.srcPitch,
        srcHeight: of.srcHeight,
        dstXInBytes: of.dstXInBytes,
        dstY: of.dstY,
        dstZ: of.dstZ,
        dstLOD: of.dstLOD,
        dstMemoryType: of.dstMemoryType,
        dstHost: of.dstHost,
        dstDevice: of.dstDevice,
        dstArray: of.dstArray,
        dstPitch: of.dstPitch,
        dstHeight: of.dstHeight,
        WidthInBytes: of.WidthInBytes,
        Height: of.Height,
        Depth: of.Depth,
        ..CUDA_MEMCPY3D::default()
    })
}

const NULL: CUstream = CUstream::NULL;

fn in_(to: CUdeviceptr, from: *const c_void, bytes: usize) -> Request {
    Request::linear(from as u64, false, to.0, true, bytes)
}

fn out(to: *mut c_void, from: CUdeviceptr, bytes: usize) -> Request {
    Request::linear(from.0, true, to as u64, false, bytes)
}

fn within(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Request {
    Request::linear(from.0, true, to.0, true, bytes)
}

pub(super) fn unified(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Request {
    Request::linear(from.0, false, to.0, false, bytes)
}

api! {
    stream fn cuMemcpy, cuMemcpy_ptds(default; to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        copy(NULL, default, false, unified(to, from, bytes))
    }

    stream fn cuMemcpyAsync, cuMemcpyAsync_ptsz(
        default; to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream,
    ) {
        copy(stream, default, true, unified(to, from, bytes))
    }

    stream fn cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds(default; to: CUdeviceptr, from: *const c_void, bytes: usize) {
        copy(NULL, default, false, in_(to, from, bytes))
    }

    stream fn cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds(default; to: *mut c_void, from: CUdeviceptr, bytes: usize) {
        copy(NULL, default, false, out(to, from, bytes))
    }

    stream fn cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds(default; to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        copy(NULL, default, false, within(to, from, bytes))
    }

    stream fn cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz(
        default; to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream,
    ) {
        copy(stream, default, true, in_(to, from, bytes))
    }

    stream fn cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz(
        default; to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream,
    ) {
        copy(stream, default, true, out(to, from, bytes))
    }

    stream fn cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz(
        default; to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream,
    ) {
        copy(stream, default, true, within(to, from, bytes))
    }

    stream fn cuMemcpyPeer, cuMemcpyPeer_ptds(
        default; to: CUdeviceptr, _to_context: CUcontext, from: CUdeviceptr, _from_context: CUcontext, bytes: usize,
    ) {
        copy(NULL, default, false, within(to, from, bytes))
    }

    stream fn cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz(
        default; to: CUdeviceptr, _to_context: CUcontext, from: CUdeviceptr, _from_context: CUcontext, bytes: usize,
        stream: CUstream,
    ) {
        copy(stream, default, true, within(to, from, bytes))
    }

    stream fn cuMemcpy2D_v2, cuMemcpy2D_v2_ptds(default; of: In<CUDA_MEMCPY2D>) {
        copy(NULL, default, false, plane(&of.get()?)?)
    }

    stream fn cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds(default; of: In<CUDA_MEMCPY2D>) {
        copy(NULL, default, false, plane(&of.get()?)?)
    }

    stream fn cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz(default; of: In<CUDA_MEMCPY2D>, stream: CUstream) {
        copy(stream, default, true, plane(&of.get()?)?)
    }

    stream fn cuMemcpy3D_v2, cuMemcpy3D_v2_ptds(default; of: In<CUDA_MEMCPY3D>) {
        copy(NULL, default, false, volume(&of.get()?)?)
    }

    stream fn cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz(default; of: In<CUDA_MEMCPY3D>, stream: CUstream) {
        copy(stream, default, true, volume(&of.get()?)?)
    }

    stream fn cuMemcpy3DPeer, cuMemcpy3DPeer_ptds(default; of: In<CUDA_MEMCPY3D_PEER>) {
        copy(NULL, default, false, peer_volume(&of.get()?)?)
    }

    stream fn cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz(default; of: In<CUDA_MEMCPY3D_PEER>, stream: CUstream) {
        copy(stream, default, true, peer_volume(&of.get()?)?)
    }
}
