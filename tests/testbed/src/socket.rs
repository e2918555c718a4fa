//! Sockets of processes that are no more.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Leaves a Unix socket at `path` to which nobody listens, as a killed process leaves it behind.
///
/// It never listens: of a listener that is dropped, a program that another test of this process
/// starts at that moment has a copy until its `exec`, and the socket answers as long.
///
/// # Panics
///
/// If there is something at `path`, or its directory is not there, or it is longer than a socket's
/// name can be.
pub fn dead_socket(path: &Path) {
    // SAFETY: a `sockaddr_un` of zeros is an address without a name.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let name = path.as_os_str().as_bytes();
    assert!(name.len() < address.sun_path.len(), "{}", path.display());
    for (to, from) in address.sun_path.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the descriptor was just made, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let bytes = mem::size_of_val(&address) as libc::socklen_t;
    // SAFETY: the address is alive and as long as is said.
    let done = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), bytes) };
    assert_eq!(
        done,
        0,
        "{}: {}",
        path.display(),
        io::Error::last_os_error()
    );
}
