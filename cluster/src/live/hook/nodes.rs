//! Reports of nodes: identity, results of orders, attempts, and metered figures.

use std::collections::BTreeSet;

use control::{ControlError, ErrorCode};
use policy::cluster::JobId;

use super::place::residents;
use super::starts::Start;
use super::{Hook, NodeEntry, invalid, refuse};
use crate::live::clock::Now;
use crate::live::records::{NodeRecord, StartsRecord};
use crate::live::wire::{
    API_MAJOR, Ack, Away, AwayJob, Ended, JobPhase, MAX_OTHERS, Order, Orders, OtherJob,
    Registration, Report, RunId, RunReport, Welcome, What, is_slurms,
};

/// Devices of a node at most: what a mask of free GPUs holds.
const MAX_DEVICES: usize = 64;
/// Nodes at most.
const MAX_NODES: usize = 1024;
/// A job whose start came to nothing this often is given up.
const MAX_FAILURES: u32 = 5;
/// Longest wait between two starts, in seconds.
const MAX_BACKOFF_S: f64 = 60.0;
/// Bytes of orders in an answer: below what is taken as one body.
const ORDERS_BYTES: usize = 4 << 20;
/// Bytes of a word that a node says of itself: the longest is a path.
const MAX_WORD_BYTES: usize = 4300;
/// Bytes of a job's last words that are kept.
const WORDS_BYTES: usize = 500;

impl Hook {
    /// A node introduces itself, or comes back.
    ///
    /// # Errors
    /// Its name is taken by another one, or what it says makes no sense.
    pub fn register(
        &mut self,
        name: &str,
        said: Registration,
        now: impl Into<Now>,
    ) -> Result<Welcome, ControlError> {
        self.advance(now);
        if said.api != API_MAJOR {
            let message = format!(
                "this hook speaks version {API_MAJOR} of the API, the arbiter speaks {}",
                said.api
            );
            return Err(ControlError::new(ErrorCode::VersionMismatch, message)
                .with_hint("use the same `sublet` on the hook's host and on the nodes"));
        }
        if control::check_name(name).is_err() {
            let message = format!("`{name}` is no name of a node");
            return Err(invalid(message, "write letters, digits, `.`, `_` or `-`"));
        }
        if !said.refusal.is_empty() {
            self.refused_by(name, &shorten(&said.refusal));
            return Ok(Welcome {
                hook: self.id.clone(),
                report_ms: self.config.report_ms,
            });
        }
        check_devices(&said)?;
        check_words(&said)?;
        let mut record = NodeRecord {
            name: name.to_owned(),
            instance: said.instance,
            machine: said.machine,
            boot: said.boot,
            engine: said.engine,
            version: said.version,
            cpus: if said.cpus.is_finite() {
                said.cpus.max(0.0)
            } else {
                0.0
            },
            mem_bytes: said.mem_bytes,
            moves_memory: said.moves_memory,
            devices: said.devices,
            starts: StartsRecord::default(),
        };
        match self.nodes.get(name) {
            None if self.nodes.len() >= MAX_NODES => {
                return Err(refuse(
                    format!("{MAX_NODES} nodes are known already"),
                    "forget some",
                ));
            }
            None => {}
            Some(known) if known.record.instance == record.instance => {}
            Some(known) => {
                let rebooted = known.record.machine == record.machine
                    && known.record.boot != record.boot
                    && !record.machine.is_empty();
                if rebooted {
                    self.give_up(name, "its node was started anew");
                } else if self.holds(name) || self.is_heard(known) {
                    let message = format!(
                        "the name `{name}` belongs to another arbiter (instance {}, this one is {}), which has jobs or reported lately",
                        known.record.instance, record.instance
                    );
                    let hint = "give this one another --cluster-node, or `sublet cluster forget` the other";
                    return Err(refuse(message, hint));
                }
            }
        }
        if let Some(known) = self.nodes.get(name) {
            // What was given up above may have counted.
            record.starts = known.record.starts.clone();
        }
        let changed = self
            .nodes
            .get(name)
            .is_none_or(|known| known.record != record);
        self.refusals.remove(name);
        let entry = self.nodes.entry(name.to_owned()).or_default();
        entry.heard_s = Some(self.now_s);
        if changed {
            entry.record = record.clone();
            entry.up = false;
            self.changes.nodes.push(record);
            self.changes.dropped_nodes.retain(|dropped| dropped != name);
            self.say("node", 0, None, format!("{name} is registered"));
        }
        self.try_registered(name);
        self.watch_nodes();
        Ok(Welcome {
            hook: self.id.clone(),
            report_ms: self.config.report_ms,
        })
    }

