//! Short jobs first, unless a long one makes far more of the GPU.

use super::{Growing, Sizer, growing, sizes};
use crate::cluster::admission::Promises;
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, JobId, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static AFS: Entry<dyn Sizer> = Registration {
    name: "afs",
    summary: "each GPU to the short, unless the long gains more",
    params: &[],
    build: |_, _| Ok(Box::new(Afs)),
};

/// AFS (NSDI'21): GPUs one after the other; jobs without one come first, the shortest of them
/// before.
///
/// Between two jobs, l the shorter and h the longer at what they have, l gets the GPU if
///
/// ```text
/// (p_l(k+1) - p_l(k)) / p_l(k)  >  (p_h(k'+1) - p_h(k')) / p_h(k'+1)
/// ```
///
/// The speed-up of the short one counts against what it has, that of the long one against what it
/// would have.
#[derive(Clone, Copy, Debug)]
pub struct Afs;

/// Whether `a` is to be preferred to `b`, both of which have something.
fn preferred(a: &Growing<'_>, b: &Growing<'_>) -> bool {
    let gain = |job: &Growing<'_>, against: f64| {
        let step = f64::from(job.step().unwrap_or(1));
        (job.next_rate() - job.rate()) / against / step
    };
    let end = |job: &Growing<'_>| job.left / job.rate();
    if end(a) < end(b) {
        gain(a, a.rate()) > gain(b, b.next_rate())
    } else {
        gain(b, b.rate()) <= gain(a, a.next_rate())
    }
}

impl Sizer for Afs {
    fn name(&self) -> &'static str {
        "afs"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Completion],
            manners: &[Manner::Elastic],
            source: "AFS, NSDI'21",
        }
    }
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)> {
        let (mut jobs, mut free) = (growing(state, promises), state.gpus());
        while free > 0 {
            let mut best: Option<usize> = None;
            for (at, job) in jobs.iter().enumerate() {
                if job.step().is_none_or(|step| step > free) {
                    continue;
                }
                let solo = |job: &Growing<'_>| job.left / job.next_rate();
                let better = best.is_none_or(|best| {
                    let best = &jobs[best];
                    match (job.at, best.at) {
                        (0, 0) => solo(job) < solo(best),
                        (0, _) => true,
                        (_, 0) => false,
                        _ => preferred(job, best),
                    }
                });
                if better {
                    best = Some(at);
                }
            }
            let Some(at) = best else { break };
            jobs[at].climb(&mut free);
        }
        sizes(&jobs)
    }
}
