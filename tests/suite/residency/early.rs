//! Programs that say which memory their parts need, and go on before all of it is back.
//!
//! A witness holds so much of the device that a restore stops where the test wants it: what happens
//! before the rest is back is a matter of order, not of time.

use std::time::Duration;

use channel::{OrderState, Reason, Verb};
use tests::fake::Attached;
use tests::{Artefacts, ProgramRun, Sandbox, programs, wait_until};

use super::{MIB, evictable, welcome};

/// Layers of the program, each of so many bytes: two chunks.
const LAYERS: u64 = 5;
const LAYER: u64 = 8 * MIB;

/// The program `layers`.
struct Net {
    run: ProgramRun,
    arbiter: Attached,
    witness: ProgramRun,
    /// What the witness has on the device, in the order of its numbers.
    held: usize,
    capacity: u64,
    hashes: String,
    _sandbox: Sandbox,
}

fn kernels(file: &str) -> String {
    let path = Artefacts::get().root().join("simgpu/kernels").join(file);
    path.display().to_string()
}

impl Net {
    fn start() -> Self {
        Self::with("chunk=4194304,reuse=0")
    }

    fn with(tuning: &str) -> Self {
        let sandbox = Sandbox::exclusive();
        let (listening, mut command) = evictable(&sandbox, &programs::program("layers"));
        command.env("SUBLET_RESIDENCY", tuning);
        let mut run = ProgramRun::start(&mut command);
        run.send(&format!("init {}", kernels("chunks.ptx")));
        let arbiter = welcome(&listening, false, None);
        assert_eq!(run.answer(), "0 1");
        let mut witness = ProgramRun::start(&mut sandbox.bare(programs::program("memory")));
        assert_eq!(witness.ask("init"), "0");
        let capacity = witness.ask("info");
        let capacity = capacity.split(' ').nth(2).expect("free and total");
        let mut net = Self {
            run,
            arbiter,
            witness,
            held: 0,
            capacity: capacity.parse().expect("bytes"),
            hashes: String::new(),
            _sandbox: sandbox,
        };
        net.says(&format!("make {LAYERS} {LAYER}"), "0");
        net.hashes = net.pass();
        net
    }

    /// As the program computes them without being moved.
    fn pass(&mut self) -> String {
        for layer in 0..LAYERS {
            self.says(&format!("layer {layer}"), "0");
        }
        self.says("wait", "0");
        self.run.ask("hashes")
    }

    #[track_caller]
    fn says(&mut self, line: &str, answer: &str) {
        assert_eq!(self.run.ask(line), answer, "{line}");
    }

    #[track_caller]
    fn evict(&mut self) {
        self.arbiter.close();
        self.arbiter.order(Verb::Evict, 0);
        assert_eq!(self.arbiter.answered(), (OrderState::Evicted, Reason::None));
    }

    fn on_the_device(&mut self) -> u64 {
        let answer = self.witness.ask("info");
        let words: Vec<u64> = answer
            .split(' ')
            .map(|word| word.parse().expect("a number"))
            .collect();
        words[2] - words[1]
    }

    /// Others have all of the device but for what is not of a group, and so many layers.
    #[track_caller]
    fn keep_space_for(&mut self, layers: u64) {
        let ungrouped = self.arbiter.footprint().evictable_bytes - LAYERS * LAYER;
        let taken = self.on_the_device();
        let bytes = self.capacity - taken - ungrouped - layers * LAYER;
        let answer = format!("0 {}", self.held);
        assert_eq!(self.witness.ask(&format!("alloc plain {bytes}")), answer);
        self.held += 1;
    }

    /// The rest of the device is free again.
    #[track_caller]
    fn give_space(&mut self) {
        assert_eq!(self.witness.ask(&format!("free {}", self.held - 1)), "0");
    }

