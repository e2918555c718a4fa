//! Where a file may grow no more (`ulimit -f`), the kernel ends the process that writes to it, by
//! SIGXFSZ. A process that writes what others have done takes it for an error of the write instead,
//! as on a full disk; what it starts does not ([`crate::as_begun`]).

use nix::libc;

/// From here on a write that goes too far is an error.
pub fn is_an_error() {
    // SAFETY: `SIG_IGN` runs no code of ours, and the signal is one that may be ignored.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}
