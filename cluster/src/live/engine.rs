//! What starts jobs on a node: the interface for Slurm, Kubernetes and the like, and the engine
//! that starts processes of its own.
//!
//! An engine knows an attempt of a job by its number and remembers it until it is forgotten, over
//! its own restart too. It never starts an attempt twice.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::Signal;

use super::process::EXECUTES;
use super::runner::{self, Ask, Orphans, SpecFile};
use super::wire::{Ended, RunId, RunReport, StartRun};

/// Ended attempts whose output is kept.
const KEPT: usize = 200;
/// TIMEOUT: a process is there within milliseconds, on a host in trouble within seconds.
const BEGIN: Duration = Duration::from_secs(60);
/// TIMEOUT: a runner that is asked to kill its job needs milliseconds; one that takes longer than
/// this is killed itself.
const HEAR: Duration = Duration::from_secs(15);

/// Why an engine did not carry out an order; one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct EngineError(pub String);

impl EngineError {
    fn io(what: &Path, error: &io::Error) -> Self {
        Self(format!("{}: {error}", what.display()))
    }
}

/// Starts jobs on a node, and knows what became of them.
pub trait Engine: Send {
    /// Its name.
    fn name(&self) -> &'static str;
    /// The cluster of its attempts: numbers of jobs are unique within one cluster only. Called
    /// before anything else.
    ///
    /// # Errors
    /// [`EngineError`].
    fn join(&mut self, cluster: &str) -> Result<(), EngineError>;
    /// Every attempt that it knows and that is not forgotten.
    ///
    /// # Errors
    /// [`EngineError`]: it is not known what runs, so the caller must not conclude anything.
    fn list(&mut self) -> Result<Vec<RunReport>, EngineError>;
    /// Starts an attempt with its environment and share. An attempt that was started before stays
    /// as it is. Where it is not known whether it will run, it counts as started, and the list says
    /// what becomes of it.
    ///
    /// # Errors
    /// [`EngineError`]: it does not run and will not.
    fn start(&mut self, run: RunId, start: &StartRun) -> Result<(), EngineError>;
    /// Asks an attempt to end, or kills it (`kill`). An attempt that is over or unknown stays as it
    /// is.
    ///
    /// # Errors
    /// [`EngineError`].
    fn stop(&mut self, run: RunId, kill: bool) -> Result<(), EngineError>;
    /// The hook knows how it ended: it need not be listed any more.
    ///
    /// # Errors
    /// [`EngineError`].
    fn forget(&mut self, run: RunId) -> Result<(), EngineError>;
}

/// Starts `sublet run` under a runner that outlives the arbiter and records how it ended.
///
/// Its state lies in one directory for each attempt, which only the arbiter's user can enter:
/// `spec.json` (what to run), `started` (made by the runner, once, with its process), `traces.json`
/// and `job.json` (how its processes are found), `exit.json`, `settled`. So the successor of a
/// killed arbiter knows its attempts, and nothing that a job writes is trusted. The space of
/// `exit.json` is taken before the start (`exit.new`), so that a full disk forgets no outcome.
/// Output and working directories lie below another directory.
#[derive(Debug)]
pub struct LocalEngine {
    config: LocalConfig,
    /// Records of the cluster's attempts.
    dir: PathBuf,
    /// Output and working directories of the cluster's attempts.
    places: PathBuf,
    cluster: String,
    /// Since when an attempt was seen without a runner.
    waiting: BTreeMap<RunId, Instant>,
    /// Since when an attempt is to be dead.
    killed: BTreeMap<RunId, Instant>,
    /// Since when nothing was found of an attempt without a runner, but for processes of which it
    /// is not known yet.
    quiet: BTreeMap<RunId, Instant>,
    /// Old directories are being removed.
    sweeping: Arc<AtomicBool>,
}

