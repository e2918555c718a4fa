//! The last spans of a device, in a ring of fixed size: the oldest are overwritten. Nothing is
//! allocated when a span is added, however often that is; a reader sees by the numbers what it has
//! missed.

use policy::TenantId;

/// Spans that are kept of a device. TIMEOUT: two jobs in slices of 2 ms make some 1500 a second, so
/// that is ten seconds of theirs.
const KEPT: usize = 1 << 14;

/// What a span is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A gate was open. `count`: the length granted, in microseconds.
    Slice,
    /// It was closed, and work was left on the device.
    Drain,
    /// Somebody waited at it while it was closed.
    Wait,
    /// Memory left the device, from the order to drain on. `count`: bytes copied.
    Evict,
    /// It came back.
    Restore,
    /// It was fitted to a limit.
    Fit,
    /// Between two boundaries. `count`: iterations.
    Iterations,
    /// The device changed to slices, to all at once or to lending. `count`: 0, 1 or 2.
    Mode,
}

/// A span that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// What it is.
    pub kind: Kind,
    /// Of which tenant; `None`: of the device.
    pub tenant: Option<TenantId>,
    pub start_ns: u64,
    pub end_ns: u64,
    /// Device time charged in it.
    pub device_ns: u64,
    /// What its kind says.
    pub count: u64,
}

/// The spans of one device, numbered from 1.
#[derive(Debug)]
pub struct Ring {
    /// Which ring it is: the time at which it was made.
    id: u64,
    spans: Vec<Span>,
    most: usize,
    last: u64,
}

impl Ring {
    /// An empty one. Its memory is taken now, and touched as it fills.
    pub fn new(now_ns: u64) -> Self {
        Self::of(now_ns, KEPT)
    }

    fn of(now_ns: u64, most: usize) -> Self {
        Self {
            id: now_ns,
            spans: Vec::with_capacity(most),
            most,
            last: 0,
        }
    }

    /// Which ring it is.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Adds a span, in place of the oldest where it is full.
    pub fn push(&mut self, span: Span) {
        let at = self.place(self.last + 1);
        self.last += 1;
        match self.spans.get_mut(at) {
            Some(oldest) => *oldest = span,
            None => self.spans.push(span),
        }
    }

    /// Where the span of a number is.
    fn place(&self, seq: u64) -> usize {
        // CAST: below the length.
        ((seq - 1) % self.most as u64) as usize
    }

    /// Number of the oldest span that is kept; one above the newest where there is none.
    pub fn first(&self) -> u64 {
        self.last + 1 - self.spans.len() as u64
    }

    /// Number of the newest; 0: there was none.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Spans above a number, oldest first, with the number of the first of them.
    pub fn since(&self, seq: u64, limit: usize) -> (u64, impl Iterator<Item = Span> + '_) {
        let from = seq.saturating_add(1).max(self.first());
        let spans = (from..=self.last).take(limit);
        (from, spans.map(|seq| self.spans[self.place(seq)]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start_ns: u64) -> Span {
        Span {
            kind: Kind::Slice,
            tenant: Some(TenantId(7)),
            start_ns,
            end_ns: start_ns + 1,
            device_ns: 1,
            count: 0,
        }
    }

    fn starts(ring: &Ring, seq: u64, limit: usize) -> (u64, Vec<u64>) {
        let (from, spans) = ring.since(seq, limit);
        (from, spans.map(|span| span.start_ns).collect())
    }

    #[test]
    fn the_oldest_are_overwritten_and_the_numbers_show_it() {
        let mut ring = Ring::of(5, 4);
        assert_eq!((ring.id(), ring.first(), ring.last()), (5, 1, 0));
        assert_eq!(starts(&ring, 0, 10), (1, vec![]));
        (1..=3).for_each(|ns| ring.push(span(ns)));
        assert_eq!(starts(&ring, 0, 10), (1, vec![1, 2, 3]));
        assert_eq!(starts(&ring, 1, 1), (2, vec![2]));
        (4..=10).for_each(|ns| ring.push(span(ns)));
        assert_eq!((ring.first(), ring.last()), (7, 10));
        assert_eq!(
            starts(&ring, 3, 10),
            (7, vec![7, 8, 9, 10]),
            "4 to 6 are lost"
        );
        assert_eq!(starts(&ring, 9, 10), (10, vec![10]));
        assert_eq!(starts(&ring, 10, 10).1, Vec::<u64>::new());
        assert_eq!(starts(&ring, u64::MAX, 10).1, Vec::<u64>::new());
    }

    #[test]
    fn nothing_is_allocated_once_it_is_made() {
        let mut ring = Ring::of(0, 8);
        let (memory, space) = (ring.spans.as_ptr(), ring.spans.capacity());
        (0..100).for_each(|ns| ring.push(span(ns)));
        assert_eq!(
            (ring.spans.as_ptr(), ring.spans.capacity()),
            (memory, space)
        );
        assert_eq!(ring.spans.len(), 8);
    }
}
