//! The journal as server-sent events.
//!
//! A follower asks at the desk like everybody else, in its user's turn, whenever the journal has
//! grown; what it is given waits here until it has read it, 256 lines at most. Who reads nothing
//! loses its connection. A number that a follower has seen goes on where that one ended
//! (`Last-Event-ID`), over restarts of the arbiter too; lines that are not kept any more are
//! counted in an event `missed`. A number above the last one is of another journal: this one is
//! sent from its first line, after a `missed` that says so.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::response::sse::{Event as Sent, Sse};
use axum::response::{IntoResponse, Response};
use control::{Event, Reply, Request};
use futures_util::future::select;
use futures_util::stream::unfold;
use parking_lot::Mutex;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::Office;
use super::conversation::Caller;
use super::problem::Problem;
use crate::bell::Bell;

/// Followers of a user, and of all.
const OF_USER: usize = 16;
const ALL: usize = 64;
/// Lines asked for at a time.
const LINES: u32 = 256;
/// TIMEOUT: for people, at once; a journal that grows all the time is asked for 20 times a second.
const PACE: Duration = Duration::from_millis(50);
/// TIMEOUT: shorter than any proxy's patience.
const SIGN: Duration = Duration::from_secs(15);
/// When a follower that was cut off comes back.
const AGAIN: Duration = Duration::from_secs(1);

/// Who follows, and how far there is something to follow.
#[derive(Debug)]
pub struct Streams {
    of_user: Mutex<BTreeMap<u32, usize>>,
    grown: watch::Sender<u64>,
}

/// What of the journal is followed.
#[derive(Debug, Default)]
pub struct Wanted {
    /// Lines above this number; `None`: those that come from now on.
    pub since_seq: Option<u64>,
    /// Of the job of this name.
    pub job: Option<String>,
    /// Of this kind.
    pub kind: Option<String>,
}

/// A follower's place; given back when it is dropped.
struct Place {
    uid: u32,
    office: Arc<Office>,
}

impl Streams {
    /// Nobody follows.
    pub fn new() -> Self {
        Self {
            of_user: Mutex::default(),
            grown: watch::channel(0).0,
        }
    }
}

impl Place {
    fn take(uid: u32, office: &Arc<Office>) -> Result<Self, Problem> {
        let mut of_user = office.streams.of_user.lock();
        let (own, all) = (of_user.get(&uid).copied(), of_user.values().sum::<usize>());
        let own = own.unwrap_or(0);
        for (count, most, whose) in [(own, OF_USER, "of yours"), (all, ALL, "of all users")] {
            if count >= most {
                let text = format!("{count} connections {whose} follow the journal already");
                return Err(Problem::too_many(text).with_hint("end one of them"));
            }
        }
        of_user.insert(uid, own + 1);
        office.news.listen(true);
        let office = Arc::clone(office);
        Ok(Self { uid, office })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut of_user = self.office.streams.of_user.lock();
        if let Some(count) = of_user.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                of_user.remove(&self.uid);
            }
        }
        self.office.news.listen(false);
    }
}

struct Ring(Bell);

impl AsRawFd for Ring {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Passes the loop's news on to all followers, for ever.
pub async fn pass_on(office: Arc<Office>) {
    let bell = office.news.bell().clone();
    // SAFETY: the bell's descriptor, which the ring holds, and always the same one.
    let ring = unsafe { AsyncFd::register_with_interest(Ring(bell), Interest::READABLE) };
    let ring = match ring {
        Ok(ring) => ring,
        Err(error) => return tracing::error!("nobody can follow the journal: {error}"),
    };
    while let Ok(mut rang) = ring.readable().await {
        ring.get_ref().0.silence();
        rang.clear_ready();
        office.streams.grown.send_replace(office.news.seq());
    }
}

/// The answer to who wants to follow.
///
/// # Errors
/// There are too many.
pub fn follow(caller: Caller, office: &Arc<Office>, wanted: Wanted) -> Result<Response, Problem> {
    let place = Place::take(caller.peer().uid, office)?;
    let last = office.news.seq();
    let start = wanted.since_seq.unwrap_or(last);
    // Numbers begin anew with a new journal, as after a reboot.
    let restarted = start > last;
    let start = if restarted { 0 } else { start };
    caller.follow();
    let follower = Follower {
        grown: office.streams.grown.subscribe(),
        closing: office.closing.clone(),
        caller,
        since_seq: start,
        restarted,
        wanted,
        lines: VecDeque::from([Sent::default().retry(AGAIN).comment("sublet")]),
        asked: None,
        over: false,
        _place: place,
    };
    let frames = unfold(follower, |mut follower| async move {
        let frame = follower.next().await?;
        Some((Ok::<_, Infallible>(frame), follower))
    });
    Ok(Sse::new(frames).into_response())
}

struct Follower {
    caller: Caller,
    wanted: Wanted,
    since_seq: u64,
    /// The number that it has was of another journal, and it does not know yet.
    restarted: bool,
    lines: VecDeque<Sent>,
    grown: watch::Receiver<u64>,
    closing: watch::Receiver<bool>,
    asked: Option<Instant>,
    /// Nothing comes after the lines that are left.
    over: bool,
    _place: Place,
}

impl Follower {
    async fn next(&mut self) -> Option<Sent> {
        loop {
            if let Some(line) = self.lines.pop_front() {
                return Some(line);
            }
            if self.over || *self.closing.borrow() {
                return None;
            }
            if let Some(asked) = self.asked {
                sleep_until(asked + PACE).await;
            }
            self.asked = Some(Instant::now());
            self.grown.mark_unchanged();
            if self.ask().await {
                continue;
            }
            let grown = pin!(async { drop(self.grown.changed().await) });
            let closing = pin!(async { drop(self.closing.wait_for(|closing| *closing).await) });
            let news = select(grown, closing);
            if timeout(SIGN, news).await.is_err() {
                return Some(Sent::default().comment(""));
            }
        }
    }

    /// Takes what is new. True where there was something, wanted or not, or the end.
    async fn ask(&mut self) -> bool {
        let request = Request::Events {
            since_seq: self.since_seq,
            limit: LINES,
        };
        let events = match self.caller.ask(request).await {
            Ok(Reply::Events(events)) => events,
            Ok(_) => {
                self.end(&Problem::defect("the arbiter answered something else"));
                return true;
            }
            Err(problem) => {
                self.end(&problem);
                return true;
            }
        };
        for event in &events {
            let missed = event.seq.saturating_sub(self.since_seq + 1);
            let restarted = std::mem::take(&mut self.restarted);
            if restarted || (missed > 0 && self.since_seq > 0) {
                let mut data = serde_json::json!({ "missed": missed });
                if restarted {
                    data["restarted"] = true.into();
                }
                let line = Sent::default().event("missed").data(data.to_string());
                self.lines.push_back(line);
            }
            self.since_seq = event.seq;
            if self.wanted.takes(event)
                && let Ok(data) = serde_json::to_string(event)
            {
                let line = Sent::default().id(event.seq.to_string());
                // Line breaks are none in JSON; kinds are the arbiter's own words.
                self.lines.push_back(line.event(&event.kind).data(data));
            }
        }
        !events.is_empty()
    }

    fn end(&mut self, problem: &Problem) {
        let data = serde_json::to_string(problem).unwrap_or_default();
        self.lines
            .push_back(Sent::default().event("error").data(data));
        self.over = true;
    }
}

impl Wanted {
    fn takes(&self, event: &Event) -> bool {
        self.job.as_ref().is_none_or(|job| *job == event.job)
            && self.kind.as_ref().is_none_or(|kind| *kind == event.kind)
    }
}
