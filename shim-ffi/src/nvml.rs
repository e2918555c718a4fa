//! C ABI of the management library, as far as its reports are changed inside a job: structures of
//! `nvml.h`, and the table of the functions that a job's programs are answered by us.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::fmt;

/// Handle of a device.
pub type Device = *mut c_void;

/// SONAME of the library.
pub const SONAME: &CStr = c"libnvidia-ml.so.1";

/// `nvmlReturn_t`: a number, because a newer library sends ones that are not known here.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(pub c_int);

impl Status {
    /// `NVML_SUCCESS`.
    pub const SUCCESS: Self = Self(0);
    /// `NVML_ERROR_INVALID_ARGUMENT`.
    pub const INVALID_ARGUMENT: Self = Self(2);
    /// `NVML_ERROR_NOT_FOUND`.
    pub const NOT_FOUND: Self = Self(6);
    /// `NVML_ERROR_INSUFFICIENT_SIZE`.
    pub const INSUFFICIENT_SIZE: Self = Self(7);
    /// `NVML_ERROR_FUNCTION_NOT_FOUND`.
    pub const FUNCTION_NOT_FOUND: Self = Self(13);

    /// Whether it is success.
    pub const fn is_ok(self) -> bool {
        self.0 == 0
    }
}

/// `nvmlMemory_t`, in bytes. `used` counts what the driver keeps for itself.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// Not in use.
    pub free: u64,
    /// In use.
    pub used: u64,
}

/// `nvmlMemory_v2_t`, in bytes. `used` does not count `reserved`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryV2 {
    /// Size of the structure and 2 in the upper byte.
    pub version: c_uint,
    /// Nothing.
    pub padding: c_uint,
    /// All of it.
    pub total: u64,
    /// Neither free nor anybody's.
    pub reserved: u64,
    /// Not in use.
    pub free: u64,
    /// In use.
    pub used: u64,
}

/// What all versions of a process's entry have.
pub trait Process: Copy + Default {
    /// Process id, on the host.
    fn pid(&self) -> c_uint;
    /// Says what it holds, in bytes.
    fn set_used_bytes(&mut self, bytes: u64);
}

macro_rules! process {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $ty:ty,)* } $bytes:literal) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $name {
            $(#[doc = concat!("`", stringify!($field), "`.")] pub $field: $ty,)*
        }
        const _: () = assert!(size_of::<$name>() == $bytes);
        impl Process for $name {
            fn pid(&self) -> c_uint {
                self.pid
            }
            fn set_used_bytes(&mut self, bytes: u64) {
                self.used_bytes = bytes;
            }
        }
    };
}

process! {
    /// `nvmlProcessInfo_v1_t`.
    ProcessV1 { pid: c_uint, padding: c_uint, used_bytes: u64, } 16
}
process! {
    /// `nvmlProcessInfo_v2_t`, which the third versions of the calls take as well.
    ProcessV2 { pid: c_uint, padding: c_uint, used_bytes: u64, gpu_instance: c_uint, compute_instance: c_uint, } 24
}
process! {
    /// `nvmlProcessDetail_v1_t`.
    ProcessDetail {
        pid: c_uint, padding: c_uint, used_bytes: u64, gpu_instance: c_uint, compute_instance: c_uint, protected_bytes: u64,
    } 32
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ProcessDetailList {
    /// Size and version.
    pub version: c_uint,
    /// Which processes.
    pub mode: c_uint,
    /// Space in `list`, and then entries of it.
    pub count: c_uint,
    /// The caller's array.
    pub list: *mut ProcessDetail,
}
const _: () = assert!(size_of::<ProcessDetailList>() == 24);

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Utilization {
    /// Of the last sample period, percent in which a kernel ran.
    pub gpu_percent: c_uint,
    /// Of the last sample period, percent in which memory was read or written.
    pub memory_percent: c_uint,
}

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessSample {
    /// Process id, on the host.
    pub pid: c_uint,
    /// Nothing.
    pub padding: c_uint,
    /// Microseconds since 1970.
    pub time_us: u64,
    /// Of the multiprocessors.
    pub sm_percent: c_uint,
    /// Of the memory's interface.
    pub memory_percent: c_uint,
    /// Of the encoder.
    pub encoder_percent: c_uint,
    /// Of the decoder.
    pub decoder_percent: c_uint,
}
const _: () = assert!(size_of::<ProcessSample>() == 32);

/// `nvmlProcessUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessUtilization {
    /// Microseconds since 1970.
    pub time_us: u64,
    /// Process id, on the host.
    pub pid: c_uint,
    /// Of the multiprocessors, memory, encoder, decoder, JPEG and optical flow engines, in percent.
    pub percent: [c_uint; 6],
}
const _: () = assert!(size_of::<ProcessUtilization>() == 40);

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ProcessesUtilization {
    /// Size and version.
    pub version: c_uint,
    /// Space in `list`, and then entries of it.
    pub count: c_uint,
    /// Samples after this time are asked for.
    pub last_seen_us: u64,
    /// The caller's array.
    pub list: *mut ProcessUtilization,
}
const _: () = assert!(size_of::<ProcessesUtilization>() == 24);

