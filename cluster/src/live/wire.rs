//! The messages between a node's agent, an operator and the hook: JSON over HTTP.
//!
//! ```text
//! anyone -> GET /v1/session                               -> Challenge
//! agent -> PUT  /v1/nodes/{node}           Registration   -> Welcome
//! agent -> POST /v1/nodes/{node}/report    Report         -> Orders
//! user  -> POST /v1/jobs                   Submission     -> JobView
//! ```
//!
//! The agent always asks and the hook always answers, so that nodes need no open port. Every answer
//! to an agent names the hook that gives it ([`HookId`]); an agent ignores a hook that another has
//! replaced. Unknown fields are ignored and missing ones take their default, as over the control
//! socket, whose [`ArbiterStatus`] and [`ControlError`](control::ControlError) are used here as
//! they are. Times on a clock are Unix milliseconds, spans seconds, sizes bytes, shares parts of
//! one device's time.

use std::collections::BTreeMap;

use control::{ArbiterStatus, Class};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::openapi;

/// Raised when an old peer would misunderstand a new one.
pub const API_MAJOR: u32 = 1;

/// Identifies one life of one hook. Two hooks on copies of one state would count alike; the nonce
/// distinguishes them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct HookId {
    /// Drawn when the state was made.
    pub cluster: String,
    /// Counts the starts of the hook. An agent does nothing for a lower one than it has seen.
    pub epoch: u64,
    /// Drawn at each start.
    pub nonce: String,
}

/// One attempt of a job: its number and which attempt it is, from 1.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Debug,
    Default,
    Serialize,
    Deserialize,
    ToSchema,
)]
pub struct RunId {
    /// The job.
    pub job: u64,
    /// Which attempt.
    pub attempt: u32,
}

impl std::fmt::Display for RunId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.job, self.attempt)
    }
}

/// Which hook answers.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Health {
    /// This one.
    pub hook: HookId,
}

/// A node introduces itself.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Registration {
    /// Must be 1: `API_MAJOR`.
    #[schema(required)]
    pub api: u32,
    /// Drawn once for each runtime directory: two nodes of one name differ in it.
    #[schema(required)]
    pub instance: String,
    /// The machine and its boot: after another boot no process of the boot before can still run.
    pub machine: String,
    /// Changes with every boot.
    pub boot: String,
    /// Version of the arbiter.
    pub version: String,
    /// Who starts jobs there.
    pub engine: String,
    /// CPU cores.
    pub cpus: f64,
    /// Memory of the machine.
    pub mem_bytes: u64,
    /// It starts jobs as evictable where it is to.
    pub moves_memory: bool,
    /// Its devices, in the order of their indices.
    pub devices: Vec<Device>,
    /// It does nothing that this hook says, and this is why. Empty: it does.
    pub refusal: String,
}

/// A device of a node.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Device {
    /// Identity, as `nvidia-smi -L` prints it.
    pub uuid: String,
    /// Product name: its type.
    pub name: String,
    /// Its memory.
    pub total_bytes: u64,
    /// It is a simulated one.
    pub simulated: bool,
}

/// The answer to a registration.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Welcome {
    /// Who answers.
    pub hook: HookId,
    /// How often to report.
    pub report_ms: u64,
}

/// What an agent says each second.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Report {
    /// As registered.
    #[schema(required)]
    pub instance: String,
    /// What became of orders, oldest first; repeated until the hook has answered.
    pub acks: Vec<Ack>,
    /// Every attempt of a job that the engine knows and the hook has not settled yet.
    pub runs: Vec<RunReport>,
    /// The arbiter with its devices and jobs, as `sublet ps --json` prints it; null where it did
    /// not answer its own agent.
    #[schema(value_type = Option<Object>)]
    pub arbiter: Option<ArbiterStatus>,
    /// What is free and how long a demand would wait, one entry for each device.
    pub waits: Vec<WaitMatrix>,
    /// Jobs of other engines of which it is known how much slower than solo they run; a part of
    /// them where there are many.
    pub others: Vec<OtherJob>,
    /// Jobs of other engines that the hook wants off the devices.
    pub away: Vec<AwayJob>,
}

/// Jobs of other engines that a node reports at most.
pub const MAX_OTHERS: usize = 256;

