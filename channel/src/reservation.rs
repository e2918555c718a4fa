//! Memory reservations of one tenant, shared by its processes without a lock.
//!
//! A process adds its request to its own slot first and looks at the sum of all slots afterwards;
//! if the sum is above the limit it takes its request back. Of two racing requests each sees the
//! other or is seen by it (store, then load, in one total order), so the sum of what was *granted*
//! never exceeds the limit. A slot has one owner: when that process is killed, at whatever
//! instruction, the arbiter zeroes the slot and nothing is lost or left behind.
//!
//! Two requests that would each fit must not refuse each other. What has been added but may yet be
//! taken back is therefore marked in the same word ([`UNDECIDED_SHIFT`]), by the addition that adds
//! it. A request that does not fit even without what is undecided is refused at once, without
//! waiting for anybody; else it waits a bounded time for the others' decisions.
//!
//! Some requests cannot know what they will take before the driver has answered: they are held
//! undecided over the call ([`Account::prepay`]) and settled afterwards.

#[cfg(loom)]
use crate::layout::SharedBlocks;
use crate::layout::{MAX_DEVICES, NO_LIMIT, TENANT_SLOTS, TenantPage, TenantSlot};
use crate::sync::{Relaxed, SeqCst, total_order};

/// A held word: bytes below this bit, what of them is undecided from it on, in [`UNDECIDED_UNIT`]s.
/// 16 TiB are more than any device has; a mark that does not fit loses upper bits, the same when it
/// is taken back.
const UNDECIDED_SHIFT: u32 = 44;
pub(crate) const BYTES: u64 = (1 << UNDECIDED_SHIFT) - 1;
const UNDECIDED_UNIT: u64 = 2 << 20;

/// How often a request that waits for others' decisions looks again.
const LOOKS: u32 = if cfg!(loom) { 2 } else { SPINS + 6 };
/// Looks between which the caller only spins; a decision takes far less.
const SPINS: u32 = 12;
/// Time before the first of the later looks, doubled for each: the process that decides is not
/// running, or inside its driver. All of them take 3 ms.
#[cfg(not(loom))]
const PAUSE_NS: i64 = 50_000;

/// A process as its own PID namespace knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct InnerPid {
    /// Its number there.
    pub pid: u32,
    /// The inode of the namespace.
    pub namespace: u64,
}

/// A reservation that did not fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OverLimit {
    /// The limit in bytes.
    pub limit_bytes: u64,
    /// What the tenant held, in bytes, without the request and without what was undecided.
    pub used_bytes: u64,
    /// The request in bytes.
    pub requested_bytes: u64,
}

/// Bytes that are held but may be given back, until [`Account::settle`] says how many were taken.
#[must_use = "what is prepaid stays undecided until it is settled"]
#[derive(Debug)]
pub struct Prepaid {
    bytes: u64,
    /// Sum over the tenant when it was made, for the peak.
    sum: u64,
}

impl Prepaid {
    /// How much it is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// `bytes` with their mark.
#[inline]
fn undecided(bytes: u64) -> u64 {
    bytes.wrapping_add(mark(bytes))
}

#[inline]
fn mark(bytes: u64) -> u64 {
    bytes.div_ceil(UNDECIDED_UNIT) << UNDECIDED_SHIFT
}

/// Bytes of a held word that are nobody's to take back.
pub(crate) fn settled(word: u64) -> u64 {
    (word & BYTES).saturating_sub((word >> UNDECIDED_SHIFT).saturating_mul(UNDECIDED_UNIT))
}

/// What a tenant holds on one device.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Look {
    held: u64,
    undecided: u64,
}

impl Look {
    fn settled(self) -> u64 {
        self.held.saturating_sub(self.undecided)
    }
}

/// One process's account in its tenant's page.
#[derive(Clone, Copy, Debug)]
pub struct Account<'a> {
    pub(crate) page: &'a TenantPage,
    own: &'a TenantSlot,
    pub(crate) slot: u32,
}

