//! The blocking client: one connection, one request after the other, every wait with a deadline.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr, sockopt};

use crate::config::ConfigReport;
use crate::device::DeviceSettings;
use crate::error::{ControlError, ErrorCode};
use crate::report::{ArbiterStatus, DeviceStatus, Event, JobStatus, Registered, Reloaded};
use crate::request::{Change, JobSpec, Reply, Request};
use crate::residency::{Moved, Moves};
use crate::timeline::Timeline;
use crate::values::DeviceSelector;
use crate::wire::{self, MAX_LINE_BYTES, WireError};

/// Why the arbiter was not reached, or what it answered. Each message is one line for people and
/// contains the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("no arbiter runs at {}: there is no socket", .0.display())]
    NoSocket(PathBuf),
    #[error("nobody listens at {}: its arbiter has ended (start one with `sublet arbiter`)", .0.display())]
    DeadSocket(PathBuf),
    #[error("no access to {} (it belongs to another user's arbiter; set SUBLET_RUNTIME_DIR to one of yours)", .0.display())]
    NoAccess(PathBuf),
    #[error("the socket path {} is longer than the 107 bytes a Unix socket allows (set SUBLET_RUNTIME_DIR to a shorter one)", .0.display())]
    PathTooLong(PathBuf),
    #[error("the arbiter at {} did not answer within {} ms: {state}", .path.display(), .waited.as_millis())]
    Timeout {
        path: PathBuf,
        waited: Duration,
        /// Which process to look at, and what it is doing.
        state: String,
    },
    #[error("the arbiter at {} closed the connection without an answer (its journal may say why)", .0.display())]
    HungUp(PathBuf),
    #[error("{0} (use the `sublet` that started the arbiter, or restart the arbiter)")]
    Version(String),
    #[error(transparent)]
    Refused(#[from] ControlError),
    #[error("{0}")]
    Protocol(String),
    #[error("talking to {} failed: {error}", .path.display())]
    Io { path: PathBuf, error: io::Error },
}

impl ClientError {
    /// Nobody is there: starting an arbiter would help.
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::NoSocket(_) | Self::DeadSocket(_))
    }
}

/// A connection to an arbiter's control socket.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
    path: PathBuf,
    deadline: Duration,
}

