//! Sia (SOSP 2023) on three types of GPU, against Pollux, which does not know types.
//!
//! *Jobs.* Those of a virtual cluster of Gavel's Philly trace, made elastic: their work is the
//! trace's steps, and their speed on 1, 2, 4 and 8 GPUs of each type is what Gavel measured. (Sia's
//! own workloads and profiles carry no licence.) 64 GPUs in the shape of Sia's testbed: 2 servers
//! of 8, 3 of 8 and 6 of 4, here V100, P100 and K80. Rounds of 300 s; a restart costs 50 s, of
//! Sia's 25 to 250 s.
//!
//! *Against* `pollux`, which goes by the speeds on V100s and takes GPUs of any type.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use cluster::report::Report;
use cluster::sim::Config;
use cluster::sweep::context;
use cluster::trace::{Isolated, Options, Trace, read_isolated};
use parking_lot::Mutex;
use policy::cluster::admission::Promises;
use policy::cluster::{Choice, ClusterState, GpuType, JobId, Scheduler, Sizer, Speed, Tags};

use super::Limit::{AtMost, Reported};
use super::{System, load, mean, rounds, row, run_with};

const CLUSTER: &str = "2x8xV100,3x8xP100,6x4xK80";

pub const SYSTEM: System = System {
    name: "sia",
    rows: &[
        row(
            "sia_jct_over_pollux",
            "ratio",
            AtMost(0.7),
            "mean completion 30 to 93 % lower than the best of its baselines",
        ),
        row(
            "sia_p99_jct_over_pollux",
            "ratio",
            AtMost(0.72),
            "99th percentile of completion 28 to 95 % lower",
        ),
        row(
            "sia_makespan_over_pollux",
            "ratio",
            AtMost(0.72),
            "makespan 28 to 95 % lower",
        ),
        row("sia_jct_mean_s", "s", Reported, "-"),
        row("sia_pollux_jct_mean_s", "s", Reported, "-"),
        row("sia_most_jobs_at_once", "jobs", Reported, "-"),
        row(
            "sia_decision_mean_ms",
            "ms",
            Reported,
            "below a second at 64 GPUs",
        ),
        row(
            "sia_decision_most_ms",
            "ms",
            Reported,
            "below a second at 64 GPUs",
        ),
    ],
    quick: false,
    run: figures,
};

/// Notes how long each decision of a sizer takes, in milliseconds, and how many jobs it is about.
struct Timed {
    sizer: Box<dyn Sizer>,
    took: Arc<Mutex<Vec<(f64, usize)>>>,
}

impl Sizer for Timed {
    fn name(&self) -> &'static str {
        self.sizer.name()
    }
    fn tags(&self) -> Tags {
        self.sizer.tags()
    }
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)> {
        let begin = Instant::now();
        let sizes = self.sizer.resize(state, promises);
        let ms = 1e3 * begin.elapsed().as_secs_f64();
        let jobs = state.waiting().len() + state.running().len();
        self.took.lock().push((ms, jobs));
        sizes
    }
    fn kind(&self, job: JobId) -> Option<GpuType> {
        self.sizer.kind(job)
    }
    fn tunes_batches(&self) -> bool {
        self.sizer.tunes_batches()
    }
}

/// Speeds on 1 to 8 GPUs of the first type, and on each type by what one GPU of it does there.
fn make_elastic(trace: &mut Trace, table: &Isolated, types: usize) {
    let speed = |kind: usize, name: &str, gpus: u32| {
        let found = table.get(&(GpuType(kind as u16), name.to_owned(), gpus));
        found.map(|solo| solo.steps_per_s)
    };
    for job in &mut trace.jobs {
        let name = trace.kinds.name(job.profile.kind.0).to_owned();
        let Some(now) = speed(0, &name, job.gpus) else {
            continue;
        };
        let mut at = 0.0;
        // Between two measured numbers, as fast as with the smaller; never slower with more.
        let curve: Vec<f64> = (1..=8)
            .map(|gpus| {
                at = f64::max(at, speed(0, &name, gpus).unwrap_or(0.0));
                at
            })
            .collect();
        if curve[0] <= 0.0 {
            continue;
        }
        job.work *= now;
        job.by_type = (0..types)
            .map(|kind| speed(kind, &name, 1).unwrap_or(0.0) / curve[0])
            .collect();
        job.speed = Speed::Curve(curve.into());
        job.most_gpus = 8;
    }
    trace
        .jobs
        .retain(|job| matches!(job.speed, Speed::Curve(_)));
}

fn figures(data: &Path) -> Vec<f64> {
    let options = Options {
        part: Some("6c71a0".to_owned()),
        limit: Some(JOBS),
        ..Options::default()
    };
    let (mut trace, spec) = load(data, "gavel/philly_trace_seed0.csv", CLUSTER, options);
    let types = Options {
        gpu_types: spec.gpu_types.clone(),
        ..Options::default()
    };
    let table = read_isolated(&data.join("gavel/isolated_throughput.csv"), &types);
    make_elastic(
        &mut trace,
        &table.expect("Gavel's table"),
        spec.gpu_types.len(),
    );
    let config = Config {
        restart_s: 50.0,
        start_s: 50.0,
        ..rounds(300.0)
    };
    let took = Arc::new(Mutex::new(Vec::new()));
    let of = |name: &str| -> Report {
        let choice = Choice {
            order: None,
            sizer: Some(name.to_owned()),
            ..Choice::new("fifo", "consolidate-relaxed")
        };
        let context = context(&trace, &spec, &[], &config);
        let mut policies = choice.policies(&context).expect("policies that act");
        if name == "sia" {
            let sizer = policies.sizer.take().expect("a sizer");
            let took = took.clone();
            policies.sizer = Some(Box::new(Timed { sizer, took }));
        }
        run_with(&trace, &spec, &config, Scheduler::of(policies, config.seed))
    };
    let (sia, pollux) = (of("sia"), of("pollux"));
    let took = took.lock();
    vec![
        sia.jct_mean_s / pollux.jct_mean_s,
        sia.jct_p99_s / pollux.jct_p99_s,
        sia.makespan_s / pollux.makespan_s,
        sia.jct_mean_s,
        pollux.jct_mean_s,
        took.iter().map(|(_, jobs)| *jobs).max().unwrap_or(0) as f64,
        mean(took.iter().map(|(ms, _)| *ms)),
        took.iter().map(|(ms, _)| *ms).fold(0.0, f64::max),
    ]
}

/// As many jobs as Sia's and Pollux' workloads have.
const JOBS: usize = 160;
