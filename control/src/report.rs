//! What the arbiter reports about itself, its devices and its jobs.
//!
//! Times on the host are Unix milliseconds (`_unix_ms`), durations nanoseconds (`_ns`), sizes bytes
//! (`_bytes`), shares fractions of one device's time between 0 and 1.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::ConfigStatus;
use crate::groups::Turn;
use crate::job_settings::JobSettings;
use crate::layers::Capped;
use crate::profile::Profile;
use crate::residency::{Pressure, Residence};
use crate::resize::ResizeStatus;
use crate::values::{Class, DeviceSelector, FailMode, Misbehaviour, Overflow, SliceMode};

/// A registration that was accepted.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Registered {
    /// Unique among the arbiter's jobs; the name asked for, with a suffix where that was taken.
    pub job: String,
    pub id: u64,
    /// 32 hexadecimal digits: a process that presents it on the channel socket belongs to the job.
    pub token: String,
    #[schema(value_type = String)]
    pub channel_socket: PathBuf,
    /// The limit on each device of the job, percentages resolved.
    pub mem_limit_bytes: Vec<DeviceBytes>,
    /// The share given; 0 where none was promised.
    pub share: f64,
    /// What is in force, rules of the arbiter's quota files included; `None`: from an arbiter that
    /// does not say.
    pub settings: Option<JobSettings>,
    /// What it asked for and does not get.
    pub capped: Vec<Capped>,
    /// What else its user should know, a line each.
    pub notices: Vec<String>,
}

/// An amount on one device.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct DeviceBytes {
    pub device: u32,
    pub bytes: u64,
}

/// How a job fares with its latency target; over several devices, sums and the worst.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct LatencyStatus {
    /// How soon each burst of its work should be done.
    pub target_ns: u64,
    /// Bursts that have ended.
    pub bursts: u64,
    /// Of these, bursts that took longer than the target.
    pub missed: u64,
    /// What a burst takes from its first waiting launch on: the 99th percentile of the recent ones;
    /// `None`: none has ended.
    pub p99_ns: Option<u64>,
    /// Why the target is not met, or cannot be, and what to do; `None`: it is met as far as is
    /// known.
    pub unmet: Option<String>,
}

