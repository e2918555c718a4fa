//! Orders that share out several resources, or give leftovers away.

use std::collections::{BTreeMap, HashMap};

use super::{Drift, Key, Order};
use crate::cluster::catalogue::Entry;
use crate::cluster::fair::{equal_parts, hug};
use crate::cluster::{ClusterState, Job, JobId, Manner, Objective, Tags, UserId};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static HUG: Entry<dyn Order> = Registration {
    name: "hug",
    summary: "user with the smallest part of its guarantee and leftovers first",
    params: &[],
    build: |_, _| Ok(Box::<Hug>::default()),
};

/// How it is chosen.
pub(super) static CARBYNE: Entry<dyn Order> = Registration {
    name: "carbyne",
    summary: "jobs at their fair time first; jobs with slack yield to the shortest",
    params: &[],
    build: |_, _| Ok(Box::<Carbyne>::default()),
};

/// What a job of unknown or endless work counts for in a fair cluster: 10 years.
const LONGEST_S: f64 = 315_360_000.0;

/// HUG (NSDI'16) between users, over GPUs and the device memory their profiles claim. Each user's
/// demand vector is what all its jobs ask for; [`hug`] gives each user its part of each resource,
/// guarantee and leftovers. The user with the smallest use of its part is next, and users beyond
/// their part come last.
#[derive(Clone, Debug, Default)]
pub struct Hug {
    /// Of each user: its use over what it may have, at the resource where that is largest.
    parts: HashMap<UserId, f64>,
}

impl Order for Hug {
    fn name(&self) -> &'static str {
        "hug"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Fairness, Objective::Utilisation],
            manners: &[Manner::Exclusive],
            source: "HUG, NSDI'16",
        }
    }
    fn key(&self, _: &ClusterState, job: &Job) -> Key {
        let part = self.parts.get(&job.user).copied().unwrap_or(0.0);
        Key::new(u32::from(part >= 1.0), part, job)
    }
    fn preemptive(&self) -> bool {
        false
    }
    fn skips(&self) -> bool {
        true
    }
    fn drift(&self) -> Drift {
        Drift::Always
    }
    fn refresh(&mut self, state: &ClusterState) {
        let bytes: f64 = state
            .nodes()
            .iter()
            .map(|node| node.gpu_bytes as f64 * f64::from(node.gpus))
            .sum();
        let needs = |job: &Job, gpus: f64| {
            let memory = job.profile.peak_bytes() as f64 * gpus / bytes.max(1.0);
            [gpus / f64::from(state.gpus()), memory]
        };
        let mut users: BTreeMap<UserId, ([f64; 2], [f64; 2])> = BTreeMap::new();
        for job in state.active() {
            let (asked, used) = users.entry(job.user).or_default();
            let run = job.run();
            let holds = run.map_or(0.0, |run| run.gpus.len() as f64 * run.share);
            for (sum, more) in asked.iter_mut().zip(needs(job, f64::from(job.gpus))) {
                *sum += more;
            }
            for (sum, more) in used.iter_mut().zip(needs(job, holds)) {
                *sum += more;
            }
        }
        let demands: Vec<Vec<f64>> = users
            .values()
            .map(|(asked, _)| {
                let most = asked.iter().copied().fold(1e-12, f64::max);
                asked.iter().map(|part| part / most).collect()
            })
            .collect();
        let may = hug(&demands).shares;
        self.parts = users
            .into_iter()
            .zip(may)
            .map(|((user, (_, used)), may)| {
                let parts = used.iter().zip(&may).filter(|(_, may)| **may > 0.0);
                (
                    user,
                    parts.map(|(used, may)| used / may).fold(0.0, f64::max),
                )
            })
            .collect();
    }
}

/// Carbyne (OSDI'16) over a fair schedule of GPUs.
///
/// *Fair.* Beside the cluster runs a fair one in which every job that came has an equal part of the
/// GPUs, at most what it asks for ([`equal_parts`]), until its work is done there. A job that ends
/// early in the cluster still has its part there: others are owed no more than they would have had.
/// A job's fair time is when the rest of its work there is done at its present part.
///
/// *Altruism.* A job needs GPUs now if it would otherwise end after its fair time, or after its
/// deadline where that is later; such jobs come first, the earliest time first. Decisions are taken
/// to be as far apart as the last two.
///
/// *Leftover.* What those do not need goes to the others by shortest remaining time, and past jobs
/// that do not fit.
#[derive(Clone, Debug, Default)]
pub struct Carbyne {
    fair: BTreeMap<JobId, Fair>,
    /// Jobs of the state that came into the fair cluster.
    seen: usize,
    now_s: f64,
    step_s: f64,
}

