//! When this arbiter began, and whether it is to end.
//!
//! Owns what ends it: a bell that anybody may ring, hangups, the time without a job, and failures
//! of the loop; and the lock of the directory, which is given back after everything else is gone.
//! An end is for good.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::sys::signalfd::SignalFd;

use crate::bell::Bell;

/// Failures in a row of [`FAILURES_NS`] after which the arbiter ends, every gate open, for a
/// successor to take over.
pub const FAILURES: u32 = 16;
const FAILURES_NS: u64 = 60_000_000_000;

/// Asks an arbiter to end, from any thread.
#[derive(Clone, Debug)]
pub struct Stopper(Bell);

impl Stopper {
    /// Asks.
    pub fn stop(&self) {
        self.0.ring();
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Lifetime {
    started_unix_ms: u64,
    stop: Bell,
    /// Where SIGHUP is read from.
    hangups: Option<SignalFd>,
    is_over: bool,
    /// Since when there is no job.
    idle_since_ns: u64,
    /// Turns of the loop, and by how much they began after their time.
    turns: (u64, u64),
    /// Turns of the loop that have failed, and since when that is counted.
    failures: (u32, u64),
    /// `None`: nobody else can know of the directory.
    lock: Option<File>,
}

impl Lifetime {
    /// Begins. `stop` ends it.
    pub fn begin(now_unix_ms: u64, now_ns: u64, stop: Bell, lock: Option<File>) -> Self {
        Self {
            started_unix_ms: now_unix_ms,
            stop,
            hangups: None,
            is_over: false,
            idle_since_ns: now_ns,
            turns: (0, 0),
            failures: (0, now_ns),
            lock,
        }
    }

    /// The lock of the directory is another file from here on.
    pub fn hold(&mut self, lock: File) {
        self.lock = Some(lock);
    }

    /// When it began.
    pub fn started_unix_ms(&self) -> u64 {
        self.started_unix_ms
    }

    /// Something to end it with.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.stop.clone())
    }

    /// Readable when it is to end.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }

    /// It is to end.
    pub fn end(&mut self) {
        self.is_over = true;
    }

    /// Whether it is to end.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Reads hangups from here on.
    pub fn hear_hangups(&mut self, hangups: SignalFd) {
        self.hangups = Some(hangups);
    }

    /// Takes the hangups that are there.
    pub fn take_hangups(&self) {
        let Some(hangups) = &self.hangups else {
            return;
        };
        while let Ok(Some(_)) = hangups.read_signal() {}
    }

    /// There is a job, or an operator.
    pub fn note_busy(&mut self, now_ns: u64) {
        self.idle_since_ns = now_ns;
    }

    /// When it ends if it may be without a job for so long, and none comes.
    pub fn ends_idle_at(&self, idle_exit: Duration) -> u64 {
        let idle_ns = u64::try_from(idle_exit.as_nanos()).unwrap_or(u64::MAX);
        self.idle_since_ns.saturating_add(idle_ns)
    }

    /// A turn of the loop has begun, so much after its time.
    pub fn note_turn(&mut self, lag_ns: u64) {
        self.turns.0 += 1;
        self.turns.1 = self.turns.1.saturating_add(lag_ns);
    }

    /// How many turns the loop has had, and by how much they began after their time in all.
    pub fn turns(&self) -> (u64, u64) {
        self.turns
    }

    /// A turn of the loop has failed; how many of them have lately.
    pub fn note_failure(&mut self, now_ns: u64) -> u32 {
        let (count, since_ns) = &mut self.failures;
        if now_ns.saturating_sub(*since_ns) > FAILURES_NS {
            (*count, *since_ns) = (0, now_ns);
        }
        *count += 1;
        *count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lifetime() -> Lifetime {
        Lifetime::begin(1, 1, Bell::new().expect("an eventfd"), None)
    }

    #[test]
    fn failures_are_counted_for_a_minute() {
        let mut lifetime = lifetime();
        assert_eq!(
            [2, 3, FAILURES_NS].map(|ns| lifetime.note_failure(ns)),
            [1, 2, 3]
        );
        assert_eq!(lifetime.note_failure(2 + FAILURES_NS), 1);
    }

    #[test]
    fn turns_and_their_lag_add_up() {
        let mut lifetime = lifetime();
        for lag_ns in [0, 5, u64::MAX] {
            lifetime.note_turn(lag_ns);
        }
        assert_eq!(lifetime.turns(), (3, u64::MAX));
    }

    #[test]
    fn the_time_without_a_job_begins_anew_with_every_job() {
        let mut lifetime = lifetime();
        let second = Duration::from_secs(1);
        assert_eq!(lifetime.ends_idle_at(second), 1_000_000_001);
        lifetime.note_busy(5);
        assert_eq!(lifetime.ends_idle_at(second), 1_000_000_005);
        assert_eq!(lifetime.ends_idle_at(Duration::MAX), u64::MAX);
        assert!(!lifetime.is_over());
        lifetime.end();
        assert!(lifetime.is_over());
    }
}
