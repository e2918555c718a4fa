//! Streams come and go, threads as well, and what is in flight is followed and bounded as ever.

use channel::{
    Event, Following, Grant, OrderState, Reason, ResidencyMode, STREAM_SLOTS, StreamSlot, Verb,
};
use serde_json::Value;
use tests::fake::{Attached, Listening, TOKEN};
use tests::{Artefacts, Outcome, ProgramRun, Sandbox, programs, wait_until};

/// The program, governed by an arbiter of the test's with the gate open.
struct Host {
    run: ProgramRun,
    arbiter: Attached,
    sandbox: Sandbox,
}

impl Host {
    fn start(vars: &[(&str, &str)], evictable: bool) -> Self {
        let sandbox = Sandbox::exclusive();
        let listening = Listening::at(&sandbox.path("channel.sock"));
        let mut command = sandbox.preloaded(programs::program("streams"));
        command
            .env("SUBLET_SOCKET", listening.path())
            .env("SUBLET_TOKEN", TOKEN)
            .envs(vars.iter().copied());
        let mut run = ProgramRun::start(&mut command);
        run.send(&init());
        let arbiter = listening.welcome_with(|pages| {
            let mode = ResidencyMode {
                evictable,
                overflow: false,
                ..ResidencyMode::default()
            };
            pages.arbiter.set_residency(mode, None);
        });
        assert_eq!(run.answer(), "0");
        Self {
            run,
            arbiter,
            sandbox,
        }
    }

    /// What is in flight is bound to so much device time.
    fn bound(&mut self, window_us: u32) {
        let grant = Grant {
            number: 2,
            quantum_us: 5000,
            deadline_mono_ns: 0,
            window: channel::Window::always(window_us),
        };
        self.arbiter.pages.arbiter.open(0, &grant);
    }

    /// What the simulated device has worked for the program, by its own account.
    fn device_us(&self) -> u64 {
        let program = Artefacts::get().program("examples/usage");
        let usage: Value = Outcome::of(&mut self.sandbox.command(program))
            .succeeded()
            .json();
        let processes = usage["devices"][0]["processes"].as_array();
        let times = processes
            .into_iter()
            .flatten()
            .filter_map(|process| process["compute_ns"].as_u64());
        times.sum::<u64>() / 1000
    }

    #[track_caller]
    fn says(&mut self, line: &str, answer: &str) {
        assert_eq!(self.run.ask(line), answer, "{line}");
    }

    /// How many kernels were in flight at once, at most.
    #[track_caller]
    fn most(&mut self, line: &str) -> usize {
        let answer = self.run.ask(line);
        let most = answer
            .strip_prefix("0 ")
            .and_then(|most| most.parse().ok())
            .unwrap_or_else(|| panic!("{line}: {answer}"));
        self.says("sync", "0");
        most
    }

    /// Fewer than so many kernels are in flight at once, the program asking for its events all the
    /// time; also where kernels that differ in a parameter only took less before. On a machine that
    /// is busy waits run out: then it is asked again.
    #[track_caller]
    fn keeps_below(&mut self, bound: usize, line: &str) {
        let mut seen = Vec::new();
        let bounded = (0..6).any(|_| {
            seen.push(self.most(line));
            seen.last().is_some_and(|most| *most < bound)
        });
        assert!(bounded, "{line}: {seen:?} in flight, not below {bound}");
    }

    /// Completion marks that were ever asked for.
    fn marks(&self) -> u64 {
        let client = &self.arbiter.pages.client;
        let words = (0..client.streams_used()).filter_map(|index| client.stream(index));
        words.map(StreamSlot::issued).sum()
    }

    #[track_caller]
    fn has_nothing_in_flight(&self) {
        wait_until("every mark has passed", || {
            (self.arbiter.pages.client.in_flight(0).marks == 0).then_some(())
        });
    }

    #[track_caller]
    fn can_be_evicted(&mut self) {
        self.arbiter.close();
        self.arbiter.order(Verb::Evict, 0);
        assert_eq!(self.arbiter.answered(), (OrderState::Evicted, Reason::None));
        self.arbiter.order(Verb::Restore, 0);
        assert_eq!(
            self.arbiter.answered(),
            (OrderState::Resident, Reason::None)
        );
        self.arbiter.open();
    }
}

fn init() -> String {
    let kernels = Artefacts::get().root().join("simgpu/kernels");
    format!("init {}", kernels.display())
}

#[test]
fn no_mark_goes_to_a_stream_that_was_destroyed() {
    // The simulated driver ends a process that uses such a stream.
    for reuse in ["0", "1"] {
        let mut host = Host::start(&[("SUBLET_SIM_REUSE_STREAMS", reuse)], false);
        for window_us in [0, 2000] {
            host.bound(window_us);
            for line in ["drop 40", "elsewhere 40", "shared 40", "context 10"] {
                host.says(line, "0");
            }
            host.says("sync", "0");
            host.has_nothing_in_flight();
        }
        host.run.ended_well();
    }
}

#[test]
fn using_a_stream_that_was_destroyed_is_seen_on_the_simulated_driver() {
    let sandbox = Sandbox::exclusive();
    let mut bare = sandbox.bare(programs::program("streams"));
    let mut run = ProgramRun::start(&mut bare);
    assert_eq!(run.ask(&init()), "0");
    run.send("freed");
    let outcome: Outcome = run.finish();
    assert_eq!(outcome.signal, Some(nix::libc::SIGABRT), "{outcome:?}");
    assert!(
        outcome.stderr.contains("which has been destroyed"),
        "{outcome:?}"
    );
    let mut run = ProgramRun::start(bare.env("SUBLET_SIM_FREED_STREAM", "refuse"));
    assert_eq!(run.ask(&init()), "0");
    assert_eq!(run.ask("freed"), "400");
    run.ended_well();
}

