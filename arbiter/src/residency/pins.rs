//! Whose turn it is to lock host memory: one client of the host at a time, for a term.
//!
//! Drivers lock pages under locks that all processes share, and two that look at once at what a
//! container's limit leaves would both count on it. A term is longer than one chunk takes, and a
//! client that does not give it back in time has lost it: a client that does nothing but ask gets
//! every second term at most while another one waits.

use std::collections::VecDeque;

/// TIMEOUT: how long a permit holds: some chunks at a few GB/s.
const TERM_NS: u64 = 250_000_000;

/// Who locks, and who waits for it.
#[derive(Debug, Default)]
pub struct Pins {
    /// Client, its request, and when its term ends.
    holder: Option<(u64, u16, u64)>,
    /// Clients with their requests, who came first before others.
    waiting: VecDeque<(u64, u16)>,
}

impl Pins {
    /// Looks at the request of a client, 0 for none; until when it is granted, if it is just now.
    pub fn look(&mut self, now_ns: u64, client: u64, wanted: u16) -> Option<u64> {
        let over = self.holder.is_some_and(|(holder, number, until_ns)| {
            now_ns >= until_ns || (holder == client && number != wanted)
        });
        if over {
            self.holder = None;
        }
        if wanted == 0 {
            self.waiting.retain(|(waits, _)| *waits != client);
            return None;
        }
        if self
            .holder
            .is_some_and(|(holder, number, _)| (holder, number) == (client, wanted))
        {
            return None;
        }
        match self.waiting.iter_mut().find(|(waits, _)| *waits == client) {
            Some((_, number)) => *number = wanted,
            None => self.waiting.push_back((client, wanted)),
        }
        if self.holder.is_some() || self.waiting.front() != Some(&(client, wanted)) {
            return None;
        }
        self.waiting.pop_front();
        let until_ns = now_ns.saturating_add(TERM_NS);
        self.holder = Some((client, wanted, until_ns));
        Some(until_ns)
    }

    /// Whether anybody waits, or has it: looks are to come soon.
    pub fn is_busy(&self) -> bool {
        self.holder.is_some() || !self.waiting.is_empty()
    }

    /// A client is gone.
    pub fn forget(&mut self, client: u64) {
        self.waiting.retain(|(waits, _)| *waits != client);
        self.holder.take_if(|(holder, ..)| *holder == client);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_at_a_time_locks_host_memory_in_the_order_of_their_requests() {
        let mut pins = Pins::default();
        assert_eq!(pins.look(0, 1, 5), Some(TERM_NS));
        assert_eq!(pins.look(1, 1, 5), None, "it knows already");
        assert_eq!(pins.look(1, 2, 9), None);
        assert_eq!(pins.look(1, 3, 1), None);
        // Given back: the next one has it, and not the first one that is looked at.
        assert_eq!(pins.look(10, 1, 0), None);
        assert_eq!(pins.look(10, 3, 1), None);
        assert_eq!(pins.look(10, 2, 9), Some(10 + TERM_NS));
        assert_eq!(pins.look(11, 3, 1), None);
    }

    #[test]
    fn who_keeps_it_loses_it_at_the_end_of_the_term() {
        let mut pins = Pins::default();
        assert!(pins.look(0, 1, 5).is_some());
        assert_eq!(pins.look(TERM_NS - 1, 2, 1), None);
        assert_eq!(pins.look(TERM_NS, 2, 1), Some(2 * TERM_NS));
        // Asks again at once, and comes after the other.
        assert_eq!(pins.look(TERM_NS, 1, 6), None);
        assert_eq!(pins.look(2 * TERM_NS, 1, 6), Some(3 * TERM_NS));
        assert!(pins.is_busy());
    }

    #[test]
    fn a_client_that_is_gone_holds_nobody_up() {
        let mut pins = Pins::default();
        assert!(pins.look(0, 1, 5).is_some());
        assert_eq!(pins.look(0, 2, 1), None);
        assert_eq!(pins.look(0, 3, 1), None);
        pins.forget(1);
        pins.forget(2);
        assert_eq!(pins.look(1, 3, 1), Some(1 + TERM_NS));
        pins.forget(3);
        assert!(!pins.is_busy());
    }
}
