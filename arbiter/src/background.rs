//! Questions whose answers may wait for a disk or a server, on a thread beside the loop.
//!
//! The loop puts questions into a queue of bounded length, and a bell rings when there are answers.
//! A question that never returns holds up those behind it in its own queue and nobody else: the
//! loop goes on with what it knows.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A thread that answers, as the loop sees it. It is left to itself when this is dropped.
#[derive(Debug)]
pub struct Background<Q, A> {
    shared: Arc<Shared<Q, A>>,
    most: usize,
    /// Readable while there are answers.
    bell: Arc<OwnedFd>,
}

#[derive(Debug)]
struct Shared<Q, A> {
    tray: Mutex<Tray<Q, A>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Tray<Q, A> {
    questions: VecDeque<Q>,
    answers: Vec<A>,
    /// Questions whose answers were not taken yet.
    outstanding: usize,
    over: bool,
}

impl<Q, A> Shared<Q, A> {
    /// A thread that panicked leaves a tray that is as good as any.
    fn tray(&self) -> MutexGuard<'_, Tray<Q, A>> {
        self.tray.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<Q> {
        let mut tray = self.tray();
        loop {
            if tray.over {
                return None;
            }
            if let Some(question) = tray.questions.pop_front() {
                return Some(question);
            }
            tray = self
                .changed
                .wait(tray)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<Q: Send + 'static, A: Send + 'static> Background<Q, A> {
    /// Starts the thread, which has `most` questions at a time.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(
        name: &str,
        most: usize,
        mut answer: impl FnMut(Q) -> A + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            tray: Mutex::new(Tray {
                questions: VecDeque::new(),
                answers: Vec::new(),
                outstanding: 0,
                over: false,
            }),
            changed: Condvar::new(),
        });
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let bell = Arc::new(rustix::event::eventfd(0, flags)?);
        let (other, ring) = (Arc::clone(&shared), Arc::clone(&bell));
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                while let Some(question) = other.next() {
                    let answer = answer(question);
                    other.tray().answers.push(answer);
                    // A full counter means that it is ringing already.
                    let _ = rustix::io::write(&ring, &1u64.to_ne_bytes());
                }
            })?;
        Ok(Self { shared, most, bell })
    }

    /// Asks; false where there are as many questions as there may be.
    pub fn ask(&self, question: Q) -> bool {
        let mut tray = self.shared.tray();
        if tray.outstanding >= self.most {
            return false;
        }
        tray.outstanding += 1;
        tray.questions.push_back(question);
        drop(tray);
        self.shared.changed.notify_all();
        true
    }

    /// Silences the bell and takes what it rang for.
    pub fn take(&self) -> Vec<A> {
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        let mut tray = self.shared.tray();
        let answers = std::mem::take(&mut tray.answers);
        tray.outstanding = tray.outstanding.saturating_sub(answers.len());
        answers
    }

    /// Rings when there are answers.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl<Q, A> Drop for Background<Q, A> {
    fn drop(&mut self) {
        self.shared.tray().over = true;
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_question_that_takes_long_holds_up_nobody_and_questions_are_bounded() {
        let (proceed, may) = mpsc::channel::<()>();
        let background = Background::start("test", 3, move |question: u32| {
            let _ = may.recv_timeout(testbed::PATIENCE);
            question * 2
        })
        .expect("a thread");
        let asked: Vec<bool> = (0..5).map(|question| background.ask(question)).collect();
        assert_eq!(asked, [true, true, true, false, false]);
        assert!(background.take().is_empty());
        (0..3).for_each(|_| proceed.send(()).expect("it listens"));
        let deadline = Instant::now() + testbed::PATIENCE;
        let mut answers = Vec::new();
        while answers.len() < 3 {
            assert!(Instant::now() < deadline);
            answers.extend(background.take());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(answers, [0, 2, 4]);
        assert!(background.ask(7), "there is space again");
    }
}
