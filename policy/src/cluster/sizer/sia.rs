//! Sia's choice of configurations (SOSP'23) as an integer program.

use std::collections::{BTreeSet, HashMap};

use microlp::{ComparisonOp, OptimizationDirection, Problem};

use super::{Sizer, share};
use crate::PolicyError;
use crate::cluster::admission::Promises;
use crate::cluster::catalogue::Entry;
use crate::cluster::{Admit, ClusterState, GpuType, Job, JobId, Manner, Objective, Speed, Tags};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static SIA: Entry<dyn Sizer> = Registration {
    name: "sia",
    summary: "the least sum of weighted powers of goodputs over GPU types",
    params: &[ParamSpec {
        name: "restart",
        summary: "what a restart is taken to cost, in seconds",
        kind: Kind::Number {
            min: 0.0,
            max: f64::INFINITY,
            default: Sia::RESTART_S,
        },
    }],
    build: |settings, context| {
        if !context.speeds {
            return Err(PolicyError::Needs {
                policy: "sia",
                what: "speeds that jobs measured on several numbers of GPUs, which this trace or a live hook does not have",
            });
        }
        Ok(Box::new(Sia::new(settings.number("restart"))))
    },
};

/// What a job may be given: so many GPUs of each type.
pub type Configuration = Vec<u32>;

/// A job and what each configuration is worth to it.
#[derive(Clone, PartialEq, Debug)]
pub struct Candidate {
    /// Its weight.
    pub weight: f64,
    /// Goodput in each configuration relative to its least good one, so at least 1; 0 if it cannot
    /// run.
    pub goodput: Vec<f64>,
}

/// Sia's exponent: below 0 it weakens the gain of those who have much.
pub const POWER: f64 = -0.5;
/// What a job costs that gets nothing.
pub const UNALLOCATED: f64 = 1.1;

/// What a choice costs: `sum_i w_i G_ic^p` over those with a configuration, `w_i lambda` for those
/// without. Lower is better.
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

/// At most one configuration for each job, within the GPUs of each type, at the least cost. `None`
/// if the solver fails.
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

/// Most combinations of free GPUs by type that [`divide`] walks through.
const MOST_COMBINATIONS: usize = 100_000;

/// The same as [`choose`], by dynamic programming over the GPUs of all types that are left: exact,
/// in jobs x configurations x combinations of GPUs (3 types of 16, 24 and 24 GPUs: 10,625), where
/// the time of the solver has no such bound. `None` where there are more than
/// [`MOST_COMBINATIONS`].
#[must_use]
pub fn divide(
    jobs: &[Candidate],
    configurations: &[Configuration],
    gpus: &[u32],
) -> Option<Vec<Option<usize>>> {
    // A combination is a number whose digits are the GPUs of each type.
    let mut digits = Vec::new();
    let mut combinations = 1_usize;
    for there in gpus {
        digits.push(combinations);
        combinations = combinations.checked_mul(*there as usize + 1)?;
    }
    if combinations > MOST_COMBINATIONS || configurations.len() >= usize::from(u16::MAX) {
        return None;
    }
    let needs: Vec<usize> = (configurations.iter())
        .map(|needs| {
            needs
                .iter()
                .zip(&digits)
                .map(|(n, digit)| *n as usize * digit)
                .sum()
        })
        .collect();
    // Where a combination has what a configuration needs, no digit borrows from the next.
    let fits: Vec<Vec<bool>> = (configurations.iter())
        .map(|needs| {
            let has = |at: usize, kind: usize| at / digits[kind] % (gpus[kind] as usize + 1);
            let kinds = 0..gpus.len();
            let all = |at: usize| {
                kinds
                    .clone()
                    .all(|kind| has(at, kind) >= needs[kind] as usize)
            };
            (0..combinations).map(all).collect()
        })
        .collect();
    const NOTHING: u16 = u16::MAX;
    let mut least = vec![0.0; combinations];
    let mut picks: Vec<Vec<u16>> = Vec::with_capacity(jobs.len());
    for job in jobs {
        let mut next: Vec<f64> = least
            .iter()
            .map(|cost| cost + job.weight * UNALLOCATED)
            .collect();
        let mut pick = vec![NOTHING; combinations];
        for (c, goodput) in job.goodput.iter().enumerate() {
            if *goodput <= 0.0 {
                continue;
            }
            let cost = job.weight * goodput.powf(POWER);
            for at in needs[c]..combinations {
                if fits[c][at] && least[at - needs[c]] + cost < next[at] {
                    next[at] = least[at - needs[c]] + cost;
                    pick[at] = c as u16;
                }
            }
        }
        least = next;
        picks.push(pick);
    }
    let mut left = combinations - 1;
    let mut chosen: Vec<Option<usize>> = (picks.iter().rev())
        .map(|pick| match pick[left] {
            NOTHING => None,
            c => {
                left -= needs[usize::from(c)];
                Some(usize::from(c))
            }
        })
        .collect();
    chosen.reverse();
    Some(chosen)
}

