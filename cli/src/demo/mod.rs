//! `sublet demo`: what sublet does, in half a minute, on the simulated GPU or on this machine's.
//!
//! Two example programs train at shares of 0.75 and 0.25 under an arbiter of their own; a third
//! asks for more memory than it may have. Whatever was started ends with this command, in which way
//! that may be.

mod stage;
mod verdict;

use std::io::{self, Write as _};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use control::JobStatus;
use serde::Serialize;

use crate::args::Demo;
use crate::exit::Result;
use stage::Stage;
use verdict::{Row, broken, table};

/// A job of the demonstration.
struct Plan {
    name: &'static str,
    share: f64,
    limit_mib: u64,
    /// Memory that it allocates beside its small network, so that the limit has something to say.
    ballast_mib: u64,
}

const TRAINERS: [Plan; 2] = [
    Plan {
        name: "steady",
        share: 0.75,
        limit_mib: 2048,
        ballast_mib: 1024,
    },
    Plan {
        name: "modest",
        share: 0.25,
        limit_mib: 1024,
        ballast_mib: 256,
    },
];
/// Asks for more than it may have.
const GREEDY: Plan = Plan {
    name: "greedy",
    share: 0.0,
    limit_mib: 1024,
    ballast_mib: 2048,
};
/// Device time that a step takes beyond the small network's own, standing for a larger model: the
/// device, and not this host's processors, is what the jobs compete for.
const EXTRA_US: u64 = 1000;
/// Launches of each job before anything is measured.
const WARM: u64 = 500;
/// TIMEOUT: how long the jobs may take to get there, on a loaded host.
const START: Duration = Duration::from_secs(60);
/// How much of their time the trainers are measured for: one may begin later than the other.
const MEASURED: f64 = 0.7;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    simulated: bool,
    device: &'a str,
    measured_s: f64,
    jobs: &'a [Row],
    broken: &'a [String],
}

/// The text to print, and whether all that sublet promises was kept.
///
/// # Errors
/// What could not be started or did not get on, with what it said.
pub fn demo(args: &Demo) -> Result<(String, bool)> {
    let mut stage = Stage::new(!args.gpu)?;
    let (rows, measured, device) = perform(&mut stage, args)?;
    let broken = broken(&rows);
    let text = match args.json {
        true => crate::json::object(serde_json::to_value(Report {
            simulated: !args.gpu,
            device: &device,
            measured_s: measured.as_secs_f64(),
            jobs: &rows,
            broken: &broken,
        })?),
        false => conclusion(&rows, &broken, &device, !args.gpu),
    };
    Ok((text, broken.is_empty()))
}

fn perform(stage: &mut Stage, args: &Demo) -> Result<(Vec<Row>, Duration, String)> {
    let say = |line: &str| {
        // Where stderr is gone there is nobody to show it to.
        let _ = writeln!(io::stderr(), "{line}");
    };
    for plan in &TRAINERS {
        let job = stage.start(
            plan.name,
            &[
                format!("--mem={}MiB", plan.limit_mib),
                format!("--share={}", plan.share),
            ],
            &trains(plan, args.seconds),
        )?;
        say(&format!("$ {}", job.shown()));
    }
    let names = TRAINERS.each_ref().map(|plan| plan.name);
    let begun = Instant::now();
    let first = loop {
        let jobs = stage.jobs()?;
        if TRAINERS.iter().all(|plan| {
            let job = jobs.iter().find(|job| job.name == plan.name);
            job.is_some_and(|job| job.launches > WARM)
        }) {
            break jobs;
        }
        stage.go_on()?;
        stage.all_train(&names)?;
        if begun.elapsed() > START {
            return Err(anyhow!(
                "the jobs have not begun to train within {} s: the host has too little time for them",
                START.as_secs()
            )
            .into());
        }
        thread::sleep(Duration::from_millis(50));
    };
    let measured = Instant::now();
    let until = Duration::from_secs_f64(args.seconds * MEASURED);
    let greedy = stage.start(
        GREEDY.name,
        &[
            format!("--mem={}MiB", GREEDY.limit_mib),
            "--class=opportunistic".into(),
        ],
        &[format!("--ballast={}MiB", GREEDY.ballast_mib)],
    )?;
    say(&format!("$ {}", greedy.shown()));
    let mut last = first.clone();
    while measured.elapsed() < until {
        thread::sleep(Duration::from_secs(1).min(until.saturating_sub(measured.elapsed())));
        stage.go_on()?;
        stage.all_train(&names)?;
        let jobs = stage.jobs()?;
        let parts: Vec<String> = TRAINERS
            .iter()
            .filter_map(|plan| {
                let part = part_of(plan.name, &last, &jobs)?;
                Some(format!("{} {:.0} %", plan.name, part * 100.0))
            })
            .collect();
        say(&format!("  of the device: {}", parts.join(", ")));
        last = jobs;
    }
    let took = measured.elapsed();
    let device = stage
        .status()?
        .and_then(|status| Some(status.devices.first()?.name.clone()));
    let device = device.unwrap_or_else(|| "an unknown device".into());
    let mut rows = Vec::new();
    for plan in TRAINERS.iter().chain([&GREEDY]) {
        let job = last.iter().find(|job| job.name == plan.name);
        let ended = stage.end_of(plan.name)?;
        rows.push(Row {
            name: plan.name.into(),
            share: (plan.share > 0.0).then_some(plan.share),
            got: (plan.share > 0.0)
                .then(|| part_of(plan.name, &first, &last))
                .flatten(),
            limit_bytes: plan.limit_mib << 20,
            peak_bytes: job.map(|job| job.mem_peak_bytes),
            steps_per_s: ended
                .report
                .as_ref()
                .and_then(|report| report["steps_per_s"].as_f64()),
            loss: ended
                .report
                .as_ref()
                .and_then(|report| report["loss"].as_f64()),
            exit: ended.code,
            said: ended.said,
        });
    }
    Ok((rows, took, device))
}

fn trains(plan: &Plan, seconds: f64) -> Vec<String> {
    vec![
        format!("--min-seconds={seconds}"),
        format!("--extra-us={EXTRA_US}"),
        "--progress-every=0".into(),
        "--json".into(),
        format!("--ballast={}MiB", plan.ballast_mib),
    ]
}

/// Its part of the device time that both trainers got between two looks.
fn part_of(name: &str, before: &[JobStatus], after: &[JobStatus]) -> Option<f64> {
    let got = |name: &str| {
        let at = |jobs: &[JobStatus]| {
            let job = jobs.iter().find(|job| job.name == name)?;
            Some(job.device_time_ns)
        };
        Some(at(after)?.saturating_sub(at(before)?))
    };
    let all: u64 = TRAINERS.iter().filter_map(|plan| got(plan.name)).sum();
    // CAST: far below 2^53 nanoseconds.
    (all > 0).then(|| got(name).map(|own| own as f64 / all as f64))?
}

fn conclusion(rows: &[Row], broken: &[String], device: &str, simulated: bool) -> String {
    let mut text = table(rows);
    text += &match simulated {
        true => format!("\nAll figures are of a simulated GPU ({device}).\n"),
        false => format!("\nMeasured on {device}.\n"),
    };
    for line in broken {
        text += &format!("not kept: {line}\n");
    }
    if broken.is_empty() {
        text += "Each job got its share, and `greedy` was refused what its limit does not hold;\nthe others did not notice. Your own jobs: sublet run --mem 8GiB --share 0.5 -- python train.py\n";
    }
    text
}
