//! Measuring jobs that are together: all of them run for a window, each against its solo speed.
//!
//! Speed is iterations per second if a job's iterations are known, else submissions per second,
//! which a job makes at a constant number per iteration. Solo speed is measured while a job has its
//! devices for itself; if its kind was never seen solo, the jobs beside it are held back for a
//! moment ([`TrialConfig::solo_s`](super::TrialConfig)). It is remembered by kind, number and type
//! of GPU.
//!
//! The window is max(20 iterations of the slower one, 30 s) by default: Gandiva's trial, as
//! `policy::cluster::packer::Trial` explains. The verdict is the packer's. What a job reports about
//! itself is not trusted beyond that: no job counts as faster than solo, and a speed that is no
//! number counts against the pair.

use std::collections::{BTreeMap, BTreeSet};

use control::{ArbiterStatus, IterationSource, JobStatus};
use policy::cluster::{JobId, JobType, Profile, Verdict};

use super::learned::{agree, of_nodes};
use super::{Hook, MEASURED_KEPT, policy_class};
use crate::live::records::{Metered, PairRecord, Solo, pair_key, solo_key};
use crate::live::wire::RunReport;

/// A job's iterations are counted where they are trusted at least so much.
const TRUSTED: f64 = 0.5;
/// Fewer iterations than this in a window say less than the submissions in it.
const FEW: u64 = 20;
/// Time after a change before anything is measured, in seconds: work that was queued before is done
/// by then.
const SETTLE_S: f64 = 0.5;
/// A job that does nothing by itself for so many times the time of a measurement counts as idle.
const IDLE_TIMES: f64 = 5.0;

/// What was metered of an attempt, last.
#[derive(Clone, Debug, Default)]
pub(super) struct Watch {
    pub(super) attempt: u32,
    /// Which life of its arbiter counts.
    life_unix_ms: u64,
    last: Sample,
    /// It has its devices for itself since then.
    solo_from: Option<Sample>,
    pub profile: Option<Profile>,
}

/// Counters at one time of the node's clock.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Sample {
    s: f64,
    /// The same time on the cluster's clock.
    heard_s: f64,
    launches: u64,
    iterations: Option<u64>,
    iteration_s: f64,
    paused: bool,
    /// Its devices had nothing else on them that runs.
    undisturbed: bool,
}

/// Jobs on trial together.
#[derive(Clone, Debug)]
pub(super) struct Trial {
    stage: Stage,
}

#[derive(Clone, Debug)]
enum Stage {
    /// All have to run.
    Waiting,
    /// One is measured while the others are held back.
    Solo {
        who: usize,
        from: Option<Sample>,
    },
    Together {
        from: Vec<Sample>,
    },
    /// What follows from it was said.
    Kept,
}

