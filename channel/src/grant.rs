//! The gate: arbiter --grants, revokes, limits--> client.
//!
//! The arbiter opens and closes; the client looks with one load and, where the gate is closed, says
//! that it wants in ([`crate::activity`]), rings the doorbell and waits on the gate word itself. A
//! wake-up cannot be lost: the futex compares the word that the client saw closed.

use std::time::Duration;

use crate::layout::{ArbiterHalf, DeviceGrant, MAX_DEVICES, NO_LIMIT};
use crate::sync::{Acquire, Relaxed, Release, SeqCst, fence};

/// Bit of the gate word that says "open".
pub const OPEN: u32 = 1;
/// Bit of the gate word that says "closed, and about to open": a thread that waits may look again
/// and again instead of sleeping.
pub const COMING: u32 = 2;
/// The gate word counts its changes in steps of this.
const CHANGE: u32 = 4;

/// One grant, as the arbiter sends it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Number of the grant.
    pub number: u64,
    /// Length in microseconds.
    pub quantum_us: u32,
    /// `CLOCK_MONOTONIC` end in nanoseconds; 0 for none.
    pub deadline_mono_ns: u64,
    /// How long work may stay queued on the device.
    pub window: Window,
}

/// An in-flight bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Window {
    /// In microseconds; 0 for no bound.
    pub us: u32,
    /// Work that ends before the grant does may be queued as well, up to so many microseconds. 0:
    /// other jobs use the device at the same time, see [`beside`](Self::beside).
    pub most_us: u32,
}

impl Window {
    /// One that does not depend on what is left of the grant.
    pub fn always(us: u32) -> Self {
        Self { us, most_us: us }
    }

    /// A bound for a device that other jobs use at the same time. It counts device time of the
    /// job's own work, and not the time for which others' work keeps that waiting.
    pub fn beside(us: u32) -> Self {
        Self { us, most_us: 0 }
    }

    /// Whether it is such a one.
    #[must_use]
    pub fn is_beside(self) -> bool {
        self.us != 0 && self.most_us == 0
    }

    /// The bound in microseconds at `now_ns` of a grant that ends at `end_ns` (0: it has no end).
    #[must_use]
    pub fn now_us(self, now_ns: u64, end_ns: u64) -> u32 {
        if self.us == 0 {
            return 0;
        }
        let left_us = end_ns.saturating_sub(now_ns) / 1000;
        let left_us = u32::try_from(left_us).unwrap_or(u32::MAX);
        self.us.max(left_us.min(self.most_us))
    }
}

/// The arbiter's end of a client's [`ArbiterHalf`].
impl ArbiterHalf {
    /// Opens the gate of `device` and wakes the threads that wait; returns how many waited.
    pub fn open(&self, device: usize, grant: &Grant) -> usize {
        let Some(slot) = self.devices.get(device) else {
            return 0;
        };
        slot.grant.store(grant.number, Relaxed);
        slot.quantum_us.store(grant.quantum_us, Relaxed);
        slot.deadline_mono_ns.store(grant.deadline_mono_ns, Relaxed);
        slot.set_window(grant.window);
        // Who found it closed by the clock may be waiting on its word.
        self.keep(device);
        // SYNC(turn): before the gate's Release store, so that a client that sees the gate open
        // does not take the time at which it was to open for a time at which it closes.
        slot.turn_mono_ns.store(0, Relaxed);
        if slot.change(OPEN) {
            slot.gate.wake_all()
        } else {
            0
        }
    }

    /// Closes the gate of `device`, or takes back that it is about to open. What was submitted
    /// before stays in flight.
    pub fn close(&self, device: usize) {
        if let Some(slot) = self.devices.get(device) {
            slot.change(0);
            // SYNC(turn seen): pairs with the fence in `DeviceGrant::is_attended`. A thread that
            // still found the gate open there has said before that it waits, and a look after this
            // sees that.
            fence(SeqCst);
            slot.turn_mono_ns.store(0, Relaxed);
        }
    }

