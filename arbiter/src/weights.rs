//! What one process's marks on one device come to: a stranger's numbers, copied out once a look.
//!
//! Invariants: what has passed and what was submitted never fall, whatever the page says; a sum
//! that does fall there is reported and taken for nothing. A stream slot that goes to another
//! device takes nothing with it that was counted here.

use channel::ClientHalf;

/// How long a largest weight counts: for one such time at least, for two at most.
const LARGEST_FOR_NS: u64 = 500_000_000;

/// What a page says that no honest process's says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Doubt {
    /// A sum has fallen.
    WentBack,
}

/// What a process's marks on a device say now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Claimed {
    /// Weight that the device has finished since the process came, in nanoseconds.
    pub passed_ns: u64,
    /// Weight that was submitted since then, what was in flight when it came included. What the
    /// driver has refused of it is made up for by what comes next.
    pub submitted_ns: u64,
    /// The largest weight of one mark of late, in nanoseconds.
    pub largest_ns: u64,
}

/// The counts of one process on one device.
#[derive(Debug)]
pub struct Weights {
    device: usize,
    slots: Vec<SlotSeen>,
    passed_ns: u64,
    submitted_ns: u64,
    /// The largest weight since `since_ns`, and in the time before.
    largest_ns: u64,
    largest_before_ns: u64,
    since_ns: u64,
}

/// What was seen of a stream slot.
#[derive(Clone, Copy, Debug, Default)]
struct SlotSeen {
    passed_ns: u64,
    done: u64,
}

impl Weights {
    /// Counts from here on.
    pub fn new(device: usize, client: &ClientHalf, now_ns: u64) -> Self {
        let mut new = Self {
            device,
            slots: Vec::new(),
            passed_ns: 0,
            submitted_ns: 0,
            largest_ns: 0,
            largest_before_ns: 0,
            since_ns: now_ns,
        };
        for slot in 0..client.streams_used() {
            let seen = client.weighed(slot).map(|said| SlotSeen {
                passed_ns: said.passed_ns.unwrap_or(said.submitted_ns),
                done: said.done,
            });
            new.slots.push(seen.unwrap_or_default());
        }
        new
    }

    /// Looks. Where the page says what cannot be, the rest of what it says is taken in.
    pub fn look(&mut self, client: &ClientHalf, now_ns: u64) -> (Claimed, Option<Doubt>) {
        let (mut pending_ns, mut doubt) = (0_u64, None);
        let used = client.streams_used();
        if self.slots.len() < used {
            self.slots.resize(used, SlotSeen::default());
        }
        if now_ns.saturating_sub(self.since_ns) >= LARGEST_FOR_NS {
            self.largest_before_ns = std::mem::take(&mut self.largest_ns);
            self.since_ns = now_ns;
        }
        for (at, seen) in self.slots.iter_mut().enumerate() {
            let Some(said) = client.weighed(at) else {
                continue;
            };
            let here = said.device == self.device;
            if let Some(passed_ns) = said.passed_ns {
                match passed_ns.checked_sub(seen.passed_ns) {
                    Some(more_ns) => {
                        if here && more_ns > 0 {
                            self.passed_ns = self.passed_ns.saturating_add(more_ns);
                            let largest_ns = client.largest_ns(at, seen.done, said.done);
                            self.largest_ns = self.largest_ns.max(largest_ns.min(more_ns));
                        }
                        seen.passed_ns = passed_ns;
                    }
                    None => doubt = Some(Doubt::WentBack),
                }
                seen.done = said.done;
            }
            if here && said.issued != said.done {
                let in_flight_ns = said.submitted_ns.saturating_sub(seen.passed_ns);
                pending_ns = pending_ns.saturating_add(in_flight_ns);
            }
        }
        self.submitted_ns = (self.submitted_ns).max(self.passed_ns.saturating_add(pending_ns));
        let claimed = Claimed {
            passed_ns: self.passed_ns,
            submitted_ns: self.submitted_ns,
            largest_ns: self.largest_ns.max(self.largest_before_ns),
        };
        (claimed, doubt)
    }
}

#[cfg(test)]
mod tests {
    use channel::arbiter::ClientPages;

    use super::*;

    const US: u64 = 1000;

    fn submit(client: &ClientHalf, slot: usize, ns: u64) {
        client.weigh_next(slot, ns);
        client.stream(slot).expect("slot").issue();
    }

    #[test]
    fn what_was_there_before_does_not_count_and_other_devices_neither() {
        let pages = ClientPages::create().expect("pages");
        let client = &pages.client;
        let (first, stream) = client.claim_stream(0).expect("slot");
        submit(client, first, 50 * US);
        stream.settle();
        submit(client, first, 20 * US);
        let mut weights = Weights::new(0, client, 0);
        let (claimed, doubt) = weights.look(client, 1);
        assert_eq!((claimed.passed_ns, claimed.submitted_ns), (0, 20 * US));
        assert_eq!(doubt, None);
        let (other, elsewhere) = client.claim_stream(1).expect("slot");
        submit(client, other, 900 * US);
        elsewhere.settle();
        stream.settle();
        let (claimed, _) = weights.look(client, 2);
        assert_eq!(
            (claimed.passed_ns, claimed.submitted_ns),
            (20 * US, 20 * US)
        );
        assert_eq!(claimed.largest_ns, 20 * US);
        // The slot comes here, without what it did there.
        elsewhere.set_device(0);
        submit(client, other, 3 * US);
        elsewhere.settle();
        let (claimed, _) = weights.look(client, 3);
        assert_eq!(claimed.passed_ns, 23 * US);
    }

    #[test]
    fn a_sum_that_falls_is_reported_and_gains_nothing() {
        let pages = ClientPages::create().expect("pages");
        let client = &pages.client;
        let (slot, stream) = client.claim_stream(0).expect("slot");
        let mut weights = Weights::new(0, client, 0);
        submit(client, slot, 50 * US);
        submit(client, slot, 0);
        stream.settle();
        assert_eq!(weights.look(client, 1).0.passed_ns, 50 * US);
        // The device goes back to a mark of before.
        stream.passed(0);
        let (claimed, doubt) = weights.look(client, 2);
        assert_eq!((claimed.passed_ns, doubt), (50 * US, Some(Doubt::WentBack)));
        stream.passed(2);
        let (claimed, doubt) = weights.look(client, 3);
        assert_eq!((claimed.passed_ns, doubt), (50 * US, None));
    }

    #[test]
    fn a_largest_weight_counts_for_some_time() {
        let pages = ClientPages::create().expect("pages");
        let client = &pages.client;
        let (slot, stream) = client.claim_stream(0).expect("slot");
        let mut weights = Weights::new(0, client, 0);
        for ns in [4, 70, 9] {
            submit(client, slot, ns);
        }
        stream.settle();
        assert_eq!(weights.look(client, 1).0.largest_ns, 70);
        assert_eq!(weights.look(client, LARGEST_FOR_NS).0.largest_ns, 70);
        assert_eq!(weights.look(client, 2 * LARGEST_FOR_NS).0.largest_ns, 0);
    }
}
