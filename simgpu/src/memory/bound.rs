//! What the simulated devices may take of the host's memory.
//!
//! Device memory takes pages of the host when it is written to. A device_state of 141 GB that a
//! program really fills takes 141 GB, and before the host has given the last of them its kernel
//! kills somebody. So writes are let through in allowances: a process may write so many bytes
//! before it looks again at what the host, and its control groups, have left. Where that is too
//! little, a write to pages that are not there yet is `CUDA_ERROR_OUT_OF_MEMORY`; what is there
//! already can be written, and what was never written costs nothing.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use host_memory::{Bound as By, Space, Standing};
use shim_ffi::CUresult;

use super::{Memory, Result};

/// Bytes between two looks, at most; and this part of what is left, since other processes look as
/// well.
const ALLOWANCE: u64 = 256 << 20;
const PART: u64 = 8;

/// The bound of this process.
pub(super) struct Bound {
    standing: Standing,
    /// What is left to the host; `None`: as much as `host-memory` leaves.
    headroom: Option<u64>,
    allowance: AtomicU64,
    reported: AtomicBool,
}

impl Bound {
    pub(super) fn new(headroom: Option<u64>) -> Self {
        Self {
            standing: Standing::of_this_process(),
            headroom,
            allowance: AtomicU64::new(0),
            reported: AtomicBool::new(false),
        }
    }

    fn free(&self, space: &Space) -> u64 {
        self.headroom.map_or(space.free_bytes, |headroom| {
            space.available_bytes.saturating_sub(headroom)
        })
    }

    fn spend(&self, bytes: u64) -> bool {
        let left = self
            .allowance
            .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes));
        left.is_ok()
    }

    /// Whether `bytes` that may need pages can be written; else what is left.
    fn allow(&self, bytes: u64) -> std::result::Result<(), Space> {
        if self.spend(bytes) {
            return Ok(());
        }
        let space = self.standing.space();
        let free = self.free(&space);
        if bytes > free {
            return Err(space);
        }
        self.allowance
            .store(((free - bytes) / PART).min(ALLOWANCE), Relaxed);
        Ok(())
    }

    /// One line, once in a process.
    fn tell(&self, bytes: u64, space: &Space) {
        if self.reported.swap(true, Relaxed) {
            return;
        }
        let mib = |bytes: u64| bytes >> 20;
        let whose = match space.bound {
            By::Group { limit_bytes, .. } => format!(
                "the control group's limit of {} MiB leaves",
                mib(limit_bytes)
            ),
            By::Host { .. } | By::Unknown => "the host has".to_owned(),
        };
        eprintln!(
            "sublet simgpu: CUDA_ERROR_OUT_OF_MEMORY: {} MiB of device memory need pages of the host and {whose} {} MiB, of which some stay free \
             (write less of the device, or lower SUBLET_SIM_HEADROOM)",
            mib(bytes).max(1),
            mib(space.available_bytes)
        );
    }
}

impl Memory {
    /// Before `bytes` at a device-accessible address are written to.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` where the host has no pages for them.
    pub fn may_fill(&self, address: u64, bytes: u64) -> Result<()> {
        let Err(space) = self.bound.allow(bytes) else {
            return Ok(());
        };
        let missing = self.unwritten(address, bytes, false);
        if missing <= self.bound.free(&space) {
            return Ok(());
        }
        self.bound.tell(missing, &space);
        Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// The same before they are copied from elsewhere: what was never written there takes no pages
    /// here. `private`: what is no device memory is private memory of the process.
    ///
    /// # Errors
    /// As [`Memory::may_fill`].
    pub fn may_copy(&self, from: u64, to: u64, bytes: u64, private: bool) -> Result<()> {
        let Err(space) = self.bound.allow(bytes) else {
            return Ok(());
        };
        let written = bytes.saturating_sub(self.unwritten(from, bytes, private));
        let missing = self.unwritten(to, bytes, false).min(written);
        if missing <= self.bound.free(&space) {
            return Ok(());
        }
        self.bound.tell(missing, &space);
        Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// Bytes of a range that have no pages yet.
    fn unwritten(&self, address: u64, bytes: u64, private: bool) -> u64 {
        let end = address.saturating_add(bytes);
        let mut missing = 0;
        let mut at = address;
        // By regions: a range may go through mappings of several handles.
        while at < end {
            let upto = self
                .region(at)
                .map_or(end, |region| (region.start + region.bytes).min(end));
            let backing = self.backing(at, upto - at, private);
            missing += self
                .extents(&backing, at, upto - at)
                .iter()
                .filter(|(_, _, written)| !written)
                .map(|(_, length, _)| length)
                .sum::<u64>();
            at = upto.max(at + 1);
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_go_by_allowances_until_the_headroom_is_reached() {
        let none = Bound::new(Some(u64::MAX));
        assert!(none.allow(1).is_err());
        let all = Bound::new(Some(0));
        assert!(all.allow(4096).is_ok());
        let left = all.allowance.load(Relaxed);
        assert!(left > 0 && left <= ALLOWANCE, "{left}");
        assert!(all.spend(left) && !all.spend(1));
        assert!(all.allow(u64::MAX).is_err(), "more than any host has");
    }
}
