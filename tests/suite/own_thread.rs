//! Work in flight that waits for its own thread, which waits at the gate: nobody hangs.

use std::time::Instant;

use tests::{Artefacts, Outcome, ProgramRun, Running, Sandbox, programs, wait_until};

/// Kinds of work that waits (`tests/programs/own_thread.c`), and how many calls of host functions
/// two rounds of it make.
const KINDS: [(&str, u32); 7] = [
    ("lock", 2),
    ("callback", 2),
    ("value", 0),
    ("behind", 0),
    ("graph", 2),
    ("copy", 2),
    ("spin", 0),
];

fn start(mut command: std::process::Command) -> ProgramRun {
    let mut run = ProgramRun::start(&mut command);
    let kernels = Artefacts::get().root().join("simgpu/kernels");
    assert_eq!(run.ask(&format!("init {}", kernels.display())), "0");
    run
}

/// Two rounds of every kind end, each with 100 kernels behind or beside what waits. How long the
/// longest kind took, in milliseconds.
fn all_kinds(run: &mut ProgramRun) -> u128 {
    let mut longest_ms = 0;
    for (kind, calls) in KINDS {
        let begun = Instant::now();
        let answer = run.ask(&format!("{kind} 2 100 100"));
        assert_eq!(answer, format!("0 {calls}"), "{kind}");
        let took_ms = begun.elapsed().as_millis();
        println!("now: {kind} {took_ms} ms");
        longest_ms = longest_ms.max(took_ms);
    }
    longest_ms
}

fn violations(sandbox: &Sandbox) -> usize {
    let events = sandbox.events().into_iter();
    events.filter(|event| event.kind == "misbehaviour").count()
}

#[test]
fn work_that_waits_for_its_own_thread_ends_by_itself_and_beside_a_busy_job() {
    let sandbox = Sandbox::exclusive();
    let bare_ms = all_kinds(&mut start(sandbox.bare(programs::program("own_thread"))));
    let _arbiter = sandbox.arbiter();
    let job = |name: &str| {
        let flags = ["--name", name, "--share", "0.5"];
        start(sandbox.job(&flags, programs::program("own_thread")))
    };
    let mut single = job("single");
    let single_ms = all_kinds(&mut single);
    single.finish().succeeded();
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
        "now: {} kinds end; the longest took {bare_ms} ms bare, {single_ms} ms as the only job, \
         {beside_ms} ms beside another one; {found} violations",
        KINDS.len()
    );
    assert_eq!(found, 0);
}

#[test]
fn a_job_whose_work_waits_for_its_own_thread_leaves_and_comes_back() {
    let sandbox = Sandbox::exclusive();
    let _arbiter = sandbox.arbiter();
    let flags = ["--name", "leaves", "--evictable", "--host-memory", "1GiB"];
    let mut run = start(sandbox.job(&flags, programs::program("own_thread")));
    let (mut refused, mut longest_ms) = (Vec::new(), 0);
    for (kind, calls) in KINDS {
        let begun = Instant::now();
        run.send(&format!("{kind} 2 100 100"));
        for order in ["evict", "restore"] {
            let begun = Instant::now();
            let outcome = Outcome::of(&mut sandbox.sublet([order, "leaves"]));
            if outcome.code != Some(0) {
                refused.push((kind, order, begun.elapsed(), outcome.stderr));
            }
        }
        assert_eq!(run.answer(), format!("0 {calls}"), "{kind}");
        longest_ms = longest_ms.max(begun.elapsed().as_millis());
    }
    run.finish().succeeded();
    println!(
        "now: {} of {} moves made; the longest of {} kinds took {longest_ms} ms",
        2 * KINDS.len() - refused.len(),
        2 * KINDS.len(),
        KINDS.len()
    );
    assert!(refused.is_empty(), "{refused:?}");
}
