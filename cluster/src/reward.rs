//! What a finish time is worth: service-level agreements as reward curves, and what another
//! agreement would bring.
//!
//! A deadline says yes or no. A reward curve (Betser's thesis, MIT 2012) gives the worth of each
//! finish time, as falling steps. "By the deadline or nothing" is the curve of one step, and its
//! reward is the number of deadlines met.

use std::fmt;
use std::str::FromStr;

use policy::cluster::Job;

use crate::sim::Outcome;
use crate::trace::Trace;

/// Until when, counted from a job's arrival.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Until {
    /// So many seconds.
    Seconds(f64),
    /// So many times its duration alone.
    Durations(f64),
    /// Its deadline in the trace, times this.
    Deadline(f64),
}

impl Until {
    fn seconds(self, job: &Job) -> Option<f64> {
        match self {
            Self::Seconds(s) => Some(s),
            Self::Durations(times) => Some(times * job.duration_s()),
            Self::Deadline(times) => Some(times * (job.deadline_s? - job.arrival_s)),
        }
    }
}

/// Steps: a job that is done by this time gets this reward. Times rise, rewards fall; after the
/// last step there is none.
#[derive(Clone, PartialEq, Debug)]
pub struct Sla {
    steps: Vec<(Until, f64)>,
}

/// A curve that is none.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error(
    "reward step `{step}`: {why}; write until:reward, several by comma, until in seconds (3600), durations (2x) or deadlines (d, 1.5d): 2x:1,4x:0.5"
)]
pub struct BadSla {
    /// Which step.
    pub step: String,
    /// What is wrong.
    pub why: &'static str,
}

impl FromStr for Sla {
    type Err = BadSla;

    fn from_str(text: &str) -> Result<Self, BadSla> {
        let mut steps: Vec<(Until, f64)> = Vec::new();
        for step in text.split(',') {
            let wrong = |why| BadSla {
                step: step.to_owned(),
                why,
            };
            let above = |number: &str| {
                let number: Option<f64> = number.parse().ok();
                number.filter(|number| number.is_finite() && *number > 0.0)
            };
            let (until, reward) = step.trim().split_once(':').ok_or(wrong("no `:`"))?;
            let read = match (until.strip_suffix('x'), until.strip_suffix('d')) {
                (Some(times), _) => above(times).map(Until::Durations),
                (_, Some("")) => Some(Until::Deadline(1.0)),
                (_, Some(times)) => above(times).map(Until::Deadline),
                (None, None) => above(until).map(Until::Seconds),
            };
            let until = read.ok_or(wrong("the time is not a number above 0"))?;
            let reward = above(reward).ok_or(wrong("the reward is not a number above 0"))?;
            if let Some((before, more)) = steps.last() {
                let rises = match (*before, until) {
                    (Until::Seconds(a), Until::Seconds(b))
                    | (Until::Durations(a), Until::Durations(b))
                    | (Until::Deadline(a), Until::Deadline(b)) => a < b,
                    _ => return Err(wrong("all times of a curve are of one unit")),
                };
                if !rises || *more < reward {
                    return Err(wrong("times go up and rewards go down"));
                }
            }
            steps.push((until, reward));
        }
        Ok(Self { steps })
    }
}

impl fmt::Display for Sla {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (until, reward)) in self.steps.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            match until {
                Until::Seconds(s) => write!(f, "{comma}{s}:{reward}")?,
                Until::Durations(times) => write!(f, "{comma}{times}x:{reward}")?,
                Until::Deadline(times) => write!(f, "{comma}{times}d:{reward}")?,
            }
        }
        Ok(())
    }
}

impl Sla {
    /// The reward of a job that is done so many seconds after its arrival, with all times of the
    /// curve multiplied by `slack`. `None` for a job that the curve does not cover: a job without a
    /// deadline under a curve of deadlines.
    #[must_use]
    pub fn reward(&self, job: &Job, took_s: Option<f64>, slack: f64) -> Option<f64> {
        self.steps.first()?.0.seconds(job)?;
        let Some(took_s) = took_s else {
            return Some(0.0);
        };
        let in_time = |(until, _): &&(Until, f64)| {
            until
                .seconds(job)
                .is_some_and(|until| took_s <= slack * until)
        };
        Some(self.steps.iter().find(in_time).map_or(0.0, |step| step.1))
    }

    /// Deadlines of a trace as this curve has them: the end of its first step.
    pub fn set_deadlines(&self, trace: &mut Trace, slack: f64) {
        let first = self.steps.first().map(|step| step.0);
        for job in &mut trace.jobs {
            let until = first.and_then(|until| until.seconds(job));
            job.deadline_s = until.map(|until| job.arrival_s + slack * until);
        }
    }

    /// Rewards of a run of this trace: those kept, and those there were to get.
    #[must_use]
    pub fn kept(&self, trace: &Trace, outcome: &Outcome, slack: f64) -> (f64, f64) {
        let best = self.steps.first().map_or(0.0, |step| step.1);
        let jobs = trace.jobs.iter().zip(&outcome.fates);
        jobs.fold((0.0, 0.0), |(kept, all), (job, fate)| {
            let took_s = fate.end_s.map(|end_s| end_s - fate.arrival_s);
            match self.reward(job, took_s, slack) {
                Some(reward) => (kept + reward, all + best),
                None => (kept, all),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use policy::cluster::JobType;

    use super::*;

    fn job() -> Job {
        let mut job = Job::rigid(JobType(0), 1, 100.0, 60.0);
        job.deadline_s = Some(400.0);
        job
    }

    #[test]
    fn a_curve_has_falling_steps() {
        let sla: Sla = "2x:1,4x:0.5".parse().unwrap();
        let at = |took_s| sla.reward(&job(), took_s, 1.0).unwrap();
        assert_eq!(
            [at(Some(120.0)), at(Some(121.0)), at(Some(240.5)), at(None)],
            [1.0, 0.5, 0.0, 0.0]
        );
        assert_eq!(sla.to_string(), "2x:1,4x:0.5");
        // More slack is never worse.
        let rewards: Vec<f64> = (1..20)
            .map(|slack| sla.reward(&job(), Some(700.0), f64::from(slack)).unwrap())
            .collect();
        assert!(rewards.is_sorted() && rewards[0] < rewards[18]);
        let deadline: Sla = "d:1".parse().unwrap();
        assert_eq!(deadline.reward(&job(), Some(300.0), 1.0), Some(1.0));
        assert_eq!(deadline.reward(&job(), Some(300.1), 1.0), Some(0.0));
        let mut free = job();
        free.deadline_s = None;
        assert_eq!(deadline.reward(&free, Some(1.0), 1.0), None);
    }

    #[test]
    fn what_is_no_curve_is_refused() {
        for (text, word) in [
            ("", "no `:`"),
            ("2x", "no `:`"),
            ("x:1", "time"),
            ("-1:1", "time"),
            ("nan:1", "time"),
            ("2x:0", "reward"),
            ("2x:1,1x:0.5", "go up"),
            ("2x:1,3x:2", "go down"),
            ("2x:1,300:0.5", "one unit"),
        ] {
            let error = text.parse::<Sla>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
