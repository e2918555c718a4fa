//! Reaching the arbiter, and starting a user's own where none is.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use control::paths::{RuntimeDir, Source};
use control::{Client, ClientError};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::{ForkResult, fork, setsid};

/// TIMEOUT: far above any answer's time on a loaded host, short enough for a person to wait.
const ANSWER: Duration = Duration::from_secs(10);
/// TIMEOUT: an arbiter listens within milliseconds; a host with two busy cores may take seconds.
const START: Duration = Duration::from_secs(20);
/// TIMEOUT: how long a winner of the lock may take to listen, once the arbiter we started has lost it.
const OTHERS_START: Duration = Duration::from_secs(5);

/// A connection to the arbiter of `dir`, whose place is trusted first.
///
/// # Errors
/// The place is unfit, or [`ClientError`]; `is_absence` where nobody is there.
pub fn existing(dir: &RuntimeDir) -> Result<Client, Unreachable> {
    dir.verify(nix::unistd::geteuid().as_raw())?;
    Ok(Client::connect(&dir.control_socket(), ANSWER)?)
}

#[derive(Debug, thiserror::Error)]
pub enum Unreachable {
    #[error(transparent)]
    Place(#[from] control::paths::PathError),
    #[error(transparent)]
    Client(#[from] ClientError),
}

impl Unreachable {
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::Client(error) if error.is_absence())
    }
}

/// As [`existing`], but a user's own arbiter is started where none is there. Two that start at once settle it by the
/// lock file: the one that loses ends, and both callers reach the one that won.
///
/// # Errors
/// As [`existing`], or why no arbiter came up, with the end of its log. The host's arbiter is never started here.
pub fn or_start(
    dir: &RuntimeDir,
    executable: &Path,
    config: Option<&Path>,
) -> anyhow::Result<Client> {
    match existing(dir) {
        Ok(client) => return Ok(client),
        Err(error) if !error.is_absence() => return Err(error.into()),
        Err(error) if dir.source() == Source::System => {
            return Err(anyhow!(error).context("the host's arbiter is down"));
        }
        Err(_) => {}
    }
    dir.ensure(nix::unistd::geteuid().as_raw())?;
    let log_from = fs::metadata(dir.log_file()).map_or(0, |meta| meta.len());
    // A second try, because the first may have found the lock taken by an arbiter on its way out.
    for _ in 0..2 {
        let alive = start(dir, executable, config)?;
        if let Some(client) = wait_until_it_listens(dir, &alive, log_from)? {
            return Ok(client);
        }
    }
    bail!(
        "the arbiter that was started ended at once: {}",
        log_tail(dir, log_from)
    );
}

/// `None` where the arbiter of `alive` has ended and no other is there or on its way.
fn wait_until_it_listens(
    dir: &RuntimeDir,
    alive: &UnixStream,
    log_from: u64,
) -> anyhow::Result<Option<Client>> {
    alive.set_nonblocking(true)?;
    let started = Instant::now();
    let mut ended: Option<Instant> = None;
    let mut pause = Duration::from_micros(500);
    loop {
        // Asked before the look, so that what was alive then has had its chance to listen.
        let over = ended
            .is_some_and(|at| at.elapsed() > OTHERS_START || !somebody_holds(&dir.lock_file()));
        match existing(dir) {
            Ok(client) => return Ok(Some(client)),
            Err(error) if !error.is_absence() => return Err(error.into()),
            Err(_) if over => return Ok(None),
            Err(_) => {}
        }
        if ended.is_none() && has_ended(alive) {
            ended = Some(Instant::now());
        }
        if started.elapsed() > START {
            bail!(
                "the arbiter that was started does not listen at {} after {} s: {}",
                dir.control_socket().display(),
                START.as_secs(),
                log_tail(dir, log_from)
            );
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Starts `sublet arbiter --embedded` apart from us: no terminal, no parent that will become the job and be surprised
/// by a child it never had. Returns a stream that ends when the arbiter does.
fn start(dir: &RuntimeDir, executable: &Path, config: Option<&Path>) -> anyhow::Result<UnixStream> {
    let (alive, theirs) = UnixStream::pair().context("cannot make a socket pair")?;
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(dir.log_file())
        .with_context(|| format!("cannot write {}", dir.log_file().display()))?;
    let mut command = Command::new(executable);
    command
        .args(["arbiter", "--embedded", "--runtime-dir"])
        .arg(dir.path())
        .current_dir("/")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(log.try_clone().context("cannot share the log")?)
        .stderr(log);
    // It serves jobs to come, so nothing of this job's may stick to it.
    for name in [
        "LD_PRELOAD",
        "SUBLET_SOCKET",
        "SUBLET_TOKEN",
        "SUBLET_JOB",
        "SUBLET_DRIVER",
    ] {
        command.env_remove(name);
    }
    if let Some(config) = config {
        let config = std::path::absolute(config).unwrap_or_else(|_| PathBuf::from(config));
        command.arg("--config").arg(config);
    }
    // SAFETY: between fork and exec this calls setsid, fork and _exit, which are async-signal-safe, and it allocates
    // nothing.
    unsafe {
        command.pre_exec(|| {
            setsid()?;
            match fork()? {
                ForkResult::Parent { .. } => nix::libc::_exit(0),
                ForkResult::Child => Ok(()),
            }
        });
    }
    let mut between = command
        .spawn()
        .with_context(|| format!("cannot start an arbiter with {}", executable.display()))?;
    drop(command);
    between
        .wait()
        .context("cannot wait for the arbiter's start")?;
    Ok(alive)
}

/// Nothing is ever written on it, so whatever a read says but "not yet" is its end.
fn has_ended(mut alive: &UnixStream) -> bool {
    let read = alive.read_exact(&mut [0]).map_err(|error| error.kind());
    !matches!(
        read,
        Err(io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
    )
}

/// Whether an arbiter lives, by its lock. Asked in a way that takes the lock for a moment where it is free.
fn somebody_holds(lock: &Path) -> bool {
    match File::open(lock) {
        Ok(file) => matches!(
            Flock::lock(file, FlockArg::LockSharedNonblock),
            Err((_, Errno::EWOULDBLOCK))
        ),
        Err(_) => false,
    }
}

/// The last line of what was logged since, for the error message.
fn log_tail(dir: &RuntimeDir, from: u64) -> String {
    let path = dir.log_file();
    let bytes = fs::read(&path).unwrap_or_default();
    let new = bytes
        .get(usize::try_from(from).unwrap_or(0)..)
        .unwrap_or_default();
    let text = String::from_utf8_lossy(new);
    match text.lines().map(str::trim).rfind(|line| !line.is_empty()) {
        Some(line) => format!("{line} (from {})", path.display()),
        None => format!("see {}", path.display()),
    }
}
