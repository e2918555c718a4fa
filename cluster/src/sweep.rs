//! Several runs of one trace on one cluster, in parallel.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use policy::cluster::Scheduler;
use policy::cluster::catalogue::{self, Context, Unknown};

use crate::sim::{Config, Outcome, SimError, Simulation};
use crate::spec::ClusterSpec;
use crate::trace::Trace;

/// The policies of one run, as written on the command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Who is next; or a round allocator, which answers for all.
    pub order: String,
    /// Who shares a GPU.
    pub packer: Option<String>,
    /// Which GPUs.
    pub placer: String,
    /// Whose deadline is promised.
    pub admission: Option<String>,
    /// How many GPUs.
    pub sizer: Option<String>,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.sizer {
            None => f.write_str(&self.order)?,
            Some(sizer) => write!(f, "{sizer}")?,
        }
        for more in [&self.packer, &self.admission].into_iter().flatten() {
            write!(f, " + {more}")?;
        }
        if self.placer != "anywhere" {
            write!(f, " @ {}", self.placer)?;
        }
        Ok(())
    }
}

impl Choice {
    /// A scheduler of these policies.
    ///
    /// # Errors
    /// [`Unknown`] policy or parameter.
    pub fn scheduler(&self, context: &Context, seed: u64) -> Result<Scheduler, Unknown> {
        let placer = catalogue::placer(&self.placer, context)?;
        if catalogue::is_round_allocator(&self.order) {
            // The order is never asked.
            let order = catalogue::order("fifo", context)?;
            let round_allocator = catalogue::round_allocator(&self.order, context)?;
            return Ok(Scheduler::new(order, placer, seed).with_round_allocator(round_allocator));
        }
        let order = catalogue::order(&self.order, context)?;
        let mut scheduler = Scheduler::new(order, placer, seed);
        if let Some(packer) = &self.packer {
            scheduler = scheduler.packing(catalogue::packer(packer, context)?);
        }
        if let Some(admission) = &self.admission {
            scheduler = scheduler.admitting(catalogue::admission(admission, context)?);
        }
        if let Some(sizer) = &self.sizer {
            scheduler = scheduler.sizing(catalogue::sizer(sizer, context)?);
        }
        Ok(scheduler)
    }
}

/// Why a run came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// No such policy.
    #[error("{0}")]
    Unknown(Unknown),
    /// The run failed.
    #[error("{choice}: {error}")]
    Sim {
        /// Which run.
        choice: String,
        /// Why.
        error: SimError,
    },
}

/// Makes all runs, on as many threads as there are processors. `progress` gets the jobs done and
/// all jobs, over all runs.
///
/// # Errors
/// The first [`SweepError`]. Policies are looked up before anything runs.
pub fn sweep(
    trace: &Trace,
    spec: &ClusterSpec,
    choices: &[Choice],
    past_gpu_s: &[f64],
    config: &Config,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Vec<Outcome>, SweepError> {
    let smallest = spec.nodes.iter().map(|node| node.gpu_bytes).min();
    let context = Context {
        pairs: trace.pairs.clone(),
        past_gpu_s: past_gpu_s.to_vec(),
        gpu_bytes: smallest.unwrap_or(0),
    };
    let mut schedulers = Vec::new();
    for choice in choices {
        let scheduler = choice.scheduler(&context, config.seed);
        schedulers.push(Mutex::new(Some(scheduler.map_err(SweepError::Unknown)?)));
    }
    let done: Vec<AtomicUsize> = choices.iter().map(|_| AtomicUsize::new(0)).collect();
    let results: Vec<Mutex<Option<Result<Outcome, SimError>>>> =
        choices.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let all = choices.len() * trace.jobs.len();
    let work = || loop {
        let at = next.fetch_add(1, Ordering::Relaxed);
        let Some(slot) = schedulers.get(at) else {
            return;
        };
        let Some(scheduler) = slot.lock().ok().and_then(|mut slot| slot.take()) else {
            return;
        };
        let report_progress = |jobs| {
            done[at].store(jobs, Ordering::Relaxed);
            progress(
                done.iter().map(|done| done.load(Ordering::Relaxed)).sum(),
                all,
            );
        };
        let run = Simulation::new(trace, spec.state(), scheduler, config.clone());
        let outcome = run.and_then(|run| run.run(report_progress));
        report_progress(trace.jobs.len());
        if let Ok(mut result) = results[at].lock() {
            *result = Some(outcome);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 1..threads.min(choices.len()) {
            scope.spawn(work);
        }
        work();
    });
    let outcomes = results.into_iter().zip(choices).map(|(result, choice)| {
        let result = result.into_inner().ok().flatten();
        let outcome =
            result.expect("every run was made: a panic in one would have come out of the scope");
        outcome.map_err(|error| SweepError::Sim {
            choice: choice.to_string(),
            error,
        })
    });
    outcomes.collect()
}
