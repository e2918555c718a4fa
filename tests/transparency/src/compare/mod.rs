//! Runs the same calls bare and interposed, in processes of their own, and compares what was
//! answered.

pub mod run;
pub mod worker;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use shim_ffi::{COUNT, CUresult, SYMBOLS, Symbol};

use crate::probe::Round;
use crate::rng::mix;
use crate::sequence::Plan;
use crate::transcript::BLOCK_CALLS;
use run::{Mode, Place, Said};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Random calls in all, in each mode.
    pub calls: u64,
    /// Calls of one sequence.
    pub per_sequence: u64,
    /// Seed of the first sequence.
    pub seed: u64,
    /// Threads of a sequence.
    pub threads: usize,
    /// Workers at a time.
    pub jobs: usize,
    /// Handles that are not valid may be used.
    pub hostile: bool,
    /// The driver, by absolute path; its file name is `libcuda.so.1`.
    pub driver: PathBuf,
    /// The preload library.
    pub preload: PathBuf,
    /// The `sublet` program.
    pub sublet: PathBuf,
    /// Variables that only the candidates see, to check that a difference is found.
    pub candidate_env: Vec<(String, String)>,
    /// Also run as a job of `sublet run`.
    pub governed: bool,
}

/// What one worker does.
#[derive(Clone, Copy, Debug)]
pub enum Task {
    /// Ask `cuGetProcAddress` for every symbol.
    Resolve,
    /// Call every symbol with nothing, from this one on.
    Probe {
        /// What the arguments are.
        round: Round,
        /// Index of the first symbol.
        from: usize,
    },
    /// Every step of the generator in turn.
    Walk {
        /// Its choices.
        plan: Plan,
    },
    /// Steps at random.
    Random {
        /// Its choices.
        plan: Plan,
    },
}

impl Task {
    /// As words of a command line.
    pub fn to_words(self) -> Vec<String> {
        let plan_words = |kind: &str, plan: Plan| {
            vec![
                kind.to_owned(),
                plan.seed.to_string(),
                plan.calls.to_string(),
                plan.threads.to_string(),
                u8::from(plan.hostile).to_string(),
            ]
        };
        match self {
            Self::Resolve => vec!["resolve".to_owned()],
            Self::Probe { round, from } => vec![
                "probe".to_owned(),
                (round as usize).to_string(),
                from.to_string(),
            ],
            Self::Walk { plan } => plan_words("walk", plan),
            Self::Random { plan } => plan_words("random", plan),
        }
    }

    /// From words of a command line.
    pub fn from_words(words: &[String]) -> Option<Self> {
        let number = |at: usize| words.get(at)?.parse::<u64>().ok();
        let plan = || {
            Some(Plan {
                seed: number(1)?,
                calls: number(2)?,
                threads: number(3)? as usize,
                hostile: number(4)? != 0,
            })
        };
        Some(match words.first()?.as_str() {
            "resolve" => Self::Resolve,
            "probe" => Self::Probe {
                round: *Round::ALL.get(number(1)? as usize)?,
                from: number(2)? as usize,
            },
            "walk" => Self::Walk { plan: plan()? },
            "random" => Self::Random { plan: plan()? },
            _ => return None,
        })
    }
}

/// What was found.
#[derive(Debug, Default)]
pub struct Findings {
    /// Name of the device.
    pub device: String,
    /// Sequences run, in each mode.
    pub sequences: u64,
    /// Calls made in sequences, in each mode.
    pub calls: u64,
    /// Probes and questions, in each mode.
    pub probes: u64,
    /// How often each symbol was called in sequences.
    pub counts: BTreeMap<String, u64>,
    /// Calls that the driver itself did not survive, bare.
    pub fatal: Vec<String>,
    /// Each difference, described.
    pub differences: Vec<String>,
}

impl Findings {
    /// Categories of the symbols that sequences called.
    pub fn categories(&self) -> std::collections::BTreeSet<&'static str> {
        self.counts
            .keys()
            .filter_map(|name| Symbol::from_name(name.as_bytes()))
            .map(|symbol| symbol.entry().category)
            .collect()
    }
}

/// The seed of one sequence.
fn seed_of(options: &Options, sequence: u64) -> u64 {
    mix(options.seed ^ mix(sequence))
}

