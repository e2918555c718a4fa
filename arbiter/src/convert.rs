//! Between what travels and what is meant: the only file that knows both the wire's types and the
//! arbiter's own.

use std::path::PathBuf;

use channel::wire::{Outcome, TOKEN_BYTES};
use control::{
    Bounds, ControlError, ErrorCode, JobSpec, JobState, JobStatus, OwnFile, Parameter,
    PolicyChoice, Settings, SpanKind, TimelineSpan, exact_bytes,
};
use policy::{Param, PolicyError, SlicePolicy};
use serde::Serialize;
use serde_json::Value;
use shim_ffi::nvml::{UuidText, uuid_digits};

use crate::refusal::{LEAST_SHARE, Refusal};
use crate::spec::Spec;
use crate::timeline;

/// Bytes of each word of a command for display: it is kept for every job.
const COMMAND_WORD_BYTES: usize = 200;
/// Rules of a user's own file that cap something.
const MOST_CAPS: usize = 64;

/// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    UuidText(*uuid).to_string()
}

/// The bytes of a UUID with or without its `GPU-` or `MIG-`.
pub fn uuid_bytes(text: &str) -> Option<[u8; 16]> {
    let digits = text
        .strip_prefix("GPU-")
        .or_else(|| text.strip_prefix("MIG-"))
        .unwrap_or(text);
    uuid_digits(digits.as_bytes())
}

/// The token as it is handed to the job.
pub fn token_text(token: &[u8; TOKEN_BYTES]) -> String {
    String::from_utf8_lossy(token).into_owned()
}

/// A token from the state file.
pub fn token_bytes(text: &str) -> Option<[u8; TOKEN_BYTES]> {
    text.as_bytes().try_into().ok()
}

/// The policy that an operator names.
///
/// # Errors
/// It is not known, or a parameter makes no sense.
pub fn policy(choice: &PolicyChoice) -> Result<Box<dyn SlicePolicy>, PolicyError> {
    let parameters: Vec<Param> = choice
        .parameters
        .iter()
        .map(|(name, value)| Param::new(name.as_str(), policy_value(value)))
        .collect();
    policy::by_name(&choice.name, &parameters)
}

/// Whether there is such a policy.
///
/// # Errors
/// The parameter that is wrong, where it is not the name, and a sentence.
pub fn check_policy(choice: &PolicyChoice) -> Result<(), (Option<String>, String)> {
    policy(choice)
        .map(|_| ())
        .map_err(|error| (error.param().map(ToOwned::to_owned), error.to_string()))
}

fn policy_value(value: &Parameter) -> policy::Value {
    match value {
        Parameter::Flag(flag) => policy::Value::Flag(*flag),
        Parameter::Number(number) => policy::Value::Number(*number),
        Parameter::Word(word) => policy::Value::Word(word.clone()),
    }
}

/// A registration as the arbiter keeps it, under `name`; a deadline becomes a time.
pub fn spec(mut job: JobSpec, name: String, now_unix_ms: u64) -> Spec {
    let cut = |word: &String| {
        let mut end = word.len().min(COMMAND_WORD_BYTES);
        while !word.is_char_boundary(end) {
            end -= 1;
        }
        word[..end].to_owned()
    };
    job.settings.anchor(now_unix_ms);
    job.cut_command();
    let mut caps = job.own_file.map_or_else(Vec::new, |file| file.caps);
    caps.truncate(MOST_CAPS);
    for cap in &mut caps {
        // It is shown to others.
        let shown = cap.from.chars().filter(|c| !c.is_control());
        cap.from = cut(&shown.collect());
    }
    Spec {
        name,
        settings: job.settings.clone(),
        bounds: Bounds::default(),
        own: job.settings,
        own_caps: caps,
        unbound: false,
        on_behalf_of: job.on_behalf_of,
        paused: job.paused,
        pid: job.pid,
        command: job.command.iter().map(cut).collect(),
        driver: job.driver,
        simulated: job.simulated,
        evicted: job.evicted,
        strict: job.strict,
        any_user: job.any_user,
    }
}

