//! The one driver of a process: everything that `cuInit` sets up.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, OnceLock};

use crate::lock::Mutex;
use shim_ffi::CUresult;

use crate::array::{Array, Texture};
use crate::capture::Capture;
use crate::context::Context;
use crate::costs::{Costs, MemoryTimeline};
use crate::device_state::{DeviceState, DeviceStateError};
use crate::event::Event;
use crate::exec::engine::Engine;
use crate::faults::Faults;
use crate::function::Function;
use crate::graph::{Condition, Graph, GraphExec, Node, UserObject};
use crate::green::{Green, Resource};
use crate::memory::Memory;
use crate::memory::pool::Pool;
use crate::module::{Library, Link, Module};
use crate::profile::MAX_DEVICES;
use crate::registry::Registry;
use crate::settings::{BadConfig, env};
use crate::stream::{Freed, Stream};
use crate::{unsupported, visible};

/// A device's primary context.
#[derive(Default)]
pub struct Primary {
    /// The context while it is active.
    pub context: Option<Arc<Context>>,
    /// Retains not yet released.
    pub retained: u32,
    /// Flags for the next activation.
    pub flags: u32,
}

/// Type and number of a place where memory lies (`CUmemLocation`).
pub type Location = (u32, i32);

/// What a program has advised for managed memory, and where it was prefetched to last.
#[derive(Debug, Clone, Default)]
pub struct Advice {
    /// It is mostly read.
    pub mostly_read: bool,
    /// Where it is to be.
    pub preferred: Option<Location>,
    /// Who is to reach it.
    pub accessed_by: Vec<Location>,
    /// Where it was prefetched to.
    pub prefetched: Option<Location>,
}

/// Everything of a process.
pub struct Driver {
    /// What the host's processes share.
    pub device_state: Arc<DeviceState>,
    /// Addresses and bytes.
    pub memory: Arc<Memory>,
    /// Streams' queues.
    pub engine: Engine,
    /// Time of calls that manage memory.
    memory_until_ns: AtomicU64,
    /// Contexts.
    pub contexts: Registry<Context>,
    /// Streams.
    pub streams: Registry<Stream>,
    /// Handles of streams that were destroyed.
    pub freed: Freed,
    /// Events.
    pub events: Registry<Event>,
    /// Modules.
    pub modules: Registry<Module>,
    /// Functions of modules, and of kernels in a context.
    pub functions: Registry<Function>,
    /// Libraries.
    pub libraries: Registry<Library>,
    /// Kernels of libraries.
    pub kernels: Registry<Function>,
    /// Pools.
    pub pools: Arc<Registry<Pool>>,
    /// Default and current pool of every device.
    pub device_pools: Vec<(Arc<Pool>, Mutex<Arc<Pool>>)>,
    /// What graphs allocate from, by device.
    pub graph_pools: Vec<Arc<Pool>>,
    /// Addresses that a graph has given the program, which it has not freed.
    pub given_by_graphs: Mutex<std::collections::BTreeSet<u64>>,
    /// Arrays.
    pub(crate) arrays: Registry<Array>,
    /// Texture objects.
    pub(crate) textures: Registry<Texture>,
    /// Link states.
    pub(crate) links: Registry<Link>,
    /// Graphs.
    pub graphs: Registry<Graph>,
    /// Their nodes.
    pub nodes: Registry<Node>,
    /// Executable graphs.
    pub execs: Registry<GraphExec>,
    /// What conditional nodes go by.
    pub conditions: Registry<Condition>,
    /// Objects that graphs keep alive.
    pub user_objects: Registry<UserObject>,
    /// Green contexts.
    pub greens: Registry<Green>,
    /// Resources that green contexts are made from.
    pub resources: Registry<Resource>,
    /// What `cuCoredumpSetAttribute*` was given, by context (0: global) and number.
    pub coredump: Mutex<std::collections::BTreeMap<(u64, u32), Vec<u8>>>,
    /// What was advised for managed memory, by the region's number.
    pub advice: Mutex<std::collections::BTreeMap<u64, Advice>>,
    /// Captures in progress.
    pub captures: Mutex<Vec<Arc<Capture>>>,
    /// Devices that the program sees, by ordinal.
    visible: Vec<usize>,
    /// Primary contexts.
    pub primaries: Vec<Mutex<Primary>>,
    /// Live contexts by device.
    pub context_counts: Vec<Mutex<u32>>,
    /// Faults on demand.
    pub faults: Faults,
}

