//! How long the device was at a launch: an event before it and one after it, both of our own.
//!
//! Where work was queued in the stream before the launch, the two events are reached when that work
//! and the launch end, and the time between them is the launch's. In an idle stream the first is
//! reached at once, and the launch gets there later by what the host took from one call to the
//! other; that is taken off. Where the host stood still on the way, by a part of the launch's
//! length that counts, nobody knows when the launch got there: then the time is the longest that it
//! can have taken. Nothing waits for the events: they are looked at when the program has waited for
//! the device, or when there are no more of them.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use shim_ffi::recording::{Kind, Quality};
use shim_ffi::*;

use super::calls::line;
use super::note;
use crate::driver::real;
use crate::gate::capture;
use crate::ground::clock::now_ns;
use crate::ground::process;

/// Launches in flight that are measured; others are taken to be as long as their likes.
const PAIRS: usize = 512;

/// What may be unknown of a launch's length: a fiftieth of it, and this at least. An undisturbed
/// host takes less for the calls around a launch.
const UNKNOWN_NS: u64 = 20_000;
const UNKNOWN_PART: u64 = 50;

const FREE: u32 = 0;
/// A thread is at it.
const TAKEN: u32 = 1;
/// Both events are recorded.
const PENDING: u32 = 2;

/// Two events, and the launch between them. The thread that takes it off another state has its
/// cells.
struct Pair {
    state: AtomicU32,
    /// Context of the events; 0: there are none yet.
    context: Cell<usize>,
    /// [`process::forks`] of the process that made them.
    forks: Cell<u32>,
    first: Cell<usize>,
    last: Cell<usize>,
    order: Cell<u64>,
    /// What the host took from the first event to the launch, where the stream was idle.
    on_the_way_ns: Cell<u64>,
    /// What recording the first event took: it may have been reached so much later than is thought.
    recording_ns: Cell<u64>,
    /// The launch, or the event behind it, may have got to the device so much later.
    late_ns: Cell<u64>,
    queued: Cell<bool>,
    /// Read by other threads, too: the stream of the launch.
    stream: AtomicUsize,
    /// Set by any thread: another stream had work at the same time.
    shared: AtomicBool,
}

// SAFETY: the cells are touched only by the thread that has the pair in state `TAKEN`.
unsafe impl Sync for Pair {}

static ALL: [Pair; PAIRS] = [const {
    Pair {
        state: AtomicU32::new(FREE),
        context: Cell::new(0),
        forks: Cell::new(0),
        first: Cell::new(0),
        last: Cell::new(0),
        order: Cell::new(0),
        on_the_way_ns: Cell::new(0),
        recording_ns: Cell::new(0),
        late_ns: Cell::new(0),
        queued: Cell::new(false),
        stream: AtomicUsize::new(0),
        shared: AtomicBool::new(false),
    }
}; PAIRS];
/// Where to look for a free pair first.
static HINT: AtomicUsize = AtomicUsize::new(0);

/// A launch that is being measured.
pub(super) struct Timed {
    pair: &'static Pair,
    /// When the first event was recorded: not before the one, not after the other.
    recording_ns: u64,
    recorded_ns: u64,
    queued: bool,
    shared: bool,
}

/// Whether another stream has work that was measured and is not over. What is pending of others is
/// shared from then on, too.
fn is_shared(stream: usize) -> bool {
    let newest = HINT.load(Ordering::Relaxed);
    let others = || {
        (1..=PAIRS)
            .filter_map(move |back| ALL.get((newest + PAIRS - back) % PAIRS))
            .filter(move |pair| {
                pair.state.load(Ordering::Relaxed) == PENDING
                    && pair.stream.load(Ordering::Relaxed) != stream
            })
    };
    let Some(other) = others().next() else {
        return false;
    };
    if !is_taken(other, PENDING) {
        return false;
    }
    let is_over = other.forks.get() != process::forks() || !is_ahead(event(other.last.get()));
    // SYNC(pair): see `is_taken`.
    other.state.store(PENDING, Ordering::Release);
    if is_over {
        return false;
    }
    // Those that are over keep what was measured.
    harvest();
    for pair in others() {
        pair.shared.store(true, Ordering::Relaxed);
    }
    true
}

fn event(handle: usize) -> CUevent {
    CUevent(std::ptr::without_provenance_mut(handle))
}

