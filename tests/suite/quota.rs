//! Memory quotas on the simulated device.

use std::collections::BTreeMap;

use control::JobStatus;
use tests::{Outcome, ProgramRun, Sandbox, programs, wait_until};

pub const OUT_OF_MEMORY: &str = "2 -1";
/// What the simulated device gives out at least.
const GRANULE: u64 = 2 * MIB;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A process that takes memory on command, inside a job of this name.
fn job(sandbox: &Sandbox, name: &str, mem: &str) -> ProgramRun {
    let mut run = ProgramRun::start(&mut sandbox.job(&["--name", name, "--mem", mem], memory()));
    assert_eq!(run.ask("init"), "0", "cuInit of {name}");
    run
}

pub fn memory() -> std::path::PathBuf {
    programs::program("memory")
}

/// One more process of the job that `first` belongs to: started with its environment.
fn another(sandbox: &Sandbox, first: &ProgramRun) -> ProgramRun {
    let environment = std::fs::read(format!("/proc/{}/environ", first.running.pid()))
        .expect("the environment of a process of ours");
    let vars: BTreeMap<String, String> = environment
        .split(|byte| *byte == 0)
        .filter_map(|pair| std::str::from_utf8(pair).ok()?.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    assert!(vars.contains_key("SUBLET_TOKEN"));
    let mut command = sandbox.command(memory());
    command.env_clear().envs(vars);
    let mut run = ProgramRun::start(&mut command);
    assert_eq!(run.ask("init"), "0");
    run
}

#[track_caller]
fn status(sandbox: &Sandbox, name: &str) -> JobStatus {
    sandbox
        .job_status(name)
        .unwrap_or_else(|| panic!("no job {name} among {:?}", sandbox.jobs()))
}

#[track_caller]
fn used(sandbox: &Sandbox, name: &str) -> u64 {
    status(sandbox, name).mem_used_bytes
}

/// Allocates and returns the number of the allocation.
#[track_caller]
pub fn take(run: &mut ProgramRun, kind: &str, bytes: u64) -> String {
    let answer = run.ask(&format!("alloc {kind} {bytes}"));
    let (status, id) = answer.split_once(' ').expect("status and number");
    assert_eq!(status, "0", "{kind} of {bytes} bytes");
    id.to_owned()
}

#[track_caller]
pub fn refused(run: &mut ProgramRun, kind: &str, bytes: u64) {
    let answer = run.ask(&format!("alloc {kind} {bytes}"));
    assert_eq!(answer, OUT_OF_MEMORY, "{kind} of {bytes} bytes");
}

#[track_caller]
fn ended_well(run: ProgramRun) {
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert_eq!(outcome.stdout, "", "{outcome:?}");
    // What `sublet run` says of the device and, at the end, of refusals; nothing of the library's.
    let mut lines = outcome.stderr.lines();
    assert!(
        lines.next().is_some_and(|line| line.contains("simulated")),
        "{outcome:?}"
    );
    for line in lines {
        assert!(line.contains("was refused memory"), "{outcome:?}");
    }
}

#[test]
fn over_the_quota_is_out_of_memory_and_one_line_in_the_journal() {
    let sandbox = Sandbox::new();
    let mut run = job(&sandbox, "greedy", "1GiB");
    take(&mut run, "plain", 768 * MIB);
    refused(&mut run, "plain", 512 * MIB);
    take(&mut run, "plain", 256 * MIB);
    refused(&mut run, "plain", 1);

    let lines = wait_until("two lines in the journal", || {
        let lines: Vec<_> = sandbox
            .events()
            .into_iter()
            .filter(|event| event.kind == "oom")
            .collect();
        (lines.len() >= 2).then_some(lines)
    });
    assert_eq!(lines.len(), 2, "{lines:#?}");
    // What was asked for, and what the device would have lacked: it gives out granules of 2 MiB.
    let refusals = [(768 * MIB, 512 * MIB, 512 * MIB), (GIB, 1, GRANULE)];
    for (line, (used, requested, charged)) in lines.iter().zip(refusals) {
        assert_eq!(line.job, "greedy");
        assert!(line.message.contains("greedy"), "{}", line.message);
        for (field, value) in [
            ("limit_bytes", GIB),
            ("used_bytes", used),
            ("requested_bytes", requested),
            ("charged_bytes", charged),
        ] {
            assert_eq!(line.fields[field], value, "{field} of {line:#?}");
        }
    }
    assert!(
        lines[1]
            .message
            .contains("1B requested (2MiB on the device)"),
        "{}",
        lines[1].message
    );
    assert_eq!(status(&sandbox, "greedy").oom_count, 2);
    ended_well(run);
}

#[test]
fn the_end_of_a_job_that_was_refused_memory_is_one_line_with_the_largest_request() {
    let sandbox = Sandbox::new();
    let mut run = job(&sandbox, "greedy", "1GiB");
    take(&mut run, "plain", 768 * MIB);
    refused(&mut run, "plain", 512 * MIB);
    refused(&mut run, "plain", 300 * MIB);
    let outcome = run.finish();
    let last: Vec<_> = outcome.stderr.lines().skip(1).collect();
    let said = "sublet: job `greedy` was refused memory 2 times by its limit of 1GiB; the largest request was 512MiB (see `sublet events --job greedy`)";
    assert_eq!(last, [said], "{outcome:?}");
    // One that was refused nothing, and one that was killed right after.
    let outcome = job(&sandbox, "modest", "1GiB").finish();
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    let mut run = job(&sandbox, "killed", "1GiB");
    refused(&mut run, "plain", 2048 * MIB);
    let outcome = run.kill();
    assert!(
        outcome
            .stderr
            .contains("`killed` was refused memory once by its limit of 1GiB"),
        "{outcome:?}"
    );
}

#[test]
fn small_allocations_fill_the_granules_that_are_paid_for() {
    let sandbox = Sandbox::new();
    let mut run = job(&sandbox, "small", "64MiB");
    take(&mut run, "plain", 62 * MIB);
    let first = take(&mut run, "plain", 1000);
    assert_eq!(used(&sandbox, "small"), 64 * MIB, "a whole granule");
    assert_eq!(run.ask("info"), format!("0 0 {}", 64 * MIB));
    // No granule is left, but most of the last one is.
    let half = take(&mut run, "plain", MIB);
    refused(&mut run, "plain", MIB);
    let last = take(&mut run, "plain", MIB / 2);
    assert_eq!(used(&sandbox, "small"), 64 * MIB, "no more than that");
    refused(&mut run, "plain", MIB);
    refused(&mut run, "plain", 3 * MIB / 2);
    // The granule is held until nobody lies in it.
    for id in [first, last] {
        assert_eq!(run.ask(&format!("free {id}")), "0");
        assert_eq!(used(&sandbox, "small"), 64 * MIB);
    }
    assert_eq!(run.ask(&format!("free {half}")), "0");
    assert_eq!(used(&sandbox, "small"), 62 * MIB);
    take(&mut run, "plain", 3 * MIB / 2);
    ended_well(run);
}

#[test]
fn what_the_program_sees_is_its_quota() {
    let sandbox = Sandbox::new();
    let mut run = job(&sandbox, "reader", "3GiB");
    assert_eq!(run.ask("info"), format!("0 {} {}", 3 * GIB, 3 * GIB));
    assert_eq!(run.ask("total"), format!("0 {}", 3 * GIB));
    let id = take(&mut run, "plain", GIB);
    assert_eq!(run.ask("info"), format!("0 {} {}", 2 * GIB, 3 * GIB));
    assert_eq!(run.ask(&format!("free {id}")), "0");
    assert_eq!(run.ask("info"), format!("0 {} {}", 3 * GIB, 3 * GIB));
    ended_well(run);
}

#[test]
fn a_percentage_is_of_the_device() {
    let sandbox = Sandbox::new();
    let mut run = job(&sandbox, "half", "50%");
    assert_eq!(run.ask("total"), format!("0 {}", 4 * GIB));
    ended_well(run);
}

#[test]
fn every_family_is_charged_and_given_back() {
    let sandbox = Sandbox::new();
    let mut run = job(&sandbox, "families", "1GiB");
    for kind in ["plain", "pitch", "managed", "async", "vmm"] {
        refused(&mut run, kind, GIB + 2 * MIB);
        let id = take(&mut run, kind, 512 * MIB);
        assert_eq!(used(&sandbox, "families"), 512 * MIB, "{kind}");
        refused(&mut run, kind, 512 * MIB + 2 * MIB);
        assert_eq!(run.ask(&format!("free {id}")), "0", "{kind}");
        assert_eq!(used(&sandbox, "families"), 0, "{kind}");
        // All of it can be had again.
        let id = take(&mut run, kind, GIB);
        assert_eq!(run.ask(&format!("free {id}")), "0", "{kind}");
    }
    // Pinned memory of the host is nobody's quota of a device.
    let id = take(&mut run, "host", 64 * MIB);
    assert_eq!(used(&sandbox, "families"), 0);
    assert_eq!(run.ask(&format!("free {id}")), "0");
    ended_well(run);
}

/// Of 64 MiB, 32 in the pool, which keeps them, 30 elsewhere; the numbers of the pool's blocks.
fn nearly_full_with_a_pool(run: &mut ProgramRun) -> Vec<String> {
    assert_eq!(run.ask("keep"), "0");
    let blocks = (0..8).map(|_| take(run, "async", 4 * MIB)).collect();
    take(run, "plain", 30 * MIB);
    blocks
}

#[test]
fn a_pool_serves_what_it_has_space_for_where_the_quota_has_none_for_growth() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.job(&["--name", "pool", "--mem", "64MiB"], memory());
    // Nothing is had by trimming.
    command.env("SUBLET_SIM_FAULT", "fail:call=cuMemPoolTrimTo,status=999");
    let mut run = ProgramRun::start(&mut command);
    assert_eq!(run.ask("init"), "0");
    let mut blocks = nearly_full_with_a_pool(&mut run);
    for _ in 0..3 {
        for id in blocks.drain(..) {
            assert_eq!(run.ask(&format!("drop {id}")), "0");
        }
        blocks = (0..8).map(|_| take(&mut run, "async", 4 * MIB)).collect();
        assert_eq!(used(&sandbox, "pool"), 62 * MIB);
        refused(&mut run, "async", 4 * MIB);
    }
    for id in blocks {
        assert_eq!(run.ask(&format!("free {id}")), "0");
    }
    ended_well(run);
}

