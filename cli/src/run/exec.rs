//! Becoming the command.
//!
//! The standard library's `exec` empties the signal mask and resets SIGPIPE; a command started
//! through `sublet run` must find both as its caller left them. So this calls execve(2) itself, and
//! gives SIGPIPE, which the Rust runtime ignores before `main`, and SIGCHLD the dispositions back
//! that a constructor has seen before the runtime.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::anyhow;
use nix::errno::Errno;
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::unistd::execve;

use crate::exit::{Failure, NOT_EXECUTABLE, NOT_FOUND};

static SIGPIPE_WAS_IGNORED: AtomicBool = AtomicBool::new(false);
static SIGCHLD_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

#[ctor::ctor]
fn see_what_is_ignored() {
    SIGPIPE_WAS_IGNORED.store(is_ignored(Signal::SIGPIPE), Ordering::Relaxed);
    let ignored = is_ignored(Signal::SIGCHLD);
    SIGCHLD_WAS_IGNORED.store(ignored, Ordering::Relaxed);
    if ignored {
        // The process that has started us does not wait for its children. We wait for ours, and of
        // a child of a process that ignores this the kernel keeps no status.
        // SAFETY: SIG_DFL installs no code of ours.
        let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) };
    }
}

fn is_ignored(signal: Signal) -> bool {
    let mut action = std::mem::MaybeUninit::<nix::libc::sigaction>::uninit();
    // SAFETY: with no new action this only writes the present one to `action`, which is read after
    // success only.
    unsafe {
        nix::libc::sigaction(signal as i32, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init_ref().sa_sigaction == nix::libc::SIG_IGN
    }
}

/// Has a command ignore SIGCHLD again where our caller did.
pub fn with_sigchld_as_it_came(command: &mut std::process::Command) {
    use std::os::unix::process::CommandExt;
    if SIGCHLD_WAS_IGNORED.load(Ordering::Relaxed) {
        // SAFETY: the call is async-signal-safe, and SIG_IGN installs no code of ours.
        unsafe {
            command.pre_exec(|| {
                signal(Signal::SIGCHLD, SigHandler::SigIgn)?;
                Ok(())
            });
        }
    }
}

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

    if !SIGPIPE_WAS_IGNORED.load(Ordering::Relaxed) {
        // SAFETY: SIG_DFL installs no code of ours.
        unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }
            .map_err(|errno| anyhow!("cannot reset SIGPIPE: {errno}"))?;
    }
    if SIGCHLD_WAS_IGNORED.load(Ordering::Relaxed) {
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
