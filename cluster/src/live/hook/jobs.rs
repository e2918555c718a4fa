//! What owners ask for: jobs in, jobs taken back.

use control::{ControlError, ErrorCode};

use super::{Hook, invalid, refuse};
use crate::live::clock::Now;
use crate::live::records::JobRecord;
use crate::live::wire::{JobPhase, JobView, MAX_LABEL_BYTES, Submission, kind_of_command};

/// Jobs that are not over at most.
const MAX_JOBS: usize = 10_000;
/// Words of a command and variables at most.
const MAX_WORDS: usize = 4096;
/// Bytes of all of them together.
const MAX_TEXT_BYTES: usize = 256 << 10;
/// Bytes of the texts of all jobs that are not over.
const MAX_ALL_TEXT_BYTES: usize = 256 << 20;
/// The least part of a GPU: an arbiter promises no less.
const LEAST_PART: f64 = 0.01;
/// Bytes of a job's name: with its number and its attempt it has to be a name on the node.
const MAX_NAME_BYTES: usize = 40;

impl Hook {
    /// Takes a job. `true`: it is new, and was not submitted before with the same word.
    ///
    /// # Errors
    /// Its submission is invalid, or it could never run here.
    pub fn submit(
        &mut self,
        asked: Submission,
        now: impl Into<Now>,
    ) -> Result<(JobView, bool), ControlError> {
        self.advance(now);
        if !asked.once.is_empty()
            && let Some(job) = self
                .jobs
                .values()
                .find(|job| job.submission.once == asked.once)
        {
            let id = job.id;
            return self.job(id).map(|view| (view, false));
        }
        let asked = checked(asked)?;
        if self.jobs.values().filter(|job| job.over.is_none()).count() >= MAX_JOBS {
            return Err(refuse(
                format!("{MAX_JOBS} jobs are not over yet"),
                "cancel some, or wait",
            ));
        }
        let waiting: usize = self
            .jobs
            .values()
            .map(|job| text_bytes(&job.submission))
            .sum();
        if waiting + text_bytes(&asked) > MAX_ALL_TEXT_BYTES {
            return Err(refuse(
                format!(
                    "the jobs that are not over hold {waiting} bytes of commands and variables"
                ),
                "put what is long into a file on the nodes, or wait",
            ));
        }
        let largest = self
            .nodes
            .values()
            .map(|node| node.record.devices.len())
            .max();
        if let Some(largest) = largest
            && asked.gpus as usize > largest
        {
            let message = format!(
                "the job asks for {} GPUs on one node, the largest node has {largest}",
                asked.gpus
            );
            return Err(refuse(
                message,
                "a job runs on one node; ask for fewer GPUs",
            ));
        }
        if let Some(why) = self.no_part(&asked) {
            return Err(why);
        }
        let id = self.store.meta.next_job;
        self.store.meta.next_job += 1;
        let record = JobRecord {
            id,
            submission: asked,
            arrival_s: self.now_s,
            submitted_unix_ms: self.unix_ms(),
            ..JobRecord::default()
        };
        self.jobs.insert(id, record);
        self.dirty.insert(id);
        self.changed = true;
        if self.state.gpus() > 0 {
            self.enter(id);
        }
        self.job(id).map(|view| (view, true))
    }

    /// Why a job cannot have the part of a GPU that it asks for here.
    fn no_part(&self, asked: &Submission) -> Option<ControlError> {
        let share = asked.share?;
        if let Some(why) = self.scheduler.gives_no_parts() {
            return Some(refuse(
                format!("the job asks for {share} of a GPU, and this hook gives no parts: {why}"),
                "ask for a whole GPU, or have the hook run with an order",
            ));
        }
        let devices = || self.nodes.values().flat_map(|node| &node.record.devices);
        let largest = devices().map(|device| device.total_bytes).max()?;
        let bytes = asked.mem_bytes.filter(|bytes| *bytes > largest)?;
        Some(refuse(
            format!(
                "the job asks for {} of a GPU's memory, the largest has {}",
                control::short_bytes(bytes),
                control::short_bytes(largest)
            ),
            "ask for less",
        ))
    }