    /// A node reports that it refuses this hook. It counts as silent: its jobs are another hook's.
    fn refused_by(&mut self, node: &str, why: &str) {
        let known = self.refusals.len() < MAX_NODES || self.refusals.contains_key(node);
        if !known || self.refusals.get(node).is_some_and(|said| said == why) {
            return;
        }
        self.refusals.insert(node.to_owned(), why.to_owned());
        self.say(
            "node",
            0,
            None,
            format!("{node} does nothing that this hook says: {why}"),
        );
    }

    fn holds(&self, node: &str) -> bool {
        self.jobs
            .values()
            .any(|job| job.run.as_ref().is_some_and(|run| run.node == node))
            || self
                .orders
                .get(node)
                .is_some_and(|orders| !orders.is_empty())
    }

    fn is_heard(&self, entry: &NodeEntry) -> bool {
        entry
            .heard_s
            .is_some_and(|at| self.now_s - at <= self.config.silent_s)
    }

    /// Nodes that fell silent or came back since the last look.
    pub(super) fn watch_nodes(&mut self) {
        let mut news = Vec::new();
        for (name, entry) in &self.nodes {
            let up = self.is_heard(entry);
            if up != entry.up {
                news.push((name.clone(), up));
            }
        }
        if news.is_empty() {
            return;
        }
        for (name, up) in news {
            if let Some(entry) = self.nodes.get_mut(&name) {
                entry.up = up;
            }
            let word = if up {
                "reports"
            } else {
                "is silent: it gets nothing new, and keeps its jobs"
            };
            self.say("node", 0, None, format!("{name} {word}"));
        }
        self.rebuild();
    }

    /// What an agent says each second; the answer is what it is to do.
    ///
    /// # Errors
    /// The node is not known (it has to register), or another one has its name.
    pub fn report(
        &mut self,
        name: &str,
        report: Report,
        now: impl Into<Now>,
    ) -> Result<Orders, ControlError> {
        self.advance(now);
        let Some(entry) = self.nodes.get_mut(name) else {
            let error = ControlError::new(
                ErrorCode::Other("unknown_node".into()),
                format!("no node is called `{name}`"),
            );
            return Err(error.with_hint("register it first"));
        };
        if entry.record.instance != report.instance {
            let message = format!("the name `{name}` belongs to another arbiter now");
            return Err(refuse(
                message,
                "give one of the two another --cluster-node",
            ));
        }
        entry.heard_s = Some(self.now_s);
        if let Some(arbiter) = &report.arbiter {
            entry.host_limit_bytes = arbiter.host_memory_limit_bytes;
        }
        entry.waits = report.waits.into_iter().take(MAX_DEVICES).collect();
        entry.others = report
            .others
            .into_iter()
            .filter(is_one)
            .take(MAX_OTHERS)
            .collect();
        entry.away = report
            .away
            .into_iter()
            .filter(|one| control::check_name(&one.name).is_ok())
            .map(|one| AwayJob {
                reason: shorten(&one.reason),
                ..one
            })
            .take(MAX_OTHERS)
            .collect();
        self.watch_nodes();
        self.note_waits();
        let mut acked_seq = 0;
        for ack in &report.acks {
            acked_seq = acked_seq.max(ack.seq);
            self.on_ack(name, ack);
        }
        if let Some(arbiter) = &report.arbiter {
            self.on_metered(name, arbiter, &report.runs);
            if let Some(entry) = self.nodes.get_mut(name) {
                entry.residents = residents(&entry.record, arbiter);
            }
        }
        let mut settled = Vec::new();
        for run in &report.runs {
            if run.saved {
                self.on_saved(name, run.run);
            }
            match &run.ended {
                Some(ended) => {
                    self.on_end(name, run.run, ended);
                    settled.push(run.run);
                }
                None => self.on_alive(name, run),
            }
        }
        let listed: BTreeSet<RunId> = report.runs.iter().map(|run| run.run).collect();
        self.miss(name, &listed);
        self.reconcile();
        // As many as an answer holds; the others come once these are acknowledged.
        let mut bytes = 0;
        let open = self.orders.get(name).into_iter().flatten();
        let orders = open
            .map(|(_, order)| order.clone())
            .take_while(|order| {
                let first = bytes == 0;
                bytes += weight(order);
                first || bytes <= ORDERS_BYTES
            })
            .collect();
        Ok(Orders {
            hook: self.id.clone(),
            acked_seq,
            settled,
            orders,
            away: self
                .away
                .as_ref()
                .map(|all| all.get(name).cloned().unwrap_or_default()),
        })
    }

