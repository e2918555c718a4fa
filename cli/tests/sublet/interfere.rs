//! `sublet interfere` without a device: what it says of a plan, and of a place that it cannot use.
//! Experiments are for the workspace's integration suite.

use std::fs;

use crate::fixture::Fixture;

const PLAN: &str = "[experiment]\nrepeat = 1\nmeasured = \"1s\"\nwarm_up = \"0s\"\n\
    [[job]]\nname = \"a\"\ncommand = [\"true\"]\n[[job]]\nname = \"b\"\ncommand = [\"true\"]\n";

#[test]
fn a_dry_run_prints_the_time_and_every_run_and_does_nothing() {
    let fixture = Fixture::without_arbiter();
    fixture.write("plan.toml", PLAN);
    let run = |more: &[&str]| {
        let args = ["interfere", "plan.toml", "--dry-run", "--out", "out"];
        let outcome = fixture.run(&[&args[..], more].concat());
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
        outcome.stdout
    };
    let first = run(&[]);
    let mut lines = first.lines();
    assert_eq!(lines.next(), Some("2 solo + 3 pairs x 1 x 1 s = 5 s"));
    let mut runs: Vec<&str> = lines.collect();
    runs.sort_unstable();
    let all = ["a #1", "a+a #1", "a+b #1", "b #1", "b+b #1"];
    assert_eq!(runs, all.map(|run| format!("exclusive {run}")));
    assert!(run(&["--repeat", "3"]).starts_with("2 solo + 3 pairs x 3 x 1 s = 15 s\n"));
    assert_ne!(run(&["--seed", "9"]), first);
    assert!(!fixture.at("out").exists());
}

#[test]
fn a_wrong_plan_is_one_line_with_its_place() {
    let fixture = Fixture::without_arbiter();
    let args = ["interfere", "plan.toml", "--sim", "--out", "out"];
    fixture
        .run(&args)
        .is_error(125, &["cannot read the plan", "plan.toml"]);
    for (from, to, words) in [
        ("repeat = 1", "repeat = 0", ["plan.toml:2:10:", "`0`"]),
        (
            "repeat",
            "repaet",
            ["plan.toml:2:1:", "did you mean `repeat`?"],
        ),
        ("\"b\"", "\"a\"", ["plan.toml:9:8:", "taken"]),
        ("[\"true\"]", "[\"true\"", ["plan.toml:", ""]),
    ] {
        fixture.write("plan.toml", &PLAN.replacen(from, to, 1));
        fixture.run(&args).is_error(125, &words);
    }
    fs::write(fixture.at("plan.toml"), b"\xff\xfe").unwrap();
    fixture.run(&args).is_error(125, &["plan.toml", "UTF-8"]);
    assert!(!fixture.at("out").exists(), "nothing was begun");
}

#[test]
fn a_mode_that_cannot_be_had_is_refused_with_the_reason() {
    let fixture = Fixture::without_arbiter();
    let lines = "command = [\"true\"]\nprogress = { lines = \"([0-9]+)\" }";
    let plan = PLAN.replace("command = [\"true\"]", lines);
    let plan = plan.replace("repeat = 1", "repeat = 1\nmodes = [\"exclusive\", \"mps\"]");
    fixture.write("plan.toml", &plan);
    let args = ["interfere", "plan.toml", "--sim", "--out", "out"];
    fixture
        .run(&args)
        .is_error(125, &["mps", "simulated", "modes"]);
    let args = [
        "interfere",
        "plan.toml",
        "--driver",
        "driver.so",
        "--out",
        "out",
    ];
    fixture
        .run(&args)
        .is_error(125, &["mps", "nvidia-cuda-mps-control", "modes"]);
}
