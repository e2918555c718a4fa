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
#[path = "heterog.rs"]
pub mod heterog;
#[path = "hived.rs"]
pub mod hived;
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

/// What a figure may be.
#[derive(Clone, Copy)]
pub enum Limit {
    /// It is printed, and nothing is asked of it.
    Reported,
    AtMost(f64),
    AtLeast(f64),
}

/// A figure that there is.
pub struct Spec {
    pub name: &'static str,
    pub unit: &'static str,
    pub limit: Limit,
    /// What was published, of what.
    pub published: &'static str,
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
    }
}

/// A system: its rows and what computes them, in this order.
pub struct System {
    pub name: &'static str,
    pub rows: &'static [Spec],
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
    swayam::SYSTEM,
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
    pub fn holds(&self, value: f64) -> bool {
        match self.limit {
            Limit::Reported => true,
            Limit::AtMost(most) => value <= most,
            Limit::AtLeast(least) => value >= least,
        }
    }

    pub fn verdict(&self, value: f64) -> String {
        let word = if self.holds(value) { "" } else { "NOT " };
        match self.limit {
            Limit::Reported => "-".to_owned(),
            Limit::AtMost(most) => format!("{word}<= {most}"),
            Limit::AtLeast(least) => format!("{word}>= {least}"),
        }
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