    /// Says that the closed gate of `device` is about to open, by itself at `mono_ns`
    /// (`CLOCK_MONOTONIC`, nanoseconds) or, where the time is not known, when it is opened; and
    /// wakes the threads that wait: waking a thread takes longer than a look of one that is awake.
    /// Returns how many waited. To be confirmed by [`open`](Self::open) or taken back by
    /// [`close`](Self::close). An open gate stays open.
    pub fn pre_wake(&self, device: usize, mono_ns: Option<u64>) -> usize {
        let Some(slot) = self.devices.get(device) else {
            return 0;
        };
        if slot.gate.load(Relaxed) & OPEN != 0 {
            return 0;
        }
        // SYNC(turn): published by the gate's Release store.
        slot.turn_mono_ns.store(mono_ns.unwrap_or(0), Relaxed);
        if slot.change(COMING) {
            slot.gate.wake_all()
        } else {
            0
        }
    }

    /// Says that the open gate of `device` closes by itself at `mono_ns`. To be confirmed by
    /// [`close`](Self::close) or taken back by [`keep`](Self::keep).
    pub fn expire(&self, device: usize, mono_ns: u64) {
        if let Some(slot) = self.devices.get(device)
            && slot.gate.load(Relaxed) & OPEN != 0
        {
            slot.turn_mono_ns.store(mono_ns, Relaxed);
        }
    }

    /// Takes back that the open gate of `device` closes by itself.
    pub fn keep(&self, device: usize) {
        if let Some(slot) = self.devices.get(device)
            && slot.gate.load(Relaxed) & OPEN != 0
            && slot.turn_mono_ns.load(Relaxed) != 0
        {
            slot.turn_mono_ns.store(0, Relaxed);
            // The word has to change, or a thread that found it closed and waits on it would wait
            // on.
            slot.change(0);
            slot.change(OPEN);
            slot.gate.wake_all();
        }
    }

    /// Closes the gate of `device` until `mono_ns` (`CLOCK_MONOTONIC`, nanoseconds), at which it
    /// opens by itself; again with another time to keep it closed. Nobody is woken: who waits looks
    /// at the clock. Ended by [`open`](Self::open), or [`close`](Self::close).
    pub fn shut(&self, device: usize, mono_ns: u64) {
        if let Some(slot) = self.devices.get(device) {
            // SYNC(turn): published by the gate's Release store. An open gate closes then instead,
            // for the moment until that.
            slot.turn_mono_ns.store(mono_ns, Relaxed);
            slot.change(COMING);
        }
    }

    /// Changes the in-flight bound of an open grant.
    pub fn set_window(&self, device: usize, window: Window) {
        if let Some(slot) = self.devices.get(device) {
            slot.set_window(window);
        }
    }

    /// Whether the gate of `device` is open.
    pub fn is_open(&self, device: usize) -> bool {
        self.devices
            .get(device)
            .is_some_and(|slot| slot.gate.load(Relaxed) & OPEN != 0)
    }

    /// Publishes the memory limit of `device` in bytes; `None`: no limit.
    pub fn set_limit(&self, device: usize, limit_bytes: Option<u64>) {
        if let Some(slot) = self.devices.get(device) {
            // SYNC(limit): a number on its own; the next reservation reads it.
            slot.limit_bytes
                .store(limit_bytes.unwrap_or(NO_LIMIT), Relaxed);
        }
    }

    /// Publishes what the device has and has free, in bytes.
    pub fn set_physical(&self, device: usize, total_bytes: u64, free_bytes: Option<u64>) {
        if let Some(slot) = self.devices.get(device) {
            slot.physical_total_bytes.store(total_bytes, Relaxed);
            slot.physical_free_bytes
                .store(free_bytes.unwrap_or(NO_LIMIT), Relaxed);
        }
    }

    /// Says which slot of the tenant's page is this client's.
    pub fn set_tenant_slot(&self, slot: u32) {
        self.tenant_slot.store(slot, Relaxed);
    }

