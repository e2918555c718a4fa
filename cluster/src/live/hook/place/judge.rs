//! What a device has left for a job, and what the job has to expect there.

use control::{Class, short_bytes};
use policy::cluster::beside_all;

use crate::live::hook::past::Pairs;
use crate::live::placement::{Candidate, Decided, JobProfile};

/// Confidence in a slowdown that was measured of these kinds of job.
const MEASURED: f64 = 0.9;
/// Part of it where one node alone says so, of itself.
const ONE_NODE: f64 = 0.5;
/// Most confidence in a slowdown that follows from how busy the jobs are.
const MODELLED: f64 = 0.5;
/// Shares are compared with this tolerance: they are sums of fractions.
const SHARE_TOLERANCE: f64 = 1e-6;

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
pub(super) fn misfit(job: &JobProfile, candidate: &Candidate) -> Option<String> {
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

/// A job's kind; without one its name.
pub(super) fn own_kind(job: &JobProfile) -> &str {
    if job.kind.is_empty() {
        &job.id
    } else {
        &job.kind
    }
}

/// What measurements of the jobs of a device are remembered by.
pub(super) fn kind_of(residents: &[JobProfile]) -> String {
    let mut all: Vec<&str> = residents.iter().map(own_kind).collect();
    all.sort_unstable();
    all.join(" + ")
}

/// How busy jobs keep a device together, and how sure that is.
pub(super) fn load<'a>(jobs: impl Iterator<Item = &'a JobProfile>) -> (f64, f64) {
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
pub(super) fn judge(pairs: &Pairs, job: &JobProfile, chosen: &[&Candidate], share: f64) -> Decided {
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
        let pair = pairs.get(&key)?;
        // What the node itself has seen says most about it; another one's word alone says less.
        let own = pair.on(&candidate.node);
        let sure = match own.is_none() && pair.unconfirmed {
            true => MEASURED * ONE_NODE,
            false => MEASURED,
        };
        let rate = own.unwrap_or(pair.rates)[who];
        (rate > 0.0).then_some((rate, sure))
    };
    let measured = rate(&there, &job.kind, 1).or_else(|| rate(&job.kind, &there, 0));
    if let Some((rate, sure)) = measured {
        let slowdown = (1.0 / rate).max(1.0);
        let by = match sure < MEASURED {
            true => "as one other node says",
            false => "as measured",
        };
        let reason = format!("beside {there}: {by}, {rate:.2} of its solo speed");
        return (slowdown, sure, reason);
    }
    // Beside several, what each of them costs adds up, where all of the pairs were measured.
    let each: Option<Vec<(f64, f64)>> = residents
        .iter()
        .map(|one| rate(&one.kind, &job.kind, 1).or_else(|| rate(&job.kind, &one.kind, 0)))
        .collect();
    if let Some(each) = each.filter(|each| each.len() > 1) {
        let rate = beside_all(each.iter().map(|(rate, _)| *rate));
        let sure = each.iter().map(|(_, sure)| *sure).fold(1.0, f64::min);
        let reason = format!("beside {there}: by measured pairs, {rate:.2} of its solo speed");
        return ((1.0 / rate).max(1.0), MODELLED.min(sure), reason);
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
