//! The memory through which the job's processes hand over what they call.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use nix::libc;
use shim_ffi::recording::Ring;

/// A ring of this process's own. It has no name in any folder, so nothing of it is left behind.
pub struct OwnRing {
    memory: OwnedFd,
    at: *mut Ring,
}

impl OwnRing {
    /// # Errors
    /// No memory for it.
    pub fn new() -> io::Result<Self> {
        let check = |answer: i32| match answer {
            -1 => Err(io::Error::last_os_error()),
            answer => Ok(answer),
        };
        // SAFETY: a NUL-terminated name; a new descriptor, nobody else's.
        let memory = unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
            OwnedFd::from_raw_fd(check(libc::memfd_create(
                c"sublet-recording".as_ptr(),
                flags,
            ))?)
        };
        let fd = memory.as_raw_fd();
        // CAST: some tens of MiB.
        let bytes = Ring::BYTES as libc::off_t;
        // SAFETY: calls with a descriptor and numbers; the mapping is a new one of the whole file.
        // All of it is there before anybody writes to it, and stays: a job that writes to memory
        // that cannot be had would be killed.
        let at = unsafe {
            match libc::posix_fallocate(fd, 0, bytes) {
                0 => {}
                error => return Err(io::Error::from_raw_os_error(error)),
            }
            let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
            check(libc::fcntl(fd, libc::F_ADD_SEALS, seals))?;
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(
                std::ptr::null_mut(),
                Ring::BYTES,
                protection,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = at.cast::<Ring>();
        // SAFETY: zeroed pages, and nobody else has them yet.
        unsafe { Ring::begin(at) };
        Ok(Self { memory, at })
    }

    pub fn ring(&self) -> &Ring {
        // SAFETY: begun above, and mapped as long as this lives.
        unsafe { &*self.at }
    }

    /// By what path other processes of this user open it, as long as this process lives.
    pub fn path(&self) -> PathBuf {
        let fd = self.memory.as_raw_fd();
        PathBuf::from(format!("/proc/{}/fd/{fd}", std::process::id()))
    }
}

impl Drop for OwnRing {
    fn drop(&mut self) {
        // SAFETY: mapped above; nobody has a reference to it any more.
        unsafe { libc::munmap(self.at.cast(), Ring::BYTES) };
    }
}