/// Sia: each job gets one configuration, a number of GPUs of one type, so that the sum of weighted
/// powers of goodputs is least.
///
/// Configurations are powers of two up to a node, then whole nodes, and for a rigid job the number
/// it asks for. A job that runs counts in any other configuration for (age - restarts x cost) /
/// (age + cost) of its goodput there, with what a restart costs. On one type of GPU the program is
/// a knapsack and solved as one ([`share`]), on several by [`divide`]; a cluster too large for that
/// goes to the solver, and if that fails, every job keeps what it has.
#[derive(Clone, Debug)]
pub struct Sia {
    restart_s: f64,
    kinds: HashMap<JobId, GpuType>,
}

impl Sia {
    /// Restart cost of a middling model; Sia's own are 25 to 250 s.
    pub const RESTART_S: f64 = 50.0;

    /// With this restart cost in seconds.
    #[must_use]
    pub fn new(restart_s: f64) -> Self {
        Self {
            restart_s,
            kinds: HashMap::new(),
        }
    }

    fn candidate(&self, state: &ClusterState, job: &Job, of: &[(GpuType, u32)]) -> Candidate {
        let now_s = state.now_s();
        let age_s = (now_s - job.arrival_s).max(0.0);
        let lost_s = f64::from(job.starts.saturating_sub(1)) * self.restart_s;
        let counts = (age_s - lost_s).max(0.0) / (age_s + self.restart_s).max(1e-9);
        let has = job
            .run()
            .and_then(|run| Some((state.type_of(*run.gpus.first()?), run.gpus.len() as u32)));
        let mut goodput: Vec<f64> = of
            .iter()
            .map(|(kind, gpus)| {
                let possible = match job.speed {
                    Speed::Rigid => *gpus == job.gpus,
                    Speed::Curve(_) => *gpus <= job.most_gpus,
                };
                f64::from(u8::from(possible)) * job.rate_on(*gpus, *kind)
            })
            .collect();
        let some = goodput.iter().copied().filter(|rate| *rate > 0.0);
        let least = some.fold(f64::INFINITY, f64::min);
        for (rate, configuration) in goodput.iter_mut().zip(of) {
            let moves = has.is_some_and(|has| has != *configuration);
            // Never quite nothing: the cost of a configuration is finite.
            let counts = if moves { counts.max(1e-3) } else { 1.0 };
            *rate = if *rate > 0.0 {
                *rate / least * counts
            } else {
                0.0
            };
        }
        Candidate {
            weight: job.weight,
            goodput,
        }
    }
}

/// Types of GPU, and how many there are of each in numbers that a job may be given.
fn configurations(state: &ClusterState, jobs: &[&Job]) -> (Vec<(GpuType, u32)>, Vec<u32>) {
    let mut widths: Vec<(u32, u32)> = Vec::new();
    for node in state.nodes() {
        let at = usize::from(node.kind.0);
        widths.resize(widths.len().max(at + 1), (0, 0));
        widths[at] = (widths[at].0.max(node.gpus), widths[at].1 + node.gpus);
    }
    let rigid = jobs.iter().filter(|job| matches!(job.speed, Speed::Rigid));
    let asked: BTreeSet<u32> = rigid.map(|job| job.gpus).collect();
    let mut all = Vec::new();
    for (kind, (width, there)) in widths.iter().enumerate() {
        let parts = (0..32).map(|power| 1_u32 << power);
        let mut sizes: BTreeSet<u32> = parts.take_while(|gpus| gpus <= width).collect();
        sizes.extend(
            (1..)
                .map(|n| n * (*width).max(1))
                .take_while(|n| n <= there),
        );
        sizes.extend(&asked);
        sizes.retain(|gpus| gpus <= there);
        all.extend(sizes.into_iter().map(|gpus| (GpuType(kind as u16), gpus)));
    }
    (all, widths.into_iter().map(|(_, there)| there).collect())
}

