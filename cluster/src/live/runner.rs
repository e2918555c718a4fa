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

mod output;

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
#[must_use]
pub fn read_exit(dir: &Path) -> Option<Ended> {
    read(&dir.join("exit.json"))
}

/// The runner, where there is or was one.
#[must_use]
pub fn read_started(dir: &Path) -> Option<Process> {
    let bytes = fs::read(dir.join("started")).ok()?;
    // Made and not written yet, or killed in between: a process that is none, and has ended.
    Some(serde_json::from_slice(&bytes).unwrap_or_default())
}

/// The job's process.
#[must_use]
pub fn read_job(dir: &Path) -> Option<JobProcess> {
    read(&dir.join("job.json"))
}

/// An attempt that is to end before its runner came to it.
///
/// # Errors
/// The file cannot be written.
pub fn mark_stopped(dir: &Path) -> io::Result<()> {
    match claim(dir) {
        Ok(()) => {
            let ended = Ended {
                never_started: true,
                words: "stopped before it began".into(),
                ..Ended::default()
            };
            write_exit(dir, &ended)
        }
        // A runner was faster; it is stopped the next time.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Be the one who runs it.
fn claim(dir: &Path) -> io::Result<()> {
    // Written first and linked into place: a process that sees `started` sees all of it.
    let own = dir.join(format!("started.{}", std::process::id()));
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&own)?;
    file.write_all(&serde_json::to_vec(&Process::own())?)?;
    let linked = fs::hard_link(&own, dir.join("started"));
    let _ = fs::remove_file(&own);
    linked
}

/// Says how it ended.
///
/// # Errors
/// The file cannot be written.
pub fn write_exit(dir: &Path, ended: &Ended) -> io::Result<()> {
    replace(&dir.join("exit.json"), &serde_json::to_vec(ended)?)
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

/// Ends what is left of an attempt without its runner's help; `true` once nothing is. Asked again
/// until then.
#[must_use]
pub fn end_orphans(dir: &Path) -> bool {
    let Some(traces) = read::<Traces>(&dir.join("traces.json")) else {
        return true;
    };
    let mut empty = true;
    if let Some(group) = &traces.group
        && !group.is_empty()
    {
        group.kill();
        empty = group.is_empty();
    }
    let job = read_job(dir);
    if let Some(job) = &job {
        empty &= !job.process.signal(Signal::KILL);
    }
    if !job.is_some_and(|job| job.confined) {
        for process in carriers(&traces.variable, traces.uid) {
            empty &= !process.signal(Signal::KILL);
        }
    }
    if empty && let Some(group) = &traces.group {
        group.remove();
    }
    empty
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
    match claim(dir) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        Err(error) => return Err(error),
    }
    // What its job leaves behind becomes ours and not init's.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let ended = match begin(dir, &spec, user) {
        Ok(attempt) => attempt.wait(),
        Err(error) => Ended {
            never_started: true,
            words: error.to_string(),
            ..Ended::default()
        },
    };
    write_exit(dir, &ended)
}

/// A running attempt, as its runner has it.
struct Attempt {
    job: Pid,
    /// Set once the job has been waited for: from then on its number may be another one's.
    status: Option<WaitStatus>,
    pidfd: Option<OwnedFd>,
    group: Option<Group>,
    /// The job was seen in it.
    confined: bool,
    asked: File,
    stdout: Output,
    stderr: Output,
}

