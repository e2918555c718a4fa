//! Decisions for other engines: one job, the devices that its engine could give it, and the same
//! policies as for the hook's own jobs.
//!
//! Each question makes a small [`ClusterState`] of the candidates that can take the job. The jobs
//! of a device are one host to the packer, so that it is asked about two jobs whatever the device
//! carries. Then the scheduler decides, and what it says about the new job is the answer: jobs
//! that run are not moved or stopped for it, because only their engine could do that.

use std::collections::{BTreeMap, BTreeSet};

use control::{ArbiterStatus, Class, ControlError, JobState, check_name, short_bytes};
use policy::PolicyError;
use policy::cluster::{ClusterState, Decision, GpuId, GpuType, Job, JobId, JobType, Node, Profile};

use super::{Config, Hook, Names, UNKNOWN_WORK_S, invalid, policy_class, scheduler_of};
use crate::live::adapt::{self, Facts, Shared};
use crate::live::placement::{Candidate, DecideRequest, Decided, JobProfile, Unfit};
use crate::live::records::PairRecord;

/// Candidates of one question at most.
const MAX_CANDIDATES: usize = 65_536;
/// Jobs on one device at most: what an arbiter takes is below that.
const MAX_RESIDENTS: usize = 256;
/// Devices of a node at most: what a mask of free GPUs holds.
const MAX_DEVICES: usize = 64;
/// Longest name, kind or UUID.
const MAX_WORD_BYTES: usize = 512;
/// Confidence in a slowdown that was measured of these kinds of job.
const MEASURED: f64 = 0.9;
/// Most confidence in a slowdown that follows from how busy the jobs are.
const MODELLED: f64 = 0.5;
/// Shares are compared with this tolerance: they are sums of fractions.
const SHARE_TOLERANCE: f64 = 1e-6;

type Pairs = BTreeMap<(String, u32, [String; 2]), PairRecord>;

impl Hook {
    /// Where a job of another engine should run. Nothing of the hook changes.
    ///
    /// # Errors
    /// The question cannot be meant so.
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
        let job = self.known_job(&asked.job);
        decide_among(&self.config, &self.pairs, &job, candidates, unfit).map_err(|error| {
            // What was looked up when the hook was opened is still there.
            ControlError::new(control::ErrorCode::Internal, error.to_string())
        })
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
        let same = |uuid: &str| uuid.eq_ignore_ascii_case(&said.uuid);
        let Some(device) = entry.record.devices.iter().find(|d| same(&d.uuid)) else {
            return Err("its node has no such device (any more)".into());
        };
        candidate.name.clone_from(&device.name);
        candidate.total_bytes = device.total_bytes;
        if let Some(waits) = entry.waits.iter().find(|waits| same(&waits.uuid)) {
            let said = candidate.free_bytes.unwrap_or(u64::MAX);
            candidate.free_bytes = Some(said.min(waits.free_bytes));
            let reported = fraction(waits.free_share);
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
                .find(|own| own.id == resident.id)
            {
                Some(own) => fill(own, resident),
                None => candidate.residents.push(resident.clone()),
            }
        }
        Ok(candidate)
    }

    /// A job with what was metered of a running one of its kind.
    fn known_job(&self, said: &JobProfile) -> JobProfile {
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
        let engines = self
            .nodes
            .values()
            .flat_map(|node| node.residents.values().flatten());
        let engines = engines
            .filter(|resident| resident.kind == job.kind)
            .filter_map(|resident| Some((resident.busy?, resident.confidence?)));
        let best = own.chain(engines).max_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((busy, confidence)) = best {
            (job.busy, job.confidence) = (Some(busy), Some(confidence));
        }
        job
    }

    /// The jobs of each device, as a node's arbiter reports them.
    pub(super) fn residents(&self, arbiter: &ArbiterStatus) -> BTreeMap<String, Vec<JobProfile>> {
        let mut all: BTreeMap<String, Vec<JobProfile>> = BTreeMap::new();
        let there = |state| !matches!(state, JobState::Gone | JobState::Dormant);
        for job in arbiter.jobs.iter().filter(|job| there(job.state)) {
            // CAST: a node has at most 64.
            let gpus = job.devices.len().clamp(1, MAX_DEVICES) as u32;
            let metered = job.profile.as_deref();
            for device in job.devices.iter().take(MAX_DEVICES) {
                let on_it = all.entry(device.uuid.clone()).or_default();
                if on_it.len() >= MAX_RESIDENTS {
                    continue;
                }
                on_it.push(JobProfile {
                    id: job.name.clone(),
                    kind: job.name.clone(),
                    gpus,
                    class: job.class,
                    mem_bytes: device.mem_limit_bytes.or(Some(device.mem_used_bytes)),
                    share: job.share_asked,
                    busy: metered.map(|of| fraction(of.busy_fraction / f64::from(gpus))),
                    confidence: metered.map(|of| fraction(of.confidence)),
                    ..JobProfile::default()
                });
            }
        }
        all
    }
}

