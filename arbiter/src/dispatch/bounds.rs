//! Floors and caps of a tenant's share, held by two token buckets of device time, whatever the
//! slice policy decides.
//!
//! *The cap* is a token bucket that fills with `max` nanoseconds per nanosecond, up to a slice, and
//! is emptied by what is charged. Once it is empty, the tenant is barred until it holds a shortest
//! slice again. A tenant capped at a half that has the device to itself, with slices of 2 to 5 ms,
//! runs 4 ms, rests 4 ms, runs 4 ms.
//!
//! *The floor* is what the tenant is owed: it grows by `min` nanoseconds per nanosecond while the
//! tenant wants the device, and shrinks by what is charged. A tenant that is owed two of the
//! longest slices comes next. A policy that keeps to the weights gives more than that by itself,
//! and never notices the floor.

/// Millionths.
const PPM: u64 = 1_000_000;
/// How far behind its floor a tenant may be, in longest slices, before it comes first.
const PATIENCE: i64 = 2;
/// What it can be owed at most, in longest slices.
const MEMORY: i64 = 20;

/// Both token buckets, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bounds {
    min_ppm: u32,
    max_ppm: Option<u32>,
    /// What the cap leaves.
    bucket_ns: i64,
    /// What the floor owes.
    owed_ns: i64,
    barred: bool,
}

/// Shortest and longest slice in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slices {
    /// Shortest.
    pub min_ns: i64,
    /// Longest.
    pub max_ns: i64,
}

impl Bounds {
    /// New bounds. What was saved or owed under the old ones is dropped where they have changed.
    pub fn set(&mut self, min_ppm: u32, max_ppm: Option<u32>) {
        if (self.min_ppm, self.max_ppm) != (min_ppm, max_ppm) {
            *self = Self {
                min_ppm,
                max_ppm,
                ..Self::default()
            };
        }
    }

    /// `dt_ns` have passed, in which `got_ns` were charged; `wants`: it wanted the device.
    pub fn pass(&mut self, dt_ns: u64, got_ns: u64, wants: bool, slices: Slices) {
        let part = |ppm: u32| signed(dt_ns.saturating_mul(u64::from(ppm)) / PPM);
        let got_ns = signed(got_ns);
        if let Some(max_ppm) = self.max_ppm {
            // Use is taken out before the bucket is capped: rest does not pay for use after the
            // rest is over.
            let bucket_ns = self
                .bucket_ns
                .saturating_add(part(max_ppm))
                .min(slices.max_ns);
            self.bucket_ns = bucket_ns.saturating_sub(got_ns);
            if self.bucket_ns <= 0 {
                self.barred = true;
            } else if self.bucket_ns >= slices.min_ns.min(slices.max_ns) {
                self.barred = false;
            }
        }
        if self.min_ppm > 0 {
            let due_ns = if wants { part(self.min_ppm) } else { 0 };
            let owed_ns = self.owed_ns.saturating_add(due_ns).saturating_sub(got_ns);
            let most = slices.max_ns.saturating_mul(MEMORY);
            self.owed_ns = owed_ns.clamp(-slices.max_ns, most);
        }
    }

    /// Whether it has used up what its cap allows.
    pub fn is_barred(&self) -> bool {
        self.barred
    }

    /// How long until that changes: until a barred one may run again, or one that runs from here on
    /// without a break is barred. `None`: it has no cap.
    pub fn change_ns(&self, slices: Slices) -> Option<u64> {
        let max_ppm = i64::from(self.max_ppm?).max(1);
        let ppm = signed(PPM);
        let ns = if self.barred {
            (slices.min_ns.min(slices.max_ns) - self.bucket_ns).saturating_mul(ppm) / max_ppm
        } else if max_ppm >= ppm {
            return None;
        } else {
            self.bucket_ns.saturating_mul(ppm) / (ppm - max_ppm)
        };
        Some(u64::try_from(ns).unwrap_or(0).max(1000))
    }

