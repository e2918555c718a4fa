//! How long a job that trains will go on: Optimus' fit of its loss (EuroSys'18).
//!
//! The loss of stochastic gradient descent falls about as `1/(a e + b) + c` over epochs `e`. All
//! three are fitted to what was seen, later points counting four times as much with every third,
//! because the start says little about the end. A job counts as converged where the loss falls by
//! less than a threshold (0.05) over ten epochs. The rest is then a number of epochs and, with a
//! speed, of seconds: what orders and sizers ask for.
//!
//! For a given `c` the fit is linear in `1/(loss - c)`; `c` is searched on a grid between 0 and the
//! least loss seen, and refined once.

/// Epochs over which a fall is measured.
pub const SPAN_EPOCHS: f64 = 10.0;
/// A fall below this is none.
pub const THRESHOLD: f64 = 0.05;
/// Fewer points than this say nothing.
const FEWEST: usize = 5;
/// Steps of the search.
const STEPS: usize = 64;

/// A fitted loss curve.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LossCurve {
    a: f64,
    b: f64,
    c: f64,
}

impl LossCurve {
    /// Fits epochs and losses. Skips values that are no number; `None` if too few are left, or the
    /// loss does not fall.
    #[must_use]
    pub fn fit(points: &[(f64, f64)]) -> Option<Self> {
        let mut seen: Vec<(f64, f64)> = points
            .iter()
            .copied()
            .filter(|(epoch, loss)| {
                epoch.is_finite() && *epoch >= 0.0 && loss.is_finite() && *loss > 0.0
            })
            .collect();
        seen.sort_by(|x, y| x.0.total_cmp(&y.0));
        if seen.len() < FEWEST {
            return None;
        }
        let least = seen
            .iter()
            .map(|(_, loss)| *loss)
            .fold(f64::INFINITY, f64::min);
        let (mut from, mut to) = (0.0, least * (1.0 - 1e-6));
        let mut best: Option<(f64, Self)> = None;
        for _ in 0..2 {
            let step = (to - from) / STEPS as f64;
            for at in 0..=STEPS {
                let found = linear(&seen, from + at as f64 * step);
                if let Some((error, curve)) = found
                    && best.is_none_or(|(least, _)| error < least)
                {
                    best = Some((error, curve));
                }
            }
            let (_, curve) = best?;
            (from, to) = (
                (curve.c - step).max(0.0),
                (curve.c + step).min(least * (1.0 - 1e-6)),
            );
        }
        best.map(|(_, curve)| curve)
    }

    /// The loss after so many epochs.
    #[must_use]
    pub fn loss(&self, epoch: f64) -> f64 {
        1.0 / (self.a * epoch + self.b) + self.c
    }

    /// The number of epochs after which it falls by less than `threshold` over the next `span`; 0
    /// if it does from the start.
    #[must_use]
    pub fn converges_after(&self, threshold: f64, span: f64) -> f64 {
        let falls = |epoch: f64| self.loss(epoch) - self.loss(epoch + span);
        if falls(0.0) < threshold {
            return 0.0;
        }
        let (mut low, mut high) = (0.0, span);
        while falls(high) >= threshold && high < 1e12 {
            high *= 2.0;
        }
        for _ in 0..64 {
            let middle = f64::midpoint(low, high);
            if falls(middle) < threshold {
                high = middle;
            } else {
                low = middle;
            }
        }
        high
    }
}

/// The best curve for this `c`, and its weighted squared error in the loss.
fn linear(seen: &[(f64, f64)], c: f64) -> Option<(f64, LossCurve)> {
    // By thirds of the points: 1, 4, 16.
    let trust = |at: usize| 4f64.powi((3 * at / seen.len()) as i32);
    let [mut n, mut x, mut y, mut xx, mut xy] = [0.0; 5];
    for (at, (epoch, loss)) in seen.iter().enumerate() {
        let value = 1.0 / (loss - c);
        // An error of the loss is so much smaller than one of its reciprocal.
        let weight = trust(at) * (loss - c).powi(4);
        n += weight;
        x += weight * epoch;
        y += weight * value;
        xx += weight * epoch * epoch;
        xy += weight * epoch * value;
    }
    let a = (n * xy - x * y) / (n * xx - x * x);
    let b = (y - a * x) / n;
    if !(a > 0.0 && b > 0.0 && a.is_finite() && b.is_finite()) {
        return None;
    }
    let curve = LossCurve { a, b, c };
    let error = seen.iter().enumerate().map(|(at, (epoch, loss))| {
        let off = curve.loss(*epoch) - loss;
        trust(at) * off * off
    });
    Some((error.sum(), curve))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Random;

    #[test]
    fn the_first_epochs_tell_the_rest() {
        let mut random = Random::new(97);
        for case in 0..50 {
            let true_curve = LossCurve {
                a: 0.02 + 0.2 * random.unit(),
                b: 0.2 + 0.4 * random.unit(),
                c: 0.3 * random.unit(),
            };
            let mut look = |epoch: f64| {
                let loss = true_curve.loss(epoch) * (1.0 + 0.005 * random.normal());
                (epoch, loss)
            };
            let seen: Vec<_> = (0..40).map(|at| look(f64::from(at))).collect();
            let fit = LossCurve::fit(&seen).unwrap();
            for epoch in [60.0, 120.0] {
                let off = fit.loss(epoch) / true_curve.loss(epoch) - 1.0;
                assert!(off.abs() < 0.1, "case {case}: {off} at {epoch}");
            }
            let ends = [fit, true_curve].map(|curve| curve.converges_after(THRESHOLD, SPAN_EPOCHS));
            assert!(
                (ends[0] / ends[1] - 1.0).abs() < 0.15,
                "case {case}: {ends:?}"
            );
        }
    }

    #[test]
    fn without_a_fall_there_is_no_curve() {
        let flat: Vec<_> = (0..20).map(|at| (f64::from(at), 2.0)).collect();
        assert!(
            LossCurve::fit(&flat)
                .is_none_or(|curve| curve.converges_after(THRESHOLD, SPAN_EPOCHS) == 0.0)
        );
        let rising: Vec<_> = (0..20)
            .map(|at| (f64::from(at), 1.0 + f64::from(at)))
            .collect();
        assert_eq!(LossCurve::fit(&rising), None);
        assert_eq!(LossCurve::fit(&[(0.0, 3.0), (1.0, 2.0)]), None);
        let bad = [
            (0.0, f64::NAN),
            (f64::INFINITY, 1.0),
            (2.0, -1.0),
            (3.0, 0.0),
            (-1.0, 2.0),
            (1.0, 1.0),
        ];
        assert_eq!(LossCurve::fit(&bad), None);
    }
}
