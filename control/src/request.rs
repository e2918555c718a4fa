//! What can be asked of the arbiter.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::ConfigReport;
use crate::device::DeviceSettings;
use crate::groups::{Acquire, Acquired, GiveUp, GroupStatus, Yielded};
use crate::job_settings::JobSettings;
use crate::layers::Layer;
use crate::report::{ArbiterStatus, DeviceStatus, Event, JobStatus, Registered, Reloaded};
use crate::residency::{Moved, Moves};
use crate::resize::Resize;
use crate::timeline::Timeline;
use crate::values::DeviceSelector;

/// One request, whichever operation of the API it came by. In the log
/// `{"kind": "set", "body": {...}}`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", content = "body", rename_all = "snake_case")]
pub enum Request {
    /// -> [`Reply::Status`]
    Status,
    /// -> [`Reply::Registered`]
    Register(JobSpec),
    /// -> [`Reply::Jobs`]
    List,
    /// One of them, by name. -> [`Reply::Job`]
    Job { job: String },
    /// -> [`Reply::Devices`]
    Devices,
    /// -> [`Reply::Changed`]
    Set { job: String, change: Change },
    /// Changes how a device is run, or every device (`None`), until the next
    /// [`Reload`](Self::Reload). -> [`Reply::Devices`]
    SetDevice {
        device: Option<DeviceSelector>,
        settings: DeviceSettings,
    },
    /// Moves jobs between device and host; answered when all of them have arrived or cannot. ->
    /// [`Reply::Moved`]
    Move(Moves),
    /// Has a job wait for the turn of its group; answered when it has it. -> [`Reply::Acquired`]
    Acquire { job: String, acquire: Acquire },
    /// Gives a job's turn up. -> [`Reply::Yielded`]
    Yield { job: String, give_up: GiveUp },
    /// The groups of jobs that take turns. -> [`Reply::Groups`]
    Groups,
    /// Reads the quota file again; if it is wrong, the arbiter goes on as before. ->
    /// [`Reply::Reloaded`]
    Reload,
    /// The quota files in force, and what they give the job of a process, or a job of a user that
    /// asks for nothing; `None`: of the user who asks. -> [`Reply::Config`]
    Config {
        pid: Option<u32>,
        user: Option<String>,
    },
    /// Ends the arbiter; jobs go on as their [`FailMode`](crate::FailMode) says. ->
    /// [`Reply::ShuttingDown`]
    Shutdown,
    /// Journal lines with a sequence number above `since_seq`, oldest first, `limit` at most (0: as
    /// many as the arbiter keeps). -> [`Reply::Events`]
    Events { since_seq: u64, limit: u32 },
    /// Spans of the device of this index with a number above `since_seq`, oldest first, `limit` at
    /// most (0, and never more: [`TIMELINE_MOST`](crate::TIMELINE_MOST)). -> [`Reply::Timeline`]
    Timeline {
        device: u32,
        since_seq: u64,
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

impl Request {
    /// One of each kind, for tests.
    #[doc(hidden)]
    pub fn one_of_each() -> [Self; 17] {
        [
            Self::Status,
            Self::Register(JobSpec::default()),
            Self::List,
            Self::Job { job: String::new() },
            Self::Devices,
            Self::Set {
                job: String::new(),
                change: Change::default(),
            },
            Self::SetDevice {
                device: None,
                settings: DeviceSettings::default(),
            },
            Self::Move(Moves::default()),
            Self::Acquire {
                job: String::new(),
                acquire: Acquire::default(),
            },
            Self::Yield {
                job: String::new(),
                give_up: GiveUp::default(),
            },
            Self::Groups,
            Self::Reload,
            Self::Config {
                pid: None,
                user: None,
            },
            Self::Shutdown,
            Self::Events {
                since_seq: 0,
                limit: 0,
            },
            Self::Timeline {
                device: 0,
                since_seq: 0,
                limit: 0,
            },
            Self::HookRefused {
                hook: String::new(),
                reason: String::new(),
            },
        ]
    }
}

/// One answer; which one follows from the request.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    Status(ArbiterStatus),
    Registered(Registered),
    Jobs(Vec<JobStatus>),
    Job(Box<JobStatus>),
    /// The job as it stands after the change.
    Changed(Box<JobStatus>),
    /// The devices as they stand, after the change where one was asked for.
    Devices(Vec<DeviceStatus>),
    Reloaded(Reloaded),
    Moved(Moved),
    Acquired(Acquired),
    Yielded(Yielded),
    Groups(Vec<GroupStatus>),
    Config(Box<ConfigReport>),
    ShuttingDown,
    Events(Vec<Event>),
    Timeline(Timeline),
    Noted,
}

/// A job as its owner asks for it. `SO_PEERCRED` says who registers it, not this type.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct JobSpec {
    /// Empty: the arbiter derives one from the command. A name in use gets a suffix.
    pub name: String,
    #[serde(flatten)]
    pub settings: JobSettings,
    /// The quota file of its owner; `None`: there is none.
    pub own_file: Option<Box<OwnFile>>,
    /// The Slurm account that its environment names. Good for less, never for more.
    pub slurm_account: String,
    /// The user whose job it is, where an engine's process of root's registers it, such as Slurm's
    /// `slurmstepd`. A second such registration of the name joins the job. When the processes that
    /// registered and joined it have ended, what is left of the job is ended. `None`: the job is
    /// its own.
    pub on_behalf_of: Option<u32>,
    /// It gets no device time until it is resumed.
    pub paused: bool,
    /// The process that becomes the job by `exec`. The server holds it against `SO_PEERCRED`.
    pub pid: u32,
    /// For display and for matching rules; not what is executed.
    pub command: Vec<String>,
    /// The driver library that the job will open, by absolute path.
    #[schema(value_type = String)]
    pub driver: PathBuf,
    pub simulated: bool,
    /// It was evicted by an operator, and stays away until it is restored.
    pub evicted: bool,
    /// It is ended where a process of it uses a device outside its limits.
    pub strict: bool,
    /// A process that presents its token belongs to it, whatever its user: a container's processes
    /// seldom run as the user who registers for them.
    pub any_user: bool,
}

