//! Prints the figures that the slice policies have to show, computed in virtual time from fixed
//! seeds: `cargo run --release -p policy --example rows -- [--json]`. Exits with 1 if a row misses
//! its limit.

mod rows;

use std::process::ExitCode;

use rows::{Limit, Row};

fn main() -> ExitCode {
    let json = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--json") => true,
        Some(other) => {
            eprintln!("rows: unknown argument {other:?}; the only one there is: --json");
            return ExitCode::from(2);
        }
    };
    let seeds: Vec<u64> = (1..=24).collect();
    let mut rows = rows::fairness::rows(&seeds);
    rows.extend(rows::salus::rows(&seeds));
    rows.extend(rows::karuna::rows(1..=288));
    rows.extend(rows::carbyne::rows(&seeds));
    if json {
        // As every measuring script: one object on one line.
        let metrics: Vec<String> = rows.iter().map(as_json).collect();
        let commit = std::env::var("SUBLET_COMMIT").unwrap_or_else(|_| "unknown".to_owned());
        println!(
            "{{\"commit\": \"{commit}\", \"device\": \"none (virtual time)\", \"simulated\": true, \"cpus\": {}, \
             \"seeds\": {}, \"metrics\": [{}]}}",
            std::thread::available_parallelism().map_or(1, usize::from),
            seeds.len(),
            metrics.join(", ")
        );
    } else {
        for row in &rows {
            println!(
                "{:48} {:>9.3}  {:9} {}",
                row.name,
                row.value,
                row.verdict(),
                row.unit
            );
        }
    }
    ExitCode::from(u8::from(!rows.iter().all(rows::Row::holds)))
}

fn as_json(row: &Row) -> String {
    let (budget, at_least) = match row.limit {
        Limit::Reported => ("null".to_owned(), false),
        Limit::AtMost(most) => (most.to_string(), false),
        Limit::AtLeast(least) => (least.to_string(), true),
    };
    format!(
        "{{\"name\": \"{}\", \"value\": {:.4}, \"unit\": \"{}\", \"baseline\": null, \"ratio\": null, \
         \"budget\": {budget}, \"at_least\": {at_least}}}",
        row.name, row.value, row.unit
    )
}
