//! When each chunk was last known to be used.
//!
//! Two things tell. Copies and memsets of the program say their addresses, whenever they are made.
//! Kernels say theirs in their parameters, which are read ([`operands`](super::operands)) and
//! looked up ([`spans`](super::spans)) while a *look* is on. The agent begins one once a second
//! where the memories of a device's jobs do not fit together, where memory of this job lies in host
//! memory, or where chunks have come or gone; after each order; and every five seconds otherwise,
//! for a limit may be lowered at any time. A look is over after [`LAUNCHES`] launches, or when two
//! ends of an iteration have been seen, as far as this process knows of any (`sublet_step`, the
//! signature that the arbiter has named): between them everything that an iteration launches has
//! been launched.
//!
//! What is missed: addresses that lie in device memory, in `__constant__` memory and in encoded
//! tensor maps, and what graphs launch; and what two threads launch at the very same moment, of
//! which one is noted. So this orders what is moved, and never says that something is not needed.
//!
//! The chunks' addresses are drawn from the table of chunks at the beginning of a look, so that a
//! launch never waits for that table: it tries a lock that is held for a search or for the exchange
//! of two lists, and where that is taken it notes nothing.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};

use channel::MAX_DEVICES;
use shim_ffi::Symbol;

use super::chunk::{self, Chunks};
use super::spans::Spans;
use super::tuning;
use crate::attachment::client::Attached;
use crate::driver::real;
use crate::gate::quiesce;
use crate::ground::clock::now_ns;

/// Launches of one look: an iteration of training is hundreds to a few thousand. One of four
/// parameters takes some 0.3 us longer meanwhile on the simulated driver: a look in a second is a
/// thousandth of the time of a thread that launches without a pause.
const LAUNCHES: u32 = 4096;
/// Looks begin so often where something may move soon, and so often where nothing asks for it.
const SOON_NS: u64 = 1_000_000_000;
const QUIET_NS: u64 = 5_000_000_000;
/// Ends of iterations after which a look is over.
const BOUNDARIES: u32 = 2;

/// Launches that the look has left; 0: there is none.
static LEFT: AtomicU32 = AtomicU32::new(0);
/// Ends of iterations that the look has seen.
static SEEN: AtomicU32 = AtomicU32::new(0);
static SPANS: Mutex<Spans> = Mutex::new(Spans::new());

/// In a forked child.
pub(super) fn forget() {
    LEFT.store(0, Ordering::Relaxed);
}

// ----------------------------------------------------------------------------------------------
// Notes
// ----------------------------------------------------------------------------------------------

/// Notes what a call of the program's uses. Where another thread is at it just now, nothing is
/// noted: nobody waits here.
pub(super) fn note(act: impl FnOnce(&mut Spans)) {
    match SPANS.try_lock() {
        Ok(mut spans) => act(&mut spans),
        Err(TryLockError::Poisoned(poisoned)) => act(&mut poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => {}
    }
}

/// Tells the chunks what has been noted of them. The agent's, before it puts chunks in order.
pub(super) fn settle() {
    let noted = SPANS.lock().unwrap_or_else(PoisonError::into_inner).take();
    if !noted.is_empty() {
        chunk::with(|chunks| tell(chunks, &noted));
    }
}

/// Draws the addresses anew.
fn draw() {
    let mut drawn = chunk::with(|chunks| Spans::of(chunks.all.iter()));
    drawn.arrange();
    {
        let mut now = SPANS.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *now, &mut drawn);
    }
    let noted = drawn.take();
    chunk::with(|chunks| tell(chunks, &noted));
}

fn tell(chunks: &mut Chunks, noted: &[(u64, u64)]) {
    for (id, used) in noted {
        // One that was freed meanwhile is not there any more; numbers are not given again.
        if let Some(chunk) = chunks.all.get_mut(id) {
            chunk.used = chunk.used.max(*used);
        }
    }
}

// ----------------------------------------------------------------------------------------------
// Looks
// ----------------------------------------------------------------------------------------------

/// Whether parameters of launches are to be read.
#[inline(always)]
pub(super) fn looking() -> bool {
    LEFT.load(Ordering::Relaxed) != 0
}

/// One launch of the look; false where it is over.
pub(super) fn take_launch() -> bool {
    let less = |left: u32| left.checked_sub(1);
    LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
        .is_ok()
}

/// An iteration of the program has ended.
#[inline]
pub(crate) fn iteration_ended() {
    if looking() && SEEN.fetch_add(1, Ordering::Relaxed) + 1 >= BOUNDARIES {
        LEFT.store(0, Ordering::Relaxed);
    }
}

fn begin_look() {
    SEEN.store(0, Ordering::Relaxed);
    LEFT.store(LAUNCHES, Ordering::Relaxed);
}

