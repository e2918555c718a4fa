//! What the simulated devices may take of the host's memory.
//!
//! Device memory takes pages of the host when it is written to. A device_state of 141 GB that a
//! program really fills takes 141 GB, and before the host has given the last of them its kernel
//! kills somebody. So a writer takes a promise first, of whole pages, and keeps it until they
//! are written. Promises of all processes together are no more than what the host, and the control
//! groups of the process, have left. Where that is too little, a write to pages that are not there
//! yet is `CUDA_ERROR_OUT_OF_MEMORY`; what is there already can be written, and what was never
//! written costs nothing. So that small writes need no look at the host each, a process has some
//! bytes promised ahead.
//!
//! What a program writes to by itself cannot be refused: page-locked, managed and host-located
//! memory is ordinary memory to it. There is a bound to how much of it a process is given: what the
//! host has in all.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use host_memory::{Bound as By, Space, Standing};
use shim_ffi::CUresult;

use super::{Kind, Memory, PAGE, Result};
use crate::device_state::DeviceState;

/// Bytes promised ahead, at most; and this part of what is left, since other processes want some as
/// well.
const AHEAD: u64 = 256 << 20;
const PART: u64 = 8;

/// The bound of this process.
pub(super) struct Bound {
    device_state: Arc<DeviceState>,
    standing: Standing,
    /// What is left to the host; `None`: as much as `host-memory` leaves.
    headroom: Option<u64>,
    /// What the host could give at most, as last seen.
    whole_bytes: AtomicU64,
    /// Promised and not asked for yet.
    ahead: AtomicU64,
    reported: AtomicBool,
}

/// Pages of the host that may be written: as long as it is there, nobody else is promised them.
#[must_use]
pub struct Promise<'a> {
    bound: &'a Bound,
    bytes: u64,
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        self.bound.device_state.redeem(self.bytes);
    }
}

impl Bound {
    pub(super) fn new(device_state: Arc<DeviceState>, headroom: Option<u64>) -> Self {
        let standing = Standing::of_this_process();
        Self {
            device_state,
            whole_bytes: AtomicU64::new(standing.whole().available_bytes),
            standing,
            headroom,
            ahead: AtomicU64::new(0),
            reported: AtomicBool::new(false),
        }
    }

    fn free(&self, space: &Space) -> u64 {
        self.headroom.map_or(space.free_bytes, |headroom| {
            space.available_bytes.saturating_sub(headroom)
        })
    }

    fn promise(&self, bytes: u64) -> Promise<'_> {
        Promise { bound: self, bytes }
    }

    /// A promise of so many bytes; else what is left.
    fn take(&self, bytes: u64) -> std::result::Result<Promise<'_>, Space> {
        let ahead = self
            .ahead
            .fetch_update(Relaxed, Relaxed, |ahead| ahead.checked_sub(bytes));
        if ahead.is_ok() {
            return Ok(self.promise(bytes));
        }
        self.device_state.promise(|promised| {
            let space = self.standing.space();
            let Some(left) = self
                .free(&space)
                .saturating_sub(promised)
                .checked_sub(bytes)
            else {
                return (0, Err(space));
            };
            let space_ahead = AHEAD.saturating_sub(self.ahead.load(Relaxed));
            let more = (left / PART).min(space_ahead);
            self.ahead.fetch_add(more, Relaxed);
            (bytes + more, Ok(self.promise(bytes)))
        })
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
             and some may be promised to other processes (write less of the device, or lower SUBLET_SIM_HEADROOM)",
            mib(bytes).max(1),
            mib(space.available_bytes)
        );
    }
}

/// A range rounded out to pages: to write a byte takes the page that it is on.
fn pages(address: u64, bytes: u64) -> (u64, u64) {
    let start = address / PAGE * PAGE;
    let end = address.saturating_add(bytes).div_ceil(PAGE);
    (start, end.saturating_mul(PAGE).saturating_sub(start))
}

/// Rows that leave no page between them out are one.
fn as_one_row(pitch: u64, bytes: u64, rows: u64) -> Option<u64> {
    (rows <= 1 || pitch <= PAGE).then(|| pitch * rows.saturating_sub(1) + bytes)
}

/// Bytes of pages that rows apart from each other lie on at most.
fn at_most(bytes: u64, rows: u64) -> u64 {
    rows.saturating_mul(bytes.next_multiple_of(PAGE) + PAGE)
}

