//! How fast a job is on how many GPUs, from a few numbers of them: Optimus' resource-speed model
//! (EuroSys'18).
//!
//! A synchronous step computes on its part of the batch, exchanges gradients, and has something
//! constant: with `w` GPUs and `m` samples on each of them it takes
//!
//! ```text
//! T(w, m) = a m + b + c w,   a, b, c >= 0
//! ```
//!
//! (Optimus has terms for parameter servers as well; with an all-reduce there are none.) The three
//! numbers come from the steps that were measured, by least squares of the relative error under the
//! condition that none is negative: a negative one would promise that some number of GPUs is
//! infinitely fast. With three numbers all supports can be tried, so the fit is exact.

use super::completion::solve;

/// A measured step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Step {
    /// GPUs.
    pub gpus: u32,
    /// Samples on each GPU; only proportions count.
    pub local: f64,
    /// How long it took, in seconds.
    pub step_s: f64,
}

/// The fitted numbers: by sample on a GPU, constant, by GPU.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Scaling {
    parts: [f64; 3],
}

/// Fits that are as good as this are equal; the one with fewer parts is taken.
const EQUAL: f64 = 1e-9;

impl Scaling {
    /// From these steps; `None` without one that can be used.
    #[must_use]
    pub fn fit(steps: &[Step]) -> Option<Self> {
        let above_0 = |x: f64| x.is_finite() && x > 0.0;
        let good = |step: &&Step| step.gpus > 0 && above_0(step.local) && above_0(step.step_s);
        // Each over its time, so that the right side is 1 and errors are relative.
        let rows: Vec<[f64; 3]> = steps
            .iter()
            .filter(good)
            .map(|step| features(step.gpus, step.local).map(|x| x / step.step_s))
            .collect();
        if rows.is_empty() {
            return None;
        }
        // Less to more parts, and what is divided among GPUs before what is not.
        let supports: [&[usize]; 7] = [&[0], &[1], &[2], &[0, 1], &[0, 2], &[1, 2], &[0, 1, 2]];
        let mut best: Option<(f64, Self)> = None;
        for support in supports {
            let matrix = support.iter().map(|i| {
                let with = |j: &usize| rows.iter().map(|row| row[*i] * row[*j]).sum::<f64>();
                support.iter().map(with).collect::<Vec<f64>>()
            });
            let mut matrix: Vec<Vec<f64>> = matrix.collect();
            // As large as a rounding error: two columns may be the same.
            for (at, row) in matrix.iter_mut().enumerate() {
                row[at] *= 1.0 + 1e-10;
            }
            // Of one unit, whatever the unit of samples is.
            let sizes: Vec<f64> = (0..support.len()).map(|i| matrix[i][i].sqrt()).collect();
            for (i, row) in matrix.iter_mut().enumerate() {
                for (j, x) in row.iter_mut().enumerate() {
                    *x /= sizes[i] * sizes[j];
                }
            }
            let right = support.iter().zip(&sizes).map(|(i, size)| {
                let sum: f64 = rows.iter().map(|row| row[*i]).sum();
                sum / size
            });
            let Some(found) = solve(matrix, right.collect()) else {
                continue;
            };
            if found.iter().any(|x| *x < 0.0) {
                continue;
            }
            let mut parts = [0.0; 3];
            for ((i, x), size) in support.iter().zip(found).zip(&sizes) {
                parts[*i] = x / size;
            }
            let error: f64 = rows
                .iter()
                .map(|row| row.iter().zip(parts).map(|(x, p)| x * p).sum::<f64>() - 1.0)
                .map(|miss| miss * miss)
                .sum();
            if best.as_ref().is_none_or(|(least, _)| error < least - EQUAL) {
                best = Some((error, Self { parts }));
            }
        }
        best.map(|(_, scaling)| scaling)
    }

    /// How long a step takes, in seconds.
    #[must_use]
    pub fn step_s(&self, gpus: u32, local: f64) -> f64 {
        let features = features(gpus, local);
        features.iter().zip(self.parts).map(|(x, p)| x * p).sum()
    }
}

fn features(gpus: u32, local: f64) -> [f64; 3] {
    [local, 1.0, f64::from(gpus)]
}

