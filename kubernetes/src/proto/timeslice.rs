//! `v1alpha1` of the API of llm-d's RL time slicing.
//!
//! Source: `pkg/timeslice-orchestrator/api/v1alpha1/timeslice_orchestrator.proto` of
//! llm-d-incubation/llm-d-rl-time-slicing at commit 6cf8e9b. Before it was renamed the same
//! messages were the service `accelerator_orchestrator.v1alpha1.AcceleratorOrchestratorService`
//! (commit 17bc9d6), whose clients are served as well. `docs/reference/timeslice.proto` is what is
//! here as a file.

/// The services, as paths begin with them.
pub const SERVICES: [&str; 2] = [
    "/timeslice_orchestrator.v1alpha1.TimeSliceOrchestratorService/",
    "/accelerator_orchestrator.v1alpha1.AcceleratorOrchestratorService/",
];

/// Of `Acquire` and of `Yield`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct JobRequest {
    #[prost(string, tag = "1")]
    pub job_id: String,
    #[prost(string, tag = "2")]
    pub group_id: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AcquireResponse {
    #[prost(bool, tag = "1")]
    pub success: bool,
    #[prost(int64, tag = "2")]
    pub waited_ms: i64,
    #[prost(bool, tag = "3")]
    pub context_restored: bool,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct YieldResponse {
    #[prost(bool, tag = "1")]
    pub success: bool,
    #[prost(int64, tag = "2")]
    pub pending_waiters: i64,
    #[prost(bool, tag = "3")]
    pub snapshot_deferred: bool,
}

/// Asks for everything: nothing is in it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListGroupsRequest {}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListGroupsResponse {
    #[prost(string, repeated, tag = "1")]
    pub group_ids: Vec<String>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct GetGroupStatusRequest {
    #[prost(string, tag = "1")]
    pub group_id: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct GetGroupStatusResponse {
    #[prost(message, optional, tag = "1")]
    pub group: Option<GroupStatus>,
    #[prost(message, repeated, tag = "2")]
    pub agent_job_states: Vec<SnapshotAgentJobState>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct GroupStatus {
    #[prost(string, tag = "1")]
    pub group_id: String,
    #[prost(enumeration = "GroupState", tag = "2")]
    pub group_state: i32,
    #[prost(message, optional, tag = "3")]
    pub state_timestamp: Option<Timestamp>,
    #[prost(string, tag = "4")]
    pub locking_job: String,
    #[prost(string, tag = "5")]
    pub active_job: String,
    #[prost(int64, tag = "6")]
    pub waiter_queue_depth: i64,
    #[prost(string, tag = "7")]
    pub loaded_job: String,
}

/// Of a group's lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum GroupState {
    Unspecified = 0,
    Unknown = 1,
    Idle = 2,
    IdleYielded = 3,
    Locked = 4,
    Switching = 5,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SnapshotAgentJobState {
    #[prost(string, tag = "1")]
    pub agent: String,
    #[prost(enumeration = "JobState", tag = "2")]
    pub job_state: i32,
    #[prost(string, tag = "3")]
    pub job_id: String,
}

/// Of a job's memory on a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum JobState {
    Unspecified = 0,
    Idle = 1,
    Running = 2,
    Transitioning = 3,
    Saved = 4,
    Faulted = 5,
}

/// protobuf's own.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Timestamp {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}
