//! Slowdown with a confidence interval, from the speeds of runs.
//!
//! The slowdown of a job is its mean speed in its solo runs over its mean speed beside others. How
//! sure that is comes from a bootstrap. Each side is drawn again, with replacement, in two ways:
//! whole runs, and the equal parts that the window of each run was divided into. The larger of the
//! two deviations counts, so that two runs which happen to agree claim no more than what happened
//! within them. Deviations are those of the logarithm of the mean; of n things that are drawn they
//! are widened by n / (n - 1), since a bootstrap of few is too narrow by that. The interval is
//! Student's, with Welch's number of degrees of freedom.
//!
//! With one run on each side only the parts are left: such an interval says nothing of what differs
//! from run to run.

use policy::cluster::Random;

/// How fast a job was in one run, and in equal parts of its window.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sample {
    pub speed: f64,
    pub parts: Vec<f64>,
}

/// A slowdown, and between which bounds it lies with 95 % confidence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    pub value: f64,
    pub low: f64,
    pub high: f64,
    pub solo_runs: usize,
    pub paired_runs: usize,
}

/// Drawn again so often.
const DRAWS: usize = 2000;
/// Normal quantile of 97.5 %.
const Z: f64 = 1.959_964;

/// `None` where a side has no run, or none that got anywhere.
pub fn slowdown(solo: &[Sample], paired: &[Sample], seed: u64) -> Option<Estimate> {
    let (fast, slow) = (mean_speed(solo)?, mean_speed(paired)?);
    let mut random = Random::new(seed);
    let solo_spread = spread(solo, &mut random);
    let paired_spread = spread(paired, &mut random);
    let variance = solo_spread.variance + paired_spread.variance;
    let value = fast / slow;
    // What rounding alone makes is none.
    let reach = match variance > 1e-20 {
        true => {
            let share = |spread: &Spread| spread.variance.powi(2) / spread.freedom.max(1.0);
            let freedom = variance.powi(2) / (share(&solo_spread) + share(&paired_spread));
            student(freedom) * variance.sqrt()
        }
        false => 0.0,
    };
    Some(Estimate {
        value,
        low: value * (-reach).exp(),
        high: value * reach.exp(),
        solo_runs: solo.len(),
        paired_runs: paired.len(),
    })
}

fn mean_speed(samples: &[Sample]) -> Option<f64> {
    let speed = mean(samples.iter().map(|sample| sample.speed))?;
    (speed > 0.0 && speed.is_finite()).then_some(speed)
}

pub fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0.0);
    for value in values {
        sum += value;
        count += 1.0;
    }
    (count > 0.0).then_some(sum / count)
}

/// Variance of the logarithm of a mean speed, and from how many free values.
struct Spread {
    variance: f64,
    freedom: f64,
}

fn spread(samples: &[Sample], random: &mut Random) -> Spread {
    let speeds: Vec<f64> = samples.iter().map(|sample| sample.speed).collect();
    let runs = Spread {
        variance: drawn(random, &[&speeds]),
        // CAST: a few runs.
        freedom: speeds.len().saturating_sub(1) as f64,
    };
    let parts: Vec<&[f64]> = samples
        .iter()
        .map(|sample| &sample.parts[..])
        .filter(|parts| parts.len() > 1)
        .collect();
    if parts.len() < samples.len() {
        return runs;
    }
    let free: usize = parts.iter().map(|parts| parts.len() - 1).sum();
    let parts = Spread {
        variance: drawn(random, &parts),
        freedom: free as f64, // CAST: as above.
    };
    match runs.variance >= parts.variance {
        true => runs,
        false => parts,
    }
}

/// Variance of the logarithm of the mean of all groups' means, where each group is drawn again by
/// itself; 0 where nothing can be drawn.
fn drawn(random: &mut Random, groups: &[&[f64]]) -> f64 {
    let least = groups.iter().map(|group| group.len()).min().unwrap_or(0);
    if least < 2 {
        return 0.0;
    }
    let mut logs = Vec::with_capacity(DRAWS);
    for _ in 0..DRAWS {
        let means = groups.iter().filter_map(|group| {
            // PANIC: below the length.
            mean((0..group.len()).map(|_| group[random.below(group.len())]))
        });
        let of_all = mean(means).unwrap_or(0.0);
        if of_all > 0.0 {
            logs.push(of_all.ln());
        }
    }
    let Some(middle) = mean(logs.iter().copied()) else {
        return 0.0;
    };
    let squares = logs.iter().map(|log| (log - middle).powi(2));
    let least = least as f64; // CAST: a few runs or parts.
    mean(squares).unwrap_or(0.0) * least / (least - 1.0)
}

