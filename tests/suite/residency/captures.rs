//! Memory that is allocated and freed beside a capture.

use super::{Host, MIB};

/// What the driver says where a capture forbids a call, and of a capture that is invalid.
const UNSUPPORTED: &str = "900";
const INVALIDATED: &str = "901";

impl Host {
    #[track_caller]
    fn address(&mut self, id: &str) -> u64 {
        let answer = self.run.ask(&format!("address {id}"));
        answer.parse().expect("an address")
    }
}

#[test]
fn a_free_beside_a_capture_succeeds_and_leaves_the_capture_valid() {
    let mut host = Host::start();
    let small = host.take("alloc 4096");
    let large = host.take(&format!("alloc {}", 24 * MIB));
    host.says("capture", "0");
    host.says(&format!("free {small}"), "0");
    host.says(&format!("free {large}"), "0");
    // As freed memory is, whether its place is another's yet or not.
    host.says(&format!("free {small}"), "1");
    host.says("captured", "0");
    let other = host.take("alloc 4096");
    host.says(&format!("free {other}"), "0");
    assert_eq!(host.arbiter.used_bytes(), 2 * MIB, "an empty chunk is kept");
    let again = host.take("alloc 4096");
    assert_eq!(host.address(&again), host.address(&small));
    host.ended_well();
}

#[test]
fn a_capture_that_forbids_allocations_and_frees_does_so_as_the_drivers_own() {
    let mut host = Host::start();
    for mode in [0, 1] {
        let id = host.take("alloc 4096");
        host.says(&format!("capture {mode}"), "0");
        host.says(&format!("free {id}"), UNSUPPORTED);
        host.says("captured", INVALIDATED);
        host.says(&format!("capture {mode}"), "0");
        assert_eq!(host.run.ask("alloc 4096"), format!("{UNSUPPORTED} -1"));
        host.says("captured", INVALIDATED);
        // It is there.
        host.says(&format!("fill {id} 3"), "0");
        host.says(&format!("check {id} 3"), "0 0");
        host.says(&format!("free {id}"), "0");
    }
    host.ended_well();
}

#[test]
fn what_is_freed_beside_a_capture_is_nobodys_before_work_that_was_there_is_over() {
    let mut host = Host::start();
    let freed = host.take("alloc 4096");
    host.says("await 5", "0");
    host.says("capture", "0");
    host.says(&format!("free {freed}"), "0");
    let beside = host.take("alloc 4096");
    host.says("captured", "0");
    let behind = host.take("alloc 4096");
    host.says("signal 5", "0");
    // A free waits for all of it.
    host.says(&format!("free {beside}"), "0");
    let after = [host.take("alloc 4096"), host.take("alloc 4096")];
    let freed = host.address(&freed);
    assert_ne!(host.address(&beside), freed);
    assert_ne!(host.address(&behind), freed);
    let after = after.map(|id| host.address(&id));
    println!("now: freed at {freed:#x}, given to the next at {after:#x?}");
    assert!(after.contains(&freed), "{freed:#x} {after:#x?}");
    host.ended_well();
}

#[test]
fn a_quota_that_is_full_of_memory_freed_beside_a_capture_has_space_again_after_it() {
    let mut host = Host::start();
    host.arbiter.pages.arbiter.set_limit(0, Some(32 * MIB));
    let whole = format!("alloc {}", 32 * MIB);
    for _ in 0..2 {
        let id = host.take(&whole);
        host.says("capture", "0");
        host.says(&format!("free {id}"), "0");
        // The same thread has to end the capture.
        assert_eq!(host.run.ask(&whole), "2 -1");
        host.says("captured", "0");
        let id = host.take(&whole);
        host.evict();
        host.restore();
        host.says(&format!("free {id}"), "0");
    }
    host.ended_well();
}
