//! How an arbiter is to run.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use control::paths::RuntimeDir;
use control::place::Identity;
use control::{DeviceSelector, DeviceSettings, Layer, MemLimit, Misbehaviour, SliceMode};

use crate::api::ApiListener;
use crate::convert;
use crate::devices::Device;
use crate::dispatch::{Answer, Mode, Pace, Setup};
use crate::names::LookUp;
use crate::refusal::Ceiling;
use crate::supervisor::Handed;

/// What an opportunistic job may have queued beside a guaranteed one, in microseconds: a tenth of
/// the least slice.
const GAP_WINDOW_US: u32 = 500;
/// How often a guaranteed job is looked at while only opportunistic ones wait, in nanoseconds.
const GAP_LOOK_NS: u64 = 200_000;
/// How long a guaranteed job's silence is borne at most while only opportunistic ones wait.
const GAP_QUIET_NS: u64 = 600_000;

/// Processes of one job that use a device at the same time, where nothing else is said.
pub const JOB_PROCESSES: u32 = 1024;

/// Looks the ceiling of a user up, by number and login name.
pub type Ceilings = Box<dyn Fn(u32, &str) -> Ceiling + Send>;

/// Reads the rules again; an error is one line for people, and changes nothing.
pub type Reload = Box<dyn Fn() -> Result<Rules, Vec<String>> + Send>;

/// Paths whose change may change the rules. Asked on a thread of its own.
pub type Watched = Box<dyn Fn() -> Vec<PathBuf> + Send>;

/// Whom rules are asked about.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Name of the job.
    pub name: &'a str,
    /// Its command, words joined by one space.
    pub command: &'a str,
    /// Number of its user.
    pub uid: u32,
    /// Login name of its user; empty where there is none.
    pub user: &'a str,
    /// Who else it is.
    pub identity: &'a Identity,
}

/// What the rules that match a job say.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Layers {
    /// What it gets that it does not ask for, the strongest first.
    pub set: Vec<Layer>,
    /// What it gets at the most.
    pub caps: Vec<Layer>,
}

/// Looks the rules of a job up.
pub type JobRules = Box<dyn Fn(&Subject<'_>) -> Layers + Send>;

/// What there is in the quota files.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sections {
    /// The files, in the order in which they were read.
    pub files: Vec<PathBuf>,
    /// Differs where a text differs.
    pub fingerprint: u64,
    /// Sections about users.
    pub users: usize,
    /// Sections about jobs.
    pub jobs: usize,
    /// Sections that go by login names.
    pub by_name: usize,
}

/// What the quota files say to the daemon.
pub struct Rules {
    /// What there is in them.
    pub sections: Sections,
    /// Settings of single devices; the first that matches is the one a device gets.
    pub devices: Vec<DeviceRule>,
    /// How jobs share memory that does not hold all of them.
    pub residency: ResidencyRule,
    /// What users may have.
    pub ceilings: Ceilings,
    /// What jobs get.
    pub jobs: JobRules,
    /// Processes of one job that use a device at the same time.
    pub job_processes: u32,
}

impl Default for Rules {
    /// As where there is no file.
    fn default() -> Self {
        Self {
            sections: Sections::default(),
            devices: Vec::new(),
            residency: ResidencyRule::default(),
            ceilings: Box::new(|_, _| Ceiling::default()),
            jobs: Box::new(|_| Layers::default()),
            job_processes: JOB_PROCESSES,
        }
    }
}

/// How long before its slice a tenant is woken. TIMEOUT: the wake-ups of the arbiter and of one
/// thread, with a margin for a busy host; a hundredth of the usual slice.
const LEAD_NS: u64 = 80_000;

/// What an NVIDIA device takes to turn from one process's context to another's: 139 to 141 us in
/// half of 701 hand-overs on an H200 with driver 580 (`docs/results/h200`), by its own clock, and
/// never less.
const TURN_NS: u64 = 140_000;
/// The same of a simulated device whose library does not say (`switch_us` in
/// `docs/reference/simgpu.md`).
const SIMULATED_TURN_NS: u64 = 20_000;

