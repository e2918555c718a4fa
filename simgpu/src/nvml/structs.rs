//! Structures of the management library, as its C header lays them out on x86-64.

use std::ffi::{c_char, c_uint};

use crate::device_state::Usage;

/// Version word of [`MemoryInfoV2`]: its size and 2.
pub(super) const MEMORY_INFO_V2: u32 = 0x0200_0028;
/// Version word of [`ProcessesUtilization`].
pub(super) const PROCESSES_UTILIZATION_V1: u32 = 0x0100_0018;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryInfo {
    pub(super) total: u64,
    pub(super) free: u64,
    pub(super) used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryInfoV2 {
    pub(super) version: c_uint,
    pub(super) padding: c_uint,
    pub(super) total: u64,
    pub(super) reserved: u64,
    pub(super) free: u64,
    pub(super) used: u64,
}
const _: () = assert!(size_of::<MemoryInfoV2>() == MEMORY_INFO_V2 as usize & 0xff_ffff);

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessInfoV1 {
    pub(super) pid: c_uint,
    pub(super) padding: c_uint,
    pub(super) used_bytes: u64,
}

/// `nvmlProcessInfo_v2_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessInfoV2 {
    pub(super) pid: c_uint,
    pub(super) padding: c_uint,
    pub(super) used_bytes: u64,
    pub(super) gpu_instance: c_uint,
    pub(super) compute_instance: c_uint,
}
const _: () = assert!(size_of::<ProcessInfoV1>() == 16 && size_of::<ProcessInfoV2>() == 24);

impl From<Usage> for ProcessInfoV1 {
    fn from(usage: Usage) -> Self {
        Self {
            pid: usage.pid,
            padding: 0,
            used_bytes: usage.used_bytes,
        }
    }
}

impl From<Usage> for ProcessInfoV2 {
    fn from(usage: Usage) -> Self {
        const NO_INSTANCE: c_uint = c_uint::MAX;
        Self {
            pid: usage.pid,
            padding: 0,
            used_bytes: usage.used_bytes,
            gpu_instance: NO_INSTANCE,
            compute_instance: NO_INSTANCE,
        }
    }
}

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Utilization {
    pub(super) gpu_percent: c_uint,
    pub(super) memory_percent: c_uint,
}

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessSample {
    pub(super) pid: c_uint,
    pub(super) padding: c_uint,
    pub(super) time_us: u64,
    pub(super) sm_percent: c_uint,
    pub(super) memory_percent: c_uint,
    pub(super) encoder_percent: c_uint,
    pub(super) decoder_percent: c_uint,
}
const _: () = assert!(size_of::<ProcessSample>() == 32);

/// `nvmlProcessUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessUtilization {
    pub(super) time_us: u64,
    pub(super) pid: c_uint,
    pub(super) sm_percent: c_uint,
    pub(super) memory_percent: c_uint,
    pub(super) encoder_percent: c_uint,
    pub(super) decoder_percent: c_uint,
    pub(super) jpeg_percent: c_uint,
    pub(super) flow_percent: c_uint,
    pub(super) padding: c_uint,
}
const _: () = assert!(size_of::<ProcessUtilization>() == 40);

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ProcessesUtilization {
    pub(super) version: c_uint,
    pub(super) count: c_uint,
    pub(super) last_seen_us: u64,
    pub(super) list: *mut ProcessUtilization,
}
const _: () = assert!(size_of::<ProcessesUtilization>() == 24);

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PciInfo {
    pub(super) bus_id_legacy: [c_char; 16],
    pub(super) domain: c_uint,
    pub(super) bus: c_uint,
    pub(super) device: c_uint,
    pub(super) device_id: c_uint,
    pub(super) subsystem_id: c_uint,
    pub(super) bus_id: [c_char; 32],
}
const _: () = assert!(size_of::<PciInfo>() == 68);

/// `nvmlPciInfo_v2_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PciInfoV2 {
    pub(super) bus_id: [c_char; 16],
    pub(super) domain: c_uint,
    pub(super) bus: c_uint,
    pub(super) device: c_uint,
    pub(super) device_id: c_uint,
    pub(super) subsystem_id: c_uint,
    pub(super) reserved: [c_uint; 4],
}

/// `nvmlPciInfo_t` of the first version.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct PciInfoV1 {
    pub(super) bus_id: [c_char; 16],
    pub(super) domain: c_uint,
    pub(super) bus: c_uint,
    pub(super) device: c_uint,
    pub(super) device_id: c_uint,
}

/// `nvmlBAR1Memory_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryBar1 {
    pub(super) total: u64,
    pub(super) free: u64,
    pub(super) used: u64,
}

/// `nvmlEccErrorCounts_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct EccErrors {
    pub(super) l1: u64,
    pub(super) l2: u64,
    pub(super) memory: u64,
    pub(super) registers: u64,
}

/// `nvmlRowRemapperHistogramValues_t`: banks by how many spare rows they have left.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct RowsLeft {
    pub(super) most: c_uint,
    pub(super) high: c_uint,
    pub(super) partial: c_uint,
    pub(super) low: c_uint,
    pub(super) none: c_uint,
}

/// `nvmlViolationTime_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Violation {
    pub(super) reference_us: u64,
    pub(super) violation_ns: u64,
}

/// `nvmlTemperature_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Temperature {
    pub(super) version: c_uint,
    pub(super) sensor: c_uint,
    pub(super) degrees: i32,
}
const _: () = assert!(size_of::<Temperature>() == 12);

/// `nvmlFieldValue_t`, whose value is a union of 8 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FieldValue {
    pub(super) id: c_uint,
    pub(super) scope: c_uint,
    pub(super) time_us: i64,
    pub(super) latency_us: i64,
    pub(super) kind: c_uint,
    pub(super) status: super::Status,
    pub(super) value: u64,
}
const _: () = assert!(size_of::<FieldValue>() == 40);

impl FieldValue {
    /// To be asked for.
    pub fn of(id: c_uint) -> Self {
        Self {
            id,
            scope: 0,
            time_us: 0,
            latency_us: 0,
            kind: 0,
            status: super::Status::UNKNOWN,
            value: 0,
        }
    }

    /// What was answered.
    ///
    /// # Errors
    /// Why nothing was.
    pub fn answer(&self) -> Result<u64, super::Status> {
        match self.status {
            super::Status::SUCCESS => Ok(self.value),
            status => Err(status),
        }
    }
}

/// `nvmlProcessDetail_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessDetail {
    pub(super) pid: c_uint,
    pub(super) padding: c_uint,
    pub(super) used_bytes: u64,
    pub(super) gpu_instance: c_uint,
    pub(super) compute_instance: c_uint,
    pub(super) protected_bytes: u64,
}
const _: () = assert!(size_of::<ProcessDetail>() == 32);

impl From<Usage> for ProcessDetail {
    fn from(usage: Usage) -> Self {
        let process = ProcessInfoV2::from(usage);
        Self {
            pid: process.pid,
            padding: 0,
            used_bytes: process.used_bytes,
            gpu_instance: process.gpu_instance,
            compute_instance: process.compute_instance,
            protected_bytes: 0,
        }
    }
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ProcessDetailList {
    pub(super) version: c_uint,
    pub(super) mode: c_uint,
    pub(super) count: c_uint,
    pub(super) list: *mut ProcessDetail,
}
const _: () = assert!(size_of::<ProcessDetailList>() == 24);

/// `nvmlSystemDriverBranchInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DriverBranch {
    pub(super) version: c_uint,
    pub(super) branch: [c_char; 80],
}
const _: () = assert!(size_of::<DriverBranch>() == 84);
