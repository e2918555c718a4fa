//! Which thread uses which slot of our page for which stream.
//!
//! A slot is a row of completion marks of one thread in one stream, for two threads cannot agree on
//! the order of their marks without a lock around the driver. There are some hundred of them,
//! however many threads and streams a program has. So any slot of which nothing is outstanding may
//! be taken over, whichever thread has it; who finds its slot gone takes another. What is looked at
//! to find one is bounded: where a slot is, is remembered in a table of hints by thread and stream;
//! a free one comes from a set of bits, else is one that was never used, else one that a hand finds
//! which goes round and spares what was used since it came by.
//!
//! A stream that is about to be destroyed is taken off its slots first ([`of_stream`]): while a
//! slot is held, nobody else marks, and afterwards nobody finds the stream any more. The word that
//! says so is [`channel::Owner`].

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

use channel::{ClientHalf, Hold, Holding, Owner, STREAM_SLOTS, StreamSlot};

use crate::gate::pace::StreamRate;

/// What this process knows of a slot and looks at where a thread turns to another stream: a line.
#[repr(C, align(64))]
pub(crate) struct Slot {
    pub(crate) owner: Owner,
    /// The stream; 0: none.
    key: AtomicUsize,
    /// The context that was its thread's current one: default streams are of it.
    context: AtomicUsize,
    /// The [`Thread::turn`](crate::ground::thread::Thread) in which its thread may turn to it
    /// without a look at whose it is; 0: none.
    pub(crate) turn: AtomicU64,
    /// Weight of what went to the stream in this batch, in nanoseconds, but for what went there
    /// since the thread turned to it.
    pub(crate) spent_ns: AtomicU64,
    /// Weight that may go to the stream between two of its marks, in nanoseconds.
    pub(crate) allowance_ns: AtomicU64,
    /// Batch of its thread that it is in, see [`crate::gate::marks`].
    pub(crate) batch: AtomicU32,
    /// The place of the slot that its thread turned to from here the last time.
    pub(crate) next: AtomicU32,
    /// It was marked before a call that waits or asks, and what is in flight not bounded since.
    pub(crate) flushed: AtomicBool,
}

const _: () = assert!(size_of::<Slot>() == 64);

/// Entries of the table of slots. The first is nobody's, ever, and so are those after all slots,
/// which make it a power of two.
const TABLE: usize = 2 * STREAM_SLOTS;

/// Dense: all that a program with many streams looks at lies in a few pages, whose lines do not
/// drive out each other.
static SLOTS: [Slot; TABLE] = [const {
    Slot {
        owner: Owner::new(),
        key: AtomicUsize::new(0),
        context: AtomicUsize::new(0),
        turn: AtomicU64::new(0),
        spent_ns: AtomicU64::new(0),
        allowance_ns: AtomicU64::new(0),
        batch: AtomicU32::new(0),
        next: AtomicU32::new(0),
        flushed: AtomicBool::new(false),
    }
}; TABLE];

/// How the stream of each slot gets on.
static RATES: [StreamRate; STREAM_SLOTS] = [const { StreamRate::new() }; STREAM_SLOTS];

/// The stream of each slot once more, apart: a thread that destroys a stream looks at all of them.
static KEYS: [AtomicUsize; STREAM_SLOTS] = [const { AtomicUsize::new(0) }; STREAM_SLOTS];

/// Slots that were used and are nobody's, as bits. The last marks of some may be outstanding.
static FREE: [AtomicU64; STREAM_SLOTS / 64] = [const { AtomicU64::new(0) }; STREAM_SLOTS / 64];

/// Where the hand is.
static HAND: AtomicUsize = AtomicUsize::new(0);

/// Slots that are looked at for one that can be taken over, at most.
const LOOKS: usize = 32;
/// Of the ones that are nobody's.
const FREE_LOOKS: usize = 8;

/// Sets of hints, and the hints of one: indices plus one, in a word.
const SETS: usize = 1024;
const WAYS: u32 = 4;
static HINTS: [AtomicU64; SETS] = [const { AtomicU64::new(0) }; SETS];