/// How a local engine is to work.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LocalConfig {
    /// Where records are kept; for nobody but this user.
    pub records: PathBuf,
    /// Where jobs write.
    pub places: PathBuf,
    /// `sublet`.
    pub executable: PathBuf,
    /// The arbiter's.
    pub runtime_dir: PathBuf,
    /// As whom jobs run, where that is not the arbiter's own user.
    pub user: Option<String>,
    /// Variables of the node that jobs get besides the usual ones.
    pub pass: Vec<String>,
}

/// Makes or checks a directory of our own with this mode, independent of the umask.
///
/// # Errors
/// It cannot be made, or is a link or belongs to another user.
pub fn own_directory(path: &Path, mode: u32) -> io::Result<()> {
    match fs::DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    let dir = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let owner = dir.metadata()?.uid();
    if owner != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other(format!(
            "it belongs to user {owner}: move it away"
        )));
    }
    Ok(rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode))?)
}

impl LocalEngine {
    /// One that knows no cluster yet.
    #[must_use]
    pub fn new(config: LocalConfig) -> Self {
        Self {
            dir: config.records.join("none"),
            places: config.places.join("none"),
            config,
            cluster: String::new(),
            waiting: BTreeMap::new(),
            killed: BTreeMap::new(),
            quiet: BTreeMap::new(),
            sweeping: Arc::default(),
        }
    }

    fn path(&self, run: RunId) -> PathBuf {
        self.dir.join(run.to_string())
    }

    /// Attempts by directory; those that are settled where asked.
    fn runs(&self, settled: bool) -> Result<Vec<(RunId, PathBuf)>, EngineError> {
        let mut all = Vec::new();
        let own = rustix::process::geteuid().as_raw();
        for entry in fs::read_dir(&self.dir).map_err(|error| EngineError::io(&self.dir, &error))? {
            let entry = entry.map_err(|error| EngineError::io(&self.dir, &error))?;
            let Some(run) = entry.file_name().to_str().and_then(run_of) else {
                continue;
            };
            // A directory of somebody else's tells nothing.
            let ours = fs::symlink_metadata(entry.path())
                .is_ok_and(|meta| meta.is_dir() && meta.uid() == own);
            if ours && entry.path().join("settled").exists() == settled {
                all.push((run, entry.path()));
            }
        }
        all.sort_unstable();
        Ok(all)
    }

    fn look(&mut self, run: RunId, dir: &Path) -> RunReport {
        let name = runner::read_spec(dir)
            .map(|spec| spec.start.name)
            .unwrap_or_default();
        let report = |pid, ended| RunReport {
            run,
            name: name.clone(),
            pid,
            ended,
            saved: false,
        };
        let job = || runner::read_job(dir).map_or(0, |job| job.process.pid);
        let (exit, claim) = match (runner::read_exit(dir), runner::read_started(dir)) {
            (Ok(exit), Ok(claim)) => (exit, claim),
            // Whether it is over is not known now, so it counts as running.
            _ => return report(job(), None),
        };
        if let Some(ended) = exit {
            self.waiting.remove(&run);
            self.killed.remove(&run);
            return report(0, Some(ended));
        }
        let Some(claim) = claim else {
            // The runner has not started it yet; or never will, and then it is marked so that no
            // other runner does.
            let since = self.waiting.entry(run).or_insert_with(Instant::now);
            if since.elapsed() > BEGIN {
                let _ = runner::mark_stopped(dir);
            }
            return report(0, None);
        };
        if claim.stopped {
            let ended = Ended::never("stopped before it began".into());
            // The claim says it as well, until there is space.
            let _ = runner::write_exit(dir, &ended);
            return report(0, Some(ended));
        }
        if claim.runner.lives() {
            // A runner that was stopped, or waits for a disk, does not react; its work is done
            // below. But one whose job is over knows the outcome, and nobody else does.
            if self.killed.get(&run).is_some_and(|at| at.elapsed() > HEAR) && !runner::is_over(dir)
            {
                claim.runner.signal(Signal::KILL);
            }
            return report(job(), None);
        }
        if !claim.runner.has_ended() {
            return report(job(), None);
        }
        // It may have written its last word between the two looks.
        match runner::read_exit(dir) {
            Ok(None) => {}
            Ok(ended) => return report(0, ended),
            Err(_) => return report(job(), None),
        }
        // Over only when none of its processes is left: otherwise the next attempt would run beside
        // this one.
        let over = match runner::end_orphans(dir) {
            Orphans::Some => {
                self.quiet.remove(&run);
                false
            }
            Orphans::Perhaps => {
                let since = self.quiet.entry(run).or_insert_with(Instant::now);
                since.elapsed() > EXECUTES
            }
            Orphans::None => true,
        };
        if !over {
            return report(job(), None);
        }
        self.quiet.remove(&run);
        let ended = runner::read_noted(dir).unwrap_or_else(|| Ended {
            never_started: runner::never_started(dir),
            words: "its runner was killed".into(),
            ..Ended::default()
        });
        let _ = runner::write_exit(dir, &ended);
        report(0, Some(ended))
    }

