//! `transparency`: runs the same driver calls bare and under the preload library and compares every
//! answer.
//!
//! ```text
//! transparency [--calls N] [--per-sequence N] [--seed S] [--threads N] [--jobs N]
//!     [--driver PATH] [--preload PATH]
//!     [--sublet PATH] [--no-job] [--gentle] [--candidate-env NAME=VALUE] [--commit TEXT] [--json]
//! ```
//!
//! Exit status: 0 no difference, 1 differences, 125 wrong use.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use transparency::compare::{self, Findings, Options, Task, worker};

const USAGE: &str = "usage: transparency [--calls N] [--per-sequence N] [--seed S] [--threads N] [--jobs N] [--driver PATH] \
                     [--preload PATH] [--sublet PATH] [--no-job] [--gentle] [--candidate-env NAME=VALUE] [--commit TEXT] \
                     [--json]";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word.starts_with("worker")) {
        return work(&words);
    }
    match parse(&words) {
        Ok((options, commit, json)) => supervise(&options, &commit, json),
        Err(error) => {
            eprintln!("transparency: {error}\n{USAGE}");
            ExitCode::from(125)
        }
    }
}

fn work(words: &[String]) -> ExitCode {
    let kind = words[0].as_str();
    let (preloaded, governed) = (kind != "worker-bare", kind == "worker-governed");
    let parsed = words[1..].split_last().and_then(|(shown, task)| {
        let (from, to) = shown.split_once("..")?;
        Some((
            Task::from_words(task)?,
            from.parse().ok()?..to.parse().ok()?,
        ))
    });
    let Some((task, shown)) = parsed else {
        eprintln!("transparency: wrong words for a worker: {words:?}");
        return ExitCode::from(125);
    };
    match worker::run(task, shown, preloaded, governed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("transparency: {error}");
            ExitCode::from(125)
        }
    }
}

fn parse(words: &[String]) -> Result<(Options, String, bool), String> {
    let here = std::env::current_exe()
        .ok()
        .and_then(|path| path.parent().map(PathBuf::from))
        .unwrap_or_default();
    let mut options = Options {
        calls: 200_000,
        per_sequence: 20_000,
        seed: 1,
        threads: 3,
        jobs: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        hostile: true,
        driver: here.join("sim/libcuda.so.1"),
        preload: here.join("libsublet.so"),
        sublet: here.join("sublet"),
        candidate_env: Vec::new(),
        governed: true,
    };
    let (mut commit, mut json) = (String::from("unknown"), false);
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        let mut value = || rest.next().ok_or(format!("{word} needs a value"));
        let number = |text: &String| {
            text.parse::<u64>()
                .map_err(|_| format!("{word} {text}: this is no number"))
        };
        match word.as_str() {
            "--calls" => options.calls = number(value()?)?,
            "--per-sequence" => options.per_sequence = number(value()?)?.max(1),
            "--seed" => options.seed = number(value()?)?,
            "--threads" => options.threads = number(value()?)?.clamp(1, 64) as usize,
            "--jobs" => options.jobs = number(value()?)?.clamp(1, 256) as usize,
            "--driver" => options.driver = value()?.into(),
            "--preload" => options.preload = value()?.into(),
            "--sublet" => options.sublet = value()?.into(),
            "--candidate-env" => {
                let pair = value()?;
                let (name, text) = pair
                    .split_once('=')
                    .ok_or(format!("{word} {pair}: NAME=VALUE is wanted"))?;
                options
                    .candidate_env
                    .push((name.to_owned(), text.to_owned()));
            }
            "--no-job" => options.governed = false,
            "--gentle" => options.hostile = false,
            "--commit" => commit = value()?.clone(),
            "--json" => json = true,
            _ => return Err(format!("{word}: there is no such option")),
        }
    }
    for (what, path) in [
        ("driver", &mut options.driver),
        ("preload", &mut options.preload),
    ] {
        *path = std::fs::canonicalize(&*path)
            .map_err(|error| format!("--{what} {}: {error}", path.display()))?;
    }
    if options
        .driver
        .file_name()
        .is_none_or(|name| name != "libcuda.so.1")
    {
        // A vendor's file has its version in its name; the link beside it has the name that
        // programs open.
        let link = options.driver.with_file_name("libcuda.so.1");
        if !link.exists() {
            return Err(format!(
                "--driver {}: there is no libcuda.so.1 beside it",
                options.driver.display()
            ));
        }
        options.driver = link;
    }
    if options.governed && !options.sublet.exists() {
        return Err(format!(
            "--sublet {}: there is no such program (build it, or give --no-job)",
            options.sublet.display()
        ));
    }
    Ok((options, commit, json))
}

fn supervise(options: &Options, commit: &str, json: bool) -> ExitCode {
    println!("seed {}", options.seed);
    let live = std::io::stderr().is_terminal();
    let started = std::time::Instant::now();
    let findings = compare::all(options, |line| {
        if live {
            eprintln!("transparency: {line}");
        }
    });
    let findings = match findings {
        Ok(findings) => findings,
        Err(error) => {
            eprintln!("transparency: no place to work in: {error}");
            return ExitCode::from(125);
        }
    };
    for difference in &findings.differences {
        println!("DIFFERENCE {difference}");
    }
    report(
        options,
        &findings,
        commit,
        json,
        started.elapsed().as_secs_f64(),
    );
    if findings.differences.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn report(options: &Options, findings: &Findings, commit: &str, json: bool, seconds: f64) {
    let modes = if options.governed { 3 } else { 2 };
    let rows = [
        ("sequences", findings.sequences as f64, "sequences"),
        ("calls", findings.calls as f64, "calls"),
        ("probes", findings.probes as f64, "calls"),
        ("modes", f64::from(modes), "modes"),
        (
            "differences",
            findings.differences.len() as f64,
            "differences",
        ),
        ("symbols_called", findings.counts.len() as f64, "symbols"),
        (
            "categories_called",
            findings.categories().len() as f64,
            "categories",
        ),
        ("fatal_probes", findings.fatal.len() as f64, "calls"),
        ("seconds", seconds, "s"),
    ];
    for line in &findings.fatal {
        println!("not survived by the bare driver: {line}");
    }
    println!("device {}", findings.device);
    println!(
        "categories {}",
        findings
            .categories()
            .into_iter()
            .collect::<Vec<_>>()
            .join(" ")
    );
    for (name, value, unit) in rows {
        println!("{name:20} {value:>14} {unit}");
    }
    if json {
        let metrics: Vec<_> = rows
            .iter()
            .map(|(name, value, unit)| {
                let budget = (*name == "differences").then_some(0);
                serde_json::json!({"name": name, "value": value, "unit": unit, "baseline": null, "ratio": null,
                    "budget": budget})
            })
            .collect();
        let object = serde_json::json!({
            "commit": commit,
            "device": findings.device,
            "simulated": findings.device.contains("(simulated)"),
            "cpus": std::thread::available_parallelism().map_or(1, usize::from),
            "seed": options.seed,
            "sequences": findings.sequences,
            "calls": findings.calls,
            "differences": findings.differences.len(),
            "metrics": metrics,
        });
        println!("{object}");
    }
}