/// The other way round, for the state file.
pub fn job_spec(spec: &Spec) -> JobSpec {
    JobSpec {
        name: spec.name.clone(),
        settings: spec.own.clone(),
        own_file: (!spec.own_caps.is_empty()).then(|| {
            Box::new(OwnFile {
                path: PathBuf::new(),
                given: spec.own.clone(),
                caps: spec.own_caps.clone(),
            })
        }),
        slurm_account: String::new(),
        on_behalf_of: spec.on_behalf_of,
        paused: spec.paused,
        pid: spec.pid,
        command: spec.command.clone(),
        driver: spec.driver.clone(),
        simulated: spec.simulated,
        evicted: spec.evicted,
        strict: spec.strict,
        any_user: spec.any_user,
    }
}

/// The settings that are set, for the journal.
pub fn settings_fields<S: Settings + Serialize>(settings: &S) -> Vec<(&'static str, Value)> {
    // PANIC: words, numbers and lists of those.
    let value = serde_json::to_value(settings).expect("settings are always writable");
    S::TABLE
        .iter()
        .filter(|setting| (setting.is_set)(settings))
        .map(|setting| (setting.about.key, value[setting.about.key].clone()))
        .collect()
}

/// What a span is.
fn span_kind(kind: timeline::Kind) -> SpanKind {
    match kind {
        timeline::Kind::Slice => SpanKind::Slice,
        timeline::Kind::Drain => SpanKind::Drain,
        timeline::Kind::Wait => SpanKind::Wait,
        timeline::Kind::Evict => SpanKind::Evict,
        timeline::Kind::Restore => SpanKind::Restore,
        timeline::Kind::Fit => SpanKind::Fit,
        timeline::Kind::Iterations => SpanKind::Iterations,
        timeline::Kind::Mode => SpanKind::Mode,
    }
}

/// A span that has ended.
pub fn span(span: timeline::Span) -> TimelineSpan {
    TimelineSpan {
        kind: span_kind(span.kind),
        job_id: span.tenant.map_or(0, |tenant| tenant.0),
        start_ns: span.start_ns,
        end_ns: span.end_ns,
        device_ns: span.device_ns,
        count: span.count,
    }
}

/// What a job is in the middle of, and since when.
pub fn open_spans(spans: &[(timeline::Kind, u64)]) -> Vec<(SpanKind, u64)> {
    let spans = spans.iter();
    spans.map(|(kind, ns)| (span_kind(*kind), *ns)).collect()
}

/// A job's last figures, for one that uses no device any more.
pub fn at_rest(status: &mut JobStatus, state: JobState) {
    status.state = state;
    status.holding = false;
    status.mem_used_bytes = 0;
    status.unattributed_bytes = 0;
    for device in &mut status.devices {
        device.holding = false;
        device.mem_used_bytes = 0;
        device.unattributed_bytes = 0;
    }
}

