//! `sublet replay`: makes the calls of a recording again, as a CUDA program of its own.
//!
//! Kernels of ours stand for those of the job: each takes as long as the one in the recording did,
//! and does nothing. So a replay needs none of the job's code and none of its data, and what
//! `sublet run` does to any program it does to a replay.

mod arrivals;
mod cuda;
mod kernels;
pub mod plan;
mod play;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::args::{Counted, Replay};
use crate::dilation;
use crate::exit::Result;
use crate::json;
use crate::recording::Recording;
use crate::run::driver::{self, Wish};
use crate::run::install::Install;
use cuda::Cuda;
use plan::{Plan, Process};
use play::{How, Played, Player};

/// Replays, and says what came of it.
///
/// # Errors
/// A file that is no recording, or a GPU that it cannot be replayed on.
pub fn replay(args: &Replay) -> Result<String> {
    let shown = args.file.display();
    let recording = Recording::open(&args.file).with_context(|| format!("{shown}"))?;
    let plan = plan::plan(&recording).with_context(|| format!("{shown}"))?;
    if args.process.is_none()
        && let Some(why) = &recording.cut
    {
        // Where stderr is gone there is nobody to tell.
        let _ = writeln!(
            io::stderr(),
            "sublet: {shown} ends early: {why}; the {} records before are there",
            recording.records.len()
        );
    }
    if args.show {
        return Ok(show(args, &recording, &plan));
    }
    let driver = find_driver(args)?;
    let dilation = dilation::asked()?;
    let how = How {
        speed: args.speed,
        dilation,
        until: args
            .duration
            .map(|time| Instant::now() + dilation::of_the_host(time, dilation)),
    };
    let played = match args.process {
        Some(number) => {
            let process = plan.processes.iter().find(|one| one.number == number);
            let process = process.with_context(|| format!("{shown} has no process {number}"))?;
            play_one(process, &recording, driver.as_deref(), how, args.count)?
        }
        None => match plan.processes.as_slice() {
            [process] => play_one(process, &recording, driver.as_deref(), how, args.count)?,
            several => play_all(args, several, dilation)?,
        },
    };
    Ok(report(args, &recording, &plan, &played))
}

/// The driver by its path; `None`: the one that the dynamic linker finds.
fn find_driver(args: &Replay) -> anyhow::Result<Option<PathBuf>> {
    // In a job, and in a recording, the driver was chosen before.
    if std::env::var_os("SUBLET_DRIVER").is_some() && preloaded() {
        return Ok(None);
    }
    if let Some(path) = &args.driver {
        return Ok(Some(path.clone()));
    }
    if !args.sim {
        return Ok(None);
    }
    let executable = std::env::current_exe().context("cannot tell where `sublet` itself lies")?;
    let install = Install::find(&executable, |name| std::env::var_os(name))?;
    Ok(Some(driver::find(Wish::Simulated, &install, None)?.path))
}

/// Whether the preload library is in this process.
fn preloaded() -> bool {
    // SAFETY: a name, looked up among what is loaded.
    let at = unsafe { nix::libc::dlsym(nix::libc::RTLD_DEFAULT, c"sublet_version".as_ptr()) };
    !at.is_null()
}

fn play_one(
    process: &Process,
    recording: &Recording,
    driver: Option<&Path>,
    how: How,
    count: Option<Counted>,
) -> anyhow::Result<Played> {
    let cuda = Cuda::open(driver)?;
    dilation::must_be(how.dilation, cuda.dilation(how.dilation))?;
    let player = Player::new(&cuda, process, &recording.names, how)?;
    let Some(what) = count else {
        return player.play();
    };
    let (over, is_over) = mpsc::channel::<()>();
    let counting = &player;
    thread::scope(|scope| {
        scope.spawn(move || {
            // Until the other end is dropped.
            while is_over.recv_timeout(COUNT_EVERY) == Err(RecvTimeoutError::Timeout) {
                let (launches, steps) = counting.counted();
                let (word, number) = match what {
                    Counted::Launches => ("launches", launches),
                    Counted::Iterations => ("iterations", steps),
                };
                // Where stdout is gone there is nobody to tell.
                let _ = writeln!(io::stdout(), "{word} {number}");
            }
        });
        let played = player.play();
        drop(over);
        played
    })
}

/// Between two lines of a replay that counts.
const COUNT_EVERY: Duration = Duration::from_millis(20);

/// TIMEOUT: no process is started later than this after the first, however long it took when it
/// was recorded.
const LATEST: Duration = Duration::from_secs(86_400);

