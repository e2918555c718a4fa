//! The time in which a holder that went in before the end of a drain shares the device with that
//! drain: whose it was.
//!
//! The device works for the drain until its end, and then for the holder; but where it turns to the
//! holder before the last work of the drain, which is a matter of when its own time slice ends, it
//! stays there for all of its next one, and the drain ends a time slice of the device (2 ms) late.
//! Who had such a time cannot be seen while it lasts. It is charged by halves, and the half of the
//! drain is kept back until the drain is over and the holder's marks show whose it was: what those
//! that passed usually take, less what the holder had to itself meanwhile, is what it had of the
//! contested time. Where no mark passes before the slice ends the halves stay. They stay, too,
//! where the drain goes on for longer: then the device turns to and fro between the two.
//!
//! Invariants: what is kept back is charged once, to the drains or to the holder; the holder never
//! has less than its half, nor more than all.

use policy::TenantId;

/// Nothing is kept back for longer: the device has been to and fro by then.
const KEPT_BACK_NS: u64 = 4_000_000;

/// The contested time of one slice, in nanoseconds.
#[derive(Debug, Default)]
pub(super) struct Contest {
    holder: Option<TenantId>,
    /// What the holder had to itself since.
    own_ns: u64,
    /// What both had together.
    shared_ns: u64,
    /// What the holder's marks that have passed since usually take.
    passed_ns: u64,
    /// Of `shared_ns`, what is kept back, by drain.
    kept_back: Vec<(TenantId, u64)>,
    /// It went on for too long in this slice: nothing more is kept back.
    given_up: bool,
}

impl Contest {
    /// Whether something is kept back.
    pub fn is_open(&self) -> bool {
        !self.kept_back.is_empty()
    }

    /// Whether what is contested with this holder may be kept back.
    pub fn may_keep_back(&self, holder: TenantId) -> bool {
        !(self.given_up && self.holder == Some(holder))
    }

    /// So much time is contested.
    pub fn share(&mut self, holder: TenantId, ns: u64) {
        if !self.is_open() {
            *self = Self::default();
        }
        self.holder = Some(holder);
        self.shared_ns += ns;
    }

    /// Of that, so much is the drain's unless the holder had it.
    pub fn keep_back(&mut self, drain: TenantId, ns: u64) {
        match self.kept_back.iter_mut().find(|(of, _)| *of == drain) {
            Some((_, kept_ns)) => *kept_ns += ns,
            None => self.kept_back.push((drain, ns)),
        }
    }

    /// Whether it has gone on for too long.
    pub fn is_overdue(&self) -> bool {
        self.shared_ns > KEPT_BACK_NS
    }

    /// Whether this drain is in it.
    pub fn has(&self, drain: TenantId) -> bool {
        self.kept_back.iter().any(|(of, _)| *of == drain)
    }

    /// Its holder, where something is kept back.
    pub fn holder(&self) -> Option<TenantId> {
        self.holder.filter(|_| self.is_open())
    }

    /// The holder had the device to itself for so long.
    pub fn add_own(&mut self, ns: u64) {
        if self.is_open() {
            self.own_ns += ns;
        }
    }

    /// Marks of the holder have passed which usually take so long.
    pub fn pass(&mut self, ns: u64) {
        if self.is_open() {
            self.passed_ns = self.passed_ns.saturating_add(ns);
        }
    }

    /// Whether the holder's marks show what it had.
    pub fn is_known(&self) -> bool {
        self.passed_ns > 0
    }

    /// It goes on for too long: halves, from here to the end of the slice. Returns who is to be
    /// charged for what was kept back.
    pub fn give_up(&mut self) -> Vec<(TenantId, u64)> {
        let holder = self.holder;
        self.passed_ns = 0;
        let charges = self.settle();
        (self.holder, self.given_up) = (holder, true);
        charges
    }

    /// The drain is over and marks have passed, or the slice is over. Returns who is to be charged
    /// for what was kept back.
    pub fn settle(&mut self) -> Vec<(TenantId, u64)> {
        let Self {
            holder,
            own_ns,
            shared_ns,
            passed_ns,
            kept_back,
            ..
        } = std::mem::take(self);
        let kept_ns: u64 = kept_back.iter().map(|(_, ns)| ns).sum();
        let Some(holder) = holder.filter(|_| kept_ns > 0) else {
            return Vec::new();
        };
        let had_ns = passed_ns.saturating_sub(own_ns);
        let more_ns = had_ns
            .saturating_sub(shared_ns.saturating_sub(kept_ns))
            .min(kept_ns);
        let mut left_ns = more_ns;
        let mut charges = Vec::with_capacity(kept_back.len() + 1);
        for (drain, ns) in kept_back {
            // From one after the other: almost always there is one.
            let taken_ns = left_ns.min(ns);
            left_ns -= taken_ns;
            charges.push((drain, ns - taken_ns));
        }
        charges.push((holder, more_ns));
        charges.retain(|(_, ns)| *ns > 0);
        charges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);
    const C: TenantId = TenantId(3);

    fn settled(own_ns: u64, shared_ns: u64, passed_ns: u64) -> Vec<(TenantId, u64)> {
        let mut contest = Contest::default();
        contest.share(B, shared_ns);
        contest.keep_back(A, shared_ns / 2);
        contest.pass(passed_ns / 2);
        contest.add_own(own_ns);
        contest.pass(passed_ns / 2);
        assert_eq!(contest.is_known(), passed_ns > 0);
        contest.settle()
    }

    #[test]
    fn what_the_marks_of_the_holder_took_is_its_own() {
        assert_eq!(settled(0, 2000, 2000), [(B, 1000)]);
        assert_eq!(settled(0, 2000, 9000), [(B, 1000)], "at most");
        assert_eq!(settled(0, 2000, 1400), [(A, 600), (B, 400)]);
        assert_eq!(settled(500, 2000, 1900), [(A, 600), (B, 400)]);
    }

    #[test]
    fn without_marks_the_halves_stay() {
        assert_eq!(settled(0, 2000, 0), [(A, 1000)]);
        assert_eq!(settled(0, 2000, 700), [(A, 1000)]);
        assert_eq!(settled(5000, 2000, 4000), [(A, 1000)]);
    }

    #[test]
    fn what_is_kept_back_is_charged_once() {
        let mut contest = Contest::default();
        contest.share(B, 3000);
        contest.keep_back(A, 1500);
        contest.keep_back(C, 500);
        contest.keep_back(A, 500);
        contest.pass(2200);
        assert!(contest.has(A) && contest.has(C) && !contest.has(B));
        assert_eq!(contest.settle(), [(A, 300), (C, 500), (B, 1700)]);
        assert!(!contest.is_open() && contest.holder().is_none());
        assert_eq!(contest.settle(), []);
        contest.add_own(100);
        contest.pass(100);
        contest.share(C, 10);
        assert_eq!(contest.settle(), [], "nothing was kept back");
    }

    #[test]
    fn one_that_goes_on_is_given_up_for_the_slice() {
        let mut contest = Contest::default();
        contest.share(B, KEPT_BACK_NS);
        contest.keep_back(A, KEPT_BACK_NS / 2);
        assert!(!contest.is_overdue() && contest.may_keep_back(B));
        contest.share(B, 2);
        contest.keep_back(A, 1);
        contest.pass(KEPT_BACK_NS);
        assert!(contest.is_overdue());
        assert_eq!(contest.give_up(), [(A, KEPT_BACK_NS / 2 + 1)]);
        assert!(!contest.may_keep_back(B) && contest.may_keep_back(C));
        contest.settle();
        assert!(contest.may_keep_back(B), "another slice");
    }
}
