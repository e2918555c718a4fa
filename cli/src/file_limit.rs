//! Where a file may grow no more (`ulimit -f`), the kernel ends the process that writes to it, by
//! SIGXFSZ. A process that writes what others have done takes it for an error of the write instead,
//! as on a full disk; what it starts does not.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::libc;

/// What this process did about it before.
#[derive(Debug, Clone, Copy)]
pub struct FileLimit(libc::sighandler_t);

impl FileLimit {
    /// From here on a write that goes too far is an error.
    pub fn is_an_error() -> Self {
        // SAFETY: `SIG_IGN` runs no code of ours, and the signal is one that may be ignored.
        Self(unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) })
    }

    /// Has a command begin as this process did.
    pub fn not_for(self, command: &mut Command) {
        let Self(before) = self;
        // SAFETY: runs in the child before its program, and calls nothing but `signal`, which is
        // async-signal-safe. What is put back is what the kernel had this process begin with, for
        // nothing here has a handler for this signal.
        unsafe {
            command.pre_exec(move || {
                libc::signal(libc::SIGXFSZ, before);
                Ok(())
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_started_is_ended_by_the_limit_as_ever() {
        // SAFETY: no handler is set, and no other test looks at this signal.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_DFL) };
        let limit = FileLimit::is_an_error();
        let ignored = |of: Option<FileLimit>| {
            let mut command = Command::new("cat");
            command.arg("/proc/self/status");
            if let Some(limit) = of {
                limit.not_for(&mut command);
            }
            let output = command.output().expect("cat");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let line = text.lines().find_map(|line| line.strip_prefix("SigIgn:"));
            let set = u64::from_str_radix(line.expect("a set").trim(), 16).expect("a number");
            // CAST: signals are small positive numbers.
            set >> (libc::SIGXFSZ as u32 - 1) & 1 == 1
        };
        assert!(ignored(None) && !ignored(Some(limit)));
    }
}
