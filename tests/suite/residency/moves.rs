//! Everything leaves, and comes back as it was.

use std::time::Duration;

use channel::{OrderState, Reason, Verb};
use tests::fake::Attached;
use tests::{Artefacts, ProgramRun, Sandbox, programs, wait_until};

use super::{Host, MIB, evictable, welcome};

#[test]
fn memory_leaves_the_device_and_comes_back_as_it_was() {
    let mut host = Host::start();
    let sizes = [1000, 4096, 3 * MIB, 5 * MIB, 40 * MIB, 200 * MIB];
    let ids: Vec<String> = sizes
        .iter()
        .map(|bytes| host.take(&format!("alloc {bytes}")))
        .collect();
    for (seed, id) in ids.iter().enumerate() {
        host.says(&format!("fill {id} {seed}"), "0");
    }
    let held = host.arbiter.used_bytes();
    assert!(held >= sizes.iter().sum::<u64>(), "{held}");
    assert_eq!(host.on_the_device(), held);
    let before: Vec<String> = ids
        .iter()
        .map(|id| host.run.ask(&format!("address {id}")))
        .collect();

    for _ in 0..3 {
        host.evict();
        assert_eq!(host.on_the_device(), 0, "all of it has left");
        let footprint = host.arbiter.footprint();
        assert_eq!(
            (footprint.evictable_bytes, footprint.resident_bytes),
            (held, 0)
        );
        assert_eq!(footprint.host_bytes, held);
        assert_eq!(host.arbiter.used_bytes(), held, "the quota is still taken");
        host.restore();
        assert_eq!(host.on_the_device(), held);
        assert_eq!(host.arbiter.footprint().resident_bytes, held);
        for (seed, id) in ids.iter().enumerate() {
            host.says(&format!("check {id} {seed}"), "0 0");
        }
    }
    let after: Vec<String> = ids
        .iter()
        .map(|id| host.run.ask(&format!("address {id}")))
        .collect();
    assert_eq!(before, after);
    for id in &ids {
        host.says(&format!("free {id}"), "0");
    }
    let left = host.arbiter.footprint();
    assert!(left.evictable_bytes <= 64 * MIB, "one empty chunk at most");
    assert_eq!(host.on_the_device(), left.evictable_bytes);
    host.ended_well();
}

#[test]
fn calls_that_touch_memory_wait_while_it_is_out() {
    let mut host = Host::start();
    let id = host.take(&format!("alloc {}", 8 * MIB));
    host.says(&format!("fill {id} 7"), "0");
    host.says(&format!("graph {id} 77"), "0");
    for (call, answer) in [
        (format!("check {id} 7"), "0 0".to_owned()),
        ("alloc 4096".to_owned(), "0 1".to_owned()),
        ("replay".to_owned(), "0".to_owned()),
        (format!("write {id} 77"), "0".to_owned()),
        (format!("words {id} 77"), "0 0".to_owned()),
    ] {
        host.evict();
        // The gate is opened: what holds the call back is that the memory is out.
        host.arbiter.open();
        host.run.send(&call);
        wait_until("somebody wants the memory back", || {
            (host.arbiter.pages.client.waiting(0) > 0).then_some(())
        });
        assert_eq!(host.on_the_device(), 0, "{call}");
        // What needs no memory is answered meanwhile, by another thread or later; here the one
        // thread waits.
        host.restore();
        assert_eq!(host.run.answer(), answer, "{call}");
    }
    // What is given back need not come back for that.
    host.evict();
    host.says("free 1", "0");
    assert_eq!(host.on_the_device(), 0);
    host.restore();
    host.ended_well();
}