impl<'a> Account<'a> {
    /// The account of slot `slot`, if there is such a slot.
    pub fn new(page: &'a TenantPage, slot: u32) -> Option<Self> {
        let own = page.slots.get(slot as usize)?;
        Some(Self { page, own, slot })
    }

    /// Reserves `bytes` on `device` within `limit_bytes`.
    ///
    /// # Errors
    /// They do not fit.
    #[inline]
    pub fn reserve(&self, device: usize, bytes: u64, limit_bytes: u64) -> Result<(), OverLimit> {
        let Some(own) = self.own.held_bytes.get(device) else {
            return Ok(());
        };
        if limit_bytes == NO_LIMIT {
            own.fetch_add(bytes, Relaxed);
            self.raise_peak(device, self.page.sum(device));
            return Ok(());
        }
        let sum = self.hold(device, bytes, limit_bytes, true)?;
        own.fetch_sub(mark(bytes), Relaxed);
        self.raise_peak(device, sum);
        Ok(())
    }

    /// Holds `bytes` on `device` within `limit_bytes` for a call that takes at most so many;
    /// [`Account::settle`] must follow. `patient`: whether to wait for the decisions of others
    /// where those may free enough.
    ///
    /// # Errors
    /// They do not fit.
    #[inline]
    pub fn prepay(
        &self,
        device: usize,
        bytes: u64,
        limit_bytes: u64,
        patient: bool,
    ) -> Result<Prepaid, OverLimit> {
        if device >= MAX_DEVICES {
            return Ok(Prepaid { bytes: 0, sum: 0 });
        }
        if limit_bytes == NO_LIMIT {
            // PANIC: looked at above.
            self.own.held_bytes[device].fetch_add(undecided(bytes), Relaxed);
            let sum = self.page.sum(device);
            return Ok(Prepaid { bytes, sum });
        }
        let sum = self.hold(device, bytes, limit_bytes, patient)?;
        Ok(Prepaid { bytes, sum })
    }

    /// Brings what was prepaid on `device` to what was `taken`, in bytes. More than was prepaid is
    /// charged whatever the limit.
    #[inline]
    pub fn settle(&self, device: usize, prepaid: Prepaid, taken: u64) {
        let Some(own) = self.own.held_bytes.get(device) else {
            return;
        };
        let Prepaid { bytes, sum } = prepaid;
        if taken != 0 {
            self.raise_peak(device, sum.saturating_sub(bytes).saturating_add(taken));
        }
        // Wrapping, as the word does: taken may be more.
        own.fetch_sub(undecided(bytes).wrapping_sub(taken), Relaxed);
    }

    /// Adds `bytes`, marked, if the sum stays within the limit; the sum.
    #[inline]
    fn hold(
        &self,
        device: usize,
        bytes: u64,
        limit_bytes: u64,
        patient: bool,
    ) -> Result<u64, OverLimit> {
        if bytes <= limit_bytes
            && let Some(sum) = self.add_within(device, bytes, limit_bytes)
        {
            return Ok(sum);
        }
        self.hold_after_all(device, bytes, limit_bytes, patient)
    }

    /// Adds `bytes`, marked, and takes them back where the sum is beyond the limit; the sum.
    #[inline(always)]
    fn add_within(&self, device: usize, bytes: u64, limit_bytes: u64) -> Option<u64> {
        // PANIC: callers have looked the device up.
        let own = &self.own.held_bytes[device];
        // SYNC(reserve): store then load in the single total order of SeqCst; the partner is the
        // same pair in every other process. One of two racers sees the other's addition.
        own.fetch_add(undecided(bytes), SeqCst);
        total_order();
        let sum = self.page.sum(device);
        if sum <= limit_bytes {
            return Some(sum);
        }
        own.fetch_sub(undecided(bytes), SeqCst);
        None
    }

