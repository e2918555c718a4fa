//! Which bells need not be rung: those of a client whose last one has not been answered yet.
//!
//! A request is a level in the client's page, and a bell says only that the arbiter is to look. The
//! arbiter counts its answers, each after it has taken what lay in the socket and before it looks.
//! A thread that finds the count as it was when a bell of its process was sent knows that the look
//! is still to come, and will find what the thread has just written. So a process sends one bell
//! for each look at it, and as many more as it has threads that ring in the same moment.

use crate::layout::ArbiterHalf;
use crate::sync::{AtomicU32, Relaxed, SeqCst, fence};

impl ArbiterHalf {
    /// The arbiter has taken what the client's socket had, and looks at its page after this.
    pub fn answer_bells(&self) {
        // Never 0: that is an arbiter that does not count.
        let next = self.header.bells.load(Relaxed).checked_add(1).unwrap_or(1);
        self.header.bells.store(next, SeqCst);
        // SYNC(bells): between the count and the look. Either a thread sees the new count and
        // rings, or the look sees what the thread had written.
        fence(SeqCst);
    }
}

/// The last bell that a client has sent.
#[derive(Debug, Default)]
pub struct LastBell {
    /// How many were answered then; 0: none was sent, or to an arbiter that does not count.
    answered: AtomicU32,
}

impl LastBell {
    /// Sends a bell unless one is on its way that the arbiter has yet to answer. `send` says
    /// whether there is one in the socket now.
    pub fn ring(&self, arbiter: &ArbiterHalf, send: impl FnOnce() -> bool) {
        // SYNC(bells): between what the thread has written and its look at the count.
        fence(SeqCst);
        let answered = arbiter.header.bells.load(SeqCst);
        let is_on_its_way = answered != 0 && self.answered.load(SeqCst) == answered;
        // Noted once it is there: a thread that is kept from sending keeps no other from it.
        if !is_on_its_way && send() {
            self.answered.store(answered, SeqCst);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_bell_is_sent_for_each_answer_and_each_to_an_arbiter_that_does_not_count() {
        let (arbiter, last) = (ArbiterHalf::default(), LastBell::default());
        let mut sent = 0;
        let ring = |sent: &mut u32| {
            last.ring(&arbiter, || {
                *sent += 1;
                true
            });
        };
        (0..5).for_each(|_| ring(&mut sent));
        assert_eq!(sent, 5, "nobody says that any was answered");
        for answers in 1..=3 {
            arbiter.answer_bells();
            (0..100).for_each(|_| ring(&mut sent));
            assert_eq!(sent, 5 + answers);
        }
        arbiter.answer_bells();
        (0..3).for_each(|_| last.ring(&arbiter, || false));
        ring(&mut sent);
        assert_eq!(
            sent,
            5 + 4,
            "those that could not be sent are not on their way"
        );
        arbiter.header.bells.store(u32::MAX, SeqCst);
        ring(&mut sent);
        arbiter.answer_bells();
        assert_eq!(arbiter.header.bells.load(SeqCst), 1);
        ring(&mut sent);
        assert_eq!(sent, 5 + 4 + 2);
    }
}
