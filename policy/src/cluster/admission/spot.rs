//! A quota of spot jobs by what guaranteed ones will ask for.
//!
//! GFS (ASPLOS'26) runs two kinds of jobs: guaranteed ones, which take GPUs from spot jobs when
//! they come, and spot jobs, which are to run undisturbed for a while. Spot jobs start within a
//! quota. With p the probability that is wanted, C the GPUs there are and H the time that a spot
//! job is to have, a forecast says what guaranteed jobs will ask for at most within H with
//! probability p. What is left of C, times a factor eta, is the quota: of 100 GPUs with 60 asked
//! for, 75 at most within the hour with p = 0.9, spot jobs have 25 although 40 are free.
//!
//! Eta follows what happens. A spot job that ends, or has run for H once more, was not disturbed;
//! one that was stopped was. The part e of the disturbed ones should be about 1 - p: at 1.5 (1 - p)
//! or more eta is multiplied by (1 - p) / e; at half of it or less, while a spot job has waited for
//! an hour, by 1.5 - e / (1 - p). These are the rules of the authors' simulator, which has the last
//! fraction upside down: that factor would be below zero.
//!
//! Ours: the forecast ([`demand`](super::demand)); each change of eta goes by what happened since
//! the one before, for the same stop counted at each step would take it to zero within an hour;
//! eta falls only by as many as can show a part of 1 - p (10 for 0.9); and one spot job at a time
//! may use what the forecast leaves, whatever eta is. Without a history the forecast is that
//! nothing changes.
//!
//! Guaranteed jobs come first and do not stop each other, whatever the order says; those of them
//! that come are placed at once, and spot jobs that are in the way are stopped, the last in order
//! first. Waiting spot jobs start within the quota, the largest first, as in GFS, then by arrival.
//! What GFS chooses by the work that a stop loses does not arise here: a suspended job keeps its
//! work.

use std::collections::{BTreeMap, BTreeSet};

use super::demand::{Demand, STEPS};
use super::{Admission, Admit, Promises};
use crate::cluster::catalogue::Entry;
use crate::cluster::{Class, ClusterState, Job, JobId, Manner, Objective, Tags, UserId};
use crate::registry::{Kind, ParamSpec, PolicyError, Registration};

/// How it is chosen.
pub(super) static SPOT_QUOTA: Entry<dyn Admission> = Registration {
    name: "spot-quota",
    summary: "opportunistic jobs start as far as guaranteed ones will leave them alone",
    params: &[
        ParamSpec {
            name: "rate",
            summary: "part of the opportunistic jobs that is to run undisturbed",
            kind: Kind::Number {
                min: 0.5,
                max: 0.999,
                default: 0.9,
            },
        },
        ParamSpec {
            name: "hours",
            summary: "for how long",
            kind: Kind::Number {
                min: 0.01,
                max: 24.0,
                default: 1.0,
            },
        },
        ParamSpec {
            name: "fixed",
            summary: "this part of the GPUs is the quota, in place of a forecast; 0: by forecast",
            kind: Kind::Number {
                min: 0.0,
                max: 1.0,
                default: 0.0,
            },
        },
    ],
    build: |settings, context| {
        if !context.opportunistic {
            return Err(PolicyError::Needs {
                policy: "spot-quota",
                what: "jobs of both classes, which this trace does not have",
            });
        }
        let mut quota = SpotQuota::new(settings.number("rate"), 3600.0 * settings.number("hours"));
        quota.fixed = Some(settings.number("fixed")).filter(|part| *part > 0.0);
        Ok(Box::new(quota))
    },
};

/// A spot job that has waited for so long is a reason for a larger quota, in seconds.
const PATIENCE_S: f64 = 3600.0;
/// Eta is at least this, so that it can come back.
const LEAST_ETA: f64 = 0.01;

