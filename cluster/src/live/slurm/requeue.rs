//! Jobs that turn out badly beside each other: which one of them goes, and the words for it.
//!
//! The job that came last goes, where the packer has put it there and its user lets it be requeued.
//! Slurm ends it in between, and the packer may be killed at any point, so each step is written
//! down before it is done:
//!
//! ```text
//! sublet:at=n2/g1,...                                      it runs
//! sublet:requeue,at=n2/g1,...,beside=12,slower=2.31        then `scontrol requeuehold`
//! sublet:hold,...,requeued=1,apart=12,after=1795687449     it waits, without shards
//! ```
//!
//! So that no job goes back and forth: it is never again put beside a job that it was taken from,
//! it waits longer each time, and it is requeued only so often, and only soon after its start.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::{MARK, Phase, Places, QueuedJob, said};
use crate::live::wire::NodeView;

/// A slowdown is believed from this confidence on.
const TRUSTED: f64 = 0.5;
/// Looks that a slowdown is seen in at least.
const LOOKS: u32 = 3;
/// The first wait after a requeue, in seconds; each later one is twice as long.
const PAUSE_S: u64 = 60;
/// The longest.
const LONGEST_PAUSE_S: u64 = 3600;
/// Times that a job may be requeued at most: its comment names a neighbour for each.
pub const MOST_REQUEUES: u32 = 8;

/// When jobs are requeued.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Limits {
    /// A job that runs slower than this relative to solo turns out badly.
    pub slowdown: f64,
    /// For so long without a break.
    pub sustained: Duration,
    /// No later than this after its start: its work since then is lost.
    pub within_s: u64,
    /// So often each job.
    pub most: u32,
    /// Evictable jobs are suspended in place of being requeued, whenever they have started: no work
    /// is lost.
    pub suspends: bool,
}

/// A job that is too slow beside another.
#[derive(Clone, PartialEq, Debug)]
pub struct Trouble {
    /// The one that is slow.
    pub slow: u64,
    /// Time of its iteration, relative to solo.
    pub slowdown: f64,
    /// The one that came last, which goes; it may be the slow one.
    pub goes: u64,
    /// Another one on the GPU: the slow one, or where that one goes, the one before it.
    pub beside: u64,
}

impl QueuedJob {
    /// How often it was requeued.
    #[must_use]
    pub fn requeued(&self) -> u32 {
        let count = said(&self.comment, "requeued").and_then(|text| text.parse().ok());
        count.unwrap_or(0)
    }

    /// Jobs that it is not to be put beside.
    pub(super) fn apart(&self) -> Vec<u64> {
        let list = said(&self.comment, "apart").unwrap_or_default();
        list.split('+').filter_map(|id| id.parse().ok()).collect()
    }

    /// Whether it has to wait for a while yet after it was requeued. A time that no requeue can
    /// have set, as where the clock was wrong then, does not count.
    #[must_use]
    pub fn is_paused(&self, now_s: u64) -> bool {
        let after = said(&self.comment, "after").and_then(|text| text.parse::<u64>().ok());
        let left = after.unwrap_or(0).saturating_sub(now_s);
        (1..=LONGEST_PAUSE_S).contains(&left)
    }

    /// Whether it was to be requeued, and it never came to that: it runs on.
    #[must_use]
    pub fn is_marked(&self) -> bool {
        self.phase == Phase::Running && self.may_go && self.comment.starts_with("requeue,")
    }
}

impl Places {
    /// Jobs that are slower than the limit beside others, each with the one that has to go.
    #[must_use]
    pub fn troubles(&self, nodes: &[NodeView], limits: &Limits, now_s: u64) -> Vec<Trouble> {
        let measured: HashMap<(&str, &str), f64> = nodes
            .iter()
            .filter(|node| node.up)
            .flat_map(|node| {
                let trusted = node.others.iter().filter(|job| job.confidence >= TRUSTED);
                trusted.map(|job| ((node.name.as_str(), job.name.as_str()), job.slowdown))
            })
            .collect();
        let mut troubles = Vec::new();
        for place in &self.all {
            let mut there: Vec<_> = place.running.iter().collect();
            there.sort_unstable_by_key(|job| (job.started_s, job.id));
            let Some((last, earlier)) = there.split_last() else {
                continue;
            };
            let Some(previous) = earlier.last() else {
                continue;
            };
            let soon = now_s.saturating_sub(last.started_s) <= limits.within_s;
            let may_go = last.may_go && soon && last.requeued < limits.most.min(MOST_REQUEUES);
            if !(may_go || limits.suspends && last.may_stand) {
                continue;
            }
            let slowdown = |id: u64| {
                let name = format!("slurm.{id}");
                let key = (place.gpu.node.as_str(), name.as_str());
                measured.get(&key).copied().unwrap_or(0.0)
            };
            let worst = there.iter().map(|job| (slowdown(job.id), job.id));
            let worst = worst.max_by(|one, other| one.0.total_cmp(&other.0));
            if let Some((slowdown, slow)) = worst.filter(|(found, _)| *found > limits.slowdown) {
                troubles.push(Trouble {
                    slow,
                    slowdown,
                    goes: last.id,
                    beside: if slow == last.id { previous.id } else { slow },
                });
            }
        }
        troubles
    }
}

