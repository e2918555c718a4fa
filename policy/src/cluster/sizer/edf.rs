//! Deadlines, greedily.

use super::{Sizer, growing};
use crate::cluster::admission::Promises;
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, JobId, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static EDF_ELASTIC: Entry<dyn Sizer> = Registration {
    name: "edf-elastic",
    summary: "earliest deadline first, all it can use",
    params: &[],
    build: |_, _| Ok(Box::new(EdfElastic)),
};

/// Earliest deadline first, each with all GPUs that make it faster: the baseline of minimum shares.
/// It wastes GPUs on the flat end of the curves.
#[derive(Clone, Copy, Debug)]
pub struct EdfElastic;

impl Sizer for EdfElastic {
    fn name(&self) -> &'static str {
        "edf-elastic"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Deadline],
            manners: &[Manner::Elastic],
            source: "ElasticFlow, ASPLOS'23 (as a baseline)",
        }
    }
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)> {
        let (mut jobs, mut free) = (growing(state, promises), state.gpus());
        let deadline = |s: Option<f64>| s.unwrap_or(f64::INFINITY);
        jobs.sort_by(|a, b| deadline(a.job.deadline_s).total_cmp(&deadline(b.job.deadline_s)));
        let mut sizes = Vec::new();
        for job in jobs {
            let fitting = job.levels.iter().rev().find(|level| **level <= free);
            if let Some(level) = fitting {
                free -= level;
                sizes.push((job.job.id, *level));
            }
        }
        sizes
    }
}
