//! How it is found out what the device has done, where it does not write that into our page.
//!
//! Best are *writes* of the device (`cuStreamWriteValue64`): they need nobody of ours to look. A
//! driver may refuse them, or our page, or accept them and never carry them out. Then the marks of
//! a stream are *events*, which are asked for one by one; and where those are refused too, the
//! stream is *asked* whether it is idle, which says nothing while the program keeps it busy, and
//! nothing any more once it is destroyed. Both times it is we who write the numbers, so somebody
//! has to look: threads that wait, and threads that mark, and between their calls a thread of ours,
//! which only such a process has.
//!
//! What is accepted and not carried out shows when the driver says that a stream is idle whose
//! marks have not come. That is asked where a thread of the program waits: for space in the window,
//! at the gate, and after its own waits.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use channel::{Event, Following, Holding, STREAM_SLOTS, StreamSlot};
use shim_ffi::*;

use crate::attachment::client::{self, Attached};
use crate::driver::{real, spawn};
use crate::gate::streams::PER_THREAD;
use crate::gate::{capture, failure, slots};
use crate::ground::clock::pause;
use crate::ground::process;
use crate::ground::thread::thread;

/// The way of this process, see [`Following`].
static WAY: AtomicU32 = AtomicU32::new(Following::Writes as u32);
/// Refusals of the present way.
static REFUSED: AtomicU32 = AtomicU32::new(0);
/// Writes that were accepted and had not come when their stream was idle.
static LOST: AtomicU32 = AtomicU32::new(0);
/// The device has written a number.
static SEEN: AtomicBool = AtomicBool::new(false);

/// Refusals after which something else is tried. One may be the fault of a stream or a context that
/// has failed.
const REFUSALS: u32 = 3;
/// Marks that were lost: one might be on its way.
const LOSSES: u32 = 2;
/// TIMEOUT: how long a write may take to be seen by the host after its stream is idle. It is there
/// before that, by the driver's reference.
const ON_ITS_WAY: Duration = Duration::from_millis(1);
/// How often who waits asks whether marks have been lost: at first, and once the device has written
/// any.
const ASK_FIRST_NS: u64 = 1_000_000;
const ASK_NS: u64 = 20_000_000;

/// Events of a slot, and so its marks in flight at most.
const RING: usize = 8;

/// The events of a slot. Touched by who holds it.
struct Events {
    /// Context that they were made in.
    context: AtomicUsize,
    /// First mark that is an event; 0: none is.
    first: AtomicU64,
    handles: [AtomicUsize; RING],
}

static EVENTS: [Events; STREAM_SLOTS] = [const {
    Events {
        context: AtomicUsize::new(0),
        first: AtomicU64::new(0),
        handles: [const { AtomicUsize::new(0) }; RING],
    }
}; STREAM_SLOTS];

/// In a forked child.
pub(crate) fn forget() {
    WAY.store(Following::Writes as u32, Ordering::Relaxed);
    REFUSED.store(0, Ordering::Relaxed);
    LOST.store(0, Ordering::Relaxed);
    SEEN.store(false, Ordering::Relaxed);
    STARTED.store(false, Ordering::Relaxed);
    BUSY.store(false, Ordering::Relaxed);
    for events in &EVENTS {
        events.first.store(0, Ordering::Relaxed);
        events.context.store(0, Ordering::Relaxed);
        let handles = events.handles.iter();
        handles.for_each(|handle| handle.store(0, Ordering::Relaxed));
    }
}

/// How completion is followed now.
#[inline]
pub(crate) fn way() -> Following {
    Following::from(WAY.load(Ordering::Relaxed))
}

/// Marks of a slot that may be outstanding when another one is made.
pub(crate) fn space() -> u64 {
    match way() {
        Following::Writes => crate::gate::pace::RING as u64 - 2,
        Following::Events | Following::Queries => RING as u64 - 2,
    }
}

