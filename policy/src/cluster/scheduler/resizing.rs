//! The decision of a scheduler with a sizer.

use std::collections::BTreeMap;

use super::held::Held;
use super::{ClusterState, Decision, FreeGpus, GpuId, JobId, Scheduler, start};
use crate::cluster::placer::Regroup;
use crate::cluster::{GpuType, Speed};

impl Scheduler {
    /// Does what the sizer says: first jobs that stop or shrink, then jobs that grow or start.
    pub(super) fn resize(
        &mut self,
        state: &ClusterState,
        memory: &Held,
        batch: &mut Vec<Decision>,
    ) {
        let Some(sizer) = &mut self.sizer else { return };
        let sizes: BTreeMap<JobId, u32> = sizer
            .resize(state, &self.promises)
            .into_iter()
            .filter(|(_, gpus)| *gpus > 0)
            .collect();
        let kinds: BTreeMap<JobId, GpuType> = sizes
            .keys()
            .filter_map(|id| Some((*id, sizer.kind(*id)?)))
            .collect();
        let mut free = state.free().clone();
        for id in state.running() {
            if !sizes.contains_key(id) {
                give(&mut free, held(state, *id));
                batch.push(Decision::Suspend { job: *id });
            }
        }
        match self.placer.regroup() {
            Regroup::Keep if kinds.is_empty() => self.extend((state, memory), free, &sizes, batch),
            order => self.regroup((state, memory), free, (&sizes, &kinds), order, batch),
        }
    }

    /// A job that shrinks keeps the first of its GPUs, a job that grows gets more of them.
    fn extend(
        &mut self,
        (state, memory): (&ClusterState, &Held),
        mut free: FreeGpus,
        sizes: &BTreeMap<JobId, u32>,
        batch: &mut Vec<Decision>,
    ) {
        for (id, gpus) in sizes {
            let held = held(state, *id);
            if (*gpus as usize) < held.len() {
                let (keep, lose) = held.split_at(*gpus as usize);
                give(&mut free, lose);
                let gpus = keep.to_vec();
                batch.push(Decision::Resize { job: *id, gpus });
            }
        }
        for (id, gpus) in sizes {
            let (job, held) = (state.job(*id), held(state, *id));
            let missing = gpus.saturating_sub(held.len() as u32);
            if missing == 0 || job.is_done() {
                continue;
            }
            // As many as the placer finds: an elastic job that waits for all of them may wait for
            // ever, such as for more GPUs than a node of a live cluster has.
            let least = match job.speed {
                Speed::Rigid => missing,
                Speed::Curve(_) => 1,
            };
            let placed = (least..=missing)
                .rev()
                .find_map(|gpus| memory.place(&*self.placer, state, &mut free, (job, gpus)));
            if placed.as_ref().map_or(0, Vec::len) < missing as usize {
                self.waits.fragmented.push(*id);
            }
            match placed {
                None => {}
                Some(more) if held.is_empty() => batch.push(start(job, more, 1.0)),
                Some(more) => {
                    let gpus = held.iter().copied().chain(more).collect();
                    batch.push(Decision::Resize { job: *id, gpus });
                }
            }
        }
    }

    /// A job that starts or has another number of GPUs is placed as a whole; if so many cannot be
    /// placed, it gets as many as can.
    fn regroup(
        &mut self,
        (state, memory): (&ClusterState, &Held),
        mut free: FreeGpus,
        (sizes, kinds): (&BTreeMap<JobId, u32>, &BTreeMap<JobId, GpuType>),
        order: Regroup,
        batch: &mut Vec<Decision>,
    ) {
        let mut movers: Vec<(u32, JobId)> = Vec::new();
        for (id, gpus) in sizes {
            let held = held(state, *id);
            let kind = kinds.get(id);
            let elsewhere = held.first().map(|gpu| state.type_of(*gpu)) != kind.copied();
            let moves = *gpus as usize != held.len() || (kind.is_some() && elsewhere);
            if moves && !state.job(*id).is_done() {
                give(&mut free, held);
                movers.push((*gpus, *id));
            }
        }
        movers.sort_by_key(|(gpus, id)| match order {
            Regroup::LargeFirst | Regroup::Keep => (u32::MAX - gpus, *id),
            Regroup::SmallFirst => (*gpus, *id),
        });
        for (gpus, id) in movers {
            let (job, held) = (state.job(id), held(state, id));
            let least = match job.speed {
                Speed::Rigid => gpus,
                Speed::Curve(_) => 1,
            };
            let placed = (least..=gpus).rev().find_map(|gpus| {
                let Some(kind) = kinds.get(&id) else {
                    return memory.place(&*self.placer, state, &mut free, (job, gpus));
                };
                let mut some = free.only(|node| state.nodes()[node].kind == *kind);
                let taken = memory.place(&*self.placer, state, &mut some, (job, gpus))?;
                for gpu in &taken {
                    free.take(*gpu);
                }
                Some(taken)
            });
            if placed
                .as_ref()
                .is_none_or(|placed| placed.len() < gpus as usize)
            {
                self.waits.fragmented.push(id);
            }
            match placed {
                None if held.is_empty() => {}
                None => batch.push(Decision::Suspend { job: id }),
                Some(gpus) if held.is_empty() => batch.push(start(job, gpus, 1.0)),
                Some(gpus) if same(&gpus, held) => {}
                Some(gpus) => batch.push(Decision::Resize { job: id, gpus }),
            }
        }
    }
}

fn held(state: &ClusterState, id: JobId) -> &[GpuId] {
    state.job(id).run().map_or(&[], |run| &run.gpus)
}

fn give(free: &mut FreeGpus, gpus: &[GpuId]) {
    for gpu in gpus {
        free.give(*gpu);
    }
}

fn same(a: &[GpuId], b: &[GpuId]) -> bool {
    a.len() == b.len() && a.iter().all(|gpu| b.contains(gpu))
}
