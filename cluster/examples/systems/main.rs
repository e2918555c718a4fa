//! Prints the figures of systems of the field, run here, with what was published beside them:
//! `cargo run --release -p cluster --example systems -- [--only SYSTEM] [--json]`. Exits with 1 if
//! a row misses its limit.

mod rows;

use std::process::ExitCode;

use rows::{Limit, SYSTEMS, data};
use serde_json::json;

fn main() -> ExitCode {
    let (mut json, mut only) = (false, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match (argument.as_str(), only.is_none()) {
            ("--json", _) => json = true,
            ("--only", true) => only = Some(arguments.next().unwrap_or_default()),
            _ => only = Some("?".to_owned()),
        }
    }
    let known = |name: &String| SYSTEMS.iter().any(|system| system.name == name);
    if only.as_ref().is_some_and(|name| !known(name)) {
        let names: Vec<&str> = SYSTEMS.iter().map(|system| system.name).collect();
        eprintln!(
            "systems: usage: systems [--only {}] [--json]",
            names.join("|")
        );
        return ExitCode::from(2);
    }
    let mut metrics = Vec::new();
    let mut missed = Vec::new();
    for system in SYSTEMS {
        if only.as_ref().is_some_and(|only| only != system.name) {
            continue;
        }
        let figures = system.figures(&data());
        for row in system.rows {
            let value = figures[row.name];
            println!(
                "{:44} {value:>12.3} {:12} {:10} published: {}",
                row.name,
                row.unit,
                row.verdict(value),
                row.published
            );
            if !row.holds(value) {
                missed.push(row.name);
            }
            let (budget, at_least) = match row.limit {
                Limit::Reported => (None, false),
                Limit::AtMost(most) => (Some(most), false),
                Limit::AtLeast(least) => (Some(least), true),
            };
            let value = (value * 1e4).round() / 1e4;
            metrics.push(
                json!({"name": row.name, "value": value, "unit": row.unit, "baseline": null,
                "ratio": null, "budget": budget, "at_least": at_least, "published": row.published}),
            );
        }
    }
    if json {
        let commit = std::env::var("SUBLET_COMMIT").unwrap_or_else(|_| "unknown".into());
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let line = json!({"commit": commit, "device": "none (virtual time)", "simulated": true,
            "cpus": cpus, "metrics": metrics});
        println!("{line}");
    }
    if missed.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("systems: missed: {}", missed.join(", "));
    ExitCode::FAILURE
}