/// The admission.
#[derive(Clone, Debug)]
pub struct SpotQuota {
    /// Probability that is wanted.
    rate: f64,
    /// For how long a spot job is to run undisturbed.
    span_s: f64,
    /// A part of the GPUs in place of the forecast.
    fixed: Option<f64>,
    demand: Demand,
    eta: f64,
    /// GPUs that guaranteed jobs are expected to leave.
    free: f64,
    /// GPUs that spot jobs may hold.
    quota: f64,
    /// Undisturbed and disturbed since eta last changed.
    outcomes: [f64; 2],
    /// Spot jobs that run, and since when, or since their last whole span.
    running: BTreeMap<JobId, f64>,
    /// Spot jobs that wait, and since when.
    waiting: BTreeMap<JobId, f64>,
    /// Of them, those that may start.
    allowed: BTreeSet<JobId>,
}

/// What outlives the jobs: a forecast goes on when the policies are made anew.
#[derive(Clone, Debug)]
pub struct History {
    demand: Demand,
    eta: f64,
    free: f64,
    quota: f64,
    outcomes: [f64; 2],
}

impl History {
    /// Users have other numbers from now on.
    pub fn renumber(&mut self, number: &mut dyn FnMut(UserId) -> UserId) {
        self.demand.renumber(number);
    }
}

fn spot(job: &Job) -> bool {
    job.profile.class == Class::Opportunistic
}

/// What a job asks for, in GPUs.
fn asks(job: &Job) -> f64 {
    job.part.map_or(f64::from(job.gpus), |part| part.share)
}

impl SpotQuota {
    /// Spot jobs are to run undisturbed for `span_s` seconds with probability `rate`.
    #[must_use]
    pub fn new(rate: f64, span_s: f64) -> Self {
        Self {
            rate,
            span_s,
            fixed: None,
            demand: Demand::new(span_s / STEPS as f64),
            eta: 1.0,
            free: 0.0,
            quota: 0.0,
            outcomes: [0.0; 2],
            running: BTreeMap::new(),
            waiting: BTreeMap::new(),
            allowed: BTreeSet::new(),
        }
    }

    /// What became of the spot jobs that ran and waited when it looked last.
    fn look(&mut self, state: &ClusterState) {
        let now_s = state.now_s();
        self.running.retain(|id, since_s| {
            let job = state.job(*id);
            let [undisturbed, disturbed] = &mut self.outcomes;
            if job.run().is_none() {
                *(if job.is_done() {
                    undisturbed
                } else {
                    disturbed
                }) += 1.0;
                return false;
            }
            let spans = ((now_s - *since_s) / self.span_s).floor().max(0.0);
            *undisturbed += spans;
            *since_s += spans * self.span_s;
            true
        });
        self.waiting.retain(|id, _| state.job(*id).waits());
        for job in state.active().filter(|job| spot(job)) {
            if job.run().is_some() {
                self.running.entry(job.id).or_insert(now_s);
            } else if job.waits() {
                self.waiting.entry(job.id).or_insert(now_s);
            }
        }
    }

    /// Eta by what happened since it last changed.
    fn adjust(&mut self, now_s: f64) {
        let [undisturbed, disturbed] = self.outcomes;
        let (count, lost) = (undisturbed + disturbed, 1.0 - self.rate);
        let part = if count > 0.0 { disturbed / count } else { 0.0 };
        if count >= 1.0 / lost - 1e-9 && part >= 1.5 * lost {
            self.eta = (self.eta * lost / part).max(LEAST_ETA);
            self.outcomes = [0.0; 2];
        } else if part <= 0.5 * lost
            && (self.waiting.values()).any(|since_s| now_s - since_s > PATIENCE_S)
        {
            self.eta *= 1.5 - part / lost;
            self.outcomes = [0.0; 2];
        }
    }

