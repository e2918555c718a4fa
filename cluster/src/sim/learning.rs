//! Training jobs in a run: epochs that end, and what jobs report to the scheduler before it
//! decides.

use policy::cluster::JobId;

use super::Simulation;
use crate::training::Session;

impl Simulation<'_> {
    /// GPUs of the widest node.
    pub(super) fn per_node(&self) -> u32 {
        let widths = self.state.nodes().iter().map(|node| node.gpus);
        widths.max().unwrap_or(1)
    }

    /// What ends now is only an epoch, and the job goes on.
    pub(super) fn ends_epoch(&mut self, id: JobId) -> bool {
        let at = id.0 as usize;
        let goes_on = self.sessions[at]
            .as_mut()
            .is_some_and(|session| !session.end_epoch());
        if goes_on {
            self.watch(id);
            self.pace(id);
        }
        goes_on
    }

    /// A running job looks at what a step takes.
    fn watch(&mut self, id: JobId) {
        let now_s = self.state.now_s();
        let run = self.state.job(id).run().filter(|run| run.warm_s < now_s);
        if let (Some(run), Some(session)) = (run, &mut self.sessions[id.0 as usize]) {
            session.observe(&self.state.placement(run));
        }
    }

    /// Every job tells how fast it would be on how many GPUs, where somebody sizes it.
    pub(super) fn tell(&mut self) {
        if !self.scheduler.sizes() || self.sessions.iter().all(Option::is_none) {
            return;
        }
        let (now_s, gpus, per_node) = (self.state.now_s(), self.state.gpus(), self.per_node());
        let active: Vec<JobId> = self.state.active().map(|job| job.id).collect();
        for id in active {
            self.watch(id);
            let left = self.state.job(id).left(now_s);
            let session = self.sessions[id.0 as usize].as_ref();
            if let Some((speed, most)) =
                session.map(|session: &Session| session.report(left, gpus, per_node))
            {
                self.state.set_speed(id, speed, most);
            }
        }
    }
}