/// What an engine does not say of its job from what was metered.
fn fill(own: &mut JobProfile, metered: &JobProfile) {
    own.mem_bytes = own.mem_bytes.or(metered.mem_bytes);
    own.share = own.share.or(metered.share);
    if own.busy.is_none() {
        (own.busy, own.confidence) = (metered.busy, metered.confidence);
    }
}

/// Between 0 and 1; what is no number counts as 1, the careful guess for a load.
fn fraction(value: f64) -> f64 {
    if value >= 0.0 { value.min(1.0) } else { 1.0 }
}

fn unfit_for(candidate: &Candidate, reason: impl Into<String>) -> Unfit {
    Unfit {
        node: candidate.node.clone(),
        uuid: candidate.uuid.clone(),
        reason: reason.into(),
    }
}

/// # Errors
/// What cannot be meant, with the value.
fn check(asked: &DecideRequest) -> Result<(), ControlError> {
    if asked.candidates.is_empty() {
        let hint = "name the devices that the engine could give the job";
        return Err(invalid("there are no candidates", hint));
    }
    if asked.candidates.len() > MAX_CANDIDATES {
        let count = asked.candidates.len();
        let message = format!("there are {count} candidates, {MAX_CANDIDATES} are taken");
        return Err(invalid(message, "ask about fewer devices"));
    }
    check_profile(&asked.job, "the job")?;
    let mut seen = BTreeSet::new();
    let mut on_node: BTreeMap<&str, usize> = BTreeMap::new();
    for candidate in &asked.candidates {
        let what = format!("candidate `{}` of `{}`", candidate.uuid, candidate.node);
        if check_name(&candidate.node).is_err() {
            let message = format!("`{}` is no name of a node", candidate.node);
            return Err(invalid(message, "write letters, digits, `.`, `_` or `-`"));
        }
        if candidate.uuid.is_empty() || candidate.uuid.len() > MAX_WORD_BYTES {
            let message = format!(
                "a candidate of `{}` has no UUID that can be one",
                candidate.node
            );
            return Err(invalid(message, "write it as `nvidia-smi -L` does"));
        }
        check_word(&candidate.name, "product name", &what)?;
        check_fraction(candidate.free_share, "free share", &what)?;
        if candidate.residents.len() > MAX_RESIDENTS {
            let message = format!("{what} has {} jobs", candidate.residents.len());
            return Err(invalid(message, "no device carries so many"));
        }
        for resident in &candidate.residents {
            check_profile(resident, &format!("a job of {what}"))?;
        }
        if !seen.insert((&candidate.node, candidate.uuid.to_ascii_lowercase())) {
            let message = format!("{what} is there twice");
            return Err(invalid(message, "name each device once"));
        }
        let count = on_node.entry(&candidate.node).or_default();
        *count += 1;
        if *count > MAX_DEVICES {
            let message = format!("`{}` has more than {MAX_DEVICES} devices", candidate.node);
            return Err(invalid(message, "name fewer of them"));
        }
    }
    Ok(())
}

fn check_profile(job: &JobProfile, what: &str) -> Result<(), ControlError> {
    check_word(&job.id, "name", what)?;
    check_word(&job.kind, "kind", what)?;
    if job.gpus > 64 {
        let message = format!("{what} asks for {} GPUs", job.gpus);
        return Err(invalid(message, "a node has at most 64"));
    }
    if job.mem_bytes == Some(0) && what == "the job" {
        return Err(invalid("the memory quota is 0", "omit it for no quota"));
    }
    for (name, value) in [
        ("share", job.share),
        ("busy", job.busy),
        ("confidence", job.confidence),
    ] {
        check_fraction(value, name, what)?;
    }
    let times = [
        ("work", job.work_s),
        ("deadline", job.deadline_s),
        ("weight", job.weight),
    ];
    for (name, value) in times {
        if let Some(value) = value
            && !(value.is_finite() && value > 0.0)
        {
            let message = format!("the {name} of {what} is {value}");
            return Err(invalid(message, "a number above 0 is expected"));
        }
    }
    Ok(())
}

