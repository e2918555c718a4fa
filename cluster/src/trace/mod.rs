//! Traces of jobs. The header of a file gives its format; a mistake is reported with file, line and
//! column.

mod acme;
mod alibaba;
mod chronus;
mod clock;
mod elasticflow;
mod gavel;
mod openb;
mod pai;
mod philly;
mod philly_log;
pub mod pollux;
mod pressure;
mod recorded;
mod requests;
mod synergy;
mod table;
#[cfg(test)]
mod tests;
mod tiresias;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use policy::cluster::fair::Sensitivity;
use policy::cluster::{GpuType, Job, JobType, PairTable, Part, Profile};

pub use elasticflow::read_curves;
pub use gavel::{Isolated, SoloSpeed, read_isolated, read_pairs};
pub use pai::{Iterations, read_iterations};
pub use recorded::{Delays, Recorded, Spread, delays};
pub use requests::{Request, TokenCost, read_requests};
pub use synergy::read_sensitivity;
pub use table::TraceError;

use crate::training::Training;

/// Names that were given numbers, in the order in which they were first seen.
#[derive(Clone, Debug, Default)]
pub struct Names {
    list: Vec<String>,
    index: HashMap<String, u32>,
}

impl Names {
    /// The number of a name, a new one where it was never seen.
    pub fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.index.get(name) {
            return *number;
        }
        let number = self.list.len() as u32;
        self.list.push(name.to_owned());
        self.index.insert(name.to_owned(), number);
        number
    }

    /// The number of a name that was seen.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<u32> {
        self.index.get(name).copied()
    }

    /// The name of a number.
    #[must_use]
    pub fn name(&self, number: u32) -> &str {
        self.list.get(number as usize).map_or("?", String::as_str)
    }

    /// All names.
    #[must_use]
    pub fn all(&self) -> &[String] {
        &self.list
    }
}

/// What a trace is read for.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Names of the GPU types of the cluster, by [`GpuType`]. Speeds are those of the first.
    pub gpu_types: Vec<String>,
    /// Only jobs of this part of the trace: a virtual cluster, a cluster, a workload.
    pub part: Option<String>,
    /// Jobs may change their number of GPUs, where the speeds for that are known.
    pub elastic: bool,
    /// At most so many jobs, the earliest.
    pub limit: Option<usize>,
}

/// Jobs, by arrival.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// They have no number yet.
    pub jobs: Vec<Job>,
    /// Names of the kinds of job, by [`JobType`].
    pub kinds: Names,
    /// Names of users or virtual clusters, by `UserId`.
    pub users: Names,
    /// Measured speeds of pairs, where the trace comes with some.
    pub pairs: Option<Arc<PairTable>>,
    /// Measured pairs with the profiles of both jobs, where those are known.
    pub sharing: Vec<(Profile, Profile, [f64; 2])>,
    /// What the jobs of a kind train, where that is known.
    pub training: HashMap<JobType, Training>,
    /// Rows that were left out: the speed of such a job is not known, or see `left_out`.
    pub skipped: usize,
    /// Of those, how many for which reason, where a trace has several.
    pub left_out: BTreeMap<&'static str, usize>,
    /// Columns that neither this reader nor the publisher of the trace knows.
    pub unused: Vec<String>,
    /// How jobs waited and ran in the cluster that the trace is of, where it says so. They are in
    /// the order of the file, and all of them also under a limit.
    pub recorded: Vec<Recorded>,
    /// How far the lengths of the instances of a job differ (coefficient of variation), of jobs
    /// for which that is known.
    pub variation: Vec<f64>,
}

/// Left out: it asks for no GPU.
const NO_GPU: &str = "without a GPU";
/// Left out: it is not said when it started, or when it ended.
const UNRECORDED: &str = "no start or no end recorded";
/// Left out: it starts before it comes, or ends before it starts.
const BACKWARDS: &str = "times run backwards";

impl Trace {
    fn sort(&mut self, limit: Option<usize>) {
        self.jobs
            .sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
        self.jobs.truncate(limit.unwrap_or(usize::MAX));
    }

    fn leave_out(&mut self, why: &'static str) {
        self.skipped += 1;
        *self.left_out.entry(why).or_default() += 1;
    }

    /// Times count from the first arrival: calendar times become seconds of a simulation.
    fn count_from_first_arrival(&mut self) {
        let arrivals = self.jobs.iter().map(|job| job.arrival_s);
        let first_s = arrivals.fold(f64::INFINITY, f64::min);
        for job in &mut self.jobs {
            job.arrival_s -= first_s;
        }
    }

    /// Gives jobs the sensitivity of their speed to cores and memory, by the names of their kinds:
    /// as measured with their number of GPUs, else with the next smaller measured number. Returns
    /// the number of jobs with a known sensitivity.
    pub fn tell_sensitivity(&mut self, table: &HashMap<(String, u32), Sensitivity>) -> usize {
        let mut known: HashMap<(JobType, u32), Option<Arc<Sensitivity>>> = HashMap::new();
        for job in &mut self.jobs {
            let name = self.kinds.name(job.profile.kind.0).to_lowercase();
            let found = known
                .entry((job.profile.kind, job.gpus))
                .or_insert_with(|| {
                    let of = (1..=job.gpus).rev();
                    let mut of = of.filter_map(|gpus| table.get(&(name.clone(), gpus)));
                    of.next().map(|found| Arc::new(found.clone()))
                });
            job.host.clone_from(found);
        }
        self.jobs.iter().filter(|job| job.host.is_some()).count()
    }

