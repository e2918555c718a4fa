//! Physical memory by handle: what it is charged, references, mappings, other processes' handles.
//!
//! Physical memory goes back to the device when the last handle reference *and* the last mapping
//! are gone, in whichever process; so does the charge. It belongs to the device that the properties
//! name, not to the caller's.
//!
//! An exported block is listed in the tenant's page ([`channel::Block`]), and so is an imported
//! one: each process that holds it lists it, and it is charged once. So an importer pays for what
//! its owner has given back. Processes know a block by the inode of the descriptor that it travels
//! as; where descriptors have none of their own (a device node's), imports are not charged and the
//! owner pays until it gives the block back.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};

use channel::{Block, NO_LIMIT, OverLimit};
use shim_ffi::*;

use super::{GRANULE, Meter};

#[derive(Default)]
struct Vmm {
    handles: HashMap<u64, Physical>,
    /// Mapped ranges by start: length and handle.
    mappings: BTreeMap<u64, (u64, u64)>,
    /// Other numbers under which the driver knows a handle.
    aliases: HashMap<u64, u64>,
    /// Shared blocks that this process has listed: how many of its handles, and imports under way,
    /// are theirs.
    shared: HashMap<u64, u32>,
}

struct Physical {
    bytes: u64,
    /// Device index of the pages.
    device: usize,
    references: u64,
    mappings: u64,
    /// Number among the shared blocks, which are charged by the list.
    shared: Option<u64>,
}

static VMM: Mutex<Option<Vmm>> = Mutex::new(None);

/// The devices of which there are exported or imported handles, by index.
pub(super) fn sharing() -> [bool; channel::MAX_DEVICES] {
    let mut found = [false; channel::MAX_DEVICES];
    with(|vmm| {
        for physical in vmm.handles.values().filter(|one| one.shared.is_some()) {
            if let Some(found) = found.get_mut(physical.device) {
                *found = true;
            }
        }
    });
    found
}

fn with<T>(act: impl FnOnce(&mut Vmm) -> T) -> T {
    act(VMM
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get_or_insert_with(Vmm::default))
}

impl Vmm {
    fn name(&self, handle: u64) -> u64 {
        self.aliases.get(&handle).copied().unwrap_or(handle)
    }

    /// Takes the handle out, and gives its memory back, if nothing holds it any more.
    fn drop_if_unheld(&mut self, handle: u64) {
        let unheld = |physical: &Physical| physical.references == 0 && physical.mappings == 0;
        if !self.handles.get(&handle).is_some_and(unheld) {
            return;
        }
        let Some(physical) = self.handles.remove(&handle) else {
            return;
        };
        self.aliases.retain(|_, name| *name != handle);
        let Some(meter) = Meter::on(physical.device) else {
            return;
        };
        match physical.shared {
            Some(id) => self.unshare(&meter, id),
            None => meter.release(physical.bytes),
        }
    }

    /// One handle or import less of a shared block.
    fn unshare(&mut self, meter: &Meter, id: u64) {
        let left = self.shared.get_mut(&id).map_or(0, |count| {
            *count = count.saturating_sub(1);
            *count
        });
        if left == 0 {
            self.shared.remove(&id);
            meter.account.unshare(id);
        }
    }
}

/// What a descriptor says of the block that it stands for (a raw system call: errno is left alone):
/// a number that is the same in all processes, and its size where the descriptor is a file of that
/// size.
fn identity(fd: i32) -> Option<(u64, Option<u64>)> {
    if fd < 0 {
        return None;
    }
    // SAFETY: not -1, and borrowed for one system call, which fails cleanly where the number is no
    // descriptor.
    let status = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(fd) }).ok()?;
    let kind = rustix::fs::FileType::from_raw_mode(status.st_mode);
    if kind.is_char_device() || kind.is_block_device() || kind.is_socket() || kind.is_fifo() {
        return None;
    }
    let id = (status.st_ino ^ status.st_dev.rotate_left(40)).max(1);
    let bytes = u64::try_from(status.st_size).unwrap_or(0) / GRANULE * GRANULE;
    Some((id, (bytes != 0).then_some(bytes)))
}

/// The one kind of handle whose blocks are known.
pub(crate) const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// After `cuMemExportToShareableHandle` has written a handle of type `kind` to `to`.
pub(crate) fn exported(handle: u64, to: usize, kind: u32) {
    if kind != DESCRIPTOR.0 {
        return;
    }
    // SAFETY: the driver has just written a descriptor there.
    let fd = unsafe { *(to as *const i32) };
    let Some((id, _)) = identity(fd) else {
        return;
    };
    with(|vmm| {
        let name = vmm.name(handle);
        let Some(physical) = vmm.handles.get_mut(&name) else {
            return;
        };
        let Some(meter) = Meter::on(physical.device) else {
            return;
        };
        let block = Block {
            id,
            device: meter.device,
            bytes: physical.bytes,
        };
        if physical.shared.is_none() && meter.account.share_own(block) {
            physical.shared = Some(id);
            *vmm.shared.entry(id).or_insert(0) += 1;
        }
    });
}

