//! The file that says what is measured: jobs, which of them run together, modes and times.
//!
//! It knows nothing of how a run is made. Every mistake has file, line and column, as in the quota
//! file.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::MemLimit;
use control::kinds::{Count, Share, Size};
use control::setting::Kind;
use policy::names::nearest;
use regex_lite::Regex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::{ConfigError, Source, scalar};

/// How the jobs of a run share the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// One at a time, in slices.
    Slices,
    /// All of them at once, each inside its quota.
    AllAtOnce,
    /// The arbiter decides between the two.
    Auto,
    /// The driver without sublet.
    Plain,
    /// The driver's Multi-Process Service, without sublet.
    Mps,
}

impl Mode {
    const ALL: [Mode; 5] = [
        Mode::Slices,
        Mode::AllAtOnce,
        Mode::Auto,
        Mode::Plain,
        Mode::Mps,
    ];

    pub fn word(self) -> &'static str {
        match self {
            Self::Slices => "slices",
            Self::AllAtOnce => "all-at-once",
            Self::Auto => "auto",
            Self::Plain => "plain",
            Self::Mps => "mps",
        }
    }

    /// What the quota file calls it; `None`: no arbiter has a part in it.
    pub fn of_device(self) -> Option<&'static str> {
        match self {
            Self::Slices => Some("exclusive"),
            Self::AllAtOnce => Some("concurrent"),
            Self::Auto => Some("auto"),
            Self::Plain | Self::Mps => None,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// How it is known how far a job has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// The iterations of its profile.
    Iterations,
    /// What it has submitted.
    Launches,
    /// Device time that it was charged.
    DeviceTime,
    /// A number in a line of its output that counts up.
    Lines { pattern: String, unit: String },
}

impl Progress {
    /// What is counted.
    pub fn unit(&self) -> &str {
        match self {
            Self::Iterations => "iterations",
            Self::Launches => "launches",
            Self::DeviceTime => "s of device time",
            Self::Lines { unit, .. } => unit,
        }
    }

    fn needs_arbiter(&self) -> bool {
        !matches!(self, Self::Lines { .. })
    }

