//! Events that processes share (`cuIpcGetEventHandle`): the preload library changes nothing of
//! them, turns of the device and evictions among them.

use channel::{OrderState, Reason, ResidencyMode, Verb};
use tests::fake::{Attached, Listening, TOKEN};
use tests::{Artefacts, ProgramRun, Sandbox, programs, wait_until};

const NOT_READY: &str = "600";
const GONE: &str = "400";

fn program() -> std::path::PathBuf {
    programs::program("shared_event")
}

fn init() -> String {
    let kernels = Artefacts::get().root().join("simgpu/kernels");
    format!("init {}", kernels.display())
}

#[track_caller]
fn says(run: &mut ProgramRun, line: &str, answer: &str) {
    assert_eq!(run.ask(line), answer, "{line}");
}

/// The handle of an event that the program makes.
#[track_caller]
fn make(run: &mut ProgramRun) -> String {
    let answer = run.ask("create");
    let handle = answer.strip_prefix("0 ").map(str::to_owned);
    handle.unwrap_or_else(|| panic!("create: {answer}"))
}

/// Its end, well; a job's standard error says that its device is simulated.
#[track_caller]
fn ended(run: ProgramRun) {
    let outcome = run.finish();
    assert_eq!(
        (outcome.code, outcome.stdout.as_str()),
        (Some(0), ""),
        "{outcome:?}"
    );
}

fn start(mut command: std::process::Command) -> ProgramRun {
    let mut run = ProgramRun::start(&mut command);
    says(&mut run, &init(), "0");
    run
}

/// What two processes do with an event; the first of them is killed at the end.
fn share(mut maker: ProgramRun, mut other: ProgramRun) {
    let handle = make(&mut maker);
    says(&mut maker, &format!("open {handle}"), "201");
    let handle_of_another = make(&mut other);
    says(&mut other, "destroy", "0");
    says(&mut other, &format!("open {handle}"), "0");
    says(&mut maker, &format!("open {handle_of_another}"), GONE);
    for _ in 0..3 {
        for (from, to) in [(true, false), (false, true)] {
            let [from, to] = match (from, to) {
                (true, _) => [&mut maker, &mut other],
                _ => [&mut other, &mut maker],
            };
            says(from, "block 0", "0");
            // Few: a launch behind work that does not get on waits for space in the window.
            says(from, "work 0 2 200", "0");
            says(from, "record 0", "0");
            says(to, "query", NOT_READY);
            says(to, "wait 1", "0");
            says(to, "work 1 2 200", "0");
            says(to, "idle 1", NOT_READY);
            to.send("synchronize");
            says(from, "release", "0");
            assert_eq!(to.answer(), "0");
            says(to, "drain 1", "0");
            says(from, "drain 0", "0");
            says(from, "query", "0");
        }
    }
    // Killed with a record that was not reached.
    says(&mut maker, "block 0", "0");
    says(&mut maker, "record 0", "0");
    says(&mut other, "wait 1", "0");
    says(&mut other, "work 1 2 200", "0");
    says(&mut other, "idle 1", NOT_READY);
    maker.send("die");
    drop(maker.finish());
    says(&mut other, "drain 1", "0");
    says(&mut other, "query", "0");
    says(&mut other, &format!("open {handle}"), GONE);
    says(&mut other, "record 1", "0");
    says(&mut other, "synchronize", "0");
    says(&mut other, "destroy", "0");
    ended(other);
}

#[test]
fn an_event_between_processes_is_the_same_with_and_without_us() {
    let sandbox = Sandbox::exclusive();
    share(
        start(sandbox.bare(program())),
        start(sandbox.bare(program())),
    );
    let _arbiter = sandbox.arbiter();
    let job = |flags: &[&str]| start(sandbox.job(flags, program()));
    share(job(&["--name", "one"]), job(&["--name", "two"]));
    // Jobs that have the device by turns.
    share(
        job(&["--name", "first", "--mem", "1GiB", "--share", "0.3"]),
        job(&["--name", "second", "--mem", "1GiB", "--share", "0.3"]),
    );
    // One that is governed and one that is not.
    share(
        job(&["--name", "third", "--share", "0.3"]),
        start(sandbox.bare(program())),
    );
}

