//! Whether anybody else wants the device of a tenant.
//!
//! Invariant: rivalry is over once nobody else has been seen to use or to want the device for
//! [`OVER_NS`], and from then until somebody is.

/// How long nobody else may have wanted the device. TIMEOUT: longer than the pauses of jobs that
/// are at work, and too short for anybody to notice that he waits.
const OVER_NS: u64 = 20_000_000;

/// Rivals of a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rivalry {
    /// Since when there have been none; `None`: there are.
    none_since_ns: Option<u64>,
}

impl Rivalry {
    /// There are rivals, or none.
    pub fn note(&mut self, now_ns: u64, rivals: bool) {
        if rivals {
            self.none_since_ns = None;
        } else {
            self.none_since_ns.get_or_insert(now_ns);
        }
    }

    /// Whether nobody else has wanted the device for some time.
    pub fn is_over(&self, now_ns: u64) -> bool {
        self.none_since_ns
            .is_some_and(|since_ns| now_ns >= since_ns + OVER_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rivalry_is_over_some_time_after_the_last_rival_and_begins_with_the_next() {
        let mut rivalry = Rivalry::default();
        assert!(!rivalry.is_over(u64::MAX), "nobody has looked");
        rivalry.note(5, false);
        rivalry.note(7, false);
        assert!(!rivalry.is_over(4 + OVER_NS) && rivalry.is_over(5 + OVER_NS));
        rivalry.note(6 + OVER_NS, true);
        assert!(!rivalry.is_over(3 * OVER_NS));
        rivalry.note(3 * OVER_NS, false);
        assert!(!rivalry.is_over(4 * OVER_NS - 1) && rivalry.is_over(4 * OVER_NS));
    }
}
