//! Requests that came over HTTP, between the API's thread and the loop.
//!
//! The API's thread puts a request here with the place for its answer ([`Counter`]); the loop takes
//! it when it is its user's turn ([`Desk`], whose turns `turns` deals).
//! Neither side waits for the other: requests travel through a queue of bounded length with a bell,
//! answers through a place of their own. Knows nothing of HTTP.
//!
//! [`News`] tells the API's threads that the journal has grown.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use control::{ControlError, Reply, Request};
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use tokio::sync::{Notify, oneshot};

use crate::bell::Bell;
use crate::who::Peer;

/// Requests in the queue. A connection has one at a time, and there are fewer connections.
const QUEUE: usize = 512;

/// What a request is answered.
pub type Answer = Result<Reply, ControlError>;

/// A request on its way to the loop.
#[derive(Debug)]
pub struct Put {
    /// Who asks.
    pub peer: Peer,
    /// What.
    pub request: Request,
    /// Where the answer goes.
    pub answer: oneshot::Sender<Answer>,
    /// Time of the loop that the connection has taken, in nanoseconds.
    pub served_ns: Arc<AtomicU64>,
}

/// Why a request was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotTaken {
    /// There are too many.
    TooMany,
    /// The loop has ended.
    Closed,
}

/// The side of the API's thread.
#[derive(Clone, Debug)]
pub struct Counter {
    put: Sender<Put>,
    bell: Bell,
    /// Connections that are open.
    open: Arc<AtomicUsize>,
}

impl Counter {
    /// Puts a request.
    ///
    /// # Errors
    /// Nobody will answer it.
    pub fn put(&self, put: Put) -> Result<(), NotTaken> {
        self.put.try_send(put).map_err(|error| match error {
            TrySendError::Full(_) => NotTaken::TooMany,
            TrySendError::Disconnected(_) => NotTaken::Closed,
        })?;
        self.bell.ring();
        Ok(())
    }

    /// Has the loop look whether somebody still waits for an answer.
    pub fn wake(&self) {
        self.bell.ring();
    }