fn check_word(word: &str, name: &str, what: &str) -> Result<(), ControlError> {
    if word.len() > MAX_WORD_BYTES {
        let message = format!("the {name} of {what} has {} bytes", word.len());
        return Err(invalid(message, "write 512 at the most"));
    }
    Ok(())
}

fn check_fraction(value: Option<f64>, name: &str, what: &str) -> Result<(), ControlError> {
    match value {
        Some(value) if !(0.0..=1.0).contains(&value) => {
            let message = format!("the {name} of {what} is {value}");
            Err(invalid(message, "a number from 0 to 1 is expected"))
        }
        _ => Ok(()),
    }
}

/// What is left on a device, beside the jobs that are or will be there.
fn left(candidate: &Candidate) -> (u64, f64) {
    let (mut bytes, mut share) = (0u64, 0.0);
    for resident in &candidate.residents {
        bytes = bytes.saturating_add(resident.mem_bytes.unwrap_or(0));
        if resident.class == Class::Guaranteed {
            share += resident.share.unwrap_or(0.0);
        }
    }
    let bytes = candidate.total_bytes.saturating_sub(bytes);
    let share = (1.0_f64 - share).max(0.0);
    (
        candidate.free_bytes.map_or(bytes, |said| said.min(bytes)),
        candidate.free_share.map_or(share, |said| said.min(share)),
    )
}

/// Why a device cannot take a job.
fn misfit(job: &JobProfile, candidate: &Candidate) -> Option<String> {
    let (bytes, share) = left(candidate);
    if let Some(asked) = job.mem_bytes.filter(|asked| *asked > bytes) {
        return Some(format!(
            "the job asks for {} of memory, {} of {} are free",
            short_bytes(asked),
            short_bytes(bytes),
            short_bytes(candidate.total_bytes)
        ));
    }
    let asked = job.share.filter(|_| job.class == Class::Guaranteed)?;
    (asked > share + SHARE_TOLERANCE)
        .then(|| format!("the job asks for a share of {asked:.2}, {share:.2} are free"))
}

/// Decides; `unfit` has the candidates that are out already.
fn decide_among(
    config: &Config,
    pairs: &Pairs,
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
    let mut model = Model::of(config, pairs, job, fit)?;
    let Some((taken, share)) = model.decide() else {
        let reason = model.why_not(config, gpus);
        return Ok(answer(reason, unfit));
    };
    // PANIC: a decision about a job has its GPUs, and each stands for a candidate.
    let chosen: Vec<&Candidate> = taken
        .iter()
        .map(|gpu| &model.places[gpu.0 as usize])
        .collect();
    let mut decided = judge(pairs, job, &chosen, share);
    decided.reason = format!("{}: {}", config.choice, decided.reason);
    decided.unfit = unfit;
    Ok(decided)
}

/// The candidates as a cluster of their own.
struct Model {
    state: ClusterState,
    scheduler: policy::cluster::Scheduler,
    job: JobId,
    /// The candidate behind each GPU.
    places: Vec<Candidate>,
}

impl Model {
    fn of(
        config: &Config,
        pairs: &Pairs,
        asked: &JobProfile,
        candidates: Vec<Candidate>,
    ) -> Result<Self, PolicyError> {
        let (mut kinds, mut types) = (Names::default(), Types::default());
        // A node with several types of device counts as several nodes.
        let mut order: Vec<(GpuType, Vec<Candidate>)> = Vec::new();
        let mut groups: BTreeMap<(String, u16), usize> = BTreeMap::new();
        for candidate in candidates {
            let kind = types.number(&candidate);
            let at = *groups
                .entry((candidate.node.clone(), kind.0))
                .or_insert(order.len());
            match order.get_mut(at) {
                Some((_, group)) => group.push(candidate),
                None => order.push((kind, vec![candidate])),
            }
        }
        let shared = Shared::default();
        let mut facts = Facts::default();
        let mut nodes = Vec::with_capacity(order.len());
        let mut places = Vec::new();
        for (kind, group) in order {
            let gpu_bytes = group.iter().map(|one| one.total_bytes).min().unwrap_or(0);
            facts.gpu_bytes.insert(kind, gpu_bytes);
            nodes.push(Node {
                first: GpuId(0),
                // CAST: checked to be at most 64.
                gpus: group.len() as u32,
                kind,
                gpu_bytes,
                cpus: 0.0,
                mem_bytes: 0,
            });
            places.extend(group);
        }
        *shared.facts() = facts;
        let past = past(pairs, &mut kinds, &types);
        let measured = adapt::context(&past);
        let context = match config.choice.policies(&measured) {
            Ok(_) => measured,
            // As for the hook itself, before pairs are measured.
            Err(_) => adapt::context_to_be(),
        };
        let mut scheduler = scheduler_of(config, &shared, &context, past)?;
        let mut state = ClusterState::new(nodes);
        let mut batch = Vec::new();
        for (at, candidate) in places.iter().enumerate() {
            if candidate.residents.is_empty() {
                continue;
            }
            let mut host = Job::rigid(JobType(0), 1, 0.0, UNKNOWN_WORK_S);
            host.most_gpus = 1;
            host.profile = together(&candidate.residents, &mut kinds);
            let id = state.arrive(host);
            scheduler.note(id);
            batch.push(Decision::Place {
                job: id,
                // CAST: as many as there are candidates.
                gpus: vec![GpuId(at as u32)],
                class: state.job(id).profile.class,
                share: 1.0,
                mem_bytes: None,
            });
        }
        // Each host has a GPU of its own, so nothing can be refused.
        let _ = state.apply(&batch);
        let gpus = asked.gpus.max(1);
        let kind = JobType(kinds.number(&asked.kind));
        let work_s = asked.work_s.unwrap_or(UNKNOWN_WORK_S);
        let mut new = Job::rigid(kind, gpus, 0.0, work_s);
        new.most_gpus = gpus;
        new.deadline_s = asked.deadline_s;
        new.weight = asked.weight.unwrap_or(1.0);
        new.profile = profile(asked, kind, gpus);
        let job = state.arrive(new);
        scheduler.note(job);
        Ok(Self {
            state,
            scheduler,
            job,
            places,
        })
    }