/// Speeds on 1 to `most` GPUs relative to that on `one`, of a job with one batch size, from its
/// iterations per second on some numbers of GPUs. What was measured stays as it is. `None` with
/// fewer than two numbers of GPUs: one says nothing about others.
#[must_use]
pub fn curve(measured: &[(u32, f64)], one: u32, most: u32) -> Option<Vec<f64>> {
    let good = |(gpus, per_s): &&(u32, f64)| *gpus > 0 && per_s.is_finite() && *per_s > 0.0;
    let steps: Vec<Step> = measured
        .iter()
        .filter(good)
        .map(|(gpus, per_s)| Step {
            gpus: *gpus,
            local: 1.0 / f64::from(*gpus),
            step_s: 1.0 / per_s,
        })
        .collect();
    let first = steps.first()?;
    if steps.iter().all(|step| step.gpus == first.gpus) {
        return None;
    }
    let scaling = Scaling::fit(&steps)?;
    let per_s = |gpus: u32| {
        let known = steps.iter().rev().find(|step| step.gpus == gpus);
        let inferred = || scaling.step_s(gpus, 1.0 / f64::from(gpus));
        1.0 / known.map_or_else(inferred, |step| step.step_s)
    };
    let unit = per_s(one.max(1));
    let curve: Vec<f64> = (1..=most).map(|gpus| per_s(gpus) / unit).collect();
    let good = |speed: &f64| speed.is_finite() && *speed > 0.0;
    curve.iter().all(good).then_some(curve)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(parts: [f64; 3], gpus: &[u32], batch: f64) -> Vec<Step> {
        let truth = Scaling { parts };
        let step = |gpus: &u32| Step {
            gpus: *gpus,
            local: batch / f64::from(*gpus),
            step_s: truth.step_s(*gpus, batch / f64::from(*gpus)),
        };
        gpus.iter().map(step).collect()
    }

    #[test]
    fn a_job_that_is_as_the_model_says_is_found_exactly() {
        for parts in [
            [0.01, 0.2, 0.003],
            [0.01, 0.0, 0.0],
            [0.0, 0.3, 0.0],
            [0.02, 0.0, 0.01],
        ] {
            let fit = Scaling::fit(&steps(parts, &[1, 2, 4, 8], 256.0)).unwrap();
            for gpus in [1, 3, 6, 16, 32] {
                let local = 256.0 / f64::from(gpus);
                let truth = Scaling { parts }.step_s(gpus, local);
                let ratio = fit.step_s(gpus, local) / truth;
                assert!((ratio - 1.0).abs() < 1e-3, "{parts:?} on {gpus}: {ratio}");
            }
        }
    }

    #[test]
    fn no_part_is_negative_and_no_number_of_gpus_is_infinitely_fast() {
        // Faster than in proportion: free least squares would make the constant part negative.
        let wild = [(1, 1.0), (2, 2.6), (4, 7.0)];
        let steps: Vec<Step> = wild
            .iter()
            .map(|(gpus, per_s)| Step {
                gpus: *gpus,
                local: 1.0 / f64::from(*gpus),
                step_s: 1.0 / per_s,
            })
            .collect();
        let fit = Scaling::fit(&steps).unwrap();
        assert!(fit.parts.iter().all(|part| *part >= 0.0), "{fit:?}");
        let curve = curve(&wild, 1, 64).unwrap();
        assert_eq!(curve[..2], [1.0, 2.6], "what was measured stays");
        assert!(
            curve.iter().all(|speed| *speed > 0.0 && *speed < 200.0),
            "{curve:?}"
        );
    }

    #[test]
    fn what_cannot_be_is_left_out_and_one_number_of_gpus_says_nothing() {
        let bad = [f64::NAN, f64::INFINITY, 0.0, -1.0].map(|step_s| Step {
            gpus: 1,
            local: 1.0,
            step_s,
        });
        assert_eq!(Scaling::fit(&bad), None);
        assert_eq!(Scaling::fit(&[]), None);
        let good = steps([0.01, 0.2, 0.003], &[1, 2, 4], 64.0);
        let with: Vec<Step> = bad.iter().chain(&good).copied().collect();
        assert_eq!(Scaling::fit(&with), Scaling::fit(&good));
        assert_eq!(curve(&[(2, 3.0), (2, 3.1)], 1, 8), None);
        assert_eq!(curve(&[(2, f64::NAN), (4, 3.1)], 1, 8), None);
        assert_eq!(curve(&[(0, 1.0), (4, 3.1)], 1, 8), None);
    }
}
