//! Rounds from a linear program.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Left, RoundAllocator, Turn, fill};
use crate::PolicyError;
use crate::cluster::catalogue::{Context, Entry};
use crate::cluster::fair::{Combination, finish_time_fairness_of_types, max_min_of_types};
use crate::cluster::{
    ClusterState, GpuType, Job, JobType, Manner, Objective, PairTable, Tags, Throughputs,
};
use crate::registry::{Kind, ParamSpec, Registration, Settings};

/// How it is chosen.
pub(super) static MAX_MIN: Entry<dyn RoundAllocator> = Registration {
    name: "gavel-max-min",
    summary: "the least share of an even division as large as can be",
    params: &[PARTNERS],
    build: |settings, context| build("gavel-max-min", Goal::MaxMin, settings, context),
};

/// How it is chosen.
pub(super) static FINISH_TIME: Entry<dyn RoundAllocator> = Registration {
    name: "gavel-finish-time",
    summary: "the worst finish-time fairness as low as can be",
    params: &[PARTNERS],
    build: |settings, context| build("gavel-finish-time", Goal::FinishTime, settings, context),
};

/// How it is chosen.
pub(super) static MAKESPAN: Entry<dyn RoundAllocator> = Registration {
    name: "gavel-makespan",
    summary: "everything done as early as can be",
    params: &[PARTNERS],
    build: |settings, context| build("gavel-makespan", Goal::Makespan, settings, context),
};

const PARTNERS: ParamSpec = ParamSpec {
    name: "partners",
    summary: "with how many other types a type of job may share GPUs; 0: no sharing",
    kind: Kind::Number {
        min: 0.0,
        max: 64.0,
        default: 3.0,
    },
};

fn build(
    name: &'static str,
    goal: Goal,
    settings: &Settings<'_>,
    context: &Context,
) -> Result<Box<dyn RoundAllocator>, PolicyError> {
    if !context.speeds_by_type {
        return Err(PolicyError::Needs {
            policy: name,
            what: "speeds of jobs by GPU type, which a live hook does not measure yet",
        });
    }
    let partners = settings.number("partners") as usize;
    let pairs = context.pairs.clone().filter(|_| partners > 0);
    Ok(Box::new(Gavel::new(goal, pairs, partners)))
}

/// What the program makes as good as can be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Goal {
    /// The least share of what an even division would give.
    MaxMin,
    /// The worst finish-time fairness.
    FinishTime,
    /// The time until everything is done.
    Makespan,
}

/// Jobs that the program does not tell apart: their kind and number of GPUs.
type Group = (JobType, u32);

/// A combination on a GPU type, and how far it is behind.
#[derive(Clone, Debug)]
struct Allocation {
    groups: Vec<usize>,
    kind: GpuType,
    gpus: u32,
    /// How many of these shall run at once, on average.
    wanted: f64,
    /// Rounds that were given to it.
    given: f64,
}

/// Gavel (OSDI'20). A linear program over types of job says which part of the time each type, solo
/// or beside another in the pair table, spends on each GPU type. Rounds carry that out: the
/// combination that is furthest behind its part goes next (Gavel's priority, wanted over given),
/// and inside a type the job with the least service. The program is solved again when the number of
/// jobs of some type changes. GPUs that no combination wants go to jobs by arrival, each on the
/// type where it is fastest.
#[derive(Clone, Debug)]
pub struct Gavel {
    goal: Goal,
    pairs: Option<Arc<PairTable>>,
    partners: usize,
    solved_for: Vec<(Group, usize)>,
    entries: Vec<Allocation>,
}

/// Pairs below this sum of relative speeds are never made: taking turns is as good.
const LEAST_SUM: f64 = 1.0;

impl Gavel {
    /// For this goal. With a table, jobs may share GPUs: each type with its `partners` best ones.
    #[must_use]
    pub fn new(goal: Goal, pairs: Option<Arc<PairTable>>, partners: usize) -> Self {
        Self {
            goal,
            pairs,
            partners,
            solved_for: Vec::new(),
            entries: Vec::new(),
        }
    }

