//! Every packer on a trace where pairs pay: jobs put beside others, and mean completion against no
//! packer, against `trial`, and with more than two jobs on a GPU against two, in one run.
//!
//! The trace is Gavel's with the measured pairs of V100, on which jobs run. Busy fractions come
//! from the pairs with every third kind of job (see `Trace::tell_pressure`): of pairs of two other
//! kinds a packer has seen nothing. For `opportunistic` every second job is
//! opportunistic. The trace has no memory of its jobs: whether three or four of them would fit into
//! a GPU's is not known, so what more than two gain here is the most that they could.

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
const PACKERS: [&str; 14] = [
    "none",
    "trial",
    "greedy",
    "util-sum",
    "score-tree",
    "opportunistic",
    "trial:jobs=3",
    "trial:jobs=4",
    "greedy:jobs=3",
    "greedy:jobs=4",
    "util-sum:jobs=3",
    "util-sum:jobs=4",
    "score-tree:jobs=4",
    "opportunistic:jobs=4",
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
        // The same packer with two.
        let plain = name.split(':').next();
        let two = runs
            .iter()
            .position(|(other, _)| Some(other.as_str()) == plain);
        let of_two = two
            .filter(|_| name.contains(':'))
            .and_then(|at| reports.get(at))
            .map(|two| report.jct_mean_s / two.jct_mean_s);
        let row = json!({"packer": name, "packs": outcome.packs, "unpacks": outcome.unpacks,
            "most_on_gpu": outcome.most_on_gpu, "jct_mean_s": report.jct_mean_s,
            "jct_median_s": report.jct_median_s, "jct_p99_s": report.jct_p99_s,
            "makespan_s": report.makespan_s, "of_none": of_none, "of_trial": of_trial,
            "of_two": of_two});
        println!("{row}");
        rows.push(row);
        if name != "none" {
            // Each packs, and packing pays.
            let without = if outcome.packs > 0 { 0.0 } else { 1.0 };
            let label = name.replace([':', '-'], "_").replace('=', "_");
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
            if let Some(of_two) = of_two {
                metrics.push(last_line::metric(
                    &format!("{label}_of_two"),
                    of_two,
                    "x",
                    None,
                ));
            }
        }
    }
    last_line::finish("packers", &metrics, &rows, json)
}
