//! The client's end: attach, and what is held while attached.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::bells::LastBell;
use crate::handshake;
use crate::kept::Kept;
use crate::layout::{ArbiterHalf, ClientHalf, MAX_DEVICES, NO_SLOT, SignaturePage, TenantPage};
use crate::page::{Mapped, PageError};
use crate::residency::RESIDENCY;
use crate::signature::SIGNATURES;
use crate::wire::{
    ASKS, DeviceId, Hello, MESSAGE_BYTES, Outcome, PROTOCOL_MAJOR, PROTOCOL_MINOR, READER,
    TEXT_BYTES, TOKEN_BYTES, Welcome, WireError,
};

/// Why a client could not attach.
#[derive(Debug)]
pub enum AttachError {
    /// Nobody answers at the socket.
    Unreachable(io::Error),
    /// The connection broke during the handshake.
    Broken(io::Error),
    /// The arbiter did not answer in time.
    TimedOut,
    /// The answer cannot be read.
    Wire(WireError),
    /// The arbiter said no.
    Refused(Outcome, String),
    /// A page it sent is not usable.
    Page(PageError),
    /// Descriptors are missing from the answer.
    Descriptors(usize),
    /// The program has closed the descriptors of the pages that the next arbiter is to take over.
    Closed,
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(_) => write!(f, "no arbiter answers"),
            Self::Broken(_) => write!(f, "the connection to the arbiter broke"),
            Self::TimedOut => write!(f, "the arbiter did not answer in time"),
            Self::Wire(_) => write!(f, "the arbiter's answer cannot be read"),
            Self::Refused(outcome, text) => write!(f, "the arbiter refused ({outcome:?}): {text}"),
            Self::Page(_) => write!(f, "the arbiter sent an unusable page"),
            Self::Descriptors(count) => {
                write!(f, "{count} of the arbiter's 3 descriptors could be taken")
            }
            Self::Closed => write!(f, "the program has closed sublet's descriptors"),
        }
    }
}

impl AttachError {
    /// Whether a later try may find it otherwise: an arbiter that is being restarted, that hangs,
    /// or that is at its limit.
    pub fn may_pass(&self) -> bool {
        use io::ErrorKind as Kind;
        match self {
            Self::Unreachable(error) => matches!(
                error.kind(),
                Kind::NotFound
                    | Kind::ConnectionRefused
                    | Kind::ConnectionReset
                    | Kind::WouldBlock
                    | Kind::Interrupted
            ),
            Self::Broken(error) => matches!(
                error.kind(),
                Kind::UnexpectedEof
                    | Kind::ConnectionReset
                    | Kind::BrokenPipe
                    | Kind::NotConnected
                    | Kind::WouldBlock
                    | Kind::Interrupted
            ),
            Self::TimedOut => true,
            Self::Refused(outcome, _) => *outcome == Outcome::Failed,
            Self::Wire(_) | Self::Page(_) | Self::Descriptors(_) | Self::Closed => false,
        }
    }

    /// Whether this process has no descriptors left for it.
    pub fn lacks_descriptors(&self) -> bool {
        let full = |error: &io::Error| {
            let errno = rustix::io::Errno::from_io_error(error);
            errno == Some(rustix::io::Errno::MFILE)
        };
        match self {
            Self::Unreachable(error) | Self::Broken(error) => full(error),
            Self::Descriptors(_) => true,
            _ => false,
        }
    }

    /// Whether the kernel forbids this process a call that it takes.
    pub fn is_forbidden(&self) -> bool {
        match self {
            Self::Unreachable(error) | Self::Broken(error) => matches!(
                error.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported
            ),
            _ => false,
        }
    }
}

impl std::error::Error for AttachError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unreachable(source) | Self::Broken(source) => Some(source),
            Self::Wire(source) => Some(source),
            Self::Page(source) => Some(source),
            _ => None,
        }
    }
}

