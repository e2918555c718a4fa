//! What the rule answers at a look.

use crate::slice::TenantId;

/// Why a gate is shut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ShutReason {
    /// Another job is owed time and this one is ahead.
    Owed,
    /// The same, and the other's promise is at risk: also through its gaps.
    Promise,
    /// A latency job serves a request.
    Request,
    /// Jobs that fill the device by themselves take turns, and it is another's; or its own begins
    /// when the last one's queue is empty (for nobody).
    Turn,
    /// It has used what it may use at most (`share_max`).
    Cap,
    /// It is opportunistic, and a guaranteed job is held up.
    Opportunistic,
    /// Another job is measured alone for a moment.
    Solo,
}

/// Whether a job may submit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gate {
    /// It may, below its cap.
    Open,
    /// It may not, until a time of the executor's clock at the latest: a late or dead executor
    /// leaves nobody shut.
    Shut {
        /// When the gate opens by itself, in nanoseconds.
        until_ns: u64,
        /// For whom it is shut; `None`: because of what the job itself used.
        beside: Option<TenantId>,
        /// Why.
        reason: ShutReason,
    },
}

/// The decision about one job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JobGate {
    /// Whose.
    pub tenant: TenantId,
    /// Whether it may submit.
    pub gate: Gate,
    /// Weight that all its processes together may have in flight, in nanoseconds. A launch goes in
    /// where nothing is in flight, whatever its weight.
    pub cap_ns: u64,
}

/// Why exclusive slices are better than gates.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SliceReason {
    /// One of the two stays below its floor beside kernels that are too long for a gate.
    BelowFloor,
    /// A counter of a process went back.
    CounterWentBack,
    /// Finished work adds up to more than the time that passed.
    MoreThanTime,
    /// The device has work all the time and finishes little: somebody hides work.
    HiddenWork,
}

/// A wish for exclusive slices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slices {
    /// Between which two jobs, the one below its floor first; `None`: all of the device.
    pub pair: Option<[TenantId; 2]>,
    /// Why.
    pub reason: SliceReason,
}

/// All decisions of a look. Lives until the next one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Decisions<'a> {
    /// One for each job, in the order in which they came.
    pub gates: &'a [JobGate],
    /// Where gates do not do. Of a pair, the rule plays the slices itself (reason
    /// [`ShutReason::Turn`]); of the whole device, all gates are open and the executor gives
    /// slices.
    pub slices: Option<Slices>,
}

impl Decisions<'_> {
    /// The decision about one job.
    #[must_use]
    pub fn of(&self, tenant: TenantId) -> Option<&JobGate> {
        self.gates.iter().find(|gate| gate.tenant == tenant)
    }
}

/// What the account of a job says. Parts are of the device's time, over [`Constants::mean_ns`].
///
/// [`Constants::mean_ns`]: super::Constants::mean_ns
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Standing {
    /// Charged since it joined: device time, its turns, and idle time held for it.
    pub charged_ns: f64,
    /// Part of the device that it is charged.
    pub used: f64,
    /// Part that it could use, and that it is entitled to.
    pub want: f64,
    /// See [`Standing::want`].
    pub entitled: f64,
    /// Part of the time that its host waits for other jobs.
    pub delay: f64,
    /// Entitled less charged, bounded.
    pub owed_ns: f64,
    /// Promised less charged, bounded.
    pub promise_ns: f64,
    /// Share less charged, bounded: what its requests may use at once.
    pub slack_ns: f64,
    /// True device time of a nanosecond of its weights.
    pub scale: f64,
    /// Time that it was seen alone, and device time finished in it.
    pub solo_ns: f64,
    /// See [`Standing::solo_ns`].
    pub solo_passed_ns: f64,
    /// It takes turns with others that fill the device.
    pub takes_turns: bool,
    /// Its requests go first: it said so, or behaves like a service.
    pub is_service: bool,
}
