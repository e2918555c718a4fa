//! The quiesce gate: calls of the program on one side, moving memory on the other.
//!
//! A call that may touch device memory, or whose arguments the driver checks against it, *passes*:
//! it counts itself in on a line of its own, looks whether the quiesce gate is open, makes the
//! driver call, and counts itself out. The agent closes the quiesce gate and waits until nobody is
//! inside. So a thread that looked at the gate long ago and was put to sleep cannot submit work to
//! memory that has left meanwhile. The gate alone cannot promise that.
//!
//! A thread that finds the quiesce gate closed waits as at the gate, in steps with a look at what
//! else may have happened, and says so to the arbiter: a program that waits in `cuMemAlloc` wants
//! its memory back as much as one that waits to launch. Where the memory could not be brought back
//! the call is answered with an error.
//!
//! While the memory comes back, threads that have said what they touch may have a leave
//! ([`pass_by_permit`]) to pass all the same. A call that gives memory back or ends a context needs
//! none of it on the device: it passes as soon as the agent rests ([`pass_to_end`]).
//!
//! The price is two locked additions per call, in evictable tenants alone.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use shim_ffi::CUresult;

use crate::attachment::client;
use crate::ground::clock::{self, now_ns};
use crate::ground::process;
use crate::ground::stretch::{Of, here};
use crate::ground::thread::{Thread, thread};

/// Bit of the quiesce gate's word that says "closed". The rest counts changes.
const CLOSED: u32 = 1;
/// TIMEOUT: how late a waiting call notices that the process is about to end or has lost its
/// arbiter.
const STEP: Duration = Duration::from_millis(50);

/// Whether this process's memory can be moved. Set once, before its first context; never in a
/// process that nobody has asked for it. What is not evictable pays one look at this word.
pub(crate) static ACTIVE: AtomicBool = AtomicBool::new(false);

/// Whether memory of this process may be movable.
#[inline(always)]
pub(crate) fn active() -> bool {
    ACTIVE.load(Ordering::Relaxed)
}

static QUIESCE: AtomicU32 = AtomicU32::new(0);
/// What calls are answered instead of waiting; 0: they wait.
static FAILED: AtomicU32 = AtomicU32::new(0);

/// The agent has nothing to do: who needs no memory may pass although the gate is closed.
static RESTS: AtomicBool = AtomicBool::new(false);
/// Changes when it begins to rest, and when the gate opens.
static RESTED: AtomicU32 = AtomicU32::new(0);

/// Devices whose memory is away or moves, as bits.
static AWAY: AtomicU32 = AtomicU32::new(0);

const LINES: usize = 64;

#[repr(align(64))]
struct Line(AtomicU32);

/// Calls inside, by thread; more threads than lines share.
static INSIDE: [Line; LINES] = [const { Line(AtomicU32::new(0)) }; LINES];

