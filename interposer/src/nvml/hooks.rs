//! The functions themselves: the library answers first, and where it has succeeded and the job has
//! a quota on the device, its answer is made to agree with the quota.

use std::ffi::{c_uint, c_void};

use shim_ffi::nvml::*;

use super::quota::Quota;
use super::real;
use crate::attachment::verdict;
use crate::ground::thread::thread;

/// Entries that the library is given space for at first, and at most.
const PROCESSES: usize = 64;
const MOST_PROCESSES: usize = 1 << 16;

/// The library's function of that name, called.
macro_rules! real {
    ($symbol:ident($($arg:expr => $ty:ty),*)) => {{
        let at = real(Function::$symbol);
        if at.is_null() {
            Status::FUNCTION_NOT_FOUND
        } else {
            // SAFETY: the library's function of this name, which takes these parameters; the
            // caller's own arguments, or ours of the same meaning.
            unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($ty),*) -> Status>(at)($($arg),*)
            }
        }
    }};
}

/// Calls a change of the library's answer, unless it was the library itself that asked, in a call
/// of ours.
fn change(device: Device, fallback: Status, body: impl FnOnce(&Quota) -> Status) -> Status {
    if !fallback.is_ok() {
        return fallback;
    }
    let ours = thread().enter_nvml();
    if ours.again() {
        return fallback;
    }
    let changed = verdict::caught(verdict::NVML, || {
        let _errno = crate::ground::errno::Preserve::new();
        Quota::of(device).map_or(fallback, |quota| body(&quota))
    });
    changed.unwrap_or(fallback)
}

/// Whether reports of `device` are changed, for answers that have to be asked for in another way
/// then.
fn governed(device: Device) -> bool {
    let mut governed = false;
    change(device, Status::SUCCESS, |_| {
        governed = true;
        Status::SUCCESS
    });
    governed
}

fn memory(device: Device, to: *mut Memory) -> Status {
    let result = real!(nvmlDeviceGetMemoryInfo(device => Device, to => *mut Memory));
    change(device, result, |quota| {
        // SAFETY: the library has just written there.
        let to = unsafe { &mut *to };
        let shown = quota.memory(to.total, to.free);
        *to = Memory {
            total: shown.total,
            free: shown.free,
            // This version counts what is reserved.
            used: shown.used + shown.reserved,
        };
        result
    })
}

fn memory_v2(device: Device, to: *mut MemoryV2) -> Status {
    let result = real!(nvmlDeviceGetMemoryInfo_v2(device => Device, to => *mut MemoryV2));
    change(device, result, |quota| {
        // SAFETY: the library has just written there.
        let to = unsafe { &mut *to };
        let shown = quota.memory(to.total, to.free);
        *to = MemoryV2 {
            version: to.version,
            padding: to.padding,
            ..shown
        };
        result
    })
}

/// All memory of the device, in bytes; 0 where the library does not say.
pub(super) fn physical_bytes(device: Device) -> u64 {
    let mut memory = Memory::default();
    let to = &raw mut memory;
    let result = real!(nvmlDeviceGetMemoryInfo(device => Device, to => *mut Memory));
    if result.is_ok() { memory.total } else { 0 }
}

/// A list of processes: those of the job, each with what its account says.
fn processes<T: Process>(
    device: Device,
    count: *mut c_uint,
    list: *mut T,
    ask: impl Fn(*mut c_uint, *mut T) -> Status,
) -> Status {
    if count.is_null() || !governed(device) {
        return ask(count, list);
    }
    let mut all = vec![T::default(); PROCESSES];
    let found = loop {
        // CAST: at most MOST_PROCESSES.
        let mut found = all.len() as c_uint;
        let result = ask(&raw mut found, all.as_mut_ptr());
        if result == Status::INSUFFICIENT_SIZE && all.len() < MOST_PROCESSES {
            all.resize(all.len() * 2, T::default());
        } else if result.is_ok() {
            break found as usize;
        } else {
            return result;
        }
    };
    all.truncate(found);
    change(device, Status::SUCCESS, |quota| {
        quota.keep_own(&mut all);
        Status::SUCCESS
    });
    // SAFETY: not null, and the caller's to read and write.
    let space = unsafe { std::mem::replace(&mut *count, all.len() as c_uint) } as usize;
    if all.is_empty() {
        return Status::SUCCESS;
    }
    if list.is_null() || space < all.len() {
        return Status::INSUFFICIENT_SIZE;
    }
    // SAFETY: the caller says that its array has space for so many.
    unsafe { std::ptr::copy_nonoverlapping(all.as_ptr(), list, all.len()) };
    Status::SUCCESS
}

/// Keeps those of the first `count` elements of the caller's array that `keep` wants; returns how
/// many they are.
///
/// # Safety
/// `list` is null or points to `count` elements that may be written.
unsafe fn retain<T: Copy>(list: *mut T, count: c_uint, keep: impl Fn(&mut T) -> bool) -> c_uint {
    if list.is_null() {
        return count;
    }
    // SAFETY: as the caller promises.
    let list = unsafe { std::slice::from_raw_parts_mut(list, count as usize) };
    let mut kept = 0;
    for at in 0..list.len() {
        let mut element = list[at];
        if keep(&mut element) {
            list[kept] = element;
            kept += 1;
        }
    }
    // CAST: no more than there were.
    kept as c_uint
}

