//! Whether a deadline is promised.

pub mod cells;
mod demand;
mod leases;
mod spot;
mod tenants;

pub use leases::Leases;
pub use spot::{History, SpotQuota};
pub use tenants::Tenants;

use super::catalogue::Entry;
use super::{ClusterState, GpuId, Job, JobId, Tags};

/// Every admission: a new one has a line here and a file of its own.
pub(crate) static ADMISSIONS: &[&Entry<dyn Admission>] = &[
    &leases::LEASES,
    &tenants::CELLS,
    &spot::SPOT_QUOTA,
    &super::sizer::MINIMUM_SHARE_ADMISSION,
];

/// What a job was promised when it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admit {
    /// Its deadline will be kept.
    Accept,
    /// It runs in what others leave.
    BestEffort,
    /// It does not run at all.
    Reject,
}

/// What the jobs of a state were promised.
#[derive(Clone, Debug, Default)]
pub struct Promises(Vec<Option<Admit>>);

impl Promises {
    /// The promise to a job; one that was never asked about counts as best effort.
    #[must_use]
    pub fn of(&self, id: JobId) -> Admit {
        self.known(id).unwrap_or(Admit::BestEffort)
    }

    pub(crate) fn known(&self, id: JobId) -> Option<Admit> {
        self.0.get(id.0 as usize).copied().flatten()
    }

    /// It was asked about, and will never run.
    pub(crate) fn refused(&self, id: JobId) -> bool {
        self.known(id) == Some(Admit::Reject)
    }

    pub(crate) fn set(&mut self, id: JobId, admit: Admit) {
        let at = id.0 as usize;
        if self.0.len() <= at {
            self.0.resize(at + 1, None);
        }
        self.0[at] = Some(admit);
    }
}

/// The slot "is the deadline promised?".
pub trait Admission: Send {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// What it is for.
    fn tags(&self) -> Tags;
    /// What a job that just came is promised.
    fn admit(&mut self, state: &ClusterState, promises: &Promises, job: &Job) -> Admit;
    /// Look around before ranks are asked for: once for each decision.
    fn refresh(&mut self, _state: &ClusterState, _promises: &Promises) {}
    /// In which queue the job stands, before the order's own: the lowest first.
    fn rank(&self, _state: &ClusterState, _promises: &Promises, _job: &Job) -> u32 {
        0
    }
    /// The jobs whose rank may have changed since the last refresh are all active ones; otherwise
    /// ranks never change.
    fn ranks_drift(&self) -> bool {
        false
    }
    /// It may refuse a job for good.
    fn rejects(&self) -> bool {
        false
    }
    /// It binds some jobs to GPUs, as [`Self::gpus`] says.
    fn places(&self) -> bool {
        false
    }
    /// It stops jobs in favour of others, whatever they are promised: only the walk of a preemptive
    /// order does that.
    fn evicts(&self) -> bool {
        false
    }
    /// A waiting job may not start now, whatever is free; as of the last [`Self::refresh`].
    fn holds(&self, _job: &Job) -> bool {
        false
    }
    /// When a job that is held back may start although nothing happened.
    fn asks_again_s(&self) -> Option<f64> {
        None
    }
    /// What it has learnt, taken out of it, for one that is made anew.
    fn history(&mut self) -> Option<History> {
        None
    }
    /// Goes on with what another had learnt.
    fn remember(&mut self, _history: History) {}
    /// The GPUs that a job is bound to: it runs there or not at all.
    fn gpus(&self, _job: JobId) -> Option<&[GpuId]> {
        None
    }
}
