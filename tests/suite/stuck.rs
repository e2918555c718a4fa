//! An arbiter that lives and does nothing (stopped, or busy) is no worse than one that is gone: who
//! waits for it waits once.

use std::time::Duration;

use channel::{Bypass, Event};
use tests::fake::{Attached, Listening, TOKEN};
use tests::{Artefacts, ProgramRun, Sandbox, programs, wait_until};

/// A client of an arbiter that does what the test says.
struct Stuck {
    run: ProgramRun,
    attached: Attached,
    _sandbox: Sandbox,
}

impl Stuck {
    fn new(on_loss: &str) -> Self {
        let sandbox = Sandbox::exclusive();
        let listening = Listening::at(&sandbox.path("channel.sock"));
        let mut command = sandbox.preloaded(programs::program("lease"));
        command
            .env("SUBLET_SOCKET", listening.path())
            .env("SUBLET_TOKEN", TOKEN)
            .env("SUBLET_ON_ARBITER_LOSS", on_loss);
        let mut run = ProgramRun::start(&mut command);
        let kernels = Artefacts::get().root().join("simgpu/kernels");
        run.send(&format!("init {}", kernels.display()));
        let attached = listening.welcome();
        assert_eq!(run.answer(), "0");
        Self {
            run,
            attached,
            _sandbox: sandbox,
        }
    }

    fn bypasses(&mut self) -> usize {
        let stuck = Event::Bypassing {
            reason: Bypass::GateStuck,
        };
        let records = self.attached.records();
        records.iter().filter(|event| **event == stuck).count()
    }
}

#[test]
fn who_goes_on_without_a_stuck_arbiter_waits_for_it_once() {
    let mut stuck = Stuck::new("open");
    stuck.attached.close();
    stuck.attached.beat_once_more();
    // Every 1000 of them are looked at anew.
    assert_eq!(stuck.run.ask("queue 5000"), "0");
    assert_eq!(stuck.run.ask("sync"), "0");
    let bypasses = stuck.bypasses();
    println!("now: 5000 launches during one silence, {bypasses} waits for it");
    assert_eq!(bypasses, 1, "one wait for one silence");

    // It works again, and so does its gate.
    stuck.attached.beat();
    stuck.run.send("queue 5000");
    stuck.attached.wait_for_a_waiter();
    stuck.attached.open();
    assert_eq!(stuck.run.answer(), "0");

    // Another silence is another wait.
    stuck.attached.close();
    stuck.attached.beat_once_more();
    assert_eq!(stuck.run.ask("queue 3000"), "0");
    assert_eq!(stuck.bypasses(), 1);
}

#[test]
fn who_must_not_go_on_fails_while_the_arbiter_is_stuck() {
    let mut stuck = Stuck::new("closed");
    // The gate is open, and nobody would ever close it.
    stuck.attached.beat_once_more();
    let refused = |stuck: &mut Stuck| {
        wait_until("a launch is refused", || {
            (stuck.run.ask("queue 100") == "802").then_some(())
        });
        assert_eq!(stuck.run.ask("queue 1"), "802", "as long as it is stuck");
    };
    refused(&mut stuck);
    stuck.attached.beat();
    assert_eq!(stuck.run.ask("queue 100"), "0");
    stuck.attached.close();
    stuck.attached.beat_once_more();
    refused(&mut stuck);
    stuck.attached.beat();
    stuck.attached.open();
    assert_eq!(stuck.run.ask("queue 100"), "0");
}

#[test]
fn who_waits_without_an_arbiter_waits_for_a_stuck_one() {
    let mut stuck = Stuck::new("freeze");
    stuck.attached.close();
    stuck.attached.beat_once_more();
    stuck.run.send("queue 10");
    stuck.attached.wait_for_a_waiter();
    // Longer than any silence is borne.
    std::thread::sleep(Duration::from_secs(7));
    assert!(stuck.attached.pages.client.waiting(0) > 0, "it still waits");
    stuck.attached.beat();
    stuck.attached.open();
    assert_eq!(stuck.run.answer(), "0");
}