    /// The quota, if a step is over.
    fn forecast(&mut self, state: &ClusterState) {
        let (now_s, gpus) = (state.now_s(), f64::from(state.gpus()));
        if let Some(part) = self.fixed {
            self.quota = (part * gpus).floor();
            return;
        }
        let mut demand: BTreeMap<UserId, f64> = BTreeMap::new();
        for job in state.active().filter(|job| !spot(job)) {
            *demand.entry(job.user).or_default() += asks(job);
        }
        if !self.demand.sample(now_s, &demand) {
            return;
        }
        self.adjust(now_s);
        let free = gpus
            - self
                .demand
                .quantile(self.rate, now_s)
                .ceil()
                .clamp(0.0, gpus);
        // More than the cluster would only take longer to fall again.
        self.eta = self.eta.min(gpus / free.max(1.0));
        self.free = free;
        self.quota = (free * self.eta).min(gpus);
    }

    fn allow(&mut self, state: &ClusterState) {
        let running = self.running.keys().map(|id| asks(state.job(*id)));
        let mut left = self.quota - running.sum::<f64>();
        let mut waiting: Vec<&Job> = self.waiting.keys().map(|id| state.job(*id)).collect();
        waiting.sort_by(|a, b| {
            let larger = asks(b).total_cmp(&asks(a));
            larger
                .then(a.arrival_s.total_cmp(&b.arrival_s))
                .then(a.id.cmp(&b.id))
        });
        self.allowed.clear();
        for job in &waiting {
            if asks(job) <= left + 1e-9 {
                left -= asks(job);
                self.allowed.insert(job.id);
            }
        }
        if self.running.is_empty() && self.allowed.is_empty() {
            // Where nobody runs nothing is learnt: eta alone keeps no cluster empty.
            let first = waiting.iter().find(|job| asks(job) <= self.free + 1e-9);
            self.allowed.extend(first.map(|job| job.id));
        }
    }
}

