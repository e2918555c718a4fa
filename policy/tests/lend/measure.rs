//! Runs a mix under a governor and measures speeds, margins, shortfalls and latencies.

use crate::device::{Hardware, Plan, SECOND, Sim};
use crate::governor::Governor;
use crate::scenarios::Mix;

/// A job alone: part of the time that its kernels run, and its requests' latencies in order.
#[derive(Clone, Debug)]
pub struct SoloRun {
    pub busy: f64,
    pub latencies: Vec<u64>,
}

/// All figures of a run. Speeds are device work over work alone; margins and shortfalls are in
/// points, of the worst second.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub speed: Vec<f64>,
    pub sum: f64,
    pub margin: Vec<f64>,
    pub short: Vec<f64>,
    /// Parts of the time.
    pub turn: f64,
    pub idle: f64,
    /// Latencies over those alone, at the 99th percentile.
    pub p99: Vec<Option<f64>>,
}

fn percentile(sorted: &[u64], part: f64) -> f64 {
    let at = ((sorted.len() as f64 * part) as usize).min(sorted.len() - 1);
    sorted[at] as f64
}

fn latencies(answers: &[(u64, u64)]) -> Vec<u64> {
    let mut all: Vec<u64> = answers.iter().map(|(_, latency)| *latency).collect();
    all.sort_unstable();
    all
}

/// Each job of the mix alone on the device, without a governor.
pub fn solo_runs(mix: &Mix, seconds: u64) -> Vec<SoloRun> {
    let one = |job: usize| {
        let mut open = Governor::Open {
            cap: Some(20_000_000),
        };
        let plan = Plan::new(1.0, mix.programs(job, job as u64 + 1));
        let hardware = Hardware {
            chunk_ns: mix.hardware.chunk_ns,
            ..Hardware::default()
        };
        let mut sim = Sim::new(vec![plan], &mut open, hardware, 1);
        sim.run(SECOND, &mut open);
        let (got, answers) = (sim.jobs[0].got, sim.jobs[0].answers.len());
        sim.run(SECOND + seconds * SECOND, &mut open);
        SoloRun {
            busy: (sim.jobs[0].got - got) as f64 / (seconds * SECOND) as f64,
            latencies: latencies(&sim.jobs[0].answers[answers..]),
        }
    };
    (0..mix.jobs.len()).map(one).collect()
}

/// Runs the mix for a second to warm up, and for `seconds` more.
pub fn run(mix: &Mix, governor: &mut Governor, solo: &[SoloRun], seconds: u64) -> Outcome {
    if let Governor::Rule(rule) = governor {
        rule.jitter = mix.jitter;
    }
    let mut sim = Sim::new(mix.plans(), governor, mix.hardware, 1);
    sim.run(SECOND, governor);
    let got = |sim: &Sim| -> Vec<u64> { sim.jobs.iter().map(|job| job.got).collect() };
    let first = got(&sim);
    let answers: Vec<usize> = sim.jobs.iter().map(|job| job.answers.len()).collect();
    let (turns, kernels) = (sim.turn_time, sim.kernel_time);
    let mut before = first.clone();
    let mut margin = vec![f64::INFINITY; solo.len()];
    let mut short = vec![f64::NEG_INFINITY; solo.len()];
    for second in 1..=seconds {
        sim.share_changed = false;
        sim.run((1 + second) * SECOND, governor);
        let now = got(&sim);
        let done: Vec<f64> = now
            .iter()
            .zip(&before)
            .map(|(now, before)| (now - before) as f64 / SECOND as f64)
            .collect();
        before = now;
        if sim.share_changed {
            continue;
        }
        let shares: f64 = sim.jobs.iter().map(|job| job.share).sum();
        let all: f64 = done.iter().sum();
        for (at, job) in sim.jobs.iter().enumerate() {
            let share = job.share / shares;
            let least = (share * all).min(solo[at].busy);
            short[at] = short[at].max(100.0 * (least - done[at]));
            margin[at] = margin[at].min(100.0 * (done[at] / solo[at].busy - share));
        }
    }
    let span = (seconds * SECOND) as f64;
    let speed: Vec<f64> = before
        .iter()
        .zip(&first)
        .zip(solo)
        .map(|((now, first), solo)| (now - first) as f64 / span / solo.busy)
        .collect();
    let turn = (sim.turn_time - turns) as f64 / span;
    let p99 = |(at, job): (usize, &crate::device::Job)| {
        let here = latencies(&job.answers[answers[at]..]);
        let there = &solo[at].latencies;
        (!here.is_empty() && !there.is_empty())
            .then(|| percentile(&here, 0.99) / percentile(there, 0.99))
    };
    Outcome {
        sum: speed.iter().sum(),
        speed,
        margin,
        short,
        turn,
        idle: 1.0 - turn - (sim.kernel_time - kernels) as f64 / span,
        p99: sim.jobs.iter().enumerate().map(p99).collect(),
    }
}