/// Whether the device has yet to come to an event of ours. The question invalidates no capture.
fn is_ahead(event: CUevent) -> bool {
    // SAFETY: an event of our own in a context that has not ended: see `forget`.
    let query = || unsafe { real::cuEventQuery(event) };
    let answer = match capture::any() {
        true => capture::relaxed(query),
        false => query(),
    };
    answer == CUresult::CUDA_ERROR_NOT_READY
}

fn current_context() -> usize {
    let mut context = CUcontext(std::ptr::null_mut());
    // SAFETY: a valid pointer to a local.
    let asked = unsafe { real::cuCtxGetCurrent(&raw mut context) };
    if asked.is_ok() { context.0 as usize } else { 0 }
}

/// A pair of the current context, its events made.
fn take(context: usize) -> Option<&'static Pair> {
    let from = HINT.load(Ordering::Relaxed);
    for at in 0..PAIRS {
        let place = (from + at) % PAIRS;
        let pair = ALL.get(place)?;
        if !is_taken(pair, FREE) {
            continue;
        }
        let usable = pair.context.get() == 0 || pair.forks.get() != process::forks();
        if usable && !make(pair, context) {
            give(pair);
            return None;
        }
        if pair.context.get() == context {
            HINT.store(place + 1, Ordering::Relaxed);
            return Some(pair);
        }
        give(pair);
    }
    None
}

fn is_taken(pair: &Pair, from: u32) -> bool {
    // SYNC(pair): pairs with the store in `give` and in `after`: the cells are this thread's now.
    pair.state
        .compare_exchange(from, TAKEN, Ordering::Acquire, Ordering::Relaxed)
        .is_ok()
}

fn give(pair: &Pair) {
    // SYNC(pair): see `is_taken`.
    pair.state.store(FREE, Ordering::Release);
}

fn make(pair: &Pair, context: usize) -> bool {
    let mut made = [0; 2];
    for handle in &mut made {
        let mut event = CUevent(std::ptr::null_mut());
        // SAFETY: a valid pointer to a local; no flags: an event that takes the time.
        if !unsafe { real::cuEventCreate(&raw mut event, 0) }.is_ok() {
            return false;
        }
        *handle = event.0 as usize;
    }
    pair.first.set(made[0]);
    pair.last.set(made[1]);
    pair.context.set(context);
    pair.forks.set(process::forks());
    true
}

/// Before a launch into `stream`, in which nothing is being captured.
pub(super) fn before(stream: usize) -> Option<Timed> {
    let context = current_context();
    if context == 0 {
        return None;
    }
    let pair = match take(context) {
        Some(pair) => pair,
        None => {
            harvest();
            take(context)?
        }
    };
    let shared = is_shared(stream);
    let recording_ns = now_ns();
    let stream = CUstream(std::ptr::without_provenance_mut(stream));
    let first = event(pair.first.get());
    // SAFETY: an event of our own, made in the current context, and the stream that the program
    // launches into.
    let recorded = unsafe { real::cuEventRecord(first, stream) }.is_ok();
    if !recorded {
        give(pair);
        return None;
    }
    let recorded_ns = now_ns();
    let queued = is_ahead(first);
    Some(Timed {
        pair,
        recording_ns,
        recorded_ns,
        queued,
        shared,
    })
}

/// After the launch of that order, which was called at `called_ns`.
pub(super) fn after(timed: Timed, stream: usize, called_ns: u64, order: u64, launched: bool) {
    let pair = timed.pair;
    pair.stream.store(stream, Ordering::Relaxed);
    pair.shared.store(timed.shared, Ordering::Relaxed);
    let stream = CUstream(std::ptr::without_provenance_mut(stream));
    // SAFETY: as in `before`.
    let measured =
        launched && unsafe { real::cuEventRecord(event(pair.last.get()), stream) }.is_ok();
    if !measured {
        give(pair);
        return;
    }
    // Work that is not over yet was there when the launch and the event behind it came.
    let was_queued = timed.queued && is_ahead(event(pair.first.get()));
    let ended_ns = now_ns();
    pair.order.set(order);
    pair.queued.set(timed.queued);
    let (on_the_way_ns, recording_ns, late_ns) = match timed.queued {
        true if was_queued => (0, 0, 0),
        true => (0, 0, ended_ns.saturating_sub(timed.recorded_ns)),
        false => (
            called_ns.saturating_sub(timed.recording_ns),
            timed.recorded_ns.saturating_sub(timed.recording_ns),
            ended_ns.saturating_sub(called_ns),
        ),
    };
    pair.on_the_way_ns.set(on_the_way_ns);
    pair.recording_ns.set(recording_ns);
    pair.late_ns.set(late_ns);
    // SYNC(pair): see `is_taken`.
    pair.state.store(PENDING, Ordering::Release);
}

