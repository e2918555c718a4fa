//! How a process ended and what it said.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use testbed::CommandWithin;

/// A finished process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Exit code, if it exited.
    pub code: Option<i32>,
    /// Signal that ended it, if one did.
    pub signal: Option<i32>,
    /// Everything on stdout.
    pub stdout: String,
    /// Everything on stderr.
    pub stderr: String,
}

impl Outcome {
    /// Runs `command` to its end.
    ///
    /// # Panics
    /// When it cannot be started, or does not end.
    #[track_caller]
    pub fn of(command: &mut Command) -> Self {
        command.output_within(testbed::PATIENCE).into()
    }

    /// Exit code 0.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self
    }

    /// Nothing on stderr; what the program itself said on stdout is returned.
    #[track_caller]
    pub fn quiet(self) -> String {
        assert_eq!(self.stderr, "", "{self:#?}");
        self.stdout
    }

    /// The last line of stdout as JSON.
    ///
    /// # Panics
    /// When it is none.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        self.stdout
            .lines()
            .next_back()
            .and_then(|line| serde_json::from_str(line).ok())
            .unwrap_or_else(|| panic!("no JSON on the last line: {self:#?}"))
    }
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            signal: output.status.signal(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}
