//! What fits on the device and in host memory.

use std::time::Duration;

use channel::{OrderState, Reason, ResidencyMode, Verb};
use tests::{ProgramRun, Sandbox, programs, wait_until};

use super::{Host, MIB, evictable, welcome};

#[test]
fn what_does_not_fit_on_the_host_stays_where_it_is() {
    let mut host = Host::with(&[], false, Some(20 * MIB));
    let id = host.take(&format!("alloc {}", 24 * MIB));
    host.says(&format!("fill {id} 1"), "0");
    host.arbiter.close();
    host.arbiter.order(Verb::Evict, 0);
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Refused, Reason::HostBudget)
    );
    assert_eq!(host.arbiter.footprint().resident_bytes, 24 * MIB);
    assert_eq!(host.arbiter.footprint().host_bytes, 0);
    host.arbiter.open();
    host.says(&format!("check {id} 1"), "0 0");
    host.ended_well();
}

#[test]
fn a_job_is_fitted_into_fewer_bytes_and_uses_all_of_them() {
    let mut host = Host::with(&[("SUBLET_RESIDENCY", "chunk=4194304,reuse=0")], true, None);
    let ids: Vec<String> = (0..4)
        .map(|_| host.take(&format!("alloc {}", 8 * MIB)))
        .collect();
    for (seed, id) in ids.iter().enumerate() {
        host.says(&format!("fill {id} {seed}"), "0");
    }
    for (target, resident, state) in [
        (13 * MIB, 12 * MIB, OrderState::Partly),
        (0, 0, OrderState::Partly),
        (20 * MIB, 20 * MIB, OrderState::Partly),
        (64 * MIB, 32 * MIB, OrderState::Resident),
    ] {
        host.arbiter.order(Verb::Fit, target);
        assert_eq!(host.arbiter.answered(), (state, Reason::None), "{target}");
        let footprint = host.arbiter.footprint();
        assert_eq!(footprint.resident_bytes, resident, "{target}");
        assert_eq!(footprint.host_bytes, 32 * MIB - resident, "{target}");
        assert_eq!(host.on_the_device(), resident, "{target}");
        for (seed, id) in ids.iter().enumerate() {
            host.says(&format!("check {id} {seed}"), "0 0");
        }
    }
    // Evicted while partly in host memory: what is there stays usable where it is.
    host.arbiter.order(Verb::Fit, 16 * MIB);
    assert_eq!(host.arbiter.answered().0, OrderState::Partly);
    host.evict();
    assert_eq!(host.on_the_device(), 0);
    host.arbiter.order(Verb::Restore, 0);
    assert_eq!(host.arbiter.answered(), (OrderState::Partly, Reason::None));
    host.arbiter.open();
    for (seed, id) in ids.iter().enumerate() {
        host.says(&format!("check {id} {seed}"), "0 0");
    }
    for id in &ids {
        host.says(&format!("free {id}"), "0");
    }
    assert_eq!(host.on_the_device(), 0);
    assert_eq!(host.arbiter.footprint().host_bytes, 0);
    host.ended_well();
}

#[test]
fn what_is_beyond_the_quota_lives_in_host_memory_if_it_may() {
    for overflow in [false, true] {
        let mut host = Host::with(&[], overflow, Some(40 * MIB));
        host.arbiter.pages.arbiter.set_limit(0, Some(64 * MIB));
        let first = host.take(&format!("alloc {}", 64 * MIB));
        host.says("info", &format!("0 0 {}", 64 * MIB));
        if !overflow {
            host.says(&format!("alloc {}", 20 * MIB), "2 -1");
            host.says("alloc 1", "2 -1");
            host.ended_well();
            continue;
        }
        let second = host.take(&format!("alloc {}", 20 * MIB));
        host.says(&format!("fill {second} 9"), "0");
        host.says(&format!("fill {first} 8"), "0");
        assert_eq!(host.on_the_device(), 64 * MIB);
        assert_eq!(host.arbiter.footprint().host_bytes, 20 * MIB);
        host.says("info", &format!("0 0 {}", 64 * MIB));
        // The host budget is an end as well.
        host.says(&format!("alloc {}", 24 * MIB), "2 -1");
        host.says(&format!("check {second} 9"), "0 0");
        host.says(&format!("free {first}"), "0");
        let third = host.take(&format!("alloc {}", 64 * MIB));
        assert_eq!(
            host.on_the_device(),
            64 * MIB,
            "space within the quota is space on the device"
        );
        host.says(&format!("free {third}"), "0");
        host.says(&format!("free {second}"), "0");
        host.ended_well();
    }
}

