//! Arrays and texture objects. An array is pitched linear memory here; only copies see the
//! difference.

use std::ffi::c_void;
use std::sync::Arc;

use shim_ffi::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY_MEMORY_REQUIREMENTS, CUDA_ARRAY3D_DESCRIPTOR,
    CUDA_RESOURCE_DESC, CUarray, CUdevice, CUdeviceptr, CUresult, CUstream, CUtexObject,
};

use super::Done;
use super::copy::{Request, copy};
use crate::array::{Array, Texture};
use crate::context::current;
use crate::driver::{Driver, driver};
use crate::entry::{In, Out, api};
use crate::exec::work::Side;
use crate::memory::Kind;
use crate::registry;

/// Rows start at multiples of this.
const PITCH: usize = 512;

fn element_bytes(format: u32) -> Result<usize, CUresult> {
    Ok(match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
    })
}

fn create(to: Out<CUarray>, descriptor: CUDA_ARRAY3D_DESCRIPTOR) -> Done {
    to.check()?;
    let (driver, context) = super::memory::allocating()?;
    if descriptor.Width == 0 || !matches!(descriptor.NumChannels, 1 | 2 | 4) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let row_bytes = descriptor
        .Width
        .checked_mul(element_bytes(descriptor.Format.0)? * descriptor.NumChannels as usize)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let pitch = row_bytes.next_multiple_of(PITCH);
    let bytes = pitch
        .checked_mul(descriptor.Height.max(1))
        .and_then(|plane| plane.checked_mul(descriptor.Depth.max(1)))
        .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)? as u64;
    let address = driver.memory.alloc(
        &driver.device_state,
        context.device,
        context.id,
        bytes,
        Kind::Array,
    )?;
    let id = registry::fresh();
    let array = Array {
        id,
        context: context.id,
        address,
        descriptor,
        row_bytes,
        pitch,
        bytes,
    };
    driver.arrays.insert(id, Arc::new(array));
    to.put(CUarray(id as *mut c_void))
}