#[test]
fn a_job_that_waits_for_the_work_of_another_lets_it_have_its_turns() {
    let sandbox = Sandbox::exclusive();
    let _arbiter = sandbox.arbiter();
    let job = |name: &str| {
        let flags = ["--name", name, "--share", "0.5"];
        start(sandbox.job(&flags, program()))
    };
    let (mut producer, mut consumer) = (job("producer"), job("consumer"));
    let handle = make(&mut producer);
    says(&mut consumer, &format!("open {handle}"), "0");
    for _ in 0..20 {
        // Longer than one slice, and the other's work is on its way meanwhile.
        says(&mut producer, "work 0 20 1000", "0");
        says(&mut producer, "record 0", "0");
        says(&mut consumer, "wait 0", "0");
        says(&mut consumer, "work 0 5 1000", "0");
        consumer.send("drain 0");
        says(&mut producer, "work 0 5 1000", "0");
        assert_eq!(consumer.answer(), "0");
    }
    says(&mut producer, "drain 0", "0");
    ended(producer);
    ended(consumer);
}

#[test]
fn work_behind_what_its_own_thread_does_later_waits_no_longer_each_time() {
    let sandbox = Sandbox::exclusive();
    let _arbiter = sandbox.arbiter();
    let mut run = start(sandbox.job(&["--share", "0.5"], program()));
    // A wait that doubled in each round would be 3.2 s soon, and all of these 13 minutes.
    says(&mut run, "rounds 0 250 200", "0");
    ended(run);
}

/// The program, evictable, and the arbiter's end of its channel.
fn evictable(sandbox: &Sandbox) -> (ProgramRun, Attached) {
    let listening = Listening::at(&sandbox.path("channel.sock"));
    let mut command = sandbox.preloaded(program());
    command
        .env("SUBLET_SOCKET", listening.path())
        .env("SUBLET_TOKEN", TOKEN);
    let mut run = ProgramRun::start(&mut command);
    run.send(&init());
    let arbiter = listening.welcome_with(|pages| {
        let mode = ResidencyMode {
            evictable: true,
            overflow: false,
            ..ResidencyMode::default()
        };
        pages.arbiter.set_residency(mode, None);
    });
    assert_eq!(run.answer(), "0");
    (run, arbiter)
}

#[test]
fn a_job_with_a_shared_event_is_evicted_when_what_it_waits_for_is_there() {
    let sandbox = Sandbox::exclusive();
    let (mut run, mut arbiter) = evictable(&sandbox);
    let mut peer = start(sandbox.bare(program()));
    says(&mut run, "fill 64 90", "0");
    let handle = make(&mut run);
    says(&mut peer, &format!("open {handle}"), "0");
    // Both ways: what the job has recorded, and what its stream waits for.
    says(&mut run, "record 0", "0");
    says(&mut run, "drain 0", "0");
    says(&mut peer, "block 0", "0");
    says(&mut peer, "record 0", "0");
    says(&mut run, "wait 0", "0");
    says(&mut run, "work 0 3 100", "0");
    says(&mut run, "record 1", "0");
    says(&mut run, "wait 1", "0");
    arbiter.close();
    arbiter.order(Verb::Evict, 0);
    wait_until("the agent is at it", || {
        let answer = arbiter.pages.client.answer(0)?;
        (answer.state == OrderState::Working).then_some(())
    });
    says(&mut run, "idle 0", NOT_READY);
    says(&mut peer, "release", "0");
    assert_eq!(arbiter.answered(), (OrderState::Evicted, Reason::None));
    // The event is there while the memory is not.
    says(&mut peer, "query", "0");
    says(&mut peer, "record 0", "0");
    says(&mut peer, "drain 0", "0");
    says(&mut run, "query", "0");
    arbiter.order(Verb::Restore, 0);
    assert_eq!(arbiter.answered(), (OrderState::Resident, Reason::None));
    arbiter.open();
    says(&mut run, "differs 90", "0 0");
    says(&mut run, "record 0", "0");
    says(&mut peer, "synchronize", "0");
    run.ended_well();
    peer.ended_well();
}
