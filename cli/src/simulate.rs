//! `sublet simulate`: a trace, a cluster, policies; what came out, as a table, JSON or a picture.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, anyhow};
use cluster::plot::{self, Series};
use cluster::report::{Report, completion_times};
use cluster::sim::{Config, Outcome};
use cluster::spec::ClusterSpec;
use cluster::sweep::sweep;
use cluster::trace::{self, Options, Trace};
use indicatif::{ProgressBar, ProgressStyle};
use policy::Kind;
use policy::cluster::Choice;
use policy::cluster::catalogue;
use serde_json::{Value, json};

use crate::args::{Policies, Simulate, SimulateCommand, SimulateRun};
use crate::exit::Result;
use crate::json::object;
use crate::table::{Align, Table};

mod cells;
mod plan;
mod serve;
mod summary;
mod what_if;

/// What is printed.
///
/// # Errors
/// A file, cluster, policy or parameter that is wrong; a run that cannot end.
pub fn simulate(args: &Simulate) -> Result<String> {
    match &args.command {
        Some(SimulateCommand::Policies(args)) => Ok(policies(args)),
        Some(SimulateCommand::Trace(args)) => summary::summary(args),
        Some(SimulateCommand::WhatIf(args)) => what_if::what_if(args),
        Some(SimulateCommand::Plan(args)) => plan::plan(args),
        Some(SimulateCommand::Cells(args)) => cells::cells(args),
        Some(SimulateCommand::Serve(args)) => serve::serve(args),
        None => run_trace(&args.run),
    }
}

/// What a run is about, as read.
struct Input {
    spec: ClusterSpec,
    trace: Trace,
    skipped: usize,
    past_gpu_s: Vec<f64>,
    config: Config,
}

fn input(args: &SimulateRun) -> Result<Input> {
    let (Some(file), Some(text)) = (&args.trace, &args.cluster) else {
        return Err(anyhow!("--trace FILE and --cluster SPEC say what to simulate").into());
    };
    let spec = ClusterSpec::parse(text)?;
    let options = Options {
        gpu_types: spec.gpu_types.clone(),
        part: args.part.clone(),
        elastic: !args.sizer.is_empty() || args.elastic,
        limit: args.limit,
    };
    let mut trace = trace::read(file, args.speeds.as_deref(), &options)?;
    let largest = args.max_gpus.unwrap_or(u32::MAX);
    let before = trace.jobs.len();
    trace.jobs.retain(|job| job.gpus <= largest);
    let skipped = trace.skipped + before - trace.jobs.len();
    let past_gpu_s = match &args.past {
        None => Vec::new(),
        Some(file) => {
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            let mut samples = Vec::new();
            for (index, line) in text.lines().enumerate().skip(1) {
                let sample: f64 = line.trim().parse().map_err(|_| {
                    let at = index + 1;
                    anyhow!(
                        "{}:{at}:1: `{line}` is not a number of GPU-seconds",
                        file.display()
                    )
                })?;
                samples.push(sample);
            }
            samples
        }
    };
    if let Some(file) = &args.sensitivity {
        let table = trace::read_sensitivity(file)?;
        if trace.tell_sensitivity(&table) == 0 {
            let mut known: Vec<&str> = table.keys().map(|(model, _)| model.as_str()).collect();
            known.sort_unstable();
            known.dedup();
            return Err(anyhow!(
                "{}: no job of the trace is of a model that it has ({}): nothing would depend on cores and memory",
                file.display(),
                known.join(", ")
            )
            .into());
        }
    }
    let config = Config {
        round_s: args.round,
        restart_s: args.restart,
        start_s: args.start,
        noise: args.noise,
        host: args.host,
        seed: args.seed,
        pair_window_s: None,
    };
    Ok(Input {
        spec,
        trace,
        skipped,
        past_gpu_s,
        config,
    })
}

