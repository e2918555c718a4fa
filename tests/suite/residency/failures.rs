//! What is refused, what fails, and who helps.

use std::time::Duration;

use channel::{Event, OrderState, Reason, Verb};
use tests::wait_until;

use super::{Host, MIB};

#[test]
fn a_capture_that_begins_while_an_eviction_waits_for_the_device_stays_valid() {
    // The call that invalidates captures takes a while, and one begins after the look whether there
    // is any.
    let fault = [("SUBLET_SIM_FAULT", "slow:call=cuCtxRecordEvent,us=1500000")];
    let mut host = Host::with(&fault, false, None);
    let id = host.take(&format!("alloc {}", 4 * MIB));
    host.says(&format!("fill {id} 3"), "0");
    host.arbiter.close();
    let number = host.arbiter.order(Verb::Evict, 0);
    wait_until("the agent is at it", || {
        let answer = host.arbiter.pages.client.answer(0)?;
        (answer.number == number && answer.state != OrderState::None).then_some(())
    });
    host.says("capture", "0");
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Refused, Reason::Capturing)
    );
    host.says("captured", "0");
    host.arbiter.open();
    host.evict();
    host.restore();
    host.says(&format!("check {id} 3"), "0 0");
    host.ended_well();
}

#[test]
fn an_eviction_that_another_order_replaces_stops_between_two_chunks() {
    const BYTES: u64 = 64 * MIB;
    let vars = [
        ("SUBLET_RESIDENCY", "chunk=4194304,depth=1,reuse=0"),
        (
            "SUBLET_SIM_FAULT",
            "slow:call=cuMemcpyDtoHAsync_v2,us=100000",
        ),
    ];
    let mut host = Host::with(&vars, false, None);
    let id = host.take(&format!("alloc {BYTES}"));
    host.says(&format!("fill {id} 3"), "0");
    host.arbiter.close();
    host.arbiter.order(Verb::Evict, 0);
    wait_until("a chunk has left", || {
        (host.arbiter.footprint().moved_out_bytes > 0).then_some(())
    });
    host.arbiter.order(Verb::Restore, 0);
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Resident, Reason::None)
    );
    let moved = host.arbiter.footprint().moved_out_bytes;
    println!("now: {moved} of {BYTES} bytes had left");
    assert!(moved < BYTES, "{moved}");
    host.arbiter.open();
    host.says(&format!("check {id} 3"), "0 0");
    host.ended_well();
}

#[test]
fn one_failed_load_of_the_hashing_kernel_is_not_for_ever() {
    let vars = [
        (
            "SUBLET_SIM_FAULT",
            "fail:call=cuModuleLoadData,status=2,after=0,times=2",
        ),
        ("SUBLET_RESIDENCY", ""),
    ];
    let mut host = Host::with(&vars, false, None);
    let id = host.take(&format!("alloc {}", 12 * MIB));
    host.says(&format!("fill {id} 4"), "0");
    host.arbiter.records();
    let mut copied = 0;
    let mut said = Vec::new();
    let mut by_round = Vec::new();
    for _ in 0..6 {
        host.evict();
        host.restore();
        let now = host.arbiter.footprint().moved_out_bytes;
        by_round.push(now - copied);
        copied = now;
        said.extend(host.arbiter.records());
    }
    // Two failures, one eviction without a try, one that takes the hashes; from then on nothing has
    // changed.
    let all = 12 * MIB;
    assert_eq!(by_round, [all, all, all, all, 0, 0]);
    assert_eq!(said, [Event::NoHashes { status: 2 }], "reported once");
    host.says(&format!("check {id} 4"), "0 0");
    host.ended_well();
}

