//! Pollux' workloads (OSDI'21) and the measurements of its six applications beside them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use policy::cluster::goodput::Gradient;
use policy::cluster::{Job, Speed};

use super::table::{Column, Row, Table, TraceError};
use super::{Options, Trace, kind};
use crate::training::{Application, Epochs, Point, Training};

type Points = Vec<Point>;

#[derive(Default)]
struct Raw {
    by_batch: BTreeMap<u32, Epochs>,
    placements: HashMap<Vec<u32>, Points>,
    sizes: BTreeMap<u32, BTreeMap<u32, Points>>,
}

fn point(row: &Row<'_>, [local, step, sync]: [Column; 3]) -> Result<Point, TraceError> {
    let (local, step_s) = (row.gpus(local)?, row.number(step)?);
    if step_s <= 0.0 {
        return Err(row.wrong(step, "a step takes more than no time"));
    }
    Ok((local, [step_s, row.number(sync)?.min(step_s)]))
}

fn times(table: &Table) -> Result<[Column; 3], TraceError> {
    Ok([
        table.column("local_bsz")?,
        table.column("step_time")?,
        table.column("sync_time")?,
    ])
}

/// All applications that are measured in a folder, by name: `placements.csv`, `scalability.csv`,
/// `validation.csv`.
///
/// # Errors
/// [`TraceError`].
pub fn read_applications(folder: &Path) -> Result<HashMap<String, Arc<Application>>, TraceError> {
    let mut raw: HashMap<String, Raw> = HashMap::new();
    let table = Table::open(&folder.join("placements.csv"))?;
    let (name, place) = (table.column("application")?, table.column("placement")?);
    let columns = times(&table)?;
    table.each(|row| {
        // A digit for each node: its GPUs.
        let digits = row.text(place)?.chars().map(|c| c.to_digit(10));
        let nodes: Option<Vec<u32>> = digits.map(|gpus| gpus.filter(|n| *n > 0)).collect();
        let nodes = nodes
            .filter(|nodes| !nodes.is_empty())
            .ok_or_else(|| row.wrong(place, "a digit from 1 to 9 is expected for each node"))?;
        let of = raw.entry(row.text(name)?.to_owned()).or_default();
        let at = of.placements.entry(nodes).or_default();
        at.push(point(row, columns)?);
        Ok(())
    })?;
    let table = Table::open(&folder.join("scalability.csv"))?;
    let name = table.column("application")?;
    let (nodes, gpus) = (table.column("num_nodes")?, table.column("num_replicas")?);
    let columns = times(&table)?;
    table.each(|row| {
        let of = raw.entry(row.text(name)?.to_owned()).or_default();
        let at = of.sizes.entry(row.gpus(nodes)?).or_default();
        let at = at.entry(row.gpus(gpus)?).or_default();
        at.push(point(row, columns)?);
        Ok(())
    })?;
    let file = folder.join("validation.csv");
    let table = Table::open(&file)?;
    let name = table.column("application")?;
    let [batch, progress, steps, square, variance] = [
        table.column("batch_size")?,
        table.column("progress")?,
        table.column("iteration")?,
        table.column("grad_sqr")?,
        table.column("grad_var")?,
    ];
    table.each(|row| {
        let of = raw.entry(row.text(name)?.to_owned()).or_default();
        let epochs = of.by_batch.entry(row.gpus(batch)?).or_default();
        let made = row.number(progress)?;
        if epochs.progress.last().is_some_and(|before| *before >= made) {
            return Err(row.wrong(progress, "more than in the epoch before is expected"));
        }
        epochs.progress.push(made);
        epochs.steps.push(row.number(steps)?);
        epochs.gradients.push(Gradient {
            square: row.number(square)?,
            variance: row.number(variance)?,
        });
        Ok(())
    })?;
    let mut all = HashMap::new();
    for (name, raw) in raw {
        // The one whose memory holds less than was measured, as in the authors' simulator.
        let most_local = (name == "yolov3").then_some(8);
        let (of, missing) = (name.clone(), file.clone());
        let application =
            Application::new(name, most_local, raw.by_batch, raw.placements, raw.sizes).ok_or(
                TraceError::Unmeasured {
                    file: missing,
                    name: of,
                },
            )?;
        all.insert(application.name.clone(), Arc::new(application));
    }
    Ok(all)
}

/// `--part` is the number of a workload, at load 1, or load/number, with the load as the file
/// writes it.
fn is_part(part: &str, load: &str, workload: &str) -> bool {
    let (wanted, number) = part.split_once('/').unwrap_or(("1", part));
    let same = match (wanted.parse::<f64>(), load.parse::<f64>()) {
        (Ok(wanted), Ok(load)) => wanted == load,
        _ => wanted == load,
    };
    same && number == workload
}

pub(super) fn read(table: Table, folder: &Path, options: &Options) -> Result<Trace, TraceError> {
    let applications = read_applications(folder)?;
    let mut trace = Trace::default();
    let [load, workload, submit, application, gpus, batch] = [
        table.column("load")?,
        table.column("workload")?,
        table.column("submit_s")?,
        table.column("application")?,
        table.column("num_gpus")?,
        table.column("batch_size")?,
    ];
    table.each(|row| {
        let (load, workload) = (row.text(load)?, row.text(workload)?);
        let part = options.part.as_deref();
        if part.is_some_and(|part| !is_part(part, load, workload)) {
            return Ok(());
        }
        let name = row.text(application)?;
        let Some(measured) = applications.get(name) else {
            return Err(row.wrong(application, "no measurement of this application is there"));
        };
        let (batch_size, gpus) = (row.gpus(batch)?, row.gpus(gpus)?);
        let kind = kind(
            &mut trace.kinds,
            &format!("{name} (batch size {batch_size})"),
        );
        let work = measured.progress(measured.epochs() - 1);
        // At the user's batch size: for what rests on how long a job takes alone.
        let step_s = |gpus| measured.step_s(batch_size, gpus, PER_NODE);
        let steps = measured.steps_left(batch_size, 0).max(1.0);
        let mut job = Job::rigid(kind, gpus, row.seconds(submit)?, work);
        let speeds = (1..=gpus).map(|gpus| work / (steps * step_s(gpus)));
        job.speed = Speed::Curve(speeds.collect());
        trace.training.entry(kind).or_insert_with(|| Training {
            application: measured.clone(),
            batch: batch_size,
            // Its noise was not measured beyond one GPU: the authors keep it there, at one batch
            // size.
            fixed: name == "ncf",
        });
        trace.jobs.push(job);
        Ok(())
    })?;
    Ok(trace)
}

/// GPUs of a node where the measurements were made.
const PER_NODE: u32 = 4;
