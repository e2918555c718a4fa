//! By deadline.

use super::{Drift, Key, Order};
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, Job, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static EDF: Entry<dyn Order> = Registration {
    name: "edf",
    summary: "earliest deadline first",
    params: &[],
    build: |_, _| Ok(Box::new(Edf)),
};

/// Earliest deadline first, preemptive; jobs without a deadline after all others, by arrival.
#[derive(Clone, Copy, Debug)]
pub struct Edf;

impl Order for Edf {
    fn name(&self) -> &'static str {
        "edf"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Deadline],
            manners: &[Manner::Exclusive],
            source: "textbook",
        }
    }
    fn key(&self, _: &ClusterState, job: &Job) -> Key {
        match job.deadline_s {
            Some(deadline_s) => Key::new(0, deadline_s, job),
            None => Key::new(1, 0.0, job),
        }
    }
    fn preemptive(&self) -> bool {
        true
    }
    fn skips(&self) -> bool {
        true
    }
    fn drift(&self) -> Drift {
        Drift::Never
    }
}
