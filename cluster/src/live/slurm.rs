//! Slurm's queue, as the packer sees it: what `scontrol` prints, the questions that follow from it
//! for `POST /v1/decide`, and the answer as words for `scontrol update`.
//!
//! No program is run here. `packaging/slurm/job_submit.lua` holds jobs of one GPU without shards;
//! the packer gives them shards of a GPU (`shard:g1:6`) and releases them. What was decided is kept
//! where Slurm's users look: in the job's `AdminComment`. So a packer has no state of its own, and
//! one that is started again goes on.
//!
//! A job is given shards once: Slurm 22.05 adds later ones of another type to those that are there,
//! and the job then waits for both.

use std::collections::BTreeMap;

use control::{Class, parse_bytes};

use super::placement::{Candidate, DecideRequest, Decided, JobProfile};
use super::wire::NodeView;

/// Bytes of a shard, where nothing else is said.
pub const SHARD_BYTES: u64 = 1 << 30;
/// Begins the comments that are ours.
const MARK: &str = "sublet:";

/// The fields of one line of `scontrol -o`: `Name=value`, apart by spaces.
fn fields(line: &str) -> BTreeMap<&str, &str> {
    // A value with spaces, such as a command line, loses what is behind the first: none of those
    // is looked at.
    let words = line.split_whitespace();
    words.filter_map(|word| word.split_once('=')).collect()
}

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
}

/// The GPUs of nodes that take jobs, from `scontrol -o show node`.
#[must_use]
pub fn gpus(text: &str) -> Vec<Gpu> {
    let mut all = Vec::new();
    for line in text.lines() {
        let fields = fields(line);
        let (Some(node), Some(state)) = (fields.get("NodeName"), fields.get("State")) else {
            continue;
        };
        // `MIXED`, `IDLE+CLOUD`; a star stands for one that does not answer.
        let usable = ["IDLE", "MIXED", "ALLOCATED"].iter().any(|good| {
            let rest = state.strip_prefix(good);
            rest.is_some_and(|rest| !rest.contains(['*', '$']) && !rest.contains("DRAIN"))
        });
        if !usable {
            continue;
        }
        let gres = fields.get("Gres").copied().unwrap_or_default();
        // `gpu:g0:1(S:0),gpu:g1:1,shard:160`
        let parts = gres
            .split(',')
            .map(|part| part.split('(').next().unwrap_or(part));
        let mut kinds = Vec::new();
        let mut shards = 0u64;
        for part in parts {
            match part.split(':').collect::<Vec<_>>()[..] {
                ["gpu", kind, "1"] => kinds.push(kind.to_owned()),
                ["shard", count] => shards += count.parse::<u64>().unwrap_or(0),
                ["shard", _, count] => shards += count.parse::<u64>().unwrap_or(0),
                _ => {}
            }
        }
        // CAST: a node has some dozens.
        let each = shards / (kinds.len() as u64).max(1);
        all.extend(kinds.into_iter().enumerate().map(|(index, kind)| Gpu {
            node: (*node).to_owned(),
            kind,
            index,
            shards: each,
        }));
    }
    all
}

/// What a job is to the packer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Held for a decision.
    Held,
    /// Decided, and still held: the packer ended in between.
    Decided,
    /// Decided; Slurm will start it.
    Released,
    /// It runs.
    Running,
}

/// A job of Slurm's that has shards.
#[derive(Clone, PartialEq, Debug)]
pub struct QueuedJob {
    /// Its number.
    pub id: u64,
    /// What it is to the packer.
    pub phase: Phase,
    /// Slurm's name for it: its kind.
    pub name: String,
    /// Shards that it asks for or has.
    pub shards: u64,
    /// Node and type of GPU, where it has or will have one.
    pub at: Option<(String, At)>,
    /// Its comment, without the mark: `hold,mem=6G,...`.
    pub comment: String,
}

/// Which GPU of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum At {
    /// By its place.
    Index(usize),
    /// By its type.
    Kind(String),
}

/// Type and count of `shard:g1:6`, `gres:shard:6`, `gres/shard=6`, `shard:g1:6(IDX:1)`.
fn shards_of(gres: &str) -> Option<(Option<String>, u64)> {
    gres.split(',').find_map(|part| {
        let at = part.find("shard")?;
        let rest = part[at + "shard".len()..].split('(').next()?;
        let words: Vec<&str> = rest
            .split([':', '=', '/'])
            .filter(|w| !w.is_empty())
            .collect();
        match words[..] {
            [] => Some((None, 1)),
            [count] => Some((None, count.parse().ok()?)),
            [kind, count] => Some((Some(kind.to_owned()), count.parse().ok()?)),
            _ => None,
        }
    })
}

