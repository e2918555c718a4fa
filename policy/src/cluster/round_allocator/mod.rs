//! Which jobs run where in this round, when one program decides order, types of GPU and pairs at
//! once.

mod gavel;
mod trades;

pub use gavel::{Gavel, Goal, LEAST_CONFIDENCE};
pub use trades::Trades;

use std::collections::BTreeSet;
use std::sync::Arc;

use super::catalogue::Entry;
use super::{ClusterState, GpuType, Job, JobId, PairTable, Tags};

/// Every round allocator: a new one has a line here and a file of its own.
pub(crate) static ROUND_ALLOCATORS: &[&Entry<dyn RoundAllocator>] = &[
    &gavel::MAX_MIN,
    &gavel::FINISH_TIME,
    &gavel::MAKESPAN,
    &trades::TRADES,
];

/// A gang of GPUs of one type for one round: for one job, or for two that share them, both with the
/// same number of GPUs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Turn {
    /// One or two jobs.
    pub jobs: Vec<JobId>,
    /// On GPUs of this type.
    pub kind: GpuType,
}

/// The slot "who runs where in this round?". It stands in for order, packer and sizer; the placer
/// still says which GPUs.
pub trait RoundAllocator: Send {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// What it is for.
    fn tags(&self) -> Tags;
    /// The turns of this round, the most important first: each job in one at most, and no more GPUs
    /// of a type than exist.
    fn turns(&mut self, state: &ClusterState) -> Vec<Turn>;
    /// Speeds of jobs by type of GPU are others now, or those of pairs; `pairs`: all that are
    /// known.
    fn learn(&mut self, _pairs: Option<&Arc<PairTable>>) {}
}

/// These turns, and after them solo turns by arrival on GPUs that they leave.
#[must_use]
pub fn filled(state: &ClusterState, mut turns: Vec<Turn>) -> Vec<Turn> {
    let mut left = Left::all(state);
    turns.retain(|turn| {
        let first = turn.jobs.first().map(|id| state.job(*id));
        first.is_some_and(|job| left.take(turn.kind, job.gpus))
    });
    let has: BTreeSet<JobId> = turns.iter().flat_map(|turn| turn.jobs.clone()).collect();
    let rest = state.active().filter(|job| !has.contains(&job.id));
    fill(rest.collect(), &mut left, &mut turns);
    turns
}

/// GPUs left of each type while turns are handed out.
struct Left(Vec<u32>);

impl Left {
    fn all(state: &ClusterState) -> Self {
        let mut left = Vec::new();
        for node in state.nodes() {
            let at = usize::from(node.kind.0);
            left.resize(left.len().max(at + 1), 0);
            left[at] += node.gpus;
        }
        Self(left)
    }

    fn has(&self, kind: GpuType, gpus: u32) -> bool {
        let left = self.0.get(usize::from(kind.0));
        left.is_some_and(|left| *left >= gpus)
    }

    fn take(&mut self, kind: GpuType, gpus: u32) -> bool {
        let fits = self.has(kind, gpus);
        if fits {
            self.0[usize::from(kind.0)] -= gpus;
        }
        fits
    }
}

/// What is left goes to these jobs by arrival, each on the type where it is fastest.
fn fill(mut rest: Vec<&Job>, left: &mut Left, turns: &mut Vec<Turn>) {
    rest.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s).then(a.id.cmp(&b.id)));
    for job in rest {
        let mut kinds: Vec<GpuType> = (0..left.0.len()).map(|k| GpuType(k as u16)).collect();
        let speed = |kind: &GpuType| job.rate_on(job.gpus, *kind);
        kinds.retain(|kind| speed(kind) > 0.0);
        kinds.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
        if let Some(kind) = kinds.into_iter().find(|kind| left.take(*kind, job.gpus)) {
            let jobs = vec![job.id];
            turns.push(Turn { jobs, kind });
        }
    }
}
