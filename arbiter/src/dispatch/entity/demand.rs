//! Whether a tenant wants the device, and whether it uses it.
//!
//! Invariants: a tenant without the device is busy while it drains, and only then. One that has the
//! device and nothing on it is idle once it has been silent for its quiet time, which stays within
//! what the pace allows and is learnt from how soon the tenant came back.

use super::hold::Hold;
use crate::dispatch::pace::Pace;
use crate::peer::Activity;

/// The demand of a tenant for the device.
#[derive(Debug)]
pub struct Demand {
    /// Somebody waits at its gate.
    waits: bool,
    /// It is charged for the time from here on.
    busy: bool,
    /// How long it may be silent before it counts as idle.
    quiet_ns: u64,
    /// It holds the device and had nothing on it when it was looked at last: it counts as idle
    /// then, unless it does something.
    idle_ns: Option<u64>,
    /// It counts as wanting the device until then although nobody waits: its slice ended while it
    /// was at work, or its in-flight work has not ended. Its threads are inside the driver, or on
    /// their way to the gate.
    ready_until_ns: u64,
    /// It lost the device because it was silent, and has not come back since.
    passed_over: bool,
    /// When it was last seen to do something; `None`: never, since its gate opened.
    active_ns: Option<u64>,
}

/// How a tenant that has the device, or drains, is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Look {
    /// What its clients claim.
    pub seen: Activity,
    /// It has submitted something since it was looked at last.
    pub submitted: bool,
    /// The slice that it has.
    pub hold: Option<Hold>,
    /// It has no slice, and its in-flight work has not ended.
    pub drains: bool,
    /// Only opportunistic tenants wait for it to fall silent.
    pub gap: bool,
}

impl Demand {
    pub fn new(pace: &Pace) -> Self {
        Self {
            waits: false,
            busy: false,
            quiet_ns: pace.quiet_ns,
            idle_ns: None,
            ready_until_ns: 0,
            passed_over: false,
            active_ns: None,
        }
    }

    /// Whether somebody waits at its gate.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Whether it is charged for the time from here on.
    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// When it counts as idle, where it has the device and nothing on it.
    pub fn idle_ns(&self) -> Option<u64> {
        self.idle_ns
    }

    /// Whether it would use the device if it were let in.
    pub fn wants(&self, now_ns: u64) -> bool {
        self.waits || now_ns < self.ready_until_ns
    }

    /// The pace is another one.
    pub fn adapt(&mut self, pace: &Pace) {
        self.quiet_ns = self.quiet_ns.clamp(pace.quiet_ns, pace.quiet_max_ns);
    }

    /// It has nothing to do with the device but that it may wait for it. One that comes back after
    /// a pause that was short enough to wait for is waited for longer next time.
    pub fn look_outside(&mut self, now_ns: u64, waits: bool, pace: &Pace) {
        self.waits = waits;
        if !self.waits || !std::mem::take(&mut self.passed_over) {
            return;
        }
        let pause_ns = now_ns.saturating_sub(self.active_ns.unwrap_or(0));
        let changed_ns = if pause_ns < pace.quiet_max_ns {
            self.quiet_ns * 2
        } else {
            self.quiet_ns / 2
        };
        self.quiet_ns = changed_ns.clamp(pace.quiet_ns, pace.quiet_max_ns);
    }

    /// It has the device, or drains. Giving way too early to opportunistic tenants costs no more
    /// than their window, so less silence will do where only those wait.
    pub fn look(&mut self, now_ns: u64, look: Look, pace: &Pace) {
        let Look { seen, hold, .. } = look;
        self.waits = seen.waits;
        let woken = hold.is_some_and(|hold| hold.is_waking(now_ns));
        if seen.is_on_device() || look.submitted || (seen.waits && woken) {
            self.active_ns = Some(now_ns);
        }
        let quiet_ns = if look.gap {
            (self.quiet_ns / 3 * 2).min(pace.gap_quiet_max_ns)
        } else {
            self.quiet_ns
        };
        let quiet_ns = if seen.unmarked {
            pace.unmarked_quiet_ns.max(quiet_ns)
        } else {
            quiet_ns
        };
        if look.drains {
            self.ready_until_ns = now_ns + self.quiet_ns;
        }
        let silent = !(seen.is_on_device() || seen.waits);
        let idle_ns = self.active_ns.map(|active_ns| active_ns + quiet_ns);
        self.idle_ns = idle_ns.filter(|_| hold.is_some() && silent);
        self.busy = if hold.is_some() {
            idle_ns.is_some_and(|idle_ns| now_ns < idle_ns)
        } else {
            look.drains
        };
    }

    /// Its gate opens at that time by itself. When that is confirmed it no longer waits.
    pub fn expect_turn(&mut self, turn_ns: u64) {
        self.ready_until_ns = self.ready_until_ns.max(turn_ns + self.quiet_ns);
    }

    /// Its gate opens. One that waits is about to begin; one that was let in unasked may never.
    pub fn begin_slice(&mut self, now_ns: u64) {
        let wants = self.wants(now_ns);
        self.active_ns = wants.then_some(now_ns);
        self.busy = wants;
    }

