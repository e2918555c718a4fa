//! The monotonic clock, and short sleeps.

use std::time::Duration;

/// Monotonic time in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // CAST: the monotonic clock is never negative.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Sleeps; may wake early.
pub(crate) fn pause(time: Duration) {
    let request = rustix::time::Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    let _ = rustix::thread::nanosleep(&request);
}