#[test]
fn a_thread_with_many_streams_leaves_slots_for_others() {
    let mut host = Host::start(&[], false);
    host.bound(2000);
    // Much shorter than those that follow, which differ in a parameter only.
    host.says("turns 40 400 5", "0");
    // Two milliseconds of them are ten. On a busy machine a wait of 50 ms that ran out lets one
    // more pass.
    host.keeps_below(50, "ahead 100 200");
    host.has_nothing_in_flight();
    host.run.ended_well();
}

#[test]
fn slots_are_used_again_by_threads_that_need_one() {
    let mut host = Host::start(&[], false);
    host.bound(2000);
    host.says("one-by-one 700", "0");
    host.says("threads 600", "0");
    host.says("turns 1 400 5", "0");
    host.says("sync", "0");
    host.keeps_below(50, "ahead 100 200");
    host.has_nothing_in_flight();
    host.run.ended_well();
}

#[test]
fn what_is_in_flight_on_many_streams_is_bounded_as_on_one() {
    let mut host = Host::start(&[], false);
    host.bound(2000);
    host.keeps_below(100, "spread 64 200 200");
    host.run.ended_well();
}

#[test]
fn marks_are_few_on_many_streams_as_on_one() {
    const KERNELS: u64 = 12_800;
    let mut host = Host::start(&[], false);
    host.bound(0);
    // More at first, until it is known what the kernels take; and where the machine is busy.
    let mut seen = Vec::new();
    let few = (0..10).any(|_| {
        let before = host.marks();
        host.says(&format!("turns 64 {KERNELS} 1"), "0");
        host.says("sync", "0");
        let marks = host.marks() - before;
        seen.push(marks);
        marks < KERNELS / 8
    });
    assert!(few, "{seen:?} marks for {KERNELS} kernels each time");
    host.has_nothing_in_flight();
    host.run.ended_well();
}

/// Kernels of a microsecond, of which one more or less in flight is nothing: so that marks are a
/// small part of the calls however many streams there are, and also behind a window.
#[test]
fn marks_are_few_under_a_window_on_any_number_of_streams() {
    const KERNELS: u64 = 25_600;
    for streams in [1, 8, 16, 64, 65, 128] {
        let mut host = Host::start(&[], false);
        host.bound(2000);
        // More at first, until it is known what the kernels take. Marks come by the device's time:
        // where it takes longer than 3.5 us for a kernel, by its own account, there is one for 70.
        let mut seen = Vec::new();
        let few = (0..12).any(|_| {
            let (marks, device_us) = (host.marks(), host.device_us());
            host.says(&format!("turns {streams} {KERNELS} 1"), "0");
            host.says("sync", "0");
            let (marks, device_us) = (host.marks() - marks, host.device_us() - device_us);
            seen.push((marks, device_us));
            marks <= (device_us / 70).max(KERNELS / 20)
        });
        println!(
            "now: {streams} streams: marks and us of the device {seen:?} for {KERNELS} kernels"
        );
        assert!(
            few,
            "{streams} streams: {seen:?} marks for {KERNELS} kernels"
        );
        host.has_nothing_in_flight();
        host.run.ended_well();
    }
}

#[test]
fn more_streams_than_can_be_followed_wait_for_each_other() {
    let mut host = Host::start(&[], false);
    // A second: all of it at once.
    host.bound(1_000_000);
    host.most("ahead 32 1000");
    let most = host.most("spread 900 900 1000");
    assert!(most < STREAM_SLOTS + 100, "{most} in flight");
    host.has_nothing_in_flight();
    host.run.ended_well();
}

/// A driver that refuses completion marks, loses them, or has nothing for us at all.
#[test]
fn work_is_followed_where_the_driver_gives_no_marks() {
    const REFUSED: &str = "fail:call=cuStreamWriteValue64_v2,status=801";
    let nothing = format!("{REFUSED};fail:call=cuEventCreate,status=801");
    let faults = [
        (REFUSED, Following::Events, 801),
        ("lose:call=cuStreamWriteValue64_v2", Following::Events, 0),
        (
            "fail:call=cuMemHostRegister_v2,status=801",
            Following::Events,
            801,
        ),
        (nothing.as_str(), Following::Queries, 801),
    ];
    for (fault, way, refusal) in faults {
        let mut host = Host::start(&[("SUBLET_SIM_FAULT", fault)], false);
        host.bound(2000);
        for line in ["turns 6 600 20", "drop 20", "elsewhere 20", "shared 20"] {
            host.says(line, "0");
        }
        host.says("sync", "0");
        assert_eq!(host.arbiter.pages.client.following(), way, "{fault}");
        let reported = |event: &Event| matches!(event, Event::Following { way: found, status } if *found == way && *status == refusal);
        assert!(host.arbiter.records().iter().any(reported), "{fault}");
        // Without a call of the program's: somebody looks.
        host.has_nothing_in_flight();
        if way == Following::Events {
            host.keeps_below(50, "ahead 100 200");
        }
        host.run.ended_well();
    }
}

#[test]
fn a_capture_ends_with_its_stream_and_goes_on_without_those_that_joined_it() {
    let mut host = Host::start(&[], true);
    host.says("alloc 8388608", "0");
    host.can_be_evicted();
    host.says("lost", "0");
    host.can_be_evicted();
    host.says("forked", "0");
    host.can_be_evicted();
    // Not its capture to end (903), which is invalid from then on, and goes on until it is ended
    // (901).
    host.says("error", "903 901");
    host.can_be_evicted();
    host.run.ended_well();
}
