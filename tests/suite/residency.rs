//! Memory that leaves the device and comes back, seen from the arbiter's end of the channel.

use std::time::Duration;

use channel::{OrderState, Reason, ResidencyMode, Verb};
use tests::fake::{Attached, Listening, TOKEN};
use tests::{Artefacts, Room, Talk, programs, wait_until};

const MIB: u64 = 1 << 20;

/// `program`, whose memory can be moved, and the socket of its arbiter.
fn evictable(room: &Room, program: &std::path::Path) -> (Listening, std::process::Command) {
    let listening = Listening::at(&room.path("channel.sock"));
    let mut command = room.bare(program);
    command
        .env("LD_PRELOAD", Artefacts::get().preload())
        .env("SUBLET_DRIVER", Artefacts::get().simulated_driver())
        .env("SUBLET_SOCKET", listening.path())
        .env("SUBLET_TOKEN", TOKEN);
    (listening, command)
}

fn welcome(listening: &Listening, overflow: bool, host_budget: Option<u64>) -> Attached {
    listening.welcome_with(|pages| {
        let mode = ResidencyMode {
            evictable: true,
            overflow,
            prepare: false,
        };
        pages.arbiter.set_residency(mode, host_budget);
    })
}

/// The program `resident`, and the arbiter's end of its channel.
struct Host {
    talk: Talk,
    arbiter: Attached,
    witness: Talk,
    _room: Room,
}

impl Host {
    fn start() -> Self {
        Self::with(&[], false, None)
    }

    /// With variables of its own, overflow to host memory allowed or not, and a host budget.
    fn with(vars: &[(&str, &str)], overflow: bool, host_budget: Option<u64>) -> Self {
        let room = Room::new();
        let (listening, mut command) = evictable(&room, &programs::program("resident"));
        // The kernel that hashes takes memory of the device, and these tests count every byte.
        command.env("SUBLET_RESIDENCY", "reuse=0");
        let mut talk = Talk::start(command.envs(vars.iter().copied()));
        talk.send("init");
        let arbiter = welcome(&listening, overflow, host_budget);
        assert_eq!(talk.answer(), "0");
        let mut witness = Talk::start(&mut room.bare(programs::program("memory")));
        assert_eq!(witness.ask("init"), "0");
        Self {
            talk,
            arbiter,
            witness,
            _room: room,
        }
    }

    #[track_caller]
    fn says(&mut self, line: &str, answer: &str) {
        assert_eq!(self.talk.ask(line), answer, "{line}");
    }

    #[track_caller]
    fn take(&mut self, line: &str) -> String {
        let answer = self.talk.ask(line);
        let (status, id) = answer.split_once(' ').expect("status and number");
        assert_eq!(status, "0", "{line}");
        id.to_owned()
    }

    /// The arbiter's part of an eviction: nobody is let in, then the order.
    #[track_caller]
    fn evict(&mut self) {
        self.arbiter.close();
        self.arbiter.order(Verb::Evict, 0);
        assert_eq!(self.arbiter.answered(), (OrderState::Evicted, Reason::None));
    }

    #[track_caller]
    fn restore(&mut self) {
        self.arbiter.order(Verb::Restore, 0);
        assert_eq!(
            self.arbiter.answered(),
            (OrderState::Resident, Reason::None)
        );
        self.arbiter.open();
    }

    /// What the simulated device has given to anybody, as it tells a stranger.
    #[track_caller]
    fn on_the_card(&mut self) -> u64 {
        let answer = self.witness.ask("info");
        let words: Vec<u64> = answer
            .split(' ')
            .map(|word| word.parse().expect("a number"))
            .collect();
        assert_eq!(words[0], 0, "{answer}");
        words[2] - words[1]
    }