    /// Waits until so many layers are back, and no more can be.
    #[track_caller]
    fn back(&self, layers: u64) {
        let footprint = self.arbiter.footprint();
        let resident = footprint.evictable_bytes - (LAYERS - layers) * LAYER;
        wait_until("that much is back", || {
            (self.arbiter.footprint().resident_bytes == resident).then_some(())
        });
    }

    /// What the agent says of the last order.
    fn state(&self) -> OrderState {
        self.arbiter
            .pages
            .client
            .answer(0)
            .expect("an answer that makes sense")
            .state
    }

    #[track_caller]
    fn has_begun(&self) {
        wait_until("the job may begin", || {
            (self.state() == OrderState::Begun).then_some(())
        });
    }

    #[track_caller]
    fn resident(&self) {
        assert_eq!(
            self.arbiter.answered(),
            (OrderState::Resident, Reason::None)
        );
    }

    #[track_caller]
    fn ended_well(self) {
        self.run.ended_well();
    }
}

#[test]
fn computation_begins_when_its_own_group_is_in() {
    let mut net = Net::start();
    net.says("declare", "1");
    for rounds in 0..3u64 {
        net.says("begin 0", "1");
        net.evict();
        net.keep_space_for(2);
        net.run.send("begin 0");
        wait_until("it wants its memory", || {
            (net.arbiter.pages.client.waiting(0) > 0).then_some(())
        });
        net.arbiter.order(Verb::Restore, 0);
        assert_eq!(net.run.answer(), "1");
        net.has_begun();
        net.back(2);
        net.arbiter.open();
        // Work with what is in, to its end: the rest is still away.
        for layer in 0..2 {
            net.says(&format!("begin {layer}"), "1");
            net.says(&format!("layer {layer}"), "0");
        }
        net.says("wait", "0");
        // What a copy names is known, and there.
        net.says(&format!("set 0 {rounds}"), "0");
        net.says("wait", "0");
        net.says("first 0", &format!("0 {rounds}"));
        let answer = net.run.ask("hashes");
        if rounds == 0 {
            assert_eq!(answer, net.hashes);
        }
        assert_eq!(net.state(), OrderState::Begun);
        net.back(2);
        net.run.send("begin 2");
        net.give_space();
        assert_eq!(net.run.answer(), "1");
        net.says("layer 2", "0");
        net.resident();
        for layer in 3..LAYERS {
            net.says(&format!("begin {layer}"), "1");
            net.says(&format!("layer {layer}"), "0");
        }
        net.says("wait", "0");
        // What was written early has stayed.
        net.says("first 0", &format!("0 {rounds}"));
        net.says("first 1", &format!("0 {}", 40503));
    }
    net.ended_well();
}

#[test]
fn a_thread_that_does_not_ask_waits_for_everything_and_so_does_what_is_not_known() {
    let mut net = Net::start();
    net.says("declare", "1");
    for call in [
        "thread layer 0",
        "thread first 4",
        "thread set 4 7",
        "thread free 3",
    ] {
        net.evict();
        let kept = net.arbiter.footprint().evictable_bytes;
        net.keep_space_for(2);
        net.run.send("begin 1");
        net.arbiter.order(Verb::Restore, 0);
        assert_eq!(net.run.answer(), "1");
        net.has_begun();
        net.arbiter.open();
        net.says(call, "0");
        // A free waits for the end of the move, and for no memory.
        let wants = !call.contains("free");
        wait_until("it waits", || {
            (!wants || net.arbiter.pages.client.waiting(0) > 0).then_some(())
        });
        // The one that has asked goes on.
        net.says("layer 1", "0");
        net.says("wait", "0");
        net.says("first 1", &format!("0 {}", 40503));
        assert_eq!(net.state(), OrderState::Begun);
        assert_eq!(net.arbiter.pages.client.waiting(0) > 0, wants, "{call}");
        assert_eq!(net.arbiter.footprint().evictable_bytes, kept, "{call}");
        net.give_space();
        net.resident();
        let answer = net.run.answer();
        assert!(answer.starts_with("thread 0"), "{call}: {answer}");
    }
    net.ended_well();
}

