//! When each piece was last known to be used.
//!
//! Two things tell. Copies and memsets of the program say their addresses, whenever they are made. Kernels say theirs in their
//! parameters, which are read ([`operands`](super::operands)) while a *look* is on: the agent begins one once a second where the memories
//! of a device's jobs do not fit together, where memory of this job lies in host memory, or where pieces have come or gone; after each
//! order; and every five seconds otherwise, for a limit may be lowered at any time. A look is over after [`LAUNCHES`] launches, or when
//! two ends of an iteration have been seen, as far as this process knows of any (`sublet_step`, the signature that the arbiter has
//! named): between them everything that an iteration launches has been launched.
//!
//! An address stands for what follows it in its allocation, up to the next one seen there, for nobody says how far a kernel goes from
//! it. An allocation is a range of an arena; what lies in a mapping of the program's own is not known, and there the address stands for
//! the piece that it lies in.
//!
//! What is missed: addresses that lie in device memory, in `__constant__` memory and in encoded tensor maps, and what graphs launch; and
//! what two threads launch at the very same moment, of which one is noted. So this orders what is moved, and never says that something is
//! not needed.
//!
//! The pieces' addresses are drawn from the table of pieces at the beginning of a look, so that a launch never waits for that table: it
//! tries a lock that is held for a search or for the exchange of two lists, and where that is taken it notes nothing.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};

use channel::MAX_DEVICES;
use shim_ffi::Symbol;

use super::piece::{self, Piece, Pieces};
use super::{latch, tuning};
use crate::client::{Attached, now_ns};
use crate::real;

/// Launches of one look: an iteration of training is hundreds to a few thousand. One of four parameters takes some 0.3 us longer
/// meanwhile on the simulated driver: a look in a second is a thousandth of the time of a thread that launches without a pause.
const LAUNCHES: u32 = 4096;
/// Looks begin so often where something may move soon, and so often where nothing asks for it.
const SOON_NS: u64 = 1_000_000_000;
const QUIET_NS: u64 = 5_000_000_000;
/// Ends of iterations after which a look is over.
const BOUNDARIES: u32 = 2;

/// Moments: the order of uses, and no time.
static CLOCK: AtomicU64 = AtomicU64::new(0);
/// Launches that the look has left; 0: there is none.
static LEFT: AtomicU32 = AtomicU32::new(0);
/// Ends of iterations that the look has seen.
static SEEN: AtomicU32 = AtomicU32::new(0);
static RANGES: Mutex<Ranges> = Mutex::new(Ranges::new());

/// The next moment, for [`Piece::used`].
pub(super) fn tick() -> u64 {
    CLOCK.fetch_add(1, Ordering::Relaxed) + 1
}

/// In a forked child.
pub(super) fn forget() {
    LEFT.store(0, Ordering::Relaxed);
}

// ---------------------------------------------------------------------------------------------------------------------
// Addresses
// ---------------------------------------------------------------------------------------------------------------------

/// Where a piece is mapped, and what was noted of it since that was last asked for.
#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    end: u64,
    piece: u64,
    of_arena: bool,
    /// Whether it belongs to the allocation that the range before it lies in.
    goes_on: bool,
    /// When a kernel was told an address in it, and when it was copied to or from; 0: not.
    pointed: u64,
    copied: u64,
}

/// Where pieces are mapped, in order of their addresses.
#[derive(Debug)]
pub(super) struct Ranges {
    all: Vec<Range>,
    /// Whether any of them was used.
    noted: bool,
}

impl Ranges {
    const fn new() -> Self {
        Self {
            all: Vec::new(),
            noted: false,
        }
    }