#[test]
fn a_pool_whose_space_does_not_lie_together_is_trimmed_and_stays_within_the_quota() {
    let sandbox = Sandbox::new();
    let mut run = job(&sandbox, "parts", "64MiB");
    let blocks = nearly_full_with_a_pool(&mut run);
    for id in blocks.iter().step_by(2) {
        assert_eq!(run.ask(&format!("drop {id}")), "0");
    }
    // 16 MiB are unused, in parts of 4.
    let id = take(&mut run, "async", 8 * MIB);
    assert_eq!(used(&sandbox, "parts"), (30 + 16 + 8) * MIB);
    refused(&mut run, "async", 12 * MIB);
    assert!(used(&sandbox, "parts") <= 64 * MIB);
    assert_eq!(run.ask(&format!("free {id}")), "0");
    ended_well(run);
}

#[test]
fn a_pool_serves_a_small_block_beside_another_one_where_the_quota_is_used_up() {
    let sandbox = Sandbox::new();
    let mut run = job(&sandbox, "beside", "64MiB");
    assert_eq!(run.ask("keep"), "0");
    let first = take(&mut run, "async", MIB);
    take(&mut run, "plain", 62 * MIB);
    assert_eq!(used(&sandbox, "beside"), 64 * MIB);
    let second = take(&mut run, "async", MIB / 2);
    let third = take(&mut run, "async", MIB / 2);
    refused(&mut run, "async", 4096);
    assert_eq!(run.ask(&format!("drop {second}")), "0");
    let again = take(&mut run, "async", MIB / 4);
    refused(&mut run, "async", MIB);
    assert_eq!(used(&sandbox, "beside"), 64 * MIB);
    for id in [first, third, again] {
        assert_eq!(run.ask(&format!("free {id}")), "0");
    }
    ended_well(run);
}

