//! What monitors read beside memory and processes: clocks, links, energy, errors, limits.
//!
//! A device without faults: no errors, nothing retired, no throttling. Energy and traffic follow
//! from how long the engines were busy.

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_void};

use super::{
    Device, EccErrors, MemoryBar1, ProcessDetail, ProcessDetailList, RowsLeft, Status, Temperature,
    Violation, architecture, clock_mhz, device, guard, now_us, power_mw, put, temperature, text,
    utilization, with_context,
};
use crate::clock;
use crate::device_state::{CopyEngine, DeviceState};
use crate::entry::Out;
use crate::lock::Mutex;
use crate::profile::MAX_DEVICES;

/// Version words of structures: their size and 1.
const TEMPERATURE_V1: c_uint = 0x0100_000c;
const PROCESS_DETAILS_V1: c_uint = 0x0100_0018;
/// Sensor periods are said to be this long.
const PERIOD_US: c_uint = 100_000;
/// Traffic is over the time since the last question, but not over less than this.
const WINDOW_NS: u64 = 20_000_000;
const IDLE: u64 = 1;

/// Degrees at which a device shuts down, slows down, and what its memory and itself should stay
/// below.
const THRESHOLDS: [c_uint; 4] = [95, 92, 95, 87];

/// Millijoules since the device came to be, of which nobody knows more than that it never goes
/// back: idle from the boot of the host on, and what its engine was busy.
pub(super) fn energy_mj(device_state: &DeviceState, index: usize) -> u64 {
    let limit_mw = u128::from(device_state.profile().power_limit_mw);
    let idle = limit_mw / 10 * u128::from(clock::now_ns());
    let busy = limit_mw * 9 / 10 * u128::from(device_state.busy_ns(index));
    // CAST: a century at a kilowatt.
    ((idle + busy) / 1_000_000_000) as u64
}

/// Bytes that a copy engine has moved, at the link's rate.
pub(super) fn moved_bytes(device_state: &DeviceState, index: usize, engine: CopyEngine) -> u64 {
    let profile = device_state.profile();
    let rate = match engine {
        CopyEngine::In => profile.copy_pinned_gbps,
        CopyEngine::Out => profile.copy_out_pinned_gbps,
    };
    // CAST: rounding is meant.
    (device_state.moved_ns(index, engine) as f64 * rate) as u64
}

/// What was seen of a copy engine at the last question.
#[derive(Clone, Copy)]
struct Traffic {
    time_ns: u64,
    bytes: u64,
    kib_per_second: u64,
}

static TRAFFIC: Mutex<[[Option<Traffic>; 2]; MAX_DEVICES]> = Mutex::new([[None; 2]; MAX_DEVICES]);

fn traffic(device_state: &DeviceState, index: usize, engine: CopyEngine) -> u64 {
    let bytes = moved_bytes(device_state, index, engine);
    let now_ns = clock::now_ns();
    let mut all = TRAFFIC.lock();
    let seen = &mut all[index][engine as usize];
    if let Some(last) = seen
        && now_ns - last.time_ns < WINDOW_NS
    {
        return last.kib_per_second;
    }
    let kib_per_second = seen.map_or(0, |last| {
        let moved = u128::from(bytes.saturating_sub(last.bytes));
        // CAST: below any link's rate.
        (moved * 1_000_000_000 / 1024 / u128::from(now_ns - last.time_ns)) as u64
    });
    *seen = Some(Traffic {
        time_ns: now_ns,
        bytes,
        kib_per_second,
    });
    kib_per_second
}

fn link_generation(device_state: &DeviceState) -> c_uint {
    match architecture(device_state) {
        6 => 3,
        7 => 4,
        _ => 5,
    }
}

/// Megabits of one link and direction, as the generation has them.
fn link_mbps(device_state: &DeviceState) -> c_uint {
    match link_generation(device_state) {
        3 => 8_000,
        4 => 16_000,
        _ => 32_000,
    }
}

fn zero(of: Device, to: Out<c_uint>) -> Result<(), Status> {
    device(of)?;
    put(to, 0)
}

/// An engine that is there and that nothing uses.
fn unused(of: Device, to: Out<c_uint>, period: Out<c_uint>) -> Result<(), Status> {
    zero(of, to)?;
    put(period, PERIOD_US)
}

