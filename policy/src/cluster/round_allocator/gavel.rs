//! Rounds from a linear program.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Left, RoundAllocator, Turn, fill};
use crate::PolicyError;
use crate::cluster::catalogue::{Context, Entry};
use crate::cluster::fair::{Combination, finish_time_fairness_of_types, max_min_of_types};
use crate::cluster::{
    ClusterState, GpuType, Job, JobType, Manner, Objective, PairTable, Random, Tags, Throughputs,
};
use crate::registry::{Kind, ParamSpec, Registration, Settings};

/// How it is chosen.
pub(super) static MAX_MIN: Entry<dyn RoundAllocator> = Registration {
    name: "gavel-max-min",
    summary: "the least share of an even division as large as can be",
    params: &[PARTNERS, KNOWN],
    build: |settings, context| build("gavel-max-min", Goal::MaxMin, settings, context),
};

/// How it is chosen.
pub(super) static FINISH_TIME: Entry<dyn RoundAllocator> = Registration {
    name: "gavel-finish-time",
    summary: "the worst finish-time fairness as low as can be",
    params: &[PARTNERS, KNOWN],
    build: |settings, context| build("gavel-finish-time", Goal::FinishTime, settings, context),
};

/// How it is chosen.
pub(super) static MAKESPAN: Entry<dyn RoundAllocator> = Registration {
    name: "gavel-makespan",
    summary: "everything done as early as can be",
    params: &[PARTNERS, KNOWN],
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

const KNOWN: ParamSpec = ParamSpec {
    name: "known",
    summary: "part of the measured pairs that it is shown; below 1 the others are completed",
    kind: Kind::Number {
        min: 0.0,
        max: 1.0,
        default: 1.0,
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
            what: "speeds of jobs by GPU type, which nothing measures here",
        });
    }
    let partners = settings.number("partners") as usize;
    let pairs = context.pairs.clone().filter(|_| partners > 0);
    let known = settings.number("known");
    let mut gavel = Gavel::new(goal, pairs, partners);
    if known < 1.0 {
        gavel.pairs = gavel.pairs.map(|pairs| Arc::new(partly(&pairs, known)));
    }
    Ok(Box::new(gavel))
}

/// Estimates that are less sure than this are not used.
pub const LEAST_CONFIDENCE: f64 = 0.2;

