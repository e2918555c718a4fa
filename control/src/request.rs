//! What can be asked of the arbiter.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::device::DeviceSettings;
use crate::job_settings::JobSettings;
use crate::report::{ArbiterStatus, DeviceStatus, Event, JobStatus, Registered, Reloaded};
use crate::residency::{Moved, Moves};
use crate::resize::Resize;

/// One request. On the wire `{"kind": "set", "body": {...}}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "body", rename_all = "snake_case")]
pub enum Request {
    /// -> [`Reply::Status`]
    Status,
    /// -> [`Reply::Registered`]
    Register(JobSpec),
    /// -> [`Reply::Jobs`]
    List,
    /// -> [`Reply::Changed`]
    Set { job: String, change: Change },
    /// Changes how a device is run, or every device (`None`), until the next
    /// [`Reload`](Self::Reload). -> [`Reply::Devices`]
    SetDevice {
        #[serde(default)]
        device: Option<DeviceSelector>,
        settings: DeviceSettings,
    },
    /// Moves jobs between device and host; answered when all of them have arrived or cannot. ->
    /// [`Reply::Moved`]
    Move(Moves),
    /// Reads the quota file again; if it is wrong, the arbiter goes on as before. ->
    /// [`Reply::Reloaded`]
    Reload,
    /// Ends the arbiter; jobs go on as their [`FailMode`] says. -> [`Reply::ShuttingDown`]
    Shutdown,
    /// Journal lines with a sequence number above `since_seq`, oldest first, `limit` at most (0: as
    /// many as the arbiter keeps). -> [`Reply::Events`]
    Events {
        #[serde(default)]
        since_seq: u64,
        #[serde(default)]
        limit: u32,
    },
    /// This node's agent does not listen to who answers at the cluster hook's address; for the
    /// journal. Of the arbiter's own user and root only. -> [`Reply::Noted`]
    HookRefused {
        /// The address.
        hook: String,
        /// Why; one line.
        reason: String,
    },
}

/// One answer; which one follows from the request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "body", rename_all = "snake_case")]
pub enum Reply {
    Status(ArbiterStatus),
    Registered(Registered),
    Jobs(Vec<JobStatus>),
    /// The job as it stands after the change.
    Changed(Box<JobStatus>),
    /// The devices as they stand after the change.
    Devices(Vec<DeviceStatus>),
    Reloaded(Reloaded),
    Moved(Moved),
    ShuttingDown,
    Events(Vec<Event>),
    Noted,
}

/// A job as its owner asks for it. `SO_PEERCRED` says who registers it, not this type.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct JobSpec {
    /// Empty: the arbiter derives one from the command. A name in use gets a suffix.
    pub name: String,
    #[serde(flatten)]
    pub settings: JobSettings,
    /// It gets no device time until it is resumed.
    pub paused: bool,
    /// The process that becomes the job by `exec`. The server holds it against `SO_PEERCRED`.
    pub pid: u32,
    /// For display and for matching rules; not what is executed.
    pub command: Vec<String>,
    /// The driver library that the job will open, by absolute path.
    pub driver: PathBuf,
    pub simulated: bool,
    /// It was evicted by an operator, and stays away until it is restored.
    pub evicted: bool,
    /// It is ended where a process of it uses a device outside its limits.
    pub strict: bool,
}

/// What may be changed on a running job; `None` leaves it as it is.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Change {
    /// Those that are live.
    #[serde(flatten)]
    pub settings: JobSettings,
    /// Time of an iteration without other jobs, in microseconds; 0 forgets it.
    pub solo_iteration_us: Option<u64>,
    pub paused: Option<bool>,
    /// Asks the job to end an iteration and be ready to go on with another number of GPUs.
    pub resize: Option<Resize>,
}

impl Change {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl From<JobSettings> for Change {
    fn from(settings: JobSettings) -> Self {
        Self {
            settings,
            ..Self::default()
        }
    }
}

/// How firmly a share is promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Gets its share whenever it wants it.
    #[default]
    Guaranteed,
    /// Runs in what guaranteed jobs leave.
    Opportunistic,
}

impl Class {
    pub const ALL: [Self; 2] = [Self::Guaranteed, Self::Opportunistic];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Guaranteed => "guaranteed",
            Self::Opportunistic => "opportunistic",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Class {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|class| class.as_str() == word)
            .ok_or_else(|| UnknownWord {
                word: word.to_owned(),
                choices: "guaranteed or opportunistic",
            })
    }
}

/// What a job does when its arbiter is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailMode {
    /// Goes on without slices; its memory quota stays.
    #[default]
    Open,
    /// Waits for an arbiter to come back.
    Freeze,
    /// Its device calls fail.
    Closed,
}

impl FailMode {
    pub const ALL: [Self; 3] = [Self::Open, Self::Freeze, Self::Closed];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Freeze => "freeze",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for FailMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for FailMode {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.as_str() == word)
            .ok_or_else(|| UnknownWord {
                word: word.to_owned(),
                choices: "open, freeze or closed",
            })
    }
}

/// What becomes of a process of a job that cannot be governed from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnRefusal {
    /// It runs without limits.
    Open,
    /// It does not start: its `cuInit`, and every later call of the driver, fails.
    Closed,
}

