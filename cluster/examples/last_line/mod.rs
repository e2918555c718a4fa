//! The last line of a measuring program: one JSON object with the keys that the scripts in
//! `scripts/bench` print as well.

use std::process::ExitCode;

use serde::Serialize;
use serde_json::{Value, json};

/// A figure; `budget` is the most it may be, where it is required.
#[must_use]
pub fn metric(name: &str, value: f64, unit: &str, budget: Option<f64>) -> Value {
    let value = (value * 1e4).round() / 1e4;
    json!({"name": name, "value": value, "unit": unit, "baseline": null, "ratio": null,
        "budget": budget})
}

/// Prints the metrics and, if asked, the JSON line; fails if a metric is above its budget.
pub fn finish(program: &str, metrics: &[Value], rows: &[impl Serialize], json: bool) -> ExitCode {
    let figure = |metric: &Value, key: &str| metric[key].as_f64();
    let name = |metric: &Value| metric["name"].as_str().unwrap_or_default().to_owned();
    println!();
    for metric in metrics {
        let (value, unit) = (figure(metric, "value"), metric["unit"].as_str());
        let budget = figure(metric, "budget").map_or("-".into(), |most| most.to_string());
        let (value, unit) = (value.unwrap_or(f64::NAN), unit.unwrap_or_default());
        println!("{:32} {value:>14.4} {unit:8} budget {budget}", name(metric));
    }
    let missed: Vec<String> = metrics
        .iter()
        .filter(|metric| {
            let value = figure(metric, "value").unwrap_or(f64::INFINITY);
            figure(metric, "budget").is_some_and(|most| value > most)
        })
        .map(name)
        .collect();
    if json {
        let commit = std::env::var("SUBLET_COMMIT").unwrap_or_else(|_| "unknown".into());
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let line = json!({"commit": commit, "device": "none (virtual time)", "simulated": true,
            "cpus": cpus, "metrics": metrics, "rows": rows});
        println!("{line}");
    }
    if missed.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("{program}: above the budget: {}", missed.join(", "));
    ExitCode::FAILURE
}
