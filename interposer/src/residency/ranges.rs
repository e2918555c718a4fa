//! Free address ranges: best fit, neighbours merged, every operation logarithmic in the number of
//! free ranges.
//!
//! Best fit keeps large ranges whole (Knuth, The Art of Computer Programming, vol. 1, 2.5); of
//! equal ones the lowest address is taken, so that a program that frees and allocates the same
//! sizes finds the same places.

use std::collections::{BTreeMap, BTreeSet};

/// A set of free ranges.
#[derive(Default, Debug)]
pub(super) struct Ranges {
    /// Length by start.
    by_start: BTreeMap<u64, u64>,
    /// The same by length, then start.
    by_bytes: BTreeSet<(u64, u64)>,
}

impl Ranges {
    fn add(&mut self, start: u64, bytes: u64) {
        self.by_start.insert(start, bytes);
        self.by_bytes.insert((bytes, start));
    }

    fn drop(&mut self, start: u64, bytes: u64) {
        self.by_start.remove(&start);
        self.by_bytes.remove(&(bytes, start));
    }

    /// Makes a range free, and one with its free neighbours.
    pub(super) fn insert(&mut self, mut start: u64, mut bytes: u64) {
        if let Some((before, length)) = self
            .by_start
            .range(..start)
            .next_back()
            .map(|(at, length)| (*at, *length))
            && before + length == start
        {
            self.drop(before, length);
            (start, bytes) = (before, length + bytes);
        }
        if let Some(length) = self.by_start.get(&(start + bytes)).copied() {
            self.drop(start + bytes, length);
            bytes += length;
        }
        self.add(start, bytes);
    }

    /// Takes `bytes` from the smallest range that has them. Starts are as aligned as all lengths
    /// are.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let (length, start) = *self.by_bytes.range((bytes, 0)..).next()?;
        self.drop(start, length);
        if length > bytes {
            self.add(start + bytes, length - bytes);
        }
        Some(start)
    }

    /// Takes exactly that range; false where not all of it is free.
    pub(super) fn take_at(&mut self, start: u64, bytes: u64) -> bool {
        let Some((from, length)) = self
            .by_start
            .range(..=start)
            .next_back()
            .map(|(at, length)| (*at, *length))
        else {
            return false;
        };
        if start + bytes > from + length {
            return false;
        }
        self.drop(from, length);
        if start > from {
            self.add(from, start - from);
        }
        if from + length > start + bytes {
            self.add(start + bytes, from + length - start - bytes);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_can_be_had_again_in_one_chunk() {
        let mut ranges = Ranges::default();
        ranges.insert(1000, 100);
        let (a, b, c) = (ranges.take(30), ranges.take(30), ranges.take(40));
        assert_eq!((a, b, c), (Some(1000), Some(1030), Some(1060)));
        assert_eq!(ranges.take(1), None);
        ranges.insert(1030, 30);
        assert_eq!(ranges.take(31), None);
        ranges.insert(1060, 40);
        ranges.insert(1000, 30);
        assert_eq!(ranges.take(100), Some(1000));
    }

    #[test]
    fn the_smallest_range_that_fits_is_taken() {
        let mut ranges = Ranges::default();
        for (start, bytes) in [(0, 10), (100, 4), (200, 6), (300, 4)] {
            ranges.insert(start, bytes);
        }
        assert_eq!(ranges.take(4), Some(100));
        assert_eq!(ranges.take(4), Some(300));
        assert_eq!(ranges.take(5), Some(200));
        assert_eq!(ranges.take(5), Some(0));
        assert!(ranges.take_at(205, 1));
        assert!(!ranges.take_at(4, 2), "half of it is taken");
        assert!(ranges.take_at(6, 2));
        assert!(ranges.take_at(5, 1) && ranges.take_at(8, 2));
        assert_eq!(ranges.take(1), None);
    }
}
