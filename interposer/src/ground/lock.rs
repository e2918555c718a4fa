//! A lock for a few dozen nanoseconds at a time.
//!
//! It is given up by a plain store. The standard library's asks by an exchange, at each release,
//! whether somebody sleeps; that costs as much as taking it, and allocations take two. Here nobody
//! is ever woken: a thread that comes meanwhile looks again, then offers the core, then sleeps for
//! short times (the holder may be of lower priority and need the core).

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::ground::clock::pause;

/// Looks before the core is offered.
const SPINS: u32 = 64;
/// Looks before the waiter sleeps.
const SLEEPS: u32 = SPINS + 32;
const NAP: Duration = Duration::from_micros(50);

/// Mutual exclusion; a panic while it is held changes nothing.
pub(crate) struct Lock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: one thread at a time reaches the value, by the guard.
unsafe impl<T: Send> Sync for Lock<T> {}

/// The lock, held.
pub(crate) struct Guard<'a, T>(&'a Lock<T>);

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self {
            held: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for the lock.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        if !self.take() {
            self.wait();
        }
        Guard(self)
    }

    #[inline]
    fn take(&self) -> bool {
        // SYNC(lock): Acquire, pairs with the Release of the guard's end.
        !self.held.swap(true, Ordering::Acquire)
    }

    #[cold]
    #[inline(never)]
    fn wait(&self) {
        let mut looks = 0u32;
        loop {
            if !self.held.load(Ordering::Relaxed) && self.take() {
                return;
            }
            looks = looks.saturating_add(1);
            // TIMEOUT: none. The holder is in a handful of instructions, and makes no call that
            // could wait.
            match looks {
                0..SPINS => std::hint::spin_loop(),
                SPINS..SLEEPS => std::thread::yield_now(),
                _ => pause(NAP),
            }
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the lock is held as long as the guard lives.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed for as long.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        static SUM: Lock<u64> = Lock::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        let mut sum = SUM.lock();
                        let before = *sum;
                        std::hint::black_box(&mut sum);
                        *sum = before + 1;
                    }
                });
            }
        });
        assert_eq!(*SUM.lock(), 40_000);
    }

    #[test]
    fn a_panic_gives_it_up() {
        static LOCK: Lock<u32> = Lock::new(1);
        let _ = std::panic::catch_unwind(|| {
            let _held = LOCK.lock();
            panic!("on purpose");
        });
        assert_eq!(*LOCK.lock(), 1);
    }
}
