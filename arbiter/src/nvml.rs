//! NVML, loaded at run time and asked by a thread of its own: its calls can take milliseconds, and
//! the reactor has none to give away.
//!
//! Structures and names are those of the public `nvml.h`. A simulated driver brings its own
//! `libnvidia-ml.so.1` in the directory of its `libcuda.so.1`; it is loaded only where nobody but
//! root or this user could have put it there.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, never, select, tick, unbounded};
use libloading::{Library, Symbol};

use crate::bell::Bell;
use crate::clock::mono_ns;
use crate::convert;

/// File name of NVML.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// How often figures are taken while clients are attached.
const REFRESH: Duration = Duration::from_millis(250);
/// Every how many times readings are taken too: people look at them, and they take longest.
const READINGS_EVERY: u32 = 4;
/// Devices and processes asked about at most.
const MAX_FOUND: c_uint = 16;
const MAX_PROCESSES: usize = 512;

/// A device as NVML tells it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// Its identity.
    pub uuid: [u8; 16],
    /// Its product name.
    pub name: String,
    /// Physical memory in bytes.
    pub total_bytes: u64,
    /// Free physical memory in bytes.
    pub free_bytes: u64,
    /// Memory by process in bytes.
    pub process_bytes: BTreeMap<u32, u64>,
    /// The library says of itself that its devices are simulated.
    pub simulated: bool,
    /// Of a simulated one: what a turn from one process to another costs there; `None`: the library
    /// does not tell.
    pub turn_ns: Option<u64>,
    /// Of a simulated one: what its times are multiplied by.
    pub dilation: u32,
    /// Whether it is cut into instances (MIG); `None`: NVML does not tell.
    pub mig: Option<bool>,
    /// `None`: it was not asked for them this time.
    pub readings: Option<Readings>,
}

/// What a device measures of itself; `None`: NVML does not tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Readings {
    /// What it draws, in milliwatts.
    pub power_mw: Option<u32>,
    /// Of the GPU itself.
    pub temperature_celsius: Option<u32>,
    /// Part of the time in which a kernel ran, over NVML's last period.
    pub sm_used_percent: Option<u32>,
}

impl Found {
    /// The identity as `nvidia-smi` prints it.
    pub fn uuid_text(&self) -> String {
        convert::uuid_text(&self.uuid)
    }
}

/// News from the watcher.
#[derive(Debug)]
pub struct News {
    /// Which driver was asked about; `None`: the host's.
    pub driver: Option<PathBuf>,
    /// When it was begun to look, on the monotonic clock.
    pub taken_ns: u64,
    /// What was found, or why nothing.
    pub found: Result<Vec<Found>, String>,
}

/// The thread that asks, as the reactor sees it. Ends when dropped.
#[derive(Debug)]
pub struct Watcher {
    asks: Sender<Ask>,
    news: Receiver<News>,
    bell: Bell,
}

#[derive(Debug)]
enum Ask {
    Discover(Option<PathBuf>),
    Watch(bool),
}

impl Watcher {
    /// Starts the thread.
    pub fn start() -> std::io::Result<Self> {
        let bell = Bell::new()?;
        let (asks, asked) = unbounded();
        let (tell, news) = unbounded();
        let ring = bell.clone();
        std::thread::Builder::new()
            .name("nvml".into())
            .spawn(move || watch(&asked, &tell, &ring))?;
        Ok(Self { asks, news, bell })
    }

    /// Looks for the devices of a driver; the answer comes as [`News`].
    pub fn discover(&self, driver: Option<PathBuf>) {
        let _ = self.asks.send(Ask::Discover(driver));
    }

    /// Whether figures are refreshed from here on.
    pub fn watch(&self, on: bool) {
        let _ = self.asks.send(Ask::Watch(on));
    }

    /// Readable when there is news.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// What has arrived.
    pub fn take(&self) -> Vec<News> {
        self.bell.silence();
        self.news.try_iter().collect()
    }
}

/// What NVML says right now, for somebody who asks once. `driver`: as for [`Watcher::discover`].
///
/// # Errors
/// Why there is no NVML, or what it refused.
pub fn look(driver: Option<&Path>) -> Result<Vec<Found>, String> {
    Nvml::open(driver)?.devices(true)
}