#[test]
fn a_full_device_is_waited_for_and_not_asked_again_and_again() {
    let vars = [
        (
            "SUBLET_SIM_FAULT",
            "fail:call=cuMemCreate,status=2,after=2,times=200",
        ),
        ("SUBLET_RESIDENCY", "chunk=2097152,reuse=0"),
    ];
    let mut host = Host::with(&vars, false, None);
    let id = host.take(&format!("alloc {}", 4 * MIB));
    host.says(&format!("fill {id} 4"), "0");
    host.evict();
    // Nobody reports free space: a second is not enough for 200 questions.
    host.arbiter
        .order_within(Verb::Restore, 0, Duration::from_secs(1));
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Refused, Reason::DeviceMemory)
    );
    // Each time that somebody has left it asks at once.
    let number = host.arbiter.order(Verb::Restore, 0);
    wait_until("it has asked often enough", || {
        host.arbiter.pages.arbiter.nudge();
        let answer = host.arbiter.pages.client.answer(0)?;
        (answer.number == number && answer.state == OrderState::Resident).then_some(())
    });
    host.arbiter.open();
    host.says(&format!("check {id} 4"), "0 0");
    host.ended_well();
}

#[test]
fn host_memory_is_taken_when_it_is_this_clients_turn() {
    let vars = [("SUBLET_RESIDENCY", "reuse=0,turn=600000")];
    let mut host = Host::with(&vars, false, None);
    host.arbiter.pages.arbiter.ask_before_pinning();
    let id = host.take(&format!("alloc {}", 4 * MIB));
    host.says(&format!("fill {id} 4"), "0");
    host.arbiter.close();
    host.arbiter.order(Verb::Evict, 0);
    let client = &host.arbiter.pages.client;
    let request = wait_until("it asks for a turn", || {
        Some(client.wants_to_pin()).filter(|number| *number != 0)
    });
    assert_eq!(host.arbiter.footprint().host_bytes, 0, "nothing before it");
    host.arbiter
        .pages
        .arbiter
        .permit_pinning(request, u64::MAX >> 8);
    assert_eq!(host.arbiter.answered(), (OrderState::Evicted, Reason::None));
    assert_eq!(
        host.arbiter.pages.client.wants_to_pin(),
        0,
        "the turn is given back"
    );
    host.restore();
    // What is locked already needs no turn.
    host.evict();
    host.restore();
    host.says(&format!("check {id} 4"), "0 0");
    host.ended_well();
}

#[test]
fn who_gets_no_turn_in_time_leaves_all_the_same() {
    let vars = [("SUBLET_RESIDENCY", "reuse=0,turn=50")];
    let mut host = Host::with(&vars, false, None);
    host.arbiter.pages.arbiter.ask_before_pinning();
    let id = host.take(&format!("alloc {}", 4 * MIB));
    host.says(&format!("fill {id} 4"), "0");
    host.evict();
    host.restore();
    host.says(&format!("check {id} 4"), "0 0");
    host.ended_well();
}

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
    let before = host.on_the_device();
    let goes = host.take(&format!("alloc {}", 80 * MIB));
    let small = host.take("alloc 100");
    host.says(&format!("fill {goes} 2"), "0");
    host.evict();
    assert_eq!(host.on_the_device(), 0);
    host.restore();
    host.says(&format!("check {goes} 2"), "0 0");
    host.says(&format!("check {stays} 1"), "0 0");
    host.says("destroy", "0");
    assert_eq!(host.on_the_device(), before);
    assert_eq!(host.arbiter.used_bytes(), before);
    for id in [&goes, &small] {
        assert_ne!(host.run.ask(&format!("free {id}")), "0");
    }
    host.says("init", "0");
    host.evict();
    assert_eq!(host.on_the_device(), 0);
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
    // A restore that cannot be carried out: nothing is lost, and calls fail instead of waiting for
    // ever.
    for call in [
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemcpyHtoDAsync_v2",
        "cuMemCreate",
    ] {
        let chunks = if call == "cuMemcpyHtoDAsync_v2" { 2 } else { 8 };
        let fault = fails(call, 999, chunks);
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
        assert_eq!(host.on_the_device(), 0, "{fault}");
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
    assert_eq!(host.on_the_device(), 6 * MIB);
    host.ended_well();
}
