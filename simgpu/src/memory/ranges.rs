//! Free ranges of some address space: best fit, with neighbours joined on free. Knows no memory,
//! only numbers.

use std::collections::{BTreeMap, BTreeSet};

/// Free ranges by start and by length.
#[derive(Debug, Default)]
pub struct Ranges {
    by_start: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
}

impl Ranges {
    /// Adds a free range, joining it with free neighbours.
    pub fn insert(&mut self, mut start: u64, mut len: u64) {
        if len == 0 {
            return;
        }
        if let Some((&before, &before_len)) = self.by_start.range(..start).next_back()
            && before + before_len == start
        {
            self.remove_exact(before, before_len);
            start = before;
            len += before_len;
        }
        if let Some(&after_len) = self.by_start.get(&(start + len)) {
            self.remove_exact(start + len, after_len);
            len += after_len;
        }
        self.by_start.insert(start, len);
        self.by_len.insert((len, start));
    }

    fn remove_exact(&mut self, start: u64, len: u64) {
        self.by_start.remove(&start);
        self.by_len.remove(&(len, start));
    }

    /// Takes `len` at an address that is a multiple of `align` (a power of two), from the smallest
    /// range that has it.
    pub fn take(&mut self, len: u64, align: u64) -> Option<u64> {
        let (&(range_len, start), at) = self.by_len.range((len, 0)..).find_map(|entry| {
            let at = entry.1.checked_next_multiple_of(align)?;
            (at + len <= entry.1 + entry.0).then_some((entry, at))
        })?;
        self.carve(start, range_len, at, len);
        Some(at)
    }

    /// Takes exactly `[start, start + len)` if all of it is free.
    pub fn take_at(&mut self, start: u64, len: u64) -> bool {
        let Some((&range, &range_len)) = self.by_start.range(..=start).next_back() else {
            return false;
        };
        if start + len > range + range_len {
            return false;
        }
        self.carve(range, range_len, start, len);
        true
    }

    fn carve(&mut self, range: u64, range_len: u64, at: u64, len: u64) {
        self.remove_exact(range, range_len);
        for (start, len) in [
            (range, at - range),
            (at + len, range + range_len - at - len),
        ] {
            if len > 0 {
                self.by_start.insert(start, len);
                self.by_len.insert((len, start));
            }
        }
    }

    /// True when all of `[start, start + len)` is free.
    pub fn is_free(&self, start: u64, len: u64) -> bool {
        self.by_start
            .range(..=start)
            .next_back()
            .is_some_and(|(range, range_len)| start + len <= range + range_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_neighbours_join() {
        let mut ranges = Ranges::default();
        ranges.insert(0, 1024);
        let a = ranges.take(256, 256).unwrap();
        let b = ranges.take(256, 256).unwrap();
        let c = ranges.take(512, 256).unwrap();
        assert_eq!(ranges.take(1, 1), None);
        for (start, len) in [(a, 256), (c, 512), (b, 256)] {
            ranges.insert(start, len);
        }
        assert_eq!(ranges.take(1024, 1024), Some(0));
    }

    #[test]
    fn alignment_leaves_both_sides_free() {
        let mut ranges = Ranges::default();
        ranges.insert(100, 1000);
        assert_eq!(ranges.take(512, 512), Some(512));
        assert!(ranges.is_free(100, 412));
        assert!(ranges.is_free(1024, 76));
        assert!(!ranges.is_free(512, 1));
    }

    #[test]
    fn the_smallest_range_that_fits_is_used() {
        let mut ranges = Ranges::default();
        ranges.insert(0, 10_000);
        ranges.insert(20_000, 300);
        assert_eq!(ranges.take(256, 1), Some(20_000));
        assert!(ranges.take_at(4096, 4096));
        assert!(!ranges.take_at(4096, 1));
    }
}