    /// One more connection is open, or one less.
    pub fn note_open(&self, on: bool) {
        // SYNC(open): a count and nothing else; no data is published by it.
        if on {
            self.open.fetch_add(1, Ordering::Relaxed);
        } else {
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The side of the loop.
#[derive(Debug)]
pub struct Desk {
    put: Receiver<Put>,
    bell: Bell,
    open: Arc<AtomicUsize>,
    /// Requests that wait for their turn, by number, with when they came.
    waiting: BTreeMap<u64, (Put, u64)>,
    /// Those that were taken, and were not answered yet.
    working: BTreeMap<u64, oneshot::Sender<Answer>>,
    /// Whose the last turn was.
    last: Option<(u64, Arc<AtomicU64>)>,
}

impl Desk {
    /// A desk, and the counter that leads to it.
    ///
    /// # Errors
    /// There is no descriptor for the bell.
    pub fn new() -> io::Result<(Self, Counter)> {
        let (put, puts) = bounded(QUEUE);
        let (bell, open) = (Bell::new()?, Arc::default());
        let counter = Counter {
            put,
            bell: bell.clone(),
            open: Arc::clone(&open),
        };
        let desk = Self {
            put: puts,
            bell,
            open,
            waiting: BTreeMap::new(),
            working: BTreeMap::new(),
            last: None,
        };
        Ok((desk, counter))
    }

    /// Rings while there are requests.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Takes what has come. `number`: the next number that is free.
    pub fn receive(&mut self, number: &mut u64, now_ns: u64) {
        self.bell.silence();
        for put in self.put.try_iter().take(QUEUE) {
            self.waiting.insert(*number, (put, now_ns));
            *number += 1;
        }
    }

    /// Forgets requests that nobody waits for any more: those that were not begun never are.
    fn forget(&mut self) {
        self.waiting.retain(|_, (put, _)| !put.answer.is_closed());
        self.working.retain(|_, place| !place.is_closed());
    }

    /// Whether one waits for a turn.
    pub fn has_turn(&mut self) -> bool {
        self.forget();
        !self.waiting.is_empty()
    }

    /// The number of the request that is next: of the user who has taken least of the loop's time
    /// (`taken_ns`), on the connection that has, the one that came first.
    pub fn first(&mut self, taken_ns: impl Fn(u32) -> u64) -> Option<u64> {
        self.forget();
        let first = self.waiting.iter().min_by_key(|(_, (put, came_ns))| {
            // SYNC(served): a sum that the loop alone writes.
            let served_ns = put.served_ns.load(Ordering::Relaxed);
            (taken_ns(put.peer.uid), served_ns, *came_ns)
        });
        first.map(|(number, _)| *number)
    }

    /// Begins to work on a request.
    pub fn take(&mut self, number: u64) -> Option<(Peer, Request)> {
        let (put, _) = self.waiting.remove(&number)?;
        self.working.insert(number, put.answer);
        self.last = Some((number, put.served_ns));
        Some((put.peer, put.request))
    }

    /// Whether somebody waits for the answer to a request that was taken.
    pub fn awaits(&self, number: u64) -> bool {
        let place = self.working.get(&number);
        place.is_some_and(|place| !place.is_closed())
    }

    /// Answers a request, once. Where nobody is there any more, nobody hears it.
    pub fn answer(&mut self, number: u64, answer: Answer) {
        if let Some(place) = self.working.remove(&number) {
            let _ = place.send(answer);
        }
    }

    /// The turn of a request has taken so much.
    pub fn spent(&mut self, number: u64, ns: u64) {
        if let Some((_, served_ns)) = self.last.take_if(|(last, _)| *last == number) {
            served_ns.fetch_add(ns, Ordering::Relaxed);
        }
    }

    /// Answers nothing any more: who waits hears of it now.
    pub fn close(self) {
        // What is in the queue goes with the last receiver at the latest.
        self.put.try_iter().for_each(drop);
    }

    /// Whether nobody is connected.
    pub fn is_empty(&self) -> bool {
        let is_over = |place: &oneshot::Sender<Answer>| place.is_closed();
        self.waiting.is_empty()
            && self.working.values().all(is_over)
            && self.open.load(Ordering::Relaxed) == 0
    }
}

/// How far the journal has come, for those who follow it.
#[derive(Debug)]
pub struct News {
    seq: AtomicU64,
    listeners: AtomicUsize,
    grown: Notify,
}

impl News {
    /// Nobody listens yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            seq: AtomicU64::new(0),
            listeners: AtomicUsize::new(0),
            grown: Notify::new(),
        })
    }

    /// The journal has come to this line.
    pub fn tell(&self, seq: u64) {
        // SYNC(news): the number alone; lines are asked for at the desk, whose queue orders them.
        self.seq.store(seq, Ordering::Relaxed);
        if self.listeners.load(Ordering::Relaxed) > 0 {
            self.grown.notify_one();
        }
    }

    /// The number of the last line.
    pub fn seq(&self) -> u64 {
        self.seq.load(Ordering::Relaxed)
    }

