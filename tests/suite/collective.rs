//! Ranks of a collective operation, whose kernels spin until all of them have begun: never kept
//! apart by the gate.

use control::{JobStatus, SliceMode};
use tests::{Artefacts, Running, Sandbox, programs, wait_until};

const ROUNDS: u32 = 150;
/// As many that somebody sees the job while it runs.
const LONG: u32 = 1500;

/// The shell's words for one rank of two.
fn rank(sandbox: &Sandbox, rank: u32, device: u32, rounds: u32) -> String {
    format!(
        "{} {} {rank} 2 {device} {rounds} 200 {}",
        programs::program("collective").display(),
        kernels().display(),
        sandbox.path("ranks").display()
    )
}

fn kernels() -> std::path::PathBuf {
    Artefacts::get().root().join("simgpu/kernels")
}

/// One job of both ranks, each a process.
fn both(sandbox: &Sandbox, devices: [u32; 2], rounds: u32) -> Running {
    let script = format!(
        "{} & {}; last=$?; wait $! && exit $last",
        rank(sandbox, 0, devices[0], rounds),
        rank(sandbox, 1, devices[1], rounds)
    );
    let flags = ["--name", "ranks", "--share", "0.4"];
    Running::start(sandbox.job(&flags, "sh").args(["-c", &script]))
}

fn spin(sandbox: &Sandbox, name: &str, device: u32) -> Running {
    let mut command = sandbox.job(
        &["--name", name, "--share", "0.3"],
        Artefacts::get().program("spin"),
    );
    command.args(["--kernel-us", "200", "--seconds", "600", "--device"]);
    Running::start(command.arg(device.to_string()))
}

fn job(sandbox: &Sandbox, name: &str) -> JobStatus {
    sandbox.job_status(name).unwrap_or_default()
}

fn is_at_work(sandbox: &Sandbox, name: &str) {
    let before = job(sandbox, name).launches;
    wait_until(&format!("{name} is at work"), || {
        (job(sandbox, name).launches > before + 200).then_some(())
    });
}

/// Waits for a program that may never end, and for its ranks' results.
fn ends_well(what: &str, mut running: Running, rounds: u32) {
    wait_until(what, || running.has_ended().then_some(()));
    let outcome = running.wait().succeeded();
    let lines = vec![format!("{rounds} 0"); 2];
    assert_eq!(
        outcome.stdout.lines().collect::<Vec<_>>(),
        lines,
        "{outcome:?}"
    );
}

fn violations(sandbox: &Sandbox) -> Vec<(String, String)> {
    let events = sandbox.events().into_iter();
    events
        .filter(|event| event.kind == "misbehaviour")
        .map(|event| (event.job, event.fields["violation"].to_string()))
        .collect()
}

/// A sandbox whose hardware gives its slices in quick succession: ranks that share a device meet by
/// nothing else.
fn sandbox() -> Sandbox {
    let mut sandbox = Sandbox::exclusive();
    sandbox.set("SUBLET_SIM_TIMESLICE_US", "200");
    sandbox
}

#[test]
fn ranks_of_a_job_on_one_device_pass_the_gate_together() {
    let sandbox = sandbox();
    let _other = spin(&sandbox, "other", 0);
    is_at_work(&sandbox, "other");
    ends_well("both ranks end", both(&sandbox, [0, 0], ROUNDS), ROUNDS);
    is_at_work(&sandbox, "other");
    assert_eq!(violations(&sandbox), []);
}

#[test]
fn ranks_of_a_job_on_two_devices_have_their_turns_together() {
    let mut sandbox = sandbox();
    sandbox.set("SUBLET_SIM_DEVICES", "2");
    let _others = [spin(&sandbox, "first", 0), spin(&sandbox, "second", 1)];
    is_at_work(&sandbox, "first");
    is_at_work(&sandbox, "second");
    let mut ranks = both(&sandbox, [0, 1], LONG);
    wait_until("it is taken for a gang", || {
        (job(&sandbox, "ranks").gang || ranks.has_ended()).then_some(())
    });
    assert!(!ranks.has_ended(), "{:?}", ranks.wait());
    ends_well("both ranks end", ranks, LONG);
    is_at_work(&sandbox, "first");
    is_at_work(&sandbox, "second");
    assert_eq!(violations(&sandbox), []);
}

/// First come, first served keeps a rank's device from the other one for good where the two are
/// jobs of their own. That a kernel goes on and on is reported after a second, and the job that
/// does it runs last from then on: the other rank comes, and both go on.
#[test]
fn ranks_that_are_jobs_of_their_own_are_kept_apart_until_that_is_reported() {
    let mut sandbox = sandbox();
    sandbox.run_devices(SliceMode::Exclusive, "policy = \"fifo\"");
    // As one job it is no matter who came first.
    ends_well("both ranks end", both(&sandbox, [0, 0], ROUNDS), ROUNDS);
    assert_eq!(violations(&sandbox), []);
    std::fs::remove_file(sandbox.path("ranks")).expect("the ranks' file");

    let start = |name, which| {
        let mut command = sandbox.job(&["--name", name, "--share", "0.4"], "sh");
        Running::start(command.args(["-c", &rank(&sandbox, which, 0, ROUNDS)]))
    };
    let first = start("first", 0);
    wait_until("the first one spins", || {
        (job(&sandbox, "first").device_time_ns > 5_000_000).then_some(())
    });
    let second = start("second", 1);
    wait_until("the journal says that its kernel does not end", || {
        let endless = ("first".to_owned(), "\"endless\"".to_owned());
        violations(&sandbox).contains(&endless).then_some(())
    });
    wait_until("the second one is let in", || {
        (job(&sandbox, "second").launches > 4).then_some(())
    });
    drop((first, second));
}
