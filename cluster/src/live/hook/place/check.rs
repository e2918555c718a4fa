//! What a question may be.

use std::collections::{BTreeMap, BTreeSet};

use control::{ControlError, check_name};

use super::{MAX_DEVICES, MAX_RESIDENTS};
use crate::live::hook::invalid;
use crate::live::placement::{DecideRequest, JobProfile};

/// Candidates of one question at most.
const MAX_CANDIDATES: usize = 65_536;
/// Longest name, kind or UUID.
const MAX_WORD_BYTES: usize = 512;

/// # Errors
/// What is wrong with it, with the value.
pub(super) fn check(asked: &DecideRequest) -> Result<(), ControlError> {
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