impl Hook {
    /// What the node's arbiter says of jobs, into watches and profiles.
    pub(super) fn on_metered(&mut self, node: &str, arbiter: &ArbiterStatus, runs: &[RunReport]) {
        // CAST: milliseconds of some decades are below 2^53.
        let s = (arbiter.started_unix_ms + arbiter.uptime_ms) as f64 / 1000.0;
        // An attempt that is being stopped still uses its devices.
        let mut users: BTreeMap<String, u32> = BTreeMap::new();
        for run in runs.iter().filter(|run| run.ended.is_none()) {
            let own = self.jobs.get(&run.run.job).and_then(|job| job.run.as_ref());
            let own = own.filter(|own| own.attempt == run.run.attempt && own.node == node);
            for device in own
                .iter()
                .filter(|own| !own.suspended)
                .flat_map(|own| &own.devices)
            {
                *users.entry(device.clone()).or_default() += 1;
            }
        }
        for run in runs {
            let id = run.run.job;
            let Some(record) = self.jobs.get(&id) else {
                continue;
            };
            let Some(own) = record
                .run
                .as_ref()
                .filter(|own| own.attempt == run.run.attempt && own.node == node)
            else {
                continue;
            };
            let Some(status) = arbiter
                .jobs
                .iter()
                .find(|job| job.name == run.name && !job.processes.is_empty())
            else {
                continue;
            };
            let undisturbed = own.devices.iter().all(|device| {
                let waits = self
                    .nodes
                    .get(node)
                    .and_then(|node| node.waits.iter().find(|w| w.uuid == *device));
                let sole = users.get(device).is_none_or(|users| *users < 2);
                sole && waits.is_some_and(|waits| waits.strangers == 0)
            });
            let sample = sample(status, [s, self.now_s], undisturbed);
            // CAST: a node has at most 64.
            let gpus = own.devices.len() as u32;
            let class = policy_class(record.submission.class);
            let kind = JobType(self.kinds.number(&record.submission.kind));
            let profile = profile(status, kind, gpus, class, record.submission.mem_bytes);
            let watch = self.watches.entry(id).or_default();
            // A restarted arbiter may have a start time before that of its predecessor on the wall
            // clock.
            if watch.attempt != run.run.attempt || watch.life_unix_ms != arbiter.started_unix_ms {
                *watch = Watch {
                    attempt: run.run.attempt,
                    life_unix_ms: arbiter.started_unix_ms,
                    ..Watch::default()
                };
            }
            if sample.s < watch.last.s {
                continue;
            }
            watch.last = sample;
            watch.profile = Some(profile);
            if let Some(at) = self.live.get(&id).copied() {
                self.state.job_mut(at).profile = profile;
                self.see_solo(id, at);
            }
        }
    }

    /// Learn a job's speed while nobody is beside it.
    fn see_solo(&mut self, id: u64, at: JobId) {
        let solo = self.is_there(id, at) && self.state.partner(at).is_none();
        let solo_s = self.config.trial.solo_s;
        let Some(watch) = self.watches.get_mut(&id) else {
            return;
        };
        let last = watch.last;
        if !solo || last.paused || !last.undisturbed || last.launches == 0 {
            watch.solo_from = None;
            return;
        }
        let Some(from) = watch.solo_from else {
            watch.solo_from = Some(last);
            return;
        };
        if last.s - from.s < solo_s + SETTLE_S {
            return;
        }
        watch.solo_from = Some(last);
        if self.clock_is_right(id, &from, &last)
            && let Some(solo) = solo_between(&from, &last)
        {
            self.learn(id, at, solo);
        }
    }

    /// Its attempt is on the GPUs that it has in the state: one that was decided to move elsewhere
    /// runs where it was until its node has stopped it.
    fn is_there(&self, id: u64, at: JobId) -> bool {
        let run = self.jobs.get(&id).and_then(|job| job.run.as_ref());
        let here = self.state.job(at).run();
        run.zip(here)
            .is_some_and(|(run, here)| !run.stopping && self.is_on(run, &here.gpus))
    }

    /// Whether as much time passed on a job's node as here; if not, that is said.
    fn clock_is_right(&mut self, id: u64, from: &Sample, to: &Sample) -> bool {
        let (theirs_s, ours_s) = (to.s - from.s, to.heard_s - from.heard_s);
        let right = agree(theirs_s, ours_s);
        if !right && let Some(node) = self.node_of(id) {
            let why = format!("{theirs_s:.1} s passed on its clock in {ours_s:.1} s");
            self.doubt(&node, &why);
        }
        right
    }

    fn node_of(&self, id: u64) -> Option<String> {
        Some(self.jobs.get(&id)?.run.as_ref()?.node.clone())
    }

