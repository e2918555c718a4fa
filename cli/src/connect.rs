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
/// TIMEOUT: how long a winner of the lock may take to listen, once the arbiter we started has lost
/// it.
const OTHERS_START: Duration = Duration::from_secs(5);

/// How often a request is put to an arbiter that hangs up on it, or says that it ends: it may do so
/// between our connecting and our asking, and then there is none, or another.
const TRIES: u32 = 3;
/// Between two tries. TIMEOUT: what an arbiter takes from its last answer to the end of its socket.
const AGAIN: Duration = Duration::from_millis(20);

/// The answer to `request`, over a connection made by `connect`.
///
/// # Errors
/// `connect`'s, or why there is no answer.
pub fn ask<T, E: From<ClientError>>(
    mut connect: impl FnMut() -> Result<Client, E>,
    request: impl Fn(&mut Client) -> Result<T, ClientError>,
) -> Result<T, E> {
    let mut tries = 1;
    loop {
        match request(&mut connect()?) {
            Err(error) if error.is_end() && tries < TRIES => {
                tries += 1;
                thread::sleep(AGAIN);
            }
            answer => return answer.map_err(E::from),
        }
    }
}

/// As [`existing`], for a request whose answer may take `patience`.
///
/// # Errors
/// As [`existing`].
pub fn patient(dir: &RuntimeDir, patience: Duration) -> Result<Client, Unreachable> {
    dir.verify(nix::unistd::geteuid().as_raw())?;
    Ok(Client::connect(&dir.api_socket(), ANSWER + patience)?)
}

/// A connection to the arbiter of `dir`, whose place is trusted first.
///
/// # Errors
/// The place is unfit, or [`ClientError`]; `is_absence` where nobody is there.
pub fn existing(dir: &RuntimeDir) -> Result<Client, Unreachable> {
    dir.verify(nix::unistd::geteuid().as_raw())?;
    Ok(Client::connect(&dir.api_socket(), ANSWER)?)
}

