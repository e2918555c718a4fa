//! The arbiter's end: a listening socket, the handshake, and what it holds of each client.

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::handshake;
use crate::layout::{
    ArbiterHalf, ClientHalf, MAX_DEVICES, SharedBlocks, SignaturePage, TENANT_SLOTS, TenantPage,
    TenantSlot,
};
use crate::page::{Mapped, PageError, Writers, allocate};
use crate::wire::{
    Hello, MESSAGE_BYTES, Outcome, PROTOCOL_MAJOR, PROTOCOL_MINOR, TEXT_BYTES, Welcome, WireError,
};

/// Who a connecting process is, as the kernel says.
#[derive(Debug)]
pub struct Identity {
    /// Process id.
    pub pid: u32,
    /// User id.
    pub uid: u32,
    /// Readable once the process has ended.
    pub process: OwnedFd,
}

/// The socket that clients connect to.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
}

impl Listener {
    /// Binds `path`, replacing what a dead arbiter left there. The caller holds the lock that says
    /// it is dead.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let _ = rustix::fs::unlink(path);
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&socket, 128)?;
        Ok(Self { socket })
    }

    /// A socket of this kind that listens already, from who starts the arbiter.
    pub fn handed(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        // The kernel names the process that has begun to listen to those who connect.
        rustix::net::listen(&socket, 128)?;
        Ok(Self { socket })
    }

    /// A client that has connected; `None` where there is none.
    pub fn try_accept(&self) -> io::Result<Option<Connection>> {
        match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => Ok(Some(Connection { socket })),
            Err(
                rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED,
            ) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A connected socket before its [`Hello`] has been answered.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Why a handshake failed on this side.
#[derive(Debug)]
pub enum HandshakeError {
    /// A system call failed or the peer left.
    Io(io::Error),
    /// The message cannot be read.
    Wire(WireError),
    /// A page that the peer sent along is unusable.
    Page(PageError),
}

impl std::fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(_) => write!(f, "the connection broke during the handshake"),
            Self::Wire(_) => write!(f, "the client's greeting cannot be read"),
            Self::Page(_) => write!(f, "the client sent an unusable page"),
        }
    }
}

impl std::error::Error for HandshakeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(source) => Some(source),
            Self::Wire(source) => Some(source),
            Self::Page(source) => Some(source),
        }
    }
}

impl Connection {
    /// Who is at the other end.
    pub fn identity(&self) -> io::Result<Identity> {
        let peer = rustix::net::sockopt::socket_peercred(&self.socket)?;
        let process = rustix::process::pidfd_open(peer.pid, rustix::process::PidfdFlags::empty())?;
        Ok(Identity {
            // CAST: process ids are positive.
            pid: peer.pid.as_raw_nonzero().get() as u32,
            uid: peer.uid.as_raw(),
            process,
        })
    }

    /// Reads the greeting; `WouldBlock` inside [`HandshakeError::Io`] where it has not come yet.
    pub fn try_hello(&self) -> Result<(Hello, Option<(OwnedFd, OwnedFd)>), HandshakeError> {
        let mut buffer = [0; MESSAGE_BYTES];
        let (bytes, fds) =
            handshake::receive(self.socket.as_fd(), &mut buffer).map_err(HandshakeError::Io)?;
        // PANIC: `receive` returns at most the buffer's length.
        let hello = Hello::decode(&buffer[..bytes]).map_err(HandshakeError::Wire)?;
        let kept = <[OwnedFd; 2]>::try_from(fds)
            .ok()
            .map(|[client, tenant]| (client, tenant));
        Ok((hello, kept))
    }

    /// Sends a refusal. The connection is closed with the value.
    pub fn refuse(self, outcome: Outcome, text: &str) {
        let welcome = welcome(outcome, [None; MAX_DEVICES], text);
        let _ = handshake::send(self.socket.as_fd(), &welcome.encode(), &[]);
    }

    /// Sends the pages. From here on the client is attached.
    pub fn welcome(
        self,
        files: PageFiles,
        tenant: &TenantMemory,
        device_map: [Option<u8>; MAX_DEVICES],
    ) -> io::Result<OwnedFd> {
        let welcome = welcome(Outcome::Attached, device_map, "");
        let fds = [
            files.arbiter.as_fd(),
            files.client.as_fd(),
            tenant.fd.as_fd(),
        ];
        // A client that has not asked for a fourth descriptor expects exactly three.
        let signatures = files.signatures.as_ref().map(OwnedFd::as_fd);
        let fds: Vec<BorrowedFd<'_>> = fds.into_iter().chain(signatures).collect();
        handshake::send(self.socket.as_fd(), &welcome.encode(), &fds)?;
        Ok(self.socket)
    }
}

