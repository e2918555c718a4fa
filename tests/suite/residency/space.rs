//! The one rule for every call that takes device memory: what others leave for is waited for, what
//! nobody can give is refused at once, and nobody leaves for it.

use std::time::Instant;

use tests::{Outcome, ProgramRun, Running, Sandbox, programs, wait_until};

use super::MIB;

/// Every way to take memory of the device.
const KINDS: [&str; 7] = [
    "plain", "pitch", "vmm", "async", "graph", "array", "managed",
];
const OUT_OF_MEMORY: &str = "2 -1";

/// A device of 128 MiB, with contexts of that size, and its arbiter.
fn device(context: &str) -> (Sandbox, Running) {
    let mut sandbox = Sandbox::exclusive();
    sandbox.set("SUBLET_SIM_CAPACITY", "128MiB");
    sandbox.set("SUBLET_SIM_CONTEXT", context);
    sandbox.set("SUBLET_RESIDENCY", "chunk=4194304,reuse=0");
    let arbiter = sandbox.arbiter();
    (sandbox, arbiter)
}

fn job(sandbox: &Sandbox, name: &str, flags: &[&str], program: &str) -> ProgramRun {
    let flags = [&["--name", name][..], flags].concat();
    let mut run = ProgramRun::start(&mut sandbox.job(&flags, programs::program(program)));
    assert_eq!(run.ask("init"), "0", "{name}");
    run
}

/// An evictable job that has so much memory on the device.
fn holder(sandbox: &Sandbox, bytes: u64) -> ProgramRun {
    let mut holder = job(sandbox, "holder", &["--evictable"], "resident");
    assert_eq!(holder.ask(&format!("alloc {bytes}")), "0 0");
    assert_eq!(holder.ask("fill 0 7"), "0");
    holder
}

/// A job says on stderr that its device is a simulated one.
fn end(run: ProgramRun) {
    assert_eq!(run.finish().code, Some(0));
}

fn evictions(sandbox: &Sandbox) -> u64 {
    let holder = sandbox.job_status("holder").expect("a job");
    holder.residence.map_or(0, |residence| residence.evictions)
}

fn kept(sandbox: &Sandbox) -> u64 {
    let events = sandbox.events();
    let refused = events.iter().filter(|event| event.kind == "no_space");
    refused.count() as u64
}

#[test]
fn every_way_to_allocate_waits_for_memory_that_others_leave() {
    let (sandbox, _arbiter) = device("2MiB");
    let mut holder = holder(&sandbox, 80 * MIB);
    let (mut got, mut refused) = (0, 0);
    for kind in KINDS {
        // Nobody leaves for a job whose own memory stays, whatever it takes.
        let before = evictions(&sandbox);
        let mut stays = job(&sandbox, &format!("{kind}-0"), &[], "memory");
        let answer = stays.ask(&format!("alloc {kind} {}", 64 * MIB));
        assert_eq!(answer, OUT_OF_MEMORY, "{kind}");
        end(stays);
        assert_eq!(evictions(&sandbox), before, "{kind}");
        refused += 1;
        let mut wants = job(&sandbox, &format!("{kind}-1"), &["--evictable"], "memory");
        let answer = wants.ask(&format!("alloc {kind} {}", 64 * MIB));
        assert_eq!(answer, "0 0", "{kind}");
        wait_until("the other one has left", || {
            (evictions(&sandbox) == before + 1).then_some(())
        });
        end(wants);
        got += 1;
        // It comes back with all that it had.
        assert_eq!(holder.ask("check 0 7"), "0 0");
    }
    println!(
        "now: {got} of {} ways to allocate have got what an idle job leaves, {refused} of a job that stays were refused",
        KINDS.len()
    );
    end(holder);
}

