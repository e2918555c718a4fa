//! A directory for one test: its own runtime directory, its own simulated device, its own arbiter.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::BufReader;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use control::{Client, JobStatus, SliceMode};
use testbed::within;

use crate::{Artefacts, Outcome, PATIENCE, wait_until};

/// Variables of the test's own environment that programs may see.
const KEPT: [&str; 1] = ["PATH"];

/// One test's place. Dropping it ends the arbiter that lives there.
#[derive(Debug)]
pub struct Sandbox {
    dir: tempfile::TempDir,
    vars: BTreeMap<OsString, OsString>,
}

/// A process of a test; ended when dropped.
#[derive(Debug)]
pub struct Running(Option<Child>);

impl Running {
    /// Starts `command` with both outputs piped.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> Self {
        let child = within::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self(Some(child))
    }

    /// A process that was started already.
    pub fn of(child: Child) -> Self {
        Self(Some(child))
    }

    /// What it has said on stderr, once it has closed that.
    pub fn take_stderr(&mut self) -> String {
        let mut text = String::new();
        if let Some(stderr) = self.0.as_mut().and_then(|child| child.stderr.take()) {
            within::read_to_end(&mut BufReader::new(stderr), &mut text);
        }
        text
    }

    /// Its process id.
    ///
    /// # Panics
    /// After [`Running::wait`].
    pub fn pid(&self) -> u32 {
        self.child().id()
    }

    fn child(&self) -> &Child {
        self.0.as_ref().expect("not waited for")
    }

    /// Ends it by SIGKILL.
    pub fn kill(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
        }
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// After [`Running::wait`], or where it cannot be sent.
    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        // CAST: process ids are positive.
        let pid = nix::unistd::Pid::from_raw(self.pid() as i32);
        nix::sys::signal::kill(pid, signal)
            .unwrap_or_else(|error| panic!("{signal} to {pid}: {error}"));
    }

    /// Lets its files grow no more than to this, which is what a full disk is to it.
    ///
    /// # Panics
    /// After [`Running::wait`], or where it cannot be limited.
    pub fn limit_file_size(&self, bytes: u64) {
        use nix::libc;
        let limit = libc::rlimit {
            rlim_cur: bytes,
            rlim_max: bytes,
        };
        // CAST: process ids are positive.
        let pid = self.pid() as i32;
        // SAFETY: a process of this test's own, and a valid structure.
        let done = unsafe {
            libc::prlimit(
                pid,
                libc::RLIMIT_FSIZE,
                &raw const limit,
                std::ptr::null_mut(),
            )
        };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.0
            .as_mut()
            .is_none_or(|child| matches!(child.try_wait(), Ok(Some(_))))
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When called twice, or where it does not end.
    #[track_caller]
    pub fn wait(mut self) -> Outcome {
        let child = self.0.take().expect("waited for once");
        let what = format!("process {}", child.id());
        within::output(child, &what, testbed::PATIENCE).into()
    }

    /// Both its pipes, for lines to it and from it.
    ///
    /// # Panics
    /// When they are taken already.
    pub fn pipes(&mut self) -> (std::process::ChildStdin, std::process::ChildStdout) {
        let child = self.0.as_mut().expect("not waited for");
        (
            child.stdin.take().expect("a pipe to it"),
            child.stdout.take().expect("a pipe from it"),
        )
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            testbed::reap(child);
        }
    }
}

