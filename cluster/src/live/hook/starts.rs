//! Starts that fail, and on which nodes.
//!
//! A node on which every start fails at once is always free, so that it would get job after job.
//! So failed starts are counted for each node, by job; a start that works begins the count anew.
//! After [`FEW`] jobs in a row the node is *shut*: what runs there goes on, nothing is started. It
//! is tried again with one job after a pause that doubles, and opens with the first start that
//! works.
//!
//! The fault may be the job's. A job that comes to nothing on several nodes is given up, and
//! counts for none of them. Until that is known, at most half of the nodes are shut; a job that
//! has started elsewhere shuts a node beyond that.

use std::collections::BTreeSet;

use control::{ControlError, ErrorCode};
use policy::cluster::{GpuId, NodeId};

use super::{Hook, NodeEntry};
use crate::live::clock::Now;
use crate::live::records::{FailedStart, RunRecord, StartsRecord};
use crate::live::wire::{Ended, NodeView, RunId};

/// So many jobs in a row shut a node.
const FEW: usize = 3;
/// Failed starts that are remembered of a node.
const KEPT: usize = 8;
/// A job that fails before it has run this long has failed at its start, in seconds: importing a
/// framework takes that long.
const MOMENTS_S: f64 = 15.0;
/// First pause of a node that is shut, in seconds.
const FIRST_PAUSE_S: f64 = 10.0;
/// Longest pause, in seconds.
const LONGEST_PAUSE_S: f64 = 600.0;
/// A job waits so long for another node than those where it failed, in seconds.
const AVOID_S: f64 = 600.0;
/// Exit code of `sublet run` where it has not started the command.
const NOT_STARTED: i32 = 125;
/// Where it cannot execute the program.
const NOT_EXECUTABLE: i32 = 126;
/// Where it does not find it.
const NOT_FOUND: i32 = 127;

/// What an attempt's end says of its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Start {
    /// Nothing of the job ran.
    Never,
    /// It ran for some moments, and failed.
    Soon,
    /// It did what it was to do, or ran for long enough.
    Worked,
    /// Nothing: it was stopped, or nobody knows how long it ran.
    Unknown,
}

/// Whether a node takes starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Door {
    /// It does.
    #[default]
    Open,
    /// One, to try it.
    Trying,
    /// None.
    Shut,
}

impl StartsRecord {
    pub(super) fn door(&self, now_s: f64) -> Door {
        match self.shut {
            false => Door::Open,
            true if self.trial.is_none() && now_s >= self.until_s => Door::Trying,
            true => Door::Shut,
        }
    }

    /// Until the next try.
    fn pause(&mut self, now_s: f64) {
        // CAST: bounded.
        let doubled = 2f64.powi(self.times.min(30) as i32);
        self.until_s = now_s + (FIRST_PAUSE_S * doubled).min(LONGEST_PAUSE_S);
        self.times = self.times.saturating_add(1);
    }
}

/// The message of `sublet run` that it cannot execute the job's program, and nothing before it on
/// stderr: a program that had run would not be missing.
fn is_not_executed(code: i32, words: &str, program: &str) -> bool {
    let fault = match code {
        NOT_FOUND => "not found",
        NOT_EXECUTABLE => "cannot be executed",
        _ => return false,
    };
    words.starts_with("sublet: ") && words.contains(&format!("{program}` {fault}"))
}

impl Hook {
    /// What the end of an attempt says of its start. `own`: the hook or the job's owner wanted it
    /// to end.
    pub(super) fn start_of(&self, job: u64, run: &RunRecord, ended: &Ended, own: bool) -> Start {
        if ended.well() {
            return Start::Worked;
        }
        if own {
            return Start::Unknown;
        }
        let command = self.jobs.get(&job).map(|job| &job.submission.command);
        let program = command.and_then(|command| command.first());
        let not_executed = ended
            .code
            .zip(program)
            .is_some_and(|(code, program)| is_not_executed(code, ended.words.trim(), program));
        if ended.never_started || ended.code == Some(NOT_STARTED) || not_executed {
            return Start::Never;
        }
        let since_s = self.now_s - run.seen_s.unwrap_or(run.ordered_s);
        match run.worked {
            true => Start::Worked,
            false if since_s < MOMENTS_S => Start::Soon,
            false if run.seen_s.is_some() => Start::Worked,
            // Its node was not heard while it ran.
            false => Start::Unknown,
        }
    }

