//! Up to when the time of a device is accounted, and how much of it the arbiter has not watched.
//!
//! Invariants: each moment is accounted once (`charged_ns` never goes back); the time beyond a
//! planned look is a host stall (`host_stall`), and most of a long stall is in no account.

use super::host_stall;
use crate::usage::Recent;

/// The accounted time.
#[derive(Debug)]
pub(super) struct TimeAccount {
    charged_ns: u64,
    /// When the next look was planned.
    planned_ns: Option<u64>,
    busy: Recent,
    busy_ns: u64,
}

/// A stretch of time that is accounted now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Passed {
    /// Its end, without the part that is in no account.
    pub until_ns: u64,
    /// Its length.
    pub dt_ns: u64,
    /// Its last part, in which nobody looked.
    pub stall_ns: u64,
}

impl TimeAccount {
    pub fn new(now_ns: u64) -> Self {
        Self {
            charged_ns: now_ns,
            planned_ns: None,
            busy: Recent::default(),
            busy_ns: 0,
        }
    }

    /// Takes the time up to `now_ns`; `None`: there is none.
    pub fn pass(&mut self, now_ns: u64) -> Option<Passed> {
        let stall_ns = host_stall::stall_ns(self.planned_ns, self.charged_ns, now_ns);
        let unsupervised_ns = host_stall::unsupervised_ns(stall_ns);
        let until_ns = now_ns.saturating_sub(unsupervised_ns);
        let passed = Passed {
            until_ns,
            dt_ns: until_ns.saturating_sub(self.charged_ns),
            stall_ns: stall_ns - unsupervised_ns,
        };
        self.charged_ns = now_ns.max(self.charged_ns);
        (passed.dt_ns > 0).then_some(passed)
    }

    /// Up to when time is accounted.
    pub fn charged_ns(&self) -> u64 {
        self.charged_ns
    }

    /// When the next look is planned.
    pub fn plan(&mut self, planned_ns: Option<u64>) {
        self.planned_ns = planned_ns;
    }

    /// The device was in use for so long.
    pub fn add_busy(&mut self, now_ns: u64, ns: u64) {
        self.busy.add(now_ns, ns);
        self.busy_ns += ns;
    }

    /// How long it was in use in all.
    pub fn busy_ns(&self) -> u64 {
        self.busy_ns
    }

    /// Part of the last second in which it was.
    pub fn busy_part(&self, now_ns: u64) -> f64 {
        self.busy.part(now_ns)
    }
}
