//! Slurm's queue, as the packer sees it: what Slurm prints, the questions that follow from it for
//! `POST /v1/decide`, and the answer as words for `scontrol update`.
//!
//! No program is run here. `packaging/slurm/job_submit.lua` holds jobs of one GPU without shards;
//! the packer gives them shards of a GPU (`shard:g1:6`) and releases them. What was decided is kept
//! where Slurm's users look, and where none of them writes: in the job's `AdminComment`. So a
//! packer has no state of its own, and one that is started again goes on.
//!
//! A job is given shards once: Slurm 22.05 adds later ones of another type to those that are there,
//! and the job then waits for both.

mod extra;
mod hosts;
mod queue;
mod requeue;
mod suspend;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use control::kinds::Share;
use control::setting::Kind as _;
use control::{Class, parse_bytes};

pub use queue::{HELD_COLUMNS, away, gpus, jobs, still_held};
pub use requeue::{Limits, MOST_REQUEUES, Trouble, Watch, clear, mark, unmark};
pub use suspend::{Next, by_node, go_on, mark_away, next, stand};

use super::placement::{Candidate, DecideRequest, Decided, JobProfile};
use super::wire::NodeView;

/// Bytes of a shard, where nothing else is said.
pub const SHARD_BYTES: u64 = 1 << 30;
/// Nodes that a reason names at most.
const NAMED_NODES: usize = 4;
/// Begins the comments that are ours.
const MARK: &str = "sublet:";

/// A GPU as Slurm knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gpu {
    /// Its node.
    pub node: String,
    /// Its type, which no other GPU of the node has.
    pub kind: String,
    /// Its place among those of the node.
    pub index: usize,
    /// Shards on it.
    pub shards: u64,
    /// The partitions of its node.
    pub partitions: Vec<String>,
}

/// A node with GPUs that takes no jobs now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Away {
    /// Its name.
    pub node: String,
    /// What Slurm says of it: `DOWN*`, `IDLE+DRAIN`.
    pub state: String,
    /// Its partitions.
    pub partitions: Vec<String>,
}

/// What a job is to the packer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Held for a decision.
    Held,
    /// Decided, and still held: the packer ended in between.
    Decided,
    /// Slurm has requeued it for the packer: node and shards are still those of before.
    Returning,
    /// Decided; Slurm will start it.
    Released,
    /// It runs.
    Running,
}

/// A job of Slurm's that has shards, or will have.
#[derive(Clone, PartialEq, Debug)]
pub struct QueuedJob {
    /// Its number.
    pub id: u64,
    /// What it is to the packer.
    pub phase: Phase,
    /// Slurm's name for it, as far as a kind may be long: its kind.
    pub name: String,
    /// Shards that it asks for or has.
    pub shards: u64,
    /// What it takes of which GPUs, where it has or will have some.
    pub taken: Vec<Taken>,
    /// Its comment, without the mark: `hold,mem=6G,...`.
    pub comment: String,
    /// Partitions of which it may be in one.
    pub partitions: Vec<String>,
    /// Nodes that it has to run on; none: on any.
    pub required: Vec<String>,
    /// Nodes that it must not run on.
    pub excluded: Vec<String>,
    /// Why Slurm has to choose its node, where it has to.
    pub for_slurm: Option<&'static str>,
    /// When it started, in Unix seconds, while it runs.
    pub started_s: u64,
    /// It runs where the packer has put it, and its user lets it be requeued.
    pub may_go: bool,
    /// It runs there, and was submitted as evictable.
    pub may_stand: bool,
    /// Slurm has suspended it.
    pub is_suspended: bool,
}

/// A part of a GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Taken {
    /// The node.
    pub node: String,
    /// Which GPU.
    pub at: At,
    /// How much of it.
    pub shards: u64,
}

/// Which GPU of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum At {
    /// By its place.
    Index(usize),
    /// By its type.
    Kind(String),
}

/// The value of a key of a comment.
fn said<'a>(comment: &'a str, key: &str) -> Option<&'a str> {
    let mut pairs = comment.split(',').filter_map(|pair| pair.split_once('='));
    let found = pairs.find(|(name, _)| *name == key);
    let value = found.map(|(_, value)| value);
    value.filter(|value| !value.is_empty())
}

