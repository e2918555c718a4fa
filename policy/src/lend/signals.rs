//! What the rule is shown at a look.

use crate::slice::{Class, TenantId};

/// A counter that only grows: its owner adds to it and never takes from it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Total(pub u64);

/// A [`Total`] was smaller than before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WentBack {
    /// What it was before.
    pub from: Total,
    /// What it is now.
    pub to: Total,
}

impl std::fmt::Display for WentBack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a counter fell from {} to {}", self.from.0, self.to.0)
    }
}

impl std::error::Error for WentBack {}

impl Total {
    /// What was added since it was `earlier`.
    ///
    /// # Errors
    ///
    /// It is smaller now, which no honest counter is.
    pub fn since(self, earlier: Self) -> Result<u64, WentBack> {
        self.0.checked_sub(earlier.0).ok_or(WentBack {
            from: earlier,
            to: self,
        })
    }
}

/// A process of a job, as the executor numbers it. A number is used once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ProcessId(pub u64);

/// What the shared page of one process says at a look. Nothing of it is trusted: a figure is
/// bounded, compared with others, or leads to slices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProcessLook {
    /// Whose process it is.
    pub tenant: TenantId,
    /// Which one.
    pub process: ProcessId,
    /// Weight of the work that the device has finished, in nanoseconds of device time: the value of
    /// the newest completion mark.
    pub passed_ns: Total,
    /// Weight of the work that was submitted, in nanoseconds of device time.
    pub submitted_ns: Total,
    /// Launches that found the process's own queue empty and had not waited at our gate.
    pub fresh: Total,
    /// Requests for which a latency job rang its doorbell.
    pub rings: Total,
    /// Threads that wait at the gate or for space below the cap.
    pub at_gate: u32,
    /// Threads inside a driver call that waits for the device.
    pub in_wait: u32,
    /// The largest weight of one launch of late, in nanoseconds.
    pub largest_ns: u64,
}

impl ProcessLook {
    /// Weight of what is submitted and not finished, in nanoseconds.
    #[must_use]
    pub fn pending_ns(&self) -> u64 {
        self.submitted_ns.0.saturating_sub(self.passed_ns.0)
    }
}

/// The largest share, and one over it the least.
pub const MOST_SHARE: f64 = 1e9;
/// The least part of the device that `share_max` may leave a job.
const LEAST_PART: f64 = 1e-6;

/// What a job is promised on this device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LendTerms {
    /// Its share; only the relation to others counts. Above 0, and at most [`MOST_SHARE`]: others
    /// count as the nearest valid share, and NaN as the least.
    pub share: f64,
    /// Opportunistic jobs get what guaranteed ones leave.
    pub class: Class,
    /// Part of the device's time that it may use at most, in (0, 1]; `None`: as much as is there.
    /// More than 1 counts as 1; 0, less and NaN count as a millionth.
    pub share_max: Option<f64>,
    /// Its requests go first, inside its share.
    pub latency: bool,
}

impl Default for LendTerms {
    fn default() -> Self {
        Self {
            share: 1.0,
            class: Class::Guaranteed,
            share_max: None,
            latency: false,
        }
    }
}

impl LendTerms {
    /// The same within the valid ranges.
    #[must_use]
    pub(super) fn bounded(self) -> Self {
        let within = |value: f64, least: f64, most: f64| {
            if value.is_nan() {
                least
            } else {
                value.clamp(least, most)
            }
        };
        Self {
            share: within(self.share, 1.0 / MOST_SHARE, MOST_SHARE),
            share_max: self.share_max.map(|most| within(most, LEAST_PART, 1.0)),
            ..self
        }
    }
}
