//! What the tests share: a daemon in a thread, clients, processes with a role, and waiting.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arbiter::{Arbiter, DeviceRule, Options, Stopper};
use channel::Event;
use channel::client::{ClientEnd, Introduction};
use channel::wire::DeviceId;
use control::paths::RuntimeDir;
use control::{Client, ClientError, DeviceSettings, JobSettings, JobSpec, Registered, SliceMode};

/// Far beyond what anything here takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Tries until there is a value.
pub fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A simulated job.
pub fn named(name: &str, share: f64) -> JobSpec {
    JobSpec {
        settings: JobSettings {
            share: Some(share),
            ..JobSettings::default()
        },
        name: name.into(),
        simulated: true,
        ..JobSpec::default()
    }
}

/// Why something was refused.
pub fn refusal(result: Result<impl std::fmt::Debug, ClientError>) -> control::ControlError {
    match result {
        Err(ClientError::Refused(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// Starts this very program with a role, which its test `role` plays.
pub fn child(role: &str, socket: &Path, word: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("us"));
    // The test runner's own threads would take a signal that the arbiter, in a thread of theirs,
    // waits for.
    // SAFETY: blocking a signal is all that happens between fork and exec, and it is
    // async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            let mut signals = nix::sys::signal::SigSet::empty();
            signals.add(nix::sys::signal::Signal::SIGTERM);
            signals.thread_block().map_err(Into::into)
        });
    }
    command
        .args(["--exact", "role", "--nocapture", "--test-threads=1"])
        .env("ARBITER_TEST_ROLE", role)
        .env("ARBITER_TEST_SOCKET", socket)
        .env("ARBITER_TEST_WORD", word)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("started")
}

/// The role of this process, with its socket and its word; `None`: it is nobody's.
pub fn role_of_ours() -> Option<(String, PathBuf, String)> {
    let role = std::env::var("ARBITER_TEST_ROLE").ok()?;
    let socket = PathBuf::from(std::env::var_os("ARBITER_TEST_SOCKET").expect("socket"));
    let word = std::env::var("ARBITER_TEST_WORD").expect("word");
    Some((role, socket, word))
}

/// A runtime directory of its own.
pub fn directory() -> (tempfile::TempDir, RuntimeDir) {
    let dir = tempfile::tempdir().expect("directory");
    let runtime = RuntimeDir::given(dir.path().join("run")).expect("absolute");
    let uid = rustix::process::geteuid().as_raw();
    runtime.ensure(uid).expect("a directory of our own");
    (dir, runtime)
}

/// Connects to the arbiter of a directory.
pub fn operator(dir: &RuntimeDir) -> Result<Client, control::ClientError> {
    Client::connect(&dir.api_socket(), PATIENCE)
}

/// Every device in slices, whatever the default is.
pub fn exclusive() -> DeviceRule {
    DeviceRule {
        settings: DeviceSettings {
            mode: Some(SliceMode::Exclusive),
            ..DeviceSettings::default()
        },
        ..DeviceRule::default()
    }
}

/// An arbiter in a thread; stopped when dropped.
pub struct Daemon {
    pub dir: RuntimeDir,
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
    _place: Option<tempfile::TempDir>,
}

impl Daemon {
    pub fn start() -> Self {
        let (place, dir) = directory();
        let mut daemon = Self::start_in(dir);
        daemon._place = Some(place);
        daemon
    }

    /// In a directory that outlives it.
    pub fn start_in(dir: RuntimeDir) -> Self {
        Self::start_as(dir, |_| ())
    }

    /// The same, with options of its own. Its devices are [`exclusive`] where those say nothing
    /// else.
    pub fn start_as(dir: RuntimeDir, set: impl FnOnce(&mut Options) + Send + 'static) -> Self {
        let (send, started) = std::sync::mpsc::channel();
        let runtime = dir.clone();
        let thread = std::thread::spawn(move || {
            let mut options = Options {
                host_nvml: false,
                devices: vec![exclusive()],
                ..Options::new(runtime)
            };
            set(&mut options);
            let arbiter = Arbiter::start(options).expect("started");
            send.send(arbiter.stopper()).expect("somebody waits");
            arbiter.serve().expect("served");
        });
        let stopper = started
            .recv_timeout(testbed::PATIENCE)
            .expect("it has started");
        Self {
            dir,
            stopper,
            thread: Some(thread),
            _place: None,
        }
    }

