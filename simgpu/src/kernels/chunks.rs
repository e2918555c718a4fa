//! Twin of `chunks.cu`: a 128-bit hash of the content of each of many ranges.
//!
//! It tells which chunks of a job's memory are as they were when the job last left the device, so that they need not be copied
//! out again. A chunk's little-endian 64-bit words go round robin to 256 lanes. A lane has two states; each absorbs every word
//! by `rotl((state ^ word) * odd, r)`, with another multiplier and another rotation. The lanes are folded pairwise, and
//! the length is mixed in.
//!
//! *What it misses.* Each half by itself is a bijection of the state for a given word and of the word for a given state, so
//! contents that differ in one word never have one hash. In more words a half can be deceived by a pattern: a difference in the
//! top bit alone stays one bit through the multiplication, and the word 2 KiB further on can cancel it there, whatever the
//! rest of the chunk holds. Not in both halves at once, for their rotations take that bit to different places; so a difference
//! must meet 64 bits by chance at least. For contents that have nothing to do with each other the odds are 2^-128. At 20,000 chunks of
//! 1 MiB that all changed, twice a second for ten years, that is 4e-26 to miss one; even at 2^-64 it would be 7e-7. It is
//! no protection against somebody who chooses contents, who would deceive only themselves: hashes are compared within one job.

use std::cell::Cell;

use super::{Cost, Fault, Kernel, Launch};

/// Threads of a block, each a lane.
const LANES: usize = 256;
const FIRST: u64 = 0x9E37_79B9_7F4A_7C15;
const SECOND: u64 = 0xC2B2_AE3D_27D4_EB4F;

/// `hashes[2 i]`, `hashes[2 i + 1]` = the hash of the `chunks[2 i + 1]` bytes at the address `chunks[2 i]` —
/// `(u64* hashes, const u64* chunks, u64 count)`. Addresses and lengths are multiples of 8; blocks of 256 threads.
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
            // Two multiplications, rotations and exclusive-ors of 64 bits per word, each a few instructions.
            flops: 2.0 * bytes,
            bytes: bytes + 32.0 * launch.size(2),
            fixed_ns: 0,
        }
    },
};

/// The chunks as pairs of address and length.
fn list<'a>(launch: &Launch<'a>) -> Result<Vec<[&'a Cell<u64>; 2]>, Fault> {
    let words = launch.u64(2)?.saturating_mul(2);
    let words = launch.buffer::<u64>(1, words)?;
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
    // All zeros are the same for all chunks of a length.
    let mut zeros: Option<(u64, [u64; 2])> = None;
    for (hash, chunk) in hashes.chunks_exact(2).zip(list(launch)?) {
        let (address, bytes) = (chunk[0].get(), chunk[1].get());
        if !bytes.is_multiple_of(8) || !address.is_multiple_of(8) {
            return Err(Fault::IllegalAddress { address, bytes });
        }
        let data = launch.at::<u64>(address, bytes / 8)?;
        let found = match zeros {
            _ if bytes == 0 || !launch.memory.is_untouched(address, bytes) => {
                hash_words(launch, address, data)
            }
            Some((length, hash)) if length == bytes => hash,
            _ => {
                let hash = hash_zeros(bytes / 8);
                zeros = Some((bytes, hash));
                hash
            }
        };
        for (to, half) in hash.iter().zip(found) {
            to.set(half);
        }
    }
    Ok(())
}

fn first(state: u64, word: u64) -> u64 {
    (state ^ word).wrapping_mul(FIRST).rotate_left(29)
}

fn second(state: u64, word: u64) -> u64 {
    (state ^ word).wrapping_mul(SECOND).rotate_left(37)
}

fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

struct Lanes {
    first: [u64; LANES],
    second: [u64; LANES],
}

impl Lanes {
    fn new() -> Self {
        // CAST: a lane is below 256.
        Self {
            first: std::array::from_fn(|lane| mix(lane as u64 + 1)),
            second: std::array::from_fn(|lane| mix(!(lane as u64))),
        }
    }

    fn absorb(&mut self, row: impl Iterator<Item = u64>) {
        for ((a, b), word) in self.first.iter_mut().zip(&mut self.second).zip(row) {
            *a = first(*a, word);
            *b = second(*b, word);
        }
    }

    fn finish(mut self, bytes: u64) -> [u64; 2] {
        let mut half = LANES / 2;
        while half > 0 {
            for (lanes, absorb) in [
                (&mut self.first, first as fn(u64, u64) -> u64),
                (&mut self.second, second),
            ] {
                let (low, high) = lanes.split_at_mut(half);
                for (low, high) in low.iter_mut().zip(high) {
                    *low = absorb(mix(*low), *high);
                }
            }
            half /= 2;
        }
        [
            mix(self.first[0] ^ bytes.wrapping_mul(FIRST)),
            mix(self.second[0] ^ bytes.wrapping_mul(SECOND)),
        ]
    }
}

/// Rows that are looked at together for whether anybody ever wrote to them.
const ROWS: usize = 128;

fn hash_words(launch: &Launch<'_>, address: u64, words: &[Cell<u64>]) -> [u64; 2] {
    let mut lanes = Lanes::new();
    let mut at = address;
    for rows in words.chunks(ROWS * LANES) {
        // CAST: lengths fit 64 bits.
        let bytes = rows.len() as u64 * 8;
        let untouched = launch.memory.is_untouched(at, bytes);
        at += bytes;
        for row in rows.chunks(LANES) {
            if untouched {
                lanes.absorb(row.iter().map(|_| 0));
            } else {
                lanes.absorb(row.iter().map(|word| u64::from_le(word.get())));
            }
        }
    }
    // CAST: a length fits 64 bits.
    lanes.finish(words.len() as u64 * 8)
}

fn hash_zeros(words: u64) -> [u64; 2] {
    let mut lanes = Lanes::new();
    let mut left = words;
    while left > 0 {
        // CAST: at most 256.
        let row = left.min(LANES as u64);
        lanes.absorb((0..row).map(|_| 0));
        left -= row;
    }
    lanes.finish(words.wrapping_mul(8))
}
