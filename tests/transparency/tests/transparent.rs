//! Transparency on the simulated GPU, short: `scripts/transparency` runs it at length.

mod artefacts;

use artefacts::{object, run, text};

fn transparency(words: &[&str]) -> std::process::Output {
    run(env!("CARGO_BIN_EXE_transparency"), words)
}

#[test]
fn bare_equals_interposed_equals_a_job_without_limits() {
    let output = transparency(&["--calls", "200000", "--json"]);
    assert!(output.status.success(), "{}", text(&output));
    let object = object(&output);
    assert_eq!(object["differences"], 0);
    assert!(object["calls"].as_u64().unwrap() >= 200_000);
    assert!(object["sequences"].as_u64().unwrap() >= 10);
}

#[test]
fn a_driver_that_answers_otherwise_is_found_and_the_call_is_named() {
    let fault = "SUBLET_SIM_FAULT=oom:after=300";
    let output = transparency(&["--calls", "20000", "--no-job", "--candidate-env", fault]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let said = text(&output);
    let line = said.lines().find(|line| line.starts_with("  interposed #"));
    assert!(
        line.is_some_and(|line| line.contains("CUDA_ERROR_OUT_OF_MEMORY")),
        "{said}"
    );
}

#[test]
fn a_limit_in_a_job_is_a_difference() {
    let output = transparency(&["--calls", "20000", "--candidate-env", "SUBLET_MEM=24MiB"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(
        text(&output).contains("DIFFERENCE governed"),
        "{}",
        text(&output)
    );
}

#[test]
fn the_same_seed_makes_the_same_calls() {
    let calls = |seed: &str| {
        let output = transparency(&["--calls", "20000", "--no-job", "--seed", seed, "--json"]);
        object(&output)["calls"].as_u64().unwrap()
    };
    assert_eq!(calls("7"), calls("7"));
    assert_ne!(calls("7"), calls("8"));
}

testbed::starts_clean!();