/// Jobs with shards, from `scontrol -o -d show job`.
#[must_use]
pub fn jobs(text: &str) -> Vec<QueuedJob> {
    let mut all = Vec::new();
    for line in text.lines() {
        let fields = fields(line);
        let get = |name: &str| fields.get(name).copied().filter(|value| *value != "(null)");
        let Some(id) = get("JobId").and_then(|id| id.parse().ok()) else {
            continue;
        };
        let comment = get("AdminComment").and_then(|text| text.strip_prefix(MARK));
        let comment = comment.unwrap_or_default();
        let held = get("Priority") == Some("0");
        let phase = match get("JobState") {
            Some("RUNNING" | "SUSPENDED" | "CONFIGURING" | "COMPLETING") => Phase::Running,
            Some("PENDING") if comment.starts_with("hold") && held => Phase::Held,
            Some("PENDING") if comment.starts_with("place,at=") && held => Phase::Decided,
            // What its user holds after that is the user's to release.
            Some("PENDING") if said(comment, "at").is_some() => Phase::Released,
            _ => continue,
        };
        let asked = if phase == Phase::Held {
            let shards = said(comment, "shards").and_then(|text| text.parse().ok());
            shards.map(|shards| (None, shards))
        } else {
            get("TresPerNode").and_then(shards_of)
        };
        let Some((kind, shards)) = asked else {
            continue;
        };
        let at = match phase {
            Phase::Held => None,
            Phase::Decided | Phase::Released => get("ReqNodeList").zip(kind.map(At::Kind)),
            // `Nodes=n1 CPU_IDs=0 Mem=100 GRES=shard:g1:6(IDX:1)`
            Phase::Running => get("NodeList").zip(get("GRES").and_then(|gres| {
                let index = gres.split("IDX:").nth(1)?;
                let digits: String = index.chars().take_while(char::is_ascii_digit).collect();
                digits.parse().ok().map(At::Index).or(kind.map(At::Kind))
            })),
        };
        all.push(QueuedJob {
            id,
            phase,
            name: get("JobName").unwrap_or_default().to_owned(),
            shards,
            at: at.map(|(node, at)| (node.to_owned(), at)),
            comment: comment.to_owned(),
        });
    }
    all
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
        let share = said(&self.comment, "share").and_then(|text| text.parse::<f64>().ok());
        JobProfile {
            id: format!("slurm.{}", self.id),
            kind: self.name.clone(),
            class: class.unwrap_or_default(),
            mem_bytes: quota.or(Some(self.shards.saturating_mul(shard_bytes))),
            share: share.filter(|share| *share > 0.0 && *share <= 1.0),
            ..JobProfile::default()
        }
    }

    fn is_on(&self, gpu: &Gpu) -> bool {
        match &self.at {
            Some((node, At::Index(index))) => *node == gpu.node && *index == gpu.index,
            Some((node, At::Kind(kind))) => *node == gpu.node && *kind == gpu.kind,
            None => false,
        }
    }
}

/// The question about a held job, and the GPU behind each candidate. `nodes`: what the hook knows.
#[must_use]
pub fn question(
    job: &QueuedJob,
    gpus: &[Gpu],
    jobs: &[QueuedJob],
    nodes: &[NodeView],
    shard_bytes: u64,
) -> (DecideRequest, Vec<Gpu>) {
    let mut behind = Vec::new();
    let mut candidates = Vec::new();
    for gpu in gpus {
        let there = jobs
            .iter()
            .filter(|other| other.id != job.id && other.is_on(gpu));
        let there: Vec<&QueuedJob> = there.collect();
        let taken: u64 = there.iter().map(|other| other.shards).sum();
        if taken.saturating_add(job.shards) > gpu.shards {
            // Slurm would not start it there.
            continue;
        }
        let known = nodes.iter().find(|node| node.name == gpu.node);
        let device = known.and_then(|node| node.devices.get(gpu.index));
        candidates.push(Candidate {
            node: gpu.node.clone(),
            uuid: device.map_or_else(|| gpu.kind.clone(), |device| device.uuid.clone()),
            name: device.map_or_else(String::new, |device| device.name.clone()),
            total_bytes: gpu.shards.saturating_mul(shard_bytes),
            residents: there
                .iter()
                .map(|other| other.profile(shard_bytes))
                .collect(),
            ..Candidate::default()
        });
        behind.push(gpu.clone());
    }
    let request = DecideRequest {
        job: job.profile(shard_bytes),
        candidates,
    };
    (request, behind)
}

