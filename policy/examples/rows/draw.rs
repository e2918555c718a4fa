//! Draws from a fixed seed, and what the workloads are drawn from.

use policy::cluster::Random;

pub struct Draw(Random);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(Random::new(seed))
    }

    /// From 0 up to 1, without 1.
    pub fn part(&mut self) -> f64 {
        self.0.unit()
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
