//! Becoming the command.
//!
//! The standard library's `exec` empties the signal mask and resets SIGPIPE; a command started
//! through `sublet run` must find both as its caller left them. So this calls execve(2) itself, and
//! gives SIGPIPE and SIGCHLD back the dispositions that this process began with
//! ([`crate::as_begun`]).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::anyhow;
use nix::errno::Errno;
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::unistd::execve;

use crate::as_begun;
use crate::exit::{Failure, NOT_EXECUTABLE, NOT_FOUND};

/// Replaces this process; returns only with the reason why not.
pub fn replace_this_process(
    program: &Path,
    words: &[OsString],
    environment: &BTreeMap<OsString, OsString>,
) -> Failure {
    let Err(failure) = try_replace(program, words, environment);
    failure
}

fn try_replace(
    program: &Path,
    words: &[OsString],
    environment: &BTreeMap<OsString, OsString>,
) -> Result<Infallible, Failure> {
    let path = c_string(program.as_os_str())?;
    let words = words
        .iter()
        .map(|word| c_string(word))
        .collect::<Result<Vec<_>, _>>()?;
    let environment = environment
        .iter()
        .map(|(name, value)| {
            let mut var = name.clone();
            var.push("=");
            var.push(value);
            c_string(&var)
        })
        .collect::<Result<Vec<_>, _>>()?;

    if !as_begun::was_ignored(Signal::SIGPIPE) {
        // SAFETY: SIG_DFL installs no code of ours.
        unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }
            .map_err(|errno| anyhow!("cannot reset SIGPIPE: {errno}"))?;
    }
    if as_begun::was_ignored(Signal::SIGCHLD) {
        // SAFETY: SIG_IGN installs no code of ours.
        unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn) }
            .map_err(|errno| anyhow!("cannot ignore SIGCHLD: {errno}"))?;
    }
    let Err(errno) = execve(&path, &words, &environment);
    let errno = if errno == Errno::ENOEXEC {
        // A script without a first line, which execvp(3) gives to the shell.
        let mut shell = vec![c_string(OsStr::new("/bin/sh"))?, path];
        shell.extend_from_slice(&words[1..]);
        let Err(errno) = execve(&shell[0], &shell, &environment);
        errno
    } else {
        errno
    };
    let code = if errno == Errno::ENOENT {
        NOT_FOUND
    } else {
        NOT_EXECUTABLE
    };
    let reason = anyhow!(
        "`{}` cannot be executed: {}",
        program.display(),
        errno.desc()
    );
    Err(Failure::with_code(code, reason))
}

fn c_string(text: &OsStr) -> Result<CString, Failure> {
    CString::new(text.as_bytes())
        .map_err(|_| anyhow!("`{}` has a zero byte in it", text.display()).into())
}
