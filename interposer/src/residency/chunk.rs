//! Chunks: physical handles of ours, where they are, and where they are mapped.
//!
//! The state machine of a chunk:
//!
//! ```text
//!   Resident ──copy to its host copy──► CopyingOut ──unmap, release──► Out
//!      ▲                                                             │
//!      └──copied back── CopyingIn ◄──create, map, set access─────────┘
//!   Resident ◄──────► Host   (same address, in host memory that the device reaches: overflow)
//! ```
//!
//! A chunk is changed by one thread at a time: by the program's while the quiesce gate is open (it
//! allocates, frees, maps), by the agent while it is closed. The table's lock is held for look-ups
//! and changes of state, never over a driver call.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use channel::{Footprint, MAX_DEVICES};
use shim_ffi::*;

use super::host_copy::HostCopy;
use super::moments;
use crate::attachment::client;
use crate::driver::real;
use crate::gate::capture;
use crate::metering;

pub(super) use crate::metering::{GRANULE, overflow_bytes};

/// Where a chunk's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// On its device.
    Resident,
    /// On its device, on the way into its host copy.
    CopyingOut,
    /// In its host copy. There is no physical handle, and nothing is mapped.
    Out,
    /// Mapped again, on the way back from its host copy.
    CopyingIn,
    /// In host memory, mapped at its address.
    Host,
}

/// One place where a chunk is mapped.
#[derive(Clone, Debug)]
pub(super) struct Mapping {
    pub(super) address: u64,
    pub(super) access: Vec<CUmemAccessDesc>,
    /// The `CU_POINTER_ATTRIBUTE_BUFFER_ID` that the program was shown; 0: none yet.
    pub(super) buffer_id: u64,
}

