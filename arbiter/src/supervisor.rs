//! The service manager that runs this arbiter, where one does: systemd's protocols.
//!
//! [`Handed`] is what it hands over at the start: sockets that are bound already, and pages that
//! an arbiter before this one has given it to keep. [`Supervisor`] owns what it hears of us
//! afterwards: readiness, a line of status, signs of life from the loop, reloads, the end; and the
//! pages that it keeps.
//!
//! Nothing here waits: what the manager does not take now is sent again later. Without a manager
//! nothing is sent. What a manager says that makes no sense is reported and left out.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

/// The first descriptor that is handed over.
const FIRST_FD: i32 = 3;
/// More than any manager keeps of us.
const MAX_HANDED: i32 = 4096;
/// Signs of life in the time that the manager waits for one. TIMEOUT: three, so that a loop that is
/// late once is not taken for a stuck one.
const SIGNS: u64 = 3;
/// When a message that was not taken is sent again.
const AGAIN_NS: u64 = 20_000_000;
/// Pages handed to the manager at a time: its queue is short, and the loop has more to do.
const PAGES_AT_ONCE: usize = 8;
/// Prefix of the names of pages; the job's number and the file's follow.
const PAGE: &str = "job-";

/// What a service manager hands over.
#[derive(Debug, Default)]
pub struct Handed {
    sockets: Vec<OwnedFd>,
    pages: Vec<(String, OwnedFd)>,
    notify: Option<OsString>,
    /// Silence after which the manager takes us for stuck, in nanoseconds; 0: it does not watch.
    patience_ns: u64,
    /// What made no sense.
    complaints: Vec<String>,
}

impl Handed {
    /// What the variables of this process tell of. To be called once: the descriptors are taken.
    pub fn of_this_process() -> Self {
        let take = |number: i32| {
            // SAFETY: the number is only asked about.
            let asked = unsafe { BorrowedFd::borrow_raw(number) };
            rustix::io::fcntl_setfd(asked, rustix::io::FdFlags::CLOEXEC)?;
            // SAFETY: open, as was just seen, and handed over to this very process (LISTEN_PID) by
            // the manager, before anything of ours could have opened one of this number.
            Ok(unsafe { OwnedFd::from_raw_fd(number) })
        };
        Self::read(|name| std::env::var_os(name), std::process::id(), take)
    }

    fn read(
        var: impl Fn(&str) -> Option<OsString>,
        pid: u32,
        mut take: impl FnMut(i32) -> io::Result<OwnedFd>,
    ) -> Self {
        let mut handed = Self {
            notify: var("NOTIFY_SOCKET").filter(|path| !path.is_empty()),
            ..Self::default()
        };
        let text = |name: &str| var(name).map(|value| value.to_string_lossy().into_owned());
        // Variables for a parent of ours are none for us.
        let is_ours = |name: &str| text(name).is_some_and(|value| value.parse() == Ok(pid));
        if let Some(usec) = text("WATCHDOG_USEC")
            && (var("WATCHDOG_PID").is_none() || is_ours("WATCHDOG_PID"))
        {
            match usec.parse::<u64>() {
                Ok(usec) if usec > 0 => handed.patience_ns = usec.saturating_mul(1000),
                _ => handed.complain(format!("WATCHDOG_USEC is `{usec}`, no time: not watched")),
            }
        }
        let (Some(count), true) = (text("LISTEN_FDS"), is_ours("LISTEN_PID")) else {
            return handed;
        };
        let Some(count) = count.parse().ok().filter(|n| (0..=MAX_HANDED).contains(n)) else {
            handed.complain(format!("LISTEN_FDS is `{count}`, no number of sockets"));
            return handed;
        };
        let names = text("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        for number in FIRST_FD..FIRST_FD + count {
            let name = names.next().unwrap_or_default();
            match take(number) {
                Ok(fd) if name.starts_with(PAGE) => handed.pages.push((name.to_owned(), fd)),
                Ok(fd) => handed.sockets.push(fd),
                Err(error) => {
                    handed.complain(format!("descriptor {number} (`{name}`): {error}"));
                }
            }
        }
        handed
    }

