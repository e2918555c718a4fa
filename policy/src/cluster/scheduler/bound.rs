//! The decision of a scheduler whose admission binds jobs to GPUs.

use super::held::{Held, Places, run_there, take};
use super::{ClusterState, Decision, FreeGpus, GpuId, JobId, Scheduler, Step, walk};

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
        let mut at = Places::new();
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
                take(&mut free, &gpus);
                at.insert(*id, gpus);
            }
        }
        // Then running jobs that are in nobody's way, then the others.
        let (mut stay, mut come) = (Vec::new(), Vec::new());
        for id in chosen.iter().filter(|id| !at.contains_key(id)) {
            match state.job(*id).run() {
                Some(run) if run.gpus.iter().all(|gpu| free.contains(*gpu)) => {
                    take(&mut free, &run.gpus);
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
        run_there(state, at, batch);
    }
}
