//! Locks and waiting that need nothing of the thread that uses them.
//!
//! The shape is parking_lot's, which the rest of the host side uses. Its threads keep data with a
//! destructor, though, and to register one glibc takes the dynamic loader's lock; so does the
//! standard library for a thread that it starts. A program may wait for the device while it holds
//! that lock: in the constructor of a library that is being opened. The device's threads must
//! therefore never ask for it, and the standard library's own locks (a word and a futex) do not.

use std::ops::{Deref, DerefMut};
use std::sync::{self, PoisonError};
use std::time::Duration;

/// Mutual exclusion; a panic while it is held changes nothing.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(sync::Mutex<T>);

/// The lock, held.
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    lock: &'a Mutex<T>,
    /// Empty only while [`MutexGuard::unlocked`] or [`Condvar`] has given it up.
    held: Option<sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// Around a value.
    pub const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard {
            lock: self,
            held: Some(self.take()),
        }
    }

    fn take(&self) -> sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> MutexGuard<'_, T> {
    /// Gives the lock up for as long as `body` runs.
    pub fn unlocked<R>(this: &mut Self, body: impl FnOnce() -> R) -> R {
        this.held = None;
        let result = body();
        this.held = Some(this.lock.take());
        result
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        match &self.held {
            Some(held) => held,
            None => unreachable!("the guard is borrowed while it is given up"),
        }
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.held {
            Some(held) => held,
            None => unreachable!("the guard is borrowed while it is given up"),
        }
    }
}

/// Waiting for a change of what a [`Mutex`] guards.
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

/// How a wait with a limit ended.
#[derive(Debug, Clone, Copy)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Whether the time was up.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// That nobody waits for yet.
    pub const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    /// Waits until notified, or for no reason.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if let Some(held) = guard.held.take() {
            let held = self.0.wait(held).unwrap_or_else(PoisonError::into_inner);
            guard.held = Some(held);
        }
    }

    /// Waits until notified, or for no reason, but for no longer than `time`.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) -> WaitTimeoutResult {
        let Some(held) = guard.held.take() else {
            return WaitTimeoutResult(false);
        };
        let (held, result) = self
            .0
            .wait_timeout(held, time)
            .unwrap_or_else(PoisonError::into_inner);
        guard.held = Some(held);
        WaitTimeoutResult(result.timed_out())
    }

    /// Wakes one that waits.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all that wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// Many readers or one writer; a panic while it is held changes nothing.
#[derive(Debug, Default)]
pub struct RwLock<T>(sync::RwLock<T>);

impl<T> RwLock<T> {
    /// Around a value.
    pub const fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }

    /// Waits to read.
    pub fn read(&self) -> sync::RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits to write.
    pub fn write(&self) -> sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
