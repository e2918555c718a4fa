//! A restore that lets the program begin before its end, where it has said what it touches
//! ([`groups`]).
//!
//! Who may begin: a thread inside of `sublet_pipeline_begin(g)` at the time, once everything of no
//! group and of the groups up to `g` is in. It, and nobody else, then has a *leave* for this
//! restore: its launches pass the quiesce gate although that is closed, and so do its copies and
//! memsets whose addresses are known and in. Everything else that it calls, and every other thread,
//! waits for the whole. A thread that does not ask is never let go early, so that nothing can be
//! got wrong by leaving something out.
//!
//! The agent takes leaves back at once, by one store, and waits as at the quiesce gate until nobody
//! is inside ([`settle`]). A leave is for one restore, by its number: one that was given in an
//! earlier one opens nothing.
//!
//! ```text
//!   agent                                        thread
//!   LEVEL = 0, RESTORE = n
//!   chunks of rank 0, 1, ... arrive: LEVEL       begin(g): LEVEL > g + 1: permit = n
//!   says that the job may begin                  launch: counts itself in;
//!                                                RESTORE == permit: to the driver; out
//!   the rest arrives: the quiesce gate opens, RESTORE = 0
//! ```

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use channel::Reason;
use shim_ffi::Operands;

use super::chunk::{self, Place};
use super::copy_streams;
use super::groups::{self, Ranks};
use super::operands;
use crate::gate::{capture, quiesce};
use crate::ground::clock::now_ns;
use crate::ground::thread::{Thread, thread};

/// TIMEOUT: how long what was begun early may go on before what has come back is left where it is
/// for now: kernels take milliseconds.
pub(super) const SETTLE_NS: u64 = 2_000_000_000;

/// Number of the restore in which leaves hold; 0: they do not.
static RESTORE: AtomicU32 = AtomicU32::new(0);
/// Restores so far.
static RESTORES: AtomicU32 = AtomicU32::new(0);
/// Everything below this rank is in (lower half), by what was declared then (upper half).
static LEVEL: AtomicU64 = AtomicU64::new(0);
/// The last restore in which a thread was given leave.
static GIVEN: AtomicU32 = AtomicU32::new(0);
/// Somebody has called the driver by a leave, and the devices were not waited for since.
static UNSETTLED: AtomicBool = AtomicBool::new(false);
/// Changes with everything that a waiting thread is to look at.
static SIGNAL: AtomicU32 = AtomicU32::new(0);

/// In a forked child.
pub(super) fn forget() {
    RESTORE.store(0, Ordering::Relaxed);
    LEVEL.store(0, Ordering::Relaxed);
    UNSETTLED.store(false, Ordering::Relaxed);
}

/// Wakes a thread that waits for a group.
pub(super) fn signal() {
    use rustix::thread::futex;
    SIGNAL.fetch_add(1, Ordering::SeqCst);
    let _ = futex::wake(&SIGNAL, futex::Flags::PRIVATE, i32::MAX as u32);
}

// ----------------------------------------------------------------------------------------------
// The agent's side
// ----------------------------------------------------------------------------------------------

/// What a restore does beside moving chunks.
pub(super) struct Watch<'a> {
    ranks: RefCell<Option<Ranks>>,
    level: Cell<u64>,
    number: u32,
    /// Says that the job may begin.
    begun: &'a dyn Fn(),
    said: Cell<bool>,
}

impl<'a> Watch<'a> {
    /// Nobody begins before the end.
    pub(super) fn nobody() -> Watch<'a> {
        Watch {
            ranks: RefCell::new(None),
            level: Cell::new(0),
            number: 0,
            begun: &|| (),
            said: Cell::new(true),
        }
    }

    /// Of a restore of `ids`, which are put into the order in which they are needed; what is needed
    /// at the same time stays as it is. `begun` is called once, when a thread has been let go.
    pub(super) fn over(ids: &mut [u64], begun: &'a dyn Fn()) -> Watch<'a> {
        let Some(ranks) = Ranks::now() else {
            return Self::nobody();
        };
        ids.sort_by_key(|id| ranks.rank(*id));
        let number = RESTORES
            .fetch_add(1, Ordering::Relaxed)
            .wrapping_add(1)
            .max(1);
        let watch = Watch {
            ranks: RefCell::new(Some(ranks)),
            level: Cell::new(0),
            number,
            begun,
            said: Cell::new(false),
        };
        LEVEL.store(0, Ordering::SeqCst);
        // SYNC(early): after the level of the last restore is gone, so that nobody takes that for
        // this one's.
        RESTORE.store(number, Ordering::SeqCst);
        watch.publish();
        watch
    }

    /// Whether anybody may begin.
    pub(super) fn is_on(&self) -> bool {
        self.number != 0
    }

    /// A chunk is back.
    pub(super) fn arrived(&self, id: u64) {
        if let Some(ranks) = &mut *self.ranks.borrow_mut() {
            ranks.arrived(id);
        }
        self.publish();
        self.look();
    }

    fn publish(&self) {
        let ranks = self.ranks.borrow();
        let Some(ranks) = &*ranks else { return };
        let level = ranks.level();
        if level != self.level.replace(level) {
            let level = level.min(u64::from(u32::MAX));
            LEVEL.store(u64::from(ranks.changes) << 32 | level, Ordering::SeqCst);
            signal();
        }
    }

    /// Looks whether a thread was let go.
    pub(super) fn look(&self) {
        if !self.said.get() && GIVEN.load(Ordering::SeqCst) == self.number {
            self.said.set(true);
            (self.begun)();
        }
    }
}

