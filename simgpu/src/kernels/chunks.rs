//! HostKernel of `chunks.cu`: a 128-bit hash of the content of each of many ranges.
//!
//! It tells which chunks of a job's memory are as they were when the job last left the device, so
//! that they need not be copied out again. A chunk's little-endian 64-bit words go round robin to
//! 256 slots. A thread has two states; each absorbs every word by `rotl((state ^ word) * odd, r)`,
//! with another multiplier and another rotation. The slots are folded pairwise, and the length is
//! mixed in.
//!
//! *What it misses.* Each half by itself is a bijection of the state for a given word and of the
//! word for a given state, so contents that differ in one word never have one hash. In more words a
//! half can be deceived by a pattern: a difference in the top bit alone stays one bit through the
//! multiplication, and the word 2 KiB further on can cancel it there, whatever the rest of the
//! chunk holds. Not in both halves at once, for their rotations take that bit to different places;
//! so a difference must meet 64 bits by chance at least. For contents that have nothing to do with
//! each other the odds are 2^-128. At 20,000 chunks of 1 MiB that all changed, twice a second for
//! ten years, that is 4e-26 to miss one; even at 2^-64 it would be 7e-7. It is no protection
//! against somebody who chooses contents, who would deceive only themselves: hashes are compared
//! within one job.

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::ops::Range;

use super::{Cost, Fault, Kernel, Launch, Reader, Written};

/// Threads of a block, each a thread.
const THREADS: usize = 256;
const FIRST: u64 = 0x9E37_79B9_7F4A_7C15;
const SECOND: u64 = 0xC2B2_AE3D_27D4_EB4F;

/// `hashes[2 i]`, `hashes[2 i + 1]` = the hash of the `chunks[2 i + 1]` bytes at the address
/// `chunks[2 i]` — `(u64* hashes, const u64* chunks, u64 count)`. Addresses and lengths are
/// multiples of 8; blocks of 256 threads.
pub(super) const HASH_CHUNKS: Kernel = Kernel {
    name: "sublet_hash_chunks",
    waits: None,
    param_sizes: &[8, 8, 8],
    run: hash_chunks,
    cost: |launch| {
        let bytes: f64 = list(launch)
            .unwrap_or_default()
            .iter()
            // CAST: the cost model needs no more than 53 bits.
            .map(|chunk| chunk[1].get() as f64)
            .sum();
        Cost {
            // Two multiplications, rotations and exclusive-ors of 64 bits per word, each a few
            // instructions.
            flops: 2.0 * bytes,
            bytes: bytes + 32.0 * launch.size(2),
            fixed_ns: 0,
        }
    },
};

/// The chunks as pairs of address and length.
fn list<'a>(launch: &Launch<'a>) -> Result<Vec<[&'a Cell<u64>; 2]>, Fault> {
    let words = launch.u64(2)?.saturating_mul(2);
    let words = launch.read::<u64>(launch.u64(1)?, words)?;
    Ok(words
        .chunks_exact(2)
        .map(|pair| [&pair[0], &pair[1]]) // PANIC: chunks of two.
        .collect())
}

fn hash_chunks(launch: &Launch<'_>) -> Result<(), Fault> {
    if launch.block != [256, 1, 1] {
        return Err(Fault::InvalidValue);
    }
    let hashes = launch.buffer::<u64>(0, launch.u64(2)?.saturating_mul(2))?;
    let chunks: Vec<(u64, u64)> = list(launch)?
        .iter()
        .map(|chunk| (chunk[0].get(), chunk[1].get()))
        .collect();
    let mut seen = Seen::default();
    HASHER.with_borrow_mut(|hasher| {
        for (at, (hash, (address, bytes))) in hashes.chunks_exact(2).zip(&chunks).enumerate() {
            let (address, bytes) = (*address, *bytes);
            if !bytes.is_multiple_of(8) || !address.is_multiple_of(8) {
                return Err(Fault::IllegalAddress { address, bytes });
            }
            // PANIC: an index of the same list.
            let chunk = seen.of(launch, &chunks[at..])?;
            let read = |address, to: &mut [u64]| chunk.read.is_some_and(|read| read(address, to));
            let found = hasher.hash(address, chunk.words, chunk.written, read);
            for (to, half) in hash.iter().zip(found) {
                to.set(half);
            }
        }
        Ok(())
    })
}

