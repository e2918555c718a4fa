//! What is known of how a job uses its devices: the material of policies and of cluster schedulers.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A job's profile. Figures are over the last half minute unless said otherwise; `None` is "not
/// known (yet)".
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Profile {
    /// How the boundaries between iterations are known.
    pub found: IterationSource,
    /// Whether the job repeats itself; `None`: too early to tell.
    pub periodic: Option<bool>,
    /// How sure that is, between 0 and 1: 1 for hints and fixed counts, for detected iterations as
    /// `docs/reference/profile.md` says.
    pub confidence: f64,
    /// Iterations counted so far, since their boundaries were known.
    pub iterations: u64,
    /// Mean time of an iteration, what is between them included, in nanoseconds.
    pub iteration_ns: Option<u64>,
    /// Middle one, in nanoseconds.
    pub iteration_p50_ns: Option<u64>,
    /// Standard deviation of the time of an iteration over its mean; `None` also if iterations are
    /// too short to be timed one by one.
    pub iteration_cov: Option<f64>,
    /// Submissions per iteration, all threads of the process that was looked at.
    pub launches_per_iteration: Option<f64>,
    /// Length of the repeated sequence, of the thread in which it was found. `None` for hints.
    pub period_launches: Option<u64>,
    /// Device time charged per iteration, in nanoseconds.
    pub device_ns_per_iteration: Option<u64>,
    /// Part of the time that was charged as device time, all devices together.
    pub busy_fraction: f64,
    /// Bytes copied between host and device by calls that say their direction, since the job
    /// started.
    pub copied_bytes: u64,
    /// Such bytes per second.
    pub copy_bytes_per_s: f64,
    /// Such bytes per iteration.
    pub copied_bytes_per_iteration: Option<u64>,
    /// Part of the time that these copies took, by the fastest copy that was seen; `None`: none was
    /// large enough.
    pub copy_fraction: Option<f64>,
    /// Device memory that survives the boundaries, in bytes.
    pub persistent_bytes: Option<u64>,
    /// Device memory beyond that at the most within an iteration, in bytes.
    pub ephemeral_bytes: Option<u64>,
    /// Mean time of an iteration without other jobs on the device, in nanoseconds.
    pub solo_iteration_ns: Option<u64>,
    /// Where that is from.
    pub solo_source: SoloSource,
    /// Time of an iteration over the last seconds against that.
    pub slowdown: Option<f64>,
}

/// How iterations are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum IterationSource {
    /// They are not.
    #[default]
    None,
    /// The sequence of launches repeats itself.
    Detected,
    /// The program says so.
    Hinted,
    /// The operator has given the number of launches.
    Fixed,
    /// A source of a newer arbiter.
    #[serde(other)]
    Unknown,
}

impl IterationSource {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Detected => "detected",
            Self::Hinted => "hinted",
            Self::Fixed => "fixed",
            Self::Unknown => "unknown",
        }
    }
}

/// Where the time of an iteration without others is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SoloSource {
    /// It is not known.
    #[default]
    None,
    /// Measured in this run, while no other job wanted the device.
    Learnt,
    /// Measured in an earlier run of a job of the same name with as many launches per iteration.
    Recorded,
    /// Set by an operator.
    Set,
    /// A source of a newer arbiter.
    #[serde(other)]
    Unknown,
}

impl SoloSource {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Learnt => "learnt",
            Self::Recorded => "recorded",
            Self::Set => "set",
            Self::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_of_a_newer_arbiter_is_read() {
        let newer = r#"{"found":"divined","solo_source":"dreamt","confidence":0.5,"mood":1}"#;
        let profile: Profile = serde_json::from_str(newer).unwrap();
        assert_eq!(profile.found, IterationSource::Unknown);
        assert_eq!(profile.solo_source, SoloSource::Unknown);
        assert_eq!((profile.confidence, profile.slowdown), (0.5, None));
    }
}
