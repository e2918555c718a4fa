//! Jobs that are evicted, restored and killed again and again, and nonsense for the daemons: short
//! runs of `scripts/soak`.

use std::process::Command;

use serde_json::Value;
use testbed::CommandWithin;
use tests::Artefacts;

/// Runs a script of `scripts/soak` on what was built and answers its report, whether it was content
/// or not, and all that it said.
fn run(script: &str, words: &[&str]) -> (bool, Value, String) {
    let artefacts = Artefacts::get();
    let done = Command::new("python3")
        .arg(artefacts.root().join("scripts/soak").join(script))
        .args(["--no-build", "--json"])
        .args(words)
        .env("SUBLET_TEST_ARTEFACTS", artefacts.dir())
        .output_within(testbed::PATIENCE);
    let said =
        String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    let report = String::from_utf8_lossy(&done.stdout)
        .lines()
        .last()
        .and_then(|line| serde_json::from_str(line).ok())
        .unwrap_or_else(|| panic!("no JSON on the last line: {said}"));
    (done.status.success(), report, said)
}

fn metric(report: &Value, name: &str) -> f64 {
    report["metrics"]
        .as_array()
        .and_then(|all| all.iter().find(|metric| metric["name"] == name))
        .and_then(|metric| metric["value"].as_f64())
        .unwrap_or_else(|| panic!("no metric {name} in {report}"))
}

fn soak(words: &[&str]) {
    let (content, report, said) = run("residency", words);
    assert!(content, "{said}");
    for name in [
        "corrupt",
        "leaked_handles",
        "leaked_host_bytes",
        "leaked_device_bytes",
    ] {
        assert_eq!(metric(&report, name), 0.0, "{name}: {said}");
    }
    // They really computed and were really looked at.
    assert!(metric(&report, "checked_gb") > 0.0, "{said}");
    assert!(report["rows"][0]["kills"].as_u64() > Some(0), "{said}");
    assert!(report["rows"][0]["looks"].as_u64() > Some(2), "{said}");
}

#[test]
fn two_hundred_evictions_lose_and_leak_nothing() {
    soak(&["--cycles", "200", "--pairs", "1", "--kill-every", "40"]);
}

#[test]
fn nor_do_they_where_half_of_the_jobs_fit() {
    soak(&[
        "--cycles",
        "60",
        "--pairs",
        "1",
        "--kill-every",
        "20",
        "--tight",
    ]);
}

/// What depends on no clock; how long anything took is for quiet machines to judge.
#[test]
fn kills_and_nonsense_end_leave_and_blame_nobody_else() {
    let words = ["--only", "kills,garbage", "--minutes", "0.3", "--seed", "1"];
    let (_, report, said) = run("storms", &words);
    for name in [
        "broken",
        "bytes_left",
        "jobs_failed",
        "died",
        "said_nothing",
    ] {
        assert_eq!(metric(&report, name), 0.0, "{name}: {said}");
    }
    assert!(metric(&report, "fds_grown") <= 8.0, "{said}");
    assert!(metric(&report, "kills") >= 40.0, "{said}");
    assert!(metric(&report, "garbage_sent") > 0.0, "{said}");
}
