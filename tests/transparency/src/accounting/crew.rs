//! The job's command: starts workers, stops them at rounds' ends, compares.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use super::Options;
use super::post::Post;

/// How long the arbiter may take to notice that a process has died, at most.
const AT_REST: Duration = Duration::from_secs(5);

struct Worker {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

/// What the workers reported.
#[derive(Default)]
struct Sums {
    ops: u64,
    refused: u64,
    failed: u64,
}

impl Worker {
    fn start(options: &Options, number: u64, post: &Post) -> std::io::Result<Self> {
        let all = (options.threads * options.processes) as u64;
        let mut child = Command::new(std::env::current_exe()?)
            .args([
                "worker",
                &(options.seed ^ crate::rng::mix(number)).to_string(),
                &options.threads.to_string(),
                // Together they want a little more than there is.
                &(options.quota_mib * 9 / 8 / all).max(4).to_string(),
                &options.families,
            ])
            .args(post.words())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let missing = || std::io::Error::other("a worker without pipes");
        let to = child.stdin.take().ok_or_else(missing)?;
        let from = BufReader::new(child.stdout.take().ok_or_else(missing)?);
        Ok(Self { child, to, from })
    }

    fn work(&mut self, ops: u64) -> std::io::Result<()> {
        writeln!(self.to, "{ops}")
    }

    /// Reads the worker's word that nothing moves: operations, refusals, failures.
    fn wait(&mut self, sums: &mut Sums) -> std::io::Result<()> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        let figures: Vec<u64> = line
            .split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        let [ops, refused, failed] = figures[..] else {
            return Err(std::io::Error::other(format!(
                "a worker has died or said {line:?}"
            )));
        };
        sums.ops += ops;
        sums.refused += refused;
        sums.failed += failed;
        Ok(())
    }

    fn kill(mut self) -> std::io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(|_| ())
    }
}

/// Bytes by process.
type ByPid = Vec<(u64, u64)>;

/// What the arbiter charges the job with, in bytes, and its processes by pid.
fn charged(options: &Options) -> std::io::Result<(u64, ByPid)> {
    let out = Command::new(&options.sublet)
        .args(["ps", "--json"])
        .env_remove("LD_PRELOAD")
        .output()?;
    let status: serde_json::Value =
        serde_json::from_slice(&out.stdout).map_err(std::io::Error::other)?;
    let jobs = status["jobs"].as_array().cloned().unwrap_or_default();
    let job = jobs
        .iter()
        .find(|job| job["name"] == "accounting")
        .ok_or_else(|| std::io::Error::other(format!("the job is not in `sublet ps`: {status}")))?;
    let used = job["mem_used_bytes"]
        .as_u64()
        .ok_or_else(|| std::io::Error::other(format!("no mem_used_bytes in {job}")))?;
    let processes = job["processes"].as_array().cloned().unwrap_or_default();
    let by_pid = processes
        .iter()
        .filter_map(|one| Some((one["pid"].as_u64()?, one["mem_used_bytes"].as_u64()?)))
        .collect();
    Ok((used, by_pid))
}

/// What the device says, in bytes: now and at most, and by pid.
fn real() -> std::io::Result<(u64, u64, ByPid)> {
    let devices =
        simgpu::observe::snapshot().map_err(|error| std::io::Error::other(error.to_string()))?;
    let device = devices
        .first()
        .ok_or_else(|| std::io::Error::other("no simulated device"))?;
    let by_pid = device
        .processes
        .iter()
        .map(|one| (u64::from(one.pid), one.used_bytes))
        .collect();
    Ok((device.used_bytes, device.peak_bytes, by_pid))
}

