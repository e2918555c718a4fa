//! What processes of a job had that have ended: before a process refuses its program memory for
//! what others of the job hold, it asks the arbiter whether one of those has ended. The arbiter
//! knows by their pidfds, at once, and frees what they had before it answers.
//!
//! A question is a number in the client's half, the answer the same number in the arbiter's. Of
//! several questions the last one is answered.

use std::time::Duration;

use crate::layout::{ArbiterHalf, ClientHalf};
use crate::sync::{Acquire, Release};

/// The first layout that has the words.
#[cfg(not(loom))]
const SINCE_MINOR: u64 = 3;

/// The client's side.
impl ClientHalf {
    /// Asks, and returns the question's number. The doorbell is rung after this.
    pub fn ask_for_credit(&self) -> u32 {
        // SYNC(credit): whatever ended before this has ended when the arbiter reads the number.
        self.credit_asked.fetch_add(1, Release).wrapping_add(1)
    }
}

/// The arbiter's view: a stranger's number, which is only sent back.
impl ClientHalf {
    /// Number of the last question.
    pub fn credit_asked(&self) -> u32 {
        // SYNC(credit): pairs with the addition in `ask_for_credit`.
        self.credit_asked.load(Acquire)
    }
}

/// The arbiter's side.
impl ArbiterHalf {
    /// Answers the question of that number, and all before it.
    pub fn answer_credit(&self, number: u32) {
        // SYNC(credit): publishes the slots that were cleared before.
        self.credited.store(number, Release);
        self.credited.wake_all();
    }
}

/// The client's view.
impl ArbiterHalf {
    /// Whether the arbiter answers such questions at all.
    #[cfg(not(loom))]
    pub fn answers_credit(&self) -> bool {
        // CAST: the lower half is the minor version.
        let minor = self.header.ready.load(Acquire) & u64::from(u32::MAX);
        minor >= SINCE_MINOR
    }

    /// Whether the question of that number is answered.
    pub fn is_credited(&self, number: u32) -> bool {
        // SYNC(credit): pairs with the store in `answer_credit`.
        let behind = number.wrapping_sub(self.credited.load(Acquire));
        // Numbers go round.
        behind == 0 || behind > u32::MAX / 2
    }

    /// Waits until the question of that number is answered, or `timeout` has passed, or for no
    /// reason.
    pub fn wait_for_credit(&self, number: u32, timeout: Duration) {
        let seen = self.credited.load(Acquire);
        if !self.is_credited(number) {
            self.credited.wait(seen, timeout);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::page::{Mapped, Writers};
    use crate::sync::Relaxed;

    #[test]
    fn an_answer_is_for_a_question_and_those_before_it_and_numbers_go_round() {
        let (client, _fd) = Mapped::<ClientHalf>::create(Writers::Holders).unwrap();
        let half = ArbiterHalf::default();
        assert_eq!(client.credit_asked(), 0);
        let (first, second) = (client.ask_for_credit(), client.ask_for_credit());
        assert_eq!((first, second, client.credit_asked()), (1, 2, 2));
        assert!(!half.is_credited(first));
        half.answer_credit(first);
        assert!(half.is_credited(first) && !half.is_credited(second));
        half.answer_credit(second);
        assert!(half.is_credited(first) && half.is_credited(second));
        client.credit_asked.store(u32::MAX, Relaxed);
        half.answer_credit(client.credit_asked());
        let next = client.ask_for_credit();
        assert!(!half.is_credited(next) && half.is_credited(u32::MAX));
        half.answer_credit(next);
        half.wait_for_credit(next, Duration::from_secs(60));
        assert!(half.is_credited(next) && half.is_credited(u32::MAX));
    }

    #[test]
    fn an_arbiter_of_an_older_layout_is_not_asked() {
        let half = ArbiterHalf::default();
        half.header.ready.store((2 << 32) | 2, Relaxed);
        assert!(!half.answers_credit());
        half.header.ready.store((2 << 32) | 3, Relaxed);
        assert!(half.answers_credit());
    }
}