impl QueuedJob {
    /// The job for the hook.
    #[must_use]
    pub fn profile(&self, shard_bytes: u64) -> JobProfile {
        let quota = said(&self.comment, "mem").and_then(|text| parse_bytes(text).ok());
        let class = said(&self.comment, "class").and_then(|text| text.parse::<Class>().ok());
        let share = said(&self.comment, "share");
        JobProfile {
            id: format!("slurm.{}", self.id),
            kind: self.name.clone(),
            class: class.unwrap_or_default(),
            mem_bytes: quota.or(Some(self.shards.saturating_mul(shard_bytes))),
            share: share.and_then(|text| Share::parse(text).ok()),
            ..JobProfile::default()
        }
    }

    /// Whether it may run on a node of these partitions.
    fn may_be_on(&self, node: &str, partitions: &[String]) -> bool {
        self.partitions.iter().any(|one| partitions.contains(one))
            && self.excluded.iter().all(|other| *other != node)
            && self.required.iter().all(|one| *one == node)
    }

    /// Why no GPU can take it, with the nodes that could if they took jobs.
    #[must_use]
    pub fn without_place(&self, away: &[Away]) -> String {
        let left_out = away
            .iter()
            .filter(|one| self.may_be_on(&one.node, &one.partitions));
        let nodes: Vec<String> = left_out
            .take(NAMED_NODES)
            .map(|one| format!("{} is {}", one.node, one.state))
            .collect();
        let mut none = format!("no GPU has {} free shards", self.shards);
        if !self.apart().is_empty() {
            none += " away from the jobs that it was taken from";
        }
        match nodes.as_slice() {
            [] => none,
            nodes => format!("{none}; {}", nodes.join("; ")),
        }
    }
}

/// A GPU with what is on it.
#[derive(Debug)]
struct Place {
    gpu: Gpu,
    /// As the hook names it, and its product; without the hook's word its type.
    uuid: String,
    name: String,
    taken: u64,
    /// Jobs there.
    jobs: Vec<JobProfile>,
    /// Their numbers.
    ids: Vec<u64>,
    /// Those of them that run.
    running: Vec<Running>,
}

/// A job that runs on a GPU.
#[derive(Clone, Copy, Debug)]
struct Running {
    id: u64,
    started_s: u64,
    may_go: bool,
    may_stand: bool,
    requeued: u32,
}

/// All GPUs of one pass, with the jobs on them.
#[derive(Debug)]
pub struct Places {
    all: Vec<Place>,
    by_index: HashMap<(String, usize), usize>,
    by_kind: HashMap<(String, String), usize>,
    shard_bytes: u64,
}

impl Places {
    /// From Slurm's GPUs and jobs. `nodes`: what the hook knows.
    #[must_use]
    pub fn of(gpus: Vec<Gpu>, jobs: &[QueuedJob], nodes: &[NodeView], shard_bytes: u64) -> Self {
        let known: HashMap<&str, &NodeView> = nodes
            .iter()
            .map(|node| (node.name.as_str(), node))
            .collect();
        let mut places = Self {
            all: Vec::with_capacity(gpus.len()),
            by_index: HashMap::new(),
            by_kind: HashMap::new(),
            shard_bytes,
        };
        for gpu in gpus {
            let at = places.all.len();
            let node = known.get(gpu.node.as_str());
            let device = node.and_then(|node| node.devices.get(gpu.index));
            places.by_index.insert((gpu.node.clone(), gpu.index), at);
            let kind = (gpu.node.clone(), gpu.kind.clone());
            places.by_kind.insert(kind, at);
            places.all.push(Place {
                uuid: device.map_or_else(|| gpu.kind.clone(), |device| device.uuid.clone()),
                name: device.map_or_else(String::new, |device| device.name.clone()),
                gpu,
                taken: 0,
                jobs: Vec::new(),
                ids: Vec::new(),
                running: Vec::new(),
            });
        }
        for job in jobs {
            places.put(job);
        }
        places
    }