/// Runs everything.
///
/// # Errors
/// A place to work in cannot be made.
pub fn all(options: &Options, mut progress: impl FnMut(&str) + Send) -> std::io::Result<Findings> {
    let sequences = options.calls.div_ceil(options.per_sequence.max(1));
    let plan = |sequence: u64| Plan {
        seed: seed_of(options, sequence),
        calls: options.per_sequence.min(options.calls),
        threads: options.threads,
        hostile: options.hostile,
    };
    let mut tasks = vec![Task::Resolve];
    let rounds = Round::ALL
        .into_iter()
        .filter(|round| options.hostile || *round != Round::Handles);
    tasks.extend(rounds.map(|round| Task::Probe { round, from: 0 }));
    tasks.push(Task::Walk {
        plan: plan(u64::MAX),
    });
    tasks.extend((0..sequences).map(|sequence| Task::Random {
        plan: plan(sequence),
    }));
    let next = AtomicUsize::new(0);
    let found = Mutex::new((Findings::default(), &mut progress));
    std::thread::scope(|scope| -> std::io::Result<()> {
        let mut workers = Vec::new();
        for number in 0..options.jobs.max(1) {
            let place = Place::new(number)?;
            let (next, found, tasks) = (&next, &found, &tasks);
            workers.push(scope.spawn(move || {
                while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    one(options, &place, *task, found);
                }
                place.close(options);
            }));
        }
        Ok(())
    })?;
    let (findings, _) = found
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    Ok(findings)
}

type Shared<'a, F> = Mutex<(Findings, &'a mut F)>;

fn one<F: FnMut(&str)>(options: &Options, place: &Place, task: Task, found: &Shared<'_, F>) {
    let modes: &[Mode] = if options.governed {
        &[Mode::Bare, Mode::Interposed, Mode::Governed]
    } else {
        &[Mode::Bare, Mode::Interposed]
    };
    let said: Vec<Said> = modes
        .iter()
        .map(|mode| match task {
            Task::Probe { round, .. } => probe_to_the_end(options, place, *mode, round),
            _ => place.run(options, *mode, task, &(0..0)),
        })
        .collect();
    let mut guard = found
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let (findings, progress) = &mut *guard;
    note(findings, task, &said[0]);
    for (mode, other) in modes.iter().zip(&said).skip(1) {
        if let Some(difference) = compare(options, place, task, *mode, &said[0], other) {
            progress(&difference);
            findings.differences.push(difference);
        }
    }
    progress(&format!(
        "{} calls in {} sequences, {} differences",
        findings.calls,
        findings.sequences,
        findings.differences.len()
    ));
}

fn note(findings: &mut Findings, task: Task, bare: &Said) {
    for line in &bare.lines {
        let mut words = line.split(' ');
        match (words.next(), words.next(), words.next()) {
            (Some("calls"), Some(count), Some(name)) => {
                let count = count.parse::<u64>().unwrap_or(0);
                findings.calls += count;
                *findings.counts.entry(name.to_owned()).or_default() += count;
            }
            (Some("device"), ..) => findings.device = line["device ".len()..].to_owned(),
            (Some("probe" | "answer"), ..) => findings.probes += 1,
            (Some("fatal"), ..) => findings.fatal.push(line.clone()),
            _ => {}
        }
    }
    if matches!(task, Task::Random { .. } | Task::Walk { .. }) {
        findings.sequences += 1;
    }
}

/// Probes in as many processes as it takes: behind a call that was not survived, a new one goes on.
fn probe_to_the_end(options: &Options, place: &Place, mode: Mode, round: Round) -> Said {
    let mut all = Said::default();
    let mut from = 0;
    while from < COUNT {
        let said = place.run(options, mode, Task::Probe { round, from }, &(0..0));
        let last = said
            .lines
            .iter()
            .rev()
            .find_map(|line| line.strip_prefix("at ")?.parse::<usize>().ok());
        let probes = said
            .lines
            .into_iter()
            .filter(|line| !line.starts_with("at "));
        all.lines.extend(probes);
        match (said.died, last) {
            (None, _) => break,
            (Some(how), Some(last)) => {
                all.lines.push(format!(
                    "fatal {} {round:?}: {how}",
                    SYMBOLS[last].entry().name()
                ));
                from = last + 1;
            }
            (Some(how), None) => {
                all.died = Some(how);
                break;
            }
        }
    }
    all
}