    fn complain(&mut self, what: String) {
        self.complaints.push(format!(
            "the service manager hands over what is no use: {what}"
        ));
    }

    /// The socket of this kind that listens at this path, if it was handed over.
    pub(crate) fn listener(&mut self, kind: SocketType, path: &Path) -> Option<OwnedFd> {
        let at = self
            .sockets
            .iter()
            .position(|socket| listens(socket, kind, path))?;
        Some(self.sockets.swap_remove(at))
    }

    /// The pages of jobs, by the job's number.
    pub(crate) fn take_pages(&mut self) -> BTreeMap<u64, OwnedFd> {
        let mut pages = BTreeMap::new();
        for (name, fd) in std::mem::take(&mut self.pages) {
            match job_of(&name) {
                Some(id) => {
                    pages.insert(id, fd);
                }
                None => self.complain(format!("`{name}` names no job's page")),
            }
        }
        pages
    }
}

/// Whether a socket is of that kind and listens there.
fn listens(socket: &OwnedFd, kind: SocketType, path: &Path) -> bool {
    let found = (|| {
        let is_kind = rustix::net::sockopt::socket_type(socket)? == kind;
        let listens = rustix::net::sockopt::socket_acceptconn(socket)?;
        let address = SocketAddrUnix::try_from(rustix::net::getsockname(socket)?)?;
        let there = address.path_bytes().map(OsStr::from_bytes).map(Path::new);
        Ok::<_, Errno>(is_kind && listens && there.is_some_and(|there| same_file(there, path)))
    })();
    found.unwrap_or(false)
}

/// `/var/run` may be a link to `/run`.
fn same_file(one: &Path, other: &Path) -> bool {
    let resolved = |path: &Path| std::fs::canonicalize(path).ok();
    one == other || resolved(one).is_some_and(|one| Some(one) == resolved(other))
}

fn page_name(id: u64, file: u64) -> String {
    format!("{PAGE}{id}-{file}")
}

fn job_of(name: &str) -> Option<u64> {
    let (id, _) = name.strip_prefix(PAGE)?.split_once('-')?;
    id.parse().ok()
}

/// Where the manager listens.
#[derive(Debug)]
struct Line {
    socket: OwnedFd,
    address: SocketAddrUnix,
}

impl Line {
    fn to(name: &OsStr) -> Result<Self, String> {
        let refused =
            |error: Errno| format!("NOTIFY_SOCKET is `{}`: {error}", name.to_string_lossy());
        let address = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name).map_err(refused)?,
            [b'/', ..] => SocketAddrUnix::new(name).map_err(refused)?,
            _ => return Err(refused(Errno::AFNOSUPPORT)),
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
        let socket = rustix::net::socket_with(family, kind, flags, None).map_err(refused)?;
        Ok(Self { socket, address })
    }

    /// Whether it was taken, or never will be.
    fn send(&self, text: &str, fd: Option<BorrowedFd<'_>>) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fd.into_iter().collect();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let text = [IoSlice::new(text.as_bytes())];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            let sent =
                rustix::net::sendmsg_addr(&self.socket, &self.address, &text, &mut control, flags);
            match sent {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS) => return false,
                Ok(_) | Err(_) => return true,
            }
        }
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Supervisor {
    /// `None`: there is nobody to tell.
    line: Option<Line>,
    /// How often a sign of life is due; `None`: nobody waits for one.
    every_ns: Option<u64>,
    next_sign_ns: u64,
    /// What was not taken yet.
    outbox: VecDeque<String>,
    status: String,
    reloads: bool,
    /// The pages that the manager keeps: numbers of jobs and files.
    kept: BTreeMap<u64, u64>,
    /// Sockets that are the manager's.
    sockets: Vec<PathBuf>,
}