impl Memory {
    /// Before `bytes` at a device-accessible address are written to. They are promised until what
    /// is returned goes.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` where the host has no pages for them.
    pub fn may_fill(&self, address: u64, bytes: u64) -> Result<Promise<'_>> {
        let (address, bytes) = pages(address, bytes);
        self.bound
            .take(bytes)
            .or_else(|_| self.take_missing(self.unwritten(address, bytes, false)))
    }

    /// The same before they are copied from elsewhere: what was never written there takes no pages
    /// here. `private`: what is no device memory is private memory of the process.
    ///
    /// # Errors
    /// As [`Memory::may_fill`].
    pub fn may_copy(&self, from: u64, to: u64, bytes: u64, private: bool) -> Result<Promise<'_>> {
        let (to, of_pages) = pages(to, bytes);
        self.bound.take(of_pages).or_else(|_| {
            // Pages of the source, and one more where they lie otherwise in the target.
            let written = bytes.saturating_sub(self.unwritten(from, bytes, private)) + PAGE;
            let missing = self.unwritten(to, of_pages, private);
            self.take_missing(missing.min(written))
        })
    }

    /// [`Memory::may_fill`] for rows of `bytes` that lie `pitch` apart.
    ///
    /// # Errors
    /// As [`Memory::may_fill`].
    pub fn may_fill_rows(
        &self,
        address: u64,
        pitch: u64,
        (bytes, rows): (u64, u64),
    ) -> Result<Promise<'_>> {
        let most = as_one_row(pitch, bytes, rows).unwrap_or_else(|| at_most(bytes, rows));
        self.bound
            .take(pages(address, most).1)
            .or_else(|_| self.take_missing(self.unwritten_rows(address, pitch, (bytes, rows))))
    }

    /// [`Memory::may_copy`] for rows of `bytes` that lie a pitch apart on both sides.
    ///
    /// # Errors
    /// As [`Memory::may_fill`].
    pub fn may_copy_rows(
        &self,
        (from, from_pitch): (u64, u64),
        (to, to_pitch): (u64, u64),
        (bytes, rows): (u64, u64),
        private: bool,
    ) -> Result<Promise<'_>> {
        if rows <= 1 {
            return self.may_copy(from, to, bytes, private);
        }
        // Without gaps in the source, what was never written there can be seen.
        if from_pitch == bytes && to_pitch == bytes {
            return self.may_copy(from, to, bytes.saturating_mul(rows), private);
        }
        self.may_fill_rows(to, to_pitch, (bytes, rows))
    }

    /// Bytes of pages of the rows that have none yet.
    fn unwritten_rows(&self, address: u64, pitch: u64, (bytes, rows): (u64, u64)) -> u64 {
        if let Some(whole) = as_one_row(pitch, bytes, rows) {
            let (at, bytes) = pages(address, whole);
            return self.unwritten(at, bytes, false);
        }
        let of_row = |row| {
            let (at, bytes) = pages(address + row * pitch, bytes);
            self.unwritten(at, bytes, false)
        };
        (0..rows).map(of_row).sum()
    }

    fn take_missing(&self, bytes: u64) -> Result<Promise<'_>> {
        self.bound.take(bytes).map_err(|space| {
            self.bound.tell(bytes, &space);
            CUresult::CUDA_ERROR_OUT_OF_MEMORY
        })
    }

    /// Before the program is given `bytes` more that it may write to by itself.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` where the process has as much of it as the host has in all.
    pub(super) fn may_give(&self, bytes: u64) -> Result<()> {
        let managed = |region: &super::Region| matches!(region.kind, Kind::Managed);
        let managed: u64 = self.regions(managed).iter().map(|region| region.span).sum();
        let held = managed.saturating_add(self.bound.device_state.own_host_bytes());
        let wanted = held.saturating_add(bytes);
        if wanted <= self.bound.whole_bytes.load(Relaxed) {
            return Ok(());
        }
        // A group's limit may have been raised.
        let whole = self.bound.standing.whole().available_bytes;
        self.bound.whole_bytes.store(whole, Relaxed);
        if wanted <= whole {
            return Ok(());
        }
        self.bound.tell(bytes, &self.bound.standing.space());
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
    use std::path::PathBuf;

    use super::*;
    use crate::profile::Profile;

    const MIB: u64 = 1 << 20;

    /// A host that has so much free, in a folder that goes with it.
    struct TestHost(PathBuf);

    impl TestHost {
        fn new(name: &str, free_mib: u64) -> Self {
            let at = std::env::temp_dir().join(format!("simgpu-{name}-{}", std::process::id()));
            std::fs::create_dir_all(at.join("proc")).expect("a folder");
            let text = format!(
                "MemTotal: {} kB\nMemAvailable: {} kB\n",
                16 << 20,
                free_mib << 10
            );
            std::fs::write(at.join("proc/meminfo"), text).expect("a file");
            Self(at)
        }

        /// The bound of one more process on it: each copy of the device has a slot of its own.
        fn process(&self, headroom: u64) -> Bound {
            let config = Profile::text_from_env(|_| None).expect("a profile");
            let device_state = DeviceState::open(&self.0.join("state"), &config).expect("a device");
            device_state.claim().expect("a slot");
            Bound {
                standing: Standing::under(&self.0),
                ..Bound::new(Arc::new(device_state), Some(headroom))
            }
        }
    }

    impl Drop for TestHost {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn writes_are_promised_until_the_headroom_is_reached() {
        let host = TestHost::new("headroom", 4096);
        assert!(host.process(u64::MAX).take(1).is_err());
        let bound = host.process(1024 * MIB);
        assert!(bound.take(4096).is_ok());
        let ahead = bound.ahead.load(Relaxed);
        assert!(ahead > 0 && ahead <= AHEAD, "{ahead}");
        assert!(bound.take(3073 * MIB).is_err(), "the rest stays free");
        assert!(bound.take(u64::MAX).is_err(), "more than any host has");
    }

    #[test]
    fn what_one_process_is_about_to_write_no_other_one_is_promised() {
        let host = TestHost::new("promised", 4096);
        let (one, other) = (host.process(0), host.process(0));
        let writing = one.take(3000 * MIB).expect("there is as much");
        assert!(other.take(1000 * MIB).is_err(), "one holds a part ahead");
        let small = other.take(500 * MIB);
        assert!(small.is_ok(), "what nobody is promised can be had");
        drop((writing, small));
        // Nothing was written in the end: it can be promised again.
        assert!(other.take(3000 * MIB).is_ok());
    }

    #[test]
    fn a_byte_takes_the_page_that_it_is_on() {
        assert_eq!(pages(4096, 1), (4096, 4096));
        assert_eq!(pages(4095, 2), (0, 8192));
        assert_eq!(pages(8192, 4096), (8192, 4096));
        assert_eq!(pages(1, u64::MAX).0, 0, "no overflow");
    }
}
