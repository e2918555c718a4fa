//! The runner, the parent process of an attempt: it starts the job, keeps its output, ends the
//! processes that it leaves behind, and records how it ended. It is no part of the arbiter, so the
//! arbiter may be killed and restarted while jobs run.
//!
//! Its records lie in a directory that only the arbiter's user can enter; the job never sees it.
//! Its output and its working directory lie elsewhere ([`SpecFile::place`]), below directories that
//! are not the job's to change.
//!
//! It makes `started` with O_EXCL before it runs anything: the process that made it is the one
//! runner of the attempt. An attempt is over when none of its processes runs: the runner ends what
//! the job has left behind by its [control group](super::confine), or as its subreaper. Should the
//! runner itself be killed, the kernel ends the job (PR_SET_PDEATHSIG), and the agent or its
//! successor ends the rest ([`end_orphans`]) before it says that the attempt is over.
//!
//! The start of the job cannot be taken back, so no error after it counts as a start that failed:
//! the attempt is ended and its end was not seen. Its outcome is known to the runner alone, which
//! stays until the disk has it. The space for both is [taken before](reserved).

mod output;
mod reserved;
#[cfg(test)]
mod tests;

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use serde::{Deserialize, Serialize};

use super::confine::Group;
use super::engine::replace;
use super::process::{Process, carriers, children_of};
use super::store::random_word;
use super::wire::{Ended, RunId, StartRun};
use output::Output;

/// TIMEOUT: what was killed is gone within milliseconds; a minute is a process that the kernel does
/// not let go of.
const END: Duration = Duration::from_secs(60);
/// First and longest pause between tries to write an outcome down.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// See [`FIRST_PAUSE`].
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// What an attempt's processes are known by where there is no control group.
const WORD: &str = "SUBLET_CLUSTER_MARK";
/// Variables of the node that its jobs get; those that begin with `LC_` as well.
const NODE_VARIABLES: [&str; 5] = ["PATH", "LANG", "TZ", "SUBLET_LIBRARY", "SUBLET_SIM_DIR"];
/// `PATH` where the node has none.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// The input of a runner, in its directory.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SpecFile {
    /// Which attempt.
    pub run: RunId,
    /// Of which cluster.
    pub cluster: String,
    /// What to run.
    pub start: StartRun,
    /// The `sublet` to run it with.
    pub sublet: PathBuf,
    /// The arbiter's directory.
    pub runtime_dir: PathBuf,
    /// Where its output goes, with its working directory `dir` where it has none of its own.
    pub place: PathBuf,
    /// Variables of the node that it gets besides the usual ones.
    pub pass: Vec<String>,
    /// As whom; `None`: as ourselves.
    pub user: Option<String>,
}

/// As whom a job runs.
pub struct User {
    /// Number.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Login name.
    pub name: String,
    /// Home directory.
    pub home: PathBuf,
    /// Login shell.
    pub shell: PathBuf,
    /// Makes the calling process this user's, with signals as they are by default and no
    /// descriptor but the first three after exec. Called between fork and exec: system calls and
    /// nothing else.
    pub become_it: Box<dyn Fn() -> io::Result<()> + Send + Sync>,
}

impl std::fmt::Debug for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "User({}, {}:{})", self.name, self.uid, self.gid)
    }
}

/// What is needed to find an attempt's processes without its runner. Written before there are any.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Traces {
    group: Option<Group>,
    /// `NAME=VALUE` in their environment.
    variable: String,
    uid: u32,
}

/// The job's process, written down by its runner.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct JobProcess {
    /// Which one.
    pub process: Process,
    /// Its control group holds all that it starts.
    pub confined: bool,
}

/// Who has claimed an attempt.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Claim {
    /// Its runner.
    #[serde(flatten)]
    pub runner: Process,
    /// It was claimed so that no runner ever runs it.
    pub stopped: bool,
}

/// What a runner is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// The job is to end: SIGTERM to its process group.
    End,
    /// All of it is killed.
    Kill,
}