    /// After it did not fit: whether that is for good.
    #[cold]
    #[inline(never)]
    fn hold_after_all(
        &self,
        device: usize,
        bytes: u64,
        limit_bytes: u64,
        patient: bool,
    ) -> Result<u64, OverLimit> {
        for looks in 1.. {
            let (look, seen) = self.page.look(device);
            if look.held.saturating_add(bytes) <= limit_bytes {
                if let Some(sum) = self.add_within(device, bytes, limit_bytes) {
                    return Ok(sum);
                }
            } else {
                // Bytes that move from one slot to another while we look would be counted twice:
                // what is seen twice the same was so at one time.
                let full = look.settled().saturating_add(bytes) > limit_bytes;
                let same = || self.page.look(device).1 == seen;
                let sure = full && (bytes > limit_bytes || same());
                if sure || (!full && !patient) || looks > LOOKS {
                    return Err(OverLimit {
                        limit_bytes,
                        used_bytes: look.settled(),
                        requested_bytes: bytes,
                    });
                }
                if full {
                    continue;
                }
            }
            if looks >= LOOKS {
                return Err(OverLimit {
                    limit_bytes,
                    used_bytes: self.page.look(device).0.settled(),
                    requested_bytes: bytes,
                });
            }
            pause(looks);
        }
        unreachable!("the loop has no end but a return")
    }

    /// Gives `bytes` on `device` back; more than is held gives back what is held.
    #[inline]
    pub fn release(&self, device: usize, bytes: u64) {
        if let Some(own) = self.own.held_bytes.get(device) {
            let before = own.fetch_sub(bytes, Relaxed) & BYTES;
            if before < bytes {
                // A program can free more than it took only through a defect of ours; never let the
                // account wrap.
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
    #[inline]
    pub fn used_bytes(&self, device: usize) -> u64 {
        self.page.sum(device)
    }

    /// What this process holds on `device`, in bytes.
    pub fn own_bytes(&self, device: usize) -> u64 {
        self.own
            .held_bytes
            .get(device)
            .map_or(0, |held| held.load(Relaxed) & BYTES)
    }

    #[inline]
    pub(crate) fn raise_peak(&self, device: usize, sum: u64) {
        // PANIC: callers have looked the device up.
        let peak = &self.page.peak_bytes[device];
        if sum > peak.load(Relaxed) {
            peak.fetch_max(sum, Relaxed);
        }
    }
}

fn pause(looks: u32) {
    if looks <= SPINS {
        for _ in 0..looks {
            std::hint::spin_loop();
        }
        return;
    }
    #[cfg(not(loom))]
    let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: PAUSE_NS << (looks - SPINS - 1).min(5),
    });
}

/// In place of the zeroed page that `page` maps.
#[cfg(loom)]
impl Default for TenantPage {
    fn default() -> Self {
        Self {
            header: Default::default(),
            slots_used: Default::default(),
            reserved: Default::default(),
            peak_bytes: Default::default(),
            sharing: Default::default(),
            slots: std::array::from_fn::<_, TENANT_SLOTS, _>(|_| TenantSlot::default()),
            shared: std::array::from_fn::<_, TENANT_SLOTS, _>(|_| SharedBlocks::default()),
        }
    }
}

impl TenantPage {
    fn in_use(&self) -> impl Iterator<Item = &TenantSlot> {
        // SYNC(slots): read after the caller's own addition, in the order of SeqCst. The arbiter
        // raises the count before it welcomes a process; a reader that still sees the old count
        // comes before that process's first reservation.
        self.slots
            .iter()
            .take(self.slots_used.load(SeqCst) as usize)
    }

    /// Sets the number of slots in use: every one above is empty and nobody's. Only the arbiter
    /// calls this.
    pub fn use_slots(&self, slots: u32) {
        // SYNC(slots): raised before a process gets its slot, lowered after the slot was cleared
        // and its process is gone. A reader that still sees the old number comes before the first
        // reservation of the one, or sums an empty slot of the other.
        let slots = slots.min(TENANT_SLOTS as u32);
        if self.slots_used.load(SeqCst) != slots {
            self.slots_used.store(slots, SeqCst);
        }
    }

    /// Slots in use, as the page says; never more than there are.
    pub fn slots_used(&self) -> u32 {
        self.slots_used.load(SeqCst).min(TENANT_SLOTS as u32)
    }