#[test]
fn a_call_that_names_memory_that_is_away_waits_although_its_thread_has_a_permit() {
    let mut net = Net::start();
    net.says("declare", "1");
    for (call, answer) in [
        ("first 4", format!("0 {}", 4 * 40503)),
        ("set 4 7", "0".to_owned()),
        ("first 4", "0 7".to_owned()),
        ("free 4", "0".to_owned()),
    ] {
        net.evict();
        let kept = net.arbiter.footprint().evictable_bytes;
        net.keep_space_for(2);
        net.run.send("begin 0");
        net.arbiter.order(Verb::Restore, 0);
        assert_eq!(net.run.answer(), "1");
        net.has_begun();
        net.arbiter.open();
        net.run.send(call);
        // A free waits for the end of the move, and for no memory.
        let wants = !call.contains("free");
        wait_until("it waits", || {
            (!wants || net.arbiter.pages.client.waiting(0) > 0).then_some(())
        });
        net.back(2);
        assert_eq!(net.state(), OrderState::Begun, "{call}");
        assert_eq!(net.arbiter.footprint().evictable_bytes, kept, "{call}");
        net.give_space();
        assert_eq!(net.run.answer(), answer, "{call}");
        net.resident();
        assert_eq!(
            net.arbiter.footprint().evictable_bytes == kept,
            call != "free 4"
        );
    }
    net.ended_well();
}

#[test]
fn without_begin_it_is_all_or_nothing() {
    let mut net = Net::start();
    net.says("declare", "1");
    net.evict();
    net.keep_space_for(4);
    net.arbiter.open();
    net.run.send("layer 0");
    net.arbiter.order(Verb::Restore, 0);
    net.back(4);
    assert_eq!(net.state(), OrderState::Working);
    net.give_space();
    net.resident();
    assert_eq!(net.run.answer(), "0");
    net.says("clear", "1");
    // Nor where nothing is declared.
    net.evict();
    net.keep_space_for(4);
    net.run.send("begin 0");
    net.arbiter.order(Verb::Restore, 0);
    wait_until("as much is back as fits", || {
        (net.arbiter.footprint().resident_bytes >= 4 * LAYER).then_some(())
    });
    assert_eq!(net.state(), OrderState::Working);
    net.give_space();
    net.resident();
    assert_eq!(net.run.answer(), "1");
    net.ended_well();
}

#[test]
fn memory_of_several_groups_is_the_firsts_and_what_was_freed_is_nobodys() {
    let mut net = Net::start();
    net.says("declare", "1");
    // Needed by the first group, although it is the last layer.
    net.says("add 0 4", "1");
    net.evict();
    net.keep_space_for(2);
    net.run.send("begin 0");
    net.arbiter.order(Verb::Restore, 0);
    assert_eq!(net.run.answer(), "1");
    net.has_begun();
    net.arbiter.open();
    net.says("layer 4", "0");
    net.says("layer 0", "0");
    net.says("wait", "0");
    net.says("first 4", &format!("0 {}", 4 * 40503));
    net.give_space();
    net.resident();
    let all = net.pass();
    assert_eq!(all, net.hashes);
    // Nonsense is refused.
    net.says("add 1048576 0", "-1");
    net.ended_well();
}

/// A restore that has let a thread go, with two layers back and no space for more.
fn half_back(net: &mut Net) {
    net.says("declare", "1");
    net.evict();
    net.keep_space_for(2);
    net.run.send("begin 0");
    net.arbiter
        .order_within(Verb::Restore, 0, Duration::from_secs(3600));
    assert_eq!(net.run.answer(), "1");
    net.has_begun();
    net.back(2);
    net.arbiter.open();
    net.says("layer 0", "0");
    net.says("set 0 77", "0");
    net.says("begin 1", "1");
    net.says("set 1 78", "0");
}

