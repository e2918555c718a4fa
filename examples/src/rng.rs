//! Random numbers that are the same everywhere and whose state fits a checkpoint.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rng {
    /// The whole state.
    pub state: u64,
}

impl Rng {
    /// A generator for `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Rng {
        Rng { state: seed }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// A number below `limit` (not 0), uniform up to 2^-32.
    pub fn below(&mut self, limit: u32) -> u32 {
        // CAST: the product of two 32-bit numbers has its upper half below `limit`.
        (((self.bits() >> 32) * u64::from(limit)) >> 32) as u32
    }

    /// A number in [-1, 1).
    pub fn signed_unit(&mut self) -> f32 {
        // CAST: 24 bits are exact in a float.
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// The numbers below `count` in random order.
    pub fn permutation(&mut self, count: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count).collect();
        for at in (1..count).rev() {
            order.swap(at as usize, self.below(at + 1) as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_holds_every_number_once_and_depends_on_the_seed() {
        let mut order = Rng::new(5).permutation(1000);
        assert_ne!(order, Rng::new(6).permutation(1000));
        assert_eq!(order, Rng::new(5).permutation(1000));
        order.sort_unstable();
        assert!(order.iter().copied().eq(0..1000));
        assert!(Rng::new(1).permutation(0).is_empty());
    }

    #[test]
    fn numbers_stay_in_their_range() {
        let mut rng = Rng::new(9);
        for _ in 0..10_000 {
            assert!((-1.0..1.0).contains(&rng.signed_unit()));
            assert!(rng.below(7) < 7);
        }
    }
}
