//! Gavel's Philly-derived trace and its measured speeds (OSDI'20).

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use policy::cluster::{GpuType, Job, PairTable, UserId};

use super::table::{Table, TraceError};
use super::{Names, Options, Trace, gpu_types, kind};

/// Steps per second alone, by GPU type, kind of job and number of GPUs.
pub type Isolated = HashMap<(GpuType, String, u32), f64>;

/// Speeds of jobs alone.
///
/// # Errors
/// [`TraceError`], also where one of the GPU types is not in the table.
pub fn read_isolated(file: &Path, options: &Options) -> Result<Isolated, TraceError> {
    let table = Table::open(file)?;
    let [gpu, job, gpus, speed] = [
        table.column("gpu")?,
        table.column("job_type")?,
        table.column("num_gpus")?,
        table.column("steps_per_s")?,
    ];
    let types = gpu_types(options);
    let mut known = BTreeSet::new();
    let mut isolated = Isolated::new();
    table.each(|row| {
        let name = row.text(gpu)?;
        known.insert(name.to_owned());
        for (number, _) in types.iter().filter(|(_, kind)| kind == name) {
            if row.is_empty(speed) {
                continue;
            }
            let steps = row.number(speed)?;
            if steps > 0.0 {
                isolated.insert((*number, row.text(job)?.to_owned(), row.gpus(gpus)?), steps);
            }
        }
        Ok(())
    })?;
    match types.iter().find(|(_, name)| !known.contains(name)) {
        None => Ok(isolated),
        Some((_, missing)) => Err(TraceError::GpuType {
            file: file.to_owned(),
            kind: missing.clone(),
            known: known.into_iter().collect::<Vec<_>>().join(", "),
        }),
    }
}

/// Speeds of pairs, relative to each alone.
///
/// # Errors
/// [`TraceError`].
pub fn read_pairs(
    file: &Path,
    options: &Options,
    kinds: &mut Names,
) -> Result<PairTable, TraceError> {
    let table = Table::open(file)?;
    let [gpu, job_a, job_b, gpus, norm_a, norm_b] = [
        table.column("gpu")?,
        table.column("job_a")?,
        table.column("job_b")?,
        table.column("num_gpus")?,
        table.column("norm_a")?,
        table.column("norm_b")?,
    ];
    let types = gpu_types(options);
    let mut pairs = PairTable::default();
    table.each(|row| {
        let name = row.text(gpu)?;
        for (number, _) in types.iter().filter(|(_, kind)| kind == name) {
            if row.is_empty(norm_a) || row.is_empty(norm_b) {
                continue;
            }
            let ab = (kind(kinds, row.text(job_a)?), kind(kinds, row.text(job_b)?));
            let speeds = [row.number(norm_a)?, row.number(norm_b)?];
            pairs.insert(*number, row.gpus(gpus)?, ab, speeds);
        }
        Ok(())
    })?;
    Ok(pairs)
}

/// Run time alone is steps / speed on the first GPU type. Jobs whose speed there is not known are
/// left out and counted.
pub(super) fn read(table: Table, folder: &Path, options: &Options) -> Result<Trace, TraceError> {
    let isolated = read_isolated(&folder.join("isolated_throughput.csv"), options)?;
    let mut trace = Trace::default();
    let pair_file = folder.join("pair_throughput.csv");
    if pair_file.exists() {
        let pairs = read_pairs(&pair_file, options, &mut trace.kinds)?;
        trace.pairs = Some(Arc::new(pairs));
    }
    let [job_type, steps, arrival, gpus] = [
        table.column("job_type")?,
        table.column("total_steps")?,
        table.column("arrival_s")?,
        table.column("num_gpus")?,
    ];
    let vc = table.optional("vc");
    table.each(|row| {
        let user = vc.map_or(Ok("all"), |vc| row.text(vc))?;
        if options.part.as_deref().is_some_and(|part| part != user) {
            return Ok(());
        }
        let (name, wanted) = (row.text(job_type)?, row.gpus(gpus)?);
        let speed = |kind| isolated.get(&(kind, name.to_owned(), wanted)).copied();
        let Some(first) = speed(GpuType(0)) else {
            trace.skipped += 1;
            return Ok(());
        };
        let kind = kind(&mut trace.kinds, name);
        let duration_s = row.number(steps)? / first;
        let mut job = Job::rigid(kind, wanted, row.number(arrival)?, duration_s);
        job.user = UserId(trace.users.number(user));
        // Where a job is not known to run on another type, it does not.
        job.by_type = (0..options.gpu_types.len())
            .map(|kind| speed(GpuType(kind as u16)).unwrap_or(0.0) / first)
            .collect();
        trace.jobs.push(job);
        Ok(())
    })?;
    Ok(trace)
}
