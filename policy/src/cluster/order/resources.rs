//! Orders that share out GPUs and device memory between users, job by job.

use std::collections::{BTreeMap, HashMap};

use super::{Drift, Key, Order};
use crate::cluster::catalogue::Entry;
use crate::cluster::fair::{fill, hug};
use crate::cluster::{ClusterState, Job, JobId, Manner, Objective, Tags, UserId};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static DRF: Entry<dyn Order> = Registration {
    name: "drf",
    summary: "job by job to the user with the smallest dominant share",
    params: &[],
    build: |_, _| Ok(Box::new(Filling::drf())),
};

/// How it is chosen.
pub(super) static HUG: Entry<dyn Order> = Registration {
    name: "hug",
    summary: "job by job to the user with the smallest part of its guarantee and leftovers",
    params: &[],
    build: |_, _| Ok(Box::new(Filling::hug())),
};

/// What each user may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum May {
    /// All there is: users are compared by their dominant shares.
    Everything,
    /// Its part by HUG, guarantee and leftovers.
    ItsPart,
}

/// Progressive filling between users, as [`fair::fill`](fill) does it: from what each user's
/// running jobs hold, the next job is one of the user with the smallest part of what it may have,
/// and counts for that user at once. The resources of a job are GPUs and the device memory its
/// profile claims. A user's own jobs follow each other by arrival.
///
/// *Dominant resource fairness* (NSDI'11): everybody may have everything.
///
/// *HUG* (NSDI'16): a user's demand vector is what all its jobs ask for, and [`hug`] says what it
/// may have of each resource. Users that have as much as that come after all others.
#[derive(Clone, Debug)]
pub struct Filling {
    may: May,
    /// The place of each waiting job in the filling.
    turns: HashMap<JobId, u32>,
}

/// What a user's jobs ask for, what those that run hold, and those that wait.
struct Asks<'a> {
    all: Vec<f64>,
    holds: Vec<f64>,
    waiting: Vec<&'a Job>,
}

impl Filling {
    /// Dominant resource fairness.
    #[must_use]
    pub fn drf() -> Self {
        Self {
            may: May::Everything,
            turns: HashMap::new(),
        }
    }

    /// HUG.
    #[must_use]
    pub fn hug() -> Self {
        Self {
            may: May::ItsPart,
            turns: HashMap::new(),
        }
    }
}