impl OnRefusal {
    pub const ALL: [Self; 2] = [Self::Open, Self::Closed];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for OnRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for OnRefusal {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|one| one.as_str() == word)
            .ok_or_else(|| UnknownWord {
                word: word.to_owned(),
                choices: "open or closed",
            })
    }
}

/// A word that is not one of a closed set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{word}` is not known: write {choices}")]
pub struct UnknownWord {
    pub word: String,
    pub choices: &'static str,
}

/// Which device: its index on this host, or its UUID as `nvidia-smi -L` prints it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceSelector {
    Index(u32),
    Uuid(String),
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

impl FromStr for DeviceSelector {
    type Err = BadDevice;

    fn from_str(text: &str) -> Result<Self, BadDevice> {
        if let Ok(index) = text.parse() {
            return Ok(Self::Index(index));
        }
        let uuid = ["GPU-", "MIG-"]
            .iter()
            .find_map(|prefix| text.strip_prefix(prefix));
        match uuid {
            Some(rest)
                if !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-') =>
            {
                Ok(Self::Uuid(text.to_owned()))
            }
            _ => Err(BadDevice(text.to_owned())),
        }
    }
}

/// Neither an index nor a UUID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no device: write an index such as 0, or a UUID such as GPU-5a1c... from `nvidia-smi -L`"
)]
pub struct BadDevice(pub String);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job_settings::Deadline;
    use crate::size::MemLimit;
    use crate::span::Span;

    fn round_trip(request: &Request) {
        let wire = serde_json::to_string(request).unwrap();
        assert_eq!(
            &serde_json::from_str::<Request>(&wire).unwrap(),
            request,
            "{wire}"
        );
    }

    #[test]
    fn requests_round_trip() {
        round_trip(&Request::Status);
        round_trip(&Request::List);
        round_trip(&Request::Shutdown);
        round_trip(&Request::Reload);
        round_trip(&Request::SetDevice {
            device: Some(DeviceSelector::Index(0)),
            settings: DeviceSettings {
                quantum: Some(Span::from_micros(9000)),
                early_wake: Some(true),
                ..DeviceSettings::default()
            },
        });
        round_trip(&Request::Move(Moves {
            evict: vec!["a".into()],
            restore: vec!["b".into()],
            deadline_ms: 5000,
        }));
        round_trip(&Request::Events {
            since_seq: 7,
            limit: 3,
        });
        round_trip(&Request::HookRefused {
            hook: "http://127.0.0.1:1".into(),
            reason: "another".into(),
        });
        round_trip(&Request::Set {
            job: "a".into(),
            change: Change {
                settings: JobSettings {
                    mem: Some(MemLimit::Percent(50.0)),
                    ..JobSettings::default()
                },
                paused: Some(false),
                ..Change::default()
            },
        });
        round_trip(&Request::Register(JobSpec {
            name: "train".into(),
            settings: JobSettings {
                class: Some(Class::Opportunistic),
                share: Some(0.25),
                deadline: Some(Deadline::AtUnixMs(1_790_000_000_000)),
                device: Some(vec![
                    DeviceSelector::Index(1),
                    DeviceSelector::Uuid("GPU-1f".into()),
                ]),
                iteration_launches: Some(15),
                ..JobSettings::default()
            },
            paused: true,
            pid: 42,
            command: vec!["python".into(), "train.py".into()],
            driver: "/usr/lib/libcuda.so.1".into(),
            simulated: true,
            evicted: true,
            strict: true,
        }));
    }

    #[test]
    fn missing_fields_take_their_default_and_unknown_ones_are_ignored() {
        let old = r#"{"kind":"register","body":{"pid":7,"colour":"blue"}}"#;
        let Request::Register(spec) = serde_json::from_str(old).unwrap() else {
            panic!("another kind");
        };
        assert_eq!(
            spec,
            JobSpec {
                pid: 7,
                ..JobSpec::default()
            }
        );
        let events: Request = serde_json::from_str(r#"{"kind":"events","body":{}}"#).unwrap();
        assert_eq!(
            events,
            Request::Events {
                since_seq: 0,
                limit: 0
            }
        );
    }

    #[test]
    fn words_parse_back_and_others_are_named() {
        for class in Class::ALL {
            assert_eq!(class.to_string().parse(), Ok(class));
        }
        for mode in FailMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        for one in OnRefusal::ALL {
            assert_eq!(one.to_string().parse(), Ok(one));
        }
        let error = "besteffort".parse::<Class>().unwrap_err().to_string();
        assert!(
            error.contains("`besteffort`") && error.contains("opportunistic"),
            "{error}"
        );
    }

    #[test]
    fn devices_are_an_index_or_a_uuid() {
        assert_eq!("3".parse(), Ok(DeviceSelector::Index(3)));
        let uuid = "GPU-5a1c0000-0000-0000-0000-000000000001";
        assert_eq!(uuid.parse(), Ok(DeviceSelector::Uuid(uuid.into())));
        for bad in ["", "gpu0", "-1", "GPU-", "GPU-xyz", "4294967296"] {
            assert_eq!(
                bad.parse::<DeviceSelector>(),
                Err(BadDevice(bad.into())),
                "{bad}"
            );
        }
    }
}