fn read<T: serde::de::DeserializeOwned>(file: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

/// What to run.
#[must_use]
pub fn read_spec(dir: &Path) -> Option<SpecFile> {
    read(&dir.join("spec.json"))
}

/// For the runner.
///
/// # Errors
/// The file cannot be written.
pub fn write_spec(dir: &Path, spec: &SpecFile) -> io::Result<()> {
    replace(&dir.join("spec.json"), &serde_json::to_vec(spec)?)
}

/// How it ended, where it has.
///
/// # Errors
/// It is there and cannot be read now.
pub fn read_exit(dir: &Path) -> io::Result<Option<Ended>> {
    match fs::read(dir.join("exit.json")) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// How it ended, as a runner that was killed had noted it.
#[must_use]
pub fn read_noted(dir: &Path) -> Option<Ended> {
    read(&reserved::space_of(&dir.join("exit.json")))
}

/// Who has claimed it.
///
/// # Errors
/// It cannot be read now.
pub fn read_started(dir: &Path) -> io::Result<Option<Claim>> {
    match fs::read(dir.join("started")) {
        // Not to be read: it stands for a process that has ended.
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).unwrap_or_default())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Nothing of it was started: what is needed to find its processes was never written down.
#[must_use]
pub fn never_started(dir: &Path) -> bool {
    let traces = fs::symlink_metadata(dir.join("traces.json"));
    traces.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Its job has ended, and its runner writes that down: it is not asked anything any more.
#[must_use]
pub fn is_over(dir: &Path) -> bool {
    let asked = fs::symlink_metadata(dir.join("asked"));
    !never_started(dir) && asked.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// The job's process.
#[must_use]
pub fn read_job(dir: &Path) -> Option<JobProcess> {
    read(&dir.join("job.json"))
}

/// Keeps every runner from an attempt that none has claimed. `false`: one was faster.
///
/// # Errors
/// It cannot be claimed, so a runner may still come to it.
pub fn mark_stopped(dir: &Path) -> io::Result<bool> {
    let nobody = Claim {
        stopped: true,
        ..Claim::default()
    };
    match claim(dir, &nobody) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Be the one who runs it, or keeps others from that.
fn claim(dir: &Path, claim: &Claim) -> io::Result<()> {
    // Written first and linked into place: a process that sees `started` sees all of it.
    let own = dir.join(format!("started.{}", std::process::id()));
    let linked = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&own)
        .and_then(|mut file| file.write_all(&serde_json::to_vec(claim)?))
        .and_then(|()| fs::hard_link(&own, dir.join("started")));
    let _ = fs::remove_file(&own);
    linked
}

/// Takes the space in which the outcome is written down.
///
/// # Errors
/// There is none.
pub fn reserve_exit(dir: &Path) -> io::Result<()> {
    reserved::reserve(&dir.join("exit.json"))
}

/// Writes down how it ended.
///
/// # Errors
/// It is not known to be on the disk.
pub fn write_exit(dir: &Path, ended: &Ended) -> io::Result<()> {
    reserved::write(&dir.join("exit.json"), &outcome(ended)?)
}

/// An outcome that has space in what was taken for it: of words without an end there is the
/// beginning.
fn outcome(ended: &Ended) -> io::Result<Vec<u8>> {
    let mut ended = ended.clone();
    loop {
        let bytes = serde_json::to_vec(&ended)?;
        if bytes.len() <= reserved::SPACE || ended.words.is_empty() {
            return Ok(bytes);
        }
        let half = ended.words.chars().count() / 2;
        ended.words = ended.words.chars().take(half).collect();
    }
}

/// Stays until the outcome is on the disk: no other process knows it.
///
/// # Errors
/// The directory is gone, and with it everybody who would read it.
fn keep_exit(dir: &Path, ended: &Ended) -> io::Result<()> {
    let mut pause = FIRST_PAUSE;
    while let Err(error) = write_exit(dir, ended) {
        if fs::metadata(dir).is_err_and(|gone| gone.kind() == io::ErrorKind::NotFound) {
            return Err(error);
        }
        if pause == FIRST_PAUSE {
            let words = "how the job ended cannot be written down and is tried again";
            let _ = writeln!(io::stderr(), "{}: {words}: {error}", dir.display());
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    Ok(())
}

/// Asks the runner of a directory. `false`: it does not listen, not yet or not any more.
///
/// # Errors
/// It cannot be asked.
pub fn ask(dir: &Path, what: Ask) -> io::Result<bool> {
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open(dir.join("asked"), flags, Mode::empty()) {
        Ok(fd) => {
            let byte = match what {
                Ask::End => b"e",
                Ask::Kill => b"k",
            };
            // A full pipe has been asked often enough.
            let _ = File::from(fd).write(byte);
            Ok(true)
        }
        Err(rustix::io::Errno::NXIO | rustix::io::Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// What is left of an attempt whose runner has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Orphans {
    /// There are some, or it is not known.
    Some,
    /// Of some processes it is not known yet whether they are the attempt's: nothing is left if
    /// that is so for [`EXECUTES`](super::process::EXECUTES).
    Perhaps,
    None,
}

/// Ends what is left of an attempt without its runner's help. Asked again until nothing is.
#[must_use]
pub fn end_orphans(dir: &Path) -> Orphans {
    let traces: Traces = match fs::read(dir.join("traces.json")) {
        Ok(bytes) => match serde_json::from_slice(&bytes) {
            Ok(traces) => traces,
            Err(_) => return Orphans::None,
        },
        // Written before there are any.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Orphans::None,
        Err(_) => return Orphans::Some,
    };
    let (mut empty, mut executing) = (true, false);
    if let Some(group) = &traces.group
        && !group.is_empty()
    {
        group.kill();
        empty = group.is_empty();
    }
    let job = read_job(dir);
    if let Some(job) = &job {
        job.process.signal(Signal::KILL);
        empty &= job.process.has_ended();
    }
    if !job.is_some_and(|job| job.confined) {
        let carriers = carriers(&traces.variable, traces.uid);
        executing = carriers.executing;
        for process in carriers.found {
            empty &= !process.signal(Signal::KILL);
        }
    }
    let left = match (empty, executing) {
        (false, _) => Orphans::Some,
        (true, true) => Orphans::Perhaps,
        (true, false) => Orphans::None,
    };
    if empty && let Some(group) = &traces.group {
        group.remove();
    }
    left
}

/// Runs the attempt of a directory to its end. `user` looks a user up by name; `None` is this
/// process's own.
///
/// # Errors
/// The directory is not one, or cannot be written.
pub fn run(dir: &Path, user: impl Fn(Option<&str>) -> io::Result<User>) -> io::Result<()> {
    let Some(spec) = read_spec(dir) else {
        return Err(io::Error::other(format!(
            "{}: there is no spec.json to be read",
            dir.display()
        )));
    };
    let own = Claim {
        // Unknown, this process would count as ended.
        runner: Process::of(std::process::id())
            .ok_or_else(|| io::Error::other("/proc does not know this process"))?,
        stopped: false,
    };
    match claim(dir, &own) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        Err(error) => return Err(error),
    }
    let ended = match begin(dir, &spec, user) {
        Ok(attempt) => attempt.wait(dir),
        Err(error) => Ended::never(error.to_string()),
    };
    // Nothing is left that could be asked: see `is_over`.
    let _ = fs::remove_file(dir.join("asked"));
    keep_exit(dir, &ended)
}

/// A running attempt, as its runner has it.
struct Attempt {
    job: Pid,
    /// Set once the job has been waited for: from then on its number may be another one's.
    status: Option<WaitStatus>,
    pidfd: Option<OwnedFd>,
    group: Option<Group>,
    /// As it is written down.
    record: JobProcess,
    /// Why it was not, so that the job is ended.
    unrecorded: Option<io::Error>,
    asked: File,
    stdout: Output,
    stderr: Output,
}

/// Starts the job. An error: nothing of it runs or has run.
fn begin(
    dir: &Path,
    spec: &SpecFile,
    user: impl Fn(Option<&str>) -> io::Result<User>,
) -> io::Result<Attempt> {
    // What its job leaves behind becomes ours and not init's.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    reserve_exit(dir)?;
    reserved::reserve(&dir.join("job.json"))?;
    let user = user(spec.user.as_deref())?;
    let owner = (user.uid, user.gid);
    let work = make_place(&spec.place, owner)?;
    let work = if spec.start.dir.is_empty() {
        work
    } else {
        PathBuf::from(&spec.start.dir)
    };
    let (stdout, out) = Output::new(&spec.place, "stdout", owner)?;
    let (stderr, err) = Output::new(&spec.place, "stderr", owner)?;
    let asked = listen(dir)?;
    let word =
        random_word().map_err(io::Error::other)? + &random_word().map_err(io::Error::other)?;
    let in_place = CString::new(work.as_os_str().as_bytes())?;
    let group = Group::make(&format!("sublet.{}.{}", spec.cluster, spec.run));
    let traces = Traces {
        group: group.clone(),
        variable: format!("{WORD}={word}"),
        uid: user.uid,
    };
    let unused = |error: io::Error| {
        if let Some(group) = &group {
            group.remove();
        }
        error
    };
    let written = serde_json::to_vec(&traces).map_err(io::Error::from);
    written
        .and_then(|bytes| replace(&dir.join("traces.json"), &bytes))
        .map_err(unused)?;
    let mut command = command(spec, &user, &word);
    command.stdin(Stdio::null()).stdout(out).stderr(err);
    let entrance = group.as_ref().and_then(|group| group.entrance().ok());
    let parent = rustix::process::getpid();
    let become_it = user.become_it;
    // SAFETY: between fork and exec this makes system calls that are async-signal-safe, and
    // allocates nothing.
    unsafe {
        command.pre_exec(move || {
            // Not inside: it is found by its word, and the runner sees that it is not.
            if let Some(entrance) = &entrance {
                let _ = rustix::io::write(entrance, b"0");
            }
            become_it()?;
            // As that user: a directory that it may not enter is none for it.
            rustix::process::chdir(in_place.as_c_str())?;
            rustix::process::umask(Mode::from_raw_mode(0o022));
            // Last: a change of user takes it away.
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // Killed between the fork and here, the parent would never have been heard to die.
            if rustix::process::getppid() == Some(parent) {
                Ok(())
            } else {
                Err(rustix::io::Errno::PIPE.into())
            }
        });
    }
    let child = command.spawn().map_err(|error| {
        unused(io::Error::other(format!(
            "cannot start {} in {} as {}: {error}",
            spec.sublet.display(),
            work.display(),
            user.name
        )))
    })?;
    // It runs: from here on there is nothing that returns an error.
    Ok(Attempt::new(&child, group, asked, stdout, stderr))
}

/// The directory of an attempt, ours, and in it the job's own.
fn make_place(place: &Path, (uid, gid): (u32, u32)) -> io::Result<PathBuf> {
    // Attempts are numbered once; what lies there is of an earlier life of the cluster.
    match fs::remove_dir_all(place) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let make = |path: &Path, mode: u32| {
        fs::DirBuilder::new().mode(0o700).create(path)?;
        // The umask has no say in it.
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
    };
    make(place, 0o711)?;
    let work = place.join("dir");
    make(&work, 0o700)?;
    std::os::unix::fs::lchown(&work, Some(uid), Some(gid))?;
    Ok(work)
}

/// Where it is asked.
fn listen(dir: &Path) -> io::Result<File> {
    let path = dir.join("asked");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::from_raw_mode(0o600))?;
    // For writing as well: it never reads an end.
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(&path, flags, Mode::empty())?))
}

/// `sublet run` with the terms of the start, and nothing of this process's environment but what is
/// meant for jobs.
fn command(spec: &SpecFile, user: &User, word: &str) -> Command {
    let start = &spec.start;
    let mut command = Command::new(&spec.sublet);
    command.args(["run", "--name", &start.name]);
    if let Some(share) = start.terms.share {
        command.args(["--share", &share.to_string()]);
    }
    if let Some(class) = start.terms.class {
        command.args(["--class", class.as_str()]);
    }
    if let Some(bytes) = start.terms.mem_bytes {
        command.args(["--mem", &format!("{bytes}B")]);
    }
    if start.evictable {
        command.arg("--evictable");
    }
    for device in &start.devices {
        command.args(["--device", device]);
    }
    if start.simulated {
        command.arg("--sim");
    }
    command.arg("--").args(&start.command);
    let passes = |name: &str| {
        NODE_VARIABLES.contains(&name)
            || name.starts_with("LC_")
            || (start.simulated && name.starts_with("SUBLET_SIM_"))
            || spec.pass.iter().any(|pass| pass == name)
    };
    let ours = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(passes));
    command
        .env_clear()
        .env("PATH", DEFAULT_PATH)
        .envs(ours)
        .env("HOME", &user.home)
        .env("USER", &user.name)
        .env("LOGNAME", &user.name)
        .env("SHELL", &user.shell)
        .envs(&start.env)
        .env("SUBLET_RUNTIME_DIR", &spec.runtime_dir)
        .env(WORD, word)
        .env("SUBLET_CLUSTER_JOB", spec.run.job.to_string())
        .env("SUBLET_CLUSTER_ATTEMPT", spec.run.attempt.to_string())
        .env("SUBLET_CLUSTER_GPUS", start.devices.len().to_string())
        // The driver then shows the program these devices alone, and counts them from 0: what is
        // asked of a job's devices by index is asked of its own, as under other schedulers.
        .env("CUDA_VISIBLE_DEVICES", start.devices.join(","))
        .process_group(0);
    command
}

impl Attempt {
    fn new(
        child: &Child,
        group: Option<Group>,
        asked: File,
        stdout: Output,
        stderr: Output,
    ) -> Self {
        let pid = child.id();
        let record = JobProcess {
            process: Process::of(pid).unwrap_or_default(),
            confined: group.as_ref().is_some_and(|group| group.holds(pid)),
        };
        let job = Pid::from_child(child);
        let flags = rustix::process::PidfdFlags::empty();
        Self {
            job,
            status: None,
            // Kernels before 5.3 have none: then it is looked at often.
            pidfd: rustix::process::pidfd_open(job, flags).ok(),
            group,
            record,
            unrecorded: None,
            asked,
            stdout,
            stderr,
        }
    }

    /// Until it is over and nothing of it is left.
    fn wait(mut self, dir: &Path) -> Ended {
        if let Err(error) = self.write_down(dir) {
            self.unrecorded = Some(error);
            self.kill();
        }
        while self.status.is_none() {
            self.rest();
            self.hear();
            self.stdout.pump();
            self.stderr.pump();
            self.reap();
        }
        // The rest takes up to a minute, in which this process may be killed.
        let known = outcome(&self.ended(true));
        let _ = known.and_then(|bytes| reserved::note(&dir.join("exit.json"), &bytes));
        let left = self.end_the_rest();
        self.stdout.pump();
        self.stderr.pump();
        self.ended(left)
    }

    /// So that its process is found without this one.
    fn write_down(&self, dir: &Path) -> io::Result<()> {
        reserved::write(&dir.join("job.json"), &serde_json::to_vec(&self.record)?)
    }

    /// All of it, as far as it can be found at once.
    fn kill(&self) {
        // Not waited for yet, so the number is the job's.
        let _ = rustix::process::kill_process_group(self.job, Signal::KILL);
        if let Some(group) = &self.group {
            group.kill();
        }
    }

    /// Sleeps until there is something to do, a second at most.
    fn rest(&self) {
        let patience = if self.pidfd.is_some() { 1000 } else { 50 };
        let patience = Timespec {
            tv_sec: patience / 1000,
            tv_nsec: (patience % 1000) * 1_000_000,
        };
        let mut all = vec![PollFd::new(&self.asked, PollFlags::IN)];
        all.extend(self.pidfd.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
        for output in [&self.stdout, &self.stderr] {
            all.extend(
                output
                    .source()
                    .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
            );
        }
        let _ = poll(&mut all, Some(&patience));
    }

    /// What it is asked.
    fn hear(&mut self) {
        let mut bytes = [0; 64];
        let count = self.asked.read(&mut bytes).unwrap_or(0);
        // PANIC: a read returns at most the buffer's length.
        for byte in &bytes[..count] {
            if *byte == b'k' {
                self.kill();
            } else {
                // Not waited for yet, so the number is the job's.
                let _ = rustix::process::kill_process_group(self.job, Signal::TERM);
            }
        }
    }

    /// Takes the ends of the job and of what it has left behind.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            if pid == self.job {
                self.status = Some(status);
            }
        }
    }

    /// Ends what the job has left behind. `false`: not all of it has ended within a minute.
    fn end_the_rest(&mut self) -> bool {
        let deadline = Instant::now() + END;
        loop {
            let mut over = true;
            if let Some(group) = &self.group
                && !group.is_empty()
            {
                group.kill();
                over = group.is_empty();
            }
            if !self.record.confined {
                // Those below them are our children once these have ended.
                for child in children_of(std::process::id()) {
                    child.signal(Signal::KILL);
                    over = false;
                }
            }
            self.stdout.pump();
            self.stderr.pump();
            self.reap();
            if over {
                if let Some(group) = &self.group {
                    group.remove();
                }
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn ended(&self, all_over: bool) -> Ended {
        let mut ended = Ended {
            code: self.status.and_then(WaitStatus::exit_status),
            signal: self.status.and_then(WaitStatus::terminating_signal),
            ..Ended::default()
        };
        if let Some(error) = &self.unrecorded
            && ended.code.is_none()
        {
            // The signal was ours and says nothing of it.
            ended.signal = None;
            ended.words =
                format!("it was ended, for its process could not be written down: {error}");
        } else if !ended.well() {
            ended.words = self.stderr.last_words();
        }
        for output in [&self.stdout, &self.stderr] {
            if let Some(loss) = output.loss() {
                ended.words = format!("{loss}; {}", ended.words);
            }
        }
        if !all_over {
            let words = format!(
                "processes that it started still run after SIGKILL and {} s",
                END.as_secs()
            );
            ended.words = format!("{words}; {}", ended.words);
        }
        ended
    }
}

/// A descriptor that does not block.
fn without_blocking(fd: impl AsFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    Ok(rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?)
}
