//! Deadlines by leases booked backwards.
//!
//! Chronus (SoCC'21) cuts time into leases. A job with `left` seconds of work needs r = ceil(left /
//! lease) of them before floor(deadline / lease). Going through the promised jobs by deadline and
//! giving each its *latest* possible r leases answers two questions: whether all promises can be
//! kept with one more (admission), and which jobs must run in the present lease (those that got
//! it). Ranks: 0 must run now; 1 all others, promised or not. Inside a rank the order decides
//! (Chronus: the shortest remaining first). Holding promised jobs back behind all best-effort ones
//! was tried and is worse for both: work put off comes back all at once (on the trace of the
//! calibration 1.4 % instead of 0.2 % of the deadlines are missed, and best-effort jobs take 5 %
//! longer).
//!
//! That keeps promises, and best-effort jobs pay for it: under overload a cluster that keeps every
//! promise lets nearly no large job without one through. The other way (`anew`) asks again at every
//! lease: all jobs with a deadline are booked by deadline, a job without a place counts as
//! best-effort for this lease, and jobs that are booked for later come after those. On the
//! calibration trace, 1,024 GPUs: 0.8 % of the deadlines missed for 0.2 %, and best-effort jobs
//! take 392 minutes for 453.
//!
//! A new job is first booked into what the present bookings leave; only if that fails, all jobs are
//! booked anew by deadline. The exact answer (a mixed-integer program in the paper) may admit a few
//! more.

use std::collections::HashMap;

use super::{Admission, Admit, Promises};
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, Job, JobId, Manner, Objective, Tags};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static LEASES: Entry<dyn Admission> = Registration {
    name: "leases",
    summary: "deadlines by leases booked backwards",
    params: &[
        ParamSpec {
            name: "lease",
            summary: "length of a lease in seconds",
            kind: Kind::Number {
                min: 1.0,
                max: f64::INFINITY,
                default: 600.0,
            },
        },
        ParamSpec {
            name: "anew",
            summary: "1: promises are made again at every lease; 0: they are kept",
            kind: Kind::Number {
                min: 0.0,
                max: 1.0,
                default: 0.0,
            },
        },
    ],
    build: |settings, _| {
        Ok(Box::new(Leases::new(
            settings.number("lease"),
            settings.number("anew") > 0.0,
        )))
    },
};

/// The admission.
#[derive(Clone, Debug)]
pub struct Leases {
    lease_s: f64,
    anew: bool,
    booked_at_s: f64,
    /// GPUs booked in each lease from now on.
    booked: Vec<u32>,
    /// Booked jobs and whether they must run now.
    now: HashMap<JobId, bool>,
}

impl Leases {
    /// With leases of this length, in seconds: that of the rounds. `anew`: promises are made again
    /// at every lease instead of being kept.
    #[must_use]
    pub fn new(lease_s: f64, anew: bool) -> Self {
        Self {
            lease_s,
            anew,
            booked_at_s: f64::NAN,
            booked: Vec::new(),
            now: HashMap::new(),
        }
    }

    /// Books the latest leases that suffice. Returns whether the present one is among them, or
    /// `None` if there are not enough.
    fn book(&self, booked: &mut Vec<u32>, state: &ClusterState, job: &Job) -> Option<bool> {
        let now_s = state.now_s();
        let leases = ((job.deadline_s? - now_s) / self.lease_s).floor().max(0.0) as usize;
        let needs = (job.left_s(now_s) / self.lease_s - 1e-9).ceil().max(0.0) as usize;
        if needs > leases {
            return None;
        }
        if booked.len() < leases {
            booked.resize(leases, 0);
        }
        let space = state.gpus().checked_sub(job.gpus)?;
        let latest = (0..leases).rev().filter(|lease| booked[*lease] <= space);
        let mine: Vec<usize> = latest.take(needs).collect();
        if mine.len() < needs {
            return None;
        }
        for lease in &mine {
            booked[*lease] += job.gpus;
        }
        Some(mine.last() == Some(&0))
    }

