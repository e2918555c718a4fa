//! Contexts that are about to end, and calls of ours in contexts of the program's.
//!
//! With the quiesce gate closed no context ends: a thread that is about to end one waits there.
//! While it is open the agent works in contexts as well: it waits for what has been submitted in
//! them, and locks host memory. A call in a context that is being taken away fails, or worse. So
//! for the length of each such call, microseconds to milliseconds, ends of contexts wait, and none
//! is made while one is on its way.
//!
//! Where memory could not be brought back threads are not kept at the closed quiesce gate any more,
//! and may end a context there: then the same holds for a whole order.
//!
//! A driver may give the handle of a context that has ended to the next one, before the thread that
//! ended it is back from the call: who has a new context waits until what belonged to the old one
//! is struck out ([`Going`]).
//!
//! Both sides wait for a bounded time, and none keeps the other out: a thread that ends a context
//! may wait in the driver for work that another such thread makes possible.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use crate::ground::clock::{self, now_ns};
use crate::ground::process;

/// What the agent does in contexts just now: [`NOTHING`], [`WANTS`], or [`WORKS`].
static AGENT: AtomicU32 = AtomicU32::new(NOTHING);
const NOTHING: u32 = 0;
/// It waits for threads that are ending a context to be done with that.
const WANTS: u32 = 1;
/// It works in them.
const WORKS: u32 = 2;

/// Threads of the program that are ending a context, or are about to.
static LEAVING: AtomicU32 = AtomicU32::new(0);

/// TIMEOUT: how long the end of a context waits for the agent: for one chunk of 64 MiB that is
/// locked at 30 MB/s. After that the driver decides.
const LOCKED_NS: u64 = 2_000_000_000;
/// TIMEOUT: how long the agent waits for threads that are ending a context, and others, once each,
/// let it go first.
const PATIENCE_NS: u64 = 20_000_000;
/// Time between two looks.
const LOOK: Duration = Duration::from_micros(50);

/// Contexts that threads are ending, and how many there are. Who finds no place is not waited for.
static GOING: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];
static GOING_COUNT: AtomicU32 = AtomicU32::new(0);

/// TIMEOUT: how long who has a context waits until an earlier one of the same handle is struck out:
/// microseconds after the driver has ended it, unless a thread stands still in between.
const GOING_NS: u64 = 2_000_000_000;

