//! No sizing at all.

use super::{Sizer, growing};
use crate::cluster::admission::Promises;
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, JobId, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static RIGID_SRTF: Entry<dyn Sizer> = Registration {
    name: "rigid-srtf",
    summary: "as many as asked for, shortest remaining time first",
    params: &[],
    build: |_, _| Ok(Box::new(RigidSrtf)),
};

/// Every job gets what it asks for or nothing, the shortest remaining time first: the baseline of
/// elastic sizers.
#[derive(Clone, Copy, Debug)]
pub struct RigidSrtf;

impl Sizer for RigidSrtf {
    fn name(&self) -> &'static str {
        "rigid-srtf"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Completion],
            manners: &[Manner::Exclusive],
            source: "textbook",
        }
    }
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)> {
        let mut jobs = growing(state, promises);
        let now_s = state.now_s();
        jobs.sort_by(|a, b| a.job.left_s(now_s).total_cmp(&b.job.left_s(now_s)));
        let mut free = state.gpus();
        let fits = jobs.iter().filter(|job| {
            let fits = job.job.gpus <= free;
            free -= if fits { job.job.gpus } else { 0 };
            fits
        });
        fits.map(|job| (job.job.id, job.job.gpus)).collect()
    }
}