/// One physical handle.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) bytes: u64,
    /// Device index of the pages.
    pub(super) device: usize,
    /// The driver's ordinal of it.
    pub(super) ordinal: i32,
    /// A context whose streams copy it; 0: none is known.
    pub(super) context: usize,
    pub(super) properties: CUmemAllocationProp,
    /// The driver's handle, of which we hold a reference while there is one.
    pub(super) handle: u64,
    pub(super) place: Place,
    pub(super) mappings: Vec<Mapping>,
    pub(super) host_copy: Option<HostCopy>,
    /// When it was last known to be used, and no earlier than it was made: larger is later. See
    /// [`last_use`](super::last_use).
    pub(super) used: u64,
    /// It is known elsewhere, or may be without a call that says so: it stays where it is.
    pub(super) stays: bool,
    /// References that the program has asked for by an address: a thread that has one may have made
    /// it known elsewhere.
    pub(super) retained: u64,
    /// References that the program has, for what it has made itself.
    pub(super) references: u64,
    /// It is an arena's.
    pub(super) of_arena: bool,
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS` was set of something in it.
    pub(super) sync_memops: bool,
    /// The `CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID` that the program was shown; 0: none yet.
    pub(super) block_id: u64,
}

// SAFETY: the only pointer in it (`properties.win32HandleMetaData`) is the program's and never
// followed.
unsafe impl Send for Chunk {}

impl Chunk {
    /// Whether somebody knows it by more than its address: what is mapped there anew would not be
    /// what they have.
    pub(super) fn is_remembered(&self) -> bool {
        self.stays || self.retained != 0
    }

    /// Whether it can be moved.
    pub(super) fn moves(&self) -> bool {
        !self.is_remembered()
            && self.context != 0
            && self.mappings.first().is_some_and(|mapping| {
                mapping.access.iter().any(|one| {
                    one.location.r#type == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE
                        && one.location.id == self.ordinal
                        && one.flags == CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                })
            })
    }

    /// Whether its bytes are on the device.
    pub(super) fn on_device(&self) -> bool {
        matches!(
            self.place,
            Place::Resident | Place::CopyingOut | Place::CopyingIn
        )
    }

    /// Where it is copied from and to.
    pub(super) fn address(&self) -> u64 {
        self.mappings.first().map_or(0, |mapping| mapping.address)
    }
}

/// All chunks of the process.
#[derive(Default)]
pub(super) struct Chunks {
    pub(super) all: BTreeMap<u64, Chunk>,
    next: u64,
    pub(super) moved_out_bytes: [u64; MAX_DEVICES],
    pub(super) moved_in_bytes: [u64; MAX_DEVICES],
}

static CHUNKS: Mutex<Option<Chunks>> = Mutex::new(None);

/// Looks at the chunks, or changes them.
pub(super) fn with<T>(act: impl FnOnce(&mut Chunks) -> T) -> T {
    act(CHUNKS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get_or_insert_with(Chunks::default))
}

impl Chunks {
    /// Makes a chunk known.
    pub(super) fn add(&mut self, chunk: Chunk) -> u64 {
        self.next += 1;
        let id = self.next;
        let used = moments::tick();
        self.all.insert(id, Chunk { used, ..chunk });
        id
    }

    /// What changes whenever a chunk comes or goes.
    pub(super) fn set(&self) -> (u64, usize) {
        (self.next, self.all.len())
    }

    /// Tells the arbiter where the memory of `device` is.
    pub(super) fn publish(&self, device: usize) {
        let mut footprint = Footprint {
            moved_out_bytes: self.moved_out_bytes.get(device).copied().unwrap_or(0),
            moved_in_bytes: self.moved_in_bytes.get(device).copied().unwrap_or(0),
            ..Footprint::default()
        };
        let mut overflow = 0;
        for chunk in self.all.values().filter(|chunk| chunk.device == device) {
            if chunk.moves() {
                footprint.evictable_bytes += chunk.bytes;
                if chunk.on_device() {
                    footprint.resident_bytes += chunk.bytes;
                }
            }
            if chunk.place == Place::Host {
                overflow += chunk.bytes;
                footprint.host_bytes += chunk.bytes;
            }
            if chunk.host_copy.is_some() {
                footprint.host_bytes += chunk.bytes;
            }
        }
        metering::set_overflow_bytes(device, overflow);
        if let Some(want) = client::current().and_then(|attached| attached.end.client.want(device))
        {
            want.set_footprint(&footprint);
        }
    }

    /// Adds what of the program's own handles stays, by device, as bits by the order of
    /// [`channel::STAYING`].
    pub(super) fn staying(&self, kinds: &mut [u8; MAX_DEVICES]) {
        const SHARED: u8 = 32;
        const UNMAPPED: u8 = 64;
        for chunk in self.all.values().filter(|chunk| !chunk.moves()) {
            if let Some(kinds) = kinds.get_mut(chunk.device) {
                *kinds |= if chunk.is_remembered() {
                    SHARED
                } else {
                    UNMAPPED
                };
            }
        }
    }

    /// Host memory held, in bytes.
    pub(super) fn host_bytes(&self) -> u64 {
        let held = self.all.values().map(|chunk| {
            let host = if chunk.place == Place::Host {
                chunk.bytes
            } else {
                0
            };
            host + chunk.host_copy.as_ref().map_or(0, |_| chunk.bytes)
        });
        held.sum()
    }
}

// ----------------------------------------------------------------------------------------------
// The driver's calls
// ----------------------------------------------------------------------------------------------

fn done(result: CUresult) -> Result<(), CUresult> {
    if result.is_ok() { Ok(()) } else { Err(result) }
}

/// Physical memory of a device, for arenas.
pub(super) fn on_device(ordinal: i32) -> CUmemAllocationProp {
    CUmemAllocationProp {
        r#type: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: CUmemLocation {
            r#type: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: ordinal,
        },
        ..CUmemAllocationProp::default()
    }
}

/// Full access from one device.
pub(super) fn access_from(ordinal: i32) -> CUmemAccessDesc {
    CUmemAccessDesc {
        location: CUmemLocation {
            r#type: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: ordinal,
        },
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    }
}

/// `cuMemCreate`.
pub(super) fn create(bytes: u64, properties: &CUmemAllocationProp) -> Result<u64, CUresult> {
    let mut handle = CUmemGenericAllocationHandle::default();
    // SAFETY: valid pointers to a local and to properties that outlive the call.
    done(unsafe { real::cuMemCreate(&raw mut handle, bytes as usize, properties, 0) })?;
    Ok(handle.0)
}

/// Maps a handle and sets access; undone where the second fails.
pub(super) fn map(handle: u64, bytes: u64, mapping: &Mapping) -> Result<(), CUresult> {
    // SAFETY: an address range reserved for this, on which nothing is mapped; the handle is whole.
    unsafe {
        done(real::cuMemMap(
            CUdeviceptr(mapping.address),
            bytes as usize,
            0,
            CUmemGenericAllocationHandle(handle),
            0,
        ))?;
        if mapping.access.is_empty() {
            return Ok(());
        }
        let access = real::cuMemSetAccess(
            CUdeviceptr(mapping.address),
            bytes as usize,
            mapping.access.as_ptr(),
            mapping.access.len(),
        );
        done(access).inspect_err(|_| {
            let _ = unmap(mapping.address, bytes);
        })
    }
}

/// `cuMemUnmap`.
pub(super) fn unmap(address: u64, bytes: u64) -> Result<(), CUresult> {
    // SAFETY: a mapping of ours, whole, that nothing on the device uses any more (the caller has
    // waited).
    done(unsafe { real::cuMemUnmap(CUdeviceptr(address), bytes as usize) })
}

/// `cuMemRelease`.
pub(super) fn release(handle: u64) -> Result<(), CUresult> {
    // SAFETY: a reference of ours.
    done(unsafe { real::cuMemRelease(CUmemGenericAllocationHandle(handle)) })
}

/// Creates, maps and gives access, at all of `mappings`; all or nothing.
pub(super) fn bring(
    bytes: u64,
    properties: &CUmemAllocationProp,
    mappings: &[Mapping],
) -> Result<u64, CUresult> {
    let handle = create(bytes, properties)?;
    for (at, mapping) in mappings.iter().enumerate() {
        if let Err(status) = map(handle, bytes, mapping) {
            for mapped in mappings.iter().take(at) {
                let _ = unmap(mapped.address, bytes);
            }
            let _ = release(handle);
            return Err(status);
        }
    }
    Ok(handle)
}

/// Unmaps everywhere and releases. Where something cannot be unmapped what was is mapped again, and
/// all is as before.
pub(super) fn dismiss(handle: u64, bytes: u64, mappings: &[Mapping]) -> Result<(), CUresult> {
    let back = |upto: usize| {
        for mapping in mappings.iter().take(upto) {
            let _ = map(handle, bytes, mapping);
        }
    };
    for (at, mapping) in mappings.iter().enumerate() {
        unmap(mapping.address, bytes).inspect_err(|_| back(at))?;
    }
    release(handle).inspect_err(|_| back(mappings.len()))
}

/// Runs own driver calls of a program's thread so that they are no calls of the program's.
pub(super) fn quietly<T>(calls: impl FnOnce() -> T) -> T {
    capture::relaxed(calls)
}
