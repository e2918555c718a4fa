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
    rows.extend(rows::karuna::rows());
    rows.extend(rows::carbyne::rows(&seeds));
    if json {
        let lines: Vec<String> = rows.iter().map(as_json).collect();
        println!(
            "{{\n  \"simulated\": true,\n  \"seeds\": {},\n  \"rows\": {{\n{}\n  }}\n}}",
            seeds.len(),
            lines.join(",\n")
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
    let limit = match row.limit {
        Limit::AtMost(most) if most.is_infinite() => String::new(),
        Limit::AtMost(most) => format!(", \"at_most\": {most}, \"holds\": {}", row.holds()),
        Limit::AtLeast(least) => format!(", \"at_least\": {least}, \"holds\": {}", row.holds()),
    };
    format!(
        "    \"{}\": {{\"value\": {:.4}, \"unit\": \"{}\"{limit}}}",
        row.name, row.value, row.unit
    )
}
