//! The work that a tenant has in flight when its gate closes: how long it usually takes to drain,
//! and when the present drain ends.
//!
//! In-flight work is a row of completion marks. Those between the first that passes and the last
//! take as long as marks of this tenant usually take, so with `n` of them left the end is `n` times
//! that after the one that passed last. The other prediction is the mean of this tenant's drains: a
//! program that keeps 64 kernels of 10 us in flight leaves 0.64 ms, though the last mark covers any
//! part of a batch. The prediction that was nearer to the truth in the past is believed.
//!
//! The error of the predictions is learnt as well: the one that is exceeded one time in five. Where
//! it is small the next slice begins before the end, so that its first submission is queued when
//! the device runs dry. Where it is not, the end is looked for every 50 us, and every 15 us around
//! the time at which it is expected: until it is found the device has nothing to do.

/// How near to the expected end of a drain it is looked for more often, in nanoseconds; beyond it
/// the expectation was wrong.
const NEAR_NS: u64 = 75_000;
/// How often then. TIMEOUT: three times what a look costs, timer and wake-up included.
const NEAR_LOOK_NS: u64 = 15_000;
/// A prediction is judged by its value so long before the end at least: the next tenant has to be
/// pre-woken by it.
const HORIZON_NS: u64 = 120_000;
/// Drains that were predicted before predictions are believed.
const LEARNT: u32 = 8;
/// Predictions that are off by no more than this, four times in five, are good enough to let the
/// next one in.
const SURE_NS: u64 = 100_000;
/// What a mark is taken to take changes by one part in so many at most with each one.
const MARK_STEP: u64 = 32;
/// By how much one prediction moves the side to which the next ones are put right.
const SIDE_STEP_NS: i64 = 5_000;
/// Beyond it the expectation was wrong.
const SIDE_MOST_NS: i64 = 500_000;
/// In-flight work that is no longer than this is done before anything that comes behind it: a
/// device turns from one context to another every 2 ms or so.
pub(super) const SHORT_NS: u64 = 500_000;
/// In-flight work of which nothing has passed for so long, and for twice what its marks take,
/// stands still.
const STANDS_STILL_NS: u64 = 2_000_000;
/// The same, and for twice what drains of the tenant take: it may wait for what its own process
/// would submit. At most so long: kernels of more than 25 ms have co-ranks more often than needed.
const KEEPS_STANDING_NS: u64 = 5_000_000;
const KEEPS_STANDING_MOST_NS: u64 = 50_000_000;
/// The longest time, besides the lead of a pre-wake, for which a thread looks at its gate because
/// the end of a drain is not known well: both together are less than the 0.2 ms after which it
/// gives up.
const LOOK_OUT_NS: u64 = 100_000;
/// How long before the predicted end, besides what the prediction may be off: from the gate to the
/// device, and what the device itself has to do before it turns to the next context.
const ENTRY_NS: u64 = 30_000;

/// How far predictions were off: mostly to which side, and the error beyond that which one in five
/// exceeds. Both move by steps, so that how far the worst are off (a thread that had no core for
/// milliseconds) does not matter.
///
/// There is a side because marks are seen to have passed only after they have, and the more so the
/// busier the cores: what one takes, and when the last one will have passed, are both found some
/// tens of microseconds too late.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Off {
    side_ns: i64,
    ns: u64,
    seen: u32,
}

impl Off {
    fn note(&mut self, ended_ns: u64, foretold_ns: u64) {
        let signed = |ns: u64| i64::try_from(ns).unwrap_or(i64::MAX);
        let error_ns = signed(ended_ns) - signed(foretold_ns);
        let error_ns = error_ns.saturating_sub(self.side_ns);
        let step_ns = (error_ns / 8).clamp(-SIDE_STEP_NS, SIDE_STEP_NS);
        self.side_ns = (self.side_ns + step_ns).clamp(-SIDE_MOST_NS, SIDE_MOST_NS);
        let error_ns = error_ns.unsigned_abs();
        self.seen = self.seen.saturating_add(1);
        if self.seen == 1 {
            self.ns = error_ns.min(2 * SURE_NS);
        } else if error_ns > self.ns {
            self.ns = (self.ns + self.ns / 4 + 2_000).min(10 * SURE_NS);
        } else {
            self.ns -= self.ns / 16;
        }
    }

    /// A prediction put right.
    fn right(self, foretold_ns: u64) -> u64 {
        foretold_ns.saturating_add_signed(self.side_ns)
    }

    /// `None`: not known well enough.
    fn sure_ns(self) -> Option<u64> {
        (self.seen >= LEARNT && self.ns <= SURE_NS).then_some(self.ns)
    }
}

/// The drains of one tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Drain {
    /// Their length, the recent ones weighing most.
    mean_ns: u64,
    /// What one mark takes, likewise; 0: not known.
    mark_ns: u64,
    /// Of the present drain: marks left, when the last one was seen to pass, and whether that mark
    /// began within the drain.
    left: u64,
    passed_ns: u64,
    whole: bool,
    looked_ns: u64,
    /// Somebody was let in beside it: what it takes says nothing of the next one.
    helped: bool,
    /// When it was expected to end by the marks that were left, as said in time; 0: not said.
    foretold_ns: u64,
    /// How far that was off in the past, and how far the mean.
    off_marks: Off,
    off_mean: Off,
}

