//! Shares of the device's time, by the arbiter's account and by the device's own.
//!
//! Bounds are generous: the machine that runs the suite may be busy with other things, and the jobs
//! then do not want the device all the time. `scripts/demo` holds the arbiter to two points.

use std::process::Command;

use serde_json::Value;
use tests::{Artefacts, Outcome, Running, Sandbox, wait_until};

/// Points of the device's time that either account may be off, as a fraction.
const OFF: f64 = 0.06;
/// Device time that both together must have had before shares mean something, in nanoseconds.
const ENOUGH_NS: u64 = 2_000_000_000;

/// Device time by process id, as the simulated device counts it. Asks in a process of its own: the
/// device belongs to the sandbox.
fn device_time(sandbox: &Sandbox) -> std::collections::BTreeMap<u64, u64> {
    let program = Artefacts::get().program("examples/usage");
    let usage: Value = Outcome::of(&mut sandbox.command(program))
        .succeeded()
        .json();
    usage["devices"][0]["processes"]
        .as_array()
        .expect("processes")
        .iter()
        .map(|process| {
            let number = |field: &str| process[field].as_u64().expect("a number");
            (number("pid"), number("compute_ns"))
        })
        .collect()
}

fn spin(sandbox: &Sandbox, name: &str, flags: &[&str]) -> Running {
    let mut all = vec!["--name", name];
    all.extend_from_slice(flags);
    let mut command: Command = sandbox.job(&all, Artefacts::get().program("spin"));
    // Longer than any test waits; the test ends it.
    command.args(["--kernel-us", "200", "--seconds", "600"]);
    Running::start(&mut command)
}

/// What each job got of what all got while both ran, by both accounts: arbiter's, device's.
fn shares(sandbox: &Sandbox, jobs: &[(&str, &Running)]) -> Vec<(f64, f64)> {
    let charged = |name: &str| sandbox.job_status(name).map_or(0, |job| job.device_time_ns);
    wait_until("all jobs are at work", || {
        jobs.iter()
            .all(|(name, _)| charged(name) > 100_000_000)
            .then_some(())
    });
    let read = || {
        let device = device_time(sandbox);
        jobs.iter()
            .map(|(name, running)| {
                let pid = u64::from(running.pid());
                (charged(name), device.get(&pid).copied().unwrap_or(0))
            })
            .collect::<Vec<_>>()
    };
    let before = read();
    let after = wait_until("enough device time was given", || {
        let now = read();
        let given: u64 = now
            .iter()
            .zip(&before)
            .map(|(now, then)| now.0 - then.0)
            .sum();
        (given > ENOUGH_NS).then_some(now)
    });
    let got: Vec<(f64, f64)> = after
        .iter()
        .zip(&before)
        // CAST: below 2^53 nanoseconds.
        .map(|(now, then)| ((now.0 - then.0) as f64, (now.1 - then.1) as f64))
        .collect();
    let whole = got
        .iter()
        .fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    got.iter()
        .map(|one| (one.0 / whole.0, one.1 / whole.1))
        .collect()
}

/// By both accounts each job gets what was asked for it. A machine so busy that jobs miss their
/// turns is asked again: what is wrong with the shares is so each time.
#[track_caller]
fn agree(sandbox: &Sandbox, jobs: &[(&str, &Running)], asked: &[f64]) {
    let near = |got: f64, asked: f64| (got - asked).abs() < OFF;
    let mut seen = Vec::new();
    let agreed = (0..3).any(|_| {
        let got = shares(sandbox, jobs);
        let good = got
            .iter()
            .zip(asked)
            .all(|(got, asked)| near(got.0, *asked) && near(got.1, *asked));
        seen.push(got);
        good
    });
    assert!(
        agreed,
        "charged by the arbiter and given by the device: {seen:?}, asked {asked:?}"
    );
}

#[test]
fn busy_jobs_get_the_shares_they_asked_for() {
    let sandbox = Sandbox::exclusive();
    let a = spin(&sandbox, "a", &["--share", "0.75"]);
    let b = spin(&sandbox, "b", &["--share", "0.25"]);
    let jobs = [("a", &a), ("b", &b)];
    agree(&sandbox, &jobs, &[0.75, 0.25]);

    // And the other way round, on the running jobs: the smaller one first, the sum may not exceed
    // 1.
    for (name, share) in [("a", "0.25"), ("b", "0.75")] {
        Outcome::of(&mut sandbox.sublet(["set", name, "--share", share])).succeeded();
    }
    agree(&sandbox, &jobs, &[0.25, 0.75]);
}

