//! Philly's own log (ATC'19; GitHub msr-fiddle/philly-traces, `cluster_job_log`): a JSON list of
//! jobs, each with when it was submitted and every attempt to run it on which GPUs.
//!
//! A job is of its virtual cluster (`--part`), asks for as many GPUs as its largest attempt held,
//! and takes as long as its attempts together. Of the log's jobs those count that have an attempt
//! with a start, an end and GPUs; a last attempt without an end was still running when the log was
//! taken. What is left out is counted by its reason: the log has such entries (its own page names
//! errors of logging), and a clock that is put back gives attempts that end before they start.
//! Times are local and without a zone.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use policy::cluster::{Job, UserId};
use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize, de};

use super::clock;
use super::recorded::Recorded;
use super::table::TraceError;
use super::{BACKWARDS, NO_GPU, Options, Trace, UNRECORDED, kind};

/// Left out: no attempt to run it is in the log.
const NEVER: &str = "never started";
/// Left out: its last attempt has no end.
const RUNNING: &str = "still running";

/// A time of the log; not every attempt has one.
#[derive(Debug, Default)]
struct Time(Option<f64>);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Time;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time such as \"2017-10-09 07:01:55\", or null")
            }
            fn visit_unit<E: Error>(self) -> Result<Time, E> {
                Ok(Time(None))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Time, E> {
                if matches!(text, "" | "None") {
                    return Ok(Time(None));
                }
                let seconds =
                    clock::local(text).map_err(|why| E::custom(format!("`{text}`: {why}")))?;
                Ok(Time(Some(seconds)))
            }
        }
        deserializer.deserialize_any(Text)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Server {
    ip: String,
    gpus: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Attempt {
    #[serde(default)]
    start_time: Time,
    #[serde(default)]
    end_time: Time,
    #[serde(default)]
    detail: Vec<Server>,
}

/// How a job ended.
#[derive(Debug, Deserialize)]
enum Status {
    Pass,
    Killed,
    Failed,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(rename = "status")]
    _status: Status,
    vc: String,
    jobid: String,
    attempts: Vec<Attempt>,
    submitted_time: Time,
    #[serde(rename = "user")]
    _user: String,
}

/// Whether a file starts as a JSON list does.
pub(super) fn is_log(file: &Path) -> bool {
    use std::io::Read;
    let mut first = [0_u8; 64];
    let read = File::open(file).and_then(|mut opened| opened.read(&mut first));
    let read = &first[..read.unwrap_or(0)];
    read.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[')
}

pub(super) fn read(file: &Path, options: &Options) -> Result<Trace, TraceError> {
    let io = |why: String| TraceError::Io {
        file: file.to_owned(),
        why,
    };
    let opened = File::open(file).map_err(|error| io(error.to_string()))?;
    let mut trace = Trace::default();
    let mut log = serde_json::Deserializer::from_reader(BufReader::new(opened));
    let entries = Entries {
        trace: &mut trace,
        options,
    };
    let read = entries.deserialize(&mut log).and_then(|()| log.end());
    read.map_err(|error| match error.is_io() {
        true => io(error.to_string()),
        false => TraceError::Log {
            file: file.to_owned(),
            line: error.line(),
            column: error.column(),
            why: {
                // It names the place once more.
                let text = error.to_string();
                let place = text.rfind(" at line ").unwrap_or(text.len());
                text[..place].to_owned()
            },
        },
    })?;
    trace.count_from_first_arrival();
    Ok(trace)
}

/// The list, one entry after the other: the log is large.
struct Entries<'a> {
    trace: &'a mut Trace,
    options: &'a Options,
}

impl<'de> DeserializeSeed<'de> for Entries<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Entries<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of jobs, as in Philly's cluster_job_log")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        while let Some(entry) = entries.next_element::<Entry>()? {
            take(self.trace, self.options, entry)?;
        }
        Ok(())
    }
}

fn take<E: de::Error>(trace: &mut Trace, options: &Options, entry: Entry) -> Result<(), E> {
    if (options.part.as_deref()).is_some_and(|part| part != entry.vc) {
        return Ok(());
    }
    let Some(submit_s) = entry.submitted_time.0 else {
        return Err(E::custom(format!(
            "job `{}` has no submitted_time",
            entry.jobid
        )));
    };
    let Some(last) = entry.attempts.last() else {
        trace.leave_out(NEVER);
        return Ok(());
    };
    let running = last.start_time.0.is_some() && last.end_time.0.is_none();
    let (mut runs, mut most, mut any_gpu) = (Vec::new(), 0, false);
    for attempt in &entry.attempts {
        let all = attempt.detail.iter();
        let all = all.flat_map(|server| server.gpus.iter().map(|gpu| (&server.ip, gpu)));
        let all: Vec<_> = all.collect();
        let gpus: HashSet<_> = all.iter().collect();
        if gpus.len() < all.len() {
            let job = &entry.jobid;
            return Err(E::custom(format!(
                "job `{job}`: an attempt holds a GPU twice"
            )));
        }
        any_gpu |= !gpus.is_empty();
        if let (Some(from_s), Some(to_s)) = (attempt.start_time.0, attempt.end_time.0)
            && !gpus.is_empty()
        {
            runs.push([from_s, to_s]);
            most = most.max(gpus.len());
        }
    }
    let backwards = runs.first().is_some_and(|first| first[0] < submit_s)
        || runs.iter().any(|run| run[1] < run[0])
        || runs.windows(2).any(|pair| pair[1][0] < pair[0][1]);
    let why = match () {
        () if running => Some(RUNNING),
        () if !any_gpu => Some(NO_GPU),
        () if runs.is_empty() => Some(UNRECORDED),
        () if backwards => Some(BACKWARDS),
        () => None,
    };
    if let Some(why) = why {
        trace.leave_out(why);
        return Ok(());
    }
    if most > 65_536 {
        let job = &entry.jobid;
        return Err(E::custom(format!(
            "job `{job}` holds {most} GPUs; at most 65536 are expected"
        )));
    }
    let duration_s: f64 = runs.iter().map(|run| run[1] - run[0]).sum();
    let kind = kind(&mut trace.kinds, "job");
    // CAST: checked above.
    let mut job = Job::rigid(kind, most as u32, submit_s, duration_s.max(1.0));
    job.user = UserId(trace.users.number(&entry.vc));
    trace.jobs.push(job);
    trace.recorded.push(Recorded {
        gpus: most as f64,
        submit_s,
        runs,
    });
    Ok(())
}
