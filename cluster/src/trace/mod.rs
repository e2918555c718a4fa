//! Traces of jobs. The header of a file gives its format; a mistake is reported with file, line and
//! column.

mod chronus;
mod elasticflow;
mod gavel;
mod openb;
mod philly;
pub mod pollux;
mod pressure;
mod requests;
mod synergy;
mod table;
mod tiresias;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use policy::cluster::fair::Sensitivity;
use policy::cluster::{GpuType, Job, JobType, PairTable, Profile};

pub use elasticflow::read_curves;
pub use gavel::{Isolated, SoloSpeed, read_isolated, read_pairs};
pub use requests::{Request, TokenCost, read_requests};
pub use synergy::read_sensitivity;
use table::Table;
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
    /// Rows that were left out because the speed of such a job is not known.
    pub skipped: usize,
}

impl Trace {
    fn sort(&mut self, limit: Option<usize>) {
        self.jobs
            .sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
        self.jobs.truncate(limit.unwrap_or(usize::MAX));
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
    let table = Table::open(path)?;
    let folder = speeds.or_else(|| path.parent()).unwrap_or(Path::new("."));
    let has = |columns: &[&str]| columns.iter().all(|column| table.has(column));
    let mut trace = if has(&["job_type", "total_steps", "arrival_s", "num_gpus"]) {
        gavel::read(table, folder, options)?
    } else if has(&["submit_min", "duration_min", "expect_time_list"]) {
        chronus::read(table, options)?
    } else if has(&["cluster", "submit_s", "duration_s", "deadline_s"]) {
        elasticflow::read(table, folder, options)?
    } else if has(&["num_gpu", "gpu_milli", "qos", "creation_time"]) {
        openb::read(table, options)?
    } else if has(&["job_id", "num_gpu", "submit_time", "duration"]) {
        tiresias::read(table, options)?
    } else if has(&["load", "workload", "submit_s", "application", "num_gpus"]) {
        pollux::read(table, folder, options)?
    } else if has(&["submit", "duration_s", "num_gpus"])
        || has(&["arrival_s", "duration_s", "num_gpus"])
    {
        philly::read(table, options)?
    } else {
        return Err(table.unknown_format());
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
