//! The emptiest node first.

use super::{Placer, Regroup, spread};
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, FreeGpus, GpuId, Job, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static EMPTIEST: Entry<dyn Placer> = Registration {
    name: "emptiest",
    summary: "on the emptiest nodes",
    params: &[],
    build: |_, _| Ok(Box::new(Emptiest)),
};

/// As many as there are on the node with the most free GPUs, then on the next, until the gang is
/// whole (worst fit). The schedulers that Pollux (OSDI'21) is compared with place like this: large
/// gangs find whole nodes, small ones spread out.
#[derive(Clone, Copy, Debug)]
pub struct Emptiest;

impl Placer for Emptiest {
    fn name(&self) -> &'static str {
        "emptiest"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Utilisation],
            manners: &[Manner::Topology],
            source: "textbook",
        }
    }
    fn place(
        &self,
        _: &ClusterState,
        free: &mut FreeGpus,
        _: &Job,
        gpus: u32,
    ) -> Option<Vec<GpuId>> {
        if free.total() < gpus {
            return None;
        }
        // The first of equals.
        let nodes = (0..free.nodes()).rev();
        spread(free, gpus, nodes)
    }
    fn regroup(&self) -> Regroup {
        Regroup::SmallFirst
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::JobType;

    #[test]
    fn a_gang_takes_whole_nodes_and_a_single_gpu_the_emptiest() {
        let state = ClusterState::uniform(12, 4);
        let mut free = state.free().clone();
        let job = Job::rigid(JobType(0), 1, 0.0, 1.0);
        let place = |free: &mut FreeGpus, gpus| {
            let gpus = Emptiest.place(&state, free, &job, gpus)?;
            Some(gpus.into_iter().map(|gpu| gpu.0).collect::<Vec<_>>())
        };
        assert_eq!(place(&mut free, 1), Some(vec![0]));
        assert_eq!(place(&mut free, 6), Some(vec![4, 5, 6, 7, 8, 9]));
        assert_eq!(
            place(&mut free, 1),
            Some(vec![1]),
            "three are free on the first"
        );
        assert_eq!(place(&mut free, 5), None);
        assert_eq!(free.total(), 4);
    }
}
