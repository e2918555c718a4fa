//! Which pages of a handle were written, where copies alone have written there.
//!
//! To ask the file system is a call for every part of a range, and each looks for what no processor
//! has in its cache. A copy knows what it writes and says so first. What a kernel writes is not
//! known: of what it was given, the file system is asked from then on.

use std::collections::BTreeMap;
use std::ops::Range;

use super::PAGE;

/// All pages that may hold anything but zeros.
#[derive(Debug)]
pub struct Known {
    /// Ends by starts, whole pages; no two touch. `None`: not known.
    written: Option<BTreeMap<u64, u64>>,
}

/// More than so many parts of one handle are not worth keeping: a look at the file is as good.
const MOST_PARTS: usize = 1 << 16;

impl Known {
    /// Of a handle of which nothing was written yet.
    pub fn nothing_written() -> Self {
        Self {
            written: Some(BTreeMap::new()),
        }
    }

    /// Of one that others write to.
    pub fn not() -> Self {
        Self { written: None }
    }

    /// What has been written is not known from now on.
    pub fn lose(&mut self) {
        self.written = None;
    }

    /// These bytes are about to be written.
    pub fn add(&mut self, bytes: &Range<u64>) {
        let Some(ranges) = &mut self.written else {
            return;
        };
        if bytes.is_empty() {
            return;
        }
        let (mut start, mut end) = (bytes.start / PAGE * PAGE, bytes.end.next_multiple_of(PAGE));
        while let Some((&from, &upto)) = ranges.range(..=end).next_back()
            && upto >= start
        {
            ranges.remove(&from);
            (start, end) = (start.min(from), end.max(upto));
        }
        ranges.insert(start, end);
        if ranges.len() > MOST_PARTS {
            self.written = None;
        }
    }

    /// The parts of a range in which anything may be but zeros, in order.
    pub fn within(&self, bytes: &Range<u64>) -> Option<Vec<Range<u64>>> {
        let ranges = self.written.as_ref()?;
        let before = ranges.range(..bytes.start).next_back();
        let found = before
            .into_iter()
            .chain(ranges.range(bytes.start..bytes.end.max(bytes.start)))
            .map(|(from, upto)| (*from).max(bytes.start)..(*upto).min(bytes.end))
            .filter(|range| range.start < range.end);
        Some(found.collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::random::Random;

    #[test]
    fn what_may_be_written_is_the_pages_of_all_that_was_added() {
        const PAGES: u64 = 40;
        let mut random = Random::new(3);
        let mut below = |limit: u64| random.below(limit);
        for round in 0..2000 {
            let (mut known, mut model) = (Known::nothing_written(), BTreeSet::new());
            for _ in 0..below(12) {
                let start = below(PAGES * PAGE);
                let bytes = start..(start + below(3 * PAGE)).min(PAGES * PAGE);
                known.add(&bytes);
                if !bytes.is_empty() {
                    model.extend(bytes.start / PAGE..bytes.end.div_ceil(PAGE));
                }
            }
            let start = below(PAGES * PAGE);
            let asked = start..(start + below(PAGES * PAGE)).min(PAGES * PAGE);
            let found = known.within(&asked).expect("known");
            assert!(
                found.windows(2).all(|two| two[0].end < two[1].start),
                "round {round}: {found:?}"
            );
            for page in 0..PAGES {
                let part = (page * PAGE).max(asked.start)..((page + 1) * PAGE).min(asked.end);
                if part.is_empty() {
                    continue;
                }
                let touched = found
                    .iter()
                    .any(|range| range.start <= part.start && part.end <= range.end);
                let apart = found
                    .iter()
                    .all(|range| range.end <= part.start || part.end <= range.start);
                assert_eq!(
                    (touched, apart),
                    (model.contains(&page), !model.contains(&page)),
                    "round {round}: page {page} of {asked:?}: {found:?}"
                );
            }
        }
    }

    #[test]
    fn what_is_lost_stays_so_and_too_many_parts_are() {
        let mut known = Known::nothing_written();
        assert_eq!(known.within(&(0..PAGE)), Some(Vec::new()));
        known.lose();
        known.add(&(0..1));
        assert_eq!(known.within(&(0..PAGE)), None);
        assert_eq!(Known::not().within(&(0..PAGE)), None);
        let mut known = Known::nothing_written();
        for page in 0..=MOST_PARTS as u64 {
            assert!(known.within(&(0..1)).is_some());
            known.add(&(2 * page * PAGE..2 * page * PAGE + 1));
        }
        assert_eq!(known.within(&(0..1)), None);
    }
}
