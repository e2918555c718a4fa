//! Processes of a job that cannot be governed: refused, or let go on without limits, and in both
//! cases said in one line.
//!
//! `--on-refusal` (`SUBLET_ON_REFUSAL`) decides which. A refused process is answered
//! `CUDA_ERROR_SYSTEM_NOT_READY` by its `cuInit` and by every later call of the driver
//! ([`real::refuse`]).
//!
//! The line is the only thing that this library ever prints. It goes to the standard error of
//! `sublet run`, and nowhere else: a program may have closed that, and have a file of its own under
//! the number 2. So `sublet run` says which file its standard error is (`SUBLET_STDERR`), and a
//! copy of descriptor 2 must be that file, or a terminal, before anything is written. In a
//! container that registers itself there is no `sublet run`: there it is the pipe that the
//! container's first process has under the number 2, where the engine reads.

use std::fmt::Display;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use channel::client::AttachError;
use channel::wire::Outcome;
use shim_ffi::CUresult;

use crate::attachment::asked;
use crate::attachment::job::{self, Membership};
use crate::driver::real;
use crate::ground::environment::variable;

/// The process must not run: ends its way to the driver for good.
pub(crate) fn refuse(why: &dyn Display) -> Result<(), CUresult> {
    real::refuse();
    let in_container = job::membership().is_some_and(Membership::is_of_container);
    let word = match in_container {
        true => "SUBLET_ON_REFUSAL=open",
        false => "--on-refusal open",
    };
    tell(&|pid, job| {
        format!(
            "sublet: process {pid} of job `{job}` is refused: {why}. Every driver call of it fails with \
             CUDA_ERROR_SYSTEM_NOT_READY (802); `{word}` would let it run without limits\n"
        )
    });
    Err(CUresult::CUDA_ERROR_SYSTEM_NOT_READY)
}

/// The process runs without limits.
pub(crate) fn run_unlimited(why: &dyn Display) {
    tell(&|pid, job| {
        format!("sublet: warning: process {pid} of job `{job}` runs without limits: {why}\n")
    });
}

/// The process uses, or would use, a device that its job may not.
pub(crate) fn elsewhere(ordinal: i32, is_kept_off: bool) {
    tell(&|pid, job| match is_kept_off {
        true => format!(
            "sublet: process {pid} of job `{job}` is kept off its device {ordinal}, which the job may not use: \
             calls that would use it fail with CUDA_ERROR_DEVICE_UNAVAILABLE (46, --strict)\n"
        ),
        false => format!(
            "sublet: warning: process {pid} of job `{job}` uses its device {ordinal}, which the job may not use: \
             quota and share do not hold there (`--strict` would keep it off)\n"
        ),
    });
}

/// Why a process could not attach, for people.
pub(crate) struct Why<'a> {
    pub(crate) error: &'a AttachError,
    pub(crate) socket: &'a Path,
    /// How long it has been tried.
    pub(crate) waited: Duration,
    /// Why it is not known what the process asks for.
    pub(crate) unknown: Option<&'static str>,
}

impl Display for Why<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // What the arbiter says of it is about the words that stand for that.
        if let (Some(unknown), AttachError::Refused(Outcome::Malformed, _)) =
            (self.unknown, self.error)
        {
            return f.write_str(unknown);
        }
        write!(f, "{}", self.error)?;
        if let Some(source) = std::error::Error::source(self.error) {
            write!(f, ": {source}")?;
        }
        if self.error.lacks_descriptors() {
            return match descriptor_limit() {
                Some(limit) => write!(
                    f,
                    " (it may open {limit} descriptors; raise that with `ulimit -n`)"
                ),
                None => write!(f, " (raise the limit with `ulimit -n`)"),
            };
        }
        if self.error.may_pass() {
            write!(
                f,
                " (asked at {} for {:.1} s; `sublet arbiter` starts one)",
                self.socket.display(),
                self.waited.as_secs_f64()
            )?;
        } else if self.error.is_forbidden() {
            write!(f, " (a seccomp filter or the socket's mode may forbid it)")?;
        }
        Ok(())
    }
}

fn descriptor_limit() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: valid pointer to a local.
    (unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0).then_some(limit.rlim_cur)
}

