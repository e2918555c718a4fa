//! Runs host programs three times: bare on the simulated driver, with the preload library and no
//! arbiter, and as a job. What they print and how they end must be the same. The programs are in
//! `programs/`, each named for what it does.

mod artefacts;
mod host;

pub use artefacts::Artefacts;
pub use host::{Host, Outcome, Way};

/// The Python interpreter itself, `None` where there is none that has what the programs import. A
/// launcher script in between would be one more program.
pub fn python() -> Option<std::path::PathBuf> {
    use testbed::CommandWithin;
    if !artefacts::exists("python3") {
        return None;
    }
    let script = "import ctypes, multiprocessing, sys; print(sys.executable)";
    let output = std::process::Command::new("python3")
        .args(["-c", script])
        .output_within(testbed::PATIENCE);
    let path = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| path.trim().into())
}