    /// In any order yet.
    fn of<'a>(pieces: impl Iterator<Item = (&'a u64, &'a Piece)>) -> Self {
        let mut all = Vec::new();
        for (id, piece) in pieces {
            all.extend(piece.mappings.iter().map(|mapping| Range {
                start: mapping.address,
                end: mapping.address.saturating_add(piece.bytes),
                piece: *id,
                of_arena: piece.of_arena,
                goes_on: false,
                pointed: 0,
                copied: 0,
            }));
        }
        Self { all, noted: false }
    }

    /// Between allocations of an arena there is a gap, so what touches is one.
    fn arrange(&mut self) {
        self.all.sort_unstable_by_key(|range| range.start);
        let mut before = None;
        for range in &mut self.all {
            range.goes_on = range.of_arena && before == Some(range.start);
            before = range.of_arena.then_some(range.end);
        }
    }

    /// An address that a kernel is told, or a word that looks like one.
    pub(super) fn pointed_to(&mut self, address: u64) {
        let after = self.all.partition_point(|range| range.start <= address);
        let range = after.checked_sub(1).and_then(|at| self.all.get_mut(at));
        if let Some(range) = range.filter(|range| address < range.end) {
            range.pointed = tick();
            self.noted = true;
        }
    }

    /// Addresses that a copy touches, all of them.
    pub(super) fn copied(&mut self, start: u64, bytes: u64) {
        let end = start.saturating_add(bytes);
        let first = self.all.partition_point(|range| range.end <= start);
        let touched = self.all.iter_mut().skip(first);
        let mut now = 0;
        for range in touched.take_while(|range| range.start < end) {
            if now == 0 {
                now = tick();
            }
            range.copied = now;
        }
        self.noted |= now != 0;
    }

    /// What was used since this was last asked, as pieces and moments.
    fn take(&mut self) -> Vec<(u64, u64)> {
        if !std::mem::take(&mut self.noted) {
            return Vec::new();
        }
        let mut told = 0;
        let used = self.all.iter_mut().filter_map(|range| {
            let pointed = std::mem::take(&mut range.pointed);
            if pointed != 0 || !range.goes_on {
                told = pointed;
            }
            let used = told.max(std::mem::take(&mut range.copied));
            (used != 0).then_some((range.piece, used))
        });
        used.collect()
    }
}

/// Notes what a call of the program's uses. Where another thread is at it just now, nothing is noted: nobody waits here.
pub(super) fn note(act: impl FnOnce(&mut Ranges)) {
    match RANGES.try_lock() {
        Ok(mut ranges) => act(&mut ranges),
        Err(TryLockError::Poisoned(poisoned)) => act(&mut poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => {}
    }
}

/// Tells the pieces what has been noted of them. The agent's, before it puts pieces in order.
pub(super) fn settle() {
    let noted = RANGES.lock().unwrap_or_else(PoisonError::into_inner).take();
    if !noted.is_empty() {
        piece::with(|pieces| tell(pieces, &noted));
    }
}

/// Draws the addresses anew.
fn draw() {
    let mut drawn = piece::with(|pieces| Ranges::of(pieces.all.iter()));
    drawn.arrange();
    {
        let mut now = RANGES.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *now, &mut drawn);
    }
    let noted = drawn.take();
    piece::with(|pieces| tell(pieces, &noted));
}