impl Supervisor {
    /// For whom has handed that over. `sockets`: those that were used.
    pub fn of(handed: Handed, sockets: Vec<PathBuf>) -> Self {
        let mut supervisor = Self {
            sockets,
            ..Self::default()
        };
        let mut complaints = handed.complaints;
        for socket in &handed.sockets {
            let address = rustix::net::getsockname(socket);
            complaints.push(format!(
                "the service manager hands over a socket that is not of this arbiter's directory ({address:?}): it is closed"
            ));
        }
        match handed.notify.as_deref().map(Line::to) {
            Some(Ok(line)) => supervisor.line = Some(line),
            Some(Err(error)) => complaints.push(error),
            None => {}
        }
        if supervisor.line.is_some() && handed.patience_ns > 0 {
            supervisor.every_ns = Some((handed.patience_ns / SIGNS).max(1));
        }
        for complaint in complaints {
            tracing::warn!("{complaint}");
        }
        supervisor
    }

    /// Whether this socket is the manager's, and stays when we end.
    pub fn keeps_socket(&self, path: &Path) -> bool {
        self.sockets.iter().any(|kept| kept == path)
    }

    /// Clients and operators are served from here on.
    pub fn ready(&mut self) {
        self.say("READY=1".into());
    }

    /// The quota file is read again, until [`reloaded`](Self::reloaded).
    pub fn reloads(&mut self, now_ns: u64) {
        self.reloads = true;
        self.say(format!("RELOADING=1\nMONOTONIC_USEC={}", now_ns / 1000));
    }

    /// The quota file was read again, or not.
    pub fn reloaded(&mut self) {
        if std::mem::take(&mut self.reloads) {
            self.say("READY=1".into());
        }
    }

    /// Nobody is served any more.
    pub fn stops(&mut self) {
        self.say("STOPPING=1".into());
    }

    /// One line for people, where it is another one than before.
    pub fn show(&mut self, status: impl FnOnce() -> String) {
        if self.line.is_none() {
            return;
        }
        let status = status();
        if status != self.status {
            self.say(format!("STATUS={status}"));
            self.status = status;
        }
    }

