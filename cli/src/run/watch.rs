//! Reports, at the end of a job with limits, which of its processes were outside of them, and what
//! its memory limit refused.
//!
//! `sublet run` becomes the command, so it cannot say anything afterwards; and a parent that stayed
//! in its place would have to pass on its signals, its stops, its exit code and its terminal, and
//! would be what a `kill -9` hits. So a process is left behind that is nobody's: no child of the
//! job, in a session of its own, with nothing of the job's open but stderr. It sleeps until the
//! job's process has ended, asks the arbiter once, says what there is to say, and ends.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use control::paths::RuntimeDir;
use control::{Client, JobStatus, short_bytes};
use nix::errno::Errno;
use nix::libc;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork, setsid};

use crate::{connect, ps};

/// TIMEOUT: a reader that waits for the end of the job's stderr waits this long, too.
const ANSWER: Duration = Duration::from_secs(1);
/// TIMEOUT: by when an arbiter has seen the end of a process; the kernel reports it.
const SEEN: Duration = Duration::from_secs(2);
/// Processes reported, a line each.
const MOST: usize = 4;

/// Leaves a process behind that tells how this one's job ended. Where it cannot be made the job's
/// record is in `sublet ps` and in the journal all the same.
pub fn stay_behind(dir: &RuntimeDir, job: u64, strict: bool) {
    let Ok(process) = pidfd_of_ours() else {
        return;
    };
    let pid = std::process::id();
    // SAFETY: this process has one thread; and the C library keeps its allocator usable in a forked
    // child.
    match unsafe { fork() } {
        Ok(ForkResult::Parent { child }) => {
            let _ = waitpid(child, None);
        }
        Ok(ForkResult::Child) => {
            let own_session = setsid().is_ok();
            // SAFETY: as above.
            let between = unsafe { fork() };
            if own_session
                && matches!(between, Ok(ForkResult::Child))
                && let Some(process) = close_others(process)
            {
                tell(&process, pid, dir, job, strict);
            }
            // SAFETY: ends this process, and runs nothing of what its parent has registered for an
            // orderly end.
            unsafe { libc::_exit(0) }
        }
        Err(_) => {}
    }
}

fn pidfd_of_ours() -> io::Result<OwnedFd> {
    // SAFETY: a system call with two numbers; it returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
    // CAST: descriptors are small numbers.
    match fd as i32 {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: new, and nobody else's.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

/// Closes everything but stderr and `process`: a pipe or a lock of the caller's must not wait for
/// us.
fn close_others(process: OwnedFd) -> Option<OwnedFd> {
    let nothing = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .ok()?;
    // SAFETY: plain descriptor calls; what is closed here belongs to values of the parent that this
    // process never uses again, and it ends without running their destructors. Descriptor 3 is made
    // from `process`, which is forgotten.
    let kept = unsafe {
        libc::dup2(nothing.as_raw_fd(), 0);
        libc::dup2(nothing.as_raw_fd(), 1);
        if process.as_raw_fd() != 3 && libc::dup2(process.as_raw_fd(), 3) != 3 {
            return None;
        }
        libc::syscall(libc::SYS_close_range, 4, u32::MAX, 0);
        libc::prctl(libc::PR_SET_NAME, c"sublet-watch".as_ptr());
        OwnedFd::from_raw_fd(3)
    };
    std::mem::forget((process, nothing));
    let _ = std::env::set_current_dir("/");
    Some(kept)
}

fn tell(process: &OwnedFd, pid: u32, dir: &RuntimeDir, job: u64, strict: bool) {
    let mut ended = libc::pollfd {
        fd: process.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // No deadline: the job takes as long as it takes, and this ends with it.
    // SAFETY: one entry, which outlives the call.
    while unsafe { libc::poll(&raw mut ended, 1, -1) } < 0 && Errno::last() == Errno::EINTR {}
    let Some(job) = last_of(pid, dir, job) else {
        return;
    };
    let mut text = refusals_line(&job).unwrap_or_default();
    for process in job.escaped.iter().take(MOST) {
        text += "sublet: warning:";
        text += ps::escaped_line(&job, process).trim_end();
        text += if strict {
            "; the job was ended for it (--strict)\n"
        } else {
            "\n"
        };
    }
    let more = job
        .escaped_count
        .saturating_sub(job.escaped.len().min(MOST) as u64);
    if more > 0 {
        text += &format!(
            "sublet: warning: {more} more processes of job `{}` did\n",
            job.name
        );
    }
    let _ = io::stderr().write_all(text.as_bytes());
}

/// The job, once the arbiter has seen that process end and read what it had to say, or after
/// [`SEEN`].
fn last_of(pid: u32, dir: &RuntimeDir, job: u64) -> Option<JobStatus> {
    let begun = Instant::now();
    loop {
        let status = connect::ask(|| connect::within(dir, ANSWER), Client::status).ok()?;
        let job = status.jobs.into_iter().find(|one| one.id == job)?;
        if job.processes.iter().all(|process| process.pid != pid) || begun.elapsed() > SEEN {
            return Some(job);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// What a program that ended for want of memory may not have said; `None`: nothing was refused.
fn refusals_line(job: &JobStatus) -> Option<String> {
    let times = match job.oom_count {
        0 => return None,
        1 => "once".to_owned(),
        count => format!("{count} times"),
    };
    Some(format!(
        "sublet: job `{0}` was refused memory {times} by its limit of {1}; the largest request was {2} (see `sublet events --job {0}`)\n",
        job.name,
        short_bytes(job.oom_limit_bytes),
        short_bytes(job.oom_largest_bytes),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_was_refused_memory_has_one_line_with_what_to_do_next() {
        let mut job = JobStatus {
            name: "train".into(),
            ..JobStatus::default()
        };
        assert_eq!(refusals_line(&job), None);
        job.oom_count = 1;
        job.oom_largest_bytes = 3 << 30;
        job.oom_limit_bytes = 8 << 30;
        assert_eq!(
            refusals_line(&job).unwrap(),
            "sublet: job `train` was refused memory once by its limit of 8GiB; the largest request was 3GiB (see `sublet events --job train`)\n"
        );
        job.oom_count = 12;
        assert!(refusals_line(&job).unwrap().contains(" 12 times "));
    }
}