#[test]
fn memory_that_the_program_maps_itself_moves_with_its_handles() {
    let mut host = Host::start();
    let first = host.take(&format!("vmm {}", 6 * MIB));
    let second = host.take(&format!("vmm {}", 4 * MIB));
    for (id, seed) in [(&first, 1), (&second, 2)] {
        host.says(&format!("fill {id} {seed}"), "0");
    }
    // The usual way: the handle goes, the mapping holds the memory.
    host.says(&format!("release {second}"), "0");
    host.says(&format!("release {second}"), "1");
    assert_eq!(host.arbiter.footprint().evictable_bytes, 10 * MIB);
    for _ in 0..2 {
        host.evict();
        assert_eq!(host.on_the_device(), 0);
        host.restore();
        for (id, seed) in [(&first, 1), (&second, 2)] {
            host.says(&format!("check {id} {seed}"), "0 0");
        }
    }
    assert_eq!(host.arbiter.used_bytes(), 10 * MIB);
    // The program's number means the handle that there is now.
    host.says(&format!("unmap {first}"), "0");
    assert_eq!(
        host.arbiter.footprint().evictable_bytes,
        4 * MIB,
        "what is mapped nowhere cannot be copied"
    );
    host.evict();
    assert_eq!(host.on_the_device(), 6 * MIB);
    host.restore();
    host.says(&format!("map {first}"), "0");
    host.says(&format!("check {first} 1"), "0 0");
    host.says(&format!("retain {first}"), "0");
    host.says(&format!("unmap {second}"), "0");
    assert_eq!(host.on_the_device(), 6 * MIB);
    // Another process may have it: it stays.
    host.says(&format!("export {first}"), "0");
    assert_eq!(host.arbiter.footprint().evictable_bytes, 0);
    host.arbiter.order(Verb::Evict, 0);
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Refused, Reason::NothingEvictable)
    );
    host.says(&format!("check {first} 1"), "0 0");
    host.says(&format!("unmap {first}"), "0");
    host.says(&format!("release {first}"), "0");
    host.ended_well();
}

#[test]
fn the_numbers_of_mapped_memory_are_the_same_after_an_eviction() {
    const BUFFER_ID: u32 = 7;
    const MEMORY_BLOCK_ID: u32 = 20;
    let mut host = Host::start();
    let id = host.take(&format!("vmm {}", 4 * MIB));
    let ask = |host: &mut Host| {
        [BUFFER_ID, MEMORY_BLOCK_ID].map(|which| host.run.ask(&format!("attribute {id} {which}")))
    };
    let before = ask(&mut host);
    host.evict();
    host.restore();
    let after = ask(&mut host);
    println!("now: {before:?} before an eviction, {after:?} after it");
    assert_eq!(before, after);
    // While it is away the question waits for it, as other calls do.
    host.evict();
    host.run.send(&format!("attribute {id} {MEMORY_BLOCK_ID}"));
    wait_until("the question waits", || {
        (host.arbiter.pages.client.waiting(0) > 0).then_some(())
    });
    host.restore();
    assert_eq!(host.run.answer(), before[1]);
    // Asked together with tokens, after which it stays where it is.
    host.says(&format!("asked_with_tokens {id}"), &before[0]);
    host.ended_well();
}

/// Evicts and restores `times`, without a pause; how often it was evicted.
fn move_about(arbiter: &mut Attached, times: usize) -> usize {
    let mut evicted = 0;
    for _ in 0..times {
        arbiter.close();
        arbiter.order(Verb::Evict, 0);
        match arbiter.answered() {
            (OrderState::Evicted, Reason::None) => {
                evicted += 1;
                assert_eq!(arbiter.footprint().resident_bytes, 0);
                arbiter.order(Verb::Restore, 0);
                let restored = arbiter.answered();
                assert_eq!(restored, (OrderState::Resident, Reason::None));
            }
            // Somebody captures, or has nothing just now: the next time.
            (OrderState::Refused, Reason::Capturing | Reason::NothingEvictable) => {}
            other => panic!("{other:?}"),
        }
        arbiter.open();
    }
    evicted
}