/// Student's quantile of 97.5 % for so many degrees of freedom, which need not be whole.
fn student(freedom: f64) -> f64 {
    const FEW: [f64; 10] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    ];
    if freedom >= 10.0 {
        // Cornish and Fisher's series, good to three digits from here on.
        let (z3, z5) = (Z.powi(3), Z.powi(5));
        return Z
            + (z3 + Z) / (4.0 * freedom)
            + (5.0 * z5 + 16.0 * z3 + 3.0 * Z) / (96.0 * freedom.powi(2));
    }
    let freedom = freedom.max(1.0);
    // CAST: from 1 to 9.
    let below = freedom.floor() as usize;
    // Between two whole numbers it is nearly linear in their inverse.
    let inverse = |number: usize| 1.0 / number as f64;
    let part = (inverse(below) - 1.0 / freedom) / (inverse(below) - inverse(below + 1));
    // PANIC: `below` is 9 at most.
    FEW[below - 1] + part * (FEW[below] - FEW[below - 1])
}

/// A number for a cell, so that each has draws of its own that are the same every time.
pub fn seed_of(seed: u64, label: &str) -> u64 {
    // FNV-1a.
    label.bytes().fold(0xcbf2_9ce4_8422_2325 ^ seed, |hash, b| {
        (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(speeds: &[f64]) -> Vec<Sample> {
        let sample = |speed: &f64| Sample {
            speed: *speed,
            parts: vec![*speed; 10],
        };
        speeds.iter().map(sample).collect()
    }

    #[test]
    fn a_slowdown_is_solo_speed_over_speed_beside_the_other() {
        let estimate = slowdown(&runs(&[100.0; 3]), &runs(&[50.0; 3]), 1).unwrap();
        let exact = Estimate {
            value: 2.0,
            low: 2.0,
            high: 2.0,
            solo_runs: 3,
            paired_runs: 3,
        };
        assert_eq!(estimate, exact);
        assert_eq!(slowdown(&[], &runs(&[1.0]), 1), None);
        assert_eq!(slowdown(&runs(&[1.0]), &runs(&[0.0]), 1), None);
    }

    #[test]
    fn an_interval_is_as_wide_as_students_for_the_same_numbers() {
        // Standard errors of the logarithms: 0.01/sqrt(3) each, with n - 1 in the variance.
        let (a, b) = ([99.0, 100.0, 101.0], [49.5, 50.0, 50.5]);
        let estimate = slowdown(&runs(&a), &runs(&b), 7).unwrap();
        assert!((estimate.value - 2.0).abs() < 1e-9);
        let expected = 2.776 * (2.0f64 * 0.01 * 0.01 / 3.0).sqrt();
        for reach in [
            (estimate.high / estimate.value).ln(),
            (estimate.value / estimate.low).ln(),
        ] {
            assert!((reach / expected - 1.0).abs() < 0.05, "{reach} {expected}");
        }
        assert_eq!(slowdown(&runs(&a), &runs(&b), 7), Some(estimate), "seeded");
    }

    #[test]
    fn runs_that_agree_claim_no_more_than_their_parts() {
        let mut solo = runs(&[100.0; 2]);
        for sample in &mut solo {
            sample.parts = vec![90.0, 110.0, 95.0, 105.0, 100.0];
        }
        let estimate = slowdown(&solo, &runs(&[50.0; 2]), 1).unwrap();
        assert!(estimate.low < 1.97 && estimate.high > 2.03, "{estimate:?}");
        // One run, without parts: a figure and no interval to speak of.
        let one = Sample {
            speed: 5.0,
            parts: vec![],
        };
        let estimate = slowdown(std::slice::from_ref(&one), std::slice::from_ref(&one), 1);
        assert_eq!(estimate.map(|one| (one.low, one.high)), Some((1.0, 1.0)));
    }

    #[test]
    fn intervals_hold_the_truth_as_often_as_they_say() {
        let mut random = Random::new(11);
        let mut held = 0;
        let mut draw = |middle: f64| {
            let speeds: Vec<f64> = (0..3)
                .map(|_| middle * (1.0 + 0.02 * random.normal()))
                .collect();
            runs(&speeds)
        };
        for trial in 0..200 {
            let estimate = slowdown(&draw(300.0), &draw(200.0), trial).unwrap();
            held += usize::from((estimate.low..=estimate.high).contains(&1.5));
        }
        // 95 % of 200 are 190; below 180 only once in thousands of times.
        assert!(held >= 180, "{held} of 200");
    }

    #[test]
    fn students_quantiles_are_those_of_the_tables() {
        for (freedom, quantile) in [
            (0.5, 12.706),
            (1.0, 12.706),
            (4.0, 2.776),
            (9.999, 2.228),
            (10.0, 2.228),
            (18.0, 2.101),
            (1000.0, 1.962),
        ] {
            assert!(
                (student(freedom) - quantile).abs() < 3e-3,
                "{freedom}: {}",
                student(freedom)
            );
        }
        let between = student(1.5);
        assert!(between < 9.0 && between > 5.0, "{between}");
    }
}