// ----------------------------------------------------------------------------------------------
// Refusals
// ----------------------------------------------------------------------------------------------

/// The driver would not have a mark the present way.
pub(crate) fn refused(attached: &Attached, way: Following, status: CUresult) {
    if self::way() == way && REFUSED.fetch_add(1, Ordering::Relaxed) + 1 >= REFUSALS {
        give_way(attached, way, status);
    }
}

/// The driver would not have our page.
pub(crate) fn page_refused(attached: &Attached, status: CUresult) {
    give_way(attached, Following::Writes, status);
}

/// A mark of the present way was accepted.
pub(crate) fn accepted() {
    if REFUSED.load(Ordering::Relaxed) != 0 {
        REFUSED.store(0, Ordering::Relaxed);
    }
}

fn give_way(attached: &Attached, from: Following, status: CUresult) {
    let next = match from {
        Following::Writes => Following::Events,
        Following::Events | Following::Queries => Following::Queries,
    };
    let changed = WAY.compare_exchange(
        from as u32,
        next as u32,
        Ordering::AcqRel,
        Ordering::Relaxed,
    );
    if changed.is_err() || from as u32 == next as u32 {
        return;
    }
    REFUSED.store(0, Ordering::Relaxed);
    attached.end.client.set_following(next);
    let event = Event::Following {
        way: next,
        status: status.0,
    };
    attached.tell(0, event);
    start();
}

/// How often a thread that waits asks.
pub(crate) fn ask_every_ns() -> u64 {
    match SEEN.load(Ordering::Relaxed) {
        true => ASK_NS,
        false => ASK_FIRST_NS,
    }
}

/// Takes note of what the device has written.
pub(crate) fn note(word: &StreamSlot) {
    if !SEEN.load(Ordering::Relaxed) && LOST.load(Ordering::Relaxed) == 0 && word.done() != 0 {
        SEEN.store(true, Ordering::Relaxed);
    }
}

/// The driver says that the stream of a slot that is held is idle, after `issued` was read: what
/// has not come by now does not come. Settles it.
pub(crate) fn is_idle(attached: &Attached, word: &StreamSlot, issued: u64, _held: &Holding<'_>) {
    let missing = || word.done() != issued;
    if way() == Following::Writes && missing() {
        pause(ON_ITS_WAY);
        if missing() && LOST.fetch_add(1, Ordering::Relaxed) + 1 >= LOSSES {
            give_way(attached, Following::Writes, CUresult::CUDA_SUCCESS);
        }
    }
    word.settle();
}

// ----------------------------------------------------------------------------------------------
// Events and questions
// ----------------------------------------------------------------------------------------------

fn handle(stream: usize) -> CUstream {
    CUstream(std::ptr::without_provenance_mut(stream))
}

fn event(handle: usize) -> CUevent {
    CUevent(std::ptr::without_provenance_mut(handle))
}

/// The next mark of a slot; `host_wait`: it covers a wait for the host and nothing else.
pub(crate) fn issue(word: &StreamSlot, host_wait: bool) -> u64 {
    match host_wait {
        true => word.issue_host_wait(),
        false => word.issue(),
    }
}

