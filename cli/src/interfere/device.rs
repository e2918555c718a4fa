//! The device as its management library (NVML) sees it while jobs run: how busy it is, and how busy
//! its memory. The arbiter's charge is another thing: what a job held, also while it computed
//! nothing.

use std::ffi::{c_int, c_uint, c_void};
use std::path::Path;

use libloading::{Library, Symbol};

use crate::run::driver::Driver;

const LIBRARY: &str = "libnvidia-ml.so.1";

/// `nvmlUtilization_t`: percent of NVML's last period.
#[repr(C)]
#[derive(Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

type Handle = *mut c_void;
type Rates = unsafe extern "C" fn(Handle, *mut Utilization) -> c_int;

/// A device of an initialised NVML.
pub struct Watched {
    handle: Handle,
    rates: Rates,
    /// The simulated device's memory figure is made up.
    simulated: bool,
    /// The pointers above live in it.
    _library: Library,
}

/// Parts of the time in which the device computed, and in which its memory was read or written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    pub busy: f64,
    pub memory: Option<f64>,
}

impl Watched {
    /// `None` where there is no NVML, or not this device. Of the simulated one, `SUBLET_SIM_STATE`
    /// in this process's environment says which.
    pub fn open(driver: &Driver, index: u32) -> Option<Self> {
        let beside = driver.path.parent().unwrap_or(Path::new("/"));
        let path = match driver.simulated {
            Some(_) => beside.join(LIBRARY),
            None => LIBRARY.into(),
        };
        // SAFETY: NVML's initialisers do what initialisers of a system library do; the simulated
        // one lies beside the driver that jobs are given.
        let library = unsafe { Library::new(path) }.ok()?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the signatures are those of nvml.h for these versioned names, and `handle`
        // outlives the call.
        let rates = unsafe {
            let init: Symbol<'_, unsafe extern "C" fn() -> c_int> =
                library.get(b"nvmlInit_v2\0").ok()?;
            let by_index: Symbol<'_, unsafe extern "C" fn(c_uint, *mut Handle) -> c_int> =
                library.get(b"nvmlDeviceGetHandleByIndex_v2\0").ok()?;
            let rates: Symbol<'_, Rates> = library.get(b"nvmlDeviceGetUtilizationRates\0").ok()?;
            if init() != 0 || by_index(index, &raw mut handle) != 0 {
                return None;
            }
            *rates
        };
        Some(Self {
            handle,
            rates,
            simulated: driver.simulated.is_some(),
            _library: library,
        })
    }

    /// Since the last look, or over NVML's last period.
    pub fn look(&self) -> Option<Rate> {
        let mut now = Utilization::default();
        // SAFETY: the handle came from NVML, and `now` outlives the call.
        let status = unsafe { (self.rates)(self.handle, &raw mut now) };
        (status == 0).then(|| Rate {
            busy: f64::from(now.gpu) / 100.0,
            memory: (!self.simulated).then(|| f64::from(now.memory) / 100.0),
        })
    }
}
