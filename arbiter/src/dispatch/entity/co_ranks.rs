//! The co-ranks that are admitted beside a drain of their tenant, and for how long. Processes that
//! have nothing on the device themselves, or those whose own work stands still.
//!
//! Invariant: beside one drain their gates are open for no longer in all than a drain is waited
//! for, and then for a window at a time, with a rest between two of them: [`AGAIN_NS`]. For those
//! whose own work it is each rest is twice as long as the one before it, from [`OWN_FIRST_NS`] to
//! [`OWN_AGAIN_NS`]: what a thread has to submit before it lets its work go on is submitted within
//! a few windows.

/// How often one that has used up its time gets another window.
const AGAIN_NS: u64 = 1_000_000_000;
/// The same for a process that waits at its gate with own work on the device that stands still: the
/// first time, and at most.
const OWN_FIRST_NS: u64 = 8_000_000;
const OWN_AGAIN_NS: u64 = 250_000_000;
/// How soon co-ranks whose gates have closed may come again, if the in-flight work stands still.
const REST_NS: u64 = 500_000;

/// A stream whose work does not get on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Standstill {
    /// Whose it is.
    pub client: u64,
    /// Its slot.
    pub slot: usize,
    /// The mark that the device has passed.
    pub done: u64,
}

/// The co-ranks that are admitted beside one drain.
#[derive(Debug, Default)]
pub struct CoRanks {
    /// Clients whose gates are open, and since when; empty: none.
    clients: Vec<u64>,
    since_ns: u64,
    /// When they left last.
    left_ns: u64,
    /// How long gates have been open beside this drain.
    used_ns: u64,
    /// How often they have left since its time was used up.
    left_again: u32,
    /// Marks of the others when they came.
    marks: u64,
    /// What did not get on then.
    stood: Vec<Standstill>,
}

impl CoRanks {
    /// Whether there are any.
    pub fn are_here(&self) -> bool {
        !self.clients.is_empty()
    }

    /// Which they are.
    pub fn clients(&self) -> &[u64] {
        &self.clients
    }

    /// The next drain starts afresh.
    pub fn renew(&mut self) {
        (self.used_ns, self.left_again) = (0, 0);
    }

    /// Whether they may come. `drain_ns`: how long a drain is waited for; `own`: the work is
    /// theirs.
    pub fn may_come(&self, now_ns: u64, drain_ns: u64, own: bool) -> bool {
        let rest_ns = match own {
            _ if self.used_ns < drain_ns => REST_NS,
            true => {
                let doubled = 1_u64.checked_shl(self.left_again).unwrap_or(u64::MAX);
                OWN_FIRST_NS.saturating_mul(doubled).min(OWN_AGAIN_NS)
            }
            false => AGAIN_NS,
        };
        now_ns >= self.left_ns.saturating_add(rest_ns)
    }

    /// These come. `marks`: what the others have on the device; `stood`: streams of the tenant that
    /// do not get on.
    pub fn come(&mut self, now_ns: u64, clients: Vec<u64>, marks: u64, stood: Vec<Standstill>) {
        (self.clients, self.since_ns, self.marks) = (clients, now_ns, marks);
        self.stood = stood;
    }

    /// Whether the others have got on since they came, or something that had not. `done`: the mark
    /// that a stream has passed by now.
    pub fn have_met(&self, marks: u64, done: impl Fn(&Standstill) -> Option<u64>) -> bool {
        marks < self.marks || self.stood.iter().any(|one| done(one) != Some(one.done))
    }

    /// Whether they have used up their time.
    pub fn time_is_up(&self, now_ns: u64, drain_ns: u64, window_ns: u64) -> bool {
        let left_ns = drain_ns.saturating_sub(self.used_ns);
        self.open_ns(now_ns) >= left_ns.max(window_ns)
    }

    /// Their gates close. `drain_ns` as above. Returns which they are.
    pub fn end(&mut self, now_ns: u64, drain_ns: u64) -> Vec<u64> {
        if self.used_ns >= drain_ns {
            self.left_again = self.left_again.saturating_add(1);
        }
        self.used_ns = self.used_ns.saturating_add(self.open_ns(now_ns));
        self.left_ns = now_ns;
        std::mem::take(&mut self.clients)
    }

    fn open_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.since_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn beside_one_drain_they_have_its_time_and_then_a_window_in_a_second() {
        let (drain_ns, window_ns) = (100 * MS, 2 * MS);
        let mut co_ranks = CoRanks::default();
        let mut now_ns = AGAIN_NS;
        let mut stays = |co_ranks: &mut CoRanks| {
            while !co_ranks.may_come(now_ns, drain_ns, false) {
                now_ns += MS / 2;
            }
            let came_ns = now_ns;
            let stood = Standstill {
                client: 7,
                slot: 1,
                done: 5,
            };
            co_ranks.come(now_ns, vec![7], 3, vec![stood]);
            let have_met = |marks, done| co_ranks.have_met(marks, |_| done);
            assert!(co_ranks.are_here() && !have_met(3, Some(5)));
            assert!(have_met(2, Some(5)) && have_met(3, Some(6)) && have_met(3, None));
            while !co_ranks.time_is_up(now_ns, drain_ns, window_ns) {
                now_ns += MS;
            }
            assert_eq!(co_ranks.end(now_ns, drain_ns), [7]);
            assert!(!co_ranks.are_here());
            (came_ns, now_ns)
        };
        let (first, second) = (stays(&mut co_ranks), stays(&mut co_ranks));
        assert_eq!(first, (AGAIN_NS, AGAIN_NS + drain_ns));
        assert_eq!(second.0, first.1 + AGAIN_NS);
        assert_eq!(second.1, second.0 + window_ns);
        let own_ns = second.1 + 2 * OWN_FIRST_NS;
        assert!(co_ranks.may_come(own_ns, drain_ns, true));
        assert!(!co_ranks.may_come(own_ns - 1, drain_ns, true));
        assert!(!co_ranks.may_come(own_ns, drain_ns, false));
        co_ranks.renew();
        let third = stays(&mut co_ranks);
        assert_eq!(third, (second.1 + REST_NS, second.1 + REST_NS + drain_ns));
    }
    #[test]
    fn for_those_whose_own_work_it_is_the_rests_get_longer() {
        let (drain_ns, window_ns) = (100 * MS, 2 * MS);
        let mut co_ranks = CoRanks::default();
        let (mut now_ns, mut came_ms) = (AGAIN_NS, Vec::new());
        while came_ms.len() < 12 {
            while !co_ranks.may_come(now_ns, drain_ns, true) {
                now_ns += MS / 2;
            }
            came_ms.push((now_ns - AGAIN_NS) / MS);
            co_ranks.come(now_ns, vec![7], 3, Vec::new());
            while !co_ranks.time_is_up(now_ns, drain_ns, window_ns) {
                now_ns += MS / 2;
            }
            co_ranks.end(now_ns, drain_ns);
        }
        println!("now: windows begin after {came_ms:?} ms");
        assert!(came_ms[4] < 250, "four windows soon: {came_ms:?}");
        let last = came_ms[11] - came_ms[10];
        assert_eq!(last, (OWN_AGAIN_NS + window_ns) / MS, "{came_ms:?}");
    }
}
