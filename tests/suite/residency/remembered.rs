//! Memory that somebody knows by more than its address stays where it is.

use channel::{OrderState, Reason, Verb};
use tests::{ProgramRun, Sandbox, programs, wait_until};

use super::{Host, MIB};

#[test]
fn other_pages_at_the_same_address_leave_a_registration_waiting_for_ever() {
    // Without us, and by hand, what an eviction does: why such memory must not move.
    let sandbox = Sandbox::exclusive();
    let mut run = ProgramRun::start(&mut sandbox.bare(programs::program("resident")));
    let mut says = |line: &str, answer: &str| assert_eq!(run.ask(line), answer, "{line}");
    says("init", "0");
    says(&format!("vmm {}", 2 * MIB), "0 0");
    says("poke 0 3", "0");
    // As another process has it, or a network adapter.
    says("alias 0", "0 1");
    says("word 1", "0 3");
    says("remap 0", "0");
    says("word 0", "0 3");
    says("expect 0 7", "0");
    says("poke 1 7", "0");
    // The stream waits for a word that was written, to pages that nobody sees at this address any
    // more.
    says("word 1", "0 7");
    says("word 0", "0 3");
    says("reached", "600");
    says("poke 0 7", "0");
    wait_until("the stream goes on", || {
        (run.ask("reached") == "0").then_some(())
    });
    run.ended_well();
}

#[test]
fn what_another_process_has_is_reached_after_an_eviction() {
    let mut host = Host::start();
    let moves = host.take(&format!("alloc {}", 4 * MIB));
    host.says(&format!("fill {moves} 1"), "0");
    let own = host.take(&format!("vmm {}", 2 * MIB));
    let alias = host.take(&format!("alias {own}"));
    for round in 5..8 {
        host.evict();
        assert_eq!(host.on_the_device(), 2 * MIB, "it stays, the rest leaves");
        host.restore();
        host.says(&format!("expect {own} {round}"), "0");
        host.says(&format!("poke {alias} {round}"), "0");
        wait_until("the stream goes on", || {
            (host.run.ask("reached") == "0").then_some(())
        });
    }
    host.says(&format!("check {moves} 1"), "0 0");
    host.ended_well();
}

/// What is evictable before and after `calls` are made of a new handle of 2 MiB, which are answered
/// 0.
fn evictable_after(host: &mut Host, make: &str, calls: &[&str]) -> u64 {
    let id = host.take(&format!("{make} {}", 2 * MIB));
    for call in calls {
        host.says(&format!("{call} {id}"), "0");
    }
    let evictable = host.arbiter.footprint().evictable_bytes;
    host.says(&format!("check {id} 9"), &format!("0 {}", 2 * MIB / 4));
    host.says(&format!("unmap {id}"), "0");
    evictable
}

#[test]
fn every_way_to_be_known_by_more_than_an_address_keeps_memory_on_the_device() {
    for (words, make, calls, moves) in [
        ("reuse=0", "vmm", &[][..], true),
        ("reuse=0", "vmm", &["export"], false),
        ("reuse=0", "vmm", &["descriptor"], false),
        ("reuse=0", "vmm", &["hold"], false),
        // For as long as it is held.
        ("reuse=0", "vmm", &["hold", "let"], true),
        ("reuse=0", "vmm", &["hold", "hold", "let"], false),
        ("reuse=0,rdma=0", "adapter", &[], true),
        ("reuse=0,rdma=0", "adapter", &["tokens"], false),
        // Where a network adapter's driver can learn of it without a call that we see.
        ("reuse=0,rdma=1", "adapter", &[], false),
        ("reuse=0,rdma=1", "vmm", &[], true),
    ] {
        let mut host = Host::with(&[("SUBLET_RESIDENCY", words)], false, None);
        let evictable = evictable_after(&mut host, make, calls);
        assert_eq!(evictable != 0, moves, "{words} {make} {calls:?}");
        host.ended_well();
    }
}

#[test]
fn an_eviction_of_memory_that_others_know_is_refused_with_the_reason() {
    let mut host = Host::start();
    let id = host.take(&format!("vmm {}", 2 * MIB));
    host.says(&format!("fill {id} 2"), "0");
    host.says(&format!("descriptor {id}"), "0");
    host.arbiter.close();
    host.arbiter.order(Verb::Evict, 0);
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Refused, Reason::NothingEvictable)
    );
    host.arbiter.open();
    host.says(&format!("check {id} 2"), "0 0");
    // Plain memory of an evictable job cannot become known to others at all.
    let plain = host.take(&format!("alloc {}", 2 * MIB));
    host.says(&format!("ipc {plain}"), "1");
    host.says(&format!("tokens {plain}"), "801");
    host.evict();
    host.restore();
    host.ended_well();
}
