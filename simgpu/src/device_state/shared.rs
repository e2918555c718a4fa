//! Memory that processes share by exported handles. It is there until the last of them has given it
//! back or is dead, so it is no single process's: each that holds it lists it, and it counts once.
//!
//! Lists grow under the device's record lock, in which sums are taken; they shrink without it. A
//! block that nobody holds but a descriptor on its way is not counted: nobody tells the
//! device_state of those.

use std::collections::HashSet;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::host::{lock, unlock};
use super::layout::{SHARED_BLOCKS, Slot};
use super::{DeviceState, LOCK_MEMORY, Own, SLOTS};

impl Slot {
    fn listed(&self) -> impl Iterator<Item = (u64, usize, u64)> {
        let used = (self.shared_used.load(Acquire) as usize).min(SHARED_BLOCKS);
        self.shared.iter().take(used).filter_map(|block| {
            let id = block.id.load(Acquire);
            (id != 0).then(|| {
                (
                    id,
                    block.device.load(Relaxed) as usize,
                    block.bytes.load(Relaxed),
                )
            })
        })
    }

    /// The slot's new process shares nothing.
    pub(super) fn forget_shared(&self) {
        for block in &self.shared {
            block.id.store(0, Relaxed);
        }
        self.shared_used.store(0, Release);
    }

    fn list(&self, id: u64, device: usize, bytes: u64) -> bool {
        let Some(at) = self
            .shared
            .iter()
            .position(|block| block.id.load(Relaxed) == 0)
        else {
            return false;
        };
        let block = &self.shared[at];
        block.device.store(device as u64, Relaxed);
        block.bytes.store(bytes, Relaxed);
        block.id.store(id, Release);
        self.shared_used.fetch_max(at as u64 + 1, AcqRel);
        true
    }
}

impl DeviceState {
    /// Lists memory of this process as shared; its bytes are no longer its own. False where no more
    /// can be listed: then it stays the process's own.
    pub fn share_own(&self, device: usize, id: u64, bytes: u64) -> bool {
        self.locked(device, |own| {
            let listed = self.state().slots[own.slot].list(id, device, bytes);
            if listed {
                // Under the lock, so that nobody who takes memory finds it in both places.
                self.slot_device(own.slot, device)
                    .used_bytes
                    .fetch_sub(bytes, AcqRel);
            }
            listed
        })
        .unwrap_or(false)
    }

    /// Lists memory that another process shares. False where it is nobody's any more and does not
    /// fit, or no more can be listed.
    pub fn share(&self, device: usize, id: u64, bytes: u64) -> bool {
        self.locked(device, |own| {
            let known = (0..SLOTS)
                .filter(|slot| self.alive_without_own(*slot, Some(own)))
                .any(|slot| self.state().slots[slot].listed().any(|one| one.0 == id));
            let sum = self.used_with(device, Some(own));
            let sum = if known {
                sum
            } else {
                sum.saturating_add(bytes)
            };
            let fits = known || sum <= self.profile.usable_bytes();
            let listed = fits && self.state().slots[own.slot].list(id, device, bytes);
            if listed {
                self.state().devices[device]
                    .peak_bytes
                    .fetch_max(sum, Relaxed);
            }
            listed
        })
        .unwrap_or(false)
    }

    /// Takes memory off this process's list.
    pub fn unshare(&self, id: u64) {
        let own = self.own.lock();
        if let Some(own) = *own
            && let Some(block) = self.state().slots[own.slot]
                .shared
                .iter()
                .find(|block| block.id.load(Relaxed) == id)
        {
            block.id.store(0, Release);
        }
    }

    fn locked<T>(&self, device: usize, act: impl FnOnce(Own) -> T) -> Option<T> {
        self.locked_at(LOCK_MEMORY + device as i64, act)
    }

    /// Does something that no other thread of any process does under the same record lock.
    pub(super) fn locked_at<T>(&self, at: i64, act: impl FnOnce(Own) -> T) -> Option<T> {
        let own = self.own.lock();
        let mine = (*own)?;
        lock(self.fd, at, libc::F_SETLKW).ok()?;
        let done = act(mine);
        unlock(self.fd, at);
        Some(done)
    }

    /// Shared memory of live processes, each block once, in bytes.
    pub(super) fn shared_bytes(&self, device: usize, own: Option<Own>) -> u64 {
        let mut seen = HashSet::new();
        let mut sum = 0;
        for (slot, shared) in self.state().slots.iter().enumerate() {
            if shared.listed().next().is_none() || !self.alive_without_own(slot, own) {
                continue;
            }
            for (id, at, bytes) in shared.listed() {
                if at == device && seen.insert(id) {
                    sum += bytes;
                }
            }
        }
        sum
    }

    /// Shared memory that counts for one process: that which no live process in a lower slot has,
    /// in bytes.
    pub(super) fn shared_bytes_of(&self, slot: usize, device: usize, own: Option<Own>) -> u64 {
        let slots = &self.state().slots;
        let mut lower = HashSet::new();
        if slots[slot].listed().next().is_none() {
            return 0;
        }
        for (other, shared) in slots.iter().enumerate().take(slot) {
            if shared.listed().next().is_some() && self.alive_without_own(other, own) {
                lower.extend(shared.listed().map(|one| one.0));
            }
        }
        slots[slot]
            .listed()
            .filter(|(id, at, _)| *at == device && !lower.contains(id))
            .map(|(_, _, bytes)| bytes)
            .sum()
    }
}
