//! Events that processes share (`cuIpcGetEventHandle`): their last records, and which of those were
//! reached.
//!
//! An entry is free while no live process holds it, so a killed process leaves nothing behind. A
//! process that waits for a record looks at the entry, and whether the process that made the record
//! still lives. The record of a dead process counts as reached, since its work is gone. Records get
//! their numbers under a record lock of the event: a process that is killed while it makes a record
//! has made none.
//!
//! A record keeps its place until 32 more have been made. Then a wait for it becomes a wait for the
//! record that took the place.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::Duration;

use super::host::{futex_wait, futex_wake, image_number};
use super::layout::{EVENT_RECORDS, EventShared, RecordShared, SHARED_EVENTS, WAITER_WORDS};
use super::{DeviceState, LOCK_EVENT, LOCK_EVENTS, Own, SLOTS};
use crate::clock;

/// How often a thread that waits for a record looks whether the process that made it still lives.
const LOOK: Duration = Duration::from_millis(1);

/// Why an event cannot be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenError {
    /// It is this process's own.
    Own,
    /// There is no such event, or no longer.
    Gone,
}

/// This process's hold on a shared event.
pub struct SharedEvent {
    state: Arc<DeviceState>,
    at: usize,
    key: u64,
    /// This process has made it.
    made: bool,
}

impl EventShared {
    fn is_held_by(&self, slots: &[u64; WAITER_WORDS]) -> bool {
        let held =
            |(word, slots): (&std::sync::atomic::AtomicU64, &u64)| word.load(Acquire) & slots != 0;
        self.holders.iter().zip(slots).any(held)
    }

    fn record(&self, number: u64) -> &RecordShared {
        // PANIC: a remainder is below what it is the remainder of.
        &self.records[(number % EVENT_RECORDS as u64) as usize]
    }
}

impl DeviceState {
    fn events(&self) -> &[EventShared] {
        let used = self.state().header.events_used.load(Acquire) as usize;
        &self.state().events[..used.min(SHARED_EVENTS)]
    }

    /// One bit for each slot whose process lives.
    fn live_slots(&self, own: Option<Own>) -> [u64; WAITER_WORDS] {
        let mut live = [0; WAITER_WORDS];
        (0..SLOTS)
            .filter(|slot| self.alive_without_own(*slot, own))
            .for_each(|slot| live[slot / 64] |= 1 << (slot % 64));
        live
    }

    /// The slot's new process holds no event.
    pub(super) fn forget_events(&self, slot: usize) {
        let bit = 1 << (slot % 64);
        for event in self.events() {
            let word = &event.holders[slot / 64];
            if word.load(Relaxed) & bit != 0 {
                word.fetch_and(!bit, AcqRel);
            }
        }
    }

    /// Shared events that live processes hold.
    pub fn shared_events(&self) -> usize {
        let live = self.live_slots(self.own());
        let held = self.events().iter().filter(|event| event.is_held_by(&live));
        held.count()
    }

    fn take_event(&self, own: Own) -> Option<(usize, u64)> {
        let (known, live) = (self.events(), self.live_slots(Some(own)));
        let free = known.iter().position(|event| !event.is_held_by(&live));
        let at = free.unwrap_or(known.len());
        let event = self.state().events.get(at)?;
        let header = &self.state().header;
        let made = header.events_made.fetch_add(1, Relaxed);
        // Not that of an event in another state's file either, as far as random numbers go.
        let key = ((image_number() & !1) ^ (made << 1)) | 1;
        event.key.store(0, Relaxed);
        event.last.store(0, Relaxed);
        event
            .records
            .iter()
            .for_each(|record| record.word.store(0, Relaxed));
        event.holders.iter().for_each(|word| word.store(0, Relaxed));
        self.hold_event(event, at, own);
        event.creator.store(own.word, Relaxed);
        header.events_used.fetch_max(at as u64 + 1, AcqRel);
        event.key.store(key, Release);
        Some((at, key))
    }

    fn open_event(&self, at: usize, key: u64, own: Own) -> Result<(), OpenError> {
        let event = self.events().get(at).ok_or(OpenError::Gone)?;
        if event.key.load(Acquire) != key {
            return Err(OpenError::Gone);
        }
        let creator = event.creator.load(Acquire);
        if creator == own.word {
            return Err(OpenError::Own);
        }
        if !self.lives(creator, Some(own)) {
            return Err(OpenError::Gone);
        }
        self.hold_event(event, at, own);
        Ok(())
    }