/// Streams that were destroyed, ever.
static DESTROYED: AtomicU32 = AtomicU32::new(0);
/// Threads that were numbered.
static THREADS: AtomicU32 = AtomicU32::new(0);

/// In a forked child: nothing of the parent's is ours.
pub(crate) fn forget() {
    for (slot, key) in SLOTS.iter().skip(1).zip(&KEYS) {
        slot.owner.forget();
        slot.key.store(0, Ordering::Relaxed);
        slot.turn.store(0, Ordering::Relaxed);
        key.store(0, Ordering::Relaxed);
    }
    FREE.iter()
        .for_each(|bits| bits.store(0, Ordering::Relaxed));
    HAND.store(0, Ordering::Relaxed);
}

/// A number for a thread, never 0; no other thread has it.
pub(crate) fn number() -> u32 {
    match THREADS.fetch_add(1, Ordering::Relaxed).wrapping_add(1) {
        0 => number(),
        number => number,
    }
}

/// Slot `index`.
#[inline(always)]
pub(crate) fn at(index: usize) -> &'static Slot {
    &SLOTS[index % STREAM_SLOTS + 1] // PANIC: the modulus is half of the length.
}

/// Where a slot is: its number in the table in bytes, so that the launch path does not multiply; 0:
/// nowhere.
#[inline(always)]
pub(crate) const fn place(index: usize) -> u32 {
    ((index % STREAM_SLOTS + 1) * size_of::<Slot>()) as u32 // CAST: below 2^17.
}

/// The index of the slot at that place.
pub(crate) const fn index_of(place: u32) -> Option<usize> {
    (place as usize / size_of::<Slot>()).checked_sub(1)
}

/// The slot at that place, or one that is nobody's.
#[inline(always)]
pub(crate) fn placed(place: u32) -> &'static Slot {
    &SLOTS[place as usize / size_of::<Slot>() % TABLE] // PANIC: the modulus is the length.
}

/// How the stream of slot `index` gets on.
pub(crate) fn rate(index: usize) -> &'static StreamRate {
    &RATES[index % STREAM_SLOTS] // PANIC: the modulus is the length.
}

/// The stream of slot `index`.
pub(crate) fn key(index: usize) -> usize {
    KEYS[index % STREAM_SLOTS].load(Ordering::Acquire) // PANIC: as above.
}

/// The context of slot `index`.
pub(crate) fn context(index: usize) -> usize {
    at(index).context.load(Ordering::Relaxed)
}

#[inline(always)]
fn hints(who: u32, stream: usize) -> &'static AtomicU64 {
    const MIX: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = (stream as u64 ^ u64::from(who) << 40).wrapping_mul(MIX);
    &HINTS[(mixed >> 54) as usize % SETS] // PANIC: the modulus is the length.
}

/// Whether slot `index` is that thread's, for that stream.
#[inline(always)]
pub(crate) fn is(index: usize, who: u32, stream: usize, context: usize) -> bool {
    let slot = at(index);
    slot.owner.is(who)
        && slot.key.load(Ordering::Relaxed) == stream
        && slot.context.load(Ordering::Relaxed) == context
}

impl Slot {
    /// Whether it is for that stream, of the thread whose turn this is.
    #[inline(always)]
    pub(crate) fn is_in(&self, turn: u64, stream: usize) -> bool {
        self.turn.load(Ordering::Relaxed) == turn && self.key.load(Ordering::Relaxed) == stream
    }
}

/// The slot of that thread and stream.
#[cold]
#[inline(never)]
pub(crate) fn find(who: u32, stream: usize, context: usize) -> Option<usize> {
    let mut hints = hints(who, stream).load(Ordering::Relaxed);
    while hints != 0 {
        // CAST: the lowest quarter. An index plus one, or 0.
        let index = (hints as u16 as usize).wrapping_sub(1);
        if index < STREAM_SLOTS && is(index, who, stream, context) {
            return Some(index);
        }
        hints >>= u64::BITS / WAYS;
    }
    None
}