/// What a client tells of itself.
#[derive(Clone, Debug)]
pub struct Introduction {
    /// Capability of its tenant.
    pub token: [u8; TOKEN_BYTES],
    /// Devices by ordinal of its driver.
    pub devices: Vec<DeviceId>,
    /// Name of the program, for people.
    pub command: String,
    /// What it asks for, where it has no token; see [`Hello::asked`].
    pub asked: Option<String>,
}

/// What survives the loss of an arbiter and is handed to the next one: the pages in which the
/// client's memory and completion marks are kept.
#[derive(Debug)]
struct ReattachState {
    /// Descriptor of the client's own half.
    client_fd: Kept,
    /// Descriptor of the tenant's page.
    tenant_fd: Kept,
}

/// An attached client. Pages are leaked on purpose: threads of a stranger's process may look at
/// them until it ends.
#[derive(Debug)]
pub struct ClientEnd {
    /// arbiter --> client, read-only.
    pub arbiter: &'static ArbiterHalf,
    /// client --> arbiter.
    pub client: &'static ClientHalf,
    /// Memory of the tenant.
    pub tenant: &'static TenantPage,
    /// client --what it submits--> arbiter; `None`: the arbiter does not ask.
    pub signatures: Option<&'static SignaturePage>,
    /// For each device ordinal of this process's driver, its index in the pages.
    pub device_map: [Option<u8>; MAX_DEVICES],
    /// Slot in the tenant's page.
    pub slot: u32,
    /// What a later re-attachment needs: the same for all attachments, for the pages are.
    reattach: Arc<ReattachState>,
    last_bell: LastBell,
    socket: Kept,
    arbiter_process: Option<Kept>,
}

/// Whether an arbiter lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Liveness {
    /// It does, though it may be stopped.
    Lives,
    /// Its process has ended.
    Gone,
    /// That cannot be known: the program has closed our descriptors, or may not make the call. Its
    /// heartbeat shows it.
    Unknown,
}

impl ClientEnd {
    /// Attaches for the first time.
    pub fn attach(
        socket: &Path,
        introduction: &Introduction,
        timeout: Duration,
    ) -> Result<Self, AttachError> {
        let features = SIGNATURES | RESIDENCY;
        Self::handshake(
            socket,
            introduction,
            features,
            None,
            Duration::ZERO,
            timeout,
        )
    }

    /// Attaches a process that only reads what the pages say: it holds no slot of its tenant's
    /// page.
    pub fn attach_reader(
        socket: &Path,
        introduction: &Introduction,
        timeout: Duration,
    ) -> Result<Self, AttachError> {
        Self::handshake(socket, introduction, READER, None, Duration::ZERO, timeout)
    }

    /// Attaches to the next arbiter with the pages of the last one, `gap` after losing it.
    pub fn reattach(
        socket: &Path,
        introduction: &Introduction,
        last: &ClientEnd,
        gap: Duration,
        timeout: Duration,
    ) -> Result<Self, AttachError> {
        let features = SIGNATURES | RESIDENCY;
        Self::handshake(socket, introduction, features, Some(last), gap, timeout)
    }

