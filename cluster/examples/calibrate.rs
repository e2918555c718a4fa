//! Runs the settings whose results are known from a reference model and prints how far off this
//! simulator is.
//!
//! The reference is a throw-away model with the same semantics (see
//! docs/explanation/simulation.md): decisions in rounds, gangs, no topology, no restart cost. Every
//! figure printed as `measured` comes from a run made here.

mod last_line;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cluster::report::Report;
use cluster::sim::{Config, Simulation};
use cluster::spec::ClusterSpec;
use cluster::sweep::context;
use cluster::trace::{self, Options, Trace};
use policy::cluster::Choice;
use serde::Serialize;

/// How a measured value is compared.
#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// A mean or a ratio: off by so many per cent.
    Pct,
    /// A fraction in per cent: off by so many points.
    Points,
    /// At most the reference.
    AtMost,
}

#[derive(Serialize)]
struct Line {
    what: String,
    kind: Kind,
    reference: f64,
    measured: f64,
    error: f64,
    /// What the error may be, up or down.
    limit: f64,
    /// The error that is known, where the row cannot keep its limit.
    known_miss: Option<f64>,
    verdict: &'static str,
}

/// Where the same reading of the same setting is run: the reference's figures have six digits.
const SAME_PCT: f64 = 0.05;
/// Where the reference leaves something open (who is paired, what a promise is worth later).
const NEAR_PCT: f64 = 3.0;
/// Fractions; the reference has some of them in whole per cent.
const POINTS: f64 = 1.0;
/// A known miss may become worse by so much, in per cent or points.
const KNOWN: f64 = 0.5;

/// One setting to run.
struct Setting<'a> {
    trace: &'a Trace,
    spec: &'a ClusterSpec,
    config: Config,
}

impl Setting<'_> {
    /// `policies`: order, and after it any of `+packer`, `!admission`, `=sizer`, `@placer`.
    fn run(&self, policies: &str) -> Report {
        let mut words = policies.split(' ');
        let mut choice = Choice::new(words.next().unwrap_or("fifo"), "anywhere");
        for (sign, name) in words.map(|word| word.split_at(1)) {
            match sign {
                "@" => choice.placer = name.into(),
                "+" => choice.packer = Some(name.into()),
                "!" => choice.admission = Some(name.into()),
                _ => choice.sizer = Some(name.into()),
            }
        }
        if choice.sizer.is_some() {
            // It takes the place of the order.
            choice.order = None;
        }
        let context = context(self.trace, self.spec, &[], &self.config);
        let scheduler = choice
            .scheduler(&context, self.config.seed)
            .expect("policies that act");
        let config = self.config.clone();
        let simulation = Simulation::new(self.trace, self.spec.state(), scheduler, config);
        let outcome = simulation.and_then(|run| run.run(|_| {})).expect("the run");
        Report::of(&outcome)
    }
}

fn rounds(round_s: f64, seed: u64) -> Config {
    Config {
        round_s: Some(round_s),
        seed,
        ..Config::default()
    }
}

#[derive(Default)]
struct Lines {
    lines: Vec<Line>,
}

impl Lines {
    fn add(&mut self, limit: f64, what: &str, kind: Kind, reference: f64, measured: f64) {
        self.judge((limit, None), what, kind, reference, measured);
    }

    /// `limits`: what the error may be, and the error of a row that is known to be off by more.
    fn judge(
        &mut self,
        limits: (f64, Option<f64>),
        what: &str,
        kind: Kind,
        reference: f64,
        measured: f64,
    ) {
        let error = match kind {
            Kind::Pct => 100.0 * (measured / reference - 1.0),
            Kind::Points => measured - reference,
            Kind::AtMost => (measured - reference).max(0.0),
        };
        let (limit, known_miss) = limits;
        // An error that is no number is past every limit.
        let kept = error.abs() <= limit;
        let verdict = match known_miss {
            None if kept => "holds",
            None => "missed",
            Some(_) if kept => "miss_gone",
            Some(known) if (error - known).abs() <= KNOWN => "known_miss",
            Some(_) => "worse",
        };
        let unit = if kind == Kind::Pct { "%" } else { "points" };
        println!(
            "{what:58} {reference:>12.2} {measured:>12.2} {error:>+8.2} {unit:6} within {limit}: {verdict}"
        );
        self.lines.push(Line {
            what: what.to_owned(),
            kind,
            reference,
            measured,
            error,
            limit,
            known_miss,
            verdict,
        });
    }
}