impl Client {
    /// Connects; `deadline` bounds this and each request after it.
    ///
    /// # Errors
    /// [`ClientError`], `NoSocket` and `DeadSocket` where no arbiter is there.
    pub fn connect(path: &Path, deadline: Duration) -> Result<Self, ClientError> {
        let address = UnixAddr::new(path).map_err(|_| ClientError::PathTooLong(path.to_owned()))?;
        let io = |error: Errno| ClientError::Io {
            path: path.to_owned(),
            error: error.into(),
        };
        let fd = socket::socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            None,
        )
        .map_err(io)?;
        let stream = UnixStream::from(fd);
        let started = Instant::now();
        loop {
            let raw = std::os::fd::AsRawFd::as_raw_fd(&stream);
            match socket::connect(raw, &address) {
                Ok(()) => break,
                // The queue of the listener is full; there is nothing to poll for on a Unix socket.
                Err(Errno::EAGAIN | Errno::EINTR) if started.elapsed() < deadline => {
                    thread::sleep(Duration::from_millis(2));
                }
                Err(Errno::EAGAIN | Errno::EINTR) => {
                    return Err(timeout(path, deadline, None));
                }
                Err(Errno::ENOENT | Errno::ENOTDIR) => {
                    return Err(ClientError::NoSocket(path.to_owned()));
                }
                Err(Errno::ECONNREFUSED) => return Err(ClientError::DeadSocket(path.to_owned())),
                Err(Errno::EACCES | Errno::EPERM) => {
                    return Err(ClientError::NoAccess(path.to_owned()));
                }
                Err(errno) => return Err(io(errno)),
            }
        }
        stream
            .set_nonblocking(false)
            .map_err(|error| ClientError::Io {
                path: path.to_owned(),
                error,
            })?;
        Ok(Self {
            stream: BufReader::new(stream),
            path: path.to_owned(),
            deadline,
        })
    }

    /// The arbiter, its devices and its jobs.
    ///
    /// # Errors
    /// As every request: [`ClientError`].
    pub fn status(&mut self) -> Result<ArbiterStatus, ClientError> {
        match self.ask(&Request::Status)? {
            Reply::Status(status) => Ok(status),
            other => Err(self.unexpected("status", &other)),
        }
    }

    /// # Errors
    /// [`ClientError::Refused`] where the arbiter does not take the job.
    pub fn register(&mut self, spec: JobSpec) -> Result<Registered, ClientError> {
        match self.ask(&Request::Register(spec))? {
            Reply::Registered(registered) => Ok(registered),
            other => Err(self.unexpected("register", &other)),
        }
    }

    /// # Errors
    /// As every request: [`ClientError`].
    pub fn list(&mut self) -> Result<Vec<JobStatus>, ClientError> {
        match self.ask(&Request::List)? {
            Reply::Jobs(jobs) => Ok(jobs),
            other => Err(self.unexpected("list", &other)),
        }
    }

    /// Changes a running job and returns it as it then stands.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no such job, not yours, or no space.
    pub fn set(&mut self, job: &str, change: Change) -> Result<JobStatus, ClientError> {
        let job = job.to_owned();
        match self.ask(&Request::Set { job, change })? {
            Reply::Changed(job) => Ok(*job),
            other => Err(self.unexpected("set", &other)),
        }
    }

    /// Changes how a device is run, or every device (`None`), and returns those as they then stand.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no such device, not yours, or settings that make no sense.
    pub fn set_device(
        &mut self,
        device: Option<DeviceSelector>,
        settings: DeviceSettings,
    ) -> Result<Vec<DeviceStatus>, ClientError> {
        match self.ask(&Request::SetDevice { device, settings })? {
            Reply::Devices(devices) => Ok(devices),
            other => Err(self.unexpected("set_device", &other)),
        }
    }

    /// Has the arbiter read its quota file again.
    ///
    /// # Errors
    /// [`ClientError::Refused`] where the file is wrong; nothing has changed then.
    pub fn reload(&mut self) -> Result<Reloaded, ClientError> {
        match self.ask(&Request::Reload)? {
            Reply::Reloaded(reloaded) => Ok(reloaded),
            other => Err(self.unexpected("reload", &other)),
        }
    }

    /// The quota files in force, and what they give: the job of a process, or a job of a user.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no job has that process, or it is another user's.
    pub fn config(
        &mut self,
        pid: Option<u32>,
        user: Option<&str>,
    ) -> Result<ConfigReport, ClientError> {
        let user = user.map(ToOwned::to_owned);
        match self.ask(&Request::Config { pid, user })? {
            Reply::Config(report) => Ok(*report),
            other => Err(self.unexpected("config", &other)),
        }
    }

    /// Moves jobs between device and host, and returns when all of them have arrived or cannot. The
    /// client's own deadline has to allow for that.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no such job, not yours, not evictable.
    pub fn move_jobs(&mut self, moves: &Moves) -> Result<Moved, ClientError> {
        match self.ask(&Request::Move(moves.clone()))? {
            Reply::Moved(moved) => Ok(moved),
            other => Err(self.unexpected("move", &other)),
        }
    }

    /// # Errors
    /// [`ClientError::Refused`] where the peer may not end the arbiter.
    pub fn shutdown(&mut self) -> Result<(), ClientError> {
        match self.ask(&Request::Shutdown)? {
            Reply::ShuttingDown => Ok(()),
            other => Err(self.unexpected("shutdown", &other)),
        }
    }

    /// Journal lines above `since_seq`, oldest first, `limit` at most (0: all that are kept).
    ///
    /// # Errors
    /// As every request: [`ClientError`].
    pub fn events(&mut self, since_seq: u64, limit: u32) -> Result<Vec<Event>, ClientError> {
        match self.ask(&Request::Events { since_seq, limit })? {
            Reply::Events(events) => Ok(events),
            other => Err(self.unexpected("events", &other)),
        }
    }

    /// Spans of a device above `since_seq`, oldest first, as many as one answer has.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no such device, or an arbiter that knows no timeline.
    pub fn timeline(&mut self, device: u32, since_seq: u64) -> Result<Timeline, ClientError> {
        let request = Request::Timeline {
            device,
            since_seq,
            limit: 0,
        };
        match self.ask(&request)? {
            Reply::Timeline(timeline) => Ok(timeline),
            other => Err(self.unexpected("timeline", &other)),
        }
    }

    /// Has the arbiter note that this node's agent refuses the hook at an address.
    ///
    /// # Errors
    /// [`ClientError::Refused`] where the peer is neither the arbiter's own user nor root.
    pub fn hook_refused(&mut self, hook: &str, reason: &str) -> Result<(), ClientError> {
        let request = Request::HookRefused {
            hook: hook.to_owned(),
            reason: reason.to_owned(),
        };
        match self.ask(&request)? {
            Reply::Noted => Ok(()),
            other => Err(self.unexpected("hook_refused", &other)),
        }
    }

    fn unexpected(&self, asked: &str, reply: &Reply) -> ClientError {
        let kind = serde_json::to_value(reply)
            .ok()
            .and_then(|value| value.get("kind").cloned())
            .unwrap_or_default();
        ClientError::Protocol(format!(
            "the arbiter at {} answered {kind} to `{asked}`",
            self.path.display()
        ))
    }

    fn ask(&mut self, request: &Request) -> Result<Reply, ClientError> {
        let line = wire::encode_request(request)
            .map_err(|error| ClientError::Protocol(error.to_string()))?;
        let answer = self.exchange(&line)?;
        match wire::decode_reply(&answer) {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) if error.code == ErrorCode::VersionMismatch => {
                Err(ClientError::Version(error.message))
            }
            Ok(Err(error)) => Err(ClientError::Refused(error)),
            Err(error @ WireError::Version { .. }) => Err(ClientError::Version(error.to_string())),
            Err(error) => Err(ClientError::Protocol(error.to_string())),
        }
    }

    fn exchange(&mut self, line: &[u8]) -> Result<Vec<u8>, ClientError> {
        let end = Instant::now() + self.deadline;
        let (path, waited) = (self.path.clone(), self.deadline);
        let peer = socket::getsockopt(self.stream.get_ref(), sockopt::PeerCredentials)
            .ok()
            .map(|peer| peer.pid());
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => timeout(&path, waited, peer),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                ClientError::HungUp(path.clone())
            }
            _ => ClientError::Io {
                path: path.clone(),
                error,
            },
        };

        let stream = self.stream.get_ref();
        stream.set_write_timeout(Some(left(end))).map_err(failed)?;
        let mut writer: &UnixStream = stream;
        writer.write_all(line).map_err(failed)?;

        let mut answer = Vec::new();
        loop {
            self.stream
                .get_ref()
                .set_read_timeout(Some(left(end)))
                .map_err(failed)?;
            let space = MAX_LINE_BYTES - answer.len();
            let chunk = match self.stream.fill_buf() {
                Ok([]) => return Err(ClientError::HungUp(self.path.clone())),
                Ok(chunk) => chunk,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(failed(error)),
            };
            let newline = chunk.iter().position(|byte| *byte == b'\n');
            let taken = newline.map_or(chunk.len(), |at| at + 1);
            if taken > space {
                return Err(ClientError::Protocol(format!(
                    "the arbiter at {} sent a line of more than {MAX_LINE_BYTES} bytes",
                    self.path.display()
                )));
            }
            answer.extend_from_slice(&chunk[..taken]);
            self.stream.consume(taken);
            if newline.is_some() {
                return Ok(answer);
            }
        }
    }
}

