//! Which GPUs a job gets.

mod buddy;
mod consolidate;

pub use buddy::Buddy;
pub use consolidate::{Anywhere, Consolidate};

use super::{ClusterState, FreeGpus, GpuId, Job, Tags};

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
}
