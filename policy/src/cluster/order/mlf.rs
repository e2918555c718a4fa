//! MLFS' heuristic (CoNEXT'20): early training, near deadlines and short rests first.

use std::collections::HashMap;

use super::{Drift, Key, Order};
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, Job, JobId, Manner, Objective, Tags};
use crate::registry::{Kind, ParamSpec, Registration};

const fn part(name: &'static str, summary: &'static str, default: f64) -> ParamSpec {
    ParamSpec {
        name,
        summary,
        kind: Kind::Number {
            min: 0.0,
            max: 1.0,
            default,
        },
    }
}

/// How it is chosen.
pub(super) static MLF: Entry<dyn Order> = Registration {
    name: "mlf",
    summary: "by what training gains next, deadline, remaining work and waiting",
    params: &[
        part(
            "ml",
            "weight of the learning score; the rest is for time",
            0.3,
        ),
        part(
            "deadline",
            "weight of the deadline in the score for time",
            0.3,
        ),
        part(
            "rest",
            "weight of the remaining work in the score for time",
            0.3,
        ),
        part("waiting", "weight of waiting in the score for time", 0.35),
        part(
            "control",
            "part of the GPUs asked for above which hopeless jobs stand back; 0: never",
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

/// What each score counts for. The defaults are the paper's, as we remember them; none was fitted
/// to a trace.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// The learning score; the rest is for the score for time.
    pub ml: f64,
    /// In the score for time: the deadline.
    pub deadline: f64,
    /// In the score for time: remaining work.
    pub rest: f64,
    /// In the score for time: waiting.
    pub waiting: f64,
    /// Part of the GPUs asked for above which load is controlled; 0: never.
    pub control: f64,
}

/// Steps of a job's training by which gains are measured: a hundredth of its work each.
const STEPS: f64 = 100.0;
/// Fall of the loss over a whole training where nobody reports one: `1 / (1 + STEEP x progress)`,
/// the shape of Optimus' fit ([`crate::cluster::convergence`]).
const STEEP: f64 = 9.0;

/// The three scores of MLFS' heuristic (MLF-H), the greatest sum first.
///
/// * *Learning*: what the loss falls by in the next step of training relative to all it fell so
///   far, over the number of steps done: early steps teach most. The paper weighs this by the size
///   of a task's model partition and by who depends on it; all workers of a data-parallel job hold
///   the whole model and wait for each other, so both are equal within a job and drop out.
/// * *Time*: the inverse of the time to the deadline, the inverse of the remaining work in
///   GPU-seconds, and the time that it has waited.
/// * *Load control*: while more GPUs are asked for than `control` of those there are, jobs that
///   cannot keep their deadline any more stand behind all others, shortest first. The paper stops
///   such jobs where their accuracy will do; nothing here ends a job that its user did not end.
///
/// Times and gains have no common unit, and a sum of inverses is ruled by the smallest: every score
/// counts by its rank among the jobs that are there, from 0 to 1.
#[derive(Clone, Debug)]
pub struct Mlf {
    weights: Weights,
    scores: HashMap<JobId, f64>,
    overloaded: bool,
}

impl Mlf {
    /// With these weights.
    #[must_use]
    pub fn new(weights: Weights) -> Self {
        Self {
            weights,
            scores: HashMap::new(),
            overloaded: false,
        }
    }

    fn hopeless(&self, state: &ClusterState, job: &Job) -> bool {
        let now_s = state.now_s();
        let misses = |deadline_s| now_s + job.left_s(now_s) > deadline_s;
        self.overloaded && job.deadline_s.is_some_and(misses)
    }
}

/// What the next step of training gains relative to all that was gained, over the steps done.
fn learning(job: &Job, now_s: f64) -> f64 {
    let loss = |progress: f64| 1.0 / (1.0 + STEEP * progress);
    let progress = (job.done(now_s) / job.work).clamp(0.0, 1.0);
    let next = (progress + 1.0 / STEPS).min(1.0);
    let (gain, all) = (loss(progress) - loss(next), loss(0.0) - loss(next));
    if all > 0.0 {
        gain / all / (progress * STEPS).max(1.0)
    } else {
        0.0
    }
}

/// The rank of each value among all, from 0 for the least to 1 for the greatest; equal values have
/// the same.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let most = values.len().saturating_sub(1).max(1) as f64;
    let rank = |value: &f64| sorted.partition_point(|other| other.total_cmp(value).is_lt());
    values
        .iter()
        .map(|value| rank(value) as f64 / most)
        .collect()
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
        if self.hopeless(state, job) {
            return Key::new(1, job.left_s(state.now_s()), job);
        }
        // One that came after the look around: of none, least.
        Key::new(0, -self.scores.get(&job.id).copied().unwrap_or(0.0), job)
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
        let Weights {
            ml,
            deadline,
            rest,
            waiting,
            control,
        } = self.weights;
        let now_s = state.now_s();
        self.overloaded =
            control > 0.0 && state.demand() as f64 > control * f64::from(state.gpus());
        let jobs: Vec<&Job> = state.active().collect();
        let by = |value: &dyn Fn(&Job) -> f64| {
            ranks(&jobs.iter().map(|job| value(job)).collect::<Vec<f64>>())
        };
        let inverse = |x: f64| 1.0 / x.max(1e-9);
        let scores = [
            (ml, by(&|job| learning(job, now_s))),
            (
                (1.0 - ml) * deadline,
                by(&|job| job.deadline_s.map_or(0.0, |at_s| inverse(at_s - now_s))),
            ),
            (
                (1.0 - ml) * rest,
                by(&|job| inverse(job.left_s(now_s) * f64::from(job.gpus))),
            ),
            (
                (1.0 - ml) * waiting,
                by(&|job| now_s - job.arrival_s - job.held_s(now_s)),
            ),
        ];
        let sum = |at: usize| {
            scores
                .iter()
                .map(|(weight, ranks)| weight * ranks[at])
                .sum()
        };
        self.scores = (jobs.iter().enumerate())
            .map(|(at, job)| (job.id, sum(at)))
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{JobType, Order};

    const EVEN: Weights = Weights {
        ml: 0.3,
        deadline: 0.3,
        rest: 0.3,
        waiting: 0.35,
        control: 1.0,
    };

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
            control: 0.0,
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
    fn a_job_that_cannot_keep_its_deadline_stands_back_only_under_overload() {
        let jobs = || {
            let hopeless = Job {
                deadline_s: Some(5.0),
                ..Job::rigid(JobType(0), 1, 0.0, 10.0)
            };
            [hopeless, Job::rigid(JobType(0), 1, 0.0, 1000.0)]
        };
        let none = Weights {
            control: 0.0,
            ..EVEN
        };
        assert_eq!(first(none, jobs(), 0.0), JobId(0));
        assert_eq!(first(EVEN, jobs(), 0.0), JobId(1));
    }

    #[test]
    fn values_that_make_no_sense_rank_and_do_not_panic() {
        let odd = |work| Job {
            work,
            deadline_s: Some(f64::NEG_INFINITY),
            ..Job::rigid(JobType(0), 1, 0.0, work)
        };
        for work in [0.0, f64::NAN, f64::INFINITY] {
            first(EVEN, [odd(work), odd(1.0)], 3.0);
        }
    }
}