    /// Combinations with their speeds by GPU type: every group alone, and pairs of the table.
    fn combinations(&self, groups: &[(Group, &Job)], kinds: usize) -> Vec<Combination> {
        let speeds = |job: &Job, relative: &dyn Fn(GpuType) -> f64| -> Vec<f64> {
            (0..kinds)
                .map(|kind| GpuType(kind as u16))
                .map(|kind| job.rate_on(job.gpus, kind) * relative(kind))
                .collect()
        };
        let mut all: Vec<Combination> = groups
            .iter()
            .enumerate()
            .map(|(i, ((_, gpus), job))| Combination {
                jobs: vec![(i, speeds(job, &|_| 1.0))],
                gpus: f64::from(*gpus),
            })
            .collect();
        let Some(table) = self.pairs.as_deref() else {
            return all;
        };
        let pair = |a: Group, b: Group, kind| {
            let both = table.pair(a.0, b.0, kind, a.1)?;
            (both[0] > 0.0 && both[1] > 0.0 && both[0] + both[1] > LEAST_SUM).then_some(both)
        };
        for (i, (a, job_a)) in groups.iter().enumerate() {
            let mut partners: Vec<(f64, usize)> = groups
                .iter()
                .enumerate()
                .skip(i)
                .filter(|(_, (b, _))| b.1 == a.1)
                .filter_map(|(k, (b, _))| {
                    let sums = (0..kinds).filter_map(|kind| pair(*a, *b, GpuType(kind as u16)));
                    let best = sums.map(|both| both[0] + both[1]).reduce(f64::max)?;
                    Some((best, k))
                })
                .collect();
            partners.sort_by(|x, y| y.0.total_cmp(&x.0).then(x.1.cmp(&y.1)));
            for (_, k) in partners.into_iter().take(self.partners) {
                let (b, job_b) = &groups[k];
                let of = |side: usize| {
                    move |kind: GpuType| pair(*a, *b, kind).map_or(0.0, |both| both[side])
                };
                all.push(Combination {
                    jobs: vec![(i, speeds(job_a, &of(0))), (k, speeds(job_b, &of(1)))],
                    gpus: f64::from(a.1),
                });
            }
        }
        all
    }

    fn solve(&mut self, state: &ClusterState, groups: &BTreeMap<Group, Vec<&Job>>) {
        let mut gpus: Vec<f64> = Vec::new();
        for node in state.nodes() {
            let at = usize::from(node.kind.0);
            gpus.resize(gpus.len().max(at + 1), 0.0);
            gpus[at] += f64::from(node.gpus);
        }
        let firsts: Vec<(Group, &Job)> = groups.iter().map(|(g, jobs)| (*g, jobs[0])).collect();
        let counts: Vec<f64> = groups.values().map(|jobs| jobs.len() as f64).collect();
        let combinations = self.combinations(&firsts, gpus.len());
        let all: f64 = gpus.iter().sum();
        let even = |job: &Job| {
            let on = |(kind, there): (usize, &f64)| {
                job.rate_on(job.gpus, GpuType(kind as u16)) * there / all
            };
            gpus.iter().enumerate().map(on).sum::<f64>()
        };
        let now_s = state.now_s();
        let mean = |of: &dyn Fn(&Job) -> f64| -> Vec<f64> {
            groups
                .values()
                .map(|jobs| jobs.iter().map(|job| of(job)).sum::<f64>() / jobs.len() as f64)
                .map(|mean| mean.max(1e-9))
                .collect()
        };
        let solved = match self.goal {
            Goal::MaxMin => {
                let reference = mean(&|job| even(job) / job.weight / f64::from(job.gpus));
                max_min_of_types(&combinations, &gpus, &reference, &counts)
            }
            Goal::Makespan => {
                let reference = mean(&|job| job.left(now_s));
                max_min_of_types(&combinations, &gpus, &reference, &counts)
            }
            Goal::FinishTime => {
                let elapsed = mean(&|job| now_s - job.arrival_s);
                let left = mean(&|job| job.left(now_s));
                let isolated = mean(&|job| job.work / even(job) * state.contention(job));
                let jobs: Vec<_> = elapsed
                    .into_iter()
                    .zip(left)
                    .zip(isolated)
                    .map(|((elapsed, left), isolated)| (elapsed, left, isolated))
                    .collect();
                // A hundredth of rho is finer than a round.
                finish_time_fairness_of_types(&combinations, &gpus, &jobs, &counts, 1e-2)
                    .map(|(division, _)| division)
            }
        };
        self.entries.clear();
        let Ok(division) = solved else { return };
        for (combination, time) in combinations.iter().zip(&division.time) {
            for (kind, wanted) in time.iter().enumerate().filter(|(_, x)| **x > 1e-6) {
                self.entries.push(Allocation {
                    groups: combination.jobs.iter().map(|(group, _)| *group).collect(),
                    kind: GpuType(kind as u16),
                    gpus: combination.gpus as u32,
                    wanted: *wanted,
                    given: 0.0,
                });
            }
        }
    }
}