/// One job. The plain memory and time fields are sums over its devices; `devices` has them apart.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct JobStatus {
    pub name: String,
    pub id: u64,
    pub uid: u32,
    /// The login name of `uid`; empty where the host does not know it.
    pub user: String,
    pub command: Vec<String>,
    pub class: Class,
    pub state: JobState,
    pub share_asked: Option<f64>,
    /// Never less while it wants the device.
    pub share_min: Option<f64>,
    /// Never more.
    pub share_max: Option<f64>,
    /// It uses several devices, and is granted all of them at once or none.
    pub gang: bool,
    /// Gets no device time until it is resumed.
    pub paused: bool,
    /// Why it runs after all others for now; `None`: it does not.
    pub demoted: Option<String>,
    /// How often it was found to harm the others.
    pub misbehaved_count: u64,
    pub deadline_unix_ms: Option<u64>,
    /// Device time that its work takes in all, as its owner thinks.
    pub work_ns: Option<u64>,
    /// How it fares with its latency target; `None`: it has none.
    pub latency: Option<Box<LatencyStatus>>,
    /// Part of the device's time over the last window of the arbiter (about a second).
    pub share_got_recent: f64,
    /// Part of the device's time since the job started.
    pub share_got_total: f64,
    /// Part of the device's time while at least one other job wanted it too, which is what a share
    /// promises; `None`: none ever did.
    pub share_got_contended: Option<f64>,
    /// How long that was the case.
    pub contended_ns: u64,
    /// `None`: no limit but the device.
    pub mem_limit_bytes: Option<u64>,
    pub mem_used_bytes: u64,
    pub mem_peak_bytes: u64,
    /// What the driver holds for the job beyond its allocations: contexts, code, library
    /// workspaces.
    pub unattributed_bytes: u64,
    /// A grant is held now.
    pub holding: bool,
    /// Completion marks that its devices have not passed yet, as its processes report; `None`: from
    /// an arbiter that does not tell.
    pub in_flight_marks: Option<u64>,
    pub device_time_ns: u64,
    pub wait_time_ns: u64,
    /// Device time beyond what was granted.
    pub overrun_ns: u64,
    pub launches: u64,
    pub grants: u64,
    /// Allocations that its limit refused.
    pub oom_count: u64,
    /// The largest that was asked for of these, in bytes, and the limit that refused it; 0: none.
    pub oom_largest_bytes: u64,
    pub oom_limit_bytes: u64,
    pub started_unix_ms: u64,
    pub simulated: bool,
    pub on_arbiter_loss: FailMode,
    /// Its memory may be moved to the host and back.
    pub evictable: bool,
    pub overflow: Overflow,
    /// Its memory leaves its devices when it has not used them for so long.
    pub evict_after_ns: Option<u64>,
    /// Host memory that it may take; `None`: no limit of its own.
    pub host_memory_limit_bytes: Option<u64>,
    /// Evicted by an operator, and away until it is restored.
    pub evicted: bool,
    /// Where its memory is, on all of its devices; `None`: it is not evictable.
    pub residence: Option<Box<Residence>>,
    pub devices: Vec<JobDevice>,
    pub processes: Vec<ProcessStatus>,
    /// `None`: from an arbiter that makes none.
    pub profile: Option<Box<Profile>>,
    /// It looks for requests to change its size.
    pub listens_for_resize: bool,
    /// Processes of it that used a device outside its limits; the first sixteen.
    pub escaped: Vec<EscapedProcess>,
    /// How many there were.
    pub escaped_count: u64,
    /// Of a dormant job, its living processes.
    pub dormant_processes: Option<u32>,
    /// What it was asked for, and has not been stopped for yet.
    pub resize: Option<ResizeStatus>,
    /// The container that registered it; `None`: it is in none.
    pub container: Option<ContainerStatus>,
    /// Settings that it, or its owner, asked for and that quota files cap.
    pub capped: Vec<Capped>,
    /// The group of jobs with which it takes turns; `None`: it is in none.
    pub group: Option<String>,
    /// What it has to do with the turn of its group.
    pub turn: Option<Turn>,
}

/// A container, as its control group and its engine say.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ContainerStatus {
    /// 64 hexadecimal digits; of one without a control group of its own `pidns-` and the number of
    /// its PID namespace.
    pub id: String,
    /// Empty: not known.
    pub name: String,
    /// `docker`, `podman`, `containerd` or `cri-o`; empty: not known.
    pub runtime: String,
    /// UID of its pod; empty: it is in none.
    pub pod: String,
    /// All of its processes are the job, which has no launcher.
    pub is_job: bool,
}

impl ContainerStatus {
    /// Its name, or so much of its id that people know it by.
    pub fn short(&self) -> &str {
        if !self.name.is_empty() {
            return &self.name;
        }
        if self.id.starts_with("pidns-") {
            return &self.id;
        }
        self.id.get(..12).unwrap_or(&self.id)
    }
}

/// A job's part in one device.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct JobDevice {
    pub index: u32,
    pub uuid: String,
    pub share_got_recent: f64,
    pub share_got_total: f64,
    pub mem_limit_bytes: Option<u64>,
    pub mem_used_bytes: u64,
    pub mem_peak_bytes: u64,
    pub unattributed_bytes: u64,
    pub holding: bool,
    pub device_time_ns: u64,
    pub wait_time_ns: u64,
    /// `None`: the job is not evictable.
    pub residence: Option<Residence>,
}

/// One process of a job that has attached to the channel.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ProcessStatus {
    pub pid: u32,
    pub command: String,
    pub attached_unix_ms: u64,
    pub launches: u64,
    pub mem_used_bytes: u64,
    /// UUIDs of devices that it uses and that the job may not use: quota and share do not hold
    /// there.
    pub ungoverned: Vec<String>,
    /// How its work on the device is followed, if the device does not write completion marks:
    /// `events` or `queries`.
    #[serde(default)]
    pub followed_by: Option<String>,
}