    /// An attempt that its arbiter has: once it has run for long enough, its start has worked.
    pub(super) fn on_running(&mut self, node: &str, id: RunId) {
        let now_s = self.now_s;
        let watched = self.watches.get(&id.job);
        if watched.is_none_or(|watch| watch.attempt != id.attempt) {
            return;
        }
        let run = self.jobs.get_mut(&id.job).and_then(|job| job.run.as_mut());
        let Some(run) = run.filter(|run| !run.worked) else {
            return;
        };
        let seen_s = *run.seen_s.get_or_insert_with(|| {
            self.dirty.insert(id.job);
            now_s
        });
        if now_s - seen_s >= MOMENTS_S {
            run.worked = true;
            let ordered_s = run.ordered_s;
            self.dirty.insert(id.job);
            let tries = |starts: &mut StartsRecord| starts.trial == Some(id.job);
            let is_trial = self.starts(node).is_some_and(tries);
            self.start_worked(node, id.job, if is_trial { now_s } else { ordered_s });
        }
    }

    fn starts(&mut self, node: &str) -> Option<&mut StartsRecord> {
        self.nodes
            .get_mut(node)
            .map(|entry| &mut entry.record.starts)
    }

    fn keep_starts(&mut self, node: &str) {
        if let Some(entry) = self.nodes.get(node) {
            self.changes.nodes.retain(|record| record.name != node);
            self.changes.nodes.push(entry.record.clone());
        }
    }

    /// The job that tries a node has ended there. `true`: it was that one.
    pub(super) fn end_trial(&mut self, node: &str, job: u64) -> bool {
        let Some(starts) = self.starts(node).filter(|one| one.trial == Some(job)) else {
            return false;
        };
        starts.trial = None;
        self.keep_starts(node);
        true
    }

    /// A job is started on a node: where that one is shut, to try it.
    pub(super) fn begin_trial(&mut self, node: &str, job: u64) {
        let now_s = self.now_s;
        let Some(starts) = self.starts(node) else {
            return;
        };
        if starts.door(now_s) != Door::Trying {
            return;
        }
        starts.trial = Some(job);
        self.keep_starts(node);
        if let Some(entry) = self.nodes.get_mut(node) {
            entry.door = Door::Shut;
        }
        // For all others it is shut from now on.
        let own = self.places.iter().enumerate();
        let own = own.filter(|(_, (name, _))| name == node);
        // CAST: a place in the list of GPUs.
        let own: Vec<GpuId> = own.map(|(at, _)| GpuId(at as u32)).collect();
        let mut facts = self.shared.facts();
        for gpu in own {
            facts.trying.remove(&gpu);
            facts.shut.insert(gpu);
        }
        drop(facts);
        self.say("node", job, None, format!("{node} is tried with it"));
    }

    /// A job came to nothing on a node.
    pub(super) fn start_failed(&mut self, node: &str, job: u64, kind: &str, words: &str) {
        let now_s = self.now_s;
        if let Some(record) = self.jobs.get_mut(&job)
            && !record.failed_on.iter().any(|name| name == node)
        {
            record.failed_on.push(node.to_owned());
            self.dirty.insert(job);
        }
        // Not the node's fault where jobs of the kind do the same elsewhere.
        let confirmed = !kind.is_empty() && self.runs_elsewhere(kind, node);
        if !kind.is_empty() && !confirmed && self.clear_kind(kind, node) {
            return;
        }
        let Some(starts) = self.starts(node) else {
            return;
        };
        starts.failed.retain(|one| one.job != job);
        starts.failed.push(FailedStart {
            job,
            at_s: now_s,
            confirmed,
            kind: kind.to_owned(),
        });
        let too_many = starts.failed.len().saturating_sub(KEPT);
        starts.failed.drain(..too_many);
        starts.reason = words.to_owned();
        starts.failed_s = now_s;
        self.keep_starts(node);
    }

    /// The job that tried a node came to nothing.
    pub(super) fn trial_failed(&mut self, node: &str) {
        let now_s = self.now_s;
        if let Some(starts) = self.starts(node).filter(|one| one.shut) {
            starts.pause(now_s);
            self.keep_starts(node);
        }
    }

    /// Whether a job of a kind runs on another node, for longer than a failed start does.
    fn runs_elsewhere(&self, kind: &str, node: &str) -> bool {
        self.jobs.values().any(|job| {
            let run = job.run.as_ref();
            job.submission.kind == kind && run.is_some_and(|run| run.worked && run.node != node)
        })
    }

    /// Jobs of a kind fail within moments on another node too: it is the kind, and no node.
    fn clear_kind(&mut self, kind: &str, node: &str) -> bool {
        let is_it = |one: &FailedStart| one.kind == kind && !one.confirmed;
        let others = self.nodes.iter();
        let others = others
            .filter(|(name, entry)| *name != node && entry.record.starts.failed.iter().any(is_it));
        let mut all: Vec<String> = others.map(|(name, _)| name.clone()).collect();
        if all.is_empty() {
            return false;
        }
        all.push(node.to_owned());
        for name in all {
            self.clear(&name, is_it);
        }
        true
    }

