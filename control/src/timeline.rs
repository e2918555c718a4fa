//! What a device did lately, span by span: the material of `sublet trace`.
//!
//! Times are the arbiter's `CLOCK_MONOTONIC` in nanoseconds. The arbiter keeps the last spans of
//! each device in a ring of fixed size; a reader that comes too seldom sees by the numbers how many
//! it has missed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Spans in one answer at most.
pub const TIMELINE_MOST: u32 = 512;

/// What a span is.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Serialize,
    Deserialize,
    ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// A job's gate was open. `count`: the length that it was granted, in microseconds.
    Slice,
    /// Its gate was closed, and work of it was left on the device.
    Drain,
    /// It waited at its closed gate.
    Wait,
    /// Its memory moved to the host. `count`: bytes copied.
    Evict,
    /// Its memory came back. `count`: bytes copied.
    Restore,
    /// Its memory was fitted to its limit. `count`: bytes copied.
    Fit,
    /// From one boundary of its iterations to another. `count`: iterations.
    Iterations,
    /// A moment at which the device began to run its jobs all at once (`count` 1), in slices (0) or
    /// as the mode lend does (2).
    Mode,
    /// A kind of a newer arbiter.
    #[default]
    #[serde(other)]
    Unknown,
}

impl SpanKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Slice => "slice",
            Self::Drain => "drain",
            Self::Wait => "wait",
            Self::Evict => "evict",
            Self::Restore => "restore",
            Self::Fit => "fit",
            Self::Iterations => "iterations",
            Self::Mode => "mode",
            Self::Unknown => "unknown",
        }
    }
}

/// One span that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct TimelineSpan {
    pub kind: SpanKind,
    /// 0: of no job.
    pub job_id: u64,
    pub start_ns: u64,
    pub end_ns: u64,
    /// Device time that the job was charged since its last slice or drain that is in a span.
    pub device_ns: u64,
    pub count: u64,
}

/// A job on a device, and what it is in the middle of.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct TimelineJob {
    pub id: u64,
    pub name: String,
    /// Device time that it was charged, ever.
    pub device_ns: u64,
    /// Of that, what is in no span yet.
    pub pending_ns: u64,
    /// Spans that have not ended: kind, and since when.
    pub open: Vec<(SpanKind, u64)>,
}

/// A part of a device's timeline.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Timeline {
    pub device: u32,
    /// Which ring this is: another one has other numbers. An arbiter that starts has new ones.
    pub ring: u64,
    /// Number of the oldest span that is kept, and of the newest; spans are numbered from 1.
    pub first_seq: u64,
    pub last_seq: u64,
    /// Number of the first of `spans`; they follow one another.
    pub from_seq: u64,
    pub spans: Vec<TimelineSpan>,
    /// Those on the device now, and those in `spans` whose name is still known.
    pub jobs: Vec<TimelineJob>,
    /// When this was answered.
    pub now_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_of_a_newer_arbiter_is_read() {
        let newer = r#"{"device":1,"spans":[{"kind":"nap","job_id":3,"mood":1}],"jobs":[{"id":3,"open":[["slice",7]]}]}"#;
        let timeline: Timeline = serde_json::from_str(newer).unwrap();
        assert_eq!(timeline.spans[0].kind, SpanKind::Unknown);
        assert_eq!(timeline.jobs[0].open, [(SpanKind::Slice, 7)]);
        let word = serde_json::to_value(SpanKind::Iterations).unwrap();
        assert_eq!(word, SpanKind::Iterations.as_str());
    }

    #[test]
    fn the_longest_answer_is_taken() {
        let span = TimelineSpan {
            kind: SpanKind::Iterations,
            job_id: u64::MAX,
            start_ns: u64::MAX,
            end_ns: u64::MAX,
            device_ns: u64::MAX,
            count: u64::MAX,
        };
        let timeline = Timeline {
            spans: vec![span; TIMELINE_MOST as usize],
            ..Timeline::default()
        };
        let bytes = serde_json::to_vec(&timeline).unwrap().len();
        assert!(bytes < crate::http::BODY_BYTES / 16, "{bytes}");
    }
}