    /// Take a job back. One that is over stays as it is.
    ///
    /// # Errors
    /// There is no such job.
    pub fn cancel(&mut self, id: u64, now: impl Into<Now>) -> Result<JobView, ControlError> {
        self.advance(now);
        let Some(record) = self.jobs.get_mut(&id) else {
            return Err(no_job(id));
        };
        if record.over.is_none() && !record.cancelled {
            record.cancelled = true;
            self.dirty.insert(id);
            if record.run.is_some() {
                self.release_place(id);
                self.reconcile();
            } else {
                self.over(
                    id,
                    JobPhase::Cancelled,
                    None,
                    "taken back by its owner".into(),
                );
            }
        }
        self.job(id)
    }
}

pub(super) fn no_job(id: u64) -> ControlError {
    ControlError::new(ErrorCode::NoSuchJob, format!("there is no job {id}"))
        .with_hint("see `sublet cluster jobs`")
}

/// Bytes of a job's command and variables.
fn text_bytes(asked: &Submission) -> usize {
    let variables = asked.env.iter();
    let words = asked.command.iter().map(String::len).sum::<usize>();
    words
        + variables
            .map(|(name, value)| name.len() + value.len())
            .sum::<usize>()
}

/// With name and kind filled in.
fn checked(mut asked: Submission) -> Result<Submission, ControlError> {
    let nul = |text: &String| text.contains('\0');
    if asked.command.first().is_none_or(String::is_empty) {
        return Err(invalid(
            "the job has no command",
            "give a program and its arguments",
        ));
    }
    let words = asked.command.len() + asked.env.len();
    let variables = asked
        .env
        .iter()
        .map(|(name, value)| name.len() + value.len());
    let bytes = asked
        .command
        .iter()
        .map(String::len)
        .chain(variables)
        .sum::<usize>()
        + asked.dir.len();
    if words > MAX_WORDS || bytes > MAX_TEXT_BYTES {
        let message = format!("command and environment have {words} words and {bytes} bytes");
        return Err(invalid(
            message,
            "at most 4096 words and 256 KiB are taken: put the rest into a script",
        ));
    }
    if asked.command.iter().any(nul) || asked.env.values().any(nul) || nul(&asked.dir) {
        return Err(invalid(
            "command, environment or directory has a NUL in it",
            "omit it",
        ));
    }
    if let Some(name) = asked
        .env
        .keys()
        .find(|name| name.is_empty() || name.contains(['=', '\0']))
    {
        return Err(invalid(
            format!("`{name}` is no name of a variable"),
            "write NAME=VALUE",
        ));
    }
    if !asked.dir.is_empty() && !asked.dir.starts_with('/') {
        return Err(invalid(
            format!("the directory `{}` is no absolute path", asked.dir),
            "write one that the nodes have",
        ));
    }
    for (what, text) in [
        ("kind", &asked.kind),
        ("user", &asked.user),
        ("word against repetition", &asked.once),
    ] {
        if text.len() > MAX_LABEL_BYTES || text.contains(char::is_control) {
            return Err(invalid(
                format!(
                    "the {what} is longer than {MAX_LABEL_BYTES} bytes or holds what cannot be shown"
                ),
                "shorten it",
            ));
        }
    }
    if asked.name.is_empty() {
        asked.name = control::name_from_command(&asked.command);
        asked.name.truncate(MAX_NAME_BYTES);
    }
    if control::check_name(&asked.name).is_err() || asked.name.len() > MAX_NAME_BYTES {
        let message = format!("`{}` is no name of a job", asked.name);
        return Err(invalid(
            message,
            "write up to 40 letters, digits, `.`, `_` or `-`, beginning with a letter or digit",
        ));
    }
    if asked.kind.is_empty() {
        asked.kind = kind_of_command(&asked.command.join(" "));
    }
    asked.gpus = asked.gpus.max(1);
    if asked.gpus > 64 {
        return Err(invalid(
            format!("{} GPUs are asked for", asked.gpus),
            "a node has at most 64",
        ));
    }
    for (what, value) in [
        ("work", asked.work_s),
        ("deadline", asked.deadline_s),
        ("weight", asked.weight),
    ] {
        if let Some(value) = value
            && !(value.is_finite() && value > 0.0)
        {
            return Err(invalid(
                format!("the {what} is {value}"),
                "a number above 0 is expected",
            ));
        }
    }
    if let Some(most) = asked.max_gpus {
        if most < asked.gpus || most > 64 {
            let message = format!(
                "at least {} GPUs are asked for and at most {most}",
                asked.gpus
            );
            return Err(invalid(
                message,
                "give a largest number between that and 64, or none",
            ));
        }
        if !asked.restartable && most > asked.gpus {
            return Err(invalid(
                "the job is to change its size and is not restartable",
                "give --restartable as well: it is stopped, and goes on in its new size from what it has saved",
            ));
        }
    }
    if asked.mem_bytes == Some(0) {
        return Err(invalid("the memory quota is 0", "omit it for no quota"));
    }
    check_part(&asked)?;
    Ok(asked)
}

