//! The management library's side of the simulated devices: identities, memory, processes and
//! utilisation.
//!
//! It reads the same shared state as the driver and needs no context. Power, temperature and clocks
//! are made up from how busy a device is; nothing was measured. What a device of the data centre
//! cannot be asked for (fans, displays) is answered as that one does: not supported.

macro_rules! nvml {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of NVML.")]
        ///
        /// # Safety
        /// As NVML says: pointers are null or valid for what the call reads or writes through them.
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> Status {
            guard(move || $body)
        }
    )*};
}

mod fields;
mod readings;
mod structs;
mod tools;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering::*};

use shim_ffi::nvml::UuidText;

use crate::lock::Mutex;

use crate::clock;
use crate::device_state::{DeviceState, Usage};
use crate::entry::{Errno, In, Out, put_text};
use crate::observe;
use crate::profile::CUDA_VERSION;
use crate::unsupported;
pub use fields::*;
pub use readings::*;
pub use structs::*;
use structs::{MEMORY_INFO_V2, PROCESSES_UTILIZATION_V1, PciInfoV1};
pub use tools::*;

/// Status of an NVML call.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(pub c_uint);

impl Status {
    /// Success.
    pub const SUCCESS: Self = Self(0);
    /// Before `nvmlInit`.
    pub const UNINITIALIZED: Self = Self(1);
    /// A null pointer, an index or a handle that is none.
    pub const INVALID_ARGUMENT: Self = Self(2);
    /// Not simulated.
    pub const NOT_SUPPORTED: Self = Self(3);
    /// What the user may not do.
    pub const NO_PERMISSION: Self = Self(4);
    /// No such device.
    pub const NOT_FOUND: Self = Self(6);
    /// The buffer is too small; the count tells what is needed.
    pub const INSUFFICIENT_SIZE: Self = Self(7);
    /// The device cannot be opened.
    pub const DRIVER_NOT_LOADED: Self = Self(9);
    /// Nothing has happened in the time given.
    pub const TIMEOUT: Self = Self(10);
    /// The library lacks the function.
    pub const FUNCTION_NOT_FOUND: Self = Self(13);
    /// A structure of another version.
    pub const ARGUMENT_VERSION_MISMATCH: Self = Self(25);
    /// Anything else.
    pub const UNKNOWN: Self = Self(999);
}

type Done = Result<(), Status>;

/// A device's handle: its ordinal above this, never a pointer.
const FIRST_HANDLE: usize = 0x0051_b1e7_1000;
/// Utilisation is over the time since the last question, but not over less than this.
const WINDOW_NS: u64 = 100_000_000;
static USERS: AtomicU32 = AtomicU32::new(0);

/// Handle of a device.
pub type Device = *mut c_void;

fn device_state() -> Result<&'static DeviceState, Status> {
    if USERS.load(Acquire) == 0 {
        return Err(Status::UNINITIALIZED);
    }
    observe::device_state().map_err(|_| Status::DRIVER_NOT_LOADED)
}

/// What all times of the devices are multiplied by; 0: there is no state to tell.
pub fn dilation() -> u32 {
    device_state().map_or(0, |state| state.profile().dilation)
}

/// What a turn from one process to another costs on a device, in ns; 0: not known, or nothing.
pub fn turn_ns() -> u64 {
    device_state().map_or(0, |state| state.scaled(state.profile().switch_ns))
}

fn device(handle: Device) -> Result<(&'static DeviceState, usize), Status> {
    let device_state = device_state()?;
    let index = (handle as usize)
        .checked_sub(FIRST_HANDLE)
        .filter(|index| *index < device_state.profile().devices);
    Ok((device_state, index.ok_or(Status::INVALID_ARGUMENT)?))
}

fn handle(index: usize) -> Device {
    (FIRST_HANDLE + index) as Device
}

fn put<T>(to: Out<T>, value: T) -> Done {
    to.put(value).map_err(|_| Status::INVALID_ARGUMENT)
}

fn text(to: Out<c_char>, value: &str, capacity: c_uint) -> Done {
    if to.is_null() {
        return Err(Status::INVALID_ARGUMENT);
    }
    if value.len() >= capacity as usize {
        return Err(Status::INSUFFICIENT_SIZE);
    }
    put_text(to, value, capacity as c_int).map_err(|_| Status::INVALID_ARGUMENT)
}

