//! The decision of a scheduler whose admission binds jobs to GPUs.

use std::collections::{BTreeMap, BTreeSet};

use super::held::Held;
use super::{ClusterState, Decision, FreeGpus, GpuId, JobId, Scheduler, Step, start, walk};

impl Scheduler {
    /// Chooses the running jobs, bound ones first by their rank; places those where they are bound,
    /// and moves jobs that are in their way. A job that cannot be moved has its own GPUs or none.
    pub(super) fn preempt_bound(
        &mut self,
        state: &ClusterState,
        held: &Held,
        batch: &mut Vec<Decision>,
    ) {
        let skips = self.order.skips();
        let (mut left, mut chosen) = (state.gpus(), Vec::new());
        walk(&self.queues, |id, gpus| {
            if gpus <= left {
                left -= gpus;
                chosen.push(id);
                return if left > 0 { Step::Next } else { Step::Stop };
            }
            if skips { Step::Omit } else { Step::Stop }
        });
        let mut free = FreeGpus::all(state.nodes());
        let mut at: BTreeMap<JobId, Vec<GpuId>> = BTreeMap::new();
        let bound = |id: &JobId| self.admission.as_ref()?.gpus(*id);
        for id in &chosen {
            let gpus = bound(id).map(<[GpuId]>::to_vec);
            // Cells are not taken twice; where a job that cannot be moved is on one, it stays.
            let can = |gpus: &Vec<GpuId>| {
                let free = gpus.iter().all(|gpu| free.contains(*gpu));
                held.is_empty() || (free && held.fit_on(state, gpus, &[*id]))
            };
            let own = self.placer.bound(*id).or(gpus);
            if let Some(gpus) = own.filter(can) {
                for gpu in &gpus {
                    free.take(*gpu);
                }
                at.insert(*id, gpus);
            }
        }
        // Then running jobs that are in nobody's way, then the others.
        let (mut stay, mut come) = (Vec::new(), Vec::new());
        for id in chosen.iter().filter(|id| !at.contains_key(id)) {
            match state.job(*id).run() {
                Some(run) if run.gpus.iter().all(|gpu| free.contains(*gpu)) => {
                    for gpu in &run.gpus {
                        free.take(*gpu);
                    }
                    stay.push((*id, run.gpus.clone()));
                }
                _ => come.push(*id),
            }
        }
        at.extend(stay);
        for id in come {
            let job = state.job(id);
            match held.place(&*self.placer, state, &mut free, (job, job.gpus)) {
                Some(gpus) => drop(at.insert(id, gpus)),
                None => self.waits.fragmented.push(id),
            }
        }
        let runs: BTreeSet<JobId> = at.keys().copied().collect();
        for id in state.running().difference(&runs) {
            batch.push(Decision::Suspend { job: *id });
        }
        for (id, gpus) in at {
            let job = state.job(id);
            match job.run() {
                Some(run) if run.gpus == gpus => {}
                Some(_) => batch.push(Decision::Migrate {
                    job: id,
                    gpus,
                    share: 1.0,
                }),
                None => batch.push(start(job, gpus, 1.0)),
            }
        }
    }
}