    /// A job that was given up because it starts on none of several nodes counts for none of them.
    pub(super) fn clear_job(&mut self, job: u64) {
        let Some(record) = self.jobs.get_mut(&job) else {
            return;
        };
        let nodes = std::mem::take(&mut record.failed_on);
        if nodes.len() < 2 {
            return;
        }
        for node in nodes {
            self.clear(&node, |one| one.job == job);
        }
    }

    fn clear(&mut self, node: &str, which: impl Fn(&FailedStart) -> bool) {
        let Some(starts) = self.starts(node) else {
            return;
        };
        let before = starts.failed.len();
        starts.failed.retain(|one| !which(one));
        if starts.failed.len() == before {
            return;
        }
        if starts.shut && starts.failed.len() < FEW {
            self.open_node(node, "the jobs that failed there fail elsewhere, too");
        } else {
            self.keep_starts(node);
        }
    }

    /// A start worked: what failed on the node before `since_s` counts no more, nor what the job
    /// did. Where the job failed before, it was not the job.
    pub(super) fn start_worked(&mut self, node: &str, job: u64, since_s: f64) {
        let Some(record) = self.jobs.get_mut(&job) else {
            return;
        };
        let failed_on = std::mem::take(&mut record.failed_on);
        if record.failures > 0 || !failed_on.is_empty() {
            record.failures = 0;
            self.dirty.insert(job);
        }
        for other in failed_on.iter().filter(|other| *other != node) {
            let Some(starts) = self.starts(other) else {
                continue;
            };
            let own = starts.failed.iter_mut().find(|one| one.job == job);
            if let Some(one) = own {
                one.confirmed = true;
                self.keep_starts(other);
            }
        }
        self.pin(job);
        let Some(starts) = self.starts(node) else {
            return;
        };
        let before = starts.failed.len();
        starts.failed.retain(|one| one.at_s > since_s);
        if starts.shut && starts.failed.len() < FEW {
            self.open_node(node, "a job started there");
        } else if starts.failed.len() < before {
            self.keep_starts(node);
        }
    }

    fn open_node(&mut self, node: &str, why: &str) {
        let Some(starts) = self.starts(node) else {
            return;
        };
        *starts = StartsRecord::default();
        self.keep_starts(node);
        let text = format!("{node} gets jobs again: {why}");
        self.say("node", 0, None, text);
    }

