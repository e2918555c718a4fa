//! The messages of `POST /v1/decide`: a job and the devices that an engine could start it on go in,
//! the device that the policies choose comes out.
//!
//! The hook keeps nothing of the question, and the engine starts the job. What a caller leaves out
//! is taken from what the hook knows: a device's memory, share and jobs from its node's last
//! report, a job's profile from a running job of its kind.

use control::Class;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::openapi;

/// Where should this job run?
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct DecideRequest {
    /// The job.
    #[schema(required)]
    pub job: JobProfile,
    /// The devices that the engine could give it.
    #[schema(required)]
    pub candidates: Vec<Candidate>,
}

/// A job as an engine knows it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct JobProfile {
    /// The engine's name for it, which is its name on the node's arbiter, too. Empty: none.
    pub id: String,
    /// Kind of job (model and batch size): the key for measurements of pairs. Empty: `id`.
    pub kind: String,
    /// Devices, all on one node. 0 counts as 1.
    #[schema(maximum = 64)]
    pub gpus: u32,
    /// How firmly its share is promised.
    #[schema(value_type = openapi::Class)]
    pub class: Class,
    /// Memory quota on each device; null: none.
    pub mem_bytes: Option<u64>,
    /// Part of each device's time that it asks for; null: the policies choose.
    #[schema(minimum = 0, maximum = 1)]
    pub share: Option<f64>,
    /// Part of the time in which one device works for it; null: not known.
    #[schema(minimum = 0, maximum = 1)]
    pub busy: Option<f64>,
    /// How far `busy` is to be trusted; null: not at all.
    #[schema(minimum = 0, maximum = 1)]
    pub confidence: Option<f64>,
    /// How long it takes solo, as its owner thinks.
    pub work_s: Option<f64>,
    /// From now.
    pub deadline_s: Option<f64>,
    /// Above 0; weighs among jobs. Null: 1.
    pub weight: Option<f64>,
}

/// A device that an engine could give to the job.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Candidate {
    /// Its node.
    #[schema(required)]
    pub node: String,
    /// Which device, as `nvidia-smi -L` prints it.
    #[schema(required)]
    pub uuid: String,
    /// Product name: its type.
    pub name: String,
    /// Its memory. 0: as its node reports.
    pub total_bytes: u64,
    /// Memory that is promised to nobody; null: what `residents` and the report leave.
    pub free_bytes: Option<u64>,
    /// Share that is promised to nobody; null: as above.
    #[schema(minimum = 0, maximum = 1)]
    pub free_share: Option<f64>,
    /// Jobs that the engine has put there, started or not; those that the node reports are added.
    pub residents: Vec<JobProfile>,
}

/// Where the job should run.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Decided {
    /// Its node. Empty: it should wait.
    pub node: String,
    /// Its device, the first where it asked for several. Empty: it should wait.
    pub device: String,
    /// All of its devices.
    pub devices: Vec<String>,
    /// Part of their time to give it.
    #[schema(minimum = 0, maximum = 1)]
    pub share: f64,
    /// Time of an iteration there against one alone, from 1. Null: it should wait.
    #[schema(minimum = 1)]
    pub expected_slowdown: Option<f64>,
    /// How sure that is: 1 alone on the device, 0.9 for a measured pair, at most 0.5 where it
    /// follows from how busy the jobs are.
    #[schema(minimum = 0, maximum = 1)]
    pub confidence: f64,
    /// The jobs there.
    pub beside: Vec<String>,
    /// Why there, or why it should wait.
    pub reason: String,
    /// Candidates that cannot take it, with the reason.
    pub unfit: Vec<Unfit>,
}

/// A candidate that cannot take the job.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Unfit {
    /// Its node.
    pub node: String,
    /// Which device.
    pub uuid: String,
    /// Why.
    pub reason: String,
}