/// A list with one element, in space for `count`.
fn one<T: Copy>(count: Out<c_uint>, list: Out<T>, value: T) -> Result<(), Status> {
    let capacity = count.get().map_err(|_| Status::INVALID_ARGUMENT)?;
    put(count, 1)?;
    if capacity < 1 || list.is_null() {
        return Err(Status::INSUFFICIENT_SIZE);
    }
    put(list, value)
}

fn none(of: Device, count: Out<c_uint>) -> Result<(), Status> {
    zero(of, count)
}

/// Sets the first `bits` of a set of `words` words.
fn bits(words: c_uint, to: Out<c_ulong>, bits: usize) -> Result<(), Status> {
    if words == 0 {
        return Err(Status::INVALID_ARGUMENT);
    }
    let of_word = c_ulong::BITS as usize;
    let set: Vec<c_ulong> = (0..words as usize)
        .map(|word| match bits.saturating_sub(word * of_word) {
            left if left >= of_word => c_ulong::MAX,
            left => (1 << left) - 1,
        })
        .collect();
    to.put_all(&set, set.len())
        .map_err(|_| Status::INVALID_ARGUMENT)
}

fn processors() -> usize {
    // SAFETY: sysconf has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) }).unwrap_or(1)
}

fn no_errors(of: Device, kind: c_uint, counter: c_uint, to: Out<u64>) -> Result<(), Status> {
    device(of)?;
    if kind > 1 || counter > 1 {
        return Err(Status::INVALID_ARGUMENT);
    }
    put(to, 0)
}

fn reasons(of: Device, to: Out<u64>) -> Result<(), Status> {
    let (device_state, index) = device(of)?;
    let idle = utilization(device_state, index).0 == 0;
    put(to, if idle { IDLE } else { 0 })
}

fn supported_reasons(of: Device, to: Out<u64>) -> Result<(), Status> {
    device(of)?;
    put(to, IDLE)
}

fn constraints_mw(device_state: &DeviceState) -> (c_uint, c_uint) {
    let limit = device_state.profile().power_limit_mw;
    (limit / 2, limit)
}

