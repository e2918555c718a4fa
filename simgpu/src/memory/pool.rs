//! Stream-ordered memory pools (`cuMemAllocAsync` and friends).
//!
//! A pool takes memory from the device_state in multiples of 2 MiB and keeps what is freed until a
//! synchronisation finds more unused than its release threshold.

use std::sync::Arc;

use crate::lock::Mutex;
use shim_ffi::{CUmemoryPool, CUresult};

use super::ranges::Ranges;
use super::window::GRANULE;
use super::{ALIGNMENT, Kind, Memory, Region, Result};
use crate::device_state::DeviceState;
use crate::registry;

/// What a pool has to do with other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Nothing.
    None,
    /// Its memory may be opened by others.
    Exportable,
    /// It stands for another process's pool: nothing can be allocated from it.
    Received {
        /// That process.
        owner: u64,
        /// Its handle of the pool.
        pool: u64,
    },
}

/// A pool.
pub struct Pool {
    /// Handle.
    pub id: u64,
    /// Device that its memory is on.
    pub device: usize,
    /// True for the device's own pool, which is never destroyed.
    pub is_default: bool,
    /// Most bytes it may have; 0 for no limit.
    pub max_bytes: u64,
    /// What it has to do with other processes.
    pub sharing: Sharing,
    /// It is what graphs allocate from: what they have had stays until it is trimmed.
    of_graphs: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: Ranges,
    segments: Vec<(u64, u64)>,
    release_threshold: u64,
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
    /// Part of `used` that graphs gave back since the last trim.
    idle: u64,
    /// Reuse attributes, which are kept but change nothing.
    reuse: [i32; 3],
    /// Something was freed since the last trim.
    dirty: bool,
    destroyed: bool,
}

/// What a pool has and had, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolUse {
    /// Taken from the device now.
    pub reserved: u64,
    /// Most ever taken since the last reset.
    pub reserved_high: u64,
    /// Given to the program now.
    pub used: u64,
    /// Most ever given since the last reset.
    pub used_high: u64,
    /// What a synchronisation leaves in the pool.
    pub release_threshold: u64,
}

impl Pool {
    /// An empty pool.
    pub fn new(device: usize, is_default: bool, max_bytes: u64) -> Arc<Self> {
        Self::shared(device, is_default, max_bytes, Sharing::None)
    }

    /// An empty pool that has to do with other processes.
    pub fn shared(device: usize, is_default: bool, max_bytes: u64, sharing: Sharing) -> Arc<Self> {
        Self::with(device, is_default, max_bytes, sharing, false)
    }

    /// An empty pool for graphs.
    pub fn of_graphs(device: usize) -> Arc<Self> {
        Self::with(device, true, 0, Sharing::None, true)
    }

    fn with(
        device: usize,
        is_default: bool,
        max_bytes: u64,
        sharing: Sharing,
        of_graphs: bool,
    ) -> Arc<Self> {
        let state = State {
            reuse: [1; 3],
            release_threshold: if of_graphs { u64::MAX } else { 0 },
            ..State::default()
        };
        Arc::new(Self {
            id: registry::fresh(),
            device,
            is_default,
            max_bytes: max_bytes.next_multiple_of(GRANULE),
            sharing,
            of_graphs,
            state: Mutex::new(state),
        })
    }

    fn handle(&self) -> CUmemoryPool {
        CUmemoryPool(self.id as *mut _)
    }

