//! Who runs where in this round, where one program answers for all: order, types of GPU and pairs at once.

mod gavel;

pub use gavel::{Gavel, Goal};

use super::{ClusterState, GpuType, JobId, Tags};

/// A gang of GPUs of one type for one round: for a job alone, or for two that share them, both with the same number of GPUs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Turn {
    /// One or two jobs.
    pub jobs: Vec<JobId>,
    /// On GPUs of this type.
    pub kind: GpuType,
}

/// The slot "who runs where in this round?". It stands in for order, packer and sizer; the placer still says which GPUs.
pub trait Divider: Send {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// What it is for.
    fn tags(&self) -> Tags;
    /// The turns of this round, the most important first: each job in one at most, no more GPUs of a type than there are.
    fn turns(&mut self, state: &ClusterState) -> Vec<Turn>;
}
