//! What a node's agent keeps of the attempts of cluster jobs, below an arbiter's runtime directory.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::PATIENCE;

fn list(dir: PathBuf) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

/// Records of the attempts that were begun.
pub fn begun(runtime: &Path) -> BTreeSet<PathBuf> {
    let attempts = list(runtime.join("cluster/runs")).flat_map(list);
    attempts
        .filter(|run| run.join("started").exists())
        .collect()
}

/// Where attempts write, begun or not.
pub fn places(runtime: &Path) -> Vec<PathBuf> {
    list(runtime.join("cluster/jobs")).flat_map(list).collect()
}

/// The process of an attempt, once it has one.
pub fn process(record: &Path) -> Option<u32> {
    let text = fs::read_to_string(record.join("job.json")).ok()?;
    let job: serde_json::Value = serde_json::from_str(&text).ok()?;
    u32::try_from(job["process"]["pid"].as_u64()?).ok()
}

/// The runner of an attempt.
pub fn runner(record: &Path) -> Option<u32> {
    let text = fs::read_to_string(record.join("started")).ok()?;
    let started: serde_json::Value = serde_json::from_str(&text).ok()?;
    u32::try_from(started["pid"].as_u64()?).ok()
}

/// Has the runners of all attempts end them. Those whose runner was killed are left alone: they
/// have ended, or are the agent's.
pub fn end_all(runtime: &Path) {
    for record in begun(runtime) {
        let over = || record.join("exit.json").exists();
        if over() {
            continue;
        }
        let asked = OpenOptions::new()
            .write(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(record.join("asked"));
        let Ok(mut asked) = asked else { continue };
        let _ = asked.write_all(b"k");
        // No assertion: this is how tests that failed clean up as well.
        let deadline = Instant::now() + PATIENCE;
        let runs =
            || runner(&record).is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists());
        while !over() && runs() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
