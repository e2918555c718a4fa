//! The decision of a scheduler with a sizer.

use super::{ClusterState, Decision, JobId, Scheduler, start};
use std::collections::BTreeMap;

impl Scheduler {
    /// Do what the sizer says: first whoever stops or shrinks, then whoever grows or starts.
    pub(super) fn resize(&mut self, state: &ClusterState, batch: &mut Vec<Decision>) {
        let Some(sizer) = &mut self.sizer else { return };
        let sizes: BTreeMap<JobId, u32> = sizer
            .resize(state, &self.promises)
            .into_iter()
            .filter(|(_, gpus)| *gpus > 0)
            .collect();
        let mut free = state.free().clone();
        let mut give = |gpus: &[super::GpuId]| {
            gpus.iter().for_each(|gpu| {
                free.give(*gpu);
            });
        };
        for id in state.running() {
            let Some(run) = state.job(*id).run() else {
                continue;
            };
            match sizes.get(id) {
                None => {
                    give(&run.gpus);
                    batch.push(Decision::Suspend { job: *id });
                }
                Some(gpus) if (*gpus as usize) < run.gpus.len() => {
                    let (keep, lose) = run.gpus.split_at(*gpus as usize);
                    give(lose);
                    let gpus = keep.to_vec();
                    batch.push(Decision::Resize { job: *id, gpus });
                }
                Some(_) => {}
            }
        }
        for (id, gpus) in sizes {
            let job = state.job(id);
            let held = job.run().map_or(&[][..], |run| &run.gpus);
            let missing = gpus.saturating_sub(held.len() as u32);
            if missing == 0 || job.is_done() {
                continue;
            }
            match self.placer.place(state, &mut free, job, missing) {
                None => self.waits.fragmented.push(id),
                Some(more) if held.is_empty() => batch.push(start(job, more, 1.0)),
                Some(more) => {
                    let gpus = held.iter().copied().chain(more).collect();
                    batch.push(Decision::Resize { job: id, gpus });
                }
            }
        }
    }
}
