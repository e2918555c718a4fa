//! A place of its own for the demonstration: a runtime directory, a simulated device, and whatever
//! was started there.
//!
//! The jobs end with this process, even if that is killed; the arbiter ends by itself when it has
//! no jobs, and is asked to before that.

use std::env;
use std::fs::{self, DirBuilder, File};
use std::io::Read as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use control::paths::RuntimeDir;
use control::{ArbiterStatus, Client, JobStatus};
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, killpg, sigaction};
use nix::unistd::Pid;
use serde_json::Value;

use crate::connect;
use crate::exit::{Failure, Result};
use crate::run::install::Install;

/// TIMEOUT: how long a job may take to end once it is asked to.
const ENDS: Duration = Duration::from_secs(10);
/// TIMEOUT: how long a trainer may take beyond its time: it ends what it is at, on a loaded host.
const LAST: Duration = Duration::from_secs(120);
/// Of what a job wrote to stderr, at most.
const SAID: u64 = 4096;
/// Of the demonstration's arbiter: shares are judged by device time, which is exact in slices.
const RULES: &str = "[[device]]\ndevice = \"*\"\nmode = \"exclusive\"\n";
/// The example program, beside the preload library.
const TRAINER: &str = "train_mlp";
/// Exit code of a command that Ctrl-C ended, as shells show it.
const INTERRUPTED: u8 = 130;

/// Ctrl-C or a polite kill has come.
static ASKED_TO_END: AtomicBool = AtomicBool::new(false);

extern "C" fn ask_to_end(_: libc::c_int) {
    ASKED_TO_END.store(true, Ordering::Relaxed);
}

pub struct Stage {
    place: tempfile::TempDir,
    sublet: PathBuf,
    trainer: PathBuf,
    simulated: bool,
    jobs: Vec<Running>,
}

struct Running {
    name: String,
    child: Child,
    out: PathBuf,
    err: PathBuf,
}

/// A job that was started, as a user would have.
pub struct Job(String);

impl Job {
    pub fn shown(&self) -> &str {
        &self.0
    }
}

/// The end of a job.
pub struct Ended {
    /// Its exit code, or 128 and its signal.
    pub code: i32,
    /// The JSON of its last line, where that is any.
    pub report: Option<Value>,
    /// The end of what it wrote to stderr.
    pub said: String,
}

