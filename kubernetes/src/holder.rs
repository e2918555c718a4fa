//! A process for each share: it registers the share's job and keeps it.
//!
//! A job belongs to the process that registers it, by the kernel's word, and lives as long as that
//! does. A pod's processes come later and go, and a plugin is restarted; so a small process of its
//! own stands for the job. It ends when it is killed, when its record is gone, and, until it is
//! asked to stay, with the process that started it: whatever is killed at whatever point, no job is
//! left that nobody knows.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use control::{Client, ClientError, JobSpec};
use serde::{Deserialize, Serialize};

use crate::records::Job;

/// TIMEOUT: the arbiter may look a driver's devices up first, which takes it seconds.
const REGISTERED: Duration = Duration::from_secs(20);
/// TIMEOUT: beyond [`REGISTERED`], for a host whose processors are busy.
const ANSWERED: Duration = Duration::from_secs(40);
/// How often a holder looks whether it is still wanted.
const LOOKS: Duration = Duration::from_secs(1);
/// Longest line between the two.
const LONGEST: u64 = 256 << 10;
/// What a holder is sent where it is to stay.
const STAY: &[u8] = b"stay\n";

/// What a holder is to do.
#[derive(Debug, Serialize, Deserialize)]
pub struct Task {
    /// Of the arbiter.
    pub api_socket: PathBuf,
    pub spec: JobSpec,
    /// Its end is this holder's.
    pub record: PathBuf,
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
enum Said {
    Registered(Job),
    /// The arbiter does not take the job.
    Refused(String),
    /// There is no arbiter to ask, or it does not answer.
    Unreachable(String),
}

/// Why there is no job.
#[derive(Debug, thiserror::Error)]
pub enum HoldError {
    #[error("the node's arbiter refused the job: {0}")]
    Refused(String),
    #[error("the node's arbiter is not there: {0}")]
    Unreachable(String),
    #[error("no process could be started to keep the job: {0}")]
    Start(io::Error),
}

/// A holder that ends with us, as long as it was not asked to stay.
#[derive(Debug)]
pub struct Holder {
    pub job: Job,
    line: UnixStream,
}

impl Holder {
    /// Starts one by `program kubernetes hold`, and waits for the job.
    ///
    /// # Errors
    /// [`HoldError`]
    pub fn start(program: &Path, task: &Task) -> Result<Self, HoldError> {
        let (ours, theirs) = UnixStream::pair().map_err(HoldError::Start)?;
        let child = Command::new(program)
            .arg0("sublet")
            .args(["kubernetes", "hold"])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir("/")
            .spawn()
            .map_err(HoldError::Start)?;
        let answered = ask(&ours, task);
        match answered {
            Ok(Said::Registered(job)) => return Ok(Self { job, line: ours }),
            // It ends by itself, since nobody asks it to stay.
            Ok(Said::Refused(why)) => Err(HoldError::Refused(why)),
            Ok(Said::Unreachable(why)) => Err(HoldError::Unreachable(why)),
            Err(error) => Err(HoldError::Start(error)),
        }
        .inspect_err(|_| {
            drop(ours);
            end(child.id(), started_ticks(child.id()).unwrap_or(0));
        })
    }

    /// Lets it go on without us.
    ///
    /// # Errors
    /// It has ended.
    pub fn stay(mut self) -> io::Result<()> {
        self.line.write_all(STAY)
    }
}

fn ask(mut line: &UnixStream, task: &Task) -> io::Result<Said> {
    line.set_write_timeout(Some(ANSWERED))?;
    line.set_read_timeout(Some(ANSWERED))?;
    let mut text = serde_json::to_vec(task)?;
    text.push(b'\n');
    line.write_all(&text)?;
    let mut answer = String::new();
    BufReader::new(line.take(LONGEST)).read_line(&mut answer)?;
    if answer.is_empty() {
        return Err(io::Error::other("it ended before it answered"));
    }
    Ok(serde_json::from_str(&answer)?)
}

/// What a holder does, with its starter at standard input. Returns when it is not wanted.
///
/// # Errors
/// Its starter is gone, or what it sent is no task.
pub fn run() -> io::Result<()> {
    // A terminal's signals are for the plugin.
    let _ = nix::unistd::setsid();
    let line = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut reader = BufReader::new((&line).take(LONGEST));
    let mut text = String::new();
    reader.read_line(&mut text)?;
    let task: Task = serde_json::from_str(&text)?;
    let said = register(&task);
    let mut answer = serde_json::to_vec(&said)?;
    answer.push(b'\n');
    (&line).write_all(&answer)?;
    let mut stay = Vec::new();
    reader.read_until(b'\n', &mut stay)?;
    if stay != STAY {
        return Ok(());
    }
    while task.record.exists() {
        thread::sleep(LOOKS);
    }
    Ok(())
}

fn register(task: &Task) -> Said {
    let registered = Client::connect(&task.api_socket, REGISTERED)
        .and_then(|mut client| client.register(task.spec.clone()));
    let pid = std::process::id();
    match registered {
        Ok(registered) => Said::Registered(Job {
            name: registered.job,
            id: registered.id,
            token: registered.token,
            channel_socket: registered.channel_socket,
            holder_pid: pid,
            holder_ticks: started_ticks(pid).unwrap_or(0),
        }),
        Err(ClientError::Refused(refusal)) => Said::Refused(refusal.to_string()),
        Err(error) => Said::Unreachable(error.to_string()),
    }
}

/// When a process started, in clock ticks since boot; `None`: there is none, or it has ended.
pub fn started_ticks(pid: u32) -> Option<u64> {
    let stat = procfs::process::Process::new(i32::try_from(pid).ok()?)
        .ok()?
        .stat()
        .ok()?;
    (stat.state != 'Z').then_some(stat.starttime)
}

/// Whether the holder of a job lives.
pub fn lives(job: &Job) -> bool {
    started_ticks(job.holder_pid) == Some(job.holder_ticks)
}

/// Ends the holder of that number, if it is the one that started then.
pub fn end(pid: u32, ticks: u64) {
    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
    let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return;
    };
    let Ok(process) = pidfd_open(number, PidfdFlags::empty()) else {
        return;
    };
    // Looked at after the descriptor was opened: what it names cannot change.
    if started_ticks(pid) == Some(ticks) {
        let _ = pidfd_send_signal(&process, Signal::KILL);
        wait_for(&process);
    }
    reap();
}

/// TIMEOUT: the kernel ends a killed process within milliseconds.
fn wait_for(process: &OwnedFd) {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let _ = poll(
        &mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)],
        PollTimeout::from(5000_u16),
    );
}

/// Takes note of children that have ended: they are holders.
pub fn reap() {
    use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
    while let Ok(status) = waitpid(None, Some(WaitPidFlag::WNOHANG)) {
        if status == WaitStatus::StillAlive {
            return;
        }
    }
}

/// What to run for a holder: this very program, also where its file was replaced.
///
/// # Errors
/// It is not known.
pub fn own_program() -> io::Result<PathBuf> {
    fs::read_link("/proc/self/exe").map(|_| PathBuf::from("/proc/self/exe"))
}
