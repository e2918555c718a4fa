//! Where cores and memory are, too.

use super::{Consolidate, Placer, Regroup};
use crate::PolicyError;
use crate::cluster::catalogue::Entry;
use crate::cluster::host::gain;
use crate::cluster::{ClusterState, FreeGpus, GpuId, Job, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static SYNERGY: Entry<dyn Placer> = Registration {
    name: "synergy",
    summary: "where cores and memory divided by need do most work",
    params: &[],
    build: |_, context| {
        if !context.sensitivity {
            return Err(PolicyError::Needs {
                policy: "synergy",
                what: "to know how jobs depend on cores and memory (`--sensitivity FILE` and `--host` of the simulator; a live hook does not measure it)",
            });
        }
        Ok(Box::new(Synergy))
    },
};

/// Synergy's placement (OSDI'22): of the nodes with space, the one on which the job adds most to
/// the work that is done, its own and its neighbours', when cores and memory are divided by need
/// ([`gain`]); the fullest of equals. A job with unknown sensitivity, or that no node has space
/// for, is consolidated as far as possible.
#[derive(Clone, Copy, Debug)]
pub struct Synergy;

impl Placer for Synergy {
    fn name(&self) -> &'static str {
        "synergy"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Completion, Objective::Utilisation],
            manners: &[Manner::Topology],
            source: "Synergy, OSDI'22",
        }
    }
    fn place(
        &self,
        state: &ClusterState,
        free: &mut FreeGpus,
        job: &Job,
        gpus: u32,
    ) -> Option<Vec<GpuId>> {
        let best = (0..free.nodes())
            .filter(|node| job.host.is_some() && gpus > 0 && free.on(*node) >= gpus)
            .map(|node| (gain(state, node, job, gpus), node))
            .min_by(|a, b| {
                let space = |node: usize| free.on(node);
                b.0.total_cmp(&a.0)
                    .then(space(a.1).cmp(&space(b.1)))
                    .then(a.1.cmp(&b.1))
            });
        let Some((_, node)) = best else {
            return Consolidate { relaxed: true }.place(state, free, job, gpus);
        };
        let mut taken = Vec::with_capacity(gpus as usize);
        free.take_on(node, gpus, &mut taken);
        Some(taken)
    }
    fn regroup(&self) -> Regroup {
        Regroup::LargeFirst
    }
}
