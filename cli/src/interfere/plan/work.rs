//! What a job of a plan runs: a command, a recording, or what a cluster's hook knows by its kind;
//! and how it is known how far that has come.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use cluster::live::wire::KindView;
use control::MemLimit;
use regex_lite::Regex;
use serde_json::{Value, json};
use toml::Spanned;
use toml::de::DeValue;

use super::Progress;
use super::table::{Placed, Table, Text};
use crate::config::{ConfigError, scalar};
use crate::recording::{Recording, checksum};
use crate::replay::plan as calls;

/// What is asked about a kind of job in a cluster. An error is a sentence.
pub type Kinds<'a> = dyn Fn(&str) -> Result<KindView, String> + 'a;

/// What a job runs.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// A program and its arguments.
    Command(Vec<String>),
    /// A recording, replayed again and again.
    Recording(Recorded),
}

/// A recording that was read to its end.
#[derive(Debug, Clone, PartialEq)]
pub struct Recorded {
    pub path: PathBuf,
    bytes: usize,
    checksum: u32,
    pub processes: usize,
    /// It says where iterations end.
    pub has_steps: bool,
}

impl Work {
    /// What two experiments must agree in; a file by what is in it, wherever it lies.
    pub fn identity(&self) -> (&'static str, Value) {
        match self {
            Self::Command(words) => ("command", json!(words)),
            Self::Recording(one) => {
                let digest = format!("{:08x}", one.checksum);
                ("recording", json!({ "bytes": one.bytes, "crc32": digest }))
            }
        }
    }
}

/// A job's work, with what the hook says of it where it has only a kind.
pub struct Known {
    pub work: Work,
    pub kind: Option<String>,
    pub env: BTreeMap<String, String>,
    pub cwd: PathBuf,
    pub mem: Option<MemLimit>,
}

/// Takes `command`, `recording` or `kind`, and what goes with it.
pub fn work(
    table: &mut Table<'_, '_>,
    base: &Path,
    kinds: &Kinds<'_>,
) -> Result<Known, ConfigError> {
    let source = table.source;
    let command = command(table)?;
    let recording = table.kind::<Text>("recording")?;
    let kind = table.kind::<Text>("kind")?;
    if let Some((kind, at)) = &kind
        && let Err(why) = is_kind(kind)
    {
        return Err(source.wrong(at.clone(), format!("kind: {why}")));
    }
    let mut env = environment(table)?;
    let mut cwd = working_directory(table, base)?;
    let mut mem = None;
    let work = match (command, recording) {
        (Some(_), Some((_, at))) => {
            let message = "recording: the job has a command as well: take one of them away";
            return Err(source.wrong(at, message));
        }
        (Some(words), None) => Work::Command(words),
        (None, Some((file, at))) => {
            let read = Recorded::read(&base.join(&file));
            let wrong = |why| source.wrong(at, format!("recording: `{file}`: {why}"));
            Work::Recording(read.map_err(wrong)?)
        }
        (None, None) => {
            let Some((kind, at)) = &kind else {
                let message = "[[job]] needs a command: command = [\"python\", \"train.py\"], \
                               recording = \"job.slr\", or the kind of a job in a cluster";
                return Err(source.wrong(table.span.clone(), message));
            };
            let wrong = |why: String| source.wrong(at.clone(), format!("kind: `{kind}`: {why}"));
            let known = kinds(kind).map_err(wrong)?;
            if known.gpus > 1 {
                let why = format!("takes {} GPUs, and an experiment has one", known.gpus);
                return Err(wrong(why));
            }
            if known.command.first().is_none_or(String::is_empty) {
                return Err(wrong("the hook has no command for it".into()));
            }
            for (name, value) in known.env {
                // What the plan says counts, and what is sublet's own is the experiment's.
                if !name.starts_with("SUBLET_") {
                    env.entry(name).or_insert(value);
                }
            }
            if let Some(dir) = Some(known.dir).filter(|dir| !dir.is_empty())
                && cwd.is_none()
            {
                let dir = PathBuf::from(dir);
                if !dir.is_dir() {
                    let why = format!(
                        "runs in `{}`, which is no directory here: write cwd, or run the \
                         experiment on a node",
                        dir.display()
                    );
                    return Err(wrong(why));
                }
                cwd = Some(dir);
            }
            mem = known.mem_bytes.map(MemLimit::Bytes);
            Work::Command(known.command)
        }
    };
    Ok(Known {
        work,
        kind: kind.map(|(kind, _)| kind),
        env,
        cwd: cwd.unwrap_or_else(|| base.to_owned()),
        mem,
    })
}

