//! What a cluster hook advises: which node and device a pod should have, by the policies of
//! `sublet simulate`, and how much slower it will be there.
//!
//! The scheduler waits for the extender, so each question has a limit. A hook that does not answer
//! within it is left alone for a while, and pods are placed by fit alone, with the reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::fit::{Candidate, Wish};

/// How long a hook that did not answer is not asked again: a queue of pods does not wait the whole
/// limit for each.
pub const PAUSE: Duration = Duration::from_secs(10);
/// Questions that wait for a hook at a time: what is asked beyond goes by fit.
const WAITING: usize = 8;
/// Longest reason of a hook that is shown.
const REASON_CHARS: usize = 400;

/// A pod, and the devices that could take it.
#[derive(Debug, Clone, PartialEq)]
pub struct Question {
    pub wish: Wish,
    pub candidates: Vec<Candidate>,
}

/// A hook's answer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Placed {
    /// Empty: the pod should wait.
    pub node: String,
    pub device: String,
    /// Time of an iteration there against one alone, from 1.
    pub slowdown: f64,
    /// How sure that is, between 0 and 1.
    pub confidence: f64,
    pub reason: String,
    /// Nodes and devices that cannot take it, with the reason.
    pub unfit: Vec<(String, String, String)>,
}

/// Why a hook has no advice.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// It is not there, or is not the hook: it is left alone for a while.
    #[error("{0}")]
    Away(String),
    /// It refuses this question.
    #[error("{0}")]
    Refused(String),
}

/// Who is asked.
pub trait Hook: Send + Sync {
    /// # Errors
    /// [`HookError`]
    fn decide(&self, question: &Question) -> Result<Placed, HookError>;
}

/// A hook that is asked within limits.
pub struct Adviser {
    hook: Arc<dyn Hook>,
    patience: Duration,
    waiting: Arc<AtomicUsize>,
    away: Mutex<Option<(Instant, String)>>,
}

impl Adviser {
    pub fn new(hook: Arc<dyn Hook>, patience: Duration) -> Self {
        Self {
            hook,
            patience,
            waiting: Arc::default(),
            away: Mutex::default(),
        }
    }

    /// Asks, and waits no longer than the limit: 2 s by default, of the five that kube-scheduler
    /// waits for an extender.
    ///
    /// # Errors
    /// Why there is no advice, for people.
    pub fn ask(&self, question: Question) -> Result<Placed, String> {
        if let Some((since, why)) = &*self.away.lock()
            && since.elapsed() < PAUSE
        {
            return Err(why.clone());
        }
        let place = Place::take(&self.waiting)
            .ok_or_else(|| format!("{WAITING} questions wait for the hook already"))?;
        let (hook, (sender, receiver)) = (Arc::clone(&self.hook), mpsc::sync_channel(1));
        // A thread for each: looking up a name, for one, has no limit of its own.
        let thread = thread::Builder::new().spawn(move || {
            let _place = place;
            let _ = sender.send(hook.decide(&question));
        });
        if let Err(error) = thread {
            return Err(format!("the hook cannot be asked: {error}"));
        }
        let answer = receiver.recv_timeout(self.patience);
        let (why, away) = match answer {
            Ok(Ok(mut placed)) => {
                *self.away.lock() = None;
                placed.reason = short(&placed.reason);
                return Ok(placed);
            }
            Ok(Err(HookError::Refused(why))) => (format!("the hook says: {why}"), false),
            Ok(Err(HookError::Away(why))) => (why, true),
            Err(RecvTimeoutError::Timeout) => {
                let ms = self.patience.as_millis();
                (format!("the hook did not answer within {ms} ms"), true)
            }
            Err(RecvTimeoutError::Disconnected) => ("asking the hook failed".into(), true),
        };
        let why = short(&why);
        if away {
            *self.away.lock() = Some((Instant::now(), why.clone()));
        }
        Err(why)
    }
}

fn short(text: &str) -> String {
    text.chars().take(REASON_CHARS).collect()
}

/// One of [`WAITING`].
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(waiting: &Arc<AtomicUsize>) -> Option<Self> {
        // SYNC(waiting): a count on its own; nothing is published by it.
        let taken = waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
            (count < WAITING).then_some(count + 1)
        });
        taken.ok().map(|_| Self(Arc::clone(waiting)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Condvar;
    use std::sync::Mutex as StdMutex;

    use super::*;

    fn question() -> Question {
        Question {
            wish: Wish::default(),
            candidates: Vec::new(),
        }
    }

    /// Answers as scripted, and counts.
    struct Scripted {
        asked: AtomicUsize,
        answer: fn() -> Result<Placed, HookError>,
    }

    impl Hook for Scripted {
        fn decide(&self, _: &Question) -> Result<Placed, HookError> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            (self.answer)()
        }
    }

    fn scripted(answer: fn() -> Result<Placed, HookError>) -> Arc<Scripted> {
        let asked = AtomicUsize::new(0);
        Arc::new(Scripted { asked, answer })
    }

    #[test]
    fn a_hook_that_is_away_is_left_alone_and_one_that_refuses_is_asked_again() {
        let away = scripted(|| Err(HookError::Away("it is not reached".into())));
        let adviser = Adviser::new(away.clone(), testbed::PATIENCE);
        for _ in 0..3 {
            assert_eq!(adviser.ask(question()), Err("it is not reached".to_owned()));
        }
        assert_eq!(away.asked.load(Ordering::Relaxed), 1);
        let refuses = scripted(|| Err(HookError::Refused("x".repeat(9999))));
        let adviser = Adviser::new(refuses.clone(), testbed::PATIENCE);
        for _ in 0..3 {
            let why = adviser.ask(question()).unwrap_err();
            assert!(why.starts_with("the hook says: xx") && why.len() < 500);
        }
        assert_eq!(refuses.asked.load(Ordering::Relaxed), 3);
    }

    /// Never answers, until it is let go.
    #[derive(Default)]
    struct Hangs {
        goes: StdMutex<bool>,
        bell: Condvar,
    }

    impl Hook for Hangs {
        fn decide(&self, _: &Question) -> Result<Placed, HookError> {
            let mut goes = self.goes.lock().unwrap();
            while !*goes {
                goes = self.bell.wait(goes).unwrap();
            }
            Ok(Placed::default())
        }
    }

    #[test]
    fn a_hook_that_hangs_keeps_nobody_beyond_the_limit_and_holds_few_threads() {
        let hook = Arc::new(Hangs::default());
        let adviser = Adviser::new(hook.clone(), Duration::from_millis(1));
        for _ in 0..WAITING {
            let why = adviser.ask(question()).unwrap_err();
            assert!(why.contains("did not answer within 1 ms"), "{why}");
            *adviser.away.lock() = None;
        }
        let why = adviser.ask(question()).unwrap_err();
        assert!(why.contains("8 questions wait"), "{why}");
        *hook.goes.lock().unwrap() = true;
        hook.bell.notify_all();
        let adviser = Adviser {
            patience: testbed::PATIENCE,
            ..adviser
        };
        let end = Instant::now() + testbed::PATIENCE;
        while adviser.ask(question()).is_err() {
            assert!(Instant::now() < end, "its places stay taken");
            thread::yield_now();
        }
    }
}