/// Between two looks at all pairs: with many of them in flight a look takes as long as a launch.
const HARVEST_NS: u64 = 200_000;
/// When all pairs were looked at last.
static HARVESTED_NS: AtomicU64 = AtomicU64::new(0);

/// Records what has been measured meanwhile, unless that was just done. Not while anything is
/// captured.
pub(super) fn harvest() {
    let (last_ns, now) = (HARVESTED_NS.load(Ordering::Relaxed), now_ns());
    if now.saturating_sub(last_ns) < HARVEST_NS
        || HARVESTED_NS
            .compare_exchange(last_ns, now, Ordering::Relaxed, Ordering::Relaxed)
            .is_err()
    {
        return;
    }
    for pair in &ALL {
        if pair.state.load(Ordering::Relaxed) != PENDING || !is_taken(pair, PENDING) {
            continue;
        }
        if pair.forks.get() != process::forks() {
            give(pair);
            continue;
        }
        let (first, last) = (event(pair.first.get()), event(pair.last.get()));
        let mut ms = 0.0_f32;
        // SAFETY: events of our own in a context that has not ended: see `forget`.
        let asked = unsafe { real::cuEventElapsedTime(&raw mut ms, first, last) };
        if asked == CUresult::CUDA_ERROR_NOT_READY {
            // SYNC(pair): see `is_taken`.
            pair.state.store(PENDING, Ordering::Release);
            continue;
        }
        let (order, queued) = (pair.order.get(), pair.queued.get());
        let on_the_way_ns = pair.on_the_way_ns.get();
        let (recording_ns, late_ns) = (pair.recording_ns.get(), pair.late_ns.get());
        let shared = pair.shared.load(Ordering::Relaxed);
        give(pair);
        if asked.is_ok() {
            // CAST: a time that is not negative; rounded to nanoseconds.
            let ns = (f64::from(ms) * 1e6).max(0.0) as u64;
            let ns = ns.saturating_sub(on_the_way_ns);
            let quality = quality(ns, recording_ns.saturating_add(late_ns), shared, queued);
            let ns = match quality {
                Quality::Bound => ns.saturating_add(recording_ns),
                Quality::Queued | Quality::Idle => ns,
            };
            note(Kind::Measured, 0, line([order, ns, quality as u64]));
        }
    }
}

/// What a measured length is worth, of which so much is not known.
fn quality(ns: u64, unknown_ns: u64, shared: bool, queued: bool) -> Quality {
    let is_known = unknown_ns <= UNKNOWN_NS.max(ns / UNKNOWN_PART);
    match (is_known && !shared, queued) {
        (false, _) => Quality::Bound,
        (true, true) => Quality::Queued,
        (true, false) => Quality::Idle,
    }
}

/// A context is about to end, and its events with it. Which one it is does not matter: others make
/// new ones.
pub(super) fn forget() {
    for pair in &ALL {
        if is_taken(pair, FREE) || is_taken(pair, PENDING) {
            pair.context.set(0);
            give(pair);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_of_which_much_is_unknown_is_a_bound() {
        const MS: u64 = 1_000_000;
        let of = |ns, unknown_ns| quality(ns, unknown_ns, false, false) as u64;
        assert_eq!(of(MS / 10, 3_000), Quality::Idle as u64);
        assert_eq!(
            of(3 * MS, 2 * MS),
            Quality::Bound as u64,
            "the host stood still"
        );
        assert_eq!(
            of(100 * MS, 2 * MS),
            Quality::Idle as u64,
            "a fiftieth of it"
        );
        let queued = |shared| quality(MS, 0, shared, true) as u64;
        assert_eq!(queued(false), Quality::Queued as u64);
        assert_eq!(queued(true), Quality::Bound as u64);
    }
}
