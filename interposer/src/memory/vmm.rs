//! Physical memory by handle: `cuMemCreate`, references, mappings.
//!
//! Physical memory goes back to the device when the last handle reference *and* the last mapping are gone; so does the
//! charge. It belongs to the device that the properties name, not to the caller's. Imported handles are somebody
//! else's memory: the exporter is charged, once.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use shim_ffi::*;

use super::Meter;
use crate::{client, real};

#[derive(Default)]
struct Vmm {
    handles: HashMap<u64, Physical>,
    /// Mapped ranges by start: length and handle.
    mappings: BTreeMap<u64, (u64, u64)>,
    /// Other numbers under which the driver knows a handle.
    aliases: HashMap<u64, u64>,
}

struct Physical {
    bytes: u64,
    ordinal: i32,
    references: u64,
    mappings: u64,
}

static VMM: Mutex<Option<Vmm>> = Mutex::new(None);

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

    /// Takes the handle out if nothing holds it any more; returns what is to be given back.
    fn drop_if_unheld(&mut self, handle: u64) -> Option<(i32, u64)> {
        let physical = self.handles.get(&handle)?;
        if physical.references != 0 || physical.mappings != 0 {
            return None;
        }
        let physical = self.handles.remove(&handle)?;
        self.aliases.retain(|_, name| *name != handle);
        Some((physical.ordinal, physical.bytes))
    }
}

fn give_back(freed: Option<(i32, u64)>) {
    if let Some((ordinal, bytes)) = freed
        && let Some(meter) = Meter::of(ordinal)
    {
        meter.release(bytes);
    }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: u64,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real::cuMemCreate(handle, bytes, properties, flags) };
    if properties.is_null() {
        return call();
    }
    // SAFETY: not null; the driver is about to read the same structure.
    let location = unsafe { (*properties).location };
    if location.r#type != CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE {
        return call();
    }
    let Some(meter) = Meter::of(location.id) else {
        return call();
    };
    if let Err(refusal) = meter.reserve(bytes as u64, bytes as u64) {
        return refusal;
    }
    let result = call();
    if result.is_ok() {
        // SAFETY: the driver has written the handle.
        let handle = unsafe { (*handle).0 };
        let physical = Physical {
            bytes: bytes as u64,
            ordinal: location.id,
            references: 1,
            mappings: 0,
        };
        with(|vmm| vmm.handles.insert(handle, physical));
    } else {
        meter.release(bytes as u64);
    }
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> CUresult {
    // SAFETY: the caller's own argument.
    let result = unsafe { real::cuMemRelease(handle) };
    if result.is_ok() && client::current().is_some() {
        give_back(with(|vmm| {
            let name = vmm.name(handle.0);
            let physical = vmm.handles.get_mut(&name)?;
            physical.references = physical.references.saturating_sub(1);
            vmm.drop_if_unheld(name)
        }));
    }
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemUnmap(start: CUdeviceptr, bytes: usize) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real::cuMemUnmap(start, bytes) };
    if result.is_ok() && client::current().is_some() {
        let end = start.0.saturating_add(bytes as u64);
        let freed: Vec<_> = with(|vmm| {
            let gone: Vec<_> = vmm
                .mappings
                .range(start.0..end)
                .map(|(at, (_, handle))| (*at, *handle))
                .collect();
            gone.into_iter()
                .filter_map(|(at, handle)| {
                    vmm.mappings.remove(&at);
                    let physical = vmm.handles.get_mut(&handle)?;
                    physical.mappings = physical.mappings.saturating_sub(1);
                    vmm.drop_if_unheld(handle)
                })
                .collect()
        });
        freed.into_iter().for_each(|freed| give_back(Some(freed)));
    }
    result
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