nvml! {
    fn nvmlDeviceGetTotalEnergyConsumption(of: Device, to: Out<u64>) {
        let (device_state, index) = device(of)?;
        put(to, energy_mj(device_state, index))
    }

    fn nvmlDeviceGetPcieThroughput(of: Device, counter: c_uint, to: Out<c_uint>) {
        let (device_state, index) = device(of)?;
        let engine = match counter {
            0 => CopyEngine::Out,
            1 => CopyEngine::In,
            _ => return Err(Status::INVALID_ARGUMENT),
        };
        // CAST: below any link's rate.
        put(to, traffic(device_state, index, engine) as c_uint)
    }

    fn nvmlDeviceGetCurrPcieLinkGeneration(of: Device, to: Out<c_uint>) { put(to, link_generation(device(of)?.0)) }
    fn nvmlDeviceGetMaxPcieLinkGeneration(of: Device, to: Out<c_uint>) { put(to, link_generation(device(of)?.0)) }
    fn nvmlDeviceGetGpuMaxPcieLinkGeneration(of: Device, to: Out<c_uint>) { put(to, link_generation(device(of)?.0)) }
    fn nvmlDeviceGetPcieSpeed(of: Device, to: Out<c_uint>) { put(to, link_mbps(device(of)?.0)) }

    fn nvmlDeviceGetPcieLinkMaxSpeed(of: Device, to: Out<c_uint>) {
        // Numbered as the generations, from 1.
        put(to, link_generation(device(of)?.0))
    }

    fn nvmlDeviceGetCurrPcieLinkWidth(of: Device, to: Out<c_uint>) {
        device(of)?;
        put(to, 16)
    }

    fn nvmlDeviceGetMaxPcieLinkWidth(of: Device, to: Out<c_uint>) {
        device(of)?;
        put(to, 16)
    }

    fn nvmlDeviceGetPcieReplayCounter(of: Device, to: Out<c_uint>) { zero(of, to) }

    fn nvmlDeviceGetBusType(of: Device, to: Out<c_uint>) {
        const PCIE: c_uint = 2;
        device(of)?;
        put(to, PCIE)
    }

    fn nvmlDeviceGetBAR1MemoryInfo(of: Device, to: Out<MemoryBar1>) {
        let bytes = device(of)?.0.profile().memory_bytes;
        let total = if bytes < 32 << 30 { 256 << 20 } else { bytes.next_power_of_two() };
        let used = 1 << 20;
        put(to, MemoryBar1 { total, free: total - used, used })
    }

    fn nvmlDeviceGetApplicationsClock(of: Device, kind: c_uint, to: Out<c_uint>) { put(to, clock_mhz(device(of)?.0, kind)?) }
    fn nvmlDeviceGetDefaultApplicationsClock(of: Device, kind: c_uint, to: Out<c_uint>) { put(to, clock_mhz(device(of)?.0, kind)?) }
    fn nvmlDeviceGetMaxCustomerBoostClock(of: Device, kind: c_uint, to: Out<c_uint>) { put(to, clock_mhz(device(of)?.0, kind)?) }

    fn nvmlDeviceGetClock(of: Device, kind: c_uint, id: c_uint, to: Out<c_uint>) {
        let (device_state, _) = device(of)?;
        if id > 3 {
            return Err(Status::INVALID_ARGUMENT);
        }
        put(to, clock_mhz(device_state, kind)?)
    }

    fn nvmlDeviceGetSupportedMemoryClocks(of: Device, count: Out<c_uint>, list: Out<c_uint>) {
        one(count, list, clock_mhz(device(of)?.0, 2)?)
    }

    fn nvmlDeviceGetSupportedGraphicsClocks(of: Device, memory_mhz: c_uint, count: Out<c_uint>, list: Out<c_uint>) {
        let (device_state, _) = device(of)?;
        if memory_mhz != clock_mhz(device_state, 2)? {
            return Err(Status::NOT_FOUND);
        }
        one(count, list, clock_mhz(device_state, 0)?)
    }

    fn nvmlDeviceGetCurrentClocksEventReasons(of: Device, to: Out<u64>) { reasons(of, to) }
    fn nvmlDeviceGetCurrentClocksThrottleReasons(of: Device, to: Out<u64>) { reasons(of, to) }
    fn nvmlDeviceGetSupportedClocksEventReasons(of: Device, to: Out<u64>) { supported_reasons(of, to) }
    fn nvmlDeviceGetSupportedClocksThrottleReasons(of: Device, to: Out<u64>) { supported_reasons(of, to) }

    fn nvmlDeviceGetPowerState(of: Device, to: Out<c_uint>) { zero(of, to) }

    fn nvmlDeviceGetViolationStatus(of: Device, policy: c_uint, to: Out<Violation>) {
        device(of)?;
        if !matches!(policy, 0..=5 | 10 | 11) {
            return Err(Status::INVALID_ARGUMENT);
        }
        put(to, Violation { reference_us: now_us(), violation_ns: 0 })
    }

    fn nvmlDeviceGetPowerManagementMode(of: Device, to: Out<c_uint>) {
        device(of)?;
        put(to, 1)
    }

    fn nvmlDeviceGetPowerManagementLimitConstraints(of: Device, least: Out<c_uint>, most: Out<c_uint>) {
        let (from, upto) = constraints_mw(device(of)?.0);
        put(least, from)?;
        put(most, upto)
    }

    fn nvmlDeviceGetPowerSource(of: Device, to: Out<c_uint>) { zero(of, to) }

    fn nvmlDeviceGetTemperatureThreshold(of: Device, which: c_uint, to: Out<c_uint>) {
        device(of)?;
        let found = THRESHOLDS.get(which as usize);
        put(to, *found.ok_or(Status::NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetTemperatureV(of: Device, to: Out<Temperature>) {
        let (device_state, index) = device(of)?;
        let mut reading = to.get().map_err(|_| Status::INVALID_ARGUMENT)?;
        if reading.version != TEMPERATURE_V1 {
            return Err(Status::ARGUMENT_VERSION_MISMATCH);
        }
        if reading.sensor != 0 {
            return Err(Status::INVALID_ARGUMENT);
        }
        // CAST: two digits.
        reading.degrees = temperature(device_state, index) as c_int;
        put(to, reading)
    }

    fn nvmlDeviceGetCpuAffinity(of: Device, words: c_uint, to: Out<c_ulong>) {
        device(of)?;
        bits(words, to, processors())
    }

    fn nvmlDeviceGetCpuAffinityWithinScope(of: Device, words: c_uint, to: Out<c_ulong>, _scope: c_uint) {
        device(of)?;
        bits(words, to, processors())
    }

    fn nvmlDeviceGetMemoryAffinity(of: Device, words: c_uint, to: Out<c_ulong>, _scope: c_uint) {
        device(of)?;
        bits(words, to, 1)
    }

    fn nvmlDeviceGetTopologyCommonAncestor(of: Device, other: Device, to: Out<c_uint>) {
        const INTERNAL: c_uint = 0;
        const HOST_BRIDGE: c_uint = 30;
        let ((_, one), (_, other)) = (device(of)?, device(other)?);
        put(to, if one == other { INTERNAL } else { HOST_BRIDGE })
    }

    fn nvmlDeviceGetP2PStatus(of: Device, other: Device, capability: c_uint, to: Out<c_uint>) {
        const NOT_SUPPORTED: c_uint = 5;
        device(of)?;
        device(other)?;
        // Reading and writing work; there is no NVLink, and nothing is atomic.
        put(to, if matches!(capability, 0 | 1 | 4) { 0 } else { NOT_SUPPORTED })
    }

    fn nvmlDeviceOnSameBoard(of: Device, other: Device, to: Out<c_int>) {
        let ((_, one), (_, other)) = (device(of)?, device(other)?);
        put(to, c_int::from(one == other))
    }

    fn nvmlDeviceGetVirtualizationMode(of: Device, to: Out<c_uint>) { zero(of, to) }
    fn nvmlDeviceGetDisplayMode(of: Device, to: Out<c_uint>) { zero(of, to) }
    fn nvmlDeviceGetDisplayActive(of: Device, to: Out<c_uint>) { zero(of, to) }
    fn nvmlDeviceGetMultiGpuBoard(of: Device, to: Out<c_uint>) { zero(of, to) }
    fn nvmlDeviceGetAccountingMode(of: Device, to: Out<c_uint>) { zero(of, to) }
    fn nvmlDeviceGetAccountingBufferSize(of: Device, to: Out<c_uint>) { zero(of, to) }
    fn nvmlDeviceGetAccountingPids(of: Device, count: Out<c_uint>, _list: *mut c_uint) { none(of, count) }
    fn nvmlDeviceGetNumFans(of: Device, to: Out<c_uint>) { zero(of, to) }

    fn nvmlDeviceGetBoardId(of: Device, to: Out<c_uint>) {
        let (device_state, index) = device(of)?;
        put(to, device_state.profile().pci_bus(index) << 8)
    }

    fn nvmlDeviceGetVbiosVersion(of: Device, to: Out<c_char>, capacity: c_uint) {
        device(of)?;
        text(to, "simulated", capacity)
    }

    fn nvmlDeviceGetGspFirmwareMode(of: Device, enabled: Out<c_uint>, default: Out<c_uint>) {
        zero(of, enabled)?;
        put(default, 0)
    }

    fn nvmlDeviceGetEncoderUtilization(of: Device, to: Out<c_uint>, period: Out<c_uint>) { unused(of, to, period) }
    fn nvmlDeviceGetDecoderUtilization(of: Device, to: Out<c_uint>, period: Out<c_uint>) { unused(of, to, period) }
    fn nvmlDeviceGetJpgUtilization(of: Device, to: Out<c_uint>, period: Out<c_uint>) { unused(of, to, period) }
    fn nvmlDeviceGetOfaUtilization(of: Device, to: Out<c_uint>, period: Out<c_uint>) { unused(of, to, period) }

    fn nvmlDeviceGetEncoderStats(of: Device, sessions: Out<c_uint>, frames: Out<c_uint>, latency: Out<c_uint>) {
        zero(of, sessions)?;
        put(frames, 0)?;
        put(latency, 0)
    }

    fn nvmlDeviceGetEncoderSessions(of: Device, count: Out<c_uint>, _list: *mut c_void) { none(of, count) }

    fn nvmlDeviceGetFBCStats(of: Device, to: Out<[c_uint; 3]>) {
        device(of)?;
        put(to, [0; 3])
    }

    fn nvmlDeviceGetFBCSessions(of: Device, count: Out<c_uint>, _list: *mut c_void) { none(of, count) }

    fn nvmlDeviceGetDefaultEccMode(of: Device, to: Out<c_uint>) {
        device(of)?;
        put(to, 1)
    }

    fn nvmlDeviceGetTotalEccErrors(of: Device, kind: c_uint, counter: c_uint, to: Out<u64>) { no_errors(of, kind, counter, to) }

    fn nvmlDeviceGetMemoryErrorCounter(of: Device, kind: c_uint, counter: c_uint, location: c_uint, to: Out<u64>) {
        if location > 7 {
            return Err(Status::INVALID_ARGUMENT);
        }
        no_errors(of, kind, counter, to)
    }

    fn nvmlDeviceGetDetailedEccErrors(of: Device, _kind: c_uint, _counter: c_uint, to: Out<EccErrors>) {
        device(of)?;
        put(to, EccErrors::default())
    }

    fn nvmlDeviceGetRemappedRows(of: Device, correctable: Out<c_uint>, others: Out<c_uint>, pending: Out<c_uint>, failed: Out<c_uint>) {
        for to in [correctable, others, pending, failed] {
            zero(of, to)?;
        }
        Ok(())
    }

    fn nvmlDeviceGetRowRemapperHistogram(of: Device, to: Out<RowsLeft>) {
        device(of)?;
        put(to, RowsLeft { most: 1, ..RowsLeft::default() })
    }

    fn nvmlDeviceGetRunningProcessDetailList(of: Device, to: Out<ProcessDetailList>) {
        let (device_state, index) = device(of)?;
        let mut info = to.get().map_err(|_| Status::INVALID_ARGUMENT)?;
        if info.version != PROCESS_DETAILS_V1 {
            return Err(Status::ARGUMENT_VERSION_MISMATCH);
        }
        let found: Vec<ProcessDetail> = match info.mode {
            0 => with_context(device_state, index),
            // Graphics, and the multi-process service: nobody's.
            1 | 2 => Vec::new(),
            _ => return Err(Status::INVALID_ARGUMENT),
        };
        let capacity = info.count as usize;
        info.count = found.len() as c_uint;
        put(to, info)?;
        if found.is_empty() {
            return Ok(());
        }
        if info.list.is_null() || capacity < found.len() {
            return Err(Status::INSUFFICIENT_SIZE);
        }
        // SAFETY: the program says that its array has `capacity` elements.
        unsafe { Out::new(info.list) }.put_all(&found, capacity).map_err(|_| Status::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetSupportedPerformanceStates(of: Device, to: Out<c_uint>, bytes: c_uint) {
        const UNKNOWN: c_uint = 32;
        device(of)?;
        let mut states = vec![UNKNOWN; bytes as usize / size_of::<c_uint>()];
        *states.first_mut().ok_or(Status::INSUFFICIENT_SIZE)? = 0;
        to.put_all(&states, states.len()).map_err(|_| Status::INVALID_ARGUMENT)
    }

    fn nvmlSystemGetDriverBranch(to: Out<super::DriverBranch>, capacity: c_uint) {
        const VERSION_1: c_uint = 0x0100_0054;
        let device_state = super::device_state()?;
        let mut branch = to.get().map_err(|_| Status::INVALID_ARGUMENT)?;
        if branch.version != VERSION_1 {
            return Err(Status::ARGUMENT_VERSION_MISMATCH);
        }
        let series = device_state.profile().driver_version.split('.').next().unwrap_or_default();
        let name = format!("r{series}_00");
        if name.len() >= branch.branch.len().min(capacity as usize) {
            return Err(Status::INSUFFICIENT_SIZE);
        }
        branch.branch = super::chars(&name);
        put(to, branch)
    }
}

/// The figures of a device as the numbered fields have them.
pub(super) fn limits_mw(device_state: &DeviceState) -> [c_uint; 4] {
    let (least, most) = constraints_mw(device_state);
    [least, most, most, most]
}

/// Milliwatts now.
pub(super) fn now_mw(device_state: &DeviceState, index: usize) -> c_uint {
    power_mw(device_state, index)
}