    /// A job onto its GPUs.
    pub fn put(&mut self, job: &QueuedJob) {
        for one in &job.taken {
            let node = one.node.clone();
            let at = match &one.at {
                At::Index(index) => self.by_index.get(&(node, *index)),
                At::Kind(kind) => self.by_kind.get(&(node, kind.clone())),
            };
            if let Some(at) = at {
                // PANIC: the maps have places of `all`.
                let place = &mut self.all[*at];
                place.taken = place.taken.saturating_add(one.shards);
                place.jobs.push(job.profile(self.shard_bytes));
                place.ids.push(job.id);
                // One that is suspended slows nobody down.
                if job.phase == Phase::Running && !job.is_suspended {
                    place.running.push(Running {
                        id: job.id,
                        started_s: job.started_s,
                        may_go: job.may_go,
                        may_stand: job.may_stand,
                        requeued: job.requeued(),
                    });
                }
            }
        }
    }

    /// The question about a held job, and the GPU behind each candidate.
    #[must_use]
    pub fn question(&self, job: &QueuedJob) -> (DecideRequest, Vec<&Gpu>) {
        let apart = job.apart();
        let free = |place: &&Place| {
            // Slurm would not start it elsewhere.
            let taken = place.taken.saturating_add(job.shards);
            taken <= place.gpu.shards
                && job.may_be_on(&place.gpu.node, &place.gpu.partitions)
                && !place.ids.iter().any(|id| apart.contains(id))
        };
        let (candidates, behind) = self
            .all
            .iter()
            .filter(free)
            .map(|place| {
                let candidate = Candidate {
                    node: place.gpu.node.clone(),
                    uuid: place.uuid.clone(),
                    name: place.name.clone(),
                    total_bytes: place.gpu.shards.saturating_mul(self.shard_bytes),
                    residents: place.jobs.clone(),
                    ..Candidate::default()
                };
                (candidate, &place.gpu)
            })
            .unzip();
        let request = DecideRequest {
            job: job.profile(self.shard_bytes),
            candidates,
        };
        (request, behind)
    }
}

/// The words for `scontrol update` that put a job where it was decided.
#[must_use]
pub fn update(job: &QueuedJob, gpu: &Gpu, decided: &Decided) -> Vec<String> {
    let slowdown = decided.expected_slowdown.unwrap_or(1.0);
    let mut comment = format!(
        "{MARK}place,at={}/{},device={},slowdown={slowdown:.2},confidence={:.2}",
        gpu.node, gpu.kind, decided.device, decided.confidence
    );
    for key in [
        "mem",
        "share",
        "class",
        "evictable",
        "requeued",
        "apart",
        "because",
    ] {
        if let Some(value) = said(&job.comment, key) {
            comment += &format!(",{key}={value}");
        }
    }
    comment += &format!(",shards={}", job.shards);
    let mut words = vec![
        format!("JobId={}", job.id),
        format!("ReqNodeList={}", gpu.node),
        format!("Gres=shard:{}:{}", gpu.kind, job.shards),
        format!("AdminComment={comment}"),
    ];
    if job.requeued() > 0 {
        // Slurm lets a requeued job wait for two minutes; it has waited.
        words.push("StartTime=now".into());
    }
    words
}

/// The job once the words of [`update`] were carried out.
pub fn updated(job: &mut QueuedJob, gpu: &Gpu, words: &[String]) {
    job.phase = Phase::Decided;
    job.taken = vec![Taken {
        node: gpu.node.clone(),
        at: At::Kind(gpu.kind.clone()),
        shards: job.shards,
    }];
    let comment = words.iter().find_map(|w| w.strip_prefix("AdminComment="));
    let comment = comment.and_then(|text| text.strip_prefix(MARK));
    comment.unwrap_or_default().clone_into(&mut job.comment);
}

/// The words that say that a decided job was released.
#[must_use]
pub fn settled(job: &QueuedJob) -> Option<Vec<String>> {
    let comment = job.comment.strip_prefix("place,")?;
    Some(vec![
        format!("JobId={}", job.id),
        format!("AdminComment={MARK}{comment}"),
    ])
}

/// The words that say why a job still waits, where they are not there yet.
#[must_use]
pub fn waits(job: &QueuedJob, reason: &str) -> Option<Vec<String>> {
    let reason: String = reason
        .chars()
        .map(|c| match c {
            ',' | '=' => '_',
            c if c.is_whitespace() || c.is_control() => '_',
            c => c,
        })
        .take(200)
        .collect();
    let base = job.comment.split(",waits=").next().unwrap_or_default();
    let comment = format!("{base},waits={reason}");
    (comment != job.comment).then(|| {
        vec![
            format!("JobId={}", job.id),
            format!("AdminComment={MARK}{comment}"),
        ]
    })
}
