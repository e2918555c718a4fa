//! Gavel (OSDI 2020): its programs against the same ones that do not know types of GPU.
//!
//! *Jobs.* The first of a virtual cluster of Gavel's Philly trace, with the speeds on V100, P100
//! and K80, alone and in pairs, that Gavel measured. As many GPUs of each type, in Gavel's rounds
//! of 360 s, at two offered loads: the mean number of GPUs that the jobs ask for, over what the
//! GPUs do together at the jobs' mean speeds. For the makespan all jobs are there at the start.
//!
//! *Against* the same program that takes each job to be as fast on every type on which it runs at
//! all: Gavel's heterogeneity-agnostic baseline. Its jobs do not share GPUs either; what types are
//! worth and what sharing is worth stand in rows of their own.
//!
//! *Pairs.* Where a fifth of the pairs is known, the others come from alternating least squares.
//! Rank and ridges of that were fitted on the P100's pairs; beside it is what comes out with rank 1
//! and ridges of 1, which nobody chose.

use std::path::Path;
use std::sync::Arc;

use cluster::report::Report;
use cluster::spec::ClusterSpec;
use cluster::sweep::context;
use cluster::trace::{Options, Trace};
use policy::cluster::completion::Settings;
use policy::cluster::round_allocator::{Gavel, Goal, LEAST_CONFIDENCE};
use policy::cluster::{
    Choice, ClusterState, GpuType, JobId, JobType, PairTable, Random, RoundAllocator, Scheduler,
    Tags, Throughputs, Turn,
};

use super::Limit::{AtLeast, AtMost, Reported};
use super::{System, load, rounds, row, run_with};

const TYPES: [&str; 3] = ["V100", "P100", "K80"];
const JOBS: usize = 240;
const LOADS: [f64; 2] = [0.8, 1.2];
const ROUND_S: f64 = 360.0;
const KNOWN: f64 = 0.2;
const UNFITTED: Settings = Settings {
    rank: 1,
    ridge: 1.0,
    offset_ridge: 1.0,
    inside_rows: false,
};
const JCT: &str = "mean completion up to 3.5x better than without types";
const SPAN: &str = "makespan up to 1.4x better than without types";

pub const SYSTEM: System = System {
    name: "gavel",
    rows: &[
        row("gavel_load_0_8_jct_gain", "ratio", AtLeast(1.0), JCT),
        row(
            "gavel_load_0_8_jct_gain_sharing",
            "ratio",
            AtLeast(1.0),
            JCT,
        ),
        row("gavel_load_1_2_jct_gain", "ratio", AtLeast(1.0), JCT),
        row(
            "gavel_load_1_2_jct_gain_sharing",
            "ratio",
            AtLeast(1.0),
            JCT,
        ),
        row(
            "gavel_load_1_2_jct_gain_sharing_a_fifth_known",
            "ratio",
            AtLeast(1.0),
            "-",
        ),
        row(
            "gavel_load_1_2_jct_gain_sharing_unfitted",
            "ratio",
            Reported,
            "-",
        ),
        row("gavel_makespan_gain", "ratio", AtLeast(1.0), SPAN),
        row("gavel_makespan_gain_sharing", "ratio", AtLeast(1.0), SPAN),
        row("gavel_rho_mean_gain", "ratio", AtLeast(1.0), "-"),
        row("gavel_rho_p99_gain", "ratio", Reported, "-"),
        row("gavel_pairs_v100_rms", "of solo", AtMost(0.28), "-"),
        row("gavel_pairs_v100_rms_unfitted", "of solo", Reported, "-"),
        row("gavel_pairs_v100_rms_of_the_mean", "of solo", Reported, "-"),
    ],
    quick: false,
    run: figures,
};

/// A program that is shown jobs which are as fast on every type.
struct Blind(Box<dyn RoundAllocator>);

impl RoundAllocator for Blind {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn tags(&self) -> Tags {
        self.0.tags()
    }
    fn turns(&mut self, state: &ClusterState) -> Vec<Turn> {
        let mut blind = state.clone();
        let ids: Vec<JobId> = blind.active().map(|job| job.id).collect();
        for id in ids {
            let job = blind.job_mut(id);
            let runs = |speed: &f64| if *speed > 0.0 { 1.0 } else { 0.0 };
            let same: Vec<f64> = job.by_type.iter().map(runs).collect();
            job.by_type = same.into();
        }
        self.0.turns(&blind)
    }
    fn learn(&mut self, pairs: Option<&Arc<PairTable>>) {
        self.0.learn(pairs);
    }
}

fn jobs(data: &Path, each: u32) -> (Trace, ClusterSpec) {
    let cluster = TYPES.map(|kind| format!("{each}x{kind}")).join(",");
    let options = Options {
        part: Some("6c71a0".to_owned()),
        limit: Some(JOBS),
        ..Options::default()
    };
    load(data, "gavel/philly_trace_seed0.csv", &cluster, options)
}

