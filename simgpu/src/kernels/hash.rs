//! HostKernels of `hash.cu`: a 64-bit hash of the content of a buffer, per block of it and of the
//! whole.
//!
//! For finding unchanged memory, not for adversaries. A block's bytes are little-endian 64-bit
//! words, the last one padded with zeros; word `i` goes to thread `i % 256`, which absorbs its
//! words in order; the slots are then folded pairwise and the block's length is mixed in. Every
//! step is a bijection of the state for a given word and of the word for a given state, so two
//! blocks that differ in one word never collide; others do with about 2^-64. The multipliers and
//! shifts of the final mixer are those of SplitMix64 (Steele, Lea, Flood 2014).

use std::cell::Cell;

use super::{Cost, Fault, Kernel, Launch};

/// Threads of a block, each with a state of its own.
const THREADS: usize = 256;

const ABSORB: u64 = 0x9E37_79B9_7F4A_7C15;

/// `hashes[i]` = the hash of the `i`-th `block_bytes` of `data`, the last one may be shorter —
/// `(u64* hashes, const u8* data, u64 bytes, u64 block_bytes)`. `data` is aligned to 8,
/// `block_bytes` a multiple of 8; blocks of 256 threads.
pub(super) const CONTENT_HASH: Kernel = Kernel {
    name: "sublet_content_hash",
    waits: None,
    param_sizes: &[8, 8, 8, 8],
    run: content_hash,
    cost: |launch| Cost {
        // One multiplication, one rotation and one exclusive-or of 64 bits per word, each a few
        // instructions.
        flops: launch.size(2),
        bytes: launch.size(2) + 8.0 * (launch.size(2) / launch.size(3).max(8.0)).ceil(),
        fixed_ns: 0,
    },
};

fn content_hash(launch: &Launch<'_>) -> Result<(), Fault> {
    let (bytes, block_bytes) = (launch.u64(2)?, launch.u64(3)?);
    if launch.block != [256, 1, 1] || block_bytes == 0 || !block_bytes.is_multiple_of(8) {
        return Err(Fault::InvalidValue);
    }
    let address = launch.u64(1)?;
    let hashes = launch.buffer::<u64>(0, bytes.div_ceil(block_bytes))?;
    let data = launch.read::<u8>(launch.u64(1)?, bytes)?;
    if bytes > 0 && !address.is_multiple_of(8) {
        return Err(Fault::IllegalAddress { address, bytes });
    }
    // CAST: a block longer than memory is the whole buffer.
    let block_bytes = usize::try_from(block_bytes).unwrap_or(usize::MAX);
    for (hash, block) in hashes.iter().zip(data.chunks(block_bytes)) {
        hash.set(hash_block(block));
    }
    Ok(())
}

/// One hash of `count` hashes — `(u64* out, const u64* hashes, u64 count)`. One block of 256
/// threads.
pub(super) const HASH_FOLD: Kernel = Kernel {
    name: "sublet_hash_fold",
    waits: None,
    param_sizes: &[8, 8, 8],
    run: |launch| {
        if launch.block != [256, 1, 1] || launch.grid != [1, 1, 1] {
            return Err(Fault::InvalidValue);
        }
        let count = launch.u64(2)?;
        let out = launch.buffer::<u64>(0, 1)?;
        let hashes = launch.read::<u64>(launch.u64(1)?, count)?;
        let mut slots = seeds();
        for row in hashes.chunks(THREADS) {
            for (thread, hash) in slots.iter_mut().zip(row) {
                *thread = absorb(*thread, hash.get());
            }
        }
        out[0].set(finish(&mut slots, count.wrapping_mul(8))); // PANIC: `out` has one element.
        Ok(())
    },
    cost: |launch| Cost {
        flops: launch.size(2),
        bytes: 8.0 * launch.size(2) + 8.0,
        fixed_ns: 0,
    },
};

fn hash_block(block: &[Cell<u8>]) -> u64 {
    let mut slots = seeds();
    for row in block.chunks(8 * THREADS) {
        for (thread, word) in slots.iter_mut().zip(row.chunks(8)) {
            *thread = absorb(*thread, little_endian(word));
        }
    }
    finish(&mut slots, block.len() as u64) // CAST: a length fits 64 bits.
}

/// Up to eight bytes as a word, padded with zeros.
fn little_endian(bytes: &[Cell<u8>]) -> u64 {
    if let [a, b, c, d, e, f, g, h] = bytes {
        return u64::from_le_bytes([a, b, c, d, e, f, g, h].map(Cell::get));
    }
    bytes
        .iter()
        .rev()
        .fold(0, |word, byte| word << 8 | u64::from(byte.get()))
}

/// The threads' first states, all different, so that words cannot change threads unnoticed.
fn seeds() -> [u64; THREADS] {
    std::array::from_fn(|thread| mix(thread as u64 + 1)) // CAST: `thread` is below 256.
}

fn absorb(state: u64, word: u64) -> u64 {
    (state ^ word).wrapping_mul(ABSORB).rotate_left(29)
}

fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

fn finish(slots: &mut [u64; THREADS], bytes: u64) -> u64 {
    let mut half = THREADS / 2;
    while half > 0 {
        let (low, high) = slots.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low = absorb(mix(*low), *high);
        }
        half /= 2;
    }
    mix(slots[0] ^ bytes.wrapping_mul(ABSORB))
}
