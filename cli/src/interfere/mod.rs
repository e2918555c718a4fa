//! `sublet interfere`: which jobs may share a GPU, by experiment. Each job runs by itself and
//! beside each other one; what comes out is how much slower it gets.
//!
//! A plan says what is measured, a schedule in which order, a runner makes one run after the other,
//! a store keeps each that is finished, statistics make slowdowns of them, a report shows these.
//! However the experiment ends, its processes end with it (`supervise`), and the same command goes
//! on from the store.

mod device;
mod feed;
mod host;
mod matrix;
mod plan;
mod progress;
mod report;
mod runner;
mod schedule;
mod statistics;
mod store;
mod supervise;

use std::env;
use std::fs;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use control::paths::{RuntimeDir, Surroundings};
use control::{Client, JobState};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::Interfere;
use crate::connect;
use crate::exit::Result;
use crate::run::driver::{self, Driver, Wish};
use crate::run::install::Install;
use device::Watched;
use host::Host;
use matrix::Matrix;
use plan::Plan;
use report::Experiment;
use runner::Runner;
use schedule::Run;
use store::{Record, Store};
use supervise::Guardian;

/// Exit code where runs failed; the report has the others.
pub const FAILED_RUNS: u8 = 1;

/// What is printed at the end, and how it ended: the exit code, or a hook that was not given what
/// was measured.
///
/// # Errors
/// A plan that is wrong, a place that cannot be written, another experiment in it, no device.
pub fn interfere(args: &Interfere) -> Result<(String, Result<u8>)> {
    let (plan, text) = read_plan(args)?;
    let fed = match &args.feed {
        Some(url) => Some((url, mode_to_feed(&plan)?)),
        None => None,
    };
    let runs = schedule::runs(&plan);
    let summary = schedule::summary(&plan);
    let Some(out) = args.out.as_deref().filter(|_| !args.dry_run) else {
        let lines = runs.iter().map(|run| format!("{}\n", run.key));
        return Ok((format!("{summary}\n{}", lines.collect::<String>()), Ok(0)));
    };
    let executable = env::current_exe().context("cannot tell where `sublet` itself lies")?;
    let install = Install::find(&executable, |name| env::var_os(name))?;
    let wish = match &args.driver {
        Some(path) => Wish::This(path),
        None if args.sim => Wish::Simulated,
        None => Wish::Any,
    };
    let driver = driver::find(wish, &install, env::var_os("LD_LIBRARY_PATH").as_deref())?;
    if let Some(why) = plan
        .modes
        .iter()
        .find_map(|mode| host::refusal(*mode, &driver))
    {
        return Err(anyhow!(why).into());
    }
    let there = arbiter_of_the_host(&plan, &driver, &args.device)?;
    let guardian = Guardian::start()?;
    let state = guardian.dir().join("sim");
    fs::create_dir_all(&state).with_context(|| format!("cannot make {}", state.display()))?;
    if driver.simulated.is_some() {
        // One simulated device for the whole experiment, which this process looks at as well.
        // SAFETY: this process has one thread.
        unsafe { env::set_var("SUBLET_SIM_STATE", &state) };
    }
    let host = Host::look(&executable, &guardian, &driver, &args.device, &plan)?;
    let watched = host.index().and_then(|index| Watched::open(&driver, index));
    let (mut store, found) = Store::open(out, &host.about)?;
    say(&format!("sublet: {summary}"));
    if let Some(simulated) = driver.simulated {
        say(&format!("sublet: simulated GPU ({})", simulated.reason()));
    }
    if found.dropped > 0 {
        say(&format!(
            "sublet: the last line of {} was not written to its end: {} bytes are dropped, and that run is made again",
            out.join(store::FILE).display(),
            found.dropped
        ));
    }
    let mut records = found.records;
    let is_there = |run: &Run| {
        let mut kept = records.iter();
        kept.any(|one| one.key == run.key && !(args.retry && one.failed.is_some()))
    };
    let left: Vec<(usize, &Run)> = (0..).zip(&runs).filter(|(_, run)| !is_there(run)).collect();
    if left.len() < runs.len() {
        let done = runs.len() - left.len();
        say(&format!(
            "sublet: {done} of {} runs are there already",
            runs.len()
        ));
    }
    let runner = Runner {
        plan: &plan,
        guardian: &guardian,
        executable: &executable,
        install: &install,
        driver: &driver,
        device: &args.device,
        there,
        watched: watched.as_ref(),
        clocks: &|| host::clocks_now(&driver, &args.device),
    };
    run_all(&runner, &left, runs.len(), &mut store, &mut records)?;
    // In the order of the plan, whatever was made first.
    records.retain(|record| runs.iter().any(|run| run.key == record.key));
    let matrix = Matrix::of(&plan, &records);
    let raw = out.join(store::FILE);
    let raw = fs::read(&raw).with_context(|| format!("cannot read {}", raw.display()))?;
    let experiment = Experiment {
        plan: &plan,
        about: &host.about,
        text: &text,
        records: &records,
        raw: String::from_utf8_lossy(&raw).into_owned(),
        matrix: &matrix,
    };
    experiment.write(out)?;
    let failed = records.iter().filter(|one| one.failed.is_some()).count();
    let mut printed = report::terminal::text(&plan, &matrix, colours());
    printed += &format!("report: {}\n", out.join("report.html").display());
    let mut code = 0;
    if failed > 0 {
        say(&format!(
            "sublet: {failed} of {} runs failed (--retry makes them again)",
            records.len()
        ));
        code = FAILED_RUNS;
    }
    let Some((url, mode)) = fed else {
        return Ok((printed, Ok(code)));
    };
    let gpu = host.about["gpu"].as_str().unwrap_or_default();
    let fed = feed::feed(args, url, feed::pairs(&plan, &matrix, mode, gpu));
    let ended = fed.map(|text| {
        say(text.trim_end());
        code
    });
    Ok((printed, ended.map_err(Into::into)))
}

