//! Gavel's Philly-derived trace and its measured speeds (OSDI'20).

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use policy::cluster::{GpuType, Job, PairTable, UserId};

use super::table::{Column, Table, TraceError};
use super::{Names, Options, Trace, gpu_types, kind};

/// What was measured of a job alone.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct SoloSpeed {
    /// Steps in a second.
    pub steps_per_s: f64,
    /// Part of the time in which the device computed, where that was measured.
    pub busy: Option<f64>,
    /// Part of the memory's bandwidth that was in use.
    pub mem_busy: Option<f64>,
    /// Memory that it held.
    pub mem_bytes: Option<u64>,
}

/// By GPU type, kind of job and number of GPUs.
pub type Isolated = HashMap<(GpuType, String, u32), SoloSpeed>;

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
    let busy = table.optional("busy");
    let mem_busy = table.optional("mem_busy");
    let mem_bytes = table.optional("mem_bytes");
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
            let optional = |column: Option<Column>| {
                let there = column.filter(|column| !row.is_empty(*column));
                there.map(|column| row.number(column)).transpose()
            };
            let solo = SoloSpeed {
                steps_per_s: steps,
                busy: optional(busy)?,
                mem_busy: optional(mem_busy)?,
                // CAST: bytes of a device.
                mem_bytes: optional(mem_bytes)?.map(|bytes| bytes as u64),
            };
            if steps > 0.0 {
                isolated.insert((*number, row.text(job)?.to_owned(), row.gpus(gpus)?), solo);
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
        let solo = |kind| isolated.get(&(kind, name.to_owned(), wanted)).copied();
        let speed = |kind| solo(kind).map(|one: SoloSpeed| one.steps_per_s);
        let Some(measured) = solo(GpuType(0)) else {
            trace.skipped += 1;
            return Ok(());
        };
        let first = measured.steps_per_s;
        let kind = kind(&mut trace.kinds, name);
        let duration_s = row.number(steps)? / first;
        let mut job = Job::rigid(kind, wanted, row.seconds(arrival)?, duration_s);
        job.user = UserId(trace.users.number(user));
        // Where a job is not known to run on another type, it does not.
        job.by_type = (0..options.gpu_types.len())
            .map(|kind| speed(GpuType(kind as u16)).unwrap_or(0.0) / first)
            .collect();
        // A job of which nothing is known counts as busy all the time.
        job.profile.busy = measured.busy.unwrap_or(job.profile.busy);
        job.profile.mem_busy = measured.mem_busy.unwrap_or(job.profile.mem_busy);
        job.profile.persistent_bytes = measured.mem_bytes.unwrap_or(0);
        job.profile = job.profile.sane();
        trace.jobs.push(job);
        Ok(())
    })?;
    Ok(trace)
}
