//! The monotonic clock, and short sleeps.
//!
//! Beside a simulated device that is slower than the one it stands for, both go slower by the same
//! factor, once the arbiter has said so: whatever is measured or waited for scales with it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// What the host's time is divided by.
static DILATION: AtomicU32 = AtomicU32::new(1);

/// What the arbiter says of it. It is not to be trusted: a clock that stands still would be waited
/// for.
pub(crate) fn dilate(dilation: u32) {
    DILATION.store(dilation.clamp(1, 1000), Ordering::Relaxed);
}

/// Monotonic time in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // CAST: the monotonic clock is never negative.
    let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
    match DILATION.load(Ordering::Relaxed) {
        1 => now_ns,
        dilation => now_ns / u64::from(dilation).max(1),
    }
}

/// How long a time of that clock is for the host.
pub(crate) fn real(time: Duration) -> Duration {
    time.saturating_mul(DILATION.load(Ordering::Relaxed))
}

/// Sleeps; may wake early.
pub(crate) fn pause(time: Duration) {
    let time = real(time);
    let request = rustix::time::Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    let _ = rustix::thread::nanosleep(&request);
}
