//! Accounting on the simulated GPU, short: `scripts/accounting` runs it at length.

mod artefacts;

use artefacts::{object, run, text};

#[test]
fn the_quotas_account_is_what_the_device_says_and_the_device_never_gave_more() {
    let words = [
        "--threads",
        "4",
        "--processes",
        "3",
        "--ops",
        "60000",
        "--json",
    ];
    let output = run(env!("CARGO_BIN_EXE_accounting"), &words);
    assert!(output.status.success(), "{}", text(&output));
    let object = object(&output);
    assert_eq!(object["drift_bytes"], 0);
    assert_eq!(object["overshoot_bytes"], 0);
    assert!(object["ops"].as_u64().unwrap() >= 60_000);
    let metric = |name: &str| {
        let metrics = object["metrics"].as_array().unwrap();
        let row = metrics.iter().find(|row| row["name"] == name).unwrap();
        row["value"].as_f64().unwrap()
    };
    assert!(metric("refused") > 0.0, "the limit was never met");
    assert!(metric("kills") > 0.0, "nobody was killed");
    assert_eq!(metric("unexpected_errors"), 0.0);
}

testbed::starts_clean!();