    /// A job's solo speed, for it and for its kind. `false`: it cannot be.
    fn learn(&mut self, id: u64, at: JobId, solo: Solo) -> bool {
        let key = self.solo_key(id, at);
        let (Some(node), Some(record)) = (self.node_of(id), self.jobs.get(&id)) else {
            return false;
        };
        let kind = record.submission.kind.clone();
        let (gpu, gpus) = (self.gpu_name(at), self.held(at));
        if !self.witness(&node, (&gpu, gpus, &kind), &solo) {
            return false;
        }
        let seen = self.watches.get(&id).and_then(|watch| watch.profile);
        let solo = Solo {
            metered: seen.map(|profile| Metered {
                busy: profile.busy,
                mem_busy: profile.mem_busy,
                persistent_bytes: profile.persistent_bytes,
                ephemeral_bytes: profile.ephemeral_bytes,
                iteration_s: profile.iteration_s,
            }),
            unix_ms: self.unix_ms(),
            ..solo
        };
        let Some(record) = self.jobs.get_mut(&id) else {
            return false;
        };
        let own = record.solo.as_ref().filter(|_| record.solo_on == key);
        if own.is_none_or(|old| far(old, &solo)) {
            record.solo = Some(solo);
            record.solo_on.clone_from(&key);
            self.dirty.insert(id);
        }
        // Of the kind, what all nodes with such GPUs say together.
        let mut solo = solo;
        if let Some((launches, iterations)) = self.speeds.get(&key).and_then(of_nodes) {
            (solo.launches_per_s, solo.iterations_per_s) = (launches, iterations);
        }
        if self.solos.get(&key).is_none_or(|old| far(old, &solo)) {
            self.solos.insert(key.clone(), solo);
            self.changes.solos.push((key, solo));
            self.forget_solos();
            if let Some(metered) = solo.metered {
                self.tell_kind(&kind, self.state.job(at).gpus, &metered);
            }
        }
        true
    }

    /// Kinds that were seen longest ago make way.
    fn forget_solos(&mut self) {
        while self.solos.len() > MEASURED_KEPT {
            let oldest = self.solos.iter().min_by_key(|(_, solo)| solo.unix_ms);
            let Some(key) = oldest.map(|(key, _)| key.clone()) else {
                return;
            };
            self.solos.remove(&key);
            self.changes.solos.retain(|(written, _)| *written != key);
            self.changes.dropped_solos.push(key);
        }
    }

    /// Pairs that were measured longest ago make way.
    pub(super) fn forget_pairs(&mut self) {
        for key in self.forget_old_claims() {
            self.drop_pair(&key);
        }
        while self.pairs.len() > MEASURED_KEPT {
            let oldest = self.pairs.iter().min_by_key(|(_, pair)| pair.unix_ms);
            let Some(key) = oldest.map(|(key, _)| key.clone()) else {
                return;
            };
            self.drop_pair(&key);
        }
    }

    fn drop_pair(&mut self, key: &(String, u32, [String; 2])) {
        if let Some(pair) = self.pairs.remove(key) {
            let key = pair_key(&pair);
            self.changes.pairs.retain(|pair| pair_key(pair) != key);
            self.changes.dropped_pairs.push(key);
        }
    }

    fn solo_key(&self, id: u64, at: JobId) -> String {
        let kind = &self.jobs[&id].submission.kind;
        solo_key(&self.gpu_name(at), self.held(at), kind)
    }

    /// The name of the type of the GPUs that a running job has.
    pub(super) fn gpu_name(&self, at: JobId) -> String {
        let gpu = self
            .state
            .job(at)
            .run()
            .and_then(|run| run.gpus.first().copied());
        let kind = gpu.map(|gpu| self.state.type_of(gpu));
        kind.and_then(|kind| self.gpu_types.0.get(usize::from(kind.0)).cloned())
            .unwrap_or_default()
    }

    fn solo(&self, id: u64, at: JobId) -> Option<Solo> {
        let key = self.solo_key(id, at);
        let record = self.jobs.get(&id)?;
        // On other GPUs it was another speed.
        let own = record.solo.filter(|_| record.solo_on == key);
        own.or_else(|| self.solos.get(&key).copied())
    }

