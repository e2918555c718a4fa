//! An order that gives leftovers away.

use std::collections::BTreeMap;

use super::{Drift, Key, Order};
use crate::cluster::catalogue::Entry;
use crate::cluster::fair::equal_parts;
use crate::cluster::{ClusterState, Job, JobId, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static CARBYNE: Entry<dyn Order> = Registration {
    name: "carbyne",
    summary: "jobs at their fair time first; jobs with slack yield to the shortest",
    params: &[],
    build: |_, context| Ok(Box::new(Carbyne::new(context.round_s))),
};

/// What a job of unknown or endless work counts for in a fair cluster: 10 years.
const LONGEST_S: f64 = 315_360_000.0;

/// Carbyne (OSDI'16) over a fair schedule of GPUs.
///
/// *Fair.* Beside the cluster runs a fair one in which every job that came has an equal part of the
/// GPUs, at most what it asks for ([`equal_parts`]), until its work is done there. A job that ends
/// early in the cluster still has its part there: others are owed no more than they would have had.
/// A job's fair time is when it is done there if nobody else comes: others that are done before it
/// leave it their parts. It is due then, or at its deadline where that is later.
///
/// *Altruism.* A job needs GPUs now if it would otherwise end after it is due; such jobs come
/// first, the earliest first. That nobody is late by itself is not enough, because several may need
/// the same time: all the work that is due by some time has to fit in before it. Where it only just
/// does, the jobs that are due by then come before all that are due later. Where
/// decisions are not taken in rounds nobody knows when a job that gave way would be asked about
/// again: there jobs go as they are due.
///
/// *Leftover.* Within these bounds GPUs go to jobs by shortest remaining time, and past jobs that
/// do not fit. On one GPU nobody is done later than in the fair cluster: to serve those that are
/// due first is always possible there, as in E. Friedman and S. Henderson, "Fairness and efficiency
/// in web server protocols", SIGMETRICS 2003.
#[derive(Clone, Debug)]
pub struct Carbyne {
    fair: BTreeMap<JobId, Fair>,
    /// Jobs of the state that came into the fair cluster.
    seen: usize,
    /// Of the fair cluster, as of its last division.
    gpus: f64,
    now_s: f64,
    /// The longest time until the next decision.
    step_s: f64,
    /// The first time by which as much is due as there is time for; jobs that are due later wait.
    full_s: f64,
}

/// A job in the fair cluster. Its work is seconds on the GPUs it asks for.
#[derive(Clone, Copy, Debug)]
struct Fair {
    gpus: f64,
    left_s: f64,
    /// Seconds of work in a second.
    rate: f64,
    /// When it is done, if nobody comes.
    end_s: f64,
}

impl Carbyne {
    /// Decisions are taken every `round_s` seconds and at no other time; `None`: whenever something
    /// happens.
    #[must_use]
    pub fn new(round_s: Option<f64>) -> Self {
        Self {
            fair: BTreeMap::new(),
            seen: 0,
            gpus: 0.0,
            now_s: 0.0,
            step_s: round_s.unwrap_or(f64::INFINITY),
            full_s: f64::INFINITY,
        }
    }

    /// Lets the fair cluster go on until now; jobs that end there in between leave their parts to
    /// the others.
    fn advance(&mut self, gpus: f64, now_s: f64) {
        while self.now_s < now_s {
            let ends = self.fair.values().filter(|job| job.rate > 0.0);
            let next_s = ends
                .map(|job| job.left_s / job.rate)
                .fold(f64::INFINITY, f64::min);
            let step_s = next_s.min(now_s - self.now_s);
            for job in self.fair.values_mut() {
                job.left_s -= job.rate * step_s;
            }
            let before = self.fair.len();
            self.fair.retain(|_, job| job.left_s > 1e-9);
            self.now_s = if step_s < next_s {
                now_s
            } else {
                self.now_s + step_s
            };
            if self.fair.len() < before {
                self.divide(gpus);
            }
        }
    }

    fn divide(&mut self, gpus: f64) {
        let wants: Vec<f64> = self.fair.values().map(|job| job.gpus).collect();
        for (job, part) in self.fair.values_mut().zip(equal_parts(gpus, &wants)) {
            job.rate = part / job.gpus;
        }
    }

    /// When each is done in the fair cluster, from now on: those that end leave their parts.
    fn foresee(&mut self, gpus: f64) {
        let mut left: Vec<(JobId, f64, f64)> = self
            .fair
            .iter()
            .map(|(id, job)| (*id, job.gpus, job.left_s))
            .collect();
        left.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut now_s = self.now_s;
        while !left.is_empty() {
            // Each has so many GPUs, or as many as it asks for.
            let (mut free, mut level) = (gpus, f64::INFINITY);
            for (served, (_, wants, _)) in left.iter().enumerate() {
                let even = free / (left.len() - served) as f64;
                if *wants > even {
                    level = even;
                    break;
                }
                free -= wants;
            }
            let rate = |wants: f64| (level / wants).min(1.0);
            let ends = left.iter().map(|(_, wants, left_s)| left_s / rate(*wants));
            let step_s = ends.fold(f64::INFINITY, f64::min);
            now_s += step_s;
            left.retain_mut(|(id, wants, left_s)| {
                *left_s -= rate(*wants) * step_s;
                let goes_on = *left_s > 1e-9 * now_s.max(1.0);
                if !goes_on && let Some(job) = self.fair.get_mut(id) {
                    job.end_s = now_s;
                }
                goes_on
            });
        }
    }

    /// When a job would be done in the fair cluster: now, where it is.
    fn fair_s(&self, id: JobId) -> f64 {
        let end_s = self.fair.get(&id).map_or(self.now_s, |job| job.end_s);
        end_s.max(self.now_s)
    }

    /// Its fair time, or its deadline where that is later.
    fn due_s(&self, job: &Job) -> f64 {
        let fair_s = self.fair_s(job.id);
        job.deadline_s
            .map_or(fair_s, |deadline_s| deadline_s.max(fair_s))
    }

    /// The first time by which so much is due that the GPUs do nothing else until then, should this
    /// step go to others.
    fn full_s(&self, state: &ClusterState) -> f64 {
        let gpus = f64::from(state.gpus());
        let mut due: Vec<(f64, f64)> = state
            .active()
            .map(|job| {
                let left_s = job.left_s(self.now_s).min(LONGEST_S);
                (self.due_s(job), left_s * f64::from(job.gpus).min(gpus))
            })
            .collect();
        due.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut work = 0.0;
        let mut full = due.into_iter().filter(|(due_s, gpu_s)| {
            work += gpu_s;
            work > gpus * (due_s - self.now_s - self.step_s)
        });
        full.next().map_or(f64::INFINITY, |(due_s, _)| due_s)
    }
}

impl Order for Carbyne {
    fn name(&self) -> &'static str {
        "carbyne"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Fairness, Objective::Completion],
            manners: &[Manner::Exclusive],
            source: "Carbyne, OSDI'16",
        }
    }
    fn key(&self, state: &ClusterState, job: &Job) -> Key {
        let left_s = job.left_s(state.now_s());
        let due_s = self.due_s(job);
        if state.now_s() + left_s + self.step_s > due_s {
            Key::new(0, due_s, job)
        } else if due_s <= self.full_s {
            Key::new(1, left_s, job)
        } else {
            Key::new(2, left_s, job)
        }
    }
    fn preemptive(&self) -> bool {
        true
    }
    fn skips(&self) -> bool {
        true
    }
    fn drift(&self) -> Drift {
        Drift::Always
    }
    fn refresh(&mut self, state: &ClusterState) {
        let (gpus, now_s) = (f64::from(state.gpus()), state.now_s());
        self.advance(gpus, now_s);
        let first = self.seen;
        let come = state.jobs().get(first..).unwrap_or(&[]);
        self.seen = state.jobs().len();
        let before = self.fair.len();
        let come = come.iter().filter(|job| !job.is_done());
        self.fair.extend(come.map(|job| {
            let fair = Fair {
                gpus: f64::from(job.gpus.max(1)),
                left_s: job.left_s(now_s).min(LONGEST_S),
                rate: 0.0,
                end_s: f64::INFINITY,
            };
            (job.id, fair)
        }));
        if self.fair.len() > before || gpus.to_bits() != self.gpus.to_bits() {
            self.gpus = gpus;
            self.divide(gpus);
            self.foresee(gpus);
        }
        self.full_s = self.full_s(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Decision, JobType};

    #[test]
    fn who_has_time_gives_way_until_its_time_has_come() {
        let mut state = ClusterState::uniform(1, 1);
        let long = state.arrive(Job::rigid(JobType(0), 1, 0.0, 100.0));
        let short = state.arrive(Job::rigid(JobType(0), 1, 0.0, 10.0));
        let mut order = Carbyne::new(Some(1.0));
        order.refresh(&state);
        // Two jobs on one GPU: half of it each, and the short one's fair time is 20 s.
        assert!((order.fair_s(short) - 20.0).abs() < 1e-9);
        assert!(order.key(&state, state.job(short)) < order.key(&state, state.job(long)));
        // The short one runs first, and is done at 10 s; it still has its part until 20 s.
        state.advance(10.0);
        state.finish(short);
        order.refresh(&state);
        assert!(
            (order.fair_s(long) - 110.0).abs() < 1e-9,
            "half of the GPU until 20 s, and all of it from then on"
        );
        state.advance(20.0);
        order.refresh(&state);
        assert!(
            (order.fair_s(long) - 110.0).abs() < 1e-9,
            "alone from 20 s on"
        );
        // Nothing of the long one is done, and 100 s do not fit before its fair time any more.
        let job = state.job(long);
        assert!(order.key(&state, job).cmp(&Key::new(1, 0.0, job)).is_lt());
    }

    #[test]
    fn a_job_that_would_be_late_comes_before_a_shorter_one_that_can_wait() {
        let mut state = ClusterState::uniform(1, 1);
        let long = state.arrive(Job::rigid(JobType(0), 1, 0.0, 100.0));
        let mut order = Carbyne::new(Some(1.0));
        order.refresh(&state);
        state.advance(60.0);
        order.refresh(&state);
        // Alone it would have 40 s left. One that comes now has 5 s, and 10 s for them.
        let short = state.arrive(Job::rigid(JobType(0), 1, 60.0, 5.0));
        state.advance(61.0);
        order.refresh(&state);
        let key = |id| order.key(&state, state.job(id));
        assert!(key(long) < key(short));
        // With a deadline later than its fair time it waits.
        state.job_mut(long).deadline_s = Some(1000.0);
        let key = |id| order.key(&state, state.job(id));
        assert!(key(short) < key(long));
    }

    /// A job of a history: when it comes, on how many GPUs, for how long.
    type Comes = (f64, u32, f64);

    /// When each would be done in the fair cluster.
    fn fair_ends_s(gpus: u32, jobs: &[Comes]) -> Vec<f64> {
        let mut left: Vec<f64> = jobs.iter().map(|job| job.2).collect();
        let mut ends = vec![f64::INFINITY; jobs.len()];
        let mut now_s = 0.0;
        while ends.iter().any(|end| end.is_infinite()) {
            let here: Vec<usize> = (0..jobs.len())
                .filter(|at| jobs[*at].0 <= now_s && ends[*at].is_infinite())
                .collect();
            let wants: Vec<f64> = here.iter().map(|at| f64::from(jobs[*at].1)).collect();
            let parts = equal_parts(f64::from(gpus), &wants);
            let rates: Vec<f64> = parts
                .iter()
                .zip(&wants)
                .map(|(part, all)| part / all)
                .collect();
            let end_s = here
                .iter()
                .zip(&rates)
                .map(|(at, rate)| now_s + left[*at] / rate);
            let next = jobs.iter().map(|job| job.0).filter(|at_s| *at_s > now_s);
            let to_s = end_s.chain(next).fold(f64::INFINITY, f64::min);
            for (at, rate) in here.into_iter().zip(rates) {
                left[at] -= rate * (to_s - now_s);
                if left[at] < 1e-9 {
                    ends[at] = to_s;
                }
            }
            now_s = to_s;
        }
        ends
    }

    /// Plays a history; when each job was done. Decisions are taken every `step_s`, or, without it,
    /// when a job comes or is done.
    fn played_s(gpus: u32, jobs: &[Comes], step_s: Option<f64>) -> Vec<f64> {
        let mut state = ClusterState::uniform(gpus, gpus);
        let mut order = Carbyne::new(step_s);
        let mut ends = vec![f64::INFINITY; jobs.len()];
        let mut come = 0;
        while ends.iter().any(|end| end.is_infinite()) {
            while jobs.get(come).is_some_and(|job| job.0 <= state.now_s()) {
                let (at_s, gpus, work_s) = jobs[come];
                state.arrive(Job::rigid(JobType(0), gpus, at_s, work_s));
                come += 1;
            }
            order.refresh(&state);
            let mut active: Vec<JobId> = state.active().map(|job| job.id).collect();
            active.sort_by_key(|id| order.key(&state, state.job(*id)));
            // First come first served, past those that do not fit.
            let mut next = 0;
            let stop = |job: &JobId| Decision::Suspend { job: *job };
            let stops: Vec<Decision> = state.running().iter().map(stop).collect();
            state.apply(&stops).unwrap();
            let mut batch = Vec::new();
            let mut runs = Vec::new();
            for job in active {
                let wants = state.job(job).gpus;
                if next + wants > gpus {
                    continue;
                }
                batch.push(Decision::Place {
                    job,
                    gpus: (next..next + wants).map(crate::cluster::GpuId).collect(),
                    class: crate::Class::Guaranteed,
                    share: 1.0,
                    mem_bytes: None,
                });
                runs.push(job);
                next += wants;
            }
            state.apply(&batch).unwrap();
            for job in &runs {
                state.set_rate(*job, 1.0);
            }
            let from_s = state.now_s();
            let next_s = jobs.get(come).map_or(f64::INFINITY, |job| job.0);
            let event_s = (runs.iter())
                .map(|job| from_s + state.job(*job).left_s(from_s))
                .fold(next_s, f64::min);
            state.advance(step_s.map_or(event_s, |step_s| from_s + step_s));
            for job in runs {
                let left_s = state.job(job).left(state.now_s());
                if left_s < 1e-9 {
                    ends[job.0 as usize] = state.now_s();
                    state.finish(job);
                }
            }
        }
        ends
    }

    /// How late the latest job is against the fair cluster, of 2,000 histories drawn by chance on
    /// one GPU, and that history.
    fn latest_s(step_s: Option<f64>) -> (f64, Vec<Comes>) {
        let mut worst = (f64::NEG_INFINITY, Vec::new());
        for seed in 0..2000 {
            let mut random = crate::cluster::Random::new(seed);
            let mut at_s = 0.0;
            let jobs: Vec<Comes> = (0..2 + random.below(9))
                .map(|_| {
                    at_s += random.below(12) as f64;
                    (at_s, 1, 1.0 + random.below(30) as f64)
                })
                .collect();
            let (ends, fair) = (played_s(1, &jobs, step_s), fair_ends_s(1, &jobs));
            let behind = ends.iter().zip(fair).map(|(end, fair)| end - fair);
            let late_s = behind.fold(f64::NEG_INFINITY, f64::max);
            if late_s > worst.0 {
                worst = (late_s, jobs);
            }
        }
        worst
    }

    #[test]
    fn jobs_that_come_to_one_gpu_at_any_time_are_never_later_than_in_equal_parts() {
        // Decided every second, and at events.
        for step_s in [Some(1.0), None] {
            let (late_s, jobs) = latest_s(step_s);
            assert!(late_s <= 1e-6, "{step_s:?}: {late_s} s late: {jobs:?}");
        }
    }

    #[test]
    fn one_gpu_whose_jobs_take_turns_is_never_later_than_in_equal_parts() {
        let mut random = crate::cluster::Random::new(13);
        for _ in 0..200 {
            let mut state = ClusterState::uniform(1, 1);
            let works: Vec<f64> = (0..6).map(|_| 1.0 + random.below(40) as f64).collect();
            let ids: Vec<JobId> = works
                .iter()
                .map(|work| state.arrive(Job::rigid(JobType(0), 1, 0.0, *work)))
                .collect();
            let mut order = Carbyne::new(Some(1.0));
            // In equal parts, a job of work w is done when all have min(own, w).
            let fair = |work: f64| works.iter().map(|other| other.min(work)).sum::<f64>();
            let mut running: Option<JobId> = None;
            while let Some(first) = {
                order.refresh(&state);
                let waiting = state.active();
                waiting
                    .map(|job| job.id)
                    .min_by_key(|id| order.key(&state, state.job(*id)))
            } {
                let mut batch = Vec::new();
                if running != Some(first) {
                    batch.extend(running.map(|job| Decision::Suspend { job }));
                    batch.push(Decision::Place {
                        job: first,
                        gpus: vec![crate::cluster::GpuId(0)],
                        class: crate::Class::Guaranteed,
                        share: 1.0,
                        mem_bytes: None,
                    });
                }
                state.apply(&batch).unwrap();
                state.set_rate(first, 1.0);
                running = Some(first);
                state.advance(state.now_s() + 1.0);
                if state.job(first).left(state.now_s()) < 1e-9 {
                    let at = ids.iter().position(|id| *id == first).unwrap();
                    let fair_s = fair(works[at]);
                    assert!(
                        state.now_s() <= fair_s + 1.0,
                        "{works:?}: {at} for {fair_s}"
                    );
                    state.finish(first);
                    running = None;
                }
            }
        }
    }
}
