//! Whether a tenant that waits comes when it is let in. One that does not is a stopped process, and
//! is passed over for a while.
//!
//! Invariants: a tenant is passed over after it has missed [`UNRESPONSIVE_AFTER`] slices in a row,
//! and each time for twice as long as before; one slice that it comes to ends that.

use super::hold::Attendance;

/// A tenant that was let in, said nothing for so many whole slices (or for as long as it is waited
/// for) and still waits is a stopped process.
const UNRESPONSIVE_AFTER: u32 = 3;
/// How long it is passed over before it gets another chance: at first, and at most after twice as
/// long each time. A host with more threads than processors lets a thread wait for tens of
/// milliseconds; a stopped process stays away.
const UNRESPONSIVE_NS: u64 = 20_000_000;
const UNRESPONSIVE_MAX_NS: u64 = 1_000_000_000;
/// From here on that is reported. TIMEOUT: it was given a dozen slices in vain by then.
const UNRESPONSIVE_REPORT_NS: u64 = 300_000_000;

/// How a tenant responds to its slices.
#[derive(Debug, Default)]
pub struct Responsiveness {
    /// Slices in a row to which it did not come.
    missed: u32,
    /// It does not come when it is let in, and is passed over until then.
    passed_over_until_ns: u64,
    /// How long it was passed over the last time.
    passed_over_ns: u64,
    /// It was passed over for so long that its process must be stopped, unless the host is.
    suspected: bool,
}

impl Responsiveness {
    /// Whether its waiting counts: it is not passed over.
    pub fn counts(&self, now_ns: u64) -> bool {
        now_ns >= self.passed_over_until_ns
    }

    /// A slice has ended. True where the tenant is passed over from now on.
    pub fn note(&mut self, now_ns: u64, attendance: Attendance) -> bool {
        match attendance {
            Attendance::Came => (self.missed, self.passed_over_ns) = (0, 0),
            Attendance::Missed => self.missed += 1,
            Attendance::CutShort => {}
        }
        if self.missed < UNRESPONSIVE_AFTER {
            return false;
        }
        self.passed_over_ns = (self.passed_over_ns * 2).clamp(UNRESPONSIVE_NS, UNRESPONSIVE_MAX_NS);
        self.passed_over_until_ns = now_ns + self.passed_over_ns;
        self.suspected |= self.passed_over_ns >= UNRESPONSIVE_REPORT_NS;
        true
    }

    /// Whether its process must be stopped, asked once.
    pub fn take_suspicion(&mut self) -> bool {
        std::mem::take(&mut self.suspected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_never_comes_is_passed_over_ever_longer_until_it_comes() {
        let mut response = Responsiveness::default();
        let (missed, came) = (Attendance::Missed, Attendance::Came);
        for _ in 1..UNRESPONSIVE_AFTER {
            assert!(!response.note(0, missed));
        }
        assert!(response.counts(0));
        assert!(!response.note(0, Attendance::CutShort), "that is no slice");
        let mut now_ns = 0;
        let mut lengths_ns = Vec::new();
        for _ in 0..8 {
            assert!(response.note(now_ns, missed));
            let over_ns = (now_ns..)
                .step_by(1_000_000)
                .find(|ns| response.counts(*ns));
            let over_ns = over_ns.expect("another chance");
            lengths_ns.push((over_ns - now_ns) / 1_000_000);
            now_ns = over_ns;
            assert_eq!(
                response.take_suspicion(),
                lengths_ns.len() >= 5,
                "{lengths_ns:?}"
            );
            assert!(!response.take_suspicion(), "said once");
        }
        assert_eq!(lengths_ns, [20, 40, 80, 160, 320, 640, 1000, 1000]);
        // Less than a slice is no chance for one that is passed over.
        assert!(response.note(now_ns, Attendance::CutShort));
        assert!(!response.note(now_ns, came));
        for _ in 1..UNRESPONSIVE_AFTER {
            assert!(!response.note(now_ns, missed), "it starts over");
        }
        assert!(response.note(2 * now_ns, missed));
        assert!(!response.counts(2 * now_ns) && response.counts(2 * now_ns + UNRESPONSIVE_NS));
    }
}