    /// Takes note of which jobs of other engines are to be off the devices. Nothing of it is kept
    /// over a restart: who says it says it again and again.
    ///
    /// # Errors
    /// What is no job, or more than there can be.
    pub fn keep_away(&mut self, away: Away) -> Result<Away, ControlError> {
        let jobs = away.nodes.values().flatten();
        if let Some(bad) = jobs.clone().find(|name| !is_slurms(name)) {
            return Err(invalid(
                format!("`{}` is no job of another engine", shorten(bad)),
                "write it as its node's arbiter does: slurm.7",
            ));
        }
        if away.nodes.len() > MAX_NODES || away.nodes.values().any(|jobs| jobs.len() > MAX_OTHERS) {
            return Err(invalid(
                format!("more than {MAX_NODES} nodes, or {MAX_OTHERS} jobs of one"),
                "name fewer",
            ));
        }
        self.away = Some(away.nodes.clone());
        Ok(away)
    }

    fn on_ack(&mut self, node: &str, ack: &Ack) {
        let Some(order) = self.drop_order(node, ack.seq) else {
            return;
        };
        let id = order.run.job;
        if ack.error.is_empty() {
            return;
        }
        let words = shorten(&ack.error);
        match order.what {
            What::Start(_) => {
                let ended = Ended {
                    never_started: true,
                    words,
                    ..Ended::default()
                };
                self.on_end(node, order.run, &ended);
            }
            What::Set(_) => {
                self.say(
                    "refused",
                    id,
                    None,
                    format!("{node} refused new terms: {words}"),
                );
                self.retry_s.insert(id, self.now_s + 1.0);
                self.with_run(node, order.run, |run| run.sent = Default::default());
            }
            What::Stop { .. } => {
                self.say(
                    "refused",
                    id,
                    None,
                    format!("{node} did not stop it: {words}"),
                );
                self.with_run(node, order.run, |run| run.stopping = false);
            }
        }
    }

    fn with_run(
        &mut self,
        node: &str,
        id: RunId,
        change: impl FnOnce(&mut crate::live::records::RunRecord),
    ) {
        let run = self.jobs.get_mut(&id.job).and_then(|job| job.run.as_mut());
        if let Some(run) = run.filter(|run| run.attempt == id.attempt && run.node == node) {
            change(run);
            self.dirty.insert(id.job);
        }
    }

    /// An attempt that is to be stopped says that all is saved.
    fn on_saved(&mut self, node: &str, id: RunId) {
        let Some(record) = self.jobs.get_mut(&id.job) else {
            return;
        };
        let Some(run) = &mut record.run else { return };
        if run.attempt != id.attempt || run.node != node || !run.stopping || run.saved {
            return;
        }
        run.saved = true;
        record.saved += 1;
        self.dirty.insert(id.job);
        let text = format!(
            "attempt {} on {node} has saved at the end of an iteration and may be stopped",
            id.attempt
        );
        self.say("saved", id.job, None, text);
    }

    /// An attempt that runs. One that nobody counts on any more is stopped.
    fn on_alive(&mut self, node: &str, run: &RunReport) {
        let id = run.run;
        let ours = self.jobs.get(&id.job).and_then(|job| job.run.as_ref());
        if ours.is_some_and(|ours| ours.attempt == id.attempt && ours.node == node) {
            if let Some(job) = self.jobs.get_mut(&id.job)
                && job.started_unix_ms.is_none()
                && run.pid != 0
            {
                job.started_unix_ms = Some(self.shown_unix_ms);
                self.dirty.insert(id.job);
            }
            self.on_running(node, id);
            return;
        }
        let ordered = self.orders.get(node).into_iter().flatten();
        if !ordered
            .into_iter()
            .any(|(_, order)| order.run == id && matches!(order.what, What::Stop { .. }))
        {
            self.say(
                "stop",
                id.job,
                None,
                format!(
                    "{node} still runs attempt {} of it, which was given up",
                    id.attempt
                ),
            );
            let grace_s = self.config.grace_s;
            self.order(
                node,
                id,
                What::Stop {
                    grace_s,
                    signal: None,
                },
            );
        }
    }