impl Sizer for Sia {
    fn name(&self) -> &'static str {
        "sia"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Completion],
            manners: &[Manner::Elastic, Manner::Heterogeneous],
            source: "Sia, SOSP'23",
        }
    }
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)> {
        let jobs: Vec<&Job> = state
            .active()
            .filter(|job| promises.known(job.id) != Some(Admit::Reject))
            .collect();
        let (of, gpus) = configurations(state, &jobs);
        let candidates: Vec<Candidate> = jobs
            .iter()
            .map(|job| self.candidate(state, job, &of))
            .collect();
        let choice = if gpus.len() == 1 {
            let costs: Vec<_> = candidates
                .iter()
                .map(|job| {
                    let can = of.iter().zip(&job.goodput).filter(|(_, rate)| **rate > 0.0);
                    let with = can.map(|((_, n), rate)| (*n, job.weight * rate.powf(POWER)));
                    with.chain([(0, job.weight * UNALLOCATED)]).collect()
                })
                .collect();
            let at = |n: u32| of.iter().position(|(_, gpus)| *gpus == n);
            Some(share(&costs, gpus[0]).into_iter().map(at).collect())
        } else {
            let rows: Vec<Configuration> = of
                .iter()
                .map(|(kind, n)| {
                    let mut row = vec![0; gpus.len()];
                    row[usize::from(kind.0)] = *n;
                    row
                })
                .collect();
            divide(&candidates, &rows, &gpus).or_else(|| choose(&candidates, &rows, &gpus))
        };
        let Some(choice) = choice else {
            let has = |job: &&Job| Some((job.id, job.run()?.gpus.len() as u32));
            return jobs.iter().filter_map(has).collect();
        };
        self.kinds.clear();
        let mut sizes = Vec::new();
        for (job, chosen) in jobs.iter().zip(choice) {
            let chosen: Option<usize> = chosen;
            if let Some((kind, gpus)) = chosen.map(|at| of[at]) {
                self.kinds.insert(job.id, kind);
                sizes.push((job.id, gpus));
            }
        }
        sizes
    }
    fn kind(&self, job: JobId) -> Option<GpuType> {
        self.kinds.get(&job).copied()
    }
    fn tunes_batches(&self) -> bool {
        true
    }
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
            let best = brute(&jobs, &configurations, &mut gpus.clone(), &mut Vec::new());
            for solve in [choose, divide] {
                let choice = solve(&jobs, &configurations, &gpus).unwrap();
                for (kind, there) in gpus.iter().enumerate() {
                    let used: u32 = choice
                        .iter()
                        .flatten()
                        .map(|c| configurations[*c][kind])
                        .sum();
                    assert!(used <= *there);
                }
                assert!(
                    (cost(&jobs, &choice) - best).abs() < 1e-9,
                    "{choice:?}: {best}"
                );
            }
            let many = [1_000, 1_000];
            assert_eq!(
                divide(&jobs, &configurations, &many),
                None,
                "too many to walk through"
            );
        }
    }

    #[test]
    fn who_gains_most_from_the_fast_type_gets_it() {
        use std::sync::Arc;

        use crate::cluster::{GpuId, JobType, Node};
        let node = |kind| Node {
            first: GpuId(0),
            gpus: 2,
            kind: GpuType(kind),
            gpu_bytes: 16 << 30,
            cpus: 6.0,
            mem_bytes: 0,
        };
        let mut state = ClusterState::new(vec![node(0), node(1)]);
        for fast in [1.1, 4.0] {
            let mut job = Job::rigid(JobType(0), 2, 0.0, 100.0);
            job.by_type = Arc::from([1.0, fast]);
            state.arrive(job);
        }
        let mut sia = Sia::new(Sia::RESTART_S);
        let sizes = sia.resize(&state, &Promises::default());
        assert_eq!(sizes, [(JobId(0), 2), (JobId(1), 2)]);
        assert_eq!(sia.kind(JobId(0)), Some(GpuType(0)));
        assert_eq!(sia.kind(JobId(1)), Some(GpuType(1)));
    }
}
