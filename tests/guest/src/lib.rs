//! Runs host programs three times: bare on the simulated driver, with the preload library and no arbiter, and as a job. What
//! they print and how they end must be the same. The programs are in `programs/`, each named for what it does.

mod artefacts;
mod host;

pub use artefacts::Artefacts;
pub use host::{Host, Outcome, Way};
