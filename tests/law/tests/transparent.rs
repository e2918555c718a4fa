//! The law on the simulated GPU, short: `scripts/law` runs it at length.
//!
//! Needs the simulated driver, the preload library and `sublet` built beside the tests (`scripts/test` does that); where
//! they are missing, they are built.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

fn target() -> PathBuf {
    // PANIC: the binary lies in the target directory's profile.
    Path::new(env!("CARGO_BIN_EXE_law"))
        .parent()
        .unwrap()
        .to_owned()
}

/// Builds what the law runs, once.
fn artefacts() -> &'static Path {
    static TARGET: OnceLock<PathBuf> = OnceLock::new();
    TARGET.get_or_init(|| {
        let target = target();
        let release = target.file_name().is_some_and(|name| name == "release");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(&root).args(["build", "-q"]);
        for package in ["simgpu-libcuda", "simgpu-libnvidia-ml", "interposer", "cli"] {
            cargo.args(["-p", package]);
        }
        if release {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success(), "the parts do not build");
        let profile = if release { "release" } else { "debug" };
        let staged = Command::new(root.join("scripts/stage"))
            .arg(profile)
            .status();
        assert!(staged.unwrap().success(), "scripts/stage {profile} failed");
        target
    })
}

fn law(words: &[&str]) -> Output {
    artefacts();
    Command::new(env!("CARGO_BIN_EXE_law"))
        .args(words)
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn bare_equals_interposed_equals_a_job_without_limits() {
    let output = law(&["--calls", "200000", "--json"]);
    assert!(output.status.success(), "{}", text(&output));
    let last = text(&output).lines().last().unwrap().to_owned();
    let object: serde_json::Value = serde_json::from_str(&last).unwrap();
    assert_eq!(object["differences"], 0);
    assert!(object["calls"].as_u64().unwrap() >= 200_000);
    assert!(object["sequences"].as_u64().unwrap() >= 10);
}

#[test]
fn a_driver_that_answers_otherwise_is_found_and_the_call_is_named() {
    let fault = "SUBLET_SIM_FAULT=oom:after=300";
    let output = law(&["--calls", "20000", "--no-job", "--candidate-env", fault]);
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
    let output = law(&["--calls", "20000", "--candidate-env", "SUBLET_MEM=24MiB"]);
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
        let output = law(&["--calls", "20000", "--no-job", "--seed", seed]);
        let said = text(&output);
        said.lines()
            .find(|line| line.starts_with("calls "))
            .unwrap()
            .to_owned()
    };
    assert_eq!(calls("7"), calls("7"));
    assert_ne!(calls("7"), calls("8"));
}