/// When the agent has begun its last look, and of what.
#[derive(Default)]
pub(super) struct Looks {
    begun_ns: u64,
    /// Changes with the set of chunks.
    chunks: (u64, usize),
    can: Option<bool>,
}

impl Looks {
    /// The next look is due at once.
    pub(super) fn again(&mut self) {
        self.begun_ns = 0;
    }

    /// Begins a look where one is due.
    pub(super) fn tend(&mut self, attached: &Attached) {
        let now = now_ns();
        let since_ns = now.saturating_sub(self.begun_ns);
        if since_ns < SOON_NS || quiesce::is_closed() || !tuning::looks() {
            return;
        }
        let chunks = chunk::with(|chunks| chunks.set());
        let soon = self.chunks != chunks
            || attached.end.arbiter.residency().prepare
            || (0..MAX_DEVICES).any(|device| chunk::overflow_bytes(device) != 0);
        if !soon && since_ns < QUIET_NS {
            return;
        }
        (self.begun_ns, self.chunks) = (now, chunks);
        draw();
        if *self.can.get_or_insert_with(driver_can) {
            begin_look();
        }
    }
}

/// Whether the driver tells how a kernel's parameters lie (12.4 and later). Addresses of copies are
/// noted all the same.
fn driver_can() -> bool {
    real::exported(Symbol::cuFuncGetParamInfo)
}

#[cfg(test)]
mod tests {
    use super::super::agent::give_host_copies_back;
    use super::super::chunk::{self, Chunk, Place};
    use super::super::engine::in_place;
    use super::super::host_copy::HostCopy;
    use super::super::moments::tick;
    use super::super::spans::tests::chunk;
    use super::*;

    #[test]
    fn what_was_used_last_goes_last_and_comes_back_first() {
        const DEVICE: usize = 7;
        const AT: u64 = 0x7700_0000_0000;
        let ids: Vec<u64> = chunk::with(|chunks| {
            (0..4)
                .map(|at| chunks.add(chunk(AT + at * 200, 100, true, DEVICE)))
                .collect()
        });
        let order = |of: [usize; 4]| of.map(|at| ids[at]);
        assert_eq!(in_place(DEVICE, Place::Resident), order([0, 1, 2, 3]));
        draw();
        note(|spans| {
            spans.copied(AT + 200, 8);
            spans.pointed_to(AT);
        });
        assert_eq!(in_place(DEVICE, Place::Resident), order([2, 3, 1, 0]));
        note(|spans| spans.pointed_to(AT + 400));
        draw();
        assert_eq!(in_place(DEVICE, Place::Resident), order([3, 1, 0, 2]));
        // One that went before anybody asked, and a lock that somebody has.
        note(|spans| spans.pointed_to(AT + 600));
        chunk::with(|chunks| chunks.all.remove(&ids[3]));
        let held = SPANS.lock().expect("nobody has panicked");
        note(|spans| spans.pointed_to(AT + 200));
        drop(held);
        assert_eq!(in_place(DEVICE, Place::Resident), order([1, 0, 2, 3])[..3]);
        chunk::with(|chunks| chunks.all.retain(|id, _| !ids.contains(id)));
    }

    #[test]
    fn what_goes_last_gives_its_host_copy_back_first() {
        const DEVICE: usize = 6;
        let bytes = chunk::GRANULE;
        let ids: Vec<u64> = (0..3)
            .map(|_| {
                let host_copy = HostCopy::take(bytes);
                assert!(host_copy.is_some());
                let of = chunk(0x6600_0000_0000, bytes, true, DEVICE);
                chunk::with(|chunks| chunks.add(Chunk { host_copy, ..of }))
            })
            .collect();
        chunk::with(|chunks| tell(chunks, &[(ids[1], tick())]));
        let have = || -> Vec<bool> {
            chunk::with(|chunks| {
                let host_copy = |id| chunks.all[id].host_copy.is_some();
                ids.iter().map(host_copy).collect()
            })
        };
        give_host_copies_back(1);
        assert_eq!(have(), [true, false, true]);
        give_host_copies_back(bytes);
        assert_eq!(have(), [true, false, false]);
        chunk::with(|chunks| chunks.all.retain(|id, _| !ids.contains(id)));
    }

    #[test]
    fn a_look_ends_after_so_many_launches_or_two_ends_of_an_iteration() {
        assert!(!looking() && !take_launch());
        iteration_ended();
        begin_look();
        assert!((0..LAUNCHES).all(|_| looking() && take_launch()));
        assert!(!looking() && !take_launch());
        begin_look();
        iteration_ended();
        assert!(take_launch());
        iteration_ended();
        assert!(!looking() && !take_launch());
    }
}
