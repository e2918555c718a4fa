//! Runs the command as a job with the diagnosis switched on, and watches its processes until the
//! last has ended.
//!
//! Processes are looked at a few hundred times a second: one that lives for less than that may not
//! be seen, but one that uses a GPU lives far longer. On the simulated GPU the driver counts as
//! well, and nothing is missed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};
use shim_ffi::counts::{RECEIVED_VARIABLE, SEEN_VARIABLE};

use super::pages::{self, Counted};
use super::process::{self, Seen};
use crate::args::Doctor;
use crate::exit::Result;
use crate::run::driver::Driver;
use crate::run::install::Install;

/// Between two looks at the processes.
const LOOK: Duration = Duration::from_millis(1);

/// What came of it.
#[derive(Debug)]
pub struct Watched {
    words: Vec<String>,
    status: ExitStatus,
    /// First process of the command.
    first: u32,
    seen: Vec<Seen>,
    counted: BTreeMap<u32, Counted>,
}

/// # Errors
/// Where nothing could be started.
pub fn run(
    args: &Doctor,
    executable: &Path,
    install: &Install,
    driver: &Driver,
) -> Result<Watched> {
    let directory = Pages::create()?;
    // Daemons of the command come to us when their parents end.
    nix::sys::prctl::set_child_subreaper(true).context("cannot adopt the command's processes")?;
    let mut command = Command::new(executable);
    command.args(["run", "--name", "doctor"]);
    if args.deep {
        command.arg("--deep");
    }
    if driver.simulated.is_some() {
        command.arg("--sim");
    } else {
        command.arg("--driver").arg(&driver.path);
    }
    command
        .arg("--")
        .args(&args.command)
        .env(SEEN_VARIABLE, &directory.0)
        .env(RECEIVED_VARIABLE, &directory.0)
        .stdin(Stdio::inherit());
    if args.json {
        // What the command prints is not to be mixed up with the report.
        command.stdout(Stdio::null());
    }
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {}", executable.display()))?;
    let mut tree = Tree::new(child.id(), executable, install.library());
    let status = loop {
        tree.look();
        if let Some(status) = child.try_wait().context("cannot wait for the command")? {
            break status;
        }
        std::thread::sleep(LOOK);
    };
    // What it has left behind in the background goes on by itself; what is there now has been
    // looked at.
    tree.look();
    Ok(Watched {
        words: args
            .command
            .iter()
            .map(|word| word.to_string_lossy().into_owned())
            .collect(),
        status,
        first: child.id(),
        seen: tree.images.into_values().collect(),
        counted: pages::read(&directory.0),
    })
}

/// A directory for the pages of calls, which processes of other users can write to as well; gone
/// when dropped.
struct Pages(PathBuf);