/// A refusal for the operator: what happened, with the value, and what to do.
pub fn refusal(refusal: &Refusal) -> ControlError {
    let error =
        |code, message: String, hint: String| ControlError::new(code, message).with_hint(hint);
    match refusal {
        Refusal::BadName(name) => ControlError::new(
            ErrorCode::Invalid,
            control::BadName(name.clone()).to_string(),
        ),
        Refusal::NameTaken(name) => error(
            ErrorCode::Refused,
            format!("a job named `{name}` is running"),
            "choose another --name, or leave it out to have one made".into(),
        ),
        Refusal::ShareRange(share) => error(
            ErrorCode::Invalid,
            format!("a share of {share} makes no sense"),
            "write a part of the device above 0 and up to 1, such as 0.5".into(),
        ),
        Refusal::MemRange(what, limit) => error(
            ErrorCode::Invalid,
            format!("a {what} of {limit} is out of range"),
            "write a size above zero such as 8GiB, or a part such as 50%".into(),
        ),
        Refusal::TooLong(what, length, most) => error(
            ErrorCode::Invalid,
            format!("the job names {length} {what}, and may name {most}"),
            "name fewer".into(),
        ),
        Refusal::DeadlineWithoutWork => error(
            ErrorCode::Invalid,
            "a deadline needs the device time that the work takes".into(),
            "give --work as well, such as --work 40m".into(),
        ),
        Refusal::Bounds { min, share, max } => {
            let reported = [("at least", min), ("", share), ("at most", max)]
                .into_iter()
                .filter_map(|(word, share)| Some(format!("{word} {}", short((*share)?))))
                .map(|text| text.trim_start().to_owned())
                .collect::<Vec<_>>();
            error(
                ErrorCode::Invalid,
                format!("a share of {} makes no sense", reported.join(", ")),
                "write bounds with the share between them".into(),
            )
        }
        Refusal::ShareSum { asked, promised } => error(
            ErrorCode::Refused,
            format!(
                "a share of {asked} with the {} promised to other jobs would be {}, above 1",
                short(*promised),
                short(asked + promised)
            ),
            format!(
                "ask for {} or less, use --class opportunistic, or lower another job's with `sublet set NAME --share`",
                short((1.0 - promised).max(0.0))
            ),
        ),
        Refusal::TooManyJobs { user, most } => error(
            ErrorCode::Refused,
            match user {
                Some(user) => format!("user {user} has {most} jobs, the most that one can have"),
                None => format!("there are {most} jobs, the most that there can be"),
            },
            "end some of them: `sublet ps` lists them, and a job ends with its processes".into(),
        ),
        Refusal::NothingLeft { promised, waiting } => error(
            ErrorCode::Refused,
            format!(
                "with shares of {} promised, less than {LEAST_SHARE} each is left for {waiting} {} without one",
                short(*promised),
                if *waiting == 1 { "job" } else { "jobs" }
            ),
            "use --class opportunistic, or lower another job's with `sublet set NAME --share`"
                .into(),
        ),
        Refusal::MemAboveDevice {
            asked,
            device,
            usable,
        } => error(
            ErrorCode::Refused,
            format!(
                "a limit of {} is above the {} that device {device} has for jobs",
                exact_bytes(*asked),
                exact_bytes(*usable)
            ),
            format!("ask for {} or less, or a percentage", exact_bytes(*usable)),
        ),
        Refusal::NoDevice { selector, known } => error(
            ErrorCode::NoSuchDevice,
            format!("no device answers to `{selector}`; {known} are known"),
            "see `sublet ps` for the devices, or leave --device out".into(),
        ),
        Refusal::UserShare { user, asked, max } => error(
            ErrorCode::Refused,
            format!(
                "the shares of {user}'s jobs would sum to {}, above the {} that the configuration allows",
                short(*asked),
                short(*max)
            ),
            "ask for less, or end one of them".into(),
        ),
        Refusal::UserMem { user, asked, max } => error(
            ErrorCode::Refused,
            format!(
                "the limits of {user}'s jobs would sum to {}, above the {} that the configuration allows",
                exact_bytes(*asked),
                exact_bytes(*max)
            ),
            "ask for less, or end one of them".into(),
        ),
        Refusal::HostMemory { asked, available } => error(
            ErrorCode::Refused,
            format!(
                "{} of host memory for the job is above the {} that all jobs may have together",
                exact_bytes(*asked),
                exact_bytes(*available)
            ),
            format!(
                "ask for {} or less, or raise host_memory in [residency] of the quota file",
                exact_bytes(*available)
            ),
        ),
        Refusal::NotEvictable(what) => error(
            ErrorCode::Invalid,
            format!("{what} makes no sense for a job whose memory stays on its devices"),
            "start it with --evictable".into(),
        ),
        Refusal::Overflow {
            used,
            limit,
            needed,
            available,
        } => error(
            ErrorCode::Refused,
            format!(
                "the job uses {}, and of the {} that a limit of {} leaves over host memory takes {}",
                exact_bytes(*used),
                exact_bytes(*needed),
                exact_bytes(*limit),
                exact_bytes(*available)
            ),
            "lower it less, or give the job more with --host-memory".into(),
        ),
        Refusal::UserMemUnnamed { user, max } => error(
            ErrorCode::Refused,
            format!(
                "{user}'s jobs may have {} together by the configuration, and this one names no limit",
                exact_bytes(*max)
            ),
            "add --mem".into(),
        ),
    }
}

/// A share as people write it: no more digits than it needs.
fn short(share: f64) -> String {
    let text = format!("{share:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Login name of a user; `None` where the host does not know it. It may ask a server for it, and
/// wait.
pub fn user_name(uid: u32) -> std::io::Result<Option<String>> {
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid))?;
    Ok(user.map(|user| user.name))
}

/// What a client is answered when it is not let in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NotIn {
    /// For programs.
    pub outcome: Outcome,
    /// For people.
    pub text: String,
    /// For the journal.
    pub fields: Vec<(&'static str, Value)>,
}

impl NotIn {
    /// With both, and nothing more to be said.
    pub fn new(outcome: Outcome, text: impl Into<String>) -> Self {
        Self {
            outcome,
            text: text.into(),
            fields: Vec::new(),
        }
    }

