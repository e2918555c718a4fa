//! The interface between a slice policy and its driver: what it may see, and what it may decide.
//!
//! The driver fills in what is known and keeps defaults for the rest. A policy that lacks a figure
//! falls back to measured device time, and its module says how.

use crate::few::Few;

/// A tenant, as its owner numbers it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct TenantId(pub u64);

/// How firmly a share is promised.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Class {
    /// Gets its share whenever it wants it.
    #[default]
    Guaranteed,
    /// Runs while no guaranteed tenant wants the device.
    Opportunistic,
}

/// Memory of one tenant on the device. Both zero: not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Memory {
    /// What survives the end of an iteration (model, optimiser, framework), in bytes.
    pub persistent_bytes: u64,
    /// What an iteration needs at its peak beyond that, in bytes; while unknown: the whole peak.
    pub ephemeral_bytes: u64,
}

impl Memory {
    /// Whether there is a figure.
    pub fn is_known(&self) -> bool {
        self.persistent_bytes > 0 || self.ephemeral_bytes > 0
    }

    /// Both together, in bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.persistent_bytes.saturating_add(self.ephemeral_bytes)
    }
}

/// What is known of a tenant's iterations (training steps, requests). Zeros and `None`: nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Iterations {
    /// Iterations ended so far.
    pub ended: u64,
    /// Wall time of the last one, from end to end, in nanoseconds.
    pub last_ns: u64,
    /// Wall time of one while the tenant has the device to itself, in nanoseconds.
    pub solo_ns: Option<u64>,
    /// Device time one takes, in nanoseconds.
    pub device_ns: Option<u64>,
    /// Device time spent in the present one so far, in nanoseconds.
    pub done_ns: u64,
    /// When the present one began, in nanoseconds of the view's clock; `None`: boundaries are not
    /// seen as they happen.
    pub began_ns: Option<u64>,
    /// The tenant stands between two iterations now: nothing of one is on the device.
    pub at_boundary: bool,
    /// How sure the detector is of the figures, in millionths; reported by the program itself:
    /// 1,000,000.
    pub confidence_ppm: u32,
}

/// One tenant of the device. Build it with [`TenantView::new`] and add what is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TenantView {
    /// Which one.
    pub id: TenantId,
    /// Its class.
    pub class: Class,
    /// Its weight in millionths of the device; 0 counts as 1. Only the ratio between tenants of one
    /// class matters.
    pub weight_ppm: u32,
    /// Never less than this part of the device while it wants it, in millionths; 0: no floor.
    pub min_share_ppm: u32,
    /// Never more than this part of the device, in millionths; `None`: no cap.
    pub max_share_ppm: Option<u32>,
    /// It waits for the device, or holds it and uses it.
    pub wants: bool,
    /// Stopped by request: it does not run, and loses the device if it holds it.
    pub paused: bool,
    /// When it came, in nanoseconds of the view's clock.
    pub arrived_ns: u64,
    /// Its memory on the device.
    pub memory: Memory,
    /// Device time it has had since it came, in nanoseconds.
    pub attained_ns: u64,
    /// Device time it still needs until it is done, in nanoseconds; with a deadline: until the work
    /// that the deadline is for is done.
    pub remaining_ns: Option<u64>,
    /// By when its remaining work should be done, in nanoseconds of the view's clock.
    pub deadline_ns: Option<u64>,
    /// Each burst of its work is to be done so long after it came, in nanoseconds.
    pub latency_target_ns: Option<u64>,
    /// For how long its work stays on the device after a slice: a high quantile of what was seen,
    /// in nanoseconds; 0: nothing was seen.
    pub drain_ns: u64,
    /// Its iterations.
    pub iterations: Iterations,
}

impl TenantView {
    /// A tenant of which no more is known than this.
    pub fn new(id: TenantId, class: Class, weight_ppm: u32, wants: bool) -> Self {
        Self {
            id,
            class,
            weight_ppm,
            wants,
            ..Self::default()
        }
    }

    /// It wants to run and may.
    pub fn is_ready(&self) -> bool {
        self.wants && !self.paused
    }
}

/// One that holds the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Holder {
    /// Which tenant.
    pub id: TenantId,
    /// When its slice began, in nanoseconds.
    pub since_ns: u64,
    /// How long its slice is, in microseconds.
    pub quantum_us: u32,
}

impl Holder {
    /// When its slice ends, in nanoseconds.
    pub fn due_ns(&self) -> u64 {
        self.since_ns
            .saturating_add(u64::from(self.quantum_us) * 1000)
    }
}

/// Between what a policy may choose the length of a slice, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuantumBounds {
    /// Never shorter.
    pub min_us: u32,
    /// Never longer.
    pub max_us: u32,
}

/// The device itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Device {
    /// How many tenants may hold it at once; 0 counts as 1. One: exclusive slices.
    pub holders: usize,
    /// Its memory in bytes; 0: not known, nothing is refused for lack of it.
    pub memory_bytes: u64,
    /// What it costs to pass it from one tenant to another, in nanoseconds; 0: not known.
    pub turn_ns: u64,
}

impl Device {
    /// One holder at a time, memory not known.
    pub const EXCLUSIVE: Self = Self {
        holders: 1,
        memory_bytes: 0,
        turn_ns: 0,
    };
}

impl Default for Device {
    fn default() -> Self {
        Self::EXCLUSIVE
    }
}

