//! What wakes the loop for something that another thread has done: a descriptor that is readable
//! until the loop has silenced it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

/// One bell; a clone rings the same one.
#[derive(Clone, Debug)]
pub struct Bell(Arc<OwnedFd>);

impl Bell {
    /// A silent one.
    ///
    /// # Errors
    /// There is no descriptor for it.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(Arc::new(eventfd(0, flags)?)))
    }

    /// Makes the descriptor readable. Never waits.
    pub fn ring(&self) {
        // A full counter means that it is ringing already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// What it rang for is looked at after this.
    pub fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
