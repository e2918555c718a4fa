//! First come, first served, and the orders that know how long a job takes.

use super::{Drift, Key, Order};
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, Job, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static FIFO: Entry<dyn Order> = Registration {
    name: "fifo",
    summary: "by arrival; nothing overtakes the first that does not fit",
    params: &[],
    build: |_, _| Ok(Box::new(Fifo { backfill: false })),
};

/// How it is chosen.
pub(super) static FIFO_BACKFILL: Entry<dyn Order> = Registration {
    name: "fifo-backfill",
    summary: "by arrival; a job that fits may overtake",
    params: &[],
    build: |_, _| Ok(Box::new(Fifo { backfill: true })),
};

/// How it is chosen.
pub(super) static SJF: Entry<dyn Order> = Registration {
    name: "sjf",
    summary: "shortest duration first, without preemption",
    params: &[],
    build: |_, _| Ok(Box::new(Sjf)),
};

/// How it is chosen.
pub(super) static SRTF: Entry<dyn Order> = Registration {
    name: "srtf",
    summary: "shortest remaining time first",
    params: &[],
    build: |_, _| Ok(Box::new(Srtf)),
};

/// How it is chosen.
pub(super) static SRSF: Entry<dyn Order> = Registration {
    name: "srsf",
    summary: "least remaining time x GPUs first",
    params: &[],
    build: |_, _| Ok(Box::new(Srsf)),
};

const COMPLETION: Tags = Tags {
    objectives: &[Objective::Completion],
    manners: &[Manner::Exclusive],
    source: "textbook",
};

/// By arrival, without preemption. Without `backfill` the first job that does not fit blocks all
/// behind it; with it, a job that fits may overtake (backfill without reservations: a large gang
/// may wait for long).
#[derive(Clone, Copy, Debug)]
pub struct Fifo {
    /// Go past what does not fit.
    pub backfill: bool,
}

impl Order for Fifo {
    fn name(&self) -> &'static str {
        if self.backfill {
            "fifo-backfill"
        } else {
            "fifo"
        }
    }
    fn tags(&self) -> Tags {
        COMPLETION
    }
    fn key(&self, _: &ClusterState, job: &Job) -> Key {
        Key::of(job.arrival_s, job)
    }
    fn preemptive(&self) -> bool {
        false
    }
    fn skips(&self) -> bool {
        self.backfill
    }
    fn drift(&self) -> Drift {
        Drift::Never
    }
}

/// Shortest job first: by duration, without preemption; no job overtakes the first that does not
/// fit.
#[derive(Clone, Copy, Debug)]
pub struct Sjf;

impl Order for Sjf {
    fn name(&self) -> &'static str {
        "sjf"
    }
    fn tags(&self) -> Tags {
        COMPLETION
    }
    fn key(&self, _: &ClusterState, job: &Job) -> Key {
        Key::of(job.duration_s(), job)
    }
    fn preemptive(&self) -> bool {
        false
    }
    fn skips(&self) -> bool {
        false
    }
    fn drift(&self) -> Drift {
        Drift::Never
    }
}

/// Shortest remaining time first, preemptive: the best mean completion time on one server, and
/// clairvoyant.
#[derive(Clone, Copy, Debug)]
pub struct Srtf;

impl Order for Srtf {
    fn name(&self) -> &'static str {
        "srtf"
    }
    fn tags(&self) -> Tags {
        COMPLETION
    }
    fn key(&self, state: &ClusterState, job: &Job) -> Key {
        Key::of(job.left_s(state.now_s()), job)
    }
    fn preemptive(&self) -> bool {
        true
    }
    fn skips(&self) -> bool {
        true
    }
    fn drift(&self) -> Drift {
        Drift::Running
    }
}

/// Shortest remaining service first: remaining time x GPUs, so that a large gang counts for what it
/// takes (Tiresias, NSDI'19).
#[derive(Clone, Copy, Debug)]
pub struct Srsf;

impl Order for Srsf {
    fn name(&self) -> &'static str {
        "srsf"
    }
    fn tags(&self) -> Tags {
        Tags {
            source: "Tiresias, NSDI'19",
            ..COMPLETION
        }
    }
    fn key(&self, state: &ClusterState, job: &Job) -> Key {
        Key::of(job.left_s(state.now_s()) * f64::from(job.gpus), job)
    }
    fn preemptive(&self) -> bool {
        true
    }
    fn skips(&self) -> bool {
        true
    }
    fn drift(&self) -> Drift {
        Drift::Running
    }
}