/// Takes all leaves back.
pub(super) fn revoke() {
    // SYNC(early): SeqCst here and in `quiesce gate::pass_by_leave`. Either the agent sees a call
    // inside, or the call sees its leave gone.
    RESTORE.store(0, Ordering::SeqCst);
    LEVEL.store(0, Ordering::SeqCst);
}

/// Nothing that was begun by a leave is still to be waited for.
pub(super) fn settled() {
    UNSETTLED.store(false, Ordering::Relaxed);
}

/// Whether something may be under way although the quiesce gate is closed.
pub(super) fn unsettled() -> bool {
    // SYNC(early): set inside of the quiesce gate's count, see `pass`.
    UNSETTLED.load(Ordering::SeqCst)
}

/// With the quiesce gate closed: takes leaves back, and waits until what was begun by them is over.
/// True where anything was.
pub(super) fn settle(deadline_ns: u64, given_up: &dyn Fn() -> bool) -> Result<bool, Reason> {
    revoke();
    if !quiesce::empty(deadline_ns) {
        UNSETTLED.store(true, Ordering::SeqCst);
        return Err(Reason::NotDrained);
    }
    if !unsettled() {
        return Ok(false);
    }
    if capture::any() {
        return Err(Reason::Capturing);
    }
    copy_streams::drain(deadline_ns, given_up)?;
    settled();
    Ok(true)
}

// ----------------------------------------------------------------------------------------------
// The program's side
// ----------------------------------------------------------------------------------------------

/// Whether a leave holds.
fn holds(permit: u32) -> bool {
    RESTORE.load(Ordering::SeqCst) == permit
}

/// Lets a submission of a thread with a leave in: launches, and what names memory that is in.
/// `None`: it goes the usual way.
#[inline]
pub(super) fn pass(operands: Operands, words: &[usize]) -> Option<quiesce::Pass> {
    let thread = thread();
    let permit = thread.permit.get();
    if permit == 0 || RESTORE.load(Ordering::Relaxed) != permit {
        return None;
    }
    pass_by_permit(thread, permit, operands, words)
}

#[cold]
#[inline(never)]
fn pass_by_permit(
    thread: &Thread,
    permit: u32,
    operands: Operands,
    words: &[usize],
) -> Option<quiesce::Pass> {
    let named = operands::linear(operands, words)?;
    let pass = quiesce::pass_by_permit(thread, || holds(permit))?;
    // Inside, so that nothing leaves any more: what is in stays in.
    let there = named
        .iter()
        .all(|(start, bytes)| *bytes == 0 || is_in(*start, *bytes));
    if !there {
        return None;
    }
    UNSETTLED.store(true, Ordering::SeqCst);
    Some(pass)
}

/// Whether nothing of a range is away.
fn is_in(start: u64, bytes: u64) -> bool {
    let end = start.saturating_add(bytes);
    chunk::with(|chunks| {
        !chunks.all.values().any(|chunk| {
            !matches!(chunk.place, Place::Resident | Place::Host)
                && chunk.mappings.iter().any(|mapping| {
                    mapping.address < end && mapping.address.saturating_add(chunk.bytes) > start
                })
        })
    })
}

/// The leave that a thread in `begin(group)` can have now.
fn permit_for(group: u32) -> Option<u32> {
    // SYNC(early): in this order; see `Watch::over`.
    let restore = RESTORE.load(Ordering::SeqCst);
    let level = LEVEL.load(Ordering::SeqCst);
    // CAST: the halves.
    let (declared, level) = ((level >> 32) as u32, u64::from(level as u32));
    let may = restore != 0 && declared == groups::changes() && level > u64::from(group) + 1;
    may.then_some(restore)
}

/// `sublet_pipeline_begin`.
pub(crate) fn begin(group: u32) -> i32 {
    let thread = thread();
    if !super::active() || thread.is_inside() {
        return 0;
    }
    thread.permit.set(0);
    if !quiesce::is_closed() {
        return 1;
    }
    wait(thread, group)
}

#[cold]
#[inline(never)]
fn wait(thread: &Thread, group: u32) -> i32 {
    let outcome = quiesce::wait_on(thread, &SIGNAL, |_| {
        if !quiesce::is_closed() {
            return Some(1);
        }
        if let Some(permit) = permit_for(group) {
            thread.permit.set(permit);
            GIVEN.store(permit, Ordering::SeqCst);
            return Some(1);
        }
        quiesce::has_failed().then_some(-1)
    });
    outcome.unwrap_or(0)
}

/// `sublet_pipeline_add`.
pub(crate) fn add(group: u32, start: u64, bytes: u64) -> i32 {
    let Some(end) = start.checked_add(bytes) else {
        return -1;
    };
    if group >= groups::MOST_GROUPS || start == 0 || bytes == 0 {
        return -1;
    }
    if !super::active() {
        return 0;
    }
    groups::declare(group, start, end);
    1
}

/// `sublet_pipeline_clear`.
pub(crate) fn clear() -> i32 {
    if !super::active() {
        return 0;
    }
    groups::clear();
    1
}

/// How long after now a leave's work may go on, at most.
pub(super) fn settle_by_ns() -> u64 {
    now_ns() + SETTLE_NS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_sense_is_not_declared() {
        for (group, start, bytes) in [
            (0, 0, 10),
            (0, 10, 0),
            (groups::MOST_GROUPS, 10, 10),
            (0, u64::MAX, 2),
        ] {
            assert_eq!(add(group, start, bytes), -1);
        }
        assert_eq!(
            add(0, 4096, 4096),
            0,
            "nothing of this process can be moved"
        );
    }
}