/// A context that may be gone after a call, until all that belonged to it is struck out.
#[derive(Debug)]
pub(crate) struct Going(Option<&'static AtomicUsize>);

impl Going {
    /// Before the call.
    pub(crate) fn begin(context: usize) -> Self {
        let taken = GOING.iter().find(|place| {
            // SYNC(going): published before the driver is called, which is what gives the handle to
            // somebody else.
            context != 0
                && (place.compare_exchange(0, context, Ordering::SeqCst, Ordering::Relaxed)).is_ok()
        });
        if taken.is_some() {
            GOING_COUNT.fetch_add(1, Ordering::SeqCst);
        }
        Self(taken)
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            place.store(0, Ordering::SeqCst);
            GOING_COUNT.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// A thread works in a context of this handle from here on. Not for one that is about to end it.
#[inline]
pub(crate) fn await_going(context: usize) {
    if GOING_COUNT.load(Ordering::SeqCst) != 0 {
        await_one(context);
    }
}

#[cold]
fn await_one(context: usize) {
    let goes = || {
        GOING
            .iter()
            .any(|place| place.load(Ordering::SeqCst) == context)
    };
    let until_ns = now_ns() + GOING_NS;
    while context != 0 && goes() && now_ns() < until_ns && !process::exiting() {
        clock::pause(LOOK);
    }
}

/// In a forked child: neither the agent nor other threads are there.
pub(super) fn forget() {
    GOING
        .iter()
        .for_each(|place| place.store(0, Ordering::Relaxed));
    GOING_COUNT.store(0, Ordering::Relaxed);
    AGENT.store(NOTHING, Ordering::Relaxed);
    LEAVING.store(0, Ordering::Relaxed);
}

/// Around a call that may end a context.
#[derive(Debug)]
pub(crate) struct Leaving(());

impl Leaving {
    fn begin() -> Self {
        // SYNC(endings): counted, then a look at the agent; it says that it works, then looks at
        // the count. Of the two one sees the other.
        LEAVING.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        LEAVING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The calling thread is about to end a context: the agent makes no calls in any from here on.
/// `None` where nothing of this process can be moved.
pub(crate) fn leaving() -> Option<Leaving> {
    if !super::active() {
        return None;
    }
    while_agent(WANTS, PATIENCE_NS);
    let leaving = Leaving::begin();
    while_agent(WORKS, LOCKED_NS);
    Some(leaving)
}

fn while_agent(state: u32, patience_ns: u64) {
    if AGENT.load(Ordering::SeqCst) != state {
        return;
    }
    let until_ns = now_ns() + patience_ns;
    while AGENT.load(Ordering::SeqCst) == state && now_ns() < until_ns && !process::exiting() {
        clock::pause(LOOK);
    }
}

/// No context ends, until dropped.
#[derive(Debug)]
pub(super) struct HeldOff(());

impl Drop for HeldOff {
    fn drop(&mut self) {
        AGENT.store(NOTHING, Ordering::SeqCst);
    }
}

/// From here on no context ends; `None`: one is on its way. The agent's alone.
pub(super) fn try_hold_off() -> Option<HeldOff> {
    hold_off_within(0)
}

/// The same, with some patience for one that is on its way.
pub(super) fn hold_off() -> Option<HeldOff> {
    hold_off_within(PATIENCE_NS)
}

fn hold_off_within(patience_ns: u64) -> Option<HeldOff> {
    let held = HeldOff(());
    let until_ns = now_ns() + patience_ns;
    loop {
        AGENT.store(WORKS, Ordering::SeqCst);
        // SYNC(endings): see `Leaving::begin`.
        if LEAVING.load(Ordering::SeqCst) == 0 {
            return Some(held);
        }
        AGENT.store(WANTS, Ordering::SeqCst);
        if now_ns() >= until_ns || process::exiting() {
            return None;
        }
        clock::pause(LOOK);
    }
}

/// Whether a thread waits for what was begun by [`hold_off`].
pub(super) fn is_awaited() -> bool {
    LEAVING.load(Ordering::SeqCst) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_a_context_waits_for_the_end_of_an_earlier_one_of_its_handle() {
        await_going(7);
        let going = Going::begin(7);
        await_going(8);
        let waits = std::thread::spawn(|| {
            await_going(7);
            GOING.iter().any(|place| place.load(Ordering::SeqCst) == 7)
        });
        std::thread::sleep(Duration::from_millis(5));
        assert!(!waits.is_finished(), "it has not waited");
        drop(going);
        assert!(
            !waits.join().expect("it goes on"),
            "it has gone on too early"
        );
        drop(Going::begin(0));
        assert_eq!(GOING_COUNT.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn the_end_of_a_context_and_the_agents_calls_exclude_each_other() {
        let of = |count: &AtomicU32| count.load(Ordering::SeqCst);
        let held = try_hold_off().expect("nobody ends one");
        assert_eq!((of(&AGENT), is_awaited()), (WORKS, false));
        drop(held);
        assert_eq!(of(&AGENT), NOTHING);
        let begun = Leaving::begin();
        assert!(try_hold_off().is_none() && hold_off().is_none());
        assert_eq!(of(&AGENT), NOTHING, "others are let go on");
        drop(begun);
        // A thread that comes meanwhile is seen, and goes on afterwards.
        let held = hold_off().expect("nobody ends one any more");
        let comes = std::thread::spawn(|| {
            let _leaving = Leaving::begin();
            while_agent(WORKS, u64::MAX / 2);
            AGENT.load(Ordering::SeqCst)
        });
        while !is_awaited() {
            assert!(!comes.is_finished(), "it has not waited");
            std::thread::yield_now();
        }
        drop(held);
        assert_eq!(comes.join().expect("it goes on"), NOTHING);
        assert_eq!(of(&LEAVING), 0);
    }
}
