//! Looks after the arbiter's directory, beside the loop: whether its names are still this
//! arbiter's, and makes them again where nobody else has them.
//!
//! A logout removes a user's runtime directory while jobs run, and cleaners empty `/tmp`. Then new
//! processes of those jobs do not find their arbiter, and the next `sublet run` would start another
//! one, which knows of none of them.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use channel::arbiter::Listener;
use control::paths::RuntimeDir;
use parking_lot::Mutex;

use crate::background::Background;
use crate::premises::{self, Premises};

/// How often it is looked at. TIMEOUT: a user who logs in again needs longer to type a command.
const EVERY_NS: u64 = 250_000_000;

/// Names that were made again.
#[derive(Debug)]
pub struct Renewed {
    /// The lock; `None`: that is still held.
    pub lock: Option<File>,
    /// Where processes of jobs connect.
    pub listener: Listener,
    /// Where requests are taken.
    pub api: UnixListener,
    /// What is its own now.
    pub premises: Premises,
}

/// Something is amiss.
#[derive(Debug)]
pub struct Amiss {
    /// What, in words.
    pub what: String,
    /// What was made again, or why nothing was.
    pub renewed: Result<Renewed, String>,
}

/// How a directory's names are made again, unless it is over meanwhile.
pub type Renew = Box<dyn FnMut(&Premises, &Over) -> Result<Renewed, String> + Send>;

/// The arbiter ends: nothing is made again from there on.
#[derive(Debug, Default)]
pub struct Over(AtomicBool);

impl Over {
    /// Whether it does.
    pub fn is_so(&self) -> bool {
        // SYNC(over): pairs with the store in `Renewal::end`, which the lock of the directory
        // orders against what is made here.
        self.0.load(Ordering::SeqCst)
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Renewal {
    premises: Arc<Premises>,
    /// `None`: nobody else can know of the directory, or a service manager has made what is there.
    looks: Option<Background<Arc<Premises>, ()>>,
    asked: bool,
    again_ns: u64,
    /// What was said last.
    said: String,
    over: Arc<Over>,
    /// What the last look has found; held while one is under way.
    found: Arc<Mutex<Option<Amiss>>>,
}

/// TIMEOUT: how long the end waits for a look that is under way, which makes two sockets at most.
const END: Duration = Duration::from_secs(1);

impl Renewal {
    /// Starts the thread, where names are to be made again.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(premises: Premises, renew: Option<Renew>) -> io::Result<Self> {
        let (over, found) = (Arc::<Over>::default(), Arc::<Mutex<_>>::default());
        let (ends, finds) = (Arc::clone(&over), Arc::clone(&found));
        let look = |mut renew: Renew| {
            Background::start("premises", 1, move |premises: Arc<Premises>| {
                let mut found = finds.lock();
                let amiss = if ends.is_so() { None } else { premises.amiss() };
                *found = amiss.map(|what| Amiss {
                    what,
                    renewed: renew(&premises, &ends),
                });
            })
        };
        Ok(Self {
            premises: Arc::new(premises),
            looks: renew.map(look).transpose()?,
            asked: false,
            again_ns: 0,
            said: String::new(),
            over,
            found,
        })
    }

    /// The arbiter ends: names that it removes are not made again. Returns what was made again and
    /// not taken yet.
    pub fn end(&self) -> Option<Renewed> {
        // First, for a look that a disk holds up for longer than it is waited for here.
        self.over.0.store(true, Ordering::SeqCst);
        self.found.try_lock_for(END)?.take()?.renewed.ok()
    }

    /// What of the directory is this arbiter's.
    pub fn premises(&self) -> &Premises {
        &self.premises
    }

    /// What was made again is its own from here on.
    pub fn move_to(&mut self, mut premises: Premises) {
        premises.replace(&self.premises);
        self.premises = Arc::new(premises);
    }

    /// Rings when it was looked at; `None`: it never is.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        Some(self.looks.as_ref()?.bell())
    }

    /// Has it looked at where that is due.
    pub fn look(&mut self, now_ns: u64) {
        if let Some(looks) = self.looks.as_ref().filter(|_| !self.asked)
            && now_ns >= self.again_ns
        {
            self.asked = looks.ask(Arc::clone(&self.premises));
        }
    }

    /// What was found amiss since that was asked last.
    pub fn take(&mut self, now_ns: u64) -> Option<Amiss> {
        let answers = self.looks.as_ref()?.take();
        if answers.is_empty() {
            return None;
        }
        self.asked = false;
        self.again_ns = now_ns + EVERY_NS;
        let amiss = self.found.lock().take();
        if amiss.is_none() {
            self.said.clear();
        }
        amiss
    }

