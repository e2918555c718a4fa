//! A go's own process beside it: starts the job, waits for it, writes down how it ended. It is no part of the arbiter, so the arbiter
//! may be killed and started anew while jobs run.
//!
//! `started` is made with O_EXCL before anything is run: whoever made it is the one runner of the go. Should the runner itself be
//! killed, the kernel ends the job (PR_SET_PDEATHSIG), because nobody would know any more when it is over.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::engine::replace;
use super::wire::{Ended, RunId, StartRun};

/// What a runner is told, in its directory.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SpecFile {
    /// Which go.
    pub run: RunId,
    /// What to run.
    pub start: StartRun,
    /// The `sublet` to run it with.
    pub sublet: PathBuf,
    /// The arbiter's directory.
    pub runtime_dir: PathBuf,
    /// As whom; `None`: as ourselves.
    pub user: Option<String>,
}

/// A process, told from later ones of its number by when it began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Process {
    pid: u32,
    start_ticks: u64,
}

impl Process {
    /// This one.
    #[must_use]
    pub fn own() -> Self {
        let pid = std::process::id();
        Self {
            pid,
            start_ticks: start_ticks(pid).unwrap_or(0),
        }
    }

    /// It is there, and no zombie.
    #[must_use]
    pub fn lives(self) -> bool {
        start_ticks(self.pid) == Some(self.start_ticks)
    }
}

/// When a living process began, in the kernel's ticks.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; fields are counted after it. The first is the state, the twentieth the start.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// What to run.
#[must_use]
pub fn read_spec(dir: &Path) -> Option<SpecFile> {
    serde_json::from_slice(&fs::read(dir.join("spec.json")).ok()?).ok()
}

/// How long ago it was written.
#[must_use]
pub fn age(dir: &Path) -> Option<Duration> {
    fs::metadata(dir.join("spec.json"))
        .ok()?
        .modified()
        .ok()?
        .elapsed()
        .ok()
}

/// For the runner.
///
/// # Errors
/// The file cannot be written.
pub fn write_spec(dir: &Path, spec: &SpecFile) -> io::Result<()> {
    replace(&dir.join("spec.json"), &serde_json::to_vec(spec)?)
}

/// How it ended, where it has.
#[must_use]
pub fn read_exit(dir: &Path) -> Option<Ended> {
    serde_json::from_slice(&fs::read(dir.join("exit.json")).ok()?).ok()
}

/// The runner, where there is or was one.
#[must_use]
pub fn read_started(dir: &Path) -> Option<Process> {
    let bytes = fs::read(dir.join("started")).ok()?;
    // Made and not written yet, or killed in between: a process that is none, and has ended.
    Some(serde_json::from_slice(&bytes).unwrap_or(Process {
        pid: 0,
        start_ticks: 0,
    }))
}

/// The job's process.
#[must_use]
pub fn read_child(dir: &Path) -> Option<u32> {
    fs::read_to_string(dir.join("pid"))
        .ok()?
        .trim()
        .parse()
        .ok()
}

