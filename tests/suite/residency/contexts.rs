//! Contexts that come and go while memory leaves the device and comes back.

use channel::{OrderState, Reason, Verb};
use tests::{ProgramRun, Sandbox, programs, wait_until};

use super::{Host, MIB, evictable, welcome};

/// Contexts that end in `way` in each of `threads`, with evictions all the time: none is refused
/// for what the program does with other contexts.
#[track_caller]
fn evictions_go_on(way: &str, threads: u32) {
    const MOVES: u32 = 6;
    let sandbox = Sandbox::exclusive();
    let (listening, mut command) = evictable(&sandbox, &programs::program("contexts"));
    command.args([way, &threads.to_string()]);
    let mut run = ProgramRun::start(command.env("SUBLET_RESIDENCY", "reuse=0"));
    let mut arbiter = welcome(&listening, false, None);
    assert_eq!(run.answer(), "started");
    let (mut orders, mut evicted, mut refused) = (0, 0, Vec::new());
    let contexts = wait_until("it was evicted, and contexts have ended", || {
        for _ in 0..2 {
            arbiter.close();
            arbiter.order(Verb::Evict, 0);
            orders += 1;
            match arbiter.answered() {
                (OrderState::Evicted, Reason::None) => {
                    evicted += 1;
                    arbiter.order(Verb::Restore, 0);
                    let restored = arbiter.answered();
                    assert_eq!(restored, (OrderState::Resident, Reason::None));
                }
                other => refused.push(other),
            }
            arbiter.open();
        }
        let contexts: u32 = run.ask("how far").parse().expect("a number");
        (orders >= MOVES && contexts > MOVES).then_some(contexts)
    });
    println!(
        "now: {} of {orders} evictions refused while {contexts} contexts were {way}",
        refused.len()
    );
    assert_eq!((refused, evicted), (Vec::new(), orders));
    let outcome = run.finish();
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let words: Vec<&str> = outcome.stdout.split_whitespace().collect();
    assert_eq!(
        words[1..],
        ["0", "0", "0"],
        "wrong words, errors, last error"
    );
}

#[test]
fn evictions_go_on_while_threads_create_and_destroy_contexts() {
    evictions_go_on("created", 2);
}

#[test]
fn evictions_go_on_after_the_last_reference_to_a_context_is_given_back() {
    evictions_go_on("detached", 1);
}

#[test]
fn evictions_go_on_while_the_primary_context_is_released() {
    evictions_go_on("released", 2);
}

#[test]
fn evictions_go_on_while_the_primary_context_is_reset() {
    evictions_go_on("reset", 1);
}

#[test]
fn evictions_go_on_while_green_contexts_come_and_go() {
    evictions_go_on("green", 2);
}

#[test]
fn memory_that_is_mapped_is_evicted_when_the_context_that_it_was_copied_in_has_gone() {
    let mut host = Host::start();
    host.says("push", "0");
    let id = host.take(&format!("vmm {}", 4 * MIB));
    host.says(&format!("fill {id} 3"), "0");
    host.evict();
    host.restore();
    host.says("destroy", "0");
    // It has no other context for now; then the next one of its device is it.
    host.says(&format!("check {id} 3"), "0 0");
    host.evict();
    let left = host.on_the_device();
    println!("now: {left} of {} bytes left on the device", 4 * MIB);
    assert_eq!(left, 0);
    host.restore();
    host.says(&format!("check {id} 3"), "0 0");
    host.ended_well();
}
