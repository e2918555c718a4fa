//! Alibaba's PAI of 2020 (NSDI'22; GitHub alibaba/clusterdata, `cluster-trace-gpu-v2020`): tasks
//! whose instances ask for parts of GPUs, and how far iterations of workers differ.
//!
//! Tables have no header; it is in a file of its own beside each (`pai_task_table.header`). What is
//! read is `pai_task_table.csv`: `plan_gpu` is the part of a GPU that each of `inst_num` instances
//! asks for, in hundredths. Tasks of one `job_name` are one job, from the first start to the last
//! end. A job of one instance that asks for less than a GPU asks for a part of it; others have
//! whole GPUs, and what they ask of those is their busy fraction. `pai_job_table.csv` beside it
//! says whose jobs are and when they came, `pai_instance_table.csv` how long instances of a job
//! ran: where they are missing, jobs come when their first task starts. `--part` is a `gpu_type`.

use std::collections::HashMap;
use std::path::Path;

use policy::cluster::{Job, Part, UserId};

use super::recorded::{Recorded, Spread};
use super::table::{Table, TraceError};
use super::{BACKWARDS, NO_GPU, Options, Trace, UNRECORDED, kind};

const TASKS: &[&str] = &[
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
];

/// Opens a table whose header is beside it, or in it.
pub(super) fn open(file: &Path) -> Result<Table, TraceError> {
    let header = file.with_extension("header");
    match header.exists() {
        true => Table::with_header(file, &header),
        false => Table::open(file),
    }
}

/// A table beside another.
fn beside(file: &Path, name: &str) -> Result<Option<Table>, TraceError> {
    let other = file.with_file_name(name);
    other.exists().then(|| open(&other)).transpose()
}

/// What the tasks of a job ask for.
struct Asks {
    name: String,
    task: String,
    /// GPUs, in sum and whole.
    gpus: f64,
    whole: f64,
    instances: f64,
    times_s: Option<[f64; 2]>,
    /// A task with a GPU lacks a start or an end.
    unrecorded: bool,
    /// A task with a GPU ends before it starts.
    backwards: bool,
}

pub(super) fn read(table: Table, file: &Path, options: &Options) -> Result<Trace, TraceError> {
    const INSTANCES: &str = "a number of instances from 1 to 65536 is expected";
    let mut trace = Trace {
        unused: table.others(TASKS)?,
        ..Trace::default()
    };
    let [job, task, instances, from, to, plan, gpu_type] = [
        table.column("job_name")?,
        table.column("task_name")?,
        table.column("inst_num")?,
        table.column("start_time")?,
        table.column("end_time")?,
        table.column("plan_gpu")?,
        table.column("gpu_type")?,
    ];
    let (mut all, mut index) = (Vec::<Asks>::new(), HashMap::<String, usize>::new());
    table.each(|row| {
        let (name, type_there) = (row.text(job)?, row.text(gpu_type)?);
        if name.is_empty() {
            return Err(row.wrong(job, "the name of a job is expected"));
        }
        if options
            .part
            .as_deref()
            .is_some_and(|part| part != type_there)
        {
            return Ok(());
        }
        let each = match row.is_empty(plan) {
            true => 0.0,
            false => row.gpu_parts(plan, 100.0)?,
        };
        let times = [row.known_seconds(from)?, row.known_seconds(to)?];
        let at = *index.entry(name.to_owned()).or_insert_with(|| {
            all.push(Asks {
                name: name.to_owned(),
                task: String::new(),
                gpus: 0.0,
                whole: 0.0,
                instances: 0.0,
                times_s: None,
                unrecorded: false,
                backwards: false,
            });
            all.len() - 1
        });
        let of = &mut all[at];
        if each == 0.0 {
            return Ok(());
        }
        let count = row.number(instances)?;
        if count.fract() != 0.0 || !(1.0..=65_536.0).contains(&count) {
            return Err(row.wrong(instances, INSTANCES));
        }
        of.gpus += each * count;
        of.whole += each.ceil() * count;
        of.instances += count;
        if of.whole > 65_536.0 {
            return Err(row.wrong(instances, "a job of at most 65536 GPUs is expected"));
        }
        of.task.push_str(if of.task.is_empty() { "" } else { "+" });
        of.task.push_str(row.text(task)?);
        let [Some(from_s), Some(to_s)] = times else {
            of.unrecorded = true;
            return Ok(());
        };
        of.backwards |= to_s < from_s;
        let [first_s, last_s] = of.times_s.unwrap_or([from_s, to_s]);
        of.times_s = Some([first_s.min(from_s), last_s.max(to_s)]);
        Ok(())
    })?;
    let came = submissions(file)?;
    let mut spread = instances_of(file)?;
    for of in all {
        if of.gpus == 0.0 {
            trace.leave_out(NO_GPU);
            continue;
        }
        let (Some([from_s, to_s]), false) = (of.times_s, of.unrecorded) else {
            trace.leave_out(UNRECORDED);
            continue;
        };
        let (user, submit_s) = match came.get(&of.name) {
            Some((user, Some(submit_s))) => (user.as_str(), *submit_s),
            Some((user, None)) => (user.as_str(), from_s),
            None => ("all", from_s),
        };
        if of.backwards || from_s < submit_s {
            trace.leave_out(BACKWARDS);
            continue;
        }
        let kind = kind(&mut trace.kinds, &of.task);
        // CAST: a whole number of at most 65,536.
        let mut job = Job::rigid(kind, of.whole as u32, submit_s, (to_s - from_s).max(1.0));
        job.profile.busy = of.gpus / of.whole;
        if of.instances == 1.0 && of.gpus < 1.0 {
            job.part = Some(Part {
                share: of.gpus,
                bytes: 0,
            });
        }
        job.user = UserId(trace.users.number(user));
        trace.jobs.push(job);
        trace.recorded.push(Recorded {
            gpus: of.gpus,
            submit_s,
            runs: vec![[from_s, to_s]],
        });
        trace.variation.extend(spread.remove(&of.name));
    }
    Ok(trace)
}

