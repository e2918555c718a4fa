//! What Slurm prints of jobs and nodes.
//!
//! A job's name, comment and paths are free text of its user, with spaces, `=` and newlines in it.
//! So jobs are read as JSON, where a value is one value, and of that only what no user writes as he
//! likes: numbers, states, lists of nodes, what the job was given, and `AdminComment`. The name
//! counts for nothing but the job's own kind. Lines about nodes are the operator's; a word there
//! counts where it comes first.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::hosts::{expand, places};
use super::{At, Away, Gpu, MARK, Phase, QueuedJob, Taken, said};
use crate::live::wire::kind_of_command;

/// The states of a node that takes jobs, and what may be added to them.
const USABLE: [&str; 3] = ["IDLE", "MIXED", "ALLOCATED"];
const HARMLESS: [&str; 3] = ["CLOUD", "DYNAMIC_NORM", "PLANNED"];
/// States of a job that holds what it was given.
const RUNNING: [&str; 7] = [
    "RUNNING",
    "SUSPENDED",
    "CONFIGURING",
    "COMPLETING",
    "STOPPED",
    "RESIZING",
    "SIGNALING",
];
/// Why a released job does not start, though there is a place for it.
const NOT_YET: [&str; 5] = [
    "JobHeldUser",
    "JobHeldAdmin",
    "Dependency",
    "DependencyNeverSatisfied",
    "BeginTime",
];

/// A value that one release writes as text and another as a list, or as a number and another as a
/// structure.
#[derive(Deserialize, Default)]
#[serde(untagged)]
enum Loose {
    Text(String),
    Number(u64),
    Flag(bool),
    Set {
        set: bool,
        number: u64,
    },
    Many(Vec<String>),
    Other(serde::de::IgnoredAny),
    #[default]
    Missing,
}

impl Loose {
    fn words(&self) -> &[String] {
        match self {
            Self::Text(text) => std::slice::from_ref(text),
            Self::Many(all) => all,
            _ => &[],
        }
    }

    fn text(&self) -> &str {
        self.words().first().map_or("", String::as_str)
    }

    fn number(&self) -> Option<u64> {
        match self {
            Self::Number(number) | Self::Set { set: true, number } => Some(*number),
            _ => None,
        }
    }

    fn is(&self, one_of: &[&str]) -> bool {
        let known = |word: &String| one_of.contains(&word.as_str());
        self.words().iter().any(known)
    }
}

#[derive(Deserialize)]
struct Queue {
    jobs: Vec<Said>,
}

/// A job, as `squeue --json` writes it.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Said {
    job_id: Loose,
    job_state: Loose,
    state_reason: Loose,
    priority: Loose,
    name: Loose,
    admin_comment: Loose,
    partition: Loose,
    nodes: Loose,
    required_nodes: Loose,
    excluded_nodes: Loose,
    features: Loose,
    resv_name: Loose,
    array_job_id: Loose,
    het_job_id: Loose,
    gres_detail: Loose,
    requeue: Loose,
    start_time: Loose,
}

impl Said {
    /// What was given to a running job, node by node.
    fn given(&self) -> Vec<Taken> {
        let nodes = expand(self.nodes.text()).unwrap_or_default();
        let each = nodes.iter().zip(self.gres_detail.words());
        each.flat_map(|(node, gres)| taken(node, gres)).collect()
    }

    /// Whether it runs and its user lets Slurm requeue it. One of an array stays: it has no number
    /// of its own.
    fn may_be_requeued(&self) -> bool {
        let array = self.array_job_id.number().is_some_and(|id| id > 0);
        matches!(self.job_state.words(), [state] if state == "RUNNING")
            && matches!(self.requeue, Loose::Flag(true) | Loose::Number(1))
            && !array
    }

    /// Whether it runs, and is no part of an array.
    fn may_be_suspended(&self) -> bool {
        let array = self.array_job_id.number().is_some_and(|id| id > 0);
        matches!(self.job_state.words(), [state] if state == "RUNNING") && !array
    }

    /// Why Slurm has to choose the node of a held job.
    fn for_slurm(&self) -> Option<&'static str> {
        let some = |value: &Loose| value.number().is_some_and(|number| number > 0);
        let set = |value: &Loose| !value.text().is_empty();
        [
            (set(&self.features), "it asks for features"),
            (set(&self.resv_name), "it has a reservation"),
            (some(&self.array_job_id), "it is of an array"),
            (some(&self.het_job_id), "it is heterogeneous"),
        ]
        .into_iter()
        .find_map(|(is, why)| is.then_some(why))
    }
}