    #[track_caller]
    fn ended_well(self) {
        let outcome = self.talk.finish();
        assert_eq!(
            (
                outcome.code,
                outcome.stderr.as_str(),
                outcome.stdout.as_str()
            ),
            (Some(0), "", "")
        );
    }
}

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
    assert_eq!(host.on_the_card(), held);
    let before: Vec<String> = ids
        .iter()
        .map(|id| host.talk.ask(&format!("address {id}")))
        .collect();

    for _ in 0..3 {
        host.evict();
        assert_eq!(host.on_the_card(), 0, "all of it has left");
        let footprint = host.arbiter.footprint();
        assert_eq!(
            (footprint.evictable_bytes, footprint.resident_bytes),
            (held, 0)
        );
        assert_eq!(footprint.host_bytes, held);
        assert_eq!(host.arbiter.used_bytes(), held, "the quota is still taken");
        host.restore();
        assert_eq!(host.on_the_card(), held);
        assert_eq!(host.arbiter.footprint().resident_bytes, held);
        for (seed, id) in ids.iter().enumerate() {
            host.says(&format!("check {id} {seed}"), "0 0");
        }
    }
    let after: Vec<String> = ids
        .iter()
        .map(|id| host.talk.ask(&format!("address {id}")))
        .collect();
    assert_eq!(before, after);
    for id in &ids {
        host.says(&format!("free {id}"), "0");
    }
    let left = host.arbiter.footprint();
    assert!(left.evictable_bytes <= 64 * MIB, "one empty chunk at most");
    assert_eq!(host.on_the_card(), left.evictable_bytes);
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
        ("free 1".to_owned(), "0".to_owned()),
    ] {
        host.evict();
        // The gate is opened: what holds the call back is that the memory is out.
        host.arbiter.open();
        host.talk.send(&call);
        wait_until("somebody wants the memory back", || {
            (host.arbiter.pages.client.waiting(0) > 0).then_some(())
        });
        assert_eq!(host.on_the_card(), 0, "{call}");
        // What needs no memory is answered meanwhile, by another thread or later; here the one thread waits.
        host.restore();
        assert_eq!(host.talk.answer(), answer, "{call}");
    }
    host.ended_well();
}

