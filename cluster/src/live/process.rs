//! Which process is meant: a number alone may be another one's by now.
//!
//! A process is known by its number, the moment it began and the boot of its host, and is signalled
//! through a pidfd that was checked against them. So no number that somebody wrote down, and no
//! later process of the same number, is ever hit.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use procfs::process::Stat;
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

/// A process, distinguished from later ones of its number.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Process {
    /// Its number; 0: none.
    pub pid: u32,
    start_ticks: u64,
    boot: String,
}

impl Process {
    /// This one.
    #[must_use]
    pub fn own() -> Self {
        Self::of(std::process::id()).unwrap_or_default()
    }

    /// The one that has this number now.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self {
            pid,
            start_ticks: stat(pid)?.starttime,
            boot: boot_id(),
        })
    }

    /// It is there, and no zombie.
    #[must_use]
    pub fn lives(&self) -> bool {
        stat(self.pid).is_some_and(|stat| stat.starttime == self.start_ticks)
            && self.boot == boot_id()
    }

    /// It is known to have ended. A process that cannot be looked at now (this one has no
    /// descriptor left) neither [lives](Self::lives) nor has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let boot = boot_id();
        if !boot.is_empty() && boot != self.boot {
            return true;
        }
        let Ok(pid) = i32::try_from(self.pid) else {
            return true;
        };
        match procfs::process::Process::new(pid).and_then(|process| process.stat()) {
            Ok(stat) => matches!(stat.state, 'Z' | 'X') || stat.starttime != self.start_ticks,
            Err(error) => matches!(error, procfs::ProcError::NotFound(_)),
        }
    }

    /// A descriptor of it; `None` once it has ended.
    #[must_use]
    pub fn open(&self) -> Option<OwnedFd> {
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Checked after the descriptor is open: the process that has the number now is the one that
        // the descriptor means.
        self.lives().then_some(fd)
    }

    /// Sends it a signal. `false`: it has ended, or may not be signalled.
    pub fn signal(&self, signal: Signal) -> bool {
        self.open()
            .is_some_and(|fd| rustix::process::pidfd_send_signal(fd, signal).is_ok())
    }
}

/// The host's boot: numbers and ticks mean nothing beyond it.
#[must_use]
pub fn boot_id() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_owned()
}

/// What `/proc/PID/stat` says of a process that has not ended.
fn stat(pid: u32) -> Option<Stat> {
    let process = procfs::process::Process::new(i32::try_from(pid).ok()?);
    living(&process.ok()?)
}

fn living(process: &procfs::process::Process) -> Option<Stat> {
    let stat = process.stat().ok()?;
    (!matches!(stat.state, 'Z' | 'X')).then_some(stat)
}

/// All processes that have not ended, with their parents.
fn all() -> Vec<(u32, u32)> {
    let processes = procfs::process::all_processes();
    let processes = processes.into_iter().flatten().flatten();
    processes
        .filter_map(|process| living(&process))
        .map(|stat| (stat.pid.unsigned_abs(), stat.ppid.unsigned_abs()))
        .collect()
}

/// Children of a process.
#[must_use]
pub fn children_of(parent: u32) -> Vec<Process> {
    let all = all().into_iter().filter(|(_, of)| *of == parent);
    all.filter_map(|(pid, _)| Process::of(pid)).collect()
}

/// Whether a process was started with an entry in its environment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Carries {
    Yes,
    /// Also: it may not be asked, or has ended.
    No,
    /// It shows no environment. It has none, or it executes a program at this moment: until the new
    /// one's arguments are in place (Linux, `create_elf_tables`) there is none to be seen, although
    /// the process that started it may go on already.
    NotYet,
}

/// TIMEOUT: how long a process that shows no environment may be executing a program. That takes
/// microseconds, and a busy host may take its core away meanwhile.
pub const EXECUTES: Duration = Duration::from_millis(100);

/// Whether a process was started with this `NAME=VALUE` in its environment.
#[must_use]
pub fn carries(pid: u32, entry: &[u8]) -> Carries {
    let environ = fs::read(format!("/proc/{pid}/environ"));
    // Kernel threads and the dead have no program.
    let has_program = || fs::read_link(format!("/proc/{pid}/exe")).is_ok();
    match environ {
        Ok(environ) if environ.is_empty() && has_program() => Carries::NotYet,
        Ok(environ) if environ.split(|byte| *byte == 0).any(|one| one == entry) => Carries::Yes,
        Ok(_) | Err(_) => Carries::No,
    }
}

/// Processes that carry an entry.
#[derive(Debug, Default)]
pub struct Carriers {
    pub found: Vec<Process>,
    /// Of some it is not known yet.
    pub executing: bool,
}

