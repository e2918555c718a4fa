//! Turns on the compute engine, between the processes of a host.
//!
//! One word says who holds it. A process that waits sets its bit, and the holder hands the word on,
//! round robin, when its slice is over or it has nothing to do. Anybody may take the word from a
//! holder that died, or whose process was stopped by a signal: a device does not stop with its
//! host.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::fence;
use std::time::{Duration, Instant};

use super::host::{futex_wait, futex_wake, is_stopped};
use super::layout::{SLOTS, WAITER_WORDS, turn_word};
use super::{DeviceState, Own};
use crate::clock;

/// How often a process that waits for the compute engine looks whether the holder still lives.
const HOLDER_CHECK: Duration = Duration::from_millis(1);
/// How long the same holder is waited for before it is looked whether its process was stopped.
const STOPPED_CHECK: Duration = Duration::from_millis(20);
/// How far back in time work may start when its process was late: the host's scheduler is not the
/// device's fault.
pub const CATCH_UP_NS: u64 = 1_000_000;

impl DeviceState {
    /// Waits for the compute engine, for work that is ready at `ready_ns`; returns from when on it
    /// is ours (by the device's clock).
    ///
    /// Returns at once when it is free or held by a dead process.
    pub fn take_turn(&self, device: usize, ready_ns: u64) -> u64 {
        let Some(own) = self.own() else {
            return clock::now_ns();
        };
        let shared = &self.state().devices[device];
        let bell = &self.slot_device(own.slot, device).bell;
        let mut waiting = false;
        let mut waited = (0, Instant::now());
        loop {
            let rung = bell.load(Acquire);
            let holder = shared.turn.load(Acquire);
            if waited.0 != holder {
                waited = (holder, Instant::now());
            }
            let stands_still =
                || waited.1.elapsed() >= STOPPED_CHECK && self.skip_if_stopped(device, holder);
            let taken = holder == own.word
                || ((holder == 0 || (waiting && (!self.holds_alive(holder) || stands_still())))
                    && shared
                        .turn
                        .compare_exchange(holder, own.word, AcqRel, Acquire)
                        .is_ok());
            if taken {
                if waiting {
                    shared.waiters[own.slot / 64].fetch_and(!(1 << (own.slot % 64)), SeqCst);
                }
                break;
            }
            if !waiting {
                waiting = true;
                // SYNC(turn): the bit is set before the word is looked at again; `give_turn` looks
                // at the bits after it freed the word. One of the two sees the other.
                shared.waiters[own.slot / 64].fetch_or(1 << (own.slot % 64), SeqCst);
                fence(SeqCst);
                continue;
            }
            // Who stood still has lost its place among those that wait.
            shared.waiters[own.slot / 64].fetch_or(1 << (own.slot % 64), SeqCst);
            futex_wait(bell, rung, HOLDER_CHECK);
        }
        let mut from = shared.compute_until_ns.load(Acquire);
        if shared.last.swap(own.word, AcqRel) != own.word {
            shared.switches.fetch_add(1, Relaxed);
            if !self.profile.idle_turn_free {
                // Nobody knows whose work comes before it is there.
                from = from.max(ready_ns);
            }
            let turn_ns = self.scaled(self.profile.switch_ns);
            let taken = &self.slot_device(own.slot, device).turn_ns;
            taken.fetch_add(turn_ns, Relaxed);
            from = from.max(clock::now_ns().saturating_sub(CATCH_UP_NS)) + turn_ns;
        }
        from
    }

    /// True when another live process waits for the compute engine.
    pub fn turn_wanted(&self, device: usize) -> bool {
        let Some(own) = self.own() else { return false };
        self.next_waiter(device, own.slot).is_some()
    }

