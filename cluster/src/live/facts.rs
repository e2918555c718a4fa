//! What is known of a live cluster beside its state: the hook writes it, and what stands between
//! the policies and the cluster ([`super::adapt`], [`super::rounds`]) reads it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use policy::cluster::{GpuId, GpuType, JobId, JobType, NodeId, Reason};

/// A kind of job with its number of GPUs, on a type of GPU.
pub type Unsure = (JobType, u32, GpuType);

/// What is known beside the state.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// GPUs of nodes that do not report.
    pub down: BTreeSet<GpuId>,
    /// GPUs that would have to be waited for, because somebody who is not ours is on them.
    pub busy: BTreeSet<GpuId>,
    /// Jobs that may only run where they are.
    pub pinned: BTreeMap<JobId, Vec<GpuId>>,
    /// Memory of a GPU of each type.
    pub gpu_bytes: BTreeMap<GpuType, u64>,
    /// How much of the memory of the jobs of one GPU of a node may be in the memory of its machine,
    /// as its arbiter says. None: it moves nothing for this hook.
    pub away_bytes: BTreeMap<NodeId, u64>,
    /// Kinds of job whose speed on a type of GPU is not known well enough.
    pub unsure: BTreeSet<Unsure>,
    /// Pairs of kinds (host first), with their number of GPUs, that were bad on a node by its own
    /// figures.
    pub barred: BTreeMap<(NodeId, u32, [JobType; 2]), Reason>,
    /// The same of three jobs or more, by their kinds in order.
    pub barred_several: BTreeMap<(NodeId, u32, Vec<JobType>), Reason>,
    /// Length of a round, in seconds.
    pub round_s: f64,
    /// When the present round ends, on the state's clock.
    pub round_ends_s: f64,
}

/// Facts that the hook writes and the policies' shells read, all on one thread at a time.
#[derive(Clone, Debug, Default)]
pub struct Shared(Arc<Mutex<Facts>>);

impl Shared {
    /// To read or write.
    pub fn facts(&self) -> MutexGuard<'_, Facts> {
        // A panic in between leaves facts that the next step writes anew.
        self.0.lock()
    }
}