/// The words for `scontrol update` that put a job where it was decided.
#[must_use]
pub fn update(job: &QueuedJob, gpu: &Gpu, decided: &Decided) -> Vec<String> {
    let kept: Vec<&str> = ["mem", "share", "class"]
        .into_iter()
        .filter_map(|key| {
            let pair = job
                .comment
                .split(',')
                .find(|pair| pair.starts_with(&format!("{key}=")))?;
            (!pair.ends_with('=')).then_some(pair)
        })
        .collect();
    let slowdown = decided.expected_slowdown.unwrap_or(1.0);
    let mut comment = format!(
        "{MARK}place,at={}/{},device={},slowdown={slowdown:.2},confidence={:.2}",
        gpu.node, gpu.kind, decided.device, decided.confidence
    );
    for pair in kept {
        comment += ",";
        comment += pair;
    }
    vec![
        format!("JobId={}", job.id),
        format!("ReqNodeList={}", gpu.node),
        format!("Gres=shard:{}:{}", gpu.kind, job.shards),
        format!("AdminComment={comment}"),
    ]
}

/// The words that say that a decided job was released.
#[must_use]
pub fn settled(job: u64, comment: &str) -> Option<Vec<String>> {
    let comment = comment.strip_prefix("place,")?;
    Some(vec![
        format!("JobId={job}"),
        format!("AdminComment={MARK}{comment}"),
    ])
}

/// What a job's comment is once these words were carried out.
#[must_use]
pub fn comment_of(words: &[String]) -> &str {
    let comment = words
        .iter()
        .find_map(|word| word.strip_prefix("AdminComment="));
    comment
        .and_then(|text| text.strip_prefix(MARK))
        .unwrap_or_default()
}

