//! Asking a job to change its size: arbiter --request--> client, client --listens, ready-->
//! arbiter. Since 1.3.
//!
//! After Elan (Xie et al., "Elan: Towards Generic and Efficient Elastic Training for Deep
//! Learning", ICDCS'20): workers come and go at the end of an iteration, when the job itself says
//! that its state is whole, and not where a signal happens to hit it; so no step is done twice.
//! This is the signal only. The job decides what it saves, and how; the engine starts the workers
//! of the new size.
//!
//! A request is a level, not a message: a number and how many GPUs the job is to go on with, in one
//! word, so that it is never read by halves. The program looks at it where it likes, with two
//! loads; nobody is interrupted and nobody waits here. It answers with the request's number once it
//! may be stopped. Numbers are never used twice, also not by the arbiter after the next, so an
//! answer cannot be taken for one to a later request. A request that has become 0 was withdrawn.
//!
//! The arbiter reads the client's words as claims: a client that lies is stopped with its work
//! unsaved, and that is all.

use crate::layout::{ArbiterHalf, ClientHalf};
use crate::sync::{Acquire, Relaxed, Release};

/// Bits of the word that hold the number of GPUs.
const GPU_BITS: u32 = 16;

/// A request to go on with another number of GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Resize {
    /// Its number, above 0 and below 2^48.
    pub number: u64,
    /// With how many GPUs; 0: with none for now, the job is to free them.
    pub gpus: u16,
}

/// The arbiter's end.
impl ArbiterHalf {
    /// Asks for another size, or takes that back.
    pub fn ask_resize(&self, resize: Option<Resize>) {
        let word = resize.map_or(0, |resize| {
            resize.number << GPU_BITS | u64::from(resize.gpus)
        });
        // SYNC(resize): a number on its own.
        self.resize.store(word, Relaxed);
    }
}

/// The client's view.
impl ArbiterHalf {
    /// What is asked for, if anything.
    pub fn resize(&self) -> Option<Resize> {
        let word = self.resize.load(Relaxed);
        let number = word >> GPU_BITS;
        // CAST: the lower 16 bits.
        (number != 0).then_some(Resize {
            number,
            gpus: word as u16,
        })
    }
}

/// The client's end; any thread.
impl ClientHalf {
    /// The program looks whether another size is asked for.
    pub fn listen_for_resize(&self) {
        // A look at each iteration writes to the page once.
        if self.resize_listens.load(Relaxed) == 0 {
            self.resize_listens.store(1, Relaxed);
        }
    }

    /// All is saved: the program may be stopped for the request of this number.
    pub fn ready_for_resize(&self, number: u64) {
        // SYNC(resize ready): pairs with the Acquire load in `resize_ready`. Files are the kernel's
        // to order.
        self.resize_ready.store(number, Release);
    }
}

/// The arbiter's view: claims of a stranger.
impl ClientHalf {
    /// Whether the program ever looked for a request.
    pub fn listens_for_resize(&self) -> bool {
        self.resize_listens.load(Relaxed) != 0
    }

    /// Number of the last request that it is ready for; 0: none.
    pub fn resize_ready(&self) -> u64 {
        // SYNC(resize ready): pairs with the Release store in `ready_for_resize`.
        self.resize_ready.load(Acquire)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::page::{Mapped, Writers};

    #[test]
    fn a_request_arrives_as_it_was_made_and_can_be_withdrawn() {
        let half = ArbiterHalf::default();
        assert_eq!(half.resize(), None);
        for (number, gpus) in [(1, 0), (1 << 47, u16::MAX), (2_000_000_000_000, 4)] {
            let resize = Resize { number, gpus };
            half.ask_resize(Some(resize));
            assert_eq!(half.resize(), Some(resize));
        }
        half.ask_resize(None);
        assert_eq!(half.resize(), None);
    }

    #[test]
    fn a_client_says_that_it_listens_and_for_which_request_it_is_ready() {
        let (page, _fd) = Mapped::<ClientHalf>::create(Writers::Holders).unwrap();
        assert!(!page.listens_for_resize() && page.resize_ready() == 0);
        page.listen_for_resize();
        page.listen_for_resize();
        page.ready_for_resize(77);
        assert!(page.listens_for_resize() && page.resize_ready() == 77);
    }
}