    /// Books all promised jobs by deadline, and one more. Returns the jobs that must run now;
    /// `None` for jobs that are late already.
    fn book_all<'a>(
        &self,
        state: &'a ClusterState,
        promises: &Promises,
        more: Option<JobId>,
    ) -> (Vec<u32>, Vec<(JobId, Option<bool>)>) {
        let promised = |job: &&'a Job| match promises.known(job.id) {
            Some(Admit::Accept) => true,
            Some(Admit::BestEffort) => self.anew && job.deadline_s.is_some(),
            Some(Admit::Reject) | None => false,
        };
        let mut jobs: Vec<&Job> = state
            .active()
            .filter(|job| promised(job) || Some(job.id) == more)
            .collect();
        let deadline = |job: &Job| job.deadline_s.unwrap_or(f64::INFINITY);
        jobs.sort_by(|a, b| deadline(a).total_cmp(&deadline(b)).then(a.id.cmp(&b.id)));
        let mut booked = Vec::new();
        let answers = jobs
            .into_iter()
            .map(|job| (job.id, self.book(&mut booked, state, job)))
            .collect();
        (booked, answers)
    }

    fn rebook(&mut self, state: &ClusterState, promises: &Promises) {
        let (booked, answers) = self.book_all(state, promises, None);
        self.booked = booked;
        self.booked_at_s = state.now_s();
        // A promised job that is late (its estimate was wrong) runs now: late is better than never.
        self.now = answers
            .into_iter()
            .filter(|(_, now)| now.is_some() || !self.anew)
            .map(|(id, now)| (id, now.unwrap_or(true)))
            .collect();
    }
}

impl Admission for Leases {
    fn name(&self) -> &'static str {
        "leases"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Deadline],
            manners: &[Manner::Exclusive],
            source: "Chronus, SoCC'21",
        }
    }
    fn admit(&mut self, state: &ClusterState, promises: &Promises, job: &Job) -> Admit {
        if job.deadline_s.is_none() {
            return Admit::BestEffort;
        }
        if self.anew {
            let (_, answers) = self.book_all(state, promises, Some(job.id));
            let booked = |(id, answer): &(JobId, Option<bool>)| *id == job.id && answer.is_some();
            return match answers.iter().any(booked) {
                true => Admit::Accept,
                false => Admit::BestEffort,
            };
        }
        if self.booked_at_s != state.now_s() {
            self.rebook(state, promises);
        }
        let mut booked = self.booked.clone();
        if let Some(now) = self.book(&mut booked, state, job) {
            self.booked = booked;
            self.now.insert(job.id, now);
            return Admit::Accept;
        }
        let (booked, answers) = self.book_all(state, promises, Some(job.id));
        if answers.iter().any(|(_, answer)| answer.is_none()) {
            return Admit::BestEffort;
        }
        self.booked = booked;
        Admit::Accept
    }
    fn refresh(&mut self, state: &ClusterState, promises: &Promises) {
        self.rebook(state, promises);
    }
    fn rank(&self, _: &ClusterState, _: &Promises, job: &Job) -> u32 {
        match self.now.get(&job.id) {
            Some(true) => 0,
            Some(false) if self.anew => 2,
            Some(false) | None => 1,
        }
    }
    fn ranks_drift(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::JobType;

    fn job(gpus: u32, duration_s: f64, deadline_s: f64) -> Job {
        let mut job = Job::rigid(JobType(0), gpus, 0.0, duration_s);
        job.deadline_s = Some(deadline_s);
        job
    }

    #[test]
    fn a_promise_is_booked_at_the_latest_time_that_meets_it() {
        let mut state = ClusterState::uniform(4, 4);
        let (mut leases, mut promises) = (Leases::new(10.0, false), Promises::default());
        let mut come = |state: &mut ClusterState, job| {
            let id = state.arrive(job);
            let admit = leases.admit(state, &promises, state.job(id));
            promises.set(id, admit);
            (admit, leases.rank(state, &promises, state.job(id)))
        };
        // Two leases of work, five until the deadline: not now.
        assert_eq!(come(&mut state, job(4, 20.0, 50.0)), (Admit::Accept, 1));
        // Three leases before 50 are left: all of them, the present one too.
        assert_eq!(come(&mut state, job(4, 30.0, 50.0)), (Admit::Accept, 0));
        assert_eq!(come(&mut state, job(1, 10.0, 50.0)).0, Admit::BestEffort);
        assert_eq!(come(&mut state, job(4, 10.0, 60.0)), (Admit::Accept, 1));
        assert_eq!(come(&mut state, job(5, 10.0, 600.0)).0, Admit::BestEffort);
    }

    #[test]
    fn asked_anew_an_earlier_deadline_takes_the_place() {
        let mut state = ClusterState::uniform(4, 4);
        let (mut leases, mut promises) = (Leases::new(10.0, true), Promises::default());
        let ids: Vec<JobId> = [job(4, 30.0, 50.0), job(4, 30.0, 40.0), job(4, 10.0, 500.0)]
            .into_iter()
            .map(|job| {
                let id = state.arrive(job);
                let admit = leases.admit(&state, &promises, state.job(id));
                promises.set(id, admit);
                assert_eq!(admit, Admit::Accept, "each would be kept when it comes");
                id
            })
            .collect();
        leases.refresh(&state, &promises);
        let rank = |at: usize| leases.rank(&state, &promises, state.job(ids[at]));
        // The second has three of the four leases before 40; the first would need three of the two
        // that are left.
        assert_eq!([rank(0), rank(1), rank(2)], [1, 2, 2]);
    }
}