#[test]
fn mapped_memory_is_held_until_the_last_mapping_is_gone() {
    let sandbox = Sandbox::new();
    let mut run = job(&sandbox, "vmm", "1GiB");
    let id = take(&mut run, "vmm", 512 * MIB);
    assert_eq!(run.ask(&format!("map {id}")), "0");
    assert_eq!(
        used(&sandbox, "vmm"),
        512 * MIB,
        "a mapping costs nothing more"
    );
    assert_eq!(run.ask(&format!("free {id}")), "0", "the handle");
    assert_eq!(
        used(&sandbox, "vmm"),
        512 * MIB,
        "the mapping holds the memory"
    );
    assert_eq!(run.ask(&format!("unmap {id}")), "0");
    assert_eq!(used(&sandbox, "vmm"), 0);
    ended_well(run);
}

#[test]
fn memory_goes_with_its_context() {
    let sandbox = Sandbox::new();
    let mut run = job(&sandbox, "context", "1GiB");
    take(&mut run, "plain", 256 * MIB);
    assert_eq!(run.ask("push"), "0");
    take(&mut run, "plain", 512 * MIB);
    assert_eq!(used(&sandbox, "context"), 768 * MIB);
    assert_eq!(run.ask("destroy"), "0");
    assert_eq!(used(&sandbox, "context"), 256 * MIB);
    ended_well(run);
}

