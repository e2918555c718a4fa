//! From the scheduler's decisions to orders for nodes.

use std::collections::BTreeSet;

use policy::cluster::{Decision, GpuId, JobId, beside_others, keep_where_nobody_comes};

use super::{Hook, wire_class};
use crate::live::records::RunRecord;
use crate::live::wire::{RunId, Signal, StartRun, Terms, What};

/// What an operator reads about a decision.
fn kind_of(decision: &Decision) -> &'static str {
    match decision {
        Decision::Place { .. } => "place",
        Decision::Suspend { .. } => "suspend",
        Decision::Resume { .. } => "resume",
        Decision::Migrate { .. } => "migrate",
        Decision::Unpack { .. } => "unpack",
        Decision::Reshare { .. } => "reshare",
        Decision::Reject { .. } => "reject",
        Decision::Resize { .. } => "resize",
    }
}

impl Hook {
    /// Ask the scheduler and bring the state to where it wants it, as far as that can be done.
    pub(super) fn decide(&mut self) {
        self.tell_speeds();
        let batch = self.scheduler.decide(&self.state);
        let asked: BTreeSet<JobId> = batch.iter().map(Decision::job).collect();
        let all = batch.len();
        let batch = self.one_to_try(batch);
        let mut batch = self.can_be_done(batch);
        let mut touched: BTreeSet<JobId> = batch.iter().map(Decision::job).collect();
        touched.extend(batch.iter().flat_map(|d| self.state.others(d.job())));
        // A decision that is left out may have made space for another, which is then left out as
        // well; nor is anybody stopped for one that does not come.
        loop {
            if batch.len() < all {
                keep_where_nobody_comes(&self.state, &mut batch);
            }
            let Err(refused) = self.state.apply(&batch) else {
                break;
            };
            let before = batch.len();
            batch.retain(|decision| decision.job() != refused.job);
            if batch.len() == before {
                batch.clear();
            }
        }
        let done: BTreeSet<JobId> = batch.iter().map(Decision::job).collect();
        for id in asked.difference(&done) {
            self.scheduler.note(*id);
        }
        touched.extend(batch.iter().flat_map(|d| self.state.others(d.job())));
        for at in touched {
            if !self.state.job(at).is_done() {
                self.pace(at);
            }
        }
        for decision in &batch {
            self.tell(decision);
        }
    }

    /// The batch without impossible decisions: GPUs of silent nodes, gangs over several nodes,
    /// moves of jobs that cannot move.
    fn can_be_done(&self, batch: Vec<Decision>) -> Vec<Decision> {
        let facts = self.shared.facts();
        let (mut kept, mut stay) = (Vec::new(), BTreeSet::new());
        for decision in &batch {
            let at = decision.job();
            let gpus = decision.gpus();
            if !gpus.is_empty() {
                let one_node = gpus
                    .windows(2)
                    .all(|two| self.state.node_of(two[0]) == self.state.node_of(two[1]));
                let up = !gpus.iter().any(|gpu| facts.down.contains(gpu));
                let pin = facts.pinned.get(&at);
                let own = pin.is_none_or(|own| same(own, gpus));
                // What runs there goes on.
                let starts = pin.is_some() || !gpus.iter().any(|gpu| facts.shut.contains(gpu));
                if !(one_node && up && own && starts) {
                    continue;
                }
                // Any job of a group may count as its host for the packer; without this check, a
                // move to the job's own place would be reported each time.
                let here = self.state.job(at).run();
                if matches!(decision, Decision::Migrate { .. })
                    && here.is_some_and(|run| same(&run.gpus, gpus))
                {
                    continue;
                }
            }
            // A joiner that cannot move is not stopped for GPUs elsewhere that it cannot get.
            if let Decision::Suspend { job } = decision
                && facts.pinned.contains_key(job)
                && let Some(host) = self.state.partner(*job)
                && self
                    .state
                    .job(*job)
                    .run()
                    .is_some_and(|run| run.beside.is_some())
            {
                let mine = self.state.job(*job).run().map_or(&[][..], |run| &run.gpus);
                let wanted = batch
                    .iter()
                    .any(|other| other.gpus().iter().any(|gpu| mine.contains(gpu)));
                let host_goes = batch
                    .iter()
                    .any(|d| d.job() == host && !matches!(d, Decision::Reshare { .. }));
                if !wanted && !host_goes {
                    stay.extend(self.state.others(*job));
                    continue;
                }
            }
            kept.push(decision.clone());
        }
        kept.retain(|decision| {
            !(matches!(decision, Decision::Reshare { .. }) && stay.contains(&decision.job()))
        });
        kept
    }