fn begin(
    dir: &Path,
    spec: &SpecFile,
    user: impl Fn(Option<&str>) -> io::Result<User>,
) -> io::Result<Attempt> {
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
    let group = Group::make(&format!("sublet.{}.{}", spec.cluster, spec.run));
    let traces = Traces {
        group: group.clone(),
        variable: format!("{WORD}={word}"),
        uid: user.uid,
    };
    replace(&dir.join("traces.json"), &serde_json::to_vec(&traces)?)?;
    let mut command = command(spec, &user, &word);
    command.stdin(Stdio::null()).stdout(out).stderr(err);
    let entrance = group.as_ref().and_then(|group| group.entrance().ok());
    let in_place = CString::new(work.as_os_str().as_bytes())?;
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
        if let Some(group) = &group {
            group.remove();
        }
        io::Error::other(format!(
            "cannot start {} in {} as {}: {error}",
            spec.sublet.display(),
            work.display(),
            user.name
        ))
    })?;
    let pid = child.id();
    let job = JobProcess {
        process: Process::of(pid).unwrap_or_default(),
        confined: group.as_ref().is_some_and(|group| group.holds(pid)),
    };
    let attempt = Attempt::new(&child, group, job.confined, asked, stdout, stderr)?;
    replace(&dir.join("job.json"), &serde_json::to_vec(&job)?)?;
    Ok(attempt)
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
        confined: bool,
        asked: File,
        stdout: Output,
        stderr: Output,
    ) -> io::Result<Self> {
        let job = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let job = job.ok_or_else(|| io::Error::other("the job's process has no number"))?;
        let flags = rustix::process::PidfdFlags::empty();
        Ok(Self {
            job,
            status: None,
            // Kernels before 5.3 have none: then it is looked at often.
            pidfd: rustix::process::pidfd_open(job, flags).ok(),
            group,
            confined,
            asked,
            stdout,
            stderr,
        })
    }

    /// Until it is over and nothing of it is left.
    fn wait(mut self) -> Ended {
        while self.status.is_none() {
            self.rest();
            self.hear();
            self.stdout.pump();
            self.stderr.pump();
            self.reap();
        }
        let left = self.end_the_rest();
        self.stdout.pump();
        self.stderr.pump();
        self.ended(left)
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
            let signal = if *byte == b'k' {
                Signal::KILL
            } else {
                Signal::TERM
            };
            // Not waited for yet, so the number is the job's.
            let _ = rustix::process::kill_process_group(self.job, signal);
            if *byte == b'k'
                && let Some(group) = &self.group
            {
                group.kill();
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
            if !self.confined {
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
        if !ended.well() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_claimed_once() {
        let dir = tempfile::tempdir().unwrap();
        claim(dir.path()).unwrap();
        assert_eq!(
            claim(dir.path()).unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        assert!(read_started(dir.path()).unwrap().lives());
        mark_stopped(dir.path()).unwrap();
        assert!(read_exit(dir.path()).is_none(), "somebody runs it");
        fs::write(dir.path().join("started"), "").unwrap();
        assert!(
            !read_started(dir.path()).unwrap().lives(),
            "made and never written"
        );
    }

    #[test]
    fn a_runner_that_is_not_there_is_not_asked() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!ask(dir.path(), Ask::Kill).unwrap(), "not yet");
        let mut asked = listen(dir.path()).unwrap();
        assert!(ask(dir.path(), Ask::End).unwrap() && ask(dir.path(), Ask::Kill).unwrap());
        let mut bytes = [0; 8];
        assert_eq!(asked.read(&mut bytes).unwrap(), 2);
        assert_eq!(&bytes[..2], b"ek");
        drop(asked);
        assert!(!ask(dir.path(), Ask::Kill).unwrap(), "not any more");
    }

    #[test]
    fn a_job_gets_no_variable_of_the_arbiter_that_is_not_meant_for_it() {
        let spec = SpecFile {
            sublet: "/bin/sublet".into(),
            start: StartRun {
                env: [("OWN".to_owned(), "1".to_owned())].into(),
                ..StartRun::default()
            },
            pass: vec!["CARGO_MANIFEST_DIR".into()],
            ..SpecFile::default()
        };
        let user = User {
            uid: 7,
            gid: 7,
            name: "somebody".into(),
            home: "/home/somebody".into(),
            shell: "/bin/sh".into(),
            become_it: Box::new(|| Ok(())),
        };
        let command = command(&spec, &user, "w");
        let vars: std::collections::BTreeMap<String, String> = command
            .get_envs()
            .map(|(name, value)| {
                let text = |text: &std::ffi::OsStr| text.to_string_lossy().into_owned();
                (text(name), value.map(text).unwrap_or_default())
            })
            .collect();
        assert!(std::env::var_os("CARGO_PKG_NAME").is_some(), "one of ours");
        for name in vars.keys() {
            let known = NODE_VARIABLES.contains(&name.as_str())
                || name.starts_with("LC_")
                || name.starts_with("SUBLET_")
                || ["HOME", "USER", "LOGNAME", "SHELL", "CUDA_VISIBLE_DEVICES"]
                    .contains(&name.as_str())
                || ["OWN", "CARGO_MANIFEST_DIR"].contains(&name.as_str());
            assert!(known, "{name}");
        }
        assert_eq!(vars["HOME"], "/home/somebody");
        assert_eq!(
            (vars["OWN"].as_str(), vars["USER"].as_str()),
            ("1", "somebody")
        );
        assert!(vars.contains_key("CARGO_MANIFEST_DIR"), "it was passed on");
        assert!(!vars.contains_key("CARGO_PKG_NAME"));
    }
}
