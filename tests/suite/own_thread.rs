//! Work in flight that waits for its own thread, which waits at the gate: nobody hangs.

use std::time::Instant;

use tests::{Artefacts, ProgramRun, Running, Sandbox, programs, wait_until};

/// Kinds of work that waits (`tests/programs/own_thread.c`), and how many calls of host functions
/// three rounds of it make.
const KINDS: [(&str, u32); 5] = [
    ("lock", 3),
    ("callback", 3),
    ("value", 0),
    ("copy", 3),
    ("spin", 0),
];

fn start(mut command: std::process::Command) -> ProgramRun {
    let mut run = ProgramRun::start(&mut command);
    let kernels = Artefacts::get().root().join("simgpu/kernels");
    assert_eq!(run.ask(&format!("init {}", kernels.display())), "0");
    run
}

/// Three rounds of every kind end, each with 100 kernels behind or beside what waits. How long the
/// longest kind took, in milliseconds.
fn all_kinds(run: &mut ProgramRun) -> u128 {
    let mut longest_ms = 0;
    for (kind, calls) in KINDS {
        let begun = Instant::now();
        let answer = run.ask(&format!("{kind} 3 100 100"));
        assert_eq!(answer, format!("0 {calls}"), "{kind}");
        longest_ms = longest_ms.max(begun.elapsed().as_millis());
    }
    longest_ms
}

fn violations(sandbox: &Sandbox) -> usize {
    let events = sandbox.events().into_iter();
    events.filter(|event| event.kind == "misbehaviour").count()
}

#[test]
fn work_that_waits_for_its_own_thread_ends_alone_and_beside_a_busy_job() {
    let sandbox = Sandbox::new();
    let bare_ms = all_kinds(&mut start(sandbox.bare(programs::program("own_thread"))));
    let _arbiter = sandbox.arbiter();
    let job = |name: &str| {
        let flags = ["--name", name, "--share", "0.5"];
        start(sandbox.job(&flags, programs::program("own_thread")))
    };
    let mut alone = job("alone");
    let alone_ms = all_kinds(&mut alone);
    alone.finish().succeeded();
    let spin = Artefacts::get().program("spin");
    let mut busy = sandbox.job(&["--name", "busy", "--share", "0.5"], spin);
    let _busy = Running::start(busy.args(["--kernel-us", "200", "--seconds", "600"]));
    wait_until("the other one is at work", || {
        let launches = sandbox.job_status("busy").map_or(0, |job| job.launches);
        (launches > 200).then_some(())
    });
    let mut beside = job("beside");
    let beside_ms = all_kinds(&mut beside);
    beside.finish().succeeded();
    let found = violations(&sandbox);
    println!(
        "now: {} kinds end; the longest took {bare_ms} ms bare, {alone_ms} ms alone in a job, \
         {beside_ms} ms beside another one; {found} violations",
        KINDS.len()
    );
    assert_eq!(found, 0);
}