/// What a device takes for a turn.
pub(crate) fn turn_ns(device: Option<&Device>) -> u64 {
    match device {
        Some(device) if device.simulated => device.turn_ns.unwrap_or(SIMULATED_TURN_NS),
        _ => TURN_NS,
    }
}

/// How a daemon is started.
pub struct Options {
    /// Where its sockets and files are. It has to exist.
    pub dir: RuntimeDir,
    /// Of the binary, as `sublet --version` prints it.
    pub version: String,
    /// Started by `sublet run`, for one user.
    pub embedded: bool,
    /// Ends after this long without a job; `None`: never.
    pub idle_exit: Option<Duration>,
    /// Slices never last longer, where a device's own rule says nothing.
    pub quantum_max: Duration,
    /// Slices last this long while two tenants want a device, one of them guaranteed, and less with
    /// more of them; where a device's own rule has a longest slice, they last that long.
    pub quantum: Duration,
    /// Slices never last less.
    pub quantum_min: Duration,
    /// How long work may stay queued on a device while several tenants want it; half a quantum at
    /// most.
    pub window: Duration,
    /// The same for a tenant alone.
    pub lone_window: Duration,
    /// How long the next slice waits for the in-flight work of the one before it; then both run at
    /// once.
    pub drain: Duration,
    /// How long a holder that does nothing keeps a device that others want.
    pub quiet: Duration,
    /// Wakes the next tenant before its slice begins, where a device's own rule says nothing.
    pub early_wake: bool,
    /// Settings of single devices; the first that matches is the one a device gets.
    pub devices: Vec<DeviceRule>,
    /// How jobs share memory that does not hold all of them.
    pub residency: ResidencyRule,
    /// What users may have.
    pub ceilings: Ceilings,
    /// What jobs get.
    pub jobs: JobRules,
    /// What there is in the quota files.
    pub sections: Sections,
    /// Reads all of that anew, where it came from.
    pub reload: Option<Reload>,
    /// What is looked at for changes of it; `None`: nothing is.
    pub watched: Option<Watched>,
    /// Looks login names up, on a thread of its own.
    pub user_name: LookUp,
    /// Processes of one job that use a device at the same time.
    pub job_processes: u32,
    /// Looks for the host's own NVML, beside those of simulated drivers.
    pub host_nvml: bool,
    /// Where other hosts are served; `None`: nowhere.
    pub api: Option<ApiListener>,
    /// What a service manager has handed over.
    pub handed: Handed,
}

/// How jobs share memory that does not hold all of them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ResidencyRule {
    /// Host memory for what is moved off the devices, all jobs together; a percentage is of the
    /// host's. `None`: half of it.
    pub host_memory: Option<MemLimit>,
    /// How many times longer than its switch a job stays.
    pub slice_over_switch: f64,
}

impl Default for ResidencyRule {
    fn default() -> Self {
        Self {
            host_memory: None,
            slice_over_switch: 10.0,
        }
    }
}

/// Settings of a device.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct DeviceRule {
    /// `None`: every device.
    pub device: Option<DeviceSelector>,
    /// How it is run.
    pub settings: DeviceSettings,
}

impl Options {
    /// The defaults: slices of 2 to 50 ms, 5 ms for two guaranteed tenants, 2 ms in flight, no end.
    pub fn new(dir: RuntimeDir) -> Self {
        Self {
            dir,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            embedded: false,
            idle_exit: None,
            quantum_max: Duration::from_millis(50),
            quantum: Duration::from_millis(5),
            quantum_min: Duration::from_millis(2),
            window: Duration::from_millis(2),
            lone_window: Duration::from_millis(20),
            drain: Duration::from_millis(100),
            quiet: Duration::from_micros(300),
            early_wake: true,
            devices: Vec::new(),
            residency: ResidencyRule::default(),
            ceilings: Box::new(|_, _| Ceiling::default()),
            jobs: Box::new(|_| Layers::default()),
            sections: Sections::default(),
            reload: None,
            watched: None,
            user_name: Box::new(convert::user_name),
            job_processes: JOB_PROCESSES,
            host_nvml: true,
            api: None,
            handed: Handed::default(),
        }
    }