/// Waits until both agree; answers by how much they differ in the end.
fn difference(options: &Options) -> std::io::Result<(u64, u64, u64)> {
    let deadline = Instant::now() + AT_REST;
    loop {
        let ((charged_bytes, ours), (device, _, theirs)) = (charged(options)?, real()?);
        if charged_bytes == device {
            return Ok((0, charged_bytes, device));
        }
        if Instant::now() > deadline {
            println!("  by process: charged {ours:?}\n              device  {theirs:?}");
            return Ok((charged_bytes.abs_diff(device), charged_bytes, device));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Does it all and reports. Answers whether the figures agreed.
///
/// # Errors
/// A worker cannot be started, or dies unbidden; the arbiter does not answer.
pub fn run(options: &Options) -> std::io::Result<bool> {
    let started = Instant::now();
    let post = Post::new()?;
    let mut next = options.processes as u64;
    let mut workers = (0..next)
        .map(|number| Worker::start(options, number, &post))
        .collect::<std::io::Result<Vec<_>>>()?;
    let per_round = options
        .ops
        .div_ceil((options.rounds * options.processes) as u64);
    let (mut sums, mut drift, mut kills, mut held) = (Sums::default(), 0, 0, 0);
    println!(
        "{:>5} {:>12} {:>10} {:>14} {:>14} {:>10}",
        "round", "operations", "refused", "charged", "device", "drift"
    );
    for round in 0..options.rounds {
        for worker in &mut workers {
            worker.work(per_round)?;
        }
        if round % 3 == 2 && options.processes > 1 {
            // In the middle of its work, at whatever instruction.
            let which = round / 3 % workers.len();
            std::thread::sleep(Duration::from_millis(3 + 7 * (round as u64 % 5)));
            let worker = Worker::start(options, next, &post)?;
            next += 1;
            std::mem::replace(&mut workers[which], worker).kill()?;
            kills += 1;
            workers[which].work(per_round)?;
        }
        for worker in &mut workers {
            worker.wait(&mut sums)?;
        }
        let (off, charged_bytes, device) = difference(options)?;
        drift = off.max(drift);
        held = held.max(device);
        println!(
            "{:>5} {:>12} {:>10} {charged_bytes:>14} {device:>14} {off:>10}",
            round + 1,
            sums.ops,
            sums.refused
        );
    }
    let peak = real()?.1;
    for worker in workers {
        worker.kill()?;
    }
    let (left, charged_bytes, device) = difference(options)?;
    drift = left.max(drift);
    println!(
        "  end {:>12} {:>10} {charged_bytes:>14} {device:>14} {left:>10}",
        sums.ops, sums.refused
    );
    let quota = options.quota_mib << 20;
    let overshoot = peak.saturating_sub(quota);
    report(
        options,
        &sums,
        [drift, overshoot, peak, held, kills],
        started.elapsed().as_secs_f64(),
    );
    Ok(drift == 0 && overshoot == 0 && sums.failed == 0)
}

fn report(options: &Options, sums: &Sums, figures: [u64; 5], seconds: f64) {
    let [drift, overshoot, peak, held, kills] = figures;
    let rows = [
        ("drift_bytes", drift as f64, "B", Some(0)),
        ("overshoot_bytes", overshoot as f64, "B", Some(0)),
        ("quota_bytes", (options.quota_mib << 20) as f64, "B", None),
        ("peak_bytes", peak as f64, "B", None),
        ("held_at_rest_bytes", held as f64, "B", None),
        ("ops", sums.ops as f64, "operations", None),
        ("refused", sums.refused as f64, "operations", None),
        (
            "unexpected_errors",
            sums.failed as f64,
            "operations",
            Some(0),
        ),
        ("kills", kills as f64, "processes", None),
        ("seconds", seconds, "s", None),
    ];
    for (name, value, unit, _) in rows {
        println!("{name:20} {value:>16} {unit}");
    }
    if options.json {
        let metrics: Vec<_> = rows
            .iter()
            .map(|(name, value, unit, budget)| {
                serde_json::json!({"name": name, "value": value, "unit": unit, "baseline": null, "ratio": null,
                    "budget": budget})
            })
            .collect();
        let object = serde_json::json!({
            "commit": options.commit,
            "device": "simgpu (simulated)",
            "simulated": true,
            "cpus": std::thread::available_parallelism().map_or(1, usize::from),
            "seed": options.seed,
            "threads": options.threads,
            "processes": options.processes,
            "ops": sums.ops,
            "drift_bytes": drift,
            "overshoot_bytes": overshoot,
            "metrics": metrics,
        });
        println!("{object}");
    }
}