    fn handshake(
        path: &Path,
        introduction: &Introduction,
        features: u64,
        last: Option<&ClientEnd>,
        gap: Duration,
        timeout: Duration,
    ) -> Result<Self, AttachError> {
        let unreachable = |errno: rustix::io::Errno| AttachError::Unreachable(errno.into());
        let address = SocketAddrUnix::new(path).map_err(unreachable)?;
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .map_err(unreachable)?;
        rustix::net::connect(&socket, &address).map_err(unreachable)?;

        let asks = introduction.asked.as_ref().map_or(0, |_| ASKS);
        let hello = Hello {
            major: PROTOCOL_MAJOR,
            minor: PROTOCOL_MINOR,
            features: features | asks,
            token: introduction.token,
            previous_slot: last.map(|last| last.slot),
            gap_ns: u64::try_from(gap.as_nanos()).unwrap_or(u64::MAX),
            devices: introduction.devices.clone(),
            command: introduction.command.clone(),
            asked: introduction.asked.clone().unwrap_or_default(),
        };
        let kept: Vec<BorrowedFd<'_>> = match last {
            Some(last) => {
                let pages = [&last.reattach.client_fd, &last.reattach.tenant_fd];
                let pages = pages.into_iter().map(Kept::get);
                pages.collect::<Option<_>>().ok_or(AttachError::Closed)?
            }
            None => Vec::new(),
        };
        handshake::send(socket.as_fd(), &hello.encode(), &kept).map_err(AttachError::Broken)?;
        let mut buffer = [0; MESSAGE_BYTES];
        let (bytes, fds) = handshake::receive_within(socket.as_fd(), &mut buffer, timeout)
            .map_err(AttachError::Broken)?
            .ok_or(AttachError::TimedOut)?;
        // PANIC: `receive` returns at most the buffer's length.
        let welcome = Welcome::decode(&buffer[..bytes]).map_err(AttachError::Wire)?;
        if welcome.outcome != Outcome::Attached {
            return Err(AttachError::Refused(welcome.outcome, welcome.text));
        }
        let taken = Taken::from(fds, last).inspect_err(|error| {
            // It takes us for attached, and is to know better.
            farewell(socket.as_fd(), &error.to_string());
        })?;
        let arbiter_process = peer_process(socket.as_fd()).and_then(|fd| Kept::new(fd).ok());
        let socket = Kept::new(socket).map_err(|errno| AttachError::Broken(errno.into()))?;
        Ok(Self {
            arbiter: taken.arbiter,
            client: taken.client,
            tenant: taken.tenant,
            signatures: taken.signatures,
            device_map: welcome.device_map,
            slot: taken.arbiter.tenant_slot(),
            reattach: taken.reattach,
            last_bell: LastBell::default(),
            socket,
            arbiter_process,
        })
    }

    /// client --something changed--> arbiter: a message of no bytes. None is sent while the last
    /// one has not been answered, and one that does not fit any more need not be sent: the arbiter
    /// has yet to look at those before it.
    pub fn ring(&self) {
        self.last_bell.ring(self.arbiter, || self.send_bell());
    }

    /// Sends a bell whether one is on its way or not, as a peer that is not this library may.
    /// Whether there is one in the socket now.
    #[doc(hidden)]
    pub fn send_bell(&self) -> bool {
        let sent = self
            .socket
            .get()
            .map(|socket| handshake::send(socket, &[], &[]));
        let is_full = |error: io::Error| error.kind() == io::ErrorKind::WouldBlock;
        sent.is_some_and(|sent| sent.map_or_else(is_full, |()| true))
    }

    /// Tells the arbiter why this process does not stay. To be dropped afterwards.
    pub fn farewell(&self, why: &str) {
        if let Some(socket) = self.socket.get() {
            farewell(socket, why);
        }
    }

    /// Another attachment has taken this one's place: what only this one used is closed. Its pages
    /// stay, for threads may be looking at them.
    pub fn retire(&self) {
        self.socket.close();
        if let Some(process) = &self.arbiter_process {
            process.close();
        }
    }

    /// Whether the arbiter's process still lives. By its pidfd, for the socket says nothing after a
    /// fork on the other side; and by the socket, for the process that the kernel names is the one
    /// that has begun to listen: a service manager, where that has handed the socket over.
    pub fn arbiter_liveness(&self) -> Liveness {
        let asked = |kept: &Kept, flags| kept.get().and_then(|fd| is_ready(fd, flags).ok());
        let hung_up = asked(&self.socket, PollFlags::empty());
        let watched = match &self.arbiter_process {
            Some(process) => asked(process, PollFlags::IN),
            None => hung_up,
        };
        match (watched, hung_up) {
            (Some(true), _) | (_, Some(true)) => Liveness::Gone,
            (Some(false), _) => Liveness::Lives,
            (None, _) => Liveness::Unknown,
        }
    }
}

/// What comes with a welcome.
struct Taken {
    arbiter: &'static ArbiterHalf,
    client: &'static ClientHalf,
    tenant: &'static TenantPage,
    signatures: Option<&'static SignaturePage>,
    reattach: Arc<ReattachState>,
}

