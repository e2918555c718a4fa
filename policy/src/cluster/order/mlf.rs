//! MLFS' heuristic (CoNEXT'20): early training, near deadlines, short rests and long waits first.

use super::{Drift, Key, Order};
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, Job, Manner, Objective, Tags};
use crate::registry::{Kind, ParamSpec, Registration};

const fn number(name: &'static str, summary: &'static str, max: f64, default: f64) -> ParamSpec {
    ParamSpec {
        name,
        summary,
        kind: Kind::Number {
            min: 0.0,
            max,
            default,
        },
    }
}

/// How it is chosen.
pub(super) static MLF: Entry<dyn Order> = Registration {
    name: "mlf",
    summary: "by what training gains next, deadline, remaining time and waiting",
    params: &[
        number(
            "ml",
            "weight of the learning score; the rest is for time",
            1.0,
            0.3,
        ),
        number(
            "deadline",
            "weight of the deadline in the score for time",
            1.0,
            0.3,
        ),
        number(
            "rest",
            "weight of the remaining time in the score for time",
            1.0,
            0.3,
        ),
        number(
            "waiting",
            "weight of waiting in the score for time",
            1.0,
            0.35,
        ),
        number(
            "control",
            "GPUs asked for over GPUs there are, above which a deadline that can no longer be met is ignored",
            1000.0,
            1.0,
        ),
    ],
    build: |settings, _| {
        Ok(Box::new(Mlf::new(Weights {
            ml: settings.number("ml"),
            deadline: settings.number("deadline"),
            rest: settings.number("rest"),
            waiting: settings.number("waiting"),
            control: settings.number("control"),
        })))
    },
};

/// What each score counts for. The defaults are the paper's from memory, unverified; none was
/// fitted to a trace.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// The learning score; the rest is for the score for time.
    pub ml: f64,
    /// In the score for time: the deadline.
    pub deadline: f64,
    /// In the score for time: remaining time.
    pub rest: f64,
    /// In the score for time: waiting.
    pub waiting: f64,
    /// GPUs asked for over GPUs there are, above which load is controlled.
    pub control: f64,
}

/// Steps of a job's training by which gains are measured: a hundredth of its work each.
const STEPS: f64 = 100.0;
/// Fall of the loss over a whole training where nobody reports one: `1 / (1 + STEEP x progress)`,
/// the shape of Optimus' fit ([`crate::cluster::convergence`]).
const STEEP: f64 = 9.0;
/// Times shorter than this count as this, in seconds: their inverse would be all that counts.
const LEAST_S: f64 = 1.0;

/// After the heuristic of MLFS (MLF-H), the greatest score first: `ml x learning + (1 - ml) x
/// time`, for each GPU that the job asks for. Units, waiting and the division by GPUs are ours.
///
/// * *Learning*: what the loss falls by in the next step of training relative to all it fell so
///   far, over the number of steps done: early steps teach most. The paper weighs this by the size
///   of a task's model partition and by who depends on it; all workers of a data-parallel job hold
///   the whole model and wait for each other, so both are equal within a job and drop out.
/// * *Time*: `deadline x T / (time to the deadline) + rest x T / R + waiting x W / R`, with the
///   remaining time `R` and the time `W` for which it has waited. The paper adds two inverse times
///   and a time and names no units. Here the unit of time `T` is the mean remaining time of the
///   jobs that are there, and waiting counts against the job's own rest, so that one formula holds
///   for jobs of minutes and of days.
/// * *For each GPU*: the paper scores tasks, each with the whole score for time. Here a job starts
///   as a whole, so its score is divided by the GPUs that it takes, as SRSF does. The paper's
///   urgency of a job is not here.
/// * *Load control*: while more GPUs are asked for than `control` times those there are, a deadline
///   counts only as long as it can be kept: what misses it anyway goes by its rest and its waiting.
///   The paper stops such jobs where their accuracy will do; nothing here ends a job that its user
///   did not end.
#[derive(Clone, Copy, Debug)]
pub struct Mlf {
    weights: Weights,
    /// The unit of time, in seconds.
    unit_s: f64,
    overloaded: bool,
}

