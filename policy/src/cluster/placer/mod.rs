//! Which GPUs a job gets.

mod buddy;
mod consolidate;
mod emptiest;
mod synergy;
mod wait_time;

pub use buddy::Buddy;
pub use consolidate::{Anywhere, Consolidate};
pub use emptiest::Emptiest;
pub use synergy::Synergy;
pub use wait_time::WaitTime;

use super::catalogue::Entry;
use super::{ClusterState, FreeGpus, GpuId, Job, JobId, NodeId, Tags};

/// Every placer: a new one has a line here and a file of its own.
pub(crate) static PLACERS: &[&Entry<dyn Placer>] = &[
    &consolidate::ANYWHERE,
    &consolidate::CONSOLIDATE,
    &consolidate::CONSOLIDATE_RELAXED,
    &emptiest::EMPTIEST,
    &buddy::BUDDY,
    &synergy::SYNERGY,
    &wait_time::WAIT_TIME,
];

/// What becomes of the GPUs of a job whose number of them changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Regroup {
    /// It keeps what it has, as far as it goes: where they are does not matter.
    Keep,
    /// All of them are chosen anew, for small gangs first.
    SmallFirst,
    /// All of them are chosen anew, for large gangs first.
    LargeFirst,
}

/// As many as there are on the node with the most free GPUs, then on the next, until the gang is
/// whole. Of equals the last of `nodes`.
fn spread(
    free: &mut FreeGpus,
    gpus: u32,
    nodes: impl Iterator<Item = usize> + Clone,
) -> Option<Vec<GpuId>> {
    let mut taken = Vec::with_capacity(gpus as usize);
    while (taken.len() as u32) < gpus {
        let missing = gpus - taken.len() as u32;
        let node = nodes.clone().max_by_key(|node| free.on(*node))?;
        free.take_on(node, missing, &mut taken);
    }
    Some(taken)
}

/// The slot "which GPUs?".
pub trait Placer: Send {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// What it is for.
    fn tags(&self) -> Tags;
    /// Take `gpus` of the free ones for a job, or none at all: `None` leaves `free` as it was.
    fn place(
        &self,
        state: &ClusterState,
        free: &mut FreeGpus,
        job: &Job,
        gpus: u32,
    ) -> Option<Vec<GpuId>>;
    /// It weighs itself how long a job would wait for a GPU that somebody else is on.
    fn weighs_waits(&self) -> bool {
        false
    }
    /// The GPUs that a job is bound to: it runs there or nowhere. `None`: anywhere.
    fn bound(&self, _job: JobId) -> Option<Vec<GpuId>> {
        None
    }
    /// Some GPUs are free and yet closed to this job; jobs behind it may take them.
    fn keeps_out(&self, _state: &ClusterState, _job: &Job) -> bool {
        false
    }
    /// All jobs that are bound, with their GPUs. They keep their memory there when they are
    /// stopped.
    fn all_bound(&self) -> Vec<(JobId, Vec<GpuId>)> {
        Vec::new()
    }
    /// How much of the memory of the jobs of one GPU of a node may be in the server's memory, in
    /// bytes.
    fn away_bytes(&self, state: &ClusterState, node: NodeId) -> u64 {
        state.nodes()[node.0 as usize].away_bytes()
    }
    /// How a resized job is placed.
    fn regroup(&self) -> Regroup {
        Regroup::Keep
    }
}
