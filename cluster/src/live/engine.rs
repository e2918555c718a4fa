//! Who starts jobs on a node. The seam for Slurm, Kubernetes and the like; here is the one that starts processes of its own.
//!
//! An engine is told of a go of a job by its number and remembers it until it is forgotten, over its own restart too. It never starts one twice.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use super::runner::{self, SpecFile};
use super::wire::{Ended, RunId, RunReport, StartRun};

/// Ended goes whose output is kept.
const KEPT: usize = 200;
/// TIMEOUT: a process is there within milliseconds, on a host in trouble within seconds.
const BEGIN: Duration = Duration::from_secs(60);
/// Bytes of the end of stderr that are reported.
const TAIL_BYTES: u64 = 400;

/// Why an engine did not do as it was told; one line.
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
    /// Whose goes it will be told of: numbers of jobs mean something within one cluster only. Told before anything else.
    ///
    /// # Errors
    /// [`EngineError`].
    fn join(&mut self, cluster: &str) -> Result<(), EngineError>;
    /// Every go that it was told of and that is not forgotten.
    ///
    /// # Errors
    /// [`EngineError`]: what runs is not known, so nothing may be concluded from it.
    fn list(&mut self) -> Result<Vec<RunReport>, EngineError>;
    /// Starts a go with its environment and share. One that was started before stays as it is.
    ///
    /// # Errors
    /// [`EngineError`]: it does not run and will not.
    fn start(&mut self, run: RunId, start: &StartRun) -> Result<(), EngineError>;
    /// Asks a go to end, or makes it (`kill`). One that is over or unknown stays as it is.
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

/// Starts `sublet run` under a runner that outlives the arbiter and writes down how it ended.
///
/// All it knows lies in a directory for each go: `spec.json` (what to run), `started` (made by the runner, once, with its process), `exit.json`,
/// `stdout`, `stderr`, `settled`. So an arbiter that is killed is followed by one that knows its goes.
#[derive(Debug)]
pub struct LocalEngine {
    base: PathBuf,
    /// Of the cluster.
    dir: PathBuf,
    executable: PathBuf,
    runtime_dir: PathBuf,
    user: Option<String>,
}

impl LocalEngine {
    /// With its directories under `base`; `executable` is `sublet`, `runtime_dir` the arbiter's. `user`: as whom jobs run, where that
    /// is not the arbiter's own user.
    #[must_use]
    pub fn new(
        base: PathBuf,
        executable: PathBuf,
        runtime_dir: PathBuf,
        user: Option<String>,
    ) -> Self {
        let dir = base.join("none");
        Self {
            base,
            dir,
            executable,
            runtime_dir,
            user,
        }
    }

    fn path(&self, run: RunId) -> PathBuf {
        self.dir.join(run.to_string())
    }

