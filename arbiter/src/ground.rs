//! What an arbiter stands on: its directory and the lock of it, its sockets, its threads, and the
//! files that they write.
//!
//! Everything here touches the host, and nothing here decides anything; [`Arbiter::on`] takes it
//! apart.
//!
//! [`Arbiter::on`]: crate::serve::Arbiter::on

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use channel::arbiter::Listener;
use control::paths::{RuntimeDir, Source};
use rustix::net::SocketType;

use crate::api::{Api, Bound, Unusable};
use crate::bell::Bell;
use crate::census::Census;
use crate::claims::Claims;
use crate::clock::Clock;
use crate::descriptors::{self, Descriptors};
use crate::desk::{Desk, News};
use crate::journal::Journal;
use crate::nvml::Watcher;
use crate::options::Options;
use crate::premises::{self, Premises};
use crate::reactor::Poller;
use crate::renewal::{self, Over, Renew, Renewal};
use crate::state::StateFile;
use crate::supervisor::{Handed, Supervisor};
use crate::turns::Turns;

/// Why an arbiter did not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody else holds the lock.
    #[error("an arbiter{} already serves {}: use it, or stop it with `sublet arbiter --stop` or SIGTERM first", pid.map_or_else(String::new, |pid| format!(" (process {pid})")), dir.display())]
    AlreadyRunning {
        /// The directory.
        dir: PathBuf,
        /// Its process, as it wrote down.
        pid: Option<u32>,
    },
    /// The API cannot be served to other hosts as it should be.
    #[error("the API cannot be served over TCP")]
    Remote(#[source] Unusable),
    /// A system call failed.
    #[error("cannot {what}")]
    Io {
        /// At what.
        what: String,
        /// Why.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            what: what.into(),
            source,
        }
    }
}

/// See the module's documentation.
pub(crate) struct Ground {
    /// `None`: nobody else can know of the directory.
    pub lock: Option<File>,
    pub poller: Poller,
    /// `None`: nobody can connect.
    pub listener: Option<Listener>,
    pub turns: Turns,
    pub watcher: Watcher,
    pub claims: Claims,
    pub census: Census,
    pub journal: Journal,
    pub state_file: StateFile,
    /// What of the directory is this arbiter's.
    pub renewal: Renewal,
    /// Asks the arbiter to end.
    pub stop: Bell,
    pub supervisor: Supervisor,
    /// Pages of jobs that a service manager has kept, by the job's number.
    pub pages: BTreeMap<u64, OwnedFd>,
    pub api: Api,
    /// Kept back, to take newcomers in with.
    pub descriptors: Descriptors,
}

impl Ground {
    /// Takes the directory and binds its sockets, where no other arbiter has it. Those that were
    /// handed over are bound already.
    ///
    /// # Errors
    /// [`Error`]
    pub fn take(options: &Options, mut handed: Handed, clock: &Clock) -> Result<Self, Error> {
        let dir = &options.dir;
        let lock = lock(options)?;
        raise_descriptor_limit();
        let poller = Poller::new().map_err(Error::io("make an epoll set"))?;
        let stop = Bell::new().map_err(Error::io("make an eventfd"))?;
        let journal_path = dir.journal_file();
        let enter = format!("enter {}", dir.path().display());
        let mut premises = Premises::enter(dir.path()).map_err(Error::io(enter))?;
        let title = premises.title();
        let mut journal = Journal::open(&journal_path, title.clone(), Rc::clone(clock))
            .map_err(Error::io(format!("write {}", journal_path.display())))?;
        let state_file =
            StateFile::start(dir.state_file(), title).map_err(Error::io("start a thread"))?;

        if options.api.is_some() && descriptors::are_fewest() {
            return Err(Error::Remote(Unusable::Descriptors));
        }
        let remote = options.api.as_ref().map(Bound::new);
        let remote = remote.transpose().map_err(Error::Remote)?;
        let listen = |path: &Path| format!("listen at {}", path.display());
        let mut sockets = Vec::new();
        // An arbiter that ends removes what is its own meanwhile.
        let guard = premises.guard();
        let path = dir.channel_socket();
        let listener = match handed.listener(SocketType::SEQPACKET, &path) {
            Some(socket) => {
                sockets.push(path.clone());
                Listener::handed(socket)
            }
            None => Listener::bind(&path),
        };
        let listener = listener.map_err(Error::io(listen(&path)))?;
        let path = dir.api_socket();
        let api = stream_socket(&mut handed, &mut sockets, &path);
        let api = api.map_err(Error::io(listen(&path)))?;
        for path in dir.sockets() {
            // Who has bound it has said who may connect.
            if sockets.contains(&path) {
                continue;
            }
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode_of(dir)))
                .map_err(Error::io(format!("set the mode of {}", path.display())))?;
        }
        drop(guard);
        for path in [dir.lock_file()].into_iter().chain(dir.sockets()) {
            // What a service manager keeps stays when this one ends.
            if !sockets.contains(&path) {
                let note = format!("look at {}", path.display());
                premises.note(&path).map_err(Error::io(note))?;
            }
        }
        let (desk, counter) = Desk::new().map_err(Error::io("make an eventfd"))?;
        let news = News::new();
        journal.tell_to(Arc::clone(&news));
        let descriptors = Descriptors::default();
        let api = Api::start(api, remote, counter, news, descriptors.clone())
            .map_err(Error::io("serve the API"))?;
        if let Some(limit) = descriptors::limit().filter(|_| descriptors::are_fewest()) {
            tracing::warn!(
                "there are few descriptors ({limit}): {} takes {} connections at a time, few jobs can run, and another arbiter of yours that has the same device is not noticed; start the arbiter with a `ulimit -n` of 64 or more",
                path.display(),
                api.connections_most()
            );
        }
        show_to_containers(dir);
        let of = dir.clone();
        let renew = move |before: &Premises, over: &Over| {
            renewal::renew(&of, before, |premises| bind_again(&of, premises, over))
        };
        // What a service manager has made it makes again itself.
        let renew = sockets.is_empty().then(|| Box::new(renew) as Renew);
        let renewal = Renewal::start(premises, renew).map_err(Error::io("start a thread"))?;
        let pages = handed.take_pages();
        let watcher = Watcher::start().map_err(Error::io("start a thread"))?;
        let claims = Claims::start(dir.path()).map_err(Error::io("start a thread"))?;
        let census = Census::start().map_err(Error::io("start a thread"))?;
        Ok(Self {
            lock: Some(lock),
            poller,
            listener: Some(listener),
            turns: Turns::new(desk),
            watcher,
            claims,
            census,
            journal,
            state_file,
            renewal,
            stop,
            supervisor: Supervisor::of(handed, sockets),
            pages,
            api,
            descriptors,
        })
    }

    /// Stands in an empty directory without a lock or a socket: nobody can connect.
    #[cfg(test)]
    pub fn closed(dir: &RuntimeDir, clock: &Clock) -> Self {
        let premises = Premises::enter(dir.path()).expect("entered");
        Self {
            lock: None,
            poller: Poller::new().expect("an epoll set"),
            listener: None,
            turns: Turns::default(),
            watcher: Watcher::start().expect("a thread"),
            claims: Claims::none(),
            census: Census::start().expect("a thread"),
            journal: Journal::open(&dir.journal_file(), premises.title(), Rc::clone(clock))
                .expect("a journal"),
            state_file: StateFile::start(dir.state_file(), premises.title()).expect("a thread"),
            renewal: Renewal::start(premises, None).expect("no thread"),
            stop: Bell::new().expect("an eventfd"),
            supervisor: Supervisor::default(),
            pages: BTreeMap::new(),
            api: Api::default(),
            descriptors: Descriptors::default(),
        }
    }
}

