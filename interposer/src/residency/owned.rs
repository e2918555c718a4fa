//! Physical memory that the program makes itself (`cuMemCreate`, `cuMemMap`; expandable segments
//! are built of it).
//!
//! A handle of the driver's does not survive an eviction, and its number may come back as somebody
//! else's. So the program is given a number of ours, and every call that takes a handle gets the
//! driver's in its place. We hold a reference of our own for as long as the program has one or
//! anything is mapped; what is mapped where, and who may touch it, is remembered, for the driver
//! forgets.
//!
//! Memory that others know by more than its address stays where it is: after a move they would go
//! on with the pages that it had before, and wait for ever for what is written to the ones that it
//! has now. That is a handle that is exported or bound to a multicast object, memory of which a
//! descriptor for other devices (`cuMemGetHandleForAddressRange`), a token for them or an IPC
//! handle was given out, all for good; and a handle that the program has retained by an address,
//! for as long as it has that reference. A network adapter's driver can learn of memory that was
//! made for it (`gpuDirectRDMACapable`) without a call that we see: where such a driver is loaded
//! ([`tuning::adapters_may_know`]) that memory stays from the beginning.
//!
//! A handle that is mapped nowhere, or where its own device has no access, cannot be copied, and
//! stays as well.

use shim_ffi::*;

use super::chunk::{self, Chunk, Mapping, Place};
use super::tuning;
use crate::attachment::client;
use crate::gate::context;
use crate::ground::thread::thread;

/// The upper half of our numbers: far from addresses and from small numbers, which is what drivers
/// use.
const TAG: u64 = 0x5b1e_7000_0000_0000;
const IDS: u64 = 0x0000_0fff_ffff_ffff;

fn id_of(handle: u64) -> Option<u64> {
    (handle & !IDS == TAG).then_some(handle & IDS)
}

/// Whether a handle is a number of ours.
pub(crate) fn is_owned(handle: u64) -> bool {
    super::active() && id_of(handle).is_some()
}

/// After `cuMemCreate` has made `handle`, on the device or in host memory: what the program is
/// given for it.
pub(crate) fn adopt(
    handle: u64,
    bytes: u64,
    device: usize,
    properties: &CUmemAllocationProp,
    on_device: bool,
) -> u64 {
    let chunk = Chunk {
        bytes,
        device,
        ordinal: properties.location.id,
        context: 0,
        properties: CUmemAllocationProp {
            win32HandleMetaData: std::ptr::null_mut(),
            ..*properties
        },
        handle,
        place: if on_device {
            Place::Resident
        } else {
            Place::Host
        },
        mappings: Vec::new(),
        host_copy: None,
        used: 0,
        stays: tuning::adapters_may_know() && properties.allocFlags.gpuDirectRDMACapable != 0,
        retained: 0,
        references: 1,
        of_arena: false,
        sync_memops: false,
        block_id: 0,
    };
    TAG | chunk::with(|chunks| chunks.add(chunk))
}

/// What the driver is given for a handle of the program's.
fn driver_handle(handle: u64) -> u64 {
    let Some(id) = id_of(handle) else {
        return handle;
    };
    // What has been released is no handle: 0 is none of the driver's.
    chunk::with(|chunks| {
        chunks
            .all
            .get(&id)
            .filter(|chunk| chunk.references != 0)
            .map_or(0, |chunk| chunk.handle)
    })
}

/// The handle is known elsewhere from here on.
fn stays(handle: u64) {
    let Some(id) = id_of(handle) else {
        return;
    };
    let host_copy = chunk::with(|chunks| {
        let chunk = chunks.all.get_mut(&id)?;
        chunk.stays = true;
        let (device, host_copy) = (chunk.device, chunk.host_copy.take());
        chunks.publish(device);
        host_copy
    });
    drop(host_copy);
}

