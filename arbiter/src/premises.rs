//! What is an arbiter's own in its directory: the directory, the lock and the sockets, known by
//! their inodes and not by their names.
//!
//! A logout removes a user's runtime directory, and cleaners empty `/tmp`, while jobs run: then the
//! names are free, and another arbiter may have them. Nothing here touches what that one has made.
//! Two arbiters that come to the same directory take turns by a lock on the directory itself.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};

/// A file, whatever it is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Inode {
    device: u64,
    number: u64,
}

impl Inode {
    fn of(meta: &std::fs::Metadata) -> Self {
        Self {
            device: meta.dev(),
            number: meta.ino(),
        }
    }

    /// Of what has this name now, a link itself; `None`: nothing has.
    pub fn at(path: &Path) -> Option<Self> {
        std::fs::symlink_metadata(path)
            .ok()
            .map(|meta| Self::of(&meta))
    }

    /// Of an open file.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn of_file(file: &File) -> io::Result<Self> {
        Ok(Self::of(&file.metadata()?))
    }
}

/// Whether the directory is this arbiter's, for the threads that write into it.
#[derive(Clone, Debug)]
pub struct Title {
    path: PathBuf,
    /// Which one that is, and how often it has changed. `None`: nobody else can know of the
    /// directory.
    own: Arc<Mutex<(Option<Inode>, u64)>>,
}

impl Title {
    /// To a directory that nobody else can know of.
    #[cfg(test)]
    pub fn unquestioned(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            own: Arc::default(),
        }
    }

    /// How often it was another directory: files in it are to be opened anew.
    pub fn moves(&self) -> u64 {
        self.own.lock().1
    }

    /// Whether what has the directory's name is the one that this arbiter has taken.
    ///
    /// # Errors
    /// It is not: what would be written is another arbiter's.
    pub fn check(&self) -> io::Result<()> {
        let own = self.own.lock().0;
        // A directory that was named by a link is the one behind it.
        let found = std::fs::metadata(&self.path).map(|meta| Inode::of(&meta));
        match (own, found) {
            (None, _) => Ok(()),
            (Some(own), Ok(found)) if own == found => Ok(()),
            (Some(_), Ok(_)) => Err(io::Error::other(format!(
                "{} was removed and made again by somebody else",
                self.path.display()
            ))),
            (Some(_), Err(error)) => Err(error),
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Premises {
    path: PathBuf,
    folder: File,
    title: Title,
    /// Names in the directory, and what they were given to here. It is held: the number of an inode
    /// that is gone is given to another one.
    own: Vec<(PathBuf, Inode, OwnedFd)>,
}

impl Premises {
    /// Enters the directory, which is there.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn enter(path: &Path) -> io::Result<Self> {
        let folder = File::open(path)?;
        let inode = Inode::of_file(&folder)?;
        Ok(Self {
            path: path.to_owned(),
            folder,
            title: Title {
                path: path.to_owned(),
                own: Arc::new(Mutex::new((Some(inode), 0))),
            },
            own: Vec::new(),
        })
    }

    /// What the threads that write into it go by.
    pub fn title(&self) -> Title {
        self.title.clone()
    }

    /// Takes the place of `before`: threads that write go by this directory from here on.
    pub fn replace(&mut self, before: &Self) {
        let own = self.title.own.lock().0;
        self.title = before.title();
        let mut title = self.title.own.lock();
        *title = (own, title.1 + 1);
    }

    /// Whether a name is still what was made here.
    pub fn has(&self, path: &Path) -> bool {
        self.title.check().is_ok()
            && name_of(path).is_ok_and(|name| {
                let mut own = self.own.iter();
                let own = own.find(|(own, ..)| *own == name);
                own.is_some_and(|(_, own, _)| self.named(&name).is_ok_and(|found| found == *own))
            })
    }

    /// This name is given to what was made here just now.
    ///
    /// # Errors
    /// Nothing has it.
    pub fn note(&mut self, path: &Path) -> io::Result<()> {
        let name = name_of(path)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let held = rustix::fs::openat(&self.folder, &name, flags, Mode::empty())?;
        let inode = self.named(&name)?;
        self.own.push((name, inode, held));
        Ok(())
    }

    /// Keeps others from making and removing names here until the guard is dropped: every arbiter
    /// holds it while it does.
    ///
    /// # Errors
    /// Somebody keeps it.
    pub fn guard(&self) -> io::Result<Guard<'_>> {
        Guard::of(&self.folder)
    }

    /// Removes a name where it is still what was made here. `true` where it was.
    pub fn remove(&self, path: &Path) -> bool {
        let Ok(name) = name_of(path) else {
            return false;
        };
        let own = self.own.iter().find(|(own, ..)| *own == name);
        let Some((_, own, _)) = own else {
            return false;
        };
        // In the directory that was entered: another one that has its name now is out of reach.
        // Within it who makes a name holds the guard, so that it is not made in between.
        let _guard = self.guard();
        let is_own = self.named(&name).is_ok_and(|found| found == *own);
        is_own && rustix::fs::unlinkat(&self.folder, &name, AtFlags::empty()).is_ok()
    }

    /// What is amiss with the directory, in words; `None`: nothing.
    pub fn amiss(&self) -> Option<String> {
        if let Err(error) = self.title.check() {
            return Some(match error.kind() {
                io::ErrorKind::NotFound => format!("{} was removed", self.path.display()),
                _ => error.to_string(),
            });
        }
        self.own.iter().find_map(|(name, own, _)| {
            let path = self.path.join(name);
            match Inode::at(&path) {
                Some(found) if found == *own => None,
                Some(_) => Some(format!("{} is somebody else's", path.display())),
                None => Some(format!("{} was removed", path.display())),
            }
        })
    }

    fn named(&self, name: &Path) -> io::Result<Inode> {
        let found = rustix::fs::statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(Inode {
            device: found.st_dev,
            number: found.st_ino,
        })
    }
}