    /// GPUs and share of the new job. `None`: it waits, or a job that runs would have to go.
    fn decide(&mut self) -> Option<(Vec<GpuId>, f64)> {
        let batch = self.scheduler.decide(&self.state);
        let (taken, share) = batch.iter().find_map(|decision| match decision {
            Decision::Place {
                job, gpus, share, ..
            } if *job == self.job => Some((gpus.clone(), *share)),
            _ => None,
        })?;
        let goes = batch.iter().any(|decision| {
            let stays = matches!(decision, Decision::Reshare { .. } | Decision::Place { .. });
            let here = self
                .state
                .job(decision.job())
                .run()
                .map_or(&[][..], |run| &run.gpus);
            !stays && here.iter().any(|gpu| taken.contains(gpu))
        });
        let here: BTreeSet<_> = taken.iter().map(|gpu| self.state.node_of(*gpu)).collect();
        (!goes && here.len() == 1).then_some((taken, share))
    }

    fn why_not(&self, config: &Config, gpus: u32) -> String {
        let free = self.state.free().total();
        let busy = self.state.gpus() - free;
        let packer = match &config.choice.packer {
            None => "there is no packer".to_owned(),
            Some(packer) if gpus > 1 => {
                format!("packer `{packer}` puts only jobs of one device beside others here")
            }
            Some(packer) => format!("packer `{packer}` takes none of the pairs"),
        };
        format!(
            "{}: the job waits: {free} of the devices that could take it carry no job, {gpus} of one node are asked for; {busy} carry jobs, and {packer}",
            config.choice
        )
    }
}

/// Types of GPU: devices of one name and one size.
#[derive(Default)]
struct Types(BTreeMap<(String, u64), GpuType>);

impl Types {
    fn number(&mut self, candidate: &Candidate) -> GpuType {
        // CAST: at most 65536 candidates.
        let next = GpuType(self.0.len() as u16);
        let key = (candidate.name.clone(), candidate.total_bytes);
        *self.0.entry(key).or_insert(next)
    }

    fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = GpuType> + 'a {
        let is = move |(known, _): &(&(String, u64), &GpuType)| known.0 == name;
        self.0.iter().filter(is).map(|(_, kind)| *kind)
    }
}

/// Measured pairs, for the types that are asked about.
fn past(
    pairs: &Pairs,
    kinds: &mut Names,
    types: &Types,
) -> Vec<(GpuType, Profile, Profile, [f64; 2])> {
    let mut all = Vec::new();
    for pair in pairs.values() {
        let mut of = |kind: &str| {
            let kind = JobType(kinds.number(kind));
            Profile::unknown(kind, pair.gpus, policy::Class::Guaranteed)
        };
        let (host, joiner) = (of(&pair.kinds[0]), of(&pair.kinds[1]));
        all.extend(
            types
                .named(&pair.gpu)
                .map(|kind| (kind, host, joiner, pair.rates)),
        );
    }
    all
}