    /// Has the manager keep these pages (numbers of jobs and files), and no others. True where
    /// there is no more to do.
    pub fn keep<'a>(&mut self, pages: impl Iterator<Item = (u64, u64, BorrowedFd<'a>)>) -> bool {
        let Some(line) = &self.line else {
            return true;
        };
        let mut left = PAGES_AT_ONCE;
        let mut gone = self.kept.clone();
        let mut done = true;
        for (id, file, fd) in pages {
            if gone.get(&id) == Some(&file) {
                gone.remove(&id);
                continue;
            }
            let name = page_name(id, file);
            // A page has no end of its own that the manager could see.
            let text = format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0");
            if left > 0 && !gone.contains_key(&id) && line.send(&text, Some(fd)) {
                left -= 1;
                self.kept.insert(id, file);
            } else {
                done = false;
            }
        }
        for (id, file) in gone {
            let text = format!("FDSTOREREMOVE=1\nFDNAME={}", page_name(id, file));
            if line.send(&text, None) {
                self.kept.remove(&id);
            } else {
                done = false;
            }
        }
        done
    }

    /// The manager keeps this page from before: the number of a job, and of a file.
    pub fn has_kept(&mut self, id: u64, file: u64) {
        self.kept.insert(id, file);
    }

    /// Whether the manager keeps any.
    pub fn keeps_pages(&self) -> bool {
        !self.kept.is_empty()
    }

    /// At every turn of the loop: sends what waits, and a sign of life where one is due. Returns
    /// when to come again.
    pub fn look(&mut self, now_ns: u64) -> Option<u64> {
        let line = self.line.as_ref()?;
        while let Some(text) = self.outbox.front() {
            if !line.send(text, None) {
                return Some(now_ns + AGAIN_NS);
            }
            self.outbox.pop_front();
        }
        let every_ns = self.every_ns?;
        if now_ns >= self.next_sign_ns {
            if !line.send("WATCHDOG=1", None) {
                return Some(now_ns + AGAIN_NS.min(every_ns));
            }
            self.next_sign_ns = now_ns + every_ns;
        }
        Some(self.next_sign_ns)
    }

    fn say(&mut self, text: String) {
        let Some(line) = &self.line else {
            return;
        };
        if !self.outbox.is_empty() || !line.send(&text, None) {
            // A status says nothing that the next one does not.
            self.outbox
                .retain(|waiting| !(waiting.starts_with("STATUS=") && text.starts_with("STATUS=")));
            self.outbox.push_back(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixDatagram, UnixListener};

    use super::*;

    fn vars<'a>(of: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        |name| {
            let found = of.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.into())
        }
    }

    fn no_fd(number: i32) -> io::Result<OwnedFd> {
        panic!("nobody was given {number}")
    }

    fn manager(dir: &tempfile::TempDir) -> (UnixDatagram, OsString) {
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).expect("bound");
        socket.set_nonblocking(true).expect("set");
        (socket, path.into())
    }

    fn supervisor(notify: OsString, patience_ns: u64) -> Supervisor {
        let handed = Handed {
            notify: Some(notify),
            patience_ns,
            ..Handed::default()
        };
        Supervisor::of(handed, Vec::new())
    }

    fn heard(manager: &UnixDatagram) -> Vec<String> {
        let mut heard = Vec::new();
        let mut buffer = [0; 512];
        while let Ok(length) = manager.recv(&mut buffer) {
            heard.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
        }
        heard
    }

    #[test]
    fn what_is_for_another_process_is_left_alone() {
        let of = [
            ("LISTEN_FDS", "2"),
            ("LISTEN_PID", "8"),
            ("WATCHDOG_USEC", "5"),
            ("WATCHDOG_PID", "8"),
        ];
        let handed = Handed::read(vars(&of), 7, no_fd);
        assert!(handed.sockets.is_empty() && handed.patience_ns == 0);
        assert!(handed.complaints.is_empty() && handed.notify.is_none());
        let nobody = Handed::read(vars(&[("LISTEN_FDS", "2")]), 7, no_fd);
        assert!(nobody.sockets.is_empty() && nobody.complaints.is_empty());
    }

    #[test]
    fn nonsense_of_a_manager_is_reported_and_left_out() {
        for (name, value) in [
            ("LISTEN_FDS", "-1"),
            ("LISTEN_FDS", "many"),
            ("LISTEN_FDS", "99999999999"),
            ("LISTEN_FDS", "5000"),
            ("WATCHDOG_USEC", "0"),
            ("WATCHDOG_USEC", "soon"),
        ] {
            let of = [("LISTEN_PID", "7"), (name, value)];
            let handed = Handed::read(vars(&of), 7, no_fd);
            let [complaint] = &handed.complaints[..] else {
                panic!("{value}: {:?}", handed.complaints);
            };
            assert!(complaint.contains(&format!("`{value}`")), "{complaint}");
        }
        let of = [
            ("LISTEN_PID", "7"),
            ("LISTEN_FDS", "2"),
            ("LISTEN_FDNAMES", "job-x-1"),
        ];
        let closed = |_| Err(io::Error::from(Errno::BADF));
        let handed = Handed::read(vars(&of), 7, closed);
        assert_eq!(handed.complaints.len(), 2, "{:?}", handed.complaints);
        for name in ["vsock:2:1", "relative", "@"] {
            let supervisor = supervisor(name.into(), 5);
            assert!(supervisor.every_ns.is_none() || name == "@");
        }
    }

    #[test]
    fn a_socket_is_known_by_its_kind_and_place() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("api.sock");
        let listener = OwnedFd::from(UnixListener::bind(&path).expect("bound"));
        let datagrams = OwnedFd::from(UnixDatagram::bind(dir.path().join("d")).expect("bound"));
        let mut handed = Handed {
            sockets: vec![datagrams, listener],
            ..Handed::default()
        };
        assert!(handed.listener(SocketType::SEQPACKET, &path).is_none());
        let elsewhere = dir.path().join("d");
        assert!(handed.listener(SocketType::DGRAM, &elsewhere).is_none());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).expect("linked");
        let found = handed.listener(SocketType::STREAM, &link.join("api.sock"));
        assert!(found.is_some() && handed.sockets.len() == 1);
        assert!(handed.listener(SocketType::STREAM, &path).is_none(), "once");
    }

    #[test]
    fn the_manager_hears_of_each_step_and_of_a_loop_that_turns() {
        let dir = tempfile::tempdir().expect("directory");
        let (manager, path) = manager(&dir);
        let mut supervisor = supervisor(path, 3_000_000);
        assert_eq!(supervisor.look(5), Some(1_000_005));
        supervisor.ready();
        supervisor.show(|| "no jobs".into());
        supervisor.show(|| "no jobs".into());
        supervisor.reloads(7_000);
        supervisor.reloaded();
        supervisor.reloaded();
        assert_eq!(supervisor.look(1_000_004), Some(1_000_005));
        assert_eq!(supervisor.look(1_000_005), Some(2_000_005));
        supervisor.stops();
        let said = [
            "WATCHDOG=1",
            "READY=1",
            "STATUS=no jobs",
            "RELOADING=1\nMONOTONIC_USEC=7",
            "READY=1",
            "WATCHDOG=1",
            "STOPPING=1",
        ];
        assert_eq!(heard(&manager), said);
    }

    #[test]
    fn a_manager_with_an_abstract_name_is_found() {
        use std::os::linux::net::SocketAddrExt;
        let name = format!("sublet-test-{}", std::process::id());
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).expect("a name");
        let manager = UnixDatagram::bind_addr(&address).expect("bound");
        manager.set_nonblocking(true).expect("set");
        supervisor(format!("@{name}").into(), 0).ready();
        assert_eq!(heard(&manager), ["READY=1"]);
    }

    #[test]
    fn what_a_busy_manager_does_not_take_is_sent_again_in_order() {
        let dir = tempfile::tempdir().expect("directory");
        let (manager, path) = manager(&dir);
        let mut supervisor = supervisor(path, 3_000_000_000);
        let mut said = 0;
        while supervisor.outbox.is_empty() {
            said += 1;
            supervisor.show(|| said.to_string());
            assert!(said < 1_000_000, "no end to its queue");
        }
        supervisor.ready();
        supervisor.show(|| "last".into());
        supervisor.stops();
        assert_eq!(supervisor.look(5), Some(5 + AGAIN_NS));
        let mut all = heard(&manager);
        assert_eq!(supervisor.look(6), Some(1_000_000_006));
        all.extend(heard(&manager));
        let end: Vec<_> = all.iter().rev().take(4).rev().map(String::as_str).collect();
        assert_eq!(end, ["READY=1", "STATUS=last", "STOPPING=1", "WATCHDOG=1"]);
    }

    #[test]
    fn pages_are_kept_while_they_are_there() {
        let dir = tempfile::tempdir().expect("directory");
        let (manager, path) = manager(&dir);
        let mut supervisor = supervisor(path, 0);
        let file = tempfile::tempfile().expect("a file");
        let fd = file.as_fd();
        assert!(supervisor.keep([(1, 10, fd), (2, 20, fd)].into_iter()));
        assert!(supervisor.keep([(1, 10, fd), (2, 20, fd)].into_iter()));
        assert_eq!(heard(&manager).len(), 2, "each once");
        // One is gone, one is another.
        assert!(!supervisor.keep([(2, 21, fd)].into_iter()));
        assert!(supervisor.keep([(2, 21, fd)].into_iter()));
        assert_eq!(
            heard(&manager),
            [
                "FDSTOREREMOVE=1\nFDNAME=job-1-10",
                "FDSTOREREMOVE=1\nFDNAME=job-2-20",
                "FDSTORE=1\nFDNAME=job-2-21\nFDPOLL=0",
            ]
        );
        assert!(supervisor.keeps_pages());
        assert!(supervisor.keep(std::iter::empty()) && !supervisor.keeps_pages());
        // The next one is handed what was kept, by these names.
        let mut handed = Handed {
            pages: [page_name(7, 70), "job-x".into(), "job-".into()]
                .map(|name| (name, fd.try_clone_to_owned().expect("a descriptor")))
                .into(),
            ..Handed::default()
        };
        let jobs: Vec<u64> = handed.take_pages().into_keys().collect();
        assert_eq!((jobs, handed.complaints.len()), (vec![7], 2));
    }

    #[test]
    fn without_a_manager_nothing_is_due() {
        let mut supervisor = Supervisor::of(Handed::default(), Vec::new());
        supervisor.ready();
        supervisor.show(|| panic!("nobody reads it"));
        assert!(supervisor.keep(std::iter::empty()));
        assert_eq!(supervisor.look(5), None);
    }
}
