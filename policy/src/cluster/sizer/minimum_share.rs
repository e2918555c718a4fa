//! Just enough for every deadline, and an admission that never promises more than that.
//!
//! ElasticFlow (ASPLOS'23). The *minimum satisfactory share* of a job is the lowest level `a` such
//! that running on `min(a, free(t))` GPUs in each slot up to its deadline finishes it, where
//! `free(t)` is what jobs with earlier deadlines leave. A job is admitted if it and all admitted
//! ones still have such a share; the others are refused, and every admitted job keeps its deadline.
//! The rest of the present slot goes one level at a time to the job that saves most remaining time
//! per GPU (diminishing returns make that a good rule); a job without GPUs comes first.

use super::{Growing, Sizer, growing, sizes};
use crate::cluster::admission::{Admission, Promises};
use crate::cluster::catalogue::Entry;
use crate::cluster::{Admit, ClusterState, Job, JobId, Manner, Objective, Tags};
use crate::registry::{Kind, ParamSpec, Registration};

/// How the sizer is chosen.
pub(super) static SIZER: Entry<dyn Sizer> = Registration {
    name: "minimum-share",
    summary: "just enough for every deadline, the rest where it gains most",
    params: &[SLOT],
    build: |settings, _| Ok(Box::new(MinimumShare::new(settings.number("slot")))),
};

/// How the admission is chosen: one file for both, since they are two sides of one policy.
pub(in crate::cluster) static ADMISSION: Entry<dyn Admission> = Registration {
    name: "minimum-share",
    summary: "only whose deadline can be kept",
    params: &[SLOT],
    build: |settings, _| Ok(Box::new(MinimumShare::new(settings.number("slot")))),
};

const SLOT: ParamSpec = ParamSpec {
    name: "slot",
    summary: "length of a slot in seconds",
    kind: Kind::Number {
        min: 1.0,
        max: f64::INFINITY,
        default: 240.0,
    },
};

const TAGS: Tags = Tags {
    objectives: &[Objective::Deadline],
    manners: &[Manner::Elastic],
    source: "ElasticFlow, ASPLOS'23",
};

/// Minimum satisfactory shares, as a sizer and as an admission. Both read only the state, so they
/// need not know each other.
#[derive(Clone, Copy, Debug)]
pub struct MinimumShare {
    slot_s: f64,
}

/// GPUs that are booked in each slot from now on.
struct Calendar {
    gpus: u32,
    slot_s: f64,
    booked: Vec<u32>,
}

impl Calendar {
    /// Books the minimum share of a job. Returns the level in the present slot (0 for none), or
    /// `None` if the deadline cannot be kept.
    fn book(&mut self, job: &Growing<'_>, now_s: f64) -> Option<u32> {
        let time_s = job.job.deadline_s? - now_s;
        if time_s <= 0.0 {
            return (job.left <= 0.0).then_some(0);
        }
        let slots = (time_s / self.slot_s - 1e-9).ceil().max(0.0) as usize;
        if self.booked.len() < slots {
            self.booked.resize(slots, 0);
        }
        for level in &job.levels {
            let (mut left, mut plan) = (job.left, Vec::new());
            for (slot, booked) in self.booked[..slots].iter().enumerate() {
                let free = (self.gpus - booked).min(*level);
                let fits = job.levels.partition_point(|level| *level <= free);
                let Some(gpus) = fits.checked_sub(1).map(|at| job.levels[at]) else {
                    continue;
                };
                let length_s = self.slot_s.min(time_s - slot as f64 * self.slot_s);
                left -= job.job.rate(gpus) * length_s;
                plan.push((slot, gpus));
                if left <= 1e-6 {
                    break;
                }
            }
            if left <= 1e-6 {
                for (slot, gpus) in &plan {
                    self.booked[*slot] += gpus;
                }
                let first = plan.first().filter(|(slot, _)| *slot == 0);
                return Some(first.map_or(0, |(_, gpus)| *gpus));
            }
        }
        None
    }
}

impl MinimumShare {
    /// With slots of this length, in seconds: that of the rounds.
    #[must_use]
    pub fn new(slot_s: f64) -> Self {
        Self { slot_s }
    }

    fn calendar(&self, state: &ClusterState) -> Calendar {
        Calendar {
            gpus: state.gpus(),
            slot_s: self.slot_s,
            booked: Vec::new(),
        }
    }
}

fn by_deadline(jobs: &mut [Growing<'_>]) {
    let deadline = |job: &Growing<'_>| job.job.deadline_s.unwrap_or(f64::INFINITY);
    jobs.sort_by(|a, b| {
        deadline(a)
            .total_cmp(&deadline(b))
            .then(a.job.id.cmp(&b.job.id))
    });
}

impl Admission for MinimumShare {
    fn name(&self) -> &'static str {
        "minimum-share"
    }
    fn tags(&self) -> Tags {
        TAGS
    }
    fn admit(&mut self, state: &ClusterState, promises: &Promises, job: &Job) -> Admit {
        if job.deadline_s.is_none() {
            return Admit::BestEffort;
        }
        let mut jobs = growing(state, promises);
        jobs.retain(|other| {
            other.job.id == job.id || promises.known(other.job.id) == Some(Admit::Accept)
        });
        by_deadline(&mut jobs);
        let mut calendar = self.calendar(state);
        let keeps = |job| calendar.book(job, state.now_s()).is_some();
        if jobs.iter().all(keeps) {
            Admit::Accept
        } else {
            Admit::Reject
        }
    }
    fn rejects(&self) -> bool {
        true
    }
}