fn welcome(outcome: Outcome, device_map: [Option<u8>; MAX_DEVICES], text: &str) -> Welcome {
    Welcome {
        major: PROTOCOL_MAJOR,
        minor: PROTOCOL_MINOR,
        features: 0,
        outcome,
        device_map,
        text: text.to_owned(),
    }
}

/// What a client's socket has said since it was looked at last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bell {
    /// That something has changed, by so many messages. What it rang for is read after this.
    Rang(u32),
    /// The other side is closed.
    HungUp,
}

/// Takes what an attached client's socket has said: a message of no bytes is a bell. Any other says
/// why the process cannot be governed after all: `farewell` is then its word, to be shown to people
/// as that.
pub fn answer_bell(socket: BorrowedFd<'_>, farewell: &mut Option<String>) -> Bell {
    /// Messages taken in one go; more than a queue holds by default (net.unix.max_dgram_qlen).
    const MOST: u32 = 64;
    for taken in 0..MOST {
        let mut text = [0u8; TEXT_BYTES];
        match rustix::net::recv(socket, &mut text, rustix::net::RecvFlags::DONTWAIT) {
            // A message of no bytes, or the end.
            Ok((_, 0)) | Err(rustix::io::Errno::INTR) => {}
            Ok((_, bytes)) => {
                let text = String::from_utf8_lossy(text.get(..bytes).unwrap_or_default());
                *farewell = Some(text.replace(char::is_control, "?"));
            }
            Err(rustix::io::Errno::AGAIN) => return Bell::Rang(taken),
            Err(_) => return Bell::HungUp,
        }
    }
    match has_hung_up(socket) {
        true => Bell::HungUp,
        false => Bell::Rang(MOST),
    }
}

/// Whether the other side of a client's socket is closed.
pub fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let now = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut ask = [PollFd::new(&socket, PollFlags::RDHUP)];
    matches!(rustix::event::poll(&mut ask, Some(&now)), Ok(ready) if ready > 0)
}

/// The two halves shared with one client.
#[derive(Debug)]
pub struct ClientPages {
    /// arbiter --> client.
    pub arbiter: Mapped<ArbiterHalf>,
    /// client --> arbiter.
    pub client: Mapped<ClientHalf>,
    signatures: Option<Mapped<SignaturePage>>,
    /// The file of the client's half: its file system and its inode number.
    client_file: (u64, u64),
    /// Until they are taken to be sent to the client.
    files: Option<PageFiles>,
}

/// The files of one client's pages. The arbiter has the pages mapped and closes the files once they
/// are sent.
#[derive(Debug)]
pub struct PageFiles {
    arbiter: OwnedFd,
    client: OwnedFd,
    signatures: Option<OwnedFd>,
}

impl PageFiles {
    /// Descriptors of the pages that the client brings to the next arbiter: its own half, and the
    /// page of its tenant.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn to_bring(&self, tenant: &TenantMemory) -> io::Result<(OwnedFd, OwnedFd)> {
        Ok((self.client.try_clone()?, tenant.fd.try_clone()?))
    }
}

impl ClientPages {
    /// Makes the pages of a new client; its halves are published, every gate is closed and every
    /// limit is "none".
    pub fn create() -> Result<Self, PageError> {
        let (client, client_fd) = Mapped::<ClientHalf>::create(Writers::Holders)?;
        client.publish();
        Self::with_client(client, client_fd)
    }

    /// Takes over the half in which a client, attached to an arbiter before this one, keeps its
    /// marks.
    pub fn adopt(client_fd: OwnedFd) -> Result<Self, PageError> {
        let client = Mapped::<ClientHalf>::open(client_fd.as_fd(), true)?;
        Self::with_client(client, client_fd)
    }

    fn with_client(client: Mapped<ClientHalf>, client_fd: OwnedFd) -> Result<Self, PageError> {
        let (arbiter, arbiter_fd) = Mapped::<ArbiterHalf>::create(Writers::OnlyUs)?;
        for device in 0..MAX_DEVICES {
            arbiter.set_limit(device, None);
            arbiter.set_physical(device, 0, None);
        }
        // From here on bells are counted.
        arbiter.answer_bells();
        arbiter.publish();
        let file = rustix::fs::fstat(&client_fd)
            .map_err(|errno| PageError::Io("look at", errno.into()))?;
        Ok(Self {
            arbiter,
            client,
            signatures: None,
            client_file: (file.st_dev, file.st_ino),
            files: Some(PageFiles {
                arbiter: arbiter_fd,
                client: client_fd,
                signatures: None,
            }),
        })
    }