    /// Go on with all jobs that are beside others.
    pub(super) fn try_groups(&mut self) {
        let mut groups: Vec<Vec<(u64, JobId)>> = Vec::new();
        for at in self.state.running() {
            let group: Vec<JobId> = self.state.group(*at).collect();
            let Some(last) = group.last().filter(|_| group.len() > 1) else {
                continue;
            };
            let joined = |at: JobId| {
                let run = self.state.job(at).run();
                run.is_some_and(|run| run.beside.is_some())
            };
            // Of parts nobody has to find out how they get on: their nodes enforce them.
            let guessed = group.iter().all(|at| self.state.job(*at).part.is_none());
            if group[0] == *at && guessed && joined(*last) {
                let number = |at: &JobId| (self.numbers[at.0 as usize], *at);
                groups.push(group.iter().map(number).collect());
            }
        }
        let there: BTreeSet<Vec<u64>> = groups.iter().map(|group| key_of(group)).collect();
        let gone = self.trials.keys().filter(|key| !there.contains(*key));
        let gone: Vec<Vec<u64>> = gone.cloned().collect();
        for key in gone {
            self.trials.remove(&key);
            key.iter().for_each(|id| {
                self.probed.remove(id);
            });
        }
        for group in groups {
            self.try_group(&group);
        }
    }

    fn try_group(&mut self, group: &[(u64, JobId)]) {
        let key = key_of(group);
        let Some(trial) = self.trials.get(&key).cloned() else {
            for (id, _) in group {
                if let Some(record) = self.jobs.get_mut(id) {
                    record.rate = None;
                }
            }
            let stage = Stage::Waiting;
            self.trials.insert(key, Trial { stage });
            return self.try_group(group);
        };
        let samples: Option<Vec<Sample>> = group.iter().map(|(id, _)| self.current(*id)).collect();
        let Some(now) = samples else {
            // One of them is not there (yet, or any more); what was under way counts for nothing.
            if !matches!(trial.stage, Stage::Kept) {
                self.set_stage(key, Stage::Waiting);
            }
            return;
        };
        match trial.stage {
            Stage::Kept => {}
            Stage::Waiting => {
                if now
                    .iter()
                    .any(|sample| sample.launches == 0 || sample.paused)
                {
                    return;
                }
                let unknown = |who: &usize| self.solo(group[*who].0, group[*who].1).is_none();
                match (0..group.len()).find(unknown) {
                    Some(who) => {
                        let others = group.iter().map(|(id, _)| *id);
                        self.probed.extend(others.filter(|id| *id != group[who].0));
                        self.set_stage(key, Stage::Solo { who, from: None });
                    }
                    None => self.set_stage(key, Stage::Together { from: now }),
                }
            }
            Stage::Solo { who, from } => self.probe(group, who, from, &now),
            Stage::Together { from } => self.watch_together(group, &from, &now),
        }
    }

    fn set_stage(&mut self, key: Vec<u64>, stage: Stage) {
        if !matches!(stage, Stage::Solo { .. }) {
            for id in &key {
                self.probed.remove(id);
            }
        }
        self.trials.insert(key, Trial { stage });
    }

    /// The newest sample of a job's present attempt.
    fn current(&self, id: u64) -> Option<Sample> {
        let attempt = self
            .jobs
            .get(&id)?
            .run
            .as_ref()
            .filter(|run| !run.stopping)?
            .attempt;
        self.watches
            .get(&id)
            .filter(|watch| watch.attempt == attempt)
            .map(|watch| watch.last)
    }

    fn probe(&mut self, group: &[(u64, JobId)], who: usize, from: Option<Sample>, now: &[Sample]) {
        let key = key_of(group);
        let all_paused = (0..group.len()).all(|other| other == who || now[other].paused);
        if !all_paused {
            return;
        }
        let Some(from) = from else {
            let from = Some(now[who]);
            return self.set_stage(key, Stage::Solo { who, from });
        };
        let solo_s = self.config.trial.solo_s;
        let passed = now[who].s - from.s;
        if passed < solo_s + SETTLE_S {
            return;
        }
        let (id, at) = group[who];
        let right = self.clock_is_right(id, &from, &now[who]);
        let known = match solo_between(&from, &now[who]).filter(|_| right) {
            Some(solo) => self.learn(id, at, solo),
            None if right && passed < IDLE_TIMES * solo_s => return,
            None => false,
        };
        // It does nothing by itself, or what cannot be: so it cannot be judged together with
        // another.
        if !known {
            let key = self.solo_key(id, at);
            if let Some(record) = self.jobs.get_mut(&id) {
                (record.solo, record.solo_on) = (Some(Solo::default()), key);
            }
        }
        self.set_stage(key, Stage::Waiting);
    }