/// All runs, on a terminal with a bar and the time left.
fn run_all(input: &Input, choices: &[Choice], json: bool) -> Result<Vec<Outcome>> {
    let bar = match json {
        true => ProgressBar::hidden(),
        // Hidden as well where standard error is no terminal.
        false => ProgressBar::new(0),
    };
    let style = ProgressStyle::with_template("[{bar:25}] {percent:3} % of the jobs, {eta} left");
    bar.set_style(style.context("the bar")?.progress_chars("## "));
    // Of two runs one may report late what the other has passed already.
    let most = AtomicUsize::new(0);
    let progress = |done: usize, all: usize| {
        let before = most.fetch_max(done, Ordering::Relaxed);
        bar.set_length(all as u64);
        bar.set_position(before.max(done) as u64);
    };
    let Input {
        spec,
        trace,
        past_gpu_s,
        config,
        ..
    } = input;
    let outcomes = sweep(trace, spec, choices, past_gpu_s, config, &progress);
    bar.finish_and_clear();
    Ok(outcomes?)
}

fn run_trace(args: &SimulateRun) -> Result<String> {
    let input = input(args)?;
    let choices = choices(args);
    let outcomes = run_all(&input, &choices, args.json)?;
    let Input {
        spec,
        trace,
        skipped,
        ..
    } = input;
    let text = args.cluster.as_deref().unwrap_or_default();
    let reports: Vec<Report> = outcomes.iter().map(Report::of).collect();
    if let Some(file) = &args.plot {
        let series: Vec<Series> = choices
            .iter()
            .zip(&outcomes)
            .map(|(choice, outcome)| Series {
                name: choice.to_string(),
                jct_s: completion_times(outcome),
            })
            .collect();
        let title = format!("{} on {text}", file_name(args));
        let picture = plot::svg(&title, &series).map_err(|error| anyhow!("no picture: {error}"))?;
        std::fs::write(file, picture)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    if args.json {
        let runs: Vec<Value> = choices
            .iter()
            .zip(&reports)
            .map(|(choice, report)| {
                json!({"policies": choice.to_string(), "order": choice.order, "packer": choice.packer,
                    "placer": choice.placer, "admission": choice.admission, "sizer": choice.sizer, "report": report})
            })
            .collect();
        let all = json!({"trace": args.trace, "cluster": text, "seed": args.seed, "round_s": args.round,
            "restart_s": args.restart, "start_s": args.start, "noise": args.noise, "skipped": skipped,
            "offered_load": trace.offered_load(spec.gpus()), "runs": runs});
        return Ok(object(all));
    }
    let mut head = format!(
        "{} jobs on {} GPUs, offered load {:.2}",
        trace.jobs.len(),
        spec.gpus(),
        trace.offered_load(spec.gpus())
    );
    if skipped > 0 {
        head += &format!("; {skipped} jobs left out{}", summary::reasons(&trace));
    }
    if !trace.unused.is_empty() {
        head += &format!("; columns not used: {}", trace.unused.join(", "));
    }
    Ok(format!("{head}\n{}", table(&choices, &reports)))
}

fn file_name(args: &SimulateRun) -> String {
    let name = args.trace.as_ref().and_then(|file| file.file_stem());
    name.map_or(String::new(), |name| name.to_string_lossy().into_owned())
}

/// Every order with every packer and placer, and every sizer with every placer.
fn choices(args: &SimulateRun) -> Vec<Choice> {
    let or_none = |list: &[String]| match list {
        [] => vec![None],
        list => list
            .iter()
            .map(|name| Some(name.clone()).filter(|name| name != "none"))
            .collect(),
    };
    let orders = or_none(&args.order);
    let mut choices = Vec::new();
    for order in &orders {
        for sizer in or_none(&args.sizer) {
            for packer in or_none(&args.packer) {
                for placer in &args.placer {
                    choices.push(Choice {
                        order: order.clone(),
                        packer: packer.clone(),
                        placer: placer.clone(),
                        admission: args.admission.clone(),
                        sizer: sizer.clone(),
                    });
                }
            }
        }
    }
    choices
}

fn table(choices: &[Choice], reports: &[Report]) -> String {
    let right = |name| (name, Align::Right);
    let mut table = Table::new(&[
        ("POLICIES", Align::Left),
        right("JCT mean s"),
        right("median"),
        right("p99"),
        right("makespan s"),
        right("wait s"),
        right("fragm."),
        right("util"),
        right("rho>1.05"),
        right("rho p99"),
        right("met"),
        right("preempt"),
        right("packs"),
        right("unpack"),
    ]);
    for (choice, report) in choices.iter().zip(reports) {
        let whole = |value: f64| format!("{value:.0}");
        let percent = |value: f64| format!("{value:.1}%");
        let met = match report.deadlines {
            0 => "-".to_owned(),
            _ => percent(report.deadlines_met_pct),
        };
        table.row(vec![
            choice.to_string(),
            whole(report.jct_mean_s),
            whole(report.jct_median_s),
            whole(report.jct_p99_s),
            whole(report.makespan_s),
            whole(report.wait_mean_s),
            whole(report.wait_fragmentation_s),
            percent(100.0 * report.utilisation),
            percent(report.rho_unfair_pct),
            format!("{:.1}", report.rho_p99),
            met,
            report.preemptions.to_string(),
            report.packs.to_string(),
            report.unpacks.to_string(),
        ]);
    }
    table.render()
}

/// The table of all policies, from what they say of themselves.
fn policies(args: &Policies) -> String {
    let entries = catalogue::entries();
    let words = |entry: &catalogue::Description| {
        let objectives: Vec<_> = entry.tags.objectives.iter().map(|o| o.word()).collect();
        let manners: Vec<_> = entry.tags.manners.iter().map(|m| m.word()).collect();
        (objectives, manners)
    };
    if args.json {
        let rows: Vec<Value> = entries
            .iter()
            .map(|entry| {
                let (objectives, manners) = words(entry);
                let parameters: BTreeMap<_, _> = entry
                    .params
                    .iter()
                    .map(|param| {
                        let default = default(&param.kind);
                        (param.name, json!({"default": default, "about": param.summary}))
                    })
                    .collect();
                json!({"slot": entry.slot.word(), "name": entry.name, "about": entry.summary, "source": entry.tags.source,
                    "objectives": objectives, "manners": manners, "parameters": parameters})
            })
            .collect();
        return object(json!({ "policies": rows }));
    }
    let columns = ["SLOT", "NAME", "OBJECTIVE", "MANNER", "SOURCE", "WHAT"];
    let mut table = Table::new(&columns.map(|name| (name, Align::Left)));
    for entry in &entries {
        let (objectives, manners) = words(entry);
        let keys: Vec<_> = entry.params.iter().map(|param| param.name).collect();
        let name = match keys[..] {
            [] => entry.name.to_owned(),
            _ => format!("{}[:{}]", entry.name, keys.join(",")),
        };
        table.row(vec![
            entry.slot.word().to_owned(),
            name,
            objectives.join(", "),
            manners.join(", "),
            entry.tags.source.to_owned(),
            entry.summary.to_owned(),
        ]);
    }
    table.render()
}

fn default(kind: &Kind) -> Value {
    match kind {
        Kind::Number { default, .. } => json!([default]),
        Kind::Whole { default, .. } => json!([default]),
        Kind::Numbers { default, .. } => json!(default),
        Kind::Choice { default, .. } => json!(default),
        Kind::Flag { default } => json!(default),
        Kind::Text { default } => json!(default),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::args::{self, Command};

    fn run(words: &[&str]) -> Result<String> {
        let words = ["sublet", "simulate"]
            .iter()
            .chain(words)
            .map(OsString::from);
        match args::parse(words).unwrap().command {
            Command::Simulate(args) => simulate(&args),
            other => panic!("{other:?}"),
        }
    }

    fn wrong(words: &[&str]) -> String {
        run(words).unwrap_err().line()
    }

    #[test]
    fn a_sweep_comes_as_table_json_and_picture() {
        let folder = tempfile::tempdir().unwrap();
        let (trace, plot) = (folder.path().join("t.csv"), folder.path().join("p.svg"));
        std::fs::write(
            &trace,
            "arrival_s,duration_s,num_gpus\n0,100,4\n1,10,1\n2,10,1\n",
        )
        .unwrap();
        let words = [
            "--trace",
            trace.to_str().unwrap(),
            "--cluster",
            "4",
            "--order",
            "fifo",
            "--order",
            "srtf",
            "--plot",
            plot.to_str().unwrap(),
        ];
        let table = run(&words).unwrap();
        assert_eq!(table.lines().count(), 4, "{table}");
        let json: Value =
            serde_json::from_str(&run(&[&words[..], &["--json"]].concat()).unwrap()).unwrap();
        // FIFO: the others wait for the gang. SRTF: they go first, and the gang waits for 11 s.
        let mean = |run: usize| json["runs"][run]["report"]["jct_mean_s"].as_f64().unwrap();
        assert!((mean(0) - (100.0 + 109.0 + 108.0) / 3.0).abs() < 1e-6);
        assert!((mean(1) - (111.0 + 10.0 + 10.0) / 3.0).abs() < 1e-6);
        assert!(std::fs::read_to_string(&plot).unwrap().contains("fifo"));
    }

    #[test]
    fn mistakes_name_what_was_probably_meant() {
        let folder = tempfile::tempdir().unwrap();
        let trace = folder.path().join("t.csv");
        std::fs::write(&trace, "arrival_s,duration_s,num_gpus\n0,100,4\n").unwrap();
        let with = |more: &[&str]| {
            let words = ["--trace", trace.to_str().unwrap()];
            wrong(&[&words[..], more].concat())
        };
        for (words, expected) in [
            (
                &["--cluster", "8", "--order", "srft"][..],
                "did you mean `srtf`?",
            ),
            (
                &["--cluster", "8", "--packer", "trail"],
                "did you mean `trial`?",
            ),
            (
                &["--cluster", "8", "--order", "2d-las:aat=3"],
                "did you mean `at`?",
            ),
            (&["--cluster", "8", "--order", "zzzzzzzzzz"], "known: fifo,"),
            (&["--cluster", "2"], "asks for 4 GPUs, the cluster has 2"),
            (&["--cluster", "0"], "at least one GPU"),
            (&["--cluster", "8", "--round", "0"], "above 0"),
            (&[], "--cluster"),
        ] {
            let line = with(words);
            assert!(line.contains(expected), "{words:?}: {line}");
        }
    }

    #[test]
    fn another_agreement_is_reported_by_slack() {
        let folder = tempfile::tempdir().unwrap();
        let trace = folder.path().join("t.csv");
        let rows =
            "arrival_s,duration_s,num_gpus,deadline_s\n0,100,1,100\n0,100,1,150\n0,100,1,300\n";
        std::fs::write(&trace, rows).unwrap();
        let words = |sla, slack| {
            let file = trace.to_str().unwrap();
            [
                "what-if",
                "--trace",
                file,
                "--cluster",
                "1",
                "--order",
                "fifo",
                "--order",
                "edf",
                "--sla",
                sla,
                "--slack",
                slack,
            ]
        };
        let json = |sla, slack| -> Value {
            let text = run(&[&words(sla, slack)[..], &["--json"]].concat()).unwrap();
            serde_json::from_str(&text).unwrap()
        };
        // One after the other: done at 100, 200 and 300.
        let kept = |json: &Value, at: usize| json["runs"][at]["kept_pct"].as_f64().unwrap();
        let deadlines = json("d:1", "1");
        assert!((kept(&deadlines, 0) - 200.0 / 3.0).abs() < 1e-9);
        let report = &deadlines["runs"][0]["report"]["deadlines_met_pct"];
        assert_eq!(
            report.as_f64().unwrap(),
            kept(&deadlines, 0),
            "a step is a deadline"
        );
        let steps = json("1x:1,2x:0.5", "1,1.5,3");
        let fifo: Vec<f64> = (0..3).map(|at| kept(&steps, at)).collect();
        assert!((fifo[0] - 50.0).abs() < 1e-9, "1 + 0.5 of 3: {fifo:?}");
        assert!(fifo.is_sorted() && fifo[2] == 100.0, "{fifo:?}");
        let table = run(&words("2x:1", "1,2")).unwrap();
        assert_eq!(table.lines().count(), 1 + 4, "{table}");
        let bad = words("2x", "1");
        let bad = ["sublet", "simulate"]
            .iter()
            .chain(&bad)
            .map(OsString::from);
        assert!(args::parse(bad).is_err(), "a step without a reward");
        assert!(wrong(&words("2x:1", "0")).contains("slack"));
    }

    #[test]
    fn every_policy_is_in_the_table() {
        let table = run(&["policies"]).unwrap();
        assert_eq!(table.lines().count(), 1 + catalogue::entries().len());
        let json: Value = serde_json::from_str(&run(&["policies", "--json"]).unwrap()).unwrap();
        assert!(
            json["policies"]
                .as_array()
                .unwrap()
                .iter()
                .all(|row| row["objectives"][0].is_string())
        );
    }
}