/// `peer`: who listens, by the kernel's word; without, the lock file beside the socket tells.
fn timeout(path: &Path, waited: Duration, peer: Option<i32>) -> ClientError {
    let written = || {
        let lock = std::fs::read_to_string(path.with_file_name("arbiter.lock")).ok()?;
        lock.trim().parse().ok()
    };
    let pid = peer.filter(|pid| *pid > 0).or_else(written);
    ClientError::Timeout {
        path: path.to_owned(),
        waited,
        state: match pid {
            Some(pid) => state_of(pid),
            None => "it runs in another PID namespace; look there whether it is stopped".into(),
        },
    }
}

/// What a process that does not answer is doing, and what to do about it.
fn state_of(pid: i32) -> String {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may contain anything, also parentheses.
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    match state {
        Some('T' | 't') => {
            format!("its process {pid} is stopped; let it go on with `kill -CONT {pid}`")
        }
        Some('D') => {
            format!("its process {pid} waits for a disk or the kernel; see `cat /proc/{pid}/stack`")
        }
        Some('Z' | 'X') => format!("its process {pid} has just ended; try again"),
        Some(_) => format!("its process {pid} is busy or gets no processor; see `top -p {pid}`"),
        None => format!("its process is {pid}, which cannot be seen from here"),
    }
}

