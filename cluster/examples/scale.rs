//! How long a simulation takes and how much memory, by the number of jobs and GPUs. The trace is
//! synthetic, from a seed: gang sizes and durations are distributed as in public traces (most jobs
//! small and short, few very long ones). Arrivals are 1.3 times what the cluster can do, so that
//! tens of thousands of jobs wait.

mod last_line;

use std::process::ExitCode;
use std::time::Instant;

use cluster::report::Report;
use cluster::sim::{Config, Simulation};
use cluster::spec::ClusterSpec;
use cluster::trace::Trace;
use policy::cluster::catalogue::Context;
use policy::cluster::{Choice, Job, JobType, Random};
use serde_json::{Value, json};

fn synthetic(jobs: usize, gpus: u32, load: f64, seed: u64) -> Trace {
    let mut random = Random::new(seed);
    let mut drawn = Vec::with_capacity(jobs);
    let mut work = 0.0;
    for _ in 0..jobs {
        let wanted = match random.below(100) {
            0..70 => 1,
            70..78 => 2,
            78..88 => 4,
            88..97 => 8,
            97..99 => 16,
            _ => 32,
        };
        // Log-normal: median 20 minutes, mean about 3 hours, at most 2 days.
        let duration_s = (1200.0 * (2.35 * random.normal()).exp()).clamp(10.0, 172_800.0);
        work += duration_s * f64::from(wanted.min(gpus));
        drawn.push((wanted.min(gpus), duration_s));
    }
    let gap_s = work / f64::from(gpus) / load / jobs as f64;
    let mut now_s = 0.0;
    let mut trace = Trace::default();
    for (wanted, duration_s) in drawn {
        now_s += random.exponential(gap_s);
        trace
            .jobs
            .push(Job::rigid(JobType(0), wanted, now_s, duration_s));
    }
    trace
}

/// Peak resident memory of this process in bytes, as Linux counts it.
fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib << 10)
}

fn run(
    jobs: usize,
    gpus: u32,
    order: &str,
    round_s: Option<f64>,
    seed: u64,
) -> Result<Value, String> {
    let trace = synthetic(jobs, gpus, 1.3, seed);
    let spec: ClusterSpec = format!("{gpus}xV100")
        .parse()
        .map_err(|error| format!("{error}"))?;
    let scheduler = Choice::new(order, "anywhere").scheduler(&Context::default(), seed);
    let scheduler = scheduler.map_err(|error| error.to_string())?;
    let config = Config {
        round_s,
        ..Config::default()
    };
    let begin = Instant::now();
    let simulation = Simulation::new(&trace, spec.state(), scheduler, config);
    let outcome = simulation
        .and_then(|run| run.run(|_| {}))
        .map_err(|error| error.to_string())?;
    let wall_s = begin.elapsed().as_secs_f64();
    let report = Report::of(&outcome);
    Ok(
        json!({"jobs": jobs, "gpus": gpus, "order": order, "round_s": round_s, "wall_s": wall_s,
        "decisions": report.decisions, "completed": report.completed, "jct_mean_s": report.jct_mean_s,
        "utilisation": report.utilisation, "preemptions": report.preemptions}),
    )
}

/// A cluster of today, and the largest that is asked for: jobs, GPUs, the most seconds and MB of a
/// run.
const SIZES: [(&str, usize, u32, f64, f64); 2] = [
    ("", 100_000, 10_000, 60.0, 1000.0),
    ("large_", 1_000_000, 100_000, 600.0, 8000.0),
];

/// What is run at a size; `None`: decisions at every event.
fn settings(name: &str, jobs: usize, gpus: u32) -> Vec<(usize, u32, &'static str, Option<f64>)> {
    let mut settings = vec![
        (jobs, gpus, "fifo-backfill", None),
        (jobs, gpus, "srtf", Some(300.0)),
        (jobs, gpus, "2d-las", Some(300.0)),
    ];
    if name.is_empty() {
        settings.push((jobs, gpus, "fifo", None));
        settings.push((jobs, gpus, "sjf", None));
        settings.push((jobs, gpus, "las", Some(300.0)));
        // How it grows with jobs, and with GPUs.
        for part in [4, 2] {
            settings.push((jobs / part, gpus, "2d-las", Some(300.0)));
            // CAST: 2 and 4.
            settings.push((jobs, gpus / part as u32, "2d-las", Some(300.0)));
        }
    }
    settings
}

fn main() -> ExitCode {
    let (mut json, mut small) = (false, false);
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--json" => json = true,
            "--small" => small = true,
            other => {
                eprintln!("scale: `{other}`: usage: scale [--small] [--json]");
                return ExitCode::from(2);
            }
        }
    }
    let (mut runs, mut metrics) = (Vec::new(), Vec::new());
    // The smaller first: the most memory of a process only grows.
    for (name, jobs, gpus, most_s, most_mb) in SIZES {
        if small && !name.is_empty() {
            continue;
        }
        let mut slowest_s = 0.0f64;
        for (jobs, gpus, order, round_s) in settings(name, jobs, gpus) {
            match run(jobs, gpus, order, round_s, 1) {
                Ok(run) => {
                    println!("{run}");
                    slowest_s = slowest_s.max(run["wall_s"].as_f64().unwrap_or(f64::NAN));
                    runs.push(run);
                }
                Err(error) => {
                    eprintln!("scale: {order}: {error}");
                    return ExitCode::FAILURE;
                }
            }
        }
        let peak_mb = peak_bytes().map_or(f64::NAN, |bytes| bytes as f64 / 1e6);
        for (what, value, unit, budget) in [
            ("wall_s", slowest_s, "s", Some(most_s)),
            ("peak_mb", peak_mb, "MB", Some(most_mb)),
            ("jobs", jobs as f64, "", None),
            ("gpus", f64::from(gpus), "", None),
        ] {
            let what = format!("{name}{what}");
            metrics.push(last_line::metric(&what, value, unit, budget));
        }
    }
    last_line::finish("scale", &metrics, &runs, json)
}