#[test]
fn processes_of_one_job_share_its_quota_exactly() {
    let sandbox = Sandbox::new();
    let mut first = job(&sandbox, "pair", "1GiB");
    let mut second = another(&sandbox, &first);
    take(&mut first, "plain", 600 * MIB);
    refused(&mut second, "plain", 424 * MIB + 1);
    let id = take(&mut second, "plain", 424 * MIB);
    refused(&mut first, "plain", 1);
    assert_eq!(used(&sandbox, "pair"), GIB);
    assert_eq!(second.ask("info"), format!("0 0 {GIB}"));
    assert_eq!(second.ask(&format!("free {id}")), "0");
    take(&mut first, "plain", 424 * MIB);
    assert_eq!(status(&sandbox, "pair").processes.len(), 2);
    assert_eq!(second.finish().quiet(), "");
    ended_well(first);
}

#[test]
fn racing_processes_never_get_more_than_the_quota() {
    let sandbox = Sandbox::new();
    let mut first = job(&sandbox, "race", "1GiB");
    let mut others: Vec<_> = (0..3).map(|_| another(&sandbox, &first)).collect();
    // What the device lacks for 7 MiB: whole granules.
    const EACH: u64 = (7 * MIB).next_multiple_of(GRANULE);
    let mut taken = 0;
    for _ in 0..48 {
        // All ask at once, then all are heard.
        for run in others.iter_mut().chain([&mut first]) {
            run.send(&format!("alloc plain {}", 7 * MIB));
        }
        for run in others.iter_mut().chain([&mut first]) {
            match run.answer().split_once(' ') {
                Some(("0", _)) => taken += EACH,
                Some(("2", "-1")) => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(taken <= GIB, "{taken}");
    }
    assert_eq!(taken, GIB / EACH * EACH, "all that fits was given");
    assert_eq!(used(&sandbox, "race"), taken);
    for run in others {
        assert_eq!(run.finish().code, Some(0));
    }
    ended_well(first);
}

#[test]
fn two_jobs_have_two_quotas() {
    let sandbox = Sandbox::new();
    let mut a = job(&sandbox, "a", "1GiB");
    let mut b = job(&sandbox, "b", "2GiB");
    take(&mut a, "plain", GIB);
    refused(&mut a, "plain", MIB);
    take(&mut b, "plain", 2 * GIB);
    refused(&mut b, "plain", MIB);
    assert_eq!(a.ask("total"), format!("0 {GIB}"));
    assert_eq!(b.ask("total"), format!("0 {}", 2 * GIB));
    ended_well(a);
    ended_well(b);
}

#[test]
fn a_quota_can_be_changed_while_the_job_runs() {
    let sandbox = Sandbox::new();
    let mut run = job(&sandbox, "resized", "1GiB");
    let id = take(&mut run, "plain", 768 * MIB);
    refused(&mut run, "plain", 512 * MIB);
    let set =
        |mem: &str| Outcome::of(&mut sandbox.sublet(["set", "resized", "--mem", mem])).succeeded();
    set("2GiB");
    let more = take(&mut run, "plain", 512 * MIB);
    assert_eq!(run.ask("total"), format!("0 {}", 2 * GIB));
    // Below what is held: nothing is taken away, and nothing more is given.
    set("512MiB");
    assert_eq!(used(&sandbox, "resized"), 1280 * MIB);
    refused(&mut run, "plain", 1);
    assert_eq!(run.ask("info"), format!("0 0 {}", 512 * MIB));
    assert_eq!(run.ask(&format!("free {id}")), "0");
    refused(&mut run, "plain", 1);
    assert_eq!(run.ask(&format!("free {more}")), "0");
    take(&mut run, "plain", 512 * MIB);
    ended_well(run);
}

#[test]
fn the_memory_of_a_killed_process_is_free_again() {
    let sandbox = Sandbox::new();
    let mut first = job(&sandbox, "survivor", "4GiB");
    let mut second = another(&sandbox, &first);
    take(&mut second, "plain", 4 * GIB);
    refused(&mut first, "plain", MIB);
    assert_eq!(second.kill().signal, Some(9));
    wait_until("the dead process's memory is free", || {
        (used(&sandbox, "survivor") == 0).then_some(())
    });
    take(&mut first, "plain", 4 * GIB);
    ended_well(first);
}

#[test]
fn the_next_process_of_a_job_has_the_memory_of_the_one_before_it() {
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    let programs = [("exec", 40), ("children", 40), ("parent", 200)];
    let refused = programs.map(|(how, count)| {
        let mut command = sandbox.job(&["--mem", "1GiB"], programs::program("successor"));
        let outcome = ProgramRun::start(command.args([how, &count.to_string()])).finish();
        assert_eq!(outcome.code, Some(0), "{how}: {outcome:?}");
        let refused = outcome.stdout.trim().parse::<u32>();
        refused.expect("how many were refused")
    });
    let started: u32 = programs.iter().map(|(_, count)| count).sum();
    println!("now: {refused:?} of {started} processes refused what the one before them had");
    assert_eq!(refused, [0; 3]);
}

#[test]
fn an_unlimited_job_meets_the_device_itself() {
    let sandbox = Sandbox::new();
    let mut run = ProgramRun::start(&mut sandbox.job(&["--name", "free"], memory()));
    assert_eq!(run.ask("init"), "0");
    assert_eq!(run.ask("total"), format!("0 {}", 8 * GIB));
    take(&mut run, "plain", 6 * GIB);
    refused(&mut run, "plain", 3 * GIB);
    assert_eq!(
        used(&sandbox, "free"),
        6 * GIB,
        "what the driver refused costs nothing"
    );
    ended_well(run);
}
