//! Draws from a fixed seed, and what the workloads are drawn from.

/// SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators",
/// OOPSLA 2014.
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 up to 1, without 1.
    pub fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + (self.part() * (high - low + 1) as f64) as u64
    }

    /// Evenly on a logarithmic scale.
    pub fn log_between(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.part())
    }

    /// From a distribution given by its quantiles: between two of them on a logarithmic scale.
    pub fn quantile(&mut self, table: &[(f64, f64)]) -> f64 {
        let part = self.part();
        let above = table
            .iter()
            .position(|(quantile, _)| *quantile > part)
            .unwrap_or(table.len() - 1)
            .max(1);
        let ((p0, v0), (p1, v1)) = (table[above - 1], table[above]);
        v0 * (v1 / v0).powf((part - p0) / (p1 - p0))
    }
}