/// Jobs that are ours to place or that have a part of a GPU, from `squeue --json`.
///
/// # Errors
/// It is no such queue.
pub fn jobs(json: &str) -> Result<Vec<QueuedJob>, String> {
    let queue: Queue = serde_json::from_str(json).map_err(|error| error.to_string())?;
    Ok(queue.jobs.iter().filter_map(job).collect())
}

fn job(said_of: &Said) -> Option<QueuedJob> {
    let id = said_of.job_id.number()?;
    let comment = said_of.admin_comment.text().strip_prefix(MARK);
    let comment = comment.unwrap_or_default();
    let held = said_of.priority.number() == Some(0);
    let shards = said(comment, "shards").and_then(|text| text.parse::<u64>().ok());
    let decided = || {
        let (node, kind) = said(comment, "at")?.split_once('/')?;
        Some(Taken {
            node: node.to_owned(),
            at: At::Kind(kind.to_owned()),
            shards: shards?,
        })
    };
    let (phase, taken) = if said_of.job_state.is(&RUNNING) {
        let given = said_of.given();
        // One that is suspended keeps what it has, whether Slurm lists that or not.
        let kept = said_of.job_state.is(&["SUSPENDED"]) && given.is_empty();
        let kept = kept.then(decided).flatten();
        (Phase::Running, kept.map_or(given, |kept| vec![kept]))
    } else if !said_of.job_state.is(&["PENDING"]) {
        return None;
    } else if held && comment.starts_with("hold,") {
        (Phase::Held, Vec::new())
    } else if held && comment.starts_with("place,at=") {
        (Phase::Decided, vec![decided()?])
    } else if held && comment.starts_with("requeue,at=") {
        (Phase::Returning, Vec::new())
    } else if (comment.starts_with("at=") || comment.starts_with("requeue,at="))
        && !held
        && !said_of.state_reason.is(&NOT_YET)
    {
        (Phase::Released, vec![decided()?])
    } else {
        // Slurm's own, or one that its user holds: it takes no place.
        return None;
    };
    let shards = match phase {
        Phase::Running => taken
            .iter()
            .fold(0, |sum: u64, one| sum.saturating_add(one.shards)),
        _ => shards?,
    };
    if shards == 0 {
        return None;
    }
    let list = |value: &Loose| expand(value.text());
    let partitions = said_of.partition.text().split(',');
    Some(QueuedJob {
        id,
        phase,
        name: kind_of_command(said_of.name.text()),
        shards,
        taken,
        comment: comment.to_owned(),
        started_s: match phase {
            Phase::Running => said_of.start_time.number().unwrap_or(0),
            _ => 0,
        },
        // One that is on its way into a suspension, or in one, goes nowhere else.
        may_go: said_of.may_be_requeued()
            && said(comment, "at").is_some()
            && !comment.starts_with("suspend"),
        may_stand: said_of.may_be_suspended()
            && said(comment, "evictable").is_some()
            && comment.starts_with("at="),
        is_suspended: said_of.job_state.is(&["SUSPENDED"]),
        partitions: partitions.map(str::to_owned).collect(),
        required: list(&said_of.required_nodes).unwrap_or_default(),
        excluded: list(&said_of.excluded_nodes).unwrap_or_default(),
        for_slurm: said_of.for_slurm().or_else(|| {
            let unread = list(&said_of.required_nodes)
                .zip(list(&said_of.excluded_nodes))
                .is_none();
            unread.then_some("its list of nodes is not understood")
        }),
    })
}

/// What `shard:8(IDX:1)`, `gpu:g0:0(IDX:),gpu:g1:1(IDX:1)` or `shard:g0:2(2/14,0/14)` take of a
/// node. A whole GPU takes all of its shards.
fn taken(node: &str, gres: &str) -> Vec<Taken> {
    let mut all = Vec::new();
    for part in outside_brackets(gres) {
        let (name, inside) = part.split_once('(').unwrap_or((part, ""));
        let inside = inside.trim_end_matches(')');
        let words: Vec<&str> = name.split([':', '/', '=']).collect();
        let (what, kind, count) = match words[..] {
            [what, count] => (what, None, count),
            [what, kind, count] => (what, Some(kind), count),
            _ => continue,
        };
        let count = count.parse::<u64>().unwrap_or(0);
        let whole = what == "gpu";
        if count == 0 || !(whole || what == "shard") {
            continue;
        }
        let mut take = |at, shards| {
            all.push(Taken {
                node: node.to_owned(),
                at,
                shards: if whole { u64::MAX } else { shards },
            });
        };
        if let Some(list) = inside.strip_prefix("IDX:") {
            // Of several GPUs nobody says how many of the shards are on which.
            for index in places(list) {
                take(At::Index(index), count);
            }
        } else if inside.contains('/') {
            for (index, used) in inside.split(',').enumerate() {
                let used = used.split('/').next().and_then(|used| used.parse().ok());
                if let Some(used) = used.filter(|used| *used > 0) {
                    take(At::Index(index), used);
                }
            }
        } else if let Some(kind) = kind {
            take(At::Kind(kind.to_owned()), count);
        }
    }
    all
}

