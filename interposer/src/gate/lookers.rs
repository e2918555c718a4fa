//! Threads that wait for one thing that any of them can use: a few look for it, the others sleep.
//!
//! What is waited for comes from the device, so nobody is there to wake anybody. A thread that
//! looks has one of a few *places*, for as long as it looks again in time, and hands it on when it
//! has found what it wanted. Thousands that wait cost no more than a few.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::thread::futex;

use crate::ground::clock::{now_ns, pause};

/// Threads that look at the same time.
const PLACES: usize = 4;
/// A thread that has not looked for so long has lost its place: it may be gone, by a jump out of a
/// signal handler or with its thread.
const HOLD_NS: u64 = 10_000_000;
/// TIMEOUT: how long a thread sleeps before it looks once by itself.
const SLEEP: futex::Timespec = futex::Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

/// The places for one kind of thing.
pub(crate) struct Lookers {
    /// Until when each of them is somebody's.
    until_ns: [AtomicU64; PLACES],
    /// Places that were handed on, ever; what the others sleep on.
    handed_on: AtomicU32,
}

impl Lookers {
    pub(crate) const fn new() -> Self {
        Self {
            until_ns: [const { AtomicU64::new(0) }; PLACES],
            handed_on: AtomicU32::new(0),
        }
    }

    /// In a forked child: nobody else waits.
    pub(crate) fn forget(&self) {
        for until in &self.until_ns {
            until.store(0, Ordering::Relaxed);
        }
    }

    /// One more that waits.
    pub(crate) const fn looker(&self) -> Looker<'_> {
        Looker {
            of: self,
            place: None,
        }
    }
}

/// A thread that waits, until dropped.
pub(crate) struct Looker<'a> {
    of: &'a Lookers,
    /// Its place, and until when.
    place: Option<(usize, u64)>,
}

impl Looker<'_> {
    /// Returns when the thread is to look again: after `nap` where it has a place, else when it is
    /// handed one, or has slept long enough to look once without.
    pub(crate) fn wait(&mut self, nap: Duration) {
        // Before looking for a place: one that is handed on from here on ends the sleep.
        let handed_on = self.of.handed_on.load(Ordering::Acquire);
        if self.keep() || self.claim() {
            pause(nap);
            return;
        }
        let word = &self.of.handed_on;
        let _ = futex::wait(word, futex::Flags::PRIVATE, handed_on, Some(&SLEEP));
        self.claim();
    }

    /// Keeps the place it has.
    fn keep(&mut self) -> bool {
        let Some((at, until_ns)) = self.place else {
            return false;
        };
        self.set(at, until_ns, now_ns() + HOLD_NS)
    }

    /// Takes a place that nobody has.
    fn claim(&mut self) -> bool {
        let now_ns = now_ns();
        (0..PLACES).any(|at| {
            let until_ns = self.of.until_ns[at].load(Ordering::Relaxed); // PANIC: below the length.
            until_ns < now_ns && self.set(at, until_ns, now_ns + HOLD_NS)
        })
    }

    fn set(&mut self, at: usize, from: u64, to: u64) -> bool {
        // PANIC: the index of a place.
        let set = self.of.until_ns[at]
            .compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok();
        self.place = set.then_some((at, to));
        set
    }
}

impl Drop for Looker<'_> {
    fn drop(&mut self) {
        if let Some((at, until_ns)) = self.place
            && self.set(at, until_ns, 0)
        {
            let word = &self.of.handed_on;
            word.fetch_add(1, Ordering::Release);
            let _ = futex::wake(word, futex::Flags::PRIVATE, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_few_look_and_hand_on() {
        const THREADS: usize = 64;
        let lookers = Lookers::new();
        let (looks, served) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let mut looker = lookers.looker();
                    // There is something for one more thread every hundred looks.
                    loop {
                        looker.wait(Duration::from_micros(20));
                        let look = looks.fetch_add(1, Ordering::Relaxed);
                        if look / 100 >= served.load(Ordering::Relaxed) {
                            served.fetch_add(1, Ordering::Relaxed);
                            break;
                        }
                    }
                });
            }
        });
        assert_eq!(served.load(Ordering::Relaxed), THREADS);
        // Every place was handed on.
        let free = |until: &AtomicU64| until.load(Ordering::Relaxed) == 0;
        assert!(lookers.until_ns.iter().all(free));
    }

    #[test]
    fn a_place_that_is_not_used_any_more_is_taken() {
        let lookers = Lookers::new();
        let mut gone = [(); PLACES].map(|()| lookers.looker());
        gone.iter_mut()
            .for_each(|looker| looker.wait(Duration::ZERO));
        assert!(gone.iter().all(|looker| looker.place.is_some()));
        let mut next = lookers.looker();
        // Sleeps; their time is over by then.
        next.wait(Duration::ZERO);
        assert!(next.place.is_some());
        // Who comes back late has lost its place, and takes nobody's.
        drop(gone);
        assert!(next.keep());
    }
}