impl Sizer for MinimumShare {
    fn name(&self) -> &'static str {
        "minimum-share"
    }
    fn tags(&self) -> Tags {
        TAGS
    }
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)> {
        let mut jobs = growing(state, promises);
        by_deadline(&mut jobs);
        let mut calendar = self.calendar(state);
        let mut free = state.gpus();
        for job in &mut jobs {
            let now = calendar.book(job, state.now_s()).unwrap_or(0);
            job.at = job.levels.partition_point(|level| *level <= now);
            free -= now;
        }
        while free > 0 {
            let mut best: Option<(f64, usize)> = None;
            for (at, job) in jobs.iter().enumerate() {
                let Some(step) = job.step().filter(|step| *step <= free) else {
                    continue;
                };
                let idle = job.at == 0;
                let time_s = |rate: f64| job.left / rate;
                let now_s = if idle { 1e18 } else { time_s(job.rate()) };
                let gain = (now_s - time_s(job.next_rate())) / f64::from(step);
                if best.is_none_or(|(most, _)| gain > most) {
                    best = Some((gain, at));
                }
            }
            let Some((_, at)) = best else { break };
            jobs[at].climb(&mut free);
        }
        sizes(&jobs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{JobType, Speed};

    /// On 1, 2 and 4 GPUs 1, 1.5 and 2 units a second: twice the GPUs, less than twice the speed.
    const CURVE: [f64; 4] = [1.0, 1.5, 1.5, 2.0];
    const SLOT_S: f64 = 10.0;

    fn job(work: f64, deadline_s: Option<f64>) -> Job {
        let mut job = Job::rigid(JobType(0), 1, 0.0, work);
        job.speed = Speed::Curve(CURVE.into());
        job.deadline_s = deadline_s;
        job
    }

    /// Whether each is admitted after those before it, and the GPUs of each in the first slot.
    fn run(gpus: u32, jobs: Vec<Job>) -> (Vec<Admit>, Vec<u32>) {
        let (mut state, mut promises) = (ClusterState::uniform(gpus, gpus), Promises::default());
        let mut policy = MinimumShare::new(SLOT_S);
        let mut admitted = Vec::new();
        for job in jobs {
            let id = state.arrive(job);
            let admit = policy.admit(&state, &promises, state.job(id));
            promises.set(id, admit);
            admitted.push(admit);
        }
        let given = policy.resize(&state, &promises);
        let of = |id: JobId| given.iter().find(|(other, _)| *other == id);
        let sizes = state.jobs().iter();
        let sizes = sizes.map(|job| of(job.id).map_or(0, |(_, gpus)| *gpus));
        (admitted, sizes.collect())
    }

    fn least(work: f64) -> Option<u32> {
        let mut state = ClusterState::uniform(4, 4);
        state.arrive(job(work, Some(30.0)));
        let jobs = growing(&state, &Promises::default());
        let mut calendar = MinimumShare::new(SLOT_S).calendar(&state);
        calendar.book(&jobs[0], 0.0)
    }

    #[test]
    fn the_minimum_satisfactory_share_is_the_least_level_that_meets_the_deadline() {
        // Three slots of 10 s: 30 units on one GPU, 45 on two, 60 on four.
        assert_eq!(least(30.0), Some(1));
        assert_eq!(least(31.0), Some(2));
        assert_eq!(least(45.0), Some(2));
        assert_eq!(least(46.0), Some(4));
        assert_eq!(least(60.0), Some(4));
        assert_eq!(least(61.0), None, "not even on all GPUs");
    }

    #[test]
    fn a_job_is_admitted_where_earlier_deadlines_leave_it_a_share_as_solved_by_hand() {
        let accept = Admit::Accept;
        // The first needs all four GPUs for its only slot. The second then has two slots: 20 units
        // on one GPU, 30 on two, 40 on four.
        let first = || job(20.0, Some(10.0));
        for (work, admit) in [(30.0, accept), (40.0, accept), (41.0, Admit::Reject)] {
            let (admitted, sizes) = run(4, vec![first(), job(work, Some(30.0))]);
            assert_eq!(
                (admitted, sizes),
                (vec![accept, admit], vec![4, 0]),
                "{work}"
            );
        }
        // With 30 units it has two GPUs there; two are left to a third in the same slots.
        let second = || job(30.0, Some(30.0));
        for (work, admit) in [(30.0, accept), (31.0, Admit::Reject)] {
            let (admitted, _) = run(4, vec![first(), second(), job(work, Some(30.0))]);
            assert_eq!(admitted, [accept, accept, admit], "{work}");
        }
        // One with an early deadline is refused where it would break what was promised.
        let (admitted, _) = run(4, vec![first(), second(), job(1.0, Some(10.0))]);
        assert_eq!(admitted, [accept, accept, Admit::Reject]);
    }

    #[test]
    fn what_is_left_goes_where_it_saves_most_time_as_solved_by_hand() {
        // One GPU for the deadline, one each for those that have none. The second GPU of a job
        // saves a third of its time: 10 s, 30 s and 20 s.
        let jobs = || vec![job(30.0, Some(30.0)), job(90.0, None), job(60.0, None)];
        assert_eq!(run(3, jobs()).1, [1, 1, 1]);
        assert_eq!(run(4, jobs()).1, [1, 2, 1]);
        assert_eq!(run(5, jobs()).1, [1, 2, 2]);
        // From two to four saves 90/1.5 - 90/2 = 15 s with two GPUs: 7.5 s for each of them.
        assert_eq!(run(6, jobs()).1, [2, 2, 2]);
    }
}
