//! What the processes of a host may still take of its memory: each says so in its slot, so that
//! nobody is promised what another one is about to take.

use std::sync::atomic::Ordering::{AcqRel, Acquire};

use super::host::{lock, unlock};
use super::{DeviceState, LOCK_HOST, Own, SLOTS};

impl DeviceState {
    /// Promises this process bytes of the host: `decide` is given what all live processes are
    /// promised and have not written yet, and returns what comes to that. One process at a time.
    pub fn promise<T>(&self, decide: impl FnOnce(u64) -> (u64, T)) -> T {
        let own = self.own.lock();
        let Some(mine) = *own else {
            return decide(0).1;
        };
        // Without the lock two processes may be promised the same; what stays free is for that.
        let locked = lock(self.fd, LOCK_HOST, libc::F_SETLKW).is_ok();
        let (bytes, decided) = decide(self.promised(mine));
        self.state().slots[mine.slot]
            .promised_bytes
            .fetch_add(bytes, AcqRel);
        if locked {
            unlock(self.fd, LOCK_HOST);
        }
        decided
    }

    fn promised(&self, own: Own) -> u64 {
        let slots = self.state().slots.iter().enumerate().take(SLOTS);
        slots
            .map(|(at, slot)| (at, slot.promised_bytes.load(Acquire)))
            .filter(|(at, bytes)| *bytes > 0 && self.alive_without_own(*at, Some(own)))
            .fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }

    /// Bytes that were promised are written, or will not be.
    pub fn redeem(&self, bytes: u64) {
        if bytes > 0
            && let Some(own) = self.own()
        {
            let promised = &self.state().slots[own.slot].promised_bytes;
            let less = |now: u64| Some(now.saturating_sub(bytes));
            let _ = promised.fetch_update(AcqRel, Acquire, less);
        }
    }
}
