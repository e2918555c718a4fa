//! Memory reservations of one tenant, shared by its processes without a lock.
//!
//! A process adds its request to its own slot first and looks at the sum of all slots afterwards; if the sum is above
//! the limit it takes its request back. Of two racing requests each sees the other or is seen by it (store, then load,
//! in one total order), so the sum of what was *granted* never exceeds the limit. A slot has one owner: when that
//! process is killed, at whatever instruction, the arbiter zeroes the slot and nothing is lost or left behind.
//!
//! Two requests that would each fit may refuse each other. A refused request therefore tries again while another
//! process is deciding, a bounded number of times; a refusal with nobody else deciding is final and exact.

use crate::layout::{MAX_DEVICES, NO_LIMIT, TENANT_SLOTS, TenantPage, TenantSlot};
use crate::sync::{Relaxed, SeqCst, total_order};

/// How often a refused request tries again while other processes are deciding.
const RETRIES: u32 = if cfg!(loom) { 1 } else { 200 };

/// A reservation that did not fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OverLimit {
    /// The limit in bytes.
    pub limit_bytes: u64,
    /// What the tenant held, in bytes, without the request.
    pub used_bytes: u64,
    /// The request in bytes.
    pub requested_bytes: u64,
}

/// One process's account in its tenant's page.
#[derive(Clone, Copy, Debug)]
pub struct Account<'a> {
    page: &'a TenantPage,
    own: &'a TenantSlot,
}

impl<'a> Account<'a> {
    /// The account of slot `slot`, if there is such a slot.
    pub fn new(page: &'a TenantPage, slot: u32) -> Option<Self> {
        let own = page.slots.get(slot as usize)?;
        Some(Self { page, own })
    }

    /// Reserves `bytes` on `device` within `limit_bytes`.
    pub fn reserve(&self, device: usize, bytes: u64, limit_bytes: u64) -> Result<(), OverLimit> {
        let Some(own) = self.own.held_bytes.get(device) else {
            return Ok(());
        };
        if limit_bytes == NO_LIMIT {
            own.fetch_add(bytes, Relaxed);
            self.note_peak(device);
            return Ok(());
        }
        // SYNC(deciding): read by `others_deciding` of other processes; only a hint that a retry may help.
        self.own.deciding.fetch_add(1, Relaxed);
        let outcome = self.decide(device, bytes, limit_bytes);
        self.own.deciding.fetch_sub(1, Relaxed);
        outcome
    }

    fn decide(&self, device: usize, bytes: u64, limit_bytes: u64) -> Result<(), OverLimit> {
        let own = &self.own.held_bytes[device]; // PANIC: `reserve` has looked the device up.
        let mut tries = 0;
        loop {
            // SYNC(reserve): store then load in the single total order of SeqCst; the partner is the same pair in every
            // other process. One of two racers sees the other's addition.
            own.fetch_add(bytes, SeqCst);
            total_order();
            let sum = self.sum(device);
            if sum <= limit_bytes {
                self.raise_peak(device, sum);
                return Ok(());
            }
            own.fetch_sub(bytes, SeqCst);
            tries += 1;
            if tries > RETRIES || !self.others_deciding() {
                let used_bytes = self.used_bytes(device);
                return Err(OverLimit {
                    limit_bytes,
                    used_bytes,
                    requested_bytes: bytes,
                });
            }
            for _ in 0..tries.min(64) {
                std::hint::spin_loop();
            }
        }
    }

    /// Gives `bytes` on `device` back; more than is held gives back what is held.
    pub fn release(&self, device: usize, bytes: u64) {
        if let Some(own) = self.own.held_bytes.get(device) {
            let before = own.fetch_sub(bytes, Relaxed);
            if before < bytes {
                // A program can free more than it took only through a defect of ours; never let the account wrap.
                own.fetch_add(bytes - before, Relaxed);
            }
        }
    }

    /// Counts pinned host memory; it has no limit yet.
    pub fn pin(&self, bytes: u64) {
        self.own.pinned_bytes.fetch_add(bytes, Relaxed);
    }

    /// Takes pinned host memory off the count.
    pub fn unpin(&self, bytes: u64) {
        self.own.pinned_bytes.fetch_sub(bytes, Relaxed);
    }

    /// What the whole tenant holds on `device`, in bytes.
    pub fn used_bytes(&self, device: usize) -> u64 {
        self.sum(device)
    }

    /// What this process holds on `device`, in bytes.
    pub fn own_bytes(&self, device: usize) -> u64 {
        self.own
            .held_bytes
            .get(device)
            .map_or(0, |held| held.load(Relaxed))
    }

    fn sum(&self, device: usize) -> u64 {
        self.page.sum(device)
    }

