//! The clock of a trace. The arbiter's times are `CLOCK_MONOTONIC`; a trace has Unix time, from the
//! base that PyTorch's profiler counts from, so that both lie side by side in a viewer.

use nix::time::{ClockId, clock_gettime};

/// PyTorch's profiler counts from the beginning of such a stretch of Unix time, in seconds: a
/// quarter of a year. Its files say so (`baseTimeNanoseconds`).
const STRETCH_S: u64 = 7_889_238;
/// The two clocks are read so often, and the closest pair counts.
const READ: u32 = 16;

/// From the arbiter's times to those of the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Where the trace's times begin, in nanoseconds since 1970.
    base_ns: u64,
    /// What is added to a monotonic time of ours to have Unix time.
    offset_ns: i128,
    /// What is added to a monotonic time of the arbiter to have ours: nothing, unless it lives in
    /// another time namespace.
    shift_ns: i128,
}

impl Clock {
    pub fn of_this_host() -> Self {
        let offset_ns = offset_ns();
        let unix_ns = i128::from(mono_ns()) + offset_ns;
        let unix_s = u64::try_from(unix_ns / 1_000_000_000).unwrap_or(0);
        Self {
            base_ns: unix_s / STRETCH_S * STRETCH_S * 1_000_000_000,
            offset_ns,
            shift_ns: 0,
        }
    }

    /// The arbiter said `theirs` between these two times of ours.
    pub fn compare(&mut self, before_ns: u64, theirs_ns: u64, after_ns: u64) {
        self.shift_ns = 0;
        if !(before_ns..=after_ns).contains(&theirs_ns) {
            let middle = i128::from(before_ns) + i128::from(after_ns.saturating_sub(before_ns) / 2);
            self.shift_ns = middle - i128::from(theirs_ns);
        }
    }

    pub fn base_ns(&self) -> u64 {
        self.base_ns
    }

    /// A time of the arbiter, in nanoseconds from the base.
    pub fn of_arbiter(&self, mono_ns: u64) -> u64 {
        self.of_unix(i128::from(mono_ns) + self.shift_ns + self.offset_ns)
    }

    /// The time now, in nanoseconds from the base.
    pub fn now(&self) -> u64 {
        self.of_unix(i128::from(mono_ns()) + self.offset_ns)
    }

    /// A time of the journal.
    pub fn of_unix_ms(&self, unix_ms: u64) -> u64 {
        self.of_unix(i128::from(unix_ms) * 1_000_000)
    }

    fn of_unix(&self, unix_ns: i128) -> u64 {
        u64::try_from(unix_ns - i128::from(self.base_ns)).unwrap_or(0)
    }

    /// By how much Unix time has been set forward since, against the monotonic clock.
    pub fn drift_ns(&self) -> i64 {
        i64::try_from(offset_ns() - self.offset_ns).unwrap_or(i64::MAX)
    }
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock).map_or((0, 0), |time| (time.tv_sec(), time.tv_nsec()));
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    part(time.0) * 1_000_000_000 + part(time.1)
}

pub fn mono_ns() -> u64 {
    read(ClockId::CLOCK_MONOTONIC)
}

/// Unix time less monotonic time: the pair of readings with least time between them.
fn offset_ns() -> i128 {
    let readings = (0..READ).map(|_| {
        let before = mono_ns();
        let unix = read(ClockId::CLOCK_REALTIME);
        let took = mono_ns().saturating_sub(before);
        (
            took,
            i128::from(unix) - i128::from(before) - i128::from(took / 2),
        )
    });
    readings.min().map_or(0, |(_, offset)| offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_count_from_the_quarter_of_a_year_that_pytorch_counts_from() {
        let clock = Clock::of_this_host();
        let unix_ns = read(ClockId::CLOCK_REALTIME);
        assert_eq!(clock.base_ns() % (STRETCH_S * 1_000_000_000), 0);
        let since_ns = unix_ns - clock.base_ns();
        assert!(since_ns < STRETCH_S * 1_000_000_000);
        // Microseconds with three digits behind the point are exact in a double.
        const { assert!(STRETCH_S * 1_000_000_000 < 1 << 53) };
        assert!(clock.now().abs_diff(since_ns) < 60_000_000_000);
        assert_eq!(
            clock.of_unix_ms(unix_ns / 1_000_000) / 1_000_000,
            since_ns / 1_000_000
        );
    }

    #[test]
    fn an_arbiter_of_another_time_namespace_is_put_right() {
        let mut clock = Clock {
            base_ns: 1000,
            offset_ns: 5000,
            shift_ns: 0,
        };
        clock.compare(100, 150, 200);
        assert_eq!(clock.of_arbiter(150), 150 + 5000 - 1000);
        clock.compare(100, 900_150, 200);
        assert_eq!(clock.of_arbiter(900_150), 150 + 5000 - 1000);
        clock.compare(900_000, 7, 900_010);
        assert_eq!(clock.of_arbiter(7), 900_005 + 5000 - 1000);
        // What would lie before the base.
        assert_eq!(clock.of_unix_ms(0), 0);
    }
}