    /// The defaults of one that `sublet run` starts: ends ten seconds after its last job.
    pub fn embedded(dir: RuntimeDir) -> Self {
        Self {
            embedded: true,
            idle_exit: Some(Duration::from_secs(10)),
            ..Self::new(dir)
        }
    }

    /// How a device with these settings is run that takes `turn_ns` from one process to another.
    pub(crate) fn setup(
        &self,
        settings: &DeviceSettings,
        memory_bytes: u64,
        turn_ns: u64,
    ) -> Setup {
        let policy = settings.policy.as_ref().map(convert::policy);
        Setup {
            mode: match settings.mode.unwrap_or_default() {
                SliceMode::Concurrent => Mode::Concurrent,
                SliceMode::Auto => Mode::Auto,
                SliceMode::Lend => Mode::Lend,
                // A mode that is not known was refused when it was said.
                SliceMode::Exclusive | SliceMode::Unknown => Mode::Exclusive,
            },
            pace: self.pace(settings, turn_ns),
            // CAST: a small number.
            holders: settings.holders.unwrap_or(1) as usize,
            // What makes no sense was refused when it was said.
            policy: policy.and_then(Result::ok),
            answer: match settings.misbehaviour.unwrap_or_default() {
                Misbehaviour::Report => Answer::Report,
                Misbehaviour::Demote => Answer::Demote,
                Misbehaviour::Kill => Answer::Kill,
            },
            memory_bytes,
        }
    }

    /// The pace of a device with these settings.
    fn pace(&self, settings: &DeviceSettings, turn_ns: u64) -> Pace {
        let micros_of = |span: Option<control::Span>| {
            span.map(|span| u32::try_from(span.micros()).unwrap_or(u32::MAX))
        };
        let set_us = micros_of(settings.quantum);
        // Below that a hand-over would cost more than the slice.
        let promised_us = set_us.unwrap_or(micros(self.quantum)).max(200);
        let min_us = micros_of(settings.quantum_min).unwrap_or(micros(self.quantum_min));
        let max_us = set_us.unwrap_or(micros(self.quantum_max).max(min_us));
        let max_us = max_us.max(promised_us);
        let early_wake = settings.early_wake.unwrap_or(self.early_wake);
        let look_ns = (u64::from(promised_us) * 1000 / 16).clamp(100_000, 400_000);
        let window_us = micros(self.window).clamp(1, promised_us / 2);
        Pace {
            quantum: policy::quantum::Lengths {
                min_us: min_us.max(200).min(max_us),
                max_us,
                promised_us,
            },
            window_us,
            lone_window_us: micros(self.lone_window).max(1),
            gap_window_us: window_us.min(GAP_WINDOW_US),
            look_ns,
            gap_look_ns: look_ns.min(GAP_LOOK_NS),
            drain_look_ns: 50_000,
            drain_ns: nanos(self.drain),
            quiet_ns: nanos(self.quiet),
            quiet_max_ns: nanos(self.quiet).max(u64::from(promised_us) * 1000 / 3),
            gap_quiet_max_ns: nanos(self.quiet).max(GAP_QUIET_NS),
            unmarked_quiet_ns: nanos(self.quiet).max(1_000_000),
            tick_ns: 20_000_000,
            lead_ns: if early_wake { LEAD_NS } else { 0 },
            turn_ns,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("dir", &self.dir)
            .field("embedded", &self.embedded)
            .field("idle_exit", &self.idle_exit)
            .field("quantum", &self.quantum)
            .field("window", &self.window)
            .finish_non_exhaustive()
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