    /// An attempt of ours that its node does not know, although it was ordered to start it, is
    /// lost.
    fn miss(&mut self, node: &str, listed: &BTreeSet<RunId>) {
        let lost: Vec<RunId> = self
            .jobs
            .values()
            .filter_map(|job| Some((job.id, job.run.as_ref()?)))
            .filter(|(_, run)| run.node == node)
            .map(|(job, run)| RunId {
                job,
                attempt: run.attempt,
            })
            .filter(|id| !listed.contains(id))
            .filter(|id| {
                let open = self.orders.get(node).into_iter().flatten();
                !open
                    .into_iter()
                    .any(|(_, order)| order.run == *id && matches!(order.what, What::Start(_)))
            })
            .collect();
        for id in lost {
            let words = format!("{node} knows nothing of it any more");
            self.on_end(
                node,
                id,
                &Ended {
                    words,
                    ..Ended::default()
                },
            );
        }
    }

    /// An attempt is over, as its node reports. A repeated report has no effect.
    pub(super) fn on_end(&mut self, node: &str, id: RunId, ended: &Ended) {
        self.end(node, id, ended, true);
    }

    /// An attempt is over. `seen`: its node reports that, and nobody has given it up.
    fn end(&mut self, node: &str, id: RunId, ended: &Ended, seen: bool) {
        let Some(record) = self.jobs.get_mut(&id.job) else {
            return;
        };
        if record
            .run
            .as_ref()
            .is_none_or(|run| run.attempt != id.attempt || run.node != node)
        {
            return;
        }
        let Some(run) = record.run.take() else { return };
        self.dirty.insert(id.job);
        let open: Vec<u64> = self
            .orders
            .get(node)
            .into_iter()
            .flatten()
            .filter(|(_, order)| order.run == id)
            .map(|(seq, _)| *seq)
            .collect();
        for seq in open {
            self.drop_order(node, seq);
        }
        self.watches.remove(&id.job);
        self.probed.remove(&id.job);
        let is_trial = self.end_trial(node, id.job);
        let Some(record) = self.jobs.get(&id.job) else {
            return;
        };
        let own = run.stopping || record.cancelled || record.over.is_some() || !seen;
        let ended = &Ended {
            words: shorten(&ended.words),
            ..ended.clone()
        };
        let start = self.start_of(id.job, &run, ended, own);
        // A start that was counted before says nothing of the node now.
        if start == Start::Worked && !run.worked {
            let since_s = if is_trial { self.now_s } else { run.ordered_s };
            self.start_worked(node, id.job, since_s);
        }
        let Some(record) = self.jobs.get_mut(&id.job) else {
            return;
        };
        if record.over.is_some() {
            return;
        }
        if record.cancelled {
            let reason = "taken back by its owner".into();
            return self.over(id.job, JobPhase::Cancelled, ended.code, reason);
        }
        // A job that was asked to make space and has ended by itself after it saved is not done
        // yet.
        let restartable = record.submission.restartable;
        let gave_way = run.stopping && run.saved && restartable;
        if ended.well() && !gave_way {
            return self.over(id.job, JobPhase::Done, ended.code, String::new());
        }
        if matches!(start, Start::Never | Start::Soon) {
            let kind = match start {
                Start::Soon => record.submission.kind.clone(),
                _ => String::new(),
            };
            self.start_failed(node, id.job, &kind, &how(ended));
            if is_trial {
                self.trial_failed(node);
            }
        }
        if start == Start::Never || (start == Start::Soon && self.is_tried_elsewhere(id.job, ended))
        {
            return self.start_again(node, id.job, ended);
        }
        if start == Start::Soon {
            self.clear_job(id.job);
        }
        let lost = ended.code.is_none() && ended.signal.is_none();
        if restartable && run.stopping {
            return self.again(
                id.job,
                0.0,
                "stopped to make space; it goes on where it was".into(),
            );
        }
        if ended.never_started {
            return self.again(id.job, 0.0, "stopped before it began".into());
        }
        if restartable && lost {
            let words = &ended.words;
            return self.again(id.job, 0.0, format!("its end was not seen: {words}"));
        }
        self.over(id.job, JobPhase::Failed, ended.code, how(ended));
    }