/// A job in the fair cluster. Its work is seconds on the GPUs it asks for.
#[derive(Clone, Copy, Debug)]
struct Fair {
    gpus: f64,
    left_s: f64,
    /// Seconds of work in a second.
    rate: f64,
}

impl Carbyne {
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

    /// When a job would be done in the fair cluster: now, where it is.
    fn fair_s(&self, id: JobId) -> f64 {
        let left = self.fair.get(&id).map_or(0.0, |job| job.left_s / job.rate);
        self.now_s + left
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
        let fair_s = self.fair_s(job.id);
        let due_s = job
            .deadline_s
            .map_or(fair_s, |deadline| deadline.max(fair_s));
        if state.now_s() + left_s + self.step_s > due_s {
            Key::new(0, due_s, job)
        } else {
            Key::new(1, left_s, job)
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
        self.step_s = (now_s - self.now_s).max(0.0);
        self.advance(gpus, now_s);
        let first = self.seen;
        let come = state.jobs().get(first..).unwrap_or(&[]);
        self.seen = state.jobs().len();
        let come = come.iter().filter(|job| !job.is_done());
        self.fair.extend(come.map(|job| {
            let fair = Fair {
                gpus: f64::from(job.gpus.max(1)),
                left_s: job.left_s(now_s).min(LONGEST_S),
                rate: 0.0,
            };
            (job.id, fair)
        }));
        self.divide(gpus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Decision, JobType};

    #[test]
    fn a_user_beyond_its_share_comes_last() {
        let mut state = ClusterState::uniform(4, 4);
        let come = |state: &mut ClusterState, user, gpus| {
            let mut job = Job::rigid(JobType(0), gpus, 0.0, 10.0);
            job.user = UserId(user);
            state.arrive(job)
        };
        let greedy = come(&mut state, 0, 3);
        let (more, other) = (come(&mut state, 0, 1), come(&mut state, 1, 1));
        let place = Decision::Place {
            job: greedy,
            gpus: (0..3).map(crate::cluster::GpuId).collect(),
            class: crate::Class::Guaranteed,
            share: 1.0,
            mem_bytes: None,
        };
        state.apply(&[place]).unwrap();
        let mut order = Hug::default();
        order.refresh(&state);
        let key = |id| order.key(&state, state.job(id));
        assert!(
            key(other) < key(more),
            "three of four GPUs are more than a half"
        );
    }

    #[test]
    fn who_has_time_gives_way_until_its_time_has_come() {
        let mut state = ClusterState::uniform(1, 1);
        let long = state.arrive(Job::rigid(JobType(0), 1, 0.0, 100.0));
        let short = state.arrive(Job::rigid(JobType(0), 1, 0.0, 10.0));
        let mut order = Carbyne::default();
        order.refresh(&state);
        // Two jobs on one GPU: half of it each, and the short one's fair time is 20 s.
        assert!((order.fair_s(short) - 20.0).abs() < 1e-9);
        assert!(order.key(&state, state.job(short)) < order.key(&state, state.job(long)));
        // The short one runs first, and is done at 10 s; it still has its part until 20 s.
        state.advance(10.0);
        state.finish(short);
        order.refresh(&state);
        assert!((order.fair_s(long) - (10.0 + 95.0 / 0.5)).abs() < 1e-9);
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
        let mut order = Carbyne::default();
        order.refresh(&state);
        state.advance(60.0);
        order.refresh(&state);
        // Alone it would have 40 s left. One that comes now has 5 s, and 10 s for them.
        let short = state.arrive(Job::rigid(JobType(0), 1, 60.0, 5.0));
        order.refresh(&state);
        let key = |id| order.key(&state, state.job(id));
        assert!(key(long) < key(short));
        // With a deadline later than its fair time it waits.
        state.job_mut(long).deadline_s = Some(1000.0);
        let key = |id| order.key(&state, state.job(id));
        assert!(key(short) < key(long));
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
            let mut order = Carbyne::default();
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
