//! The division of GPUs with the best mean goodput, in the harmonic sense.

use super::{Sizer, levels};
use crate::PolicyError;
use crate::cluster::admission::Promises;
use crate::cluster::catalogue::Entry;
use crate::cluster::{Admit, ClusterState, Job, JobId, Manner, Objective, Tags};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static POLLUX: Entry<dyn Sizer> = Registration {
    name: "pollux",
    summary: "the best mean goodput against a fair share, exactly",
    params: &[ParamSpec {
        name: "delay",
        summary: "what a restart is taken to cost, in seconds",
        kind: Kind::Number {
            min: 0.0,
            max: f64::INFINITY,
            default: Pollux::DELAY_S,
        },
    }],
    build: |settings, context| {
        if !context.speeds {
            return Err(PolicyError::Needs {
                policy: "pollux",
                what: "speeds that jobs measured on several numbers of GPUs, which this trace or a live hook does not have",
            });
        }
        Ok(Box::new(Pollux::new(settings.number("delay"))))
    },
};

/// Pollux' objective (OSDI'21), solved exactly.
///
/// Pollux maximises the power mean with exponent -1 of the jobs' speed-ups over their goodput on a
/// fair share of the GPUs. A job whose GPUs change counts for (age - restarts x delay) / (age +
/// delay) of its speed-up, which keeps young and often restarted jobs where they are; `delay` is 30
/// s. Pollux searches over placements with a genetic algorithm, 100 generations of 100. Here a
/// speed-up depends on the number of GPUs alone (on as few nodes as hold them), so the objective is
/// a sum over jobs under one bound, and dynamic programming over the GPUs gives the best division:
/// [`share`]. Jobs larger than a node are given whole nodes, so that no two of them meet on one.
#[derive(Clone, Copy, Debug)]
pub struct Pollux {
    delay_s: f64,
}

impl Pollux {
    /// What a restart costs, in seconds, as Pollux' objective has it.
    pub const DELAY_S: f64 = 30.0;

    /// With this restart cost.
    #[must_use]
    pub fn new(delay_s: f64) -> Self {
        Self { delay_s }
    }

    /// Whether a job may have so many GPUs: what a node can hold, or whole nodes.
    fn fits_nodes(gpus: u32, node: u32) -> bool {
        gpus <= node || gpus.is_multiple_of(node)
    }

    fn costs(&self, state: &ClusterState, job: &Job, fair: u32, node: u32) -> Vec<(u32, f64)> {
        let now_s = state.now_s();
        let age_s = (now_s - job.arrival_s).max(0.0);
        let restarts = f64::from(job.starts.saturating_sub(1));
        let lost = (age_s - restarts * self.delay_s).max(0.0) / (age_s + self.delay_s);
        let has = job.run().map_or(0, |run| run.gpus.len() as u32);
        let base = job.rate(fair).max(1e-12);
        let cost = |gpus: u32| {
            let speedup = job.rate(gpus) / base;
            let counts = if gpus == has { speedup } else { speedup * lost };
            // A job without GPUs costs as much as one a thousand times slower than its fair share.
            job.weight / (counts + 1e-3)
        };
        let mut sizes = levels(job, state.gpus().min(job.most_gpus));
        sizes.retain(|gpus| Self::fits_nodes(*gpus, node));
        if has > 0 && !sizes.contains(&has) {
            sizes.push(has);
        }
        sizes.push(0);
        sizes.into_iter().map(|gpus| (gpus, cost(gpus))).collect()
    }
}

/// One size for each job, within `gpus`, at the least sum of costs. `jobs[i]` lists what job i may
/// have and what that costs; each should list 0. Exact, in jobs x GPUs x sizes.
#[must_use]
pub fn share(jobs: &[Vec<(u32, f64)>], gpus: u32) -> Vec<u32> {
    let width = gpus as usize + 1;
    let mut least = vec![0.0; width];
    let mut chosen: Vec<Vec<u32>> = Vec::with_capacity(jobs.len());
    for sizes in jobs {
        let (mut next, mut picks) = (vec![f64::INFINITY; width], vec![0; width]);
        for (size, cost) in sizes {
            for there in *size as usize..width {
                let sum = least[there - *size as usize] + cost;
                if sum < next[there] {
                    (next[there], picks[there]) = (sum, *size);
                }
            }
        }
        least = next;
        chosen.push(picks);
    }
    let mut left = gpus as usize;
    let mut sizes: Vec<u32> = chosen
        .iter()
        .rev()
        .map(|picks| {
            let pick = picks[left];
            left -= pick as usize;
            pick
        })
        .collect();
    sizes.reverse();
    sizes
}

impl Sizer for Pollux {
    fn name(&self) -> &'static str {
        "pollux"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Completion, Objective::Fairness],
            manners: &[Manner::Elastic],
            source: "Pollux, OSDI'21",
        }
    }
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)> {
        let jobs: Vec<&Job> = state
            .active()
            .filter(|job| promises.known(job.id) != Some(Admit::Reject))
            .collect();
        let fair = state.gpus().div_ceil(jobs.len().max(1) as u32);
        let node = state
            .nodes()
            .iter()
            .map(|node| node.gpus)
            .max()
            .unwrap_or(1);
        let costs: Vec<_> = jobs
            .iter()
            .map(|job| self.costs(state, job, fair, node))
            .collect();
        let sizes = share(&costs, state.gpus());
        let with = jobs.iter().zip(sizes).filter(|(_, gpus)| *gpus > 0);
        with.map(|(job, gpus)| (job.id, gpus)).collect()
    }
    fn tunes_batches(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Random;

    fn brute(jobs: &[Vec<(u32, f64)>], left: u32) -> f64 {
        let Some((sizes, rest)) = jobs.split_first() else {
            return 0.0;
        };
        let fitting = sizes.iter().filter(|(size, _)| *size <= left);
        fitting
            .map(|(size, cost)| cost + brute(rest, left - size))
            .fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn a_division_is_as_good_as_the_best_of_all() {
        let mut random = Random::new(29);
        for _ in 0..200 {
            let jobs: Vec<Vec<(u32, f64)>> = (0..5)
                .map(|_| {
                    (0..5)
                        .map(|size| (size, random.unit() * 10.0 / f64::from(size + 1)))
                        .collect()
                })
                .collect();
            let gpus = random.below(14) as u32;
            let sizes = share(&jobs, gpus);
            assert!(sizes.iter().sum::<u32>() <= gpus);
            let cost: f64 = jobs
                .iter()
                .zip(&sizes)
                .map(|(list, size)| list.iter().find(|(s, _)| s == size).unwrap().1)
                .sum();
            assert!((cost - brute(&jobs, gpus)).abs() < 1e-9, "{sizes:?}");
        }
    }
}
