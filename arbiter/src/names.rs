//! What users are called. The host may ask a server for that, and the server may not answer: a
//! thread of its own asks ([`Background`]), and until it knows a user goes by its number.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;

use crate::background::Background;

/// Questions at a time; more are asked again later.
const MOST_ASKED: usize = 64;
/// Users that are remembered.
const MOST_KNOWN: usize = 4096;
/// How long a name is good for, and how long the lack of one.
const KNOWN_NS: u64 = 600_000_000_000;
const UNKNOWN_NS: u64 = 10_000_000_000;

/// Looks a user's login name up; `None`: the host has none for it. May take any time.
pub type LookUp = Box<dyn FnMut(u32) -> io::Result<Option<String>> + Send>;

/// The names of users, as far as they are known.
#[derive(Debug)]
pub struct Names {
    lookups: Background<u32, (u32, io::Result<Option<String>>)>,
    known: BTreeMap<u32, Name>,
}

#[derive(Debug, Default)]
struct Name {
    /// Empty: the host has none, or none is known.
    name: String,
    /// What the host said.
    said: bool,
    /// Nobody waits for an answer any more, until one is there.
    given_up: bool,
    asked: bool,
    until_ns: u64,
}

impl Names {
    /// Starts the thread.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(mut look_up: LookUp) -> io::Result<Self> {
        let lookups = Background::start("names", MOST_ASKED, move |uid| (uid, look_up(uid)))?;
        Ok(Self {
            lookups,
            known: BTreeMap::new(),
        })
    }

    /// Rings when something was found out.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.lookups.bell()
    }

    /// Whether the name need not be waited for; asks for it where it is not known, or not any more.
    pub fn ask(&mut self, uid: u32, now_ns: u64) -> bool {
        if !self.known.contains_key(&uid) && self.known.len() >= MOST_KNOWN {
            let oldest = self.known.iter().min_by_key(|(_, name)| name.until_ns);
            if let Some(oldest) = oldest.map(|(uid, _)| *uid) {
                self.known.remove(&oldest);
            }
        }
        let name = self.known.entry(uid).or_default();
        if !name.asked && now_ns >= name.until_ns {
            name.asked = self.lookups.ask(uid);
        }
        name.said || name.given_up
    }

    /// The name, as far as it is known; empty where it is not.
    pub fn of(&self, uid: u32) -> &str {
        self.known.get(&uid).map_or("", |name| name.name.as_str())
    }

    /// Whether the host has said what the user is called, or that it has no name.
    pub fn is_settled(&self, uid: u32) -> bool {
        self.known.get(&uid).is_some_and(|name| name.said)
    }

    /// The name was waited for long enough.
    pub fn give_up(&mut self, uid: u32) {
        self.known.entry(uid).or_default().given_up = true;
    }

    /// Takes answers: the users whose names are new.
    pub fn take(&mut self, now_ns: u64) -> Vec<(u32, String)> {
        let mut new = Vec::new();
        for (uid, answer) in self.lookups.take() {
            let name = self.known.entry(uid).or_default();
            name.asked = false;
            match answer {
                Ok(found) => {
                    let is_there = found.is_some();
                    let found = found.unwrap_or_default();
                    name.until_ns = now_ns + if is_there { KNOWN_NS } else { UNKNOWN_NS };
                    (name.said, name.given_up) = (true, false);
                    name.name.clone_from(&found);
                    new.push((uid, found));
                }
                Err(error) => {
                    tracing::warn!("the name of user {uid} cannot be looked up: {error}");
                    name.until_ns = now_ns + UNKNOWN_NS;
                    name.given_up = true;
                }
            }
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn taken(names: &mut Names, now_ns: u64) -> Vec<(u32, String)> {
        let deadline = Instant::now() + testbed::PATIENCE;
        loop {
            let new = names.take(now_ns);
            if !new.is_empty() || !names.known.values().any(|name| name.asked) {
                return new;
            }
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_name_is_asked_for_once_and_again_when_it_is_old() {
        let mut asked = 0;
        let look_up = Box::new(move |uid: u32| {
            asked += 1;
            match uid {
                7 => Ok(Some(format!("seven-{asked}"))),
                8 => Ok(None),
                _ => Err(io::ErrorKind::TimedOut.into()),
            }
        });
        let mut names = Names::start(look_up).expect("a thread");
        assert!(!names.ask(7, 0) && !names.ask(7, 0));
        assert_eq!((names.of(7), names.is_settled(7)), ("", false));
        assert_eq!(taken(&mut names, 5), [(7, "seven-1".to_owned())]);
        assert!(names.ask(7, 6) && names.is_settled(7));
        assert!(names.ask(7, 5 + KNOWN_NS), "what was known holds meanwhile");
        assert_eq!(taken(&mut names, 6), [(7, "seven-2".to_owned())]);
        assert_eq!(names.of(7), "seven-2");
        names.ask(8, 0);
        assert_eq!(taken(&mut names, 0), [(8, String::new())]);
        names.ask(9, 0);
        assert!(taken(&mut names, 0).is_empty());
        assert!(
            names.ask(9, 1) && !names.is_settled(9),
            "nobody waits for it"
        );
    }

    #[test]
    fn who_is_remembered_is_bounded() {
        let mut names = Names::start(Box::new(|_| Ok(None))).expect("a thread");
        for uid in 0..5000 {
            names.ask(uid, 0);
        }
        assert!(names.known.len() <= MOST_KNOWN);
    }
}
