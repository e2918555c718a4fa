//! Sia's choice of configurations (SOSP'23) as an integer program.

use microlp::{ComparisonOp, OptimizationDirection, Problem};

/// What a job may be given: so many GPUs of each type.
pub type Configuration = Vec<u32>;

/// A job and what each configuration is worth to it.
#[derive(Clone, PartialEq, Debug)]
pub struct Candidate {
    /// Its weight.
    pub weight: f64,
    /// Goodput in each configuration relative to its least good one, so at least 1; 0 where it cannot run.
    pub goodput: Vec<f64>,
}

/// Sia's exponent: below 0 it weakens the gain of those who have much.
pub const POWER: f64 = -0.5;
/// What a job costs that gets nothing.
pub const UNALLOCATED: f64 = 1.1;

/// What a choice costs: `sum_i w_i G_ic^p` over those with a configuration, `w_i lambda` for those without. Lower is better.
#[must_use]
pub fn cost(jobs: &[Candidate], choice: &[Option<usize>]) -> f64 {
    jobs.iter()
        .zip(choice)
        .map(|(job, chosen)| match chosen {
            Some(configuration) => job.weight * job.goodput[*configuration].powf(POWER),
            None => job.weight * UNALLOCATED,
        })
        .sum()
}

/// At most one configuration for each job, within the GPUs there are of each type, at the least cost. `None` where the solver fails.
#[must_use]
pub fn choose(
    jobs: &[Candidate],
    configurations: &[Configuration],
    gpus: &[u32],
) -> Option<Vec<Option<usize>>> {
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let mut chosen = Vec::new();
    for job in jobs {
        let row: Vec<_> = job
            .goodput
            .iter()
            .enumerate()
            .filter(|(_, goodput)| **goodput > 0.0)
            .map(|(c, goodput)| {
                let gain = job.weight * (goodput.powf(POWER) - UNALLOCATED);
                (c, problem.add_binary_var(gain))
            })
            .collect();
        chosen.push(row);
    }
    for row in &chosen {
        let row: Vec<_> = row.iter().map(|(_, x)| (*x, 1.0)).collect();
        problem.add_constraint(&row, ComparisonOp::Le, 1.0);
    }
    for (kind, there) in gpus.iter().enumerate() {
        let all = chosen.iter().flatten();
        let row: Vec<_> = all
            .map(|(c, x)| (*x, f64::from(configurations[*c][kind])))
            .collect();
        problem.add_constraint(&row, ComparisonOp::Le, f64::from(*there));
    }
    let solution = problem.solve().ok()?.into_solution().ok()?;
    let pick = |row: &Vec<(usize, microlp::Variable)>| {
        let taken = row.iter().find(|(_, x)| solution.var_value(*x) > 0.5);
        taken.map(|(c, _)| *c)
    };
    Some(chosen.iter().map(pick).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Random;

    /// The best of all choices.
    fn brute(
        jobs: &[Candidate],
        configurations: &[Configuration],
        left: &mut Vec<u32>,
        choice: &mut Vec<Option<usize>>,
    ) -> f64 {
        if choice.len() == jobs.len() {
            return cost(jobs, choice);
        }
        choice.push(None);
        let mut best = brute(jobs, configurations, left, choice);
        choice.pop();
        for (c, needs) in configurations.iter().enumerate() {
            let fits = needs
                .iter()
                .zip(left.iter())
                .all(|(need, left)| need <= left);
            if !fits || jobs[choice.len()].goodput[c] <= 0.0 {
                continue;
            }
            left.iter_mut()
                .zip(needs)
                .for_each(|(left, need)| *left -= need);
            choice.push(Some(c));
            best = best.min(brute(jobs, configurations, left, choice));
            choice.pop();
            left.iter_mut()
                .zip(needs)
                .for_each(|(left, need)| *left += need);
        }
        best
    }

    #[test]
    fn six_jobs_are_divided_as_well_as_by_trying_everything() {
        let mut random = Random::new(3);
        let configurations = vec![vec![1, 0], vec![2, 0], vec![4, 0], vec![0, 1], vec![0, 2]];
        for _ in 0..20 {
            let jobs: Vec<Candidate> = (0..6)
                .map(|_| Candidate {
                    weight: 0.5 + random.unit(),
                    goodput: configurations
                        .iter()
                        .map(|_| {
                            if random.below(6) == 0 {
                                0.0
                            } else {
                                1.0 + 7.0 * random.unit()
                            }
                        })
                        .collect(),
                })
                .collect();
            let gpus = vec![2 + random.below(4) as u32, 1 + random.below(3) as u32];
            let choice = choose(&jobs, &configurations, &gpus).unwrap();
            for (kind, there) in gpus.iter().enumerate() {
                let used: u32 = choice
                    .iter()
                    .flatten()
                    .map(|c| configurations[*c][kind])
                    .sum();
                assert!(used <= *there);
            }
            let best = brute(&jobs, &configurations, &mut gpus.clone(), &mut Vec::new());
            assert!(
                (cost(&jobs, &choice) - best).abs() < 1e-9,
                "{choice:?}: {best}"
            );
        }
    }
}