impl Mlf {
    /// With these weights.
    #[must_use]
    pub fn new(weights: Weights) -> Self {
        Self {
            weights,
            unit_s: 1.0,
            overloaded: false,
        }
    }

    fn score(&self, state: &ClusterState, job: &Job) -> f64 {
        let Weights {
            ml,
            deadline,
            rest,
            waiting,
            ..
        } = self.weights;
        let now_s = state.now_s();
        let left_s = rest_s(job, now_s).max(LEAST_S);
        let waited_s = (now_s - job.arrival_s - job.held_s(now_s)).max(0.0);
        let kept = |time_s: &f64| *time_s > 0.0 && !(self.overloaded && *time_s < left_s);
        let due = job.deadline_s.map(|at_s| at_s - now_s).filter(kept);
        let due = due.map_or(0.0, |time_s| self.unit_s / time_s.max(LEAST_S));
        let time = deadline * due + rest * self.unit_s / left_s + waiting * waited_s / left_s;
        let score = ml * learning(job, now_s) + (1.0 - ml) * time;
        score / f64::from(job.gpus.max(1))
    }
}

/// Seconds that a job would still take, alone. One that has gone beyond what was expected of it is
/// expected to take as long again: nothing left would put it before all others for good.
fn rest_s(job: &Job, now_s: f64) -> f64 {
    let left_s = job.left_s(now_s);
    if left_s == 0.0 {
        job.held_s(now_s)
    } else {
        left_s
    }
}

/// What the next step of training gains relative to all that was gained, over the steps done.
fn learning(job: &Job, now_s: f64) -> f64 {
    let loss = |progress: f64| 1.0 / (1.0 + STEEP * progress);
    let progress = (job.done(now_s) / job.work).clamp(0.0, 1.0);
    let next = (progress + 1.0 / STEPS).min(1.0);
    let (gain, all) = (loss(progress) - loss(next), loss(0.0) - loss(next));
    let score = gain / all / (progress * STEPS).max(1.0);
    // Of a job without any work nothing can be said.
    if score.is_finite() { score } else { 0.0 }
}

