//! A division of the GPUs while it is made, move by move, and what the network sees of it.

use super::super::{Growing, growing};
use crate::cluster::admission::Promises;
use crate::cluster::{ClusterState, JobId};

/// Numbers that the network sees of a move.
pub const INPUTS: usize = 17;

/// Numbers that the critic sees of a job.
pub const CRITIC_INPUTS: usize = INPUTS + 6;

/// What the network sees of a move.
pub type Input = [f64; INPUTS];

/// What the critic sees of a job.
pub type Prospect = [f64; CRITIC_INPUTS];

/// Jobs by arrival, each with what it has got so far. A move gives one job the GPUs of its next
/// level.
pub struct Division<'a> {
    jobs: Vec<Growing<'a>>,
    /// What the jobs held before.
    held: Vec<u32>,
    /// Logarithm of the time left on the first level, against the mean of all jobs.
    left: Vec<f64>,
    /// The same of the time from start to end.
    whole: Vec<f64>,
    age: Vec<f64>,
    gpus: u32,
    free: u32,
}

impl<'a> Division<'a> {
    /// With nothing given yet.
    #[must_use]
    pub fn new(state: &'a ClusterState, promises: &Promises) -> Self {
        let now_s = state.now_s();
        let jobs = growing(state, promises);
        let first = |job: &Growing<'_>| job.levels.first().map_or(0.0, |gpus| job.job.rate(*gpus));
        let relative = |of: &dyn Fn(&Growing<'_>) -> f64| -> Vec<f64> {
            // A job that is over but for its end counts as one with a second left.
            let time_s = |job: &Growing<'_>| match first(job) > 0.0 {
                true => (of(job) / first(job)).max(1.0).ln(),
                false => 0.0,
            };
            let logs: Vec<f64> = jobs.iter().map(time_s).collect();
            let mean = logs.iter().sum::<f64>() / logs.len().max(1) as f64;
            logs.iter().map(|log| (log - mean) / 4.0).collect()
        };
        let left = relative(&|job| job.left);
        let whole = relative(&|job| job.job.work);
        let age = jobs.iter().map(|job| {
            let age_s = (now_s - job.job.arrival_s).max(0.0);
            age_s / (age_s + job.left / first(job).max(f64::MIN_POSITIVE) + 1.0)
        });
        Self {
            held: jobs
                .iter()
                .map(|job| job.job.run().map_or(0, |run| run.gpus.len() as u32))
                .collect(),
            left,
            whole,
            age: age.collect(),
            gpus: state.gpus(),
            free: state.gpus(),
            jobs,
        }
    }

    /// Number of jobs.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// The job at this place.
    #[must_use]
    pub fn job(&self, at: usize) -> JobId {
        self.jobs[at].job.id
    }

    /// Jobs whose next level can be had.
    #[must_use]
    pub fn moves(&self) -> Vec<usize> {
        let fits = |at: &usize| self.jobs[*at].step().is_some_and(|step| step <= self.free);
        (0..self.jobs.len()).filter(fits).collect()
    }

    /// Nobody has anything yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.free == self.gpus
    }

    /// The move of dominant resource fairness: the next level goes to the job with the smallest
    /// dominant share, of equal ones to the first that came. A GPU brings its part of the cores and
    /// memory along, so the share of GPUs is the dominant one.
    #[must_use]
    pub fn teacher(&self) -> Option<usize> {
        let moves = self.moves().into_iter();
        moves.min_by_key(|at| (self.jobs[*at].has(), *at))
    }

    /// Gives a job its next level.
    pub fn give(&mut self, at: usize) {
        self.jobs[at].climb(&mut self.free);
    }

    /// Which part of a job's work is done in so many seconds, by the speed that it reports.
    fn yields_of(&self, job: &Growing<'_>, seconds: f64) -> f64 {
        (job.rate() * seconds).min(job.left) / work(job)
    }

    /// The same, summed over the jobs.
    #[must_use]
    pub fn yields(&self, seconds: f64) -> f64 {
        let jobs = self.jobs.iter();
        jobs.map(|job| self.yields_of(job, seconds)).sum()
    }

    /// What each job got.
    #[must_use]
    pub fn sizes(&self) -> Vec<(JobId, u32)> {
        super::super::sizes(&self.jobs)
    }

    /// GPUs on a scale on which each doubling is as much.
    fn scale(&self, gpus: u32) -> f64 {
        (f64::from(gpus) + 1.0).ln() / (f64::from(self.gpus) + 1.0).ln()
    }

    fn common(&self, input: &mut [f64]) {
        let jobs = self.jobs.len().max(1) as f64;
        let without = self.jobs.iter().filter(|job| job.at == 0).count();
        input[1] = f64::from(self.free) / f64::from(self.gpus);
        input[2] = (1.0 + jobs / f64::from(self.gpus)).ln();
        input[3] = without as f64 / jobs;
    }

    fn own(&self, at: usize, input: &mut [f64]) {
        let job = &self.jobs[at];
        let first = job.levels.first().copied().unwrap_or(1);
        // Speed on a GPU where it is best used: on the first level.
        let best = job.job.rate(first) / f64::from(first);
        let has = job.has();
        input[4] = self.scale(has);
        input[5] = f64::from(u8::from(has == 0));
        input[6] = at as f64 / self.jobs.len() as f64;
        input[7] = self.left[at];
        input[8] = 1.0 - job.left / work(job);
        input[9] = match has {
            0 => 1.0,
            has => job.rate() / f64::from(has) / best,
        };
        input[13] = self.scale(self.held[at]);
        input[15] = self.age[at];
        input[16] = self.whole[at];
        let Some(step) = job.step() else { return };
        input[10] = (job.next_rate() - job.rate()) / f64::from(step) / best;
        input[11] = self.scale(step);
        input[12] = (f64::from(step) / f64::from(self.free.max(1))).min(1.0);
        input[14] = f64::from(u8::from(has + step <= self.held[at]));
    }

    /// What the network sees of a move; `None`: to stop.
    #[must_use]
    pub fn input(&self, to: Option<usize>) -> Input {
        let mut input = [0.0; INPUTS];
        self.common(&mut input);
        match to {
            Some(at) => self.own(at, &mut input),
            None => input[0] = 1.0,
        }
        input
    }

    /// What the critic sees of each job, in slots of so many seconds: what the network sees, how
    /// long the job still takes, and how much all jobs still have to do.
    #[must_use]
    pub fn prospects(&self, slot_s: f64) -> Vec<Prospect> {
        let first = |job: &Growing<'_>| job.levels.first().map_or(0.0, |gpus| job.job.rate(*gpus));
        let slots = |job: &Growing<'_>, rate: f64| match rate > 0.0 {
            true => job.left / rate / slot_s,
            false => 0.0,
        };
        let scale = |slots: f64| (1.0 + slots).ln() / 4.0;
        let all: f64 = self.jobs.iter().map(|job| slots(job, first(job))).sum();
        let of = |(at, job): (usize, &Growing<'_>)| {
            let mut prospect = [0.0; CRITIC_INPUTS];
            self.common(&mut prospect);
            self.own(at, &mut prospect);
            prospect[INPUTS] = scale(slots(job, first(job)));
            prospect[INPUTS + 1] = scale(slots(job, job.rate()));
            prospect[INPUTS + 2] = self.yields_of(job, slot_s);
            prospect[INPUTS + 3] = scale(all / f64::from(self.gpus));
            // Times of days are no matter of logarithms alone.
            prospect[INPUTS + 4] = slots(job, first(job)) / 100.0;
            prospect[INPUTS + 5] = slots(job, job.rate()) / 100.0;
            prospect
        };
        self.jobs.iter().enumerate().map(of).collect()
    }
}

fn work(job: &Growing<'_>) -> f64 {
    job.job.work.max(f64::MIN_POSITIVE)
}