/// Whether this is how a job of Slurm's is called. Only an engine has such names: no user can take
/// one.
#[must_use]
pub fn is_slurms(name: &str) -> bool {
    let number = name.strip_prefix("slurm.").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// A job that another engine has started, as its node's arbiter measures it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct OtherJob {
    /// Its name on the node's arbiter: `slurm.7`.
    pub name: String,
    /// Time of an iteration over the last seconds, relative to solo.
    #[schema(minimum = 0)]
    pub slowdown: f64,
    /// How far that is to be trusted.
    #[schema(minimum = 0, maximum = 1)]
    pub confidence: f64,
}

/// A job of another engine whose memory is to leave its device.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct AwayJob {
    /// Its name on the node's arbiter: `slurm.7`.
    pub name: String,
    /// Its memory has left, and it gets no time.
    pub evicted: bool,
    /// Why it cannot leave; empty: it has left, or does.
    pub reason: String,
}

/// Which jobs of other engines are to be off the devices: all of them, by node. Those that were
/// there before and are not any more come back.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Away {
    /// Their names on the node's arbiter, by the node's name.
    pub nodes: BTreeMap<String, Vec<String>>,
}

/// What became of an order.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Ack {
    /// Which one.
    #[schema(required)]
    pub seq: u64,
    /// Why it was not done; empty: it was.
    pub error: String,
}

/// An attempt of a job as its engine sees it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RunReport {
    /// Which one.
    #[schema(required)]
    pub run: RunId,
    /// Its name on the node's arbiter.
    pub name: String,
    /// Its process; 0 before it has one.
    pub pid: u32,
    /// Set once it is over.
    pub ended: Option<Ended>,
    /// It reported at the end of an iteration that all is saved, after a request to change its size
    /// or to make space.
    pub saved: bool,
}

/// How an attempt ended.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Ended {
    /// Exit code, where it had one.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// It never became the job: nothing of it ran.
    pub never_started: bool,
    /// The last words on its stderr, or why its end is not known.
    pub words: String,
}

impl Ended {
    /// Of an attempt that never became the job.
    #[must_use]
    pub fn never(words: String) -> Self {
        Self {
            never_started: true,
            words,
            ..Self::default()
        }
    }

    /// It did what it was to do.
    #[must_use]
    pub fn well(&self) -> bool {
        self.code == Some(0)
    }
}

/// Expected waits on one device, after Apollo (OSDI'14): rows are memory, columns shares of time.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct WaitMatrix {
    /// Which device.
    pub uuid: String,
    /// Share that is promised to nobody.
    #[schema(minimum = 0, maximum = 1)]
    pub free_share: f64,
    /// Memory that is neither used nor reserved.
    pub free_bytes: u64,
    /// Jobs on it that are not the hook's.
    pub strangers: u32,
    /// Least memory of each row.
    pub rows_bytes: Vec<u64>,
    /// Share of each column.
    pub columns_share: Vec<f64>,
    /// `wait_s[row][column]`: seconds until so much is free; `null`: nobody can tell.
    pub wait_s: Vec<Vec<Option<f64>>>,
}

/// The answer to a report.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Orders {
    /// Who answers.
    pub hook: HookId,
    /// Acks up to here are written down and need not be repeated.
    pub acked_seq: u64,
    /// Ends that are written down: the engine may forget these.
    pub settled: Vec<RunId>,
    /// What to do, in this order; repeated until acknowledged.
    pub orders: Vec<Order>,
    /// Jobs of other engines whose memory is to be off the devices. Null: that is not known, and
    /// all stays as it is.
    pub away: Option<Vec<String>>,
}

/// One thing to do on a node. Numbers grow by node and are never used twice within an epoch; one of
/// a later epoch is always a later order.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Order {
    /// The epoch of the hook that made it.
    #[serde(default)]
    pub epoch: u64,
    /// Its number.
    pub seq: u64,
    /// About which attempt.
    pub run: RunId,
    /// What.
    pub what: What,
}

/// What to do about an attempt.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", content = "body", rename_all = "snake_case")]
pub enum What {
    /// Start it.
    Start(Box<StartRun>),
    /// Change its terms.
    Set(Terms),
    /// End it: asked first, killed when `grace_s` have passed.
    Stop {
        /// Patience.
        grace_s: f64,
        /// It is given the time to end its iteration before it is asked.
        #[serde(default)]
        signal: Option<Signal>,
    },
}

