//! Decisions for other engines: one job, the devices that its engine could give it, and the same
//! policies as for the hook's own jobs.
//!
//! Each question makes a small [`ClusterState`](policy::cluster::ClusterState) of the candidates
//! that can take the job. The jobs of a device are one host to the packer, so that it is asked
//! about two jobs whatever the device carries. Then the scheduler decides, and what it says about
//! the new job is the answer: jobs that run are not moved or stopped for it, because only their
//! engine could do that.

mod check;
mod judge;
mod model;

use std::collections::BTreeMap;
use std::sync::Arc;

use control::{ArbiterStatus, Class, ControlError, JobState, check_name};
use policy::PolicyError;

use super::learned::Learned;
use super::past::{Pairs, Solos};
use super::starts::Door;
use super::{Config, Hook, NodeEntry};
use crate::live::placement::{Candidate, DecideRequest, Decided, JobProfile, Unfit};
use crate::live::records::NodeRecord;
use check::check;
use judge::{judge, misfit};
use model::Model;

/// Jobs on one device at most: what an arbiter takes is below that.
const MAX_RESIDENTS: usize = 256;
/// Devices of a node at most: what a mask of free GPUs holds.
const MAX_DEVICES: usize = 64;
/// Confidence in what an earlier job of a kind was metered at.
const REMEMBERED: f64 = 0.5;

/// A job of a device, as its node's arbiter reports it. Its name is shared between its devices.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Resident {
    name: Arc<str>,
    gpus: u32,
    class: Class,
    mem_bytes: u64,
    share: Option<f64>,
    busy: Option<f64>,
    confidence: Option<f64>,
}

impl Resident {
    fn profile(&self) -> JobProfile {
        JobProfile {
            id: (*self.name).to_owned(),
            kind: (*self.name).to_owned(),
            gpus: self.gpus,
            class: self.class,
            mem_bytes: Some(self.mem_bytes),
            share: self.share,
            busy: self.busy,
            confidence: self.confidence,
            ..JobProfile::default()
        }
    }
}

/// What the hook remembers, for a question.
struct Remembered<'a> {
    pairs: &'a Pairs,
    solos: &'a Solos,
    learned: &'a Learned,
    past_gpu_s: Vec<f64>,
}

impl Hook {
    /// Where a job of another engine should run. Nothing of the hook changes.
    ///
    /// # Errors
    /// What is wrong with the question, with the value.
    pub fn decide_for(&self, asked: &DecideRequest) -> Result<Decided, ControlError> {
        check(asked)?;
        let mut unfit = Vec::new();
        let mut candidates = Vec::with_capacity(asked.candidates.len());
        for candidate in &asked.candidates {
            match self.known(candidate) {
                Ok(candidate) => candidates.push(candidate),
                Err(reason) => unfit.push(unfit_for(candidate, reason)),
            }
        }
        let job = self.known_job(&asked.job, &candidates);
        decide_among(&self.config, &self.remembered(), &job, candidates, unfit).map_err(|error| {
            // What was looked up when the hook was opened is still there.
            ControlError::new(control::ErrorCode::Internal, error.to_string())
        })
    }

    fn remembered(&self) -> Remembered<'_> {
        Remembered {
            pairs: &self.pairs,
            solos: &self.solos,
            learned: &self.learned,
            past_gpu_s: self.past_gpu_s(),
        }
    }

    /// A candidate with what its node reports.
    fn known(&self, said: &Candidate) -> Result<Candidate, String> {
        let mut candidate = said.clone();
        let Some(entry) = self.nodes.get(&said.node) else {
            return if said.total_bytes == 0 {
                Err(
                    "its node reports to no arbiter's agent here, and no `total_bytes` was given"
                        .into(),
                )
            } else {
                Ok(candidate)
            };
        };
        if !entry.up {
            return Err("its node is silent".into());
        }
        let starts = &entry.record.starts;
        if starts.door(self.now_s) == Door::Shut {
            return Err(format!("jobs do not start on its node: {}", starts.reason));
        }
        let same = |uuid: &str| uuid.eq_ignore_ascii_case(&said.uuid);
        let Some(device) = entry.record.devices.iter().find(|d| same(&d.uuid)) else {
            return Err("its node has no such device (any more)".into());
        };
        candidate.name.clone_from(&device.name);
        candidate.total_bytes = device.total_bytes;
        if let Some(waits) = entry.waits.iter().find(|waits| same(&waits.uuid)) {
            let said = candidate.free_bytes.unwrap_or(u64::MAX);
            candidate.free_bytes = Some(said.min(waits.free_bytes));
            let reported = free_fraction(waits.free_share);
            candidate.free_share = Some(
                candidate
                    .free_share
                    .map_or(reported, |said| said.min(reported)),
            );
        }
        let metered = entry.residents.get(&device.uuid).into_iter().flatten();
        for resident in metered {
            match candidate
                .residents
                .iter_mut()
                .find(|own| *own.id == *resident.name)
            {
                Some(own) => fill(own, resident),
                None => candidate.residents.push(resident.profile()),
            }
        }
        Ok(candidate)
    }

    /// A job with what was metered of its kind: of one that runs, on a candidate or elsewhere, or
    /// of an earlier one.
    fn known_job(&self, said: &JobProfile, candidates: &[Candidate]) -> JobProfile {
        let mut job = said.clone();
        if job.kind.is_empty() {
            job.kind.clone_from(&job.id);
        }
        if job.busy.is_some() {
            return job;
        }
        let own = self.watches.iter().filter_map(|(id, watch)| {
            let kind = &self.jobs.get(id)?.submission.kind;
            let profile = watch.profile.filter(|_| *kind == job.kind)?;
            Some((profile.busy, profile.confidence))
        });
        let beside = candidates.iter().flat_map(|one| &one.residents);
        let beside = beside
            // Of a job that only its node reports, the kind is its name: no engine has said it.
            .filter(|other| {
                let is_said = other.kind != other.id && other.kind == job.kind;
                is_said || (!job.id.is_empty() && other.id == job.id)
            })
            .filter_map(|other| Some((other.busy?, other.confidence.unwrap_or(0.0))));
        let reported = self.reported(&job.id);
        let earlier = self.metered(&job.kind, job.gpus.max(1));
        let earlier = earlier.map(|metered| (metered.busy, REMEMBERED));
        let all = own.chain(beside).chain(reported).chain(earlier);
        if let Some((busy, confidence)) = all.max_by(|a, b| a.1.total_cmp(&b.1)) {
            (job.busy, job.confidence) = (Some(busy), Some(confidence));
        }
        job
    }

    /// How busy the job of this id is, for a question about one that runs already: its node's
    /// arbiter calls it by its id. A kind is no name: another user's job may be called so. Nor does
    /// a name say which job is meant where jobs of several nodes have it.
    fn reported(&self, id: &str) -> Option<(f64, f64)> {
        let on_node = |node: &NodeEntry| {
            let mut all = node.residents.values().flatten();
            all.find(|other| !id.is_empty() && *other.name == *id)
                .map(|other| other.busy.zip(other.confidence))
        };
        let mut found = self.nodes.values().filter_map(on_node);
        let first = found.next()?;
        first.filter(|_| found.next().is_none())
    }
}

