//! Host copies of chunks.
//!
//! A host copy is anonymous memory of ours that the driver is asked to pin, and not memory from the
//! driver: the driver's goes with the context that asked for it, bytes and all. One that cannot be
//! pinned still holds its bytes; the copy is slower then.
//!
//! Taken before anything moves, perhaps long before ([`super::ahead`]), and kept for the next time
//! within the host budget.

use std::ffi::c_void;

use super::host::{self, Short};
use super::tuning;
use crate::driver::real;
use crate::gate::capture;

/// A hash of each range of a chunk, in order.
pub(super) type Digest = Vec<[u64; 2]>;

/// Bytes of the host for one chunk.
#[derive(Debug)]
pub(super) struct HostCopy {
    at: usize,
    bytes: u64,
    /// Its pages are there.
    there: bool,
    pinned: bool,
    /// What it holds, by hash; `None`: it has not been copied to, or nobody knows.
    pub(super) digest: Option<Digest>,
}

impl HostCopy {
    /// Address space for `bytes`; its pages come with [`Host copy::take_pages`].
    pub(super) fn take(bytes: u64) -> Option<Self> {
        // SAFETY: a fresh anonymous mapping.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return None;
        }
        // A forked child has no use for it, and a core dump should not be made longer by it. Large
        // pages are pinned faster.
        for advice in [
            libc::MADV_DONTFORK,
            libc::MADV_DONTDUMP,
            libc::MADV_HUGEPAGE,
        ] {
            // SAFETY: our own mapping. Advice that the kernel does not take changes nothing.
            unsafe { libc::madvise(at, bytes as usize, advice) };
        }
        Some(Self {
            at: at as usize,
            bytes,
            there: false,
            pinned: false,
            digest: None,
        })
    }

    /// Its first byte.
    pub(super) fn pointer(&self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.at)
    }

    /// Takes its pages from the host: before the driver is asked to pin them, which would be killed
    /// for want of them instead of refused.
    pub(super) fn take_pages(&mut self) -> Result<(), Short> {
        if !self.there {
            host::take_pages(self.at, self.bytes)?;
            self.there = true;
        }
        Ok(())
    }

    /// Asks the driver to pin it, for all contexts; with the copying context current.
    pub(super) fn pin(&mut self) {
        const PORTABLE: u32 = 1;
        if self.pinned || !tuning::pins() {
            return;
        }
        // SAFETY: a mapping of our own of that many bytes, which is unpinned before it goes.
        let result =
            unsafe { real::cuMemHostRegister_v2(self.pointer(), self.bytes as usize, PORTABLE) };
        self.pinned = result.is_ok();
    }

    /// Whether the driver has pinned it.
    pub(super) fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// Its context has gone, and its registration with it.
    pub(super) fn unpinned(&mut self) {
        self.pinned = false;
    }
}

impl Drop for HostCopy {
    fn drop(&mut self) {
        if self.pinned {
            // Whichever thread this is: somebody else's capture may be under way.
            let _ = capture::relaxed(|| {
                // SAFETY: registered by `pin`; the driver refuses what it does not know any more.
                unsafe { real::cuMemHostUnregister(self.pointer()) }
            });
        }
        // SAFETY: the mapping made in `take`, whose address nobody else has.
        unsafe { libc::munmap(self.pointer(), self.bytes as usize) };
    }
}