#[test]
fn an_allocation_waits_for_memory_that_another_tenant_is_to_leave() {
    let mut host = Host::start();
    assert_eq!(
        host.witness.ask(&format!("alloc plain {}", 8000 * MIB)),
        "0 0"
    );
    host.run.send(&format!("alloc {}", 256 * MIB));
    wait_until("it asks for space", || {
        (host.arbiter.pages.client.space_bytes(0) == 256 * MIB).then_some(())
    });
    assert_eq!(host.witness.ask("free 0"), "0");
    assert_eq!(host.run.answer(), "0 0");
    assert_eq!(host.arbiter.pages.client.space_bytes(0), 0);
    host.says("fill 0 5", "0");
    // The same for a restore.
    host.evict();
    assert_eq!(
        host.witness.ask(&format!("alloc plain {}", 8000 * MIB)),
        "0 1"
    );
    host.arbiter
        .order_within(Verb::Restore, 0, Duration::from_millis(100));
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Refused, Reason::DeviceMemory)
    );
    assert_eq!(host.arbiter.footprint().resident_bytes, 0);
    host.arbiter.order(Verb::Restore, 0);
    assert_eq!(host.witness.ask("free 1"), "0");
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Resident, Reason::None)
    );
    host.arbiter.open();
    host.says("check 0 5", "0 0");
    host.ended_well();
}

#[test]
fn host_memory_is_made_ready_before_it_is_needed_within_the_budget() {
    const BUDGET: u64 = 160 * MIB;
    let mut host = Host::with(&[], false, Some(BUDGET));
    let mode = |prepare| ResidencyMode {
        evictable: true,
        prepare,
        ..ResidencyMode::default()
    };
    let ids: Vec<String> = (0..3)
        .map(|_| host.take(&format!("alloc {}", 64 * MIB)))
        .collect();
    for (seed, id) in ids.iter().enumerate() {
        host.says(&format!("fill {id} {seed}"), "0");
    }
    assert_eq!(
        host.arbiter.footprint().host_bytes,
        0,
        "nobody asked for it"
    );
    let half = |host: &Host, mode, budget| {
        host.arbiter.pages.arbiter.set_residency(mode, Some(budget));
    };
    half(&host, mode(true), BUDGET);
    wait_until("two of three are ready", || {
        (host.arbiter.footprint().host_bytes == 128 * MIB).then_some(())
    });
    // The job is at work meanwhile, and its contexts come and go.
    let more = host.take(&format!("alloc {}", 64 * MIB));
    host.says(&format!("check {} 0", ids[0]), "0 0");
    assert_eq!(
        host.arbiter.footprint().host_bytes,
        128 * MIB,
        "a budget is a budget"
    );
    half(&host, mode(true), 4 * BUDGET);
    wait_until("all of it is ready", || {
        (host.arbiter.footprint().host_bytes == 256 * MIB).then_some(())
    });
    assert_eq!(host.arbiter.footprint().resident_bytes, 256 * MIB);
    host.evict();
    assert_eq!(host.arbiter.footprint().host_bytes, 256 * MIB);
    host.restore();
    for (seed, id) in ids.iter().enumerate() {
        host.says(&format!("check {id} {seed}"), "0 0");
    }
    host.says(&format!("free {more}"), "0");
    half(&host, mode(false), 64 * MIB);
    wait_until("what is beyond the budget is given back", || {
        (host.arbiter.footprint().host_bytes <= 64 * MIB).then_some(())
    });
    host.ended_well();
}

#[test]
fn a_context_waits_for_memory_that_another_tenant_is_to_leave() {
    let mut sandbox = Sandbox::exclusive();
    sandbox.set("SUBLET_SIM_CONTEXT", "256MiB");
    let mut witness = ProgramRun::start(&mut sandbox.bare(programs::program("memory")));
    assert_eq!(witness.ask("init"), "0");
    assert_eq!(
        witness.ask(&format!("alloc plain {}", 7800 * MIB)),
        "0 0",
        "136 MiB are left"
    );
    let (listening, mut command) = evictable(&sandbox, &programs::program("resident"));
    let mut run = ProgramRun::start(&mut command);
    run.send("init");
    let arbiter = welcome(&listening, false, None);
    wait_until("it asks for space", || {
        (arbiter.pages.client.space_bytes(0) == 512 * MIB).then_some(())
    });
    assert_eq!(witness.ask("free 0"), "0");
    assert_eq!(run.answer(), "0");
    assert_eq!(arbiter.pages.client.space_bytes(0), 0);
}
