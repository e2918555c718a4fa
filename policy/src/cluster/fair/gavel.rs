//! Gavel's allocations (OSDI'20) as linear programs.
//!
//! X_cj is the part of the time for which combination c (a job alone, or a pair) runs on GPU type j. Every job is in combinations
//! for at most all of the time, and type j has W_j GPUs: `sum_{c with i} sum_j X_cj <= 1`, `sum_c gpus_c X_cj <= W_j`. A job's
//! throughput is linear in X, so "the least of all throughputs, each over a reference, as high as can be" is a linear program;
//! with the speed on evenly divided GPUs as the reference that is max-min fairness, with the work left it minimises
//! the makespan, and finish-time fairness is found by bisection over such programs.

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

/// The division whose least speed over `reference` (by job, above 0) is highest. `gpus` are there of each type.
///
/// # Errors
/// [`NoDivision`] where a reference is not above 0, or the solver fails.
pub fn max_min(
    combinations: &[Combination],
    gpus: &[f64],
    reference: &[f64],
) -> Result<Division, NoDivision> {
    if reference
        .iter()
        .any(|speed| !(speed.is_finite() && *speed > 0.0))
    {
        return Err(NoDivision);
    }
    let mut problem = Problem::new(OptimizationDirection::Maximize);
    let least = problem.add_var(1.0, (0.0, f64::INFINITY));
    let time: Vec<Vec<_>> = combinations
        .iter()
        .map(|_| {
            gpus.iter()
                .map(|_| problem.add_var(0.0, (0.0, 1.0)))
                .collect()
        })
        .collect();
    for (j, there) in gpus.iter().enumerate() {
        let row: Vec<_> = (0..combinations.len())
            .map(|c| (time[c][j], combinations[c].gpus))
            .collect();
        problem.add_constraint(&row, ComparisonOp::Le, *there);
    }
    for (i, speed) in reference.iter().enumerate() {
        let (mut busy, mut progress) = (Vec::new(), vec![(least, -speed)]);
        for (combination, time) in combinations.iter().zip(&time) {
            for (job, speeds) in combination.jobs.iter().filter(|(job, _)| *job == i) {
                debug_assert_eq!(*job, i);
                busy.extend(time.iter().map(|x| (*x, 1.0)));
                progress.extend(time.iter().zip(speeds).map(|(x, speed)| (*x, *speed)));
            }
        }
        problem.add_constraint(&busy, ComparisonOp::Le, 1.0);
        problem.add_constraint(&progress, ComparisonOp::Ge, 0.0);
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
            relative[*job] += speed / reference[*job];
        }
    }
    Ok(Division {
        least: relative.iter().copied().fold(f64::INFINITY, f64::min),
        time,
        relative,
    })
}

/// The division whose worst finish-time fairness `(elapsed + left / speed) / isolated` is lowest, and that value. By job: seconds since it
/// came, work left, and its completion time in an evenly divided cluster.
///
/// # Errors
/// [`NoDivision`] where the solver fails.
pub fn finish_time_fairness(
    combinations: &[Combination],
    gpus: &[f64],
    jobs: &[(f64, f64, f64)],
) -> Result<(Division, f64), NoDivision> {
    // At a given rho job i needs left / (rho isolated - elapsed): possible if the least speed over that is at least 1.
    let ask = |rho: f64| {
        let needed: Option<Vec<f64>> = jobs
            .iter()
            .map(|(elapsed, left, isolated)| {
                let time = rho * isolated - elapsed;
                (time > 0.0).then(|| left / time)
            })
            .collect();
        let division = max_min(combinations, gpus, &needed?).ok()?;
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
        if high - low < 1e-9 * high {
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

    fn alone(job: usize, speeds: [f64; 2]) -> Combination {
        Combination {
            jobs: vec![(job, speeds.to_vec())],
            gpus: 1.0,
        }
    }

    #[test]
    fn three_jobs_on_two_types_as_solved_by_hand() {
        // One fast and one slow GPU. Speeds (4,1), (3,1), (2,1); an even division is a third of each: 5/3, 4/3, 1. Everybody shall
        // have t times that. Job 2 loses least on the slow GPU: it has it for a time y and the fast one for z, with y + z = 1. Job 1 loses
        // less than job 0: it has the slow one for what is left of it, z, and the fast one for b; job 0 the fast one for a.
        //   4a = 5t/3,  3b + z = 4t/3,  2z + y = t,  a + b + z = 1
        // so z = t - 1, a = 5t/12, b = 4t/9 - (t - 1)/3, and 55t/36 = 5/3: t = 12/11.
        let jobs = [alone(0, [1.0, 1.0])];
        assert_eq!(max_min(&jobs, &[1.0, 1.0], &[0.0]), Err(NoDivision));
        assert_eq!(max_min(&jobs, &[1.0, 1.0], &[f64::NAN]), Err(NoDivision));
    }
}