/// Handle of the green context that a context is; 0 where it is none.
pub fn green_of(driver: &Driver, context: u64) -> u64 {
    let green = driver.greens.all(|green| green.context.id == context);
    green.first().map_or(0, |green| green.id)
}

static DRIVER: OnceLock<Result<Driver, CUresult>> = OnceLock::new();
static FORKED: AtomicBool = AtomicBool::new(false);
static EXITED: AtomicBool = AtomicBool::new(false);

/// The driver, after `cuInit`.
///
/// # Errors
/// `NOT_INITIALIZED` before `cuInit`, after one that has failed and in a forked child,
/// `DEINITIALIZED` when the process ends.
pub fn driver() -> Result<&'static Driver, CUresult> {
    if EXITED.load(Relaxed) {
        return Err(CUresult::CUDA_ERROR_DEINITIALIZED);
    }
    if FORKED.load(Relaxed) {
        return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
    }
    match DRIVER.get() {
        Some(Ok(driver)) => Ok(driver),
        Some(Err(_)) | None => Err(CUresult::CUDA_ERROR_NOT_INITIALIZED),
    }
}

/// What `cuInit` does.
///
/// # Errors
/// `INVALID_VALUE`, `NO_DEVICE`, `SYSTEM_NOT_READY`, after one line on standard error that says
/// why; without one where a machine without devices is simulated.
pub fn init() -> Result<&'static Driver, CUresult> {
    if EXITED.load(Relaxed) || FORKED.load(Relaxed) {
        return driver();
    }
    let made = DRIVER.get_or_init(|| {
        Driver::new().map_err(|error| {
            if !matches!(error, InitError::NoDevices) {
                eprintln!("sublet simgpu: {error}");
            }
            match error {
                InitError::DeviceState(DeviceStateError::Config(_))
                | InitError::Config(_)
                | InitError::NoDevices
                | InitError::Nothing(_) => CUresult::CUDA_ERROR_NO_DEVICE,
                InitError::DeviceState(_) => CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
                InitError::Memory(_) => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            }
        })
    });
    made.as_ref().map_err(|status| *status)
}

#[derive(Debug)]
enum InitError {
    Config(BadConfig),
    DeviceState(DeviceStateError),
    Memory(std::io::Error),
    /// The profile has none.
    NoDevices,
    /// `CUDA_VISIBLE_DEVICES` names no device.
    Nothing(String),
}

impl std::fmt::Display for InitError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Config(error) => write!(f, "{error}"),
            Self::DeviceState(error) => write!(f, "{error}"),
            Self::NoDevices => f.write_str("the profile has no devices"),
            Self::Nothing(list) => {
                write!(f, "CUDA_VISIBLE_DEVICES=`{list}` names none of the devices")
            }
            Self::Memory(error) => write!(f, "cannot reserve device addresses: {error}"),
        }
    }
}