/// Marks what is in the stream of a slot that is held by an event; the number of the mark. One that
/// has no event left has the last one again, which then stands for what has come since as well.
/// `None`: another thread than the slot's has no event for it.
pub(crate) fn record(
    attached: &Attached,
    index: usize,
    (weight_ns, host_wait): (u64, bool),
    _held: &Holding<'_>,
) -> Result<Option<u64>, CUresult> {
    let client = attached.end.client;
    let Some(word) = client.stream(index) else {
        return Ok(None);
    };
    let (stream, context) = (slots::key(index), slots::context(index));
    let events = &EVENTS[index % STREAM_SLOTS]; // PANIC: the modulus is the length.
    if events.context.swap(context, Ordering::Relaxed) != context {
        for handle in &events.handles {
            destroy(handle.swap(0, Ordering::Relaxed));
        }
    }
    let outstanding = word.issued().wrapping_sub(word.done());
    let first = events.first.load(Ordering::Relaxed);
    let again = outstanding >= RING as u64 && first != 0;
    let mark = word.issued().wrapping_add(u64::from(!again));
    let place = &events.handles[mark as usize % RING]; // PANIC: the modulus is the length.
    if place.load(Ordering::Relaxed) == 0 {
        // Events are made in the current context, and good for streams of that one alone.
        if thread().context.get() != context {
            return Ok(None);
        }
        place.store(create()?, Ordering::Relaxed);
    }
    let event = event(place.load(Ordering::Relaxed));
    // SAFETY: an event of ours, and a stream that has not been destroyed, for its slot is held; the
    // caller has made sure that it is not being captured.
    let result = relaxed(|| unsafe { real::cuEventRecord(event, handle(stream)) });
    if !result.is_ok() {
        return Err(result);
    }
    if again {
        client.weigh_more(index, weight_ns);
    } else {
        issue(word, host_wait);
        if first == 0 {
            events.first.store(mark, Ordering::Relaxed);
        }
    }
    Ok(Some(mark))
}

fn create() -> Result<usize, CUresult> {
    const DISABLE_TIMING: u32 = 2;
    let mut made = CUevent::NULL;
    // SAFETY: valid pointer to a local.
    let result = relaxed(|| unsafe { real::cuEventCreate(&raw mut made, DISABLE_TIMING) });
    match result {
        CUresult::CUDA_SUCCESS => Ok(made.0.addr()),
        result => Err(result),
    }
}

fn destroy(handle: usize) {
    if handle != 0 {
        // SAFETY: an event of ours, whose context lives: `context_gone` forgets those of others.
        let _ = thread().own(|| unsafe { real::cuEventDestroy_v2(event(handle)) });
    }
}