    fn hold_event(&self, event: &EventShared, at: usize, own: Own) {
        let mut held = self.own_events.lock();
        *held.entry(at).or_default() += 1;
        event.holders[own.slot / 64].fetch_or(1 << (own.slot % 64), AcqRel);
    }

    fn let_go_event(&self, at: usize) {
        let Some(own) = self.own() else { return };
        let mut held = self.own_events.lock();
        if let Some(count) = held.get_mut(&at) {
            *count -= 1;
            if *count == 0 {
                held.remove(&at);
                let word = &self.state().events[at].holders[own.slot / 64];
                word.fetch_and(!(1 << (own.slot % 64)), AcqRel);
            }
        }
    }
}

impl SharedEvent {
    /// Makes an event that other processes can open; none where there are too many.
    pub fn create(state: &Arc<DeviceState>) -> Option<Arc<Self>> {
        let taken = state.locked_at(LOCK_EVENTS, |own| state.take_event(own));
        let (at, key) = taken??;
        let state = state.clone();
        let made = true;
        Some(Arc::new(Self {
            state,
            at,
            key,
            made,
        }))
    }

    /// Opens the event of another process.
    ///
    /// # Errors
    /// It is this process's, or gone.
    pub fn open(state: &Arc<DeviceState>, at: usize, key: u64) -> Result<Arc<Self>, OpenError> {
        state
            .locked_at(LOCK_EVENTS, |own| state.open_event(at, key, own))
            .unwrap_or(Err(OpenError::Gone))?;
        let state = state.clone();
        let made = false;
        Ok(Arc::new(Self {
            state,
            at,
            key,
            made,
        }))
    }

    /// What another process opens it by; none for one that was opened itself.
    pub fn name(&self) -> Option<(usize, u64)> {
        self.made.then_some((self.at, self.key))
    }

    fn event(&self) -> &EventShared {
        // PANIC: the number of an entry that was taken or opened.
        &self.state.state().events[self.at]
    }

    /// Where this process has made it, nobody can open it any more.
    pub fn withdraw(&self) {
        if self.made {
            self.event().creator.store(0, Release);
        }
    }

    /// Begins a record of this process, the last one from now on; returns its number.
    pub fn begin(&self) -> Option<u64> {
        let event = self.event();
        self.state.locked_at(LOCK_EVENT + self.at as i64, |own| {
            let number = event.last.load(Relaxed) + 1;
            let record = event.record(number);
            // Before the word: who finds a record that is not reached finds who made it.
            record.by.store(own.word, Release);
            record.word.store(number * 2, Release);
            // SYNC(shared record): pairs with the Acquire load in `last`; publishes the record.
            event.last.store(number, Release);
            number
        })
    }

    /// Number of the last record.
    pub fn last(&self) -> Option<u64> {
        let number = self.event().last.load(Acquire);
        (number != 0).then_some(number)
    }

    /// A record of this process was reached at `time_ns`.
    pub fn reach(&self, number: u64, time_ns: u64) {
        let event = self.event();
        let record = event.record(number);
        if record.word.load(Relaxed) != number * 2 {
            return;
        }
        record.time_ns.store(time_ns, Relaxed);
        // SYNC(shared reach): pairs with the Acquire load in `reached`; publishes the time. A later
        // record may have taken the place meanwhile.
        let _ = record
            .word
            .compare_exchange(number * 2, number * 2 + 1, AcqRel, Relaxed);
        event.bell.fetch_add(1, Release);
        futex_wake(&event.bell);
    }

    /// When a record was reached, if it was; `look`: ask whether who made it still lives.
    pub fn reached(&self, number: u64, look: bool) -> Option<u64> {
        let record = self.event().record(number);
        let reached = || {
            let is_reached = record.word.load(Acquire) & 1 != 0;
            is_reached.then(|| record.time_ns.load(Relaxed))
        };
        reached().or_else(|| {
            if !look || self.state.lives(record.by.load(Acquire), self.state.own()) {
                return None;
            }
            // It may have been the last thing that the process did.
            reached().or_else(|| Some(clock::now_ns()))
        })
    }

    /// Waits until a record is reached; returns when it was.
    pub fn wait(&self, number: u64) -> u64 {
        let bell = &self.event().bell;
        loop {
            let rung = bell.load(Acquire);
            if let Some(reached_ns) = self.reached(number, true) {
                return reached_ns;
            }
            futex_wait(bell, rung, LOOK);
        }
    }
}

impl Drop for SharedEvent {
    fn drop(&mut self) {
        self.withdraw();
        self.state.let_go_event(self.at);
    }
}
