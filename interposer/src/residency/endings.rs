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

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use crate::gate::registration;
use crate::ground::clock::{self, now_ns};
use crate::ground::process;
use crate::ground::stretch;
use crate::ground::thread::{Thread, thread};

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

/// A thread that ends a context.
struct Place {
    /// Which thread, by the kernel's number; 0: the place is free.
    who: AtomicU32,
    /// The context that may be gone after its call; 0: none that is known.
    context: AtomicUsize,
    /// Whether it is counted in [`LEAVING`].
    leaving: AtomicBool,
}

/// Who finds no place is not waited for, and its end is not noticed.
static PLACES: [Place; 16] = [const {
    Place {
        who: AtomicU32::new(0),
        context: AtomicUsize::new(0),
        leaving: AtomicBool::new(false),
    }
}; 16];
/// How many have a context in them.
static GOING_COUNT: AtomicU32 = AtomicU32::new(0);

impl Place {
    fn end_leaving(&self) {
        if self.leaving.swap(false, Ordering::SeqCst) {
            LEAVING.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn end(&self) {
        self.end_leaving();
        if self.context.swap(0, Ordering::SeqCst) != 0 {
            GOING_COUNT.fetch_sub(1, Ordering::SeqCst);
        }
        self.who.store(0, Ordering::Release);
    }
}

/// Gives up the places of threads that have ended.
fn sweep() {
    for place in &PLACES {
        let who = place.who.load(Ordering::Acquire);
        if who != 0 && process::has_ended(who) {
            place.end();
        }
    }
}

/// TIMEOUT: how long who has a context waits until an earlier one of the same handle is struck out:
/// microseconds after the driver has ended it, unless a thread stands still in between.
const GOING_NS: u64 = 2_000_000_000;

/// A context that may be gone after a call, until all that belonged to it is struck out.
#[derive(Debug)]
pub(crate) struct Going(Option<usize>);

impl Going {
    /// Before the call. `at`: where the stack is in the entry.
    pub(crate) fn begin(context: usize, at: usize) -> Self {
        let (thread, who) = (thread(), process::own_tid());
        let take = || {
            PLACES.iter().position(|place| {
                let free =
                    (place.who).compare_exchange(0, who, Ordering::AcqRel, Ordering::Relaxed);
                free.is_ok()
            })
        };
        let taken = take().or_else(|| {
            sweep();
            take()
        });
        if let Some(place) = taken {
            if thread.ending.get() == 0 {
                thread.ends.set(at);
            }
            thread.ending.set(thread.ending.get() | 1 << place);
            if context != 0 {
                GOING_COUNT.fetch_add(1, Ordering::SeqCst);
                // SYNC(going): published before the driver is called, which is what gives the
                // handle to somebody else. PANIC: a position in it.
                PLACES[place].context.store(context, Ordering::SeqCst);
            }
        }
        Self(taken)
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        let thread = thread();
        if let Some(at) = self.0
            && thread.ending.get() & 1 << at != 0
        {
            thread.ending.set(thread.ending.get() & !(1 << at));
            // PANIC: a position in it.
            PLACES[at].end();
        }
    }
}

/// In an entry, where the stack is at `at`: ends of contexts that the thread has left by a jump are
/// over.
#[inline(always)]
pub(crate) fn give_back(at: usize) {
    let thread = thread();
    if thread.ending.get() != 0 || thread.withdrew.get() != 0 {
        give_back_left(thread, at);
    }
}

#[cold]
#[inline(never)]
fn give_back_left(thread: &Thread, at: usize) {
    if thread.ending.get() != 0 && stretch::left(thread.ends.get(), at) {
        let mine = thread.ending.replace(0);
        let places = PLACES.iter().enumerate();
        let places = places.filter(|(at, _)| mine & 1 << at != 0);
        places.for_each(|(_, place)| place.end());
    }
    if thread.withdrew.get() != 0 && stretch::left(thread.withdrew.get(), at) {
        registration::left();
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
    let begun_ns = now_ns();
    let mut swept = false;
    while context != 0 && goes(context) && !process::exiting() {
        let waited_ns = now_ns() - begun_ns;
        if waited_ns > GOING_NS {
            return;
        }
        if waited_ns > PATIENCE_NS && !swept {
            sweep();
            swept = true;
        }
        clock::pause(LOOK);
    }
}

fn goes(context: usize) -> bool {
    (PLACES.iter()).any(|place| place.context.load(Ordering::SeqCst) == context)
}

/// In a forked child: neither the agent nor other threads are there.
pub(super) fn forget() {
    for place in &PLACES {
        place.leaving.store(false, Ordering::Relaxed);
        place.context.store(0, Ordering::Relaxed);
        place.who.store(0, Ordering::Relaxed);
    }
    thread().ending.set(0);
    GOING_COUNT.store(0, Ordering::Relaxed);
    AGENT.store(NOTHING, Ordering::Relaxed);
    LEAVING.store(0, Ordering::Relaxed);
}

/// Around a call that may end a context, inside of a [`Going`].
#[derive(Debug)]
pub(crate) struct Leaving(Option<usize>);

impl Leaving {
    fn begin(going: &Going) -> Self {
        // SYNC(endings): counted, then a look at the agent; it says that it works, then looks at
        // the count. Of the two one sees the other.
        LEAVING.fetch_add(1, Ordering::SeqCst);
        if let Some(at) = going.0 {
            // PANIC: a position in it.
            PLACES[at].leaving.store(true, Ordering::SeqCst);
        }
        Self(going.0)
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        match self.0 {
            // PANIC: a position in it. Where it was given up meanwhile nothing is left to do.
            Some(at) if thread().ending.get() & 1 << at != 0 => PLACES[at].end_leaving(),
            Some(_) => {}
            None => {
                LEAVING.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

/// The calling thread is about to end a context: the agent makes no calls in any from here on.
/// `None` where nothing of this process can be moved.
pub(crate) fn leaving(going: &Going) -> Option<Leaving> {
    if !super::active() {
        return None;
    }
    while_agent(WANTS, PATIENCE_NS);
    let leaving = Leaving::begin(going);
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
            // For the next time.
            sweep();
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
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use super::*;
    use crate::ground::stretch::{deeper, here};

    /// One test at a time: the threads that end a context are the process's.
    fn one_at_a_time() -> MutexGuard<'static, ()> {
        static TESTS: Mutex<()> = Mutex::new(());
        TESTS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(count: &AtomicU32) -> u32 {
        count.load(Ordering::SeqCst)
    }

    /// The end of a context that the thread leaves without returning.
    fn jump_out(context: usize) {
        let going = Going::begin(context, here());
        std::mem::forget((Leaving::begin(&going), going));
    }

    #[test]
    fn the_end_of_a_context_that_a_thread_has_left_by_a_jump_keeps_nobody() {
        let _guard = one_at_a_time();
        let outer = Going::begin(8, here());
        deeper(|| {
            jump_out(7);
            // A handler's call while it lasts.
            deeper(|| give_back(here()));
        });
        assert!(try_hold_off().is_none() && goes(7) && goes(8));
        drop(outer);
        assert!(!goes(8));
        // The thread's next one from where the other was called.
        thread().ends.set(here() - 4096);
        give_back(here());
        assert!(try_hold_off().is_some() && !goes(7));
        assert_eq!((of(&LEAVING), of(&GOING_COUNT)), (0, 0));
        // After it was given back its guard ends nothing, its own or another's.
        let left = Going::begin(9, here());
        let leaving = Leaving::begin(&left);
        thread().ends.set(1);
        give_back(here());
        assert_eq!((of(&LEAVING), of(&GOING_COUNT)), (0, 0));
        drop(leaving);
        drop(left);
        assert_eq!((of(&LEAVING), of(&GOING_COUNT)), (0, 0));
    }

    #[test]
    fn a_thread_that_has_ended_ends_no_context_any_more() {
        let _guard = one_at_a_time();
        std::thread::spawn(|| jump_out(7)).join().expect("it ends");
        assert!(goes(7));
        let begun_ns = now_ns();
        while hold_off().is_none() {
            assert!(now_ns() - begun_ns < 30_000_000_000, "nobody sees its end");
        }
        assert!(!goes(7));
        assert_eq!((of(&LEAVING), of(&GOING_COUNT)), (0, 0));
    }

    #[test]
    fn who_has_a_context_waits_for_the_end_of_an_earlier_one_of_its_handle() {
        let _guard = one_at_a_time();
        await_going(7);
        let going = Going::begin(7, here());
        await_going(8);
        let waits = std::thread::spawn(|| {
            await_going(7);
            goes(7)
        });
        std::thread::sleep(Duration::from_millis(5));
        assert!(!waits.is_finished(), "it has not waited");
        drop(going);
        assert!(
            !waits.join().expect("it goes on"),
            "it has gone on too early"
        );
        drop(Going::begin(0, here()));
        assert_eq!(of(&GOING_COUNT), 0);
    }

    #[test]
    fn the_end_of_a_context_and_the_agents_calls_exclude_each_other() {
        let _guard = one_at_a_time();
        let held = try_hold_off().expect("nobody ends one");
        assert_eq!((of(&AGENT), is_awaited()), (WORKS, false));
        drop(held);
        assert_eq!(of(&AGENT), NOTHING);
        let going = Going::begin(0, here());
        let begun = Leaving::begin(&going);
        assert!(try_hold_off().is_none() && hold_off().is_none());
        assert_eq!(of(&AGENT), NOTHING, "others are let go on");
        drop(begun);
        // A thread that comes meanwhile is seen, and goes on afterwards.
        let held = hold_off().expect("nobody ends one any more");
        let comes = std::thread::spawn(|| {
            let going = Going::begin(0, here());
            let _leaving = Leaving::begin(&going);
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
