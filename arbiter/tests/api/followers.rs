//! Following the journal by server-sent events.

use serde_json::Value;
use testbed::http::Http;

use super::connect;
use crate::bench::{Daemon, named, until};

/// One event as it is sent.
#[derive(Debug, Default, PartialEq)]
struct Sent {
    id: Option<u64>,
    kind: String,
    data: Value,
}

/// A connection on which the journal is followed.
struct Follower(Http);

impl Follower {
    fn start(daemon: &Daemon, query: &str, last: Option<u64>) -> Self {
        let mut http = connect(daemon);
        let last = last.map_or_else(String::new, |id| format!("last-event-id: {id}\r\n"));
        let ask = format!("GET /v1/events/stream{query} HTTP/1.1\r\nhost: x\r\n{last}\r\n");
        http.send(ask.as_bytes()).expect("sent");
        let head = http.head().expect("answered");
        assert_eq!(head.status, 200, "{head:?}");
        assert_eq!(head.field("content-type"), Some("text/event-stream"));
        Self(http)
    }

    /// The next event; `None`: there is none any more.
    fn next(&mut self) -> Option<Sent> {
        let mut sent = Sent::default();
        loop {
            // Chunks begin with their length, which is no field of an event.
            let line = self.0.line().ok()?;
            match line.split_once(": ").or_else(|| line.split_once(':')) {
                Some(("id", id)) => sent.id = id.parse().ok(),
                Some(("event", kind)) => sent.kind = kind.to_owned(),
                Some(("data", data)) => sent.data = serde_json::from_str(data).expect("JSON"),
                _ if line.is_empty() && !sent.kind.is_empty() => return Some(sent),
                _ if line == "0" => return None,
                _ => {}
            }
        }
    }

    fn next_of(&mut self, kind: &str) -> Sent {
        std::iter::from_fn(|| self.next())
            .find(|sent| sent.kind == kind)
            .unwrap_or_else(|| panic!("no `{kind}`"))
    }
}

fn starts(daemon: &Daemon, name: &str) {
    let mut job = named(name, 0.0);
    job.settings.share = None;
    daemon.operator().register(job).expect("registered");
}

#[test]
fn who_follows_hears_of_each_line_once_and_goes_on_where_it_was_cut_off() {
    let daemon = Daemon::start();
    let mut follower = Follower::start(&daemon, "", None);
    starts(&daemon, "a");
    let first = follower.next_of("registered");
    assert_eq!(first.data["job"], "a");
    assert_eq!(first.id, first.data["seq"].as_u64());
    drop(follower);
    starts(&daemon, "b");
    starts(&daemon, "c");
    let mut follower = Follower::start(&daemon, "", first.id);
    let second = follower.next().expect("an event");
    assert_eq!(second.data["job"], "b");
    assert_eq!(second.id, first.id.map(|id| id + 1));
    let third = follower.next().expect("an event");
    assert_eq!(third.data["job"], "c");
    // The whole journal, and a part of it.
    let mut all = Follower::start(&daemon, "?since_seq=0", None);
    assert_eq!(all.next().expect("an event").kind, "start");
    let mut of_c = Follower::start(&daemon, "?since_seq=0&job=c&kind=registered", None);
    assert_eq!(of_c.next(), Some(third));
    // `Last-Event-ID` is stronger.
    let mut again = Follower::start(&daemon, "?since_seq=0", first.id);
    assert_eq!(again.next(), Some(second));
}

#[test]
fn lines_that_are_not_kept_any_more_are_counted() {
    let daemon = Daemon::start();
    starts(&daemon, "a");
    let first = Follower::start(&daemon, "?since_seq=0", None)
        .next()
        .expect("one");
    let mut operator = daemon.operator();
    // The arbiter keeps a thousand.
    for number in 0..1100 {
        let change = control::Change {
            paused: Some(number % 2 == 0),
            ..control::Change::default()
        };
        operator.set("a", change).expect("changed");
    }
    let mut follower = Follower::start(&daemon, "", first.id);
    let missed = follower.next().expect("an event");
    assert_eq!(missed.kind, "missed");
    let count = missed.data["missed"].as_u64().expect("a number");
    let next = follower.next().expect("an event");
    assert_eq!(next.id, first.id.map(|id| id + count + 1));
    let last = std::iter::from_fn(|| follower.next())
        .nth(998)
        .expect("all that are kept");
    assert_eq!(last.id, next.id.map(|id| id + 999));
}

#[test]
fn a_number_of_another_journal_begins_with_the_first_line_of_this_one() {
    let daemon = Daemon::start();
    let mut follower = Follower::start(&daemon, "", Some(1_000_000));
    let missed = follower.next().expect("an event");
    assert_eq!(missed.kind, "missed");
    let said = serde_json::json!({ "missed": 0, "restarted": true });
    assert_eq!(missed.data, said);
    let first = follower.next().expect("an event");
    assert_eq!((first.kind.as_str(), first.id), ("start", Some(1)));
    starts(&daemon, "a");
    assert_eq!(follower.next_of("registered").data["job"], "a");
}

#[test]
fn a_user_follows_so_many_times_and_followers_end_with_the_arbiter() {
    let daemon = Daemon::start();
    let mut followers: Vec<Follower> = (0..16)
        .map(|_| Follower::start(&daemon, "", None))
        .collect();
    let mut http = connect(&daemon);
    let refused = http
        .ask("GET", "/v1/events/stream", None)
        .expect("answered");
    assert_eq!(refused.status, 429, "{refused:?}");
    assert!(refused.body.contains("16 connections"), "{refused:?}");
    followers.pop();
    let mut newcomer = until("there is space again", || {
        let mut http = connect(&daemon);
        http.send(b"GET /v1/events/stream HTTP/1.1\r\nhost: x\r\n\r\n")
            .ok()?;
        (http.head().ok()?.status == 200).then_some(Follower(http))
    });
    starts(&daemon, "a");
    for follower in followers.iter_mut().chain([&mut newcomer]) {
        assert_eq!(follower.next_of("registered").data["job"], "a");
    }
    let mut http = connect(&daemon);
    let ended = http.ask("POST", "/v1/shutdown", None).expect("answered");
    assert_eq!((ended.status, ended.body.as_str()), (202, "{}"));
    for mut follower in followers {
        while follower.next().is_some() {}
    }
}