/// Asks a job that looks for such requests to prepare for a stop: at the end of an iteration it
/// saves, and reports that.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Signal {
    /// GPUs that it is to go on with; 0: none for now.
    #[schema(maximum = 65535)]
    pub gpus: u16,
    /// How long that may take, in seconds.
    pub patience_s: f64,
}

/// What it may have while it runs.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Terms {
    /// Part of each device's time; null leaves it.
    #[schema(minimum = 0, maximum = 1)]
    pub share: Option<f64>,
    /// How firmly.
    #[schema(value_type = Option<openapi::Class>)]
    pub class: Option<Class>,
    /// Memory quota on each device; null leaves it.
    pub mem_bytes: Option<u64>,
    /// Held back.
    pub paused: bool,
}

/// An attempt to start.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct StartRun {
    /// What the job is called there.
    pub name: String,
    /// What to run.
    pub command: Vec<String>,
    /// Variables beyond those of the node.
    pub env: BTreeMap<String, String>,
    /// Where; empty: a directory of its own.
    pub dir: String,
    /// On which devices, by UUID.
    pub devices: Vec<String>,
    /// They are simulated.
    pub simulated: bool,
    /// Its memory may leave its devices while others run.
    pub evictable: bool,
    /// What it may have.
    pub terms: Terms,
}

/// A job as its owner asks for it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Submission {
    /// For people; empty: from the command.
    pub name: String,
    /// Kind of job (model and batch size): the key for measurements of pairs. Empty: the command
    /// line.
    pub kind: String,
    /// Whose; empty: everybody's.
    pub user: String,
    /// What to run: the program and its arguments.
    #[schema(required)]
    pub command: Vec<String>,
    /// Variables for it.
    pub env: BTreeMap<String, String>,
    /// Where; empty: a directory of its own on its node.
    pub dir: String,
    /// GPUs, all on one node. 0 counts as 1.
    pub gpus: u32,
    /// It can go on with any number of GPUs up to this, in proportion as fast; for restartable
    /// jobs. Null: with `gpus` only.
    #[schema(minimum = 1)]
    pub max_gpus: Option<u32>,
    /// Part of one GPU's time that it asks for, above 0 and below 1, with `mem_bytes` of its
    /// memory: it shares that GPU with others of which the parts add up to no more than one. Null:
    /// whole GPUs.
    #[schema(exclusive_minimum = 0, exclusive_maximum = 1)]
    pub share: Option<f64>,
    /// Memory quota on each device.
    pub mem_bytes: Option<u64>,
    /// How firmly.
    #[schema(value_type = openapi::Class)]
    pub class: Class,
    /// How long it takes solo, as its owner thinks.
    pub work_s: Option<f64>,
    /// From its submission.
    pub deadline_s: Option<f64>,
    /// Above 0; weighs among jobs. Null: 1.
    pub weight: Option<f64>,
    /// It keeps its progress itself: it may be stopped and started again, anywhere. Otherwise it
    /// stays where it started, and is paused if it has to make space.
    pub restartable: bool,
    /// Its memory may leave its devices while others run: it may be beside jobs with which it does
    /// not fit into a device's memory at once.
    pub evictable: bool,
    /// A word of the submitter's, such as a UUID: the same word twice is one job. Empty: none.
    pub once: String,
}

/// What a job is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobPhase {
    /// It waits for GPUs.
    #[default]
    Waiting,
    /// It was ordered to start, and its node has not confirmed it yet.
    Starting,
    /// It runs.
    Running,
    /// It holds its place on a node and gets no time.
    Paused,
    /// It was ordered to stop, and its node has not confirmed it yet.
    Stopping,
    /// It ended with exit code 0.
    Done,
    /// It ended otherwise.
    Failed,
    /// Its owner has taken it back.
    Cancelled,
}

impl JobPhase {
    /// Nothing more will come.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }

    /// As on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopping => "stopping",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A job as it stands.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct JobView {
    /// Its number, never used twice.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: String,
    /// What it is doing.
    pub phase: JobPhase,
    /// Why it waits or how it ended.
    pub reason: String,
    /// GPUs that it asks for.
    pub gpus: u32,
    /// Its node, while it has one.
    pub node: String,
    /// Its devices there, by UUID.
    pub devices: Vec<String>,
    /// Part of their time that it was given.
    #[schema(minimum = 0, maximum = 1)]
    pub share: f64,
    /// The job it shares them with; of several the one that came first.
    pub beside: Option<u64>,
    /// All jobs that it shares them with, the one that came first first.
    pub beside_all: Vec<u64>,
    /// Part of one GPU that it asks for; null: whole GPUs.
    pub share_asked: Option<f64>,
    /// Speed relative to solo, as last measured beside another.
    pub rate: Option<f64>,
    /// How often it was started.
    pub attempts: u32,
    /// How many of its attempts were stopped with all saved, at the end of an iteration.
    pub saved: u32,
    /// When it came.
    pub submitted_unix_ms: u64,
    /// When it first started.
    pub started_unix_ms: Option<u64>,
    /// When it was over.
    pub ended_unix_ms: Option<u64>,
    /// Its exit code.
    pub exit_code: Option<i32>,
}

/// A node as it stands.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct NodeView {
    /// Its name.
    pub name: String,
    /// It has reported lately.
    pub up: bool,
    /// Seconds since its last report; null: none since the hook started.
    pub silent_s: Option<f64>,
    /// Who starts jobs there.
    pub engine: String,
    /// Its devices.
    pub devices: Vec<Device>,
    /// Jobs of the hook on it.
    pub jobs: Vec<u64>,
    /// Orders that it has not acknowledged.
    pub open_orders: u64,
    /// Expected waits, as it last published them.
    pub waits: Vec<WaitMatrix>,
    /// Jobs of other engines, as it last reported them; none while it is silent.
    pub others: Vec<OtherJob>,
    /// Jobs of other engines that are to be off its devices, as it last reported them; none while
    /// it is silent.
    pub away: Vec<AwayJob>,
    /// Why it does nothing that this hook says. Empty: it does.
    pub refusal: String,
    /// Jobs in a row whose starts failed there.
    pub failed_starts: u64,
    /// Why the last of them failed, where so many did that the node gets no new jobs. Empty: it
    /// gets some.
    pub shut: String,
    /// Seconds until such a node is tried with one job; null: a job tries it, or the next one will.
    pub tried_in_s: Option<f64>,
    /// The job that tries it.
    pub trial: Option<u64>,
}

/// A line of the decision log.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct DecisionView {
    /// Counts up by one, over restarts too.
    pub seq: u64,
    /// When.
    pub unix_ms: u64,
    /// `place`, `suspend`, `resume`, `migrate`, `unpack`, `reshare`, `resize`, `reject`,
    /// `measured`, `fed`, ...
    pub kind: String,
    /// About whom; 0: about no job.
    pub job: u64,
    /// The job beside it, where there is one.
    pub beside: Option<u64>,
    /// In words.
    pub text: String,
}

/// What was measured of two kinds of job together.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PairView {
    /// Type of the GPU.
    pub gpu: String,
    /// GPUs of each.
    pub gpus: u32,
    /// The two kinds, the one that was there first first.
    pub kinds: [String; 2],
    /// Speed of each relative to being alone.
    pub rates: [f64; 2],
    /// The packer refuses the pair.
    pub refused: bool,
    /// It was not measured: this is what can be inferred from the pairs that were.
    pub estimated: bool,
    /// How sure the speeds are; 1: measured.
    #[schema(minimum = 0, maximum = 1)]
    pub confidence: f64,
    /// Nodes that measured it; 0: it was fed, or inferred.
    pub nodes: u64,
    /// Of three nodes or more, those whose figures are far from what counts.
    pub outliers: Vec<String>,
    /// When.
    pub unix_ms: u64,
}

/// How fast a kind of job is by itself on a type of GPU.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct SpeedView {
    /// Type of the GPU.
    pub gpu: String,
    /// GPUs of the job.
    pub gpus: u32,
    /// Its kind.
    pub kind: String,
    /// Iterations or submissions per second.
    pub per_s: f64,
    /// They are iterations.
    pub iterations: bool,
    /// Speed relative to the fastest type that the cluster has.
    #[schema(minimum = 0, maximum = 1)]
    pub relative: f64,
    /// It was measured, and not inferred from other kinds and types.
    pub measured: bool,
    /// How sure it is; 1: measured; 0: nothing is known, and it counts as fast as the mean of the
    /// types that were measured.
    #[schema(minimum = 0, maximum = 1)]
    pub confidence: f64,
    /// Nodes that measured it.
    pub nodes: u64,
    /// When, last.
    pub unix_ms: u64,
}

