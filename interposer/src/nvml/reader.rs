//! An attachment for programs that read NVML and do not use the driver, such as a monitor started
//! inside a job: made at the first question about memory or processes, with the devices as NVML
//! knows them.

use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use channel::client::{ClientEnd, Liveness};
use channel::wire::DeviceId;
use channel::{ArbiterHalf, MAX_DEVICES, TenantPage};
use shim_ffi::nvml::{Device, GetCount, GetHandleByIndex};

use super::quota::uuid_of;
use super::{Helper, helper};
use crate::attachment::{client, job};
use crate::ground::{clock, process};

/// How long after a failure nobody tries again, in nanoseconds.
const AGAIN_NS: u64 = 500_000_000;

/// One attachment. Leaked: threads may be looking at it until the process ends.
struct Reader {
    end: ClientEnd,
    devices: Vec<DeviceId>,
}

static CURRENT: AtomicPtr<Reader> = AtomicPtr::new(std::ptr::null_mut());
/// When the next try is due, monotonic; all ones while somebody is at it.
static DUE_NS: AtomicU64 = AtomicU64::new(0);

/// Of which process the above are: see [`process::forks`].
static FORKS: AtomicU32 = AtomicU32::new(0);

/// In a forked child: as if never attached.
fn forget_parent() {
    let forks = process::forks();
    if FORKS.swap(forks, Ordering::AcqRel) != forks {
        job::forget();
        CURRENT.store(std::ptr::null_mut(), Ordering::Release);
        DUE_NS.store(0, Ordering::Release);
    }
}

/// The job's pages, and the device index in them, of the device of that UUID.
pub(super) fn index_of_uuid(
    uuid: &[u8; 16],
) -> Option<(&'static ArbiterHalf, &'static TenantPage, usize)> {
    let reader = current()?;
    let ordinal = reader.devices.iter().position(|id| id.uuid == *uuid)?;
    let index = (*reader.end.device_map.get(ordinal)?)?;
    Some((reader.end.arbiter, reader.end.tenant, usize::from(index)))
}

fn current() -> Option<&'static Reader> {
    forget_parent();
    let at = CURRENT.load(Ordering::Acquire);
    // SAFETY: null, or leaked by `attach` and never freed.
    if let Some(reader) = unsafe { at.as_ref() } {
        // A process that uses the driver comes back to the next arbiter by itself, with its memory;
        // nobody comes twice then.
        if client::current().is_some() || reader.end.arbiter_liveness() != Liveness::Gone {
            return Some(reader);
        }
    } else if client::current().is_some() {
        return None;
    }
    let now_ns = clock::now_ns();
    let due = DUE_NS.load(Ordering::Acquire);
    // SAFETY: as above.
    let old = unsafe { at.as_ref() };
    let mine = now_ns >= due
        && DUE_NS
            .compare_exchange(due, u64::MAX, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
    if !mine {
        return old;
    }
    let new = attach().map(|reader| &*Box::leak(Box::new(reader)));
    if let Some(reader) = new {
        if let Some(old) = old {
            old.end.retire();
        }
        CURRENT.store(std::ptr::from_ref(reader).cast_mut(), Ordering::Release);
    }
    DUE_NS.store(clock::now_ns() + AGAIN_NS, Ordering::Release);
    // What the last arbiter said holds until there is another.
    new.or(old)
}

fn attach() -> Option<Reader> {
    let devices = devices()?;
    let end = client::attach_reader(&devices)?;
    Some(Reader { end, devices })
}

/// The devices in NVML's order.
fn devices() -> Option<Vec<DeviceId>> {
    let (count, by_index) = (helper(Helper::Count), helper(Helper::ByIndex));
    if count.is_null() || by_index.is_null() {
        return None;
    }
    // SAFETY: the library's functions of these names.
    let (count, by_index) = unsafe {
        (
            std::mem::transmute::<*mut c_void, GetCount>(count),
            std::mem::transmute::<*mut c_void, GetHandleByIndex>(by_index),
        )
    };
    let mut devices: c_uint = 0;
    // SAFETY: the number outlives the call.
    if !unsafe { count(&raw mut devices) }.is_ok() {
        return None;
    }
    // CAST: a small number.
    let list = (0..devices.min(MAX_DEVICES as c_uint)).map(|index| {
        let mut handle: Device = std::ptr::null_mut();
        // SAFETY: the handle outlives the call.
        let found = unsafe { by_index(index, &raw mut handle) }.is_ok();
        DeviceId {
            // A device that cannot be asked keeps its place; nobody has its UUID.
            uuid: found.then(|| uuid_of(handle)).flatten().unwrap_or_default(),
            // The arbiter, which reads NVML as well, knows it already.
            total_bytes: super::hooks::physical_bytes(handle),
        }
    });
    Some(list.collect())
}
