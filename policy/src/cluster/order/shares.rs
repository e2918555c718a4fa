//! Orders that share out several resources, or give leftovers away.

use std::collections::{BTreeMap, HashMap};

use super::{Drf, Drift, Key, Order};
use crate::cluster::catalogue::Entry;
use crate::cluster::fair::hug;
use crate::cluster::{ClusterState, Job, Manner, Objective, Tags, UserId};
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

/// Carbyne (OSDI'16) over dominant resource fairness: a job that can wait and still end by its fair
/// time gives its turn away, to the job with the shortest remaining time. The fair time of a job is
/// its duration in an evenly divided cluster, after its arrival; a job whose finish-time fairness
/// has reached 1 has nothing more to give and comes first, in the order of [`Drf`]. A job with a
/// deadline after its fair time can wait until its deadline.
#[derive(Clone, Debug, Default)]
pub struct Carbyne {
    fair: Drf,
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
        let (now_s, left_s) = (state.now_s(), job.left_s(state.now_s()));
        let fair_s = job.arrival_s + job.duration_s() * state.contention(job);
        let due_s = job
            .deadline_s
            .map_or(fair_s, |deadline| deadline.max(fair_s));
        if now_s + left_s >= due_s {
            self.fair.key(state, job)
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
        self.fair.refresh(state);
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
        let order = Carbyne::default();
        // Two jobs on one GPU: the long one's fair time is 200 s.
        assert!(order.key(&state, state.job(short)) < order.key(&state, state.job(long)));
        state.advance(150.0);
        let (short, long) = (state.job(short), state.job(long));
        let waits = order.key(&state, long);
        assert!(
            waits.cmp(&Key::new(1, 0.0, long)).is_lt(),
            "100 s left until 200 s"
        );
        assert!(
            order
                .key(&state, short)
                .cmp(&Key::new(1, 0.0, short))
                .is_lt()
        );
    }
}
