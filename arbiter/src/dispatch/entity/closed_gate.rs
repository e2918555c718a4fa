//! Submissions past a closed gate.
//!
//! Invariant: they are counted between two inspections of one time that the gate is closed, and
//! only once what was on its way when it closed has arrived.

use crate::dispatch::violation::Violation;
use crate::tally::growth;

/// So many submissions past a closed gate between two inspections are no race with its closing.
const UNGATED: u64 = 256;
/// Its gate was closed for at least so long, so that what was on its way has arrived.
const SETTLED_NS: u64 = 50_000_000;

/// The gate of a tenant while it is closed.
#[derive(Debug)]
pub struct ClosedGate {
    /// When it closed last.
    since_ns: u64,
    /// The tenant's submissions at the last inspection since.
    launches: Option<u64>,
}

impl ClosedGate {
    pub fn new(now_ns: u64) -> Self {
        Self {
            since_ns: now_ns,
            launches: None,
        }
    }

    /// It closes, after the tenant's slice or behind co-ranks.
    pub fn close(&mut self, now_ns: u64) {
        *self = Self::new(now_ns);
    }

    /// Looks whether the tenant has submitted since the last inspection. `open`: the gate is open
    /// to some of its clients.
    pub fn inspect(
        &mut self,
        now_ns: u64,
        open: bool,
        launches: impl FnOnce() -> u64,
    ) -> Option<Violation> {
        if open || now_ns < self.since_ns + SETTLED_NS {
            self.launches = None;
            return None;
        }
        let launches = launches();
        let before = self.launches.replace(launches)?;
        let launches = growth(before, launches)?;
        (launches >= UNGATED).then_some(Violation::Ungated { launches })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn only_what_is_submitted_between_two_inspections_of_a_settled_gate_counts() {
        let mut gate = ClosedGate::new(0);
        let mut at = |ms: u64, open: bool, launches: u64| {
            let found = gate.inspect(ms * MS, open, || launches);
            if ms == 300 {
                gate.close(300 * MS);
            }
            found
        };
        assert_eq!(at(40, false, 0), None, "it may have been on its way");
        assert_eq!(at(60, false, 1000), None, "nobody knows since when");
        assert_eq!(at(160, false, 1000 + UNGATED - 1), None, "a race");
        let found = Some(Violation::Ungated { launches: 5000 });
        assert_eq!(at(260, false, 5999 + UNGATED), found);
        assert_eq!(at(270, false, 10), None, "a process has ended");
        assert_eq!(at(280, true, 5000), None);
        assert_eq!(at(290, false, 9000), None, "it was open");
        assert_eq!(at(300, false, 9000), None);
        assert_eq!(at(340, false, 15_000), None, "it has closed anew");
        assert_eq!(at(360, false, 20_000), None);
        assert_eq!(
            at(370, false, 25_000),
            Some(Violation::Ungated { launches: 5000 })
        );
    }
}