impl JobSpec {
    /// Words of the command that count, for display and for rules, and bytes of each.
    pub const COMMAND_WORDS: usize = 32;
    const WORD_BYTES: usize = 1024;

    /// Cuts a command short: a request may have to wait, and a command line can be long.
    pub fn cut_command(&mut self) {
        self.command.truncate(Self::COMMAND_WORDS);
        for word in &mut self.command {
            let mut end = word.len().min(Self::WORD_BYTES);
            while !word.is_char_boundary(end) {
                end -= 1;
            }
            word.truncate(end);
            word.shrink_to_fit();
        }
        self.command.shrink_to_fit();
    }
}

/// A quota file that some of a job's settings come from. An arbiter that has read that very file
/// goes by what it says there, also when it changes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct OwnFile {
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// The job's settings without those of the file.
    pub given: JobSettings,
    /// What the file says that the job gets at the most.
    pub caps: Vec<Layer>,
}

/// What may be changed on a running job; `None` leaves it as it is.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_fields_take_their_default_and_unknown_ones_are_ignored() {
        let spec: JobSpec = serde_json::from_str(r#"{"pid":7,"colour":"blue"}"#).unwrap();
        let wanted = JobSpec {
            pid: 7,
            ..JobSpec::default()
        };
        assert_eq!(spec, wanted);
    }

    #[test]
    fn a_request_is_logged_by_its_kind() {
        let kinds = Request::one_of_each().map(|request| {
            let logged = serde_json::to_value(request).unwrap();
            logged["kind"].as_str().unwrap().to_owned()
        });
        assert_eq!(kinds[0], "status");
        assert_eq!(kinds[16], "hook_refused");
    }
}
