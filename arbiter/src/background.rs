//! Questions whose answers may wait for a disk or a server, on a thread beside the loop.
//!
//! The loop puts questions into a queue of bounded length, and a bell rings when there are answers.
//! A question that never returns holds up those behind it in its own queue and nobody else: the
//! loop goes on with what it knows.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::bell::Bell;

/// A thread that answers, as the loop sees it. It is left to itself when this is dropped.
#[derive(Debug)]
pub struct Background<Q, A> {
    questions: Sender<Q>,
    answers: Receiver<A>,
    most: usize,
    /// Questions whose answers were not taken yet. Only the loop counts.
    outstanding: AtomicUsize,
    /// Rings while there are answers.
    bell: Bell,
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
        let (questions, asked) = unbounded();
        let (tell, answers) = unbounded();
        let bell = Bell::new()?;
        let ring = bell.clone();
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                for question in asked {
                    if tell.send(answer(question)).is_err() {
                        return;
                    }
                    ring.ring();
                }
            })?;
        Ok(Self {
            questions,
            answers,
            most,
            outstanding: AtomicUsize::new(0),
            bell,
        })
    }

    /// Asks; false where there are as many questions as there may be.
    pub fn ask(&self, question: Q) -> bool {
        // SYNC(outstanding): a count and nothing else; no data is published by it.
        if self.outstanding.load(Ordering::Relaxed) >= self.most {
            return false;
        }
        let sent = self.questions.send(question).is_ok();
        if sent {
            self.outstanding.fetch_add(1, Ordering::Relaxed);
        }
        sent
    }

    /// Silences the bell and takes what it rang for.
    pub fn take(&self) -> Vec<A> {
        self.bell.silence();
        let answers: Vec<A> = self.answers.try_iter().collect();
        self.outstanding.fetch_sub(answers.len(), Ordering::Relaxed);
        answers
    }

    /// The bell, for somebody else to ring it too.
    pub fn ringer(&self) -> Bell {
        self.bell.clone()
    }

    /// Rings when there are answers.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_question_that_takes_long_holds_up_nobody_and_questions_are_bounded() {
        let (proceed, may) = unbounded::<()>();
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
