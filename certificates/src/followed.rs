//! Files that count as they are now: certificates, keys, tokens. Each is looked at when it is
//! needed, and read again where it is another one or was written to; nobody has to send a signal.
//! [`Followed`] is what such files say, and what holds while they are wrong.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

/// More than any chain of certificates or list of tokens has.
const MOST_BYTES: u64 = 1 << 20;
/// Times of files are those of a clock that ticks every few milliseconds. TIMEOUT: a file that is
/// younger may be written to again without a sign.
const SETTLED: Duration = Duration::from_secs(2);

/// Why a file is not what it should be.
#[derive(Debug, thiserror::Error)]
pub enum Wrong {
    /// It is not there, or cannot be opened or read.
    #[error("{} cannot be read: {error}", .path.display())]
    Unreadable {
        /// Its path.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// Others can change it, or read what is secret in it.
    #[error("{} {why}", .path.display())]
    Unsafe {
        /// Its path.
        path: PathBuf,
        /// Whose it is, or which mode it has, and what to do.
        why: String,
    },
    /// What is in it.
    #[error("{}: {why}", .path.display())]
    Text {
        /// Its path.
        path: PathBuf,
        /// Where, and what.
        why: String,
    },
}

/// Which file it is, and in which state. Differs where what is in it may differ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stamp {
    place: (u64, u64),
    bytes: u64,
    times: [(i64, i64); 2],
    access: (u32, u32),
    /// It was written to so lately that a further change may not show.
    is_fresh: bool,
}

impl Stamp {
    fn of(meta: &Metadata, now: SystemTime) -> Self {
        let now_s = now
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        // Nobody can set that time.
        let age_s = now_s.checked_sub(u64::try_from(meta.ctime()).unwrap_or(u64::MAX));
        Self {
            place: (meta.dev(), meta.ino()),
            bytes: meta.size(),
            times: [
                (meta.mtime(), meta.mtime_nsec()),
                (meta.ctime(), meta.ctime_nsec()),
            ],
            access: (meta.mode(), meta.uid()),
            is_fresh: age_s.is_none_or(|age_s| age_s <= SETTLED.as_secs()),
        }
    }

    /// Whether both are of one file in one state.
    fn is_of_what(&self, other: &Self) -> bool {
        let fresh = |stamp: &Self| Self {
            is_fresh: true,
            ..stamp.clone()
        };
        fresh(self) == fresh(other)
    }

    /// Whether the file is certainly the same as when this stamp was taken.
    pub fn holds(&self, path: &Path) -> bool {
        let now = |meta| Self::of(&meta, SystemTime::now());
        !self.is_fresh && std::fs::metadata(path).is_ok_and(|meta| now(meta) == *self)
    }
}

/// What is read from some files, with the stamp of each.
pub type Taken<T> = Result<(T, Vec<Stamp>), Wrong>;

/// What has changed about some files, once for each change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice<'a> {
    /// They say something new.
    Renewed,
    /// They are as they should be again.
    Mended,
    /// They are wrong, for that reason; what they said before stays in force.
    Kept(&'a str),
    /// They are wrong, for that reason, and say nothing any more.
    Ended(&'a str),
}

/// In words for an operator, where the files are certificates.
impl std::fmt::Display for Notice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Renewed => {
                f.write_str("the certificates are new ones: connections use them from now on")
            }
            Self::Mended => f.write_str("the certificates are as they should be again"),
            Self::Kept(why) => write!(
                f,
                "{why}; the certificates that were read last stay in force"
            ),
            Self::Ended(why) => write!(f, "{why}; no connection is taken"),
        }
    }
}

/// How files are read.
type Reader<T> = Box<dyn Fn(&[PathBuf]) -> Taken<T> + Send + Sync>;