/// The words that say why a job still waits, where they are not there yet.
#[must_use]
pub fn waits(job: &QueuedJob, reason: &str) -> Option<Vec<String>> {
    // Words of a comment are apart by nothing that `scontrol` prints as a space.
    let reason: String = reason
        .chars()
        .map(|c| {
            if c.is_whitespace() || matches!(c, ',' | '=') {
                '_'
            } else {
                c
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::wire::Device;

    const NODES: &str = "\
NodeName=n1 Arch=x86_64 CoresPerSocket=8 State=MIXED Gres=gpu:g0:1(S:0),gpu:g1:1(S:0),shard:32 Partitions=main
NodeName=n2 Arch=x86_64 State=IDLE Gres=gpu:g0:1,gpu:g1:1,shard:32
NodeName=n3 State=DOWN* Gres=gpu:g0:1,shard:16
NodeName=n4 State=IDLE+DRAIN Gres=gpu:g0:1,shard:16
NodeName=n5 State=IDLE* Gres=gpu:g0:1,shard:16
NodeName=n6 State=IDLE Gres=(null)";

    const JOBS: &str = "\
JobId=3 JobName=train UserId=a(1) Priority=42 JobState=RUNNING NodeList=n1 Nodes=n1 CPU_IDs=0 Mem=100 GRES=shard:g0:8(IDX:0) TresPerNode=gres:shard:g0:8 AdminComment=sublet:at=n1/g0,share=0.5
JobId=4 JobName=held UserId=a(1) Priority=0 JobState=PENDING Reason=JobHeldAdmin NodeList=(null) AdminComment=sublet:hold,mem=6G,share=0.25,class=,shards=6 Command=/a b=c
JobId=5 JobName=soon Priority=7 JobState=PENDING ReqNodeList=n2 TresPerNode=gres:shard:g1:12 AdminComment=sublet:at=n2/g1
JobId=10 JobName=half UserId=a(1) Priority=0 JobState=PENDING Reason=JobHeldAdmin ReqNodeList=n9 TresPerNode=gres:shard:g1:1 AdminComment=sublet:place,at=n9/g1
JobId=11 JobName=own UserId=a(1) Priority=0 JobState=PENDING Reason=JobHeldUser TresPerNode=gres:shard:g1:3 ReqNodeList=n9 AdminComment=sublet:at=n9/g1,shards=6
JobId=6 JobName=other Priority=0 JobState=PENDING TresPerNode=gres:shard:g0:6
JobId=7 JobName=cpu Priority=9 JobState=RUNNING NodeList=n1
JobId=8 JobName=plain Priority=9 JobState=RUNNING NodeList=n2 GRES=shard:g0:2(IDX:0) TresPerNode=gres/shard:2
JobId=9 JobName=done JobState=COMPLETED TresPerNode=gres:shard:6";

    #[test]
    fn gpus_of_nodes_that_take_jobs() {
        let all = gpus(NODES);
        let shown: Vec<_> = all
            .iter()
            .map(|g| (g.node.as_str(), g.kind.as_str(), g.index, g.shards))
            .collect();
        assert_eq!(
            shown,
            [
                ("n1", "g0", 0, 16),
                ("n1", "g1", 1, 16),
                ("n2", "g0", 0, 16),
                ("n2", "g1", 1, 16)
            ]
        );
    }

    #[test]
    fn jobs_that_count_and_the_one_that_is_asked_about() {
        let all = jobs(JOBS);
        let shown: Vec<_> = all
            .iter()
            .map(|job| (job.id, job.phase, job.shards))
            .collect();
        assert_eq!(
            shown,
            [
                (3, Phase::Running, 8),
                (4, Phase::Held, 6),
                (5, Phase::Released, 12),
                (10, Phase::Decided, 1),
                (11, Phase::Released, 3),
                (8, Phase::Running, 2)
            ]
        );
        assert_eq!(all[0].at, Some(("n1".into(), At::Index(0))));
        assert_eq!(all[2].at, Some(("n2".into(), At::Kind("g1".into()))));
        let profile = all[1].profile(SHARD_BYTES);
        assert_eq!(
            (profile.id.as_str(), profile.kind.as_str()),
            ("slurm.4", "held")
        );
        assert_eq!(
            (profile.mem_bytes, profile.share),
            (Some(6 << 30), Some(0.25))
        );
        assert_eq!(profile.class, Class::Guaranteed);
    }

    #[test]
    fn a_question_has_the_gpus_with_enough_shards_and_their_jobs() {
        let (gpus, jobs) = (gpus(NODES), jobs(JOBS));
        let nodes = [NodeView {
            name: "n2".into(),
            devices: vec![Device {
                uuid: "GPU-a".into(),
                name: "T4".into(),
                ..Device::default()
            }],
            ..NodeView::default()
        }];
        let (asked, behind) = question(&jobs[1], &gpus, &jobs, &nodes, SHARD_BYTES);
        let shown: Vec<_> = asked
            .candidates
            .iter()
            .map(|one| (one.node.as_str(), one.uuid.as_str(), one.residents.len()))
            .collect();
        // The second GPU of n2 has 4 shards left.
        assert_eq!(
            shown,
            [("n1", "g0", 1), ("n1", "g1", 0), ("n2", "GPU-a", 1)]
        );
        assert_eq!(behind.len(), 3);
        let decided = Decided {
            node: "n2".into(),
            device: "GPU-a".into(),
            expected_slowdown: Some(1.25),
            confidence: 0.9,
            ..Decided::default()
        };
        assert_eq!(
            update(&jobs[1], &behind[2], &decided),
            [
                "JobId=4",
                "ReqNodeList=n2",
                "Gres=shard:g0:6",
                "AdminComment=sublet:place,at=n2/g0,device=GPU-a,slowdown=1.25,confidence=0.90,mem=6G,share=0.25"
            ]
        );
    }

    #[test]
    fn a_released_job_s_comment_says_so() {
        let words = settled(4, "place,at=n2/g0,device=x").expect("words");
        assert_eq!(words, ["JobId=4", "AdminComment=sublet:at=n2/g0,device=x"]);
        assert_eq!(comment_of(&words), "at=n2/g0,device=x");
        assert_eq!(settled(4, "at=n2/g0"), None);
    }

    #[test]
    fn why_a_job_waits_is_written_once() {
        let mut job = jobs(JOBS).remove(1);
        let words = waits(&job, "no space, yet").unwrap();
        assert_eq!(
            words[1],
            "AdminComment=sublet:hold,mem=6G,share=0.25,class=,shards=6,waits=no_space__yet"
        );
        job.comment = words[1]
            .strip_prefix("AdminComment=sublet:")
            .unwrap()
            .to_owned();
        assert_eq!(waits(&job, "no space, yet"), None);
        assert!(waits(&job, "another").unwrap()[1].ends_with("shards=6,waits=another"));
    }

    #[test]
    fn lines_that_are_none_are_left_out() {
        for text in [
            "",
            "No jobs in the system",
            "JobId=x TresPerNode=gres:shard:1",
            "JobId=1 TresPerNode=gres:shard:a:b:c JobState=RUNNING",
            "JobId=1 JobState=RUNNING TresPerNode=gres:shard:-1",
        ] {
            assert_eq!(jobs(text), [], "{text}");
            assert_eq!(gpus(text), [], "{text}");
        }
        assert_eq!(
            gpus("NodeName=n State=IDLE Gres=gpu:g0:1,shard:99999999999999999999"),
            [Gpu {
                node: "n".into(),
                kind: "g0".into(),
                index: 0,
                shards: 0
            }]
        );
    }
}
