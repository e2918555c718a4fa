//! Events on pods, for those who describe them (`core/v1`).
//!
//! They are written by a thread of their own: an event that fails, or that takes its time, keeps
//! nobody waiting.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use serde_json::{Value, json};

use crate::api::{Api, ApiError};

/// Who reports.
const COMPONENT: &str = "sublet-extender";
/// Bytes of a message that an API server takes.
const MESSAGE_BYTES: usize = 1024;
/// Characters of the pod in the event's name, which may have 253 with the rest.
const NAME_CHARS: usize = 200;

/// Events that wait to be written; what comes beyond is left out.
const WAITING: usize = 256;

/// How much it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Normal,
    Warning,
}

/// An event on a pod.
#[derive(Debug)]
pub struct Event {
    pub pod: String,
    pub namespace: String,
    pub uid: String,
    pub kind: Kind,
    /// One word in upper camel case.
    pub reason: &'static str,
    pub message: String,
}

/// Where events are queued until they are written.
#[derive(Debug)]
pub struct Events(SyncSender<Event>);

impl Events {
    /// Events for this API server. The thread that writes them ends with this.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(api: Api) -> std::io::Result<Self> {
        let (sender, receiver) = sync_channel(WAITING);
        let write = move || write(&api, &receiver);
        thread::Builder::new().name("events".into()).spawn(write)?;
        Ok(Self(sender))
    }

    /// Queues an event. It is written when those before it are.
    pub fn queue(&self, event: Event) {
        if self.0.try_send(event).is_err() {
            crate::say!("{WAITING} events wait for the API server: one more is left out");
        }
    }
}

fn write(api: &Api, events: &Receiver<Event>) {
    for event in events {
        if let Err(error) = event.post(api) {
            crate::say!("{}/{}: {error}", event.namespace, event.pod);
        }
    }
}

impl Event {
    /// # Errors
    /// [`ApiError`]
    fn post(&self, api: &Api) -> Result<(), ApiError> {
        let object = self.object(jiff::Timestamp::now());
        let path = format!("/api/v1/namespaces/{}/events", self.namespace);
        api.post(&path, &object).map(drop)
    }

    fn object(&self, now: jiff::Timestamp) -> Value {
        let pod: String = self.pod.chars().take(NAME_CHARS).collect();
        let name = format!("{pod}.{:x}", now.as_nanosecond());
        let mut end = MESSAGE_BYTES.min(self.message.len());
        while !self.message.is_char_boundary(end) {
            end -= 1;
        }
        let message = self.message.get(..end).unwrap_or_default();
        let at = format!("{now:.0}");
        json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": self.namespace},
            "involvedObject": {
                "apiVersion": "v1", "kind": "Pod",
                "name": self.pod, "namespace": self.namespace, "uid": self.uid,
            },
            "type": match self.kind {
                Kind::Normal => "Normal",
                Kind::Warning => "Warning",
            },
            "reason": self.reason,
            "message": message,
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": COMPONENT,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_stays_within_what_a_server_takes() {
        let event = Event {
            pod: "p".repeat(253),
            namespace: "d".into(),
            uid: "1".into(),
            kind: Kind::Warning,
            reason: "PlacedByFit",
            message: format!("x{}", "\u{e9}".repeat(2000)),
        };
        let now: jiff::Timestamp = "2026-01-02T03:04:05.678Z".parse().unwrap();
        let object = event.object(now);
        let length = |of: &Value| of.as_str().unwrap().len();
        assert!(length(&object["metadata"]["name"]) <= 253);
        assert!((1000..=MESSAGE_BYTES).contains(&length(&object["message"])));
        assert_eq!(object["firstTimestamp"], "2026-01-02T03:04:05Z");
        assert_eq!(object["type"], "Warning");
        assert_eq!(object["involvedObject"]["uid"], "1");
    }
}