/// A context has gone, and its events with it.
pub(crate) fn context_gone(context: usize) {
    for events in &EVENTS {
        if events
            .context
            .compare_exchange(context, 0, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
        {
            events.first.store(0, Ordering::Relaxed);
            let handles = events.handles.iter();
            handles.for_each(|handle| handle.store(0, Ordering::Relaxed));
        }
    }
}

/// A slot has a new owner: nothing is outstanding.
pub(crate) fn begin(index: usize) {
    EVENTS[index % STREAM_SLOTS]
        .first
        .store(0, Ordering::Relaxed); // PANIC: the modulus is the length.
}

fn relaxed(calls: impl FnOnce() -> CUresult) -> CUresult {
    thread().own(|| match capture::any() {
        true => capture::relaxed(calls),
        false => calls(),
    })
}

/// Looks what of a slot that is held the device has done, where the device does not say so itself;
/// `theirs`: by another thread than the one whose slot it is.
pub(crate) fn look(
    attached: &Attached,
    index: usize,
    word: &StreamSlot,
    held: &Holding<'_>,
    theirs: bool,
) {
    if way() == Following::Writes || word.is_idle() {
        return;
    }
    let events = &EVENTS[index % STREAM_SLOTS]; // PANIC: the modulus is the length.
    let (issued, first) = (word.issued(), events.first.load(Ordering::Relaxed));
    if first != 0 {
        let mut mark = word.done().wrapping_add(1);
        // What is older than the first event is over when that is.
        if first.wrapping_sub(mark) < u64::MAX / 2 {
            mark = first;
        }
        while issued.wrapping_sub(mark) < RING as u64 {
            // PANIC: the modulus is the length.
            let handle = events.handles[mark as usize % RING].load(Ordering::Relaxed);
            // SAFETY: an event of ours that was recorded.
            match relaxed(|| unsafe { real::cuEventQuery(event(handle)) }) {
                CUresult::CUDA_SUCCESS => word.passed(mark),
                CUresult::CUDA_ERROR_NOT_READY => return,
                result => {
                    // No event any more: its context has failed, or is on its way out.
                    failure::after_error(result);
                    word.settle();
                    return;
                }
            }
            mark = mark.wrapping_add(1);
        }
        if word.is_idle() || way() == Following::Events {
            return;
        }
    }
    let stream = slots::key(index);
    // Of a stream that is gone nobody can ask; of what another thread's default stream is, only
    // that one.
    if stream == 0 {
        word.settle();
    } else if !(theirs && stream == PER_THREAD || capture::any() && capture::is_capturing(stream)) {
        // SAFETY: a stream that has not been destroyed, for its slot is held.
        match relaxed(|| unsafe { real::cuStreamQuery(handle(stream)) }) {
            CUresult::CUDA_ERROR_NOT_READY => {}
            CUresult::CUDA_SUCCESS => is_idle(attached, word, issued, held),
            result => failure::after_error(result),
        }
    }
}

// ----------------------------------------------------------------------------------------------
// The thread that looks
// ----------------------------------------------------------------------------------------------

static STARTED: AtomicBool = AtomicBool::new(false);
/// Whether it is making driver calls.
static BUSY: AtomicBool = AtomicBool::new(false);
/// How often it looks while anything is outstanding.
const LOOK: Duration = Duration::from_micros(200);
/// How often it looks whether anything is.
const REST: Duration = Duration::from_millis(1);

fn start() {
    if !STARTED.swap(true, Ordering::AcqRel) {
        let _errno = crate::ground::errno::Preserve::new();
        if !spawn::spawn(run_caught) {
            STARTED.store(false, Ordering::Release);
        }
    }
}

/// At exit: the driver is about to go. Waits a moment for a look that is under way.
pub(crate) fn stop() {
    // TIMEOUT: a look takes microseconds for each stream.
    for _ in 0..200 {
        if !BUSY.load(Ordering::Acquire) {
            return;
        }
        pause(Duration::from_millis(1));
    }
}

extern "C" fn run_caught(_: *mut c_void) -> *mut c_void {
    // SAFETY: a NUL-terminated name of less than 16 bytes; changes this thread alone.
    unsafe {
        libc::syscall(
            libc::SYS_prctl,
            libc::PR_SET_NAME,
            c"sublet-follow".as_ptr(),
        )
    };
    thread().is_ours();
    let _ = std::panic::catch_unwind(run);
    std::ptr::null_mut()
}

fn run() {
    let mut context = 0;
    while !process::exiting() {
        BUSY.store(true, Ordering::SeqCst);
        // SYNC(exit): either the exit is seen here, or the exit waits for this look.
        let outstanding = !process::exiting()
            && client::current().is_some_and(|attached| look_at_all(attached, &mut context));
        BUSY.store(false, Ordering::Release);
        pause(if outstanding { LOOK } else { REST });
    }
}

/// True where anything is outstanding.
fn look_at_all(attached: &Attached, here: &mut usize) -> bool {
    let client = attached.end.client;
    let mut outstanding = false;
    for index in 0..client.streams_used() {
        let Some(word) = client.stream(index).filter(|word| !word.is_idle()) else {
            continue;
        };
        outstanding = true;
        let Some(holding) = slots::hold_any(index, || false) else {
            continue;
        };
        let context = slots::context(index);
        if slots::key(index) != 0 && context != *here {
            let context = CUcontext(std::ptr::without_provenance_mut(context));
            // SAFETY: the context lives, for a slot is held of one of its streams; this thread is
            // ours.
            if unsafe { real::cuCtxSetCurrent(context) }.is_ok() {
                *here = slots::context(index);
            }
        }
        look(attached, index, word, &holding, true);
    }
    if !outstanding && *here != 0 {
        // SAFETY: this thread is ours. The context may go meanwhile.
        let _ = unsafe { real::cuCtxSetCurrent(CUcontext::NULL) };
        *here = 0;
    }
    outstanding
}
