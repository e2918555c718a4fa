//! Where the job is done first.

use super::{Placer, Regroup};
use crate::cluster::catalogue::Entry;
use crate::cluster::wait::WaitMatrix;
use crate::cluster::{ClusterState, FreeGpus, GpuId, Job, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static WAIT_TIME: Entry<dyn Placer> = Registration {
    name: "wait-time",
    summary: "where the job is done first, by the waits that nodes publish",
    params: &[],
    build: |_, _| Ok(Box::new(WaitTime)),
};

/// Apollo's placement (OSDI'14): of the places that a job could have, the one with the earliest
/// estimated completion, which is how long it waits there and then runs, and not the one with the
/// least load. Each node publishes the waits ([`WaitMatrix`]); run times are what is left of the
/// job at its speed on that type of GPU. A gang waits for the last of its GPUs and runs as fast as
/// the slowest.
///
/// Its candidates are GPUs that are free in the scheduler's own state: on these a job waits for
/// work that the scheduler did not place. It does not consider waiting for a faster GPU that
/// another job holds. A place with an unknown wait comes last, and is taken if there is no other:
/// the node itself decides when the job starts.
#[derive(Clone, Copy, Debug)]
pub struct WaitTime;

/// Seconds; the second counts where the first are equal.
type Estimate = (f64, u32);

impl WaitTime {
    fn wait_s(state: &ClusterState, job: &Job, gpu: GpuId) -> f64 {
        let matrix: Option<&WaitMatrix> = state.wait_matrix(gpu);
        matrix.map_or(0.0, |matrix| matrix.wait_s(1.0, job.profile.peak_bytes()))
    }

    /// The GPUs of this node that come free first, and when the job would be done on them.
    fn on_node(
        state: &ClusterState,
        free: &FreeGpus,
        job: &Job,
        (node, gpus): (usize, u32),
    ) -> (Estimate, Vec<GpuId>) {
        let there = &state.nodes()[node];
        let mut own: Vec<(f64, GpuId)> = (there.first.0..there.first.0 + there.gpus)
            .map(GpuId)
            .filter(|gpu| free.contains(*gpu))
            .map(|gpu| (Self::wait_s(state, job, gpu), gpu))
            .collect();
        own.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        own.truncate(gpus as usize);
        let wait_s = own.last().map_or(0.0, |(wait_s, _)| *wait_s);
        let run_s = job.left(state.now_s()) / job.rate_on(gpus, there.kind).max(f64::MIN_POSITIVE);
        let mut taken: Vec<GpuId> = own.into_iter().map(|(_, gpu)| gpu).collect();
        taken.sort_unstable();
        // Among equals the fullest node, so that larger gangs find space.
        ((wait_s + run_s, free.on(node)), taken)
    }
}

impl Placer for WaitTime {
    fn name(&self) -> &'static str {
        "wait-time"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Completion],
            manners: &[Manner::Heterogeneous, Manner::Topology],
            source: "Apollo, OSDI'14",
        }
    }
    fn place(
        &self,
        state: &ClusterState,
        free: &mut FreeGpus,
        job: &Job,
        gpus: u32,
    ) -> Option<Vec<GpuId>> {
        if free.total() < gpus || gpus == 0 {
            return None;
        }
        let whole = (0..free.nodes())
            .filter(|node| free.on(*node) >= gpus)
            .map(|node| Self::on_node(state, free, job, (node, gpus)))
            .min_by(|a, b| a.0.0.total_cmp(&b.0.0).then(a.0.1.cmp(&b.0.1)));
        let taken = match whole {
            Some((_, taken)) => taken,
            // Over several nodes: those that are there first, one node after the other.
            None => {
                let mut nodes: Vec<(Estimate, Vec<GpuId>)> = (0..free.nodes())
                    .filter(|node| free.on(*node) > 0)
                    .map(|node| Self::on_node(state, free, job, (node, free.on(node))))
                    .map(|((_, count), own)| {
                        let wait_s = own.iter().map(|gpu| Self::wait_s(state, job, *gpu));
                        ((wait_s.fold(0.0, f64::max), u32::MAX - count), own)
                    })
                    .collect();
                nodes.sort_by(|a, b| a.0.0.total_cmp(&b.0.0).then(a.0.1.cmp(&b.0.1)));
                let all = nodes.into_iter().flat_map(|(_, own)| own);
                all.take(gpus as usize).collect()
            }
        };
        for gpu in &taken {
            free.take(*gpu);
        }
        Some(taken)
    }
    fn weighs_waits(&self) -> bool {
        true
    }
    fn regroup(&self) -> Regroup {
        Regroup::LargeFirst
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::wait::Use;
    use crate::cluster::{GpuType, JobType, Node};

    const GIB: u64 = 1 << 30;

    /// Two GPUs of a fast type on one node, two of a slow one on another.
    fn state() -> ClusterState {
        let node = |kind| Node {
            first: GpuId(0),
            gpus: 2,
            kind: GpuType(kind),
            gpu_bytes: 16 * GIB,
            cpus: 8.0,
            mem_bytes: 64 * GIB,
        };
        ClusterState::new(vec![node(0), node(1)])
    }

    fn waits(left_s: f64) -> WaitMatrix {
        let stranger = Use {
            share: 0.5,
            bytes: GIB,
            left_s,
        };
        WaitMatrix::of(16 * GIB, &[stranger], &[], &[0.5, 1.0], &[GIB, 15 * GIB])
    }

    fn place(state: &ClusterState, gpus: u32) -> Vec<u32> {
        let mut job = Job::rigid(JobType(0), gpus, 0.0, 100.0);
        job.by_type = [1.0, 0.5].into();
        let mut free = state.free().clone();
        let taken = WaitTime.place(state, &mut free, &job, gpus).unwrap();
        assert_eq!(free.total(), 4 - gpus);
        taken.into_iter().map(|gpu| gpu.0).collect()
    }

    #[test]
    fn a_wait_is_worth_it_where_the_job_is_done_earlier_all_the_same() {
        let mut state = state();
        assert_eq!(place(&state, 1), [0], "the fast type");
        // 100 s there and 200 s on the other.
        state.set_wait_matrix(GpuId(0), Some(waits(50.0)));
        state.set_wait_matrix(GpuId(1), Some(waits(60.0)));
        assert_eq!(place(&state, 1), [0], "50 s and 100 s");
        assert_eq!(place(&state, 2), [0, 1], "60 s and 100 s");
        state.set_wait_matrix(GpuId(0), Some(waits(150.0)));
        assert_eq!(place(&state, 1), [1], "60 s and 100 s");
        assert_eq!(place(&state, 2), [2, 3], "150 s and 100 s are later");
        state.set_wait_matrix(GpuId(1), Some(waits(150.0)));
        assert_eq!(place(&state, 1), [2]);
    }

    #[test]
    fn a_wait_without_end_comes_last_and_a_gang_over_two_nodes_begins_with_the_first() {
        let mut state = state();
        for gpu in 0..4 {
            state.set_wait_matrix(GpuId(gpu), Some(waits(f64::INFINITY)));
        }
        assert_eq!(place(&state, 1), [0], "the node has the last word");
        state.set_wait_matrix(GpuId(2), None);
        assert_eq!(place(&state, 1), [2]);
        state.set_wait_matrix(GpuId(3), Some(waits(1.0)));
        assert_eq!(place(&state, 3), [2, 3, 0]);
        let mut free = state.free().clone();
        let job = Job::rigid(JobType(0), 5, 0.0, 1.0);
        assert!(WaitTime.place(&state, &mut free, &job, 5).is_none());
        assert_eq!(free.total(), 4);
    }
}