#[test]
fn an_address_is_what_it_would_be_of_plain_memory() {
    let mut host = Host::start();
    let small = host.take("alloc 1000");
    let large = host.take(&format!("alloc {}", 100 * MIB + 5));
    for (id, bytes) in [(&small, 1000), (&large, 100 * MIB + 5)] {
        for offset in [0, 1, 512, bytes - 1] {
            host.says(&format!("range {id} {offset}"), &format!("0 0 {bytes}"));
        }
        let address = host.talk.ask(&format!("address {id}"));
        for (attribute, value) in [
            (2, "2".to_owned()),
            (3, address.clone()),
            (8, "0".to_owned()),
            (9, "0".to_owned()),
            (10, "0".to_owned()),
            (11, address.clone()),
            (12, bytes.to_string()),
            (13, "1".to_owned()),
        ] {
            host.says(
                &format!("attribute {id} {attribute}"),
                &format!("0 {value}"),
            );
        }
        assert_ne!(
            host.talk.ask(&format!("attribute {id} 1")),
            "0 0",
            "a context"
        );
        // The driver's own error: no other process can open what may be moved.
        assert_ne!(host.talk.ask(&format!("ipc {id}")), "0");
        assert_ne!(host.talk.ask(&format!("retain {id}")), "0");
    }
    let buffers = [&small, &large].map(|id| host.talk.ask(&format!("attribute {id} 7")));
    assert_ne!(buffers[0], buffers[1]);
    host.evict();
    host.says(&format!("range {small} 3"), "0 0 1000");
    host.restore();
    host.says(&format!("free {small}"), "0");
    host.says(&format!("free {small}"), "1");
    let gone = host.talk.ask(&format!("range {small} 0"));
    assert!(gone.starts_with("500 "), "{gone}");
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
fn what_the_host_has_no_room_for_stays_where_it_is() {
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
        assert_eq!(host.on_the_card(), 0);
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
    assert_eq!(host.on_the_card(), 6 * MIB);
    host.restore();
    host.says(&format!("map {first}"), "0");
    host.says(&format!("check {first} 1"), "0 0");
    host.says(&format!("retain {first}"), "0");
    host.says(&format!("unmap {second}"), "0");
    assert_eq!(host.on_the_card(), 6 * MIB);
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
        assert_eq!(host.on_the_card(), resident, "{target}");
        for (seed, id) in ids.iter().enumerate() {
            host.says(&format!("check {id} {seed}"), "0 0");
        }
    }
    // Evicted while partly in host memory: what is there stays usable where it is.
    host.arbiter.order(Verb::Fit, 16 * MIB);
    assert_eq!(host.arbiter.answered().0, OrderState::Partly);
    host.evict();
    assert_eq!(host.on_the_card(), 0);
    host.arbiter.order(Verb::Restore, 0);
    assert_eq!(host.arbiter.answered(), (OrderState::Partly, Reason::None));
    host.arbiter.open();
    for (seed, id) in ids.iter().enumerate() {
        host.says(&format!("check {id} {seed}"), "0 0");
    }
    for id in &ids {
        host.says(&format!("free {id}"), "0");
    }
    assert_eq!(host.on_the_card(), 0);
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
        assert_eq!(host.on_the_card(), 64 * MIB);
        assert_eq!(host.arbiter.footprint().host_bytes, 20 * MIB);
        host.says("info", &format!("0 0 {}", 64 * MIB));
        // The host budget is an end as well.
        host.says(&format!("alloc {}", 24 * MIB), "2 -1");
        host.says(&format!("check {second} 9"), "0 0");
        host.says(&format!("free {first}"), "0");
        let third = host.take(&format!("alloc {}", 64 * MIB));
        assert_eq!(
            host.on_the_card(),
            64 * MIB,
            "room of the quota is of the device"
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
    host.talk.send(&format!("alloc {}", 256 * MIB));
    wait_until("it asks for room", || {
        (host.arbiter.pages.client.room_bytes(0) == 256 * MIB).then_some(())
    });
    assert_eq!(host.witness.ask("free 0"), "0");
    assert_eq!(host.talk.answer(), "0 0");
    assert_eq!(host.arbiter.pages.client.room_bytes(0), 0);
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
    let room = Room::new();
    let (listening, mut command) = evictable(&room, &programs::program("restless"));
    let mut talk = Talk::start(command.arg("4").env("SUBLET_RESIDENCY", "chunk=2097152"));
    let mut arbiter = welcome(&listening, false, None);
    assert_eq!(talk.answer(), "started");
    let evicted = move_about(&mut arbiter, 60);
    assert!(evicted > 20, "{evicted}");
    let outcome = talk.finish();
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let words: Vec<&str> = outcome.stdout.split_whitespace().collect();
    assert!(words[0].parse::<u64>().expect("a number") > 20, "{words:?}");
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
    let bare = loss(tests::Outcome::of(Room::new().bare(&train_mlp).args(steps)));
    let room = Room::new();
    let (listening, mut command) = evictable(&room, &train_mlp);
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

#[test]
fn host_memory_is_made_ready_before_it_is_needed_within_the_budget() {
    const BUDGET: u64 = 160 * MIB;
    let mut host = Host::with(&[], false, Some(BUDGET));
    let mode = |prepare| ResidencyMode {
        evictable: true,
        overflow: false,
        prepare,
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
    let mut room = Room::new();
    room.set("SUBLET_SIM_CONTEXT", "256MiB");
    let mut witness = Talk::start(&mut room.bare(programs::program("memory")));
    assert_eq!(witness.ask("init"), "0");
    assert_eq!(
        witness.ask(&format!("alloc plain {}", 7800 * MIB)),
        "0 0",
        "136 MiB are left"
    );
    let (listening, mut command) = evictable(&room, &programs::program("resident"));
    let mut talk = Talk::start(&mut command);
    talk.send("init");
    let arbiter = welcome(&listening, false, None);
    wait_until("it asks for room", || {
        (arbiter.pages.client.room_bytes(0) == 512 * MIB).then_some(())
    });
    assert_eq!(witness.ask("free 0"), "0");
    assert_eq!(talk.answer(), "0");
    assert_eq!(arbiter.pages.client.room_bytes(0), 0);
}

#[test]
fn kinds_of_memory_that_stay_are_told() {
    const MANAGED: u8 = 8;
    const POOLS: u8 = 1;
    let room = Room::new();
    let (listening, mut command) = evictable(&room, &programs::program("memory"));
    let mut talk = Talk::start(&mut command);
    talk.send("init");
    let arbiter = welcome(&listening, false, None);
    assert_eq!(talk.answer(), "0");
    let staying = || arbiter.pages.client.staying(0);
    // What can be moved is none of them.
    assert_eq!(talk.ask(&format!("alloc plain {}", 8 * MIB)), "0 0");
    assert_eq!(talk.ask(&format!("alloc managed {}", 8 * MIB)), "0 1");
    wait_until("managed memory stays", || {
        (staying() == MANAGED).then_some(())
    });
    assert_eq!(talk.ask(&format!("alloc async {}", 8 * MIB)), "0 2");
    assert_eq!(talk.ask("free 1"), "0");
    wait_until("a pool's stays, and there is no managed memory", || {
        (staying() == POOLS).then_some(())
    });
}