fn name_of(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name();
    name.map(PathBuf::from)
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
}

/// The lock of a directory, for as long as this is held.
#[derive(Debug)]
pub struct Guard<'a>(&'a File);

impl<'a> Guard<'a> {
    fn of(folder: &'a File) -> io::Result<Self> {
        /// TIMEOUT: a holder makes two sockets; one that stands still is not waited for any longer.
        const MOST: u32 = 200;
        for _ in 0..MOST {
            match rustix::fs::flock(folder, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self(folder)),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(self.0, FlockOperation::Unlock);
    }
}

/// Opens a file of this name and takes its lock: the file that has the name in the end, where
/// somebody removes and makes it meanwhile. `None`: somebody else has it.
///
/// # Errors
/// A system call fails.
pub fn lock_file(path: &Path) -> io::Result<Result<File, File>> {
    loop {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
        match rustix::fs::flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(Err(file)),
            Err(errno) => return Err(errno.into()),
        }
        // The lock of a file that nobody finds is none.
        if Inode::at(path) == Some(Inode::of_file(&file)?) {
            return Ok(Ok(file));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_still_its_own_is_removed() {
        let place = tempfile::tempdir().expect("directory");
        let path = place.path().join("run");
        let make = |name: &str| std::fs::write(path.join(name), "").expect("a file");
        std::fs::create_dir(&path).expect("directory");
        let mut first = Premises::enter(&path).expect("entered");
        for name in ["kept", "replaced", "removed"] {
            make(name);
            first.note(&path.join(name)).expect("there");
        }
        assert_eq!(first.amiss(), None);
        // The inode of a removed file may be given out again at once: this one is held.
        let _held = File::open(path.join("replaced")).expect("a file");
        std::fs::remove_file(path.join("replaced")).expect("removed");
        make("replaced");
        make("another");
        std::fs::remove_file(path.join("removed")).expect("removed");
        assert!(first.amiss().is_some_and(|text| text.contains("replaced")));
        let removed = ["kept", "replaced", "removed", "another"];
        let removed = removed.map(|name| first.remove(&path.join(name)));
        assert_eq!(removed, [true, false, false, false]);
        assert!(path.join("replaced").exists() && path.join("another").exists());
    }

    #[test]
    fn a_directory_that_was_made_again_is_somebody_elses() {
        let place = tempfile::tempdir().expect("directory");
        let path = place.path().join("run");
        std::fs::create_dir(&path).expect("directory");
        std::fs::write(path.join("socket"), "").expect("a file");
        let mut first = Premises::enter(&path).expect("entered");
        first.note(&path.join("socket")).expect("there");
        first.title().check().expect("its own");
        std::fs::remove_dir_all(&path).expect("removed");
        let gone = first.amiss().expect("gone");
        assert!(gone.ends_with("was removed"), "{gone}");
        std::fs::create_dir(&path).expect("directory");
        std::fs::write(path.join("socket"), "").expect("a file");
        assert!(first.title().check().is_err() && !first.remove(&path.join("socket")));
        assert!(path.join("socket").exists());
        Title::unquestioned(&path).check().expect("nobody asks");
    }

    #[test]
    fn a_lock_is_of_the_file_that_has_the_name() {
        let place = tempfile::tempdir().expect("directory");
        let path = place.path().join("lock");
        let first = lock_file(&path).expect("opened").expect("free");
        assert!(lock_file(&path).expect("opened").is_err());
        std::fs::remove_file(&path).expect("removed");
        let second = lock_file(&path).expect("opened").expect("another file's");
        let inodes = [&first, &second].map(|file| Inode::of_file(file).expect("known"));
        assert_ne!(inodes[0], inodes[1]);
    }
}
