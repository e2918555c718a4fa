//! Where a pool is known to have space: the blocks that the program has given back, by address.
//!
//! Always less than the truth. A block counts from when the driver is asked to free it; for
//! allocations of every stream once the stream that it was freed in is known to have got there.
//! A block that is handed out takes its space out of it.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included, Unbounded};

/// Least bytes that drivers hand out of a pool, and what they align to.
const UNIT: u64 = 512;
/// Holes that are remembered of one pool.
const MOST: usize = 4096;

/// A stream that blocks are freed in: the context of one that each context has, else 0, and its
/// key.
pub(super) type Order = (usize, usize);

/// What a block of so many bytes takes of a pool, at least.
pub(super) fn span(bytes: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(UNIT).unwrap_or(bytes)
}

/// What is known of a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The driver is being asked, in a call with this number.
    Asked(u64),
    /// Free once a stream has come to where it was freed; the number says when that was.
    InOrder(Order, u64),
    /// Free.
    Free,
}

/// Holes of one pool.
#[derive(Default)]
pub(super) struct Holes {
    /// By start: end and state. They do not overlap.
    known: BTreeMap<u64, (u64, State)>,
    /// Numbers given so far.
    number: u64,
}

impl Holes {
    /// Before the driver is asked to free a block; the number of the call.
    pub(super) fn asked(&mut self, start: u64, bytes: u64) -> u64 {
        self.number += 1;
        // One that cannot be remembered is missed, no more.
        if self.known.len() < MOST && start.is_multiple_of(UNIT) {
            self.fill(start, span(bytes));
            let end = start.saturating_add(span(bytes));
            self.known.insert(start, (end, State::Asked(self.number)));
        }
        self.number
    }

    /// After the driver has answered the call of this number: freed in the order of a stream, or
    /// not at all. What others were given of it meanwhile is no hole any more.
    pub(super) fn answered(&mut self, call: u64, start: u64, bytes: u64, order: Option<Order>) {
        let end = start.saturating_add(span(bytes));
        let parts: Vec<u64> = self
            .known
            .range(start..end)
            .filter(|(_, (_, state))| *state == State::Asked(call))
            .map(|(start, _)| *start)
            .collect();
        self.number += 1;
        for start in parts {
            let Some((end, _)) = self.known.remove(&start) else {
                continue;
            };
            if let Some(order) = order {
                self.add(start, end, State::InOrder(order, self.number));
            }
        }
    }

    /// The number of the last call that was answered: what is `InOrder` up to it was freed before
    /// now.
    pub(super) fn now(&self) -> u64 {
        self.number
    }

    /// A stream has done everything that was submitted up to a number.
    pub(super) fn done(&mut self, order: Order, number: u64) {
        let over = |state: &State| matches!(state, State::InOrder(one, at) if *one == order && *at <= number);
        let done: Vec<u64> = self
            .known
            .iter()
            .filter(|(_, (_, state))| over(state))
            .map(|(start, _)| *start)
            .collect();
        for start in done {
            // An earlier one may have been joined with it.
            if let Some((end, _)) = self.known.remove(&start) {
                self.add(start, end, State::Free);
            }
        }
    }

    /// Streams are gone: nobody will know when they came to what was freed in them.
    pub(super) fn forget(&mut self, gone: impl Fn(Order) -> bool) {
        self.known
            .retain(|_, (_, state)| !matches!(state, State::InOrder(order, _) if gone(*order)));
    }

    /// Nothing is known any more.
    pub(super) fn clear(&mut self) {
        self.known.clear();
    }

    /// Adds a hole; joined with its neighbours where they are free, too.
    fn add(&mut self, mut start: u64, mut end: u64, state: State) {
        if state == State::Free {
            let before = self.known.range(..start).next_back();
            if let Some((&before, &(its_end, State::Free))) = before
                && its_end == start
            {
                self.known.remove(&before);
                start = before;
            }
            if let Some(&(its_end, State::Free)) = self.known.get(&end) {
                self.known.remove(&end);
                end = its_end;
            }
        }
        self.known.insert(start, (end, state));
    }

    /// A block lies here now: takes it out. Whether all of it was known to be a hole.
    pub(super) fn fill(&mut self, start: u64, bytes: u64) -> bool {
        let end = start.saturating_add(bytes);
        let first = self.known.range(..=start).next_back().map(|(at, _)| *at);
        let from = first.map_or(Unbounded, Included);
        let met: Vec<(u64, u64, State)> = self
            .known
            .range((from, Excluded(end)))
            .filter(|(_, (its_end, _))| *its_end > start)
            .map(|(at, (end, state))| (*at, *end, *state))
            .collect();
        let mut covered_to = start;
        for (at, its_end, state) in met {
            self.known.remove(&at);
            if at <= covered_to {
                covered_to = covered_to.max(its_end);
            }
            if at < start {
                self.known.insert(at, (start, state));
            }
            if its_end > end {
                self.known.insert(end, (its_end, state));
            }
        }
        covered_to >= end
    }

    /// Whether a block of `span` bytes fits into one hole, or will when `order` has come to what
    /// was freed in it.
    pub(super) fn fits(&self, span: u64, order: Option<Order>) -> bool {
        let (mut start, mut end) = (0, 0);
        self.known.iter().any(|(&at, &(its_end, state))| {
            match state {
                State::Free => {}
                State::InOrder(one, _) if Some(one) == order => {}
                _ => return false,
            }
            if at != end {
                start = at;
            }
            end = its_end;
            end - start >= span
        })
    }

