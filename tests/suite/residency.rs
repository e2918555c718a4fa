//! Memory that leaves the device and comes back, seen from the arbiter's end of the channel.

use std::time::Duration;

use channel::{OrderState, Reason, ResidencyMode, Verb};
use tests::fake::{Attached, Listening, TOKEN};
use tests::{Artefacts, Room, Talk, programs, wait_until};

const MIB: u64 = 1 << 20;

/// A program whose memory can be moved, and the arbiter's end of its channel.
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
        let listening = Listening::at(&room.path("channel.sock"));
        let mut command = room.bare(programs::program("resident"));
        command
            .env("LD_PRELOAD", Artefacts::get().preload())
            .env("SUBLET_DRIVER", Artefacts::get().simulated_driver())
            .env("SUBLET_SOCKET", listening.path())
            .env("SUBLET_TOKEN", TOKEN)
            .envs(vars.iter().copied());
        let mut talk = Talk::start(&mut command);
        talk.send("init");
        let arbiter = listening.welcome_with(|pages| {
            let mode = ResidencyMode {
                evictable: true,
                overflow,
            };
            pages.arbiter.set_residency(mode, host_budget);
        });
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
