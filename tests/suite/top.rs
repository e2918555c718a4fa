//! `sublet top` with jobs on the simulated GPU.

use serde_json::Value;
use testbed::terminal::Terminal;
use tests::{Artefacts, Outcome, Running, Sandbox, wait_until};

fn spin(sandbox: &Sandbox, name: &str, share: &str) -> Running {
    let flags = ["--name", name, "--share", share, "--mem", "1GiB"];
    let mut command = sandbox.job(&flags, Artefacts::get().program("spin"));
    // Longer than any test waits; the test ends it.
    command.args(["--kernel-us", "200", "--seconds", "600"]);
    let running = Running::start(&mut command);
    wait_until("it is at work", || {
        let job = sandbox.job_status(name)?;
        (job.device_time_ns > 100_000_000).then_some(())
    });
    running
}

#[test]
fn what_jobs_get_is_shown_and_a_job_is_paused_by_keys() {
    let sandbox = Sandbox::exclusive();
    let _first = spin(&sandbox, "first", "0.75");
    let mut command = sandbox.sublet(["top", "--interval", "200ms"]);
    command.env("TERM", "xterm").env("LANG", "C.UTF-8");
    let mut terminal = Terminal::start(&mut command, 24, 100);
    terminal.shows("first");
    let _other = spin(&sandbox, "other", "0.25");
    terminal.shows("other");
    terminal.shows("0.25");
    terminal.shows("1GiB");
    terminal.press("/other\rp");
    terminal.shows("pause other (job ");
    terminal.press("y");
    wait_until("it is paused", || {
        sandbox.job_status("other").filter(|job| job.paused)
    });
    terminal.press("\x1b");
    terminal.shows("paused");
    terminal.press("q");
    assert!(terminal.end().success());
    terminal.is_given_back();
}

#[test]
fn figures_of_an_interval_are_the_arbiters() {
    let sandbox = Sandbox::exclusive();
    let _first = spin(&sandbox, "first", "0.75");
    let _second = spin(&sandbox, "second", "0.25");
    let top: Value = Outcome::of(&mut sandbox.sublet(["top", "--once", "--json"]))
        .succeeded()
        .json();
    let jobs = top["jobs"].as_array().expect("jobs");
    assert_eq!(jobs.len(), 2, "{top}");
    let mut all = 0.0;
    for job in jobs {
        let got = job["share_got"].as_f64().expect("a share");
        all += got;
        assert_eq!(job["mem_limit_bytes"], 1 << 30, "{job}");
        assert!(
            job["launches_per_s"].as_f64().expect("a rate") > 0.0,
            "{job}"
        );
        assert!(job["in_flight_marks"].is_u64(), "{job}");
    }
    // One device has one device's time, to what was charged around the ends of the interval.
    assert!(all > 0.0 && all < 1.5, "{top}");
    let device = &top["devices"][0];
    assert!(
        device["used_bytes"].as_u64().expect("a size") > 0,
        "{device}"
    );
    // The simulated NVML measures these.
    for name in ["power_w", "temperature_celsius", "sm_used_fraction"] {
        assert!(device[name].is_number(), "{name}: {device}");
    }
}
