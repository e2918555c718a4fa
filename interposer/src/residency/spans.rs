//! Where chunks are mapped, and what was noted of them there.
//!
//! An address stands for what follows it in its allocation, up to the next one seen there, for
//! nobody says how far a kernel goes from it. An allocation is a range of an arena; what lies in a
//! mapping of the program's own is not known, and there the address stands for the chunk that it
//! lies in. A copy says how far it goes.

use super::chunk::Chunk;
use super::moments::tick;

/// Where a chunk is mapped, and what was noted of it since that was last asked for.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u64,
    end: u64,
    chunk: u64,
    of_arena: bool,
    /// Whether it belongs to the allocation that the span before it lies in.
    goes_on: bool,
    /// When a kernel was given an address in it, and when it was copied to or from; 0: not.
    pointed: u64,
    copied: u64,
}

/// Where chunks are mapped, in order of their addresses.
#[derive(Debug)]
pub(super) struct Spans {
    all: Vec<Span>,
    /// Whether any of them was used.
    noted: bool,
}

impl Spans {
    pub(super) const fn new() -> Self {
        Self {
            all: Vec::new(),
            noted: false,
        }
    }

    /// In any order yet.
    pub(super) fn of<'a>(chunks: impl Iterator<Item = (&'a u64, &'a Chunk)>) -> Self {
        let mut all = Vec::new();
        for (id, chunk) in chunks {
            all.extend(chunk.mappings.iter().map(|mapping| Span {
                start: mapping.address,
                end: mapping.address.saturating_add(chunk.bytes),
                chunk: *id,
                of_arena: chunk.of_arena,
                goes_on: false,
                pointed: 0,
                copied: 0,
            }));
        }
        Self { all, noted: false }
    }

    /// Between allocations of an arena there is a gap, so what touches is one.
    pub(super) fn arrange(&mut self) {
        self.all.sort_unstable_by_key(|span| span.start);
        let mut before = None;
        for span in &mut self.all {
            span.goes_on = span.of_arena && before == Some(span.start);
            before = span.of_arena.then_some(span.end);
        }
    }

    /// An address that a kernel is given, or a word that looks like one.
    pub(super) fn pointed_to(&mut self, address: u64) {
        let after = self.all.partition_point(|span| span.start <= address);
        let span = after.checked_sub(1).and_then(|at| self.all.get_mut(at));
        if let Some(span) = span.filter(|span| address < span.end) {
            span.pointed = tick();
            self.noted = true;
        }
    }

    /// Addresses that a copy touches, all of them.
    pub(super) fn copied(&mut self, start: u64, bytes: u64) {
        let end = start.saturating_add(bytes);
        let first = self.all.partition_point(|span| span.end <= start);
        let touched = self.all.iter_mut().skip(first);
        let mut now = 0;
        for span in touched.take_while(|span| span.start < end) {
            if now == 0 {
                now = tick();
            }
            span.copied = now;
        }
        self.noted |= now != 0;
    }

    /// What was used since this was last asked, as chunks and moments.
    pub(super) fn take(&mut self) -> Vec<(u64, u64)> {
        if !std::mem::take(&mut self.noted) {
            return Vec::new();
        }
        let mut pointed_ns = 0;
        let used = self.all.iter_mut().filter_map(|span| {
            let pointed = std::mem::take(&mut span.pointed);
            if pointed != 0 || !span.goes_on {
                pointed_ns = pointed;
            }
            let used = pointed_ns.max(std::mem::take(&mut span.copied));
            (used != 0).then_some((span.chunk, used))
        });
        used.collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::chunk::{self, Mapping, Place};
    use super::*;

    /// One that can be moved.
    pub(in super::super) fn chunk(
        address: u64,
        bytes: u64,
        of_arena: bool,
        device: usize,
    ) -> Chunk {
        Chunk {
            bytes,
            device,
            ordinal: 0,
            context: 1,
            properties: chunk::on_device(0),
            handle: 1,
            place: Place::Resident,
            mappings: vec![Mapping {
                address,
                access: vec![chunk::access_from(0)],
                buffer_id: 0,
            }],
            host_copy: None,
            used: 0,
            stays: false,
            retained: 0,
            references: 0,
            of_arena,
            sync_memops: false,
            block_id: 0,
        }
    }

    /// Chunks by start, length and whether they are an arena's, numbered from 1 on.
    pub(in super::super) fn spans(of: &[(u64, u64, bool)]) -> Spans {
        let chunks: Vec<(u64, Chunk)> = (1..)
            .zip(of)
            .map(|(id, (start, bytes, of_arena))| (id, chunk(*start, *bytes, *of_arena, 0)))
            .collect();
        let mut of = Spans::of(chunks.iter().map(|(id, chunk)| (id, chunk)));
        of.arrange();
        of
    }

    /// Numbers of the chunks that were used, the latest last.
    pub(in super::super) fn used(spans: &mut Spans) -> Vec<u64> {
        let mut taken = spans.take();
        taken.sort_unstable_by_key(|(id, used)| (*used, *id));
        taken.into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn an_address_stands_for_what_follows_it_in_its_allocation() {
        let mut of = spans(&[
            (5000, 100, true), // 1 and 3 are one allocation, in spite of their numbers
            (1000, 100, true),
            (5100, 100, true),
            (5300, 100, true),
            (9000, 100, false), // 5 and 6 are mapped by the program
            (9100, 100, false),
        ]);
        for (address, chunks) in [
            (0, vec![]),
            (999, vec![]),
            (1000, vec![2]),
            (1099, vec![2]),
            (1100, vec![]),
            (5000, vec![1, 3]),
            (5099, vec![1, 3]),
            (5100, vec![3]),
            (5200, vec![]),
            (5300, vec![4]),
            (9000, vec![5]),
            (9199, vec![6]),
            (u64::MAX, vec![]),
        ] {
            of.pointed_to(address);
            assert_eq!(used(&mut of), chunks, "{address}");
        }
        of.pointed_to(9000);
        of.pointed_to(1000);
        of.pointed_to(5300);
        of.pointed_to(9050);
        assert_eq!(used(&mut of), [2, 4, 5], "in order, and each once");
        assert_eq!(used(&mut of), [], "until it is asked for");
    }

    #[test]
    fn an_address_stands_for_nothing_beyond_the_next_one() {
        let mut of = spans(&[
            (1000, 100, true),
            (1100, 100, true),
            (1200, 100, true),
            (1300, 100, true),
        ]);
        of.pointed_to(1200);
        of.pointed_to(1000);
        assert_eq!(used(&mut of), [3, 4, 1, 2]);
        // What was copied says nothing of what follows.
        of.pointed_to(1100);
        of.copied(1200, 1);
        assert_eq!(used(&mut of), [2, 4, 3]);
        of.copied(1000, 100);
        assert_eq!(used(&mut of), [1]);
    }

    #[test]
    fn a_copy_touches_all_that_it_lies_in_and_no_more() {
        let mut of = spans(&[(1000, 100, true), (1100, 100, true), (1300, 100, false)]);
        for (start, bytes, chunks) in [
            (1000, 0, vec![]),
            (1000, 1, vec![1]),
            (1099, 1, vec![1]),
            (1099, 2, vec![1, 2]),
            (900, 100, vec![]),
            (900, 101, vec![1]),
            (1200, 100, vec![]),
            (1150, 151, vec![2, 3]),
            (1399, u64::MAX, vec![3]),
            (u64::MAX, u64::MAX, vec![]),
        ] {
            of.copied(start, bytes);
            assert_eq!(used(&mut of), chunks, "{start} {bytes}");
        }
    }
}
