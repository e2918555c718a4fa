//! The one door to atomics and futexes. Under `--cfg loom` the same protocol code runs on loom's
//! types, so that what ships is what the model checker has seen.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, fence};

pub(crate) use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// Marks where a SeqCst write has to come before a SeqCst read in the single total order of both.
/// The orderings say so themselves; loom treats SeqCst accesses as AcqRel and knows a total order
/// of fences only (see its README), so that it gets one.
#[inline]
pub(crate) fn total_order() {
    #[cfg(loom)]
    fence(SeqCst);
}

/// A 32-bit word that processes can wait on.
#[cfg(not(loom))]
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct FutexWord(AtomicU32);

#[cfg(not(loom))]
impl FutexWord {
    /// The word itself, for a hot path that only wants to look.
    pub fn word(&self) -> &std::sync::atomic::AtomicU32 {
        &self.0
    }

    pub(crate) fn load(&self, order: std::sync::atomic::Ordering) -> u32 {
        self.0.load(order)
    }

    pub(crate) fn store(&self, value: u32, order: std::sync::atomic::Ordering) {
        self.0.store(value, order);
    }

    /// Waits until woken, `timeout` has passed, or the word is no longer `expected`. May wake for
    /// no reason.
    pub(crate) fn wait(&self, expected: u32, timeout: std::time::Duration) {
        use rustix::thread::futex;
        let timeout = rustix::time::Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // Every outcome (woken, changed, timed out, interrupted) means the same to the caller: look
        // again.
        let _ = futex::wait(&self.0, futex::Flags::empty(), expected, Some(&timeout));
    }

    /// Wakes every waiter; returns how many there were.
    pub(crate) fn wake_all(&self) -> usize {
        use rustix::thread::futex;
        futex::wake(&self.0, futex::Flags::empty(), i32::MAX as u32).unwrap_or(0)
    }
}

/// A futex modelled for loom: the kernel checks the word and queues the waiter under one lock, and
/// so does this.
#[cfg(loom)]
#[derive(Debug)]
pub struct FutexWord {
    word: AtomicU32,
    bucket: loom::sync::Mutex<()>,
    woken: loom::sync::Condvar,
}

#[cfg(loom)]
impl Default for FutexWord {
    fn default() -> Self {
        Self {
            word: AtomicU32::new(0),
            bucket: loom::sync::Mutex::new(()),
            woken: loom::sync::Condvar::new(),
        }
    }
}

#[cfg(loom)]
impl FutexWord {
    pub(crate) fn load(&self, order: std::sync::atomic::Ordering) -> u32 {
        self.word.load(order)
    }

    pub(crate) fn store(&self, value: u32, order: std::sync::atomic::Ordering) {
        self.word.store(value, order);
    }

    /// Never times out: a wake-up that is lost shows as a deadlock.
    pub(crate) fn wait(&self, expected: u32, _timeout: std::time::Duration) {
        let guard = self.bucket.lock().unwrap();
        if self.word.load(SeqCst) == expected {
            drop(self.woken.wait(guard).unwrap());
        }
    }

    pub(crate) fn wake_all(&self) -> usize {
        let _guard = self.bucket.lock().unwrap();
        self.woken.notify_all();
        0
    }
}