/// The jobs of each device of a node, as its arbiter reports them.
pub(super) fn residents(
    node: &NodeRecord,
    arbiter: &ArbiterStatus,
) -> BTreeMap<String, Vec<Resident>> {
    let mut all: BTreeMap<String, Vec<Resident>> = BTreeMap::new();
    let there = |state| !matches!(state, JobState::Gone | JobState::Dormant);
    for job in arbiter.jobs.iter().filter(|job| there(job.state)) {
        if check_name(&job.name).is_err() {
            continue;
        }
        let name: Arc<str> = job.name.as_str().into();
        // CAST: a node has at most 64.
        let gpus = job.devices.len().clamp(1, MAX_DEVICES) as u32;
        let metered = job.profile.as_deref();
        for device in job.devices.iter().take(MAX_DEVICES) {
            if !node.devices.iter().any(|known| known.uuid == device.uuid) {
                continue;
            }
            let on_it = all.entry(device.uuid.clone()).or_default();
            if on_it.len() >= MAX_RESIDENTS {
                continue;
            }
            on_it.push(Resident {
                name: name.clone(),
                gpus,
                class: job.class,
                mem_bytes: device.mem_limit_bytes.unwrap_or(device.mem_used_bytes),
                share: job.share_asked,
                busy: metered.map(|of| fraction(of.busy_fraction / f64::from(gpus))),
                confidence: metered.map(|of| fraction(of.confidence)),
            });
        }
    }
    all
}

/// What an engine does not say of its job from what was metered.
fn fill(own: &mut JobProfile, metered: &Resident) {
    own.mem_bytes = own.mem_bytes.or(Some(metered.mem_bytes));
    own.share = own.share.or(metered.share);
    if own.busy.is_none() {
        (own.busy, own.confidence) = (metered.busy, metered.confidence);
    }
}

/// Between 0 and 1; what is no number counts as 1, the careful guess for a load.
fn fraction(value: f64) -> f64 {
    if value >= 0.0 { value.min(1.0) } else { 1.0 }
}

/// A free share as reported: one below 0 or that is no number counts as none.
fn free_fraction(value: f64) -> f64 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

fn unfit_for(candidate: &Candidate, reason: impl Into<String>) -> Unfit {
    Unfit {
        node: candidate.node.clone(),
        uuid: candidate.uuid.clone(),
        reason: reason.into(),
    }
}

/// Decides; `unfit` has the candidates that are out already.
fn decide_among(
    config: &Config,
    known: &Remembered<'_>,
    job: &JobProfile,
    candidates: Vec<Candidate>,
    mut unfit: Vec<Unfit>,
) -> Result<Decided, PolicyError> {
    let mut fit: Vec<Candidate> = Vec::with_capacity(candidates.len());
    for mut candidate in candidates {
        // A question about a job that is there already is one about moving it.
        candidate
            .residents
            .retain(|other| job.id.is_empty() || other.id != job.id);
        match misfit(job, &candidate) {
            Some(reason) => unfit.push(unfit_for(&candidate, reason)),
            None => fit.push(candidate),
        }
    }
    let gpus = job.gpus.max(1);
    let answer = |reason: String, unfit| Decided {
        reason,
        unfit,
        ..Decided::default()
    };
    if fit.is_empty() {
        let first = unfit.first().map_or("", |one| &one.reason);
        let reason = format!(
            "none of {} candidates can take the job: {first}",
            unfit.len()
        );
        return Ok(answer(reason, unfit));
    }
    let mut model = Model::of(config, known, job, fit)?;
    let Some((taken, share)) = model.decide() else {
        let reason = model.why_not(config, gpus);
        return Ok(answer(reason, unfit));
    };
    // PANIC: a decision about a job has its GPUs, and each stands for a candidate.
    let chosen: Vec<&Candidate> = taken
        .iter()
        .map(|gpu| &model.places[gpu.0 as usize])
        .collect();
    let mut decided = judge(known.pairs, job, &chosen, share);
    decided.reason = format!("{}: {}", config.choice, decided.reason);
    decided.unfit = unfit;
    Ok(decided)
}
