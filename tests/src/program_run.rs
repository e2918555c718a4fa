//! A host program that takes commands, a line at a time.

use std::io::{BufReader, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use testbed::within;

use crate::Outcome;
use crate::sandbox::Running;

/// A running host program and both its pipes.
#[derive(Debug)]
pub struct ProgramRun {
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// The process.
    pub running: Running,
}

impl ProgramRun {
    /// Starts `command` with its pipes connected to the test.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> Self {
        let mut running = Running::start(command.stdin(Stdio::piped()));
        let (to, from) = running.pipes();
        Self {
            to,
            from: BufReader::new(from),
            running,
        }
    }

    /// Says `line` and does not wait.
    ///
    /// # Panics
    /// When nobody listens.
    #[track_caller]
    pub fn send(&mut self, line: &str) {
        writeln!(self.to, "{line}").expect("the host program listens");
    }

    /// The next line of the program.
    ///
    /// # Panics
    /// When it has ended, with what it said on stderr, or says nothing.
    #[track_caller]
    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        within::read_line(&mut self.from, &mut line);
        assert!(
            line.ends_with('\n'),
            "the host program has ended: {:?}",
            self.running.take_stderr()
        );
        line.trim_end().to_owned()
    }

    /// Says `line` and waits for the answer.
    #[track_caller]
    pub fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.answer()
    }

    /// Closes the program's stdin and waits for its end; stdout is what no command asked for.
    ///
    /// # Panics
    /// When its output cannot be read.
    #[track_caller]
    pub fn finish(self) -> Outcome {
        let Self {
            to,
            mut from,
            running,
        } = self;
        drop(to);
        let mut rest = String::new();
        within::read_to_end(&mut from, &mut rest);
        let mut outcome = running.wait();
        outcome.stdout = rest;
        outcome
    }

    /// Ends the program as [`finish`](Self::finish) does; it and everything in it must have been
    /// silent and well.
    ///
    /// # Panics
    /// When it was not.
    #[track_caller]
    pub fn ended_well(self) {
        let outcome = self.finish();
        assert_eq!(
            (
                outcome.code,
                outcome.stderr.as_str(),
                outcome.stdout.as_str()
            ),
            (Some(0), "", "")
        );
    }

    /// Ends the program by SIGKILL and waits until it is gone.
    pub fn kill(self) -> Outcome {
        let Self {
            to,
            from,
            mut running,
        } = self;
        running.kill();
        drop((to, from));
        running.wait()
    }
}