/// Calls the macro `$callback` with every function that is answered by us inside a job: symbol and
/// parameters. They are those that `nvml.csv` marks `virtualise-report`, but for
/// `nvmlDeviceGetSamples` (docs/reference/memory.md says why).
#[macro_export]
macro_rules! nvml_table {
    ($callback:ident) => {
        $callback! {
            nvmlDeviceGetMemoryInfo(device: Device, to: *mut Memory);
            nvmlDeviceGetMemoryInfo_v2(device: Device, to: *mut MemoryV2);
            nvmlDeviceGetComputeRunningProcesses(device: Device, count: *mut c_uint, list: *mut ProcessV1);
            nvmlDeviceGetComputeRunningProcesses_v2(device: Device, count: *mut c_uint, list: *mut ProcessV2);
            nvmlDeviceGetComputeRunningProcesses_v3(device: Device, count: *mut c_uint, list: *mut ProcessV2);
            nvmlDeviceGetGraphicsRunningProcesses(device: Device, count: *mut c_uint, list: *mut ProcessV1);
            nvmlDeviceGetGraphicsRunningProcesses_v2(device: Device, count: *mut c_uint, list: *mut ProcessV2);
            nvmlDeviceGetGraphicsRunningProcesses_v3(device: Device, count: *mut c_uint, list: *mut ProcessV2);
            nvmlDeviceGetMPSComputeRunningProcesses(device: Device, count: *mut c_uint, list: *mut ProcessV1);
            nvmlDeviceGetMPSComputeRunningProcesses_v2(device: Device, count: *mut c_uint, list: *mut ProcessV2);
            nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Device, count: *mut c_uint, list: *mut ProcessV2);
            nvmlDeviceGetRunningProcessDetailList(device: Device, list: *mut ProcessDetailList);
            nvmlDeviceGetUtilizationRates(device: Device, to: *mut Utilization);
            nvmlDeviceGetProcessUtilization(device: Device, list: *mut ProcessSample, count: *mut c_uint, since_us: u64);
            nvmlDeviceGetProcessesUtilizationInfo(device: Device, info: *mut ProcessesUtilization);
        }
    };
}

macro_rules! functions {
    ($($symbol:ident($($arg:ident: $ty:ty),*);)*) => {
        /// A function that is answered by us.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Function {
            $(#[doc = concat!("`", stringify!($symbol), "`.")] $symbol),*
        }

        /// Every [`Function`], by its number.
        pub const FUNCTIONS: &[(Function, &str)] = &[$((Function::$symbol, stringify!($symbol))),*];
    };
}
nvml_table!(functions);

impl Function {
    /// The function of that name.
    pub fn from_name(name: &[u8]) -> Option<Self> {
        if !name.starts_with(b"nvmlDeviceGet") {
            return None;
        }
        let found = FUNCTIONS.iter().find(|(_, own)| own.as_bytes() == name);
        found.map(|(function, _)| *function)
    }
}

/// What is asked of the library to know a device by.
pub type GetUuid = unsafe extern "C" fn(Device, *mut c_char, c_uint) -> Status;
/// `nvmlDeviceGetCount_v2`.
pub type GetCount = unsafe extern "C" fn(*mut c_uint) -> Status;
/// `nvmlDeviceGetHandleByIndex_v2`.
pub type GetHandleByIndex = unsafe extern "C" fn(c_uint, *mut Device) -> Status;

/// The 16 bytes of `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, or of `MIG-...`.
pub fn uuid_bytes(text: &[u8]) -> Option<[u8; 16]> {
    let digits = text
        .strip_prefix(b"GPU-")
        .or_else(|| text.strip_prefix(b"MIG-"))?;
    uuid_digits(digits)
}

/// The same without what it begins with.
pub fn uuid_digits(digits: &[u8]) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let mut nibbles = 0;
    for digit in digits.iter().filter(|digit| **digit != b'-') {
        let value = char::from(*digit).to_digit(16)?;
        let byte = bytes.get_mut(nibbles / 2)?;
        // CAST: below 16.
        *byte = (*byte << 4) | value as u8;
        nibbles += 1;
    }
    (nibbles == 32).then_some(bytes)
}

/// A UUID as `nvidia-smi -L` prints it: `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
#[derive(Clone, Copy, Debug)]
pub struct UuidText(pub [u8; 16]);

impl fmt::Display for UuidText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn uuids_are_read_and_written() {
        let uuid = uuid_bytes(b"GPU-00010203-0405-0607-0809-0a0b0c0d0eFF");
        let expected = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255];
        assert_eq!(uuid, Some(expected));
        let text = std::format!("{}", UuidText(expected));
        assert_eq!(text, "GPU-00010203-0405-0607-0809-0a0b0c0d0eff");
        assert_eq!(uuid_digits(&text.as_bytes()[4..]), Some(expected));
        for none in [
            &b"GPU-0001"[..],
            b"00010203-0405-0607-0809-0a0b0c0d0e0f",
            b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f0",
            b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0g",
        ] {
            assert_eq!(uuid_bytes(none), None);
        }
    }

    #[test]
    fn functions_are_found_by_name() {
        let found = Function::from_name(b"nvmlDeviceGetMemoryInfo_v2");
        assert_eq!(found, Some(Function::nvmlDeviceGetMemoryInfo_v2));
        assert_eq!(Function::from_name(b"nvmlDeviceGetMemoryInf"), None);
        for (at, (function, _)) in FUNCTIONS.iter().enumerate() {
            assert_eq!(*function as usize, at);
        }
    }
}