#[test]
fn threads_that_never_rest_find_what_they_have_written() {
    let sandbox = Sandbox::exclusive();
    let (listening, mut command) = evictable(&sandbox, &programs::program("restless"));
    let mut run = ProgramRun::start(command.arg("4").env("SUBLET_RESIDENCY", "chunk=2097152"));
    let mut arbiter = welcome(&listening, false, None);
    assert_eq!(run.answer(), "started");
    let mut evicted = move_about(&mut arbiter, 60);
    // On a busy host the threads get little done between two evictions.
    wait_until("the threads have gone on", || {
        let iterations: u64 = run.ask("how far").parse().expect("a number");
        if iterations <= 20 || evicted <= 20 {
            evicted += move_about(&mut arbiter, 10);
        }
        (iterations > 20 && evicted > 20).then_some(())
    });
    let outcome = run.finish();
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let words: Vec<&str> = outcome.stdout.split_whitespace().collect();
    assert_eq!(
        words[1..],
        ["0", "0", "0"],
        "wrong words, errors, last error"
    );
    let left = arbiter.footprint();
    assert!(left.evictable_bytes <= 4 * MIB, "{left:?}");
}

#[test]
fn training_ends_with_the_same_loss_however_often_it_is_moved() {
    let steps = [
        "--steps",
        "600",
        "--extra-us",
        "500",
        "--progress-every",
        "0",
        "--json",
    ];
    let loss = |outcome: tests::Outcome| {
        let report = outcome.succeeded().json();
        report["loss_bits"].as_str().expect("the loss").to_owned()
    };
    let train_mlp = Artefacts::get().program("train_mlp");
    let bare = loss(tests::Outcome::of(
        Sandbox::exclusive().bare(&train_mlp).args(steps),
    ));
    let sandbox = Sandbox::exclusive();
    let (listening, mut command) = evictable(&sandbox, &train_mlp);
    let mut job = tests::Running::start(command.args(steps));
    let mut arbiter = welcome(&listening, false, None);
    wait_until("it trains", || {
        (arbiter.pages.client.launches() > 100 || job.has_ended()).then_some(())
    });
    let mut evicted = 0;
    while !job.has_ended() && evicted < 10 {
        arbiter.close();
        arbiter.order_within(Verb::Evict, 0, Duration::from_millis(500));
        let moved = wait_until("it is evicted or ends", || {
            let answer = arbiter.pages.client.answer(0)?;
            let evicted = answer.state == OrderState::Evicted;
            let refused = answer.state == OrderState::Refused;
            (evicted || refused || job.has_ended()).then_some(evicted)
        });
        if moved {
            evicted += 1;
            arbiter.order(Verb::Restore, 0);
            arbiter.answered();
        }
        arbiter.open();
    }
    assert!(evicted > 0);
    assert_eq!(loss(job.wait()), bare);
}

#[test]
fn what_has_not_changed_since_it_left_is_not_copied_out_again() {
    for reuse in [true, false] {
        let reuse_word = format!("chunk=4194304,reuse={}", u8::from(reuse));
        let mut host = Host::with(&[("SUBLET_RESIDENCY", &reuse_word)], false, None);
        let large = host.take(&format!("alloc {}", 30 * MIB));
        let small = host.take("alloc 100000");
        host.says(&format!("fill {large} 1"), "0");
        host.says(&format!("fill {small} 2"), "0");
        let held = host.arbiter.footprint().evictable_bytes;
        let mut moved = 0;
        let mut out = |host: &mut Host| {
            host.evict();
            let now = host.arbiter.footprint().moved_out_bytes;
            let by = now - moved;
            moved = now;
            host.restore();
            by
        };
        assert_eq!(out(&mut host), held);
        host.says(&format!("check {large} 1"), "0 0");
        assert_eq!(out(&mut host), if reuse { 0 } else { held });
        // One word of one MiB.
        host.says(&format!("write {large} 77"), "0");
        assert_eq!(out(&mut host), if reuse { MIB } else { held });
        host.says(&format!("check {large} 1"), "0 1");
        host.says(&format!("fill {small} 3"), "0");
        host.says(&format!("fill {large} 1"), "0");
        assert_eq!(out(&mut host), if reuse { 2 * MIB } else { held });
        host.says(&format!("check {large} 1"), "0 0");
        host.says(&format!("check {small} 3"), "0 0");
        host.ended_well();
    }
}

#[test]
fn a_program_ends_as_ever_while_its_memory_is_out() {
    let mut host = Host::start();
    let id = host.take(&format!("alloc {}", 20 * MIB));
    host.says(&format!("fill {id} 1"), "0");
    host.evict();
    host.ended_well();
}
