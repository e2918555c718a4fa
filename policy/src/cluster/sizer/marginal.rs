//! Each GPU to where it saves most time.

use super::{Sizer, first_level, growing, sizes};
use crate::cluster::admission::Promises;
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, JobId, Manner, Objective, Tags};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static OPTIMUS: Entry<dyn Sizer> = Registration {
    name: "optimus",
    summary: "each GPU to where it saves most time",
    params: &[ParamSpec {
        name: "single",
        summary: "1: looks one GPU ahead only; 0: to the next number that is faster",
        kind: Kind::Number {
            min: 0.0,
            max: 1.0,
            default: 0.0,
        },
    }],
    build: |settings, _| {
        Ok(Box::new(Marginal {
            single: settings.number("single") > 0.0,
        }))
    },
};

/// Optimus' sizing (EuroSys'18): first one GPU each by arrival, then always the step that saves
/// most remaining time per GPU, `(left / rate(now) - left / rate(next)) / step`. Long jobs gain
/// most, so they grow first: good for the makespan, less so for the mean. (Optimus hands out
/// workers and parameter servers; with all-reduce there is only the GPU.)
#[derive(Clone, Copy, Debug, Default)]
pub struct Marginal {
    /// Look one GPU ahead only, as Optimus does: a job stops where one more gains nothing, though
    /// two might (beyond the edge of a node).
    pub single: bool,
}

impl Sizer for Marginal {
    fn name(&self) -> &'static str {
        "optimus"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Completion, Objective::Makespan],
            manners: &[Manner::Elastic],
            source: "Optimus, EuroSys'18",
        }
    }
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)> {
        let (mut jobs, mut free) = (growing(state, promises), state.gpus());
        if self.single {
            for job in &mut jobs {
                let most = state.gpus().min(job.job.most_gpus);
                let gains = |gpus: &u32| job.job.rate(*gpus) > job.job.rate(*gpus - 1);
                job.levels = (1..=most).take_while(gains).collect();
            }
        }
        first_level(&mut jobs, &mut free);
        while free > 0 {
            let gains = jobs.iter().enumerate().filter(|(_, job)| job.at > 0);
            let gains = gains.filter_map(|(at, job)| {
                let step = job.step().filter(|step| *step <= free)?;
                let saved_s = job.left / job.rate() - job.left / job.next_rate();
                (saved_s > 0.0).then_some((saved_s / f64::from(step), at))
            });
            // The first of equals.
            let best = gains.reduce(|best, next| if next.0 > best.0 { next } else { best });
            let Some((_, at)) = best else { break };
            jobs[at].climb(&mut free);
        }
        sizes(&jobs)
    }
}
