//! AntMan's memory coordinator in the real arbiter: opportunistic jobs shrink on the device when a
//! guaranteed one needs it, with nobody's command, and grow when it is gone.

use control::{Event, ResidenceState, SliceMode};
use tests::{ProgramRun, Running, Sandbox, programs, wait_until};

const MIB: u64 = 1 << 20;
/// Memory of the device.
const DEVICE: u64 = 512 * MIB;

/// A device of 512 MiB in slices that is run so, and its arbiter.
fn device(policy: &str) -> (Sandbox, Running) {
    let rules = format!("policy = {policy}");
    let mut sandbox = Sandbox::in_mode(SliceMode::Exclusive, &rules);
    sandbox.set("SUBLET_SIM_CAPACITY", "512MiB");
    sandbox.set("SUBLET_RESIDENCY", "chunk=4194304,reuse=0");
    let arbiter = sandbox.arbiter();
    (sandbox, arbiter)
}

fn antman() -> (Sandbox, Running) {
    device("{ name = \"antman\", memory_calm_ms = 300 }")
}

/// A job that does with memory what it is asked to.
fn job(sandbox: &Sandbox, name: &str, flags: &[&str]) -> ProgramRun {
    let mut all = vec!["--name", name];
    all.extend_from_slice(flags);
    let mut run = ProgramRun::start(&mut sandbox.job(&all, programs::program("resident")));
    assert_eq!(run.ask("init"), "0");
    run
}

const OPPORTUNISTIC: [&str; 3] = ["--class", "opportunistic", "--evictable"];

/// An opportunistic job with so many blocks of 32 MiB, each with contents of its own.
fn sweep(sandbox: &Sandbox, name: &str, mem: &str, blocks: u32) -> ProgramRun {
    let mut run = job(
        sandbox,
        name,
        &[&OPPORTUNISTIC[..], &["--mem", mem]].concat(),
    );
    for block in 0..blocks {
        fill(&mut run, block);
    }
    run
}

fn fill(run: &mut ProgramRun, block: u32) {
    assert_eq!(
        run.ask(&format!("alloc {}", 32 * MIB)),
        format!("0 {block}")
    );
    assert_eq!(run.ask(&format!("fill {block} {block}")), "0");
}

/// All contents are what they were.
fn is_intact(run: &mut ProgramRun, blocks: u32) {
    for block in 0..blocks {
        assert_eq!(run.ask(&format!("check {block} {block}")), "0 0", "{block}");
    }
}

/// Where a job's memory is: of what can be moved, how much in all and how much on the device.
fn where_is(sandbox: &Sandbox, name: &str) -> Option<(u64, u64)> {
    let residence = sandbox.job_status(name)?.residence?;
    Some((residence.evictable_bytes, residence.resident_bytes))
}

fn is_whole(sandbox: &Sandbox, name: &str) {
    wait_until("all of it is on the device", || {
        let (all, here) = where_is(sandbox, name)?;
        (all > 0 && here == all).then_some(())
    });
}

fn event(sandbox: &Sandbox, kind: &str, job: &str) -> Event {
    wait_until("the journal says so", || {
        let mut events = sandbox.events().into_iter();
        events.find(|event| event.kind == kind && event.job == job)
    })
}

/// The guaranteed job's memory stays, and it asks for nothing but memory.
#[test]
fn an_opportunistic_job_shrinks_for_a_guaranteed_one_and_grows_when_it_is_gone() {
    let (sandbox, _arbiter) = antman();
    let mut b = sweep(&sandbox, "b", "400MiB", 12);
    is_whole(&sandbox, "b");
    let mut a = job(&sandbox, "a", &["--mem", "300MiB"]);
    assert_eq!(a.ask(&format!("alloc {}", 256 * MIB)), "0 0");
    assert_eq!(a.ask("fill 0 99"), "0");
    let (all, here) = where_is(&sandbox, "b").expect("it is evictable");
    assert!(
        all >= 384 * MIB && here <= DEVICE - 256 * MIB,
        "{here} of {all}"
    );
    assert!(here >= 128 * MIB, "no more than is needed: {here} of {all}");
    is_intact(&mut b, 12);
    let shrunk = event(&sandbox, "shrunk", "b");
    assert!(
        shrunk.message.contains("`a` waits for memory"),
        "{shrunk:?}"
    );
    let residence = sandbox.job_status("b").and_then(|job| job.residence);
    let residence = residence.expect("it is evictable");
    assert_eq!(residence.state, ResidenceState::Partly);
    assert!(
        residence.reason.starts_with("shrunk to "),
        "{}",
        residence.reason
    );
    assert_eq!(residence.evictions, 0, "it was never out");
    // What it allocates now lies on the host, within its quota and no further.
    assert_eq!(b.ask(&format!("alloc {}", 8 * MIB)), "0 12");
    assert_eq!(b.ask(&format!("alloc {}", 32 * MIB)), "2 -1");
    assert_eq!(a.ask("check 0 99"), "0 0");
    a.kill();
    is_whole(&sandbox, "b");
    is_intact(&mut b, 12);
    let grown = event(&sandbox, "grown", "b");
    assert!(grown.message.contains("enough again"), "{grown:?}");
}