impl Taken {
    fn from(fds: Vec<OwnedFd>, last: Option<&ClientEnd>) -> Result<Self, AttachError> {
        let count = fds.len();
        // A page of its own per attachment: what an earlier arbiter saw of it means nothing to this
        // one.
        let signatures = match fds.get(3) {
            Some(fd) => Mapped::<SignaturePage>::open(fd.as_fd(), true)
                .ok()
                .map(Mapped::leak),
            None => None,
        };
        let mut fds = fds;
        fds.truncate(3);
        let Ok([arbiter_fd, client_fd, tenant_fd]) = <[OwnedFd; 3]>::try_from(fds) else {
            return Err(AttachError::Descriptors(count));
        };
        let arbiter = Mapped::<ArbiterHalf>::open(arbiter_fd.as_fd(), false)
            .map_err(AttachError::Page)?
            .leak();
        drop(arbiter_fd);
        // Where the arbiter took our pages over, the mappings that threads use stay the ones in
        // use.
        let (client, tenant) = match last {
            Some(last) => (last.client, last.tenant),
            None => (
                Mapped::<ClientHalf>::open(client_fd.as_fd(), true)
                    .map_err(AttachError::Page)?
                    .leak(),
                Mapped::<TenantPage>::open(tenant_fd.as_fd(), arbiter.tenant_slot() != NO_SLOT)
                    .map_err(AttachError::Page)?
                    .leak(),
            ),
        };
        let keep = |fd| Kept::new(fd).map_err(|errno| AttachError::Broken(errno.into()));
        let reattach = match last {
            Some(last) => Arc::clone(&last.reattach),
            None => Arc::new(ReattachState {
                client_fd: keep(client_fd)?,
                tenant_fd: keep(tenant_fd)?,
            }),
        };
        Ok(Self {
            arbiter,
            client,
            tenant,
            signatures,
            reattach,
        })
    }
}

/// Says why this process cannot be governed after all.
fn farewell(socket: BorrowedFd<'_>, why: &str) {
    let bytes = why.as_bytes();
    // PANIC: at most its length. The arbiter reads what it is cut to as text all the same.
    let _ = handshake::send(socket, &bytes[..bytes.len().min(TEXT_BYTES)], &[]);
}

/// The arbiter's process; `None` where it is in a PID namespace that ours does not see: then the
/// end of the socket tells of its end.
fn peer_process(socket: BorrowedFd<'_>) -> Option<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(peer_pid(socket)?)?;
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
}

/// Number of the process at the other end; 0 where our PID namespace has none for it. rustix has no
/// value for that: its type for process ids is never zero.
fn peer_pid(socket: BorrowedFd<'_>) -> Option<i32> {
    #[repr(C)]
    struct Credentials {
        pid: i32,
        uid: u32,
        gid: u32,
    }
    const SOL_SOCKET: i32 = 1;
    const SO_PEERCRED: i32 = 17;
    unsafe extern "C" {
        fn getsockopt(
            socket: i32,
            level: i32,
            name: i32,
            value: *mut Credentials,
            length: *mut u32,
        ) -> i32;
    }
    let mut peer = Credentials {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    // CAST: twelve bytes.
    let mut length = size_of::<Credentials>() as u32;
    // SAFETY: the C library's function, with a structure of the kernel's layout and its length,
    // both of which outlive the call.
    let status = unsafe {
        getsockopt(
            socket.as_raw_fd(),
            SOL_SOCKET,
            SO_PEERCRED,
            &raw mut peer,
            &raw mut length,
        )
    };
    (status == 0 && length as usize == size_of::<Credentials>()).then_some(peer.pid)
}

/// Whether `fd` is ready for `flags`, or hung up, right now.
fn is_ready(fd: BorrowedFd<'_>, flags: PollFlags) -> Result<bool, rustix::io::Errno> {
    let now = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let ready = rustix::event::poll(&mut [PollFd::new(&fd, flags)], Some(&now));
    match ready {
        Err(rustix::io::Errno::INTR) => Ok(false),
        ready => Ok(ready? > 0),
    }
}