/// A call of the program inside the quiesce gate, until dropped.
#[derive(Debug)]
pub(crate) struct Pass(Option<(&'static AtomicU32, u32)>);

impl Pass {
    /// Of a call that nobody waits for.
    pub(crate) const fn uncounted() -> Self {
        Self(None)
    }

    /// Whether memory may be moved at all, and this is a call of the program's own.
    #[inline(always)]
    pub(crate) fn counts(&self) -> bool {
        self.0.is_some()
    }
}

impl Drop for Pass {
    #[inline]
    fn drop(&mut self) {
        let Some((line, begun)) = self.0 else { return };
        // One that was given up is counted out already.
        if thread().passes.end(begun) {
            // SYNC(quiesce): Release, so that the agent that finds nobody inside sees what the call
            // has done.
            line.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Lets a call of the program in, or says what it is to be answered. Not to be asked by a thread
/// that is inside already.
#[inline(always)]
pub(crate) fn pass() -> Result<Pass, CUresult> {
    if active() { enter() } else { Ok(Pass(None)) }
}

/// Counts a call in that has a leave, if that still holds, which is asked for inside.
pub(crate) fn pass_by_permit(thread: &Thread, holds: impl FnOnce() -> bool) -> Option<Pass> {
    let line = line_of(thread);
    // SYNC(early): as in `enter`, with the agent's `revoke`.
    line.fetch_add(1, Ordering::SeqCst);
    let pass = Pass(Some((line, thread.passes.begin())));
    holds().then_some(pass)
}

/// The same without waiting: `None` where the quiesce gate is closed.
#[inline]
pub(crate) fn try_pass() -> Option<Pass> {
    let thread = thread();
    let line = line_of(thread);
    // SYNC(quiesce): as in `enter`.
    line.fetch_add(1, Ordering::SeqCst);
    if QUIESCE.load(Ordering::SeqCst) & CLOSED == 0 {
        return Some(Pass(Some((line, thread.passes.begin()))));
    }
    line.fetch_sub(1, Ordering::Release);
    None
}

/// As [`pass`] for a call that gives memory back, or ends a context with all that is in it. What is
/// away need not come back for that: behind the closed gate it waits for no more than the end of
/// what the agent is doing. The agent does nothing until it is through.
pub(crate) fn pass_to_end() -> Result<Pass, CUresult> {
    let thread = thread();
    if !active() || thread.is_inside() {
        return Ok(Pass(None));
    }
    let line = line_of(thread);
    loop {
        let rested = RESTED.load(Ordering::SeqCst);
        let held = holds(thread);
        // SYNC(quiesce): as in `enter`, with `rest` and `nobody_inside` as well.
        line.fetch_add(1, Ordering::SeqCst);
        let closed = QUIESCE.load(Ordering::SeqCst) & CLOSED != 0;
        if held || !closed || RESTS.load(Ordering::SeqCst) {
            return Ok(Pass(Some((line, thread.passes.begin()))));
        }
        line.fetch_sub(1, Ordering::Release);
        let failed = FAILED.load(Ordering::Acquire);
        if failed != 0 {
            return Err(CUresult(failed));
        }
        if process::exiting() || client::current().is_none() {
            return Ok(Pass(None));
        }
        thread.counts.give_back();
        sleep_on(&RESTED, rested);
    }
}

#[inline(never)]
fn enter() -> Result<Pass, CUresult> {
    let thread = thread();
    if thread.is_inside() {
        return Ok(Pass(None));
    }
    let line = line_of(thread);
    if holds(thread) {
        // In a signal handler: what the call needs that it came in between stays until that is
        // over, and this one cannot wait for its end.
        line.fetch_add(1, Ordering::SeqCst);
        return Ok(Pass(Some((line, thread.passes.begin()))));
    }
    loop {
        // SYNC(quiesce): SeqCst here and in `close`. Either the agent sees us inside, or we see the
        // quiesce gate closed.
        line.fetch_add(1, Ordering::SeqCst);
        let seen = QUIESCE.load(Ordering::SeqCst);
        if seen & CLOSED == 0 {
            return Ok(Pass(Some((line, thread.passes.begin()))));
        }
        line.fetch_sub(1, Ordering::Release);
        if !wait(thread)? {
            return Ok(Pass(None));
        }
    }
}

/// Whether the thread is in a call inside the quiesce gate. Those that it has left by a jump are
/// counted out.
#[inline(always)]
pub(crate) fn holds(thread: &Thread) -> bool {
    let (count, left) = thread.passes.look();
    if left != 0 {
        // SYNC(quiesce): as where a pass ends.
        line_of(thread).fetch_sub(left, Ordering::Release);
    }
    count != 0
}

fn line_of(thread: &Thread) -> &'static AtomicU32 {
    // Fibonacci hashing of where the thread's data lies.
    let at = (std::ptr::from_ref(thread) as u64 >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // PANIC: the modulus is the length.
    &INSIDE[(at >> 32) as usize % LINES].0
}

/// Waits until the quiesce gate may be open; false where there is nothing to wait for any more.
#[cold]
#[inline(never)]
fn wait(thread: &Thread) -> Result<bool, CUresult> {
    let outcome = wait_on(thread, &QUIESCE, |seen| {
        if seen & CLOSED == 0 {
            return Some(Ok(true));
        }
        let failed = FAILED.load(Ordering::Acquire);
        (failed != 0).then_some(Err(CUresult(failed)))
    });
    outcome.unwrap_or(Ok(false))
}

/// Tells the arbiter that a thread waits for its memory, and waits until `look` has an answer,
/// which is asked for whenever `word` may have changed. `None`: there is nothing to wait for any
/// more.
pub(crate) fn wait_on<T>(
    thread: &Thread,
    word: &AtomicU32,
    mut look: impl FnMut(u32) -> Option<T>,
) -> Option<T> {
    let attached = client::current()?;
    // What has its answer already is no wait, and the arbiter need not hear of it: a program may
    // call again and again while its calls fail.
    if let Some(answer) = look(word.load(Ordering::SeqCst)) {
        return Some(answer);
    }
    let own = (thread.device_plus_one.get() as usize).saturating_sub(1);
    thread.counts.give_back();
    let at = here();
    let mut waiting = None;
    let mut waits_for = 0;
    loop {
        let seen = word.load(Ordering::SeqCst);
        // The gate is closed for the whole process: the thread waits for whatever is away, wherever
        // its own work is. Before that is known, it is taken to be there.
        let away = match AWAY.load(Ordering::Acquire) {
            0 => bit(own),
            away => away,
        };
        if waits_for != away {
            // The new wait begins before the old one ends.
            let next = Of::WaitingOn(attached.end.client, away);
            drop(waiting.replace(thread.counts.begin(next, at)));
            attached.end.ring();
            waits_for = away;
        }
        if let Some(answer) = look(seen) {
            break Some(answer);
        }
        // At exit and after a fork the attachment is gone, and so is a thread that would change the
        // word.
        if process::exiting() || client::current().is_none() {
            break None;
        }
        sleep_on(word, seen);
    }
}

/// Sleeps until a word changes from `seen`, or for a step.
fn sleep_on(word: &AtomicU32, seen: u32) {
    let timeout = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: STEP.as_nanos() as i64, // CAST: 50 million.
    };
    use rustix::thread::futex;
    let _ = futex::wait(word, futex::Flags::PRIVATE, seen, Some(&timeout));
}

fn bit(device: usize) -> u32 {
    // CAST: a device's index.
    1u32.checked_shl(device as u32).unwrap_or(0)
}

/// Memory of a device leaves or is away, or is there again.
pub(crate) fn set_away(device: usize, away: bool) {
    // SYNC(away): Release; who waits reads it anew at every change of the gate and every 50 ms.
    if away {
        AWAY.fetch_or(bit(device), Ordering::Release);
    } else {
        AWAY.fetch_and(!bit(device), Ordering::Release);
    }
}

/// Whether the quiesce gate is closed.
pub(crate) fn is_closed() -> bool {
    QUIESCE.load(Ordering::Relaxed) & CLOSED != 0
}

/// Whether calls are answered with an error instead of waiting.
pub(crate) fn has_failed() -> bool {
    FAILED.load(Ordering::Acquire) != 0
}

/// How often it has closed and opened, as a number that changes.
pub(crate) fn changes() -> u32 {
    QUIESCE.load(Ordering::Relaxed)
}

/// Closes the quiesce gate and waits until nobody is inside. False, with the quiesce gate as it
/// was (see [`open`]), where somebody still is at `deadline_ns`.
pub(crate) fn close(deadline_ns: u64, opened: impl FnOnce()) -> bool {
    if is_closed() {
        return true;
    }
    // SYNC(quiesce): see `enter`.
    QUIESCE.fetch_add(CLOSED, Ordering::SeqCst);
    let empty = empty(deadline_ns);
    if !empty {
        open(opened);
    }
    empty
}

/// Waits until nobody is inside; false where somebody still is at `deadline_ns`.
pub(crate) fn empty(deadline_ns: u64) -> bool {
    let mut nap = Duration::from_micros(20);
    loop {
        if INSIDE.iter().all(|line| line.0.load(Ordering::SeqCst) == 0) {
            return true;
        }
        if now_ns() > deadline_ns || process::exiting() {
            return false;
        }
        clock::pause(nap);
        nap = (nap * 2).min(Duration::from_millis(1));
    }
}

/// Opens the quiesce gate and wakes a thread that waits. `opened` is called where it was closed.
pub(crate) fn open(opened: impl FnOnce()) {
    FAILED.store(0, Ordering::Release);
    AWAY.store(0, Ordering::Release);
    if is_closed() {
        QUIESCE.fetch_add(CLOSED, Ordering::SeqCst);
        opened();
        wake();
    }
}

/// From here on calls that find the quiesce gate closed are answered `status`, until it opens.
pub(crate) fn fail(status: CUresult) {
    FAILED.store(status.0, Ordering::Release);
    wake();
}

fn wake() {
    use rustix::thread::futex;
    let _ = futex::wake(&QUIESCE, futex::Flags::PRIVATE, i32::MAX as u32);
    wake_ending();
}

/// Wakes a thread that waits in [`pass_to_end`].
fn wake_ending() {
    use rustix::thread::futex;
    RESTED.fetch_add(1, Ordering::SeqCst);
    let _ = futex::wake(&RESTED, futex::Flags::PRIVATE, i32::MAX as u32);
}

/// The agent waits: where the gate is closed, calls that need no memory pass meanwhile. Afterwards
/// it asks [`nobody_inside`] before it changes anything.
pub(crate) fn rest(waits: impl FnOnce()) {
    if is_closed() {
        RESTS.store(true, Ordering::SeqCst);
        wake_ending();
    }
    waits();
    // SYNC(quiesce): SeqCst, before the look at who is inside: either that sees a call, or the call
    // sees that nobody rests.
    RESTS.store(false, Ordering::SeqCst);
}

/// Whether no call of the program is behind the closed gate, or none is by `deadline_ns`. Where the
/// gate is open it is closed first, see [`close`].
pub(crate) fn nobody_inside(deadline_ns: u64) -> bool {
    !is_closed() || empty(deadline_ns)
}

/// In a forked child.
pub(crate) fn forget() {
    QUIESCE.store(0, Ordering::Relaxed);
    RESTS.store(false, Ordering::Relaxed);
    AWAY.store(0, Ordering::Relaxed);
    FAILED.store(0, Ordering::Relaxed);
    for line in &INSIDE {
        line.0.store(0, Ordering::Relaxed);
    }
}