fn watch(asked: &Receiver<Ask>, tell: &Sender<News>, ring: &Bell) {
    let mut open: Vec<(Option<PathBuf>, Nvml)> = Vec::new();
    let mut watching = false;
    let send = |driver, taken_ns, found| {
        let news = News {
            driver,
            taken_ns,
            found,
        };
        let sent = tell.send(news).is_ok();
        ring.ring();
        sent
    };
    let (figures, none) = (tick(REFRESH), never());
    let mut refreshed = 0_u32;
    loop {
        let due = if watching && !open.is_empty() {
            &figures
        } else {
            &none
        };
        select! {
            recv(asked) -> ask => match ask {
                Ok(Ask::Watch(on)) => watching = on,
                Ok(Ask::Discover(driver)) => {
                    let taken_ns = mono_ns();
                    let found = match open.iter().find(|(at, _)| *at == driver) {
                        Some((_, nvml)) => nvml.devices(true),
                        None => Nvml::open(driver.as_deref()).and_then(|nvml| {
                            let found = nvml.devices(true);
                            open.push((driver.clone(), nvml));
                            found
                        }),
                    };
                    if !send(driver, taken_ns, found) {
                        return;
                    }
                }
                Err(_) => return,
            },
            recv(due) -> _ => {
                // WRAPPING: a place in a circle of readings.
                refreshed = refreshed.wrapping_add(1);
                for (driver, nvml) in &open {
                    let taken_ns = mono_ns();
                    if let Ok(found) = nvml.devices(refreshed.is_multiple_of(READINGS_EVERY))
                        && !send(driver.clone(), taken_ns, Ok(found))
                    {
                        return;
                    }
                }
            },
        }
    }
}

/// Which library to load for a driver.
fn library_for(driver: Option<&Path>) -> Result<PathBuf, String> {
    let Some(driver) = driver else {
        return Ok(LIBRARY.into());
    };
    let beside = driver
        .parent()
        .map(|dir| dir.join(LIBRARY))
        .ok_or_else(|| format!("{} is no path of a driver", driver.display()))?;
    let path = beside
        .canonicalize()
        .map_err(|error| format!("{}: {error}", beside.display()))?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    for trusted in [path.as_path(), dir] {
        let meta = trusted
            .metadata()
            .map_err(|error| format!("{}: {error}", trusted.display()))?;
        let ours = rustix::process::geteuid().as_raw();
        if (meta.uid() != 0 && meta.uid() != ours) || meta.mode() & 0o022 != 0 {
            return Err(format!(
                "{} is not loaded: others than root and user {ours} can write it",
                trusted.display()
            ));
        }
    }
    Ok(path)
}

/// `nvmlReturn_t`; 0 is success.
type Status = c_int;
/// `nvmlDevice_t`
type Handle = *mut c_void;
/// `NVML_ERROR_INSUFFICIENT_SIZE`
const INSUFFICIENT_SIZE: Status = 7;
/// `NVML_VALUE_NOT_AVAILABLE` as a number of bytes.
const NOT_AVAILABLE: u64 = u64::MAX;

