//! What a cluster hook advises: which node and device a pod should have, by the policies of
//! `sublet simulate`, and how much slower it will be there.
//!
//! The scheduler waits for the extender, so each question has a limit. A hook that does not answer
//! within it is left alone, longer each time, and pods are placed by fit alone, with the reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::fit::{Candidate, Wish};

/// How long a hook that did not answer is not asked again: a queue of pods does not wait the whole
/// limit for each. Doubled each time that it does not answer then either.
pub const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest such time.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(30);
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
    away: Mutex<Option<Away>>,
}

/// A hook that has not answered.
#[derive(Debug)]
struct Away {
    since: Instant,
    /// When it is asked again.
    until: Instant,
    pause: Duration,
    why: String,
}

impl Adviser {
    /// `patience` is for the whole of a question, where its asker has the time.
    pub fn new(hook: Arc<dyn Hook>, patience: Duration) -> Self {
        Self {
            hook,
            patience,
            waiting: Arc::default(),
            away: Mutex::default(),
        }
    }

    /// Asks, and waits no longer than the limit, nor than `left`, which is all the time that its
    /// asker has.
    ///
    /// # Errors
    /// Why there is no advice, for people.
    pub fn ask(&self, question: Question, left: Duration) -> Result<Placed, String> {
        let begun = Instant::now();
        if let Some(away) = &mut *self.away.lock() {
            if begun < away.until {
                return Err(away.why.clone());
            }
            // One asks for all: the others do without it until that has its answer.
            away.until = begun + self.patience;
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
        let limit = self.patience.min(left);
        let (why, away) = match receiver.recv_timeout(limit) {
            Ok(Ok(mut placed)) => {
                *self.away.lock() = None;
                placed.reason = short(&placed.reason);
                return Ok(placed);
            }
            Ok(Err(HookError::Refused(why))) => {
                *self.away.lock() = None;
                (format!("the hook says: {why}"), false)
            }
            Ok(Err(HookError::Away(why))) => (why, true),
            Err(RecvTimeoutError::Timeout) => {
                let ms = limit.as_millis();
                // With little time left it had no chance to answer.
                let had_time = limit >= self.patience / 2;
                (format!("the hook did not answer within {ms} ms"), had_time)
            }
            Err(RecvTimeoutError::Disconnected) => ("asking the hook failed".into(), true),
        };
        let why = short(&why);
        if away {
            self.leave_alone(begun, &why);
        }
        Err(why)
    }

    /// Notes that a question of then was not answered.
    fn leave_alone(&self, begun: Instant, why: &str) {
        let now = Instant::now();
        let mut away = self.away.lock();
        let pause = match &*away {
            // Several were asked at once: that is one silence.
            Some(away) if away.since > begun => return,
            Some(away) => (away.pause * 2).min(LONGEST_PAUSE),
            None => FIRST_PAUSE,
        };
        *away = Some(Away {
            since: now,
            until: now + pause,
            pause,
            why: why.to_owned(),
        });
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
            assert_eq!(
                adviser.ask(question(), testbed::PATIENCE),
                Err("it is not reached".to_owned())
            );
        }
        assert_eq!(away.asked.load(Ordering::Relaxed), 1);
        let refuses = scripted(|| Err(HookError::Refused("x".repeat(9999))));
        let adviser = Adviser::new(refuses.clone(), testbed::PATIENCE);
        for _ in 0..3 {
            let why = adviser.ask(question(), testbed::PATIENCE).unwrap_err();
            assert!(why.starts_with("the hook says: xx") && why.len() < 500);
        }
        assert_eq!(refuses.asked.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn the_longer_a_hook_is_silent_the_longer_it_is_left_alone() {
        let away = scripted(|| Err(HookError::Away("it is not reached".into())));
        let adviser = Adviser::new(away.clone(), testbed::PATIENCE);
        let mut pauses = Vec::new();
        for _ in 0..7 {
            adviser.ask(question(), testbed::PATIENCE).unwrap_err();
            let mut noted = adviser.away.lock();
            let noted = noted.as_mut().unwrap();
            pauses.push(noted.pause.as_secs());
            // Its time has come.
            noted.until = Instant::now();
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(away.asked.load(Ordering::Relaxed), 7);
        // Several questions of one moment are one silence.
        let before = adviser.away.lock().as_ref().unwrap().since;
        adviser.leave_alone(before - Duration::from_secs(1), "another");
        assert_eq!(adviser.away.lock().as_ref().unwrap().since, before);
        // An answer ends it, also one that refuses.
        let refuses = scripted(|| Err(HookError::Refused("no".into())));
        let adviser = Adviser {
            hook: refuses,
            ..adviser
        };
        adviser.ask(question(), testbed::PATIENCE).unwrap_err();
        assert!(adviser.away.lock().is_none());
    }

    #[test]
    fn while_one_asks_a_hook_again_the_others_do_without_it() {
        let hook = Arc::new(Hangs::default());
        let adviser = Arc::new(Adviser::new(hook.clone(), testbed::PATIENCE));
        let now = Instant::now();
        *adviser.away.lock() = Some(Away {
            since: now,
            until: now,
            pause: FIRST_PAUSE,
            why: "it was silent".into(),
        });
        let own = Arc::clone(&adviser);
        let first = thread::spawn(move || own.ask(question(), testbed::PATIENCE));
        let asked = || adviser.waiting.load(Ordering::Relaxed) == 1;
        let end = Instant::now() + testbed::PATIENCE;
        while !asked() {
            assert!(Instant::now() < end, "nobody asks it again");
            thread::yield_now();
        }
        let second = adviser.ask(question(), testbed::PATIENCE);
        assert_eq!(second, Err("it was silent".to_owned()));
        hook.let_go();
        assert_eq!(testbed::join(first), Ok(Placed::default()));
        assert!(adviser.away.lock().is_none());
    }

    #[test]
    fn a_hook_that_had_no_time_to_answer_is_not_left_alone() {
        let hook = Arc::new(Hangs::default());
        let adviser = Adviser::new(hook.clone(), testbed::PATIENCE);
        let why = adviser.ask(question(), Duration::from_millis(1));
        let why = why.unwrap_err();
        assert!(why.contains("within 1 ms"), "{why}");
        assert!(adviser.away.lock().is_none());
        hook.let_go();
    }

    /// Never answers, until it is let go.
    #[derive(Default)]
    struct Hangs {
        goes: StdMutex<bool>,
        bell: Condvar,
    }

    impl Hangs {
        fn let_go(&self) {
            *self.goes.lock().unwrap() = true;
            self.bell.notify_all();
        }
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
            let why = adviser.ask(question(), testbed::PATIENCE).unwrap_err();
            assert!(why.contains("did not answer within 1 ms"), "{why}");
            *adviser.away.lock() = None;
        }
        let why = adviser.ask(question(), testbed::PATIENCE).unwrap_err();
        assert!(why.contains("8 questions wait"), "{why}");
        hook.let_go();
        let adviser = Adviser {
            patience: testbed::PATIENCE,
            ..adviser
        };
        let end = Instant::now() + testbed::PATIENCE;
        while adviser.ask(question(), testbed::PATIENCE).is_err() {
            assert!(Instant::now() < end, "its places stay taken");
            thread::yield_now();
        }
    }
}
