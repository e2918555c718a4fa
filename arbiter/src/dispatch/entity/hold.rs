//! The slice of a tenant that holds the device, from the opening of its gate to its closing; and
//! whether the tenant came for it.
//!
//! Invariants: there is one slice at most. A slice that its tenant is waited for begins when the
//! tenant comes, and after [`GRACE_NS`] at the latest. What a hand-over leaves out of the account
//! is of one slice: nothing of it is left when the gate opens the next time.

use policy::quantum::SwitchCost;
use policy::{Holder, TenantId};

use super::WAKE_NS;

/// A tenant that takes longer than this to come after it was let in is slow: the host has more
/// threads than cores, and a slice may be shorter than the time after which its thread gets one.
const SLOW_START_NS: u64 = 1_000_000;
/// For so long the slice of a tenant that was slow, or missed its last slice, waits for it to
/// begin. It is charged for that time like for the slice.
const GRACE_NS: u64 = WAKE_NS;

/// A slice that has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Hold {
    /// When it began, or begins at the latest where its holder is waited for.
    since_ns: u64,
    /// When the gate opened.
    opened_ns: u64,
    /// How long its gate stays open, in microseconds.
    quantum_us: u32,
}

impl Hold {
    /// When it ends.
    pub fn due_ns(&self) -> u64 {
        self.since_ns
            .saturating_add(u64::from(self.quantum_us) * 1000)
    }

    /// When its gate was opened, and how long it is to stay open, in microseconds.
    pub fn opened(&self) -> (u64, u32) {
        (self.opened_ns, self.quantum_us)
    }

    /// Whether its gate was opened then.
    pub fn was_opened_at(&self, opened_ns: u64) -> bool {
        self.opened_ns == opened_ns
    }

    /// Whether threads that waited when the gate opened may be on their way still.
    pub fn is_waking(&self, now_ns: u64) -> bool {
        now_ns < self.opened_ns + WAKE_NS
    }
}

/// How a slice was used by the tenant that was let in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attendance {
    /// It gave a sign of life.
    Came,
    /// It did not, and had the time.
    Missed,
    /// It did not, in too short a time.
    CutShort,
}

/// Whether a tenant holds the device, and since when.
#[derive(Debug)]
pub struct Holding {
    hold: Option<Hold>,
    /// It has given a sign of life since its gate opened.
    came: bool,
    /// It took long to come the last time.
    slow: bool,
    /// What a hand-over to it costs.
    cost: SwitchCost,
    /// Of the slice that has begun, what is not charged to it.
    forgiven_ns: u64,
    /// Its slice began before the end of the drain before it, which is expected then: until one of
    /// the two happens the device works for the other tenant.
    behind_until_ns: u64,
}

impl Default for Holding {
    fn default() -> Self {
        Self {
            hold: None,
            came: true,
            slow: false,
            cost: SwitchCost::default(),
            forgiven_ns: 0,
            behind_until_ns: 0,
        }
    }
}

impl Holding {
    /// The slice under way.
    pub fn hold(&self) -> Option<Hold> {
        self.hold
    }

    /// The same, as a policy sees it.
    pub fn holder(&self, tenant: TenantId) -> Option<Holder> {
        self.hold.map(|hold| Holder {
            id: tenant,
            since_ns: hold.since_ns,
            quantum_us: hold.quantum_us,
        })
    }

    /// For how long a slice waits for its tenant, if it began now. `waits`: the tenant is at its
    /// gate.
    pub fn grace_ns(&self, waits: bool) -> u64 {
        if self.slow && waits { GRACE_NS } else { 0 }
    }

    /// A slice begins: the gate opens for a tenant that waits there or not, or stays open.
    pub fn begin(&mut self, now_ns: u64, waits: bool, quantum_us: u32) {
        let opened_ns = match self.hold {
            Some(hold) => hold.opened_ns,
            None => {
                self.came = !waits;
                self.slow &= !self.came;
                (self.forgiven_ns, self.behind_until_ns) = (0, 0);
                now_ns
            }
        };
        let grace_ns = if self.came { 0 } else { self.grace_ns(waits) };
        self.hold = Some(Hold {
            since_ns: now_ns + grace_ns,
            opened_ns,
            quantum_us,
        });
    }

    /// No slice is longer than that from now on.
    pub fn shorten(&mut self, most_us: u32) {
        if let Some(hold) = &mut self.hold {
            hold.quantum_us = hold.quantum_us.min(most_us);
        }
    }

    /// The tenant was looked at; `away`: it gave no sign of life.
    pub fn note_coming(&mut self, now_ns: u64, away: bool) {
        if self.came || away {
            return;
        }
        self.came = true;
        if let Some(hold) = &mut self.hold {
            self.slow = now_ns > hold.opened_ns + SLOW_START_NS;
            hold.since_ns = hold.since_ns.min(now_ns);
        }
    }

    /// What the hand-over to it leaves out of its account: what one to it costs, as far as that is
    /// known, and no more than `most_ns`. Who comes at once has nothing to be let off.
    pub fn excuse(&mut self, most_ns: u64, behind_until_ns: u64) {
        self.forgiven_ns = self.hand_over_ns().map_or(most_ns, |ns| ns.min(most_ns));
        self.behind_until_ns = behind_until_ns;
    }

    /// A hand-over to it left the device idle for so long.
    pub fn note_hand_over(&mut self, idle_ns: u64) {
        self.cost.note(idle_ns);
    }

    /// For how long hand-overs to it do, as learnt; `None`: none was seen.
    pub fn hand_over_ns(&self) -> Option<u64> {
        (self.cost.seen() > 0).then_some(self.cost.ns())
    }