/// As [`existing`], for somebody who waits so long at most.
///
/// # Errors
/// As [`existing`].
pub fn within(dir: &RuntimeDir, answer: Duration) -> Result<Client, Unreachable> {
    dir.verify(nix::unistd::geteuid().as_raw())?;
    Ok(Client::connect(&dir.api_socket(), answer)?)
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

/// As [`existing`], but a user's own arbiter is started where none is there. Two that start at once
/// settle it by the lock file: the one that loses ends, and both callers reach the one that won.
///
/// # Errors
/// As [`existing`], or why no arbiter came up, with the end of its log. The host's arbiter is never
/// started here.
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
    let mut last_words = String::new();
    for _ in 0..2 {
        let mut alive = start(dir, executable, config)?;
        if let Some(client) = wait_until_it_listens(dir, &alive, log_from)? {
            return Ok(client);
        }
        // What it wrote before it ended; the log may be on a full disk.
        last_words.clear();
        let _ = alive.read_to_string(&mut last_words);
    }
    let why = match last_words.trim() {
        "" => log_end(dir, log_from),
        words => words.to_owned(),
    };
    bail!("the arbiter that was started ended at once: {why}");
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
                dir.api_socket().display(),
                START.as_secs(),
                log_end(dir, log_from)
            );
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Starts `sublet arbiter --embedded` apart from us: no terminal, no parent that will become the
/// job and be surprised by a child it never had. Returns a stream that ends when the arbiter does.
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
        "LD_AUDIT",
        "CUDA_INJECTION64_PATH",
        "SUBLET_LIMITED",
        "SUBLET_SOCKET",
        "SUBLET_TOKEN",
        "SUBLET_JOB",
        "SUBLET_DRIVER",
        "SUBLET_STRICT",
        "SUBLET_ON_REFUSAL",
        "SUBLET_STDERR",
    ] {
        command.env_remove(name);
    }
    // Its working directory is another one.
    if let Some(folder) = std::env::var_os("SUBLET_CONFIG_DIR").filter(|folder| !folder.is_empty())
    {
        let folder = std::path::absolute(&folder).unwrap_or_else(|_| folder.into());
        command.env("SUBLET_CONFIG_DIR", folder);
    }
    if let Some(config) = config {
        let config = std::path::absolute(config).unwrap_or_else(|_| PathBuf::from(config));
        command.arg("--config").arg(config);
    }
    // SAFETY: between fork and exec this calls setsid, close_range, fork and _exit, which are
    // async-signal-safe, and it allocates nothing.
    unsafe {
        command.pre_exec(|| {
            setsid()?;
            // A pipe or a terminal that our caller has left open must not wait for the arbiter's
            // end. A kernel before 5.11 has no such call; then they stay open.
            nix::libc::syscall(
                nix::libc::SYS_close_range,
                3,
                u32::MAX,
                nix::libc::CLOSE_RANGE_CLOEXEC,
            );
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

/// Nothing is written on it but a last word, an empty line before it, so whatever a read says but
/// "not yet" is its end.
fn has_ended(mut alive: &UnixStream) -> bool {
    let read = alive.read_exact(&mut [0]).map_err(|error| error.kind());
    !matches!(
        read,
        Err(io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
    )
}

/// Whether an arbiter lives, by its lock. Asked in a way that takes the lock for a moment where it
/// is free.
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
fn log_end(dir: &RuntimeDir, from: u64) -> String {
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use control::paths::Surroundings;

    use super::*;

    /// A runtime directory, and a script in the arbiter's place.
    struct Fixture {
        root: tempfile::TempDir,
        dir: RuntimeDir,
    }

    impl Fixture {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let dir = RuntimeDir::given(root.path().join("run")).unwrap();
            Self { root, dir }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.root.path().join(name)
        }

        fn script(&self, text: &str) -> PathBuf {
            fs::write(self.at("arbiter.sh"), text).unwrap();
            concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in_arbiter.sh").into()
        }

        fn start_with(&self, script: &str, config: Option<&Path>) -> anyhow::Result<Client> {
            or_start(&self.dir, &self.script(script), config)
        }
    }

    #[test]
    fn an_arbiter_that_ends_at_once_is_reported_with_the_end_of_its_log() {
        let fixture = Fixture::new();
        fs::create_dir(fixture.dir.path()).unwrap();
        fs::set_permissions(fixture.dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        fs::write(fixture.dir.log_file(), "an older line\n").unwrap();
        let error = fixture
            .start_with("echo 'no device at all' >&2; exit 1", None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("ended at once: no device at all"), "{error}");
        assert!(error.contains("arbiter.log"), "{error}");

        let error = fixture.start_with("exit 1", None).unwrap_err().to_string();
        assert!(
            !error.contains("older line") && error.contains("see "),
            "{error}"
        );
    }

    #[test]
    fn an_arbiter_whose_log_takes_nothing_says_why_it_ended() {
        let fixture = Fixture::new();
        let error = fixture
            .start_with(
                "printf '\\ncannot take the lock: no space' >&0; exit 1",
                None,
            )
            .unwrap_err()
            .to_string();
        let why = "ended at once: cannot take the lock: no space";
        assert!(error.contains(why), "{error}");
    }

    #[test]
    fn what_cannot_be_executed_is_named() {
        let fixture = Fixture::new();
        let missing = fixture.at("none");
        let error = or_start(&fixture.dir, &missing, None).unwrap_err();
        assert!(
            format!("{error:#}").contains(missing.to_str().unwrap()),
            "{error:#}"
        );
    }

    #[test]
    fn it_is_nobodys_child_and_has_its_arguments() {
        let fixture = Fixture::new();
        let out = fixture.at("out");
        // Fields of proc(5) stat: pid, name, state, parent, process group, session.
        let script = format!(
            "{{ printf '%s\\n' \"$@\"; cut -d' ' -f4,6 /proc/$$/stat; pwd; }} > {}",
            out.display()
        );
        let config = fixture.at("q.toml");
        fixture.start_with(&script, Some(&config)).unwrap_err();
        let text = fs::read_to_string(&out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let dir = fixture.dir.path().to_str().unwrap();
        let args = [
            "arbiter",
            "--embedded",
            "--runtime-dir",
            dir,
            "--config",
            config.to_str().unwrap(),
        ];
        assert_eq!(lines[..6], args);
        let (parent, session) = lines[6].split_once(' ').unwrap();
        assert_ne!(parent, std::process::id().to_string());
        let ours = nix::unistd::getsid(None).unwrap().to_string();
        assert_ne!(session, ours);
        assert_eq!(lines[7], "/");
    }

    #[test]
    fn the_one_that_loses_the_lock_waits_for_the_one_that_won() {
        let fixture = Fixture::new();
        fixture.dir.ensure(nix::unistd::geteuid().as_raw()).unwrap();
        let lock = File::create(fixture.dir.lock_file()).unwrap();
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).unwrap();
        let ended = fixture.at("ended");
        let socket = fixture.dir.api_socket();
        let seen = ended.clone();
        let winner = thread::spawn(move || {
            while !seen.exists() {
                thread::sleep(Duration::from_millis(1));
            }
            // Well after the loser's end, so that only the lock speaks for the winner.
            thread::sleep(Duration::from_millis(100));
            (UnixListener::bind(socket).unwrap(), lock)
        });
        let client = fixture.start_with(&format!("touch {}", ended.display()), None);
        drop(client.unwrap());
        drop(winner.join().unwrap());
    }

    #[test]
    fn two_tries_are_made_and_no_more() {
        let fixture = Fixture::new();
        let out = fixture.at("out");
        fixture
            .start_with(&format!("echo x >> {}", out.display()), None)
            .unwrap_err();
        assert_eq!(fs::read_to_string(&out).unwrap(), "x\nx\n");
    }

    #[test]
    fn the_hosts_arbiter_is_not_started() {
        // Only root can make a socket that counts as the host's arbiter's.
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let fixture = Fixture::new();
        testbed::dead_socket(&fixture.at("api.sock"));
        let around = Surroundings {
            system_dir: fixture.root.path().to_owned(),
            ..Surroundings::default()
        };
        let dir = RuntimeDir::find(&around).unwrap();
        assert_eq!(dir.source(), Source::System);
        let out = fixture.at("out");
        let error = or_start(
            &dir,
            &fixture.script(&format!("touch {}", out.display())),
            None,
        )
        .unwrap_err();
        assert!(
            format!("{error:#}").starts_with("the host's arbiter is down: "),
            "{error:#}"
        );
        assert!(!out.exists());
    }
}
