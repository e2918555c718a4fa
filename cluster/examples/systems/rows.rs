//! The figures that systems of the field have to show here: what each is called, what it may be,
//! and what was published.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cluster::report::Report;
use cluster::sim::{Config, Fate, Outcome, Simulation};
use cluster::spec::ClusterSpec;
use cluster::sweep::context;
use cluster::trace::{self, Options, Trace};
use policy::cluster::{Choice, Scheduler};

#[path = "carbyne.rs"]
pub mod carbyne;
#[path = "dl2.rs"]
pub mod dl2;
#[path = "gavel.rs"]
pub mod gavel;
#[path = "gfs.rs"]
pub mod gfs;
#[path = "heterog.rs"]
pub mod heterog;
#[path = "hived.rs"]
pub mod hived;
#[path = "../../../policy/examples/rows/limits.rs"]
mod limits;
#[path = "lucid.rs"]
pub mod lucid;
#[path = "mlfs.rs"]
pub mod mlfs;
#[path = "pai.rs"]
pub mod pai;
#[path = "sia.rs"]
pub mod sia;
#[path = "swayam.rs"]
pub mod swayam;
#[path = "themis.rs"]
pub mod themis;

pub use limits::{Limit, Verdict};

/// Why a figure misses its limit, and how far it may.
#[derive(Clone, Copy, Debug)]
pub struct KnownMiss {
    /// What was found when the row was written.
    pub measured: f64,
    /// What it may not be worse than.
    pub bound: f64,
    pub why: &'static str,
}

/// A figure that there is.
pub struct Spec {
    pub name: &'static str,
    pub unit: &'static str,
    pub limit: Limit,
    /// What was published, of what.
    pub published: &'static str,
    /// It does not keep its limit.
    pub known_miss: Option<KnownMiss>,
}

/// A row of a system.
pub const fn row(
    name: &'static str,
    unit: &'static str,
    limit: Limit,
    published: &'static str,
) -> Spec {
    Spec {
        name,
        unit,
        limit,
        published,
        known_miss: None,
    }
}

/// A system: its rows and what computes them, in this order.
pub struct System {
    pub name: &'static str,
    pub rows: &'static [Spec],
    /// It takes seconds in a debug build too.
    pub quick: bool,
    pub run: fn(&Path) -> Vec<f64>,
}

pub const SYSTEMS: &[System] = &[
    mlfs::SYSTEM,
    dl2::SYSTEM,
    heterog::SYSTEM,
    hived::SYSTEM,
    sia::SYSTEM,
    carbyne::SYSTEM,
    themis::SYSTEM,
    gavel::SYSTEM,
    pai::SYSTEM,
    lucid::SYSTEM,
    swayam::SYSTEM,
    gfs::SYSTEM,
];

pub fn data() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data")
}

/// A trace of the folder of data, on this cluster.
pub fn load(data: &Path, file: &str, cluster: &str, options: Options) -> (Trace, ClusterSpec) {
    let spec: ClusterSpec = cluster.parse().expect("a cluster");
    let options = Options {
        gpu_types: spec.gpu_types.clone(),
        ..options
    };
    let trace = trace::read(&data.join(file), None, &options).expect("a trace of the repository");
    (trace, spec)
}

/// A run under policies by name.
pub fn run(trace: &Trace, spec: &ClusterSpec, config: &Config, choice: &Choice) -> Report {
    run_with(trace, spec, config, scheduler(trace, spec, config, choice))
}

/// A run under this scheduler.
pub fn run_with(
    trace: &Trace,
    spec: &ClusterSpec,
    config: &Config,
    scheduler: Scheduler,
) -> Report {
    Report::of(&outcome(trace, spec, config, scheduler))
}

/// What becomes of each job under an order, on whatever GPUs are free.
pub fn fates(trace: &Trace, spec: &ClusterSpec, config: &Config, order: &str) -> Vec<Fate> {
    let scheduler = scheduler(trace, spec, config, &Choice::new(order, "anywhere"));
    outcome(trace, spec, config, scheduler).fates
}

fn scheduler(trace: &Trace, spec: &ClusterSpec, config: &Config, choice: &Choice) -> Scheduler {
    let context = context(trace, spec, &[], config);
    let scheduler = choice.scheduler(&context, config.seed);
    scheduler.expect("policies that act")
}

fn outcome(trace: &Trace, spec: &ClusterSpec, config: &Config, scheduler: Scheduler) -> Outcome {
    let simulation = Simulation::new(trace, spec.state(), scheduler, config.clone());
    simulation.and_then(|run| run.run(|_| {})).expect("the run")
}

/// Decisions in rounds of so many seconds.
pub fn rounds(round_s: f64) -> Config {
    Config {
        round_s: Some(round_s),
        seed: 1,
        ..Config::default()
    }
}

impl Spec {
    /// The same row, whose limit is known to be missed.
    pub const fn missed(self, measured: f64, bound: f64, why: &'static str) -> Self {
        let known_miss = Some(KnownMiss {
            measured,
            bound,
            why,
        });
        Self { known_miss, ..self }
    }

    /// What a figure of this row that is known to miss its limit may not be worse than.
    pub fn bound(&self) -> Option<f64> {
        self.known_miss.map(|miss| miss.bound)
    }

    pub fn verdict(&self, value: f64) -> Verdict {
        self.limit.verdict(self.bound(), value)
    }
}

impl System {
    /// Its figures by name.
    pub fn figures(&self, data: &Path) -> BTreeMap<&'static str, f64> {
        let values = (self.run)(data);
        assert_eq!(values.len(), self.rows.len(), "{}", self.name);
        self.rows.iter().map(|row| row.name).zip(values).collect()
    }
}

pub fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0);
    for value in values {
        (sum, count) = (sum + value, count + 1.0);
    }
    sum / f64::max(count, 1.0)
}
