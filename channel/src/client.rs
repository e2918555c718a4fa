//! The client's end: attach, and what is held while attached.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::handshake;
use crate::layout::{ArbiterHalf, ClientHalf, MAX_DEVICES, SignaturePage, TenantPage};
use crate::page::{Mapped, PageError};
use crate::residency::RESIDENCY;
use crate::signature::SIGNATURES;
use crate::wire::{
    DeviceId, Hello, MESSAGE_BYTES, Outcome, PROTOCOL_MAJOR, PROTOCOL_MINOR, TOKEN_BYTES, Welcome,
    WireError,
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
                write!(f, "{count} of the arbiter's 4 descriptors could be taken")
            }
        }
    }
}

impl AttachError {
    /// Whether a later try may find it otherwise: an arbiter that is being restarted, that hangs, or that is at its limit.
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
            Self::Wire(_) | Self::Page(_) | Self::Descriptors(_) => false,
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
}

/// What survives the loss of an arbiter and is handed to the next one: the pages in which the client's memory and
/// completion marks are kept.
#[derive(Debug)]
pub struct Keepsake {
    /// Descriptor of the client's own half.
    pub client_fd: OwnedFd,
    /// Descriptor of the tenant's page.
    pub tenant_fd: OwnedFd,
    /// Slot in the tenant's page.
    pub slot: u32,
}

/// An attached client. Pages are leaked on purpose: threads of a stranger's process may look at them until it ends.
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
    /// What a later re-attachment needs.
    pub keepsake: Keepsake,
    doorbell: OwnedFd,
    socket: OwnedFd,
    arbiter_process: Option<OwnedFd>,
}

impl ClientEnd {
    /// Attaches for the first time.
    pub fn attach(
        socket: &Path,
        introduction: &Introduction,
        timeout: Duration,
    ) -> Result<Self, AttachError> {
        Self::handshake(socket, introduction, None, Duration::ZERO, timeout)
    }

    /// Attaches to the next arbiter with the pages of the last one, `gap` after losing it.
    pub fn reattach(
        socket: &Path,
        introduction: &Introduction,
        last: &ClientEnd,
        gap: Duration,
        timeout: Duration,
    ) -> Result<Self, AttachError> {
        Self::handshake(socket, introduction, Some(last), gap, timeout)
    }

    fn handshake(
        path: &Path,
        introduction: &Introduction,
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

        let hello = Hello {
            major: PROTOCOL_MAJOR,
            minor: PROTOCOL_MINOR,
            features: SIGNATURES | RESIDENCY,
            token: introduction.token,
            previous_slot: last.map(|last| last.keepsake.slot),
            gap_ns: u64::try_from(gap.as_nanos()).unwrap_or(u64::MAX),
            devices: introduction.devices.clone(),
            command: introduction.command.clone(),
        };
        let kept: Vec<BorrowedFd<'_>> = last
            .map(|last| {
                vec![
                    last.keepsake.client_fd.as_fd(),
                    last.keepsake.tenant_fd.as_fd(),
                ]
            })
            .unwrap_or_default();
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
        let count = fds.len();
        // A page of its own per attachment: what an earlier arbiter saw of it means nothing to this one.
        let signatures = match fds.get(4) {
            Some(fd) => Mapped::<SignaturePage>::open(fd.as_fd(), true)
                .ok()
                .map(Mapped::leak),
            None => None,
        };
        let mut fds = fds;
        fds.truncate(4);
        let Ok([arbiter_fd, client_fd, tenant_fd, doorbell]) = <[OwnedFd; 4]>::try_from(fds) else {
            return Err(AttachError::Descriptors(count));
        };
        let arbiter = Mapped::<ArbiterHalf>::open(arbiter_fd.as_fd(), false)
            .map_err(AttachError::Page)?
            .leak();
        // Where the arbiter took our pages over, the mappings that threads use stay the ones in use.
        let (client, tenant) = match last {
            Some(last) => (last.client, last.tenant),
            None => (
                Mapped::<ClientHalf>::open(client_fd.as_fd(), true)
                    .map_err(AttachError::Page)?
                    .leak(),
                Mapped::<TenantPage>::open(tenant_fd.as_fd(), true)
                    .map_err(AttachError::Page)?
                    .leak(),
            ),
        };
        let keepsake = Keepsake {
            client_fd: out_of_the_way(client_fd),
            tenant_fd: out_of_the_way(tenant_fd),
            slot: arbiter.tenant_slot(),
        };
        let arbiter_process = peer_process(socket.as_fd()).map(out_of_the_way);
        let (socket, doorbell) = (out_of_the_way(socket), out_of_the_way(doorbell));
        Ok(Self {
            arbiter,
            client,
            tenant,
            signatures,
            device_map: welcome.device_map,
            keepsake,
            doorbell,
            socket,
            arbiter_process,
        })
    }

    /// client --something changed--> arbiter.
    pub fn ring(&self) {
        ring(self.doorbell.as_fd());
    }

    /// The doorbell, for a caller that keeps its number.
    pub fn doorbell(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }

    /// Whether the arbiter's process still lives. By its pidfd: the socket says nothing after a fork on the other side.
    pub fn arbiter_lives(&self) -> bool {
        match &self.arbiter_process {
            Some(process) => !ready(process.as_fd(), PollFlags::IN),
            None => !ready(self.socket.as_fd(), PollFlags::empty()),
        }
    }

    /// The socket and every other descriptor held open, for code that must not close them by accident.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 4] {
        [
            self.socket.as_fd(),
            self.doorbell.as_fd(),
            self.keepsake.client_fd.as_fd(),
            self.keepsake.tenant_fd.as_fd(),
        ]
    }
}

/// Rings a doorbell. A full counter means that it is ringing already.
pub(crate) fn ring(doorbell: BorrowedFd<'_>) {
    let _ = rustix::io::write(doorbell, &1u64.to_ne_bytes());
}

/// The same descriptor under a high number. A program expects the lowest free numbers for its own files, and one that has
/// closed its standard output must not write into ours.
fn out_of_the_way(fd: OwnedFd) -> OwnedFd {
    /// FLOOR: above what shells and programs name themselves, below the usual limit of 1024.
    const HIGH: i32 = 900;
    rustix::io::fcntl_dupfd_cloexec(&fd, HIGH)
        .or_else(|_| rustix::io::fcntl_dupfd_cloexec(&fd, 3))
        .unwrap_or(fd)
}

fn peer_process(socket: BorrowedFd<'_>) -> Option<OwnedFd> {
    let peer = rustix::net::sockopt::socket_peercred(socket).ok()?;
    rustix::process::pidfd_open(peer.pid, rustix::process::PidfdFlags::empty()).ok()
}

/// Whether `fd` is ready for `flags`, or hung up, right now.
fn ready(fd: BorrowedFd<'_>, flags: PollFlags) -> bool {
    let now = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::event::poll(&mut [PollFd::new(&fd, flags)], Some(&now)).is_ok_and(|count| count > 0)
}