    /// The batch with one start for each node that is to be tried: the others are decided anew,
    /// for places elsewhere.
    fn one_to_try(&mut self, batch: Vec<Decision>) -> Vec<Decision> {
        let facts = self.shared.facts();
        if facts.trying.is_empty() {
            return batch;
        }
        let all = batch.len();
        let mut tried = BTreeSet::new();
        let kept: Vec<Decision> = batch
            .into_iter()
            .filter(|decision| {
                let mut gpus = decision.gpus().iter();
                match gpus.find(|gpu| facts.trying.contains(gpu)) {
                    Some(gpu) if !facts.pinned.contains_key(&decision.job()) => {
                        tried.insert(self.state.node_of(*gpu))
                    }
                    _ => true,
                }
            })
            .collect();
        drop(facts);
        self.changed |= kept.len() < all;
        kept
    }

    /// Into the log, and into the counts.
    fn tell(&mut self, decision: &Decision) {
        let at = decision.job();
        let id = self.numbers[at.0 as usize];
        let beside = self
            .state
            .partner(at)
            .map(|other| self.numbers[other.0 as usize]);
        let place = self.state.job(at).run().map(|run| {
            let devices: Vec<&str> = run
                .gpus
                .iter()
                .map(|gpu| self.places[gpu.0 as usize].1.as_str())
                .collect();
            let node = run
                .gpus
                .first()
                .map_or("", |gpu| &self.places[gpu.0 as usize].0);
            (
                format!("{node} {}", devices.join(" ")),
                run.share,
                run.beside.is_some(),
            )
        });
        let text = match (decision, &place) {
            (Decision::Unpack { reason, .. }, _) => reason.to_string(),
            (Decision::Reject { .. }, _) => "its deadline cannot be kept".into(),
            (_, Some((place, share, _))) => format!("on {place}, share {share}"),
            _ => String::new(),
        };
        match decision {
            Decision::Place { .. } | Decision::Resume { .. } | Decision::Migrate { .. }
                if place.as_ref().is_some_and(|(_, _, joiner)| *joiner) =>
            {
                self.store.meta.packs += 1;
            }
            Decision::Unpack { .. } => self.store.meta.unpacks += 1,
            Decision::Reject { .. } => {
                self.over(id, crate::live::wire::JobPhase::Failed, None, text.clone())
            }
            _ => {}
        }
        if let (Decision::Unpack { .. }, Some(record)) = (decision, self.jobs.get_mut(&id)) {
            record.reason = format!("split from its host: {text}");
            self.dirty.insert(id);
        }
        self.say(kind_of(decision), id, beside, text);
    }

    /// How fast a job goes where it is: as measured, else by what it costs it to be beside each of
    /// the others where that was measured, else by what all of them ask of the device; on a slower
    /// type of GPU by so much less.
    pub(super) fn pace(&mut self, at: JobId) {
        let job = self.state.job(at);
        let first = job.run().and_then(|run| run.gpus.first());
        let kind = first.map(|gpu| self.state.type_of(*gpu));
        let by_type = kind.and_then(|kind| job.by_type.get(usize::from(kind.0)));
        let by_type = by_type.copied().unwrap_or(1.0);
        let rate = match self.state.partner(at) {
            None => job.rate(self.held(at)),
            Some(_) => {
                let id = self.numbers[at.0 as usize];
                let measured = self
                    .jobs
                    .get(&id)
                    .and_then(|job| job.rate)
                    .filter(|rate| rate.is_finite());
                measured.unwrap_or_else(|| self.rate_beside(at))
            }
        };
        self.state.set_rate(at, rate * by_type);
    }

