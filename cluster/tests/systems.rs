//! The rows of `examples/systems`: what a limit says of a figure. The example computes the figures.

#[allow(dead_code, reason = "the example computes the figures")]
#[path = "../examples/systems/rows.rs"]
mod rows;

use rows::{Limit, SYSTEMS, Verdict, row};

#[test]
fn a_known_miss_fails_where_it_is_worse_and_where_it_is_gone() {
    let most = row("most", "x", Limit::AtMost(10.0), "-");
    assert_eq!(most.verdict(10.0), Verdict::Holds);
    assert_eq!(most.verdict(10.1), Verdict::Missed);
    assert_eq!(most.verdict(f64::NAN), Verdict::Missed);
    let most = most.missed(11.1, 11.2, "why");
    assert_eq!(most.verdict(11.2), Verdict::KnownMiss);
    assert_eq!(most.verdict(11.3), Verdict::Worse);
    assert_eq!(most.verdict(f64::NAN), Verdict::Worse);
    assert_eq!(most.verdict(10.0), Verdict::MissGone);
    let least = row("least", "x", Limit::AtLeast(96.0), "-").missed(60.9, 60.0, "why");
    assert_eq!(least.verdict(60.0), Verdict::KnownMiss);
    assert_eq!(least.verdict(59.9), Verdict::Worse);
    assert_eq!(least.verdict(96.0), Verdict::MissGone);
    let fails = [Verdict::Missed, Verdict::Worse, Verdict::MissGone];
    assert!(fails.into_iter().all(Verdict::fails));
    let passes = [Verdict::Reported, Verdict::Holds, Verdict::KnownMiss];
    assert!(!passes.into_iter().any(Verdict::fails));
}

/// A bound far from what was measured would let anything pass.
#[test]
fn every_limit_is_a_number_and_every_known_miss_is_bound_near_what_was_measured() {
    for row in SYSTEMS.iter().flat_map(|system| system.rows) {
        let name = row.name;
        let limit = match row.limit {
            Limit::AtMost(limit) | Limit::AtLeast(limit) => Some(limit),
            Limit::Reported => None,
        };
        assert!(limit.is_none_or(f64::is_finite), "{name}");
        let Some(miss) = row.known_miss else { continue };
        assert!(limit.is_some() && !miss.why.is_empty(), "{name}");
        assert_eq!(row.verdict(miss.measured), Verdict::KnownMiss, "{name}");
        let away = (miss.bound - miss.measured).abs();
        assert!(away <= 0.05 * miss.measured.abs(), "{name}: {away}");
    }
}

testbed::starts_clean!();