    /// The runner of an attempt, unless there is one.
    fn launch(&self, run: RunId, start: &StartRun, dir: &Path) -> Result<(), EngineError> {
        let failed = |error: io::Error| EngineError::io(dir, &error);
        own_directory(dir, 0o700).map_err(failed)?;
        if dir.join("started").exists() {
            return Ok(());
        }
        let spec = SpecFile {
            run,
            cluster: self.cluster.clone(),
            start: start.clone(),
            sublet: self.config.executable.clone(),
            runtime_dir: self.config.runtime_dir.clone(),
            place: self.places.join(run.to_string()),
            pass: self.config.pass.clone(),
            user: self.config.user.clone(),
        };
        // Before its runner: where there is none the attempt is refused, and starts elsewhere.
        runner::reserve_exit(dir).map_err(failed)?;
        runner::write_spec(dir, &spec).map_err(failed)?;
        // If there are two runners of one attempt (the arbiter was killed here and got the order
        // again), whichever makes `started` runs it.
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(dir.join("runner.log"))
            .map_err(failed)?;
        let mut command = Command::new(&self.config.executable);
        command
            .args(["cluster", "run-job"])
            .arg(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0);
        let mut runner = command
            .spawn()
            .map_err(|error| EngineError::io(&self.config.executable, &error))?;
        // A thread of its own waits for it, so that no zombie stays; the runner outlives this
        // process.
        let waiting = std::thread::Builder::new()
            .name("runner".into())
            .spawn(move || runner.wait());
        drop(waiting);
        Ok(())
    }

    /// Removes what was settled long ago, on a thread of its own: a job's directory may hold
    /// millions of files.
    fn sweep(&self, old: Vec<(RunId, PathBuf)>) {
        let (dir, places) = (self.dir.clone(), self.places.clone());
        let sweeping = Arc::clone(&self.sweeping);
        // SYNC(sweeping): a flag and nothing else; the thread reads directories and no data of
        // ours.
        if sweeping.swap(true, Ordering::Relaxed) {
            return;
        }
        let swept = Arc::clone(&sweeping);
        let thread = std::thread::Builder::new()
            .name("sweep".into())
            .spawn(move || {
                for (run, record) in old {
                    let _ = fs::remove_dir_all(places.join(run.to_string()));
                    let _ = fs::remove_dir_all(record);
                }
                // What was left by an earlier boot, whose records are gone.
                let entries = fs::read_dir(&places).into_iter().flatten().flatten();
                for entry in entries {
                    let run = entry.file_name().to_str().and_then(run_of);
                    if run.is_some_and(|run| !dir.join(run.to_string()).exists()) {
                        let _ = fs::remove_dir_all(entry.path());
                    }
                }
                swept.store(false, Ordering::Relaxed);
            });
        if thread.is_err() {
            sweeping.store(false, Ordering::Relaxed);
        }
    }
}

/// The attempt whose directory has this name.
fn run_of(name: &str) -> Option<RunId> {
    let (job, attempt) = name.split_once('.')?;
    Some(RunId {
        job: job.parse().ok()?,
        attempt: attempt.parse().ok()?,
    })
}

