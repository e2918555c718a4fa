//! From the text of a plan to what it says.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use control::kinds::{Count, Share, Size};
use control::setting::Kind as _;
use policy::names::nearest;
use toml::de::{DeTable, DeValue};

use super::table::{JobName, Table, Text};
use super::work::{Kinds, Work, progress, work};
use super::{Combination, Job, Mode, Plan};
use crate::config::{ConfigError, Source, scalar};

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
const JOB: [&str; 11] = [
    "name",
    "command",
    "recording",
    "kind",
    "env",
    "cwd",
    "mem",
    "share",
    "warm_up",
    "measured",
    "progress",
];
const COMBINATION: [&str; 2] = ["jobs", "shares"];

/// Most jobs of a plan: with all pairs these are 2144 runs.
const JOBS_MOST: usize = 64;
/// Most jobs of one run.
const TOGETHER_MOST: usize = 8;
/// A shorter window says nothing: a slice alone may take 50 ms.
const MEASURED_LEAST: Duration = Duration::from_millis(500);
const MOST: Duration = Duration::from_secs(86_400);

/// Reads and checks a plan. Relative directories and recordings of jobs are below `base`; `kinds`
/// is asked about those that have neither command nor recording.
///
/// # Errors
/// The first thing that is wrong, with its place.
pub fn parse(text: &str, file: &str, base: &Path, kinds: &Kinds<'_>) -> Result<Plan, ConfigError> {
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
        let known = work(&mut table, base, kinds)?;
        let mem = table.kind::<Size>("mem")?;
        let share = table.kind::<Share>("share")?;
        let (progress, progress_at) = progress(&mut table, &known.work)?;
        places.push(JobPlaces {
            share: share.as_ref().map(|(_, at)| at.clone()),
            progress: progress_at,
        });
        jobs.push(Job {
            name,
            work: known.work,
            kind: known.kind,
            env: known.env,
            cwd: known.cwd,
            mem: mem.map(|(mem, _)| mem).or(known.mem),
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
        && let Some(at) = jobs.iter().position(Job::needs_arbiter)
    {
        let remedy = match &jobs[at].work {
            Work::Command(_) => "write progress = { lines = \"step ([0-9]+)\" }",
            Work::Recording(one) if one.processes > 1 => "its processes are counted by none",
            Work::Recording(_) => "write progress = \"launches\"",
        };
        let message = format!(
            "job `{}` is read by {}, and in mode {mode} no arbiter counts them: {remedy}, or take \
             {mode} out of modes",
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
        let Some(mode) = Mode::named(&word) else {
            let remedy = match nearest(&word, words()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("write some of {}", words().collect::<Vec<_>>().join(", ")),
            };
            let message = format!("modes: `{word}` is not known: {remedy}");
            return Err(table.source.wrong(at, message));
        };
        if modes.contains(&mode) {
            let message = format!("modes: `{word}` is named twice: take one away");
            return Err(table.source.wrong(at, message));
        }
        modes.push(mode);
    }
    if modes.is_empty() {
        modes.push(Mode::Exclusive);
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

/// One of `[[combination]]`.
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
