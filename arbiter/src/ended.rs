//! Jobs that have ended and are still shown.
//!
//! Owns how each of them stood at its end. So many are kept, and each for so long.

use std::collections::VecDeque;

use control::JobStatus;

/// How many are kept, and for how long.
const KEPT: usize = 64;
const KEPT_MS: u64 = 600_000;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Ended {
    /// With the time of their end.
    jobs: VecDeque<(u64, JobStatus)>,
}

impl Ended {
    /// A job has ended; those that ended long ago are forgotten.
    pub fn add(&mut self, now_unix_ms: u64, status: JobStatus) {
        self.jobs.push_back((now_unix_ms, status));
        let is_old = |(at, _): &(u64, JobStatus)| at + KEPT_MS < now_unix_ms;
        while self.jobs.len() > KEPT || self.jobs.front().is_some_and(is_old) {
            self.jobs.pop_front();
        }
    }

    /// In the order in which they ended.
    pub fn iter(&self) -> impl Iterator<Item = &JobStatus> {
        self.jobs.iter().map(|(_, job)| job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_kept_for_a_while() {
        let mut ended = Ended::default();
        for at in 0..100 {
            ended.add(at, JobStatus::default());
        }
        assert_eq!(ended.iter().count(), KEPT);
        ended.add(100 + KEPT_MS, JobStatus::default());
        assert_eq!(ended.iter().count(), 1);
    }
}
