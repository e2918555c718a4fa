//! What is refused, what fails, and who helps.

use std::time::Duration;

use channel::{OrderState, Reason, Verb};

use super::{Host, MIB};

#[test]
fn a_job_that_is_not_quiet_is_not_evicted() {
    let mut host = Host::start();
    let id = host.take(&format!("alloc {}", 4 * MIB));
    host.says(&format!("fill {id} 3"), "0");
    host.says("capture", "0");
    host.arbiter.close();
    host.arbiter.order(Verb::Evict, 0);
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Refused, Reason::Capturing)
    );
    host.says("captured", "0");
    // A stream that waits for something that only the program can do.
    host.arbiter.open();
    host.says("await 5", "0");
    host.arbiter.close();
    host.arbiter
        .order_within(Verb::Evict, 0, Duration::from_millis(200));
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Refused, Reason::NotDrained)
    );
    host.says("signal 5", "0");
    host.arbiter.open();
    host.says(&format!("check {id} 3"), "0 0");
    host.evict();
    host.restore();
    host.says(&format!("check {id} 3"), "0 0");
    host.ended_well();
}

#[test]
fn a_context_takes_its_memory_with_it() {
    let mut host = Host::start();
    let stays = host.take(&format!("alloc {}", 2 * MIB));
    host.says(&format!("fill {stays} 1"), "0");
    host.says("push", "0");
    let before = host.on_the_card();
    let goes = host.take(&format!("alloc {}", 80 * MIB));
    let small = host.take("alloc 100");
    host.says(&format!("fill {goes} 2"), "0");
    host.evict();
    assert_eq!(host.on_the_card(), 0);
    host.restore();
    host.says(&format!("check {goes} 2"), "0 0");
    host.says(&format!("check {stays} 1"), "0 0");
    host.says("destroy", "0");
    assert_eq!(host.on_the_card(), before);
    assert_eq!(host.arbiter.used_bytes(), before);
    for id in [&goes, &small] {
        assert_ne!(host.talk.ask(&format!("free {id}")), "0");
    }
    host.says("init", "0");
    host.evict();
    assert_eq!(host.on_the_card(), 0);
    host.restore();
    host.says(&format!("check {stays} 1"), "0 0");
    host.ended_well();
}

#[test]
fn a_failure_at_any_step_leaves_the_job_resident_or_says_so() {
    let fails = |call: &str, status: u32, after: u32| {
        format!("fail:call={call},status={status},after={after}")
    };
    // Everything of an eviction: what has left by then comes back.
    for (call, after) in [
        ("cuMemcpyDtoHAsync_v2", 0),
        ("cuMemcpyDtoHAsync_v2", 3),
        ("cuMemUnmap", 0),
        ("cuMemUnmap", 2),
        ("cuMemRelease", 1),
        ("cuCtxRecordEvent", 0),
        ("cuStreamCreate", 0),
    ] {
        let fault = fails(call, 999, after);
        let vars = [
            ("SUBLET_SIM_FAULT", fault.as_str()),
            ("SUBLET_RESIDENCY", "chunk=2097152,depth=2,reuse=0"),
        ];
        let mut host = Host::with(&vars, false, None);
        let id = host.take(&format!("alloc {}", 12 * MIB));
        host.says(&format!("fill {id} 4"), "0");
        host.arbiter.close();
        host.arbiter.order(Verb::Evict, 0);
        let (state, reason) = host.arbiter.answered();
        assert_eq!(reason, Reason::Driver, "{fault}");
        assert_eq!(state, OrderState::Refused, "{fault}");
        host.arbiter.open();
        assert_eq!(host.arbiter.footprint().resident_bytes, 12 * MIB, "{fault}");
        host.says(&format!("check {id} 4"), "0 0");
        host.ended_well();
    }
    // Without pinned memory, events or hashes it is slower, and that is all.
    for (call, after) in [
        ("cuMemHostRegister_v2", 1),
        ("cuEventRecord", 1),
        ("cuModuleLoadData", 0),
        ("cuLaunchKernel", 0),
        ("cuMemHostAlloc", 0),
    ] {
        let fault = fails(call, 999, after);
        let vars = [
            ("SUBLET_SIM_FAULT", fault.as_str()),
            ("SUBLET_RESIDENCY", ""),
        ];
        let mut host = Host::with(&vars, false, None);
        let id = host.take(&format!("alloc {}", 12 * MIB));
        host.says(&format!("fill {id} 4"), "0");
        for _ in 0..2 {
            host.evict();
            host.restore();
            host.says(&format!("check {id} 4"), "0 0");
        }
        host.ended_well();
    }
    // A restore that cannot be carried out: nothing is lost, and calls are told instead of waiting for ever.
    for call in [
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemcpyHtoDAsync_v2",
        "cuMemCreate",
    ] {
        let pieces = if call == "cuMemcpyHtoDAsync_v2" { 2 } else { 8 };
        let fault = fails(call, 999, pieces);
        let vars = [
            ("SUBLET_SIM_FAULT", fault.as_str()),
            ("SUBLET_RESIDENCY", "chunk=2097152,reuse=0"),
        ];
        let mut host = Host::with(&vars, false, None);
        let id = host.take(&format!("alloc {}", 12 * MIB));
        host.says(&format!("fill {id} 4"), "0");
        host.evict();
        host.arbiter.order(Verb::Restore, 0);
        assert_eq!(
            host.arbiter.answered(),
            (OrderState::Failed, Reason::Driver),
            "{fault}"
        );
        host.arbiter.open();
        assert_eq!(host.on_the_card(), 0, "{fault}");
        host.says(&format!("fill {id} 4"), "999");
        host.ended_well();
    }
}

#[test]
fn a_job_whose_arbiter_is_silent_brings_itself_back() {
    let mut host = Host::start();
    let id = host.take(&format!("alloc {}", 6 * MIB));
    host.says(&format!("fill {id} 6"), "0");
    host.evict();
    host.arbiter.pages.arbiter.beat(1);
    host.says(&format!("check {id} 6"), "0 0");
    assert_eq!(host.on_the_card(), 6 * MIB);
    host.ended_well();
}
