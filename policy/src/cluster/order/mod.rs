//! Who is next: a key for each job, the lowest first.

mod attained;
mod deadline;
mod fair;
mod mlf;
mod resources;
mod shares;
mod simple;

use std::cmp::Ordering;

pub use attained::{Gittins, Las, TwoDLas};
pub use deadline::Edf;
pub use fair::{Tickets, WorstRho};
pub use mlf::{Mlf, Weights as MlfWeights};
pub use resources::Filling;
pub use shares::Carbyne;
pub use simple::{Fifo, Sjf, Srsf, Srtf};

use super::catalogue::Entry;
use super::{ClusterState, Job, Tags};

/// Every order: a new one has a line here and a file of its own.
pub(crate) static ORDERS: &[&Entry<dyn Order>] = &[
    &simple::FIFO,
    &simple::FIFO_BACKFILL,
    &simple::SJF,
    &simple::SRTF,
    &simple::SRSF,
    &attained::LAS,
    &attained::TWO_D_LAS,
    &attained::GITTINS,
    &fair::WORST_RHO,
    &deadline::EDF,
    &mlf::MLF,
    &resources::DRF,
    &resources::HUG,
    &shares::CARBYNE,
    &fair::TICKETS,
];

/// A place in the order. The lowest is first; equal ones by arrival, then by number.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    queue: u32,
    value: f64,
    arrival_s: f64,
}

impl Key {
    /// In this queue, by this value. What is not a number comes last in its queue.
    #[must_use]
    pub fn new(queue: u32, value: f64, job: &Job) -> Self {
        let last = |x: f64| if x.is_nan() { f64::INFINITY } else { x };
        Self {
            queue,
            value: last(value),
            arrival_s: last(job.arrival_s),
        }
    }

    /// The same place in a later queue: an admission's rank comes before an order's.
    #[must_use]
    pub fn behind(mut self, rank: u32) -> Self {
        self.queue = self.queue.saturating_add(rank.saturating_mul(1 << 16));
        self
    }

    /// In the first queue, by this value.
    #[must_use]
    pub fn of(value: f64, job: &Job) -> Self {
        Self::new(0, value, job)
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        self.queue
            .cmp(&other.queue)
            .then(self.value.total_cmp(&other.value))
            .then(self.arrival_s.total_cmp(&other.arrival_s))
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Key {}

/// When a job's key may become another one: what must be asked again before each decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drift {
    /// Only when the job comes, starts or stops.
    Never,
    /// While the job runs.
    Running,
    /// Always, while it waits too.
    Always,
}

/// The slot "who is next?".
pub trait Order: Send {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// What it is for.
    fn tags(&self) -> Tags;
    /// Where a job stands now.
    fn key(&self, state: &ClusterState, job: &Job) -> Key;
    /// It takes GPUs away from a job that stands further back.
    fn preemptive(&self) -> bool;
    /// It goes past a job that does not fit, to one that does.
    fn skips(&self) -> bool;
    /// When keys change.
    fn drift(&self) -> Drift;
    /// Look around before keys are asked for: once for each decision.
    fn refresh(&mut self, _state: &ClusterState) {}
    /// The GPU times of past jobs, where more of them are known now.
    fn learn(&mut self, _past_gpu_s: &[f64]) {}
}