    fn watch_together(&mut self, group: &[(u64, JobId)], from: &[Sample], now: &[Sample]) {
        let key = key_of(group);
        if now.iter().any(|sample| sample.paused) {
            return self.set_stage(key, Stage::Waiting);
        }
        let trial = self.config.trial;
        let slower_s = now
            .iter()
            .map(|sample| sample.iteration_s)
            .fold(0.0, f64::max);
        let window_s = (trial.iterations * slower_s).max(trial.window_s);
        let all = 0..group.len();
        if (all.clone()).any(|who| now[who].s - from[who].s < window_s) {
            return;
        }
        // Nothing is known of jobs on a node whose clock is wrong.
        if (all.clone()).any(|who| !self.clock_is_right(group[who].0, &from[who], &now[who])) {
            return self.set_stage(key, Stage::Waiting);
        }
        let rates = all.map(|who| {
            let solo = self.solo(group[who].0, group[who].1);
            solo.map_or(f64::NAN, |solo| relative(&solo, &from[who], &now[who]))
        });
        let rates: Vec<f64> = rates.collect();
        let unpack = match (group, &rates[..]) {
            ([host, joiner], [a, b]) => self.judge([*host, *joiner], [*a, *b]),
            // What several are measured at is nothing that a pair was.
            _ => {
                let ats: Vec<JobId> = group.iter().map(|(_, at)| *at).collect();
                self.claim_several(&ats, &rates).is_some()
            }
        };
        self.judged(group, &rates, (window_s, unpack));
    }

    /// Whether a pair is to be split.
    fn judge(&mut self, pair: [(u64, JobId); 2], rates: [f64; 2]) -> bool {
        let [(host, host_at), (joiner, joiner_at)] = pair;
        let measured = PairRecord {
            gpu: self.gpu_name(host_at),
            gpus: self.held(host_at),
            kinds: [host, joiner].map(|id| self.jobs[&id].submission.kind.clone()),
            // JSON has no NaN: a pair of which nothing is known is one that does nothing.
            rates: rates.map(|rate| if rate.is_nan() { 0.0 } else { rate }),
            ..PairRecord::default()
        };
        let node = self.node_of(host).unwrap_or_default();
        let (counts, unconfirmed, here) = self.claim(&node, measured);
        // What one node says to keep a pair apart is not the cluster's memory.
        let verdict = if unconfirmed {
            Verdict::from(here)
        } else {
            self.scheduler
                .observe(&self.state, host_at, joiner_at, counts)
        };
        self.forget_pairs();
        self.unlearnt.speeds = true;
        here.is_some() || matches!(verdict, Verdict::Unpack(_))
    }

    /// Goes on with what a group was measured at, and says it.
    fn judged(&mut self, group: &[(u64, JobId)], rates: &[f64], (window_s, unpack): (f64, bool)) {
        for ((id, at), rate) in group.iter().zip(rates) {
            if let Some(job) = self.jobs.get_mut(id) {
                job.rate = rate.is_finite().then_some(*rate);
                self.dirty.insert(*id);
            }
            self.pace(*at);
        }
        let (host, last) = (group.first(), group.last());
        let (Some((host, _)), Some((last, _))) = (host, last) else {
            return;
        };
        let word = match (group.len(), unpack) {
            (2, true) => "the pair is split",
            (2, false) => "the pair stays",
            (_, true) => "the one that came last leaves",
            (_, false) => "they stay",
        };
        let all: Vec<String> = rates.iter().map(|rate| format!("{rate:.2}")).collect();
        let of = all.split_last().map_or_else(String::new, |(end, others)| {
            format!("{} and {end}", others.join(", "))
        });
        let text = format!("{of} of their solo speeds over {window_s:.0} s: {word}");
        self.say("measured", *last, Some(*host), text);
        self.set_stage(key_of(group), Stage::Kept);
        self.changed |= unpack;
    }
}

