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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Job, JobType, Speed};

    fn sizes(gpus: u32, jobs: &[(f64, &[f64])]) -> Vec<u32> {
        let mut state = ClusterState::uniform(gpus, gpus);
        for (left, curve) in jobs {
            let mut job = Job::rigid(JobType(0), 1, 0.0, *left);
            job.speed = Speed::Curve((*curve).into());
            state.arrive(job);
        }
        let given = Afs.resize(&state, &Promises::default());
        let of = |at: usize| given.iter().find(|(id, _)| id.0 as usize == at);
        (0..jobs.len())
            .map(|at| of(at).map_or(0, |(_, gpus)| *gpus))
            .collect()
    }

    #[test]
    fn each_gpu_goes_to_the_job_that_gains_most_by_it_as_solved_by_hand() {
        // A short job that scales less and less, and a long one that scales without loss.
        let short = (10.0, &[1.0, 1.8, 2.5, 2.6, 2.7, 2.8][..]);
        let long = (40.0, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0][..]);
        for (gpus, want, why) in [
            (1, [1, 0], "nobody has one: the shorter is first"),
            (2, [1, 1], "who has none comes before who has one"),
            (
                3,
                [2, 1],
                "0.8/1 = 0.8 for the short one, 1/2 for the long one",
            ),
            (
                4,
                [2, 2],
                "0.7/1.8 = 0.39 for the short one, 1/2 for the long one",
            ),
            (5, [3, 2], "0.39 for the short one, 1/3 for the long one"),
            (
                6,
                [3, 3],
                "0.1/2.5 = 0.04 for the short one, 1/3 for the long one",
            ),
        ] {
            assert_eq!(sizes(gpus, &[short, long]), want, "{gpus} GPUs: {why}");
            assert_eq!(
                sizes(gpus, &[long, short]),
                [want[1], want[0]],
                "{gpus}: {why}"
            );
        }
    }

    #[test]
    fn of_two_that_scale_alike_the_shorter_has_more_and_a_tie_goes_to_the_longer() {
        let linear = &[1.0, 2.0, 3.0, 4.0][..];
        // 1/1 for the short one, 1/2 for the long one.
        assert_eq!(sizes(3, &[(10.0, linear), (11.0, linear)]), [2, 1]);
        // 0.5/1 for the short one, 1/2 for the long one: equal.
        let half = &[1.0, 1.5, 1.6, 1.7][..];
        assert_eq!(sizes(3, &[(10.0, half), (40.0, linear)]), [1, 2]);
        // Which one is short is a matter of what they have: on two GPUs the larger job ends first.
        assert_eq!(sizes(4, &[(10.0, &[1.0][..]), (11.0, linear)]), [1, 3]);
    }
}