    /// Allocates.
    ///
    /// # Errors
    /// `INVALID_VALUE` for zero bytes, `OUT_OF_MEMORY` beyond device or pool.
    pub fn alloc(
        &self,
        memory: &Memory,
        device_state: &DeviceState,
        context: u64,
        bytes: u64,
    ) -> Result<u64> {
        if bytes == 0 || matches!(self.sharing, Sharing::Received { .. }) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if bytes > device_state.profile().usable_bytes() {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let span = bytes.next_multiple_of(ALIGNMENT);
        let mut state = self.state.lock();
        let start = match state.free.take(span, ALIGNMENT) {
            Some(start) => start,
            None => {
                self.grow(
                    &mut state,
                    memory,
                    device_state,
                    span.next_multiple_of(GRANULE),
                )?;
                state
                    .free
                    .take(span, ALIGNMENT)
                    .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?
            }
        };
        let again = span.min(state.idle);
        state.idle -= again;
        state.used += span - again;
        state.used_high = state.used_high.max(state.used);
        drop(state);
        let kind = Kind::Pool(self.handle());
        let id = memory.id();
        let region = Region {
            start,
            bytes,
            span,
            device: self.device,
            context,
            id,
            kind,
            sync_memops: false,
        };
        memory.inner.write().regions.insert(start, region);
        Ok(start)
    }

    fn grow(
        &self,
        state: &mut State,
        memory: &Memory,
        device_state: &DeviceState,
        bytes: u64,
    ) -> Result<()> {
        if self.max_bytes > 0 && state.reserved + bytes > self.max_bytes {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        if !device_state.reserve(self.device, bytes) {
            // What lies unused in this pool may be in the way.
            Self::release_unused(state, memory, device_state, self.device, 0);
            if !device_state.reserve(self.device, bytes) {
                return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            }
        }
        let Some(start) = memory.inner.write().space.take(bytes, GRANULE) else {
            device_state.release(self.device, bytes);
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        };
        state.free.insert(start, bytes);
        state.segments.push((start, bytes));
        state.reserved += bytes;
        state.reserved_high = state.reserved_high.max(state.reserved);
        Ok(())
    }

    /// Takes a block back whose region has been removed. True when that was the last of a destroyed
    /// pool.
    pub fn give_back(&self, memory: &Memory, device_state: &DeviceState, region: &Region) -> bool {
        let mut state = self.state.lock();
        state.free.insert(region.start, region.span);
        if self.of_graphs {
            state.idle += region.span;
        } else {
            state.used = state.used.saturating_sub(region.span);
        }
        state.dirty = true;
        if state.destroyed {
            Self::release_unused(&mut state, memory, device_state, self.device, 0);
        }
        state.destroyed && state.used == 0
    }

    fn release_unused(
        state: &mut State,
        memory: &Memory,
        device_state: &DeviceState,
        device: usize,
        keep: u64,
    ) {
        if keep == 0 {
            state.used = state.used.saturating_sub(state.idle);
            state.idle = 0;
        }
        let mut kept = Vec::new();
        for (start, bytes) in std::mem::take(&mut state.segments) {
            if state.reserved > keep && state.free.is_free(start, bytes) {
                state.free.take_at(start, bytes);
                state.reserved -= bytes;
                memory.window().punch(start, bytes);
                memory.inner.write().space.insert(start, bytes);
                device_state.release(device, bytes);
            } else {
                kept.push((start, bytes));
            }
        }
        state.segments = kept;
        state.dirty = false;
    }

    /// Releases unused memory until at most `keep` bytes are reserved.
    pub fn trim(&self, memory: &Memory, device_state: &DeviceState, keep: u64) {
        Self::release_unused(
            &mut self.state.lock(),
            memory,
            device_state,
            self.device,
            keep,
        );
    }

    /// What a synchronisation does.
    pub fn synchronised(&self, memory: &Memory, device_state: &DeviceState) {
        let mut state = self.state.lock();
        if state.dirty {
            let keep = state.release_threshold;
            Self::release_unused(&mut state, memory, device_state, self.device, keep);
        }
    }

    /// Releases everything now, and what is in use when it is freed. True when nothing is in use.
    pub fn destroy(&self, memory: &Memory, device_state: &DeviceState) -> bool {
        let mut state = self.state.lock();
        state.destroyed = true;
        Self::release_unused(&mut state, memory, device_state, self.device, 0);
        state.used == 0
    }

    /// Figures.
    pub fn usage(&self) -> PoolUse {
        let state = self.state.lock();
        PoolUse {
            reserved: state.reserved,
            reserved_high: state.reserved_high,
            used: state.used,
            used_high: state.used_high,
            release_threshold: state.release_threshold,
        }
    }

    /// Sets the release threshold, in bytes.
    pub fn set_release_threshold(&self, bytes: u64) {
        self.state.lock().release_threshold = bytes;
    }

    /// Lets the high-water marks start from now.
    pub fn reset_high(&self, reserved: bool, used: bool) {
        let mut state = self.state.lock();
        if reserved {
            state.reserved_high = state.reserved;
        }
        if used {
            state.used_high = state.used;
        }
    }

    /// One of the three reuse attributes.
    pub fn reuse(&self, which: usize) -> i32 {
        self.state.lock().reuse[which]
    }

    /// Sets one of the three reuse attributes.
    pub fn set_reuse(&self, which: usize, value: i32) {
        self.state.lock().reuse[which] = value;
    }
}