    /// Makes the page in which the client is to write what it submits; for a client whose greeting
    /// has the feature [`SIGNATURES`](crate::SIGNATURES), before it is welcomed.
    pub fn ask_for_signatures(&mut self) -> Result<(), PageError> {
        let (page, fd) = Mapped::<SignaturePage>::create(Writers::Holders)?;
        page.publish();
        self.signatures = Some(page);
        if let Some(files) = &mut self.files {
            files.signatures = Some(fd);
        }
        Ok(())
    }

    /// The files to send to the client, once.
    pub fn take_files(&mut self) -> Option<PageFiles> {
        self.files.take()
    }

    /// client --what it submits--> arbiter; `None` for a client that does not tell.
    pub fn signatures(&self) -> Option<&SignaturePage> {
        self.signatures.as_deref()
    }

    /// Whether the process has the client's half mapped, as proc_pid_maps(5) says: one that has
    /// executed another program has not, though it is the same process. `None`: that cannot be
    /// read, or the process is on its way out.
    pub fn are_mapped_by(&self, pid: u32) -> Option<bool> {
        let (file_system, inode) = self.client_file;
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
        let is_ours = |line: &str| {
            let mut fields = line.split_ascii_whitespace().skip(3);
            let device = fields.next().and_then(|device| device.split_once(':'));
            let number = |digits| u32::from_str_radix(digits, 16).ok();
            let device = device.and_then(|(major, minor)| Some((number(major)?, number(minor)?)));
            let (major, minor) = (
                rustix::fs::major(file_system),
                rustix::fs::minor(file_system),
            );
            device == Some((major, minor))
                && fields.next().and_then(|inode| inode.parse().ok()) == Some(inode)
        };
        (!maps.is_empty()).then(|| maps.lines().any(is_ours))
    }
}

/// The page in which a tenant's processes account their memory.
#[derive(Debug)]
pub struct TenantMemory {
    /// The page.
    pub page: Mapped<TenantPage>,
    fd: OwnedFd,
    /// Slots with memory behind them, from the first.
    slots_there: usize,
}

impl TenantMemory {
    /// Makes the page of a new tenant.
    pub fn create() -> Result<Self, PageError> {
        let (page, fd) = Mapped::<TenantPage>::create(Writers::Holders)?;
        page.publish();
        Ok(Self {
            page,
            fd,
            slots_there: 0,
        })
    }

    /// Makes sure that there is memory behind slot `slot`: touched without, it would be taken from
    /// the host when the host may have none, in somebody's training job.
    ///
    /// # Errors
    /// The host has none, or there is no such slot.
    pub fn make_slot(&mut self, slot: u32) -> Result<(), PageError> {
        const AT_ONCE: usize = 16;
        let wanted = slot as usize + 1;
        if wanted <= self.slots_there {
            return Ok(());
        }
        if wanted > TENANT_SLOTS {
            let error = io::Error::other(format!("a page has {TENANT_SLOTS} slots"));
            return Err(PageError::Io("find slots in", error));
        }
        let first = self.slots_there;
        let last = wanted.next_multiple_of(AT_ONCE).min(TENANT_SLOTS);
        for (start, each) in [
            (offset_of!(TenantPage, slots), size_of::<TenantSlot>()),
            (offset_of!(TenantPage, shared), size_of::<SharedBlocks>()),
        ] {
            allocate(&self.fd, start + first * each, (last - first) * each)?;
        }
        self.slots_there = last;
        Ok(())
    }

    /// Takes over the page of a tenant whose processes were attached to an arbiter before this one.
    pub fn adopt(fd: OwnedFd) -> Result<Self, PageError> {
        Ok(Self {
            page: Mapped::open(fd.as_fd(), true)?,
            fd,
            slots_there: 0,
        })
    }

    /// Its file, for who keeps it beyond this process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The number of its file, which no other page that is there has.
    pub fn number(&self) -> u64 {
        rustix::fs::fstat(&self.fd).map_or(0, |stat| stat.st_ino)
    }

    /// Whether `fd` is this very page (processes of one tenant hand in the same one).
    pub fn is(&self, fd: BorrowedFd<'_>) -> bool {
        match (rustix::fs::fstat(&self.fd), rustix::fs::fstat(fd)) {
            (Ok(ours), Ok(theirs)) => ours.st_ino == theirs.st_ino && ours.st_dev == theirs.st_dev,
            _ => false,
        }
    }
}