impl Driver {
    fn new() -> Result<Self, InitError> {
        if let Some(text) = env("SUBLET_SIM_LOAD_US").filter(|text| text.parse::<u64>().is_err()) {
            return Err(InitError::Config(BadConfig(format!(
                "SUBLET_SIM_LOAD_US={text}: expected a number of microseconds"
            ))));
        }
        let faults = Faults::parse(&env("SUBLET_SIM_FAULT").unwrap_or_default())
            .map_err(InitError::Config)?;
        let device_state = Arc::new(DeviceState::of_this_host().map_err(InitError::DeviceState)?);
        let devices = device_state.profile().devices;
        if devices == 0 {
            return Err(InitError::NoDevices);
        }
        device_state.claim().map_err(InitError::DeviceState)?;
        let list = env("CUDA_VISIBLE_DEVICES");
        let visible = visible::devices(list.as_deref(), devices, |at| {
            device_state.profile().uuid(at)
        });
        if visible.is_empty() {
            return Err(InitError::Nothing(list.unwrap_or_default()));
        }
        let headroom = match env("SUBLET_SIM_HEADROOM") {
            Some(text) => Some(crate::profile::parse_bytes(&text).ok_or_else(|| {
                InitError::Config(BadConfig(format!(
                    "SUBLET_SIM_HEADROOM={text}: expected a size with a unit, such as 4GiB or 0B"
                )))
            })?),
            None => None,
        };
        let memory = Arc::new(Memory::new(&device_state, headroom).map_err(InitError::Memory)?);
        let pools = Arc::new(Registry::<Pool>::default());
        let device_pools = (0..devices)
            .map(|device| {
                let pool = Pool::new(device, true, 0);
                pools.insert(pool.id, pool.clone());
                (pool.clone(), Mutex::new(pool))
            })
            .collect();
        let graph_pools: Vec<_> = (0..devices).map(Pool::of_graphs).collect();
        graph_pools
            .iter()
            .for_each(|pool| pools.insert(pool.id, pool.clone()));
        let free = {
            let (device_state, memory, pools) =
                (device_state.clone(), memory.clone(), pools.clone());
            Box::new(move |address: u64| {
                if let Ok(region) = memory.free(&device_state, address)
                    && let crate::memory::Kind::Pool(pool) | crate::memory::Kind::PoolFreeing(pool) =
                        region.kind
                    && let Some(pool) = pools.get(pool.0 as u64)
                    && pool.give_back(&memory, &device_state, &region)
                {
                    pools.remove(pool.id);
                }
            })
        };
        // SAFETY: both only set a flag.
        unsafe {
            libc::pthread_atfork(None, None, Some(forked));
            libc::atexit(exited);
        }
        Ok(Self {
            engine: Engine::new(device_state.clone(), memory.clone(), free),
            memory_until_ns: AtomicU64::new(0),
            device_state,
            memory,
            contexts: Registry::default(),
            streams: Registry::default(),
            freed: Freed::from_env(env).map_err(InitError::Config)?,
            events: Registry::default(),
            modules: Registry::default(),
            functions: Registry::default(),
            libraries: Registry::default(),
            kernels: Registry::default(),
            pools,
            device_pools,
            graph_pools,
            given_by_graphs: Mutex::default(),
            arrays: Registry::default(),
            textures: Registry::default(),
            links: Registry::default(),
            graphs: Registry::default(),
            nodes: Registry::default(),
            execs: Registry::default(),
            conditions: Registry::default(),
            user_objects: Registry::default(),
            greens: Registry::default(),
            resources: Registry::default(),
            coredump: Mutex::default(),
            advice: Mutex::default(),
            captures: Mutex::default(),
            visible,
            primaries: (0..MAX_DEVICES).map(|_| Mutex::default()).collect(),
            context_counts: (0..MAX_DEVICES).map(|_| Mutex::new(0)).collect(),
            faults,
        })
    }

    /// Takes `ns` of the profile's time of the calling thread for a call that manages memory, which
    /// began at `began_ns`.
    pub fn spend(&self, began_ns: u64, ns: u64) {
        let ns = self.device_state.scaled(ns);
        if self.costs().driver_lock {
            MemoryTimeline(self.device_state.memory_until_ns()).spend(began_ns, ns);
        } else if ns > 0 {
            MemoryTimeline(&self.memory_until_ns).spend(began_ns, ns);
        }
    }

    /// What calls cost beside what the host takes for them.
    pub fn costs(&self) -> &Costs {
        &self.device_state.profile().costs
    }

    /// Takes the time of a call that was to take memory, began at `began_ns` and failed.
    pub fn spend_if_failed<T>(&self, began_ns: u64, result: &Result<T, CUresult>) {
        if result.is_err() && self.costs().failed_ns > 0 {
            self.spend(began_ns, self.costs().failed_ns);
        }
    }

    /// Number of devices that the program sees.
    pub fn devices(&self) -> usize {
        self.visible.len()
    }

    /// Number of devices of the host.
    pub fn all_devices(&self) -> usize {
        self.device_state.profile().devices
    }

    /// The device of an ordinal that is one.
    ///
    /// # Errors
    /// `INVALID_DEVICE`.
    pub fn device(&self, ordinal: i32) -> Result<usize, CUresult> {
        usize::try_from(ordinal)
            .ok()
            .and_then(|ordinal| self.visible.get(ordinal).copied())
            .ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }

    /// The ordinal of a device; -1 where the program does not see it.
    pub fn ordinal(&self, device: usize) -> i32 {
        let at = self.visible.iter().position(|visible| *visible == device);
        // CAST: there are 16 devices at most.
        at.map_or(-1, |at| at as i32)
    }

    /// What every synchronisation does besides waiting: pools give back what they need not keep.
    pub fn synchronised(&self) {
        for pool in self.pools.all(|_| true) {
            pool.synchronised(&self.memory, &self.device_state);
        }
    }
}

extern "C" fn forked() {
    FORKED.store(true, Relaxed);
}

extern "C" fn exited() {
    EXITED.store(true, Relaxed);
    unsupported::dump();
}
