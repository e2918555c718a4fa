//! Gavel's allocations (OSDI'20) as linear programs.
//!
//! X_cj is the part of the time for which combination c (a job alone, or a pair) runs on GPU type
//! j. Every job is in combinations for at most all of the time, and type j has W_j GPUs: `sum_{c
//! with i} sum_j X_cj <= 1`, `sum_c gpus_c X_cj <= W_j`. A job's throughput is linear in X, so "the
//! least of all throughputs, each over a reference, as high as can be" is a linear program; with
//! the speed on evenly divided GPUs as the reference that is max-min fairness, with the work left
//! it minimises the makespan, and finish-time fairness is found by bisection over such programs.

use std::collections::BTreeMap;

use microlp::{ComparisonOp, OptimizationDirection, Problem};

/// One or two jobs that run on the same GPUs.
#[derive(Clone, PartialEq, Debug)]
pub struct Combination {
    /// Jobs by number, with their speed on each GPU type; 0 where it cannot run there.
    pub jobs: Vec<(usize, Vec<f64>)>,
    /// GPUs that it takes.
    pub gpus: f64,
}

/// Who runs where for which part of the time.
#[derive(Clone, PartialEq, Debug)]
pub struct Division {
    /// By combination and GPU type.
    pub time: Vec<Vec<f64>>,
    /// Speed of each job over its reference: the least of them is as high as can be.
    pub relative: Vec<f64>,
    /// The least.
    pub least: f64,
}

/// There is no division: the program could not be solved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoDivision;

/// The division whose least speed over `reference` (by job, above 0) is highest. `gpus`: how many
/// of each type.
///
/// # Errors
/// [`NoDivision`] if a reference is not above 0, or the solver fails.
pub fn max_min(
    combinations: &[Combination],
    gpus: &[f64],
    reference: &[f64],
) -> Result<Division, NoDivision> {
    max_min_of_types(combinations, gpus, reference, &vec![1.0; reference.len()])
}

/// The same over types of job: `counts` says how many there are of each, `time` how many of a
/// combination run at once on average, and `relative` is that of one job of the type. Programs stay
/// small for any number of jobs of few types.
///
/// # Errors
/// [`NoDivision`] where a reference or a count is not above 0, or the solver fails.
pub fn max_min_of_types(
    combinations: &[Combination],
    gpus: &[f64],
    reference: &[f64],
    counts: &[f64],
) -> Result<Division, NoDivision> {
    let above_0 = |number: &f64| number.is_finite() && *number > 0.0;
    if !reference.iter().all(above_0) || !counts.iter().all(above_0) {
        return Err(NoDivision);
    }
    let mut problem = Problem::new(OptimizationDirection::Maximize);
    let least = problem.add_var(1.0, (0.0, f64::INFINITY));
    let time: Vec<Vec<_>> = combinations
        .iter()
        .map(|_| {
            gpus.iter()
                .map(|_| problem.add_var(0.0, (0.0, f64::INFINITY)))
                .collect()
        })
        .collect();
    for (j, there) in gpus.iter().enumerate() {
        let row: Vec<_> = (0..combinations.len())
            .map(|c| (time[c][j], combinations[c].gpus))
            .collect();
        problem.add_constraint(&row, ComparisonOp::Le, *there);
    }
    let mut busy = vec![Vec::new(); reference.len()];
    let mut progress: Vec<_> = reference
        .iter()
        .zip(counts)
        .map(|(speed, count)| vec![(least, -speed * count)])
        .collect();
    for (combination, time) in combinations.iter().zip(&time) {
        for (j, x) in time.iter().enumerate() {
            // A pair of one type counts twice for it, in one coefficient.
            let mut of: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
            for (job, speeds) in &combination.jobs {
                let (times, speed) = of.entry(*job).or_default();
                *times += 1.0;
                *speed += speeds[j];
            }
            for (job, (times, speed)) in of {
                busy[job].push((*x, times));
                progress[job].push((*x, speed));
            }
        }
    }
    for ((busy, progress), count) in busy.iter().zip(&progress).zip(counts) {
        problem.add_constraint(busy, ComparisonOp::Le, *count);
        problem.add_constraint(progress, ComparisonOp::Ge, 0.0);
    }
    let solution = problem.solve().map_err(|_| NoDivision)?;
    let solution = solution.into_solution().map_err(|_| NoDivision)?;
    let time: Vec<Vec<f64>> = time
        .iter()
        .map(|row| row.iter().map(|x| solution.var_value(*x)).collect())
        .collect();
    let mut relative = vec![0.0; reference.len()];
    for (combination, time) in combinations.iter().zip(&time) {
        for (job, speeds) in &combination.jobs {
            let speed: f64 = time.iter().zip(speeds).map(|(x, speed)| x * speed).sum();
            relative[*job] += speed / reference[*job] / counts[*job];
        }
    }
    Ok(Division {
        least: relative.iter().copied().fold(f64::INFINITY, f64::min),
        time,
        relative,
    })
}

/// The division whose worst finish-time fairness `(elapsed + left / speed) / isolated` is lowest,
/// and that value. By job: seconds since its arrival, work left, and its completion time in an
/// evenly divided cluster.
///
/// # Errors
/// [`NoDivision`] where the solver fails.
pub fn finish_time_fairness(
    combinations: &[Combination],
    gpus: &[f64],
    jobs: &[(f64, f64, f64)],
) -> Result<(Division, f64), NoDivision> {
    let counts = vec![1.0; jobs.len()];
    finish_time_fairness_of_types(combinations, gpus, jobs, &counts, 1e-9)
}