/// What some files say, as they are now.
pub struct Followed<T> {
    paths: Vec<PathBuf>,
    read: Reader<T>,
    /// What of it ends what they said before; all else leaves that in force.
    ends: fn(&Wrong) -> bool,
    tell: Box<dyn Fn(Notice<'_>) + Send + Sync>,
    /// Held while files are read.
    state: Mutex<State>,
    /// `Err`: they say nothing, for that reason. Held for a moment only.
    said: Mutex<Result<Arc<T>, String>>,
    /// How often they have come to say something new.
    changes: AtomicU64,
}

struct State {
    /// `None`: they were wrong when they were read last.
    stamps: Option<Vec<Stamp>>,
    /// What is wrong with them as they are now, as it was reported.
    reported: String,
}

impl<T> Followed<T> {
    /// Reads them for the first time.
    ///
    /// # Errors
    /// [`Wrong`]
    pub fn open(
        paths: Vec<PathBuf>,
        read: impl Fn(&[PathBuf]) -> Taken<T> + Send + Sync + 'static,
        ends: fn(&Wrong) -> bool,
        tell: impl Fn(Notice<'_>) + Send + Sync + 'static,
    ) -> Result<Self, Wrong> {
        let (said, stamps) = read(&paths)?;
        let state = State {
            stamps: Some(stamps),
            reported: String::new(),
        };
        Ok(Self {
            paths,
            read: Box::new(read),
            ends,
            tell: Box::new(tell),
            state: Mutex::new(state),
            said: Mutex::new(Ok(Arc::new(said))),
            changes: AtomicU64::new(0),
        })
    }

    /// What they say now; where they are wrong, what they said before.
    ///
    /// # Errors
    /// They are wrong in a way that ends that, with the reason.
    pub fn now(&self) -> Result<Arc<T>, String> {
        let mut state = self.state.lock();
        let holds = |stamps: &Vec<Stamp>| {
            let mut all = stamps.iter().zip(&self.paths);
            all.all(|(stamp, path)| stamp.holds(path))
        };
        if !state.stamps.as_ref().is_some_and(holds) {
            self.look(&mut state);
        }
        drop(state);
        self.held()
    }

    /// How often they have come to say something new, or to say something again.
    pub fn changes(&self) -> u64 {
        // A number that others compare: what it counts is behind a lock of its own.
        self.changes.load(Ordering::Relaxed)
    }

    /// What they said when they were looked at last. This waits for no disk.
    ///
    /// # Errors
    /// As [`Followed::now`].
    pub fn held(&self) -> Result<Arc<T>, String> {
        self.said.lock().clone()
    }

    fn look(&self, state: &mut State) {
        let before = state.stamps.take();
        let wrong = match (self.read)(&self.paths) {
            Ok((said, stamps)) => {
                let was_wrong = before.is_none();
                let is_new = before.is_some_and(|before| {
                    let mut all = before.iter().zip(&stamps);
                    !all.all(|(before, now)| before.is_of_what(now))
                });
                *self.said.lock() = Ok(Arc::new(said));
                state.stamps = Some(stamps);
                if is_new || was_wrong {
                    self.changes.fetch_add(1, Ordering::Relaxed);
                }
                if is_new && state.reported.is_empty() {
                    (self.tell)(Notice::Renewed);
                }
                String::new()
            }
            Err(error) => {
                if (self.ends)(&error) {
                    *self.said.lock() = Err(error.to_string());
                }
                error.to_string()
            }
        };
        if wrong == state.reported {
            return;
        }
        let has_ended = self.said.lock().is_err();
        (self.tell)(match wrong.as_str() {
            "" => Notice::Mended,
            wrong if has_ended => Notice::Ended(wrong),
            wrong => Notice::Kept(wrong),
        });
        state.reported = wrong;
    }
}

impl<T: Send + Sync + 'static> Followed<T> {
    /// Has a thread look at them every so often, for as long as they are used: where those who need
    /// them may not wait for a disk and go by [`Followed::held`].
    ///
    /// # Errors
    /// There is no thread.
    pub fn follow(self: &Arc<Self>, every: Duration) -> io::Result<()> {
        let followed = Arc::downgrade(self);
        std::thread::Builder::new()
            .name("certificates".into())
            .spawn(move || {
                loop {
                    std::thread::sleep(every);
                    match followed.upgrade() {
                        Some(followed) => drop(followed.now()),
                        None => return,
                    }
                }
            })?;
        Ok(())
    }
}

/// Reads a file whose owner is this process's user or root. `is_secret`: nobody else may read it,
/// but for a group that root has let read its own file, which is how this process reads it:
/// Kubernetes mounts secrets so.
///
/// # Errors
/// [`Wrong`]
pub fn read(path: &Path, is_secret: bool) -> Result<(Vec<u8>, Stamp), Wrong> {
    let unreadable = |error| Wrong::Unreadable {
        path: path.to_owned(),
        error,
    };
    let not_safe = |why: String| Wrong::Unsafe {
        path: path.to_owned(),
        why,
    };
    // One descriptor: what is checked is what is read. A pipe would keep us waiting.
    let mut options = File::options();
    options
        .read(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
    let mut file = options.open(path).map_err(unreadable)?;
    let meta = file.metadata().map_err(unreadable)?;
    if !meta.is_file() {
        return Err(not_safe("is no regular file".into()));
    }
    let ours = rustix::process::geteuid().as_raw();
    if meta.uid() != 0 && meta.uid() != ours {
        return Err(not_safe(format!(
            "belongs to user {}: run `chown {ours}` on it",
            meta.uid()
        )));
    }
    let (mode, refused, want) = match is_secret {
        true => (
            meta.mode() & 0o7777,
            0o077,
            "read or change it: run `chmod 600` on it",
        ),
        false => (
            meta.mode() & 0o7777,
            0o022,
            "change it: run `chmod go-w` on it",
        ),
    };
    let by_group = is_secret && meta.uid() == 0 && ours != 0 && mode & 0o037 == 0;
    if mode & refused != 0 && !by_group {
        return Err(not_safe(format!(
            "has mode {mode:04o}, so others can {want}"
        )));
    }
    if meta.size() > MOST_BYTES {
        return Err(not_safe(format!(
            "has {} bytes, {MOST_BYTES} are taken",
            meta.size()
        )));
    }
    let stamp = Stamp::of(&meta, SystemTime::now());
    let mut bytes = Vec::new();
    let mut limited = Read::by_ref(&mut file).take(MOST_BYTES + 1);
    limited.read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(not_safe(format!("grows beyond {MOST_BYTES} bytes")));
    }
    Ok((bytes, stamp))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_that_others_can_read_is_not_taken_and_a_pipe_keeps_nobody_waiting() {
        let place = tempfile::tempdir().expect("directory");
        let path = place.path().join("tokens");
        std::fs::write(&path, "x").expect("written");
        let set = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, mode).expect("set");
        };
        for (mode, is_secret, taken) in [
            (0o600, true, true),
            (0o400, true, true),
            (0o640, true, false),
            (0o604, true, false),
            (0o620, false, false),
            (0o644, false, true),
        ] {
            set(mode);
            let read = read(&path, is_secret);
            assert_eq!(read.is_ok(), taken, "{mode:o}: {read:?}");
            if let Err(error) = read {
                let text = error.to_string();
                assert!(
                    text.contains(&format!("{mode:04o}")) && text.contains("chmod"),
                    "{text}"
                );
            }
        }
        let pipe = place.path().join("pipe");
        let (here, mode) = (rustix::fs::CWD, rustix::fs::Mode::RUSR);
        rustix::fs::mkfifoat(here, &pipe, mode).expect("a pipe");
        let error = read(&pipe, true).expect_err("no file").to_string();
        assert!(error.contains("no regular file"), "{error}");
        let error = read(&place.path().join("none"), true).expect_err("none");
        assert!(matches!(error, Wrong::Unreadable { .. }), "{error:?}");
        let long = place.path().join("long");
        std::fs::write(&long, vec![b'x'; (MOST_BYTES + 1) as usize]).expect("written");
        assert!(read(&long, false).is_err());
    }

    #[test]
    fn what_is_wrong_leaves_in_force_what_was_said_or_ends_it() {
        let place = tempfile::tempdir().expect("directory");
        let path = place.path().join("a");
        let read = |paths: &[PathBuf]| -> Taken<String> {
            let (bytes, stamp) = super::read(&paths[0], false)?;
            match String::from_utf8(bytes) {
                Ok(text) => Ok((text, vec![stamp])),
                Err(_) => Err(Wrong::Text {
                    path: paths[0].clone(),
                    why: "no text".into(),
                }),
            }
        };
        std::fs::write(&path, "one").expect("written");
        let reported = Arc::new(Mutex::new(Vec::new()));
        let open = |ends| {
            let reported = Arc::clone(&reported);
            let tell = move |notice: Notice<'_>| reported.lock().push(format!("{notice:?}"));
            Followed::open(vec![path.clone()], read, ends, tell).expect("read")
        };
        let keeps = open(|_| false);
        let ends = open(|wrong| !matches!(wrong, Wrong::Text { .. }));
        let said = |followed: &Followed<String>| followed.now().map(|said| said.to_string());
        assert_eq!(said(&ends).as_deref(), Ok("one"));
        std::fs::write(&path, b"\xff").expect("written");
        assert_eq!(said(&keeps).as_deref(), Ok("one"));
        assert_eq!(said(&ends).as_deref(), Ok("one"));
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(said(&keeps).as_deref(), Ok("one"));
        assert!(said(&ends).is_err_and(|why| why.contains("cannot be read")));
        // Half of it does not bring back what has ended.
        std::fs::write(&path, b"\xff").expect("written");
        assert!(said(&ends).is_err());
        std::fs::write(&path, "two").expect("written");
        assert_eq!(keeps.held().as_deref().map(String::as_str), Ok("one"));
        for followed in [&keeps, &ends] {
            assert_eq!(said(followed).as_deref(), Ok("two"));
        }
        std::fs::write(&path, "three").expect("written");
        assert_eq!(said(&keeps).as_deref(), Ok("three"));
        let reported = reported.lock();
        let kinds: Vec<&str> = reported
            .iter()
            .filter_map(|one| one.split('(').next())
            .collect();
        // Of the first: no text, gone, no text again, mended, renewed. Of the second the same, but
        // for what ends it and what does not bring it back.
        assert_eq!(
            kinds,
            [
                "Kept", "Kept", "Kept", "Ended", "Ended", "Mended", "Mended", "Renewed"
            ]
        );
    }

    #[test]
    fn a_stamp_holds_for_that_file_in_that_state_alone() {
        let place = tempfile::tempdir().expect("directory");
        let path = place.path().join("a");
        std::fs::write(&path, "one").expect("written");
        let fresh = read(&path, false).expect("read").1;
        assert!(!fresh.holds(&path), "it may change without a sign");
        // As it would be read a minute later.
        let later = SystemTime::now() + Duration::from_secs(60);
        let meta = std::fs::metadata(&path).expect("known");
        let stamp = Stamp::of(&meta, later);
        let now = Stamp {
            is_fresh: true,
            ..stamp.clone()
        };
        assert!(!stamp.is_fresh && now == fresh);
        std::fs::write(&path, "three").expect("written");
        let meta = std::fs::metadata(&path).expect("known");
        assert_ne!(Stamp::of(&meta, later), stamp);
        std::fs::remove_file(&path).expect("removed");
        assert!(!stamp.holds(&path));
    }
}