/// A table of which this part is known, with what can be inferred of the others. Which ones is the
/// same each time.
fn partly(all: &PairTable, known: f64) -> PairTable {
    let mut pairs: Vec<_> = all.iter().filter(|(_, _, a, b, _)| a <= b).collect();
    pairs.sort_by_key(|(kind, gpus, a, b, _)| (*kind, *gpus, *a, *b));
    let types = pairs.iter().map(|(kind, ..)| kind.0 + 1).max().unwrap_or(0);
    let mut kinds: Vec<Group> = pairs
        .iter()
        .flat_map(|(_, gpus, a, b, _)| [(*a, *gpus), (*b, *gpus)])
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    let mut random = Random::new(1);
    pairs.retain(|_| random.unit() < known);
    let mut table = PairTable::default();
    for (kind, gpus, a, b, speeds) in pairs {
        table.insert(kind, gpus, (a, b), speeds);
    }
    table.complete(&kinds, types, LEAST_CONFIDENCE);
    table
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

/// Jobs of one group that can run on the same types of GPU: one that is bound to its GPUs can run
/// on their type alone. A bit for each type.
type Alike = (Group, u64);

/// The types on which a job runs at all.
fn runs_on(job: &Job, types: usize) -> u64 {
    let runs = |kind: &usize| job.rate_on(job.gpus, GpuType(*kind as u16)) > 0.0;
    (0..types.min(64))
        .filter(runs)
        .fold(0, |all, kind| all | 1 << kind)
}

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
/// jobs of some type changes, or speeds do. GPUs that no combination wants go to jobs by arrival,
/// each on the type where it is fastest.
#[derive(Clone, Debug)]
pub struct Gavel {
    goal: Goal,
    pairs: Option<Arc<PairTable>>,
    partners: usize,
    solved_for: Vec<(Alike, usize)>,
    entries: Vec<Allocation>,
    /// Speeds are others than when it was solved.
    stale: bool,
}

/// Groups beyond which those are one to the program that it could not tell apart anyway: as fast on
/// each type, and in no pair.
const MERGE_ABOVE: usize = 64;
/// Groups of one program at most, those with the oldest jobs: it takes more than linear time. The
/// jobs of the others get what is left.
const MOST_GROUPS: usize = 128;

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
            stale: false,
        }
    }

    /// How far each combination is ahead of the one that is furthest behind, in rounds.
    fn ahead(&self) -> BTreeMap<(Vec<usize>, GpuType), f64> {
        let rounds = |entry: &Allocation| entry.given / entry.wanted;
        let least = self
            .entries
            .iter()
            .map(rounds)
            .fold(f64::INFINITY, f64::min);
        let key = |entry: &Allocation| (entry.groups.clone(), entry.kind);
        let entries = self.entries.iter();
        entries
            .map(|entry| (key(entry), rounds(entry) - least))
            .collect()
    }

    /// Combinations with their speeds by GPU type: every group alone, and pairs of the table.
    fn combinations(&self, groups: &[(Alike, &Job)], kinds: usize) -> Vec<Combination> {
        let speeds = |job: &Job, relative: &dyn Fn(GpuType) -> f64| -> Vec<f64> {
            (0..kinds)
                .map(|kind| GpuType(kind as u16))
                .map(|kind| job.rate_on(job.gpus, kind) * relative(kind))
                .collect()
        };
        let mut all: Vec<Combination> = groups
            .iter()
            .enumerate()
            .map(|(i, (((_, gpus), _), job))| Combination {
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
        for (i, ((a, _), job_a)) in groups.iter().enumerate() {
            let mut partners: Vec<(f64, usize)> = groups
                .iter()
                .enumerate()
                .skip(i)
                .filter(|(_, ((b, _), _))| b.1 == a.1)
                .filter_map(|(k, ((b, _), _))| {
                    let sums = (0..kinds).filter_map(|kind| pair(*a, *b, GpuType(kind as u16)));
                    let best = sums.map(|both| both[0] + both[1]).reduce(f64::max)?;
                    Some((best, k))
                })
                .collect();
            partners.sort_by(|x, y| y.0.total_cmp(&x.0).then(x.1.cmp(&y.1)));
            for (_, k) in partners.into_iter().take(self.partners) {
                let ((b, _), job_b) = &groups[k];
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

    /// The jobs of each group, and those of groups that are too many.
    fn groups<'a>(&self, state: &'a ClusterState) -> (BTreeMap<Alike, Vec<&'a Job>>, Vec<&'a Job>) {
        let mut groups: BTreeMap<Alike, Vec<&Job>> = BTreeMap::new();
        let types = state.nodes().iter().map(|node| node.kind.0 + 1);
        let types = types.max().unwrap_or(0);
        for job in state.active() {
            let runs_on = runs_on(job, usize::from(types));
            // One that runs nowhere would make every program impossible.
            if runs_on != 0 {
                let alike = ((job.profile.kind, job.gpus), runs_on);
                groups.entry(alike).or_default().push(job);
            }
        }
        if groups.len() > MERGE_ABOVE {
            let pairs = self.pairs.as_deref();
            let paired: BTreeSet<JobType> = pairs
                .iter()
                .flat_map(|table| table.iter())
                .flat_map(|(_, _, a, b, _)| [a, b])
                .collect();
            let mut first: BTreeMap<(u32, u64, Vec<i64>), JobType> = BTreeMap::new();
            let mut merged: BTreeMap<Alike, Vec<&Job>> = BTreeMap::new();
            for (((kind, gpus), runs_on), jobs) in groups {
                let mut known = kind;
                if !paired.contains(&kind) {
                    // To within a twentieth.
                    let step = |kind: u16| {
                        let speed = jobs[0].rate_on(gpus, GpuType(kind));
                        (20.0 * speed.max(1e-9).ln()).round() as i64
                    };
                    let speeds = (0..types).map(step).collect();
                    known = *first.entry((gpus, runs_on, speeds)).or_insert(kind);
                }
                let alike = ((known, gpus), runs_on);
                merged.entry(alike).or_default().extend(jobs);
            }
            groups = merged;
        }
        let mut others = Vec::new();
        if groups.len() > MOST_GROUPS {
            let oldest = |jobs: &Vec<&Job>| {
                let arrivals = jobs.iter().map(|job| job.arrival_s);
                arrivals.fold(f64::INFINITY, f64::min)
            };
            let mut order: Vec<(f64, Alike)> = groups
                .iter()
                .map(|(alike, jobs)| (oldest(jobs), *alike))
                .collect();
            order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            for (_, alike) in order.into_iter().skip(MOST_GROUPS) {
                others.extend(groups.remove(&alike).unwrap_or_default());
            }
        }
        (groups, others)
    }

    fn solve(&mut self, state: &ClusterState, groups: &BTreeMap<Alike, Vec<&Job>>) {
        let mut gpus: Vec<f64> = Vec::new();
        for node in state.nodes() {
            let at = usize::from(node.kind.0);
            gpus.resize(gpus.len().max(at + 1), 0.0);
            gpus[at] += f64::from(node.gpus);
        }
        let firsts: Vec<(Alike, &Job)> = groups.iter().map(|(g, jobs)| (*g, jobs[0])).collect();
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
        let (groups, others) = self.groups(state);
        let sizes: Vec<(Alike, usize)> = groups.iter().map(|(g, jobs)| (*g, jobs.len())).collect();
        let stale = std::mem::take(&mut self.stale);
        if sizes != self.solved_for {
            self.solve(state, &groups);
            self.solved_for = sizes;
        } else if stale {
            // The same jobs: who had more than its part so far still has to wait for the others.
            // Otherwise those with a small part would never have a turn where speeds change often.
            let ahead = self.ahead();
            self.solve(state, &groups);
            for entry in &mut self.entries {
                let before = ahead.get(&(entry.groups.clone(), entry.kind));
                entry.given = entry.wanted * before.copied().unwrap_or(0.0);
            }
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
        let rest = waiting.into_iter().flatten().chain(others);
        fill(rest.collect(), &mut left, &mut turns);
        turns
    }
    fn learn(&mut self, pairs: Option<&Arc<PairTable>>) {
        self.pairs = pairs.filter(|_| self.partners > 0).cloned();
        // The next round solves anew.
        self.stale = true;
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
        rounds(false);
    }

    #[test]
    fn rounds_give_what_the_program_says_also_where_speeds_are_learnt_in_each_of_them() {
        rounds(true);
    }

    fn rounds(learns: bool) {
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
            if learns {
                gavel.learn(None);
            }
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
    fn a_thousand_kinds_are_divided_by_a_program_that_stays_small() {
        // Kinds of which nothing is known are one; of those that are known, no more than a program
        // takes, and the others have what is left.
        let mut state = mixed();
        for kind in 0..1000u32 {
            let mut job = Job::rigid(JobType(kind), 1, 0.0, 1e9);
            if kind % 2 == 1 {
                job.by_type = Arc::from([1.0, 1.0 / (2.0 + f64::from(kind % 5))]);
            }
            state.arrive(job);
        }
        let mut gavel = Gavel::new(Goal::MaxMin, None, 3);
        let (groups, others) = gavel.groups(&state);
        assert_eq!((groups.len(), others.len()), (6, 0));
        assert_eq!(gavel.turns(&state).len(), 2);
        let mut state = mixed();
        for kind in 0..300u32 {
            let mut job = Job::rigid(JobType(kind), 1, f64::from(kind), 1e9);
            job.by_type = Arc::from([1.0, 0.94_f64.powf(f64::from(kind))]);
            state.arrive(job);
        }
        let (groups, others) = gavel.groups(&state);
        assert_eq!(
            (groups.len(), others.len()),
            (MOST_GROUPS, 300 - MOST_GROUPS)
        );
        assert!(others.iter().all(|job| job.arrival_s >= MOST_GROUPS as f64));
        assert_eq!(gavel.turns(&state).len(), 2);
    }

    #[test]
    fn a_job_that_is_bound_to_a_type_has_its_turns_there_and_others_get_on_by_that() {
        // Three alike, 3 times as fast on the first type; one of them cannot leave the second.
        let mut state = mixed();
        for bound in [false, false, true] {
            let mut job = Job::rigid(JobType(0), 1, 0.0, 1e9);
            job.by_type = Arc::from([if bound { 0.0 } else { 1.0 }, 1.0 / 3.0]);
            state.arrive(job);
        }
        let mut gavel = Gavel::new(Goal::MaxMin, None, 0);
        let mut times = [[0.0; 2]; 3];
        let rounds = 1000;
        for _ in 0..rounds {
            for turn in gavel.turns(&state) {
                times[turn.jobs[0].0 as usize][usize::from(turn.kind.0)] += 1.0 / f64::from(rounds);
            }
        }
        assert_eq!(times[2][0], 0.0, "{times:?}");
        assert!(times[2][1] > 0.3, "{times:?}");
        let fast: f64 = times.iter().map(|time| time[0]).sum();
        assert!((fast - 1.0).abs() < 0.01, "{times:?}");
    }

    #[test]
    fn speeds_that_are_learnt_are_in_the_next_round() {
        // Two jobs on two GPUs: each has its own all the time, and which one follows the speeds.
        let mut state = mixed();
        let ids: Vec<_> = (0..2)
            .map(|kind| state.arrive(Job::rigid(JobType(kind), 1, 0.0, 1e9)))
            .collect();
        let mut gavel = Gavel::new(Goal::MaxMin, None, 4);
        for likes in [0, 1] {
            for (at, id) in ids.iter().enumerate() {
                let slow = if at == likes { 0.1 } else { 0.9 };
                state.job_mut(*id).by_type = Arc::from([1.0, slow]);
            }
            gavel.learn(None);
            let turns = gavel.turns(&state);
            let on_fast = turns.iter().find(|turn| turn.kind == GpuType(0));
            assert_eq!(on_fast.unwrap().jobs, [ids[likes]], "{turns:?}");
        }
        // Pairs as well: on one GPU they share it once they are known to do well.
        let mut state = ClusterState::uniform(1, 1);
        for kind in 0..2 {
            state.arrive(Job::rigid(JobType(kind), 1, 0.0, 1e9));
        }
        let mut gavel = Gavel::new(Goal::MaxMin, None, 4);
        assert_eq!(gavel.turns(&state)[0].jobs.len(), 1);
        let mut table = PairTable::default();
        table.insert(GpuType(0), 1, (JobType(0), JobType(1)), [0.9; 2]);
        gavel.learn(Some(&Arc::new(table)));
        assert_eq!(gavel.turns(&state)[0].jobs.len(), 2);
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
