//! Signal handlers of the program's that come while its thread waits at the gate.

use channel::{OrderState, Reason, Verb};
use nix::sys::signal::Signal;
use tests::fake::Attached;
use tests::{ProgramRun, Sandbox, programs, wait_until};

use super::{MIB, evictable, welcome};

/// The program `interrupted`, whose memory can be moved.
struct Host {
    run: ProgramRun,
    arbiter: Attached,
    _sandbox: Sandbox,
}

impl Host {
    fn start() -> Self {
        let sandbox = Sandbox::exclusive();
        let (listening, mut command) = evictable(&sandbox, &programs::program("interrupted"));
        let mut run = ProgramRun::start(&mut command);
        run.send(&format!("init {}", 16 * MIB));
        let arbiter = welcome(&listening, false, None);
        arbiter.pages.arbiter.set_limit(0, Some(256 * MIB));
        assert_eq!(run.answer(), "0");
        Self {
            run,
            arbiter,
            _sandbox: sandbox,
        }
    }

    fn waiting(&self) -> u32 {
        self.arbiter.pages.client.waiting(0)
    }

    fn evict(&mut self) {
        self.arbiter.close();
        self.arbiter.order(Verb::Evict, 0);
        assert_eq!(self.arbiter.answered(), (OrderState::Evicted, Reason::None));
    }

    fn restore(&mut self) {
        self.arbiter.order(Verb::Restore, 0);
        let resident = (OrderState::Resident, Reason::None);
        assert_eq!(self.arbiter.answered(), resident);
        self.arbiter.open();
    }

    /// The program begins that, waits at the closed gate, and gets the signal.
    fn interrupt(&mut self, line: &str) {
        self.run.send(line);
        self.arbiter.wait_for_a_waiter();
        self.run.running.signal(Signal::SIGTERM);
    }

    #[track_caller]
    fn wait_for_waiters(&self, count: u32) {
        wait_until(&format!("{count} waits at the gate"), || {
            (self.waiting() == count).then_some(())
        });
    }
}

#[test]
fn a_handler_that_comes_in_a_wait_at_the_gate_is_governed_like_the_program() {
    let mut host = Host::start();
    host.evict();
    host.interrupt(&format!("copy {}", 512 * MIB));
    // The thread waits in the handler as well, and lets nobody wait for it.
    host.wait_for_waiters(2);
    host.restore();
    let copied = host.run.answer();
    assert_eq!(copied, "0 0 0 2", "status, copy, wrong bytes, allocation");
    host.wait_for_waiters(0);

    host.evict();
    host.interrupt("launch");
    host.wait_for_waiters(2);
    host.restore();
    let launched = host.run.answer();
    assert_eq!(launched, "0 0");
    let kept = host.run.ask("check");
    assert_eq!(kept, "0 0", "the contents");
    println!("now: a handler's copy, wrong bytes and allocation {copied}, its launch {launched}");
    host.run.ended_well();
}

#[test]
fn a_thread_that_leaves_a_wait_by_a_jump_waits_no_longer_and_is_governed() {
    let mut host = Host::start();
    let mut left = Vec::new();
    for _ in 0..3 {
        host.arbiter.close();
        host.interrupt("jump");
        assert_eq!(host.run.answer(), "0");
        host.arbiter.open();
        assert_eq!(host.run.ask("submit"), "0", "after a jump");
        // Its next call may have gone the fast way; one that waits does not.
        host.arbiter.close();
        host.run.send("submit");
        host.wait_for_waiters(1);
        host.arbiter.open();
        assert_eq!(host.run.answer(), "0");
        host.wait_for_waiters(0);
        left.push(host.waiting());
    }
    // Its memory can leave, and it is governed.
    host.evict();
    host.run.send("check");
    host.wait_for_waiters(1);
    host.restore();
    assert_eq!(host.run.answer(), "0 0");
    println!("now: {left:?} threads are said to wait after jumps out of waits");
    host.run.ended_well();
}