fn report(
    (trace, spec): &(Trace, ClusterSpec),
    order: &str,
    rounds_of: impl FnOnce(Box<dyn RoundAllocator>) -> Box<dyn RoundAllocator>,
) -> Report {
    let config = rounds(ROUND_S);
    let context = context(trace, spec, &[], &config);
    let choice = Choice::new(order, "anywhere");
    let mut policies = choice.policies(&context).expect("policies that act");
    policies.round_allocator = policies.round_allocator.map(rounds_of);
    run_with(trace, spec, &config, Scheduler::of(policies, config.seed))
}

/// The pairs of the table, each once, and those that are shown.
type Pair = (GpuType, u32, JobType, JobType, [f64; 2]);

fn shown(all: &PairTable) -> (Vec<Pair>, PairTable) {
    let mut pairs: Vec<Pair> = all.iter().filter(|(_, _, a, b, _)| a <= b).collect();
    pairs.sort_by_key(|(kind, gpus, a, b, _)| (*kind, *gpus, *a, *b));
    let mut random = Random::new(1);
    let mut table = PairTable::default();
    for (kind, gpus, a, b, speeds) in &pairs {
        if random.unit() < KNOWN {
            table.insert(*kind, *gpus, (*a, *b), *speeds);
        }
    }
    (pairs, table)
}

/// What is inferred of the others.
fn completed(all: &PairTable, least: f64, settings: &Settings) -> PairTable {
    let (pairs, mut table) = shown(all);
    let mut kinds: Vec<(JobType, u32)> = pairs
        .iter()
        .flat_map(|(_, gpus, a, b, _)| [(*a, *gpus), (*b, *gpus)])
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    table.complete_by(&kinds, TYPES.len() as u16, least, settings);
    table
}

/// How far inferred pairs of the V100 are off, and how far the mean of the known ones is.
fn off(all: &PairTable, settings: &Settings) -> [f64; 2] {
    let (pairs, known) = shown(all);
    let table = completed(all, 0.0, settings);
    let seen: Vec<f64> = known.iter().map(|(.., speeds)| speeds[0]).collect();
    let mean = seen.iter().sum::<f64>() / seen.len() as f64;
    let (mut squares, mut count) = ([0.0; 2], 0.0);
    for (kind, gpus, a, b, speeds) in pairs.iter().filter(|pair| pair.0 == GpuType(0)) {
        if known.pair(*a, *b, *kind, *gpus).is_some() {
            continue;
        }
        let Some(found) = table.pair(*a, *b, *kind, *gpus) else {
            continue;
        };
        for who in 0..2 {
            squares[0] += (found[who] - speeds[who]).powi(2);
            squares[1] += (mean - speeds[who]).powi(2);
            count += 1.0;
        }
    }
    squares.map(|sum| f64::sqrt(sum / count))
}

fn figures(data: &Path) -> Vec<f64> {
    let same = |one: Box<dyn RoundAllocator>| one;
    let blind = |one: Box<dyn RoundAllocator>| Box::new(Blind(one)) as Box<dyn RoundAllocator>;
    let (trace, _) = jobs(data, 1);
    // What one GPU of each type does, at the jobs' mean speeds.
    let of_type = |at: usize| {
        let speeds = trace.jobs.iter().map(|job| job.by_type[at]);
        speeds.sum::<f64>() / trace.jobs.len() as f64
    };
    let three: f64 = (0..TYPES.len()).map(of_type).sum();
    let largest = trace.jobs.iter().map(|job| job.gpus).max().unwrap_or(1);
    let sized = |offered: f64| {
        let each = trace.offered_load(1) / offered / three;
        jobs(data, (each.round() as u32).max(largest))
    };
    let all = trace.pairs.clone().expect("Gavel's pairs");
    let mut out = Vec::new();
    for offered in LOADS {
        let world = sized(offered);
        let base = report(&world, "gavel-max-min:partners=0", blind).jct_mean_s;
        out.push(base / report(&world, "gavel-max-min:partners=0", same).jct_mean_s);
        out.push(base / report(&world, "gavel-max-min", same).jct_mean_s);
        if offered == LOADS[1] {
            for settings in [Settings::PAIRS, UNFITTED] {
                let table = Arc::new(completed(&all, LEAST_CONFIDENCE, &settings));
                let by = |_| {
                    let gavel = Gavel::new(Goal::MaxMin, Some(table.clone()), 3);
                    Box::new(gavel) as Box<dyn RoundAllocator>
                };
                out.push(base / report(&world, "gavel-max-min", by).jct_mean_s);
            }
        }
    }
    let mut together = sized(1.0);
    for job in &mut together.0.jobs {
        job.arrival_s = 0.0;
    }
    let base = report(&together, "gavel-makespan:partners=0", blind).makespan_s;
    out.push(base / report(&together, "gavel-makespan:partners=0", same).makespan_s);
    out.push(base / report(&together, "gavel-makespan", same).makespan_s);
    let world = sized(LOADS[1]);
    let base = report(&world, "gavel-finish-time:partners=0", blind);
    let aware = report(&world, "gavel-finish-time:partners=0", same);
    out.push(base.rho_mean / aware.rho_mean);
    out.push(base.rho_p99 / aware.rho_p99);
    let (fitted, unfitted) = (off(&all, &Settings::PAIRS), off(&all, &UNFITTED));
    out.extend([fitted[0], unfitted[0], fitted[1]]);
    out
}