/// Writes one line where `sublet run` writes its own.
fn tell(line: &dyn Fn(u32, &str) -> String) {
    let Some(stderr) = stderr_of_run() else {
        return;
    };
    let job = job::value(c"SUBLET_JOB").or_else(|| job::value(asked::CONTAINER));
    let job = job.map_or("?".into(), String::from_utf8_lossy);
    write_once(stderr.as_fd(), line(std::process::id(), &job).as_bytes());
}

/// A copy of descriptor 2 where it is the standard error of `sublet run`, or a terminal. A copy, so
/// that what was looked at is what is written to, whatever another thread does with the number 2
/// meanwhile.
fn stderr_of_run() -> Option<Copy> {
    let in_container = job::membership().is_some_and(Membership::is_of_container);
    if job::said().is_none() && !in_container {
        return None;
    }
    // SAFETY: a number to copy; where it is not open the copy fails.
    let stderr = unsafe { BorrowedFd::borrow_raw(2) };
    let copy = match rustix::io::fcntl_dupfd_cloexec(stderr, 3) {
        Ok(copy) => Copy::Own(copy),
        // No number is left. Then nobody else can open something under this one in between, short
        // of closing it first.
        Err(_) => Copy::Itself(stderr),
    };
    let file = rustix::fs::fstat(copy.as_fd()).ok()?;
    let of_run = variable(c"SUBLET_STDERR").and_then(|text| std::str::from_utf8(text).ok());
    let is_of_run = of_run == Some(format!("{}:{}", file.st_dev, file.st_ino).as_str());
    let is_shown = is_of_run || rustix::termios::isatty(copy.as_fd());
    (is_shown || (in_container && is_of_container(&file))).then_some(copy)
}

/// Whether this is the pipe into which the first process of our container writes its errors: the
/// engine has made it, and keeps what comes.
fn is_of_container(file: &rustix::fs::Stat) -> bool {
    use rustix::fs::FileType;
    let is_pipe = FileType::from_raw_mode(file.st_mode) == FileType::Fifo;
    let first = rustix::fs::stat("/proc/1/fd/2");
    is_pipe && first.is_ok_and(|it| (it.st_dev, it.st_ino) == (file.st_dev, file.st_ino))
}

enum Copy {
    Own(OwnedFd),
    Itself(BorrowedFd<'static>),
}

impl Copy {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(copy) => copy.as_fd(),
            Self::Itself(stderr) => *stderr,
        }
    }
}

/// One write, that neither waits for a reader nor ends the program where there is none any more.
fn write_once(to: BorrowedFd<'_>, line: &[u8]) {
    use rustix::event::{PollFd, PollFlags};
    let now = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut ask = [PollFd::new(&to, PollFlags::OUT)];
    match rustix::event::poll(&mut ask, Some(&now)) {
        // Full, and nobody reads.
        Ok(0) => return,
        Ok(_) if !ask[0].revents().contains(PollFlags::OUT) => return,
        // A filter may forbid the question; the answer is worth a try.
        _ => {}
    }
    // `sigprocmask` and not `pthread_sigmask`, which is the same call on Linux, and moved to
    // another version of the C library.
    // SAFETY: sets of our own, filled before they are read; the calls change this thread's mask and
    // put it back. A signal that the write has raised is taken back before the mask is: one that
    // was pending before stays.
    unsafe {
        let (mut both, mut pipe, mut before, mut pending): (
            libc::sigset_t,
            libc::sigset_t,
            libc::sigset_t,
            libc::sigset_t,
        ) = std::mem::zeroed();
        libc::sigemptyset(&raw mut both);
        libc::sigaddset(&raw mut both, libc::SIGPIPE);
        // A job in the background may write to its terminal all the same.
        libc::sigaddset(&raw mut both, libc::SIGTTOU);
        libc::sigemptyset(&raw mut pipe);
        libc::sigaddset(&raw mut pipe, libc::SIGPIPE);
        if libc::sigprocmask(libc::SIG_BLOCK, &raw const both, &raw mut before) != 0 {
            return;
        }
        libc::sigpending(&raw mut pending);
        let was_pending = libc::sigismember(&raw const pending, libc::SIGPIPE) == 1;
        if rustix::io::write(to, line) == Err(rustix::io::Errno::PIPE) && !was_pending {
            let none = libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            libc::sigtimedwait(&raw const pipe, std::ptr::null_mut(), &raw const none);
        }
        libc::sigprocmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    }
}
