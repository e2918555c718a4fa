//! What a trace says of the cluster that it comes from: how long jobs waited there, and why.
//!
//! A log says when a job came and when it ran, not why it waited. The split is that of the
//! simulator's reports: time in which as many GPUs were free as the job asks for counts as waiting
//! by fragmentation (they were not where it could use them, or were kept for others), all other
//! time as waiting for its turn. GPUs there are taken to be as many as were ever held at once.

use std::collections::BTreeMap;

/// A job as recorded, in seconds of the trace's clock.
#[derive(Clone, PartialEq, Debug)]
pub struct Recorded {
    /// GPUs it asked for.
    pub gpus: f64,
    /// When it came.
    pub submit_s: f64,
    /// When it held GPUs, each time it was given some.
    pub runs: Vec<[f64; 2]>,
}

/// Some numbers: smallest below which half, nine tenths, and 99 hundredths lie, and the mean.
#[derive(Clone, Copy, Default, PartialEq, Debug, serde::Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Spread {
    /// Of these; all zero of nothing.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|part| {
            // Nearest rank. CAST: at most their number.
            let rank = (part * values.len() as f64).ceil() as usize;
            values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        });
        // An empty sum is minus zero.
        let mean = (0.0 + values.iter().sum::<f64>()) / values.len().max(1) as f64;
        Self {
            mean,
            p50,
            p90,
            p99,
        }
    }
}

/// How long recorded jobs waited before they had GPUs for the first time, in seconds.
#[derive(Clone, Copy, Default, PartialEq, Debug, serde::Serialize)]
pub struct Delays {
    /// Jobs.
    pub jobs: usize,
    /// Most GPUs held at once.
    pub gpus: f64,
    /// All of it.
    pub wait_s: Spread,
    /// Of it: while enough GPUs were free.
    pub fragmentation_s: Spread,
    /// Of it: while fewer were.
    pub fairness_s: Spread,
    /// Starts after the first.
    pub starts_again: usize,
    /// Time without GPUs between two starts.
    pub between_s: Spread,
}

/// Sums of [`Recorded::gpus`] are compared with this tolerance.
const TOLERANCE: f64 = 1e-6;

/// The split of the waits.
#[must_use]
pub fn delays(recorded: &[Recorded]) -> Delays {
    let mut changes: Vec<(f64, f64)> = recorded
        .iter()
        .flat_map(|one| one.runs.iter().map(|run| (run, one.gpus)))
        .flat_map(|(run, gpus)| [(run[0], gpus), (run[1], -gpus)])
        .collect();
    // Who leaves at an instant leaves before others come.
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut held = Vec::with_capacity(changes.len());
    let (mut now, mut most) = (0.0, 0.0_f64);
    for (at_s, change) in &changes {
        now += change;
        most = most.max(now);
        held.push((*at_s, now));
    }
    // For each size, how long in all as many were free, up to each change.
    let mut free: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for one in recorded {
        free.entry(one.gpus.to_bits()).or_insert_with(|| {
            let (mut total_s, mut before) = (0.0, None);
            let sums = held.iter().map(|(at_s, now)| {
                if let Some((since_s, held)) = before.replace((*at_s, *now))
                    && most - held >= one.gpus - TOLERANCE
                {
                    total_s += at_s - since_s;
                }
                total_s
            });
            sums.collect()
        });
    }
    let free_until = |gpus: f64, at_s: f64| {
        let after = held.partition_point(|(change_s, _)| *change_s <= at_s);
        let Some(last) = after.checked_sub(1) else {
            // Nobody had come yet: all were free.
            return at_s - held.first().map_or(at_s, |(first_s, _)| *first_s);
        };
        let (since_s, now) = held[last];
        let on = most - now >= gpus - TOLERANCE;
        free[&gpus.to_bits()][last] + if on { at_s - since_s } else { 0.0 }
    };
    let (mut waits, mut fragmented, mut fair, mut between) = (vec![], vec![], vec![], vec![]);
    for one in recorded {
        let Some(first) = one.runs.first() else {
            continue;
        };
        let wait_s = (first[0] - one.submit_s).max(0.0);
        let split_s = free_until(one.gpus, first[0]) - free_until(one.gpus, one.submit_s);
        let split_s = split_s.clamp(0.0, wait_s);
        waits.push(wait_s);
        fragmented.push(split_s);
        fair.push(wait_s - split_s);
        let gaps = one.runs.windows(2);
        between.extend(gaps.map(|pair| (pair[1][0] - pair[0][1]).max(0.0)));
    }
    Delays {
        jobs: waits.len(),
        gpus: most,
        starts_again: between.len(),
        wait_s: Spread::of(waits),
        fragmentation_s: Spread::of(fragmented),
        fairness_s: Spread::of(fair),
        between_s: Spread::of(between),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_split_by_what_was_free_meanwhile() {
        let job = |gpus: f64, submit_s: f64, runs: &[[f64; 2]]| Recorded {
            gpus,
            submit_s,
            runs: runs.to_vec(),
        };
        // Eight GPUs at most. The last waits from 10 to 40: two are free until 20, then four, then
        // from 30 on eight. It asks for four.
        let all = [
            job(2.0, 0.0, &[[0.0, 20.0]]),
            job(4.0, 0.0, &[[0.0, 30.0]]),
            job(2.0, 0.0, &[[0.0, 5.0]]),
            job(4.0, 10.0, &[[40.0, 50.0], [65.0, 70.0]]),
        ];
        let found = delays(&all);
        assert_eq!((found.jobs, found.gpus), (4, 8.0));
        assert_eq!(found.wait_s.p99, 30.0);
        assert_eq!((found.wait_s.mean, found.wait_s.p50), (7.5, 0.0));
        assert_eq!(
            (found.fragmentation_s.p99, found.fairness_s.p99),
            (20.0, 10.0)
        );
        assert_eq!((found.starts_again, found.between_s.mean), (1, 15.0));
        assert_eq!(delays(&[]), Delays::default());
    }

    #[test]
    fn by_the_sum_over_each_second_it_is_the_same() {
        let mut random = policy::cluster::Random::new(7);
        let jobs: Vec<Recorded> = (0..60)
            .map(|_| {
                let submit = random.below(200);
                let start = submit + random.below(60);
                let end = start + 1 + random.below(40);
                Recorded {
                    gpus: (1 << random.below(6)) as f64,
                    submit_s: submit as f64,
                    runs: vec![[start as f64, end as f64]],
                }
            })
            .collect();
        let held = |second: f64| -> f64 {
            let runs = jobs.iter().filter(|job| {
                let [from, to] = job.runs[0];
                (from..to).contains(&second)
            });
            runs.map(|job| job.gpus).sum()
        };
        let first = jobs
            .iter()
            .map(|job| job.runs[0][0])
            .fold(f64::MAX, f64::min);
        let most = (0..400).map(|at| held(f64::from(at))).fold(0.0, f64::max);
        let slow = jobs.iter().map(|job| {
            let waited = job.submit_s as u32..job.runs[0][0] as u32;
            let free = waited.filter(|second| {
                let second = f64::from(*second);
                second < first || most - held(second) >= job.gpus
            });
            free.count() as f64
        });
        let slow: f64 = slow.sum::<f64>() / 60.0;
        let found = delays(&jobs);
        assert_eq!(found.gpus, most);
        assert!(
            (found.fragmentation_s.mean - slow).abs() < 1e-9,
            "{found:?} {slow}"
        );
        assert!(slow > 1.0 && found.fairness_s.mean > 0.1, "{found:?}");
    }
}
