//! The harness of the suite: builds and stages what is tested, gives every test a directory of its
//! own, starts and ends its processes.
//!
//! Nothing here waits by sleeping for a fixed time: [`wait_until`] asks again until a deadline that
//! only a failure reaches. Only processes that a test has started are ended, through their own
//! handle.

pub mod artefacts;
pub mod attempts;
pub mod coverage;
pub mod elf;
pub mod fake;
pub mod floors;
pub mod hooks_doc;
pub mod log;
pub mod manager;
pub mod modules;
pub mod outcome;
pub mod pages;
pub mod program_run;
pub mod programs;
pub mod sandbox;
pub mod stub;
pub mod table;

use std::time::{Duration, Instant};

pub use artefacts::Artefacts;
pub use manager::Manager;
pub use outcome::Outcome;
pub use program_run::ProgramRun;
pub use sandbox::{Running, Sandbox};

/// TIMEOUT: how long a test waits for something that happens at once on an idle machine. Only
/// failures wait this long.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Asks `attempt` until it answers, at most [`PATIENCE`].
///
/// # Panics
/// When nothing came in time; `what` says what was waited for.
#[track_caller]
pub fn wait_until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(
            Instant::now() < deadline,
            "{what}: not within {} s",
            PATIENCE.as_secs()
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}
