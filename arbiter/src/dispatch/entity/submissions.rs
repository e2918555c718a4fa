//! What a tenant has submitted, as its clients count it, and what a submission of it takes.
//!
//! Counts are the clients' own and may be of any value. Invariants: each submission counts once; a
//! count that goes back counts for nothing.

use crate::dispatch::unfinished::Moved;
use crate::peer::Activity;
use crate::tally::growth;

/// Device time over which the mean is taken.
const MEAN_OVER_NS: u64 = 500_000_000;

/// The submissions of a tenant.
#[derive(Debug, Default)]
pub struct Submissions {
    /// As they were counted last.
    launches: u64,
    /// Marks that had passed then.
    passed: u64,
    /// How many of them had not when it was looked before.
    newly_passed: u64,
    /// What was charged since marks passed.
    unpassed_ns: u64,
    rate: Rate,
    /// Of marks, learnt where nothing else was on the device.
    marks: Rate,
}

impl Submissions {
    /// Clients have come or gone: counts from here.
    pub fn count_from(&mut self, seen: Activity) {
        (self.launches, self.passed) = (seen.launches, seen.passed);
    }

    /// Counts them. Returns what has changed.
    pub fn look(&mut self, seen: Activity) -> Moved {
        let moved = Moved {
            submitted: self.has_changed(seen),
            passed: seen.passed != self.passed,
        };
        self.rate.launch(self.since(seen));
        self.newly_passed = growth(self.passed, seen.passed).unwrap_or(0);
        (self.launches, self.passed) = (seen.launches, seen.passed);
        moved
    }

    /// Whether there are other submissions than were counted last.
    pub fn has_changed(&self, seen: Activity) -> bool {
        seen.launches != self.launches
    }

    /// How many there are beyond what was counted last.
    pub fn since(&self, seen: Activity) -> u64 {
        growth(self.launches, seen.launches).unwrap_or(0)
    }

    /// They were charged for so long.
    pub fn charge(&mut self, ns: u64) {
        self.rate.charge(ns);
        self.unpassed_ns += ns;
    }

    /// How long the marks that were found to have passed by the last look take in the mean; `None`:
    /// none has passed, or it is not known.
    pub fn passed_ns(&self) -> Option<u64> {
        let passed = Some(self.newly_passed).filter(|passed| *passed > 0);
        self.marks.takes_ns(passed?)
    }

    /// Learns what marks take: `whole`: what was charged since the last ones passed was theirs, and
    /// theirs alone.
    pub fn learn_marks(&mut self, whole: bool) {
        if !whole {
            self.unpassed_ns = 0;
        } else if self.newly_passed > 0 {
            self.marks.charge(std::mem::take(&mut self.unpassed_ns));
            self.marks.launch(self.newly_passed);
        }
    }

    /// How long so many take; `None`: not known.
    pub fn take_ns(&self, launches: u64) -> Option<u64> {
        self.rate.takes_ns(launches)
    }
}

/// What a submission takes in the mean, the recent ones weighing most.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Rate {
    ns: u64,
    launches: u64,
}

impl Rate {
    /// It was charged for so long.
    fn charge(&mut self, ns: u64) {
        self.ns += ns;
        if self.ns > MEAN_OVER_NS {
            (self.ns, self.launches) = (self.ns / 2, self.launches / 2);
        }
    }

    /// So many submissions were seen.
    fn launch(&mut self, launches: u64) {
        self.launches = self.launches.saturating_add(launches);
    }

    /// What so many take; `None`: not known.
    fn takes_ns(self, launches: u64) -> Option<u64> {
        let each_ns = self.ns.checked_div(self.launches)?;
        Some(each_ns.saturating_mul(launches))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(launches: u64, passed: u64) -> Activity {
        Activity {
            launches,
            passed,
            ..Activity::default()
        }
    }

    #[test]
    fn each_submission_counts_once_and_a_count_that_goes_back_for_nothing() {
        let mut submissions = Submissions::default();
        let (both, none) = (
            Moved {
                submitted: true,
                passed: true,
            },
            Moved::default(),
        );
        submissions.count_from(seen(1000, 0));
        assert_eq!(submissions.since(seen(1010, 0)), 10);
        assert_eq!(submissions.look(seen(1010, 3)), both);
        assert_eq!(submissions.look(seen(1010, 3)), none);
        submissions.charge(50);
        assert_eq!(submissions.take_ns(1), Some(5));
        // One of its processes has ended.
        assert!(submissions.has_changed(seen(400, 1)));
        assert_eq!(submissions.since(seen(400, 1)), 0);
        assert_eq!(submissions.look(seen(400, 1)), both);
        assert_eq!(submissions.take_ns(1), Some(5));
        assert_eq!(submissions.since(seen(401, 1)), 1);
    }

    #[test]
    fn the_mean_follows_what_submissions_take() {
        let mut rate = Rate::default();
        assert_eq!(rate.takes_ns(3), None);
        for _ in 0..2000 {
            rate.launch(1);
            rate.charge(1_000_000);
        }
        let takes_ns = rate.takes_ns(3).expect("known");
        assert!(takes_ns.abs_diff(3_000_000) < 50_000, "{takes_ns}");
        for _ in 0..20_000 {
            rate.launch(1);
            rate.charge(200_000);
        }
        let takes_ns = rate.takes_ns(3).expect("known");
        assert!(takes_ns.abs_diff(600_000) < 50_000, "{takes_ns}");
    }
}
