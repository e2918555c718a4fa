//! Memory that leaves the device and comes back, seen from the arbiter's end of the channel.

mod captures;
mod contexts;
mod devices;
mod early;
mod failures;
mod given_back;
mod host_memory;
mod interrupted;
mod last_use;
mod limits;
mod looks;
mod moves;
mod remembered;
mod space;

use channel::{OrderState, Reason, ResidencyMode, Verb};
use tests::fake::{Attached, Listening, TOKEN};
use tests::{Artefacts, ProgramRun, Sandbox, programs};

const MIB: u64 = 1 << 20;

/// `program`, whose memory can be moved, and the socket of its arbiter.
fn evictable(sandbox: &Sandbox, program: &std::path::Path) -> (Listening, std::process::Command) {
    let listening = Listening::at(&sandbox.path("channel.sock"));
    let mut command = sandbox.bare(program);
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
            ..ResidencyMode::default()
        };
        pages.arbiter.set_residency(mode, host_budget);
    })
}

/// The program `resident`, and the arbiter's end of its channel.
struct Host {
    run: ProgramRun,
    arbiter: Attached,
    witness: ProgramRun,
    _sandbox: Sandbox,
}

impl Host {
    fn start() -> Self {
        Self::with(&[], false, None)
    }

    /// With variables of its own, overflow to host memory allowed or not, and a host budget.
    fn with(vars: &[(&str, &str)], overflow: bool, host_budget: Option<u64>) -> Self {
        let sandbox = Sandbox::exclusive();
        let (listening, mut command) = evictable(&sandbox, &programs::program("resident"));
        // The kernel that hashes takes memory of the device, and these tests count every byte.
        command.env("SUBLET_RESIDENCY", "reuse=0");
        let mut run = ProgramRun::start(command.envs(vars.iter().copied()));
        run.send("init");
        let arbiter = welcome(&listening, overflow, host_budget);
        assert_eq!(run.answer(), "0");
        let mut witness = ProgramRun::start(&mut sandbox.bare(programs::program("memory")));
        assert_eq!(witness.ask("init"), "0");
        Self {
            run,
            arbiter,
            witness,
            _sandbox: sandbox,
        }
    }

    #[track_caller]
    fn says(&mut self, line: &str, answer: &str) {
        assert_eq!(self.run.ask(line), answer, "{line}");
    }

    #[track_caller]
    fn take(&mut self, line: &str) -> String {
        let answer = self.run.ask(line);
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
    fn on_the_device(&mut self) -> u64 {
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
        self.run.ended_well();
    }
}