    /// Whether this was not said just before.
    pub fn is_new(&mut self, text: &str) -> bool {
        let is_new = self.said != text;
        text.clone_into(&mut self.said);
        is_new
    }
}

/// Makes the directory and its names again. `bind` binds the sockets there.
///
/// # Errors
/// Why not, in words: another arbiter has them, or they cannot be made.
pub fn renew(
    dir: &RuntimeDir,
    before: &Premises,
    bind: impl FnOnce(&mut Premises) -> io::Result<(Listener, UnixListener)>,
) -> Result<Renewed, String> {
    let words = |error: io::Error| error.to_string();
    dir.ensure_again(rustix::process::geteuid().as_raw())
        .map_err(|error| error.to_string())?;
    let path = dir.lock_file();
    let lock = if before.has(&path) {
        None
    } else {
        let taken = premises::lock_file(&path).map_err(words)?;
        let mut lock = taken.map_err(|_| {
            let pid = std::fs::read_to_string(&path).unwrap_or_default();
            format!(
                "another arbiter (process {}) has it: jobs of both share the devices without knowing of each other; stop that one with `sublet arbiter --stop`",
                pid.trim()
            )
        })?;
        lock.set_len(0)
            .and_then(|()| writeln!(lock, "{}", std::process::id()))
            .map_err(words)?;
        Some(lock)
    };
    let mut premises = Premises::enter(dir.path()).map_err(words)?;
    let (listener, api) = bind(&mut premises).map_err(words)?;
    premises.note(&path).map_err(words)?;
    Ok(Renewed {
        lock,
        listener,
        api,
        premises,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn an_arbiter_that_ends_makes_nothing_again() {
        let folder = tempfile::tempdir().expect("directory");
        let name = folder.path().join("api.sock");
        std::fs::write(&name, "").expect("written");
        let mut premises = Premises::enter(folder.path()).expect("entered");
        premises.note(&name).expect("noted");
        std::fs::remove_file(&name).expect("removed");
        let renew: Renew = Box::new(|_, _| Err("it was tried".into()));
        let mut renewal = Renewal::start(premises, Some(renew)).expect("a thread");
        let found = |renewal: &mut Renewal, now_ns: u64| {
            renewal.look(now_ns);
            let deadline = Instant::now() + testbed::PATIENCE;
            while renewal.asked {
                assert!(Instant::now() < deadline, "it is looked at");
                if let Some(amiss) = renewal.take(now_ns) {
                    return Some(amiss.renewed.expect_err("it was not made"));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            None
        };
        assert_eq!(found(&mut renewal, 1).as_deref(), Some("it was tried"));
        assert!(renewal.end().is_none(), "nothing was made");
        assert_eq!(found(&mut renewal, 2 * EVERY_NS), None);
    }

    #[test]
    fn what_was_made_again_just_before_the_end_is_the_arbiters_to_remove() {
        let folder = tempfile::tempdir().expect("directory");
        let dir = RuntimeDir::given(folder.path().to_owned()).expect("absolute");
        fn bind(dir: &RuntimeDir, premises: &mut Premises) -> io::Result<(Listener, UnixListener)> {
            let channel = Listener::bind(&dir.channel_socket())?;
            let api = UnixListener::bind(dir.api_socket())?;
            let mut paths = dir.sockets().into_iter();
            paths.try_for_each(|path| premises.note(&path))?;
            Ok((channel, api))
        }
        let mut premises = Premises::enter(folder.path()).expect("entered");
        let first = bind(&dir, &mut premises).expect("bound");
        for path in dir.sockets() {
            std::fs::remove_file(&path).expect("removed");
        }
        let again = dir.clone();
        let renew: Renew =
            Box::new(move |before, _| renew(&again, before, |premises| bind(&again, premises)));
        let mut renewal = Renewal::start(premises, Some(renew)).expect("a thread");
        renewal.look(1);
        let deadline = Instant::now() + testbed::PATIENCE;
        while !dir.api_socket().exists() {
            assert!(Instant::now() < deadline, "it is made again");
            std::thread::sleep(Duration::from_millis(1));
        }
        // The loop ends before it hears of that.
        let renewed = renewal.end().expect("it was made");
        renewal.move_to(renewed.premises);
        let removed = dir.sockets().map(|path| renewal.premises().remove(&path));
        println!("now: removed {removed:?}");
        assert!(dir.sockets().iter().all(|path| !path.exists()));
        drop(first);
    }
}
