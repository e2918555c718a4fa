//! One client of a host at a time takes host memory and locks it: drivers lock pages one process
//! after the other, so that everybody's memory calls wait for everybody's pinning, and two that
//! look at once at what a container's limit leaves would both count on it.
//!
//! The arbiter hands out a permit for a term. Who has none in time goes on without: pages are taken
//! with a look before each step, and what is not locked is copied all the same, only slower.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::tuning;
use crate::attachment::client::{self, Attached};
use crate::ground::clock::now_ns;
use crate::ground::process;

/// What is left of a term must be enough for one chunk.
const LEAST_NS: u64 = 20_000_000;
/// TIMEOUT: the arbiter wakes us; this is for one that does not.
const STEP: Duration = Duration::from_millis(10);

/// Requests so far.
static REQUESTS: AtomicU32 = AtomicU32::new(0);

/// In a forked child.
pub(super) fn forget() {
    REQUESTS.store(0, Ordering::Relaxed);
}

/// A wish to lock memory, for the length of a move. The agent's alone.
pub(super) struct Permits {
    attached: Option<&'static Attached>,
    /// The request under way; 0: none.
    number: Cell<u16>,
    patience_ns: Cell<u64>,
    deadline_ns: u64,
}

impl Permits {
    /// For a move that is to be over at `deadline_ns`.
    pub(super) fn until(deadline_ns: u64) -> Self {
        Self {
            attached: client::current(),
            number: Cell::new(0),
            patience_ns: Cell::new(tuning::turn().as_nanos() as u64), // CAST: minutes.
            deadline_ns,
        }
    }

    /// For what can be done another time: no longer than `patience`.
    pub(super) fn within(patience: Duration) -> Self {
        let permits = Self::until(u64::MAX);
        // CAST: milliseconds.
        permits.patience_ns.set(patience.as_nanos() as u64);
        permits
    }

    /// Whether memory may be locked now. Waits for it while there is patience left.
    pub(super) fn have(&self) -> bool {
        let Some(attached) = self.attached else {
            return true;
        };
        let arbiter = attached.end.arbiter;
        let begun_ns = now_ns();
        loop {
            if !arbiter.pinning_needs_permit() || attached.is_lost() {
                return true;
            }
            let seen = arbiter.orders();
            let now = now_ns();
            match arbiter.pinning_permitted_until(self.number.get()) {
                Some(until_ns) if now + LEAST_NS < until_ns => {
                    self.spend(now.saturating_sub(begun_ns));
                    return true;
                }
                // Over: others may be waiting.
                Some(_) => self.give_back(),
                None => {}
            }
            let waited = now.saturating_sub(begun_ns);
            if waited >= self.patience_ns.get() || now >= self.deadline_ns || process::exiting() {
                self.spend(waited);
                self.give_back();
                return false;
            }
            if self.number.get() == 0 {
                // CAST: the lower bits of a counter, never 0.
                let number = (REQUESTS.fetch_add(1, Ordering::Relaxed) % 0xffff) as u16 + 1;
                self.number.set(number);
                attached.end.client.want_to_pin(number);
                attached.end.ring();
            }
            arbiter.wait_for_orders(seen, STEP);
        }
    }

    fn spend(&self, ns: u64) {
        self.patience_ns
            .set(self.patience_ns.get().saturating_sub(ns));
    }

    fn give_back(&self) {
        if let Some(attached) = self.attached
            && self.number.take() != 0
        {
            attached.end.client.want_to_pin(0);
            attached.end.ring();
        }
    }
}

impl Drop for Permits {
    fn drop(&mut self) {
        self.give_back();
    }
}
