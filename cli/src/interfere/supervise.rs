//! Nothing of an experiment outlives it, however it ends.
//!
//! Three things see to that. Every process that is started here gets SIGKILL from the kernel when
//! its parent ends. All of them, with what they start in turn, have a variable of this experiment
//! in their environment, by which they are found after each run. And a process of its own, the
//! guardian, waits on a pipe that the kernel closes when the experiment's process ends, in whatever
//! way: then it finds and ends them, and removes the experiment's files.
//!
//! What a job starts with an emptied environment, or as another user, is not found.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use cluster::live::process::{Carries, EXECUTES, carries};
use nix::fcntl::OFlag;
use nix::libc;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork, pipe2, setsid};

use crate::{as_begun, file_limit};

/// Has the experiment's own word in everything that it starts.
pub const VARIABLE: &str = "SUBLET_INTERFERE";
/// TIMEOUT: a process that was killed is gone within milliseconds, unless the kernel holds it.
const GONE: Duration = Duration::from_secs(10);

/// The experiment's word and its files, and the process that clears up after it.
pub struct Guardian {
    word: String,
    dir: PathBuf,
    process: Pid,
    /// Closed by the kernel when this process ends.
    alive: Option<OwnedFd>,
}

impl Guardian {
    /// Makes the directory and the process. This process must have one thread.
    ///
    /// # Errors
    /// No directory, pipe or process to be had.
    pub fn start() -> anyhow::Result<Self> {
        let template = std::env::temp_dir().join("sublet-interfere-XXXXXX");
        let dir = nix::unistd::mkdtemp(&template)
            .with_context(|| format!("cannot make a directory in {}", template.display()))?;
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let word = format!("{}-{name}", std::process::id());
        let (ended, alive) = pipe2(OFlag::O_CLOEXEC).context("cannot make a pipe")?;
        // This process writes a store, its jobs do not.
        file_limit::is_an_error();
        // SAFETY: this process has one thread; and the C library keeps its allocator usable in a
        // forked child.
        match unsafe { fork() }.context("cannot start the guardian")? {
            ForkResult::Parent { child } => Ok(Self {
                word,
                dir,
                process: child,
                alive: Some(alive),
            }),
            ForkResult::Child => {
                drop(alive);
                if setsid().is_ok()
                    && let Some(ended) = only(ended)
                {
                    wait_for_the_end(ended);
                    sweep(&word);
                    let _ = fs::remove_dir_all(&dir);
                }
                // SAFETY: ends this process, and runs nothing of what its parent has registered for
                // an orderly end.
                unsafe { libc::_exit(0) }
            }
        }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Makes a command one of the experiment's: in a process group of its own, and ended with us.
    pub fn adopt(&self, command: &mut Command) {
        let parent = std::process::id();
        command.env(VARIABLE, &self.word).process_group(0);
        as_begun::give_to(command);
        // SAFETY: prctl, getppid and _exit are async-signal-safe, and nothing is allocated.
        unsafe {
            command.pre_exec(move || {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
                // It may have ended before that.
                if libc::getppid().cast_unsigned() != parent {
                    libc::_exit(0);
                }
                Ok(())
            });
        }
    }

    /// Ends every process that has the experiment's word in its environment.
    pub fn sweep(&self) {
        sweep(&self.word);
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        drop(self.alive.take());
        let _ = waitpid(self.process, None);
    }
}

/// Closes everything but `kept`: a terminal, a pipe or a lock of the caller's must not wait for us.
fn only(kept: OwnedFd) -> Option<File> {
    let nothing = File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .ok()?;
    // SAFETY: plain descriptor calls; what is closed here belongs to values of the parent that this
    // process never uses again, and it ends without running their destructors. Descriptor 3 is made
    // from `kept`, which is forgotten.
    let file = unsafe {
        for fd in 0..3 {
            libc::dup2(nothing.as_raw_fd(), fd);
        }
        if kept.as_raw_fd() != 3 && libc::dup2(kept.as_raw_fd(), 3) != 3 {
            return None;
        }
        libc::syscall(libc::SYS_close_range, 4, u32::MAX, 0);
        libc::prctl(libc::PR_SET_NAME, c"sublet-guardian".as_ptr());
        File::from_raw_fd(3)
    };
    std::mem::forget((kept, nothing));
    let _ = std::env::set_current_dir("/");
    Some(file)
}

/// No deadline: an experiment takes as long as it takes.
fn wait_for_the_end(mut ended: File) {
    let mut nothing = [0];
    while let Err(error) = ended.read(&mut nothing) {
        if error.kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}

/// Ends every process that has this word in its environment, until there is none.
fn sweep(word: &str) {
    let wanted = format!("{VARIABLE}={word}");
    let begun = Instant::now();
    // A process may start another before it is ended, and show what it carries a moment later.
    let mut last = begun;
    while begun.elapsed() < GONE {
        let (found, executing) = end_all(wanted.as_bytes());
        if found > 0 {
            last = Instant::now();
        } else if executing == 0 || last.elapsed() >= EXECUTES {
            return;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// How many were found, and how many are executing a program, so that it is not known yet.
fn end_all(wanted: &[u8]) -> (usize, usize) {
    let own = std::process::id();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let (mut found, mut executing) = (0, 0);
    for process in processes {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if pid == own {
            continue;
        }
        // Opened first, so that its number is not another one's by the time of the signal.
        let Some(handle) = open(pid) else { continue };
        let carries = carries(pid, wanted);
        executing += usize::from(carries == Carries::NotYet);
        if carries == Carries::Yes {
            found += 1;
            // SAFETY: a descriptor of a process, and numbers.
            unsafe {
                libc::syscall(
                    libc::SYS_pidfd_send_signal,
                    handle.as_raw_fd(),
                    libc::SIGKILL,
                    0,
                    0,
                );
            }
        }
    }
    (found, executing)
}

fn open(pid: u32) -> Option<OwnedFd> {
    // SAFETY: a system call with two numbers; it returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    // CAST: descriptors are small numbers.
    match fd as i32 {
        -1 => None,
        // SAFETY: new, and nobody else's.
        fd => Some(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Stdio;

    use super::*;

    #[test]
    fn only_processes_with_the_word_are_ended() {
        let word = format!("test-{}", std::process::id());
        let start = |word: &str| {
            let mut command = Command::new("sleep");
            command.arg("600").env(VARIABLE, word).stdin(Stdio::null());
            command.spawn().unwrap()
        };
        let (mut ours, mut other) = (start(&word), start(&format!("{word}0")));
        sweep(&word);
        let status = testbed::within::wait(&mut ours, "the process", testbed::PATIENCE);
        assert_eq!(status.signal(), Some(9));
        assert!(other.try_wait().unwrap().is_none());
        testbed::reap(&mut other);
    }
}