fn guard(body: impl FnOnce() -> Done) -> Status {
    let _errno = Errno::new();
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Status::SUCCESS,
        Ok(Err(status)) => status,
        Err(_) => Status::UNKNOWN,
    }
}

fn bus_id(device_state: &DeviceState, index: usize) -> String {
    format!(
        "00000000:{:02X}:00.0",
        device_state.profile().pci_bus(index)
    )
}

fn init() -> Done {
    observe::device_state().map_err(|error| {
        eprintln!("sublet simgpu: {error}");
        Status::DRIVER_NOT_LOADED
    })?;
    USERS.fetch_add(1, AcqRel);
    Ok(())
}

/// Of the driver, which says it also before `nvmlInit`.
fn cuda_version() -> c_int {
    observe::device_state().map_or(CUDA_VERSION, |state| state.profile().cuda_version)
}

fn count(to: Out<c_uint>) -> Done {
    put(to, device_state()?.profile().devices as c_uint)
}

fn by_index(index: c_uint, to: Out<Device>) -> Done {
    if index as usize >= device_state()?.profile().devices {
        return Err(Status::INVALID_ARGUMENT);
    }
    put(to, handle(index as usize))
}

fn by_bus(id: In<c_char>, to: Out<Device>) -> Done {
    let device_state = device_state()?;
    let wanted = id
        .text()
        .map_err(|_| Status::INVALID_ARGUMENT)?
        .to_ascii_uppercase();
    let found = (0..device_state.profile().devices).find(|index| {
        // Domains are written with four or eight digits.
        bus_id(device_state, *index).trim_start_matches('0') == wanted.trim_start_matches('0')
    });
    put(to, handle(found.ok_or(Status::NOT_FOUND)?))
}

fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (to, byte) in out.iter_mut().zip(text.bytes().take(N - 1)) {
        *to = byte as c_char;
    }
    out
}

fn pci(device_state: &DeviceState, index: usize) -> PciInfo {
    let id = bus_id(device_state, index);
    PciInfo {
        bus_id_legacy: chars(id.trim_start_matches("0000")),
        domain: 0,
        bus: device_state.profile().pci_bus(index),
        device: 0,
        device_id: 0,
        subsystem_id: 0,
        bus_id: chars(&id),
    }
}

fn memory(device_state: &DeviceState, index: usize) -> MemoryInfoV2 {
    let profile = device_state.profile();
    let used = device_state.used(index);
    MemoryInfoV2 {
        version: MEMORY_INFO_V2,
        padding: 0,
        total: profile.memory_bytes,
        reserved: profile.driver_reserved_bytes,
        free: profile.usable_bytes().saturating_sub(used),
        used,
    }
}

/// Processes with a context.
fn with_context<T: From<Usage>>(device_state: &DeviceState, index: usize) -> Vec<T> {
    let usages = device_state.usages(index).into_iter();
    usages
        .filter(|usage| usage.contexts > 0)
        .map(T::from)
        .collect()
}

/// Processes with a context, as a list that the program has space for.
fn processes<T: From<Usage> + Copy>(of: Device, count: Out<c_uint>, list: Out<T>) -> Done {
    let (device_state, index) = device(of)?;
    let capacity = count.get().map_err(|_| Status::INVALID_ARGUMENT)? as usize;
    let found: Vec<T> = with_context(device_state, index);
    put(count, found.len() as c_uint)?;
    if found.is_empty() {
        return Ok(());
    }
    if capacity < found.len() || list.is_null() {
        return Err(Status::INSUFFICIENT_SIZE);
    }
    list.put_all(&found, capacity)
        .map_err(|_| Status::INVALID_ARGUMENT)
}

fn no_processes(of: Device, count: Out<c_uint>) -> Done {
    device(of)?;
    put(count, 0)
}

/// What was seen at the last question, to take differences from.
struct Seen {
    time_ns: u64,
    compute_ns: Vec<(u32, u64)>,
    percent: u32,
    per_process: Vec<(u32, u32)>,
}

static SEEN: Mutex<Vec<Option<Seen>>> = Mutex::new(Vec::new());