    /// One more listens, or one less. Who asks at the desk after that hears of all that comes
    /// after the answer.
    pub fn listen(&self, on: bool) {
        if on {
            self.listeners.fetch_add(1, Ordering::Relaxed);
        } else {
            self.listeners.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Waits until the journal has grown since the last wait has ended. One waits at a time.
    pub async fn wait(&self) {
        self.grown.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(uid: u32, served_ns: &Arc<AtomicU64>) -> (Put, oneshot::Receiver<Answer>) {
        let (answer, hears) = oneshot::channel();
        let put = Put {
            peer: Peer::here(1, uid),
            request: Request::List,
            answer,
            served_ns: Arc::clone(served_ns),
        };
        (put, hears)
    }

    #[test]
    fn who_has_taken_least_is_first_and_is_answered_once() {
        let (mut desk, counter) = Desk::new().expect("a desk");
        let [greedy, modest] = [0, 0].map(|_| Arc::new(AtomicU64::new(0)));
        let mut number = 7;
        let (first, mut first_hears) = put(1, &greedy);
        let (second, _second_hears) = put(2, &modest);
        for put in [first, second] {
            counter.put(put).expect("taken");
        }
        desk.receive(&mut number, 5);
        assert_eq!(number, 9);
        let next = desk.first(|uid| if uid == 1 { 100 } else { 0 });
        let next = next.expect("one");
        assert_eq!(next, 8);
        desk.take(next).expect("the second");
        desk.spent(next, 50);
        desk.spent(next, 50);
        assert_eq!(modest.load(Ordering::Relaxed), 50, "once");
        let next = desk.first(|_| 0).expect("the first");
        desk.take(next).expect("the first");
        let answer = || Ok(Reply::Noted);
        desk.answer(next, answer());
        assert_eq!(first_hears.try_recv(), Ok(answer()));
        desk.answer(next, answer());
        assert!(!desk.is_empty(), "the second waits for its answer");
    }

    #[test]
    fn what_nobody_waits_for_is_not_begun_and_the_queue_is_bounded() {
        let (mut desk, counter) = Desk::new().expect("a desk");
        let served = Arc::new(AtomicU64::new(0));
        let mut hears = Vec::new();
        for _ in 0..QUEUE {
            let (put, hear) = put(1, &served);
            hears.push(hear);
            counter.put(put).expect("taken");
        }
        let no_more = counter.put(put(1, &served).0);
        assert_eq!(no_more, Err(NotTaken::TooMany));
        hears.clear();
        desk.receive(&mut 1, 0);
        assert!(!desk.has_turn() && desk.first(|_| 0).is_none());
        assert!(desk.is_empty());
        // Nor is one waited for that was begun.
        let (put, hear) = put(1, &served);
        counter.put(put).expect("taken");
        desk.receive(&mut 7, 0);
        desk.take(7).expect("the request");
        assert!(desk.awaits(7) && !desk.is_empty());
        drop(hear);
        assert!(!desk.awaits(7) && desk.is_empty());
        counter.note_open(true);
        assert!(!desk.is_empty(), "somebody is connected");
        counter.note_open(false);
        assert!(desk.is_empty(), "nobody is");
    }

    #[test]
    fn a_desk_that_is_closed_leaves_nobody_waiting() {
        let (mut desk, counter) = Desk::new().expect("a desk");
        let served = Arc::new(AtomicU64::new(0));
        let mut all: Vec<_> = (0..3).map(|_| put(1, &served)).collect();
        let mut hears = Vec::new();
        for (put, hear) in all.drain(..2) {
            counter.put(put).expect("taken");
            desk.receive(&mut 1, 0);
            hears.push(hear);
        }
        let next = desk.first(|_| 0).expect("one");
        desk.take(next).expect("the first");
        let (queued, hear) = all.remove(0);
        counter.put(queued).expect("taken");
        hears.push(hear);
        desk.close();
        for mut hear in hears {
            assert_eq!(hear.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        }
        let afterwards = counter.put(put(1, &served).0);
        assert_eq!(afterwards, Err(NotTaken::Closed));
    }

    #[test]
    fn news_come_to_those_who_listen() {
        use std::pin::pin;
        use std::task::{Context, Waker};
        let news = News::new();
        let has_come = || {
            let mut waits = pin!(news.wait());
            let mut nobody = Context::from_waker(Waker::noop());
            waits.as_mut().poll(&mut nobody).is_ready()
        };
        news.tell(3);
        assert!(!has_come() && news.seq() == 3);
        news.listen(true);
        news.tell(4);
        assert!(has_come() && !has_come());
        news.listen(false);
        news.tell(5);
        assert!(!has_come() && news.seq() == 5);
    }
}
