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
//! calibration trace, 1,024 GPUs: 0.8 % of the deadlines missed for 0.3 %, and best-effort jobs
//! take 390 minutes for 453.
//!
//! A new job is first booked into what the present bookings leave. If that fails, all jobs are
//! booked anew by deadline, and if that fails too, in other orders (`search`): jobs without a place
//! move ahead, halfway to the first, and all are booked again (squeaky wheel optimisation, Joslin
//! and Clements, AAAI'98). This local search stands for the paper's mixed-integer program, which
//! the tests compare it with. At the next lease all are booked by deadline again, or, where that
//! leaves somebody without a place, in the order in which the promises were made. (By deadline
//! alone 0.2 % are missed on that trace, but a promise may be left without its leases.)

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
        ParamSpec {
            name: "search",
            summary: "orders of booking that are tried before a promise is refused",
            kind: Kind::Number {
                min: 0.0,
                max: 1000.0,
                default: Leases::SEARCH as f64,
            },
        },
    ],
    build: |settings, _| {
        let leases = Leases::new(settings.number("lease"), settings.number("anew") > 0.0);
        Ok(Box::new(Leases {
            search: settings.number("search") as usize,
            ..leases
        }))
    },
};

/// The admission.
#[derive(Clone, Debug)]
pub struct Leases {
    lease_s: f64,
    anew: bool,
    search: usize,
    /// Promised jobs, in the order in which they are booked.
    order: Vec<JobId>,
    booked_at_s: f64,
    /// GPUs booked in each lease from now on.
    booked: Vec<u32>,
    /// Booked jobs and whether they must run now.
    now: HashMap<JobId, bool>,
}

/// Bookings in an order: GPUs in each lease, and for each job whether it must run now; `None` for
/// a job without enough leases.
#[derive(Clone, Debug)]
struct Booking {
    booked: Vec<u32>,
    answers: Vec<(JobId, Option<bool>)>,
}

impl Booking {
    /// Jobs without enough leases.
    fn missing(&self) -> usize {
        let without = self.answers.iter().filter(|(_, answer)| answer.is_none());
        without.count()
    }
}

impl Leases {
    /// Orders that are tried where nothing else is said.
    pub const SEARCH: usize = 8;

    /// With leases of this length, in seconds: that of the rounds. `anew`: promises are made again
    /// at every lease instead of being kept.
    #[must_use]
    pub fn new(lease_s: f64, anew: bool) -> Self {
        Self {
            lease_s,
            anew,
            search: Self::SEARCH,
            order: Vec::new(),
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

    /// Promised jobs by deadline, and one more.
    fn by_deadline<'a>(
        &self,
        state: &'a ClusterState,
        promises: &Promises,
        more: Option<JobId>,
    ) -> Vec<&'a Job> {
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
        jobs
    }

    fn book_in(&self, state: &ClusterState, jobs: &[&Job]) -> Booking {
        let mut booked = Vec::new();
        let answers = jobs
            .iter()
            .map(|job| (job.id, self.book(&mut booked, state, job)))
            .collect();
        Booking { booked, answers }
    }