#[test]
fn a_job_alone_has_all_of_the_device() {
    let sandbox = Sandbox::exclusive();
    let _a = spin(&sandbox, "a", &["--share", "0.25"]);
    wait_until("it has more than its share", || {
        let job = sandbox.job_status("a")?;
        (job.share_got_recent > 0.9).then_some(())
    });
}

#[test]
fn a_program_says_itself_where_its_iterations_end() {
    let sandbox = Sandbox::exclusive();
    let steps = tests::programs::program("steps");
    let bare = Outcome::of(&mut sandbox.bare(&steps)).succeeded();
    assert_eq!(bare.stdout, "none\n");
    let mut command = sandbox.job(&["--name", "steps"], &steps);
    let mut running = Running::start(command.stdin(std::process::Stdio::piped()));
    let profile = wait_until("its steps are counted", || {
        let profile = sandbox.job_status("steps")?.profile?;
        (profile.iterations >= 20).then_some(profile)
    });
    assert_eq!(profile.found, control::IterationSource::Hinted);
    assert_eq!((profile.periodic, profile.confidence), (Some(true), 1.0));
    // Steps are two milliseconds apart, or more on a busy host.
    assert!(
        profile.iteration_ns.is_some_and(|ns| ns >= 2_000_000),
        "{profile:?}"
    );
    let (input, output) = running.pipes();
    drop(input);
    let mut text = String::new();
    testbed::within::read_to_end(&mut std::io::BufReader::new(output), &mut text);
    assert_eq!(text, "before 0\nafter 1\n");
    assert_eq!(running.wait().code, Some(0));
}

#[test]
fn shares_above_the_whole_are_refused() {
    let sandbox = Sandbox::exclusive();
    let _a = spin(&sandbox, "a", &["--share", "0.75"]);
    wait_until("the first is registered", || sandbox.job_status("a"));
    let outcome = Outcome::of(sandbox.job(&["--share", "0.5"], "true").env("LC_ALL", "C"));
    assert_eq!(outcome.code, Some(125), "{outcome:?}");
    assert_eq!(outcome.stdout, "", "{outcome:?}");
    assert!(outcome.stderr.starts_with("sublet: "), "{outcome:?}");
    assert!(outcome.stderr.contains("0.5"), "{outcome:?}");
}

/// A driver that refuses completion marks, loses them, or refuses our page: without them a job was
/// charged nothing at all. How near the shares come to 55 and 45 says the machine's load as well,
/// so that is printed and not asserted.
#[test]
fn a_job_without_completion_marks_is_charged_like_any_other() {
    for fault in [
        "fail:call=cuStreamWriteValue64_v2,status=801",
        "lose:call=cuStreamWriteValue64_v2",
        "fail:call=cuMemHostRegister_v2,status=801",
    ] {
        let sandbox = Sandbox::exclusive();
        let a = spin(&sandbox, "a", &["--share", "0.55"]);
        wait_until("the arbiter is there", || sandbox.job_status("a"));
        let mut b = sandbox.job(
            &["--name", "b", "--share", "0.45"],
            Artefacts::get().program("spin"),
        );
        b.args(["--kernel-us", "200", "--seconds", "600"])
            .env("SUBLET_SIM_FAULT", fault);
        let b = Running::start(&mut b);
        let mut seen = Vec::new();
        let charged = (0..5).any(|_| {
            let got = shares(&sandbox, &[("a", &a), ("b", &b)]);
            let good = (0.25..0.65).contains(&got[1].0);
            seen.push(got);
            good
        });
        println!("now: {fault}: charged and given by the device {seen:?}, asked 0.55 and 0.45");
        assert!(charged, "{fault}: {seen:?}");
        // It is reported, in every place.
        let followed_by = |name: &str| {
            let job = sandbox.job_status(name)?;
            job.processes.first()?.followed_by.clone()
        };
        assert_eq!(followed_by("b").as_deref(), Some("events"), "{fault}");
        assert_eq!(followed_by("a"), None);
        let reported = |event: &control::Event| event.kind == "following" && event.job == "b";
        assert!(sandbox.events().iter().any(reported), "{fault}");
        let said = Outcome::of(&mut sandbox.sublet(["ps"]));
        assert!(
            said.stdout.contains("gives no completion marks"),
            "{said:?}"
        );
    }
}