/// As the hook takes it.
fn is_kind(kind: &str) -> Result<(), String> {
    match kind {
        "" => Err("it is empty: write a word such as resnet50-b64".into()),
        kind if kind.len() > 512 || kind.contains(char::is_control) => {
            Err("it has more than 512 bytes, or some that cannot be shown: shorten it".into())
        }
        _ => Ok(()),
    }
}

impl Recorded {
    /// Reads all of it: half a job has other figures than the whole.
    fn read(path: &Path) -> Result<Self, String> {
        let bytes = fs::read(path).map_err(|error| format!("cannot read it: {error}"))?;
        let recording = Recording::read(&bytes[..]).map_err(|error| error.to_string())?;
        if let Some(why) = &recording.cut {
            return Err(format!(
                "ends early: {why}; half a job has other figures: record it again"
            ));
        }
        let plan = calls::plan(&recording).map_err(|error| error.to_string())?;
        if plan.figures.launches + plan.figures.graph_launches == 0 {
            return Err("launches nothing: record a job that computes".into());
        }
        Ok(Self {
            path: path.to_owned(),
            bytes: bytes.len(),
            checksum: checksum(&[&bytes]),
            processes: plan
                .processes
                .iter()
                .filter(|one| !one.ops.is_empty())
                .count(),
            has_steps: plan.figures.steps > 0,
        })
    }
}

/// Words, or a text that the shell runs.
fn command(table: &mut Table<'_, '_>) -> Result<Option<Vec<String>>, ConfigError> {
    let is_text = matches!(
        table.table.get("command").map(Spanned::get_ref),
        Some(DeValue::String(_))
    );
    let words: Vec<Placed<String>> = if is_text {
        let text = table.kind::<Text>("command")?;
        text.into_iter().collect()
    } else {
        table.texts("command")?.unwrap_or_default()
    };
    let Some((first, at)) = words.first() else {
        return Ok(None);
    };
    if first.trim().is_empty() {
        let message = "command: the program is empty: write its name or path";
        return Err(table.source.wrong(at.clone(), message));
    }
    if let Some((word, at)) = words.iter().find(|(word, _)| word.contains('\0')) {
        let message = format!("command: `{}` has a zero byte in it", word.escape_debug());
        return Err(table.source.wrong(at.clone(), message));
    }
    let words = words.into_iter().map(|(word, _)| word);
    Ok(Some(match is_text {
        true => ["/bin/sh".to_owned(), "-c".to_owned()]
            .into_iter()
            .chain(words)
            .collect(),
        false => words.collect(),
    }))
}

