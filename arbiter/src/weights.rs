//! What one process's marks on one device come to: a stranger's numbers, copied out once a look.
//!
//! Invariants: what has passed and what was submitted never fall, whatever the page says; a sum
//! that does fall there is reported and taken for nothing. A stream slot that goes to another
//! device takes nothing with it that was counted here.

use channel::ClientHalf;

/// How long a largest weight counts: for one such time at least, for two at most.
const LARGEST_FOR_NS: u64 = 500_000_000;

/// What a process's marks on a device say now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Claimed {
    /// Weight that the device has finished since the process came, in nanoseconds.
    pub passed_ns: u64,
    /// Weight that was submitted since then, what was in flight when it came included. What the
    /// driver has refused of it is made up for by what comes next.
    pub submitted_ns: u64,
    /// The largest weight of one of the last marks, in nanoseconds.
    pub largest_ns: u64,
    /// A sum has fallen, as no honest process's does. What the page says otherwise was taken in.
    pub went_back: bool,
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
#[derive(Clone, Copy, Debug)]
struct SlotSeen {
    /// The largest sum at a mark that has passed; `None`: what it was when the process came is not
    /// known yet.
    passed_ns: Option<u64>,
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
            let said = client.weighed(slot);
            new.slots.push(SlotSeen {
                passed_ns: said.map_or(Some(0), |said| said.passed_ns),
                done: said.map_or(0, |said| said.done),
            });
        }
        new
    }

    /// Looks.
    pub fn look(&mut self, client: &ClientHalf, now_ns: u64) -> Claimed {
        let (mut pending_ns, mut went_back) = (0_u64, false);
        let used = client.streams_used();
        if self.slots.len() < used {
            let new = SlotSeen {
                passed_ns: Some(0),
                done: 0,
            };
            self.slots.resize(used, new);
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
                let before_ns = seen.passed_ns.unwrap_or(passed_ns);
                match passed_ns.checked_sub(before_ns) {
                    Some(more_ns) => {
                        if here && more_ns > 0 {
                            self.passed_ns = self.passed_ns.saturating_add(more_ns);
                            let largest_ns = client.largest_ns(at, seen.done, said.done);
                            self.largest_ns = self.largest_ns.max(largest_ns.min(more_ns));
                        }
                        seen.passed_ns = Some(passed_ns);
                    }
                    None => went_back = true,
                }
                seen.done = said.done;
            }
            if here
                && said.issued != said.done
                && let Some(passed_ns) = seen.passed_ns
            {
                let in_flight_ns = said.submitted_ns.saturating_sub(passed_ns);
                pending_ns = pending_ns.saturating_add(in_flight_ns);
            }
        }
        self.submitted_ns = (self.submitted_ns).max(self.passed_ns.saturating_add(pending_ns));
        Claimed {
            passed_ns: self.passed_ns,
            submitted_ns: self.submitted_ns,
            largest_ns: self.largest_ns.max(self.largest_before_ns),
            went_back,
        }
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
        let claimed = weights.look(client, 1);
        assert_eq!((claimed.passed_ns, claimed.submitted_ns), (0, 20 * US));
        assert!(!claimed.went_back);
        let (other, elsewhere) = client.claim_stream(1).expect("slot");
        submit(client, other, 900 * US);
        elsewhere.settle();
        stream.settle();
        let claimed = weights.look(client, 2);
        assert_eq!(
            (claimed.passed_ns, claimed.submitted_ns),
            (20 * US, 20 * US)
        );
        assert_eq!(claimed.largest_ns, 20 * US);
        // The slot comes here, without what it did there.
        elsewhere.set_device(0);
        submit(client, other, 3 * US);
        elsewhere.settle();
        let claimed = weights.look(client, 3);
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
        assert_eq!(weights.look(client, 1).passed_ns, 50 * US);
        // The device goes back to a mark of before.
        stream.passed(0);
        let claimed = weights.look(client, 2);
        assert_eq!((claimed.passed_ns, claimed.went_back), (50 * US, true));
        stream.passed(2);
        let claimed = weights.look(client, 3);
        assert_eq!((claimed.passed_ns, claimed.went_back), (50 * US, false));
    }

    #[test]
    fn what_was_in_flight_when_the_process_came_takes_nothing_back() {
        let pages = ClientPages::create().expect("pages");
        let client = &pages.client;
        let (slot, stream) = client.claim_stream(0).expect("slot");
        (0..channel::WEIGHED_MARKS).for_each(|_| submit(client, slot, US));
        let mut weights = Weights::new(0, client, 0);
        assert_eq!(weights.look(client, 1), Claimed::default());
        stream.passed(10);
        let claimed = weights.look(client, 2);
        assert_eq!((claimed.passed_ns, claimed.went_back), (0, false));
        stream.passed(14);
        let claimed = weights.look(client, 3);
        assert_eq!((claimed.passed_ns, claimed.went_back), (4 * US, false));
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
        assert_eq!(weights.look(client, 1).largest_ns, 70);
        assert_eq!(weights.look(client, LARGEST_FOR_NS).largest_ns, 70);
        assert_eq!(weights.look(client, 2 * LARGEST_FOR_NS).largest_ns, 0);
    }
}