/// The parts between commas that are in no bracket.
fn outside_brackets(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    text.split(move |c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth == 0
    })
}

/// Whether a job is still held and without shards, from `squeue -h -j JOB -O` with the columns
/// [`HELD_COLUMNS`]. None of them is its user's text but the last one, which has to be empty.
#[must_use]
pub fn still_held(line: &str, job: u64) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    let id = job.to_string();
    match words[..] {
        [said, "PENDING", "0", ref shards @ ..] => {
            // What was cleared leaves the word before it.
            said == id && matches!(shards, [] | ["N/A" | "(null)" | "gres:" | "gres/"])
        }
        _ => false,
    }
}

/// The columns for [`still_held`].
pub const HELD_COLUMNS: &str = "JobID:24,State:24,PriorityLong:24,tres-per-node:256";

/// The first value of each word of a line of `scontrol -o`.
pub(super) fn fields(line: &str) -> BTreeMap<&str, &str> {
    let words = line.split_whitespace();
    let mut fields = BTreeMap::new();
    for (name, value) in words.filter_map(|word| word.split_once('=')) {
        fields.entry(name).or_insert(value);
    }
    fields
}

/// Whether a node takes jobs: `MIXED`, `IDLE+CLOUD`. A sign behind the state, such as `IDLE*`, says
/// that it does not answer, starts, or ends.
fn is_usable(state: &str) -> bool {
    let mut words = state.split('+');
    words.next().is_some_and(|word| USABLE.contains(&word))
        && words.all(|word| HARMLESS.contains(&word))
}

/// Nodes with GPUs that take no jobs now, from `scontrol -o show node`.
#[must_use]
pub fn away(text: &str) -> Vec<Away> {
    let lines = text.lines().map(fields);
    let one = |fields: BTreeMap<&str, &str>| {
        let get = |name: &str| fields.get(name).copied().unwrap_or_default();
        let mut gres = outside_brackets(get("Gres"));
        let has_gpus = gres.any(|part| part.starts_with("gpu:"));
        let away = has_gpus && !get("NodeName").is_empty() && !is_usable(get("State"));
        away.then(|| Away {
            node: get("NodeName").to_owned(),
            state: get("State").to_owned(),
            partitions: get("Partitions").split(',').map(str::to_owned).collect(),
        })
    };
    lines.filter_map(one).collect()
}

/// The GPUs of nodes that take jobs, from `scontrol -o show node`.
#[must_use]
pub fn gpus(text: &str) -> Vec<Gpu> {
    let mut all = Vec::new();
    for line in text.lines() {
        let fields = fields(line);
        let get = |name: &str| fields.get(name).copied().unwrap_or_default();
        let node = get("NodeName");
        if node.is_empty() || !is_usable(get("State")) {
            continue;
        }
        // `gpu:g0:1(S:0),gpu:g1:1,shard:160`, or `shard:g0:80,shard:g1:80`
        let mut kinds: Vec<(String, usize)> = Vec::new();
        let mut shards: BTreeMap<&str, u64> = BTreeMap::new();
        let mut index = 0usize;
        for part in outside_brackets(get("Gres")) {
            let name = part.split('(').next().unwrap_or(part);
            let words: Vec<&str> = name.split(':').collect();
            let count = words.last().and_then(|count| count.parse::<u64>().ok());
            match (&words[..], count) {
                (["gpu", kind, _], Some(count)) => {
                    if count == 1 {
                        kinds.push(((*kind).to_owned(), index));
                    }
                    index = index.saturating_add(usize::try_from(count).unwrap_or(usize::MAX));
                }
                (["gpu", _], Some(count)) => {
                    index = index.saturating_add(usize::try_from(count).unwrap_or(usize::MAX));
                }
                (["shard", kind, _], Some(count)) => {
                    let known = shards.entry(*kind).or_default();
                    *known = known.saturating_add(count);
                }
                (["shard", _], Some(count)) => {
                    let known = shards.entry("").or_default();
                    *known = known.saturating_add(count);
                }
                _ => {}
            }
        }
        // CAST: a node has some dozens.
        let untyped = shards.get("").copied().unwrap_or(0) / (index as u64).max(1);
        let partitions: Vec<String> = get("Partitions").split(',').map(str::to_owned).collect();
        all.extend(kinds.into_iter().map(|(kind, index)| Gpu {
            node: node.to_owned(),
            shards: shards.get(kind.as_str()).copied().unwrap_or(untyped),
            kind,
            index,
            partitions: partitions.clone(),
        }));
    }
    all
}