#[test]
fn what_nobody_can_give_is_refused_and_nobody_leaves_for_it() {
    let (sandbox, _arbiter) = device("2MiB");
    let mut holder = holder(&sandbox, 80 * MIB);
    let mut fixed = job(&sandbox, "fixed", &[], "memory");
    assert_eq!(fixed.ask(&format!("alloc plain {}", 32 * MIB)), "0 0");
    wait_until("what stays is known", || {
        let fixed = sandbox.job_status("fixed")?;
        fixed
            .devices
            .iter()
            .any(|device| device.mem_used_bytes == 32 * MIB)
            .then_some(())
    });
    let mut refused = 0;
    // More than the device has, and more than the job that stays leaves of it.
    for bytes in [136 * MIB, 100 * MIB] {
        for (at, flags) in [&["--evictable"][..], &[]].into_iter().enumerate() {
            let mut wants = job(&sandbox, &format!("w{at}-{bytes}"), flags, "memory");
            for kind in KINDS.into_iter().filter(|kind| *kind != "graph") {
                let answer = wants.ask(&format!("alloc {kind} {bytes}"));
                assert_eq!(answer, OUT_OF_MEMORY, "{kind} {flags:?} {bytes}");
                refused += 1;
            }
            end(wants);
        }
    }
    assert_eq!(evictions(&sandbox), 0);
    assert_eq!(holder.ask("check 0 7"), "0 0");
    wait_until("the reasons are in the journal", || {
        (kept(&sandbox) > 0).then_some(())
    });
    let gone = evictions(&sandbox);
    println!("now: {refused} requests that cannot be met have made {gone} jobs leave");
    end(holder);
    end(fixed);
}

#[test]
fn a_context_that_never_fits_makes_nobody_leave_a_second_time() {
    // With two contexts on the device there is no space for a third, with all memory gone.
    let (sandbox, _arbiter) = device("45MiB");
    let mut holder = holder(&sandbox, 8 * MIB);
    let other = job(&sandbox, "other", &[], "memory");
    let mut gone = Vec::new();
    for at in 0..3 {
        let name = format!("third-{at}");
        let flags = ["--name", &name, "--evictable"];
        let mut run = ProgramRun::start(&mut sandbox.job(&flags, programs::program("memory")));
        assert_eq!(run.ask("init"), "2");
        end(run);
        assert_eq!(holder.ask("check 0 7"), "0 0");
        gone.push(evictions(&sandbox));
    }
    println!("now: after each try for such a context the others have left {gone:?} times");
    assert!(gone[0] <= 1 && gone[2] == gone[0], "{gone:?}");
    end(holder);
    end(other);
}

#[test]
fn a_restore_that_is_overtaken_by_a_neighbours_block_goes_on_without_its_deadline() {
    let (mut sandbox, _arbiter) = device("0B");
    // Copies of 72 MiB take most of a second.
    sandbox.set(
        "SUBLET_SIM_SET",
        "copy_pinned_gbps=0.1;copy_pageable_gbps=0.1",
    );
    let mut holder = holder(&sandbox, 72 * MIB);
    let mut grows = job(&sandbox, "grows", &["--evictable"], "resident");
    assert_eq!(grows.ask(&format!("alloc {}", 40 * MIB)), "0 0");
    assert_eq!(grows.ask("fill 0 9"), "0");
    Outcome::of(&mut sandbox.sublet(["evict", "holder"])).succeeded();
    let restore = Running::start(&mut sandbox.sublet(["restore", "holder"]));
    let begun = Instant::now();
    wait_until("it is on its way", || {
        let residence = sandbox.job_status("holder")?.residence?;
        (residence.resident_bytes > 0).then_some(())
    });
    // 8 MiB are lacking from here on.
    let took = grows.ask(&format!("alloc {}", 24 * MIB));
    let left = sandbox.job_status("holder").and_then(|job| job.residence);
    let was_away = left.is_some_and(|residence| residence.resident_bytes < 72 * MIB);
    assert!(took == "0 1" && was_away, "{took}: it came too late");
    assert_eq!(holder.ask("check 0 7"), "0 0");
    let back_ms = begun.elapsed().as_millis();
    let ended = restore.wait();
    let events = sandbox.events();
    let refused = (events.iter()).filter(|event| event.kind == "not_restored");
    let refused: Vec<_> = refused.map(|event| event.message.clone()).collect();
    println!(
        "now: a restore that comes to lack 8 MiB: back after {back_ms} ms, {} refused, `sublet restore` ends with {:?}",
        refused.len(),
        ended.code
    );
    assert_eq!(refused, Vec::<String>::new());
    assert_eq!(grows.ask("check 0 9"), "0 0");
    end(grows);
    end(holder);
}