    /// Sum on `device`, in bytes, saturating; what is undecided included.
    #[inline]
    pub(crate) fn sum(&self, device: usize) -> u64 {
        let held = self
            .in_use()
            .filter_map(|slot| slot.held_bytes.get(device))
            .fold(0, |sum: u64, held| {
                sum.saturating_add(held.load(SeqCst) & BYTES)
            });
        // A process adds a block to the shared list before it takes it off its own: so read in the
        // opposite order.
        held.saturating_add(self.shared_bytes(device))
    }

    /// What is held on `device`, and a number that differs wherever any process's word does, or
    /// what they share: slots are many, and the stack may be a small one.
    fn look(&self, device: usize) -> (Look, u64) {
        let mut look = Look {
            held: 0,
            undecided: 0,
        };
        let mut seen = 0u64;
        for slot in self.in_use() {
            // PANIC: callers have looked the device up.
            let word = slot.held_bytes[device].load(SeqCst);
            look.held = look.held.saturating_add(word & BYTES);
            look.undecided = look
                .undecided
                .saturating_add((word >> UNDECIDED_SHIFT) * UNDECIDED_UNIT);
            // An odd factor and a rotation are one to one: the number differs where one word does.
            seen = (seen ^ word)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(29);
        }
        // Read last, as in `sum`.
        let shared = self.shared_bytes(device);
        look.held = look.held.saturating_add(shared);
        (look, seen ^ shared)
    }

    /// Takes a dead process's slot back: everything it held is free at once.
    pub fn clear_slot(&self, slot: u32) {
        if let Some(slot) = self.slots.get(slot as usize) {
            for held in &slot.held_bytes {
                held.store(0, SeqCst);
            }
            slot.pinned_bytes.store(0, Relaxed);
            slot.pid.store(0, Relaxed);
            slot.inner_pid.store(0, Relaxed);
            slot.pid_namespace.store(0, Relaxed);
        }
        self.clear_shared(slot);
    }

    /// Notes whose slot `slot` is, by the process id on the arbiter's host, and by that in the PID
    /// namespace of the process, as far as it is known. Only the arbiter calls this.
    pub fn name_slot(&self, slot: u32, pid: u32, inner: Option<InnerPid>) {
        if let Some(slot) = self.slots.get(slot as usize) {
            let inner = inner.unwrap_or_default();
            slot.pid.store(pid, Relaxed);
            slot.inner_pid.store(inner.pid, Relaxed);
            slot.pid_namespace.store(inner.namespace, Relaxed);
        }
    }

    /// What process `pid` of this tenant holds on `device`, in bytes, without what may yet be taken
    /// back; `None`: no process of this tenant. `pid` is what `namespace` calls it, the PID
    /// namespace (its inode) of who asks; where that knows no such process of the tenant, what the
    /// arbiter's host calls it.
    pub fn process_bytes(&self, pid: u32, namespace: u64, device: usize) -> Option<u64> {
        let sum = |is_it: &dyn Fn(&TenantSlot) -> bool| {
            let mut own = self.in_use().filter(|slot| is_it(slot)).peekable();
            own.peek()?;
            Some(own.fold(0, |sum: u64, slot| {
                let word = slot.held_bytes.get(device);
                sum.saturating_add(word.map_or(0, |word| settled(word.load(Relaxed))))
            }))
        };
        if pid == 0 {
            return None;
        }
        let within = |slot: &TenantSlot| {
            namespace != 0
                && slot.pid_namespace.load(Relaxed) == namespace
                && slot.inner_pid.load(Relaxed) == pid
        };
        sum(&within).or_else(|| sum(&|slot| slot.pid.load(Relaxed) == pid))
    }

    /// What slot `slot` holds on `device`, in bytes; what it shares with a lower slot is counted
    /// there.
    pub fn slot_bytes(&self, slot: u32, device: usize) -> u64 {
        self.slots
            .get(slot as usize)
            .and_then(|held| held.held_bytes.get(device))
            .map_or(0, |held| held.load(SeqCst) & BYTES)
            .saturating_add(self.slot_shared_bytes(slot, device))
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
