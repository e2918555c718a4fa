//! Where a job's memory is: requests about it, and reports.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where the memory of a job, or of one of its processes, is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResidenceState {
    /// All of it on the device.
    #[default]
    Resident,
    /// On its way to the host.
    Evicting,
    /// What can be evicted is in host memory.
    Evicted,
    /// On its way back.
    Restoring,
    /// Part of it in host memory, usable there.
    Partly,
    /// A move could neither be finished nor undone: the job's submissions fail.
    Failed,
    /// A state of a newer arbiter.
    #[serde(other)]
    Unknown,
}

impl ResidenceState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Resident => "resident",
            Self::Evicting => "evicting",
            Self::Evicted => "evicted",
            Self::Restoring => "restoring",
            Self::Partly => "partly",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// Where an evictable job's memory on a device is, or on all of them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Residence {
    pub state: ResidenceState,
    /// What could be evicted, on the device or not.
    pub evictable_bytes: u64,
    /// Of that, what is on the device.
    pub resident_bytes: u64,
    /// What stays on the device whatever happens: pools, arrays, shared memory.
    pub fixed_bytes: u64,
    /// The kinds of memory that stay, as its library reports: `pools`, `graph memory`, `arrays`,
    /// `managed memory`, `plain allocations`, `shared memory`, `unmapped handles`.
    pub staying: Vec<String>,
    /// Host memory held for it, what is kept for the next time included.
    pub host_bytes: u64,
    /// Copied to the host, ever.
    pub moved_out_bytes: u64,
    /// Copied back, ever.
    pub moved_in_bytes: u64,
    pub evictions: u64,
    pub restores: u64,
    /// How long its moves took in all.
    pub moving_ns: u64,
    /// Parked until there is space for it without an eviction.
    pub parked: bool,
    /// Why it is where it is, or why it cannot be moved; empty: there is nothing to say.
    pub reason: String,
}

/// How much of a device's time goes into moving memory.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Pressure {
    pub level: PressureLevel,
    /// Part of the last minute or so in which memory was moved between turns.
    pub switching_fraction: f64,
    /// Turns that began with a switch.
    pub switches: u64,
    pub switching_ns: u64,
    /// How many times longer than configured jobs stay on the device, because of the pressure.
    pub stretch: u32,
    /// Fastest rate seen, device to host; 0: not measured.
    pub out_bytes_per_s: u64,
    /// The same, host to device.
    pub in_bytes_per_s: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PressureLevel {
    /// Moving takes no more than it is meant to.
    #[default]
    Calm,
    /// It takes more: jobs stay longer.
    Pressed,
    /// That was not enough: one job is parked.
    Thrashing,
    /// A level of a newer arbiter.
    #[serde(other)]
    Unknown,
}

impl PressureLevel {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Calm => "calm",
            Self::Pressed => "pressed",
            Self::Thrashing => "thrashing",
            Self::Unknown => "unknown",
        }
    }
}

/// Jobs to be moved, all at once: evictions make space for restores.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Moves {
    /// These leave the device, and stay away and paused until they are restored.
    pub evict: Vec<String>,
    /// These come back.
    pub restore: Vec<String>,
    /// These will be used soon: what `evict_after` has evicted comes back, and what is on its
    /// devices stays as if it had just been used. Answered at once, by itself, with where each of
    /// them is. A job that was evicted by hand stays away.
    pub wake: Vec<String>,
    /// How long it may take; 0: as long as the arbiter thinks right.
    pub deadline_ms: u64,
}

/// What came of [`Moves`].
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Moved {
    /// In the order in which they were asked for, evictions first.
    pub jobs: Vec<JobMoved>,
    /// From the request to the last answer.
    pub elapsed_ns: u64,
    /// Of every device concerned.
    pub simulated: bool,
}

impl Moved {
    /// Whether everything went where it was to go.
    pub fn is_done(&self) -> bool {
        self.jobs.iter().all(|job| job.outcome == MoveOutcome::Done)
    }
}

/// What came of one job.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct JobMoved {
    pub job: String,
    pub evicted: bool,
    pub outcome: MoveOutcome,
    /// Why not; empty where it was done.
    pub reason: String,
    /// What can be evicted of it.
    pub evictable_bytes: u64,
    /// Copied over the link for it. Less than what it has where parts were unchanged.
    pub copied_bytes: u64,
    /// From the request to its last answer.
    pub elapsed_ns: u64,
    /// Of that, until its work on the device had ended.
    pub drain_ns: u64,
    /// From the order to the last answer.
    pub moving_ns: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MoveOutcome {
    Done,
    /// Nothing has moved.
    Refused,
    /// It comes in its turn, when there is space.
    Waiting,
    /// It took too long; it goes on.
    TimedOut,
    /// It failed on the way.
    Failed,
    /// An outcome of a newer arbiter.
    #[default]
    #[serde(other)]
    Unknown,
}

impl MoveOutcome {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused => "refused",
            Self::Waiting => "waiting",
            Self::TimedOut => "timed out",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_newer_arbiters_are_read() {
        let residence: Residence =
            serde_json::from_str(r#"{"state":"frozen","evictable_bytes":3,"mood":1}"#).unwrap();
        assert_eq!(residence.state, ResidenceState::Unknown);
        assert_eq!(residence.evictable_bytes, 3);
        let pressure: Pressure = serde_json::from_str(r#"{"level":"dire"}"#).unwrap();
        assert_eq!(pressure.level, PressureLevel::Unknown);
        let moved: JobMoved = serde_json::from_str(r#"{"outcome":"halfway"}"#).unwrap();
        assert_eq!(moved.outcome, MoveOutcome::Unknown);
    }

    #[test]
    fn all_is_done_only_where_every_job_is() {
        let job = |outcome| JobMoved {
            outcome,
            ..JobMoved::default()
        };
        let moved = |outcomes: &[MoveOutcome]| Moved {
            jobs: outcomes.iter().copied().map(job).collect(),
            ..Moved::default()
        };
        assert!(moved(&[MoveOutcome::Done, MoveOutcome::Done]).is_done());
        assert!(!moved(&[MoveOutcome::Done, MoveOutcome::TimedOut]).is_done());
    }
}
