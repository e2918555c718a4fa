//! Prints how much of the driver is covered. `--json` adds one object as the last line. See
//! `scripts/coverage`.

use std::process::ExitCode;

use serde_json::json;
use tests::Artefacts;
use tests::coverage::count;
use tests::elf::Library;

fn main() -> ExitCode {
    let as_json = std::env::args().any(|arg| arg == "--json");
    let artefacts = Artefacts::get();
    let coverage = count(
        &Library::read(&artefacts.preload()),
        &Library::read(&artefacts.simulated_driver()),
    );
    let mut rows = vec![
        ("csv_symbols".to_owned(), coverage.csv_symbols),
        ("table_symbols".to_owned(), coverage.table_symbols),
        ("hooked".to_owned(), coverage.hooked),
    ];
    for (action, count) in &coverage.by_action {
        rows.push((format!("action_{}", action.replace('-', "_")), *count));
    }
    rows.push(("sim_implemented".to_owned(), coverage.simulated));
    rows.push(("sim_not_supported".to_owned(), coverage.not_supported));
    rows.push(("unaccounted".to_owned(), coverage.unaccounted.len()));
    for (name, value) in &rows {
        println!("{name:<28} {value:>5}");
    }
    for line in &coverage.unaccounted {
        println!("unaccounted: {line}");
    }
    if as_json {
        let metrics: Vec<_> = rows
            .iter()
            .map(|(name, value)| {
                let budget = (name == "unaccounted").then_some(0);
                json!({"name": name, "value": value, "unit": "symbols", "baseline": null, "ratio": null, "budget": budget})
            })
            .collect();
        let commit = std::env::var("SUBLET_COMMIT").unwrap_or_else(|_| "unknown".to_owned());
        let mut object = json!({
            "commit": commit,
            "device": "none",
            "simulated": true,
            "cpus": std::thread::available_parallelism().map_or(1, usize::from),
            "metrics": metrics,
        });
        for (name, value) in &rows {
            object[name] = json!(value);
        }
        println!("{object}");
    }
    if coverage.unaccounted.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