/// Gives a chunk that nobody holds any more back to the driver. Inside the quiesce gate.
fn drop_if_unheld(id: u64) {
    let gone = chunk::with(|chunks| {
        let unheld = |chunk: &Chunk| chunk.references == 0 && chunk.mappings.is_empty();
        if !chunks.all.get(&id).is_some_and(unheld) {
            return None;
        }
        let chunk = chunks.all.remove(&id);
        if let Some(chunk) = &chunk {
            chunks.publish(chunk.device);
        }
        chunk
    });
    if let Some(chunk) = gone
        && chunk.place != Place::Out
    {
        let _ = chunk::release(chunk.handle);
    }
}

/// `cuMemRelease` of a handle of ours. Inside the quiesce gate.
pub(crate) fn release(handle: u64) -> CUresult {
    let Some(id) = id_of(handle) else {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    };
    let known = chunk::with(|chunks| {
        let chunk = chunks.all.get_mut(&id)?;
        chunk.references = chunk.references.checked_sub(1)?;
        // Who retains gives back what it has retained; both are one number.
        chunk.retained = chunk.retained.saturating_sub(1);
        let device = chunk.device;
        chunks.publish(device);
        Some(())
    });
    if known.is_none() {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    drop_if_unheld(id);
    CUresult::CUDA_SUCCESS
}

/// After `cuMemMap` of a handle of ours.
fn mapped(address: u64, handle: u64) {
    let Some(id) = id_of(handle) else {
        return;
    };
    let thread = thread();
    if let Some(attached) = client::current() {
        context::refresh(thread, attached);
    }
    let here = (thread.context.get(), thread.ordinal.get());
    let ordinal = chunk::with(|chunks| chunks.all.get(&id).map(|chunk| chunk.ordinal));
    let any = ordinal.map_or(0, super::copy_streams::any_context);
    chunk::with(|chunks| {
        let Some(chunk) = chunks.all.get_mut(&id) else {
            return;
        };
        chunk.mappings.push(Mapping {
            address,
            access: Vec::new(),
            buffer_id: 0,
        });
        if chunk.context == 0 {
            chunk.context = if here.1 == chunk.ordinal && here.0 != 0 {
                here.0
            } else {
                any
            };
        }
    });
}

/// Whether something in a range is away whose handle the program has, and that is mapped nowhere
/// else. Inside the quiesce gate.
pub(crate) fn is_kept_away(start: u64, end: u64) -> bool {
    let is_in = |mapping: &Mapping| (start..end).contains(&mapping.address);
    chunk::with(|chunks| {
        let mut away = (chunks.all.values())
            .filter(|chunk| chunk.place == Place::Out && chunk.references != 0);
        away.any(|chunk| !chunk.mappings.is_empty() && chunk.mappings.iter().all(is_in))
    })
}

/// `cuMemUnmap` of a range, which `call` makes of each part of it in which the driver may have
/// something mapped: of what is away it has nothing. Inside the quiesce gate.
pub(crate) fn unmap(start: u64, end: u64, call: impl Fn(u64, u64) -> CUresult) -> CUresult {
    let mut away: Vec<(u64, u64)> = chunk::with(|chunks| {
        let away = chunks.all.values().filter(|one| one.place == Place::Out);
        let mapped = away.flat_map(|chunk| {
            let ends = |at: u64| at.saturating_add(chunk.bytes);
            (chunk.mappings.iter()).map(move |mapping| (mapping.address, ends(mapping.address)))
        });
        mapped
            .filter(|(from, to)| start <= *from && *to <= end)
            .collect()
    });
    away.sort_unstable();
    let is_all = !away.is_empty();
    let mut at = start;
    for (from, to) in away.into_iter().chain([(end, end)]) {
        if at < from || !is_all {
            let result = call(at, from);
            if !result.is_ok() {
                return result;
            }
        }
        at = to;
    }
    unmapped(start, end);
    CUresult::CUDA_SUCCESS
}

/// After `cuMemUnmap` of a range, which is made of whole mappings. Inside the quiesce gate.
fn unmapped(start: u64, end: u64) {
    super::groups::forget(start, end);
    let touched: Vec<u64> = chunk::with(|chunks| {
        let mut touched = Vec::new();
        let mut devices = Vec::new();
        for (id, chunk) in &mut chunks.all {
            let before = chunk.mappings.len();
            chunk
                .mappings
                .retain(|mapping| !(start..end).contains(&mapping.address));
            if chunk.mappings.len() != before {
                touched.push(*id);
                devices.push(chunk.device);
            }
        }
        for device in devices {
            chunks.publish(device);
        }
        touched
    });
    touched.into_iter().for_each(drop_if_unheld);
}

/// After `cuMemSetAccess` of a range.
///
/// # Safety
/// `list` points to `count` descriptors.
unsafe fn accessible(start: u64, bytes: u64, list: *const CUmemAccessDesc, count: usize) {
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts(list, count) };
    let end = start.saturating_add(bytes);
    chunk::with(|chunks| {
        let mut devices = Vec::new();
        for chunk in chunks.all.values_mut() {
            for mapping in &mut chunk.mappings {
                if !(start..end).contains(&mapping.address) {
                    continue;
                }
                for one in list {
                    mapping.access.retain(|known| {
                        (known.location.r#type, known.location.id)
                            != (one.location.r#type, one.location.id)
                    });
                    if one.flags != CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE {
                        mapping.access.push(*one);
                    }
                }
                if !devices.contains(&chunk.device) {
                    devices.push(chunk.device);
                }
            }
        }
        for device in devices {
            chunks.publish(device);
        }
    });
    super::agent::start();
}

/// `cuMemRetainAllocationHandle` of an address where a chunk of the program's is mapped: its
/// number, with one more reference. Inside the quiesce gate.
pub(crate) fn retain(address: u64) -> Option<u64> {
    let (handle, host_copy) = chunk::with(|chunks| {
        let (id, chunk) = chunks.all.iter_mut().find(|(_, chunk)| {
            chunk
                .mappings
                .iter()
                .any(|mapping| address.wrapping_sub(mapping.address) < chunk.bytes)
        })?;
        chunk.references += 1;
        chunk.retained += 1;
        let (handle, device, host_copy) = (TAG | id, chunk.device, chunk.host_copy.take());
        chunks.publish(device);
        Some((handle, host_copy))
    })?;
    drop(host_copy);
    Some(handle)
}

/// The driver's handle of physical memory where the program has given one of ours.
pub(crate) fn translated(handle: usize) -> Option<usize> {
    id_of(handle as u64)?;
    Some(driver_handle(handle as u64) as usize)
}

/// After a call of the program's that has succeeded, with the words that the program gave.
pub(crate) fn noted(traits: Traits, words: &[usize]) {
    let word = |at: usize| words.get(at).copied().unwrap_or(0);
    let at = |at: u8| word(usize::from(at)) as u64;
    match traits.tracks {
        Tracks::MemoryMap => mapped(word(0) as u64, word(3) as u64),
        Tracks::MemoryAccess => {
            // SAFETY: the driver has just read as many descriptors there.
            unsafe { accessible(word(0) as u64, word(1) as u64, word(2) as *const _, word(3)) };
        }
        _ => {}
    }
    match traits.shares {
        Shares::Nothing => {}
        Shares::Handle { at: handle } => stays(at(handle)),
        Shares::Range { start, bytes } => stay(at(start), at(bytes)),
        Shares::Address { at: address } => stay(at(address), 1),
    }
}

/// What is mapped in a range is known elsewhere from here on, an arena's chunks included. Inside
/// the quiesce gate.
pub(crate) fn stay(start: u64, bytes: u64) {
    let end = start.saturating_add(bytes.max(1));
    let ids: Vec<u64> = chunk::with(|chunks| {
        let touched = |chunk: &Chunk| {
            chunk.mappings.iter().any(|mapping| {
                mapping.address < end && start < mapping.address.saturating_add(chunk.bytes)
            })
        };
        let found = chunks.all.iter().filter(|(_, chunk)| touched(chunk));
        found.map(|(id, _)| *id).collect()
    });
    ids.into_iter().for_each(|id| stays(TAG | id));
}