    /// Books in this order, and in others as long as somebody has no place. The one with the fewest
    /// such jobs.
    fn book_best<'a>(
        &self,
        state: &ClusterState,
        mut jobs: Vec<&'a Job>,
    ) -> (Vec<&'a Job>, Booking) {
        let booking = self.book_in(state, &jobs);
        let mut best = (jobs.clone(), booking.clone());
        let mut last = booking;
        for _ in 0..self.search {
            if best.1.missing() == 0 {
                break;
            }
            for at in 0..jobs.len() {
                if last.answers[at].1.is_none() {
                    jobs[at / 2..=at].rotate_right(1);
                }
            }
            last = self.book_in(state, &jobs);
            if last.missing() < best.1.missing() {
                best = (jobs.clone(), last.clone());
            }
        }
        best
    }

    fn keep(&mut self, jobs: &[&Job], booking: Booking) {
        self.order = jobs.iter().map(|job| job.id).collect();
        self.booked = booking.booked;
        // A promised job that is late (its estimate was wrong) runs now: late is better than never.
        self.now = (booking.answers.into_iter())
            .filter(|(_, now)| now.is_some() || !self.anew)
            .map(|(id, now)| (id, now.unwrap_or(true)))
            .collect();
    }

    fn rebook(&mut self, state: &ClusterState, promises: &Promises) {
        let mut jobs = self.by_deadline(state, promises, None);
        let mut booking = self.book_in(state, &jobs);
        if booking.missing() > 0 && !self.anew {
            // Nobody is without a place in the order in which the promises were made.
            let places = self.order.iter().enumerate();
            let places: HashMap<JobId, usize> = places.map(|(at, id)| (*id, at)).collect();
            let mut kept = jobs.clone();
            kept.sort_by_key(|job| places.get(&job.id).copied().unwrap_or(usize::MAX));
            let other = self.book_in(state, &kept);
            if other.missing() < booking.missing() {
                (jobs, booking) = (kept, other);
            }
        }
        self.booked_at_s = state.now_s();
        self.keep(&jobs, booking);
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
            let jobs = self.by_deadline(state, promises, Some(job.id));
            let answers = self.book_in(state, &jobs).answers;
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
            self.order.push(job.id);
            self.now.insert(job.id, now);
            return Admit::Accept;
        }
        // With too little time left for itself no order helps.
        if self.book(&mut Vec::new(), state, job).is_none() {
            return Admit::BestEffort;
        }
        let jobs = self.by_deadline(state, promises, Some(job.id));
        let (jobs, booking) = self.book_best(state, jobs);
        if booking.missing() > 0 {
            return Admit::BestEffort;
        }
        self.keep(&jobs, booking);
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

    /// Whether all jobs can be given enough leases: Chronus' integer program. A binary variable for
    /// each job and lease before its deadline.
    fn exact(jobs: &[(u32, usize, usize)], gpus: u32) -> bool {
        use microlp::{ComparisonOp, OptimizationDirection, Problem};
        let mut problem = Problem::new(OptimizationDirection::Minimize);
        let mut leases: Vec<Vec<(microlp::Variable, f64)>> = Vec::new();
        for (width, needs, due) in jobs {
            let mine: Vec<_> = (0..*due).map(|_| problem.add_binary_var(0.0)).collect();
            leases.resize(leases.len().max(*due), Vec::new());
            for (lease, x) in leases.iter_mut().zip(&mine) {
                lease.push((*x, f64::from(*width)));
            }
            let sum: Vec<_> = mine.iter().map(|x| (*x, 1.0)).collect();
            problem.add_constraint(&sum, ComparisonOp::Eq, *needs as f64);
        }
        for lease in &leases {
            problem.add_constraint(lease, ComparisonOp::Le, f64::from(gpus));
        }
        problem
            .solve()
            .is_ok_and(|solved| solved.into_solution().is_ok())
    }

    #[test]
    fn the_search_admits_nearly_what_the_integer_program_does_and_nothing_else() {
        let mut random = crate::cluster::Random::new(37);
        let (mut program, mut with, mut without) = (0, 0, 0);
        for _ in 0..300 {
            let jobs: Vec<(u32, usize, usize)> = (0..4 + random.below(4))
                .map(|_| {
                    let due = 2 + random.below(5);
                    (
                        1 + random.below(4) as u32,
                        1 + random.below(due.min(3)),
                        due,
                    )
                })
                .collect();
            let can = exact(&jobs, 6);
            let promised = |search| {
                let mut state = ClusterState::uniform(6, 6);
                let mut leases = Leases {
                    search,
                    ..Leases::new(10.0, false)
                };
                let mut promises = Promises::default();
                let of = jobs.iter().map(|(width, needs, due)| {
                    job(*width, 10.0 * *needs as f64, 10.0 * *due as f64)
                });
                of.collect::<Vec<_>>().into_iter().all(|job| {
                    let id = state.arrive(job);
                    let admit = leases.admit(&state, &promises, state.job(id));
                    promises.set(id, admit);
                    admit == Admit::Accept
                })
            };
            let (searched, greedy) = (promised(Leases::SEARCH), promised(0));
            assert!(can || !searched, "{jobs:?} cannot all be promised");
            assert!(searched || !greedy, "{jobs:?}: the search loses nothing");
            program += usize::from(can);
            with += usize::from(searched);
            without += usize::from(greedy);
        }
        assert!(program > 50 && program < 250, "{program} of 300");
        assert!(with > without, "{with} against {without} of {program}");
        assert!(50 * with >= 49 * program, "{with} of {program}");
    }

    #[test]
    fn what_was_promised_is_booked_until_it_is_done() {
        let mut random = crate::cluster::Random::new(41);
        for _ in 0..100 {
            let mut state = ClusterState::uniform(6, 6);
            let (mut leases, mut promises) = (Leases::new(10.0, false), Promises::default());
            for lease in 0..30 {
                state.advance(f64::from(lease) * 10.0);
                for id in state.running().clone() {
                    if state.job(id).left(state.now_s()) < 1e-6 {
                        state.finish(id);
                    }
                }
                for _ in 0..random.below(3) {
                    let due = 2 + random.below(9);
                    let long_s = 10.0 * (1 + random.below(due)) as f64;
                    let mut job = job(1 + random.below(4) as u32, long_s, 10.0 * due as f64);
                    job.arrival_s = state.now_s();
                    job.deadline_s = job.deadline_s.map(|due| due + state.now_s());
                    let id = state.arrive(job);
                    let admit = leases.admit(&state, &promises, state.job(id));
                    promises.set(id, admit);
                }
                leases.refresh(&state, &promises);
                // Those that must run now fit, and are run.
                let now: Vec<JobId> = (state.active().map(|job| job.id))
                    .filter(|id| promises.of(*id) == Admit::Accept)
                    .filter(|id| leases.rank(&state, &promises, state.job(*id)) == 0)
                    .collect();
                let running = state.running().iter();
                let mut batch: Vec<crate::cluster::Decision> = running
                    .map(|id| crate::cluster::Decision::Suspend { job: *id })
                    .collect();
                state.apply(&batch).unwrap();
                batch.clear();
                let mut gpu = 0;
                for id in &now {
                    let gpus = (gpu..).take(state.job(*id).gpus as usize);
                    gpu += state.job(*id).gpus;
                    batch.push(crate::cluster::Decision::Place {
                        job: *id,
                        gpus: gpus.map(crate::cluster::GpuId).collect(),
                        class: crate::Class::Guaranteed,
                        share: 1.0,
                        mem_bytes: None,
                    });
                }
                assert!(gpu <= 6, "{gpu} GPUs in one lease");
                state.apply(&batch).unwrap();
                for id in now {
                    state.set_rate(id, 1.0);
                    let job = state.job(id);
                    let end_s = state.now_s() + job.left_s(state.now_s());
                    assert!(job.deadline_s.is_some_and(|due| end_s <= due + 1e-6));
                }
                for job in state.active() {
                    let kept = job.deadline_s.is_some_and(|due| due > state.now_s());
                    assert!(promises.of(job.id) != Admit::Accept || kept, "{job:?}");
                }
            }
        }
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