    /// What it is owed, once that is so much that it comes next.
    pub fn due_ns(&self, slices: Slices) -> Option<u64> {
        let due = self.min_ppm > 0 && self.owed_ns >= slices.max_ns.saturating_mul(PATIENCE);
        due.then(|| u64::try_from(self.owed_ns).unwrap_or(0))
    }

    /// Whether anything is owed.
    pub fn is_owed(&self) -> bool {
        self.min_ppm > 0 && self.owed_ns > 0
    }
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;
    const MS: u64 = 1_000_000;
    const SLICES: Slices = Slices {
        min_ns: 2_000_000,
        max_ns: 5_000_000,
    };

    #[test]
    fn a_cap_is_held_by_runs_and_rests_of_a_slice() {
        let mut bounds = Bounds::default();
        bounds.set(0, Some(400_000));
        bounds.pass(100 * MS, 0, true, SLICES);
        let (mut got, mut turns) = (0, 0);
        for _ in 0..100_000 {
            let was = bounds.is_barred();
            let used = if was { 0 } else { 100 * US };
            got += used;
            bounds.pass(100 * US, used, true, SLICES);
            turns += u32::from(was && !bounds.is_barred());
        }
        let part = got as f64 / (10_000 * MS) as f64;
        assert!((part - 0.4).abs() < 0.001, "{part}");
        assert!((1000..3000).contains(&turns), "{turns} in ten seconds");
    }

    #[test]
    fn when_that_changes_is_known_beforehand() {
        let mut bounds = Bounds::default();
        bounds.set(0, Some(500_000));
        bounds.pass(100 * MS, 0, true, SLICES);
        assert_eq!(bounds.change_ns(SLICES), Some(10 * MS));
        bounds.pass(10 * MS, 10 * MS, true, SLICES);
        assert!(bounds.is_barred());
        let rest = bounds.change_ns(SLICES).expect("a cap");
        bounds.pass(rest - MS, 0, true, SLICES);
        assert!(bounds.is_barred());
        bounds.pass(MS, 0, true, SLICES);
        assert!(!bounds.is_barred());
        assert_eq!(Bounds::default().change_ns(SLICES), None);
    }

    #[test]
    fn overrun_is_paid_for_by_a_longer_rest() {
        let mut bounds = Bounds::default();
        bounds.set(0, Some(100_000));
        bounds.pass(50 * MS, 50 * MS, true, SLICES);
        let mut rested = 0;
        while bounds.is_barred() {
            bounds.pass(MS, 0, true, SLICES);
            rested += 1;
        }
        assert!(
            (450..=520).contains(&rested),
            "{rested} ms for 50 ms at a tenth"
        );
    }

    #[test]
    fn a_floor_is_owed_while_it_is_wanted_and_only_then() {
        let mut bounds = Bounds::default();
        bounds.set(100_000, None);
        bounds.pass(1000 * MS, 0, false, SLICES);
        assert_eq!((bounds.due_ns(SLICES), bounds.is_owed()), (None, false));
        bounds.pass(99 * MS, 0, true, SLICES);
        assert!(bounds.is_owed() && bounds.due_ns(SLICES).is_none());
        bounds.pass(2 * MS, 0, true, SLICES);
        assert!(bounds.due_ns(SLICES).is_some());
        bounds.pass(5 * MS, 10 * MS, true, SLICES);
        assert!(bounds.is_owed() && bounds.due_ns(SLICES).is_none());
        bounds.pass(MS, MS, true, SLICES);
        assert!(!bounds.is_owed());
    }

    #[test]
    fn new_bounds_begin_anew_and_the_same_ones_continue() {
        let mut bounds = Bounds::default();
        bounds.set(100_000, None);
        bounds.pass(500 * MS, 0, true, SLICES);
        bounds.set(100_000, None);
        assert!(bounds.is_owed());
        bounds.set(200_000, None);
        assert!(!bounds.is_owed());
    }
}
