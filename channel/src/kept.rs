//! Descriptors that are kept open in a stranger's process.
//!
//! A program may close every descriptor that it finds and have files of its own under the same
//! numbers. So a number is proved to be ours each time before it is used or closed, by the device
//! and inode that it had when we opened it. (Kernels before 6.9 give all pidfds the same inode;
//! those are only ever asked whether they are readable.)
//!
//! Between the proof and the use another thread may still replace the number, within a microsecond.
//! What is done with these descriptors is chosen so that no byte reaches a file then: bells are
//! messages of no bytes, which are an error on files and pipes and nothing on streams; pages that
//! are handed to an arbiter are refused by it where they are none; everything else only reads.
//! Closing is the exception, and is done only where a new attachment takes an old one's place.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// One such descriptor.
#[derive(Debug)]
pub(crate) struct Kept {
    fd: ManuallyDrop<OwnedFd>,
    device: u64,
    inode: u64,
    closed: AtomicBool,
}

impl Kept {
    /// Keeps `fd`, under a high number. A program expects the lowest free numbers for its own
    /// files, and one that has closed its standard output must not write into ours.
    pub(crate) fn new(fd: OwnedFd) -> Result<Self, rustix::io::Errno> {
        /// FLOOR: above what shells and programs name themselves, below the usual limit of 1024.
        const HIGH: i32 = 900;
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, HIGH)
            .or_else(|_| rustix::io::fcntl_dupfd_cloexec(&fd, 3))
            .unwrap_or(fd);
        let file = rustix::fs::fstat(&fd)?;
        Ok(Self {
            fd: ManuallyDrop::new(fd),
            device: file.st_dev,
            inode: file.st_ino,
            closed: AtomicBool::new(false),
        })
    }

    /// The descriptor, where the number is still ours.
    pub(crate) fn get(&self) -> Option<BorrowedFd<'_>> {
        if self.closed.load(Ordering::Relaxed) {
            return None;
        }
        let file = rustix::fs::fstat(&*self.fd).ok()?;
        (file.st_dev == self.device && file.st_ino == self.inode).then(|| self.fd.as_fd())
    }

    /// Closes it, where the number is still ours.
    pub(crate) fn close(&self) {
        let is_ours = self.get().is_some();
        if !self.closed.swap(true, Ordering::Relaxed) && is_ours {
            // SAFETY: a number of our own, as has just been proved; once, and nobody is given it
            // afterwards.
            drop(unsafe { OwnedFd::from_raw_fd(self.fd.as_raw_fd()) });
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn a_number_that_became_somebody_elses_is_neither_given_out_nor_closed() {
        let (ours, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let kept = Kept::new(ours.into()).expect("kept");
        let number = kept.get().expect("ours").as_raw_fd();
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(b"theirs").expect("written");
        let mut theirs = std::mem::ManuallyDrop::new(file.try_clone().expect("a copy"));
        // SAFETY: replaces the number that `kept` has, which is what this is about; `theirs` is
        // closed by nobody.
        unsafe {
            let mut taken = ManuallyDrop::new(OwnedFd::from_raw_fd(number));
            rustix::io::dup2(&*theirs, &mut taken).expect("replaced");
        }
        assert!(kept.get().is_none());
        drop(kept);
        // SAFETY: open, as `kept` has left it alone.
        let again = unsafe { BorrowedFd::borrow_raw(number) };
        rustix::fs::fstat(again).expect("still open");
        theirs.rewind().expect("rewound");
        let mut text = String::new();
        theirs.read_to_string(&mut text).expect("read");
        assert_eq!(text, "theirs");
    }
}