    /// Free space beside a block that made the pool grow by whole granules.
    pub(super) fn beside(&mut self, start: u64, end: u64) {
        if start < end && self.known.len() < MOST {
            self.fill(start, end - start);
            self.add(start, end, State::Free);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDER: Order = (0, 0x100);
    const OTHER: Order = (0, 0x200);

    fn freed(holes: &mut Holes, start: u64, bytes: u64, order: Order) {
        let call = holes.asked(start, bytes);
        holes.answered(call, start, bytes, Some(order));
    }

    #[test]
    fn a_hole_is_one_when_its_stream_is_known_to_have_come_to_it() {
        let mut holes = Holes::default();
        freed(&mut holes, 0x1000, 0x1000, ORDER);
        let seen = holes.now();
        freed(&mut holes, 0x2000, 0x1000, ORDER);
        assert!(!holes.fits(0x200, None));
        assert!(holes.fits(0x2000, Some(ORDER)) && !holes.fits(0x200, Some(OTHER)));
        holes.done(OTHER, holes.now());
        assert!(!holes.fits(0x200, None));
        holes.done(ORDER, seen);
        assert!(holes.fits(0x1000, None) && !holes.fits(0x2000, None));
        holes.done(ORDER, holes.now());
        assert!(holes.fits(0x2000, None) && !holes.fits(0x2001, None));
    }

    #[test]
    fn holes_that_do_not_touch_are_not_added_up() {
        let mut holes = Holes::default();
        for at in [0x1000, 0x3000, 0x5000] {
            freed(&mut holes, at, 0x1000, ORDER);
        }
        holes.done(ORDER, holes.now());
        assert!(holes.fits(0x1000, None) && !holes.fits(0x1200, None));
        freed(&mut holes, 0x2000, 0x1000, ORDER);
        // What is free later does not join what is free now, but is counted with it where that is
        // asked.
        assert!(!holes.fits(0x3000, None) && holes.fits(0x3000, Some(ORDER)));
        holes.done(ORDER, holes.now());
        assert!(holes.fits(0x3000, None) && !holes.fits(0x3200, None));
    }

    #[test]
    fn what_is_handed_out_is_no_hole() {
        let mut holes = Holes::default();
        freed(&mut holes, 0x1000, 0x4000, ORDER);
        holes.done(ORDER, holes.now());
        assert!(holes.fill(0x2000, 0x1000));
        assert!(holes.fits(0x2000, None) && !holes.fits(0x2200, None));
        assert!(
            !holes.fill(0x1e00, 0x400),
            "a part of it was not known to be free"
        );
        assert!(!holes.fill(0x9000, 0x1000));
        assert!(holes.fill(0x3000, 0x2000));
        assert!(holes.fits(0xe00, None) && !holes.fits(0x1000, None));
        // Over a seam.
        freed(&mut holes, 0x1e00, 0x200, OTHER);
        assert!(holes.fill(0x1c00, 0x400));
    }

    #[test]
    fn what_another_thread_is_given_before_a_free_comes_back_is_no_hole() {
        let mut holes = Holes::default();
        let call = holes.asked(0x1000, 0x2000);
        assert!(!holes.fits(0x200, Some(ORDER)));
        // The driver has it back already, and has given away the first half.
        assert!(holes.fill(0x1000, 0x1000));
        holes.answered(call, 0x1000, 0x2000, Some(ORDER));
        holes.done(ORDER, holes.now());
        assert!(holes.fits(0x1000, None) && !holes.fits(0x1200, None));
        // Given away, and freed again: the earlier answer says nothing about that.
        let mut holes = Holes::default();
        let earlier = holes.asked(0x8000, 0x1000);
        assert!(holes.fill(0x8000, 0x1000));
        let again = holes.asked(0x8000, 0x1000);
        holes.answered(earlier, 0x8000, 0x1000, Some(ORDER));
        assert!(!holes.fits(0x200, Some(ORDER)));
        holes.answered(again, 0x8000, 0x1000, Some(ORDER));
        assert!(holes.fits(0x1000, Some(ORDER)));
    }

    #[test]
    fn a_free_that_the_driver_refuses_makes_no_hole() {
        let mut holes = Holes::default();
        let call = holes.asked(0x1000, 0x1000);
        holes.answered(call, 0x1000, 0x1000, None);
        holes.done(ORDER, holes.now());
        assert!(!holes.fits(0x200, Some(ORDER)));
    }

    #[test]
    fn what_was_freed_in_a_stream_that_is_gone_is_forgotten() {
        let mut holes = Holes::default();
        freed(&mut holes, 0x1000, 0x1000, ORDER);
        freed(&mut holes, 0x4000, 0x1000, OTHER);
        holes.forget(|order| order == ORDER);
        // A new stream may have the same handle.
        holes.done(ORDER, holes.now());
        assert!(!holes.fits(0x200, None) && holes.fits(0x1000, Some(OTHER)));
    }

    #[test]
    fn memory_is_bounded() {
        let mut holes = Holes::default();
        for at in 0..2 * MOST as u64 {
            freed(&mut holes, at * 0x2000, 0x1000, ORDER);
        }
        assert!(holes.known.len() <= MOST);
    }
}