/// What is left until `end`; a timeout of zero would mean none, so at least a millisecond.
fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread::JoinHandle;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);
    const PATIENCE: Duration = Duration::from_secs(20);

    struct Fixture {
        dir: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                dir: tempfile::tempdir().unwrap(),
            }
        }

        fn socket(&self) -> PathBuf {
            self.dir.path().join("control.sock")
        }

        /// Serves one connection: reads a line, hands it to `answer`, writes what that returns and
        /// hangs up.
        fn serve(&self, answer: impl FnOnce(&[u8]) -> Vec<u8> + Send + 'static) -> JoinHandle<()> {
            let listener = UnixListener::bind(self.socket()).unwrap();
            thread::spawn(move || {
                let (stream, _) = listener.accept().unwrap();
                let mut line = Vec::new();
                BufReader::new(&stream)
                    .read_until(b'\n', &mut line)
                    .unwrap();
                let _ = (&stream).write_all(&answer(&line));
            })
        }
    }

    #[test]
    fn a_request_is_answered() {
        let fixture = Fixture::new();
        let server = fixture.serve(|line| {
            let request = wire::decode_request(line).unwrap();
            let Request::Set { job, change } = request else {
                panic!("{request:?}");
            };
            assert_eq!(change.settings.share, Some(0.5));
            wire::encode_reply(&Ok(Reply::Changed(Box::new(JobStatus {
                name: job,
                ..JobStatus::default()
            }))))
        });
        let mut client = Client::connect(&fixture.socket(), PATIENCE).unwrap();
        let change = Change {
            settings: crate::JobSettings {
                share: Some(0.5),
                ..crate::JobSettings::default()
            },
            ..Change::default()
        };
        assert_eq!(client.set("train", change).unwrap().name, "train");
        testbed::join(server);
    }

    #[test]
    fn an_answer_in_parts_is_put_together() {
        let fixture = Fixture::new();
        let listener = UnixListener::bind(fixture.socket()).unwrap();
        let server = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut line = Vec::new();
            BufReader::new(&stream)
                .read_until(b'\n', &mut line)
                .unwrap();
            for part in
                wire::encode_reply(&Ok(Reply::Jobs(vec![JobStatus::default(); 40]))).chunks(777)
            {
                (&stream).write_all(part).unwrap();
            }
        });
        let mut client = Client::connect(&fixture.socket(), PATIENCE).unwrap();
        assert_eq!(client.list().unwrap().len(), 40);
        testbed::join(server);
    }

    #[test]
    fn a_refusal_arrives_with_its_words() {
        let fixture = Fixture::new();
        let server = fixture.serve(|_| {
            let error =
                ControlError::new(ErrorCode::NoSuchJob, "no job `x`").with_hint("see `sublet ps`");
            wire::encode_reply(&Err(error))
        });
        let mut client = Client::connect(&fixture.socket(), PATIENCE).unwrap();
        let error = client.set("x", Change::default()).unwrap_err();
        assert_eq!(error.to_string(), "no job `x` (see `sublet ps`)");
        assert!(!error.is_absence());
        testbed::join(server);
    }

    #[test]
    fn a_version_mismatch_is_its_own_error_from_either_end() {
        let newer = br#"{"v_major":9,"reply":{"kind":"status"}}"#.to_vec();
        let refusing = wire::encode_reply(&Err(ControlError::new(
            ErrorCode::VersionMismatch,
            "speaks 2",
        )));
        for answer in [newer, refusing] {
            let fixture = Fixture::new();
            let server = fixture.serve(move |_| [answer, b"\n".to_vec()].concat());
            let mut client = Client::connect(&fixture.socket(), PATIENCE).unwrap();
            let error = client.status().unwrap_err();
            assert!(matches!(error, ClientError::Version(_)), "{error}");
            assert!(error.to_string().contains("restart the arbiter"), "{error}");
            testbed::join(server);
        }
    }

    #[test]
    fn silence_ends_at_the_deadline() {
        let fixture = Fixture::new();
        let listener = UnixListener::bind(fixture.socket()).unwrap();
        let mut client = Client::connect(&fixture.socket(), SOON).unwrap();
        let error = client.status().unwrap_err();
        assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
        drop(listener);
    }

    #[test]
    fn a_full_backlog_ends_at_the_deadline() {
        let fixture = Fixture::new();
        let fd = socket::socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .unwrap();
        let address = UnixAddr::new(&fixture.socket()).unwrap();
        let raw = std::os::fd::AsRawFd::as_raw_fd(&fd);
        socket::bind(raw, &address).unwrap();
        socket::listen(&fd, socket::Backlog::new(0).unwrap()).unwrap();
        let mut held = Vec::new();
        let error = loop {
            match Client::connect(&fixture.socket(), SOON) {
                Ok(client) => held.push(client),
                Err(error) => break error,
            }
            assert!(held.len() < 100, "a backlog of 0 never fills");
        };
        assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    }

    #[test]
    fn a_hang_up_and_nonsense_are_distinguished() {
        let fixture = Fixture::new();
        let server = fixture.serve(|_| Vec::new());
        let mut client = Client::connect(&fixture.socket(), PATIENCE).unwrap();
        assert!(matches!(client.status(), Err(ClientError::HungUp(_))));
        testbed::join(server);

        let fixture = Fixture::new();
        let server = fixture.serve(|_| b"HTTP/1.1 400\n".to_vec());
        let mut client = Client::connect(&fixture.socket(), PATIENCE).unwrap();
        assert!(matches!(client.status(), Err(ClientError::Protocol(_))));
        testbed::join(server);
    }

    #[test]
    fn an_answer_to_another_question_is_refused() {
        let fixture = Fixture::new();
        let server = fixture.serve(|_| wire::encode_reply(&Ok(Reply::ShuttingDown)));
        let mut client = Client::connect(&fixture.socket(), PATIENCE).unwrap();
        let error = client.status().unwrap_err().to_string();
        assert!(
            error.contains("shutting_down") && error.contains("`status`"),
            "{error}"
        );
        testbed::join(server);
    }

    #[test]
    fn absence_has_two_shapes() {
        let fixture = Fixture::new();
        let error = Client::connect(&fixture.socket(), PATIENCE).unwrap_err();
        assert!(matches!(error, ClientError::NoSocket(_)) && error.is_absence());

        drop(UnixListener::bind(fixture.socket()).unwrap());
        let error = Client::connect(&fixture.socket(), PATIENCE).unwrap_err();
        assert!(matches!(error, ClientError::DeadSocket(_)) && error.is_absence());
    }

    #[test]
    fn a_path_beyond_the_kernels_limit_is_named() {
        let long = PathBuf::from("/tmp").join("x".repeat(200));
        let error = Client::connect(&long, PATIENCE).unwrap_err();
        assert!(matches!(error, ClientError::PathTooLong(_)), "{error}");
    }
}