/// Variables by name.
fn environment(table: &mut Table<'_, '_>) -> Result<BTreeMap<String, String>, ConfigError> {
    let source = table.source;
    let Some(value) = table.take("env") else {
        return Ok(BTreeMap::new());
    };
    let span = value.span();
    let DeValue::Table(variables) = value.into_inner() else {
        let message = "env is written as a table here: env = { NAME = \"value\" }";
        return Err(source.wrong(span, message));
    };
    let mut read = BTreeMap::new();
    for (name, value) in variables {
        let at = name.span();
        let name = name.into_inner().into_owned();
        if name.is_empty() || name.contains(['=', '\0']) {
            let message = format!("env: `{}` is no name of a variable", name.escape_debug());
            return Err(source.wrong(at, message));
        }
        if name.starts_with("SUBLET_SIM_") {
            let message = format!(
                "env: `{name}` describes the device of all jobs: set it for `sublet interfere`"
            );
            return Err(source.wrong(at, message));
        }
        if name.starts_with("SUBLET_") {
            let message = format!(
                "env: `{name}` is sublet's own: use the plan's keys (mem, share), or take it away"
            );
            return Err(source.wrong(at, message));
        }
        let at = value.span();
        let text = scalar(value.get_ref()).filter(|text| !text.contains('\0'));
        let Some(text) = text else {
            let message = format!("env: `{name}` is a text, a number, true or false");
            return Err(source.wrong(at, message));
        };
        read.insert(name, text.into_owned());
    }
    Ok(read)
}

fn working_directory(
    table: &mut Table<'_, '_>,
    base: &Path,
) -> Result<Option<PathBuf>, ConfigError> {
    let Some((text, at)) = table.kind::<Text>("cwd")? else {
        return Ok(None);
    };
    let path = base.join(&text);
    match path.is_dir() {
        true => Ok(Some(path)),
        false => {
            let message = format!("cwd: `{}` is no directory: make it first", path.display());
            Err(table.source.wrong(at, message))
        }
    }
}

/// How progress is read, and where that is said.
pub fn progress(
    table: &mut Table<'_, '_>,
    work: &Work,
) -> Result<(Progress, Range<usize>), ConfigError> {
    let source = table.source;
    let is_table = matches!(
        table.table.get("progress").map(Spanned::get_ref),
        Some(DeValue::Table(_))
    );
    if !is_table {
        let Some((word, at)) = table.kind::<Text>("progress")? else {
            let progress = match work {
                Work::Recording(one) if !one.has_steps => Progress::Launches,
                _ => Progress::Iterations,
            };
            return Ok((progress, table.span.clone()));
        };
        let progress = match word.as_str() {
            "iterations" => Progress::Iterations,
            "launches" => Progress::Launches,
            "device_time" => Progress::DeviceTime,
            _ => {
                let message = format!(
                    "progress: `{word}` is not known: write iterations, launches, device_time or \
                     {{ lines = \"step ([0-9]+)\" }}"
                );
                return Err(source.wrong(at, message));
            }
        };
        if let Work::Recording(one) = work
            && !one.has_steps
            && progress == Progress::Iterations
        {
            let message = "progress: the recording says of no iteration that it ends: write \
                           launches";
            return Err(source.wrong(at, message));
        }
        return Ok((progress, at));
    }
    // PANIC: it is there, as was seen above.
    let value = table.take("progress").expect("the table of progress");
    let span = value.span();
    if matches!(work, Work::Recording(_)) {
        let message = "progress: a replay writes no lines: write launches or iterations";
        return Err(source.wrong(span, message));
    }
    let mut lines = Table::of(source, "progress", value, &["lines", "unit"])?;
    let (pattern, at) = lines.need::<Text>("lines")?;
    let example = "such as lines = \"step ([0-9]+)\"";
    match Regex::new(&pattern) {
        Err(error) => {
            let message = format!("lines: `{pattern}` is no regular expression: {error}");
            return Err(source.wrong(at, message.replace('\n', " ")));
        }
        Ok(regex) if regex.captures_len() != 2 => {
            let message = format!(
                "lines: `{pattern}` has {} groups in brackets: write one, around the number that \
                 counts up, {example}",
                regex.captures_len() - 1
            );
            return Err(source.wrong(at, message));
        }
        Ok(_) => {}
    }
    let unit = lines.kind::<Text>("unit")?;
    let unit = unit.map_or_else(|| "steps".to_owned(), |(unit, _)| unit);
    Ok((Progress::Lines { pattern, unit }, span))
}
