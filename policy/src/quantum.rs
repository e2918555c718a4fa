//! How long a slice lasts: long enough that hand-overs cost little, short enough that no job waits
//! long.
//!
//! A hand-over leaves the device idle for a moment: the arbiter must see the end, open a gate and
//! wake a thread, which submits a first kernel. With a *switch cost* of `c` and slices of `q` that
//! is `c / (q + c)` of the time, and a round of `n` tenants takes `n (q + c)`. At 77 us, measured
//! on a simulated device, slices of 2 ms lose 3.7 %, slices of 5 ms 1.5 %, slices of 50 ms 0.15 %.
//!
//! So a slice is as short as these rules allow:
//!
//! * While a guaranteed tenant competes, two of them have [`Lengths::promised_us`] each (5 ms by
//!   default), and more of them have less, so that a round stays about as long.
//! * A hand-over takes 1.25 % of a slice at most ([`PART`]): with a switch cost of 77 us no slice
//!   is shorter than 6.2 ms. If that is more than 10 ms ([`FAIR_US`]) and a share was promised, the
//!   promise comes first: a job with one slice of 10 ms too many or too few in a second is off by a
//!   point.
//! * While only opportunistic tenants compete no share was promised, and slices have their greatest
//!   length: 50 ms.
//! * The operator's bounds hold whatever a hand-over costs: with `min_us` equal to `max_us` all
//!   slices are that long.
//!
//! The switch cost is *learnt*: a mean in which every hand-over weighs a sixteenth. A single
//! hand-over counts for a millisecond at most: if a thread waits 10 ms for a core, the host is
//! slow, not the device.

use crate::slice::QuantumBounds;

/// A slice lasts so many times what a hand-over costs, at least.
pub const PART: u64 = 80;
/// Longest slice to which the cost of hand-overs leads while a guaranteed tenant competes, in
/// microseconds.
pub const FAIR_US: u32 = 10_000;
/// More than this one hand-over is not taken to cost, in nanoseconds.
const MOST_NS: u64 = 1_000_000;
/// Weight of a hand-over in the mean, as a power of two.
const WEIGHT: u32 = 4;

/// What a slice may last, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lengths {
    /// Never shorter.
    pub min_us: u32,
    /// Never longer.
    pub max_us: u32,
    /// What two tenants have while at least one of those that compete is guaranteed.
    pub promised_us: u32,
}

impl Lengths {
    /// All slices between these, and two tenants have the longer.
    pub fn between(bounds: QuantumBounds) -> Self {
        Self {
            min_us: bounds.min_us,
            max_us: bounds.max_us,
            promised_us: bounds.max_us,
        }
    }

    /// The present bounds: `cost_ns` is the cost of a hand-over (0: not known); `promised`: a
    /// guaranteed tenant competes.
    pub fn now(&self, cost_ns: u64, promised: bool) -> QuantumBounds {
        let least_us = u32::try_from(cost_ns.saturating_mul(PART) / 1000).unwrap_or(u32::MAX);
        let min_us = self.min_us.min(self.max_us);
        let (least_us, long_us) = if promised {
            let least_us = least_us.min(FAIR_US);
            (least_us, self.promised_us.max(least_us))
        } else {
            (least_us, self.max_us)
        };
        QuantumBounds {
            min_us: least_us.clamp(min_us, self.max_us),
            max_us: long_us.clamp(min_us, self.max_us),
        }
    }
}

/// What a hand-over costs, as learnt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwitchCost {
    /// The mean in nanoseconds, in sixteenths.
    scaled_ns: u64,
    seen: u64,
}

impl SwitchCost {
    /// A hand-over left the device idle for so long.
    pub fn note(&mut self, idle_ns: u64) {
        let idle_ns = idle_ns.min(MOST_NS);
        self.seen += 1;
        if self.seen == 1 {
            self.scaled_ns = idle_ns << WEIGHT;
        } else {
            // A plain mean of the first ones, so that the very first does not count for sixteen.
            let weight = self.seen.min(1 << WEIGHT);
            let faded_ns = self.scaled_ns / weight;
            self.scaled_ns = self.scaled_ns - faded_ns + (idle_ns << WEIGHT) / weight;
        }
    }

