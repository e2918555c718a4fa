//! Orders that divide: finish-time fairness, dominant shares, tickets.

use std::collections::{BTreeMap, HashMap};

use super::{Drift, Key, Order};
use crate::cluster::catalogue::Entry;
use crate::cluster::fair::fill;
use crate::cluster::{ClusterState, Job, JobId, Manner, Objective, Tags, UserId};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static WORST_RHO: Entry<dyn Order> = Registration {
    name: "worst-rho",
    summary: "worst finish-time fairness first",
    params: &[ParamSpec {
        name: "filter",
        summary: "part of the jobs that stands behind the others, by remaining time",
        kind: Kind::Number {
            min: 0.0,
            max: 1.0,
            default: 0.0,
        },
    }],
    build: |settings, _| Ok(Box::new(WorstRho::new(settings.number("filter")))),
};

/// How it is chosen.
pub(super) static DRF: Entry<dyn Order> = Registration {
    name: "drf",
    summary: "job by job to the user with the smallest dominant share",
    params: &[],
    build: |_, _| Ok(Box::<Drf>::default()),
};

/// How it is chosen.
pub(super) static TICKETS: Entry<dyn Order> = Registration {
    name: "tickets",
    summary: "users by stride over GPU time, one ticket each",
    params: &[],
    build: |_, _| Ok(Box::<Tickets>::default()),
};

const fn fair(source: &'static str) -> Tags {
    Tags {
        objectives: &[Objective::Fairness],
        manners: &[Manner::Exclusive],
        source,
    }
}

/// Themis' goal without its auction: the worst finish-time fairness first.
///
/// rho = time in the shared cluster / time in an evenly divided one (see [`ClusterState::rho`]).
/// Themis (NSDI'20) leases GPUs and offers each expired lease to the fraction 1 - f of applications
/// with the worst rho, which bid for it; here that fraction comes first, by rho, and the others
/// follow by remaining time. f = 0 orders all jobs by rho.
#[derive(Clone, Debug)]
pub struct WorstRho {
    filter: f64,
    threshold: f64,
}

impl WorstRho {
    /// `filter` is Themis' f, between 0 and 1.
    #[must_use]
    pub fn new(filter: f64) -> Self {
        Self {
            filter: filter.clamp(0.0, 1.0),
            threshold: 0.0,
        }
    }
}

impl Order for WorstRho {
    fn name(&self) -> &'static str {
        "worst-rho"
    }
    fn tags(&self) -> Tags {
        fair("Themis, NSDI'20")
    }
    fn key(&self, state: &ClusterState, job: &Job) -> Key {
        let rho = state.rho(job);
        if rho >= self.threshold {
            Key::new(0, -rho, job)
        } else {
            Key::new(1, job.left_s(state.now_s()), job)
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
        self.threshold = 0.0;
        if self.filter > 0.0 {
            let mut all: Vec<f64> = state.active().map(|job| state.rho(job)).collect();
            all.sort_by(f64::total_cmp);
            let at = (self.filter * all.len() as f64) as usize;
            self.threshold = all.get(at).copied().unwrap_or(f64::INFINITY);
        }
    }
}

/// Dominant resource fairness (NSDI'11) between users by progressive filling, as
/// [`fair::fill`](fill) does it: from what each user's running jobs hold, the next job is one of
/// the user whose largest share of any resource is smallest, and counts for that user at once. The
/// resources of a job are GPUs and the device memory its profile claims. A user's own jobs follow
/// each other by arrival.
#[derive(Clone, Debug, Default)]
pub struct Drf {
    /// The place of each waiting job in the filling.
    turns: HashMap<JobId, u32>,
}

