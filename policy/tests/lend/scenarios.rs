//! The mixes and attacks of `scenarios.json`, and what must hold in each.

use policy::Class;

use crate::device::{Hardware, MS, Plan, Program, US};
use crate::json::Json;
use crate::measure::Outcome;
use crate::programs;

pub type Maker = Box<dyn Fn(u64) -> Program>;

/// A job of a mix.
pub struct MixJob {
    pub programs: Vec<Maker>,
    pub share: f64,
    pub latency: bool,
    pub charge_error: f64,
    pub class: Class,
    pub share_max: Option<f64>,
}

impl MixJob {
    pub fn new(share: f64, program: impl Fn(u64) -> Program + 'static) -> Self {
        Self {
            programs: vec![Box::new(program)],
            share,
            latency: false,
            charge_error: 1.0,
            class: Class::Guaranteed,
            share_max: None,
        }
    }
}

/// Jobs, and the hardware they run on.
pub struct Mix {
    pub jobs: Vec<MixJob>,
    pub hardware: Hardware,
    /// Probability of a late look, and by how much at most.
    pub jitter: Option<(f64, u64)>,
}

impl Mix {
    pub fn new(jobs: Vec<MixJob>) -> Self {
        Self {
            jobs,
            hardware: Hardware::default(),
            jitter: None,
        }
    }

    pub fn programs(&self, job: usize, seed: u64) -> Vec<Program> {
        let of = self.jobs[job].programs.iter().enumerate();
        of.map(|(at, make)| make(seed * 7 + at as u64)).collect()
    }

    pub fn plans(&self) -> Vec<Plan> {
        let plan = |(at, job): (usize, &MixJob)| Plan {
            charge_error: job.charge_error,
            latency: job.latency,
            class: job.class,
            share_max: job.share_max,
            ..Plan::new(job.share, self.programs(at, at as u64 + 1))
        };
        self.jobs.iter().enumerate().map(plan).collect()
    }
}

/// A mix with a name and what must hold in it.
pub struct Scenario {
    pub name: String,
    pub mix: Mix,
    /// Each with whether the reference kept it.
    pub invariants: Vec<(String, bool)>,
}

fn maker(of: &Json) -> Maker {
    let number = |key: &str| {
        of.get(key)
            .number()
            .unwrap_or_else(|| panic!("{key}: {of:?}"))
    };
    let ms = |key: &str| (number(key) * MS as f64) as u64;
    let us = |key: &str| (number(key) * US as f64) as u64;
    let count = |key: &str| number(key) as u64;
    match of.get("kind").text() {
        "recording" => {
            let (file, sync) = (of.get("file").text().to_owned(), count("sync_every_steps"));
            Box::new(move |seed| programs::recorded(&file, sync, seed))
        }
        "train" => {
            let (host, device) = (ms("host_ms"), ms("device_ms"));
            let (launches, sync) = (count("launches"), count("sync_every_steps"));
            Box::new(move |seed| programs::train(host, device, launches, sync, seed))
        }
        "stream" => {
            let (len, host) = (us("kernel_us"), us("host_us"));
            Box::new(move |_| programs::stream(len, host))
        }
        "sync_each_kernel" => {
            let (len, host) = (us("kernel_us"), us("host_us"));
            Box::new(move |seed| programs::sync_each(len, host, seed))
        }
        "polls_own_queue" => {
            let (below, len, host) = (us("below_us"), us("kernel_us"), us("host_us"));
            Box::new(move |_| programs::polls_own_queue(below, len, host))
        }
        "burst" => {
            let (sleep, work) = (ms("sleep_ms"), ms("work_ms"));
            let (len, host) = (us("kernel_us"), us("host_us"));
            Box::new(move |seed| programs::burst(sleep, work, len, host, seed))
        }
        "service" => {
            let (rate, kernels) = (number("rate_per_s"), count("kernels"));
            let (len, host) = (us("kernel_us"), us("host_us"));
            Box::new(move |seed| programs::service(rate, kernels, len, host, seed))
        }
        "copy_then_train" => {
            let (copy, host, device) = (ms("copy_ms"), ms("host_ms"), ms("device_ms"));
            let launches = count("launches");
            Box::new(move |seed| programs::copy_then_train(copy, host, device, launches, seed))
        }
        "stall_in_stream" => {
            let (stall, device) = (ms("stall_ms"), ms("device_ms"));
            let launches = count("launches");
            Box::new(move |_| programs::stall_in_stream(stall, device, launches))
        }
        other => panic!("unknown kind of program {other}"),
    }
}

