//! One host program and the ways to run it.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use testbed::CommandWithin;

use crate::Artefacts;

/// TIMEOUT: after which a program counts as hung. Far beyond what any needs, also on a busy
/// machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// How a program is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// On the driver, without us.
    Bare,
    /// With the preload library, and nobody to attach to.
    Preloaded,
    /// By `sublet run`, with a quota and a share.
    Job,
}

/// How a program ended and what it said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Exit code.
    pub code: Option<i32>,
    /// Signal that ended it.
    pub signal: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error, without the line in which `sublet run` says that the GPU is simulated.
    pub stderr: String,
}

/// A program in a place of its own: a simulated device, a runtime directory, an arbiter that ends
/// with it.
#[derive(Debug)]
pub struct Host {
    dir: tempfile::TempDir,
    program: PathBuf,
    args: Vec<OsString>,
    /// Directory of another driver than the simulated one.
    driver: Option<PathBuf>,
}

impl Host {
    /// `program`, with its arguments.
    ///
    /// # Panics
    /// When there is no temporary directory.
    pub fn new<S: AsRef<OsStr>>(program: impl Into<PathBuf>, args: &[S]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for name in ["run", "sim", "work"] {
            std::fs::DirBuilder::new()
                .mode(0o700)
                .create(dir.path().join(name))
                .expect("a directory");
        }
        Self {
            dir,
            program: program.into(),
            args: args.iter().map(|arg| arg.as_ref().to_owned()).collect(),
            driver: None,
        }
    }

    /// The C program `programs/NAME.c`, or the C++ one.
    ///
    /// # Panics
    /// When it does not compile.
    pub fn c(source: &str) -> Self {
        let name = source.split('.').next().unwrap_or(source);
        let program = Artefacts::get()
            .compile(name, source, None, &[])
            .unwrap_or_else(|error| panic!("{error}"));
        Self::new::<&str>(program, &[])
    }

    /// With another driver than the simulated one: the directory of its `libcuda.so.1`.
    pub fn on(mut self, driver: &Path) -> Self {
        self.driver = Some(driver.to_owned());
        self
    }

    /// A file in its place.
    pub fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The command that runs it by `sublet run FLAGS`.
    pub fn job(&self, flags: &[&str]) -> Command {
        let mut command = self.sublet();
        command.arg("run").args(flags);
        match &self.driver {
            Some(dir) => command.arg("--driver").arg(dir.join("libcuda.so.1")),
            None => command.arg("--sim"),
        };
        command.arg("--").arg(&self.program).args(&self.args);
        command
    }

    /// Runs it by `sublet run FLAGS`, to its end.
    ///
    /// # Panics
    /// When it does not start, or hangs.
    pub fn run_job(&self, flags: &[&str]) -> Outcome {
        finish(&mut self.job(flags))
    }

    /// The command that runs it so, with no more than its own environment.
    pub fn command(&self, way: Way) -> Command {
        let artefacts = Artefacts::get();
        let sim = artefacts.dir.join("sim");
        let driver = self.driver.as_ref().unwrap_or(&sim);
        if way == Way::Job {
            return self.job(&["--mem", "1GiB", "--share", "0.5"]);
        }
        let mut command = self.plain(&self.program);
        command.args(&self.args);
        command.env("LD_LIBRARY_PATH", driver);
        if way == Way::Preloaded {
            command
                .env("LD_PRELOAD", artefacts.preload())
                .env("SUBLET_DRIVER", driver.join("libcuda.so.1"));
        }
        command
    }

    /// `sublet`, in this place.
    pub fn sublet(&self) -> Command {
        self.plain(&Artefacts::get().sublet())
    }

    fn plain(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .env("HOME", self.at("work"))
            .env("SUBLET_RUNTIME_DIR", self.at("run"))
            .env("SUBLET_SIM_STATE", self.at("sim"))
            .env("SUBLET_SIM_CAPACITY", "4GiB")
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .current_dir(self.at("work"))
            .stdin(Stdio::null());
        command
    }

    /// Runs it so, to its end.
    ///
    /// # Panics
    /// When it does not start, or hangs.
    pub fn run(&self, way: Way) -> Outcome {
        finish(&mut self.command(way))
    }

    /// Runs it in all ways; all outcomes are the same, and silent on standard error. Answers that
    /// outcome.
    ///
    /// # Panics
    /// When they differ.
    #[track_caller]
    pub fn is_the_same_everywhere(&self) -> Outcome {
        let bare = self.run(Way::Bare);
        assert_eq!(bare.stderr, "", "bare: {bare:?}");
        for way in [Way::Preloaded, Way::Job] {
            let outcome = self.run(way);
            assert_eq!(
                outcome,
                bare,
                "{way:?} differs from bare for {}:\n{}\n--- bare\n{}",
                self.program.display(),
                outcome.stdout,
                bare.stdout
            );
        }
        bare
    }

    /// What `sublet ps --json` says here.
    pub fn ps(&self) -> serde_json::Value {
        let outcome = finish(self.sublet().args(["ps", "--json"]));
        serde_json::from_str(&outcome.stdout).unwrap_or_default()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // An arbiter that `sublet run` has started. Where there is none, this says so to nobody.
        let _ = self
            .sublet()
            .args(["arbiter", "--stop"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status_within(PATIENCE);
    }
}

/// Runs a command to its end, at most [`PATIENCE`].
///
/// # Panics
/// When it does not start, or hangs.
#[track_caller]
pub fn finish(command: &mut Command) -> Outcome {
    let output = command.output_within(PATIENCE);
    let stderr = String::from_utf8_lossy(&output.stderr);
    Outcome {
        code: output.status.code(),
        signal: output.status.signal(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: stderr
            .lines()
            .filter(|line| !line.starts_with("sublet: simulated GPU"))
            .map(|line| format!("{line}\n"))
            .collect(),
    }
}