/// What a trial of these jobs is called.
fn key_of(group: &[(u64, JobId)]) -> Vec<u64> {
    group.iter().map(|(id, _)| *id).collect()
}

/// Two measurements say something different.
fn far(old: &Solo, new: &Solo) -> bool {
    let change = new.launches_per_s / old.launches_per_s;
    let busy = |solo: &Solo| solo.metered.map(|metered| metered.busy);
    let busier = match (busy(old), busy(new)) {
        (Some(old), Some(new)) => (old - new).abs() > 0.05,
        (old, new) => old.is_some() != new.is_some(),
    };
    !(0.9..1.1).contains(&change)
        || busier
        || old.iterations_per_s.is_some() != new.iterations_per_s.is_some()
}

/// Speed over a stretch; `None` where nothing was done in it.
fn solo_between(from: &Sample, to: &Sample) -> Option<Solo> {
    let passed = to.s - from.s;
    let launches = to.launches.checked_sub(from.launches)?;
    if launches == 0 || passed <= 0.0 {
        return None;
    }
    let iterations = iterations(from, to).filter(|count| *count >= FEW);
    // CAST: counts are below 2^53.
    Some(Solo {
        launches_per_s: launches as f64 / passed,
        iterations_per_s: iterations.map(|count| count as f64 / passed),
        ..Solo::default()
    })
}

fn iterations(from: &Sample, to: &Sample) -> Option<u64> {
    to.iterations?.checked_sub(from.iterations?)
}

/// Speed over a stretch relative to solo; at most 1, NaN if that is not known.
fn relative(solo: &Solo, from: &Sample, to: &Sample) -> f64 {
    let passed = to.s - from.s;
    // CAST: counts are below 2^53.
    let by = |count: u64, solo: f64| count as f64 / passed / solo;
    let rate = match (solo.iterations_per_s, iterations(from, to)) {
        (Some(solo), Some(count)) if count >= FEW => by(count, solo),
        _ => by(
            to.launches.saturating_sub(from.launches),
            solo.launches_per_s,
        ),
    };
    if rate.is_nan() || passed <= 0.0 {
        f64::NAN
    } else {
        rate.min(1.0)
    }
}

fn sample(status: &JobStatus, [s, heard_s]: [f64; 2], undisturbed: bool) -> Sample {
    let profile = status.profile.as_deref();
    let trusted = profile.filter(|p| p.found != IterationSource::None && p.confidence >= TRUSTED);
    Sample {
        s,
        heard_s,
        launches: status.launches,
        iterations: trusted.map(|profile| profile.iterations),
        // CAST: nanoseconds of an iteration are below 2^53.
        iteration_s: trusted
            .and_then(|p| p.iteration_ns)
            .map_or(0.0, |ns| ns as f64 / 1e9),
        paused: status.paused,
        undisturbed,
    }
}