/// Processes of a user that were started with `NAME=VALUE` in their environment, and what descends
/// from them and runs as the same user.
#[must_use]
pub fn carriers(variable: &str, uid: u32) -> Carriers {
    let of_user = |pid: u32| {
        fs::metadata(format!("/proc/{pid}")).is_ok_and(|meta| meta.uid() == uid)
            && pid != std::process::id()
    };
    let all: Vec<(u32, u32)> = all().into_iter().filter(|(pid, _)| of_user(*pid)).collect();
    let (mut found, mut executing) = (Vec::new(), false);
    for (pid, _) in &all {
        match carries(*pid, variable.as_bytes()) {
            Carries::Yes => found.push(*pid),
            Carries::NotYet => executing = true,
            Carries::No => {}
        }
    }
    loop {
        let more: Vec<u32> = all
            .iter()
            .filter(|(pid, parent)| found.contains(parent) && !found.contains(pid))
            .map(|(pid, _)| *pid)
            .collect();
        if more.is_empty() {
            break;
        }
        found.extend(more);
    }
    Carriers {
        found: found.into_iter().filter_map(Process::of).collect(),
        executing,
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_process_is_distinguished_from_a_later_one_of_its_number() {
        let own = Process::own();
        assert!(own.lives());
        for other in [
            Process {
                start_ticks: own.start_ticks + 1,
                ..own.clone()
            },
            Process {
                boot: "another".into(),
                ..own.clone()
            },
        ] {
            assert!(!other.lives() && other.open().is_none() && !other.signal(Signal::KILL));
        }
        let mut child = Command::new("true").spawn().unwrap();
        let later = Process {
            pid: child.id(),
            ..own
        };
        child.wait().unwrap();
        assert!(!later.lives());
        assert!(!Process::default().lives(), "none");
    }

    #[test]
    fn a_process_whose_name_is_no_text_is_found_as_well() {
        let mut child = Command::new("sh");
        let script = "printf '\\377) Z' > /proc/$$/comm; read line";
        let mut child = child
            .args(["-c", script])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let comm = format!("/proc/{}/comm", child.id());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !fs::read(&comm).is_ok_and(|name| name.starts_with(b"\xff")) {
            assert!(std::time::Instant::now() < deadline, "it takes the name");
        }
        let found = Process::of(child.id()).expect("it lives");
        assert!(children_of(std::process::id()).contains(&found));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(!found.lives());
    }

    #[test]
    fn a_process_is_found_from_the_moment_on_at_which_it_was_started() {
        let entry = b"SUBLET_TEST_STARTED=1";
        let mut later = 0;
        for _ in 0..200 {
            let mut command = Command::new("sleep");
            let command = command.arg("60").env("SUBLET_TEST_STARTED", "1");
            let mut child = command.spawn().unwrap();
            let mut looks = vec![carries(child.id(), entry)];
            let deadline = Instant::now() + Duration::from_secs(60);
            while *looks.last().unwrap() == Carries::NotYet && Instant::now() < deadline {
                looks.push(carries(child.id(), entry));
            }
            child.kill().unwrap();
            let carried = looks.pop();
            assert_eq!(carried, Some(Carries::Yes), "never taken for another's");
            later += usize::from(!looks.is_empty());
            while Process::of(child.id()).is_some() {
                std::thread::yield_now();
            }
            let dead = carries(child.id(), entry);
            assert_eq!(dead, Carries::No, "it executes nothing any more");
            child.wait().unwrap();
        }
        println!("now: {later} of 200 do not show their environment at once");
    }

    #[test]
    fn of_a_process_without_an_environment_it_is_not_known() {
        let mut bare = Command::new("sleep");
        let mut bare = bare.arg("60").env_clear().spawn().unwrap();
        let entry = format!("SUBLET_TEST_NOBODY={}", bare.id());
        assert_eq!(carries(bare.id(), entry.as_bytes()), Carries::NotYet);
        let uid = rustix::process::geteuid().as_raw();
        let carriers = carriers(&entry, uid);
        assert!(
            carriers.executing && carriers.found.is_empty(),
            "{carriers:?}"
        );
        bare.kill().unwrap();
        bare.wait().unwrap();
    }

    #[test]
    fn what_carries_a_word_is_found_with_its_children_and_nobody_else() {
        let word = format!("SUBLET_TEST_WORD={}", std::process::id());
        let (name, value) = word.split_once('=').unwrap();
        let mut marked = Command::new("sh");
        // The child has an environment of its own.
        let mut marked = marked
            .args(["-c", "env -i sleep 60 & wait"])
            .env(name, value)
            .spawn()
            .unwrap();
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let mut found = Vec::new();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while found.len() < 2 && std::time::Instant::now() < deadline {
            found = carriers(&word, uid).found;
        }
        let pids: Vec<u32> = found.iter().map(|process| process.pid).collect();
        assert!(
            pids.contains(&marked.id()) && !pids.contains(&other.id()),
            "{pids:?}"
        );
        assert!(
            carriers(&word, uid + 1).found.is_empty(),
            "another user's are not looked at"
        );
        for process in &found {
            process.signal(Signal::KILL);
        }
        marked.wait().unwrap();
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
    }
}