/// Bytes of a kind, a user, a word against repetition, at most.
pub const MAX_LABEL_BYTES: usize = 512;

/// The kind of a job that says none: its command line, as far as a kind may be long.
#[must_use]
pub fn kind_of_command(line: &str) -> String {
    let line = line.replace(char::is_control, " ");
    let end = (0..=line.len().min(MAX_LABEL_BYTES))
        .rev()
        .find(|at| line.is_char_boundary(*at));
    line[..end.unwrap_or(0)].to_owned()
}

/// A kind of job, as one of it was submitted last.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct KindView {
    /// Its kind.
    pub kind: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Names of its variables.
    pub variables: Vec<String>,
    /// What a caller knows of their values; the hook says none, as they may be secrets.
    #[serde(skip)]
    #[schema(ignore)]
    pub env: BTreeMap<String, String>,
    /// Where it runs; empty: in a directory of its own.
    pub dir: String,
    /// GPUs that it asks for.
    pub gpus: u32,
    /// Memory quota on each device.
    pub mem_bytes: Option<u64>,
    /// When that was.
    pub submitted_unix_ms: u64,
}

/// Pairs that were measured elsewhere: all of them are taken, or none.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Feed {
    /// Each in either order; a later one of two counts.
    pub pairs: Vec<FedPair>,
}

/// A pair that was measured elsewhere.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct FedPair {
    /// Type of the GPU, as its nodes call it.
    pub gpu: String,
    /// GPUs of each. 0 counts as 1.
    pub gpus: u32,
    /// The two kinds.
    pub kinds: [String; 2],
    /// Speed of each relative to being alone; above 1 counts as 1.
    pub rates: [f64; 2],
}

/// What became of them.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Fed {
    /// Pairs that were taken.
    pub taken: u64,
    /// Pairs in the table now.
    pub pairs: u64,
}

/// The hook as it stands.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct HookStatus {
    /// Which one.
    pub hook: HookId,
    /// Version of the binary.
    pub version: String,
    /// Its policies.
    pub policies: String,
    /// Since when it runs.
    pub started_unix_ms: u64,
    /// Its nodes.
    pub nodes: Vec<NodeView>,
    /// Jobs by phase.
    pub jobs: BTreeMap<String, u64>,
    /// Pairs that were measured, and, for a policy that uses them, what can be inferred of others.
    pub pairs: Vec<PairView>,
    /// Speeds by kind of job and type of GPU.
    pub speeds: Vec<SpeedView>,
    /// Past jobs whose GPU time is remembered.
    pub past_jobs: u64,
    /// Pairs made since the state was.
    pub packs: u64,
    /// Pairs split because they did not pay.
    pub unpacks: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_takes_its_default_and_what_is_unknown_is_ignored() {
        let report: Report = serde_json::from_str(
            r#"{"instance":"a","mood":"fine","runs":[{"run":{"job":3,"attempt":1}}]}"#,
        )
        .unwrap();
        assert_eq!(report.runs[0].run, RunId { job: 3, attempt: 1 });
        assert!(report.arbiter.is_none());
    }

    #[test]
    fn orders_travel_as_they_are() {
        for what in [
            What::Start(Box::default()),
            What::Set(Terms {
                share: Some(0.5),
                ..Terms::default()
            }),
            What::Stop {
                grace_s: 5.0,
                signal: None,
            },
            What::Stop {
                grace_s: 5.0,
                signal: Some(Signal {
                    gpus: 2,
                    patience_s: 30.0,
                }),
            },
        ] {
            let order = Order {
                epoch: 2,
                seq: 7,
                run: RunId { job: 1, attempt: 2 },
                what,
            };
            let text = serde_json::to_string(&order).unwrap();
            assert_eq!(
                serde_json::from_str::<Order>(&text).unwrap(),
                order,
                "{text}"
            );
        }
    }

    #[test]
    fn a_number_that_is_none_is_refused_with_its_place() {
        for bad in [r#"{"cpus":NaN}"#, r#"{"cpus":1e999}"#, r#"{"cpus":null}"#] {
            let error = serde_json::from_str::<Registration>(bad).unwrap_err();
            assert!(error.to_string().contains("line 1"), "{error}");
        }
    }
}