impl Sandbox {
    /// An empty place with a small simulated device: 8 GiB, no overhead per context, fast to
    /// create. How its jobs share time is left to the default.
    ///
    /// # Panics
    /// When there is no temporary directory.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for name in ["run", "sim", "home"] {
            std::fs::DirBuilder::new()
                .mode(0o700)
                .create(dir.path().join(name))
                .expect("a directory");
        }
        let mut vars = BTreeMap::new();
        for name in KEPT {
            if let Some(value) = std::env::var_os(name) {
                vars.insert(name.into(), value);
            }
        }
        let mut sandbox = Self { dir, vars };
        sandbox.set("HOME", sandbox.path("home"));
        sandbox.set("SUBLET_RUNTIME_DIR", sandbox.path("run"));
        sandbox.set("SUBLET_SIM_STATE", sandbox.path("sim"));
        sandbox.set("SUBLET_SIM_CAPACITY", "8GiB");
        sandbox.set("SUBLET_SIM_CONTEXT", "0B");
        sandbox
    }

    /// The same, and its devices share their time in slices, whatever the default is. For tests
    /// that ask what jobs get of the device, when they get it, or who has it.
    ///
    /// # Panics
    /// When there is no temporary directory.
    pub fn exclusive() -> Self {
        Self::in_mode(SliceMode::Exclusive, "")
    }

    /// The same in any mode. `rules`: lines with other keys of the device's section in the quota
    /// file.
    ///
    /// # Panics
    /// When there is no temporary directory.
    pub fn in_mode(mode: SliceMode, rules: &str) -> Self {
        let mut sandbox = Self::new();
        sandbox.run_devices(mode, rules);
        sandbox
    }

    /// From here on devices of arbiters that are started are run so, see
    /// [`in_mode`](Self::in_mode).
    ///
    /// # Panics
    /// When the quota file cannot be written.
    pub fn run_devices(&mut self, mode: SliceMode, rules: &str) {
        let file = self.path("sublet.toml");
        let text = format!("[[device]]\ndevice = \"*\"\nmode = \"{mode}\"\n{rules}\n");
        std::fs::write(&file, text).expect("a quota file");
        self.set("SUBLET_CONFIG", file);
    }

    /// A file or directory in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Sets a variable for every program started from here on.
    pub fn set(&mut self, name: &str, value: impl AsRef<OsStr>) {
        self.vars.insert(name.into(), value.as_ref().into());
    }

    /// `program`, with the sandbox's environment and nothing else.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .envs(&self.vars)
            .current_dir(self.dir.path())
            .stdin(Stdio::null());
        command
    }

    /// `program` on the simulated driver, without the preload library.
    pub fn bare(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.command(program);
        command.env("LD_LIBRARY_PATH", sim_dir());
        command
    }

    /// `program` on the simulated driver, with the preload library and without an arbiter.
    pub fn preloaded(&self, program: impl AsRef<OsStr>) -> Command {
        let artefacts = Artefacts::get();
        let mut command = self.bare(program);
        command
            .env("LD_PRELOAD", artefacts.preload())
            .env("SUBLET_DRIVER", artefacts.simulated_driver());
        command
    }

    /// `sublet ARGS`.
    pub fn sublet<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = self.command(Artefacts::get().program("sublet"));
        command.args(args);
        command
    }

    /// `sublet run --sim FLAGS -- PROGRAM`; arguments of the program are to be added.
    pub fn job(&self, flags: &[&str], program: impl AsRef<OsStr>) -> Command {
        let mut command = self.sublet(["run", "--sim"]);
        command.args(flags).arg("--").arg(program);
        command
    }

    /// An arbiter of the sandbox's own, ready.
    pub fn arbiter(&self) -> Running {
        let mut arbiter = Running::start(&mut self.sublet(["arbiter"]));
        wait_until("the arbiter answers", || {
            if arbiter.has_ended() {
                let ended = std::mem::replace(&mut arbiter, Running(None));
                panic!("the arbiter ended at once: {:?}", ended.wait());
            }
            self.control().ok()?.status().ok()
        });
        arbiter
    }

    /// A connection to the arbiter of the sandbox.
    ///
    /// # Errors
    /// What went wrong, in words.
    pub fn control(&self) -> Result<Client, String> {
        Client::connect(&self.path("run/api.sock"), PATIENCE).map_err(|error| error.to_string())
    }

    /// All jobs of the arbiter; none where it does not answer.
    pub fn jobs(&self) -> Vec<JobStatus> {
        self.control()
            .ok()
            .and_then(|mut control| control.list().ok())
            .unwrap_or_default()
    }

    /// The job of this name.
    pub fn job_status(&self, name: &str) -> Option<JobStatus> {
        self.jobs().into_iter().find(|job| job.name == name)
    }

    /// The arbiter's journal.
    pub fn events(&self) -> Vec<control::Event> {
        self.control()
            .ok()
            .and_then(|mut control| control.events(0, 0).ok())
            .unwrap_or_default()
    }
}

impl Default for Sandbox {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // An embedded arbiter belongs to the sandbox that it was started in.
        if let Ok(mut control) = self.control() {
            let _ = control.shutdown();
        }
    }
}

fn sim_dir() -> PathBuf {
    Artefacts::get()
        .simulated_driver()
        .parent()
        .map_or_else(PathBuf::new, Path::to_owned)
}
