//! Tells when a file may have changed, whatever way it is changed in: written in place, replaced by
//! a rename, reached by a link that is exchanged, in a folder that comes later.
//!
//! A thread of its own watches the folders, since a watch of a file is lost with a rename. It goes
//! by what is there and not by what the kernel's events say: they only wake it. Where the kernel
//! gives it no watch, it looks each second.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use control::ConfigWatch;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use crate::bell::Bell;

/// TIMEOUT: an editor's or a package manager's steps come within milliseconds of each other; a
/// reader sees the last of them.
const QUIET: Duration = Duration::from_millis(20);
/// TIMEOUT: a folder in which something happens all the time is looked at nevertheless.
const NOISY: Duration = Duration::from_millis(200);
/// TIMEOUT: how old the knowledge may be where the kernel tells nothing.
const POLLING: Duration = Duration::from_secs(1);

/// The thread, as the loop sees it. It is left to itself when this is dropped.
#[derive(Debug)]
pub struct Watch {
    changed: Arc<AtomicBool>,
    polls: Arc<AtomicBool>,
}

impl Watch {
    /// Watches what `paths` says, each time it is asked; whatever is found from here on rings the
    /// bell.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        paths: impl Fn() -> Vec<PathBuf> + Send + 'static,
        bell: Bell,
    ) -> io::Result<Self> {
        let watch = Self {
            changed: Arc::default(),
            polls: Arc::default(),
        };
        let (changed, polls) = (Arc::clone(&watch.changed), Arc::clone(&watch.polls));
        let ring = move || {
            // SYNC(changed): pairs with `Watch::take`; the files themselves are what it publishes.
            changed.store(true, Ordering::Release);
            bell.ring();
        };
        std::thread::Builder::new()
            .name("config".into())
            .spawn(move || look(&paths, &ring, &polls))?;
        Ok(watch)
    }

    /// Whether something may have changed since this was asked last. Asked after the bell was
    /// silenced.
    pub fn take(&self) -> bool {
        // SYNC(changed): pairs with the thread's store.
        self.changed.swap(false, Ordering::Acquire)
    }

    /// How changes are noticed.
    pub fn how(&self) -> ConfigWatch {
        // SYNC(polls): a flag for people; no data is published by it.
        if self.polls.load(Ordering::Relaxed) {
            ConfigWatch::Polling
        } else {
            ConfigWatch::Inotify
        }
    }
}

fn look(paths: &impl Fn() -> Vec<PathBuf>, ring: &impl Fn(), polls: &AtomicBool) {
    // What was read at the start may be older than this: the first look always rings.
    let mut known = None;
    loop {
        let watched = paths();
        // Before what is there is looked at: a change after that is an event.
        let listening = Listening::to(&watched);
        let found = marks(&watched);
        if known.as_ref() != Some(&found) {
            known = Some(found);
            ring();
        }
        match listening {
            Ok(listening) => {
                // SYNC(polls): as above.
                polls.store(false, Ordering::Relaxed);
                if listening.wait().is_err() {
                    std::thread::sleep(POLLING);
                }
            }
            Err(error) => {
                if !polls.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "the kernel does not tell of changed quota files ({error}): they are looked at each second"
                    );
                }
                std::thread::sleep(POLLING);
            }
        }
    }
}

/// What there is to see of a file without reading it; `None`: it is not there.
type Mark = (PathBuf, Option<[i64; 8]>);

fn marks(paths: &[PathBuf]) -> Vec<Mark> {
    let mark = |path: &PathBuf| {
        let found = std::fs::metadata(path).ok().map(|found| {
            // CAST: compared and nothing else.
            [
                found.dev() as i64,
                found.ino() as i64,
                found.size() as i64,
                i64::from(found.mode()),
                found.mtime(),
                found.mtime_nsec(),
                found.ctime(),
                found.ctime_nsec(),
            ]
        });
        (path.clone(), found)
    };
    paths.iter().map(mark).collect()
}

/// Folders that the kernel watches for us, and the names in them that matter.
struct Listening {
    inotify: OwnedFd,
    names: BTreeMap<i32, BTreeSet<OsString>>,
}

