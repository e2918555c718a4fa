//! How a device is scheduled: what a quota file or an operator chooses, in the scheduler's own
//! units.

use policy::SlicePolicy;
use policy::quantum::Lengths;

/// How a device is scheduled; times in nanoseconds unless named otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pace {
    /// What a slice may last.
    pub quantum: Lengths,
    /// How long work may stay queued while several tenants want the device.
    pub window_us: u32,
    /// The same for a tenant alone.
    pub lone_window_us: u32,
    /// The same for an opportunistic tenant beside a guaranteed one, which may have to wait for
    /// that much when it comes back.
    pub gap_window_us: u32,
    /// How often the holder is looked at while a tenant waits, and in-flight work while it lasts.
    pub look_ns: u64,
    /// The same while only opportunistic tenants wait.
    pub gap_look_ns: u64,
    /// How often the end of a drain is looked for while the next slice waits for it.
    pub drain_look_ns: u64,
    /// How long the next slice waits for a drain.
    pub drain_ns: u64,
    /// How long a holder without work in flight must have submitted nothing to count as idle, at
    /// first.
    pub quiet_ns: u64,
    /// The same for one that was passed over again and again and came back at once (anticipation:
    /// S. Iyer, P. Druschel, "Anticipatory scheduling", SOSP 2001).
    pub quiet_max_ns: u64,
    /// The same where only opportunistic tenants wait for a guaranteed one to fall idle: what it is
    /// worth waiting is less, for it has the device back within a window.
    pub gap_quiet_max_ns: u64,
    /// The same where it has submitted work that no mark covers.
    pub unmarked_quiet_ns: u64,
    /// How often a tenant alone is looked at, for the accounts.
    pub tick_ns: u64,
    /// How long before the end of a slice the next tenant is woken, so that its threads are up when
    /// their gate opens; 0: they are woken by the opening.
    pub lead_ns: u64,
    /// What the device takes to turn from one process's context to another's: slices are long
    /// enough for that as well.
    pub turn_ns: u64,
}

/// One at a time, or all at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Slices.
    Exclusive,
    /// Every gate is open, but for who is ahead while somebody who is behind is held up.
    Lend,
    /// Every gate is open; only memory is limited.
    Concurrent,
    /// All at once while that serves every guaranteed tenant as well as slices do, else slices.
    Auto,
}

/// What becomes of a tenant that harms the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// It is reported.
    Report,
    /// It also runs after all others for a while.
    Demote,
    /// Its processes are also ended.
    Kill,
}

/// How a device is run.
#[derive(Debug)]
pub struct Setup {
    /// One at a time, or all at once.
    pub mode: Mode,
    /// How fast.
    pub pace: Pace,
    /// How many tenants may hold the device at once in slices.
    pub holders: usize,
    /// Who runs next; `None`: the policy stays.
    pub policy: Option<Box<dyn SlicePolicy>>,
    /// What becomes of a tenant that harms the others.
    pub answer: Answer,
    /// Memory of the device in bytes; 0: not known.
    pub memory_bytes: u64,
}
