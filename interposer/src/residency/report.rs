//! What a program is shown of memory in an arena: what it would be shown of plain memory.
//!
//! The driver knows chunks where the program knows allocations, and nothing at all while they are
//! out. So every answer is ours.

use shim_ffi::*;

use super::arena::{self, Known};
use super::chunk;

/// Of an address in an arena: the allocation that it lies in. `None`: it is none of ours.
pub(crate) fn address_range(address: u64) -> Option<Result<(u64, u64), CUresult>> {
    if !arena::owns(address) {
        return None;
    }
    let known = arena::known(address).map(|known| (known.start, known.bytes));
    Some(known.ok_or(CUresult::CUDA_ERROR_NOT_FOUND))
}

/// A value with the type that the API gives it.
enum Value {
    Int(u32),
    Wide(u64),
}

impl Value {
    /// # Safety
    /// `to` points to space for a value of this attribute's type.
    unsafe fn put(self, to: *mut c_void) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Int(value) => to.cast::<u32>().write_unaligned(value),
                Self::Wide(value) => to.cast::<u64>().write_unaligned(value),
            }
        }
    }
}

fn value(known: &Known, attribute: CUpointer_attribute, at: u64) -> Result<Value, CUresult> {
    use CUpointer_attribute as A;
    const DEVICE: u32 = 2;
    const READ_WRITE: u32 = 3;
    Ok(match attribute {
        A::CU_POINTER_ATTRIBUTE_CONTEXT => Value::Wide(known.context as u64),
        A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => Value::Int(DEVICE),
        A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER => Value::Wide(at),
        A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => Value::Int(u32::from(known.sync_memops)),
        A::CU_POINTER_ATTRIBUTE_BUFFER_ID => Value::Wide(known.id),
        // CAST: ordinals are small and not negative.
        A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => Value::Int(known.ordinal as u32),
        A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR | A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => {
            Value::Wide(known.start)
        }
        A::CU_POINTER_ATTRIBUTE_RANGE_SIZE | A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE => {
            Value::Wide(known.bytes)
        }
        A::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => Value::Wide(known.id),
        A::CU_POINTER_ATTRIBUTE_MAPPED => Value::Int(1),
        A::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => Value::Int(READ_WRITE),
        // Another process cannot open it, and a network adapter must not learn of it: the pages
        // behind it change.
        A::CU_POINTER_ATTRIBUTE_IS_MANAGED
        | A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        | A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => Value::Int(0),
        A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES | A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {
            Value::Wide(0)
        }
        A::CU_POINTER_ATTRIBUTE_P2P_TOKENS => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    })
}

/// `cuPointerGetAttribute` of an address in an arena; `None`: the driver is to answer.
///
/// # Safety
/// As the driver's function.
pub(crate) unsafe fn attribute(
    data: *mut c_void,
    attribute: CUpointer_attribute,
    pointer: u64,
) -> Option<CUresult> {
    if data.is_null() || !arena::owns(pointer) {
        return None;
    }
    let found = arena::known(pointer)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
        .and_then(|known| value(&known, attribute, pointer));
    Some(match found {
        Ok(value) => {
            // SAFETY: the caller's, of the attribute's type.
            unsafe { value.put(data) };
            CUresult::CUDA_SUCCESS
        }
        Err(status) => status,
    })
}

/// `cuPointerGetAttributes` of an address in an allocation of an arena; `None`: the driver is to
/// answer. What does not apply to the address is reported as the driver tells it of its own,
/// without an error.
///
/// # Safety
/// As the driver's function.
pub(crate) unsafe fn attributes(
    count: u32,
    attributes: *mut CUpointer_attribute,
    data: *mut *mut c_void,
    pointer: u64,
) -> Option<CUresult> {
    if attributes.is_null() || data.is_null() || !arena::owns(pointer) {
        return None;
    }
    let known = arena::known(pointer)?;
    for at in 0..count as usize {
        // SAFETY: arrays of `count` elements, the caller's.
        let (attribute, to) = unsafe { (*attributes.add(at), *data.add(at)) };
        if to.is_null() {
            return Some(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let value = value(&known, attribute, pointer).unwrap_or(Value::Wide(0));
        // SAFETY: the caller's, of the attribute's type; those that do not apply are words.
        unsafe { value.put(to) };
    }
    Some(CUresult::CUDA_SUCCESS)
}

/// Whether an address lies in memory that the program has mapped itself, of which the driver knows
/// nothing while it is out.
pub(crate) fn is_mapped(address: u64) -> bool {
    super::active()
        && !arena::owns(address)
        && chunk::with(|chunks| mapping_at(chunks, address).is_some())
}

fn mapping_at(chunks: &mut chunk::Chunks, address: u64) -> Option<(&mut u64, &mut u64)> {
    chunks.all.values_mut().find_map(|chunk| {
        let bytes = chunk.bytes;
        let mut mappings = chunk.mappings.iter_mut();
        let mapping = mappings.find(|mapping| address.wrapping_sub(mapping.address) < bytes)?;
        Some((&mut mapping.buffer_id, &mut chunk.block_id))
    })
}

/// After the driver has written an attribute of an address in such memory: its numbers stay what
/// the program was shown first, for the driver has others after each move. Inside the quiesce gate.
///
/// # Safety
/// `data` points to what the driver has written.
pub(crate) unsafe fn keep_number(data: *mut c_void, attribute: CUpointer_attribute, address: u64) {
    let is_block = attribute == CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID;
    if !is_block && attribute != CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID {
        return;
    }
    let to = data.cast::<u64>();
    // SAFETY: the caller's promise; both are words.
    let now = unsafe { to.read_unaligned() };
    let shown = chunk::with(|chunks| {
        let (buffer_id, block_id) = mapping_at(chunks, address)?;
        let shown = if is_block { block_id } else { buffer_id };
        if *shown == 0 {
            *shown = now;
        }
        Some(*shown)
    });
    if let Some(shown) = shown {
        // SAFETY: as above.
        unsafe { to.write_unaligned(shown) };
    }
}

/// After `cuPointerSetAttribute`. The one attribute that can be set says that copies of this memory
/// are to wait for their end; the driver has heard so of the chunk, hears it again whenever that is
/// mapped anew, and we remember it of the allocation.
pub(crate) fn set_attribute(value: usize, attribute: u32, pointer: u64) {
    if attribute != CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS.0
        || value == 0
        || !super::active()
    {
        return;
    }
    // SAFETY: the driver has just read an int there.
    let on = unsafe { *(value as *const i32) } != 0;
    arena::note_sync_memops(pointer, on);
    chunk::with(|chunks| {
        let mut all = chunks.all.values_mut();
        if let Some(chunk) = all.find(|chunk| pointer.wrapping_sub(chunk.address()) < chunk.bytes) {
            chunk.sync_memops = on;
        }
    });
}
