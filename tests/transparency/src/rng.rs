//! A generator of reproducible choices.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng};

/// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Rng(SplitMix64);

impl Rng {
    /// A generator whose whole output follows from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    /// The next 64 bits.
    #[inline]
    pub fn word(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `limit`; 0 for a limit of 0.
    #[inline]
    pub fn below(&mut self, limit: usize) -> usize {
        // The bias is below limit / 2^64.
        ((u128::from(self.word()) * limit as u128) >> 64) as usize
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// An element.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        // PANIC: callers pass lists that are not empty.
        from[self.below(from.len())]
    }
}

/// The finaliser of SplitMix64: every input bit changes half of the output.
#[inline]
pub fn mix(value: u64) -> u64 {
    let mut z = value;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