/// A process of a job that used a device without being attached: no limit held for it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct EscapedProcess {
    pub pid: u32,
    pub command: String,
    /// Indices of the devices.
    pub devices: Vec<u32>,
    /// Their memory that it had when it was found, as NVML says.
    pub used_bytes: u64,
    /// Why no limit held.
    pub reason: String,
    pub since_unix_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Registered; no process has attached yet.
    #[default]
    Starting,
    /// Holds a grant, or has work on the device.
    Running,
    /// Wants the device and waits for a grant.
    Waiting,
    /// Attached and wants nothing.
    Idle,
    /// Held back by its owner.
    Paused,
    /// Its launcher has ended, some of its processes live, and none of them uses a device: no
    /// share, no memory, and its token stays valid.
    Dormant,
    /// Every process has ended; kept for a while for its last figures.
    Gone,
    /// A state of a newer arbiter.
    #[serde(other)]
    Unknown,
}

impl JobState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Idle => "idle",
            Self::Paused => "paused",
            Self::Dormant => "dormant",
            Self::Gone => "gone",
            Self::Unknown => "unknown",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct DeviceStatus {
    pub index: u32,
    pub uuid: String,
    pub name: String,
    pub total_bytes: u64,
    /// What is in use, as NVML said last; `None`: it does not tell, or nobody looks because no job
    /// is there.
    pub used_bytes: Option<u64>,
    /// Kept from every quota, by configuration.
    pub reserved_bytes: u64,
    pub simulated: bool,
    /// As configured.
    pub mode: SliceMode,
    /// How it runs now: exclusive, concurrent or lend. In the mode auto it is exclusive or
    /// concurrent, in the mode lend exclusive or lend.
    pub running: SliceMode,
    /// Why it runs so, where the mode leaves a choice; empty otherwise.
    pub running_reason: String,
    /// The slice policy, with the parameters that differ from their defaults.
    pub policy: String,
    /// Longest slice.
    pub quantum_us: u64,
    /// Shortest slice.
    pub quantum_min_us: u64,
    /// What the last slice was given while others waited; 0: there was none.
    pub slice_us: u64,
    /// How long a hand-over leaves the device idle, as learnt on the host; 0: not known.
    pub switch_cost_ns: u64,
    /// How many jobs may hold it at once in slices.
    pub holders_max: u32,
    pub early_wake: bool,
    pub misbehaviour: Misbehaviour,
    /// Something of this was set by hand, and stays until the quota file is read again.
    pub set_by_hand: bool,
    /// The job that holds the device now, or one of them.
    pub holder: Option<String>,
    /// All jobs that hold the device now.
    pub holders: Vec<String>,
    /// Names of the jobs on it.
    pub jobs: Vec<String>,
    /// Sum of the shares promised to guaranteed jobs.
    pub share_promised: f64,
    /// Part of the last window in which some job held the device.
    pub busy_fraction: f64,
    /// Time in which it was in use, since this arbiter has known it.
    pub busy_ns: u64,
    /// Slices granted on it in that time.
    pub grants: u64,
    /// Processes that the driver knows on the device, and that belong to no job: nothing limits
    /// them.
    pub unmanaged: Vec<UnmanagedProcess>,
    /// How much of its time goes into moving memory.
    pub pressure: Pressure,
    /// What it draws, in milliwatts, as NVML said last; `None` as for `used_bytes`.
    pub power_mw: Option<u64>,
    /// Of the GPU itself, in degrees Celsius; the same.
    pub temperature_celsius: Option<u32>,
    /// Part of the time in which a kernel ran, over NVML's last period; the same.
    pub sm_used_fraction: Option<f64>,
}

/// A process on a device that is part of no job.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct UnmanagedProcess {
    pub pid: u32,
    /// Device memory that it has, its context included.
    pub used_bytes: u64,
    /// Its command line; empty where that cannot be read.
    pub command: String,
}

