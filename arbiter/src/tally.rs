//! Counts that clients write, as they are taken to an account: they never fall.
//!
//! A client may write any number at any time, processes end, and threads go from one device to
//! another. A sum over what is there now falls then, and the difference of two such sums is no
//! count. So each count is followed where it is written: what it has grown by is added to a total,
//! and where it goes back nothing is added and it is followed from there. What the total has is
//! kept when the count is gone.

use channel::THREAD_SLOTS;
use channel::arbiter::ClientPages;

/// A count that a client writes is taken to have gone back where it has grown by more than this.
const MOST: u64 = u64::MAX / 2;

/// By how much a count that a client writes has grown; `None`: it has gone back.
pub fn growth(before: u64, now: u64) -> Option<u64> {
    // WRAPPING: the count of a client may begin anywhere and go past the end of its numbers; what
    // is beyond half of them is a step back, and has no other answer than that.
    let more = now.wrapping_sub(before);
    (more <= MOST).then_some(more)
}

/// A count that a client writes, followed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// As it was read last.
    seen: u64,
    /// What it has grown by since it is followed.
    total: u64,
}

impl Tally {
    /// All that the count says counts.
    pub fn whole() -> Self {
        Self::default()
    }

    /// The count is read.
    pub fn look(&mut self, now: u64) -> u64 {
        let more = growth(self.seen, now).unwrap_or(0);
        self.seen = now;
        self.total = self.total.saturating_add(more);
        self.total
    }

    /// What it has grown by.
    pub fn total(&self) -> u64 {
        self.total
    }
}

/// The submissions of one client to one device, thread by thread: what a thread has submitted
/// elsewhere comes with it when it changes the device, and does not count here.
#[derive(Debug)]
pub struct OnDevice {
    /// What each thread had submitted when it was looked at last, to whatever device.
    seen: Box<[u64; THREAD_SLOTS]>,
}

impl OnDevice {
    /// Counts from here on.
    pub fn from(pages: &ClientPages) -> Self {
        let mut seen = Box::new([0; THREAD_SLOTS]);
        for (slot, seen) in seen.iter_mut().enumerate() {
            *seen = pages.client.launches_of(slot);
        }
        Self { seen }
    }

    /// How many there are beyond those that were counted last.
    pub fn more(&self, pages: &ClientPages, device: usize) -> u64 {
        let threads = self.seen.iter().enumerate();
        threads.fold(0, |sum: u64, (slot, before)| {
            let now = pages.client.launches_of(slot);
            if now == *before || !pages.client.uses(slot, device) {
                return sum;
            }
            sum.saturating_add(growth(*before, now).unwrap_or(0))
        })
    }

    /// The same, which are counted now.
    pub fn count(&mut self, pages: &ClientPages, device: usize) -> u64 {
        let more = self.more(pages, device);
        for (slot, before) in self.seen.iter_mut().enumerate() {
            *before = pages.client.launches_of(slot);
        }
        more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_goes_back_takes_nothing_from_the_total() {
        let mut tally = Tally::whole();
        assert_eq!(tally.look(1000), 1000);
        assert_eq!(tally.look(7), 1000, "it lies, or has begun anew");
        assert_eq!(tally.look(10), 1003);
        assert_eq!(tally.look(u64::MAX), 1003, "that is a step back by 11");
        assert_eq!(tally.look(4), 1008, "and past the end of the numbers");
        assert_eq!((growth(5, 3), growth(3, 5)), (None, Some(2)));
    }
}