/// Percent of a window that were computed.
fn share(from_ns: u64, before_ns: u64, now_ns: u64, computed_ns: u64) -> u32 {
    let window_ns = now_ns.saturating_sub(from_ns).max(1);
    (computed_ns.saturating_sub(before_ns) * 100 / window_ns).min(100) as u32
}

/// Where nobody has asked yet, what the process notes by itself counts, while it is fresh.
fn recent_share(usage: &Usage, now_ns: u64) -> u32 {
    const FRESH_NS: u64 = 1_000_000_000;
    let (from_ns, before_ns) = usage.recent;
    if from_ns == 0 || now_ns.saturating_sub(usage.last_busy_ns) > FRESH_NS {
        return 0;
    }
    share(from_ns, before_ns, now_ns, usage.compute_ns)
}

/// Percent of the compute engine, in all and by process, since the last question; at the first
/// one, lately.
fn utilization(device_state: &DeviceState, index: usize) -> (u32, Vec<(u32, u32)>) {
    let mut seen = SEEN.lock();
    if seen.len() <= index {
        seen.resize_with(index + 1, || None);
    }
    let now_ns = clock::now_ns();
    if let Some(last) = &seen[index]
        && now_ns - last.time_ns < WINDOW_NS
    {
        return (last.percent, last.per_process.clone());
    }
    let usages = device_state.usages(index);
    let (mut percent, mut per_process) = (0, Vec::new());
    for usage in &usages {
        let share = match &seen[index] {
            Some(last) => {
                let before = last.compute_ns.iter().find(|(of, _)| *of == usage.pid);
                let before = before.map_or(0, |(_, ns)| *ns);
                share(last.time_ns, before, now_ns, usage.compute_ns)
            }
            None => recent_share(usage, now_ns),
        };
        per_process.push((usage.pid, share));
        percent = (percent + share).min(100);
    }
    let compute_ns = usages
        .iter()
        .map(|usage| (usage.pid, usage.compute_ns))
        .collect();
    seen[index] = Some(Seen {
        time_ns: now_ns,
        compute_ns,
        percent,
        per_process: per_process.clone(),
    });
    (percent, per_process)
}

/// The program as it was called, with its path where it was called by one.
fn process_name(pid: c_uint) -> Option<String> {
    let called = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let called = called.split(|byte| *byte == 0).next().unwrap_or_default();
    if !called.is_empty() {
        return Some(String::from_utf8_lossy(called).into_owned());
    }
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

fn now_us() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map(|since| since.as_micros() as u64).unwrap_or(0)
}

/// Milliwatts: idle at a tenth of the limit, busy at all of it.
fn power_mw(device_state: &DeviceState, index: usize) -> u32 {
    let limit = device_state.profile().power_limit_mw;
    limit / 10
        + (u64::from(limit) * 9 / 10 * u64::from(utilization(device_state, index).0) / 100) as u32
}

fn temperature(device_state: &DeviceState, index: usize) -> u32 {
    30 + utilization(device_state, index).0 * 40 / 100
}

fn architecture(device_state: &DeviceState) -> c_uint {
    match device_state.profile().architecture.as_str() {
        "turing" => 6,
        "ampere" => 7,
        "hopper" => 9,
        _ => c_uint::MAX,
    }
}

fn clock_mhz(device_state: &DeviceState, kind: c_uint) -> Result<c_uint, Status> {
    const MEMORY: c_uint = 2;
    match kind {
        MEMORY => Ok(device_state.profile().memory_clock_mhz as c_uint),
        0 | 1 | 3 => Ok(device_state.profile().clock_mhz as c_uint),
        _ => Err(Status::INVALID_ARGUMENT),
    }
}

