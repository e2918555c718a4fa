//! What a program may do in the middle of its slice: whatever it is, the others go on, and have the
//! device when it wants it no more.

use control::JobStatus;
use tests::{Artefacts, ProgramRun, Running, Sandbox, programs, wait_until};

/// A job that always wants the device.
fn honest(sandbox: &Sandbox) -> Running {
    let mut command = sandbox.job(
        &["--name", "honest", "--share", "0.5"],
        Artefacts::get().program("spin"),
    );
    let running = Running::start(command.args(["--kernel-us", "200", "--seconds", "600"]));
    goes_on(sandbox, "honest");
    running
}

/// A program that follows commands, ready to work.
fn commanded(sandbox: &Sandbox) -> ProgramRun {
    let flags = ["--name", "commanded", "--share", "0.5", "--mem", "1GiB"];
    let mut run = ProgramRun::start(&mut sandbox.job(&flags, programs::program("lease")));
    init(&mut run);
    run
}

fn init(run: &mut ProgramRun) {
    let kernels = Artefacts::get().root().join("simgpu/kernels");
    assert_eq!(run.ask(&format!("init {}", kernels.display())), "0");
}

fn job(sandbox: &Sandbox, name: &str) -> JobStatus {
    sandbox.job_status(name).unwrap_or_default()
}

#[track_caller]
fn goes_on(sandbox: &Sandbox, name: &str) {
    let before = job(sandbox, name).launches;
    wait_until(&format!("{name} goes on"), || {
        (job(sandbox, name).launches > before + 200).then_some(())
    });
}

/// Nobody else uses any of the device, by the arbiter's account, nor did anything wrong.
#[track_caller]
fn has_it_alone(sandbox: &Sandbox) {
    goes_on(sandbox, "honest");
    wait_until("the honest one has the device to itself", || {
        (job(sandbox, "honest").share_got_recent > 0.9).then_some(())
    });
    // One that is gone is forgotten some time.
    let charged = || job(sandbox, "commanded").device_time_ns;
    let before = charged();
    goes_on(sandbox, "honest");
    assert!(charged() <= before, "it is charged for what it does not do");
    let wrong = |event: &control::Event| event.kind == "misbehaviour";
    let events: Vec<_> = sandbox.events().into_iter().filter(wrong).collect();
    assert!(events.is_empty(), "{events:?}");
}

#[test]
fn a_capture_that_never_ends_bounds_what_is_in_flight_as_ever() {
    let sandbox = Sandbox::exclusive();
    let _honest = honest(&sandbox);
    let mut run = commanded(&sandbox);
    // What such a kernel takes is learnt first.
    assert_eq!(
        (run.ask("queue 32"), run.ask("sync")),
        ("0".into(), "0".into())
    );
    assert_eq!(run.ask("capture"), "0");
    let answer = run.ask("most 100");
    let most = answer
        .strip_prefix("0 ")
        .and_then(|most| most.parse::<u32>().ok());
    // Two milliseconds of them are ten. On a busy machine a wait of 50 ms that ran out lets one
    // more pass.
    assert!(most.is_some_and(|most| most < 50), "{answer}");
    assert_eq!(run.ask("sync"), "0");
    has_it_alone(&sandbox);
    drop(run);
}

#[test]
fn a_process_that_dies_in_a_capture_leaves_nothing_behind() {
    let sandbox = Sandbox::exclusive();
    let _honest = honest(&sandbox);
    let mut run = commanded(&sandbox);
    assert_eq!(
        (run.ask("run"), run.ask("capture")),
        ("0".into(), "0".into())
    );
    goes_on(&sandbox, "commanded");
    goes_on(&sandbox, "honest");
    wait_until("it holds the device", || {
        job(&sandbox, "commanded").holding.then_some(())
    });
    assert_eq!(run.kill().signal, Some(9));
    has_it_alone(&sandbox);
}

#[test]
fn a_process_whose_context_is_lost_and_that_stays_wants_nothing_more() {
    for (what, status) in [("bad", "700"), ("trap", "719")] {
        let sandbox = Sandbox::exclusive();
        let _honest = honest(&sandbox);
        let mut run = commanded(&sandbox);
        assert_eq!(run.ask("run"), "0");
        goes_on(&sandbox, "commanded");
        // Work before the error and behind it, of this thread and of the other one.
        assert_eq!(run.ask("queue 20"), "0");
        run.ask(what);
        run.ask("queue 20");
        assert_eq!(run.ask("sync"), status, "{what}");
        // The thread may have seen its end coming before the error.
        let thread = run.ask("rest");
        assert!(thread == status || thread == "0", "{what}: {thread}");
        has_it_alone(&sandbox);
        assert_eq!(run.ask("queue 1"), status, "{what}");
        run.finish().succeeded();
    }
}

#[test]
fn a_child_that_exits_ends_nothing_of_its_parents() {
    let sandbox = Sandbox::exclusive();
    let _honest = honest(&sandbox);
    let mut run = commanded(&sandbox);
    assert_eq!(run.ask("run"), "0");
    goes_on(&sandbox, "commanded");
    for _ in 0..5 {
        assert_eq!(run.ask("child"), "7");
    }
    goes_on(&sandbox, "commanded");
    goes_on(&sandbox, "honest");
    assert_eq!(run.ask("rest"), "0");
    has_it_alone(&sandbox);
    run.finish().succeeded();
}

#[test]
fn a_parent_that_exits_takes_its_work_along() {
    let sandbox = Sandbox::exclusive();
    let _honest = honest(&sandbox);
    let mut run = commanded(&sandbox);
    assert_eq!(run.ask("run"), "0");
    goes_on(&sandbox, "commanded");
    wait_until("it holds the device", || {
        job(&sandbox, "commanded").holding.then_some(())
    });
    let child = run.ask("parent");
    assert_ne!(child, run.running.pid().to_string());
    has_it_alone(&sandbox);
    // The child lives, and is nobody to the arbiter: it never used the device.
    assert_eq!(run.ask("pid"), child);
    run.finish().succeeded();
}

#[test]
fn a_thread_that_ends_with_work_in_flight_leaves_the_device_when_that_is_done() {
    let sandbox = Sandbox::exclusive();
    let _honest = honest(&sandbox);
    let mut run = commanded(&sandbox);
    for _ in 0..20 {
        assert_eq!(run.ask("thread 12"), "0");
    }
    has_it_alone(&sandbox);
    assert_eq!(run.ask("sync"), "0");
    run.finish().succeeded();
}

#[test]
fn a_process_that_executes_another_program_begins_anew() {
    let sandbox = Sandbox::exclusive();
    let _honest = honest(&sandbox);
    let mut run = commanded(&sandbox);
    assert_eq!(run.ask("run"), "0");
    goes_on(&sandbox, "commanded");
    wait_until("it holds the device", || {
        job(&sandbox, "commanded").holding.then_some(())
    });
    let pid = run.ask("pid");
    run.send("exec");
    assert_eq!(run.ask("pid"), pid);
    has_it_alone(&sandbox);
    init(&mut run);
    assert_eq!(run.ask("run"), "0");
    goes_on(&sandbox, "commanded");
    goes_on(&sandbox, "honest");
    assert_eq!(run.ask("rest"), "0");
    run.finish().succeeded();
}
