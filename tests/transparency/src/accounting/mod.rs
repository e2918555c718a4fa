//! Exactness: after any operations from many threads and processes of one job, what its quota has
//! been charged is what the device says that it has; and the device never had more than the quota.
//!
//! `supervise` starts a job of `sublet run` whose command is the crew; the crew starts worker
//! processes, lets them run in rounds, kills one now and then, and between rounds, when nothing
//! moves, compares the arbiter's figure with the device's.

mod crew;
mod held;
mod post;
mod worker;

use std::path::PathBuf;
use std::process::{Command, Stdio};

pub use crew::run as crew;
pub use worker::run as worker;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads of each process.
    pub threads: usize,
    /// Processes of the job.
    pub processes: usize,
    /// Operations in all.
    pub ops: u64,
    /// Times that the work stops and figures are compared.
    pub rounds: usize,
    /// Chooses the operations.
    pub seed: u64,
    /// The job's limit in MiB.
    pub quota_mib: u64,
    /// The families of operations, by letter; empty for all (see the module `worker`).
    pub families: String,
    /// The `sublet` program.
    pub sublet: PathBuf,
    /// For the report.
    pub commit: String,
    /// Print one JSON object as the last line.
    pub json: bool,
}

impl Options {
    /// As words of a command line, for the crew.
    fn words(&self) -> Vec<String> {
        let mut words = vec![
            "crew".to_owned(),
            "--threads".to_owned(),
            self.threads.to_string(),
            "--processes".to_owned(),
            self.processes.to_string(),
            "--ops".to_owned(),
            self.ops.to_string(),
            "--rounds".to_owned(),
            self.rounds.to_string(),
            "--seed".to_owned(),
            self.seed.to_string(),
            "--quota-mib".to_owned(),
            self.quota_mib.to_string(),
            "--families".to_owned(),
            self.families.clone(),
            "--commit".to_owned(),
            self.commit.clone(),
            "--sublet".to_owned(),
            self.sublet.display().to_string(),
        ];
        if self.json {
            words.push("--json".to_owned());
        }
        words
    }
}

/// Runs the crew as a job with a limit on a simulated device of its own. Answers the job's exit
/// status.
///
/// # Errors
/// The job cannot be started.
pub fn supervise(options: &Options) -> std::io::Result<i32> {
    use std::os::unix::fs::PermissionsExt;
    let directory = std::env::temp_dir().join(format!("accounting-{}", std::process::id()));
    let runtime = directory.join("run");
    std::fs::create_dir_all(&runtime)?;
    std::fs::set_permissions(&runtime, std::fs::Permissions::from_mode(0o700))?;
    let sublet = |words: &[&str]| {
        let mut command = Command::new(&options.sublet);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SUBLET_") {
                command.env_remove(name);
            }
        }
        command
            .args(words)
            .env("SUBLET_RUNTIME_DIR", &runtime)
            .env("SUBLET_SIM_STATE", directory.join("sim"))
            // A context's own memory is nobody's quota; here it would only blur the comparison.
            .env("SUBLET_SIM_CONTEXT", "0B")
            .env("SUBLET_SIM_SPEED", "1000000")
            .env(
                "SUBLET_SIM_CAPACITY",
                format!("{}MiB", options.quota_mib * 2),
            );
        command
    };
    let quota = format!("{}MiB", options.quota_mib);
    let status = sublet(&[
        "run",
        "--sim",
        "--name",
        "accounting",
        "--mem",
        &quota,
        "--",
    ])
    .arg(std::env::current_exe()?)
    .args(options.words())
    .status();
    let _ = sublet(&["arbiter", "--stop"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let _ = std::fs::remove_dir_all(&directory);
    Ok(status?.code().unwrap_or(1))
}
