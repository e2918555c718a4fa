//! How an arbiter is to run.

use std::fmt;
use std::time::Duration;

use control::paths::RuntimeDir;
use control::{DeviceSelector, MemLimit, SliceMode};

use crate::dispatch::{Mode, Pace};
use crate::ledger::Ceiling;

/// Looks the ceiling of a user up, by number and login name.
pub type Ceilings = Box<dyn Fn(u32, &str) -> Ceiling + Send>;

/// How long before its slice a tenant is woken. TIMEOUT: the wake-ups of the arbiter and of one thread, with a margin for a
/// busy host; a hundredth of the usual slice.
const LEAD_NS: u64 = 80_000;

/// What a daemon is told at its start.
pub struct Options {
    /// Where its sockets and files are. It has to exist.
    pub dir: RuntimeDir,
    /// Of the binary, as `sublet --version` prints it.
    pub version: String,
    /// Started by `sublet run`, for one user.
    pub embedded: bool,
    /// Ends after this long without a job; `None`: never.
    pub idle_exit: Option<Duration>,
    /// Slices last this long while two tenants want a device, and less with more of them.
    pub quantum: Duration,
    /// Slices never last less.
    pub quantum_min: Duration,
    /// How long work may stay queued on a device while several tenants want it; half a quantum at most.
    pub window: Duration,
    /// The same for a tenant alone.
    pub lone_window: Duration,
    /// How long the next slice waits for the end of what the one before it has queued; then both run at once.
    pub drain: Duration,
    /// How long a holder that does nothing keeps a device that others want.
    pub quiet: Duration,
    /// Wakes the next tenant before its slice begins, where a device's own rule says nothing.
    pub early_wake: bool,
    /// Settings of single devices; the first that matches is the one a device gets.
    pub devices: Vec<DeviceRule>,
    /// What users may have.
    pub ceilings: Ceilings,
    /// Looks for the host's own NVML, beside those of simulated drivers.
    pub host_nvml: bool,
}

/// Settings of a device.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct DeviceRule {
    /// `None`: every device.
    pub device: Option<DeviceSelector>,
    /// `None` and `Auto`: slices.
    pub mode: Option<SliceMode>,
    /// Longest slice.
    pub quantum: Option<Duration>,
    /// Whether the next tenant is woken before its slice begins.
    pub early_wake: Option<bool>,
    /// Memory kept from every quota.
    pub mem_reserve: Option<MemLimit>,
}

impl Options {
    /// The defaults: 5 ms slices, 2 ms in flight, no end.
    pub fn new(dir: RuntimeDir) -> Self {
        Self {
            dir,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            embedded: false,
            idle_exit: None,
            quantum: Duration::from_millis(5),
            quantum_min: Duration::from_millis(2),
            window: Duration::from_millis(2),
            lone_window: Duration::from_millis(20),
            drain: Duration::from_millis(100),
            quiet: Duration::from_micros(300),
            early_wake: true,
            devices: Vec::new(),
            ceilings: Box::new(|_, _| Ceiling::default()),
            host_nvml: true,
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

    /// The pace of a device with this rule.
    pub(crate) fn pace(&self, rule: Option<&DeviceRule>) -> Pace {
        let quantum = rule.and_then(|rule| rule.quantum).unwrap_or(self.quantum);
        // Below that a hand-over would cost more than the slice.
        let max_us = micros(quantum).max(200);
        let early_wake = rule
            .and_then(|rule| rule.early_wake)
            .unwrap_or(self.early_wake);
        let look_ns = (u64::from(max_us) * 1000 / 16).clamp(100_000, 400_000);
        Pace {
            quantum: policy::QuantumBounds {
                min_us: micros(self.quantum_min).min(max_us),
                max_us,
            },
            window_us: micros(self.window).clamp(1, max_us / 2),
            lone_window_us: micros(self.lone_window).max(1),
            look_ns,
            drain_look_ns: 50_000,
            drain_ns: nanos(self.drain),
            quiet_ns: nanos(self.quiet),
            quiet_max_ns: nanos(self.quiet).max(u64::from(max_us) * 1000 / 3),
            unmarked_quiet_ns: nanos(self.quiet).max(1_000_000),
            tick_ns: 20_000_000,
            lead_ns: if early_wake { LEAD_NS } else { 0 },
        }
    }

    /// The mode of a device with this rule.
    pub(crate) fn mode(rule: Option<&DeviceRule>) -> Mode {
        match rule.and_then(|rule| rule.mode) {
            Some(SliceMode::Concurrent) => Mode::Concurrent,
            _ => Mode::Exclusive,
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