    /// Whether a job that failed within moments is given another start: a restartable job is, on
    /// one other node, and again where nobody saw how it ended.
    fn is_tried_elsewhere(&self, job: u64, ended: &Ended) -> bool {
        let Some(record) = self.jobs.get(&job) else {
            return false;
        };
        let lost = ended.code.is_none() && ended.signal.is_none();
        let once = record.failed_on.len() < 2 && self.has_another_node(job);
        record.submission.restartable && (lost || once)
    }

    /// Another start for a job whose last one failed, as long as there were few.
    fn start_again(&mut self, node: &str, id: u64, ended: &Ended) {
        let Some(record) = self.jobs.get_mut(&id) else {
            return;
        };
        record.failures += 1;
        if record.failures >= MAX_FAILURES {
            let on = match &record.failed_on[..] {
                [] | [_] => String::new(),
                several => format!(" on {}", several.join(", ")),
            };
            let reason = format!(
                "it could not be started {MAX_FAILURES} times{on}: {}",
                how(ended)
            );
            self.clear_job(id);
            return self.over(id, JobPhase::Failed, ended.code, reason);
        }
        // CAST: a few.
        let backoff_s = 2f64.powi(record.failures as i32 - 1).min(MAX_BACKOFF_S);
        self.again(
            id,
            backoff_s,
            format!("{node} could not start it: {}", how(ended)),
        );
    }

    /// Back among those that wait, after a while.
    fn again(&mut self, id: u64, after_s: f64, reason: String) {
        self.say("again", id, None, reason.clone());
        let not_before_s = self.now_s + after_s;
        if let Some(record) = self.jobs.get_mut(&id) {
            record.reason = reason;
            record.not_before_s = not_before_s;
        }
        let Some(at) = self.live.get(&id).copied() else {
            return;
        };
        if after_s > 0.0 {
            self.release_place(id);
        } else {
            // Where the policies already have it somewhere else, that is where it goes next.
            self.pin(id);
            self.scheduler.note(at);
        }
        self.changed = true;
    }

    /// Out of the policies' view.
    pub(super) fn release_place(&mut self, id: u64) {
        self.keep_progress();
        let Some(at) = self.live.remove(&id) else {
            return;
        };
        let mut facts = self.shared.facts();
        facts.pinned.remove(&at);
        facts.avoided.remove(&at);
        drop(facts);
        let others: Vec<JobId> = self.state.others(at).collect();
        self.state.finish(at);
        self.scheduler.note(at);
        for other in others {
            self.scheduler.note(other);
            self.pace(other);
        }
        self.changed = true;
    }

    /// A job is over.
    pub(super) fn over(
        &mut self,
        id: u64,
        phase: JobPhase,
        exit_code: Option<i32>,
        reason: String,
    ) {
        self.release_place(id);
        let unix_ms = self.unix_ms();
        let Some(record) = self.jobs.get_mut(&id) else {
            return;
        };
        record.over = Some(crate::live::records::Over {
            phase,
            exit_code,
            unix_ms,
        });
        record.reason.clone_from(&reason);
        // Nothing of it will be started any more, and its variables may be secrets.
        record.submission.command = Vec::new();
        record.submission.env.clear();
        self.dirty.insert(id);
        if phase == JobPhase::Done {
            self.keep_service(id);
        }
        self.say(phase.as_str(), id, None, reason);
    }

    /// Count a node's attempts as lost and forget its orders.
    fn give_up(&mut self, node: &str, why: &str) {
        let seqs: Vec<u64> = self
            .orders
            .get(node)
            .into_iter()
            .flatten()
            .map(|(seq, _)| *seq)
            .collect();
        for seq in seqs {
            self.drop_order(node, seq);
        }
        let lost: Vec<RunId> = self
            .jobs
            .values()
            .filter_map(|job| Some((job.id, job.run.as_ref()?)))
            .filter(|(_, run)| run.node == node)
            .map(|(job, run)| RunId {
                job,
                attempt: run.attempt,
            })
            .collect();
        for id in lost {
            let ended = Ended {
                words: why.to_owned(),
                ..Ended::default()
            };
            self.end(node, id, &ended, false);
        }
    }