impl Drain {
    /// A slice has ended with nothing on the device.
    pub fn none(&mut self) {
        self.off_mean.note(0, self.mean_ns);
        self.learn(0);
    }

    /// A slice has ended with so many marks outstanding.
    pub fn begin(&mut self, now_ns: u64, marks: u64) {
        (self.left, self.passed_ns, self.looked_ns) = (marks, now_ns, now_ns);
        (self.whole, self.foretold_ns, self.helped) = (false, 0, false);
    }

    /// Somebody of the tenant is let in beside it.
    pub fn help(&mut self) {
        self.helped = true;
    }

    /// It has not ended.
    pub fn look(&mut self, now_ns: u64, marks: u64) {
        let passed = self.left.saturating_sub(marks);
        let since_ns = now_ns.saturating_sub(self.passed_ns);
        if let Some(took_ns) = since_ns.checked_div(passed) {
            self.learn_mark(took_ns);
            // Half way between the two looks.
            self.passed_ns = now_ns - now_ns.saturating_sub(self.looked_ns) / 2;
            self.whole = true;
        }
        (self.left, self.looked_ns) = (marks, now_ns);
        if let Some(ends_ns) = self.by_marks_ns()
            && ends_ns >= now_ns.saturating_add(HORIZON_NS)
        {
            self.foretold_ns = ends_ns;
        }
    }

    /// It was found to have ended; when it has, as far as that is known.
    pub fn end(&mut self, since_ns: u64, now_ns: u64) -> u64 {
        let ended_ns = now_ns - now_ns.saturating_sub(self.looked_ns.max(since_ns)) / 2;
        let drain_ns = ended_ns.saturating_sub(since_ns);
        if self.helped {
            return ended_ns;
        }
        // In a drain of two marks only the last one shows how long a mark takes.
        if let Some(took_ns) = ended_ns
            .saturating_sub(self.passed_ns)
            .checked_div(self.left)
        {
            self.learn_mark(took_ns);
        }
        if self.foretold_ns != 0 {
            self.off_marks.note(ended_ns, self.foretold_ns);
        }
        self.off_mean.note(drain_ns, self.mean_ns);
        self.learn(drain_ns);
        ended_ns
    }

    /// When this one is expected to end.
    pub fn ends_ns(&self, since_ns: u64) -> u64 {
        self.believed(since_ns).0
    }

    /// From when on the next slice may begin, and when this drain is expected to have ended then;
    /// `None`: that is not known well enough.
    pub fn entry_ns(&self, since_ns: u64) -> Option<(u64, u64)> {
        let (ends_ns, off) = self.believed(since_ns);
        let lead_ns = ENTRY_NS + off.sure_ns()?;
        Some((ends_ns.saturating_sub(lead_ns).max(since_ns), ends_ns))
    }

    /// From when on the next tenant's threads look at their gate, where they do not go in by the
    /// clock: earlier, where the end is not known well.
    pub fn look_out_ns(&self, since_ns: u64, lead_ns: u64) -> u64 {
        let (ends_ns, off) = self.believed(since_ns);
        ends_ns.saturating_sub(lead_ns + off.ns.min(LOOK_OUT_NS))
    }

    fn believed(&self, since_ns: u64) -> (u64, Off) {
        let by_mean = (self.off_mean.right(since_ns + self.mean_ns), self.off_mean);
        let mean_is_better = self.off_mean.seen >= LEARNT
            && (self.off_marks.seen < LEARNT || self.off_mean.ns < self.off_marks.ns);
        match self.by_marks_ns() {
            Some(ends_ns) if !(mean_is_better && self.off_mean.sure_ns().is_some()) => {
                (self.off_marks.right(ends_ns), self.off_marks)
            }
            _ => by_mean,
        }
    }

    fn by_marks_ns(&self) -> Option<u64> {
        let known = self.whole && self.mark_ns > 0;
        known.then(|| {
            let left_ns = self.left.saturating_mul(self.mark_ns);
            self.passed_ns.saturating_add(left_ns)
        })
    }

    /// When to look for the end of one that is about to end, although nobody waits for it.
    pub fn look_ns(&self, since_ns: u64, now_ns: u64) -> Option<u64> {
        let near = self.ends_ns(since_ns).abs_diff(now_ns) <= 2 * NEAR_NS;
        near.then_some(now_ns + 2 * NEAR_LOOK_NS)
    }

    /// Whether nothing of this one has passed for longer than kernels take.
    pub fn stands_still(&self, now_ns: u64) -> bool {
        let usual_ns = self.mark_ns.saturating_mul(2);
        now_ns.saturating_sub(self.passed_ns) > usual_ns.max(STANDS_STILL_NS)
    }

    /// Whether nothing of it has passed for longer than its kernels and its drains take.
    pub fn keeps_standing(&self, now_ns: u64) -> bool {
        let usual_ns = self.mark_ns.max(self.mean_ns).saturating_mul(2);
        let most_ns = usual_ns.clamp(KEEPS_STANDING_NS, KEEPS_STANDING_MOST_NS);
        now_ns.saturating_sub(self.passed_ns) > most_ns
    }