fn load(data: &Path, file: &str, cluster: &str, options: Options) -> (Trace, ClusterSpec) {
    let spec: ClusterSpec = cluster.parse().expect("a cluster");
    let options = Options {
        gpu_types: spec.gpu_types.clone(),
        ..options
    };
    match trace::read(&data.join(file), None, &options) {
        Ok(trace) => (trace, spec),
        Err(error) => {
            eprintln!("calibrate: {error}");
            std::process::exit(1);
        }
    }
}

const GAVEL: &str = "gavel/philly_trace_seed0.csv";

fn orders(lines: &mut Lines, data: &Path, seed: u64) {
    let rows = [
        (
            "6c71a0",
            "96xV100",
            [
                653_208.0, 615_683.0, 264_368.0, 161_689.0, 159_235.0, 170_952.0, 543_611.0,
                245_025.0,
            ],
            [71.7, 8.0],
        ),
        (
            "ee9e8c",
            "80xV100",
            [
                555_460.0, 404_352.0, 271_835.0, 245_619.0, 210_359.0, 310_784.0, 459_846.0,
                360_148.0,
            ],
            [58.0, 7.0],
        ),
    ];
    let names = [
        "fifo",
        "fifo-backfill",
        "sjf",
        "srtf",
        "srsf",
        "las",
        "2d-las:at=3250",
        "2d-las",
    ];
    for (vc, cluster, jcts, unfair) in rows {
        let options = Options {
            part: Some(vc.into()),
            ..Options::default()
        };
        let (trace, spec) = load(data, GAVEL, cluster, options);
        let setting = Setting {
            trace: &trace,
            spec: &spec,
            config: rounds(300.0, seed),
        };
        for (name, reference) in names.iter().zip(jcts) {
            let report = setting.run(name);
            let what = format!("{vc} {name}: mean JCT, s");
            lines.add(SAME_PCT, &what, Kind::Pct, reference, report.jct_mean_s);
            if *name == "fifo" {
                let what = format!("{vc} fifo: jobs with rho > 1.05, %");
                let measured = report.rho_unfair_pct;
                lines.add(POINTS, &what, Kind::Points, unfair[0], measured);
            }
        }
        let report = setting.run("worst-rho");
        let what = format!("{vc} worst-rho: jobs with rho > 1.05, %");
        lines.add(
            POINTS,
            &what,
            Kind::Points,
            unfair[1],
            report.rho_unfair_pct,
        );
        let what = format!("{vc} worst-rho: jobs with rho > 1.05, % (bound)");
        lines.add(0.0, &what, Kind::AtMost, 10.0, report.rho_unfair_pct);
    }
}

fn packers(lines: &mut Lines, data: &Path, seed: u64) {
    let packers = [
        "",
        " +trial:margin=0",
        " +greedy",
        " +greedy:least=1.2",
        " +greedy:least=1.5",
    ];
    let rows = [
        (
            "96xV100",
            "fifo-backfill",
            [615_683.0, 173_560.0, 161_656.0, 166_320.0, 201_348.0],
        ),
        (
            "96xV100",
            "2d-las",
            [245_025.0, 161_490.0, 149_723.0, 149_732.0, 152_670.0],
        ),
        (
            "96xV100",
            "srtf",
            [161_689.0, 152_811.0, 143_802.0, 143_220.0, 142_894.0],
        ),
        (
            "128xP100",
            "fifo-backfill",
            [426_481.0, 213_698.0, 210_630.0, 312_863.0, 373_042.0],
        ),
        (
            "128xP100",
            "2d-las",
            [239_006.0, 209_895.0, 205_549.0, 222_524.0, 234_417.0],
        ),
        (
            "128xP100",
            "srtf",
            [190_997.0, 202_649.0, 197_721.0, 189_627.0, 190_342.0],
        ),
    ];
    for (cluster, order, jcts) in rows {
        let options = Options {
            part: Some("6c71a0".into()),
            ..Options::default()
        };
        let (trace, spec) = load(data, GAVEL, cluster, options);
        let setting = Setting {
            trace: &trace,
            spec: &spec,
            config: rounds(300.0, seed),
        };
        let v100 = cluster == "96xV100";
        let mut bare = f64::NAN;
        for (packer, reference) in packers.iter().zip(jcts) {
            let report = setting.run(&format!("{order}{packer}"));
            if packer.is_empty() {
                bare = report.jct_mean_s;
                if v100 {
                    continue;
                }
            }
            let limit = if packer.is_empty() {
                SAME_PCT
            } else {
                NEAR_PCT
            };
            let what = format!("6c71a0 on {cluster}, {order}{packer}: mean JCT, s");
            lines.add(limit, &what, Kind::Pct, reference, report.jct_mean_s);
            if (order, *packer) == ("2d-las", " +greedy") {
                let reference = if v100 { 1.64 } else { 1.16 };
                let what = format!("6c71a0 on {cluster}, 2d-las: gain by packing, x");
                let gain = bare / report.jct_mean_s;
                lines.add(NEAR_PCT, &what, Kind::Pct, reference, gain);
            }
        }
    }
}