#[test]
fn an_eviction_in_the_middle_of_an_early_start_loses_nothing() {
    for reuse in ["reuse=0", "reuse=1"] {
        let mut net = Net::with(&format!("chunk=4194304,{reuse}"));
        half_back(&mut net);
        // Replaced before it is over: what was written meanwhile has to be copied out.
        net.arbiter.close();
        net.arbiter.order(Verb::Evict, 0);
        assert_eq!(net.arbiter.answered(), (OrderState::Evicted, Reason::None));
        assert_eq!(net.arbiter.footprint().resident_bytes, 0);
        // Its leave is gone: it waits, for its group or for everything.
        net.arbiter.open();
        net.run.send("layer 0");
        wait_until("it waits", || {
            (net.arbiter.pages.client.waiting(0) > 0).then_some(())
        });
        net.arbiter.order(Verb::Restore, 0);
        net.back(2);
        assert_eq!(
            net.state(),
            OrderState::Working,
            "no leave outlives its restore"
        );
        net.give_space();
        net.resident();
        assert_eq!(net.run.answer(), "0");
        net.says("wait", "0");
        for (layer, word) in [(0, 77), (1, 78), (2, 2 * 40503), (4, 4 * 40503)] {
            net.says(&format!("first {layer}"), &format!("0 {word}"));
        }
        net.ended_well();
    }
}

#[test]
fn a_restore_that_does_not_get_the_rest_takes_back_what_was_begun() {
    let mut net = Net::start();
    half_back(&mut net);
    net.run.send("begin 4");
    // The same again, and its time is up.
    net.arbiter
        .order_within(Verb::Restore, 0, Duration::from_millis(1));
    assert_eq!(
        net.arbiter.answered(),
        (OrderState::Refused, Reason::DeviceMemory)
    );
    let left = net.arbiter.footprint().resident_bytes;
    assert_eq!(left, 0, "nothing is left behind");
    // It goes on waiting, and is let go by a later one.
    net.give_space();
    net.arbiter.order(Verb::Restore, 0);
    net.resident();
    assert_eq!(net.run.answer(), "1");
    net.says("wait", "0");
    net.says("first 0", "0 77");
    net.says("first 1", "0 78");
    net.ended_well();
}

#[test]
fn what_the_device_is_not_done_with_stays_until_it_is() {
    let mut net = Net::start();
    let spinner = format!("spinner {}", kernels("busy.ptx"));
    net.says(&spinner, "0");
    half_back(&mut net);
    // Longer than anybody waits for what was begun early.
    net.says("spin 4000", "0");
    net.says("set 0 79", "0");
    // The rest does not come: what has come back has to go, and cannot yet.
    net.arbiter
        .order_within(Verb::Restore, 0, Duration::from_millis(1));
    assert_eq!(
        net.arbiter.answered(),
        (OrderState::Refused, Reason::DeviceMemory)
    );
    wait_until("all of it has left", || {
        (net.arbiter.footprint().resident_bytes == 0).then_some(())
    });
    net.give_space();
    net.arbiter.order(Verb::Restore, 0);
    net.resident();
    net.arbiter.open();
    net.says("wait", "0");
    net.says("first 0", "0 79");
    net.says("first 1", "0 78");
    net.ended_well();
}

#[test]
fn killed_in_the_middle_of_an_early_start_it_leaves_nothing_on_the_device() {
    let mut net = Net::start();
    half_back(&mut net);
    net.run.send("thread begin 4");
    assert_eq!(net.run.answer(), "0");
    net.run.running.kill();
    wait_until("the device is the witness's again", || {
        let bytes = net.on_the_device();
        (bytes < net.capacity - LAYER).then_some(())
    });
    net.give_space();
    wait_until("nothing is left", || {
        (net.on_the_device() == 0).then_some(())
    });
}