/// Text of a status.
///
/// # Safety
/// None; the signature is the library's.
pub unsafe extern "C" fn nvmlErrorString(status: Status) -> *const c_char {
    let text: &CStr = match status {
        Status::SUCCESS => c"The operation was successful",
        Status::UNINITIALIZED => c"Uninitialized",
        Status::INVALID_ARGUMENT => c"Invalid Argument",
        Status::NOT_SUPPORTED => c"Not Supported",
        Status::NO_PERMISSION => c"Insufficient Permissions",
        Status::NOT_FOUND => c"Not Found",
        Status::INSUFFICIENT_SIZE => c"Insufficient Size",
        Status::DRIVER_NOT_LOADED => c"Driver Not Loaded",
        Status::TIMEOUT => c"Timeout",
        Status::FUNCTION_NOT_FOUND => c"Function Not Found",
        Status::ARGUMENT_VERSION_MISMATCH => c"Argument version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

/// What a function that is not written answers; counted.
pub fn unsupported(name: &'static str) -> Status {
    unsupported::named(name);
    Status::NOT_SUPPORTED
}

nvml! {
    fn nvmlInit() { init() }
    fn nvmlInit_v2() { init() }
    fn nvmlInitWithFlags(_flags: c_uint) { init() }

    fn nvmlShutdown() {
        let less = USERS.fetch_update(AcqRel, Acquire, |users| users.checked_sub(1));
        less.map(|_| ()).map_err(|_| Status::UNINITIALIZED)
    }

    fn nvmlSystemGetDriverVersion(to: Out<c_char>, capacity: c_uint) {
        text(to, &device_state()?.profile().driver_version, capacity)
    }

    fn nvmlSystemGetNVMLVersion(to: Out<c_char>, capacity: c_uint) {
        let nvml = format!("{}.{}", cuda_version() / 1000, device_state()?.profile().driver_version);
        text(to, &nvml, capacity)
    }

    fn nvmlSystemGetCudaDriverVersion(to: Out<c_int>) { put(to, cuda_version()) }
    fn nvmlSystemGetCudaDriverVersion_v2(to: Out<c_int>) { put(to, cuda_version()) }

    fn nvmlSystemGetProcessName(pid: c_uint, to: Out<c_char>, capacity: c_uint) {
        device_state()?;
        let name = process_name(pid).ok_or(Status::NOT_FOUND)?;
        put_text(to, &name, capacity as c_int).map_err(|_| Status::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetCount(to: Out<c_uint>) { count(to) }
    fn nvmlDeviceGetCount_v2(to: Out<c_uint>) { count(to) }
    fn nvmlDeviceGetHandleByIndex(index: c_uint, to: Out<Device>) { by_index(index, to) }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, to: Out<Device>) { by_index(index, to) }
    fn nvmlDeviceGetHandleByPciBusId(id: In<c_char>, to: Out<Device>) { by_bus(id, to) }
    fn nvmlDeviceGetHandleByPciBusId_v2(id: In<c_char>, to: Out<Device>) { by_bus(id, to) }

    fn nvmlDeviceGetHandleByUUID(uuid: In<c_char>, to: Out<Device>) {
        let device_state = device_state()?;
        let wanted = uuid.text().map_err(|_| Status::INVALID_ARGUMENT)?;
        let found = (0..device_state.profile().devices).find(|index| UuidText(device_state.profile().uuid(*index)).to_string() == wanted);
        put(to, handle(found.ok_or(Status::NOT_FOUND)?))
    }

    fn nvmlDeviceGetIndex(of: Device, to: Out<c_uint>) { put(to, device(of)?.1 as c_uint) }
    fn nvmlDeviceGetMinorNumber(of: Device, to: Out<c_uint>) { put(to, device(of)?.1 as c_uint) }

    fn nvmlDeviceGetName(of: Device, to: Out<c_char>, capacity: c_uint) {
        let (device_state, _) = device(of)?;
        text(to, &device_state.profile().name, capacity)
    }

    fn nvmlDeviceGetUUID(of: Device, to: Out<c_char>, capacity: c_uint) {
        let (device_state, index) = device(of)?;
        text(to, &UuidText(device_state.profile().uuid(index)).to_string(), capacity)
    }

    fn nvmlDeviceGetSerial(of: Device, to: Out<c_char>, capacity: c_uint) {
        let (_, index) = device(of)?;
        text(to, &format!("simulated-{index}"), capacity)
    }

    fn nvmlDeviceGetPciInfo(of: Device, to: Out<PciInfoV2>) {
        let (device_state, index) = device(of)?;
        let info = pci(device_state, index);
        // The first version ends before `reserved`.
        let first = PciInfoV1 {
            bus_id: info.bus_id_legacy, domain: info.domain, bus: info.bus, device: info.device, device_id: info.device_id,
        };
        // SAFETY: the program points to a structure of the first version, which is a prefix.
        put(unsafe { Out::new(to.raw().cast::<PciInfoV1>()) }, first)
    }

    fn nvmlDeviceGetPciInfo_v2(of: Device, to: Out<PciInfoV2>) {
        let (device_state, index) = device(of)?;
        let info = pci(device_state, index);
        put(to, PciInfoV2 {
            bus_id: info.bus_id_legacy, domain: info.domain, bus: info.bus, device: info.device, device_id: info.device_id,
            subsystem_id: info.subsystem_id, reserved: [0; 4],
        })
    }

    fn nvmlDeviceGetPciInfo_v3(of: Device, to: Out<PciInfo>) {
        let (device_state, index) = device(of)?;
        put(to, pci(device_state, index))
    }

    fn nvmlDeviceGetMemoryInfo(of: Device, to: Out<MemoryInfo>) {
        let (device_state, index) = device(of)?;
        let info = memory(device_state, index);
        // The first version counts what is reserved as used.
        put(to, MemoryInfo { total: info.total, free: info.free, used: info.used + info.reserved })
    }

    fn nvmlDeviceGetMemoryInfo_v2(of: Device, to: Out<MemoryInfoV2>) {
        let (device_state, index) = device(of)?;
        if to.get().map_err(|_| Status::INVALID_ARGUMENT)?.version != MEMORY_INFO_V2 {
            return Err(Status::ARGUMENT_VERSION_MISMATCH);
        }
        put(to, memory(device_state, index))
    }

    fn nvmlDeviceGetComputeRunningProcesses(of: Device, count: Out<c_uint>, list: Out<ProcessInfoV1>) {
        processes(of, count, list)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(of: Device, count: Out<c_uint>, list: Out<ProcessInfoV2>) {
        processes(of, count, list)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(of: Device, count: Out<c_uint>, list: Out<ProcessInfoV2>) {
        processes(of, count, list)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses(of: Device, count: Out<c_uint>, _list: *mut c_void) { no_processes(of, count) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(of: Device, count: Out<c_uint>, _list: *mut c_void) { no_processes(of, count) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(of: Device, count: Out<c_uint>, _list: *mut c_void) { no_processes(of, count) }
    fn nvmlDeviceGetMPSComputeRunningProcesses(of: Device, count: Out<c_uint>, _list: *mut c_void) { no_processes(of, count) }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(of: Device, count: Out<c_uint>, _list: *mut c_void) { no_processes(of, count) }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(of: Device, count: Out<c_uint>, _list: *mut c_void) { no_processes(of, count) }

    fn nvmlDeviceGetUtilizationRates(of: Device, to: Out<Utilization>) {
        let (device_state, index) = device(of)?;
        let (gpu_percent, _) = utilization(device_state, index);
        put(to, Utilization { gpu_percent, memory_percent: gpu_percent / 2 })
    }

    fn nvmlDeviceGetProcessUtilization(of: Device, list: Out<ProcessSample>, count: Out<c_uint>, _since_us: u64) {
        let (device_state, index) = device(of)?;
        let capacity = count.get().map_err(|_| Status::INVALID_ARGUMENT)? as usize;
        let time_us = now_us();
        let samples: Vec<_> = utilization(device_state, index)
            .1
            .into_iter()
            .map(|(pid, sm_percent)| ProcessSample { pid, time_us, sm_percent, ..ProcessSample::default() })
            .collect();
        put(count, samples.len() as c_uint)?;
        if samples.is_empty() {
            return Err(Status::NOT_FOUND);
        }
        if list.is_null() || capacity < samples.len() {
            return Err(Status::INSUFFICIENT_SIZE);
        }
        list.put_all(&samples, capacity).map_err(|_| Status::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetProcessesUtilizationInfo(of: Device, to: Out<ProcessesUtilization>) {
        let (device_state, index) = device(of)?;
        let mut info = to.get().map_err(|_| Status::INVALID_ARGUMENT)?;
        if info.version != PROCESSES_UTILIZATION_V1 {
            return Err(Status::ARGUMENT_VERSION_MISMATCH);
        }
        let capacity = info.count as usize;
        let time_us = now_us();
        let samples: Vec<_> = utilization(device_state, index)
            .1
            .into_iter()
            .map(|(pid, sm_percent)| ProcessUtilization { pid, time_us, sm_percent, ..ProcessUtilization::default() })
            .collect();
        info.count = samples.len() as c_uint;
        put(to, info)?;
        if info.list.is_null() || capacity < samples.len() {
            return Err(Status::INSUFFICIENT_SIZE);
        }
        // SAFETY: the program says that its array has `capacity` elements.
        unsafe { Out::new(info.list) }.put_all(&samples, capacity).map_err(|_| Status::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetPowerUsage(of: Device, to: Out<c_uint>) {
        let (device_state, index) = device(of)?;
        put(to, power_mw(device_state, index))
    }

    fn nvmlDeviceGetPowerManagementLimit(of: Device, to: Out<c_uint>) { put(to, device(of)?.0.profile().power_limit_mw) }
    fn nvmlDeviceGetPowerManagementDefaultLimit(of: Device, to: Out<c_uint>) { put(to, device(of)?.0.profile().power_limit_mw) }
    fn nvmlDeviceGetEnforcedPowerLimit(of: Device, to: Out<c_uint>) { put(to, device(of)?.0.profile().power_limit_mw) }

    fn nvmlDeviceGetTemperature(of: Device, sensor: c_uint, to: Out<c_uint>) {
        let (device_state, index) = device(of)?;
        if sensor != 0 {
            return Err(Status::INVALID_ARGUMENT);
        }
        put(to, temperature(device_state, index))
    }

    fn nvmlDeviceGetClockInfo(of: Device, kind: c_uint, to: Out<c_uint>) { put(to, clock_mhz(device(of)?.0, kind)?) }
    fn nvmlDeviceGetMaxClockInfo(of: Device, kind: c_uint, to: Out<c_uint>) { put(to, clock_mhz(device(of)?.0, kind)?) }

    fn nvmlDeviceGetPerformanceState(of: Device, to: Out<c_uint>) {
        device(of)?;
        put(to, 0)
    }

    fn nvmlDeviceGetPersistenceMode(of: Device, to: Out<c_uint>) {
        device(of)?;
        put(to, 1)
    }

    fn nvmlDeviceGetComputeMode(of: Device, to: Out<c_uint>) {
        device(of)?;
        put(to, 0)
    }

    fn nvmlDeviceSetComputeMode(of: Device, mode: c_uint) {
        const EXCLUSIVE_PROCESS: c_uint = 3;
        device(of)?;
        // The device is shared: its mode stays, also where root asks.
        Err(if mode > EXCLUSIVE_PROCESS { Status::INVALID_ARGUMENT } else { Status::NO_PERMISSION })
    }

    fn nvmlDeviceGetModuleId(of: Device, to: Out<c_uint>) {
        let (_, index) = device(of)?;
        // CAST: there are 16 devices at most.
        put(to, index as c_uint)
    }

    fn nvmlDeviceGetEccMode(of: Device, current: Out<c_uint>, pending: Out<c_uint>) {
        device(of)?;
        put(current, 1)?;
        put(pending, 1)
    }

    fn nvmlDeviceGetMigMode(of: Device, current: Out<c_uint>, pending: Out<c_uint>) {
        device(of)?;
        put(current, 0)?;
        put(pending, 0)
    }

    fn nvmlDeviceIsMigDeviceHandle(of: Device, to: Out<c_uint>) {
        device(of)?;
        put(to, 0)
    }

    fn nvmlDeviceGetMaxMigDeviceCount(of: Device, to: Out<c_uint>) {
        device(of)?;
        put(to, 0)
    }

    fn nvmlDeviceGetCudaComputeCapability(of: Device, major: Out<c_int>, minor: Out<c_int>) {
        let (device_state, _) = device(of)?;
        put(major, device_state.profile().major)?;
        put(minor, device_state.profile().minor)
    }

    fn nvmlDeviceGetArchitecture(of: Device, to: Out<c_uint>) { put(to, architecture(device(of)?.0)) }
    fn nvmlDeviceGetMemoryBusWidth(of: Device, to: Out<c_uint>) { put(to, device(of)?.0.profile().memory_bus_bits as c_uint) }
    fn nvmlDeviceGetNumGpuCores(of: Device, to: Out<c_uint>) { put(to, device(of)?.0.profile().multiprocessors as c_uint * 128) }

    fn nvmlDeviceGetBrand(of: Device, to: Out<c_uint>) {
        device(of)?;
        put(to, 0)
    }
}
