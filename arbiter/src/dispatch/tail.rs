//! What a tenant has on the device when its gate closes: how long that usually takes, and when this one ends.
//!
//! A tail is a row of completion marks. Those between the first that passes and the last take as long as marks of this tenant take, so
//! with `n` of them left the end is `n` times that after the one that passed last. With nothing seen yet it is what
//! tails of this tenant take in the mean. The end is looked for every 50 us, and every 15 us around the time at which it is expected:
//! until it is found the device has nothing to do.

/// How near to the expected end of a tail it is looked for more often, in nanoseconds; beyond it the expectation was wrong.
const NEAR_NS: u64 = 75_000;
/// How often then. TIMEOUT: three times what a look costs, timer and wake-up included.
const NEAR_LOOK_NS: u64 = 15_000;

/// The tails of one tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Tail {
    /// Their length, the recent ones weighing most.
    mean_ns: u64,
    /// What one mark takes, likewise; 0: not known.
    mark_ns: u64,
    /// Of the present one: marks left, when the last one was seen to pass, and whether that was one that began within the tail.
    left: u64,
    passed_ns: u64,
    whole: bool,
    looked_ns: u64,
}

impl Tail {
    /// A slice has ended with nothing on the device.
    pub fn none(&mut self) {
        self.learn(0);
    }

    /// A slice has ended with so many marks outstanding.
    pub fn begin(&mut self, now_ns: u64, marks: u64) {
        (self.left, self.passed_ns, self.looked_ns) = (marks, now_ns, now_ns);
        self.whole = false;
    }

    /// It has not ended.
    pub fn look(&mut self, now_ns: u64, marks: u64) {
        let passed = self.left.saturating_sub(marks);
        let since_ns = now_ns.saturating_sub(self.passed_ns);
        if let Some(took_ns) = since_ns.checked_div(passed) {
            if self.whole {
                self.mark_ns = match self.mark_ns {
                    0 => took_ns,
                    mark_ns => mark_ns - mark_ns / 4 + took_ns / 4,
                };
            }
            // Half way between the two looks.
            self.passed_ns = now_ns - now_ns.saturating_sub(self.looked_ns) / 2;
            self.whole = true;
        }
        (self.left, self.looked_ns) = (marks, now_ns);
    }

    /// It was found to have ended; when it has, as far as that is known.
    pub fn end(&mut self, since_ns: u64, now_ns: u64) -> u64 {
        let ended_ns = now_ns - now_ns.saturating_sub(self.looked_ns.max(since_ns)) / 2;
        self.learn(ended_ns.saturating_sub(since_ns));
        ended_ns
    }

    /// When this one is expected to end.
    pub fn ends_ns(&self, since_ns: u64) -> u64 {
        if self.whole && self.mark_ns > 0 {
            let left_ns = self.left.saturating_mul(self.mark_ns);
            self.passed_ns.saturating_add(left_ns)
        } else {
            since_ns + self.mean_ns
        }
    }

    /// How long they are.
    pub fn mean_ns(&self) -> u64 {
        self.mean_ns
    }

    fn learn(&mut self, tail_ns: u64) {
        self.mean_ns = self.mean_ns - self.mean_ns / 8 + tail_ns / 8;
    }
}

/// When to look for the end of a tail again that is expected to end at `ends_ns`; `every_ns` where that is far.
pub(super) fn look_again_ns(now_ns: u64, ends_ns: u64, every_ns: u64) -> u64 {
    let near = ends_ns.abs_diff(now_ns) <= NEAR_NS;
    now_ns
        + if near {
            every_ns.min(NEAR_LOOK_NS)
        } else {
            every_ns
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    #[test]
    fn the_end_of_a_row_of_marks_is_known_once_two_have_passed() {
        let mut tail = Tail::default();
        for round in 0..20 {
            let since_ns = round * 10_000 * US;
            // Four kernels of 500 us, the first of which has run for 200 already; looked at every 50 us.
            tail.begin(since_ns, 4);
            let ends_ns = since_ns + 1800 * US;
            let mut now_ns = since_ns;
            loop {
                now_ns += 50 * US;
                if now_ns >= ends_ns {
                    break;
                }
                let left = (ends_ns - now_ns).div_ceil(500 * US);
                tail.look(now_ns, left);
                if round > 2 && left == 1 {
                    let off_ns = tail.ends_ns(since_ns).abs_diff(ends_ns);
                    assert!(off_ns <= 75 * US, "{round}: {off_ns}");
                }
            }
            let ended_ns = tail.end(since_ns, now_ns);
            assert!(ended_ns.abs_diff(ends_ns) <= 25 * US);
        }
        assert!(tail.mean_ns().abs_diff(1800 * US) < 200 * US, "{tail:?}");
    }

    #[test]
    fn with_nothing_seen_it_is_what_tails_usually_take() {
        let mut tail = Tail::default();
        for round in 0..100 {
            tail.begin(round * 1000 * US, 1);
            tail.end(round * 1000 * US, round * 1000 * US + 320 * US);
        }
        let mean_ns = tail.mean_ns();
        tail.begin(500_000 * US, 1);
        assert_eq!(tail.ends_ns(500_000 * US), 500_000 * US + mean_ns);
        (0..100).for_each(|_| tail.none());
        assert!(tail.mean_ns() < US);
    }

    #[test]
    fn looks_are_close_only_where_the_end_is_expected() {
        let every = 50 * US;
        assert_eq!(look_again_ns(0, 1000 * US, every), every);
        assert_eq!(look_again_ns(0, 70 * US, every), 15 * US);
        assert_eq!(look_again_ns(1000 * US, 950 * US, every), 1015 * US);
        assert_eq!(look_again_ns(1000 * US, 900 * US, every), 1050 * US);
        assert_eq!(look_again_ns(0, 10 * US, 5 * US), 5 * US);
    }

    #[test]
    fn marks_that_come_back_do_no_harm() {
        let mut tail = Tail::default();
        tail.begin(100, 2);
        tail.look(50, 7);
        tail.look(40, 3);
        tail.look(30, u64::MAX);
        tail.look(20, 0);
        assert_eq!(tail.end(100, 10), 10);
        let _ = tail.ends_ns(100);
    }
}