/// The same over types of job, as [`max_min_of_types`], and to within this part of the value.
///
/// # Errors
/// [`NoDivision`] where the solver fails.
pub fn finish_time_fairness_of_types(
    combinations: &[Combination],
    gpus: &[f64],
    jobs: &[(f64, f64, f64)],
    counts: &[f64],
    within: f64,
) -> Result<(Division, f64), NoDivision> {
    // At a given rho job i needs left / (rho isolated - elapsed): possible if the least speed over
    // that is at least 1.
    let ask = |rho: f64| {
        let needed: Option<Vec<f64>> = jobs
            .iter()
            .map(|(elapsed, left, isolated)| {
                let time = rho * isolated - elapsed;
                (time > 0.0).then(|| left / time)
            })
            .collect();
        let division = max_min_of_types(combinations, gpus, &needed?, counts).ok()?;
        (division.least >= 1.0 - 1e-9).then_some(division)
    };
    let (mut low, mut high) = (0.0, 1.0);
    let mut best = None;
    for _ in 0..200 {
        if best.is_none() {
            best = ask(high);
            if best.is_none() {
                (low, high) = (high, 2.0 * high);
            }
            continue;
        }
        if high - low < within * high {
            break;
        }
        let middle = f64::midpoint(low, high);
        match ask(middle) {
            Some(division) => (best, high) = (Some(division), middle),
            None => low = middle,
        }
    }
    best.map(|division| (division, high)).ok_or(NoDivision)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn solo(job: usize, speeds: [f64; 2]) -> Combination {
        Combination {
            jobs: vec![(job, speeds.to_vec())],
            gpus: 1.0,
        }
    }

    #[test]
    fn three_jobs_on_two_types_as_solved_by_hand() {
        // One fast and one slow GPU. Speeds (4,1), (3,1), (2,1); an even division is a third of
        //   each: 5/3, 4/3, 1. Each job is to have t times that. Job 2 loses least on the slow GPU:
        //   it has it for a time y and the fast one for z, with y + z = 1. Job 1 loses less than
        //   job 0: it has the slow one for the rest, z, and the fast one for b; job 0 the fast one
        //   for a. 4a = 5t/3,  3b + z = 4t/3,  2z + y = t,  a + b + z = 1 so z = t - 1, a = 5t/12,
        //   b = 4t/9 - (t - 1)/3, and 55t/36 = 5/3: t = 12/11.
        let jobs = [
            solo(0, [4.0, 1.0]),
            solo(1, [3.0, 1.0]),
            solo(2, [2.0, 1.0]),
        ];
        let even = [5.0 / 3.0, 4.0 / 3.0, 1.0];
        let division = max_min(&jobs, &[1.0, 1.0], &even).unwrap();
        assert!((division.least - 12.0 / 11.0).abs() < 1e-6, "{division:?}");
        let fast: f64 = division.time.iter().map(|time| time[0]).sum();
        assert!((fast - 1.0).abs() < 1e-6, "{division:?}");
        // Three of each type on three times as many GPUs is the same for each of them.
        let many = max_min_of_types(&jobs, &[3.0, 3.0], &even, &[3.0; 3]).unwrap();
        assert!((many.least - 12.0 / 11.0).abs() < 1e-6, "{many:?}");
        let jobs = [solo(0, [1.0, 1.0])];
        assert_eq!(max_min(&jobs, &[1.0, 1.0], &[0.0]), Err(NoDivision));
        assert_eq!(max_min(&jobs, &[1.0, 1.0], &[f64::NAN]), Err(NoDivision));
    }

    #[test]
    fn two_jobs_that_share_well_share_all_the_time() {
        // One GPU; alone each runs at 1, together at 0.8 each: taking turns gives 0.5, sharing 0.8.
        let solo = |job| Combination {
            jobs: vec![(job, vec![1.0])],
            gpus: 1.0,
        };
        let pair = Combination {
            jobs: vec![(0, vec![0.8]), (1, vec![0.8])],
            gpus: 1.0,
        };
        let division = max_min(&[solo(0), solo(1), pair], &[1.0], &[1.0, 1.0]).unwrap();
        assert!((division.least - 0.8).abs() < 1e-6, "{division:?}");
        // Two jobs of one type, together at 0.4 each: turns are better.
        let pair = Combination {
            jobs: vec![(0, vec![0.4]), (0, vec![0.4])],
            gpus: 1.0,
        };
        let division = max_min_of_types(&[solo(0), pair], &[1.0], &[1.0], &[2.0]).unwrap();
        assert!((division.least - 0.5).abs() < 1e-6, "{division:?}");
        assert!(division.time[1][0] < 1e-6, "{division:?}");
    }

    #[test]
    fn the_worst_finish_time_fairness_is_as_low_as_can_be() {
        // Two jobs on one GPU, both came now; 1 and 3 of work, alone in halves of the cluster 2 and
        // 6. Both finish at rho r with speeds 1 / 2r and 3 / 6r: together one GPU, so r = 1.
        let jobs: Vec<_> = (0..2)
            .map(|job| Combination {
                jobs: vec![(job, vec![1.0])],
                gpus: 1.0,
            })
            .collect();
        let of = [(0.0, 1.0, 2.0), (0.0, 3.0, 6.0)];
        let (_, rho) = finish_time_fairness(&jobs, &[1.0], &of).unwrap();
        assert!((rho - 1.0).abs() < 1e-6, "{rho}");
    }
}