    /// Hands the compute engine, busy until `until_ns`, to the next waiting process, or leaves it
    /// free.
    pub fn give_turn(&self, device: usize, until_ns: u64) {
        let Some(own) = self.own() else { return };
        let shared = &self.state().devices[device];
        shared.compute_until_ns.fetch_max(until_ns, AcqRel);
        if let Some(next) = self.next_in_turn(device, own.slot) {
            self.hand(device, own.word, next);
            return;
        }
        if shared
            .turn
            .compare_exchange(own.word, 0, AcqRel, Acquire)
            .is_ok()
        {
            // SYNC(turn): see `take_turn`.
            fence(SeqCst);
            if let Some(next) = self.next_waiter(device, own.slot) {
                self.hand(device, 0, next);
            }
        }
    }

    fn hand(&self, device: usize, from: u64, to: usize) {
        let word = turn_word(to, self.state().slots[to].generation.load(Acquire));
        if self.state().devices[device]
            .turn
            .compare_exchange(from, word, AcqRel, Acquire)
            .is_ok()
        {
            let bell = &self.slot_device(to, device).bell;
            bell.fetch_add(1, AcqRel);
            futex_wake(bell);
        }
    }

    /// Notes that this process used the engine for longer than its slice, because host code that
    /// stands for a kernel cannot be stopped half way.
    pub fn overran(&self, device: usize, ns: u64) {
        if let Some(own) = self.own() {
            self.slot_device(own.slot, device)
                .debt_ns
                .fetch_add(ns, Relaxed);
        }
    }

    /// The next process in turn; one in debt loses its turn for every slice that it owes.
    fn next_in_turn(&self, device: usize, after: usize) -> Option<usize> {
        let slice = self.scaled(self.profile.timeslice_ns).max(1);
        let waiting: Vec<usize> = self.waiters(device, after).collect();
        let mut best = None;
        for slot in &waiting {
            let debt = &self.slot_device(*slot, device).debt_ns;
            let owed = debt.load(Relaxed);
            if owed < slice {
                best = Some(*slot);
                break;
            }
            debt.store(owed - slice, Relaxed);
        }
        best.or_else(|| waiting.first().copied())
    }

    fn next_waiter(&self, device: usize, after: usize) -> Option<usize> {
        self.waiters(device, after).next()
    }

    /// Live waiting slots other than `after`, in the order of turns.
    fn waiters(&self, device: usize, after: usize) -> impl Iterator<Item = usize> {
        let shared = &self.state().devices[device];
        let words: [u64; WAITER_WORDS] = std::array::from_fn(|at| shared.waiters[at].load(SeqCst));
        let any = words.iter().any(|word| *word != 0);
        (1..SLOTS)
            .take_while(move |_| any)
            .map(move |step| (after + step) % SLOTS)
            .filter(move |slot| words[slot / 64] & (1 << (slot % 64)) != 0)
            .filter(move |slot| {
                let alive = self.alive(*slot);
                if !alive {
                    self.state().devices[device].waiters[slot / 64]
                        .fetch_and(!(1 << (slot % 64)), SeqCst);
                }
                alive
            })
    }

    /// Whether the engine is this process's: it may have been taken away while the process stood
    /// still.
    pub fn has_turn(&self, device: usize) -> bool {
        self.own()
            .is_some_and(|own| self.state().devices[device].turn.load(Acquire) == own.word)
    }

    /// Whether the holder's process was stopped by a signal; then it waits no longer either.
    fn skip_if_stopped(&self, device: usize, word: u64) -> bool {
        let slot = (word & 0xffff) as usize;
        let Some(slot) = slot.checked_sub(1).filter(|slot| *slot < SLOTS) else {
            return false;
        };
        let stopped = is_stopped(self.pid_of(slot));
        if stopped {
            self.state().devices[device].waiters[slot / 64].fetch_and(!(1 << (slot % 64)), SeqCst);
        }
        stopped
    }

    fn holds_alive(&self, word: u64) -> bool {
        self.lives(word, self.own())
    }

    /// Whether the process that a word names (a slot and its generation) is alive.
    pub(super) fn lives(&self, word: u64, own: Option<Own>) -> bool {
        let slot = (word & 0xffff) as usize;
        if !(1..=SLOTS).contains(&slot) {
            return false;
        }
        word == turn_word(
            slot - 1,
            self.state().slots[slot - 1].generation.load(Acquire),
        ) && self.alive_without_own(slot - 1, own)
    }
}