    fn note_peak(&self, device: usize) {
        self.raise_peak(device, self.sum(device));
    }

    fn raise_peak(&self, device: usize, sum: u64) {
        let peak = &self.page.peak_bytes[device]; // PANIC: callers have looked the device up.
        if sum > peak.load(Relaxed) {
            peak.fetch_max(sum, Relaxed);
        }
    }

    /// Whether anybody but the caller is deciding: another process, or another thread of this one.
    fn others_deciding(&self) -> bool {
        self.page.in_use().any(|slot| {
            let callers = u32::from(std::ptr::eq(slot, self.own));
            slot.deciding.load(Relaxed) > callers
        })
    }
}

/// In place of the zeroed page that `page` maps.
#[cfg(loom)]
impl Default for TenantPage {
    fn default() -> Self {
        Self {
            header: Default::default(),
            slots_used: Default::default(),
            reserved0: 0,
            reserved: Default::default(),
            peak_bytes: Default::default(),
            slots: std::array::from_fn::<_, TENANT_SLOTS, _>(|_| TenantSlot::default()),
        }
    }
}

impl TenantPage {
    fn in_use(&self) -> impl Iterator<Item = &TenantSlot> {
        // SYNC(slots): read after the caller's own addition, in the order of SeqCst. The arbiter raises the count before it
        // welcomes a process; a reader that still sees the old count comes before that process's first reservation.
        self.slots
            .iter()
            .take(self.slots_used.load(SeqCst) as usize)
    }

    /// Raises the number of slots in use to at least `slots`. Only the arbiter calls this.
    pub fn use_slots(&self, slots: u32) {
        if self.slots_used.load(SeqCst) < slots {
            self.slots_used
                .store(slots.min(TENANT_SLOTS as u32), SeqCst);
        }
    }

    /// Sum on `device`, in bytes, saturating.
    pub(crate) fn sum(&self, device: usize) -> u64 {
        self.in_use()
            .filter_map(|slot| slot.held_bytes.get(device))
            .fold(0, |sum: u64, held| sum.saturating_add(held.load(SeqCst)))
    }

    /// Takes a dead process's slot back: everything it held is free at once.
    pub fn clear_slot(&self, slot: u32) {
        if let Some(slot) = self.slots.get(slot as usize) {
            for held in &slot.held_bytes {
                held.store(0, SeqCst);
            }
            slot.pinned_bytes.store(0, Relaxed);
            slot.deciding.store(0, Relaxed);
            slot.pid.store(0, Relaxed);
        }
    }

    /// Notes whose slot `slot` is, by the process id on the arbiter's host. Only the arbiter calls this.
    pub fn name_slot(&self, slot: u32, pid: u32) {
        if let Some(slot) = self.slots.get(slot as usize) {
            slot.pid.store(pid, Relaxed);
        }
    }

    /// Whether the arbiter says whose slots are whose: one of layout 1.0 does not.
    pub fn names_slots(&self) -> bool {
        self.in_use().any(|slot| slot.pid.load(Relaxed) != 0)
    }

    /// What process `pid` of this tenant holds on `device`, in bytes; `None`: no process of this tenant.
    pub fn process_bytes(&self, pid: u32, device: usize) -> Option<u64> {
        let mut own = self
            .in_use()
            .filter(|slot| pid != 0 && slot.pid.load(Relaxed) == pid)
            .peekable();
        own.peek()?;
        Some(own.fold(0, |sum: u64, slot| {
            let held = slot.held_bytes.get(device);
            sum.saturating_add(held.map_or(0, |held| held.load(Relaxed)))
        }))
    }

    /// What slot `slot` holds on `device`, in bytes.
    pub fn slot_bytes(&self, slot: u32, device: usize) -> u64 {
        self.slots
            .get(slot as usize)
            .and_then(|slot| slot.held_bytes.get(device))
            .map_or(0, |held| held.load(SeqCst))
    }

    /// Pinned host memory of slot `slot`, in bytes.
    pub fn slot_pinned_bytes(&self, slot: u32) -> u64 {
        self.slots
            .get(slot as usize)
            .map_or(0, |slot| slot.pinned_bytes.load(Relaxed))
    }

    /// What the tenant holds on `device`, in bytes.
    pub fn used_bytes(&self, device: usize) -> u64 {
        self.sum(device)
    }

    /// Most that the tenant ever held on `device`, in bytes.
    pub fn peak_bytes(&self, device: usize) -> u64 {
        self.peak_bytes
            .get(device)
            .map_or(0, |peak| peak.load(Relaxed))
    }

    /// Whether any process of the tenant holds memory on any device.
    pub fn is_empty(&self) -> bool {
        (0..MAX_DEVICES).all(|device| self.used_bytes(device) == 0)
    }
}
