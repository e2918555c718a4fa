//! What is written down: jobs, nodes, attempts, pairs, and what is counted.

use serde::{Deserialize, Serialize};

use super::wire::{DecisionView, Device, JobPhase, Order, Submission, Terms};

/// What is counted and drawn.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Meta {
    /// Version of what is in the tables.
    pub format: u32,
    /// Drawn when the state was made.
    pub cluster: String,
    /// Starts of the hook.
    pub epoch: u64,
    /// Zero of the cluster's clock.
    pub origin_unix_ms: u64,
    /// What the [deciding clock](super::clock) said when this was written.
    pub last_ms: u64,
    /// What the wall clock said then.
    pub last_unix_ms: u64,
    /// What the host's clock since its start said then.
    pub last_boottime_ms: u64,
    /// Which start of the host that was.
    pub boot: String,
    /// Number of the next job.
    pub next_job: u64,
    /// Number of the next order.
    pub next_order: u64,
    /// Number of the next line of the log.
    pub next_line: u64,
    /// Pairs made.
    pub packs: u64,
    /// Pairs split.
    pub unpacks: u64,
}

/// A node, as it registered.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeRecord {
    /// Its name.
    pub name: String,
    /// As registered.
    pub instance: String,
    /// As registered.
    pub machine: String,
    /// As registered.
    pub boot: String,
    /// As registered.
    pub engine: String,
    /// As registered.
    pub version: String,
    /// CPU cores.
    pub cpus: f64,
    /// Memory of the machine.
    pub mem_bytes: u64,
    /// As registered.
    pub moves_memory: bool,
    /// Its devices.
    pub devices: Vec<Device>,
    /// How starts fare there.
    pub starts: StartsRecord,
}

/// How starts fare on a node.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StartsRecord {
    /// Jobs whose starts failed there in a row, oldest first: each once, and a few at most.
    pub failed: Vec<FailedStart>,
    /// Why the last one failed.
    pub reason: String,
    /// When, on the cluster's clock.
    pub failed_s: f64,
    /// Nothing is started there but one job at a time, to try it.
    pub shut: bool,
    /// How often in a row it was shut, or tried in vain.
    pub times: u32,
    /// It is tried again from then on, on the cluster's clock.
    pub until_s: f64,
    /// The job that tries it.
    pub trial: Option<u64>,
}

/// A start that failed on a node.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FailedStart {
    /// Of which job.
    pub job: u64,
    /// When, on the cluster's clock.
    pub at_s: f64,
    /// The job has started elsewhere since, so that it was not the job.
    pub confirmed: bool,
    /// The kind of a job that ran for some moments; empty: it never ran.
    pub kind: String,
}

/// Solo speed of a job, by two counters of which one may stand still.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Solo {
    /// Submissions per second.
    pub launches_per_s: f64,
    /// Iterations per second, where they are known.
    pub iterations_per_s: Option<f64>,
    /// How it used its devices then: what packers know of the next job of its kind.
    pub metered: Option<Metered>,
    /// When it was measured.
    pub unix_ms: u64,
}

/// How a job uses a device by itself.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Metered {
    /// Part of the time in which a device works for it.
    pub busy: f64,
    /// Part of the time in which it copies.
    pub mem_busy: f64,
    /// Bytes that outlive an iteration.
    pub persistent_bytes: u64,
    /// Peak bytes beyond those.
    pub ephemeral_bytes: u64,
    /// Time of an iteration in seconds; 0: not known.
    pub iteration_s: f64,
}

/// What a node measured of a kind of job by itself.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Witness {
    /// Which node.
    pub node: String,
    /// Submissions per second.
    pub launches_per_s: f64,
    /// Iterations per second, where they are known.
    pub iterations_per_s: Option<f64>,
    /// When, on the cluster's clock.
    pub at_s: f64,
    /// When, by the wall clock.
    pub unix_ms: u64,
}

/// How fast a kind of job is by itself on a type of GPU, as several nodes measured it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SpeedRecord {
    /// Type of the GPU.
    pub gpu: String,
    /// GPUs of the job.
    pub gpus: u32,
    /// Its kind.
    pub kind: String,
    /// One entry for a node.
    pub witnesses: Vec<Witness>,
}

