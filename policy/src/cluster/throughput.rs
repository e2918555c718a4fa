//! How fast two jobs run together.

use std::collections::HashMap;

use super::completion::{PairEstimate, complete_pairs};
use super::{GpuType, JobType};

/// Where the speeds of pairs come from: a measured table, a model, or what arbiters report.
pub trait Throughputs {
    /// Speeds of `a` and `b` together on the same `gpus` GPUs of a type, each relative to its own
    /// speed alone there. `Some([0.0, 0.0])`: they do not fit. `None`: not known.
    fn pair(&self, a: JobType, b: JobType, kind: GpuType, gpus: u32) -> Option<[f64; 2]>;
}

/// A table of measured pairs.
#[derive(Clone, Debug, Default)]
pub struct PairTable {
    speeds: HashMap<(GpuType, u32, JobType, JobType), [f64; 2]>,
}

impl PairTable {
    /// Adds a measurement; it counts in both directions. `false`: a value that is negative or no
    /// number is refused.
    pub fn insert(
        &mut self,
        kind: GpuType,
        gpus: u32,
        (a, b): (JobType, JobType),
        [speed_a, speed_b]: [f64; 2],
    ) -> bool {
        let good = |speed: f64| speed.is_finite() && speed >= 0.0;
        if !good(speed_a) || !good(speed_b) {
            return false;
        }
        self.speeds.insert((kind, gpus, a, b), [speed_a, speed_b]);
        self.speeds.insert((kind, gpus, b, a), [speed_b, speed_a]);
        true
    }

    /// Number of ordered pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.speeds.len()
    }

    /// Nothing measured yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.speeds.is_empty()
    }

    /// Adds what can be inferred of pairs that are not there, between `kinds` (with their numbers
    /// of GPUs) on the first `types` types, where that is at least so sure. What is there stays.
    /// Returns what was added.
    pub fn complete(
        &mut self,
        kinds: &[(JobType, u32)],
        types: u16,
        least: f64,
    ) -> Vec<PairEstimate> {
        let estimates = complete_pairs(self, kinds, types, least);
        for one in &estimates {
            self.insert(one.kind, one.gpus, one.kinds.into(), one.speeds);
        }
        estimates
    }

    /// Every measurement: type, GPUs, the two kinds, their speeds.
    pub fn iter(&self) -> impl Iterator<Item = (GpuType, u32, JobType, JobType, [f64; 2])> + '_ {
        self.speeds
            .iter()
            .map(|((kind, gpus, a, b), speeds)| (*kind, *gpus, *a, *b, *speeds))
    }
}

impl Throughputs for PairTable {
    fn pair(&self, a: JobType, b: JobType, kind: GpuType, gpus: u32) -> Option<[f64; 2]> {
        self.speeds.get(&(kind, gpus, a, b)).copied()
    }
}
