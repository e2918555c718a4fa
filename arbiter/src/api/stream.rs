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
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::response::sse::{Event as Sent, Sse};
use axum::response::{IntoResponse, Response};
use control::{Event, Reply, Request};
use futures_util::future::select;
use futures_util::stream::unfold;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::Office;
use super::connections::Holder;
use super::conversation::Caller;
use super::problem::Problem;

/// Over the Unix socket: of a user, and of all.
pub const LOCAL: Limits = Limits {
    of_one: 16,
    all: 64,
    whose: ["of yours", "of all users"],
};
/// Over TCP: of an address, and of all. They are half of its connections: followers never give way,
/// and others are to be answered.
pub const REMOTE: Limits = Limits {
    of_one: 16,
    all: 32,
    whose: ["of your address", "over TCP"],
};
/// Lines asked for at a time.
const LINES: u32 = 256;
/// TIMEOUT: for people, at once; a journal that grows all the time is asked for 20 times a second.
const PACE: Duration = Duration::from_millis(50);
/// TIMEOUT: shorter than any proxy's patience.
const SIGN: Duration = Duration::from_secs(15);
/// When a follower that was cut off comes back.
const AGAIN: Duration = Duration::from_secs(1);

/// How many there may be.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    of_one: usize,
    all: usize,
    whose: [&'static str; 2],
}

/// Who follows over one of the sockets. Each has places of its own: other hosts cannot take those
/// of this one's users.
#[derive(Debug)]
pub struct Followers {
    of: Mutex<BTreeMap<Holder, usize>>,
    limits: Limits,
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
    holder: Holder,
    office: Arc<Office>,
}

impl Followers {
    /// Nobody follows.
    pub fn new(limits: Limits) -> Self {
        Self {
            of: Mutex::default(),
            limits,
        }
    }

    fn add(&self, holder: Holder) -> Result<(), Problem> {
        let limits = self.limits;
        let mut of = self.of.lock();
        let own = of.get(&holder).copied().unwrap_or(0);
        let counts = [(own, limits.of_one), (of.values().sum(), limits.all)];
        for ((count, most), whose) in counts.into_iter().zip(limits.whose) {
            if count >= most {
                let text = format!("{count} connections {whose} follow the journal already");
                return Err(Problem::too_many(text).with_hint("end one of them"));
            }
        }
        of.insert(holder, own + 1);
        Ok(())
    }

    fn remove(&self, holder: Holder) {
        let mut of = self.of.lock();
        if let Some(count) = of.get_mut(&holder) {
            *count -= 1;
            if *count == 0 {
                of.remove(&holder);
            }
        }
    }
}

impl Place {
    fn take(holder: Holder, office: &Arc<Office>) -> Result<Self, Problem> {
        office.followers.add(holder)?;
        office.news.listen(true);
        let office = Arc::clone(office);
        Ok(Self { holder, office })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.office.followers.remove(self.holder);
        self.office.news.listen(false);
    }
}

/// Passes the loop's news on to all followers, for ever.
pub async fn pass_on(office: Arc<Office>) {
    loop {
        office.news.wait().await;
        office.grown.send_replace(office.news.seq());
    }
}

/// The answer to who wants to follow.
///
/// # Errors
/// There are too many.
pub fn follow(caller: Caller, office: &Arc<Office>, wanted: Wanted) -> Result<Response, Problem> {
    let place = Place::take(caller.holder(), office)?;
    let last = office.news.seq();
    let start = wanted.since_seq.unwrap_or(last);
    // Numbers begin anew with a new journal, as after a reboot.
    let restarted = start > last;
    let start = if restarted { 0 } else { start };
    caller.follow();
    let follower = Follower {
        grown: office.grown.subscribe(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_and_all_of_them_have_so_many_places_beside_those_of_this_host() {
        let [local, remote] = [LOCAL, REMOTE].map(Followers::new);
        let at = |host| Holder::at(std::net::IpAddr::from([10, 0, 0, host]));
        let filled = |followers: &Followers, holder| {
            (0..100)
                .take_while(|_| followers.add(holder).is_ok())
                .count()
        };
        assert_eq!([1, 2, 3].map(|host| filled(&remote, at(host))), [16, 16, 0]);
        let error = format!("{:?}", remote.add(at(3)));
        assert!(error.contains("32 connections over TCP"), "{error}");
        assert_eq!(filled(&local, Holder::of_user(7)), 16);
        let error = format!("{:?}", local.add(Holder::of_user(7)));
        assert!(error.contains("16 connections of yours"), "{error}");
        remote.remove(at(1));
        assert_eq!(filled(&remote, at(3)), 1);
    }
}