    /// The mean in nanoseconds; 0 while no hand-over was seen.
    pub fn ns(&self) -> u64 {
        self.scaled_ns >> WEIGHT
    }

    /// Hand-overs it was learnt from.
    pub fn seen(&self) -> u64 {
        self.seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY: Lengths = Lengths {
        min_us: 2000,
        max_us: 50_000,
        promised_us: 5000,
    };

    fn now(lengths: Lengths, cost_us: u64, promised: bool) -> (u32, u32) {
        let bounds = lengths.now(cost_us * 1000, promised);
        (bounds.min_us, bounds.max_us)
    }

    #[test]
    fn slices_are_short_where_a_share_was_promised_and_long_where_none_was() {
        assert_eq!(now(ANY, 0, true), (2000, 5000));
        assert_eq!(now(ANY, 20, true), (2000, 5000));
        assert_eq!(now(ANY, 0, false), (2000, 50_000));
    }

    #[test]
    fn a_hand_over_never_takes_more_than_its_part() {
        assert_eq!(now(ANY, 50, true), (4000, 5000));
        assert_eq!(now(ANY, 77, true), (6160, 6160));
        assert_eq!(now(ANY, 77, false), (6160, 50_000));
        for cost_us in [30, 60, 100, 120] {
            let (min_us, _) = now(ANY, cost_us, true);
            assert!(cost_us * 1000 <= u64::from(min_us) * 1000 / 80, "{cost_us}");
        }
    }

    #[test]
    fn a_promise_comes_before_the_cost_and_the_operator_before_both() {
        assert_eq!(now(ANY, 400, true), (10_000, 10_000));
        assert_eq!(now(ANY, 400, false), (32_000, 50_000));
        let pinned = Lengths::between(QuantumBounds {
            min_us: 3000,
            max_us: 3000,
        });
        let bounded = Lengths::between(QuantumBounds {
            min_us: 2000,
            max_us: 5000,
        });
        for (cost_us, promised) in [(0, true), (77, true), (400, false), (100_000, true)] {
            assert_eq!(now(pinned, cost_us, promised), (3000, 3000));
            let (min_us, max_us) = now(bounded, cost_us, promised);
            assert!(2000 <= min_us && min_us <= max_us && max_us <= 5000);
        }
        assert_eq!(now(bounded, 77, true), (5000, 5000));
    }

    #[test]
    fn bounds_that_cross_make_no_panic() {
        let crossed = Lengths {
            min_us: 9,
            max_us: 5,
            promised_us: 7,
        };
        assert_eq!(now(crossed, 1, true), (5, 5));
        assert_eq!(
            ANY.now(u64::MAX, false),
            QuantumBounds {
                min_us: 50_000,
                max_us: 50_000
            }
        );
    }

    #[test]
    fn the_cost_follows_samples_and_one_delayed_thread_moves_it_little() {
        let mut cost = SwitchCost::default();
        assert_eq!((cost.ns(), cost.seen()), (0, 0));
        for n in 0..100u64 {
            cost.note(70_000 + n % 2 * 20_000);
        }
        assert!((78_000..82_000).contains(&cost.ns()), "{}", cost.ns());
        cost.note(40_000_000);
        assert!(cost.ns() < 140_000, "{}", cost.ns());
        for _ in 0..100 {
            cost.note(20_000);
        }
        assert!((20_000..21_000).contains(&cost.ns()), "{}", cost.ns());
        // The first ones weigh alike: one that was late is not the whole of it for long.
        let mut cost = SwitchCost::default();
        cost.note(1_000_000);
        (0..9).for_each(|_| cost.note(50_000));
        assert!((120_000..170_000).contains(&cost.ns()), "{}", cost.ns());
    }
}