fn deadlines(lines: &mut Lines, data: &Path, seed: u64) {
    for (cluster, misses, best_min, kept_pct) in [
        (
            "1024",
            [63.9, 1.5, 0.2, 0.7],
            [1301.0, 321.0, 3560.0, 386.0],
            Some(17.4),
        ),
        (
            "1280",
            [30.6, 0.5, 0.2, 0.2],
            [352.0, 277.0, 452.0, 277.0],
            None,
        ),
    ] {
        let (trace, spec) = load(
            data,
            "chronus-philly/philly_mix1.csv",
            cluster,
            Options::default(),
        );
        let setting = Setting {
            trace: &trace,
            spec: &spec,
            config: rounds(600.0, seed),
        };
        let orders = ["fifo", "srtf", "edf", "srtf !leases:anew=1"];
        for (i, policies) in orders.iter().enumerate() {
            let report = setting.run(policies);
            let what = format!("Chronus mix on {cluster}, {policies}: deadlines missed, %");
            let missed = 100.0 - report.deadlines_met_pct;
            lines.add(POINTS, &what, Kind::Points, misses[i], missed);
            let what = format!("Chronus mix on {cluster}, {policies}: best-effort JCT, min");
            let measured = report.best_effort_jct_mean_s / 60.0;
            lines.add(NEAR_PCT, &what, Kind::Pct, best_min[i], measured);
        }
        // Promises that are kept; the reference makes them anew, and who has none waits less.
        for policies in ["srtf !leases", "srtf !leases:search=0"] {
            let report = setting.run(policies);
            let what = format!("Chronus mix on {cluster}, {policies}: deadlines missed, %");
            let missed = 100.0 - report.deadlines_met_pct;
            lines.add(POINTS, &what, Kind::Points, misses[3], missed);
            let what = format!("Chronus mix on {cluster}, {policies}: best-effort JCT, min");
            let measured = report.best_effort_jct_mean_s / 60.0;
            let limits = (NEAR_PCT, kept_pct);
            lines.judge(limits, &what, Kind::Pct, best_min[3], measured);
        }
    }
}

fn elastic(lines: &mut Lines, data: &Path, seed: u64) {
    let file = "elasticflow-itp/itp_jobs.csv";
    let options = |part: &str| Options {
        part: Some(part.into()),
        elastic: true,
        ..Options::default()
    };
    let shares = "fifo !minimum-share =minimum-share";
    let (trace, spec) = load(data, file, "128xA100", options("195job"));
    let setting = Setting {
        trace: &trace,
        spec: &spec,
        config: rounds(240.0, seed),
    };
    for (policies, jct, met) in [
        ("fifo-backfill", 27_677.0, None),
        ("fifo =rigid-srtf", 27_669.0, None),
        ("fifo =optimus", 19_742.0, None),
        ("fifo =max-min", 17_072.0, Some(81.0)),
        ("fifo =afs", 16_386.0, Some(82.6)),
    ] {
        let report = setting.run(policies);
        let what = format!("195 jobs on 128 A100, {policies}: mean JCT, s");
        lines.add(SAME_PCT, &what, Kind::Pct, jct, report.jct_mean_s);
        if let Some(met) = met {
            let what = format!("195 jobs on 128 A100, {policies}: deadlines met, %");
            lines.add(POINTS, &what, Kind::Points, met, report.deadlines_met_pct);
        }
    }
    for (policies, met) in [(shares, 90.3), ("edf", 45.1), ("fifo =edf-elastic", 27.2)] {
        let report = setting.run(policies);
        let what = format!("195 jobs on 128 A100, {policies}: deadlines met, %");
        lines.add(POINTS, &what, Kind::Points, met, report.deadlines_met_pct);
        if policies == shares {
            let what = "195 jobs on 128 A100, minimum-share: mean JCT of the admitted, s";
            lines.add(NEAR_PCT, what, Kind::Pct, 17_521.0, report.jct_mean_s);
        }
    }
}