    /// Publishes the incarnation of the arbiter.
    pub fn set_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Relaxed);
    }
}

/// The clock that both sides go by.
impl ArbiterHalf {
    /// Says what the host's time is divided by: `CLOCK_MONOTONIC` stands for that wherever it is
    /// named here. Before the client reads the page.
    pub fn set_dilation(&self, dilation: u32) {
        self.header.dilation.store(dilation, Relaxed);
    }

    /// What the host's time is divided by; 0 and 1: by nothing.
    pub fn dilation(&self) -> u32 {
        self.header.dilation.load(Relaxed)
    }
}

/// Signs of life.
impl ArbiterHalf {
    /// Says that the arbiter is at work at `mono_ns` (`CLOCK_MONOTONIC`, nanoseconds). At least
    /// once a second while the client has threads waiting: a client whose arbiter has been silent
    /// for seconds stops waiting for it.
    pub fn beat(&self, mono_ns: u64) {
        self.heartbeat_mono_ns.store(mono_ns, Relaxed);
    }

    /// When the arbiter was last at work (`CLOCK_MONOTONIC`, nanoseconds).
    pub fn heartbeat_mono_ns(&self) -> u64 {
        self.heartbeat_mono_ns.load(Relaxed)
    }
}

/// The client's view of its [`ArbiterHalf`].
impl ArbiterHalf {
    /// The grant slot of `device`.
    pub fn device(&self, device: usize) -> Option<&DeviceGrant> {
        self.devices.get(device)
    }

    /// Incarnation of the arbiter.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Relaxed)
    }

    /// This client's slot in its tenant's page.
    pub fn tenant_slot(&self) -> u32 {
        self.tenant_slot.load(Relaxed)
    }
}

impl Default for ArbiterHalf {
    fn default() -> Self {
        Self {
            header: Default::default(),
            epoch: Default::default(),
            tenant_slot: Default::default(),
            credited: Default::default(),
            heartbeat_mono_ns: Default::default(),
            orders: Default::default(),
            residency: Default::default(),
            host_budget_bytes: Default::default(),
            resize: Default::default(),
            pin_permit: Default::default(),
            anchor: Default::default(),
            devices: std::array::from_fn::<_, MAX_DEVICES, _>(|_| DeviceGrant::default()),
        }
    }
}

impl DeviceGrant {
    /// Moves the gate to `state` ([`OPEN`], [`COMING`] or 0); false where it is there already. Only
    /// the arbiter calls this.
    fn change(&self, state: u32) -> bool {
        let word = self.gate.load(Relaxed);
        if word % CHANGE == state {
            return false;
        }
        let next = (word - word % CHANGE).wrapping_add(CHANGE) | state;
        // SYNC(grant): pairs with the Acquire load in `look`; publishes the grant words written
        // above.
        self.gate.store(next, Release);
        true
    }

    /// The gate word as a hot path may poll it: bit 0 is [`OPEN`].
    #[cfg(not(loom))]
    pub fn gate_word(&self) -> &std::sync::atomic::AtomicU32 {
        self.gate.word()
    }

    /// Looks at the gate: `Ok` where it is open, else the word to wait on.
    pub fn look(&self) -> Result<(), u32> {
        // SYNC(grant): pairs with the Release store in `change`.
        let word = self.gate.load(Acquire);
        if word & OPEN != 0 { Ok(()) } else { Err(word) }
    }

    /// Whether somebody may pass at `now_mono_ns` (`CLOCK_MONOTONIC`, nanoseconds), by the gate or
    /// by the time at which it turns over; else the word to wait on.
    pub fn pass(&self, now_mono_ns: u64) -> Result<(), u32> {
        // SYNC(grant), SYNC(turn): pairs with the Release store in `change`.
        let word = self.gate.load(Acquire);
        let turn_mono_ns = self.turn_mono_ns.load(Relaxed);
        let turned = turn_mono_ns != 0 && now_mono_ns >= turn_mono_ns;
        match word % CHANGE {
            OPEN if !turned => Ok(()),
            COMING if turned => Ok(()),
            _ => Err(word),
        }
    }