thread_local! {
    /// Kept from launch to launch: a thousand rows of zeros take as long as hundreds of chunks that
    /// begin with them. It does not go with its thread, for which the thread would have to ask for
    /// the dynamic loader's lock: see [`crate::lock`].
    static HASHER: RefCell<ManuallyDrop<Hasher>> = RefCell::new(ManuallyDrop::new(Hasher::new()));
}

/// Where chunks lie and what of them may have been written, looked up for many neighbours at a
/// time.
#[derive(Default)]
struct Seen<'a> {
    known: Range<u64>,
    /// From the start of what is known on.
    words: &'a [Cell<u64>],
    ranges: Vec<Range<u64>>,
    read: Option<Reader<'a>>,
    /// The first of the ranges that is not wholly before the last chunk.
    next: usize,
    last: u64,
}

/// A chunk of them.
struct Chunk<'a, 'b> {
    words: &'a [Cell<u64>],
    /// Where it may be anything but zeros.
    written: &'b [Range<u64>],
    /// Who reads it cheaply.
    read: Option<&'b Reader<'a>>,
}

impl<'a> Seen<'a> {
    /// Bytes that are looked up at once.
    const AHEAD: u64 = 64 << 20;

    /// The first of `chunks`, of which there is one; its address and length are multiples of 8.
    fn of(&mut self, launch: &Launch<'a>, chunks: &[(u64, u64)]) -> Result<Chunk<'a, '_>, Fault> {
        let (address, bytes) = chunks[0]; // PANIC: the caller has one.
        let outside = Fault::IllegalAddress { address, bytes };
        let end = address.checked_add(bytes).ok_or(outside)?;
        // Chunks may come again, or overlap; what lies behind the last one is not looked for again.
        if !(self.last <= address && end <= self.known.end) {
            self.look_up(launch, chunks, end)?;
        }
        self.last = address;
        while self
            .ranges
            .get(self.next)
            .is_some_and(|range| range.end <= address)
        {
            self.next += 1;
        }
        let from = &self.ranges[self.next..];
        let count = from.partition_point(|range| range.start < end);
        // CAST: inside of what was translated.
        let words = [address, end].map(|at| ((at - self.known.start) / 8) as usize);
        Ok(Chunk {
            words: self.words.get(words[0]..words[1]).ok_or(outside)?,
            written: &from[..count],
            read: self.read.as_ref(),
        })
    }

    /// The first of `chunks`, up to `end`, and what follows it.
    fn look_up(
        &mut self,
        launch: &Launch<'a>,
        chunks: &[(u64, u64)],
        end: u64,
    ) -> Result<(), Fault> {
        let (address, bytes) = chunks[0]; // PANIC: the caller has one.
        let mut upto = end;
        for (next, more) in &chunks[1..] {
            let further = upto.saturating_add(*more);
            if *next != upto || further - address > Self::AHEAD {
                break;
            }
            upto = further;
        }
        let words = match launch.read::<u64>(address, (upto - address) / 8) {
            Ok(words) => words,
            // Perhaps it is one further on that is not there: that is found when its turn comes.
            Err(_) => {
                upto = end;
                launch.read::<u64>(address, bytes / 8)?
            }
        };
        let mut written = launch.memory.written(address, upto - address);
        if written.end < end {
            // It goes on in other memory: all of it counts as written.
            written = Written {
                end,
                ranges: std::iter::once(address..end).collect(),
                read: None,
            };
        }
        *self = Self {
            known: address..written.end.min(upto),
            words,
            ranges: written.ranges,
            read: written.read,
            next: 0,
            last: address,
        };
        Ok(())
    }
}

#[inline(always)]
fn first(state: u64, word: u64) -> u64 {
    (state ^ word).wrapping_mul(FIRST).rotate_left(29)
}

#[inline(always)]
fn second(state: u64, word: u64) -> u64 {
    (state ^ word).wrapping_mul(SECOND).rotate_left(37)
}

#[inline(always)]
fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