impl Order for Mlf {
    fn name(&self) -> &'static str {
        "mlf"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Deadline, Objective::Completion],
            manners: &[Manner::Exclusive],
            source: "MLFS, CoNEXT'20",
        }
    }
    fn key(&self, state: &ClusterState, job: &Job) -> Key {
        Key::of(-self.score(state, job), job)
    }
    fn preemptive(&self) -> bool {
        true
    }
    fn skips(&self) -> bool {
        true
    }
    fn drift(&self) -> Drift {
        Drift::Always
    }
    fn refresh(&mut self, state: &ClusterState) {
        let gpus = f64::from(state.gpus());
        self.overloaded = state.demand() as f64 > self.weights.control * gpus;
        let left = state.active().map(|job| rest_s(job, state.now_s()));
        let (mut sum_s, mut count) = (0.0, 0.0);
        for left_s in left.filter(|left_s| left_s.is_finite()) {
            (sum_s, count) = (sum_s + left_s, count + 1.0);
        }
        let mean_s: f64 = sum_s / f64::max(count, 1.0);
        self.unit_s = mean_s.clamp(LEAST_S, f64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{JobId, JobType, Order};

    const PAPER: Weights = Weights {
        ml: 0.3,
        deadline: 0.3,
        rest: 0.3,
        waiting: 0.35,
        control: 1.0,
    };
    /// Load is never controlled.
    const NEVER: f64 = 1000.0;

    fn first(weights: Weights, jobs: [Job; 2], now_s: f64) -> JobId {
        let mut state = ClusterState::uniform(1, 1);
        state.advance(now_s);
        for job in jobs {
            state.arrive(job);
        }
        let mut order = Mlf::new(weights);
        order.refresh(&state);
        let least = state.active().min_by_key(|job| order.key(&state, job));
        least.unwrap().id
    }

    fn only(ml: f64, deadline: f64, rest: f64, waiting: f64) -> Weights {
        Weights {
            ml,
            deadline,
            rest,
            waiting,
            control: NEVER,
        }
    }

    #[test]
    fn each_score_alone_puts_first_what_it_is_for() {
        let job = |gpus, duration_s| Job::rigid(JobType(0), gpus, 0.0, duration_s);
        let due = |at_s| Job {
            deadline_s: Some(at_s),
            ..job(1, 10.0)
        };
        let done = |part: f64| Job {
            settled_work: part * 10.0,
            ..job(1, 10.0)
        };
        let came = |arrival_s| Job {
            arrival_s,
            ..job(1, 10.0)
        };
        // The second is first each time, which its number does not give it.
        let cases = [
            (only(1.0, 0.0, 0.0, 0.0), [done(0.8), done(0.1)], "learning"),
            (
                only(0.0, 1.0, 0.0, 0.0),
                [due(900.0), due(200.0)],
                "deadline",
            ),
            (
                only(0.0, 0.0, 1.0, 0.0),
                [job(8, 10.0), job(1, 40.0)],
                "rest",
            ),
            (
                only(0.0, 0.0, 0.0, 1.0),
                [came(90.0), came(10.0)],
                "waiting",
            ),
        ];
        for (weights, jobs, what) in cases {
            assert_eq!(first(weights, jobs, 100.0), JobId(1), "{what}");
        }
    }

    #[test]
    fn a_deadline_that_is_lost_counts_no_more_only_under_overload() {
        let jobs = || {
            let lost = Job {
                deadline_s: Some(5.0),
                ..Job::rigid(JobType(0), 1, 0.0, 1001.0)
            };
            [lost, Job::rigid(JobType(0), 1, 0.0, 1000.0)]
        };
        let never = Weights {
            control: NEVER,
            ..PAPER
        };
        assert_eq!(first(never, jobs(), 0.0), JobId(0));
        assert_eq!(first(PAPER, jobs(), 0.0), JobId(1));
        // A deadline that is over counts in neither.
        assert_eq!(first(never, jobs(), 5.0), JobId(1));
    }

    #[test]
    fn a_job_beyond_its_work_is_not_first_for_good() {
        let beyond = Job {
            settled_work: 20.0,
            settled_s: 2000.0,
            ..Job::rigid(JobType(0), 1, 0.0, 10.0)
        };
        let jobs = [beyond, Job::rigid(JobType(0), 1, 4990.0, 100.0)];
        assert_eq!(first(PAPER, jobs, 5000.0), JobId(1));
    }

    #[test]
    fn the_unit_of_time_does_not_change_the_order() {
        let jobs = |unit_s: f64| {
            let job = |gpus, arrival_s, duration_s, deadline_s: Option<f64>| Job {
                deadline_s: deadline_s.map(|at_s| at_s * unit_s),
                ..Job::rigid(JobType(0), gpus, arrival_s * unit_s, duration_s * unit_s)
            };
            [
                job(1, 0.0, 300.0, None),
                job(2, 40.0, 100.0, Some(900.0)),
                job(1, 90.0, 400.0, Some(520.0)),
                job(4, 10.0, 50.0, None),
            ]
        };
        let order = |unit_s: f64| {
            let mut state = ClusterState::uniform(1, 1);
            state.advance(100.0 * unit_s);
            let ids: Vec<JobId> = jobs(unit_s).map(|job| state.arrive(job)).into();
            let mut order = Mlf::new(PAPER);
            order.refresh(&state);
            let mut keyed: Vec<_> = (ids.iter())
                .map(|id| (order.key(&state, state.job(*id)), *id))
                .collect();
            keyed.sort_by_key(|(key, _)| *key);
            keyed.into_iter().map(|(_, id)| id).collect::<Vec<_>>()
        };
        assert_eq!(order(1.0), order(3600.0));
        assert_ne!(order(1.0), [0, 1, 2, 3].map(JobId));
    }

    #[test]
    fn absurd_values_rank_and_do_not_panic() {
        let odd = |work| Job {
            work,
            deadline_s: Some(f64::NEG_INFINITY),
            ..Job::rigid(JobType(0), 1, 0.0, work)
        };
        for work in [f64::NAN, f64::INFINITY, f64::MAX] {
            // The other one gains more from its next step.
            assert_eq!(first(PAPER, [odd(work), odd(1.0)], 3.0), JobId(1), "{work}");
        }
        assert_eq!(first(PAPER, [odd(0.0), odd(100.0)], 3.0), JobId(0));
    }
}