impl DeviceStatus {
    /// Whether `selector` means this device. UUIDs compare without regard to case.
    pub fn answers_to(&self, selector: &DeviceSelector) -> bool {
        match selector {
            DeviceSelector::Index(index) => *index == self.index,
            DeviceSelector::Uuid(uuid) => uuid.eq_ignore_ascii_case(&self.uuid),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ArbiterStatus {
    /// Of the binary, as `sublet --version` prints it.
    pub version: String,
    pub pid: u32,
    pub uid: u32,
    pub started_unix_ms: u64,
    pub uptime_ms: u64,
    #[schema(value_type = String)]
    pub runtime_dir: PathBuf,
    #[schema(value_type = String)]
    pub api_socket: PathBuf,
    #[schema(value_type = String)]
    pub channel_socket: PathBuf,
    /// Address and port at which other hosts reach the API, by TLS; empty: nowhere.
    pub api_address: String,
    /// Descriptors that it may have; `None`: as many as there is memory for. Below 64 it serves few
    /// connections at a time, and few jobs.
    pub descriptor_limit: Option<u64>,
    /// Started by `sublet run`, for one user.
    pub embedded: bool,
    /// Ends itself after this long without a job; `None`: never.
    pub idle_exit_s: Option<u64>,
    /// Host memory that evicted and overflowing bytes of all jobs may take.
    pub host_memory_limit_bytes: u64,
    /// What they take.
    pub host_memory_used_bytes: u64,
    /// Turns of its loop, and by how much they began after their time, in all.
    pub loop_turns: u64,
    pub loop_lag_ns: u64,
    /// Lines of the journal that could not be written.
    pub journal_lost: u64,
    /// The quota files in force.
    pub config: ConfigStatus,
    pub devices: Vec<DeviceStatus>,
    pub jobs: Vec<JobStatus>,
}

/// What came of reading the quota file again.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Reloaded {
    /// The files; none: there are none, and defaults are in force.
    #[schema(value_type = Vec<String>)]
    pub files: Vec<PathBuf>,
    /// Their sections about devices, about users and about jobs.
    pub device_rules: u32,
    pub user_rules: u32,
    pub job_rules: u32,
    /// Running jobs that have other settings now.
    pub jobs_changed: u32,
}

/// One line of the journal.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Event {
    /// Counts up by one per line, over restarts of the arbiter too.
    pub seq: u64,
    pub unix_ms: u64,
    /// A short word: `oom`, `attached`, `detached`, ...; see [`EVENT_KINDS`](crate::EVENT_KINDS).
    pub kind: String,
    /// Empty where the line is about no job.
    pub job: String,
    /// The number of that job, which no other job of this arbiter's directory ever had; 0 where the
    /// line is about none.
    pub job_id: u64,
    pub message: String,
    /// The figures in `message`, by name with unit: `limit_bytes`, `used_bytes`, `requested_bytes`,
    /// ...
    #[schema(value_type = Object)]
    pub fields: serde_json::Map<String, serde_json::Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_a_newer_arbiter_is_read() {
        let newer =
            r#"{"name":"a","state":"hibernating","mood":"fine","devices":[{"index":1,"heat":9}]}"#;
        let job: JobStatus = serde_json::from_str(newer).unwrap();
        assert_eq!((job.name.as_str(), job.state), ("a", JobState::Unknown));
        assert_eq!(job.devices[0].index, 1);
        let device: DeviceStatus = serde_json::from_str(r#"{"mode":"quantum"}"#).unwrap();
        assert_eq!(device.mode, SliceMode::Unknown);
    }

    #[test]
    fn a_device_answers_to_its_index_and_its_uuid() {
        let device = DeviceStatus {
            index: 2,
            uuid: "GPU-00ff".into(),
            ..DeviceStatus::default()
        };
        assert!(device.answers_to(&DeviceSelector::Index(2)));
        assert!(device.answers_to(&DeviceSelector::Uuid("GPU-00FF".into())));
        assert!(!device.answers_to(&DeviceSelector::Index(0)));
        assert!(!device.answers_to(&DeviceSelector::Uuid("GPU-00fe".into())));
    }
}
