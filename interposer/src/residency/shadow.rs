//! Host copies of pieces.
//!
//! A shadow is anonymous memory of ours that the driver is asked to pin, and not memory from the driver: the driver's goes with the
//! context that asked for it, bytes and all. One that cannot be pinned still holds its bytes; the copy is slower then.
//!
//! Taken before anything moves, perhaps long before ([`super::ahead`]), and kept for the next time within the host budget.

use std::ffi::c_void;

use super::tuning;
use crate::real;

/// Bytes of the host for one piece.
#[derive(Debug)]
pub(super) struct Shadow {
    at: usize,
    bytes: u64,
    pinned: bool,
    /// What it holds, by hash; `None`: it has not been copied to, or nobody knows.
    pub(super) digest: Option<super::digest::Digest>,
}

impl Shadow {
    /// Address space for `bytes`; what it takes of the host's memory it takes when it is written to.
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
        // A forked child has no use for it, and a core dump should not be made longer by it. Large pages are pinned faster.
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
            pinned: false,
            digest: None,
        })
    }

    /// Its first byte.
    pub(super) fn pointer(&self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.at)
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

impl Drop for Shadow {
    fn drop(&mut self) {
        if self.pinned {
            // SAFETY: registered by `pin`; the driver refuses what it does not know any more.
            let _ = unsafe { real::cuMemHostUnregister(self.pointer()) };
        }
        // SAFETY: the mapping made in `take`, whose address nobody else has.
        unsafe { libc::munmap(self.pointer(), self.bytes as usize) };
    }
}

/// Memory that the host could still give, in bytes, by its own account; `None`: it does not say.
pub(super) fn host_available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
