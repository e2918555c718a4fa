//! The figures of `examples/rows`, held to their limits. The example prints them for more seeds.

#[path = "../examples/rows/rows.rs"]
mod rows;

/// Other seeds than the example's.
const SEEDS: [u64; 8] = [101, 102, 103, 104, 105, 106, 107, 108];

fn hold(rows: &[rows::Row]) {
    for row in rows {
        println!(
            "{} {:.3} {} ({})",
            row.name,
            row.value,
            row.verdict(),
            row.unit
        );
    }
    let missed: Vec<&str> = (rows.iter())
        .filter(|row| !row.holds())
        .map(|row| row.name.as_str())
        .collect();
    assert!(missed.is_empty(), "{missed:?}");
}

#[test]
fn stride_is_fair() {
    hold(&rows::fairness::rows(&SEEDS));
}

#[test]
fn salus_halves_completions_and_equal_jobs_are_equal() {
    hold(&rows::salus::rows(&SEEDS));
}

#[test]
fn karuna_keeps_deadlines_and_shortens_the_rest() {
    hold(&rows::karuna::rows(1..=96));
}

#[test]
fn carbyne_makes_nobody_later_and_most_sooner() {
    hold(&rows::carbyne::rows(&SEEDS));
}