    /// Shuts nodes where starts fail, and sees to those that were. The policies' view is made anew
    /// where one of them takes starts now and did not before, or the other way round.
    pub(super) fn watch_starts(&mut self) {
        let now_s = self.now_s;
        let (mut up, mut shut, mut suspects) = (0, 0, Vec::new());
        for (name, entry) in &self.nodes {
            let starts = &entry.record.starts;
            up += usize::from(entry.up);
            shut += usize::from(entry.up && starts.shut);
            if !starts.shut && starts.failed.len() >= FEW {
                let confirmed = starts.failed.iter().filter(|one| one.confirmed);
                suspects.push((name.clone(), confirmed.count() >= FEW));
            }
        }
        for (name, sure) in suspects {
            if sure || 2 * (shut + 1) <= up {
                shut += 1;
                self.shut_node(&name);
            }
        }
        let gone: Vec<String> = self
            .nodes
            .iter()
            .filter(|(name, entry)| {
                let trial = entry.record.starts.trial;
                trial.is_some_and(|job| self.runs_on(job).is_none_or(|node| node != *name))
            })
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            if let Some(starts) = self.starts(&name) {
                starts.trial = None;
            }
            self.keep_starts(&name);
        }
        let stale = self.nodes.iter().any(|(name, entry)| {
            let door = entry.record.starts.door(now_s);
            // The last job that ran there has ended.
            let left = door == Door::Shut && entry.in_view && !self.has_run(name);
            door != entry.door || left
        });
        if stale {
            self.rebuild();
        }
    }

    fn runs_on(&self, job: u64) -> Option<&str> {
        let run = self.jobs.get(&job)?.run.as_ref()?;
        Some(&run.node)
    }

    fn has_run(&self, node: &str) -> bool {
        let mut runs = self.jobs.values().filter_map(|job| job.run.as_ref());
        runs.any(|run| run.node == node)
    }

    fn shut_node(&mut self, node: &str) {
        let now_s = self.now_s;
        let Some(starts) = self.starts(node) else {
            return;
        };
        starts.shut = true;
        starts.pause(now_s);
        let text = format!(
            "{node} gets no new jobs: the last {} did not start there ({}); it is tried with one in {:.0} s",
            starts.failed.len(),
            starts.reason,
            starts.until_s - now_s
        );
        self.keep_starts(node);
        self.say("node", 0, None, text);
    }

    /// An agent that registers may have been mended: its node is tried again, at the earliest a
    /// pause after the last failure, so that an arbiter that ends again and again gets no more.
    pub(super) fn try_registered(&mut self, node: &str) {
        if let Some(starts) = self.starts(node).filter(|starts| starts.shut) {
            let soon_s = starts.failed_s + FIRST_PAUSE_S;
            if soon_s < starts.until_s {
                starts.until_s = soon_s;
                self.keep_starts(node);
            }
        }
    }

    /// An operator says that a node where starts failed may be tried again, now.
    ///
    /// # Errors
    /// There is no such node.
    pub fn retry(&mut self, node: &str, now: impl Into<Now>) -> Result<NodeView, ControlError> {
        self.advance(now);
        let now_s = self.now_s;
        let Some(starts) = self.starts(node) else {
            return Err(self.no_node(node));
        };
        if starts.shut && starts.until_s > now_s {
            starts.until_s = now_s;
            self.keep_starts(node);
            let text = format!("{node} is to be tried again, says an operator");
            self.say("node", 0, None, text);
        }
        // PANIC: it was there above.
        Ok(self.node_view(node, &self.nodes[node]))
    }

    pub(super) fn no_node(&self, node: &str) -> ControlError {
        let known: Vec<&str> = self.nodes.keys().map(String::as_str).collect();
        let error = ControlError::new(
            ErrorCode::Other("unknown_node".into()),
            format!("no node is called `{node}`"),
        );
        error.with_hint(format!("known: {}", known.join(", ")))
    }

    /// Whether a node that a job has not failed on could take it.
    pub(super) fn has_another_node(&self, job: u64) -> bool {
        let Some(record) = self.jobs.get(&job) else {
            return false;
        };
        let asked = &record.submission;
        let takes = |name: &String, entry: &NodeEntry| {
            let devices = entry.record.devices.iter();
            let fit = devices.filter(|one| asked.mem_bytes.unwrap_or(0) <= one.total_bytes);
            entry.up
                && entry.record.starts.door(self.now_s) == Door::Open
                && !record.failed_on.contains(name)
                && fit.count() >= asked.gpus as usize
        };
        self.nodes.iter().any(|(name, entry)| takes(name, entry))
    }

    /// Where a job's starts failed, for the placer.
    pub(super) fn avoided(&self, job: u64) -> Option<(f64, Vec<NodeId>)> {
        let record = self.jobs.get(&job)?;
        if record.failed_on.is_empty() {
            return None;
        }
        let own = self.places.iter().enumerate();
        let own = own.filter(|(_, (node, _))| record.failed_on.contains(node));
        // CAST: a place in the list of GPUs.
        let nodes: BTreeSet<NodeId> = own
            .map(|(at, _)| self.state.node_of(GpuId(at as u32)))
            .collect();
        let until_s = record.not_before_s + AVOID_S;
        Some((until_s, nodes.into_iter().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sublets_own_word_says_that_a_program_is_missing() {
        let missing = "sublet: command `./train` not found: give its path, or add its directory";
        assert!(is_not_executed(127, missing, "./train"));
        assert!(!is_not_executed(1, missing, "./train"));
        assert!(!is_not_executed(126, missing, "./train"));
        assert!(!is_not_executed(127, missing, "./other"));
        let script = "train.sh: line 3: ./train: not found";
        assert!(!is_not_executed(127, script, "./train"));
        assert!(!is_not_executed(127, &format!("a {missing}"), "./train"));
        let refused = "sublet: `/mnt/train` cannot be executed: Permission denied";
        assert!(is_not_executed(126, refused, "train"));
    }

    #[test]
    fn the_pause_doubles_up_to_a_bound() {
        let mut starts = StartsRecord {
            shut: true,
            ..StartsRecord::default()
        };
        let pauses: Vec<f64> = (0..100)
            .map(|_| {
                starts.pause(5.0);
                starts.until_s - 5.0
            })
            .collect();
        assert_eq!(pauses[..3], [10.0, 20.0, 40.0]);
        assert!(pauses.iter().all(|pause| *pause <= LONGEST_PAUSE_S));
        assert_eq!(pauses.last(), Some(&LONGEST_PAUSE_S));
    }
}
