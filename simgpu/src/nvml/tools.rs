//! What NVIDIA's own tools ask beside the documented functions, and sets of events, in which
//! nothing ever happens.

use std::ffi::{c_char, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use super::{
    Device, Done, ProcessInfoV2, Status, chars, device, device_state, guard, no_processes,
    process_name, processes, put,
};
use crate::device_state::Usage;
use crate::entry::{In, Out};
use crate::unsupported;

/// The table that `nvidia-smi` asks for, by the bytes of its id.
const TOOL_TABLE: [u8; 16] = [
    0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4,
];
/// Functions in it: more than any tool was seen to call.
const ENTRIES: usize = 1023;

/// ABI: the entries that `nvidia-smi` of the series 535 and 550 needs for lists of processes and
/// for its monitors, by what they were seen to be called with and what was then shown.
const IS_SUPPORTED: usize = 71;
const COMPUTE_PROCESSES: usize = 212;
const GRAPHICS_PROCESSES: usize = 213;
const MPS_PROCESSES: usize = 214;

type Entry = unsafe extern "C" fn() -> Status;
type Processes = unsafe extern "C" fn(Device, Out<c_uint>, Out<ToolProcess>) -> Status;

/// ABI: a process in the lists of these entries; the tool shows those that have a name.
#[repr(C)]
#[derive(Clone, Copy)]
struct ToolProcess {
    process: ProcessInfoV2,
    reserved: u64,
    name: [c_char; 4096],
}
const _: () = assert!(size_of::<ToolProcess>() == 4128);

impl From<Usage> for ToolProcess {
    fn from(usage: Usage) -> Self {
        let name = process_name(usage.pid).unwrap_or_else(|| "-".to_owned());
        Self {
            process: ProcessInfoV2::from(usage),
            reserved: 0,
            name: chars(&name),
        }
    }
}

/// A private table: its size in bytes, and functions.
#[repr(C)]
struct Table {
    bytes: usize,
    entries: [Entry; ENTRIES],
}

static TABLE: Table = {
    let mut entries: [Entry; ENTRIES] = [not_supported; ENTRIES];
    // SAFETY: functions of C's calling convention, which the tool calls with the parameters that
    // they have.
    unsafe {
        entries[IS_SUPPORTED] = std::mem::transmute::<
            unsafe extern "C" fn(Device, Out<c_uint>) -> Status,
            Entry,
        >(tool_is_supported);
        entries[COMPUTE_PROCESSES] = std::mem::transmute::<Processes, Entry>(tool_processes);
        entries[GRAPHICS_PROCESSES] = std::mem::transmute::<Processes, Entry>(tool_no_processes);
        entries[MPS_PROCESSES] = std::mem::transmute::<Processes, Entry>(tool_no_processes);
    }
    Table {
        bytes: size_of::<Table>(),
        entries,
    }
};

extern "C" fn not_supported() -> Status {
    unsupported::named("nvmlInternalGetExportTable.entry");
    Status::NOT_SUPPORTED
}

unsafe extern "C" fn tool_is_supported(of: Device, to: Out<c_uint>) -> Status {
    guard(|| {
        device(of)?;
        put(to, 1)
    })
}

unsafe extern "C" fn tool_processes(
    of: Device,
    count: Out<c_uint>,
    list: Out<ToolProcess>,
) -> Status {
    guard(|| processes(of, count, list))
}

unsafe extern "C" fn tool_no_processes(
    of: Device,
    count: Out<c_uint>,
    _list: Out<ToolProcess>,
) -> Status {
    guard(|| no_processes(of, count))
}

/// Handles of event sets: numbers from here on, never pointers.
static NEXT_SET: AtomicUsize = AtomicUsize::new(0x0051_b1e7_2000);

/// A set of events.
pub type EventSet = *mut c_void;

fn wait(set: EventSet, data: *mut c_void, timeout_ms: c_uint) -> Done {
    device_state()?;
    if set.is_null() || data.is_null() {
        return Err(Status::INVALID_ARGUMENT);
    }
    std::thread::sleep(Duration::from_millis(u64::from(timeout_ms)));
    Err(Status::TIMEOUT)
}

nvml! {
    fn nvmlInternalGetExportTable(to: Out<*const c_void>, id: In<[u8; 16]>) {
        let id = id.get().map_err(|_| Status::INVALID_ARGUMENT)?;
        if id != TOOL_TABLE {
            return Err(Status::NOT_FOUND);
        }
        put(to, (&raw const TABLE).cast())
    }

    fn nvmlEventSetCreate(to: Out<EventSet>) {
        device_state()?;
        put(to, NEXT_SET.fetch_add(1, Relaxed) as EventSet)
    }

    fn nvmlEventSetFree(set: EventSet) {
        device_state()?;
        if set.is_null() {
            return Err(Status::INVALID_ARGUMENT);
        }
        Ok(())
    }

    fn nvmlDeviceGetSupportedEventTypes(of: Device, to: Out<u64>) {
        device(of)?;
        put(to, 0)
    }

    fn nvmlDeviceRegisterEvents(of: Device, kinds: u64, set: EventSet) {
        device(of)?;
        if set.is_null() {
            return Err(Status::INVALID_ARGUMENT);
        }
        if kinds == 0 { Ok(()) } else { Err(Status::NOT_SUPPORTED) }
    }

    fn nvmlEventSetWait(set: EventSet, data: *mut c_void, timeout_ms: c_uint) { wait(set, data, timeout_ms) }
    fn nvmlEventSetWait_v2(set: EventSet, data: *mut c_void, timeout_ms: c_uint) { wait(set, data, timeout_ms) }

    fn nvmlGetExcludedDeviceCount(to: Out<c_uint>) { put(to, 0) }
    fn nvmlGetBlacklistDeviceCount(to: Out<c_uint>) { put(to, 0) }

    fn nvmlUnitGetCount(to: Out<c_uint>) {
        device_state()?;
        put(to, 0)
    }
}