fn find(array: CUarray) -> Result<(&'static Driver, Arc<Array>), CUresult> {
    let driver = driver()?;
    Ok((
        driver,
        driver
            .arrays
            .get(array.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?,
    ))
}

/// A part of a row of an array, as one side of a copy.
fn part(array: CUarray, offset: usize, bytes: usize) -> Result<Side, CUresult> {
    let (_, array) = find(array)?;
    let (row, column) = (offset / array.row_bytes, offset % array.row_bytes);
    let rows = array.descriptor.Height.max(1) * array.descriptor.Depth.max(1);
    if row >= rows || column + bytes > array.row_bytes {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(Side::linear(
        array.address + (row * array.pitch + column) as u64,
    ))
}

fn request(from: (Side, bool), to: (Side, bool), bytes: usize) -> Request {
    let ((from, from_device), (to, to_device)) = (from, to);
    Request {
        from,
        to,
        from_device,
        to_device,
        width: bytes as u64,
        height: 1,
        depth: 1,
    }
}

fn host(pointer: *const c_void) -> (Side, bool) {
    (Side::linear(pointer as u64), false)
}

const NULL: CUstream = CUstream::NULL;

api! {
    fn cuArrayCreate_v2(to: Out<CUarray>, descriptor: In<CUDA_ARRAY_DESCRIPTOR>) {
        let plane = descriptor.get()?;
        create(to, CUDA_ARRAY3D_DESCRIPTOR {
            Width: plane.Width,
            Height: plane.Height,
            Format: plane.Format,
            NumChannels: plane.NumChannels,
            ..CUDA_ARRAY3D_DESCRIPTOR::default()
        })
    }

    fn cuArray3DCreate_v2(to: Out<CUarray>, descriptor: In<CUDA_ARRAY3D_DESCRIPTOR>) {
        create(to, descriptor.get()?)
    }

    fn cuArrayGetDescriptor_v2(to: Out<CUDA_ARRAY_DESCRIPTOR>, array: CUarray) {
        let of = find(array)?.1.descriptor;
        to.put(CUDA_ARRAY_DESCRIPTOR { Width: of.Width, Height: of.Height, Format: of.Format, NumChannels: of.NumChannels })
    }

    fn cuArray3DGetDescriptor_v2(to: Out<CUDA_ARRAY3D_DESCRIPTOR>, array: CUarray) {
        to.put(find(array)?.1.descriptor)
    }

    fn cuArrayGetMemoryRequirements(to: Out<CUDA_ARRAY_MEMORY_REQUIREMENTS>, array: CUarray, device: CUdevice) {
        let (driver, array) = find(array)?;
        driver.device(device.0)?;
        to.put(CUDA_ARRAY_MEMORY_REQUIREMENTS {
            size: array.bytes as usize,
            alignment: PITCH,
            ..CUDA_ARRAY_MEMORY_REQUIREMENTS::default()
        })
    }

    fn cuArrayDestroy(array: CUarray) {
        let (driver, array) = find(array)?;
        let (_, context) = current()?;
        crate::capture::forbid_unsafe(driver)?;
        driver.engine.wait_streams(|stream| stream.device == context.device);
        driver.arrays.remove(array.id);
        driver.memory.free(&driver.device_state, array.address).map(|_| ())
    }

    stream fn cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds(
        default; to: CUarray, offset: usize, from: *const c_void, bytes: usize,
    ) {
        copy(NULL, default, false, request(host(from), (part(to, offset, bytes)?, true), bytes))
    }

    stream fn cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds(
        default; to: *mut c_void, from: CUarray, offset: usize, bytes: usize,
    ) {
        copy(NULL, default, false, request((part(from, offset, bytes)?, true), host(to), bytes))
    }

    stream fn cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2_ptsz(
        default; to: CUarray, offset: usize, from: *const c_void, bytes: usize, stream: CUstream,
    ) {
        copy(stream, default, true, request(host(from), (part(to, offset, bytes)?, true), bytes))
    }

    stream fn cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz(
        default; to: *mut c_void, from: CUarray, offset: usize, bytes: usize, stream: CUstream,
    ) {
        copy(stream, default, true, request((part(from, offset, bytes)?, true), host(to), bytes))
    }

    stream fn cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds(
        default; to: CUarray, offset: usize, from: CUdeviceptr, bytes: usize,
    ) {
        copy(NULL, default, false, request((Side::linear(from.0), true), (part(to, offset, bytes)?, true), bytes))
    }

    stream fn cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds(
        default; to: CUdeviceptr, from: CUarray, offset: usize, bytes: usize,
    ) {
        copy(NULL, default, false, request((part(from, offset, bytes)?, true), (Side::linear(to.0), true), bytes))
    }

    stream fn cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds(
        default; to: CUarray, to_offset: usize, from: CUarray, from_offset: usize, bytes: usize,
    ) {
        let sides = ((part(from, from_offset, bytes)?, true), (part(to, to_offset, bytes)?, true));
        copy(NULL, default, false, request(sides.0, sides.1, bytes))
    }

    fn cuTexObjectCreate(
        to: Out<CUtexObject>, descriptor: In<CUDA_RESOURCE_DESC>, texture: In<u8>, _view: In<u8>,
    ) {
        let (driver, _) = current()?;
        to.check()?;
        if texture.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let id = registry::fresh();
        driver.textures.insert(id, Arc::new(Texture { descriptor: descriptor.get()? }));
        to.put(CUtexObject(id))
    }

    fn cuTexObjectDestroy(texture: CUtexObject) {
        driver()?.textures.remove(texture.0).map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    fn cuTexObjectGetResourceDesc(to: Out<CUDA_RESOURCE_DESC>, texture: CUtexObject) {
        to.put(driver()?.textures.get(texture.0).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.descriptor)
    }
}
