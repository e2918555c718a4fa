//! Prints the figures that the slice policies have to show, computed in virtual time from fixed
//! seeds: `cargo run --release -p policy --example rows -- [--json]`. Exits with 1 if a row misses
//! its limit, or is known to and is worse than that, or keeps it.

mod rows;

use std::ops::RangeInclusive;
use std::process::ExitCode;

use rows::Row;

/// Those by which Karuna's margin was chosen.
const KARUNA_SEEDS: RangeInclusive<u64> = 1..=288;
/// As many again, by which nothing was chosen.
const OTHER_SEEDS: RangeInclusive<u64> = 289..=576;

/// Rows that miss their limit, and what they may not be worse than.
const KNOWN_MISSES: [(&str, f64); 2] = [
    ("karuna_as_published_rest_p95_below_strict_pct", 24.3),
    (
        "karuna_other_seeds_as_published_rest_p95_below_strict_pct",
        20.0,
    ),
];

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
    rows.extend(rows::karuna::rows("", KARUNA_SEEDS));
    rows.extend(rows::karuna::rows("_other_seeds", OTHER_SEEDS));
    rows.extend(rows::carbyne::rows(&seeds));
    let known = |row: &Row| KNOWN_MISSES.iter().find(|(name, _)| *name == row.name);
    let rows: Vec<Row> = rows
        .into_iter()
        .map(|row| match known(&row) {
            Some((_, bound)) => row.missed(*bound),
            None => row,
        })
        .collect();
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
    let number = |value: Option<f64>| value.map_or("null".to_owned(), |value| value.to_string());
    let (budget, at_least) = row.limit.budget();
    let (budget, known) = (number(budget), number(row.known_miss));
    format!(
        "{{\"name\": \"{}\", \"value\": {:.4}, \"unit\": \"{}\", \"baseline\": null, \"ratio\": null, \
         \"budget\": {budget}, \"at_least\": {at_least}, \"known_miss\": {known}, \"verdict\": \"{}\"}}",
        row.name,
        row.value,
        row.unit,
        row.word()
    )
}