/// What policies read of a job. Nothing of it is believed beyond what can be.
fn profile(
    status: &JobStatus,
    kind: JobType,
    gpus: u32,
    class: policy::Class,
    quota: Option<u64>,
) -> Profile {
    let mut profile = Profile::unknown(kind, gpus, class);
    // A quota is what it may come to.
    profile.persistent_bytes = quota.unwrap_or(status.mem_used_bytes.max(status.mem_peak_bytes));
    // What stays on one of its devices is at most what stays on all of them. Before it has
    // allocated anything that can move, nothing is known to.
    let residence = status.residence.as_deref().filter(|_| status.evictable);
    let moves = residence.filter(|at| at.evictable_bytes > 0);
    if let Some(metered) = status.profile.as_deref() {
        profile.busy = metered.busy_fraction / f64::from(gpus.max(1));
        profile.mem_busy = metered.copy_fraction.unwrap_or(0.0);
        if let (Some(persistent), Some(ephemeral), None) =
            (metered.persistent_bytes, metered.ephemeral_bytes, quota)
        {
            (profile.persistent_bytes, profile.ephemeral_bytes) = (persistent, ephemeral);
        }
        // CAST: nanoseconds of an iteration are below 2^53.
        profile.iteration_s = metered.iteration_ns.map_or(0.0, |ns| ns as f64 / 1e9);
        profile.iteration_cov = metered.iteration_cov.unwrap_or(0.0);
        profile.launches = metered.launches_per_iteration.unwrap_or(0.0);
        profile.h2d_bytes = metered.copied_bytes_per_iteration.unwrap_or(0);
        profile.confidence = metered.confidence;
    }
    profile.movable_bytes =
        moves.map_or(0, |at| profile.peak_bytes().saturating_sub(at.fixed_bytes));
    profile.sane()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(s: f64, launches: u64, iterations: Option<u64>) -> Sample {
        Sample {
            s,
            launches,
            iterations,
            ..Sample::default()
        }
    }

    #[test]
    fn speed_is_counted_in_iterations_where_there_are_enough() {
        let solo = solo_between(&at(0.0, 0, Some(0)), &at(10.0, 1000, Some(100))).unwrap();
        assert_eq!(
            (solo.launches_per_s, solo.iterations_per_s),
            (100.0, Some(10.0))
        );
        let half = relative(&solo, &at(20.0, 0, Some(0)), &at(30.0, 900, Some(50)));
        assert_eq!(
            half, 0.5,
            "by iterations, although it launched nearly as often"
        );
        let few = relative(&solo, &at(20.0, 0, Some(0)), &at(21.0, 80, Some(8)));
        assert_eq!(few, 0.8, "by launches: eight iterations say little");
        let reset = relative(&solo, &at(20.0, 0, Some(500)), &at(30.0, 700, Some(3)));
        assert!((reset - 0.7).abs() < 1e-12, "iterations were counted anew");
    }

    #[test]
    fn nobody_is_faster_than_solo_and_no_number_stays_none() {
        let solo = Solo {
            launches_per_s: 10.0,
            ..Solo::default()
        };
        assert_eq!(
            relative(&solo, &at(0.0, 0, None), &at(1.0, 1 << 60, None)),
            1.0
        );
        assert_eq!(
            relative(&solo, &at(0.0, 50, None), &at(1.0, 0, None)),
            0.0,
            "a counter that runs backwards"
        );
        assert!(relative(&Solo::default(), &at(0.0, 0, None), &at(1.0, 0, None)).is_nan());
        assert!(relative(&solo, &at(1.0, 0, None), &at(1.0, 0, None)).is_nan());
        assert!(solo_between(&at(0.0, 7, None), &at(9.0, 7, None)).is_none());
    }

    #[test]
    fn a_lying_profile_is_cut_to_what_can_be() {
        let metered = control::Profile {
            busy_fraction: f64::NAN,
            copy_fraction: Some(-3.0),
            confidence: 1e300,
            iteration_cov: Some(f64::INFINITY),
            ..control::Profile::default()
        };
        let status = JobStatus {
            profile: Some(Box::new(metered)),
            mem_peak_bytes: 9,
            ..JobStatus::default()
        };
        let profile = profile(&status, JobType(0), 1, policy::Class::Guaranteed, None);
        assert_eq!(
            (profile.busy, profile.mem_busy, profile.confidence),
            (1.0, 1.0, 1.0)
        );
        assert_eq!((profile.iteration_cov, profile.persistent_bytes), (0.0, 9));
    }
}
