//! What time it is for a hook: a clock that only goes forward decides, the one that people set is
//! shown.
//!
//! The deciding clock counts milliseconds since 1970 as they were when the state was made, by
//! CLOCK_BOOTTIME. Over a restart of the hook it goes on where it was: in the same boot by that
//! clock, after another boot by what the wall clock says has passed, if it says so at all. So a
//! wall clock that is set back, or forth, holds nobody up and makes nobody late.

use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

use super::process::boot_id;
use super::records::Meta;

/// A moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Now {
    /// Decides: never less than before.
    pub ms: u64,
    /// Is shown: Unix milliseconds by the wall clock.
    pub unix_ms: u64,
}

/// In virtual time both are one.
impl From<u64> for Now {
    fn from(ms: u64) -> Self {
        Self { ms, unix_ms: ms }
    }
}

/// What the host's clocks say.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reading {
    /// By the wall clock.
    pub unix_ms: u64,
    /// Since the host's start, the time that it slept included.
    pub boottime_ms: u64,
    /// Which start. Empty: not known.
    pub boot: String,
}

/// In virtual time there is the wall clock alone.
impl From<u64> for Reading {
    fn from(unix_ms: u64) -> Self {
        Self {
            unix_ms,
            ..Self::default()
        }
    }
}

fn boottime_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    // CAST: it counts from 0 up.
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Milliseconds since 1970, by the wall clock.
#[must_use]
pub fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

impl Reading {
    /// Of this host.
    #[must_use]
    pub fn now() -> Self {
        Self {
            unix_ms: unix_ms(),
            boottime_ms: boottime_ms(),
            boot: boot_id(),
        }
    }

    /// Where the deciding clock of a state goes on.
    #[must_use]
    pub fn resume(&self, meta: &Meta) -> u64 {
        let passed = if !self.boot.is_empty() && self.boot == meta.boot {
            self.boottime_ms.saturating_sub(meta.last_boottime_ms)
        } else {
            self.unix_ms.saturating_sub(meta.last_unix_ms)
        };
        meta.last_ms.saturating_add(passed)
    }
}

/// The clock of a hook that runs.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    begun_ms: u64,
    begun_boottime_ms: u64,
}

impl Clock {
    /// It was `begun_ms` when the host's clocks said `reading`.
    #[must_use]
    pub fn new(begun_ms: u64, reading: &Reading) -> Self {
        Self {
            begun_ms,
            begun_boottime_ms: reading.boottime_ms,
        }
    }

    /// Now.
    #[must_use]
    pub fn now(&self) -> Now {
        Now {
            ms: self.begun_ms + boottime_ms().saturating_sub(self.begun_boottime_ms),
            unix_ms: unix_ms(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deciding_clock_goes_on_over_restarts_whatever_the_wall_clock_does() {
        let meta = Meta {
            last_ms: 5_000,
            last_unix_ms: 1_000_000,
            last_boottime_ms: 300,
            boot: "b".into(),
            ..Meta::default()
        };
        let at = |unix_ms, boottime_ms, boot: &str| {
            let boot = boot.into();
            let reading = Reading {
                unix_ms,
                boottime_ms,
                boot,
            };
            reading.resume(&meta)
        };
        assert_eq!(at(10, 1_300, "b"), 6_000, "set back, same boot");
        assert_eq!(at(u64::MAX, 1_300, "b"), 6_000, "set forth, same boot");
        assert_eq!(at(1_002_000, 10, "c"), 7_000, "another boot");
        assert_eq!(at(10, 10, "c"), 5_000, "set back over another boot");
        let clock = Clock::new(5_000, &Reading::now());
        let (first, second) = (clock.now(), clock.now());
        assert!(first.ms >= 5_000 && second.ms >= first.ms);
    }
}