    /// The same where it was not measured.
    fn rate_beside(&self, at: JobId) -> f64 {
        let job = self.state.job(at);
        let others: Vec<JobId> = self.state.others(at).collect();
        let busy = |id: &JobId| self.state.job(*id).profile.busy;
        let all = job.profile.busy + others.iter().map(busy).sum::<f64>();
        let speeds = others.iter().map(|other| {
            // Of two the packer's window will tell.
            if others.len() < 2 {
                return None;
            }
            self.pair_rate(at, *other)
        });
        let beside = beside_others(speeds, all);
        match &job.part {
            None => beside,
            // What it was promised it gets, whatever the others do.
            Some(part) if job.profile.class == policy::Class::Guaranteed => {
                beside.max((part.share / job.profile.busy.max(part.share)).min(1.0))
            }
            Some(_) => beside,
        }
    }

    /// A job's speed beside another, as pairs of their kinds were measured on such GPUs.
    fn pair_rate(&self, own: JobId, other: JobId) -> Option<f64> {
        let kind = |at: JobId| {
            let id = self.numbers.get(at.0 as usize)?;
            Some(self.jobs.get(id)?.submission.kind.clone())
        };
        let (gpu, gpus) = (self.gpu_name(own), self.held(own));
        let kinds = [kind(own)?, kind(other)?];
        let turned = [kinds[1].clone(), kinds[0].clone()];
        let rate = |kinds: [String; 2], who: usize| {
            let pair = self.pairs.get(&(gpu.clone(), gpus, kinds))?;
            Some(pair.rates[who]).filter(|rate| *rate > 0.0)
        };
        rate(kinds, 0).or_else(|| rate(turned, 1))
    }

    /// Orders the difference between where jobs are to be and what was ordered from nodes. Orders
    /// that make space come first.
    pub(super) fn reconcile(&mut self) {
        let mut open: Vec<(u8, u64)> = Vec::new();
        for (id, record) in &self.jobs {
            if record.over.is_some() && record.run.is_none() {
                continue;
            }
            let wanted = self.wanted(*id);
            let run = record.run.as_ref();
            let sent = run.and_then(|run| run.sent.share);
            let moves = |node: &str, gpus: &[GpuId]| {
                run.is_some_and(|run| run.node != node || !self.is_on(run, gpus))
            };
            let rank = match (&wanted, sent) {
                (None, _) => 0,
                // It leaves the GPUs that another may be going to.
                (Some((node, gpus, _)), _) if moves(node, gpus) => 0,
                (Some((.., share)), Some(sent)) if *share < sent => 1,
                _ => 2,
            };
            open.push((rank, *id));
        }
        open.sort_unstable();
        for (_, id) in open {
            self.reconcile_job(id);
        }
    }

    /// Node, devices and share that the state has for a job.
    fn wanted(&self, id: u64) -> Option<(String, Vec<GpuId>, f64)> {
        let run = self.state.job(*self.live.get(&id)?).run()?;
        let node = self.places[run.gpus.first()?.0 as usize].0.clone();
        Some((node, run.gpus.clone(), run.share))
    }

