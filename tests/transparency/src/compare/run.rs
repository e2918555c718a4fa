//! Starts a worker bare, interposed, or as a governed job, and reads what it says.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Options, Task};

/// Who answers the worker's calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// The driver alone.
    Bare,
    /// The preload library, with no arbiter.
    Interposed,
    /// The preload library in a job of `sublet run` without limits.
    Governed,
}

impl Mode {
    /// For reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Interposed => "interposed",
            Self::Governed => "governed",
        }
    }
}

/// What a worker said.
#[derive(Debug, Default)]
pub struct Said {
    /// Its lines.
    pub lines: Vec<String>,
    /// How it ended, where that was not by saying everything.
    pub died: Option<String>,
}

/// Where one worker at a time works: a simulated device and an arbiter of its own.
pub struct Place {
    directory: PathBuf,
}

impl Place {
    /// A fresh directory.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(number: usize) -> std::io::Result<Self> {
        let directory =
            std::env::temp_dir().join(format!("transparency-{}-{number}", std::process::id()));
        std::fs::create_dir_all(directory.join("run"))?;
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(
            directory.join("run"),
            std::fs::Permissions::from_mode(0o700),
        )?;
        Ok(Self { directory })
    }

    fn command(&self, options: &Options, mode: Mode) -> Command {
        let worker = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("transparency"));
        let mut command = match mode {
            Mode::Governed => {
                let mut command = Command::new(&options.sublet);
                command.args(["run", "--name", "transparency"]);
                // `--driver` takes real drivers only.
                let beside = options.sublet.with_file_name("sim/libcuda.so.1");
                if std::fs::canonicalize(beside).is_ok_and(|path| path == options.driver) {
                    command.arg("--sim");
                } else {
                    command.arg("--driver").arg(&options.driver);
                }
                command.arg("--").arg(worker);
                command
            }
            _ => Command::new(worker),
        };
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("SUBLET_") && !text.starts_with("SUBLET_SIM_") {
                command.env_remove(name);
            }
        }
        let directory = options.driver.parent().unwrap_or(Path::new("/"));
        command
            .env_remove("LD_PRELOAD")
            .env("LD_LIBRARY_PATH", directory)
            .env("SUBLET_RUNTIME_DIR", self.directory.join("run"))
            .env("SUBLET_SIM_STATE", self.directory.join("sim"))
            // Simulated work takes no time worth waiting for.
            .env("SUBLET_SIM_SPEED", "1000000")
            // Sequences make calls with handles of what is gone.
            .env("SUBLET_SIM_FREED_STREAM", "refuse")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if mode != Mode::Bare {
            command.envs(options.candidate_env.iter().cloned());
        }
        if mode == Mode::Interposed {
            command
                .env("LD_PRELOAD", &options.preload)
                .env("SUBLET_DRIVER", &options.driver);
        }
        command
    }

    /// Runs one worker to its end.
    pub fn run(
        &self,
        options: &Options,
        mode: Mode,
        task: Task,
        shown: &std::ops::Range<u64>,
    ) -> Said {
        let mut command = self.command(options, mode);
        command
            .arg(match mode {
                Mode::Bare => "worker-bare",
                Mode::Interposed => "worker",
                Mode::Governed => "worker-governed",
            })
            .args(task.to_words());
        command.arg(format!("{}..{}", shown.start, shown.end));
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                return Said {
                    lines: Vec::new(),
                    died: Some(format!("cannot be started: {error}")),
                };
            }
        };
        let errors = child.stderr.take();
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            if let Some(mut errors) = errors {
                let _ = errors.read_to_string(&mut text);
            }
            text
        });
        let mut text = String::new();
        if let Some(mut out) = child.stdout.take() {
            let _ = out.read_to_string(&mut text);
        }
        let status = child.wait();
        let errors = reader.join().unwrap_or_default();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let complete = lines.last().is_some_and(|line| line == "end");
        if complete {
            lines.pop();
        }
        let died = match status {
            Ok(status) if complete && status.success() => None,
            Ok(status) => Some(match status.signal() {
                Some(signal) => format!("signal {signal}{}", last_calls(&mut lines)),
                None => format!("exit {}: {}", status.code().unwrap_or(-1), errors.trim()),
            }),
            Err(error) => Some(error.to_string()),
        };
        Said { lines, died }
    }

    /// Ends the arbiter of this place, if one was started.
    pub fn close(self, options: &Options) {
        if !options.governed {
            let _ = std::fs::remove_dir_all(&self.directory);
            return;
        }
        let _ = Command::new(&options.sublet)
            .args(["arbiter", "--stop"])
            .env("SUBLET_RUNTIME_DIR", self.directory.join("run"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Takes out what the process said of its last calls when a signal ended it.
fn last_calls(lines: &mut Vec<String>) -> String {
    let at = lines.iter().position(|line| line.starts_with("died in "));
    at.map_or_else(String::new, |at| format!(", {}", lines.remove(at)))
}
