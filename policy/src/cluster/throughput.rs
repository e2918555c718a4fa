//! How fast two jobs run together, and several.

use std::collections::HashMap;

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

/// The speed of a job beside several others, relative to being alone, from its speeds beside each
/// of them. Nobody publishes speeds of three jobs or more, so this is a rule and no measurement:
/// *what each of the others costs adds up*. Beside one it needs 1/s of its time alone, so each adds
/// 1/s - 1.
///
/// Two jobs that keep the device busy by themselves take turns (s = 1/2), and so do three (1/3) or
/// ten; one that costs nothing (s = 1) changes nothing. Jobs that use different parts of a device
/// get on better than this where the pairs were measured one by one at a full device; the rule errs
/// to the slow side there. A speed of 0, or none, leaves 0.
#[must_use]
pub fn beside_all(speeds: impl IntoIterator<Item = f64>) -> f64 {
    let mut time = 1.0;
    for speed in speeds {
        if speed.is_nan() || speed <= 0.0 {
            return 0.0;
        }
        time += 1.0 / speed.min(1.0) - 1.0;
    }
    1.0 / time
}

/// The same of a job whose speeds beside each of the others may not be known: where all are, what
/// they cost adds up; else all of them slow down by what they ask for beyond one device, `busy`
/// together.
#[must_use]
pub fn beside_others(speeds: impl IntoIterator<Item = Option<f64>>, busy: f64) -> f64 {
    let known: Option<Vec<f64>> = speeds.into_iter().collect();
    match known.as_deref() {
        // To the bit what was measured of the two.
        Some([only]) => *only,
        Some(all) => beside_all(all.iter().copied()),
        None => 1.0 / busy.max(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_one_pair_is_not_known_all_go_by_how_busy_they_are() {
        assert_eq!(beside_others([Some(0.7)], 9.0), 0.7);
        assert!((beside_others([Some(0.5), Some(0.5)], 9.0) - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(beside_others([Some(0.5), None], 1.6), 1.0 / 1.6);
        assert_eq!(beside_others([None], 0.4), 1.0);
        assert_eq!(beside_others([], 0.4), 1.0);
    }

    #[test]
    fn what_others_cost_adds_up() {
        let near = |speeds: &[f64], expected: f64| {
            let found = beside_all(speeds.iter().copied());
            assert!((found - expected).abs() < 1e-12, "{speeds:?}: {found}");
        };
        near(&[], 1.0);
        near(&[0.7], 0.7);
        // Three, and ten, that each keep the device busy take turns.
        near(&[0.5; 2], 1.0 / 3.0);
        near(&[0.5; 9], 0.1);
        near(&[1.0, 0.5, 1.0], 0.5);
        near(&[0.8, 0.0], 0.0);
        near(&[0.8, f64::NAN], 0.0);
        near(&[3.0], 1.0);
    }
}
