//! Everybody the same.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Sizer, first_level, growing, sizes};
use crate::cluster::admission::Promises;
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, JobId, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static MAX_MIN: Entry<dyn Sizer> = Registration {
    name: "max-min",
    summary: "one GPU after the other to the job that has fewest",
    params: &[],
    build: |_, _| Ok(Box::new(MaxMin)),
};

/// Max-min fairness over GPUs: first one each by arrival, then always the next level for the job
/// that has fewest and can use more.
#[derive(Clone, Copy, Debug)]
pub struct MaxMin;

impl Sizer for MaxMin {
    fn name(&self) -> &'static str {
        "max-min"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Fairness],
            manners: &[Manner::Elastic],
            source: "textbook",
        }
    }
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)> {
        let (mut jobs, mut free) = (growing(state, promises), state.gpus());
        first_level(&mut jobs, &mut free);
        let with = jobs.iter().enumerate().filter(|(_, job)| job.at > 0);
        let mut poorest: BinaryHeap<Reverse<(u32, usize)>> =
            with.map(|(at, job)| Reverse((job.has(), at))).collect();
        while free > 0 {
            let Some(Reverse((_, at))) = poorest.pop() else {
                break;
            };
            // A job that does not fit now never will: no job gives anything back.
            if jobs[at].step().is_some_and(|step| step <= free) {
                jobs[at].climb(&mut free);
                poorest.push(Reverse((jobs[at].has(), at)));
            }
        }
        sizes(&jobs)
    }
}