fn mode_to_feed(plan: &Plan) -> anyhow::Result<plan::Mode> {
    feed::mode(plan).context(
        "--feed: no mode of the plan has an arbiter, and the hook's nodes have: write \
         exclusive, concurrent, auto or lend among its modes",
    )
}

fn read_plan(args: &Interfere) -> anyhow::Result<(Plan, String)> {
    let path = &args.plan;
    let text = fs::read_to_string(path)
        .with_context(|| format!("cannot read the plan {}", path.display()))?;
    let whole = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
    let base = whole.parent().unwrap_or(Path::new("/"));
    let known = feed::Known::new(args);
    let kinds = |kind: &str| known.kind(kind);
    let mut plan = plan::parse(&text, &path.display().to_string(), base, &kinds)?;
    if let Some(repeat) = args.repeat {
        plan.repeat = repeat;
    }
    if let Some(seed) = args.seed {
        plan.seed = seed;
    }
    Ok((plan, text))
}

/// On a real device: the arbiter that governs it already, which no second one may do.
fn arbiter_of_the_host(
    plan: &Plan,
    driver: &Driver,
    device: &str,
) -> anyhow::Result<Option<RuntimeDir>> {
    if driver.simulated.is_some() {
        return Ok(None);
    }
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    let status = match connect::ask(|| connect::existing(&dir), Client::status) {
        Ok(status) => status,
        Err(error) if error.is_absence() => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if let Some(job) = status.jobs.iter().find(|job| job.state != JobState::Gone) {
        bail!(
            "job `{}` is with the arbiter at {}, and would be measured with the others: wait for its end",
            job.name,
            dir.path().display()
        );
    }
    let mut devices = status.devices.iter();
    let found = devices
        .find(|one| one.index.to_string() == device || one.uuid.eq_ignore_ascii_case(device));
    for mode in plan.modes.iter().filter_map(|mode| mode.of_device()) {
        if let Some(found) = found
            && found.mode.as_str() != mode
        {
            bail!(
                "the arbiter at {} runs device {device} in mode {}, and the plan asks for {mode}: `sublet device set {device} --mode {mode}` changes that (one mode at a time)",
                dir.path().display(),
                found.mode.as_str()
            );
        }
    }
    Ok(Some(dir))
}

/// Makes all runs, and keeps each as soon as it is finished.
fn run_all(
    runner: &Runner<'_>,
    left: &[(usize, &Run)],
    all: usize,
    store: &mut Store,
    records: &mut Vec<Record>,
) -> anyhow::Result<()> {
    let begun = Instant::now();
    // When all of it is expected to be done, in milliseconds from here.
    let end_ms = Arc::new(AtomicU64::new(0));
    let bar = bar(begun, &end_ms, all)?;
    // What a run takes beside warm-up and window.
    let mut beside = Duration::from_millis(700);
    for (at, (number, run)) in left.iter().enumerate() {
        let planned: Duration = left[at..]
            .iter()
            .map(|(_, run)| schedule::time_of(runner.plan, run) + beside)
            .sum();
        let end = begun.elapsed() + planned;
        // CAST: milliseconds of days.
        end_ms.store(end.as_millis() as u64, Ordering::Relaxed);
        bar.set_position((all - left.len() + at) as u64);
        bar.set_message(run.key.clone());
        let started = Instant::now();
        let record = runner.run(run, *number)?;
        let record = store.append(&record)?;
        let took = started.elapsed();
        beside = (beside + took.saturating_sub(schedule::time_of(runner.plan, run))) / 2;
        let line = line_of(&record);
        if bar.is_hidden() {
            let time = schedule::long(end.saturating_sub(begun.elapsed()));
            let done = all - left.len() + at + 1;
            say(&format!("[{done}/{all}] {line}; {time} left"));
        } else if record.failed.is_some() {
            bar.suspend(|| say(&line));
        }
        records.retain(|one| one.key != record.key);
        records.push(record);
    }
    bar.finish_and_clear();
    Ok(())
}

fn bar(begun: Instant, end_ms: &Arc<AtomicU64>, all: usize) -> anyhow::Result<ProgressBar> {
    // Hidden where standard error is no terminal.
    let bar = ProgressBar::new(all as u64);
    let end_ms = end_ms.clone();
    let style = ProgressStyle::with_template("[{bar:25}] {pos}/{len}, {left} left: {msg}");
    let style = style.context("the bar")?.progress_chars("## ").with_key(
        "left",
        move |_: &indicatif::ProgressState, out: &mut dyn std::fmt::Write| {
            let end = Duration::from_millis(end_ms.load(Ordering::Relaxed));
            let _ = out.write_str(&schedule::long(end.saturating_sub(begun.elapsed())));
        },
    );
    bar.set_style(style);
    if !bar.is_hidden() {
        bar.enable_steady_tick(Duration::from_millis(500));
    }
    Ok(bar)
}

/// What came of a run, for a person.
fn line_of(record: &Record) -> String {
    if let Some(why) = &record.failed {
        return format!("{}: failed: {why}", record.key);
    }
    let speeds: Vec<String> = record
        .figures
        .iter()
        .map(|one| format!("{} {:.4} {}/s", one.job, one.speed, one.unit))
        .collect();
    format!("{}: {}", record.key, speeds.join(", "))
}

/// Whether standard output shows colours, and its reader wants them.
fn colours() -> bool {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    io::stdout().is_terminal()
        && set("NO_COLOR").is_none()
        && set("TERM").is_none_or(|term| term != "dumb")
}

/// Where stderr is gone there is nobody to tell.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}