/// Whose each job is, and when it came, where the table of jobs is there.
fn submissions(file: &Path) -> Result<HashMap<String, (String, Option<f64>)>, TraceError> {
    let Some(table) = beside(file, "pai_job_table.csv")? else {
        return Ok(HashMap::new());
    };
    let [job, user, from] = [
        table.column("job_name")?,
        table.column("user")?,
        table.column("start_time")?,
    ];
    let mut all = HashMap::new();
    table.each(|row| {
        let of = (row.text(user)?.to_owned(), row.known_seconds(from)?);
        all.insert(row.text(job)?.to_owned(), of);
        Ok(())
    })?;
    Ok(all)
}

/// How far the lengths of the instances of each job differ, where their table is there and has at
/// least two: coefficient of variation.
fn instances_of(file: &Path) -> Result<HashMap<String, f64>, TraceError> {
    let Some(table) = beside(file, "pai_instance_table.csv")? else {
        return Ok(HashMap::new());
    };
    let [job, from, to] = [
        table.column("job_name")?,
        table.column("start_time")?,
        table.column("end_time")?,
    ];
    let mut lengths = HashMap::<String, Moments>::new();
    table.each(|row| {
        let times = [row.known_seconds(from)?, row.known_seconds(to)?];
        if let [Some(from_s), Some(to_s)] = times
            && to_s >= from_s
        {
            let of = lengths.entry(row.text(job)?.to_owned()).or_default();
            of.add(to_s - from_s);
        }
        Ok(())
    })?;
    let several = lengths.into_iter().filter(|(_, of)| of.count > 1.0);
    Ok(several.map(|(name, of)| (name, of.variation())).collect())
}

/// Number, mean and sum of squares about it (Welford).
#[derive(Clone, Copy, Default)]
struct Moments {
    count: f64,
    mean: f64,
    squares: f64,
}

impl Moments {
    fn add(&mut self, value: f64) {
        self.count += 1.0;
        let off = value - self.mean;
        self.mean += off / self.count;
        self.squares += off * (value - self.mean);
    }

    /// Standard deviation over mean; 0 where all are 0.
    fn variation(self) -> f64 {
        match self.mean > 0.0 {
            true => (self.squares / self.count).sqrt() / self.mean,
            false => 0.0,
        }
    }
}

/// Of workers of a job that each have the same part of a GPU: how far the times of their
/// iterations differ, as coefficients of variation.
#[derive(Clone, Debug, PartialEq)]
pub struct Iterations {
    /// Name or number of the job.
    pub job: String,
    /// Part of a GPU that each worker has, in hundredths.
    pub gpu_percent: f64,
    /// Of each worker by itself, over its iterations.
    pub of_worker: Spread,
    /// Between the workers, in each iteration.
    pub between_workers: Spread,
}

/// Reads the times of iterations (`mini-batch-time`: worker, gpu, time, batch_time_norm), of one
/// job, or of several with a column `job`, `gpu_percent` for `gpu` and `iteration` for `time`.
///
/// # Errors
/// [`TraceError`]: the file cannot be read, lacks a column or has a bad field.
pub fn read_iterations(file: &Path) -> Result<Vec<Iterations>, TraceError> {
    const PART: &str = "hundredths of a GPU, above 0 and at most 100, are expected";
    let table = Table::open(file)?;
    let either = |a: &'static str, b: &'static str| table.column(if table.has(a) { a } else { b });
    let job = table.optional("job");
    let [worker, part, iteration, time] = [
        table.column("worker")?,
        either("gpu_percent", "gpu")?,
        either("iteration", "time")?,
        table.column("batch_time_norm")?,
    ];
    #[derive(Default)]
    struct Of {
        percent: f64,
        workers: HashMap<String, Moments>,
        iterations: HashMap<u64, Moments>,
    }
    let (mut order, mut jobs) = (Vec::new(), HashMap::<String, Of>::new());
    table.each(|row| {
        let name = job.map_or(Ok("job"), |job| row.text(job))?;
        if !jobs.contains_key(name) {
            order.push(name.to_owned());
        }
        let of = jobs.entry(name.to_owned()).or_default();
        of.percent = row.number(part)?;
        if !(of.percent > 0.0 && of.percent <= 100.0) {
            return Err(row.wrong(part, PART));
        }
        let took = row.number(time)?;
        let at = row.number(iteration)?.to_bits();
        let worker = row.text(worker)?.to_owned();
        of.workers.entry(worker).or_default().add(took);
        of.iterations.entry(at).or_default().add(took);
        Ok(())
    })?;
    let spread = |all: &mut dyn Iterator<Item = Moments>| {
        let several = all.filter(|of| of.count > 1.0);
        Spread::of(several.map(Moments::variation).collect())
    };
    let of = order.into_iter().filter_map(|name| {
        let of = jobs.remove(&name)?;
        Some(Iterations {
            job: name,
            gpu_percent: of.percent,
            of_worker: spread(&mut of.workers.into_values()),
            between_workers: spread(&mut of.iterations.into_values()),
        })
    });
    let all: Vec<Iterations> = of.collect();
    if all.is_empty() {
        return Err(TraceError::Empty {
            file: file.to_owned(),
            part: None,
        });
    }
    Ok(all)
}