    pub fn operator(&self) -> Client {
        operator(&self.dir).expect("it listens")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            let ended = testbed::joined(thread);
            if !std::thread::panicking() {
                ended
                    .expect("the daemon ends")
                    .expect("the daemon has not panicked");
            }
        }
    }
}

pub fn introduction(job: &Registered) -> Introduction {
    Introduction {
        token: job.token.as_bytes().try_into().expect("32 digits"),
        devices: vec![DeviceId {
            uuid: [7; 16],
            total_bytes: 8 << 30,
        }],
        command: "worker".into(),
        asked: None,
    }
}

pub fn attach(job: &Registered) -> ClientEnd {
    ClientEnd::attach(&job.channel_socket, &introduction(job), PATIENCE).expect("attached")
}

/// A client that always has more to do: waits at its gate as the interposer does, and keeps one
/// mark in flight while it is open, however rarely this machine lets its thread run.
pub struct Worker {
    launches: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub fn start(client: ClientEnd) -> Self {
        let (launches, stop) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (count, ended) = (Arc::clone(&launches), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let gate = client.arbiter.device(0).expect("device");
            let want = client.client.want(0).expect("device");
            let thread = client.client.thread(0);
            let stream = client.client.claim_stream(0).expect("slot").1;
            while !ended.load(Relaxed) {
                if let Err(seen) = gate.look() {
                    stream.settle();
                    want.begin_waiting();
                    client.ring();
                    gate.wait(seen, Duration::from_millis(100));
                    want.end_waiting();
                    continue;
                }
                thread.count_launch();
                thread.all_marked();
                stream.settle();
                stream.issue();
                count.fetch_add(1, Relaxed);
                std::thread::sleep(Duration::from_micros(30));
            }
            stream.settle();
        });
        Self {
            launches,
            stop,
            thread: Some(thread),
        }
    }

    pub fn launches(&self) -> u64 {
        self.launches.load(Relaxed)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = testbed::joined(thread);
        }
    }
}

/// Waits, blocks and computes without end as it says, and has claimed many impossible things.
pub fn lie(client: &ClientEnd, lines: usize) {
    let want = client.client.want(0).expect("device");
    want.begin_waiting();
    want.begin_blocking();
    let stream = client.client.claim_stream(0).expect("slot").1;
    for _ in 0..lines {
        stream.issue();
        client
            .client
            .write_record(99, Event::Reattached { gap_ns: 1 });
    }
    client.ring();
}

/// A connection to the channel that says nothing.
pub fn seqpacket(path: &Path) -> OwnedFd {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC;
    let kind = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).expect("socket");
    let address = SocketAddrUnix::new(path).expect("address");
    rustix::net::connect(&socket, &address).expect("connected");
    socket
}

/// Sends one message; false where the other side has hung up.
pub fn send(socket: &OwnedFd, bytes: &[u8]) -> bool {
    rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL).is_ok()
}

/// One message with the descriptors that came along.
pub fn receive_with(socket: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
    let timeout = rustix::net::sockopt::Timeout::Recv;
    rustix::net::sockopt::set_socket_timeout(socket, timeout, Some(PATIENCE)).expect("set");
    let mut buffer = vec![0; 4096];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [std::io::IoSliceMut::new(&mut buffer)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let message =
        rustix::net::recvmsg(socket, &mut slices, &mut control, flags).expect("an answer");
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds = rights.flatten().collect();
    buffer.truncate(message.bytes);
    (buffer, fds)
}

/// One message; `None` where the other side has hung up without one.
pub fn receive(socket: &OwnedFd) -> Option<Vec<u8>> {
    let mut buffer = vec![0; 4096];
    let flags = rustix::net::RecvFlags::empty();
    let (bytes, _) = rustix::net::recv(socket, &mut buffer[..], flags).ok()?;
    buffer.truncate(bytes);
    (bytes > 0).then_some(buffer)
}