/// What a job that is done was given.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Service {
    /// Its number.
    pub job: u64,
    /// Whose it was.
    pub user: String,
    /// GPU-seconds that it held.
    pub gpu_s: f64,
    /// When it ended, on the cluster's clock.
    pub ended_s: f64,
}

/// An attempt that was ordered and has not been settled.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RunRecord {
    /// Which attempt of its job.
    pub attempt: u32,
    /// On which node.
    pub node: String,
    /// On which devices.
    pub devices: Vec<String>,
    /// The terms that were last sent to it.
    pub sent: Terms,
    /// It was ordered to stop.
    pub stopping: bool,
    /// It holds its place and waits for its turn.
    pub suspended: bool,
    /// Others were on its devices before it.
    pub joiner: bool,
    /// How many; 0 for a joiner: it is one.
    pub rank: u32,
    /// It said that all is saved and that it may be stopped.
    pub saved: bool,
    /// When it was ordered, on the cluster's clock; 0: by a hook that did not write that down.
    pub ordered_s: f64,
    /// When its node's arbiter was first seen to have it.
    pub seen_s: Option<f64>,
    /// It has run for longer than a failed start does.
    pub worked: bool,
}

/// How a job ended.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Over {
    /// `done`, `failed` or `cancelled`.
    pub phase: JobPhase,
    /// Exit code.
    pub exit_code: Option<i32>,
    /// When.
    pub unix_ms: u64,
}

/// A job.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct JobRecord {
    /// Its number.
    pub id: u64,
    /// As asked for, with its name and kind filled in.
    pub submission: Submission,
    /// When it came, on the cluster's clock.
    pub arrival_s: f64,
    /// When it came, by the wall clock.
    pub submitted_unix_ms: u64,
    /// When it first started.
    pub started_unix_ms: Option<u64>,
    /// The attempt in the works.
    pub run: Option<RunRecord>,
    /// Goes so far.
    pub attempts: u32,
    /// Goes that were stopped with all saved.
    pub saved: u32,
    /// Starts in a row that came to nothing.
    pub failures: u32,
    /// On which nodes, each once.
    pub failed_on: Vec<String>,
    /// Not to be started before, on the cluster's clock.
    pub not_before_s: f64,
    /// Its owner has taken it back.
    pub cancelled: bool,
    /// Why it waits or how it ended.
    pub reason: String,
    /// Seconds of work done, by the rates that were measured.
    pub done_s: f64,
    /// GPU-seconds held.
    pub gpu_s: f64,
    /// Seconds held.
    pub held_s: f64,
    /// Up to when these three are counted, on the cluster's clock; 0: not known.
    pub counted_s: f64,
    /// Its solo speed.
    pub solo: Option<Solo>,
    /// On which GPUs that was measured, by [`solo_key`].
    pub solo_on: String,
    /// Speed relative to that, as last measured.
    pub rate: Option<f64>,
    /// Set once it is over.
    pub over: Option<Over>,
}

/// What a node measured of two kinds of job together.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PairClaim {
    /// Which node; empty: measured elsewhere, and fed.
    pub node: String,
    /// Speed of each relative to being alone.
    pub rates: [f64; 2],
    /// When, on the cluster's clock.
    pub at_s: f64,
    /// When, by the wall clock.
    pub unix_ms: u64,
}

/// What two kinds of job were measured at.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PairRecord {
    /// Type of the GPU.
    pub gpu: String,
    /// GPUs of each.
    pub gpus: u32,
    /// Host and joiner.
    pub kinds: [String; 2],
    /// Speed of each relative to being alone: what counts of the claims.
    pub rates: [f64; 2],
    /// One of each node. None: it was measured elsewhere, and fed.
    pub claims: Vec<PairClaim>,
    /// The only claim is a node's that would keep the pair apart on other nodes too.
    #[serde(skip)]
    pub unconfirmed: bool,
    /// When, last.
    pub unix_ms: u64,
}

