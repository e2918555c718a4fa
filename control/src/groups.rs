//! Jobs that take turns by themselves: groups of them, one of which holds the turn.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The group of a job that names none.
pub const DEFAULT_GROUP: &str = "default";
/// How long a request to acquire waits that does not say, in milliseconds: a phase of training
/// takes minutes.
const PATIENCE_MS: u64 = 3_600_000;
/// And how long at the most: a week.
const MOST_MS: u64 = 7 * 24 * 3_600_000;

/// A job asks for the turn of its group, and waits for it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Acquire {
    /// Empty: the group that it is in, and where it is in none, `default`.
    pub group: String,
    /// How long it waits; 0: as long as the arbiter thinks right, an hour.
    pub timeout_ms: u64,
}

impl Acquire {
    /// How long it waits, in milliseconds.
    pub fn patience_ms(&self) -> u64 {
        match self.timeout_ms {
            0 => PATIENCE_MS,
            ms => ms.min(MOST_MS),
        }
    }
}

/// What came of a request to acquire.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Acquired {
    pub job: String,
    pub group: String,
    /// It has the turn; false: it waited as long as it was to, and does not wait any more.
    pub acquired: bool,
    /// From the request to the turn, with its memory back.
    pub waited_ms: u64,
    /// Its memory was away, and came back for this.
    pub restored: bool,
    /// It had the turn when it asked.
    pub held_before: bool,
    /// What it waited for in the end, where it has not acquired the turn.
    pub waits_for: String,
}

/// A job gives the turn of its group up.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct GiveUp {
    /// Empty: the group that it is in.
    pub group: String,
}

/// A job has given its turn up.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Yielded {
    pub job: String,
    pub group: String,
    /// Jobs that wait for the turn.
    pub waiting: u64,
    /// Nobody waits: its memory stays where it is until somebody asks for the turn or for memory.
    pub stays: bool,
}

/// A group of jobs that take turns.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct GroupStatus {
    pub name: String,
    /// Whose jobs they are: groups of two users are two groups, whatever their names.
    pub uid: u32,
    /// Login name of `uid`; empty where the host does not know it.
    pub user: String,
    pub state: GroupState,
    /// When it came into that state.
    pub since_unix_ms: u64,
    /// The job that has the turn, or is about to; `None`: nobody.
    pub holder: Option<String>,
    /// The job that had the turn last, which is the holder where there is one.
    pub last: Option<String>,
    /// Jobs that wait for the turn, first come first.
    pub waiting: Vec<String>,
    pub members: Vec<GroupMember>,
}

/// How far the turn of a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum GroupState {
    /// Nobody has the turn.
    #[default]
    Idle,
    /// Nobody has the turn, and the job that had it last is still on the device.
    Yielded,
    /// A job has it.
    Held,
    /// A job is about to have it: memory is on its way.
    Switching,
    /// A state of a newer arbiter.
    #[serde(other)]
    Unknown,
}

impl GroupState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Yielded => "yielded",
            Self::Held => "held",
            Self::Switching => "switching",
            Self::Unknown => "unknown",
        }
    }
}

/// A job of a group.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct GroupMember {
    pub job: String,
    pub turn: Turn,
    /// What of its memory can be evicted.
    pub evictable_bytes: u64,
    /// Of that, what is on its devices.
    pub resident_bytes: u64,
    /// A move of its memory could neither be finished nor undone.
    pub failed: bool,
}

/// What a job has to do with the turn of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Turn {
    /// It has it.
    Holds,
    /// It gets it as soon as memory has moved.
    Comes,
    /// It has asked for it.
    Waits,
    /// It has not asked: it may not use its devices.
    #[default]
    None,
    /// Something of a newer arbiter.
    #[serde(other)]
    Unknown,
}

impl Turn {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::Comes => "comes",
            Self::Waits => "waits",
            Self::None => "none",
            Self::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_newer_arbiters_are_read() {
        let group: GroupStatus =
            serde_json::from_str(r#"{"name":"a","state":"torn","mood":1}"#).unwrap();
        assert_eq!(group.state, GroupState::Unknown);
        let member: GroupMember = serde_json::from_str(r#"{"turn":"soon"}"#).unwrap();
        assert_eq!(member.turn, Turn::Unknown);
        for state in [
            GroupState::Idle,
            GroupState::Yielded,
            GroupState::Held,
            GroupState::Switching,
        ] {
            let word = serde_json::to_value(state).unwrap();
            assert_eq!(word, state.as_str());
        }
    }
}
