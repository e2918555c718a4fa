//! Jobs whose work, or whose processes, stand still, and whether the host is why.
//!
//! Owns what is known of each such job: since when it is looked at, and how long its threads had
//! waited for a processor then. A job is suspected for some time before it is found out. What was
//! seen long ago is forgotten, and looking is bounded: so many jobs in a round.

use std::collections::BTreeMap;

use policy::TenantId;

/// A job whose work stands still is looked at for so long before that counts as its own doing.
/// Where its threads wait for a processor for more than a fifth of that, or the arbiter itself had
/// none, the host stands still and it is looked at again, so long at most.
const LOOK_NS: u64 = 300_000_000;
const LOOK_MOST_NS: u64 = 10_000_000_000;
/// What was seen so long ago tells nothing about now.
const LOOK_AGAIN_NS: u64 = 3_000_000_000;
/// A round of housekeeping that comes so much late is one for which the arbiter had no processor.
const STALL_NS: u64 = 100_000_000;
/// Jobs that are looked at in a round, and processes of each; the others have their turn.
pub const LOOKED_AT: usize = 8;

/// A job that is suspected, and how long its threads had waited for a processor then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Suspicion {
    since_ns: u64,
    at_ns: u64,
    waited_ns: u64,
}

impl Suspicion {
    /// Whether the host may be why nothing of the job gets on.
    fn excuses(&mut self, now_ns: u64, waited_ns: u64, stalled: bool) -> bool {
        let for_ns = now_ns.saturating_sub(self.at_ns);
        if self.since_ns == 0 || for_ns > LOOK_AGAIN_NS {
            *self = Self {
                since_ns: now_ns,
                at_ns: now_ns,
                waited_ns,
            };
            return true;
        }
        if for_ns < LOOK_NS {
            return true;
        }
        let waited_for_ns = waited_ns.saturating_sub(self.waited_ns);
        (self.at_ns, self.waited_ns) = (now_ns, waited_ns);
        let starved = waited_for_ns > for_ns / 5 || stalled;
        starved && now_ns.saturating_sub(self.since_ns) < LOOK_MOST_NS
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Suspicions {
    jobs: BTreeMap<TenantId, Suspicion>,
}

/// One round of looking at them.
#[derive(Debug)]
pub struct Round {
    now_ns: u64,
    stalled: bool,
    left: usize,
}

impl Suspicions {
    /// Begins a round, which comes so much later than it was to.
    pub fn begin_round(&mut self, now_ns: u64, late_ns: u64) -> Round {
        self.jobs
            .retain(|_, suspicion| now_ns.saturating_sub(suspicion.at_ns) <= LOOK_AGAIN_NS);
        Round {
            now_ns,
            stalled: late_ns > STALL_NS,
            left: LOOKED_AT,
        }
    }

    /// Whether the host may be why nothing of a job gets on, whose threads have waited so long for
    /// a processor; or whether others are looked at in this round.
    pub fn excuses(&mut self, round: &mut Round, id: TenantId, waited_ns: u64) -> bool {
        round.left = round.left.saturating_sub(1);
        let suspicion = self.jobs.entry(id).or_default();
        round.left == 0 || suspicion.excuses(round.now_ns, waited_ns, round.stalled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_gets_no_processor_is_excused_for_some_time_and_one_that_waits_for_none_is_not() {
        const MS: u64 = 1_000_000;
        // Where its threads wait all the time, and where the arbiter itself is late.
        for (waits, stalled) in [(true, false), (false, true)] {
            let mut suspicion = Suspicion::default();
            let mut excused_until_ns = 0;
            for at_ns in (1..200).map(|round| round * 100 * MS) {
                let waited_ns = if waits { at_ns } else { 0 };
                if !suspicion.excuses(at_ns, waited_ns, stalled) {
                    break;
                }
                excused_until_ns = at_ns;
            }
            let most = LOOK_MOST_NS - LOOK_NS..=LOOK_MOST_NS + LOOK_NS;
            assert!(most.contains(&excused_until_ns), "{excused_until_ns}");
        }
        let mut suspicion = Suspicion::default();
        let excused: Vec<bool> = (10..16)
            .map(|round| suspicion.excuses(round * 100 * MS, 77, false))
            .collect();
        assert_eq!(excused, [true, true, true, false, true, true]);
        // What was seen long ago begins anew.
        assert!(suspicion.excuses(20_000 * MS, 77, false));
    }

    #[test]
    fn a_round_looks_at_some_jobs_and_forgets_those_that_were_not_seen_for_long() {
        let mut suspicions = Suspicions::default();
        let mut found = Vec::new();
        for now_ns in [1, 1 + LOOK_NS] {
            let mut round = suspicions.begin_round(now_ns, 0);
            let mut excuses = |id: &u64| suspicions.excuses(&mut round, TenantId(*id), 0);
            let found_out = (0..20).filter(|id| !excuses(id));
            found = found_out.collect();
        }
        assert_eq!(found, (0..LOOKED_AT as u64 - 1).collect::<Vec<_>>());
        let mut round = suspicions.begin_round(2 + 2 * LOOK_NS, STALL_NS + 1);
        let excused = suspicions.excuses(&mut round, TenantId(0), 0);
        assert!(excused, "the arbiter stood still");
        suspicions.begin_round(u64::MAX, 0);
        assert!(suspicions.jobs.is_empty());
    }
}