/// Binds both sockets in a directory that was made again.
fn bind_again(
    dir: &RuntimeDir,
    premises: &mut Premises,
    over: &Over,
) -> io::Result<(Listener, UnixListener)> {
    let guard = premises.guard();
    // Who ends removes its names with the guard: those that are made before that are found there.
    if over.is_so() {
        return Err(io::Error::other("the arbiter ends"));
    }
    let listener = Listener::bind(&dir.channel_socket())?;
    let path = dir.api_socket();
    let _ = std::fs::remove_file(&path);
    let api = UnixListener::bind(&path)?;
    for path in dir.sockets() {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode_of(dir)))?;
    }
    drop(guard);
    for path in dir.sockets() {
        premises.note(&path)?;
    }
    show_to_containers(dir);
    Ok((listener, api))
}

/// The host's arbiter serves every user, distinguished by SO_PEERCRED; any other serves its own.
fn mode_of(dir: &RuntimeDir) -> u32 {
    match dir.source() {
        Source::System => 0o666,
        Source::Given | Source::Xdg | Source::Tmp => 0o600,
    }
}

/// The socket that was handed over, and is listed then, or one that is bound here.
fn stream_socket(
    handed: &mut Handed,
    sockets: &mut Vec<PathBuf>,
    path: &Path,
) -> io::Result<UnixListener> {
    match handed.listener(SocketType::STREAM, path) {
        Some(socket) => {
            sockets.push(path.to_owned());
            // So that the kernel names this process to those who connect.
            rustix::net::listen(&socket, 128)?;
            Ok(UnixListener::from(socket))
        }
        None => {
            let _ = std::fs::remove_file(path);
            UnixListener::bind(path)
        }
    }
}

/// Gives the channel's socket a second name in a folder of its own, for containers to mount: who
/// mounts the whole directory shows them the tokens of all jobs. The folder outlives this process,
/// and so does what is mounted; the name in it is the new socket's from here on.
fn show_to_containers(dir: &RuntimeDir) {
    use std::os::unix::fs::DirBuilderExt;
    let folder = dir.containers_dir();
    let mode = if dir.source() == Source::System {
        0o755
    } else {
        0o700
    };
    let socket = folder.join("channel.sock");
    let new = folder.join(".channel.sock.new");
    let made = match std::fs::DirBuilder::new().mode(mode).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    };
    let linked = made
        .and_then(|()| match std::fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        })
        .and_then(|()| std::fs::hard_link(dir.channel_socket(), &new))
        .and_then(|()| std::fs::rename(&new, &socket));
    // A rename onto another name of the same file does nothing, and leaves both.
    let _ = std::fs::remove_file(&new);
    if let Err(error) = linked {
        tracing::warn!(
            "containers cannot reach this arbiter: {} cannot be made: {error}",
            socket.display()
        );
    }
}

/// Takes the lock of the directory, which the kernel gives back when this process ends, however it
/// does.
fn lock(options: &Options) -> Result<File, Error> {
    let path = options.dir.lock_file();
    let what = format!("take {}", path.display());
    let mut file = match premises::lock_file(&path).map_err(Error::io(what.clone()))? {
        Ok(file) => file,
        Err(_) => {
            let pid = std::fs::read_to_string(&path).unwrap_or_default();
            return Err(Error::AlreadyRunning {
                dir: options.dir.path().to_owned(),
                pid: pid.trim().parse().ok(),
            });
        }
    };
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(Error::io(what))?;
    Ok(file)
}

/// A client takes four descriptors; the usual soft limit of 1024 would end at some 200 of them.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