impl Admission for SpotQuota {
    fn name(&self) -> &'static str {
        "spot-quota"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Utilisation],
            manners: &[Manner::Exclusive],
            source: "GFS, ASPLOS'26",
        }
    }
    fn admit(&mut self, _: &ClusterState, _: &Promises, job: &Job) -> Admit {
        match spot(job) {
            true => Admit::BestEffort,
            false => Admit::Accept,
        }
    }
    fn refresh(&mut self, state: &ClusterState, _: &Promises) {
        self.look(state);
        self.forecast(state);
        self.allow(state);
    }
    fn rank(&self, _: &ClusterState, _: &Promises, job: &Job) -> u32 {
        // Who runs goes before who waits: of one class nobody stops another.
        2 * u32::from(spot(job)) + u32::from(job.waits())
    }
    fn ranks_drift(&self) -> bool {
        true
    }
    fn evicts(&self) -> bool {
        true
    }
    fn holds(&self, job: &Job) -> bool {
        spot(job) && job.waits() && !self.allowed.contains(&job.id)
    }
    fn asks_again_s(&self) -> Option<f64> {
        let held = self.waiting.len() > self.allowed.len() && self.fixed.is_none();
        self.demand.next_s().filter(|_| held)
    }
    fn history(&mut self) -> Option<History> {
        let new = Demand::new(self.demand.step_s());
        Some(History {
            demand: std::mem::replace(&mut self.demand, new),
            eta: self.eta,
            free: self.free,
            quota: self.quota,
            outcomes: self.outcomes,
        })
    }
    fn remember(&mut self, history: History) {
        if history.demand.step_s() == self.demand.step_s() {
            self.demand = history.demand;
            (self.eta, self.free, self.quota) = (history.eta, history.free, history.quota);
            self.outcomes = history.outcomes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::catalogue::{self, Context};
    use crate::cluster::{Choice, Decision, JobType, Scheduler};

    fn job(gpus: u32, class: Class, user: u32) -> Job {
        let mut job = Job::rigid(JobType(0), gpus, 0.0, 1e9);
        job.profile.class = class;
        job.user = UserId(user);
        job
    }

    fn scheduler(admission: &str) -> Scheduler {
        let mut choice = Choice::new("srtf", "anywhere");
        choice.admission = Some(admission.into());
        choice.scheduler(&Context::complete(), 1).unwrap()
    }

    /// Comes, and is decided about.
    fn comes(state: &mut ClusterState, scheduler: &mut Scheduler, mut job: Job) -> JobId {
        job.arrival_s = state.now_s();
        let id = state.arrive(job);
        scheduler.note(id);
        decide(state, scheduler);
        id
    }

    fn decide(state: &mut ClusterState, scheduler: &mut Scheduler) -> Vec<Decision> {
        let batch = scheduler.decide(state);
        state.apply(&batch).unwrap();
        batch
    }

    fn runs(state: &ClusterState, id: JobId) -> bool {
        state.job(id).run().is_some()
    }

    #[test]
    fn guaranteed_jobs_take_gpus_from_spot_jobs_and_from_nobody_else() {
        let mut state = ClusterState::uniform(8, 8);
        let mut scheduler = scheduler("spot-quota:fixed=1");
        let spots = [4, 4].map(|gpus| {
            comes(
                &mut state,
                &mut scheduler,
                job(gpus, Class::Opportunistic, 0),
            )
        });
        assert!(spots.iter().all(|id| runs(&state, *id)));
        let mut first = job(4, Class::Guaranteed, 1);
        first.work = 1e12;
        let first = comes(&mut state, &mut scheduler, first);
        assert!(runs(&state, first));
        assert_eq!(spots.iter().filter(|id| runs(&state, **id)).count(), 1);
        // Shorter, and srtf would have it first: guaranteed jobs do not stop each other.
        let mut short = job(8, Class::Guaranteed, 1);
        short.work = 1.0;
        let short = comes(&mut state, &mut scheduler, short);
        assert!(runs(&state, first) && !runs(&state, short));
        // A spot job that would be first among its own waits for one that runs.
        let mut brief = job(4, Class::Opportunistic, 0);
        brief.work = 1.0;
        let brief = comes(&mut state, &mut scheduler, brief);
        assert!(!runs(&state, brief));
        assert_eq!(spots.iter().filter(|id| runs(&state, **id)).count(), 1);
    }

    #[test]
    fn the_quota_is_what_guaranteed_jobs_leave_and_the_largest_starts_first() {
        let mut state = ClusterState::uniform(10, 10);
        let mut scheduler = scheduler("spot-quota:fixed=0.5");
        let small = [1, 1].map(|gpus| state.arrive(job(gpus, Class::Opportunistic, 0)));
        let large = state.arrive(job(4, Class::Opportunistic, 0));
        let never = state.arrive(job(6, Class::Opportunistic, 0));
        for id in small.into_iter().chain([large, never]) {
            scheduler.note(id);
        }
        decide(&mut state, &mut scheduler);
        assert!(runs(&state, large), "the largest that fits");
        assert!(runs(&state, small[0]) && !runs(&state, small[1]));
        assert!(!runs(&state, never), "more than half of the GPUs");
    }

    /// A user asks for 8 of 10 GPUs from 9 to 17 each day. Without a forecast a spot job starts
    /// before and is stopped; with one it starts when it will be left alone.
    #[test]
    fn a_spot_job_waits_where_its_gpus_will_be_asked_for() {
        let run = |admission: &str, hour: f64| {
            let mut state = ClusterState::uniform(10, 10);
            let mut scheduler = scheduler(admission);
            let mut guaranteed = None;
            let start_s = 5.0 * 86_400.0 + hour * 3600.0;
            let mut spot = None;
            for step in 0..6 * 288 {
                let now_s = f64::from(step) * 300.0;
                state.advance(now_s);
                let at = now_s.rem_euclid(86_400.0) / 3600.0;
                let busy = (9.0..17.0).contains(&at);
                if busy && guaranteed.is_none() {
                    let id = comes(&mut state, &mut scheduler, job(8, Class::Guaranteed, 1));
                    guaranteed = Some(id);
                } else if !busy && let Some(id) = guaranteed.take() {
                    state.finish(id);
                    scheduler.note(id);
                }
                if now_s >= start_s && spot.is_none() {
                    spot = Some(comes(
                        &mut state,
                        &mut scheduler,
                        job(6, Class::Opportunistic, 2),
                    ));
                    if !spot.is_some_and(|id| runs(&state, id)) {
                        return [false, false];
                    }
                }
                decide(&mut state, &mut scheduler);
                if now_s >= start_s + 3600.0 {
                    break;
                }
            }
            [true, spot.is_some_and(|id| runs(&state, id))]
        };
        // Whether it starts at once, and whether it still runs after an hour.
        let [blind, forecast] = ["spot-quota:fixed=1", "spot-quota"];
        assert_eq!(run(blind, 8.5), [true, false], "it is stopped at nine");
        assert_eq!(run(forecast, 8.5), [false, false], "it waits");
        assert_eq!(
            run(forecast, 5.0),
            [true, true],
            "nobody comes within the hour"
        );
    }

    #[test]
    fn eta_follows_how_many_were_disturbed_and_how_long_others_wait() {
        let mut quota = SpotQuota::new(0.9, 3600.0);
        // 3 of 9 say too little about 10 %; 3 of 10 do.
        quota.outcomes = [6.0, 3.0];
        quota.adjust(0.0);
        assert_eq!(quota.eta, 1.0);
        quota.outcomes = [7.0, 3.0];
        quota.adjust(0.0);
        assert!((quota.eta - 0.1 / 0.3).abs() < 1e-12, "{}", quota.eta);
        assert_eq!(quota.outcomes, [0.0; 2], "counted once");
        quota.adjust(0.0);
        assert!((quota.eta - 0.1 / 0.3).abs() < 1e-12);
        // Nobody is disturbed, but nobody waits for long either.
        let _ = quota.waiting.insert(JobId(0), 0.0);
        quota.adjust(3600.0);
        assert!((quota.eta - 0.1 / 0.3).abs() < 1e-12);
        quota.outcomes = [39.0, 1.0];
        quota.adjust(3601.0);
        assert!(
            (quota.eta - 1.25 * 0.1 / 0.3).abs() < 1e-12,
            "{}",
            quota.eta
        );
        // Between both it stays.
        quota.outcomes = [9.0, 1.0];
        quota.adjust(3601.0);
        assert!((quota.eta - 1.25 * 0.1 / 0.3).abs() < 1e-12);
        for _ in 0..100 {
            quota.outcomes = [0.0, 10.0];
            quota.adjust(0.0);
        }
        assert_eq!(quota.eta, LEAST_ETA);
    }

    #[test]
    fn eta_alone_keeps_no_cluster_empty() {
        let mut state = ClusterState::uniform(10, 10);
        let mut quota = SpotQuota::new(0.9, 3600.0);
        quota.eta = LEAST_ETA;
        let ids = [4, 6].map(|gpus| state.arrive(job(gpus, Class::Opportunistic, 0)));
        state.arrive(job(5, Class::Guaranteed, 1));
        quota.refresh(&state, &Promises::default());
        // 5 are left: the larger one would be in the way.
        assert!(quota.holds(state.job(ids[1])) && !quota.holds(state.job(ids[0])));
        let third = state.arrive(job(1, Class::Opportunistic, 0));
        quota.running.insert(third, 0.0);
        quota.allow(&state);
        assert!(quota.holds(state.job(ids[0])), "one at a time");
    }

    #[test]
    fn stops_ends_and_whole_spans_are_counted_once() {
        let mut state = ClusterState::uniform(4, 4);
        let mut quota = SpotQuota::new(0.9, 3600.0);
        let promises = Promises::default();
        let ids = [0, 1, 2].map(|_| state.arrive(job(1, Class::Opportunistic, 0)));
        quota.refresh(&state, &promises);
        let place = |state: &mut ClusterState, at: usize| {
            let place = Decision::Place {
                job: ids[at],
                gpus: vec![crate::cluster::GpuId(at as u32)],
                class: Class::Opportunistic,
                share: 1.0,
                mem_bytes: None,
            };
            state.apply(&[place]).unwrap();
        };
        (0..3).for_each(|at| place(&mut state, at));
        quota.refresh(&state, &promises);
        state.advance(7300.0);
        state.apply(&[Decision::Suspend { job: ids[0] }]).unwrap();
        state.finish(ids[1]);
        for _ in 0..2 {
            // Not at a step, so that eta is left alone.
            quota.look(&state);
            assert_eq!(quota.outcomes, [1.0 + 2.0, 1.0]);
        }
        assert_eq!(quota.running.keys().collect::<Vec<_>>(), [&ids[2]]);
        assert_eq!(quota.waiting.keys().collect::<Vec<_>>(), [&ids[0]]);
    }

    #[test]
    fn a_job_larger_than_what_a_forecast_leaves_starts_at_last() {
        let mut state = ClusterState::uniform(10, 10);
        let mut scheduler = scheduler("spot-quota");
        // A user asks for 6 GPUs every other step, and then for none.
        for step in 0..40 {
            state.advance(300.0 * f64::from(step));
            let id = comes(&mut state, &mut scheduler, job(6, Class::Guaranteed, 0));
            if step % 2 == 1 {
                state.finish(JobId(id.0 - 1));
                state.finish(id);
                scheduler.note(JobId(id.0 - 1));
                scheduler.note(id);
                decide(&mut state, &mut scheduler);
            }
        }
        let large = comes(&mut state, &mut scheduler, job(9, Class::Opportunistic, 2));
        assert!(!runs(&state, large), "that user may come again");
        let came_s = state.now_s();
        while !runs(&state, large) {
            let next_s = scheduler.asks_again_s().expect("it is held back");
            assert!(next_s > state.now_s() && next_s < came_s + 86_400.0);
            state.advance(next_s);
            decide(&mut state, &mut scheduler);
        }
        assert!(state.now_s() > came_s);
        assert!(scheduler.asks_again_s().is_none());
    }

    #[test]
    fn a_forecast_goes_on_when_the_policies_are_made_anew() {
        let mut old = scheduler("spot-quota");
        let mut state = ClusterState::uniform(10, 10);
        comes(&mut state, &mut old, job(6, Class::Guaranteed, 0));
        let mut new = scheduler("spot-quota");
        new.inherit(&mut old, &mut |user| UserId(user.0 + 7));
        // The history knows of 6 GPUs, and the next sample is not due.
        let mut after = ClusterState::uniform(10, 10);
        let spot = comes(&mut after, &mut new, job(6, Class::Opportunistic, 2));
        assert!(!runs(&after, spot));
        // That user has another number, and asks for nothing any more.
        after.advance(300.0);
        decide(&mut after, &mut new);
        assert!(runs(&after, spot));
        let mut other = scheduler("spot-quota:hours=2");
        other.inherit(&mut old, &mut |user| user);
        let mut fresh = ClusterState::uniform(10, 10);
        let spot = comes(&mut fresh, &mut other, job(6, Class::Opportunistic, 2));
        assert!(runs(&fresh, spot), "another span has another history");
    }

    #[test]
    fn it_needs_both_classes_and_an_order_that_stops_jobs() {
        let one_class = Context {
            opportunistic: false,
            ..Context::complete()
        };
        let refused = |text: &str, context: &Context| {
            catalogue::admission(text, context)
                .err()
                .unwrap()
                .to_string()
        };
        assert!(refused("spot-quota", &one_class).contains("both classes"));
        let context = Context::complete();
        for text in [
            "spot-quota:rate=1",
            "spot-quota:hours=0",
            "spot-quota:fixed=-1",
        ] {
            refused(text, &context);
        }
        let mut choice = Choice::new("fifo", "anywhere");
        choice.admission = Some("spot-quota".into());
        let error = choice.scheduler(&context, 1).err().unwrap().to_string();
        assert!(error.contains("never stops a job"), "{error}");
    }
}
