//! A high quantile of the most recent values of something.

use std::collections::VecDeque;

/// So many of the most recent values count: of fewer than a hundred the highest is the 99th
/// percentile, of these it is the second highest.
const KEPT: usize = 128;

/// The most recent values, in nanoseconds, and their 99th percentile by the nearest rank.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Quantile {
    /// The oldest first.
    recent: VecDeque<u64>,
    /// The same in order.
    sorted: Vec<u64>,
}

impl Quantile {
    /// Another value.
    pub fn note(&mut self, ns: u64) {
        if self.recent.len() == KEPT
            && let Some(oldest) = self.recent.pop_front()
            && let Ok(at) = self.sorted.binary_search(&oldest)
        {
            self.sorted.remove(at);
        }
        self.recent.push_back(ns);
        let at = self.sorted.partition_point(|value| *value < ns);
        self.sorted.insert(at, ns);
    }

    /// The 99th percentile in nanoseconds; `None`: there is no value.
    pub fn p99_ns(&self) -> Option<u64> {
        let rank = (self.sorted.len() * 99).div_ceil(100);
        self.sorted.get(rank.checked_sub(1)?).copied()
    }

    /// How many of the recent values are above `ns`.
    pub fn above(&self, ns: u64) -> usize {
        self.sorted.len() - self.sorted.partition_point(|value| *value <= ns)
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.sorted.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.sorted.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_few_values_the_highest_and_of_many_all_but_one_in_a_hundred() {
        let mut quantile = Quantile::default();
        assert_eq!((quantile.p99_ns(), quantile.is_empty()), (None, true));
        for ns in [5, 90, 7] {
            quantile.note(ns);
        }
        assert_eq!((quantile.p99_ns(), quantile.above(7)), (Some(90), 1));
        (0..100).for_each(|_| quantile.note(7));
        assert_eq!(quantile.p99_ns(), Some(7), "one in 103");
        assert_eq!(quantile.len(), 103);
    }

    #[test]
    fn old_values_are_forgotten_in_their_order() {
        let mut quantile = Quantile::default();
        (0..1000).for_each(|ns| quantile.note(ns));
        assert_eq!((quantile.len(), quantile.p99_ns()), (KEPT, Some(998)));
        (0..KEPT).for_each(|_| quantile.note(3));
        assert_eq!((quantile.p99_ns(), quantile.above(2)), (Some(3), KEPT));
    }
}
