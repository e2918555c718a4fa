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
//! Both sides wait for a bounded time: a thread that ends a context may wait in the
//! driver for work that another such thread makes possible.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::thread::futex;

use crate::ground::clock::{self, now_ns};
use crate::ground::process;
use crate::ground::stretch::{Counted, Of, here};
use crate::ground::thread::thread;

/// What the agent does in contexts just now: [`NOTHING`], [`WORKS`], or [`AWAITED`].
static AGENT: AtomicU32 = AtomicU32::new(NOTHING);
const NOTHING: u32 = 0;
/// It works in them, or waits for threads that end one to be done with that.
const WORKS: u32 = 1;
/// The same, and a thread waits for its end.
const AWAITED: u32 = 2;

/// Threads of the program that are ending a context.
static LEAVING: AtomicU32 = AtomicU32::new(0);

/// TIMEOUT: how long the end of a context waits for the agent: for one chunk of 64 MiB that is
/// locked at 30 MB/s. After that the driver decides.
const LOCKED_NS: u64 = 2_000_000_000;
/// TIMEOUT: how long the agent keeps other threads from ending contexts while it waits for one that
/// does. Then it lets them go on for a moment.
const PATIENCE_NS: u64 = 20_000_000;

/// In a forked child: neither the agent nor other threads are there.
pub(super) fn forget() {
    AGENT.store(NOTHING, Ordering::Relaxed);
    LEAVING.store(0, Ordering::Relaxed);
}

/// Around a call that may end a context.
pub(crate) struct Leaving {
    _counted: Counted,
}

/// The calling thread is about to end a context: the agent makes no calls in any from here on.
/// `None` where nothing of this process can be moved.
pub(crate) fn leaving() -> Option<Leaving> {
    if !super::active() {
        return None;
    }
    let until_ns = now_ns() + LOCKED_NS;
    loop {
        let leaving = Leaving {
            _counted: thread().counts.begin(Of::Number(&LEAVING), here()),
        };
        // SYNC(endings): counted, then a look at the agent; it says that it works, then looks at
        // the count. Of the two one sees the other.
        fence(Ordering::SeqCst);
        let now = AGENT.load(Ordering::SeqCst);
        if now == NOTHING || now_ns() > until_ns || process::exiting() {
            return Some(leaving);
        }
        drop(leaving);
        wait();
    }
}

/// Until the agent is done, or for a moment.
fn wait() {
    let _ = AGENT.compare_exchange(WORKS, AWAITED, Ordering::SeqCst, Ordering::SeqCst);
    let step = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 50_000_000,
    };
    let _ = futex::wait(&AGENT, futex::Flags::PRIVATE, AWAITED, Some(&step));
}

/// No context ends, until dropped.
#[derive(Debug)]
pub(super) struct HeldOff(());

impl Drop for HeldOff {
    fn drop(&mut self) {
        if AGENT.swap(NOTHING, Ordering::SeqCst) == AWAITED {
            let _ = futex::wake(&AGENT, futex::Flags::PRIVATE, i32::MAX as u32);
        }
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
    AGENT.store(WORKS, Ordering::SeqCst);
    let held = HeldOff(());
    // SYNC(endings): see `leaving`.
    fence(Ordering::SeqCst);
    let until_ns = now_ns() + patience_ns;
    while LEAVING.load(Ordering::SeqCst) != 0 {
        if now_ns() >= until_ns || process::exiting() {
            return None;
        }
        clock::pause(Duration::from_micros(50));
    }
    Some(held)
}

/// Whether a thread waits for what was begun by [`hold_off`].
pub(super) fn is_awaited() -> bool {
    AGENT.load(Ordering::SeqCst) == AWAITED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_context_and_the_agents_calls_exclude_each_other() {
        let of = |count: &AtomicU32| count.load(Ordering::SeqCst);
        let held = try_hold_off().expect("nobody ends one");
        assert_eq!((of(&AGENT), is_awaited()), (WORKS, false));
        drop(held);
        assert_eq!(of(&AGENT), NOTHING);
        let begun = thread().counts.begin(Of::Number(&LEAVING), here());
        assert!(try_hold_off().is_none());
        assert_eq!(of(&AGENT), NOTHING, "others are let go on");
        drop(begun);
        // A thread that comes meanwhile says so, and is woken.
        let held = hold_off().expect("nobody ends one any more");
        let waits = std::thread::spawn(wait);
        while !is_awaited() {
            assert!(!waits.is_finished(), "it has not waited");
            std::thread::yield_now();
        }
        drop(held);
        waits.join().expect("it goes on");
        assert_eq!((of(&AGENT), of(&LEAVING)), (NOTHING, 0));
    }
}
