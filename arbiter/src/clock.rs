//! The two clocks: monotonic nanoseconds for decisions, Unix milliseconds for people.

use std::time::{SystemTime, UNIX_EPOCH};

/// `CLOCK_MONOTONIC` in nanoseconds.
pub fn mono_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // CAST: the monotonic clock starts at zero.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Sleeps until that time, at the latest; not at all where it has passed.
pub fn sleep_until(until_ns: u64) {
    use rustix::thread::{ClockId, Timespec, clock_nanosleep_absolute};
    let until = Timespec {
        // CAST: 2^63 ns are 292 years.
        tv_sec: (until_ns / 1_000_000_000) as i64,
        tv_nsec: (until_ns % 1_000_000_000) as i64,
    };
    // A signal ends it early, which does no harm.
    let _ = clock_nanosleep_absolute(ClockId::Monotonic, &until);
}

/// Milliseconds since 1970.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}