fn describe_probe(line: &str) -> String {
    let mut words = line
        .split(' ')
        .skip(1)
        .filter_map(|word| word.parse::<usize>().ok());
    match (words.next().and_then(|at| SYMBOLS.get(at)), words.next()) {
        (Some(symbol), Some(status)) => {
            format!("{} -> {:?}", symbol.entry().name(), CUresult(status as u32))
        }
        _ => line.to_owned(),
    }
}

/// The first difference between two workers' words, described; `None` where they agree.
fn compare(
    options: &Options,
    place: &Place,
    task: Task,
    mode: Mode,
    bare: &Said,
    other: &Said,
) -> Option<String> {
    let what = format!("{} {}", mode.name(), task.to_words().join(" "));
    if bare.died != other.died {
        return Some(format!(
            "{what}: bare ended with {:?}, {} with {:?}",
            bare.died,
            mode.name(),
            other.died
        ));
    }
    let at = (0..bare.lines.len().max(other.lines.len()))
        .find(|at| bare.lines.get(*at) != other.lines.get(*at));
    let Some(at) = at else {
        return bare
            .died
            .as_ref()
            .map(|how| format!("{what}: both ended with {how}"));
    };
    let nothing = String::from("nothing");
    let (a, b) = (
        bare.lines.get(at).unwrap_or(&nothing),
        other.lines.get(at).unwrap_or(&nothing),
    );
    if !a.starts_with("block") && !b.starts_with("block") {
        return Some(format!(
            "{what}: bare {}, {} {}",
            describe_probe(a),
            mode.name(),
            describe_probe(b)
        ));
    }
    let block = bare.lines[..at]
        .iter()
        .filter(|line| line.starts_with("block"))
        .count() as u64;
    Some(format!(
        "{what}: {}",
        replay(options, place, task, mode, block)
    ))
}

/// Runs a sequence again, with the calls of the differing block (and the ones before it) written
/// out.
fn replay(options: &Options, place: &Place, task: Task, mode: Mode, block: u64) -> String {
    const BEFORE: usize = 12;
    const REPLAYS: u64 = 20;
    let first = block * BLOCK_CALLS;
    let shown = first.saturating_sub(BLOCK_CALLS)..first + BLOCK_CALLS + 1;
    let text = |mode: Mode| -> Vec<String> {
        let said = place.run(options, mode, task, &shown);
        said.lines
            .iter()
            .filter_map(|line| line.strip_prefix("shown ").map(str::to_owned))
            .collect()
    };
    let differs = |bare: &[String], other: &[String]| {
        (0..bare.len().max(other.len())).find(|at| bare.get(*at) != other.get(*at))
    };
    let bare = text(Mode::Bare);
    // What depends on time differs in one run of many; what else the machine was doing then it may
    // still do now.
    let runs = (1..=REPLAYS).map(|run| (run, text(mode), text(Mode::Bare)));
    let found = runs
        .map(|(run, other, again)| {
            let at = differs(&bare, &other);
            (run, other, differs(&bare, &again).is_some(), at)
        })
        .find(|(_, _, unstable, at)| at.is_some() || *unstable);
    let Some((run, other, unstable, at)) = found else {
        return format!(
            "block {block} differed, but not when it was run {REPLAYS} times again: not the same in every run"
        );
    };
    let unstable = match (unstable, run) {
        (true, _) => " (the bare driver differs from itself here)".to_owned(),
        (false, 1) => String::new(),
        (false, run) => format!(" (not in every run: in the {run}. one when it was run again)"),
    };
    let Some(at) = at else {
        return format!("in block {block}{unstable}");
    };
    let none = String::from("(nothing)");
    let mut report = format!("in block {block}{unstable}\n");
    for line in &bare[at.saturating_sub(BEFORE)..at] {
        report.push_str(&format!("      {line}\n"));
    }
    report.push_str(&format!("  bare       {}\n", bare.get(at).unwrap_or(&none)));
    report.push_str(&format!(
        "  {:10} {}",
        mode.name(),
        other.get(at).unwrap_or(&none)
    ));
    report
}