/// A slot for that thread and stream; `None`: marks are outstanding wherever was looked. `adopt` is
/// called with slots that could be taken over but for work of others that no mark covers; they are
/// nobody's afterwards; `begun` with the slot, while it is held.
pub(crate) fn take(
    half: &'static ClientHalf,
    (who, stream, context, device): (u32, usize, usize, u32),
    now_ns: u64,
    mut adopt: impl FnMut(usize, &'static StreamSlot),
    begun: impl FnOnce(usize),
) -> Option<usize> {
    let (index, holding) = free(half, who)
        .or_else(|| fresh(half, who, device))
        .or_else(|| used(half, who, &mut adopt))?;
    let (slot, word) = (at(index), half.stream(index)?);
    word.set_device(device);
    slot.key.store(stream, Ordering::Relaxed);
    slot.context.store(context, Ordering::Relaxed);
    slot.turn.store(0, Ordering::Relaxed);
    slot.batch.store(0, Ordering::Relaxed);
    slot.spent_ns.store(0, Ordering::Relaxed);
    slot.allowance_ns.store(0, Ordering::Relaxed);
    slot.flushed.store(false, Ordering::Relaxed);
    rate(index).reset(word, device as usize, now_ns);
    begun(index);
    // PANIC: the modulus is the length.
    KEYS[index % STREAM_SLOTS].store(stream, Ordering::Release);
    drop(holding);
    let hints = hints(who, stream);
    // Who writes at the same time loses a hint at worst, and takes another slot some time.
    hints.store(
        hints.load(Ordering::Relaxed) << (u64::BITS / WAYS) | (index as u64 + 1),
        Ordering::Relaxed,
    );
    Some(index)
}

/// One that is nobody's.
fn free(half: &'static ClientHalf, who: u32) -> Option<(usize, Holding<'static>)> {
    let mut looks = 0;
    for (word, bits) in FREE.iter().enumerate() {
        let mut seen = bits.load(Ordering::Relaxed);
        while seen != 0 {
            let bit = seen & seen.wrapping_neg();
            seen &= !bit;
            let index = word * 64 + bit.trailing_zeros() as usize;
            let look = at(index).owner.look();
            if !look.is_nobodys() {
                bits.fetch_and(!bit, Ordering::Relaxed); // the hand came by
            } else if half.stream(index)?.is_idle()
                && let Some(holding) = at(index).owner.take(look, who)
            {
                bits.fetch_and(!bit, Ordering::Relaxed);
                return Some((index, holding));
            }
            looks += 1;
            if looks == FREE_LOOKS {
                return None;
            }
        }
    }
    None
}

/// One that was never used.
fn fresh(half: &'static ClientHalf, who: u32, device: u32) -> Option<(usize, Holding<'static>)> {
    let (index, _) = half.claim_stream(device)?;
    let owner = &at(index).owner;
    Some((index, owner.take(owner.look(), who)?))
}

/// One that another thread, or this one for another stream, has done with for now.
fn used(
    half: &'static ClientHalf,
    who: u32,
    adopt: &mut impl FnMut(usize, &'static StreamSlot),
) -> Option<(usize, Holding<'static>)> {
    let mut second = None;
    for _ in 0..LOOKS {
        let index = HAND.fetch_add(1, Ordering::Relaxed) % STREAM_SLOTS;
        let (owner, word) = (&at(index).owner, half.stream(index)?);
        let look = owner.look();
        if look.is_held() || !word.is_idle() {
            continue;
        }
        if !look.is_quiet() {
            owner.pass(look);
            second = second.or(Some(index));
        } else if look.is_open() {
            adopt(index, word);
        } else if let Some(holding) = owner.take(look, who) {
            return Some((index, holding));
        }
    }
    let index = second?;
    let (owner, word) = (&at(index).owner, half.stream(index)?);
    let look = owner.look();
    if look.is_open() {
        adopt(index, word);
        return None;
    }
    word.is_idle()
        .then(|| owner.take(look, who))
        .flatten()
        .map(|holding| (index, holding))
}

/// Takes a slot that is held from its owner: nobody marks its stream any more.
pub(crate) fn retire(index: usize, holding: Holding<'_>) {
    at(index).key.store(0, Ordering::Relaxed);
    at(index).turn.store(0, Ordering::Relaxed);
    KEYS[index % STREAM_SLOTS].store(0, Ordering::Release); // PANIC: the modulus is the length.
    let at = index % STREAM_SLOTS;
    holding.retire();
    FREE[at / 64].fetch_or(1 << (at % 64), Ordering::Relaxed); // PANIC: likewise.
}

/// How often a stream has been destroyed. A thread that marks a stream long after the program has
/// used it compares.
pub(crate) fn destroyed() -> u32 {
    // SYNC(destroyed): pairs with the fence in `of_stream`: either the slot that was taken before
    // this is seen there, or the destruction is seen here.
    fence(Ordering::SeqCst);
    DESTROYED.load(Ordering::Relaxed)
}

/// How many streams on `device` have work in flight of which something has passed since that of
/// slot `index` stands still.
pub(crate) fn movers_beside(half: &ClientHalf, device: usize, index: usize) -> u32 {
    let since_ns = rate(index).moved_ns();
    let moves = |other: &usize| {
        half.stream(*other)
            .is_some_and(|slot| slot.is_on(device) && !slot.is_idle() && !slot.waits_for_host())
            && rate(*other).moved_ns() > since_ns
    };
    let others = (0..half.streams_used()).filter(|other| *other != index);
    // CAST: below the number of slots.
    others.filter(moves).count() as u32
}

/// The slots of a stream that is about to be destroyed.
pub(crate) fn of_stream(half: &ClientHalf, stream: usize) -> impl Iterator<Item = usize> {
    DESTROYED.fetch_add(1, Ordering::Relaxed);
    // SYNC(destroyed): see there.
    fence(Ordering::SeqCst);
    let keys = KEYS.iter().take(half.streams_used()).enumerate();
    keys.filter_map(move |(index, key)| (key.load(Ordering::Acquire) == stream).then_some(index))
}

/// The slots of streams of a context that is about to be destroyed; `None`: of all.
pub(crate) fn of_context(half: &ClientHalf, context: Option<usize>) -> impl Iterator<Item = usize> {
    DESTROYED.fetch_add(1, Ordering::Relaxed);
    // SYNC(destroyed): as above.
    fence(Ordering::SeqCst);
    (0..half.streams_used()).filter(move |index| {
        key(*index) != 0
            && context.is_none_or(|context| at(*index).context.load(Ordering::Relaxed) == context)
    })
}

/// The slots that are nobody's and whose streams were of a context that is gone.
pub(crate) fn left_by(half: &ClientHalf, context: usize) -> impl Iterator<Item = usize> {
    (0..half.streams_used()).filter(move |index| {
        key(*index) == 0 && at(*index).context.load(Ordering::Relaxed) == context
    })
}

/// Holds slot `index`, whichever thread has it; `None`: a thread that holds it goes on doing so.
pub(crate) fn hold_any(index: usize, mut wait: impl FnMut() -> bool) -> Option<Holding<'static>> {
    loop {
        match at(index).owner.hold_any() {
            Hold::Held(holding) => return Some(holding),
            Hold::Busy if wait() => {}
            Hold::Busy | Hold::Gone => return None,
        }
    }
}

/// How often a thread looks again at its own slot while somebody else holds it: those hold it for a
/// call of the driver's at most.
const PATIENCE: u32 = 2000;

/// Holds slot `index` for the thread that owns it; `None`: it is another's, or is held on and on.
pub(crate) fn hold(index: usize, who: u32) -> Option<Holding<'static>> {
    for _ in 0..PATIENCE {
        match at(index).owner.hold(who) {
            Hold::Held(holding) => return Some(holding),
            Hold::Busy => std::hint::spin_loop(),
            Hold::Gone => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_found_at_its_place_and_nobody_else() {
        for index in 0..STREAM_SLOTS {
            let place = place(index);
            assert_eq!(index_of(place), Some(index));
            assert!(std::ptr::eq(placed(place), at(index)), "slot {index}");
            assert!(!std::ptr::eq(placed(0), at(index)), "slot {index}");
        }
        assert_eq!(index_of(0), None);
        // Nobody's slot is in no thread's turn, for no stream: streams are not 0.
        assert!(!placed(0).is_in(0, 1));
        assert!(!placed(u32::MAX).is_in(0, 1));
    }
}
