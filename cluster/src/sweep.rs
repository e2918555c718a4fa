//! Several runs of one trace on one cluster, in parallel.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use policy::PolicyError;
use policy::cluster::catalogue::{Busy, Context};
use policy::cluster::{Choice, Class, Speed};

use crate::sim::{Config, Outcome, SimError, Simulation};
use crate::spec::ClusterSpec;
use crate::trace::Trace;

/// Why a run came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// A policy is unknown or could not act.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The run failed.
    #[error("{choice}: {error}")]
    Sim {
        /// Which run.
        choice: String,
        /// Why.
        error: SimError,
    },
}

/// Largest file that a parameter of a policy names.
const FILE_BYTES: u64 = 64 << 20;

/// Reads a file that a parameter of a policy names.
pub(crate) fn read_file(file: &str) -> Result<String, String> {
    let about = std::fs::metadata(file).map_err(|error| error.to_string())?;
    // A pipe would have the policy wait, and a device never ends.
    if !about.is_file() || about.len() > FILE_BYTES {
        return Err(format!("it is no file of at most {FILE_BYTES} bytes"));
    }
    std::fs::read_to_string(file).map_err(|error| error.to_string())
}

/// What policies can count on in runs of this trace.
#[must_use]
pub fn context(trace: &Trace, spec: &ClusterSpec, past_gpu_s: &[f64], config: &Config) -> Context {
    let smallest = spec.nodes.iter().map(|node| node.gpu_bytes).min();
    let any = |is: &dyn Fn(&policy::cluster::Job) -> bool| trace.jobs.iter().any(is);
    let class = |class| move |job: &policy::cluster::Job| job.profile.class == class;
    Context {
        pairs: trace.pairs.clone(),
        sharing: trace.sharing.clone(),
        past_gpu_s: past_gpu_s.to_vec(),
        gpu_bytes: smallest.unwrap_or(0),
        // A job of which nothing is known counts as busy all the time.
        busy: match any(&|job| job.profile.busy < 1.0) {
            true => Busy::FromArrival,
            false => Busy::Unknown,
        },
        opportunistic: any(&class(Class::Opportunistic)) && any(&class(Class::Guaranteed)),
        sensitivity: config.host.is_some() && any(&|job| job.host.is_some()),
        speeds: any(&|job| matches!(job.speed, Speed::Curve(_))) || !trace.training.is_empty(),
        speeds_by_type: true,
        round_s: config.round_s,
        files: Some(read_file),
    }
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
    let context = context(trace, spec, past_gpu_s, config);
    let mut schedulers = Vec::new();
    for choice in choices {
        let scheduler = choice.scheduler(&context, config.seed);
        schedulers.push(Mutex::new(Some(scheduler?)));
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
        let Some(scheduler) = slot.lock().take() else {
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
        *results[at].lock() = Some(outcome);
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 1..threads.min(choices.len()) {
            scope.spawn(work);
        }
        work();
    });
    let outcomes = results.into_iter().zip(choices).map(|(result, choice)| {
        let outcome = result
            .into_inner()
            .expect("every run was made: a panic in one would have come out of the scope");
        outcome.map_err(|error| SweepError::Sim {
            choice: choice.to_string(),
            error,
        })
    });
    outcomes.collect()
}