/// Troubles over time.
#[derive(Debug, Default)]
pub struct Watch {
    /// Since when each job that would go is the reason, and in how many looks it was.
    seen: HashMap<(u64, u64), (Instant, u32)>,
    /// Jobs that Slurm would not requeue.
    refused: HashSet<u64>,
}

impl Watch {
    /// Those of the troubles that have lasted.
    pub fn step(
        &mut self,
        troubles: Vec<Trouble>,
        jobs: &[QueuedJob],
        sustained: Duration,
        now: Instant,
    ) -> Vec<Trouble> {
        let key = |trouble: &Trouble| (trouble.goes, trouble.beside);
        let now_there: HashSet<_> = troubles.iter().map(key).collect();
        self.seen.retain(|key, _| now_there.contains(key));
        if !self.refused.is_empty() {
            let known: HashSet<u64> = jobs.iter().map(|job| job.id).collect();
            self.refused.retain(|id| known.contains(id));
        }
        let mut lasting = Vec::new();
        for trouble in troubles {
            let (since, looks) = self.seen.entry(key(&trouble)).or_insert((now, 0));
            *looks = looks.saturating_add(1);
            let has_lasted = *looks >= LOOKS && now.duration_since(*since) >= sustained;
            if has_lasted && !self.refused.contains(&trouble.goes) {
                lasting.push(trouble);
            }
        }
        lasting
    }

    /// Slurm does not requeue this one: it is not asked again.
    pub fn refuse(&mut self, job: u64) {
        self.refused.insert(job);
    }
}

/// The words that write down that a job is to be requeued.
#[must_use]
pub fn mark(job: &QueuedJob, trouble: &Trouble) -> Vec<String> {
    words(
        job,
        &format!(
            "requeue,{},beside={},slow={},slower={:.2}",
            job.comment, trouble.beside, trouble.slow, trouble.slowdown
        ),
    )
}

/// The words that take [`mark`] back.
#[must_use]
pub fn unmark(job: &QueuedJob) -> Vec<String> {
    let comment = job.comment.strip_prefix("requeue,").unwrap_or(&job.comment);
    words(job, comment.split(",beside=").next().unwrap_or(comment))
}

/// The words that take node and shards from a job that Slurm has requeued, so that it is placed
/// anew.
#[must_use]
pub fn clear(job: &QueuedJob, now_s: u64) -> Vec<String> {
    let get = |key: &str| said(&job.comment, key).unwrap_or_default();
    let count = job.requeued().saturating_add(1);
    let pause_s = PAUSE_S.saturating_mul(1u64.checked_shl(count - 1).unwrap_or(u64::MAX));
    let pause_s = pause_s.min(LONGEST_PAUSE_S);
    let mut apart = job.apart();
    apart.extend(get("beside").parse::<u64>());
    let from = apart.len().saturating_sub(MOST_REQUEUES as usize);
    let apart: Vec<String> = apart[from..].iter().map(u64::to_string).collect();
    let mut comment = "hold".to_owned();
    for key in ["mem", "share", "class"] {
        comment += &format!(",{key}={}", get(key));
    }
    if !get("evictable").is_empty() {
        comment += ",evictable=1";
    }
    comment += &format!(
        ",requeued={count},apart={},after={},because=slurm.{}_ran_{}_times_slower,shards={}",
        apart.join("+"),
        now_s.saturating_add(pause_s),
        get("slow"),
        get("slower"),
        job.shards
    );
    let said = words(job, &comment);
    let none = ["ReqNodeList=".to_owned(), "Gres=".to_owned()];
    said[..1]
        .iter()
        .cloned()
        .chain(none)
        .chain(said[1..].iter().cloned())
        .collect()
}

pub(super) fn words(job: &QueuedJob, comment: &str) -> Vec<String> {
    vec![
        format!("JobId={}", job.id),
        format!("AdminComment={MARK}{comment}"),
    ]
}
