//! The file that says what is measured: jobs, which of them run together, modes and times.
//!
//! It knows nothing of how a run is made. Every mistake has file, line and column, as in the quota
//! file.

mod parse;
mod table;
#[cfg(test)]
mod tests;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use control::MemLimit;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use parse::parse;
pub use work::Work;

/// How the jobs of a run share the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// One at a time, in slices.
    #[serde(alias = "slices")]
    Exclusive,
    /// All of them at once, each inside its quota.
    #[serde(alias = "all-at-once")]
    Concurrent,
    /// The arbiter decides between the two.
    Auto,
    /// All of them at once; one that is ahead of its share waits while it holds up another.
    Lend,
    /// The driver without sublet.
    Plain,
    /// The driver's Multi-Process Service, without sublet.
    Mps,
}

impl Mode {
    /// What plans called modes before they had one word each.
    const FORMER: [(&'static str, Mode); 2] = [
        ("slices", Mode::Exclusive),
        ("all-at-once", Mode::Concurrent),
    ];

    const ALL: [Mode; 6] = [
        Mode::Exclusive,
        Mode::Concurrent,
        Mode::Auto,
        Mode::Lend,
        Mode::Plain,
        Mode::Mps,
    ];

    /// The mode that a plan names.
    fn named(word: &str) -> Option<Self> {
        let former = || Self::FORMER.iter().find(|(name, _)| *name == word);
        let now = Self::ALL.into_iter().find(|mode| mode.word() == word);
        now.or_else(|| former().map(|(_, mode)| *mode))
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::Concurrent => "concurrent",
            Self::Auto => "auto",
            Self::Lend => "lend",
            Self::Plain => "plain",
            Self::Mps => "mps",
        }
    }

    /// What the quota file calls it; `None`: no arbiter has a part in it.
    pub fn of_device(self) -> Option<&'static str> {
        match self {
            Self::Exclusive => Some("exclusive"),
            Self::Concurrent => Some("concurrent"),
            Self::Auto => Some("auto"),
            Self::Lend => Some("lend"),
            Self::Plain | Self::Mps => None,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// How it is known how far a job has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// The iterations of its profile.
    Iterations,
    /// What it has submitted.
    Launches,
    /// Device time that it was charged.
    DeviceTime,
    /// A number in a line of its output that counts up.
    Lines { pattern: String, unit: String },
}

impl Progress {
    /// What is counted.
    pub fn unit(&self) -> &str {
        match self {
            Self::Iterations => "iterations",
            Self::Launches => "launches",
            Self::DeviceTime => "s of device time",
            Self::Lines { unit, .. } => unit,
        }
    }

    fn identity(&self) -> Value {
        match self {
            Self::Iterations => json!("iterations"),
            Self::Launches => json!("launches"),
            Self::DeviceTime => json!("device_time"),
            Self::Lines { pattern, unit } => json!({ "lines": pattern, "unit": unit }),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    pub name: String,
    pub work: Work,
    /// What a cluster's hook calls jobs like it.
    pub kind: Option<String>,
    pub env: BTreeMap<String, String>,
    pub cwd: PathBuf,
    pub mem: Option<MemLimit>,
    pub share: Option<f64>,
    pub warm_up: Duration,
    pub measured: Duration,
    pub progress: Progress,
}

impl Job {
    /// Whether nothing but an arbiter can tell how far it is. A replay of one process counts by
    /// itself.
    fn needs_arbiter(&self) -> bool {
        match (&self.work, &self.progress) {
            (_, Progress::Lines { .. }) => false,
            (Work::Recording(one), Progress::Launches | Progress::Iterations) => one.processes > 1,
            _ => true,
        }
    }

    /// What the hook's table of pairs knows it by: as for a job that was submitted without a kind.
    pub fn kind(&self) -> String {
        let line = match (&self.kind, &self.work) {
            (Some(kind), _) => return kind.clone(),
            (None, Work::Command(words)) => words.join(" "),
            (None, Work::Recording(_)) => self.name.clone(),
        };
        cluster::live::wire::kind_of_command(&line)
    }
}

/// Jobs that run together, by their numbers; one alone is its solo run.
#[derive(Debug, Clone, PartialEq)]
pub struct Combination {
    pub jobs: Vec<usize>,
    /// In place of the jobs' own.
    pub shares: Option<Vec<f64>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub repeat: u32,
    pub seed: u64,
    pub modes: Vec<Mode>,
    /// How long a job may take until it submits its first work.
    pub start_limit: Duration,
    pub jobs: Vec<Job>,
    /// Solo runs first, then pairs, then what the file names.
    pub combinations: Vec<Combination>,
}

impl Plan {
    /// What two experiments must agree in to be one. How often it is repeated is not part of it.
    pub fn identity(&self) -> Value {
        let jobs: serde_json::Map<String, Value> = self
            .jobs
            .iter()
            .map(|job| {
                let mut about = json!({
                    "env": job.env,
                    "cwd": job.cwd,
                    "mem": job.mem.map(|mem| mem.to_string()),
                    "share": job.share,
                    "warm_up_s": job.warm_up.as_secs_f64(),
                    "measured_s": job.measured.as_secs_f64(),
                    "progress": job.progress.identity(),
                });
                let (what, identity) = job.work.identity();
                about[what] = identity;
                (job.name.clone(), about)
            })
            .collect();
        let combinations: Vec<String> = self
            .combinations
            .iter()
            .map(|combination| self.label(combination))
            .collect();
        json!({
            "seed": self.seed,
            "modes": self.modes,
            "start_limit_s": self.start_limit.as_secs_f64(),
            "jobs": jobs,
            "combinations": combinations,
        })
    }

    /// `a+b`, with shares of their own `a+b@0.75,0.25`.
    pub fn label(&self, combination: &Combination) -> String {
        let names: Vec<&str> = combination
            .jobs
            .iter()
            .map(|job| self.jobs[*job].name.as_str())
            .collect();
        let mut label = names.join("+");
        if let Some(shares) = &combination.shares {
            let shares: Vec<String> = shares.iter().map(f64::to_string).collect();
            label += "@";
            label += &shares.join(",");
        }
        label
    }

    /// Warm-up and window of a run: the longest that one of its jobs asks for.
    pub fn times(&self, combination: &Combination) -> (Duration, Duration) {
        let of = |time: fn(&Job) -> Duration| {
            let times = combination.jobs.iter().map(|job| time(&self.jobs[*job]));
            times.max().unwrap_or_default()
        };
        (of(|job| job.warm_up), of(|job| job.measured))
    }
}

/// Names of the jobs of a run, each once: a second one of the same job has a number.
pub fn names_in_run(plan: &Plan, combination: &Combination) -> Vec<String> {
    let mut taken: BTreeSet<String> = BTreeSet::new();
    let jobs = combination.jobs.iter().map(|job| &plan.jobs[*job].name);
    jobs.map(|name| {
        let mut free = name.clone();
        let mut number = 2;
        while !taken.insert(free.clone()) {
            // Within what a name may have.
            let short: String = name.chars().take(control::NAME_MAX_BYTES - 4).collect();
            free = format!("{short}-{number}");
            number += 1;
        }
        free
    })
    .collect()
}
