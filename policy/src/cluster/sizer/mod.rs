//! How many GPUs each elastic job gets.
//!
//! All of these hand out GPUs by *levels*: the numbers of GPUs at which a job is faster than at any
//! smaller number. Speed curves are measured at a few points and flat or falling between and beyond
//! them; a GPU more is a step to the next level, and its gain is counted per GPU of the step.

mod afs;
pub mod dl2;
mod edf;
mod marginal;
mod maxmin;
mod minimum_share;
mod pollux;
mod rigid;
pub mod sia;

pub use afs::Afs;
pub use dl2::Dl2;
pub use edf::EdfElastic;
pub use marginal::Marginal;
pub use maxmin::MaxMin;
pub(super) use minimum_share::ADMISSION as MINIMUM_SHARE_ADMISSION;
pub use minimum_share::MinimumShare;
pub use pollux::{Pollux, share};
pub use rigid::RigidSrtf;
pub use sia::Sia;

use super::admission::Promises;
use super::catalogue::Entry;

/// Every sizer: a new one has a line here and a file of its own.
pub(crate) static SIZERS: &[&Entry<dyn Sizer>] = &[
    &rigid::RIGID_SRTF,
    &maxmin::MAX_MIN,
    &marginal::OPTIMUS,
    &pollux::POLLUX,
    &afs::AFS,
    &sia::SIA,
    &dl2::DL2,
    &edf::EDF_ELASTIC,
    &minimum_share::SIZER,
];
use super::{Admit, ClusterState, GpuType, Job, JobId, Speed, Tags};

/// The slot "how many GPUs?".
pub trait Sizer: Send {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// What it is for.
    fn tags(&self) -> Tags;
    /// The number of GPUs of every job that gets some, from now on. Together no more than exist.
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)>;
    /// On which type of GPU a job that it just gave some shall have them; `None`: on any.
    fn kind(&self, _job: JobId) -> Option<GpuType> {
        None
    }
    /// It counts on jobs that choose their batch size by the GPUs they have.
    fn tunes_batches(&self) -> bool {
        false
    }
}

/// The numbers of GPUs that are worth having, ascending, up to `most`.
#[must_use]
pub fn levels(job: &Job, most: u32) -> Vec<u32> {
    match &job.speed {
        Speed::Rigid => vec![job.gpus],
        Speed::Curve(curve) => {
            let mut best = 0.0;
            let steps = (1..).zip(curve.iter()).filter(|(_, speed)| {
                let better = **speed > best;
                best = best.max(**speed);
                better
            });
            steps
                .map(|(gpus, _)| gpus)
                .take_while(|gpus| *gpus <= most)
                .collect()
        }
    }
}

/// A job while GPUs are handed out.
struct Growing<'a> {
    job: &'a Job,
    levels: Vec<u32>,
    /// How many of the levels it has climbed.
    at: usize,
    left: f64,
}

impl Growing<'_> {
    /// GPUs it has.
    fn has(&self) -> u32 {
        self.at.checked_sub(1).map_or(0, |at| self.levels[at])
    }

    /// GPUs of the next level.
    fn next(&self) -> Option<u32> {
        self.levels.get(self.at).copied()
    }

    /// GPUs that the next level takes.
    fn step(&self) -> Option<u32> {
        self.next().map(|next| next - self.has())
    }

    fn rate(&self) -> f64 {
        self.job.rate(self.has())
    }

    fn next_rate(&self) -> f64 {
        self.next().map_or(0.0, |next| self.job.rate(next))
    }

    fn climb(&mut self, free: &mut u32) {
        *free -= self.step().unwrap_or(0);
        self.at += 1;
    }
}

/// All jobs that may run, by arrival, with nothing yet.
fn growing<'a>(state: &'a ClusterState, promises: &Promises) -> Vec<Growing<'a>> {
    let mut jobs: Vec<Growing<'a>> = state
        .active()
        .filter(|job| promises.known(job.id) != Some(Admit::Reject))
        .map(|job| Growing {
            job,
            levels: levels(job, state.gpus().min(job.most_gpus)),
            at: 0,
            left: job.left(state.now_s()),
        })
        .collect();
    jobs.sort_by(|a, b| {
        let arrival = a.job.arrival_s.total_cmp(&b.job.arrival_s);
        arrival.then(a.job.id.cmp(&b.job.id))
    });
    jobs
}

/// One level for everybody, in this order, as far as GPUs go.
fn first_level(jobs: &mut [Growing<'_>], free: &mut u32) {
    for job in jobs {
        if job.step().is_some_and(|step| step <= *free) {
            job.climb(free);
        }
    }
}

fn sizes(jobs: &[Growing<'_>]) -> Vec<(JobId, u32)> {
    let with = jobs.iter().filter(|job| job.at > 0);
    with.map(|job| (job.job.id, job.has())).collect()
}
