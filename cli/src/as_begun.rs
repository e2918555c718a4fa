//! What a command inherits.
//!
//! A command that `sublet` starts must find signals as they were when `sublet` itself began:
//! `sublet` blocks some to read them from a descriptor, and the Rust runtime ignores SIGPIPE. A
//! constructor reads the mask and the dispositions before the runtime and before any of our code
//! changes them. Descriptors need nothing: all of ours close on exec. Limits and the process group
//! are never changed.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::OnceLock;

use nix::libc;
use nix::sys::signal::Signal;

/// Signals whose disposition some command of `sublet` changes.
const CHANGED: [libc::c_int; 3] = [libc::SIGPIPE, libc::SIGCHLD, libc::SIGXFSZ];

#[derive(Clone, Copy)]
struct Signals {
    mask: libc::sigset_t,
    /// Which of [`CHANGED`] were ignored. Handlers do not outlive an exec, so others have the
    /// default.
    ignored: [bool; CHANGED.len()],
}

static BEGUN: OnceLock<Signals> = OnceLock::new();

#[ctor::ctor]
fn see_signals() {
    // SAFETY: these calls only read, into locals that all-zero bytes are valid for.
    let signals = unsafe {
        let mut signals = Signals {
            mask: std::mem::zeroed(),
            ignored: [false; CHANGED.len()],
        };
        libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), &raw mut signals.mask);
        for (signal, ignored) in CHANGED.into_iter().zip(&mut signals.ignored) {
            let mut action: libc::sigaction = std::mem::zeroed();
            *ignored = libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0
                && action.sa_sigaction == libc::SIG_IGN;
        }
        signals
    };
    let _ = BEGUN.set(signals);
    if was_ignored(Signal::SIGCHLD) {
        // Our parent does not wait for its children. We wait for ours, and the kernel keeps no
        // status of a child whose parent ignores this signal.
        // SAFETY: the default disposition runs no code of ours.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    }
}

/// Whether this process began with a signal ignored; false of one that nobody here changes.
pub fn was_ignored(signal: Signal) -> bool {
    let at = CHANGED
        .iter()
        .position(|changed| *changed == signal as libc::c_int);
    BEGUN
        .get()
        .zip(at)
        .is_some_and(|(begun, at)| begun.ignored[at])
}

/// Has the command begin with the signals that this process began with.
pub fn give_to(command: &mut Command) {
    let Some(signals) = BEGUN.get().copied() else {
        return;
    };
    // SAFETY: runs in the child before its program, and makes async-signal-safe calls only. The
    // mask comes last: no signal that was blocked until then finds a disposition of ours.
    unsafe {
        command.pre_exec(move || {
            for (signal, ignored) in CHANGED.into_iter().zip(signals.ignored) {
                let disposition = if ignored {
                    libc::SIG_IGN
                } else {
                    libc::SIG_DFL
                };
                libc::signal(signal, disposition);
            }
            match libc::pthread_sigmask(
                libc::SIG_SETMASK,
                &raw const signals.mask,
                std::ptr::null_mut(),
            ) {
                0 => Ok(()),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        });
    }
}
