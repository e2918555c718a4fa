//! Orders that divide time: finish-time fairness, tickets.

use std::collections::HashMap;

use super::{Drift, Key, Order};
use crate::cluster::catalogue::Entry;
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