    /// Mean GPU time asked for per second, over the number of GPUs: 1 is a cluster that is just
    /// full.
    #[must_use]
    pub fn offered_load(&self, gpus: u32) -> f64 {
        let (Some(first), Some(last)) = (self.jobs.first(), self.jobs.last()) else {
            return 0.0;
        };
        let work: f64 = self
            .jobs
            .iter()
            .map(|job| job.duration_s() * f64::from(job.gpus))
            .sum();
        work / (last.arrival_s - first.arrival_s).max(1.0) / f64::from(gpus)
    }
}

/// Reads a trace of any known format. Speed tables are expected beside it, unless `speeds` names
/// another folder.
///
/// # Errors
/// [`TraceError`]: the file cannot be read, has a header that no reader knows, or a bad field.
pub fn read(path: &Path, speeds: Option<&Path>, options: &Options) -> Result<Trace, TraceError> {
    let mut trace = match philly_log::is_log(path) {
        true => philly_log::read(path, options)?,
        false => read_table(path, speeds, options)?,
    };
    trace.sort(options.limit);
    if trace.jobs.is_empty() {
        return Err(TraceError::Empty {
            file: path.to_owned(),
            part: options.part.clone(),
        });
    }
    Ok(trace)
}

fn read_table(path: &Path, speeds: Option<&Path>, options: &Options) -> Result<Trace, TraceError> {
    let table = pai::open(path)?;
    let folder = speeds.or_else(|| path.parent()).unwrap_or(Path::new("."));
    let has = |columns: &[&str]| columns.iter().all(|column| table.has(column));
    if has(&["job_type", "total_steps", "arrival_s", "num_gpus"]) {
        gavel::read(table, folder, options)
    } else if has(&["submit_min", "duration_min", "expect_time_list"]) {
        chronus::read(table, options)
    } else if has(&["cluster", "submit_s", "duration_s", "deadline_s"]) {
        elasticflow::read(table, folder, options)
    } else if has(&["num_gpu", "gpu_milli", "qos", "creation_time"]) {
        openb::read(table, options)
    } else if has(&["job_id", "num_gpu", "submit_time", "duration"]) {
        tiresias::read(table, options)
    } else if has(&["load", "workload", "submit_s", "application", "num_gpus"]) {
        pollux::read(table, folder, options)
    } else if has(&["submit", "duration_s", "num_gpus"])
        || has(&["arrival_s", "duration_s", "num_gpus"])
    {
        philly::read(table, options)
    } else if has(&["job_name", "task_name", "inst_num", "plan_gpu"]) {
        pai::read(table, path, options)
    } else if has(&["gpu_num", "submit_time", "start_time", "end_time"]) {
        acme::read(table, options)
    } else if has(&["instance_sn", "role", "gpu_request"]) {
        alibaba::read_instances(table, options)
    } else if has(&["gpu_request", "worker_num", "submit_time", "job_type"]) {
        alibaba::read_spot(table, options)
    } else if has(&["pod_id", "gpu_request", "day", "hour"]) {
        alibaba::read_hourly(table, options)
    } else if has(&["pod_id", "duration_hours"]) {
        Err(TraceError::NoTimes {
            file: path.to_owned(),
            why: alibaba::NO_TIMES,
        })
    } else {
        Err(table.unknown_format())
    }
}

/// The GPU types of [`Options`] by name.
fn gpu_types(options: &Options) -> Vec<(GpuType, String)> {
    let numbered = options.gpu_types.iter().enumerate();
    numbered
        .map(|(i, name)| (GpuType(i as u16), name.to_lowercase()))
        .collect()
}

fn kind(names: &mut Names, name: &str) -> JobType {
    JobType(names.number(name))
}

/// A job of so many instances that each ask for so many GPUs. One that asks for less than a GPU
/// asks for a part of it; several have one each and are that busy.
///
/// # Errors
/// What is expected instead.
fn asking(
    kind: JobType,
    each: f64,
    instances: f64,
    arrival_s: f64,
    duration_s: f64,
) -> Result<Job, &'static str> {
    let gpus = each.ceil() * instances;
    if !(1.0..=65_536.0).contains(&gpus) {
        return Err("a job of 1 to 65536 GPUs is expected");
    }
    // CAST: a whole number of at most 65,536.
    let mut job = Job::rigid(kind, gpus as u32, arrival_s, duration_s);
    // Its length was recorded at this part: it needs no more.
    job.profile.busy = each / each.ceil();
    if instances == 1.0 && each < 1.0 {
        job.part = Some(Part {
            share: each,
            bytes: 0,
        });
    }
    Ok(job)
}