fn profile(job: &JobProfile, kind: JobType, gpus: u32) -> Profile {
    let mut profile = Profile::unknown(kind, gpus, policy_class(job.class));
    profile.persistent_bytes = job.mem_bytes.unwrap_or(0);
    profile.busy = job.busy.unwrap_or(1.0);
    profile.confidence = job.confidence.unwrap_or(0.0);
    profile
}

/// The jobs of one device as one.
fn together(residents: &[JobProfile], kinds: &mut Names) -> Profile {
    let kind = JobType(kinds.number(&kind_of(residents)));
    let guaranteed = residents.iter().any(|job| job.class == Class::Guaranteed);
    let class = if guaranteed {
        Class::Guaranteed
    } else {
        Class::Opportunistic
    };
    let mut all = Profile::unknown(kind, 1, policy_class(class));
    (all.busy, all.confidence) = load(residents.iter());
    all.busy = all.busy.min(1.0);
    all.persistent_bytes = residents
        .iter()
        .fold(0, |sum, job| sum.saturating_add(job.mem_bytes.unwrap_or(0)));
    all
}

/// What measurements of the jobs of a device are remembered by.
fn kind_of(residents: &[JobProfile]) -> String {
    let kind = |job: &JobProfile| {
        let named = !job.kind.is_empty();
        if named {
            job.kind.clone()
        } else {
            job.id.clone()
        }
    };
    let mut all: Vec<String> = residents.iter().map(kind).collect();
    all.sort_unstable();
    all.join(" + ")
}

/// How busy jobs keep a device together, and how sure that is.
fn load<'a>(jobs: impl Iterator<Item = &'a JobProfile>) -> (f64, f64) {
    jobs.fold((0.0, 1.0), |(busy, sure), job| {
        let confidence = if job.busy.is_some() {
            job.confidence.unwrap_or(0.0)
        } else {
            0.0
        };
        (busy + job.busy.unwrap_or(1.0), f64::min(sure, confidence))
    })
}

/// What is to be expected on the chosen devices: that of the worst one.
fn judge(pairs: &Pairs, job: &JobProfile, chosen: &[&Candidate], share: f64) -> Decided {
    let mut decided = Decided {
        share: job.share.unwrap_or(share),
        expected_slowdown: Some(1.0),
        confidence: 1.0,
        ..Decided::default()
    };
    for (at, candidate) in chosen.iter().enumerate() {
        decided.devices.push(candidate.uuid.clone());
        let (slowdown, confidence, reason) = expected(pairs, job, candidate, decided.share);
        if at == 0 {
            decided.node.clone_from(&candidate.node);
            decided.device.clone_from(&candidate.uuid);
        }
        if at == 0 || Some(slowdown) > decided.expected_slowdown {
            decided.expected_slowdown = Some(slowdown);
            decided.reason = reason;
        }
        decided.confidence = decided.confidence.min(confidence);
        for resident in &candidate.residents {
            if !decided.beside.contains(&resident.id) {
                decided.beside.push(resident.id.clone());
            }
        }
    }
    decided
}

/// Slowdown on one device, how sure it is, and why.
fn expected(
    pairs: &Pairs,
    job: &JobProfile,
    candidate: &Candidate,
    share: f64,
) -> (f64, f64, String) {
    let residents = &candidate.residents;
    if residents.is_empty() {
        return (1.0, 1.0, "alone on the device".into());
    }
    let there = kind_of(residents);
    let gpus = job.gpus.max(1);
    let rate = |host: &str, joiner: &str, who: usize| {
        let key = (
            candidate.name.clone(),
            gpus,
            [host.to_owned(), joiner.to_owned()],
        );
        pairs
            .get(&key)
            .map(|pair| pair.rates[who])
            .filter(|rate| *rate > 0.0)
    };
    if let Some(rate) = rate(&there, &job.kind, 1).or_else(|| rate(&job.kind, &there, 0)) {
        let slowdown = (1.0 / rate).max(1.0);
        let reason = format!("beside {there}: as measured, {rate:.2} of its solo speed");
        return (slowdown, MEASURED, reason);
    }
    let (busy, sure) = load(residents.iter().chain([job]));
    let own = job.busy.unwrap_or(1.0).max(SHARE_TOLERANCE);
    // Time is divided by what both want, and never below what was promised.
    let promised = match job.class {
        Class::Guaranteed => (share / own).min(1.0),
        Class::Opportunistic => 0.0,
    };
    let rate = (1.0 / busy.max(1.0)).max(promised);
    let known = if sure > 0.0 {
        "by"
    } else {
        "nothing is known of some of them; at worst by"
    };
    let reason =
        format!("beside {there}: {known} how busy they are, {busy:.2} of the device in all");
    (1.0 / rate, MODELLED * sure, reason)
}