impl Order for Drf {
    fn name(&self) -> &'static str {
        "drf"
    }
    fn tags(&self) -> Tags {
        fair("DRF, NSDI'11")
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
        let needs = |job: &Job, gpus: f64| vec![gpus, job.profile.peak_bytes() as f64 * gpus];
        // By user: what its running jobs hold, and its waiting jobs, the first one last.
        let mut users: BTreeMap<UserId, (Vec<f64>, Vec<&Job>)> = BTreeMap::new();
        let of = |user| (user, (vec![0.0; 2], Vec::new()));
        users.extend(state.active().map(|job| of(job.user)));
        for id in state.running() {
            let job = state.job(*id);
            let run = job.run();
            let gpus = run.map_or(0.0, |run| run.gpus.len() as f64 * run.share);
            if let Some((used, _)) = users.get_mut(&job.user) {
                used.iter_mut()
                    .zip(needs(job, gpus))
                    .for_each(|(used, more)| *used += more);
            }
        }
        for id in state.waiting() {
            let job = state.job(*id);
            if let Some((_, waiting)) = users.get_mut(&job.user) {
                waiting.push(job);
            }
        }
        let (used, mut waiting): (Vec<_>, Vec<_>) = users.into_values().unzip();
        for jobs in &mut waiting {
            jobs.sort_by(|a, b| b.arrival_s.total_cmp(&a.arrival_s).then(b.id.cmp(&a.id)));
        }
        self.turns.clear();
        fill(&[f64::from(state.gpus()), bytes], used, |user| {
            let job = waiting[user].pop()?;
            self.turns.insert(job.id, self.turns.len() as u32);
            Some(needs(job, f64::from(job.gpus)))
        });
    }
}

/// Gandiva-fair (EuroSys'20): users hold tickets, and GPU time is handed out by gang-aware stride.
/// A user's pass is the GPU time its jobs have held over its tickets; the lowest pass is next, and
/// a gang that does not fit keeps its place. A user that comes, or comes back, starts at the lowest
/// pass of the present users.
#[derive(Clone, Debug, Default)]
pub struct Tickets {
    tickets: HashMap<UserId, f64>,
    pass: HashMap<UserId, f64>,
    seen_gpu_s: HashMap<JobId, f64>,
    active: HashMap<UserId, usize>,
}

impl Tickets {
    /// Users that are not named hold one ticket.
    #[must_use]
    pub fn new(tickets: HashMap<UserId, f64>) -> Self {
        Self {
            tickets,
            ..Self::default()
        }
    }
}

impl Order for Tickets {
    fn name(&self) -> &'static str {
        "tickets"
    }
    fn tags(&self) -> Tags {
        fair("Gandiva-fair, EuroSys'20")
    }
    fn key(&self, _: &ClusterState, job: &Job) -> Key {
        Key::of(self.pass.get(&job.user).copied().unwrap_or(0.0), job)
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
        let now_s = state.now_s();
        let mut active: HashMap<UserId, usize> = HashMap::new();
        let mut held: HashMap<UserId, f64> = HashMap::new();
        for job in state.active() {
            *active.entry(job.user).or_default() += 1;
            let service = job.service_gpu_s(now_s);
            let before = self.seen_gpu_s.insert(job.id, service).unwrap_or(0.0);
            *held.entry(job.user).or_default() += service - before;
        }
        for (user, gpu_s) in held {
            let tickets = self.tickets.get(&user).copied().unwrap_or(1.0).max(1e-9);
            *self.pass.entry(user).or_default() += gpu_s / tickets;
        }
        let floor = active
            .keys()
            .filter(|user| self.active.contains_key(user))
            .filter_map(|user| self.pass.get(user))
            .copied()
            .min_by(f64::total_cmp)
            .unwrap_or(0.0);
        for user in active.keys().filter(|user| !self.active.contains_key(user)) {
            let pass = self.pass.entry(*user).or_default();
            *pass = pass.max(floor);
        }
        self.active = active;
        self.seen_gpu_s.retain(|id, _| !state.job(*id).is_done());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::fair::drf;
    use crate::cluster::{Decision, GpuId, JobType, Random};

    fn keys(state: &ClusterState) -> Vec<UserId> {
        let mut order = Drf::default();
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
        let users: Vec<u32> = keys(&state).iter().map(|user| user.0).collect();
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
        let users: Vec<u32> = keys(&state).iter().map(|user| user.0).collect();
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
            for user in keys(&state) {
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
}