impl Pages {
    fn create() -> Result<Self> {
        let base = std::env::temp_dir();
        let mut tries = 0;
        loop {
            let path = base.join(format!("sublet-doctor-{}-{tries}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => {
                    fs::set_permissions(&path, fs::Permissions::from_mode(0o1733))
                        .with_context(|| format!("cannot open {} to others", path.display()))?;
                    return Ok(Self(path));
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && tries < 100 => {
                    tries += 1;
                }
                Err(error) => {
                    let context = format!("cannot create {}", path.display());
                    return Err(anyhow::Error::new(error).context(context).into());
                }
            }
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The processes below one, and the programs that each has executed.
struct Tree<'a> {
    /// The command's first process.
    root: u32,
    /// Processes that still execute this are on their way to the command.
    executable: &'a Path,
    library: &'a Path,
    images: BTreeMap<(u32, u64, PathBuf), Seen>,
}

impl<'a> Tree<'a> {
    fn new(root: u32, executable: &'a Path, library: &'a Path) -> Self {
        Self {
            root,
            executable,
            library,
            images: BTreeMap::new(),
        }
    }

    fn look(&mut self) {
        // Those that we have adopted are ours as well.
        let mut below = BTreeSet::from([self.root]);
        let mut next = vec![std::process::id(), self.root];
        while let Some(pid) = next.pop() {
            for child in children(pid) {
                if below.insert(child) {
                    next.push(child);
                }
            }
        }
        for pid in below {
            let Some(seen) = process::look(pid, self.library) else {
                continue;
            };
            // An arbiter that was started for the job is no part of it.
            if fs::canonicalize(self.executable).is_ok_and(|own| own == seen.program) {
                continue;
            }
            let known = self
                .images
                .entry((pid, seen.image, seen.program.clone()))
                .or_insert_with(|| seen.clone());
            merge(known, seen);
        }
    }
}

/// What was true once stays in the record; why the library is absent is as of the last look.
fn merge(known: &mut Seen, seen: Seen) {
    known.drivers = known.drivers.max(seen.drivers);
    known.ours = known.ours.max(seen.ours);
    known.device_open |= seen.device_open;
    for file in seen.driver_files {
        if !known.driver_files.contains(&file) {
            known.driver_files.push(file);
        }
    }
    known.absent = if known.ours > 0 { None } else { seen.absent };
    known.audited |= seen.audited;
    known.command = seen.command;
}

/// The children of a process, of all its threads.
fn children(pid: u32) -> Vec<u32> {
    let process = i32::try_from(pid).map(procfs::process::Process::new);
    let threads = process.ok().and_then(|process| process.ok()?.tasks().ok());
    let threads = threads.into_iter().flatten().flatten();
    threads
        .filter_map(|thread| thread.children().ok())
        .flatten()
        .collect()
}

impl Watched {
    /// As JSON: the command, how it ended, calls, ways in, escapes.
    pub fn report(&self) -> Value {
        let mut all = Counted::default();
        self.counted.values().for_each(|counted| all.add(counted));
        let (escapes, out_of_reach) = self.outside();
        let sum = |calls: &BTreeMap<String, u64>| calls.values().sum::<u64>();
        json!({
            "words": self.words,
            "exit_code": self.status.code(),
            "signal": self.status.signal(),
            "processes": self.seen.iter().map(|seen| seen.pid).collect::<BTreeSet<_>>().len(),
            "calls_seen": sum(&all.seen),
            "calls_received": (!all.received.is_empty()).then(|| sum(&all.received)),
            "functions_seen": all.seen.len(),
            "most_called": most_called(&all.seen),
            "ways_in": all.ways(),
            "passes": all.passes(),
            "complete": escapes.is_empty(),
            "escapes": escapes,
            "out_of_reach": out_of_reach,
        })
    }

    /// Processes that use the driver past the library (or are the command itself, without it), and
    /// others that the library is not in.
    fn outside(&self) -> (Vec<Value>, Vec<Value>) {
        let (mut escapes, mut out_of_reach) = (Vec::new(), Vec::new());
        let mut reported = BTreeSet::new();
        // Counts are by process. Where it has executed a program with the library and one without,
        // the latter made them.
        let without: BTreeSet<u32> = self
            .seen
            .iter()
            .filter(|seen| seen.absent.is_some())
            .map(|seen| seen.pid)
            .collect();
        for seen in &self.seen {
            let counted = self.counted.get(&seen.pid);
            let (past, symbol) = match counted {
                Some(counted) if seen.absent.is_some() || !without.contains(&seen.pid) => {
                    counted.escaped()
                }
                _ => (0, None),
            };
            let uses = seen.drivers > 0 || seen.device_open || past > 0;
            let who = format!("process {} ({})", seen.pid, seen.command);
            if let Some(absent) = seen.absent {
                let text = format!("{who} {}", absent.reason());
                let text = match (uses, past) {
                    (true, 0) => format!("{text}, and it has the driver loaded"),
                    (true, _) => format!("{text}; {past} driver calls went past"),
                    (false, _) => format!("{text}; it was not seen to use a GPU"),
                };
                let value = json!({
                    "pid": seen.pid, "command": seen.command, "kind": absent.as_str(), "calls": past, "text": text,
                });
                if uses || seen.pid == self.first {
                    reported.insert(seen.pid);
                    escapes.push(value);
                } else {
                    out_of_reach.push(value);
                }
                continue;
            }
            if seen.nvmls > 1 {
                let text = format!(
                    "{who} has the management library (NVML) loaded {} times: one of them is ours to answer for, another (dlmopen, a second copy of the file) tells the whole device's memory and processes; quotas hold all the same",
                    seen.nvmls
                );
                out_of_reach.push(json!({
                    "pid": seen.pid, "command": seen.command, "kind": "nvml_copy", "calls": 0, "text": text,
                }));
            }
            // A link namespace that the auditor is in counts as one of ours, and has no driver.
            let namespaces = seen.ours.saturating_sub(usize::from(seen.audited));
            let (kind, text) = if past > 0 && seen.drivers > namespaces {
                (
                    "namespace",
                    format!(
                        "{who} has opened the driver in a link namespace of its own (dlmopen), where the library is not; {past} driver calls went past (`sublet run --deep` reaches there)"
                    ),
                )
            } else if past > 0 {
                (
                    "past_the_library",
                    format!(
                        "{who} made {past} driver calls past the library, {} among them (an RTLD_DEEPBIND library that opens the driver by path? `sublet run --deep` reaches there)",
                        symbol.unwrap_or("unnamed")
                    ),
                )
            } else if seen.drivers > namespaces && seen.driver_files.len() < 2 {
                (
                    "namespace",
                    format!(
                        "{who} has the driver loaded {} times and the library {namespaces} times: a link namespace of its own (dlmopen), where the library is not",
                        seen.drivers
                    ),
                )
            } else if seen.drivers > 0 && counted.is_none() {
                (
                    "past_the_library",
                    format!(
                        "{who} has the driver loaded, and no call of it went through the library (an RTLD_DEEPBIND library that opens the driver by path?)"
                    ),
                )
            } else if counted.is_some_and(|counted| counted.unknown_functions() > 0) {
                let unknown = counted.map_or(0, Counted::unknown_functions);
                (
                    "unknown_function",
                    format!(
                        "{who} was given {unknown} driver functions that this version of sublet does not know (is the driver newer? update sublet)"
                    ),
                )
            } else {
                continue;
            };
            reported.insert(seen.pid);
            escapes.push(json!({
                "pid": seen.pid, "command": seen.command, "kind": kind, "calls": past, "text": text,
            }));
        }
        // Too short-lived to be looked at, but the simulated driver has heard of them.
        for (pid, counted) in &self.counted {
            let (past, symbol) = counted.escaped();
            if past > 0 && reported.insert(*pid) {
                let text = format!(
                    "process {pid}, which has ended since, made {past} driver calls past the library, {} among them",
                    symbol.unwrap_or("unnamed")
                );
                escapes.push(json!({
                    "pid": pid, "command": null, "kind": "unseen", "calls": past, "text": text,
                }));
            }
        }
        (escapes, out_of_reach)
    }
}

fn most_called(calls: &BTreeMap<String, u64>) -> Value {
    /// SHOWN: what a person takes in at a glance.
    const SHOWN: usize = 8;
    let mut calls: Vec<_> = calls.iter().collect();
    calls.sort_by_key(|(name, count)| (std::cmp::Reverse(**count), (*name).clone()));
    calls
        .iter()
        .take(SHOWN)
        .map(|(name, count)| json!({ "function": name, "calls": count }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::process::Absent;
    use super::*;

    fn watched(seen: Vec<Seen>) -> Watched {
        Watched {
            words: vec!["x".into()],
            status: ExitStatus::from_raw(0),
            first: 1,
            seen,
            counted: BTreeMap::new(),
        }
    }

    fn seen(pid: u32, ours: usize, drivers: usize, absent: Option<Absent>) -> Seen {
        Seen {
            pid,
            ours,
            drivers,
            absent,
            driver_files: vec!["/usr/lib/libcuda.so.1".into()],
            ..Seen::default()
        }
    }

    fn kinds(seen: Vec<Seen>) -> (Vec<String>, usize) {
        let (escapes, others) = watched(seen).outside();
        let kinds = escapes
            .iter()
            .map(|one| one["kind"].as_str().unwrap().to_owned());
        (kinds.collect(), others.len())
    }

    #[test]
    fn who_is_outside_and_who_escapes() {
        let absent = Some(Absent::Cleared);
        assert_eq!(kinds(vec![seen(2, 1, 0, None)]), (vec![], 0));
        assert_eq!(
            kinds(vec![seen(2, 0, 0, absent)]),
            (vec![], 1),
            "uses no GPU"
        );
        assert_eq!(
            kinds(vec![seen(2, 0, 1, absent)]),
            (vec!["preload_cleared".into()], 0)
        );
        assert_eq!(
            kinds(vec![seen(1, 0, 0, Some(Absent::Static))]),
            (vec!["static".into()], 0),
            "the command itself"
        );
        assert_eq!(
            kinds(vec![seen(2, 1, 2, None)]),
            (vec!["namespace".into()], 0)
        );
        assert_eq!(
            kinds(vec![seen(2, 1, 1, None)]),
            (vec!["past_the_library".into()], 0)
        );
        let (mut once, mut twice) = (seen(2, 1, 0, None), seen(2, 1, 0, None));
        (once.nvmls, twice.nvmls) = (1, 2);
        assert_eq!(kinds(vec![once]), (vec![], 0));
        assert_eq!(kinds(vec![twice]), (vec![], 1), "reported, and no escape");
        let mut audited = seen(2, 3, 2, None);
        audited.audited = true;
        let mut watched = watched(vec![audited]);
        watched.counted.insert(2, Counted::default());
        assert_eq!(watched.outside().0, Vec::<Value>::new());
    }

    #[test]
    fn of_two_programs_in_one_process_the_one_without_us_made_the_calls() {
        let mut watched = watched(vec![
            seen(2, 1, 0, None),
            seen(2, 0, 1, Some(Absent::Cleared)),
        ]);
        let mut counted = Counted::default();
        counted.received.insert("cuInit".into(), 3);
        watched.counted.insert(2, counted);
        let (escapes, _) = watched.outside();
        assert_eq!(escapes.len(), 1, "{escapes:?}");
        assert_eq!(escapes[0]["kind"], "preload_cleared");
        assert_eq!(escapes[0]["calls"], 3);
    }

    #[test]
    fn children_are_found() {
        let mut child = Command::new("sleep").arg("30").spawn().unwrap();
        assert!(children(std::process::id()).contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!children(std::process::id()).contains(&child.id()));
    }
}