impl Stage {
    /// # Errors
    /// What is missing of the installation, or no place for temporary files.
    pub fn new(simulated: bool) -> Result<Self> {
        let sublet = env::current_exe().context("cannot tell where `sublet` itself lies")?;
        let install = Install::find(&sublet, |name| env::var_os(name))?;
        let trainer = trainer(&install, &sublet)?;
        let place = tempfile::Builder::new()
            .prefix("sublet-demo-")
            .tempdir()
            .context("cannot make a folder for temporary files (is TMPDIR right?)")?;
        for name in ["run", "sim"] {
            let path = place.path().join(name);
            DirBuilder::new()
                .mode(0o700)
                .create(&path)
                .with_context(|| format!("cannot make {}", path.display()))?;
        }
        let action = SigAction::new(
            SigHandler::Handler(ask_to_end),
            SaFlags::SA_RESTART,
            SigSet::empty(),
        );
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            // SAFETY: the handler stores to an atomic and does nothing else.
            unsafe { sigaction(signal, &action) }.context("cannot take signals")?;
        }
        Ok(Self {
            place,
            sublet,
            trainer,
            simulated,
            jobs: Vec::new(),
        })
    }

    /// Starts the trainer with these words as a job with these flags.
    ///
    /// # Errors
    /// It cannot be started; what is wrong with it shows later.
    pub fn start(&mut self, name: &str, flags: &[String], words: &[String]) -> anyhow::Result<Job> {
        let mut flags = flags.to_vec();
        if self.simulated {
            flags.push("--sim".into());
        }
        let mut command = Command::new(&self.sublet);
        // Its settings are those that are shown, whatever the environment of this shell is.
        for (variable, _) in env::vars_os() {
            let text = variable.to_string_lossy();
            if text.starts_with("SUBLET_") && text != "SUBLET_LIBRARY" && text != "SUBLET_SIM_DIR" {
                command.env_remove(&variable);
            }
        }
        let rules = self.at("rules.toml");
        fs::write(&rules, RULES).with_context(|| format!("cannot write {}", rules.display()))?;
        let (out, err) = (
            self.at(&format!("{name}.out")),
            self.at(&format!("{name}.err")),
        );
        command
            .args(["run", "--name", name, "--config"])
            .arg(&rules)
            .args(&flags)
            .arg("--")
            .arg(&self.trainer)
            .args(words)
            .args(["--name", name])
            .env("SUBLET_RUNTIME_DIR", self.at("run"))
            .env("SUBLET_SIM_STATE", self.at("sim"))
            .stdin(Stdio::null())
            .stdout(create(&out)?)
            .stderr(create(&err)?)
            .process_group(0);
        let parent = std::process::id();
        // SAFETY: between fork and exec this makes two system calls, which are async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                // Killed before it was set.
                if libc::getppid().cast_unsigned() != parent {
                    libc::_exit(1);
                }
                Ok(())
            });
        }
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", self.sublet.display()))?;
        self.jobs.push(Running {
            name: name.into(),
            child,
            out,
            err,
        });
        let shown: Vec<&str> = flags.iter().map(String::as_str).collect();
        let what: Vec<&str> = words
            .iter()
            .filter(|word| word.starts_with("--ballast"))
            .map(String::as_str)
            .collect();
        Ok(Job(format!(
            "sublet run --name {name} {} -- {TRAINER} {} ...",
            shown.join(" "),
            what.join(" ")
        )))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// # Errors
    /// Somebody wants this process to end.
    pub fn go_on(&self) -> Result<()> {
        match ASKED_TO_END.load(Ordering::Relaxed) {
            true => Err(Failure::with_code(
                INTERRUPTED,
                anyhow!("interrupted; the jobs were ended"),
            )),
            false => Ok(()),
        }
    }

    /// # Errors
    /// One of the jobs has ended already.
    pub fn all_train(&mut self, names: &[&str]) -> anyhow::Result<()> {
        for job in &mut self.jobs {
            if names.contains(&job.name.as_str())
                && let Some(status) = job.child.try_wait().context("cannot look after a job")?
            {
                bail!(
                    "the job `{}` ended too early, with {}: {}",
                    job.name,
                    code_of(status),
                    end_of_text(&job.err)
                );
            }
        }
        Ok(())
    }

    /// What the arbiter says of itself and its jobs; `None`: it does not listen yet.
    ///
    /// # Errors
    /// It does not answer.
    pub fn status(&self) -> anyhow::Result<Option<ArbiterStatus>> {
        let dir = RuntimeDir::given(self.at("run"))?;
        match connect::ask(|| connect::existing(&dir), Client::status) {
            Ok(status) => Ok(Some(status)),
            Err(error) if error.is_absence() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The jobs that it knows.
    ///
    /// # Errors
    /// As [`status`](Self::status).
    pub fn jobs(&self) -> anyhow::Result<Vec<JobStatus>> {
        Ok(self.status()?.map(|status| status.jobs).unwrap_or_default())
    }

    /// Waits for the end of a job.
    ///
    /// # Errors
    /// It does not end.
    pub fn end_of(&mut self, name: &str) -> Result<Ended> {
        let begun = Instant::now();
        loop {
            self.go_on()?;
            let Some(job) = self.jobs.iter_mut().find(|job| job.name == name) else {
                return Err(anyhow!("there is no job `{name}`").into());
            };
            if let Some(status) = job.child.try_wait().context("cannot look after a job")? {
                let out = fs::read_to_string(&job.out).unwrap_or_default();
                let last = out.lines().last().unwrap_or_default();
                return Ok(Ended {
                    code: code_of(status),
                    report: serde_json::from_str(last).ok(),
                    said: end_of_text(&job.err),
                });
            }
            if begun.elapsed() > LAST {
                return Err(anyhow!(
                    "the job `{name}` does not end within {} s of its time: {}",
                    LAST.as_secs(),
                    end_of_text(&job.err)
                )
                .into());
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        for job in &mut self.jobs {
            end(&mut job.child);
        }
        // No arbiter, or none that answers: it ends by itself without jobs.
        if let Ok(dir) = RuntimeDir::given(self.at("run"))
            && let Ok(mut client) = connect::existing(&dir)
        {
            let _ = client.shutdown();
            let begun = Instant::now();
            while dir.api_socket().exists() && begun.elapsed() < ENDS {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Ends a job, with what it may have started.
fn end(child: &mut Child) {
    if !matches!(child.try_wait(), Ok(None)) {
        return;
    }
    // It leads its own group, and is not waited for yet, so the number is its.
    let group = Pid::from_raw(child.id().cast_signed());
    let _ = killpg(group, Signal::SIGTERM);
    let begun = Instant::now();
    while begun.elapsed() < ENDS {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    let _ = killpg(group, Signal::SIGKILL);
    let _ = child.wait();
}

/// Where the example program is: beside the libraries, or beside `sublet`.
fn trainer(install: &Install, sublet: &Path) -> Result<PathBuf> {
    let places: Vec<PathBuf> = [install.library(), install.sim_dir(), sublet]
        .iter()
        .filter_map(|path| Some(path.parent()?.join(TRAINER)))
        .collect();
    match places.iter().find(|path| path.is_file()) {
        Some(path) => Ok(path.clone()),
        None => Err(anyhow!(
            "the example program `{TRAINER}` is not installed: looked at {}",
            places
                .iter()
                .map(|path| path.display().to_string())
                .collect::<Vec<_>>()
                .join(", ")
        )
        .into()),
    }
}

fn create(path: &Path) -> anyhow::Result<File> {
    File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot write {}", path.display()))
}

fn code_of(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

fn end_of_text(path: &Path) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(SAID).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).trim().to_owned()
}