impl Listening {
    fn to(paths: &[PathBuf]) -> io::Result<Self> {
        if crate::descriptors::are_fewest() {
            return Err(io::Error::other("the limit of descriptors is low"));
        }
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let mut names: BTreeMap<i32, BTreeSet<OsString>> = BTreeMap::new();
        let mut done = BTreeSet::new();
        let mut ahead: Vec<PathBuf> = paths.to_vec();
        while let Some(path) = ahead.pop() {
            if !done.insert(path.clone()) || done.len() > 4096 {
                continue;
            }
            // A file can change by any name on the way to it, and what a link names has a way too.
            if let Ok(target) = std::fs::read_link(&path) {
                let folder = path.parent().unwrap_or(Path::new("/"));
                ahead.push(folder.join(target));
            }
            let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
                continue;
            };
            ahead.push(folder.to_owned());
            let flags = WatchFlags::CLOSE_WRITE
                | WatchFlags::CREATE
                | WatchFlags::DELETE
                | WatchFlags::MOVED_FROM
                | WatchFlags::MOVED_TO
                | WatchFlags::ATTRIB
                | WatchFlags::ONLYDIR;
            match inotify::add_watch(&inotify, folder, flags) {
                Ok(number) => {
                    names.entry(number).or_default().insert(name.to_owned());
                }
                // It may come: the folder above is watched for it.
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {}
                // Others cannot exchange what is in it for us either, or may not look.
                Err(rustix::io::Errno::ACCESS) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        // In a folder of files each name matters.
        for path in paths.iter().filter(|path| path.is_dir()) {
            let flags = WatchFlags::CLOSE_WRITE
                | WatchFlags::CREATE
                | WatchFlags::DELETE
                | WatchFlags::MOVED_FROM
                | WatchFlags::MOVED_TO
                | WatchFlags::ATTRIB;
            let number = inotify::add_watch(&inotify, path, flags)?;
            names.remove(&number);
        }
        Ok(Self { inotify, names })
    }

    /// Waits for something that matters, and until it is quiet after that.
    fn wait(&self) -> io::Result<()> {
        while !self.read_events(None)? {}
        let since = Instant::now();
        while since.elapsed() < NOISY && self.is_ready(Some(QUIET))? {
            self.read_events(Some(Duration::ZERO))?;
        }
        Ok(())
    }

    fn is_ready(&self, limit: Option<Duration>) -> io::Result<bool> {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut fds = [PollFd::new(&self.inotify, PollFlags::IN)];
        match poll(&mut fds, limit.as_ref()) {
            Ok(ready) => Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Takes what has come; whether something of it matters.
    fn read_events(&self, limit: Option<Duration>) -> io::Result<bool> {
        if !self.is_ready(limit)? {
            return Ok(false);
        }
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(self.inotify.as_fd(), &mut buffer);
        let mut matters = false;
        loop {
            match reader.next() {
                Ok(event) => {
                    let wanted = self.names.get(&event.wd());
                    matters |= match (wanted, event.file_name()) {
                        (Some(wanted), Some(name)) => {
                            wanted.contains(OsStr::from_bytes(name.to_bytes()))
                        }
                        // Of a folder of files, of the folder itself, or too many to tell.
                        _ => true,
                    };
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(matters),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    struct Watched {
        dir: tempfile::TempDir,
        watch: Watch,
        bell: Bell,
    }

    impl Watched {
        fn at(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        /// Whether it rings within the time of a test.
        fn rings(&self) -> bool {
            let limit = Timespec::try_from(testbed::PATIENCE).expect("a time");
            let mut fds = [PollFd::new(&self.bell, PollFlags::IN)];
            poll(&mut fds, Some(&limit)).expect("poll");
            self.bell.silence();
            self.watch.take()
        }
    }

    fn watched() -> Watched {
        let dir = tempfile::tempdir().expect("directory");
        let folder = dir.path().join("etc");
        let paths = move || {
            let mut paths = vec![folder.join("config.toml"), folder.join("config.d")];
            if let Ok(entries) = fs::read_dir(folder.join("config.d")) {
                paths.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
            }
            paths
        };
        let bell = Bell::new().expect("a bell");
        let watch = Watch::start(paths, bell.clone()).expect("a thread");
        let watched = Watched { dir, watch, bell };
        assert!(watched.rings(), "of what is there at the start");
        watched
    }

    #[test]
    fn a_change_is_noticed_whatever_way_it_is_made_in() {
        let it = watched();
        fs::create_dir(it.at("etc")).expect("a folder that comes later");
        fs::write(it.at("etc/config.toml"), "1").expect("a file");
        assert!(it.rings(), "a file in a new folder");
        fs::write(it.at("etc/config.toml"), "22").expect("in place");
        assert!(it.rings(), "in place");
        fs::write(it.at("etc/.config.toml.new"), "333").expect("beside");
        fs::rename(it.at("etc/.config.toml.new"), it.at("etc/config.toml")).expect("rename");
        assert!(it.rings(), "a rename");
        fs::create_dir(it.at("etc/config.d")).expect("a folder");
        fs::write(it.at("etc/config.d/10-a.toml"), "1").expect("a file");
        assert!(it.rings(), "a file beside");
        fs::remove_file(it.at("etc/config.d/10-a.toml")).expect("removed");
        assert!(it.rings(), "a file less");
        // As a ConfigMap is mounted: a link to a link to a folder.
        for (version, text) in [("v1", "4444"), ("v2", "55555")] {
            fs::create_dir(it.at(version)).expect("a version");
            fs::write(it.at(version).join("config.toml"), text).expect("a file");
        }
        symlink(it.at("v1"), it.at("data")).expect("a link");
        symlink("../data/config.toml", it.at("etc/link.new")).expect("a link");
        fs::rename(it.at("etc/link.new"), it.at("etc/config.toml")).expect("rename");
        assert!(it.rings(), "a link in its place");
        symlink(it.at("v2"), it.at("data.new")).expect("a link");
        fs::rename(it.at("data.new"), it.at("data")).expect("rename");
        assert!(it.rings(), "another folder behind the link");
        fs::write(it.at("v2/config.toml"), "666666").expect("in place");
        assert!(it.rings(), "what the link names");
        fs::remove_dir_all(it.at("etc")).expect("removed");
        assert!(it.rings(), "nothing is left");
        assert_eq!(it.watch.how(), ConfigWatch::Inotify);
    }

    #[test]
    fn what_happens_beside_the_files_rings_nothing() {
        let it = watched();
        fs::create_dir(it.at("etc")).expect("a folder");
        fs::write(it.at("etc/config.toml"), "1").expect("a file");
        assert!(it.rings());
        while {
            let limit = Timespec::try_from(NOISY * 3).expect("a time");
            let mut fds = [PollFd::new(&it.bell, PollFlags::IN)];
            poll(&mut fds, Some(&limit)).expect("poll");
            it.bell.silence();
            it.watch.take()
        } {}
        for number in 0..50 {
            fs::write(it.at(&format!("etc/other-{number}")), "1").expect("a file");
            fs::write(it.at(&format!("beside-{number}")), "1").expect("a file");
        }
        // Whatever rang for those has rung by the time of the next change.
        fs::write(it.at("etc/config.toml"), "22").expect("in place");
        assert!(it.rings());
    }
}
