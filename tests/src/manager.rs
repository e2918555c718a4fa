//! A service manager for one arbiter, as far as an arbiter can tell: systemd's protocols of sockets
//! and notifications, without systemd.
//!
//! It binds the sockets and keeps them, hands them over at each start together with what it was
//! given to keep, writes down what it hears, and says whether the service is late with its signs
//! of life. What happens then is the test's to do.

use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::cmsg_space;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
};

use crate::{Artefacts, Running, Sandbox, wait_until};

/// The sockets, the descriptors kept, and the service while it runs. To be dropped before its
/// [`Sandbox`].
#[derive(Debug)]
pub struct Manager {
    sockets: [OwnedFd; 2],
    notify: UnixDatagram,
    kept: Vec<(String, OwnedFd)>,
    heard: Vec<String>,
    signed: Instant,
    patience: Duration,
    service: Option<Running>,
}

impl Manager {
    /// Listens where the arbiter of a sandbox would. Nothing is started. The service has to give a
    /// sign of life so often.
    ///
    /// # Panics
    /// When a socket cannot be bound.
    pub fn of(sandbox: &Sandbox, patience: Duration) -> Self {
        let api = UnixListener::bind(sandbox.path("run/api.sock")).expect("bound");
        let path = sandbox.path("run/channel.sock");
        let (family, kind) = (AddressFamily::Unix, SockType::SeqPacket);
        let channel =
            nix::sys::socket::socket(family, kind, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
        let address = UnixAddr::new(&path).expect("an address");
        nix::sys::socket::bind(channel.as_raw_fd(), &address).expect("bound");
        nix::sys::socket::listen(&channel, Backlog::MAXCONN).expect("listens");
        let notify = UnixDatagram::bind(sandbox.path("notify")).expect("bound");
        notify.set_nonblocking(true).expect("set");
        Self {
            sockets: [channel, api.into()],
            notify,
            kept: Vec::new(),
            heard: Vec::new(),
            signed: Instant::now(),
            patience,
            service: None,
        }
    }

    /// Starts the service and waits until it is ready.
    ///
    /// # Panics
    /// When it is not, in time.
    pub fn start(&mut self, sandbox: &Sandbox) {
        // The kernel keeps what an earlier one has sent last.
        self.listen();
        self.heard.clear();
        // The variables are for the process itself, whose number only that knows.
        let script = "export LISTEN_PID=$$ WATCHDOG_PID=$$; exec \"$0\" arbiter";
        let mut command = sandbox.command("sh");
        command
            .args(["-c", script])
            .arg(Artefacts::get().program("sublet"));
        let usec = self.patience.as_micros().to_string();
        command
            .env("NOTIFY_SOCKET", sandbox.path("notify"))
            .env("WATCHDOG_USEC", usec);
        let sockets = self.sockets.iter().map(|fd| ("sublet.socket", fd));
        let kept = self.kept.iter().map(|(name, fd)| (name.as_str(), fd));
        let handed: Vec<_> = sockets.chain(kept).collect();
        let names: Vec<_> = handed.iter().map(|(name, _)| *name).collect();
        command
            .env("LISTEN_FDS", handed.len().to_string())
            .env("LISTEN_FDNAMES", names.join(":"));
        hand_over(
            &mut command,
            handed.iter().map(|(_, fd)| fd.as_raw_fd()).collect(),
        );
        self.service = Some(Running::start(&mut command));
        self.signed = Instant::now();
        self.waits_for("READY=1");
    }

    /// Takes what the service has said.
    ///
    /// # Panics
    /// When a message cannot be read.
    pub fn listen(&mut self) {
        loop {
            let mut text = [0; 4096];
            let mut space = cmsg_space!([RawFd; 4]);
            let mut into = [IoSliceMut::new(&mut text)];
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
            let from = self.notify.as_raw_fd();
            let message =
                nix::sys::socket::recvmsg::<UnixAddr>(from, &mut into, Some(&mut space), flags);
            let message = match message {
                Ok(message) => message,
                Err(nix::Error::EAGAIN) => return,
                Err(errno) => panic!("a notification: {errno}"),
            };
            let mut fds = Vec::new();
            for control in message.cmsgs().expect("whole") {
                if let ControlMessageOwned::ScmRights(sent) = control {
                    // SAFETY: the kernel has just made them for this process.
                    fds.extend(sent.iter().map(|fd| unsafe { OwnedFd::from_raw_fd(*fd) }));
                }
            }
            let length = message.bytes;
            let said = String::from_utf8_lossy(&text[..length]).into_owned();
            self.hear(&said, fds);
        }
    }

    fn hear(&mut self, said: &str, fds: Vec<OwnedFd>) {
        let name = said
            .lines()
            .find_map(|line| line.strip_prefix("FDNAME="))
            .unwrap_or_default();
        for line in said.lines() {
            match line {
                "FDSTORE=1" => {}
                "FDSTOREREMOVE=1" => self.kept.retain(|(kept, _)| kept != name),
                "WATCHDOG=1" => self.signed = Instant::now(),
                other => self.heard.push(other.to_owned()),
            }
        }
        self.kept
            .extend(fds.into_iter().map(|fd| (name.to_owned(), fd)));
    }

    /// Waits until the service has said this; what it has said until then, and this, is forgotten.
    ///
    /// # Panics
    /// When it does not say it, in time, or has ended.
    pub fn waits_for(&mut self, what: &str) -> Vec<String> {
        wait_until(what, || {
            self.listen();
            let at = self.heard.iter().position(|line| line == what);
            if let Some(at) = at {
                return Some(self.heard.drain(..=at).collect());
            }
            if let Some(service) = &mut self.service
                && service.has_ended()
            {
                panic!("the service has ended: {}", service.take_stderr());
            }
            None
        })
    }

    /// Whether the service owes a sign of life.
    pub fn misses_a_sign(&mut self) -> bool {
        self.listen();
        self.signed.elapsed() > self.patience
    }

    /// The names of what is kept.
    pub fn kept(&mut self) -> Vec<String> {
        self.listen();
        self.kept.iter().map(|(name, _)| name.clone()).collect()
    }

    /// The service.
    ///
    /// # Panics
    /// While it does not run.
    pub fn service(&mut self) -> &mut Running {
        self.service.as_mut().expect("it runs")
    }

    /// Takes the service, which is to end or has ended.
    ///
    /// # Panics
    /// While it does not run.
    pub fn take_service(&mut self) -> Running {
        self.service.take().expect("it runs")
    }
}

/// Has the process that `command` starts find these descriptors from 3 on.
fn hand_over(command: &mut Command, fds: Vec<RawFd>) {
    // CAST: a handful.
    let first_free = 3 + fds.len() as RawFd;
    let give = move || {
        // Out of the way of the numbers that they are to have; these copies end with exec.
        let mut copies = [0; 64];
        for (copy, fd) in copies.iter_mut().zip(&fds) {
            // SAFETY: plain system calls on descriptors that are open in the forked child.
            *copy = unsafe { nix::libc::fcntl(*fd, nix::libc::F_DUPFD_CLOEXEC, first_free) };
        }
        for (number, copy) in (3..).zip(&copies[..fds.len()]) {
            // SAFETY: as above; the copies lie above all numbers that are replaced.
            if *copy < 0 || unsafe { nix::libc::dup2(*copy, number) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: what runs between fork and exec makes system calls only, and allocates nothing.
    unsafe { command.pre_exec(give) };
}