#[derive(Clone)]
struct States {
    first: [u64; THREADS],
    second: [u64; THREADS],
}

impl States {
    fn new() -> Self {
        // CAST: a thread is below 256.
        Self {
            first: std::array::from_fn(|thread| mix(thread as u64 + 1)),
            second: std::array::from_fn(|thread| mix(!(thread as u64))),
        }
    }

    #[inline(always)]
    fn absorb(&mut self, row: impl Iterator<Item = u64>) {
        for ((a, b), word) in self.first.iter_mut().zip(&mut self.second).zip(row) {
            *a = first(*a, word);
            *b = second(*b, word);
        }
    }

    /// Absorbs what is left of a chunk, `known` and then `rows`, and folds. `written` says of each
    /// row whether it may be anything but zeros.
    #[inline(always)]
    fn finish(
        &mut self,
        known: &[u64],
        rows: &[Cell<u64>],
        mut written: impl FnMut(usize) -> bool,
        bytes: u64,
    ) -> [u64; 2] {
        for words in known.chunks(THREADS) {
            self.absorb(words.iter().map(|word| u64::from_le(*word)));
        }
        for (row, words) in rows.chunks(THREADS).enumerate() {
            if written(row) {
                self.absorb(words.iter().map(|word| u64::from_le(word.get())));
            } else {
                self.absorb(words.iter().map(|_| 0));
            }
        }
        let mut half = THREADS / 2;
        while half > 0 {
            let (low, high) = self.first.split_at_mut(half);
            for (low, high) in low.iter_mut().zip(high) {
                *low = first(mix(*low), *high);
            }
            let (low, high) = self.second.split_at_mut(half);
            for (low, high) in low.iter_mut().zip(high) {
                *low = second(mix(*low), *high);
            }
            half /= 2;
        }
        [
            mix(self.first[0] ^ bytes.wrapping_mul(FIRST)),
            mix(self.second[0] ^ bytes.wrapping_mul(SECOND)),
        ]
    }

    /// [`States::finish`] for processors that multiply several words at once.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn finish_wide(
        &mut self,
        known: &[u64],
        rows: &[Cell<u64>],
        written: impl FnMut(usize) -> bool,
        bytes: u64,
    ) -> [u64; 2] {
        self.finish(known, rows, written, bytes)
    }
}

/// What the processor multiplies at once. Wide is what brings `unchanged_over_full` of
/// `scripts/bench/switch` below its limit; AVX-512 brings no more than AVX2 within the noise
/// (docs/reference/performance.md, "What the simulation
/// needs of the host").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    One,
    /// With AVX2.
    #[cfg(target_arch = "x86_64")]
    Wide,
}

impl Width {
    fn of_this_processor() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx2") {
                return Self::Wide;
            }
        }
        Self::One
    }
}

/// Bytes of a row: a word for each thread.
const ROW: u64 = 8 * THREADS as u64;
/// So many rows are copied together, where no more were written.
const FEW: u64 = 32;

/// Hashes one chunk after the other. What was never written is zeros and is not read; how chunks
/// that begin with so many rows of zeros go on is remembered of the last one.
struct Hasher {
    /// Before anything.
    fresh: States,
    /// After so many rows of zeros.
    zeros: (u64, States),
    slots: States,
    /// Rows that were copied.
    known: Vec<u64>,
    width: Width,
}

impl Hasher {
    fn new() -> Self {
        Self {
            fresh: States::new(),
            zeros: (0, States::new()),
            slots: States::new(),
            known: vec![0; FEW as usize * THREADS],
            width: Width::of_this_processor(),
        }
    }