/// Each process of the recording in one of its own.
fn play_all(args: &Replay, processes: &[Process], dilation: u32) -> anyhow::Result<Played> {
    let executable = std::env::current_exe().context("cannot tell where `sublet` itself lies")?;
    let mut ordered: Vec<&Process> = processes.iter().filter(|one| !one.ops.is_empty()).collect();
    ordered.sort_by_key(|one| one.begins_ns);
    let first_ns = ordered.first().map_or(0, |one| one.begins_ns);
    let (began, began_mono_ns) = (Instant::now(), crate::record::now_ns());
    let mut children = Vec::new();
    for process in ordered {
        // CAST: rounding is meant.
        let after = (process.begins_ns - first_ns) as f64 / args.speed;
        let after = dilation::of_the_host(Duration::from_nanos(after as u64), dilation);
        let due = began + after.min(LATEST);
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let mut command = Command::new(&executable);
        command.arg("replay").arg(&args.file);
        command.args(["--json", "--process", &process.number.to_string()]);
        command.args(["--speed", &args.speed.to_string()]);
        if args.sim {
            command.arg("--sim");
        }
        if let Some(driver) = &args.driver {
            command.arg("--driver").arg(driver);
        }
        if let Some(time) = args.duration {
            let left = time.saturating_sub(began.elapsed() / dilation);
            command.args(["--for", &format!("{}ms", left.as_millis().max(1))]);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a process of the recording")?;
        children.push((process.number, child));
    }
    let mut all = Played {
        began_mono_ns: began_mono_ns / u64::from(dilation),
        ..Played::default()
    };
    let mut failed = None;
    for (number, child) in children {
        let output = child
            .wait_with_output()
            .context("cannot wait for a process")?;
        let value: Value = match serde_json::from_slice(&output.stdout) {
            Ok(value) if output.status.success() => value,
            _ => {
                failed.get_or_insert(number);
                continue;
            }
        };
        let whole = |name: &str| value[name].as_u64().unwrap_or(0);
        all.rounds = all.rounds.max(whole("rounds"));
        all.launches += whole("launches");
        all.device_ns += whole("device_ns");
        all.device = value["device"].as_str().unwrap_or_default().to_owned();
    }
    // CAST: years.
    all.host_ns = began.elapsed().as_nanos() as u64 / u64::from(dilation);
    match failed {
        Some(number) => bail!("process {number} of the recording could not be replayed"),
        None => Ok(all),
    }
}

fn report(args: &Replay, recording: &Recording, plan: &Plan, played: &Played) -> String {
    let seconds = |ns: u64| ns as f64 / 1e9; // CAST: rounding is meant.
    if args.json {
        return json::object(json!({
            "file": args.file.display().to_string(),
            "command": recording.provenance.command,
            "simulated": played.device.contains("simulated"),
            "device": played.device,
            "rounds": played.rounds,
            "launches": played.launches,
            "device_ns": played.device_ns,
            "host_ns": played.host_ns,
            "began_mono_ns": played.began_mono_ns,
            "cut": recording.cut,
            "recorded": plan.figures.json(),
        }));
    }
    let rounds = match played.rounds {
        1 => String::new(),
        rounds => format!(", {rounds} times"),
    };
    format!(
        "{} on {}{rounds}: {} launches, {:.3} s of device time, in {:.3} s\n",
        recording.provenance.command,
        played.device,
        played.launches,
        seconds(played.device_ns),
        seconds(played.host_ns),
    )
}

/// What is in the file, without a GPU.
fn show(args: &Replay, recording: &Recording, plan: &Plan) -> String {
    let figures = &plan.figures;
    let threads: usize = plan.processes.iter().map(|process| process.threads).sum();
    if args.json {
        return json::object(json!({
            "file": args.file.display().to_string(),
            "provenance": recording.provenance,
            "devices": recording.devices,
            "processes": plan.processes.len(),
            "threads": threads,
            "kernels": recording.names,
            "cut": recording.cut,
            "end": recording.end,
            "recorded": figures.json(),
        }));
    }
    let from = &recording.provenance;
    let device = recording.devices.first();
    let device = device.map_or("an unknown device", |device| &device.name);
    let made = from.derived.as_ref();
    let made = made.map_or_else(String::new, |how| format!("made from {how}\n"));
    let end = match (&recording.end, &recording.cut) {
        (Some(end), _) => match end.lost {
            0 => format!("{:?}, {} records", end.reason, end.records),
            lost => format!("{:?}, {} records, {lost} lost", end.reason, end.records),
        },
        (None, Some(why)) => why.clone(),
        (None, None) => "none".to_owned(),
    };
    format!(
        "{} on {device}, {}\n\
         processes {}, threads {threads}, kernels {}\n\
         launches {}, of graphs {}, without a length of their own {}; calls at fixed times {}\n\
         device {:.3} s, host {:.3} s, memory {} MiB\n\
         copies {}, {} MiB; waits {}; iterations {}\n\
         {made}end: {end}\n",
        from.command,
        from.began,
        plan.processes.len(),
        recording.names.len(),
        figures.launches,
        figures.graph_launches,
        figures.unmeasured,
        figures.at_fixed_times,
        figures.device_ns as f64 / 1e9, // CAST: rounding is meant.
        figures.host_ns as f64 / 1e9,   // CAST: as above.
        figures.most_bytes >> 20,
        figures.copies,
        figures.copy_bytes >> 20,
        figures.waits,
        figures.steps,
    )
}