    /// Whether the arbiter is about to look who waits, and need not be rung: the holder's turn is
    /// over by the clock, and the arbiter has yet to confirm it. To be asked after
    /// [`begin_waiting`](crate::Want::begin_waiting).
    pub fn is_attended(&self) -> bool {
        // SYNC(turn seen): pairs with the fence in `ArbiterHalf::close`.
        fence(SeqCst);
        self.gate.load(Relaxed) & OPEN != 0 && self.turn_mono_ns.load(Relaxed) != 0
    }

    /// When the gate turns over by itself (`CLOCK_MONOTONIC`, nanoseconds); 0: it does not.
    pub fn turn_mono_ns(&self) -> u64 {
        self.turn_mono_ns.load(Relaxed)
    }

    /// Waits until the gate word is no longer `seen`, or `timeout` has passed, or for no reason.
    pub fn wait(&self, seen: u32, timeout: Duration) {
        self.gate.wait(seen, timeout);
    }

    /// In-flight bound in microseconds, however little is left of the grant; 0 for none.
    pub fn window_us(&self) -> u32 {
        self.window_us.load(Relaxed)
    }

    /// The whole in-flight bound.
    pub fn window(&self) -> Window {
        Window {
            us: self.window_us.load(Relaxed),
            most_us: self.window_most_us.load(Relaxed),
        }
    }

    fn set_window(&self, window: Window) {
        self.window_us.store(window.us, Relaxed);
        self.window_most_us.store(window.most_us, Relaxed);
    }

    /// `CLOCK_MONOTONIC` time at which submissions end, in nanoseconds: by the clock, where that is
    /// said, else the end of the grant; 0 for none.
    pub fn end_mono_ns(&self) -> u64 {
        match self.turn_mono_ns() {
            0 => self.deadline_mono_ns(),
            turn_ns => turn_ns,
        }
    }

    /// `CLOCK_MONOTONIC` end of the grant in nanoseconds; 0 for none.
    pub fn deadline_mono_ns(&self) -> u64 {
        self.deadline_mono_ns.load(Relaxed)
    }

    /// Memory limit in bytes, [`NO_LIMIT`] for none.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Relaxed)
    }

    /// Physical memory of the device in bytes; 0 where unknown.
    pub fn physical_total_bytes(&self) -> u64 {
        self.physical_total_bytes.load(Relaxed)
    }

    /// Free physical memory when the arbiter last looked, in bytes; [`NO_LIMIT`] where it never
    /// did.
    pub fn physical_free_bytes(&self) -> u64 {
        self.physical_free_bytes.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_before_the_grant_may_be_queued() {
        let window = Window {
            us: 2000,
            most_us: 20_000,
        };
        let at = |now_us: u64, end_us: u64| window.now_us(now_us * 1000, end_us * 1000);
        assert_eq!(at(100, 50_100), 20_000);
        assert_eq!(at(100, 10_100), 10_000);
        assert_eq!(at(100, 1100), 2000);
        assert_eq!(at(1100, 100), 2000, "its end has passed");
        assert_eq!(at(100, 0), 2000, "it has no end");
        assert_eq!(at(0, u64::MAX / 1000), 20_000);
        assert_eq!(Window::always(700).now_us(0, 1_000_000_000), 700);
        let unbound = Window { us: 0, most_us: 9 };
        assert_eq!(unbound.now_us(0, 1_000_000_000), 0);
    }

    #[test]
    fn beside_others_the_bound_is_of_own_work_and_no_end_widens_it() {
        let beside = Window::beside(3000);
        assert!(beside.is_beside());
        assert_eq!(beside.now_us(0, u64::MAX), 3000);
        assert!(!Window::always(3000).is_beside() && !Window::default().is_beside());
        let half = crate::layout::DeviceGrant::default();
        half.set_window(beside);
        assert!(half.window().is_beside());
    }
}
