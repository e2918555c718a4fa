//! What one tenant got of one device, and when. Counts what is reported to it; knows neither clocks
//! nor gates.

/// How finely the recent past is remembered.
const BUCKET_NS: u64 = 100_000_000;
/// How much of it: a second.
const BUCKETS: usize = 10;

/// Device time over the last second.
#[derive(Clone, Debug, Default)]
pub struct Recent {
    buckets: [u64; BUCKETS],
    /// Number of the bucket written last, counted from the clock's zero.
    at: u64,
    since_ns: Option<u64>,
}

impl Recent {
    /// Adds `ns` that ended at `now_ns`.
    pub fn add(&mut self, now_ns: u64, ns: u64) {
        self.forget(now_ns);
        self.since_ns.get_or_insert(now_ns.saturating_sub(ns));
        // PANIC: the modulus is the length.
        self.buckets[(self.at % BUCKETS as u64) as usize] += ns;
    }

    /// The part of the last second, or of the time since the first charge where that is shorter.
    pub fn part(&self, now_ns: u64) -> f64 {
        let mut fresh = self.clone();
        fresh.forget(now_ns);
        let Some(since_ns) = fresh.since_ns else {
            return 0.0;
        };
        // The bucket being filled covers the time since it began, the others are whole.
        let window_ns = (BUCKETS as u64 - 1) * BUCKET_NS + now_ns % BUCKET_NS;
        let window_ns = window_ns.min(now_ns.saturating_sub(since_ns)).max(1);
        let sum: u64 = fresh.buckets.iter().sum();
        (sum as f64 / window_ns as f64).min(1.0)
    }

    fn forget(&mut self, now_ns: u64) {
        let now = now_ns / BUCKET_NS;
        let passed = now.saturating_sub(self.at).min(BUCKETS as u64);
        for ahead in 1..=passed {
            self.buckets[((self.at + ahead) % BUCKETS as u64) as usize] = 0;
        }
        self.at = self.at.max(now);
    }
}

/// One tenant's use of one device since it came.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// When it came.
    pub since_ns: u64,
    /// Device time charged.
    pub device_ns: u64,
    /// Time spent wanting and not holding.
    pub wait_ns: u64,
    /// Device time charged after its gate was closed.
    pub overrun_ns: u64,
    /// Slices granted.
    pub grants: u64,
    /// Time in which it and at least one other tenant wanted the device.
    pub contended_ns: u64,
    /// Device time charged in that time.
    pub contended_device_ns: u64,
    /// The last second.
    pub recent: Recent,
    /// When it was last charged or seen waiting.
    pub at_work_ns: u64,
}

impl Usage {
    /// Whether it wanted the device in the last `ns`.
    pub fn was_at_work(&self, now_ns: u64, ns: u64) -> bool {
        self.at_work_ns > 0 && now_ns.saturating_sub(self.at_work_ns) < ns
    }

    /// Part of the device's time since it came.
    pub fn share_total(&self, now_ns: u64) -> f64 {
        part(self.device_ns, now_ns.saturating_sub(self.since_ns))
    }

    /// Part of the device's time while others wanted it too: what a share promises. `None`: that
    /// was never the case.
    pub fn share_contended(&self) -> Option<f64> {
        (self.contended_ns > 0).then(|| part(self.contended_device_ns, self.contended_ns))
    }
}

fn part(of_ns: u64, all_ns: u64) -> f64 {
    if all_ns == 0 {
        return 0.0;
    }
    (of_ns as f64 / all_ns as f64).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn the_recent_part_follows_the_last_second() {
        let mut recent = Recent::default();
        let start = 77_000 * MS;
        for ms in 0..3000 {
            let now = start + (ms + 1) * MS;
            recent.add(now, if ms < 2000 { MS / 4 } else { 3 * MS / 4 });
        }
        let part = recent.part(start + 3000 * MS);
        assert!((part - 0.75).abs() < 0.01, "{part}");
        assert_eq!(recent.part(start + 9000 * MS), 0.0, "long ago");
    }

    #[test]
    fn a_young_tenant_is_measured_over_its_life() {
        let mut recent = Recent::default();
        recent.add(77_000 * MS + 50 * MS, 50 * MS);
        let part = recent.part(77_000 * MS + 100 * MS);
        assert!((part - 0.5).abs() < 0.01, "{part}");
    }

    #[test]
    fn shares_are_parts_of_their_own_time() {
        let usage = Usage {
            since_ns: 100,
            device_ns: 300,
            contended_ns: 400,
            contended_device_ns: 100,
            ..Usage::default()
        };
        assert_eq!(usage.share_total(1100), 0.3);
        assert_eq!(usage.share_contended(), Some(0.25));
        assert_eq!(Usage::default().share_contended(), None);
    }
}