/// A part of a GPU is a share of one and some of its memory.
fn check_part(asked: &Submission) -> Result<(), ControlError> {
    let Some(share) = asked.share else {
        return Ok(());
    };
    if !(LEAST_PART..1.0).contains(&share) {
        return Err(invalid(
            format!("{share} of a GPU is asked for"),
            "ask for at least 0.01 and less than 1, or omit the share for whole GPUs",
        ));
    }
    if asked.gpus > 1 || asked.max_gpus.is_some_and(|most| most > 1) {
        let gpus = asked.gpus.max(asked.max_gpus.unwrap_or(1));
        return Err(invalid(
            format!("{share} of {gpus} GPUs is asked for"),
            "ask for a part of one GPU, or for whole GPUs",
        ));
    }
    if asked.mem_bytes.is_none() {
        return Err(invalid(
            format!("{share} of a GPU is asked for, and none of its memory"),
            "say how much (--mem): others have the rest of it",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(change: impl FnOnce(&mut Submission)) -> Result<Submission, ControlError> {
        let mut asked = Submission {
            command: vec!["train".into(), "--x".into()],
            ..Submission::default()
        };
        change(&mut asked);
        checked(asked)
    }

    #[test]
    fn what_is_not_said_is_filled_in() {
        let job = asked(|_| ()).unwrap();
        assert_eq!(
            (job.name.as_str(), job.kind.as_str(), job.gpus),
            ("train", "train --x", 1)
        );
        let long = asked(|job| job.command = vec!["é".repeat(4000)]).unwrap();
        assert!(long.kind.len() <= MAX_LABEL_BYTES && long.name.len() <= MAX_NAME_BYTES);
    }

    #[test]
    fn nonsense_is_refused_with_its_value() {
        let wrong =
            |change: &dyn Fn(&mut Submission)| asked(|job| change(job)).unwrap_err().to_string();
        assert!(wrong(&|job| job.command.clear()).contains("no command"));
        assert!(wrong(&|job| job.command = vec!["a\0".into()]).contains("NUL"));
        assert!(wrong(&|job| job.name = "a b".into()).contains("`a b`"));
        assert!(wrong(&|job| job.gpus = 65).contains("65"));
        assert!(
            wrong(&|job| (job.gpus, job.max_gpus, job.restartable) = (4, Some(3), true))
                .contains("at most 3")
        );
        assert!(wrong(&|job| job.max_gpus = Some(2)).contains("not restartable"));
        assert!(wrong(&|job| job.work_s = Some(f64::NAN)).contains("NaN"));
        assert!(wrong(&|job| job.weight = Some(-1.0)).contains("-1"));
        assert!(wrong(&|job| job.dir = "here".into()).contains("`here`"));
        assert!(wrong(&|job| job.mem_bytes = Some(0)).contains("quota"));
        assert!(wrong(&|job| drop(job.env.insert("A=B".into(), String::new()))).contains("`A=B`"));
        assert!(wrong(&|job| job.kind = "x".repeat(513)).contains("kind"));
        for share in [0.0, -0.5, 1.0, 7.0, 0.001, f64::NAN, f64::INFINITY] {
            let wrong = wrong(&|job| (job.share, job.mem_bytes) = (Some(share), Some(1)));
            assert!(wrong.contains(&format!("{share} of a GPU")), "{wrong}");
        }
        assert!(wrong(&|job| job.share = Some(0.5)).contains("none of its memory"));
        let gang = |job: &mut Submission| {
            (job.share, job.mem_bytes, job.gpus) = (Some(0.5), Some(1), 2);
        };
        assert!(wrong(&gang).contains("0.5 of 2 GPUs"));
    }
}