    /// A word for programs that read the journal.
    pub fn word(&self) -> &'static str {
        match self.outcome {
            Outcome::Attached => "attached",
            Outcome::Version => "version",
            Outcome::UnknownToken => "unknown_token",
            Outcome::Permission => "permission",
            Outcome::Full => "full",
            Outcome::Malformed => "malformed",
            Outcome::Failed => "failed",
            Outcome::NoDevice => "no_device",
        }
    }
}

/// An error with everything that it says it comes from: the first line alone is seldom the reason.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// How a client's work is followed, where that is worth telling.
pub fn followed_by(way: channel::Following) -> Option<String> {
    match way {
        channel::Following::Writes => None,
        channel::Following::Events => Some("events".into()),
        channel::Following::Queries => Some("queries".into()),
    }
}

/// What the journal says of a process whose devices the job may not use: a line for people, and
/// fields.
pub fn ungoverned(
    job: &str,
    pid: u32,
    command: &str,
    devices: &[[u8; 16]],
) -> (String, Vec<(&'static str, Value)>) {
    let (names, fields) = of_devices(pid, devices);
    let message = format!(
        "process {pid} ({command}) of job `{job}` uses {names}, which the job may not use: quota and share do not hold there"
    );
    (message, fields)
}

/// What the journal says of a process that is not let in, because its job's memory limit would hold
/// on no device.
pub fn nowhere(
    job: &str,
    pid: u32,
    command: &str,
    devices: &[[u8; 16]],
) -> (String, Vec<(&'static str, Value)>) {
    let (names, fields) = of_devices(pid, devices);
    let message = format!(
        "process {pid} ({command}) of job `{job}` has {names} only, of which the job may use none, and the job has a memory limit: it does not start (see --device, CUDA_VISIBLE_DEVICES, and the driver)"
    );
    (message, fields)
}

fn of_devices(pid: u32, devices: &[[u8; 16]]) -> (String, Vec<(&'static str, Value)>) {
    let names: Vec<String> = devices.iter().map(uuid_text).collect();
    let text = names.join(", ");
    let fields = vec![("pid", Value::from(pid)), ("devices", Value::from(names))];
    (text, fields)
}

#[cfg(test)]
mod tests {
    use control::JobSettings;

    use super::*;

    #[test]
    fn uuids_come_back_as_they_were() {
        let uuid: [u8; 16] = std::array::from_fn(|at| at as u8 * 17);
        let text = uuid_text(&uuid);
        assert_eq!(text, "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(uuid_bytes(&text), Some(uuid));
        assert_eq!(uuid_bytes(&text[4..].to_uppercase()), Some(uuid));
        for bad in [
            "",
            "GPU-",
            "GPU-0011",
            "GPU-zz112233-4455-6677-8899-aabbccddeeff",
        ] {
            assert_eq!(uuid_bytes(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_spec_comes_back_as_it_was_but_for_an_endless_command() {
        let job = JobSpec {
            name: "a".into(),
            settings: JobSettings {
                class: Some(control::Class::Opportunistic),
                share: Some(0.25),
                deadline: Some(control::Deadline::AtUnixMs(7)),
                ..JobSettings::default()
            },
            paused: true,
            pid: 3,
            command: vec!["é".repeat(1000); 100],
            simulated: true,
            evicted: true,
            ..JobSpec::default()
        };
        let back = job_spec(&spec(job.clone(), "a".into(), 0));
        assert_eq!(back.command.len(), JobSpec::COMMAND_WORDS);
        assert!(
            back.command
                .iter()
                .all(|word| word.len() <= COMMAND_WORD_BYTES)
        );
        assert_eq!(
            JobSpec {
                command: vec![],
                ..back
            },
            JobSpec {
                command: vec![],
                ..job
            }
        );
    }

    #[test]
    fn refusals_name_the_value_and_the_remedy() {
        let sum = refusal(&Refusal::ShareSum {
            asked: 0.5,
            promised: 0.75,
        });
        assert_eq!(sum.code, ErrorCode::Refused);
        assert!(
            sum.message.contains("0.5") && sum.message.contains("1.25"),
            "{sum}"
        );
        assert!(sum.hint.contains("0.25 or less"), "{sum}");
        let mem = refusal(&Refusal::MemAboveDevice {
            asked: 3 << 30,
            device: 0,
            usable: 2 << 30,
        });
        assert!(
            mem.to_string().contains("3GiB") && mem.hint.contains("2GiB"),
            "{mem}"
        );
    }
}