/// An import that is about to be made.
pub(crate) struct Import {
    meter: Meter,
    block: Block,
}

/// Lists what is about to be imported; `None`: it is unknown or there is no place, and nobody pays
/// here.
fn list(meter: &Meter, id: u64, size: Option<u64>) -> Result<Option<Block>, OverLimit> {
    with(|vmm| {
        let Some(block) = meter.account.find_shared(id).or(size.map(|bytes| Block {
            id,
            device: meter.device,
            bytes,
        })) else {
            return Ok(None);
        };
        let limit_bytes = Meter::on(block.device).map_or(NO_LIMIT, |meter| meter.limit_bytes());
        match vmm.shared.get_mut(&id) {
            Some(count) => *count += 1,
            None if meter.account.share(block, limit_bytes)? => {
                vmm.shared.insert(id, 1);
            }
            None => return Ok(None),
        }
        Ok(Some(block))
    })
}

/// Before a descriptor is imported: charges for its block. `None`: it is unknown, and nobody pays
/// here.
///
/// # Errors
/// What the program is answered.
pub(crate) fn import(fd: i32) -> Result<Option<Import>, CUresult> {
    // Where no context is current, the first device stands for the one that is not known yet.
    let meter = Meter::here().ok().or_else(|| Meter::of(0));
    let (Some(meter), Some((id, size))) = (meter, identity(fd)) else {
        return Ok(None);
    };
    let once = || list(&meter, id, size);
    let block = once()
        .or_else(|first| meter.reserve_again(first, once))
        .map_err(|over| meter.refuse(over, over.requested_bytes))?;
    Ok(block.map(|block| Import { meter, block }))
}

impl Import {
    /// The driver has answered with this handle, or not at all.
    pub(crate) fn made(self, handle: Option<u64>) {
        with(|vmm| {
            let Some(handle) = handle else {
                return vmm.unshare(&self.meter, self.block.id);
            };
            let physical = Physical {
                bytes: self.block.bytes,
                device: self.block.device,
                references: 1,
                mappings: 0,
                shared: Some(self.block.id),
            };
            match vmm.handles.get_mut(&handle) {
                // A driver that answers with a handle that the process has already: one more
                // reference to it.
                Some(known) if known.shared == physical.shared => {
                    known.references += 1;
                    vmm.unshare(&self.meter, self.block.id);
                }
                _ => {
                    vmm.handles.insert(handle, physical);
                }
            }
        });
    }
}

/// After `cuMemCreate`, of `bytes` that are charged on `device` already.
pub(crate) fn created(handle: u64, bytes: u64, device: usize) {
    let physical = Physical {
        bytes,
        device,
        references: 1,
        mappings: 0,
        shared: None,
    };
    with(|vmm| vmm.handles.insert(handle, physical));
}

/// After `cuMemRelease`.
pub(crate) fn released(handle: u64) {
    with(|vmm| {
        let name = vmm.name(handle);
        if let Some(physical) = vmm.handles.get_mut(&name) {
            physical.references = physical.references.saturating_sub(1);
            vmm.drop_if_unheld(name);
        }
    });
}

/// After `cuMemUnmap`.
pub(crate) fn unmapped(start: u64, end: u64) {
    with(|vmm| {
        let gone: Vec<_> = vmm
            .mappings
            .range(start..end)
            .map(|(at, (_, handle))| (*at, *handle))
            .collect();
        for (at, handle) in gone {
            vmm.mappings.remove(&at);
            if let Some(physical) = vmm.handles.get_mut(&handle) {
                physical.mappings = physical.mappings.saturating_sub(1);
                vmm.drop_if_unheld(handle);
            }
        }
    });
}

/// After `cuMemMap`.
pub(crate) fn mapped(start: u64, bytes: u64, handle: u64) {
    with(|vmm| {
        let name = vmm.name(handle);
        if let Some(physical) = vmm.handles.get_mut(&name) {
            physical.mappings += 1;
            vmm.mappings.insert(start, (bytes, name));
        }
    });
}

/// After `cuMemRetainAllocationHandle`: one more reference to what is mapped at `address`.
pub(crate) fn retained(handle: u64, address: u64) {
    with(|vmm| {
        let Some((start, (bytes, name))) = vmm
            .mappings
            .range(..=address)
            .next_back()
            .map(|(at, what)| (*at, *what))
        else {
            return;
        };
        if address - start >= bytes {
            return;
        }
        if let Some(physical) = vmm.handles.get_mut(&name) {
            physical.references += 1;
            if handle != name {
                vmm.aliases.insert(handle, name);
            }
        }
    });
}
