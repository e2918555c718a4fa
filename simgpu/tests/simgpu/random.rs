//! Numbers for tests: the same from run to run, so that a failure can be run again.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

pub struct Random(SplitMix64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    /// Less than `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0.next_u64() % limit
    }
}