/// A go that is to end before its runner came to it.
///
/// # Errors
/// The file cannot be written.
pub fn mark_stopped(dir: &Path) -> io::Result<()> {
    match claim(dir) {
        Ok(()) => {
            let ended = Ended {
                never_started: true,
                words: "stopped before it began".into(),
                ..Ended::default()
            };
            write_exit(dir, &ended)
        }
        // A runner was faster; it is stopped the next time.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Be the one who runs it.
fn claim(dir: &Path) -> io::Result<()> {
    // Written first and linked into place: whoever sees `started` sees all of it.
    let own = dir.join(format!("started.{}", std::process::id()));
    fs::write(&own, serde_json::to_vec(&Process::own())?)?;
    let linked = fs::hard_link(&own, dir.join("started"));
    let _ = fs::remove_file(&own);
    linked
}

fn write_exit(dir: &Path, ended: &Ended) -> io::Result<()> {
    replace(&dir.join("exit.json"), &serde_json::to_vec(ended)?)
}

/// Runs the go of a directory to its end. `as_user` prepares a command to run as somebody else, whose user and group it tells.
///
/// # Errors
/// The directory is not one, or cannot be written.
pub fn run(
    dir: &Path,
    as_user: impl Fn(&mut Command, &str) -> io::Result<(u32, u32)>,
) -> io::Result<()> {
    let Some(spec) = read_spec(dir) else {
        return Err(io::Error::other(format!(
            "{}: there is no spec.json to be read",
            dir.display()
        )));
    };
    match claim(dir) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        Err(error) => return Err(error),
    }
    let ended = match begin(dir, &spec, as_user) {
        Ok(mut child) => {
            replace(&dir.join("pid"), child.id().to_string().as_bytes())?;
            ended(child.wait()?)
        }
        Err(error) => Ended {
            never_started: true,
            words: error.to_string(),
            ..Ended::default()
        },
    };
    write_exit(dir, &ended)
}

fn begin(
    dir: &Path,
    spec: &SpecFile,
    as_user: impl Fn(&mut Command, &str) -> io::Result<(u32, u32)>,
) -> io::Result<std::process::Child> {
    let start = &spec.start;
    let out = |name: &str| -> io::Result<File> {
        OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(dir.join(name))
    };
    let mut command = Command::new(&spec.sublet);
    command.args(["run", "--name", &start.name]);
    if let Some(share) = start.terms.share {
        command.args(["--share", &share.to_string()]);
    }
    if let Some(class) = start.terms.class {
        command.args(["--class", class.as_str()]);
    }
    if let Some(bytes) = start.terms.mem_bytes {
        command.args(["--mem", &format!("{bytes}B")]);
    }
    for device in &start.devices {
        command.args(["--device", device]);
    }
    if start.simulated {
        command.arg("--sim");
    }
    command.arg("--").args(&start.command);
    command
        .envs(&start.env)
        .env("SUBLET_RUNTIME_DIR", &spec.runtime_dir)
        .env("SUBLET_CLUSTER_JOB", spec.run.job.to_string())
        .env("SUBLET_CLUSTER_GO", spec.run.go.to_string())
        .env("SUBLET_CLUSTER_GPUS", start.devices.len().to_string())
        // The driver then shows the program these devices alone, and counts them from 0: what is asked of a job's devices by index
        // is asked of its own, as under other schedulers.
        .env("CUDA_VISIBLE_DEVICES", start.devices.join(","))
        .current_dir(if start.dir.is_empty() {
            dir
        } else {
            Path::new(&start.dir)
        })
        .stdin(Stdio::null())
        .stdout(out("stdout")?)
        .stderr(out("stderr")?)
        .process_group(0);
    if let Some(user) = &spec.user {
        let (uid, gid) = as_user(&mut command, user)?;
        std::os::unix::fs::chown(dir, Some(uid), Some(gid))?;
    }
    let parent = rustix::process::getpid();
    // SAFETY: between fork and exec this makes two system calls that are async-signal-safe, and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            // Killed between the fork and here, the parent would never have been heard to die.
            if rustix::process::getppid() == Some(parent) {
                Ok(())
            } else {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        });
    }
    command.spawn()
}

fn ended(status: ExitStatus) -> Ended {
    Ended {
        code: status.code(),
        signal: status.signal(),
        ..Ended::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_a_later_one_of_its_number() {
        let own = Process::own();
        assert!(own.lives());
        assert!(
            !Process {
                start_ticks: own.start_ticks + 1,
                ..own
            }
            .lives()
        );
        let mut child = Command::new("true").spawn().unwrap();
        let id = child.id();
        child.wait().unwrap();
        assert!(
            !Process {
                pid: id,
                start_ticks: own.start_ticks
            }
            .lives()
        );
    }

    #[test]
    fn a_go_is_claimed_once() {
        let dir = tempfile::tempdir().unwrap();
        claim(dir.path()).unwrap();
        assert_eq!(
            claim(dir.path()).unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        assert!(read_started(dir.path()).unwrap().lives());
        mark_stopped(dir.path()).unwrap();
        assert!(read_exit(dir.path()).is_none(), "somebody runs it");
        fs::write(dir.path().join("started"), "").unwrap();
        assert!(
            !read_started(dir.path()).unwrap().lives(),
            "made and never written"
        );
    }
}