    fn identity(&self) -> Value {
        match self {
            Self::Iterations => json!("iterations"),
            Self::Launches => json!("launches"),
            Self::DeviceTime => json!("device_time"),
            Self::Lines { pattern, unit } => json!({ "lines": pattern, "unit": unit }),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    pub name: String,
    pub command: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub cwd: PathBuf,
    pub mem: Option<MemLimit>,
    pub share: Option<f64>,
    pub warm_up: Duration,
    pub measured: Duration,
    pub progress: Progress,
}

/// Jobs that run together, by their numbers; one alone is its solo run.
#[derive(Debug, Clone, PartialEq)]
pub struct Combination {
    pub jobs: Vec<usize>,
    /// In place of the jobs' own.
    pub shares: Option<Vec<f64>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub repeat: u32,
    pub seed: u64,
    pub modes: Vec<Mode>,
    /// How long a job may take until it submits its first work.
    pub start_limit: Duration,
    pub jobs: Vec<Job>,
    /// Solo runs first, then pairs, then what the file names.
    pub combinations: Vec<Combination>,
}

impl Plan {
    /// What two experiments must agree in to be one. How often it is repeated is not part of it.
    pub fn identity(&self) -> Value {
        let jobs: serde_json::Map<String, Value> = self
            .jobs
            .iter()
            .map(|job| {
                let about = json!({
                    "command": job.command,
                    "env": job.env,
                    "cwd": job.cwd,
                    "mem": job.mem.map(|mem| mem.to_string()),
                    "share": job.share,
                    "warm_up_s": job.warm_up.as_secs_f64(),
                    "measured_s": job.measured.as_secs_f64(),
                    "progress": job.progress.identity(),
                });
                (job.name.clone(), about)
            })
            .collect();
        let combinations: Vec<String> = self
            .combinations
            .iter()
            .map(|combination| self.label(combination))
            .collect();
        json!({
            "seed": self.seed,
            "modes": self.modes,
            "start_limit_s": self.start_limit.as_secs_f64(),
            "jobs": jobs,
            "combinations": combinations,
        })
    }

    /// `a+b`, with shares of their own `a+b@0.75,0.25`.
    pub fn label(&self, combination: &Combination) -> String {
        let names: Vec<&str> = combination
            .jobs
            .iter()
            .map(|job| self.jobs[*job].name.as_str())
            .collect();
        let mut label = names.join("+");
        if let Some(shares) = &combination.shares {
            let shares: Vec<String> = shares.iter().map(f64::to_string).collect();
            label += "@";
            label += &shares.join(",");
        }
        label
    }

    /// Warm-up and window of a run: the longest that one of its jobs asks for.
    pub fn times(&self, combination: &Combination) -> (Duration, Duration) {
        let of = |time: fn(&Job) -> Duration| {
            let times = combination.jobs.iter().map(|job| time(&self.jobs[*job]));
            times.max().unwrap_or_default()
        };
        (of(|job| job.warm_up), of(|job| job.measured))
    }
}

/// Which pairs are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pairs {
    /// Each with each, and with a second one of its own.
    All,
    /// Each with each other.
    Distinct,
    None,
}

const TOP: [&str; 3] = ["experiment", "job", "combination"];
const EXPERIMENT: [&str; 7] = [
    "repeat",
    "seed",
    "modes",
    "pairs",
    "warm_up",
    "measured",
    "start_limit",
];
const JOB: [&str; 9] = [
    "name", "command", "env", "cwd", "mem", "share", "warm_up", "measured", "progress",
];
const COMBINATION: [&str; 2] = ["jobs", "shares"];

/// Most jobs of a plan: with all pairs these are 2144 runs.
const JOBS_MOST: usize = 64;
/// Most jobs of one run.
const TOGETHER_MOST: usize = 8;
/// A shorter window says nothing: a slice alone may take 50 ms.
const MEASURED_LEAST: Duration = Duration::from_millis(500);
const MOST: Duration = Duration::from_secs(86_400);

/// Reads and checks a plan. Relative directories of jobs are below `base`.
///
/// # Errors
/// The first thing that is wrong, with its place.
pub fn parse(text: &str, file: &str, base: &Path) -> Result<Plan, ConfigError> {
    let source = Source { text, file };
    let document = DeTable::parse(text).map_err(|error| {
        let message = error.message().trim().replace('\n', ", ");
        source.wrong(error.span().unwrap_or(0..0), message)
    })?;
    let mut top = Table::new(source, "the plan", document, &TOP)?;
    let mut experiment = match top.take("experiment") {
        None => Table::empty(source, "[experiment]"),
        Some(value) => Table::of(source, "[experiment]", value, &EXPERIMENT)?,
    };
    let repeat = experiment.kind::<Count<1, 1000>>("repeat")?;
    let seed = experiment.kind::<Count<0, { u64::MAX }>>("seed")?;
    let pairs = pairs(&mut experiment)?;
    let modes = modes(&mut experiment)?;
    let warm_up = time(&mut experiment, "warm_up", Duration::ZERO)?;
    let measured = time(&mut experiment, "measured", MEASURED_LEAST)?;
    let start_limit = time(&mut experiment, "start_limit", Duration::from_secs(1))?;

    let mut jobs: Vec<Job> = Vec::new();
    let mut places: Vec<JobPlaces> = Vec::new();
    for value in top.tables("job")? {
        let mut table = Table::of(source, "[[job]]", value, &JOB)?;
        let (name, at) = table.need::<JobName>("name")?;
        if jobs.iter().any(|job| job.name == name) {
            let message = format!("name: `{name}` is taken by a job above: write another");
            return Err(source.wrong(at, message));
        }
        let command = command(&mut table)?;
        let env = environment(&mut table)?;
        let cwd = working_directory(&mut table, base)?;
        let mem = table.kind::<Size>("mem")?;
        let share = table.kind::<Share>("share")?;
        let (progress, progress_at) = progress(&mut table)?;
        places.push(JobPlaces {
            share: share.as_ref().map(|(_, at)| at.clone()),
            progress: progress_at,
        });
        jobs.push(Job {
            name,
            command,
            env,
            cwd,
            mem: mem.map(|(mem, _)| mem),
            share: share.map(|(share, _)| share),
            warm_up: time(&mut table, "warm_up", Duration::ZERO)?
                .or(warm_up)
                .unwrap_or(Duration::from_secs(5)),
            measured: time(&mut table, "measured", MEASURED_LEAST)?
                .or(measured)
                .unwrap_or(Duration::from_secs(30)),
            progress,
        });
        if jobs.len() > JOBS_MOST {
            let message = format!("more than {JOBS_MOST} jobs: divide them between two plans");
            return Err(source.wrong(table.span, message));
        }
    }
    if jobs.is_empty() {
        let message = "the plan has no [[job]]: write at least one, with name and command";
        return Err(source.wrong(0..0, message));
    }
    let without = modes.iter().find(|mode| mode.of_device().is_none());
    if let Some(mode) = without
        && let Some(at) = jobs.iter().position(|job| job.progress.needs_arbiter())
    {
        let message = format!(
            "job `{}` is read by {}, and in mode {mode} no arbiter counts them: write progress = \
             {{ lines = \"step ([0-9]+)\" }}, or take {mode} out of modes",
            jobs[at].name,
            jobs[at].progress.unit()
        );
        return Err(source.wrong(places[at].progress.clone(), message));
    }

    let mut combinations: Vec<Combination> = (0..jobs.len()).map(solo).collect();
    for a in 0..jobs.len() {
        for b in a..jobs.len() {
            let wanted = match pairs {
                Pairs::All => true,
                Pairs::Distinct => a != b,
                Pairs::None => false,
            };
            if wanted {
                let pair = vec![a, b];
                fits(source, &jobs, &places, &pair)?;
                combinations.push(Combination {
                    jobs: pair,
                    shares: None,
                });
            }
        }
    }
    for value in top.tables("combination")? {
        let table = Table::of(source, "[[combination]]", value, &COMBINATION)?;
        let at = table.span.clone();
        let combination = combination(table, &jobs)?;
        if combination.shares.is_none() {
            fits(source, &jobs, &places, &combination.jobs)?;
        }
        if combinations.contains(&combination) {
            let message = "this combination is measured already, by pairs or by one above";
            return Err(source.wrong(at, message));
        }
        combinations.push(combination);
    }
    Ok(Plan {
        // CAST: 1000 at most.
        repeat: repeat.map_or(3, |(repeat, _)| repeat as u32),
        seed: seed.map_or(1, |(seed, _)| seed),
        modes,
        start_limit: start_limit.unwrap_or(Duration::from_secs(120)),
        jobs,
        combinations,
    })
}

/// Where a job says what is checked against the others.
struct JobPlaces {
    share: Option<Range<usize>>,
    progress: Range<usize>,
}

fn solo(job: usize) -> Combination {
    Combination {
        jobs: vec![job],
        shares: None,
    }
}

/// An error where the jobs' own shares are more than a device has.
fn fits(
    source: Source<'_>,
    jobs: &[Job],
    places: &[JobPlaces],
    together: &[usize],
) -> Result<(), ConfigError> {
    let sum: f64 = together.iter().filter_map(|job| jobs[*job].share).sum();
    if sum <= 1.0 + 1e-9 {
        return Ok(());
    }
    let names: Vec<&str> = together
        .iter()
        .map(|job| jobs[*job].name.as_str())
        .collect();
    let at = together.iter().find_map(|job| places[*job].share.clone());
    let message = format!(
        "share: {} run together and ask for {sum} of the device: write 1 in all at most, or \
         choose other pairs (all, distinct, none)",
        names.join(" and ")
    );
    Err(source.wrong(at.unwrap_or(0..0), message))
}

fn pairs(table: &mut Table<'_, '_>) -> Result<Pairs, ConfigError> {
    let Some((word, at)) = table.kind::<Text>("pairs")? else {
        return Ok(Pairs::All);
    };
    match word.as_str() {
        "all" => Ok(Pairs::All),
        "distinct" => Ok(Pairs::Distinct),
        "none" => Ok(Pairs::None),
        _ => {
            let message = format!("pairs: `{word}` is not known: write all, distinct or none");
            Err(table.source.wrong(at, message))
        }
    }
}

fn modes(table: &mut Table<'_, '_>) -> Result<Vec<Mode>, ConfigError> {
    let mut modes: Vec<Mode> = Vec::new();
    for (word, at) in table.texts("modes")?.into_iter().flatten() {
        let words = || Mode::ALL.iter().map(|mode| mode.word());
        let Some(mode) = Mode::ALL.iter().find(|mode| mode.word() == word) else {
            let remedy = match nearest(&word, words()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("write some of {}", words().collect::<Vec<_>>().join(", ")),
            };
            let message = format!("modes: `{word}` is not known: {remedy}");
            return Err(table.source.wrong(at, message));
        };
        if modes.contains(mode) {
            let message = format!("modes: `{word}` is named twice: take one away");
            return Err(table.source.wrong(at, message));
        }
        modes.push(*mode);
    }
    if modes.is_empty() {
        modes.push(Mode::Slices);
    }
    Ok(modes)
}

/// A duration; `0s` is none, where that is allowed.
fn time(
    table: &mut Table<'_, '_>,
    key: &str,
    least: Duration,
) -> Result<Option<Duration>, ConfigError> {
    let Some((text, at)) = table.kind::<Text>(key)? else {
        return Ok(None);
    };
    let read = match text.trim() {
        "0" | "0s" if least.is_zero() => Ok(Duration::ZERO),
        text => control::parse_span(text).map_err(|error| error.to_string()),
    };
    let out_of_range = || {
        let (least, most) = (control::short_span(least), control::short_span(MOST));
        format!("`{text}` is out of range: write from {least} to {most}")
    };
    let time = read.and_then(|time| match (least..=MOST).contains(&time) {
        true => Ok(time),
        false => Err(out_of_range()),
    });
    time.map(Some)
        .map_err(|message| table.source.wrong(at, format!("{key}: {message}")))
}

/// Words, or a text that the shell runs.
fn command(table: &mut Table<'_, '_>) -> Result<Vec<String>, ConfigError> {
    let span = table.span.clone();
    let is_text = matches!(
        table.table.get("command").map(Spanned::get_ref),
        Some(DeValue::String(_))
    );
    let words: Vec<(String, Range<usize>)> = if is_text {
        let text = table.kind::<Text>("command")?;
        text.into_iter().collect()
    } else {
        table.texts("command")?.unwrap_or_default()
    };
    let Some((first, at)) = words.first() else {
        let message = "[[job]] needs a command: command = [\"python\", \"train.py\"]";
        return Err(table.source.wrong(span, message));
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
    Ok(match is_text {
        true => ["/bin/sh".to_owned(), "-c".to_owned()]
            .into_iter()
            .chain(words)
            .collect(),
        false => words.collect(),
    })
}

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

fn working_directory(table: &mut Table<'_, '_>, base: &Path) -> Result<PathBuf, ConfigError> {
    let Some((text, at)) = table.kind::<Text>("cwd")? else {
        return Ok(base.to_owned());
    };
    let path = base.join(&text);
    match path.is_dir() {
        true => Ok(path),
        false => {
            let message = format!("cwd: `{}` is no directory: make it first", path.display());
            Err(table.source.wrong(at, message))
        }
    }
}

/// How progress is read, and where that is said.
fn progress(table: &mut Table<'_, '_>) -> Result<(Progress, Range<usize>), ConfigError> {
    let source = table.source;
    let is_table = matches!(
        table.table.get("progress").map(Spanned::get_ref),
        Some(DeValue::Table(_))
    );
    if !is_table {
        let Some((word, at)) = table.kind::<Text>("progress")? else {
            return Ok((Progress::Iterations, table.span.clone()));
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
        return Ok((progress, at));
    }
    // PANIC: it is there, as was seen above.
    let value = table.take("progress").expect("the table of progress");
    let span = value.span();
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

fn combination(mut table: Table<'_, '_>, jobs: &[Job]) -> Result<Combination, ConfigError> {
    let source = table.source;
    let span = table.span.clone();
    let names = table.texts("jobs")?.unwrap_or_default();
    if !(2..=TOGETHER_MOST).contains(&names.len()) {
        let message = format!(
            "[[combination]] needs 2 to {TOGETHER_MOST} jobs, and has {}: jobs = [\"a\", \"b\"]",
            names.len()
        );
        return Err(source.wrong(span, message));
    }
    let mut numbers = Vec::new();
    for (name, at) in names {
        let Some(number) = jobs.iter().position(|job| job.name == name) else {
            let known = || jobs.iter().map(|job| job.name.as_str());
            let remedy = match nearest(&name, known()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("the plan has {}", known().collect::<Vec<_>>().join(", ")),
            };
            let message = format!("jobs: no [[job]] is called `{name}`: {remedy}");
            return Err(source.wrong(at, message));
        };
        numbers.push(number);
    }
    let shares = match table.take("shares") {
        None => None,
        Some(value) => {
            let span = value.span();
            let DeValue::Array(list) = value.get_ref() else {
                let message = "shares is written as a list here: shares = [0.75, 0.25]";
                return Err(source.wrong(span, message));
            };
            let mut shares = Vec::new();
            for item in list.iter() {
                let text = scalar(item.get_ref()).unwrap_or(Cow::Borrowed(""));
                let share = Share::parse(&text).map_err(|message| {
                    let message = format!("shares: {message}");
                    source.wrong(item.span(), message)
                })?;
                shares.push(share);
            }
            let sum: f64 = shares.iter().sum();
            if shares.len() != numbers.len() || sum > 1.0 + 1e-9 {
                let message = format!(
                    "shares: {} shares of {sum} in all for {} jobs: write one for each, 1 in all \
                     at most",
                    shares.len(),
                    numbers.len()
                );
                return Err(source.wrong(span, message));
            }
            Some(shares)
        }
    };
    Ok(Combination {
        jobs: numbers,
        shares,
    })
}

/// Any text.
struct Text;

impl Kind for Text {
    type Value = String;
    const PLACEHOLDER: &'static str = "TEXT";
    const FORMS: &'static [control::setting::Form] = &[control::setting::Form::Text];
    const EXAMPLE: &'static str = "\"text\"";

    fn parse(text: &str) -> Result<String, String> {
        Ok(text.to_owned())
    }

    fn schema() -> Value {
        json!({ "type": "string" })
    }
}

/// The name of a job.
struct JobName;

impl Kind for JobName {
    type Value = String;
    const PLACEHOLDER: &'static str = "NAME";
    const FORMS: &'static [control::setting::Form] = &[control::setting::Form::Text];
    const EXAMPLE: &'static str = "\"train\"";

    fn parse(text: &str) -> Result<String, String> {
        control::check_name(text).map_err(|error| error.to_string())?;
        Ok(text.to_owned())
    }

    fn schema() -> Value {
        json!({ "type": "string" })
    }
}

/// A value, and where it stands in the file.
type Placed<T> = (T, Range<usize>);

/// A table of the file, from which keys are taken.
struct Table<'s, 't> {
    source: Source<'s>,
    heading: &'static str,
    span: Range<usize>,
    table: DeTable<'t>,
}

impl<'s, 't> Table<'s, 't> {
    fn empty(source: Source<'s>, heading: &'static str) -> Self {
        Self {
            source,
            heading,
            span: 0..0,
            table: DeTable::new(),
        }
    }

    /// Refuses keys that do not belong there, before any value is looked at.
    fn new(
        source: Source<'s>,
        heading: &'static str,
        table: Spanned<DeTable<'t>>,
        keys: &[&str],
    ) -> Result<Self, ConfigError> {
        let span = table.span();
        let table = table.into_inner();
        let unknown = table
            .keys()
            .filter(|key| !keys.contains(&key.get_ref().as_ref()))
            .min_by_key(|key| key.span().start);
        if let Some(key) = unknown {
            let remedy = match nearest(key.get_ref(), keys.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("it has {}", keys.join(", ")),
            };
            let message = format!("unknown key `{}` in {heading}: {remedy}", key.get_ref());
            return Err(source.wrong(key.span(), message));
        }
        Ok(Self {
            source,
            heading,
            span,
            table,
        })
    }

    fn of(
        source: Source<'s>,
        heading: &'static str,
        value: Spanned<DeValue<'t>>,
        keys: &[&str],
    ) -> Result<Self, ConfigError> {
        let span = value.span();
        match value.into_inner() {
            DeValue::Table(table) => Self::new(source, heading, Spanned::new(span, table), keys),
            _ => {
                let message = format!("{heading} is a table: write its keys below it");
                Err(source.wrong(span, message))
            }
        }
    }

    fn take(&mut self, key: &str) -> Option<Spanned<DeValue<'t>>> {
        self.table.remove(key)
    }

    /// The items of `[[key]]`.
    fn tables(&mut self, key: &str) -> Result<Vec<Spanned<DeValue<'t>>>, ConfigError> {
        let Some(value) = self.take(key) else {
            return Ok(Vec::new());
        };
        let span = value.span();
        match value.into_inner() {
            DeValue::Array(list) => Ok(list.into_iter().collect()),
            _ => {
                let message = format!("`{key}` is written as one table here: write [[{key}]]");
                Err(self.source.wrong(span, message))
            }
        }
    }

    /// A value of a kind that `control` knows, and where it stands.
    fn kind<K: Kind>(&mut self, key: &str) -> Result<Option<Placed<K::Value>>, ConfigError> {
        use control::setting::Form;
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let at = value.span();
        let form = match value.get_ref() {
            DeValue::String(_) => Some(Form::Text),
            DeValue::Integer(_) | DeValue::Float(_) => Some(Form::Number),
            DeValue::Boolean(_) => Some(Form::Boolean),
            _ => None,
        };
        let fits = form.is_some_and(|form| K::FORMS.contains(&form));
        let read = match scalar(value.get_ref()).filter(|_| fits) {
            Some(text) => K::parse(&text),
            None => Err(format!(
                "`{}` is written as in {key} = {}",
                self.source.quote(at.clone()),
                K::EXAMPLE
            )),
        };
        match read {
            Ok(value) => Ok(Some((value, at))),
            Err(message) => Err(self.source.wrong(at, format!("{key}: {message}"))),
        }
    }

    fn need<K: Kind>(&mut self, key: &str) -> Result<Placed<K::Value>, ConfigError> {
        match self.kind::<K>(key)? {
            Some(value) => Ok(value),
            None => {
                let message = format!("{} needs {key} = {}", self.heading, K::EXAMPLE);
                Err(self.source.wrong(self.span.clone(), message))
            }
        }
    }

    /// A list of texts, each with its place.
    fn texts(&mut self, key: &str) -> Result<Option<Vec<Placed<String>>>, ConfigError> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let span = value.span();
        let wrong = |at: Range<usize>| {
            let quote = self.source.quote(at.clone());
            let message = format!("{key}: `{quote}` is written as in {key} = [\"a\", \"b\"]");
            self.source.wrong(at, message)
        };
        let DeValue::Array(list) = value.get_ref() else {
            return Err(wrong(span));
        };
        let texts = list.iter().map(|item| match item.get_ref() {
            DeValue::String(text) => Ok((text.to_string(), item.span())),
            _ => Err(wrong(item.span())),
        });
        texts.collect::<Result<Vec<_>, _>>().map(Some)
    }
}

/// Names of the jobs of a run, each once: a second one of the same job has a number.
pub fn names_in_run(plan: &Plan, combination: &Combination) -> Vec<String> {
    let mut taken: BTreeSet<String> = BTreeSet::new();
    let jobs = combination.jobs.iter().map(|job| &plan.jobs[*job].name);
    jobs.map(|name| {
        let mut free = name.clone();
        let mut number = 2;
        while !taken.insert(free.clone()) {
            // Within what a name may have.
            let short: String = name.chars().take(control::NAME_MAX_BYTES - 4).collect();
            free = format!("{short}-{number}");
            number += 1;
        }
        free
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Plan, String> {
        parse(text, "p.toml", Path::new("/")).map_err(|error| error.to_string())
    }

    const TWO: &str = "[[job]]\nname = \"a\"\ncommand = [\"x\", \"1\"]\n\
        [[job]]\nname = \"b\"\ncommand = \"x | y\"\n";

    #[test]
    fn a_plan_has_solo_runs_all_pairs_and_what_is_named() {
        let plan = read(TWO).unwrap();
        let labels = |plan: &Plan| -> Vec<String> {
            let all = plan.combinations.iter();
            all.map(|combination| plan.label(combination)).collect()
        };
        assert_eq!(labels(&plan), ["a", "b", "a+a", "a+b", "b+b"]);
        assert_eq!((plan.repeat, plan.seed), (3, 1));
        assert_eq!(plan.modes, [Mode::Slices]);
        assert_eq!(plan.jobs[1].command, ["/bin/sh", "-c", "x | y"]);
        assert_eq!(plan.jobs[0].progress, Progress::Iterations);

        let more = "[experiment]\npairs = \"distinct\"\nmodes = [\"all-at-once\", \"auto\"]\n\
            warm_up = \"0s\"\nmeasured = \"2s\"\n\
            [[combination]]\njobs = [\"a\", \"b\", \"a\"]\n\
            [[combination]]\njobs = [\"a\", \"b\"]\nshares = [0.75, \"25%\"]\n";
        let plan = read(&format!("{more}{TWO}")).unwrap();
        assert_eq!(labels(&plan), ["a", "b", "a+b", "a+b+a", "a+b@0.75,0.25"]);
        assert_eq!(plan.modes, [Mode::AllAtOnce, Mode::Auto]);
        let times = (Duration::ZERO, Duration::from_secs(2));
        assert_eq!(plan.times(&plan.combinations[0]), times);
        let names = names_in_run(&plan, &plan.combinations[3]);
        assert_eq!(names, ["a", "b", "a-2"]);
    }

    #[test]
    fn a_run_takes_the_longest_of_its_jobs() {
        let text = "[experiment]\nwarm_up = \"1s\"\nmeasured = \"2s\"\n\
            [[job]]\nname = \"a\"\ncommand = [\"x\"]\nwarm_up = \"3s\"\n\
            [[job]]\nname = \"b\"\ncommand = [\"x\"]\nmeasured = \"5s\"\n";
        let plan = read(text).unwrap();
        let of = |at: usize| plan.times(&plan.combinations[at]);
        let s = Duration::from_secs;
        assert_eq!((of(0), of(1)), ((s(3), s(2)), (s(1), s(5))));
        assert_eq!(of(3), (s(3), s(5)), "{:?}", plan.combinations[3]);
    }

    #[test]
    fn what_is_counted_may_be_a_number_in_a_line() {
        let text = "[experiment]\nmodes = [\"plain\"]\n[[job]]\nname = \"a\"\ncommand = [\"x\"]\n\
            progress = { lines = \"step ([0-9]+)\", unit = \"images\" }\nenv = { A = 1, B = \"c\" }\n";
        let job = &read(text).unwrap().jobs[0];
        assert_eq!(job.progress.unit(), "images");
        assert_eq!((&job.env["A"][..], &job.env["B"][..]), ("1", "c"));
    }

    #[test]
    fn how_often_is_no_part_of_an_experiment_and_everything_else_is() {
        let first = read(TWO).unwrap();
        let again = read(&format!("[experiment]\nrepeat = 9\n{TWO}")).unwrap();
        assert_eq!(first.identity(), again.identity());
        for other in ["seed = 2", "pairs = \"none\"", "measured = \"3s\""] {
            let other = read(&format!("[experiment]\n{other}\n{TWO}")).unwrap();
            assert_ne!(first.identity(), other.identity());
        }
    }

    #[test]
    fn mistakes_are_placed_and_corrected() {
        for (text, at, words) in [
            ("", "1:1", &["no [[job]]"][..]),
            ("[[jobs]]\n", "1:3", &["`jobs`", "did you mean `job`?"]),
            ("[experiment\n", "1:", &[]),
            (
                "[experiment]\nrepat = 1\n",
                "2:1",
                &["did you mean `repeat`?"],
            ),
            ("[experiment]\nrepeat = 0\n", "2:10", &["`0`", "1 to 1000"]),
            ("[experiment]\nrepeat = \"x\"\n", "2:10", &["repeat = 2"]),
            ("[experiment]\nseed = -1\n", "2:8", &["`-1`"]),
            (
                "[experiment]\nmodes = \"auto\"\n",
                "2:9",
                &["[\"a\", \"b\"]"],
            ),
            (
                "[experiment]\nmodes = [\"slice\"]\n",
                "2:10",
                &["did you mean `slices`?"],
            ),
            (
                "[experiment]\nmodes = [\"auto\", \"auto\"]\n",
                "2:18",
                &["twice"],
            ),
            ("[experiment]\nmodes = [1]\n", "2:10", &["`1`"]),
            (
                "[experiment]\npairs = \"some\"\n",
                "2:9",
                &["`some`", "distinct"],
            ),
            (
                "[experiment]\nmeasured = \"1ms\"\n",
                "2:12",
                &["`1ms`", "500ms"],
            ),
            ("[experiment]\nmeasured = 5\n", "2:12", &["`5`"]),
            (
                "[experiment]\nwarm_up = \"soon\"\n",
                "2:11",
                &["`soon`", "90s"],
            ),
            (
                "[experiment]\nwarm_up = \"2d\"\n",
                "2:11",
                &["out of range"],
            ),
            ("[job]\nname = \"a\"\n", "1:", &["[[job]]"]),
            ("[[job]]\ncommand = [\"x\"]\n", "1:1", &["needs name"]),
            ("[[job]]\nname = \"a b\"\n", "2:8", &["`a b`", "letters"]),
            ("[[job]]\nname = \"a\"\n", "1:1", &["needs a command"]),
            (
                "[[job]]\nname = \"a\"\ncommand = []\n",
                "1:1",
                &["needs a command"],
            ),
            ("[[job]]\nname = \"a\"\ncommand = [3]\n", "3:12", &["`3`"]),
            (
                "[[job]]\nname = \"a\"\ncommand = \" \"\n",
                "3:11",
                &["empty"],
            ),
            (
                "[[job]]\nname = \"a\"\ncommand = [\"a\\u0000\"]\n",
                "3:12",
                &["zero byte"],
            ),
        ] {
            let error = read(text).unwrap_err();
            assert!(
                error.starts_with(&format!("p.toml:{at}")),
                "{text}: {error}"
            );
            assert!(!error.contains('\n'), "{error}");
            for word in words {
                assert!(error.contains(word), "{text}: {error}");
            }
        }
        for (line, at, words) in [
            ("share = 1.5", "4:9", &["`1.5`", "at most 1"][..]),
            ("share = 0.6", "4:9", &["a and a", "1.2", "distinct"]),
            ("mem = 20", "4:7", &["mem = \"8GiB\""]),
            ("mem = \"20\"", "4:7", &["no unit"]),
            (
                "cwd = \"nowhere-at-all\"",
                "4:7",
                &["/nowhere-at-all", "no directory"],
            ),
            ("env = 3", "4:7", &["NAME = "]),
            ("env = { \"A=\" = 1 }", "4:9", &["`A=`"]),
            ("env = { A = [1] }", "4:13", &["`A`"]),
            ("env = { SUBLET_MEM = \"1G\" }", "4:9", &["sublet's own"]),
            ("env = { SUBLET_SIM_SPEED = 2 }", "4:9", &["all jobs"]),
            ("progress = \"steps\"", "4:12", &["`steps`", "iterations"]),
            (
                "progress = { line = \"x\" }",
                "4:14",
                &["did you mean `lines`?"],
            ),
            ("progress = { unit = \"x\" }", "4:12", &["needs lines"]),
            (
                "progress = { lines = \"step ([0-9]+\" }",
                "4:22",
                &["no regular expression"],
            ),
            ("progress = { lines = \"step\" }", "4:22", &["0 groups"]),
            ("progress = { lines = \"(a)(b)\" }", "4:22", &["2 groups"]),
            ("colour = 1", "4:1", &["`colour`", "it has name"]),
            (
                "[[job]]\nname = \"a\"\ncommand = [\"y\"]",
                "5:8",
                &["taken"],
            ),
            (
                "[[combination]]\njobs = [\"a\"]",
                "4:1",
                &["2 to 8", "has 1"],
            ),
            (
                "[[combination]]\njobs = [\"a\", \"bb\"]",
                "5:14",
                &["`bb`", "the plan has a"],
            ),
            (
                "[[combination]]\njobs = [\"a\", \"a\"]",
                "4:1",
                &["already"],
            ),
            (
                "[[combination]]\njobs = [\"a\", \"a\"]\nshares = [0.5]",
                "6:10",
                &["2 jobs"],
            ),
            (
                "[[combination]]\njobs = [\"a\", \"a\"]\nshares = [1, 0.1]",
                "6:10",
                &["1.1"],
            ),
            (
                "[[combination]]\njobs = [\"a\", \"a\"]\nshares = [\"x\", 0.1]",
                "6:11",
                &["`x`"],
            ),
        ] {
            let text = format!("[[job]]\nname = \"a\"\ncommand = [\"x\"]\n{line}\n");
            let error = read(&text).unwrap_err();
            assert!(
                error.starts_with(&format!("p.toml:{at}")),
                "{line}: {error}"
            );
            assert!(!error.contains('\n'), "{error}");
            for word in words {
                assert!(error.contains(word), "{line}: {error}");
            }
        }
        let plain = format!("[experiment]\nmodes = [\"plain\"]\n{TWO}");
        let error = read(&plain).unwrap_err();
        assert!(
            error.contains("`a`") && error.contains("lines ="),
            "{error}"
        );
    }
}