/// The same jobs without a coordinator: the device is full, and that is the answer.
#[test]
fn under_another_policy_and_where_it_is_switched_off_a_full_device_is_full() {
    for policy in ["\"stride\"", "{ name = \"antman\", memory = false }"] {
        let (sandbox, _arbiter) = device(policy);
        let mut b = sweep(&sandbox, "b", "400MiB", 12);
        let mut a = job(&sandbox, "a", &["--mem", "300MiB"]);
        assert_eq!(a.ask(&format!("alloc {}", 256 * MIB)), "2 -1", "{policy}");
        is_intact(&mut b, 12);
    }
}

/// A job that comes later finds the device full, and is not refused: it goes on in host memory, and
/// then has its part.
#[test]
fn opportunistic_jobs_share_what_a_guaranteed_one_leaves() {
    let (sandbox, _arbiter) = antman();
    let mut a = job(&sandbox, "a", &["--mem", "128MiB"]);
    assert_eq!(a.ask(&format!("alloc {}", 128 * MIB)), "0 0");
    let mut b = sweep(&sandbox, "b", "400MiB", 10);
    let mut c = sweep(&sandbox, "c", "400MiB", 10);
    // What would move less than an eighth of a job is not worth it.
    wait_until("both have as much", || {
        let (_, b) = where_is(&sandbox, "b")?;
        let (_, c) = where_is(&sandbox, "c")?;
        (b.abs_diff(c) <= 48 * MIB && b + c >= 320 * MIB).then_some(())
    });
    is_intact(&mut b, 10);
    is_intact(&mut c, 10);
    // One ends, and the other has use for what it leaves.
    c.kill();
    is_whole(&sandbox, "b");
    is_intact(&mut b, 10);
    assert_eq!(
        a.ask(&format!("alloc {}", 8 * MIB)),
        "2 -1",
        "a quota is a quota"
    );
}

/// Memory that a program creates by handle goes where there is space. For a handle that can be
/// exported the job's other memory gives way.
#[test]
fn memory_by_handle_is_not_refused_for_want_of_space_on_the_device() {
    let (sandbox, _arbiter) = antman();
    let mut a = job(&sandbox, "a", &["--mem", "256MiB"]);
    assert_eq!(a.ask(&format!("alloc {}", 256 * MIB)), "0 0");
    let mut b = sweep(&sandbox, "b", "500MiB", 7);
    for (id, verb) in [(7, "owned"), (8, "vmm")] {
        assert_eq!(b.ask(&format!("{verb} {}", 64 * MIB)), format!("0 {id}"));
        assert_eq!(b.ask(&format!("fill {id} {id}")), "0");
    }
    is_intact(&mut b, 9);
    // What the driver refuses is refused on a full device as well.
    let mut bare = ProgramRun::start(&mut sandbox.bare(programs::program("resident")));
    assert_eq!(bare.ask("init"), "0");
    let odd = ["0 0", "67108865 0", "67108864 1"];
    for words in odd.map(|words| format!("create {words}")) {
        assert_eq!((b.ask(&words), bare.ask(&words)), ("1".into(), "1".into()));
    }
    assert_eq!(b.ask(&format!("create {} 0", 32 * MIB)), "0");
    drop(bare);
    a.kill();
    is_whole(&sandbox, "b");
    is_intact(&mut b, 9);
}

/// A job that is killed while it shrinks gives all it had, and nobody waits for it.
#[test]
fn one_that_is_killed_on_the_way_leaves_its_memory_to_the_one_that_waits() {
    let (sandbox, _arbiter) = antman();
    let b = sweep(&sandbox, "b", "400MiB", 12);
    let mut a = job(&sandbox, "a", &["--mem", "512MiB"]);
    a.send(&format!("alloc {}", 448 * MIB));
    b.kill();
    assert_eq!(a.answer(), "0 0");
    assert_eq!(a.ask("fill 0 1"), "0");
    assert_eq!(a.ask("check 0 1"), "0 0");
}

/// The next arbiter finds a job in host memory by half, and has it grow all the same.
#[test]
fn an_arbiter_that_is_killed_leaves_nobody_shrunk() {
    let (sandbox, mut arbiter) = antman();
    let mut b = sweep(&sandbox, "b", "400MiB", 12);
    let mut a = job(&sandbox, "a", &["--mem", "300MiB"]);
    assert_eq!(a.ask(&format!("alloc {}", 256 * MIB)), "0 0");
    arbiter.kill();
    let _ = arbiter.wait();
    let _next = sandbox.arbiter();
    // A job finds the next arbiter with its next calls.
    wait_until("it is back", || {
        is_intact(&mut b, 1);
        (!sandbox.job_status("b")?.processes.is_empty()).then_some(())
    });
    is_intact(&mut b, 12);
    a.kill();
    is_whole(&sandbox, "b");
    is_intact(&mut b, 12);
}

/// Where the host may not take it nothing moves, the journal says why, and the guaranteed job is
/// answered by the device.
#[test]
fn without_host_memory_nobody_shrinks_and_that_is_said() {
    let (sandbox, _arbiter) = antman();
    let flags = ["--mem", "400MiB", "--host-memory", "16MiB"];
    let mut b = job(&sandbox, "b", &[&OPPORTUNISTIC[..], &flags].concat());
    for block in 0..12 {
        fill(&mut b, block);
    }
    let mut a = job(&sandbox, "a", &["--mem", "300MiB"]);
    a.send(&format!("alloc {}", 256 * MIB));
    let refused = event(&sandbox, "not_fitted", "b");
    assert!(refused.message.contains("host memory"), "{refused:?}");
    is_intact(&mut b, 12);
    drop(b);
    assert_eq!(a.answer(), "0 0", "it has what the other leaves by its end");
}
