//! Every packer on a trace where pairs pay: pairs made, and mean completion against no packer and
//! against `trial`, in one run.
//!
//! The trace is Gavel's with the measured pairs of V100, on which jobs run. Busy fractions come
//! from the pairs with every third kind of job (see `Trace::tell_pressure`): of pairs of two other
//! kinds a packer has seen nothing. For `opportunistic` every second job is
//! opportunistic.

mod last_line;

use std::path::PathBuf;
use std::process::ExitCode;

use cluster::report::Report;
use cluster::sim::{Config, Outcome};
use cluster::spec::ClusterSpec;
use cluster::sweep::sweep;
use cluster::trace::{self, Options, Trace};
use policy::cluster::{Choice, Class};
use serde_json::json;

const ORDER: &str = "2d-las";
const PACKERS: [&str; 6] = [
    "none",
    "trial",
    "greedy",
    "util-sum",
    "score-tree",
    "opportunistic",
];

fn run(jobs: Option<usize>) -> Result<Vec<(String, Outcome)>, String> {
    let spec: ClusterSpec = "96xV100"
        .parse()
        .map_err(|error| format!("the cluster: {error}"))?;
    let options = Options {
        gpu_types: spec.gpu_types.clone(),
        part: Some("6c71a0".into()),
        limit: jobs,
        ..Options::default()
    };
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data/gavel/philly_trace_seed0.csv");
    let read = || -> Result<Trace, String> {
        let mut trace = trace::read(&file, None, &options).map_err(|error| error.to_string())?;
        trace.tell_pressure();
        for job in trace.jobs.iter_mut().step_by(2) {
            job.profile.class = Class::Opportunistic;
        }
        Ok(trace)
    };
    let choices: Vec<Choice> = PACKERS
        .iter()
        .map(|packer| Choice {
            packer: (*packer != "none").then(|| (*packer).to_owned()),
            ..Choice::new(ORDER, "anywhere")
        })
        .collect();
    let config = Config {
        round_s: Some(300.0),
        seed: 1,
        ..Config::default()
    };
    let outcomes = sweep(&read()?, &spec, &choices, &[], &config, &|_, _| {});
    let outcomes = outcomes.map_err(|error| error.to_string())?;
    let names = PACKERS.iter().map(|name| (*name).to_owned());
    Ok(names.zip(outcomes).collect())
}

fn main() -> ExitCode {
    let (mut json, mut jobs) = (false, None);
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--json" => json = true,
            "--quick" => jobs = Some(600),
            other => {
                eprintln!("packers: `{other}`: usage: packers [--quick] [--json]");
                return ExitCode::from(2);
            }
        }
    }
    let runs = match run(jobs) {
        Ok(runs) => runs,
        Err(error) => {
            eprintln!("packers: {error}");
            return ExitCode::FAILURE;
        }
    };
    let reports: Vec<Report> = runs
        .iter()
        .map(|(_, outcome)| Report::of(outcome))
        .collect();
    let [bare, trial, ..] = reports.as_slice() else {
        return ExitCode::FAILURE;
    };
    let mut metrics = Vec::new();
    let mut rows = Vec::new();
    for ((name, outcome), report) in runs.iter().zip(&reports) {
        let [of_none, of_trial] = [bare, trial].map(|other| report.jct_mean_s / other.jct_mean_s);
        let row = json!({"packer": name, "packs": outcome.packs, "unpacks": outcome.unpacks,
            "jct_mean_s": report.jct_mean_s, "of_none": of_none, "of_trial": of_trial});
        println!("{row}");
        rows.push(row);
        if name != "none" {
            // Each packs, and packing pays.
            let without = if outcome.packs > 0 { 0.0 } else { 1.0 };
            let label = name.replace('-', "_");
            metrics.push(last_line::metric(
                &format!("{label}_without_pairs"),
                without,
                "",
                Some(0.0),
            ));
            metrics.push(last_line::metric(
                &format!("{label}_of_none"),
                of_none,
                "x",
                Some(1.0),
            ));
            metrics.push(last_line::metric(
                &format!("{label}_of_trial"),
                of_trial,
                "x",
                None,
            ));
        }
    }
    last_line::finish("packers", &metrics, &rows, json)
}