impl Order for Filling {
    fn name(&self) -> &'static str {
        match self.may {
            May::Everything => "drf",
            May::ItsPart => "hug",
        }
    }
    fn tags(&self) -> Tags {
        let (objectives, source): (&'static [Objective], _) = match self.may {
            May::Everything => (&[Objective::Fairness], "DRF, NSDI'11"),
            May::ItsPart => (
                &[Objective::Fairness, Objective::Utilisation],
                "HUG, NSDI'16",
            ),
        };
        Tags {
            objectives,
            manners: &[Manner::Exclusive],
            source,
        }
    }
    fn key(&self, _: &ClusterState, job: &Job) -> Key {
        // A job that runs has had its turn.
        Key::of(
            self.turns.get(&job.id).map_or(0.0, |turn| f64::from(*turn)),
            job,
        )
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
        let all = vec![f64::from(state.gpus()), bytes];
        let needs = |job: &Job, gpus: f64| vec![gpus, job.profile.peak_bytes() as f64 * gpus];
        let add = |sum: &mut Vec<f64>, more: Vec<f64>| {
            sum.iter_mut()
                .zip(more)
                .for_each(|(sum, more)| *sum += more);
        };
        let mut users: BTreeMap<UserId, Asks> = BTreeMap::new();
        for job in state.active() {
            let user = users.entry(job.user).or_insert_with(|| Asks {
                all: vec![0.0; 2],
                holds: vec![0.0; 2],
                waiting: Vec::new(),
            });
            add(&mut user.all, needs(job, f64::from(job.gpus)));
            match job.run() {
                Some(run) => {
                    let gpus = run.gpus.len() as f64 * run.share;
                    add(&mut user.holds, needs(job, gpus));
                }
                None => user.waiting.push(job),
            }
        }
        let (mut may, mut used, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
        for mut user in users.into_values() {
            // The first one last.
            let jobs = &mut user.waiting;
            jobs.sort_by(|a, b| b.arrival_s.total_cmp(&a.arrival_s).then(b.id.cmp(&a.id)));
            may.push(user.all);
            used.push(user.holds);
            waiting.push(user.waiting);
        }
        match self.may {
            May::Everything => may.fill(all),
            May::ItsPart => {
                for asked in &mut may {
                    // Parts of what there is, relative to the largest of them.
                    let parts = asked.iter_mut().zip(&all);
                    parts.for_each(|(asked, all)| *asked /= all.max(1.0));
                    let most = asked.iter().copied().fold(1e-12, f64::max);
                    asked.iter_mut().for_each(|part| *part /= most);
                }
                may = hug(&may).shares;
                for may in &mut may {
                    may.iter_mut().zip(&all).for_each(|(may, all)| *may *= all);
                }
            }
        }
        self.turns.clear();
        fill(&may, used, |user| {
            let job = waiting[user].pop()?;
            self.turns.insert(job.id, self.turns.len() as u32);
            Some(needs(job, f64::from(job.gpus)))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::fair::drf;
    use crate::cluster::{Decision, GpuId, JobType, Random};

    fn keys(state: &ClusterState, mut order: Filling) -> Vec<UserId> {
        order.refresh(state);
        let mut waiting: Vec<&Job> = state.waiting().iter().map(|id| state.job(*id)).collect();
        waiting.sort_by_key(|job| (order.key(state, job), job.id));
        waiting.iter().map(|job| job.user).collect()
    }

    fn come(state: &mut ClusterState, user: u32, gpus: u32, gpu_bytes: u64) -> JobId {
        let mut job = Job::rigid(JobType(0), gpus, 0.0, 10.0);
        job.user = UserId(user);
        job.profile.persistent_bytes = gpu_bytes;
        state.arrive(job)
    }

    #[test]
    fn users_take_turns_within_one_decision() {
        let mut state = ClusterState::uniform(8, 8);
        for user in [0, 0, 0, 1, 1, 2] {
            come(&mut state, user, 1, 0);
        }
        let users: Vec<u32> = keys(&state, Filling::drf())
            .iter()
            .map(|user| user.0)
            .collect();
        assert_eq!(users, [0, 1, 2, 0, 1, 0]);
        // Who holds two GPUs is next when the others have as many.
        let held = come(&mut state, 1, 2, 0);
        let place = Decision::Place {
            job: held,
            gpus: vec![GpuId(0), GpuId(1)],
            class: crate::Class::Guaranteed,
            share: 1.0,
            mem_bytes: None,
        };
        state.apply(&[place]).unwrap();
        let users: Vec<u32> = keys(&state, Filling::drf())
            .iter()
            .map(|user| user.0)
            .collect();
        assert_eq!(users, [0, 2, 0, 0, 1, 1]);
    }

    #[test]
    fn a_cluster_is_filled_as_the_function_of_the_paper_fills_it() {
        let mut random = Random::new(21);
        for _ in 0..50 {
            let gpus = 16 + random.below(32) as u32;
            let mut state = ClusterState::uniform(gpus, 8);
            let all: f64 = state
                .nodes()
                .iter()
                .map(|n| n.gpu_bytes as f64 * f64::from(n.gpus))
                .sum();
            // Each user has more equal jobs than fit.
            let jobs: Vec<(u32, u64)> = (0..3)
                .map(|_| (1 + random.below(4) as u32, (random.below(16) as u64) << 30))
                .collect();
            for (user, (gpus, bytes)) in jobs.iter().enumerate() {
                for _ in 0..48 {
                    come(&mut state, user as u32, *gpus, *bytes);
                }
            }
            let demands: Vec<Vec<f64>> = (jobs.iter())
                .map(|(gpus, bytes)| vec![f64::from(*gpus), f64::from(*gpus) * *bytes as f64])
                .collect();
            let tasks = drf(&[f64::from(gpus), all], &demands);
            // The first of the order that fit, a user's first misfit ending its turn.
            let (mut left, mut got, mut over) = ([f64::from(gpus), all], [0; 3], [false; 3]);
            for user in keys(&state, Filling::drf()) {
                let (user, need) = (user.0 as usize, &demands[user.0 as usize]);
                over[user] |= need
                    .iter()
                    .zip(left)
                    .any(|(need, left)| *need > left + 1e-9);
                if !over[user] {
                    left.iter_mut()
                        .zip(need)
                        .for_each(|(left, need)| *left -= need);
                    got[user] += 1;
                }
            }
            assert_eq!(got.to_vec(), tasks);
        }
    }

    /// The first of the order that fit, a user's first misfit ending its turn: jobs of each of two
    /// users, and what is left of GPUs and memory.
    fn filled(state: &ClusterState, order: Filling, needs: [[f64; 2]; 2]) -> ([u32; 2], [f64; 2]) {
        let bytes = state
            .nodes()
            .iter()
            .map(|n| n.gpu_bytes as f64 * f64::from(n.gpus));
        let mut left = [f64::from(state.gpus()), bytes.sum()];
        let (mut got, mut over) = ([0; 2], [false; 2]);
        for user in keys(state, order) {
            let user = user.0 as usize;
            let need = needs[user];
            over[user] |= need
                .iter()
                .zip(left)
                .any(|(need, left)| *need > left + 1e-3);
            if !over[user] {
                left.iter_mut()
                    .zip(need)
                    .for_each(|(left, need)| *left -= need);
                got[user] += 1;
            }
        }
        (got, left)
    }

    #[test]
    fn hug_fills_a_cluster_with_the_parts_of_the_papers_figure() {
        // Demands of (1/2, 1) and (1, 1/6) of GPUs and memory: HUG gives (1/3, 2/3) and (2/3, 1/3).
        let mut state = ClusterState::uniform(36, 6);
        let gpu_bytes = state.nodes()[0].gpu_bytes;
        let bytes = [2 * gpu_bytes, gpu_bytes / 6];
        for (user, bytes) in [(0, bytes[0]), (1, bytes[1])] {
            for _ in 0..36 {
                come(&mut state, user, 1, bytes);
            }
        }
        let needs = bytes.map(|bytes| [1.0, bytes as f64]);
        let (jobs, left) = filled(&state, Filling::hug(), needs);
        // In one decision, although the first user's jobs all came before the other's.
        assert_eq!(jobs, [12, 24], "1/3 and 2/3 of the GPUs");
        assert!(left[0].abs() < 1e-9);
        let all = 36.0 * gpu_bytes as f64;
        assert!(
            (12.0 * needs[0][1] / all - 2.0 / 3.0).abs() < 1e-6,
            "of the memory"
        );
    }

    #[test]
    fn who_has_its_part_comes_last_although_its_dominant_share_is_smaller() {
        let mut state = ClusterState::uniform(36, 6);
        let gpu_bytes = state.nodes()[0].gpu_bytes;
        for user in [0, 1] {
            let bytes = [2 * gpu_bytes, gpu_bytes / 6][user as usize];
            for _ in 0..36 {
                come(&mut state, user, 1, bytes);
            }
        }
        let place = |state: &mut ClusterState, job: JobId, from: u32, gpus: u32| {
            let place = Decision::Place {
                job,
                gpus: (from..from + gpus).map(GpuId).collect(),
                class: crate::Class::Guaranteed,
                share: 1.0,
                mem_bytes: None,
            };
            state.apply(&[place]).unwrap();
        };
        // Of the GPUs, 0.31 in place of 0.40 that it may have, and 0.42 in place of 0.60.
        let held = [(0, 11, 0), (1, 15, 11)];
        for (user, gpus, from) in held {
            let job = come(&mut state, user, gpus, 0);
            place(&mut state, job, from, gpus);
        }
        assert_eq!(keys(&state, Filling::drf())[0], UserId(0));
        assert_eq!(keys(&state, Filling::hug())[0], UserId(1));
    }

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
        let mut order = Filling::hug();
        order.refresh(&state);
        let key = |id| order.key(&state, state.job(id));
        assert!(
            key(other) < key(more),
            "three of four GPUs are more than a half"
        );
    }
}