/// `nvmlMemory_t`
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlUtilization_t`
#[repr(C)]
#[derive(Default)]
struct Utilisation {
    gpu: c_uint,
    memory: c_uint,
}

/// `NVML_TEMPERATURE_GPU`
const OF_THE_GPU: c_int = 0;

/// `nvmlProcessInfo_v2_t`, as `nvmlDeviceGetComputeRunningProcesses_v3` fills it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used_gpu_memory: u64,
    gpu_instance_id: c_uint,
    compute_instance_id: c_uint,
}
const _: () = assert!(size_of::<ProcessInfo>() == 24 && size_of::<Memory>() == 24);

type Init = unsafe extern "C" fn() -> Status;
/// `sublet_simgpu_turn_ns`
type TurnNs = unsafe extern "C" fn() -> u64;
/// `sublet_simgpu_dilation`
type Dilation = unsafe extern "C" fn() -> u32;
type Count = unsafe extern "C" fn(*mut c_uint) -> Status;
type ByIndex = unsafe extern "C" fn(c_uint, *mut Handle) -> Status;
type Text = unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> Status;
type MemoryInfo = unsafe extern "C" fn(Handle, *mut Memory) -> Status;
type Number = unsafe extern "C" fn(Handle, *mut c_uint) -> Status;
type Temperature = unsafe extern "C" fn(Handle, c_int, *mut c_uint) -> Status;
type Rates = unsafe extern "C" fn(Handle, *mut Utilisation) -> Status;
type MigMode = unsafe extern "C" fn(Handle, *mut c_uint, *mut c_uint) -> Status;
type Processes = unsafe extern "C" fn(Handle, *mut c_uint, *mut ProcessInfo) -> Status;

/// An initialised NVML.
struct Nvml {
    count: Count,
    by_index: ByIndex,
    uuid: Text,
    name: Text,
    memory: MemoryInfo,
    processes: Option<Processes>,
    /// It exports the mark of the simulated GPU's library.
    simulated: bool,
    turn_ns: Option<TurnNs>,
    dilation: Option<Dilation>,
    mig_mode: Option<MigMode>,
    power: Option<Number>,
    temperature: Option<Temperature>,
    rates: Option<Rates>,
    /// The pointers above live in it.
    _library: Library,
}

impl Nvml {
    fn open(driver: Option<&Path>) -> Result<Self, String> {
        let path = library_for(driver)?;
        let failed = |error: libloading::Error| format!("{}: {error}", path.display());
        // SAFETY: NVML's initialisers do what initialisers of a system library do; who may have
        // written the file was checked in `library_for`, or the loader's own path was used.
        let library = unsafe { Library::new(&path) }.map_err(failed)?;
        // SAFETY: the signatures are those of nvml.h for these versioned names.
        let nvml = unsafe {
            let init: Symbol<'_, Init> = library.get(b"nvmlInit_v2\0").map_err(failed)?;
            let status = init();
            if status != 0 {
                return Err(format!("{}: nvmlInit_v2 gave {status}", path.display()));
            }
            Self {
                count: *library.get(b"nvmlDeviceGetCount_v2\0").map_err(failed)?,
                by_index: *library
                    .get(b"nvmlDeviceGetHandleByIndex_v2\0")
                    .map_err(failed)?,
                uuid: *library.get(b"nvmlDeviceGetUUID\0").map_err(failed)?,
                name: *library.get(b"nvmlDeviceGetName\0").map_err(failed)?,
                memory: *library.get(b"nvmlDeviceGetMemoryInfo\0").map_err(failed)?,
                processes: library
                    .get(b"nvmlDeviceGetComputeRunningProcesses_v3\0")
                    .ok()
                    .map(|symbol: Symbol<'_, Processes>| *symbol),
                simulated: library.get::<Init>(b"sublet_simgpu\0").is_ok(),
                turn_ns: library
                    .get(b"sublet_simgpu_turn_ns\0")
                    .ok()
                    .map(|symbol: Symbol<'_, TurnNs>| *symbol),
                dilation: library
                    .get(b"sublet_simgpu_dilation\0")
                    .ok()
                    .map(|symbol: Symbol<'_, Dilation>| *symbol),
                mig_mode: library
                    .get(b"nvmlDeviceGetMigMode\0")
                    .ok()
                    .map(|symbol: Symbol<'_, MigMode>| *symbol),
                power: library
                    .get(b"nvmlDeviceGetPowerUsage\0")
                    .ok()
                    .map(|symbol: Symbol<'_, Number>| *symbol),
                temperature: library
                    .get(b"nvmlDeviceGetTemperature\0")
                    .ok()
                    .map(|symbol: Symbol<'_, Temperature>| *symbol),
                rates: library
                    .get(b"nvmlDeviceGetUtilizationRates\0")
                    .ok()
                    .map(|symbol: Symbol<'_, Rates>| *symbol),
                _library: library,
            }
        };
        Ok(nvml)
    }

    fn devices(&self, with_readings: bool) -> Result<Vec<Found>, String> {
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        check("nvmlDeviceGetCount_v2", unsafe { (self.count)(&mut count) })?;
        (0..count.min(MAX_FOUND))
            .map(|index| self.device(index, with_readings))
            .collect()
    }

    fn device(&self, index: c_uint, with_readings: bool) -> Result<Found, String> {
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: `handle` outlives the call.
        check("nvmlDeviceGetHandleByIndex_v2", unsafe {
            (self.by_index)(index, &mut handle)
        })?;
        let uuid = text("nvmlDeviceGetUUID", self.uuid, handle)?;
        let uuid = convert::uuid_bytes(&uuid)
            .ok_or_else(|| format!("nvmlDeviceGetUUID gave `{uuid}`, which is no UUID"))?;
        let mut memory = Memory::default();
        // SAFETY: the handle came from NVML, `memory` outlives the call.
        check("nvmlDeviceGetMemoryInfo", unsafe {
            (self.memory)(handle, &mut memory)
        })?;
        Ok(Found {
            uuid,
            name: text("nvmlDeviceGetName", self.name, handle)?,
            total_bytes: memory.total,
            free_bytes: memory.free,
            process_bytes: self.process_bytes(handle),
            simulated: self.simulated,
            // SAFETY: no arguments; functions of the simulated GPU's library.
            turn_ns: self.turn_ns.map(|call| unsafe { call() }),
            // SAFETY: as above.
            dilation: self.dilation.map_or(1, |call| unsafe { call() }.max(1)),
            mig: self.mig(handle),
            readings: with_readings.then(|| self.readings(handle)),
        })
    }

    fn readings(&self, handle: Handle) -> Readings {
        let number = |call: Option<Number>| {
            let mut number = 0;
            // SAFETY: the handle came from NVML, and `number` outlives the call.
            let status = unsafe { (call?)(handle, &mut number) };
            (status == 0).then_some(number)
        };
        let temperature = self.temperature.and_then(|call| {
            let mut number = 0;
            // SAFETY: as above.
            let status = unsafe { call(handle, OF_THE_GPU, &mut number) };
            (status == 0).then_some(number)
        });
        let rates = self.rates.and_then(|call| {
            let mut rates = Utilisation::default();
            // SAFETY: as above; the structure is nvml.h's.
            let status = unsafe { call(handle, &mut rates) };
            (status == 0).then_some(rates.gpu)
        });
        Readings {
            power_mw: number(self.power),
            temperature_celsius: temperature,
            sm_used_percent: rates,
        }
    }

    fn mig(&self, handle: Handle) -> Option<bool> {
        let (mut now, mut pending) = (0, 0);
        // SAFETY: the handle came from NVML, and both numbers outlive the call.
        let status = unsafe { (self.mig_mode?)(handle, &mut now, &mut pending) };
        (status == 0).then_some(now == 1)
    }

    /// Empty where NVML does not tell, as in most containers.
    fn process_bytes(&self, handle: Handle) -> BTreeMap<u32, u64> {
        let Some(processes) = self.processes else {
            return BTreeMap::new();
        };
        let mut infos = vec![ProcessInfo::default(); 32];
        loop {
            // CAST: at most MAX_PROCESSES.
            let mut count = infos.len() as c_uint;
            // SAFETY: `infos` has space for `count` entries, and NVML writes no more.
            let status = unsafe { processes(handle, &mut count, infos.as_mut_ptr()) };
            match status {
                0 => {
                    infos.truncate(count as usize);
                    // Processes are reported also where their memory is not.
                    let bytes = |info: &ProcessInfo| match info.used_gpu_memory {
                        NOT_AVAILABLE => 0,
                        bytes => bytes,
                    };
                    return infos.iter().map(|info| (info.pid, bytes(info))).collect();
                }
                INSUFFICIENT_SIZE if infos.len() < MAX_PROCESSES => {
                    infos.resize(infos.len() * 2, ProcessInfo::default());
                }
                _ => return BTreeMap::new(),
            }
        }
    }
}

fn check(call: &str, status: Status) -> Result<(), String> {
    if status == 0 {
        Ok(())
    } else {
        Err(format!("{call} gave {status}"))
    }
}

fn text(name: &str, call: Text, handle: Handle) -> Result<String, String> {
    let mut buffer: [c_char; 96] = [0; 96];
    // SAFETY: the handle came from NVML; the buffer's length is given, and its last byte is never
    // handed out, so that it ends with a zero whatever is written.
    let status = unsafe { call(handle, buffer.as_mut_ptr(), 95) };
    check(name, status)?;
    // SAFETY: ends with a zero, as said above, and lives long enough.
    let text = unsafe { CStr::from_ptr(buffer.as_ptr()) };
    Ok(text.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_others_can_write_is_not_loaded() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("dir");
        let driver = dir.path().join("libcuda.so.1");
        let library = dir.path().join(LIBRARY);
        let missing = library_for(Some(&driver)).expect_err("nothing there");
        assert!(missing.contains(LIBRARY), "{missing}");
        std::fs::write(&library, b"not ELF").expect("write");
        std::fs::set_permissions(&library, std::fs::Permissions::from_mode(0o666)).expect("mode");
        let refused = library_for(Some(&driver)).expect_err("writable by all");
        assert!(refused.contains("can write it"), "{refused}");
        std::fs::set_permissions(&library, std::fs::Permissions::from_mode(0o600)).expect("mode");
        library_for(Some(&driver)).expect("private");
    }

    #[test]
    fn a_driver_without_nvml_is_answered_with_the_reason() {
        let watcher = Watcher::start().expect("thread");
        watcher.discover(Some("/nowhere/libcuda.so.1".into()));
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(
            watcher.bell(),
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut fds, None).expect("poll");
        let news = watcher.take();
        assert_eq!(news.len(), 1);
        let reason = news[0].found.as_ref().expect_err("nothing is there");
        assert!(reason.contains("/nowhere"), "{reason}");
    }
}
