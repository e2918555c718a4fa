//! Violations: what tenants that harm the others are found to do, and the penalty.
//!
//! Nothing here is needed to protect the others: gates close without the tenant's help, what it
//! does is charged, and what it claims hurts only itself. This is about reports, and about running
//! such a tenant after all others until it behaves.

use super::pace::Answer;

/// How long a tenant runs last after its last violation. The only sign that an unresponsive one has
/// recovered is that it comes when it is let in, so it is given a chance more often; that costs the
/// others a slice.
const PENALTY_NS: u64 = 10_000_000_000;
const UNRESPONSIVE_PENALTY_NS: u64 = 2_000_000_000;
/// The same violation is reported again after this long.
const SILENCE_NS: u64 = 10_000_000_000;

/// What a tenant is found to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Violation {
    /// It waits, is let in, and never comes: its process is stopped or frozen.
    Unresponsive,
    /// What it had on the device when its slice ended is still not done.
    Endless {
        /// For so long, in milliseconds.
        ms: u64,
    },
    /// It submits although its gate is closed.
    Ungated {
        /// So many submissions in a tenth of a second.
        launches: u64,
    },
    /// It rings without end.
    Flood,
    /// Its page holds what no library of ours writes.
    Nonsense,
}

impl Violation {
    /// For programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Unresponsive => "unresponsive",
            Self::Endless { .. } => "endless",
            Self::Ungated { .. } => "ungated",
            Self::Flood => "flood",
            Self::Nonsense => "nonsense",
        }
    }

    /// For people, after the job's name.
    pub fn text(self) -> String {
        match self {
            Self::Unresponsive => "waits for the device and does not come when it is let in".into(),
            Self::Endless { ms } => {
                format!("still has work on the device {ms} ms after its slice has ended")
            }
            Self::Ungated { launches } => {
                format!("submits without a grant: {launches} times in a tenth of a second")
            }
            Self::Flood => "floods the arbiter with requests".into(),
            Self::Nonsense => "writes what makes no sense into its page".into(),
        }
    }
}

/// How a tenant behaves on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ViolationRecord {
    violation: Option<Violation>,
    /// It runs last until then.
    demoted_until_ns: u64,
    reported_ns: Option<u64>,
    /// How often it was found out.
    count: u64,
}

impl ViolationRecord {
    /// A violation was found. True where that is to be reported.
    pub fn find(&mut self, now_ns: u64, violation: Violation, answer: Answer) -> bool {
        let same = self
            .violation
            .is_some_and(|before| before.word() == violation.word());
        self.violation = Some(violation);
        if answer != Answer::Report {
            let penalty_ns = match violation {
                Violation::Unresponsive => UNRESPONSIVE_PENALTY_NS,
                _ => PENALTY_NS,
            };
            self.demoted_until_ns = self.demoted_until_ns.max(now_ns + penalty_ns);
        }
        let silent = same
            && self
                .reported_ns
                .is_some_and(|reported_ns| now_ns < reported_ns + SILENCE_NS);
        if silent {
            return false;
        }
        self.count += 1;
        self.reported_ns = Some(now_ns);
        true
    }

    /// How often it was found out.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Why it runs after all others.
    pub fn demoted(&self, now_ns: u64) -> Option<Violation> {
        self.violation.filter(|_| now_ns < self.demoted_until_ns)
    }

    /// Its penalty is over: true once, the first time after that.
    pub fn forgive(&mut self, now_ns: u64) -> bool {
        let over = self.demoted_until_ns > 0 && now_ns >= self.demoted_until_ns;
        if over {
            (self.demoted_until_ns, self.violation) = (0, None);
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_violator_runs_last_until_some_time_after_its_last_violation() {
        let mut record = ViolationRecord::default();
        assert_eq!(record.demoted(0), None);
        assert!(record.find(S, Violation::Flood, Answer::Demote));
        assert!(
            !record.find(2 * S, Violation::Flood, Answer::Demote),
            "reported"
        );
        assert_eq!(record.demoted(11 * S), Some(Violation::Flood));
        assert!(!record.forgive(11 * S));
        assert_eq!(record.demoted(12 * S), None);
        assert!(record.forgive(12 * S) && !record.forgive(13 * S));
        assert_eq!(record.count, 1);
        assert!(record.find(20 * S, Violation::Unresponsive, Answer::Demote));
        assert_eq!(record.demoted(21 * S), Some(Violation::Unresponsive));
        assert_eq!(record.demoted(22 * S), None, "it has another chance soon");
    }

    #[test]
    fn another_violation_and_the_same_one_much_later_are_reported() {
        let mut record = ViolationRecord::default();
        assert!(record.find(S, Violation::Flood, Answer::Demote));
        assert!(record.find(S, Violation::Endless { ms: 1000 }, Answer::Demote));
        assert!(!record.find(2 * S, Violation::Endless { ms: 2000 }, Answer::Demote));
        assert!(record.find(12 * S, Violation::Endless { ms: 12_000 }, Answer::Demote));
        assert_eq!(record.count, 3);
    }

    #[test]
    fn one_that_is_only_reported_keeps_its_place() {
        let mut record = ViolationRecord::default();
        assert!(record.find(S, Violation::Nonsense, Answer::Report));
        assert_eq!(record.demoted(S), None);
    }
}
