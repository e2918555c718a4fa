//! Requests that wait for word of their driver's devices, or of their user's name.
//!
//! Owns their requests, each with the time at which it goes on without that word.

use crate::turns::Ask;

/// How long a registration waits. TIMEOUT: initialising NVML takes up to a second or two where no
/// process holds the driver.
const DISCOVERY_NS: u64 = 3_000_000_000;

/// A registration that waits.
#[derive(Debug)]
pub struct Waiting {
    /// What was asked.
    pub ask: Ask,
    deadline_ns: u64,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Parked {
    waiting: Vec<Waiting>,
}

impl Parked {
    /// One waits from here on.
    pub fn park(&mut self, ask: Ask, now_ns: u64) {
        let deadline_ns = now_ns + DISCOVERY_NS;
        self.waiting.push(Waiting { ask, deadline_ns });
    }

    /// Forgets those whose answer nobody `awaits`.
    pub fn retain(&mut self, awaits: impl Fn(u64) -> bool) {
        self.waiting.retain(|waiting| awaits(waiting.ask.number));
    }

    /// Takes all of them, to be looked at again.
    pub fn take(&mut self) -> Vec<Waiting> {
        std::mem::take(&mut self.waiting)
    }

    /// One that was [taken](Self::take) waits on.
    pub fn put_back(&mut self, waiting: Waiting) {
        self.waiting.push(waiting);
    }

    /// Takes those that have waited long enough.
    pub fn expire(&mut self, now_ns: u64) -> Vec<Ask> {
        let is_over = |waiting: &mut Waiting| waiting.deadline_ns <= now_ns;
        let over = self.waiting.extract_if(.., is_over);
        over.map(|waiting| waiting.ask).collect()
    }

    /// Those that wait.
    pub fn iter(&self) -> impl Iterator<Item = &Ask> {
        self.waiting.iter().map(|waiting| &waiting.ask)
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use control::Request;

    use super::*;
    use crate::who::Peer;

    fn ask(number: u64) -> Ask {
        Ask {
            number,
            peer: Peer::here(1, 1),
            request: Request::List,
        }
    }

    #[test]
    fn one_whose_connection_has_gone_is_forgotten() {
        let mut parked = Parked::default();
        for number in 1..=3 {
            parked.park(ask(number), 5);
        }
        parked.retain(|number| number == 2);
        let left: Vec<u64> = parked.take().iter().map(|one| one.ask.number).collect();
        assert_eq!(left, [2]);
    }

    #[test]
    fn each_waits_for_its_own_time() {
        let mut parked = Parked::default();
        parked.park(ask(1), 5);
        parked.park(ask(2), 9);
        for waiting in parked.take() {
            parked.put_back(waiting);
        }
        assert!(parked.expire(4 + DISCOVERY_NS).is_empty());
        let over = parked.expire(5 + DISCOVERY_NS);
        assert_eq!(over.iter().map(|ask| ask.number).collect::<Vec<_>>(), [1]);
        assert!(!parked.is_empty());
        assert_eq!(parked.expire(9 + DISCOVERY_NS).len(), 1);
        assert!(parked.is_empty());
    }
}