/// All that a policy may look at.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Now, in nanoseconds of any monotonic clock.
    pub now_ns: u64,
    /// Every tenant of the device, each once. One that is missing has gone for good.
    pub tenants: &'a [TenantView],
    /// Who holds the device, each once.
    pub holders: &'a [Holder],
    /// How long slices may be.
    pub quantum: QuantumBounds,
    /// The device.
    pub device: Device,
}

impl View<'_> {
    /// The tenant of this number.
    pub fn tenant(&self, id: TenantId) -> Option<&TenantView> {
        self.tenants.iter().find(|tenant| tenant.id == id)
    }

    /// The slice that `id` holds.
    pub fn held(&self, id: TenantId) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.id == id)
    }
}

/// When opportunistic jobs shrink on the device for guaranteed ones, and when they grow, in parts
/// of the device in millionths: see [`crate::coordinator`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CoordinatorTerms {
    /// So much is kept free for guaranteed jobs.
    pub keep_ppm: u32,
    /// Between the point at which jobs shrink and the one at which they may grow.
    pub band_ppm: u32,
    /// How long there has to be enough before anybody grows, in nanoseconds.
    pub calm_ns: u64,
}

/// How a tenant with a latency target fares.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LatencyReport {
    /// How long a burst may take, in nanoseconds.
    pub target_ns: u64,
    /// Bursts that have ended.
    pub bursts: u64,
    /// Of these, bursts that took longer.
    pub missed: u64,
    /// What a burst takes from its first waiting launch to its end: the 99th percentile of the
    /// recent ones, in nanoseconds; `None`: none has ended.
    pub p99_ns: Option<u64>,
    /// Why the target is not met, or cannot be; `None`: it is met.
    pub unmet: Option<Unmet>,
}

/// Why a latency target is not met.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unmet {
    /// A burst has to wait for what others have on the device and then takes its own time, and
    /// both are longer than the target.
    TooShort {
        /// What a burst needs in all, in nanoseconds.
        needs_ns: u64,
        /// Of that, its own device time, in nanoseconds; 0: not known yet.
        service_ns: u64,
        /// Whose work it may have to wait for; `None`: nobody's was seen.
        behind: Option<TenantId>,
        /// How long that stays on the device, with the turn, in nanoseconds.
        wait_ns: u64,
    },
    /// It is due more device time than its share: bursts were late while that was used up.
    Share,
    /// More than one in a hundred of its recent bursts was late.
    Missed,
}

/// A slice to be granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Slice {
    /// To whom.
    pub tenant: TenantId,
    /// For how long, in microseconds.
    pub quantum_us: u32,
}

/// What is to be done now, and when to ask again.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Decision {
    /// Take the device from these.
    pub revoke: Few<TenantId>,
    /// Then give it to these. If one of them is a holder that is not revoked, its slice begins
    /// anew.
    pub grant: Few<Slice>,
    /// Which tenant will probably hold it next, when a present slice has ended: it can be woken
    /// early. Never a tenant that holds it or is granted it now.
    pub next: Option<TenantId>,
    /// Ask again at this time at the latest, in nanoseconds; `None`: when something has changed.
    pub again_ns: Option<u64>,
}

/// Decides who holds one device.
pub trait SlicePolicy: std::fmt::Debug + Send {
    /// By what name it is chosen.
    fn name(&self) -> &'static str;

    /// `id` has used the device for `device_ns` nanoseconds, inside its slice or beyond it.
    fn charge(&mut self, id: TenantId, device_ns: u64);

    /// What to do, given the view. Afterwards there are at most `view.device.holders` holders.
    fn decide(&mut self, view: &View<'_>) -> Decision;

    /// Everybody has had the device at once since the last decision: what was charged meanwhile is
    /// nobody's debt, and nobody's claim.
    fn resume(&mut self) {}

    /// How far `id` is ahead of what it is due, in nanoseconds of device time: above zero it owes,
    /// below it is owed. `None` where the policy keeps no such account.
    fn debt_ns(&self, id: TenantId) -> Option<i64> {
        let _ = id;
        None
    }

    /// How memory is divided between the classes; `None`: the policy has no say in that.
    fn coordinates(&self) -> Option<CoordinatorTerms> {
        None
    }

    /// How `id` fares with its latency target; `None`: it has none, or the policy does not look at
    /// it.
    fn latency(&self, id: TenantId) -> Option<LatencyReport> {
        let _ = id;
        None
    }

    /// Never more of the work of `id` than this is to be queued on the device, in microseconds, so
    /// that others need not wait longer for it; `None`: the policy does not mind.
    fn in_flight_us(&self, id: TenantId) -> Option<u32> {
        let _ = id;
        None
    }
}

impl<P: SlicePolicy + ?Sized> SlicePolicy for Box<P> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn charge(&mut self, id: TenantId, device_ns: u64) {
        (**self).charge(id, device_ns);
    }

    fn decide(&mut self, view: &View<'_>) -> Decision {
        (**self).decide(view)
    }

    fn resume(&mut self) {
        (**self).resume();
    }

    fn debt_ns(&self, id: TenantId) -> Option<i64> {
        (**self).debt_ns(id)
    }

    fn coordinates(&self) -> Option<CoordinatorTerms> {
        (**self).coordinates()
    }

    fn latency(&self, id: TenantId) -> Option<LatencyReport> {
        (**self).latency(id)
    }

    fn in_flight_us(&self, id: TenantId) -> Option<u32> {
        (**self).in_flight_us(id)
    }
}