    /// It is charged for all of its slice: others wait.
    pub fn keep_busy(&mut self) {
        self.busy = true;
    }

    /// Its gate has closed. `waits`: somebody waits there, and is believed to come if let in.
    pub fn end_slice(&mut self, now_ns: u64, drains: bool, waits: bool) {
        self.idle_ns = None;
        self.passed_over = !self.busy;
        if self.busy || drains {
            self.ready_until_ns = now_ns + self.quiet_ns;
        }
        (self.busy, self.waits) = (drains, waits);
    }

    /// All of its clients are gone.
    pub fn clear(&mut self) {
        (self.waits, self.busy) = (false, false);
        (self.idle_ns, self.ready_until_ns) = (None, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::hold::Holding;
    use super::*;
    use crate::dispatch::Mode;
    use crate::dispatch::tests::{MS, US, setup};

    fn slice_at(now_ns: u64) -> Option<Hold> {
        let mut holding = Holding::default();
        holding.begin(now_ns, false, 3000);
        holding.hold()
    }

    fn silent(hold: Option<Hold>) -> Look {
        Look {
            seen: Activity::default(),
            submitted: false,
            hold,
            drains: false,
            gap: false,
        }
    }

    #[test]
    fn a_holder_is_idle_once_it_has_been_silent_for_its_quiet_time() {
        let pace = setup(Mode::Exclusive).pace;
        let mut demand = Demand::new(&pace);
        demand.look_outside(0, true, &pace);
        demand.begin_slice(20 * MS);
        let hold = slice_at(20 * MS);
        let at = |demand: &mut Demand, ns: u64, look: Look| {
            demand.look(ns, look, &pace);
            (demand.is_busy(), demand.idle_ns())
        };
        let submitted = Look {
            submitted: true,
            ..silent(hold)
        };
        let idle_ns = 21 * MS + pace.quiet_ns;
        assert_eq!(at(&mut demand, 21 * MS, submitted), (true, Some(idle_ns)));
        assert!(at(&mut demand, idle_ns - 1, silent(hold)).0);
        assert!(!at(&mut demand, idle_ns, silent(hold)).0);
        // Something is on the device: it is not silent.
        let works = Look {
            seen: Activity {
                marks: 1,
                ..Activity::default()
            },
            ..silent(hold)
        };
        assert_eq!(at(&mut demand, 22 * MS, works), (true, None));
        let gap = Look {
            gap: true,
            ..silent(hold)
        };
        let (_, idle_ns) = at(&mut demand, 22 * MS, gap);
        assert!(idle_ns.is_some_and(|ns| ns < 22 * MS + pace.quiet_ns));
        demand.end_slice(23 * MS, false, false);
        assert_eq!((demand.is_busy(), demand.idle_ns()), (false, None));
    }

    #[test]
    fn without_the_device_it_is_busy_while_it_drains_and_wants_it_a_little_longer() {
        let pace = setup(Mode::Exclusive).pace;
        let mut demand = Demand::new(&pace);
        demand.look_outside(0, true, &pace);
        demand.begin_slice(0);
        demand.end_slice(3 * MS, true, false);
        assert!(demand.is_busy() && demand.wants(3 * MS));
        let drains = Look {
            drains: true,
            ..silent(None)
        };
        demand.look(4 * MS, drains, &pace);
        demand.look(5 * MS, silent(None), &pace);
        assert!(!demand.is_busy());
        assert!(demand.wants(4 * MS + pace.quiet_ns - 1) && !demand.wants(4 * MS + pace.quiet_ns));
        demand.expect_turn(9 * MS);
        demand.expect_turn(7 * MS);
        assert!(demand.wants(9 * MS));
        demand.clear();
        assert!(!demand.wants(0));
    }

    #[test]
    fn the_quiet_time_is_learnt_from_pauses_and_stays_within_the_pace() {
        let pace = setup(Mode::Exclusive).pace;
        let mut demand = Demand::new(&pace);
        let mut now_ns = MS;
        // It is passed over as soon as it counts as idle, and comes back so long after it was
        // last at work.
        let mut comes_back_after = |demand: &mut Demand, ns: u64| {
            demand.look_outside(now_ns, true, &pace);
            demand.begin_slice(now_ns);
            let idle_ns = now_ns + demand.quiet_ns;
            demand.look(idle_ns, silent(slice_at(now_ns)), &pace);
            demand.end_slice(idle_ns, false, false);
            now_ns += ns;
            demand.look_outside(now_ns, true, &pace);
            demand.quiet_ns
        };
        let learnt = [(); 3].map(|()| comes_back_after(&mut demand, 1500 * US));
        assert_eq!(learnt, [600 * US, 1200 * US, pace.quiet_max_ns]);
        let learnt = [(); 3].map(|()| comes_back_after(&mut demand, 100 * MS));
        assert_eq!(learnt, [800 * US, 400 * US, pace.quiet_ns]);
        let slower = Pace {
            quiet_ns: 500 * US,
            ..pace
        };
        demand.adapt(&slower);
        assert_eq!(demand.quiet_ns, 500 * US);
    }
}