fn tell(pieces: &mut Pieces, noted: &[(u64, u64)]) {
    for (id, used) in noted {
        // One that was freed meanwhile is not there any more; numbers are not given again.
        if let Some(piece) = pieces.all.get_mut(id) {
            piece.used = piece.used.max(*used);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Looks
// ---------------------------------------------------------------------------------------------------------------------

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
    /// Changes with the set of pieces.
    pieces: (u64, usize),
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
        if since_ns < SOON_NS || latch::is_closed() || !tuning::looks() {
            return;
        }
        let pieces = piece::with(|pieces| pieces.set());
        let soon = self.pieces != pieces
            || attached.end.arbiter.residency().prepare
            || (0..MAX_DEVICES).any(|device| piece::overflow_bytes(device) != 0);
        if !soon && since_ns < QUIET_NS {
            return;
        }
        (self.begun_ns, self.pieces) = (now, pieces);
        draw();
        if *self.can.get_or_insert_with(driver_can) {
            begin_look();
        }
    }
}

/// Whether the driver tells how a kernel's parameters lie (12.4 and later). Addresses of copies are noted all the same.
fn driver_can() -> bool {
    real::exported(Symbol::cuFuncGetParamInfo)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::engine::in_place;
    use super::super::piece::{self, Mapping, Piece, Place};
    use super::*;

    fn piece(address: u64, bytes: u64, of_arena: bool, device: usize) -> Piece {
        Piece {
            bytes,
            device,
            ordinal: 0,
            context: 1,
            properties: piece::on_device(0),
            handle: 1,
            place: Place::Resident,
            mappings: vec![Mapping {
                address,
                access: vec![piece::access_from(0)],
            }],
            shadow: None,
            used: 0,
            stays: false,
            references: 0,
            of_arena,
            sync_memops: false,
        }
    }

    /// Pieces by start, length and whether they are an arena's, numbered from 1 on.
    pub(in super::super) fn ranges(of: &[(u64, u64, bool)]) -> Ranges {
        let pieces: Vec<(u64, Piece)> = (1..)
            .zip(of)
            .map(|(id, (start, bytes, of_arena))| (id, piece(*start, *bytes, *of_arena, 0)))
            .collect();
        let mut of = Ranges::of(pieces.iter().map(|(id, piece)| (id, piece)));
        of.arrange();
        of
    }

    /// Numbers of the pieces that were used, the latest last.
    pub(in super::super) fn used(ranges: &mut Ranges) -> Vec<u64> {
        let mut taken = ranges.take();
        taken.sort_unstable_by_key(|(id, used)| (*used, *id));
        taken.into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn an_address_stands_for_what_follows_it_in_its_allocation() {
        let mut of = ranges(&[
            (5000, 100, true), // 1 and 3 are one allocation, in spite of their numbers
            (1000, 100, true),
            (5100, 100, true),
            (5300, 100, true),
            (9000, 100, false), // 5 and 6 are mapped by the program
            (9100, 100, false),
        ]);
        for (address, pieces) in [
            (0, vec![]),
            (999, vec![]),
            (1000, vec![2]),
            (1099, vec![2]),
            (1100, vec![]),
            (5000, vec![1, 3]),
            (5099, vec![1, 3]),
            (5100, vec![3]),
            (5200, vec![]),
            (5300, vec![4]),
            (9000, vec![5]),
            (9199, vec![6]),
            (u64::MAX, vec![]),
        ] {
            of.pointed_to(address);
            assert_eq!(used(&mut of), pieces, "{address}");
        }
        of.pointed_to(9000);
        of.pointed_to(1000);
        of.pointed_to(5300);
        of.pointed_to(9050);
        assert_eq!(used(&mut of), [2, 4, 5], "in order, and each once");
        assert_eq!(used(&mut of), [], "until it is asked for");
    }

    #[test]
    fn an_address_stands_for_nothing_beyond_the_next_one() {
        let mut of = ranges(&[
            (1000, 100, true),
            (1100, 100, true),
            (1200, 100, true),
            (1300, 100, true),
        ]);
        of.pointed_to(1200);
        of.pointed_to(1000);
        assert_eq!(used(&mut of), [3, 4, 1, 2]);
        // What was copied says nothing of what follows.
        of.pointed_to(1100);
        of.copied(1200, 1);
        assert_eq!(used(&mut of), [2, 4, 3]);
        of.copied(1000, 100);
        assert_eq!(used(&mut of), [1]);
    }

    #[test]
    fn a_copy_touches_all_that_it_lies_in_and_no_more() {
        let mut of = ranges(&[(1000, 100, true), (1100, 100, true), (1300, 100, false)]);
        for (start, bytes, pieces) in [
            (1000, 0, vec![]),
            (1000, 1, vec![1]),
            (1099, 1, vec![1]),
            (1099, 2, vec![1, 2]),
            (900, 100, vec![]),
            (900, 101, vec![1]),
            (1200, 100, vec![]),
            (1150, 151, vec![2, 3]),
            (1399, u64::MAX, vec![3]),
            (u64::MAX, u64::MAX, vec![]),
        ] {
            of.copied(start, bytes);
            assert_eq!(used(&mut of), pieces, "{start} {bytes}");
        }
    }

    #[test]
    fn what_was_used_last_leaves_last_and_comes_back_first() {
        const DEVICE: usize = 7;
        const AT: u64 = 0x7700_0000_0000;
        let ids: Vec<u64> = piece::with(|pieces| {
            (0..4)
                .map(|at| pieces.add(piece(AT + at * 200, 100, true, DEVICE)))
                .collect()
        });
        let order = |of: [usize; 4]| of.map(|at| ids[at]);
        assert_eq!(in_place(DEVICE, Place::Resident), order([0, 1, 2, 3]));
        draw();
        note(|ranges| {
            ranges.copied(AT + 200, 8);
            ranges.pointed_to(AT);
        });
        assert_eq!(in_place(DEVICE, Place::Resident), order([2, 3, 1, 0]));
        note(|ranges| ranges.pointed_to(AT + 400));
        draw();
        assert_eq!(in_place(DEVICE, Place::Resident), order([3, 1, 0, 2]));
        // One that went before anybody asked, and a lock that somebody has.
        note(|ranges| ranges.pointed_to(AT + 600));
        piece::with(|pieces| pieces.all.remove(&ids[3]));
        let held = RANGES.lock().expect("nobody has panicked");
        note(|ranges| ranges.pointed_to(AT + 200));
        drop(held);
        assert_eq!(in_place(DEVICE, Place::Resident), order([1, 0, 2, 3])[..3]);
        piece::with(|pieces| pieces.all.retain(|id, _| !ids.contains(id)));
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
