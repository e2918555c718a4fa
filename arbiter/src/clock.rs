//! The two clocks: monotonic nanoseconds for decisions, Unix milliseconds for people.
//!
//! The monotonic one may go slower than the host's by a whole factor, the *dilation* of a simulated
//! device: then everything that is planned, measured and waited for by it takes so much longer, and
//! nothing else knows of that.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{SystemTime, UNIX_EPOCH};

/// What the host's time is divided by.
static DILATION: AtomicU32 = AtomicU32::new(1);

/// Sets what the host's time is divided by, in this process: before anything looks at the clock.
pub fn dilate(dilation: u32) {
    DILATION.store(dilation.max(1), Relaxed);
}

/// What the host's time is divided by.
pub fn dilation() -> u32 {
    DILATION.load(Relaxed)
}

/// When it is that time by the host's clock.
pub fn of_the_host(ns: u64) -> u64 {
    ns.saturating_mul(u64::from(dilation()))
}

/// `CLOCK_MONOTONIC` in nanoseconds, over the dilation.
pub fn mono_ns() -> u64 {
    host_mono_ns() / u64::from(dilation())
}

fn host_mono_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // CAST: the monotonic clock starts at zero.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Sleeps until that time, at the latest; not at all where it has passed.
pub fn sleep_until(until_ns: u64) {
    let until_ns = of_the_host(until_ns);
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

/// What the loop takes from the host besides events: the time, and randomness. Everything on the
/// loop asks the one that its arbiter was started with, so that a test can step a whole arbiter in
/// virtual time.
pub trait Source: std::fmt::Debug {
    /// Monotonic time in nanoseconds.
    fn mono_ns(&self) -> u64;

    /// Milliseconds since 1970.
    fn unix_ms(&self) -> u64;

    /// Clock ticks since boot, in which start times of processes are given.
    fn boot_ticks(&self) -> u64;

    /// Random bytes.
    ///
    /// # Errors
    /// The host has none.
    fn fill_random(&self, bytes: &mut [u8]) -> std::io::Result<()>;
}

/// The source of one arbiter.
pub type Clock = std::rc::Rc<dyn Source>;

/// The host's own clocks and random numbers.
#[derive(Clone, Copy, Debug)]
pub struct Host;

impl Source for Host {
    fn mono_ns(&self) -> u64 {
        mono_ns()
    }

    fn unix_ms(&self) -> u64 {
        unix_ms()
    }

    fn boot_ticks(&self) -> u64 {
        crate::peer::now_ticks()
    }

    fn fill_random(&self, bytes: &mut [u8]) -> std::io::Result<()> {
        getrandom::fill(bytes).map_err(std::io::Error::other)
    }
}

/// The host's own.
pub fn host() -> Clock {
    std::rc::Rc::new(Host)
}

#[cfg(test)]
pub mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::{Clock, Source};

    /// A time that the test sets, and numbers that follow from those before.
    #[derive(Debug, Default)]
    pub struct Virtual {
        now_ns: Cell<u64>,
        drawn: Cell<u64>,
    }

    impl Virtual {
        /// Sets the time.
        pub fn set(&self, now_ns: u64) {
            assert!(now_ns >= self.now_ns.get(), "time never goes back");
            self.now_ns.set(now_ns);
        }
    }

    impl Source for Virtual {
        fn mono_ns(&self) -> u64 {
            self.now_ns.get()
        }

        fn unix_ms(&self) -> u64 {
            self.now_ns.get() / 1_000_000
        }

        fn boot_ticks(&self) -> u64 {
            self.now_ns.get() / 10_000_000
        }

        fn fill_random(&self, bytes: &mut [u8]) -> std::io::Result<()> {
            for byte in bytes {
                self.drawn.set(self.drawn.get() + 1);
                *byte = self
                    .drawn
                    .get()
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    .to_be_bytes()[0];
            }
            Ok(())
        }
    }

    /// A clock that stands at that time.
    pub fn at(now_ns: u64) -> Clock {
        let clock = Virtual::default();
        clock.set(now_ns);
        Rc::new(clock)
    }
}