impl Engine for LocalEngine {
    fn name(&self) -> &'static str {
        "local"
    }

    fn join(&mut self, cluster: &str) -> Result<(), EngineError> {
        let word = !cluster.is_empty() && cluster.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !word {
            return Err(EngineError(format!("`{cluster}` is no word for a cluster")));
        }
        if self.cluster == cluster {
            return Ok(());
        }
        for (base, mode) in [(&self.config.records, 0o700), (&self.config.places, 0o711)] {
            for dir in [base, &base.join(cluster)] {
                own_directory(dir, mode).map_err(|error| EngineError::io(dir, &error))?;
            }
        }
        self.dir = self.config.records.join(cluster);
        self.places = self.config.places.join(cluster);
        cluster.clone_into(&mut self.cluster);
        Ok(())
    }

    fn list(&mut self) -> Result<Vec<RunReport>, EngineError> {
        let runs = self.runs(false)?;
        Ok(runs
            .into_iter()
            .map(|(run, dir)| self.look(run, &dir))
            .collect())
    }

    fn start(&mut self, run: RunId, start: &StartRun) -> Result<(), EngineError> {
        let dir = self.path(run);
        let fresh =
            fs::symlink_metadata(&dir).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        let Err(error) = self.launch(run, start, &dir) else {
            return Ok(());
        };
        if fresh {
            // No runner has ever been here, and what was made takes space.
            let _ = fs::remove_dir_all(&dir);
            return Err(error);
        }
        // The order is repeated, and the runner of the first time may be on its way: an attempt
        // counts as never started once no runner can claim it any more.
        match runner::mark_stopped(&dir) {
            Ok(true) => Err(error),
            Ok(false) | Err(_) => Ok(()),
        }
    }

    fn stop(&mut self, run: RunId, kill: bool) -> Result<(), EngineError> {
        let dir = self.path(run);
        let failed = |error: io::Error| EngineError::io(&dir, &error);
        if !dir.exists() || runner::read_exit(&dir).map_err(failed)?.is_some() {
            return Ok(());
        }
        let Some(claim) = runner::read_started(&dir).map_err(failed)? else {
            // Not begun: a runner that comes now finds that it has ended before. A runner that was
            // faster is stopped the next time.
            runner::mark_stopped(&dir).map_err(failed)?;
            return Ok(());
        };
        if kill {
            self.killed.entry(run).or_insert_with(Instant::now);
        }
        if claim.runner.lives() {
            // The runner knows its processes; if it does not react, the next look at the attempt
            // handles it.
            let ask = if kill { Ask::Kill } else { Ask::End };
            runner::ask(&dir, ask).map_err(failed)?;
        }
        Ok(())
    }

    fn forget(&mut self, run: RunId) -> Result<(), EngineError> {
        let dir = self.path(run);
        if dir.exists() {
            replace(&dir.join("settled"), b"").map_err(|error| EngineError::io(&dir, &error))?;
        }
        self.waiting.remove(&run);
        self.killed.remove(&run);
        self.quiet.remove(&run);
        let mut old = self.runs(true)?;
        old.truncate(old.len().saturating_sub(KEPT));
        if !old.is_empty() {
            self.sweep(old);
        }
        Ok(())
    }
}

/// Writes a file as a whole: there is the old one or the new one, never half of one.
pub(super) fn replace(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = file.parent().unwrap_or(Path::new("."));
    // Always the same name: one that a killed process has left is written over.
    let new = file.with_extension("new");
    let mut out = tempfile::Builder::new()
        .prefix(new.file_name().unwrap_or_default())
        .rand_bytes(0)
        .make_in(directory, |new| {
            OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                // CAST: flags of open(2) are an int.
                .custom_flags(OFlags::NOFOLLOW.bits() as i32)
                .open(new)
        })?;
    out.write_all(bytes)?;
    out.as_file().sync_all()?;
    out.persist(file)?;
    File::open(directory)?.sync_all()
}