/// Pollux' own simulator: 16 nodes of 4 T4, rounds of a minute, each start and restart half a
/// minute.
fn goodput(lines: &mut Lines, data: &Path, seed: u64) {
    let options = Options {
        part: Some("6".into()),
        ..Options::default()
    };
    let file = "pollux-adaptdl/workloads.csv";
    let (trace, spec) = load(data, file, "16x4xT4", options);
    let setting = Setting {
        trace: &trace,
        spec: &spec,
        config: Config {
            restart_s: 30.0,
            start_s: 30.0,
            ..rounds(60.0, seed)
        },
    };
    let mut means = Vec::new();
    for (name, policies, reference) in [
        ("Pollux", "fifo =pollux @consolidate-relaxed", 2446.1),
        ("Tiresias", "2d-las @emptiest", 3469.7),
        ("Optimus", "fifo =optimus:single=1 @emptiest", 5301.9),
    ] {
        let report = setting.run(policies);
        let what = format!("Pollux' workload 6, {name} ({policies}): mean JCT, s");
        lines.add(NEAR_PCT, &what, Kind::Pct, reference, report.jct_mean_s);
        means.push(report.jct_mean_s);
    }
    let ordered = means.windows(2).all(|pair| pair[0] < pair[1]);
    let what = "Pollux' workload 6: orders other than Pollux < Tiresias < Optimus";
    lines.add(0.0, what, Kind::AtMost, 0.0, f64::from(u8::from(!ordered)));
}

/// The parts that can be run alone.
type Part = (&'static str, fn(&mut Lines, &Path, u64));
const PARTS: [Part; 5] = [
    ("orders", orders),
    ("packers", packers),
    ("sizers", elastic),
    ("leases", deadlines),
    ("goodput", goodput),
];

/// Parts that take seconds in a debug build too.
const QUICK: [&str; 1] = ["goodput"];

fn main() -> ExitCode {
    let (mut json, mut quick) = (false, false);
    let mut only = None;
    let mut seed = 1;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => {
                json = true;
                continue;
            }
            "--quick" => {
                quick = true;
                continue;
            }
            _ => {}
        }
        match (argument.as_str(), arguments.next()) {
            ("--seed", Some(value)) if value.parse::<u64>().is_ok() => {
                seed = value.parse().unwrap_or(1)
            }
            ("--only", Some(value)) if PARTS.iter().any(|part| part.0 == value) => {
                only = Some(value);
            }
            _ => {
                let parts = PARTS.map(|part| part.0).join("|");
                eprintln!(
                    "calibrate: `{argument}`: usage: calibrate [--quick] [--only {parts}] [--seed N] [--json]"
                );
                return ExitCode::from(2);
            }
        }
    }
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data");
    let mut lines = Lines::default();
    for (name, run) in PARTS {
        let chosen = only.as_deref().is_none_or(|only| only == name);
        if chosen && (!quick || QUICK.contains(&name)) {
            run(&mut lines, &data, seed);
        }
    }
    let lines = lines.lines;
    let worst = |kind| {
        let such = lines.iter().filter(|line| line.kind == kind);
        let errors = such.filter(|line| line.known_miss.is_none());
        errors.map(|line| line.error.abs()).fold(0.0, f64::max)
    };
    let count = |verdicts: &[&str]| {
        let such = lines.iter().filter(|line| verdicts.contains(&line.verdict));
        such.count() as f64
    };
    for line in &lines {
        let said = match line.verdict {
            "missed" => "off by more than its limit",
            "worse" => "not off by what is known of it",
            "miss_gone" => "known to be off by more than its limit, and is not: change the row",
            _ => continue,
        };
        let (what, error, limit) = (&line.what, line.error, line.limit);
        eprintln!("calibrate: {what}: off by {error:+.3}, limit {limit}: {said}");
    }
    let past = count(&["missed", "worse", "miss_gone"]);
    let metrics = [
        last_line::metric("rows", lines.len() as f64, "", None),
        last_line::metric("rows_past_their_limit", past, "", Some(0.0)),
        last_line::metric("known_misses", count(&["known_miss"]), "", None),
        last_line::metric("worst_error_pct", worst(Kind::Pct), "%", None),
        last_line::metric("worst_error_points", worst(Kind::Points), "points", None),
    ];
    last_line::finish("calibrate", &metrics, &lines, json)
}
