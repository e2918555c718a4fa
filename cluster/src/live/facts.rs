//! What is known of a live cluster beside its state: the hook writes it, and what stands between
//! the policies and the cluster ([`super::adapt`], [`super::rounds`]) reads it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use policy::cluster::{ClusterState, GpuId, GpuType, Job, JobId, JobType, Node, NodeId, Reason};

/// A kind of job with its number of GPUs, on a type of GPU.
pub type Unsure = (JobType, u32, GpuType);

/// What is known beside the state.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// GPUs of nodes that do not report.
    pub down: BTreeSet<GpuId>,
    /// GPUs of nodes on which starts fail: jobs that run there stay, and nothing is started.
    pub shut: BTreeSet<GpuId>,
    /// GPUs of such nodes that are due to be tried with one job.
    pub trying: BTreeSet<GpuId>,
    /// Nodes where starts of a job failed, and until when it goes elsewhere if it can, on the
    /// state's clock.
    pub avoided: BTreeMap<JobId, (f64, Vec<NodeId>)>,
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

impl Facts {
    /// GPUs of nodes where a job's starts failed, as long as another node could take it.
    pub fn avoids(&self, state: &ClusterState, job: &Job) -> Vec<GpuId> {
        let of_job = self.avoided.get(&job.id);
        let of_job = of_job.filter(|(until_s, _)| state.now_s() < *until_s);
        let nodes = of_job.map_or(&[][..], |(_, nodes)| nodes);
        let is_another = |(at, node): (usize, &Node)| {
            let first = node.first;
            let hidden = self.down.contains(&first) || self.shut.contains(&first);
            // CAST: a place in the list of nodes.
            let own = nodes.contains(&NodeId(at as u32));
            let bytes = job.profile.persistent_bytes;
            let fits = node.gpus >= job.gpus && (node.gpu_bytes == 0 || bytes <= node.gpu_bytes);
            !hidden && !own && fits
        };
        if nodes.is_empty() || !state.nodes().iter().enumerate().any(is_another) {
            return Vec::new();
        }
        let own = nodes
            .iter()
            .filter_map(|node| state.nodes().get(node.0 as usize));
        own.flat_map(|node| (node.first.0..node.first.0 + node.gpus).map(GpuId))
            .collect()
    }

    /// Whether a job that is not on these GPUs may not be started there: their node takes no
    /// starts, or is one where its own failed.
    pub fn keeps_out(&self, state: &ClusterState, gpus: &[GpuId], job: &Job) -> bool {
        let here = |own: &[GpuId]| own.iter().any(|gpu| gpus.contains(gpu));
        let runs = job.run().is_some_and(|run| here(&run.gpus));
        if runs || self.pinned.get(&job.id).is_some_and(|own| here(own)) {
            return false;
        }
        let avoided = self.avoids(state, job);
        let mut gpus = gpus.iter();
        gpus.any(|gpu| self.shut.contains(gpu) || avoided.contains(gpu))
    }
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
