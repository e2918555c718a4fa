//! Jobs that are evicted, restored and killed again and again: a short run of `scripts/soak/residency`.

use std::process::Command;

use testbed::CommandWithin;
use tests::Artefacts;

fn soak(words: &[&str]) {
    let artefacts = Artefacts::get();
    let done = Command::new("python3")
        .arg(artefacts.root().join("scripts/soak/residency"))
        .args(["--no-build", "--json"])
        .args(words)
        .env("SUBLET_TEST_ARTEFACTS", artefacts.dir())
        .output_within(testbed::PATIENCE);
    let (said, wrong) = (
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr),
    );
    assert!(done.status.success(), "{wrong}{said}");
    let last = said.lines().last().unwrap_or_default();
    let report: serde_json::Value = serde_json::from_str(last).expect("JSON on the last line");
    let metric = |name: &str| {
        report["metrics"]
            .as_array()
            .and_then(|all| all.iter().find(|metric| metric["name"] == name))
            .and_then(|metric| metric["value"].as_f64())
            .unwrap_or_else(|| panic!("no metric {name} in {last}"))
    };
    for name in [
        "corrupt",
        "leaked_handles",
        "leaked_host_bytes",
        "leaked_device_bytes",
    ] {
        assert_eq!(metric(name), 0.0, "{name}: {last}");
    }
    // They really computed and were really looked at.
    assert!(metric("checked_gb") > 0.0, "{last}");
    assert!(report["rows"][0]["kills"].as_u64() > Some(0), "{last}");
    assert!(report["rows"][0]["looks"].as_u64() > Some(2), "{last}");
}

#[test]
fn two_hundred_evictions_lose_and_leak_nothing() {
    soak(&["--cycles", "200", "--pairs", "1", "--kill-every", "40"]);
}

#[test]
fn nor_do_they_where_there_is_room_for_half_of_the_jobs() {
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