    /// An operator says that a node will not come back, or that what runs there is of no matter.
    ///
    /// # Errors
    /// There is no such node.
    pub fn forget(&mut self, node: &str, now: impl Into<Now>) -> Result<(), ControlError> {
        self.advance(now);
        if !self.nodes.contains_key(node) {
            return Err(self.no_node(node));
        }
        self.give_up(node, "its node was given up");
        self.nodes.remove(node);
        self.refusals.remove(node);
        self.doubted_s.retain(|(name, _), _| name != node);
        self.orders.remove(node);
        self.changes.nodes.retain(|record| record.name != node);
        self.changes.dropped_nodes.push(node.to_owned());
        self.say(
            "node",
            0,
            None,
            format!("{node} was given up by an operator"),
        );
        self.rebuild();
        Ok(())
    }
}

/// How an attempt ended, for people.
fn how(ended: &Ended) -> String {
    let how = match (ended.code, ended.signal) {
        _ if ended.never_started => String::new(),
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("ended by signal {signal}"),
        (None, None) => "its end was not seen".into(),
    };
    match (how.is_empty(), ended.words.is_empty()) {
        (_, true) => how,
        (true, false) => ended.words.clone(),
        (false, false) => format!("{how}: {}", ended.words),
    }
}

/// Whether a job of another engine is one, with figures that can be.
fn is_one(job: &OtherJob) -> bool {
    let fits = control::check_name(&job.name).is_ok();
    fits && job.slowdown.is_finite() && job.slowdown >= 0.0 && (0.0..=1.0).contains(&job.confidence)
}

fn check_devices(said: &Registration) -> Result<(), ControlError> {
    if said.devices.len() > MAX_DEVICES {
        let message = format!(
            "a node has at most {MAX_DEVICES} devices, not {}",
            said.devices.len()
        );
        return Err(invalid(message, "run several arbiters"));
    }
    let uuids: BTreeSet<&str> = said
        .devices
        .iter()
        .map(|device| device.uuid.as_str())
        .collect();
    if uuids.len() < said.devices.len() || uuids.contains("") {
        return Err(invalid(
            "two devices have the same UUID, or none",
            "what `nvidia-smi -L` prints is expected",
        ));
    }
    let kinds: BTreeSet<&str> = said
        .devices
        .iter()
        .map(|device| device.name.as_str())
        .collect();
    if kinds.len() > 1 {
        let kinds: Vec<&str> = kinds.into_iter().collect();
        let message = format!("the devices are of several types: {}", kinds.join(", "));
        return Err(invalid(message, "run an arbiter for each type"));
    }
    Ok(())
}

/// About how long an order is on the wire.
fn weight(order: &Order) -> usize {
    let What::Start(start) = &order.what else {
        return 256;
    };
    let words = start.command.iter().map(String::len);
    let variables = start
        .env
        .iter()
        .map(|(name, value)| name.len() + value.len());
    // A byte may take six as JSON.
    6 * (words.sum::<usize>() + variables.sum::<usize>() + start.dir.len())
        + 64 * (start.command.len() + start.env.len() + start.devices.len())
        + 512
}

/// What is written down of a node is short.
fn check_words(said: &Registration) -> Result<(), ControlError> {
    let devices = said.devices.iter();
    let words = devices
        .flat_map(|device| [&device.uuid, &device.name])
        .chain([
            &said.instance,
            &said.machine,
            &said.boot,
            &said.version,
            &said.engine,
        ]);
    for word in words {
        if word.len() > MAX_WORD_BYTES || word.contains(char::is_control) {
            let shown: String = word.chars().take(40).collect();
            let message = format!(
                "`{}` is too long or holds what cannot be shown",
                shown.escape_debug()
            );
            return Err(invalid(
                message,
                "the arbiter's own words are short and on one line",
            ));
        }
    }
    Ok(())
}

/// The end of a text, on one line.
fn shorten(text: &str) -> String {
    let line: String = text
        .trim()
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    let from = line.len().saturating_sub(WORDS_BYTES);
    let from = (from..=line.len())
        .find(|at| line.is_char_boundary(*at))
        .unwrap_or(line.len());
    line[from..].to_owned()
}
