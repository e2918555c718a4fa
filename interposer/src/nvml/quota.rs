//! What a job is shown of one device: its quota and its processes.

use std::ffi::{CStr, c_char, c_void};

use channel::{ArbiterHalf, NO_LIMIT, TenantPage};
use shim_ffi::nvml::{Device, GetUuid, MemoryV2, Process, uuid_bytes};

use super::reader;
use super::{Helper, helper};
use crate::attachment::client;

/// The quota that is in force on a device.
pub(super) struct Quota {
    arbiter: &'static ArbiterHalf,
    tenant: &'static TenantPage,
    /// Device index of the pages.
    device: usize,
    limit_bytes: u64,
    /// The PID namespace of this process, whose numbers the library may give; 0: not known.
    pid_namespace: u64,
}

impl Quota {
    /// The quota on the device behind an NVML handle; `None`: there is none, and the library's
    /// answers stand. The device is known by its UUID: NVML counts devices otherwise than the
    /// driver does.
    pub(super) fn of(handle: Device) -> Option<Self> {
        let uuid = uuid_of(handle)?;
        let of_driver = client::current().and_then(|attached| {
            let index = attached.index_of_uuid(&uuid)?;
            Some((attached.end.arbiter, attached.end.tenant, index))
        });
        let (arbiter, tenant, device) = of_driver.or_else(|| reader::index_of_uuid(&uuid))?;
        let limit_bytes = arbiter.device(device)?.limit_bytes();
        (limit_bytes != NO_LIMIT).then_some(Self {
            arbiter,
            tenant,
            device,
            limit_bytes,
            // Not kept: a child in a namespace of its own has another one.
            pid_namespace: rustix::fs::stat("/proc/self/ns/pid").map_or(0, |found| found.st_ino),
        })
    }

    /// Memory as the job has it, on a device that has `physical` bytes, `physical_free` of them
    /// free. The story is that of `cuMemGetInfo`: of the quota, what the device cannot give at
    /// present is neither free nor the job's; it is reserved.
    pub(super) fn memory(&self, physical: u64, physical_free: u64) -> MemoryV2 {
        let grant = self.arbiter.device(self.device);
        let (most, last_looked) = grant.map_or((0, NO_LIMIT), |grant| {
            (grant.physical_total_bytes(), grant.physical_free_bytes())
        });
        // The driver has a little less for programs than NVML counts.
        let most = if most == 0 { physical } else { most };
        let total = self.limit_bytes.min(physical).min(most);
        let used = self.tenant.used_bytes(self.device).min(total);
        let free = (total - used).min(physical_free).min(last_looked);
        MemoryV2 {
            version: 0,
            padding: 0,
            total,
            reserved: total - used - free,
            free,
            used,
        }
    }

    /// Whether process `pid` is one of the job's.
    pub(super) fn has(&self, pid: u32) -> bool {
        self.held_by(pid).is_some()
    }

    /// What process `pid` of the job holds here, in bytes; `None`: it is not of the job. In a PID
    /// namespace some drivers give its numbers, others those of the host.
    fn held_by(&self, pid: u32) -> Option<u64> {
        let grant = self.arbiter.device(self.device);
        // A page says what its processes write; no process has more than the device.
        let most = match grant.map_or(0, channel::DeviceGrant::physical_total_bytes) {
            0 => u64::MAX,
            physical => physical,
        };
        self.tenant
            .process_bytes(pid, self.pid_namespace, self.device)
            .map(|bytes| bytes.min(most))
    }

    /// Whether it is one of the job's; says what it holds.
    pub(super) fn is_own<T: Process>(&self, process: &mut T) -> bool {
        let held = self.held_by(process.pid());
        if let Some(bytes) = held {
            process.set_used_bytes(bytes);
        }
        held.is_some()
    }

    /// Keeps the job's own processes.
    pub(super) fn keep_own<T: Process>(&self, processes: &mut Vec<T>) {
        processes.retain_mut(|process| self.is_own(process));
    }
}

/// The UUID of a device, as NVML says.
pub(super) fn uuid_of(handle: Device) -> Option<[u8; 16]> {
    let ask = helper(Helper::Uuid);
    if ask.is_null() {
        return None;
    }
    let mut text: [c_char; 96] = [0; 96];
    // SAFETY: the library's function of this name; a handle that it has just accepted, and a buffer
    // with its length, of which the last byte stays zero.
    let status =
        unsafe { std::mem::transmute::<*mut c_void, GetUuid>(ask)(handle, text.as_mut_ptr(), 95) };
    // SAFETY: ends with a zero, as said above.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    status.is_ok().then(|| uuid_bytes(text.to_bytes()))?
}