fn detail_list(device: Device, info: *mut ProcessDetailList) -> Status {
    let result = real!(nvmlDeviceGetRunningProcessDetailList(device => Device, info => *mut ProcessDetailList));
    change(device, result, |quota| {
        // SAFETY: the library has just written there, and to as many elements of the caller's array
        // as it says.
        unsafe {
            let info = &mut *info;
            info.count = retain(info.list, info.count, |process| quota.is_own(process));
        }
        result
    })
}

fn samples(device: Device, list: *mut ProcessSample, count: *mut c_uint, since_us: u64) -> Status {
    real!(nvmlDeviceGetProcessUtilization(
        device => Device, list => *mut ProcessSample, count => *mut c_uint, since_us => u64))
}

fn process_utilization(
    device: Device,
    list: *mut ProcessSample,
    count: *mut c_uint,
    since_us: u64,
) -> Status {
    let result = samples(device, list, count, since_us);
    change(device, result, |quota| {
        // SAFETY: the library has just written there, and to as many elements of the caller's array
        // as it says.
        let left = unsafe {
            *count = retain(list, *count, |sample| quota.has(sample.pid));
            *count
        };
        if left == 0 { Status::NOT_FOUND } else { result }
    })
}

fn processes_utilization(device: Device, info: *mut ProcessesUtilization) -> Status {
    let result = real!(nvmlDeviceGetProcessesUtilizationInfo(device => Device, info => *mut ProcessesUtilization));
    change(device, result, |quota| {
        // SAFETY: the library has just written there, and to as many elements of the caller's array
        // as it says.
        unsafe {
            let info = &mut *info;
            info.count = retain(info.list, info.count, |sample| quota.has(sample.pid));
        }
        result
    })
}

/// The device's rates, as far as they are this job's: never more than the device's.
fn rates(device: Device, to: *mut Utilization) -> Status {
    let result = real!(nvmlDeviceGetUtilizationRates(device => Device, to => *mut Utilization));
    change(device, result, |quota| {
        let mut list = vec![ProcessSample::default(); 4 * PROCESSES];
        // CAST: its own length.
        let mut count = list.len() as c_uint;
        // PERIOD: the library's own sample periods are up to a second long.
        let since_us = now_us().saturating_sub(1_000_000);
        match samples(device, list.as_mut_ptr(), &raw mut count, since_us) {
            Status::SUCCESS => list.truncate(count as usize),
            Status::NOT_FOUND => list.clear(),
            // Where processes are not distinguished, as on a MIG instance, the device's figure is
            // all there is.
            _ => return result,
        }
        list.retain(|sample| quota.has(sample.pid));
        // A process counts once, with its newest sample.
        list.sort_unstable_by_key(|sample| (sample.pid, std::cmp::Reverse(sample.time_us)));
        list.dedup_by_key(|sample| sample.pid);
        let sum = |percent: fn(&ProcessSample) -> c_uint| {
            let percents = list.iter().map(percent);
            percents.fold(0, c_uint::saturating_add)
        };
        // SAFETY: the library has just written there.
        let to = unsafe { &mut *to };
        to.gpu_percent = to.gpu_percent.min(sum(|sample| sample.sm_percent));
        to.memory_percent = to.memory_percent.min(sum(|sample| sample.memory_percent));
        result
    })
}

/// Time of day in microseconds, as the library stamps its samples.
fn now_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    // CAST: after 1970.
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

macro_rules! body {
    (nvmlDeviceGetMemoryInfo $device:ident $to:ident) => { memory($device, $to) };
    (nvmlDeviceGetMemoryInfo_v2 $device:ident $to:ident) => { memory_v2($device, $to) };
    (nvmlDeviceGetRunningProcessDetailList $device:ident $info:ident) => { detail_list($device, $info) };
    (nvmlDeviceGetUtilizationRates $device:ident $to:ident) => { rates($device, $to) };
    (nvmlDeviceGetProcessUtilization $device:ident $list:ident $count:ident $since:ident) => {
        process_utilization($device, $list, $count, $since)
    };
    (nvmlDeviceGetProcessesUtilizationInfo $device:ident $info:ident) => { processes_utilization($device, $info) };
    ($symbol:ident $device:ident $count:ident $list:ident) => {
        processes($device, $count, $list, |count, list| real!($symbol($device => Device, count => *mut c_uint, list => *mut _)))
    };
}

macro_rules! exports {
    ($($symbol:ident($($arg:ident: $ty:ty),*);)*) => {
        $(
            #[doc = concat!("`", stringify!($symbol), "` of NVML.")]
            ///
            /// # Safety
            /// As NVML says.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C-unwind" fn $symbol($($arg: $ty),*) -> Status {
                body!($symbol $($arg)*)
            }
        )*

        /// Our functions, by number.
        static OWN: [Own; super::COUNT] = [$(Own($symbol as *const c_void)),*];
    };
}
shim_ffi::nvml_table!(exports);

/// Address of a function of ours.
struct Own(*const c_void);

// SAFETY: the address of code; never written.
unsafe impl Sync for Own {}

/// Our function.
pub(super) fn own(function: Function) -> *mut c_void {
    // PANIC: the enumeration and the array expand from the same rows.
    OWN[function as usize].0.cast_mut()
}