    /// Of `words` at `address`, of which nothing but `written` may be anything but zeros; `read`
    /// copies some of them, if it can.
    fn hash(
        &mut self,
        address: u64,
        words: &[Cell<u64>],
        written: &[Range<u64>],
        read: impl FnOnce(u64, &mut [u64]) -> bool,
    ) -> [u64; 2] {
        // CAST: lengths fit 64 bits, and rows' numbers fit both ways.
        let bytes = words.len() as u64 * 8;
        let row_of = |at: u64| (at.saturating_sub(address) / ROW).min(bytes / ROW);
        let zeros = written
            .first()
            .map_or(bytes / ROW, |range| row_of(range.start));
        self.skip(zeros);
        let rows = &words[zeros as usize * THREADS..];
        let ends = written
            .last()
            .map_or(zeros, |range| row_of(range.end.saturating_sub(1)) + 1);
        let few = rows.len().min((ends - zeros) as usize * THREADS);
        let copied = few > 0
            && self
                .known
                .get_mut(..few)
                .is_some_and(|known| read(address + zeros * ROW, known));
        let (known, rows) = if copied {
            (&self.known[..few], &rows[few..])
        } else {
            (&[][..], rows)
        };
        let mut left = written.iter().filter(|_| !copied).peekable();
        let is_written = |row: usize| {
            let start = address + (zeros + row as u64) * ROW;
            while left.peek().is_some_and(|range| range.end <= start) {
                left.next();
            }
            left.peek().is_some_and(|range| range.start < start + ROW)
        };
        let slots = &mut self.slots;
        match self.width {
            Width::One => slots.finish(known, rows, is_written, bytes),
            // SAFETY: the processor has these instructions.
            #[cfg(target_arch = "x86_64")]
            Width::Wide => unsafe { slots.finish_wide(known, rows, is_written, bytes) },
        }
    }

    /// Begins with so many rows of zeros.
    fn skip(&mut self, rows: u64) {
        let (done, slots) = &mut self.zeros;
        if rows == 0 {
            self.slots.clone_from(&self.fresh);
            return;
        }
        if *done > rows {
            *done = 0;
            slots.clone_from(&self.fresh);
        }
        while *done < rows {
            slots.absorb(std::iter::repeat_n(0, THREADS));
            *done += 1;
        }
        self.slots.clone_from(slots);
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    fn one(range: Range<u64>) -> Vec<Range<u64>> {
        std::iter::once(range).collect()
    }

    #[test]
    fn every_way_finds_the_same_hash() {
        let widths = match Width::of_this_processor() {
            Width::Wide => &[Width::One, Width::Wide][..],
            Width::One => &[Width::One],
        };
        let words: Vec<Cell<u64>> = (0..40 * THREADS as u64 + 7)
            .map(|word| {
                Cell::new(if (600..9000).contains(&word) {
                    0
                } else {
                    mix(word)
                })
            })
            .collect();
        for length in [
            0,
            1,
            THREADS - 1,
            THREADS,
            2 * THREADS + 3,
            36 * THREADS,
            words.len(),
        ] {
            let words = &words[..length];
            let end = 8 * length as u64;
            let all = [0..4800, 72000..end]
                .map(|part: Range<u64>| part.start.min(end)..part.end.min(end));
            let first: Vec<Range<u64>> = all
                .iter()
                .filter(|part| !part.is_empty())
                .cloned()
                .collect();
            let copy = |address: u64, to: &mut [u64]| {
                let from = &words[address as usize / 8..];
                to.iter_mut()
                    .zip(from)
                    .for_each(|(to, from)| *to = from.get());
                true
            };
            let everything = one(0..end);
            let [plain, skipped] = [&everything[..], &first].map(|written| {
                Hasher {
                    width: Width::One,
                    ..Hasher::new()
                }
                .hash(0, words, written, |_, _| false)
            });
            assert_eq!(plain, skipped, "{length} words");
            for width in widths {
                let mut hasher = Hasher {
                    width: *width,
                    ..Hasher::new()
                };
                assert_eq!(hasher.hash(0, words, &first, copy), plain, "{length} words");
            }
        }
        // The beginning alone was written: what follows is not looked at.
        let mut hasher = Hasher::new();
        let start: Vec<Cell<u64>> = (0..50 * THREADS as u64)
            .map(|word| Cell::new(if word < 300 { mix(word) } else { 0 }))
            .collect();
        let plain = hasher.hash(0, &start, &one(0..start.len() as u64 * 8), |_, _| false);
        let copy = |_: u64, to: &mut [u64]| {
            to.iter_mut()
                .zip(&start)
                .for_each(|(to, from)| *to = from.get());
            true
        };
        assert_eq!(hasher.hash(0, &start, &one(0..2400), copy), plain);
    }
}