    /// Goes by directory; with `settled` ones where asked.
    fn runs(&self, settled: bool) -> Result<Vec<(RunId, PathBuf)>, EngineError> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(|error| EngineError::io(&self.dir, &error))? {
            let entry = entry.map_err(|error| EngineError::io(&self.dir, &error))?;
            let name = entry.file_name();
            let Some((job, go)) = name.to_str().and_then(|name| name.split_once('.')) else {
                continue;
            };
            let (Ok(job), Ok(go)) = (job.parse(), go.parse()) else {
                continue;
            };
            if entry.path().join("settled").exists() == settled {
                all.push((RunId { job, go }, entry.path()));
            }
        }
        all.sort_unstable();
        Ok(all)
    }

    fn look(&self, run: RunId, dir: &Path) -> RunReport {
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
        if let Some(mut ended) = runner::read_exit(dir) {
            if !ended.well() && ended.words.is_empty() {
                ended.words = tail(&dir.join("stderr"));
            }
            return report(0, Some(ended));
        }
        match runner::read_started(dir) {
            None => {
                // The runner has not come to it yet; or never will, and then it is made sure that none does.
                if runner::age(dir).is_some_and(|age| age > BEGIN) {
                    let _ = runner::mark_stopped(dir);
                }
                report(0, None)
            }
            Some(process) if process.lives() => report(runner::read_child(dir).unwrap_or(0), None),
            Some(_) => {
                // It may have written its last word between the two looks.
                let lost = || Ended {
                    words: "its runner was killed".into(),
                    ..Ended::default()
                };
                report(0, Some(runner::read_exit(dir).unwrap_or_else(lost)))
            }
        }
    }
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
        let dir = self.base.join(cluster);
        let made = fs::DirBuilder::new()
            .mode(0o755)
            .recursive(true)
            .create(&dir);
        made.map_err(|error| EngineError::io(&dir, &error))?;
        self.dir = dir;
        Ok(())
    }

    fn list(&mut self) -> Result<Vec<RunReport>, EngineError> {
        Ok(self
            .runs(false)?
            .into_iter()
            .map(|(run, dir)| self.look(run, &dir))
            .collect())
    }

    fn start(&mut self, run: RunId, start: &StartRun) -> Result<(), EngineError> {
        let dir = self.path(run);
        let failed = |error: io::Error| EngineError::io(&dir, &error);
        match fs::DirBuilder::new().mode(0o755).create(&dir) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(error)),
        }
        if dir.join("started").exists() {
            return Ok(());
        }
        let spec = SpecFile {
            run,
            start: start.clone(),
            sublet: self.executable.clone(),
            runtime_dir: self.runtime_dir.clone(),
            user: self.user.clone(),
        };
        runner::write_spec(&dir, &spec).map_err(failed)?;
        // Two runners of one go (the arbiter was killed here and told again) settle it by who makes `started`.
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(dir.join("runner.log"))
            .map_err(failed)?;
        let mut command = Command::new(&self.executable);
        command
            .args(["cluster", "run-job"])
            .arg(&dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0);
        let mut runner = command
            .spawn()
            .map_err(|error| EngineError::io(&self.executable, &error))?;
        // It is waited for by a thread that has nothing else to do, so that no zombie stays; it lives on where we do not.
        let waiting = std::thread::Builder::new()
            .name("runner".into())
            .spawn(move || runner.wait());
        drop(waiting);
        Ok(())
    }

    fn stop(&mut self, run: RunId, kill: bool) -> Result<(), EngineError> {
        let dir = self.path(run);
        if !dir.exists() || runner::read_exit(&dir).is_some() {
            return Ok(());
        }
        let Some(process) = runner::read_started(&dir) else {
            // Not begun: whoever comes now finds that it has ended before.
            runner::mark_stopped(&dir).map_err(|error| EngineError::io(&dir, &error))?;
            return Ok(());
        };
        if !process.lives() {
            return Ok(());
        }
        let signal = if kill { Signal::KILL } else { Signal::TERM };
        // The job has a process group of its own, which the runner has written down.
        if let Some(pid) =
            runner::read_child(&dir).and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?))
        {
            let _ = rustix::process::kill_process_group(pid, signal);
        }
        Ok(())
    }

    fn forget(&mut self, run: RunId) -> Result<(), EngineError> {
        let dir = self.path(run);
        if dir.exists() {
            File::create(dir.join("settled")).map_err(|error| EngineError::io(&dir, &error))?;
        }
        let old = self.runs(true)?;
        for (_, dir) in old.iter().take(old.len().saturating_sub(KEPT)) {
            fs::remove_dir_all(dir).map_err(|error| EngineError::io(dir, &error))?;
        }
        Ok(())
    }
}

/// The last lines of a file.
fn tail(file: &Path) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(file)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    };
    read().unwrap_or_default()
}

/// Writes a file as a whole: there is the old one or the new one, never half of one.
pub(super) fn replace(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = file.with_extension("new");
    let mut out = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    out.write_all(bytes)?;
    out.sync_all()?;
    fs::rename(&new, file)
}
