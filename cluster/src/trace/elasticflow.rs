//! ElasticFlow's traces of Microsoft ITP clusters (ASPLOS'23), with speeds by number of GPUs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use policy::cluster::{Job, Speed, UserId};

use super::table::{Table, TraceError};
use super::{Options, Trace, gpu_types, kind};

/// Iterations per second on 1, 2, 3 ... GPUs, by model and global batch size.
pub type Curves = HashMap<(String, u32), Arc<[f64]>>;

/// Turns speeds at some numbers of GPUs into a curve over all numbers: a job uses the largest
/// measured number that it can fill, because the number of its data-parallel workers divides the
/// batch.
///
/// # Errors
/// [`TraceError`], also if the GPU type is not in the table.
pub fn read_curves(file: &Path, options: &Options) -> Result<Curves, TraceError> {
    let table = Table::open(file)?;
    let [gpu, model, batch, gpus, speed] = [
        table.column("gpu")?,
        table.column("model")?,
        table.column("global_batch")?,
        table.column("num_gpus")?,
        table.column("iters_per_s")?,
    ];
    let wanted = gpu_types(options).first().map(|(_, name)| name.clone());
    let mut known = BTreeSet::new();
    let mut points: BTreeMap<(String, u32), BTreeMap<u32, f64>> = BTreeMap::new();
    table.each(|row| {
        let name = row.text(gpu)?.to_lowercase();
        if wanted.as_ref().is_none_or(|wanted| *wanted == name) {
            let key = (row.text(model)?.to_owned(), row.number(batch)? as u32);
            let at = points.entry(key).or_default();
            // `nan` is what could not be measured.
            if !row.text(speed)?.eq_ignore_ascii_case("nan") {
                at.insert(row.gpus(gpus)?, row.number(speed)?);
            }
        }
        known.insert(name);
        Ok(())
    })?;
    if points.is_empty() {
        return Err(TraceError::GpuType {
            file: file.to_owned(),
            kind: wanted.unwrap_or_default(),
            known: known.into_iter().collect::<Vec<_>>().join(", "),
        });
    }
    let curve = |at: BTreeMap<u32, f64>| {
        let most = at.keys().next_back().copied().unwrap_or(0);
        let below = |n| at.range(..=n).next_back().map_or(0.0, |(_, speed)| *speed);
        (1..=most).map(below).collect()
    };
    Ok(points
        .into_iter()
        .map(|(key, at)| (key, curve(at)))
        .collect())
}

pub(super) fn read(table: Table, folder: &Path, options: &Options) -> Result<Trace, TraceError> {
    let curves = if options.elastic {
        read_curves(&folder.join("throughput_by_gpus.csv"), options)?
    } else {
        Curves::new()
    };
    let mut trace = Trace::default();
    let [
        part,
        submit,
        duration,
        gpus,
        model,
        batch,
        iterations,
        deadline,
    ] = [
        table.column("cluster")?,
        table.column("submit_s")?,
        table.column("duration_s")?,
        table.column("num_gpus")?,
        table.column("model")?,
        table.column("batch_size")?,
        table.column("iterations")?,
        table.column("deadline_s")?,
    ];
    table.each(|row| {
        let user = row.text(part)?;
        if options.part.as_deref().is_some_and(|part| part != user) {
            return Ok(());
        }
        let (name, batch_size) = (row.text(model)?.to_owned(), row.number(batch)? as u32);
        let kind = kind(
            &mut trace.kinds,
            &format!("{name} (batch size {batch_size})"),
        );
        let mut job = Job::rigid(
            kind,
            row.gpus(gpus)?,
            row.seconds(submit)?,
            row.seconds(duration)?,
        );
        job.user = UserId(trace.users.number(user));
        job.deadline_s = Some(row.seconds(deadline)?);
        if options.elastic {
            let Some(curve) = curves.get(&(name, batch_size)) else {
                trace.skipped += 1;
                return Ok(());
            };
            job.work = row.number(iterations)?;
            job.speed = Speed::Curve(curve.clone());
        }
        trace.jobs.push(job);
        Ok(())
    })?;
    Ok(trace)
}