/// What a node measured of three jobs or more together. It counts on that node alone.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CrowdRecord {
    /// Which node.
    pub node: String,
    /// Type of the GPU.
    pub gpu: String,
    /// GPUs of each.
    pub gpus: u32,
    /// Their kinds, the one that came first first.
    pub kinds: Vec<String>,
    /// Speed of each relative to being alone.
    pub rates: Vec<f64>,
    /// When, on the cluster's clock.
    pub at_s: f64,
    /// When, by the wall clock.
    pub unix_ms: u64,
}

/// All that is kept.
#[derive(Debug, Default)]
pub struct Kept {
    /// Nodes.
    pub nodes: Vec<NodeRecord>,
    /// Jobs by number.
    pub jobs: Vec<JobRecord>,
    /// Orders by node and number.
    pub orders: Vec<(String, Order)>,
    /// Pairs.
    pub pairs: Vec<PairRecord>,
    /// Three jobs or more together.
    pub crowds: Vec<CrowdRecord>,
    /// Solo speeds, by [`solo_key`].
    pub solos: Vec<(String, Solo)>,
    /// Solo speeds by node.
    pub speeds: Vec<SpeedRecord>,
    /// What past jobs were given.
    pub services: Vec<Service>,
    /// The decision log.
    pub log: Vec<DecisionView>,
}

/// What a transaction writes.
#[derive(Debug, Default)]
pub struct Changes {
    /// Jobs to write.
    pub jobs: Vec<JobRecord>,
    /// Jobs to drop.
    pub dropped_jobs: Vec<u64>,
    /// Nodes to write.
    pub nodes: Vec<NodeRecord>,
    /// Nodes to drop.
    pub dropped_nodes: Vec<String>,
    /// Orders to write.
    pub orders: Vec<(String, Order)>,
    /// Orders to drop.
    pub dropped_orders: Vec<(String, u64)>,
    /// Pairs to write.
    pub pairs: Vec<PairRecord>,
    /// Pairs to drop, by [`pair_key`].
    pub dropped_pairs: Vec<String>,
    /// Three jobs or more together, to write.
    pub crowds: Vec<CrowdRecord>,
    /// To drop, by [`crowd_key`].
    pub dropped_crowds: Vec<String>,
    /// Speeds to write.
    pub solos: Vec<(String, Solo)>,
    /// Speeds to drop.
    pub dropped_solos: Vec<String>,
    /// Speeds by node to write.
    pub speeds: Vec<SpeedRecord>,
    /// Speeds by node to drop, by [`solo_key`].
    pub dropped_speeds: Vec<String>,
    /// Services to write.
    pub services: Vec<Service>,
    /// Services to drop, by job.
    pub dropped_services: Vec<u64>,
    /// Lines to append to the log.
    pub log: Vec<DecisionView>,
}

impl Changes {
    /// Nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
            && self.dropped_jobs.is_empty()
            && self.nodes.is_empty()
            && self.dropped_nodes.is_empty()
            && self.orders.is_empty()
            && self.dropped_orders.is_empty()
            && self.pairs.is_empty()
            && self.dropped_pairs.is_empty()
            && self.crowds.is_empty()
            && self.dropped_crowds.is_empty()
            && self.solos.is_empty()
            && self.dropped_solos.is_empty()
            && self.speeds.is_empty()
            && self.dropped_speeds.is_empty()
            && self.services.is_empty()
            && self.dropped_services.is_empty()
            && self.log.is_empty()
    }
}

/// The key of a solo speed.
#[must_use]
pub fn solo_key(gpu: &str, gpus: u32, kind: &str) -> String {
    format!("{gpu}\n{gpus}\n{kind}")
}

/// Under what three jobs or more are kept: in any order of coming.
#[must_use]
pub fn crowd_key(crowd: &CrowdRecord) -> String {
    let mut kinds = crowd.kinds.clone();
    kinds.sort_unstable();
    format!(
        "{}\n{}\n{}\n{}",
        crowd.node,
        crowd.gpu,
        crowd.gpus,
        kinds.join("\n")
    )
}

/// Under what a pair is kept.
#[must_use]
pub fn pair_key(pair: &PairRecord) -> String {
    format!(
        "{}\n{}\n{}\n{}",
        pair.gpu, pair.gpus, pair.kinds[0], pair.kinds[1]
    )
}