    fn reconcile_job(&mut self, id: u64) {
        let wanted = self.wanted(id);
        let Some(record) = self.jobs.get(&id) else {
            return;
        };
        let Some(run) = record.run.clone() else {
            if let Some((node, gpus, share)) = wanted {
                self.start(id, node, &gpus, share);
            }
            return;
        };
        if run.stopping {
            return;
        }
        let restartable = record.submission.restartable;
        let run_id = RunId {
            job: id,
            attempt: run.attempt,
        };
        let stop = match &wanted {
            None => record.cancelled || record.over.is_some() || restartable,
            Some((node, gpus, _)) => *node != run.node || !self.is_on(&run, gpus),
        };
        if stop {
            let grace_s = self.config.grace_s;
            // A job that will not go on has nothing to save.
            let goes_on = restartable && !record.cancelled && record.over.is_none();
            let signal = goes_on.then(|| Signal {
                // CAST: a node has at most 64.
                gpus: wanted.as_ref().map_or(0, |(_, gpus, _)| gpus.len() as u16),
                patience_s: self.config.signal_s,
            });
            self.order(&run.node, run_id, What::Stop { grace_s, signal });
            self.change_run(id, |run| run.stopping = true);
            return;
        }
        let suspended = wanted.is_none();
        let class = record.submission.class;
        let terms = Terms {
            // What is promised to one that is held back would be kept from others.
            class: Some(if suspended {
                control::Class::Opportunistic
            } else {
                class
            }),
            share: wanted.as_ref().map(|(.., share)| *share).or(run.sent.share),
            mem_bytes: record.submission.mem_bytes,
            paused: suspended || self.probed.contains(&id),
        };
        let (joiner, rank) = self.coming(id);
        if run.suspended != suspended || (run.joiner, run.rank) != (joiner, rank) {
            self.change_run(id, |run| {
                (run.suspended, run.joiner, run.rank) = (suspended, joiner, rank);
            });
        }
        if terms != run.sent && self.retry_s.get(&id).is_none_or(|at| *at <= self.now_s) {
            self.order(&run.node, run_id, What::Set(terms));
            self.change_run(id, |run| run.sent = terms);
        }
    }

    /// Whether others were on a job's devices before it, and how many.
    fn coming(&self, id: u64) -> (bool, u32) {
        let Some(at) = self.live.get(&id).copied() else {
            return (false, 0);
        };
        let run = self.state.job(at).run();
        let joiner = run.is_some_and(|run| run.beside.is_some());
        let before = self.state.group(at).position(|other| other == at);
        // CAST: at most 64.
        (joiner, before.unwrap_or(0) as u32)
    }

    pub(super) fn is_on(&self, run: &RunRecord, gpus: &[GpuId]) -> bool {
        let own: Option<Vec<GpuId>> = run
            .devices
            .iter()
            .map(|device| self.gpu(&run.node, device))
            .collect();
        own.is_some_and(|own| same(&own, gpus))
    }

    fn change_run(&mut self, id: u64, change: impl FnOnce(&mut RunRecord)) {
        if let Some(run) = self.jobs.get_mut(&id).and_then(|job| job.run.as_mut()) {
            change(run);
            self.dirty.insert(id);
            self.pin(id);
        }
    }

    fn start(&mut self, id: u64, node: String, gpus: &[GpuId], share: f64) {
        let Some(entry) = self.nodes.get(&node) else {
            return;
        };
        let devices: Vec<String> = gpus
            .iter()
            .map(|gpu| self.places[gpu.0 as usize].1.clone())
            .collect();
        let simulated = entry
            .record
            .devices
            .iter()
            .any(|device| device.simulated && devices.contains(&device.uuid));
        let (joiner, rank) = self.coming(id);
        let class = self
            .live
            .get(&id)
            .and_then(|at| self.state.job(*at).run())
            .map(|run| run.class);
        let Some(record) = self.jobs.get_mut(&id) else {
            return;
        };
        let asked = &record.submission;
        record.attempts += 1;
        let attempt = record.attempts;
        let terms = Terms {
            share: Some(share),
            class: Some(class.map_or(asked.class, wire_class)),
            mem_bytes: asked.mem_bytes,
            paused: false,
        };
        let start = StartRun {
            name: format!("{}.{id}.{attempt}", asked.name),
            command: asked.command.clone(),
            env: asked.env.clone(),
            dir: asked.dir.clone(),
            devices: devices.clone(),
            simulated,
            evictable: asked.evictable,
            terms,
        };
        record.run = Some(RunRecord {
            attempt,
            node: node.clone(),
            devices,
            sent: terms,
            joiner,
            rank,
            ordered_s: self.now_s,
            ..RunRecord::default()
        });
        record.reason.clear();
        self.dirty.insert(id);
        self.watches.remove(&id);
        self.begin_trial(&node, id);
        self.order(
            &node,
            RunId { job: id, attempt },
            What::Start(Box::new(start)),
        );
        self.pin(id);
    }
}

fn same(a: &[GpuId], b: &[GpuId]) -> bool {
    a.len() == b.len() && a.iter().all(|gpu| b.contains(gpu))
}
