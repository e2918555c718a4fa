//! Prints the figures of systems of the field, run here, with what was published beside them:
//! `cargo run --release -p cluster --example systems -- [--quick] [--only SYSTEM] [--json]`.
//!
//! Exits with 1 if a row misses its limit, is worse than its known miss allows, or keeps a limit
//! that it is said to miss.

mod rows;

use std::process::ExitCode;
use std::time::Instant;

use rows::{SYSTEMS, Spec, Verdict, data};
use serde_json::{Value, json};

fn main() -> ExitCode {
    let (mut json, mut quick, mut only) = (false, false, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match (argument.as_str(), only.is_none()) {
            ("--json", _) => json = true,
            ("--quick", _) => quick = true,
            ("--only", true) => only = Some(arguments.next().unwrap_or_default()),
            _ => only = Some("?".to_owned()),
        }
    }
    let known = |name: &String| SYSTEMS.iter().any(|system| system.name == name);
    if only.as_ref().is_some_and(|name| !known(name)) {
        let names: Vec<&str> = SYSTEMS.iter().map(|system| system.name).collect();
        eprintln!(
            "systems: usage: systems [--quick] [--only {}] [--json]",
            names.join("|")
        );
        return ExitCode::from(2);
    }
    let mut metrics = Vec::new();
    let mut failed = Vec::new();
    for system in SYSTEMS {
        let chosen = only.as_ref().is_none_or(|only| only == system.name);
        if !chosen || (quick && !system.quick) {
            continue;
        }
        let began = Instant::now();
        let figures = system.figures(&data());
        for row in system.rows {
            let value = figures[row.name];
            let verdict = row.verdict(value);
            let said = row.limit.said(row.bound(), verdict);
            println!(
                "{:44} {value:>12.3} {:12} {said:32} published: {}",
                row.name, row.unit, row.published
            );
            if let Some(miss) = row.known_miss {
                println!("{:44} {}", "", miss.why);
            }
            if verdict.fails() {
                failed.push(format!("{}: {value:.4} is {said}", row.name));
            }
            metrics.push(metric(row, value, verdict));
        }
        let took_s = began.elapsed().as_secs_f64();
        eprintln!("systems: {} took {took_s:.1} s", system.name);
    }
    if json {
        let commit = std::env::var("SUBLET_COMMIT").unwrap_or_else(|_| "unknown".into());
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let line = json!({"commit": commit, "device": "none (virtual time)", "simulated": true,
            "cpus": cpus, "metrics": metrics});
        println!("{line}");
    }
    for line in &failed {
        eprintln!("systems: {line}");
    }
    ExitCode::from(u8::from(!failed.is_empty()))
}

fn metric(row: &Spec, value: f64, verdict: Verdict) -> Value {
    let (budget, at_least) = row.limit.budget();
    let known = row
        .known_miss
        .map(|miss| json!({"measured": miss.measured, "bound": miss.bound, "why": miss.why}));
    let value = (value * 1e4).round() / 1e4;
    json!({"name": row.name, "value": value, "unit": row.unit, "baseline": null,
        "ratio": null, "budget": budget, "at_least": at_least, "verdict": verdict.word(),
        "known_miss": known, "published": row.published})
}
