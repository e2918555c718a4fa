//! Spans as events of Chrome's trace event format: a process for each device, and for each job on
//! it four threads, on each of which nothing overlaps.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use control::SpanKind;

/// Processes of a trace have numbers that no process of Linux has, so that traces of programs can
/// be put beside it.
const DEVICES: u64 = 10_000_000;
/// The arbiter itself.
pub const ARBITER: Track = Track {
    process: DEVICES - 1,
    thread: 0,
};

/// Where an event is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Track {
    process: u64,
    thread: u64,
}

impl Track {
    /// Of what concerns the device as a whole.
    pub fn device(index: u32) -> Self {
        Self {
            process: DEVICES + u64::from(index),
            thread: 0,
        }
    }
}

/// Something that an event says besides.
#[derive(Debug, Clone, Copy)]
pub enum Said<'a> {
    Text(&'a str),
    Whole(u64),
    /// Nanoseconds, written as microseconds.
    Micros(u64),
    Flag(bool),
}

/// Which jobs have appeared on which device, and which tracks have their names.
#[derive(Debug, Default)]
pub struct Tracks {
    jobs: BTreeMap<(u32, u64), u64>,
    named: BTreeSet<Track>,
}

impl Tracks {
    /// Where a span of a job belongs.
    pub fn of_job(&mut self, device: u32, job: u64, kind: SpanKind) -> Track {
        let next = self.jobs.len() as u64 + 1;
        let number = *self.jobs.entry((device, job)).or_insert(next);
        let row = match kind {
            SpanKind::Slice | SpanKind::Drain => 0,
            SpanKind::Wait => 1,
            SpanKind::Evict | SpanKind::Restore | SpanKind::Fit => 2,
            SpanKind::Iterations | SpanKind::Mode | SpanKind::Unknown => 3,
        };
        Track {
            thread: 4 * number + row,
            ..Track::device(device)
        }
    }

    /// Events that name the track and its process, once.
    pub fn name(&mut self, track: Track, process: &str, thread: &str) -> Vec<String> {
        if !self.named.insert(track) {
            return Vec::new();
        }
        let mut events = Vec::new();
        let of_process = |one: &Track| one.process == track.process;
        if self.named.iter().filter(|one| of_process(one)).count() == 1 {
            events.push(meta(track, "process_name", process));
        }
        events.push(meta(track, "thread_name", thread));
        events
    }
}

/// What a job's track is called.
pub fn row_name(kind: SpanKind) -> &'static str {
    match kind {
        SpanKind::Slice | SpanKind::Drain => "device",
        SpanKind::Wait => "waits",
        SpanKind::Evict | SpanKind::Restore | SpanKind::Fit => "memory",
        SpanKind::Iterations | SpanKind::Mode | SpanKind::Unknown => "iterations",
    }
}

fn meta(track: Track, what: &str, name: &str) -> String {
    let Track { process, thread } = track;
    format!(
        "{{\"ph\":\"M\",\"name\":\"{what}\",\"ts\":0,\"dur\":0,\"pid\":{process},\"tid\":{thread},\"args\":{{\"name\":{}}}}}",
        quoted(name)
    )
}

/// From one time to another, in nanoseconds.
pub fn span(
    track: Track,
    name: &str,
    from_ns: u64,
    to_ns: u64,
    said: &[(&str, Said<'_>)],
) -> String {
    let mut text = begun("X", track, name, from_ns);
    let _ = write!(text, ",\"dur\":{}", micros(to_ns.saturating_sub(from_ns)));
    ended(text, said)
}

/// At one time.
pub fn moment(track: Track, name: &str, at_ns: u64, said: &[(&str, Said<'_>)]) -> String {
    let mut text = begun("i", track, name, at_ns);
    text += ",\"dur\":0,\"s\":\"p\"";
    ended(text, said)
}

fn begun(phase: &str, track: Track, name: &str, at_ns: u64) -> String {
    let Track { process, thread } = track;
    format!(
        "{{\"ph\":\"{phase}\",\"cat\":\"sublet\",\"name\":{},\"ts\":{},\"pid\":{process},\"tid\":{thread}",
        quoted(name),
        micros(at_ns)
    )
}

fn ended(mut text: String, said: &[(&str, Said<'_>)]) -> String {
    text += ",\"args\":{";
    for (number, (name, value)) in said.iter().enumerate() {
        if number > 0 {
            text.push(',');
        }
        let _ = write!(text, "{}:", quoted(name));
        let _ = match value {
            Said::Text(value) => write!(text, "{}", quoted(value)),
            Said::Whole(value) => write!(text, "{value}"),
            Said::Micros(value) => write!(text, "{}", micros(*value)),
            Said::Flag(value) => write!(text, "{value}"),
        };
    }
    text + "}}"
}

/// Nanoseconds as microseconds, with all their digits.
pub fn micros(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

/// As a string of JSON.
pub fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(event: &str) -> Value {
        serde_json::from_str(event).unwrap()
    }

    #[test]
    fn events_are_objects_whatever_is_in_their_names() {
        let track = Track::device(3);
        for name in ["train", "a\"b\\c\n", "\u{1b}[2J", "☃", ""] {
            let said = [("job", Said::Text(name)), ("open", Said::Flag(true))];
            let event = read(&span(track, name, 1_234_567, 2_000_001, &said));
            assert_eq!(event["name"], name);
            assert_eq!(event["args"], json!({ "job": name, "open": true }));
            assert_eq!(
                (event["ts"].as_f64(), event["dur"].as_f64()),
                (Some(1234.567), Some(765.434))
            );
            assert_eq!(event["pid"], 10_000_003);
        }
        let said = [("n", Said::Whole(u64::MAX)), ("us", Said::Micros(1))];
        let event = read(&moment(track, "lost", 5, &said));
        assert_eq!(event["ph"], "i");
        assert_eq!(event["args"], json!({ "n": u64::MAX, "us": 0.001 }));
        // A span that a clock has set back.
        assert_eq!(read(&span(track, "a", 9, 5, &[]))["dur"], 0.0);
    }

    #[test]
    fn each_job_has_its_own_tracks_on_each_device_and_they_are_named_once() {
        let mut tracks = Tracks::default();
        let all: BTreeSet<Track> = [(0, 1), (0, 2), (1, 1)]
            .iter()
            .flat_map(|(device, job)| {
                let kinds = [
                    SpanKind::Slice,
                    SpanKind::Wait,
                    SpanKind::Evict,
                    SpanKind::Iterations,
                ];
                kinds.map(|kind| tracks.of_job(*device, *job, kind))
            })
            .collect();
        assert_eq!(all.len(), 12);
        let slices = tracks.of_job(0, 1, SpanKind::Slice);
        assert_eq!(slices, tracks.of_job(0, 1, SpanKind::Drain));
        assert!(all.contains(&slices));
        let named = tracks.name(slices, "GPU 0", "train: device");
        let kinds: Vec<Value> = named.iter().map(|one| read(one)["name"].clone()).collect();
        assert_eq!(kinds, ["process_name", "thread_name"]);
        assert!(tracks.name(slices, "GPU 0", "train: device").is_empty());
        let waits = tracks.of_job(0, 1, SpanKind::Wait);
        assert_eq!(tracks.name(waits, "GPU 0", "train: waits").len(), 1);
    }
}