    /// Whether it is queued behind a drain, where there is one.
    pub fn is_behind(&self, now_ns: u64) -> bool {
        now_ns <= self.behind_until_ns
    }

    /// What remains of a charge once what is nobody's was taken off.
    pub fn forgive(&mut self, got_ns: u64) -> u64 {
        if self.hold.is_none() {
            return got_ns;
        }
        let forgiven_ns = got_ns.min(self.forgiven_ns);
        self.forgiven_ns -= forgiven_ns;
        got_ns - forgiven_ns
    }

    /// The gate closes. Returns the slice that has ended.
    pub fn end(&mut self) -> Option<Hold> {
        self.hold.take()
    }

    /// Whether the tenant came for a slice that has ended; `away`: it had given no sign of life
    /// when its gate had closed.
    pub fn attendance(&mut self, now_ns: u64, ended: Hold, away: bool) -> Attendance {
        self.came |= !away;
        self.slow |= !self.came;
        if self.came {
            Attendance::Came
        } else if now_ns >= ended.due_ns().min(ended.opened_ns + WAKE_NS) {
            Attendance::Missed
        } else {
            Attendance::CutShort
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn since_ns(holding: &Holding) -> u64 {
        holding.hold().expect("a slice").since_ns
    }

    #[test]
    fn the_slice_of_a_slow_tenant_begins_when_it_comes_and_at_the_latest_after_its_grace() {
        let mut holding = Holding::default();
        assert_eq!(holding.grace_ns(true), 0, "nothing is known of it");
        holding.begin(100 * MS, true, 3000);
        holding.note_coming(100 * MS + SLOW_START_NS + 1, false);
        assert!(holding.end().is_some() && holding.end().is_none());
        assert_eq!(holding.grace_ns(false), 0, "nobody waits");
        holding.begin(200 * MS, true, 3000);
        let hold = holding.hold().expect("a slice");
        assert_eq!(hold.due_ns(), 200 * MS + GRACE_NS + 3 * MS);
        assert!(hold.was_opened_at(200 * MS));
        holding.note_coming(203 * MS, true);
        assert_eq!(since_ns(&holding), 200 * MS + GRACE_NS);
        holding.note_coming(204 * MS, false);
        holding.note_coming(201 * MS, false);
        assert_eq!(since_ns(&holding), 204 * MS, "it comes once");
        // It keeps the device: its gate has been open since then.
        holding.begin(207 * MS, true, 3000);
        assert_eq!(since_ns(&holding), 207 * MS);
        assert!(
            holding
                .hold()
                .is_some_and(|hold| hold.was_opened_at(200 * MS))
        );
        holding.end();
        holding.begin(300 * MS, false, 3000);
        assert_eq!(since_ns(&holding), 300 * MS, "nobody is waited for");
        holding.end();
        assert_eq!(holding.grace_ns(true), 0, "it is not slow any more");
    }

    #[test]
    fn what_a_hand_over_leaves_out_is_of_one_slice() {
        let mut holding = Holding::default();
        holding.excuse(300, 0);
        assert_eq!(holding.forgive(200), 200, "it has no slice");
        holding.begin(1000, false, 3000);
        assert_eq!(holding.forgive(200), 200, "that was before this one");
        holding.excuse(300, 1500);
        assert!(holding.is_behind(1500) && !holding.is_behind(1501));
        assert_eq!([200, 200, 200].map(|ns| holding.forgive(ns)), [0, 100, 200]);
        holding.excuse(300, 1500);
        holding.begin(1200, false, 3000);
        assert!(holding.is_behind(1400), "it goes on");
        holding.end();
        holding.begin(1300, false, 3000);
        assert!(!holding.is_behind(1400));
        assert_eq!(holding.forgive(200), 200);
    }

    #[test]
    fn a_hand_over_leaves_out_what_those_to_this_tenant_cost_and_no_more_than_others() {
        let left_out = |own_ns: &[u64], most_ns: u64| {
            let mut holding = Holding::default();
            own_ns.iter().for_each(|ns| holding.note_hand_over(*ns));
            holding.begin(1000, false, 3000);
            holding.excuse(most_ns, 0);
            1000 - holding.forgive(1000)
        };
        assert_eq!(left_out(&[], 300), 300, "nothing is known of it");
        assert_eq!(left_out(&[0, 0], 300), 0, "it comes at once");
        assert_eq!(left_out(&[100, 100], 300), 100);
        assert_eq!(left_out(&[900, 900], 300), 300, "whatever it claims");
        assert_eq!(left_out(&[900, 900], 0), 0);
    }

    #[test]
    fn who_does_not_come_has_missed_a_slice_that_was_long_enough() {
        let mut holding = Holding::default();
        let mut after = |waits: bool, ns: u64, away: bool| {
            holding.begin(0, waits, 3000);
            let hold = holding.end().expect("a slice");
            holding.attendance(ns, hold, away)
        };
        assert_eq!(after(true, 2 * MS, true), Attendance::CutShort);
        // It is slow now: its slice begins later.
        assert_eq!(after(true, 3 * MS, true), Attendance::CutShort);
        assert_eq!(after(true, WAKE_NS, true), Attendance::Missed);
        assert_eq!(after(true, WAKE_NS, false), Attendance::Came);
        assert_eq!(
            after(false, WAKE_NS, true),
            Attendance::Came,
            "it was let in unasked"
        );
    }

    #[test]
    fn shorter_slices_hold_for_the_one_under_way() {
        let mut holding = Holding::default();
        holding.shorten(1000);
        assert_eq!(holding.hold(), None);
        holding.begin(0, false, 3000);
        holding.shorten(2000);
        holding.shorten(5000);
        assert_eq!(holding.hold().map(|hold| hold.due_ns()), Some(2 * MS));
    }
}