    /// How long they are.
    pub fn mean_ns(&self) -> u64 {
        self.mean_ns
    }

    /// A mark was seen to take so long. It counts if it began within the drain.
    fn learn_mark(&mut self, took_ns: u64) {
        if self.whole {
            // By small steps: where the device turned to another context in between, a mark takes
            // two or three times as long.
            let most_ns = (self.mark_ns / MARK_STEP).max(1000);
            self.mark_ns = match self.mark_ns {
                0 => took_ns,
                mark_ns if took_ns > mark_ns => mark_ns + ((took_ns - mark_ns) / 4).min(most_ns),
                mark_ns => mark_ns - ((mark_ns - took_ns) / 4).min(most_ns),
            };
        }
    }

    fn learn(&mut self, drain_ns: u64) {
        // A plain mean of the first ones.
        let weight = u64::from(self.off_mean.seen).clamp(1, 8);
        self.mean_ns = self.mean_ns - self.mean_ns / weight + drain_ns / weight;
    }
}

/// When to look again for the end of a drain that is expected to end at `ends_ns`; `every_ns` where
/// that is far.
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
        let mut drain = Drain::default();
        for round in 0..20 {
            let since_ns = round * 10_000 * US;
            // Four kernels of 500 us, the first of which has run for 200 already; looked at every
            // 50 us.
            drain.begin(since_ns, 4);
            let ends_ns = since_ns + 1800 * US;
            let mut now_ns = since_ns;
            loop {
                now_ns += 50 * US;
                if now_ns >= ends_ns {
                    break;
                }
                let left = (ends_ns - now_ns).div_ceil(500 * US);
                drain.look(now_ns, left);
                if round > 2 && left == 1 {
                    let off_ns = drain.ends_ns(since_ns).abs_diff(ends_ns);
                    assert!(off_ns <= 75 * US, "{round}: {off_ns}");
                }
            }
            let ended_ns = drain.end(since_ns, now_ns);
            assert!(ended_ns.abs_diff(ends_ns) <= 25 * US);
        }
        assert!(drain.mean_ns().abs_diff(1800 * US) < 200 * US, "{drain:?}");
    }

    #[test]
    fn two_marks_are_enough() {
        let mut drain = Drain::default();
        for round in 1..40u64 {
            let since_ns = round * 10_000 * US;
            // The first of two kernels of a millisecond has run for any part of that.
            let first_ns = since_ns + round * 370 % 1000 * US;
            drain.begin(since_ns, 2);
            let mut now_ns = since_ns;
            while now_ns < first_ns + 1000 * US {
                let reported = drain.entry_ns(since_ns);
                if round > 20 && now_ns > first_ns + 100 * US {
                    let (entry_ns, ends_ns) = reported.expect("sure");
                    assert!(ends_ns.abs_diff(first_ns + 1000 * US) <= 60 * US);
                    assert!(entry_ns < ends_ns);
                }
                now_ns += 50 * US;
                let left = u64::from(now_ns < first_ns + 1000 * US) + u64::from(now_ns < first_ns);
                if left > 0 {
                    drain.look(now_ns, left);
                }
            }
            drain.end(since_ns, now_ns);
        }
    }

    #[test]
    fn with_nothing_seen_it_is_the_usual_drain() {
        let mut drain = Drain::default();
        for round in 0..100 {
            drain.begin(round * 1000 * US, 1);
            drain.end(round * 1000 * US, round * 1000 * US + 320 * US);
        }
        let mean_ns = drain.mean_ns();
        drain.begin(500_000 * US, 1);
        let off_ns = drain.ends_ns(500_000 * US).abs_diff(500_000 * US + mean_ns);
        assert!(off_ns < US, "{off_ns}");
        (0..100).for_each(|_| drain.none());
        assert!(drain.mean_ns() < US);
    }

    #[test]
    fn a_constant_lateness_is_corrected() {
        let mut off = Off::default();
        // Foretold too late by 60 us, give or take 20.
        for round in 1..200u64 {
            let foretold_ns = round * 10_000 * US;
            off.note(foretold_ns - (40 + round * 7 % 41) * US, foretold_ns);
        }
        assert!((off.side_ns + 60_000).abs() < 8_000, "{off:?}");
        assert!(off.ns < 25 * US, "{off:?}");
        assert_eq!(off.right(1000 * US), 1_000_000 - off.side_ns.unsigned_abs());
        // Nonsense moves it by a step.
        let before_ns = off.side_ns;
        off.note(0, u64::MAX);
        off.note(u64::MAX, 0);
        assert!((off.side_ns - before_ns).abs() <= 2 * SIDE_STEP_NS);
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
        let mut drain = Drain::default();
        drain.begin(100, 2);
        drain.look(50, 7);
        drain.look(40, 3);
        drain.look(30, u64::MAX);
        drain.look(20, 0);
        assert_eq!(drain.end(100, 10), 10);
        let _ = drain.ends_ns(100);
    }
}
