//! Waits with limits, for processes, threads and lines of text.
//!
//! Only failures wait so long. What was started is ended, through its own handle, before a test
//! fails because of it.

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// TIMEOUT: how long a test waits for what takes seconds at most on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// Processes that are run to their end, but not for ever.
pub trait CommandWithin {
    /// As [`Command::output`].
    ///
    /// # Panics
    /// Where it cannot be started, or has not ended within `limit`.
    fn output_within(&mut self, limit: Duration) -> Output;

    /// As [`Command::status`].
    ///
    /// # Panics
    /// Where it cannot be started, or has not ended within `limit`.
    fn status_within(&mut self, limit: Duration) -> ExitStatus;
}

/// As [`Command::spawn`], but a file that a test has just written starts: until it executes its own
/// program, another thread's child may hold it open for writing.
///
/// # Errors
/// As [`Command::spawn`]; the file is still being written after [`PATIENCE`].
pub fn spawn(command: &mut Command) -> std::io::Result<Child> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match command.spawn() {
            Err(error)
                if error.kind() == ErrorKind::ExecutableFileBusy && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            answer => return answer,
        }
    }
}

impl CommandWithin for Command {
    #[track_caller]
    fn output_within(&mut self, limit: Duration) -> Output {
        let what = format!("{self:?}");
        let child = spawn(self.stdout(Stdio::piped()).stderr(Stdio::piped()))
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        output(child, &what, limit)
    }

    #[track_caller]
    fn status_within(&mut self, limit: Duration) -> ExitStatus {
        let what = format!("{self:?}");
        let mut child = spawn(self).unwrap_or_else(|error| panic!("{what}: {error}"));
        wait(&mut child, &what, limit)
    }
}

/// The end of a process.
///
/// # Panics
/// Where it has not ended within `limit`; it is killed then.
#[track_caller]
pub fn wait(child: &mut Child, what: &str, limit: Duration) -> ExitStatus {
    ended(child, limit).unwrap_or_else(|| {
        reap(child);
        panic!("{what}: not ended within {limit:?}")
    })
}

/// The end of a process and what it has said on the pipes that are left, as
/// [`Child::wait_with_output`].
///
/// # Panics
/// Where it has not ended, or somebody else still holds its pipes, after `limit`; it is killed
/// then.
#[track_caller]
pub fn output(mut child: Child, what: &str, limit: Duration) -> Output {
    drop(child.stdin.take());
    let begun = Instant::now();
    let readers = (reader(child.stdout.take()), reader(child.stderr.take()));
    let status = ended(&mut child, limit);
    if status.is_none() {
        reap(&mut child);
    }
    // A child of its may hold the pipes for longer than it lives; what was said is with the thread
    // that reads.
    let rest = match status {
        Some(_) => limit
            .saturating_sub(begun.elapsed())
            .max(Duration::from_secs(10)),
        None => Duration::from_secs(10),
    };
    let end = Instant::now() + rest;
    let (stdout, stderr) = (said(readers.0, end), said(readers.1, end));
    match (status, stdout, stderr) {
        (Some(status), Some(stdout), Some(stderr)) => Output {
            status,
            stdout,
            stderr,
        },
        (None, stdout, stderr) => panic!(
            "{what}: not ended within {limit:?}; it said {:?} {:?}",
            String::from_utf8_lossy(&stdout.unwrap_or_default()),
            String::from_utf8_lossy(&stderr.unwrap_or_default())
        ),
        (Some(status), ..) => panic!(
            "{what}: ended ({status}), and yet a process that it has started held its output for {limit:?}"
        ),
    }
}

/// The end of a thread, with what it answers.
///
/// # Panics
/// Where it has not ended within [`PATIENCE`], or has panicked.
#[track_caller]
pub fn join<T>(thread: JoinHandle<T>) -> T {
    joined(thread)
        .unwrap_or_else(|| panic!("a thread of the test has not ended within {PATIENCE:?}"))
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// As [`join`], where a failure may not panic: in a `drop`. `None` where the thread has not ended
/// in time.
pub fn joined<T>(thread: JoinHandle<T>) -> Option<std::thread::Result<T>> {
    let end = Instant::now() + PATIENCE;
    while !thread.is_finished() {
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Some(thread.join())
}

/// Kills a process and takes its end, as far as that is to be had: for a `drop`.
pub fn reap(child: &mut Child) {
    let _ = child.kill();
    // A killed process that is stuck in the kernel is not waited for.
    let end = Instant::now() + Duration::from_secs(10);
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Appends the next line to `line`, as [`BufRead::read_line`]; 0 at the end.
///
/// # Panics
/// Where nothing comes for [`PATIENCE`], or what comes is not text.
#[track_caller]
pub fn read_line<R: Read + AsFd>(from: &mut BufReader<R>, line: &mut String) -> usize {
    let end = Instant::now() + PATIENCE;
    let mut bytes = Vec::new();
    loop {
        if from.buffer().is_empty() {
            readable(from.get_ref(), end, &bytes);
        }
        let more = from.fill_buf().expect("it can be read");
        let (taken, whole) = match more.iter().position(|byte| *byte == b'\n') {
            Some(at) => (at + 1, true),
            None => (more.len(), more.is_empty()),
        };
        bytes.extend_from_slice(&more[..taken]);
        from.consume(taken);
        if whole {
            line.push_str(std::str::from_utf8(&bytes).expect("text"));
            return bytes.len();
        }
    }
}

/// Appends everything up to the end to `text`, as [`Read::read_to_string`].
///
/// # Panics
/// Where the end does not come within [`PATIENCE`].
#[track_caller]
pub fn read_to_end<R: Read + AsFd>(from: &mut BufReader<R>, text: &mut String) {
    while read_line(from, text) > 0 {}
}

#[track_caller]
fn readable(from: &impl AsFd, end: Instant, before: &[u8]) {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut poll = libc::pollfd {
            fd: from.as_fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // CAST: minutes, in milliseconds.
        let left_ms = left.as_millis() as libc::c_int;
        // SAFETY: one structure, which outlives the call.
        let ready = unsafe { libc::poll(&mut poll, 1, left_ms) };
        if ready > 0 {
            return;
        }
        assert!(
            !left.is_zero(),
            "nothing to read for {PATIENCE:?}; before that: {:?}",
            String::from_utf8_lossy(before)
        );
    }
}

fn ended(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().expect("it is our child") {
            return Some(status);
        }
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn reader<R: Read + Send + 'static>(from: Option<R>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            let _ = from.read_to_end(&mut bytes);
        }
        bytes
    })
}

fn said(reader: JoinHandle<Vec<u8>>, end: Instant) -> Option<Vec<u8>> {
    while !reader.is_finished() {
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Some(reader.join().unwrap_or_default())
}