/// All of the file.
pub fn all() -> Vec<Scenario> {
    let file = Json::parse(include_str!("scenarios.json"));
    file.list().iter().map(scenario).collect()
}

fn scenario(of: &Json) -> Scenario {
    let shares = of.get("shares").list();
    let stress = of.get("stress");
    let errors = stress.get("charge_error").list();
    let jobs = of.get("jobs").list().iter().enumerate().map(|(at, job)| {
        let processes = job.list();
        MixJob {
            programs: processes.iter().map(maker).collect(),
            share: shares[at].number().expect("a share"),
            latency: processes.iter().any(|of| of.get("latency").is_true()),
            charge_error: errors.get(at).and_then(Json::number).unwrap_or(1.0),
            class: Class::Guaranteed,
            share_max: None,
        }
    });
    let mut hardware = Hardware::default();
    let us = |key: &str| stress.get(key).number().map(|of| of as u64 * US);
    hardware.linger_ns = us("linger_us").unwrap_or(hardware.linger_ns);
    hardware.slice_ns = us("slice_us").unwrap_or(hardware.slice_ns);
    hardware.mark_ns = us("mark_us").unwrap_or(hardware.mark_ns);
    let jitter = match stress.get("late_looks").list() {
        [part, most] => {
            let number = |of: &Json| of.number().expect("a number");
            Some((number(part), number(most) as u64 * US))
        }
        _ => None,
    };
    let texts = of.get("invariants").list().iter().map(Json::text);
    let holds = of.get("holds_in_model").list().iter().map(Json::is_true);
    Scenario {
        name: of.get("name").text().to_owned(),
        mix: Mix {
            jobs: jobs.collect(),
            hardware,
            jitter,
        },
        invariants: texts.map(str::to_owned).zip(holds).collect(),
    }
}

/// Whether an invariant holds, and the worst figure that it is about. `none`: the sum of speeds
/// without a governor.
pub fn holds(invariant: &str, outcome: &Outcome, none: f64) -> (bool, f64) {
    let at_least = invariant.contains(">=");
    let (left, right) = invariant
        .split_once(if at_least { ">=" } else { "<=" })
        .expect("a comparison");
    let bound: f64 = match right.strip_suffix("*none") {
        Some(factor) => factor.parse::<f64>().expect("a factor") * none,
        None => right.parse().expect("a bound"),
    };
    let (what, which) = match left.split_once('[') {
        Some((what, at)) => {
            let at: usize = at.trim_end_matches(']').parse().expect("a job");
            (what, Some(at))
        }
        None => (left, None),
    };
    let figures: Vec<f64> = match what {
        "speed" => outcome.speed.clone(),
        "margin" => outcome.margin.clone(),
        "short" => outcome.short.clone(),
        "sum" => vec![outcome.sum],
        "turn" => vec![outcome.turn],
        "idle" => vec![outcome.idle],
        "p99" => outcome.p99.iter().map(|of| of.unwrap_or(0.0)).collect(),
        other => panic!("unknown figure {other}"),
    };
    let of = match which {
        Some(at) => figures[at],
        None if at_least => figures.into_iter().fold(f64::INFINITY, f64::min),
        None => figures.into_iter().fold(f64::NEG_INFINITY, f64::max),
    };
    (if at_least { of >= bound } else { of <= bound }, of)
}