impl RoundAllocator for Gavel {
    fn name(&self) -> &'static str {
        match self.goal {
            Goal::MaxMin => "gavel-max-min",
            Goal::FinishTime => "gavel-finish-time",
            Goal::Makespan => "gavel-makespan",
        }
    }
    fn tags(&self) -> Tags {
        let objectives: &[Objective] = match self.goal {
            Goal::MaxMin | Goal::FinishTime => &[Objective::Fairness],
            Goal::Makespan => &[Objective::Makespan],
        };
        Tags {
            objectives,
            manners: &[Manner::Heterogeneous, Manner::Sharing],
            source: "Gavel, OSDI'20",
        }
    }
    fn turns(&mut self, state: &ClusterState) -> Vec<Turn> {
        let now_s = state.now_s();
        let mut groups: BTreeMap<Group, Vec<&Job>> = BTreeMap::new();
        for job in state.active() {
            groups
                .entry((job.profile.kind, job.gpus))
                .or_default()
                .push(job);
        }
        let sizes: Vec<(Group, usize)> = groups.iter().map(|(g, jobs)| (*g, jobs.len())).collect();
        if sizes != self.solved_for {
            self.solve(state, &groups);
            self.solved_for = sizes;
        }
        // The least served last, so that popping takes it.
        let mut waiting: Vec<Vec<&Job>> = groups.into_values().collect();
        for jobs in &mut waiting {
            let service = |job: &Job| job.service_gpu_s(now_s);
            jobs.sort_by(|a, b| service(b).total_cmp(&service(a)).then(b.id.cmp(&a.id)));
        }
        let mut left = Left::all(state);
        let mut turns = Vec::new();
        let mut open: Vec<usize> = (0..self.entries.len()).collect();
        let behind = |entry: &Allocation| (entry.given + 0.5) / entry.wanted;
        while let Some(place) = (0..open.len()).min_by(|a, b| {
            let [a, b] = [a, b].map(|at| behind(&self.entries[open[*at]]));
            a.total_cmp(&b)
        }) {
            let entry = &mut self.entries[open[place]];
            let enough = entry.groups.iter().all(|group| {
                let needs = entry.groups.iter().filter(|other| *other == group).count();
                waiting[*group].len() >= needs
            });
            if !enough || !left.take(entry.kind, entry.gpus) {
                open.swap_remove(place);
                continue;
            }
            entry.given += 1.0;
            let jobs = entry.groups.iter();
            let jobs = jobs.filter_map(|group| Some(waiting[*group].pop()?.id));
            turns.push(Turn {
                jobs: jobs.collect(),
                kind: entry.kind,
            });
        }
        fill(
            waiting.into_iter().flatten().collect(),
            &mut left,
            &mut turns,
        );
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{GpuId, Node};

    fn mixed() -> ClusterState {
        let node = |kind| Node {
            first: GpuId(0),
            gpus: 1,
            kind: GpuType(kind),
            gpu_bytes: 16 << 30,
            cpus: 3.0,
            mem_bytes: 0,
        };
        ClusterState::new(vec![node(0), node(1)])
    }

    #[test]
    fn rounds_give_what_the_program_says() {
        // The three jobs of the worked example: 12/11 of an even division for each.
        let mut state = mixed();
        for (kind, slow) in [(0, 1.0 / 4.0), (1, 1.0 / 3.0), (2, 1.0 / 2.0)] {
            let mut job = Job::rigid(JobType(kind), 1, 0.0, 1e9);
            job.by_type = Arc::from([1.0, slow]);
            state.arrive(job);
        }
        let mut gavel = Gavel::new(Goal::MaxMin, None, 0);
        let (mut progress, rounds) = ([0.0; 3], 1100);
        for _ in 0..rounds {
            for turn in gavel.turns(&state) {
                let job = state.job(turn.jobs[0]);
                progress[job.id.0 as usize] += job.rate_on(1, turn.kind);
            }
        }
        for (job, done) in state.jobs().iter().zip(progress) {
            let even = (1.0 + job.by_type[1]) / 3.0;
            let relative = done / f64::from(rounds) / even;
            assert!((relative - 12.0 / 11.0).abs() < 0.01, "{relative}");
        }
    }

    #[test]
    fn a_pair_below_one_is_never_made() {
        let mut state = ClusterState::uniform(1, 1);
        for kind in 0..2 {
            state.arrive(Job::rigid(JobType(kind), 1, 0.0, 1e9));
        }
        for (sum, sizes) in [(0.9, 1), (1.6, 2)] {
            let mut table = PairTable::default();
            table.insert(GpuType(0), 1, (JobType(0), JobType(1)), [sum / 2.0; 2]);
            let mut gavel = Gavel::new(Goal::MaxMin, Some(Arc::new(table)), 4);
            for _ in 0..10 {
                let turns = gavel.turns(&state);
                assert_eq!(turns.len(), 1);
                assert_eq!(turns[0].jobs.len(), sizes, "{sum}");
            }
        }
    }
}
