//! Jobs that turn out badly beside each other where the one that goes is evictable: it is suspended
//! in place of being requeued, loses no work, and goes on once the other one has ended.
//!
//! Slurm stops the processes of a job that it suspends, and a stopped process moves no memory. So
//! its memory leaves first, by its node's agent; it comes back once the job has been resumed. As
//! the packer may be killed at any point, each step is written down before it is done:
//!
//! ```text
//! sublet:at=n2/g1,...,evictable=1                 it runs
//! sublet:suspend,at=n2/g1,...,beside=12,...       its memory leaves, then `scontrol suspend`
//! sublet:suspended,at=n2/g1,...,beside=12,...     it stands until job 12 has ended
//! ```

use std::collections::BTreeMap;

use super::requeue::words;
use super::{Phase, QueuedJob, Trouble, said};
use crate::live::wire::NodeView;

const LEAVES: &str = "suspend,";
const STANDS: &str = "suspended,";
/// How long a job's memory may take to leave. TIMEOUT: the largest GPU's memory crosses a slow link
/// in some ten seconds, after the work on the device has ended.
const LEAVES_S: u64 = 120;

/// What becomes of a job that is to stand, or stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Next {
    /// It stays as it is.
    Wait,
    /// Its memory has left: Slurm is to suspend it.
    Suspend,
    /// Slurm has suspended it, and that is to be written down.
    Note,
    /// It cannot be suspended, for that reason, and runs on.
    GiveUp(String),
    /// The other job has ended: Slurm is to resume it.
    Resume,
    /// Somebody has resumed it: its memory is to come back.
    Back,
}

impl QueuedJob {
    /// Whether its memory is to be off the GPU, or was.
    #[must_use]
    pub fn is_away(&self) -> bool {
        let away = |begin| self.comment.starts_with(begin);
        self.phase == Phase::Running && (away(LEAVES) || away(STANDS))
    }

    /// The node that it was put on.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        said(&self.comment, "at")?.split_once('/').map(|at| at.0)
    }
}

/// What is next for a job that [is away](QueuedJob::is_away).
#[must_use]
pub fn next(job: &QueuedJob, jobs: &[QueuedJob], nodes: &[NodeView], now_s: u64) -> Next {
    let number = |key: &str| said(&job.comment, key).and_then(|text| text.parse::<u64>().ok());
    if job.comment.starts_with(STANDS) {
        let beside = number("beside");
        let runs = |one: &QueuedJob| {
            Some(one.id) == beside && one.phase == Phase::Running && !one.is_suspended
        };
        return match job.is_suspended {
            false => Next::Back,
            true if jobs.iter().any(runs) => Next::Wait,
            true => Next::Resume,
        };
    }
    if job.is_suspended {
        return Next::Note;
    }
    let name = format!("slurm.{}", job.id);
    let node = nodes
        .iter()
        .find(|node| Some(node.name.as_str()) == job.node());
    let reported = node.and_then(|node| node.away.iter().find(|one| one.name == name));
    match reported {
        Some(one) if one.evicted => return Next::Suspend,
        Some(one) if !one.reason.is_empty() => return Next::GiveUp(one.reason.clone()),
        _ => {}
    }
    // A time that is yet to come was written by another clock.
    let since = number("since").unwrap_or(0).min(now_s);
    match now_s - since {
        waited if waited < LEAVES_S => Next::Wait,
        _ => Next::GiveUp(format!(
            "its memory has not left the GPU within {LEAVES_S} s"
        )),
    }
}

/// The words that write down that a job is to stand.
#[must_use]
pub fn mark_away(job: &QueuedJob, trouble: &Trouble, now_s: u64) -> Vec<String> {
    words(
        job,
        &format!(
            "{LEAVES}{},beside={},slow={},slower={:.2},since={now_s}",
            job.comment, trouble.beside, trouble.slow, trouble.slowdown
        ),
    )
}

/// The words that write down that it stands.
#[must_use]
pub fn stand(job: &QueuedJob) -> Vec<String> {
    let rest = job.comment.strip_prefix(LEAVES).unwrap_or(&job.comment);
    words(job, &format!("{STANDS}{rest}"))
}

/// The words that take [`mark_away`] and [`stand`] back.
#[must_use]
pub fn go_on(job: &QueuedJob) -> Vec<String> {
    let rest = job.comment.strip_prefix(LEAVES);
    let rest = rest.or_else(|| job.comment.strip_prefix(STANDS));
    let rest = rest.unwrap_or(&job.comment);
    words(job, rest.split(",beside=").next().unwrap_or(rest))
}

/// Of these jobs, those on each node, by their names there.
#[must_use]
pub fn by_node<'a>(jobs: impl Iterator<Item = &'a QueuedJob>) -> BTreeMap<String, Vec<String>> {
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for job in jobs {
        if let Some(node) = job.node() {
            let name = format!("slurm.{}", job.id);
            all.entry(node.to_owned()).or_default().push(name);
        }
    }
    all
}
