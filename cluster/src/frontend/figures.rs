//! What became of requests: counts, how long they took, and whether the agreement was kept lately.

use std::collections::VecDeque;

use policy::standbys::Sla;
use serde::{Deserialize, Serialize};

/// Seconds in which the agreement is looked at.
pub const WINDOW_S: f64 = 60.0;
/// Requests that are kept for that.
const MOST_RECENT: usize = 1 << 14;
/// Ends of the buckets of times of response, in agreed times.
pub const BUCKETS: [f64; 9] = [0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0];

/// Requests so far.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    /// All that were read whole.
    pub requests: u64,
    /// Answered by an instance.
    pub answered: u64,
    /// Of these, within the agreed time.
    pub in_time: u64,
    /// Refused because they had waited too long.
    pub pruned: u64,
    /// Not answered by any instance, or with an error (5xx).
    pub failed: u64,
    /// Who asked has gone before the answer.
    pub left: u64,
    /// Tries at another instance.
    pub retries: u64,
}

/// Requests of the last minute.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Lately {
    /// Answered or refused.
    pub requests: u64,
    /// Within the agreed time.
    pub in_time: u64,
    /// The agreed percentile of the times of response; `None`: it is among those that were not
    /// answered, or there was none.
    pub percentile_s: Option<f64>,
    /// Whether the agreed part was in time.
    pub is_met: bool,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Figures {
    sla: Sla,
    /// Counts so far.
    pub counts: Counts,
    /// Times of response by bucket, those beyond the last one in one more.
    pub buckets: [u64; BUCKETS.len() + 1],
    /// All of them together.
    pub sum_s: f64,
    /// When each of the last requests was over, and how long it took; infinite: no answer.
    recent: VecDeque<(f64, f64)>,
}

impl Figures {
    /// None yet.
    #[must_use]
    pub fn new(sla: Sla) -> Self {
        Self {
            sla,
            counts: Counts::default(),
            buckets: [0; BUCKETS.len() + 1],
            sum_s: 0.0,
            recent: VecDeque::new(),
        }
    }

    /// An instance has answered, and the request took so long from when it was here.
    pub fn answered(&mut self, now_s: f64, took_s: f64) {
        self.counts.answered += 1;
        self.counts.in_time += u64::from(took_s <= self.sla.within_s);
        let times = took_s / self.sla.within_s;
        let bucket = BUCKETS.iter().position(|end| times <= *end);
        self.buckets[bucket.unwrap_or(BUCKETS.len())] += 1;
        self.sum_s += took_s;
        self.note(now_s, took_s);
    }

    /// It waited too long.
    pub fn pruned(&mut self, now_s: f64) {
        self.counts.pruned += 1;
        self.note(now_s, f64::INFINITY);
    }

    /// No instance answered, or one with an error.
    pub fn failed(&mut self, now_s: f64) {
        self.counts.failed += 1;
        self.note(now_s, f64::INFINITY);
    }

    fn note(&mut self, now_s: f64, took_s: f64) {
        self.forget(now_s);
        if self.recent.len() >= MOST_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((now_s, took_s));
    }

    fn forget(&mut self, now_s: f64) {
        let is_old = |of: &(f64, f64)| of.0 < now_s - WINDOW_S;
        while self.recent.front().is_some_and(is_old) {
            self.recent.pop_front();
        }
    }

    /// Of the last minute, as far as it is kept.
    pub fn lately(&mut self, now_s: f64) -> Lately {
        self.forget(now_s);
        let mut times: Vec<f64> = self.recent.iter().map(|(_, took_s)| *took_s).collect();
        times.sort_by(f64::total_cmp);
        let in_time = times.partition_point(|took_s| *took_s <= self.sla.within_s);
        let least = self.sla.level * times.len() as f64 - 1e-9;
        // CAST: a place in a short list.
        let place = least.ceil() as usize;
        let percentile_s = times.get(place.max(1) - 1).copied();
        Lately {
            requests: times.len() as u64,
            in_time: in_time as u64,
            percentile_s: percentile_s.filter(|took_s| took_s.is_finite()),
            is_met: in_time as f64 >= least,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> Figures {
        Figures::new(Sla {
            within_s: 0.2,
            level: 0.9,
            burst: 1.0,
        })
    }

    #[test]
    fn the_last_minute_is_what_is_kept_to_the_agreement() {
        let mut figures = figures();
        assert_eq!(
            figures.lately(0.0),
            Lately {
                is_met: true,
                ..Lately::default()
            }
        );
        for at in 0..10 {
            figures.answered(f64::from(at), 0.1 + f64::from(at) / 100.0);
        }
        let lately = figures.lately(9.0);
        assert_eq!(
            (lately.requests, lately.in_time, lately.is_met),
            (10, 10, true)
        );
        assert!(
            (lately.percentile_s.unwrap() - 0.18).abs() < 1e-9,
            "{lately:?}"
        );
        figures.failed(9.0);
        figures.pruned(9.0);
        let lately = figures.lately(9.0);
        assert_eq!(
            (lately.requests, lately.is_met, lately.percentile_s),
            (12, false, None)
        );
        // Two of twelve were not answered, and a minute later all of them are forgotten but these.
        let later = figures.lately(69.0);
        assert_eq!((later.requests, later.in_time), (3, 1), "{later:?}");
        assert_eq!(figures.lately(70.0).requests, 0);
        assert_eq!((figures.counts.failed, figures.counts.pruned), (1, 1));
    }

    /// 55 % of 100 are 55, and a little more in binary.
    #[test]
    fn the_percentile_says_what_the_agreement_does() {
        for percent in 1..100_u32 {
            let mut figures = Figures::new(Sla {
                within_s: 0.2,
                level: f64::from(percent) / 100.0,
                burst: 1.0,
            });
            for at in 0..100 {
                figures.answered(1.0, if at < percent { 0.1 } else { 0.3 });
            }
            let lately = figures.lately(1.0);
            assert!(lately.is_met, "{percent}");
            assert_eq!(lately.percentile_s, Some(0.1), "p{percent}");
        }
    }

    #[test]
    fn every_time_is_in_one_bucket_and_memory_is_bounded() {
        let mut figures = figures();
        for took_s in [0.0, 0.02, 0.021, 0.2, 0.201, 2.0, 2.001, 1e9] {
            figures.answered(1.0, took_s);
        }
        assert_eq!(figures.buckets, [2, 1, 0, 0, 1, 1, 0, 0, 1, 2]);
        assert_eq!((figures.counts.answered, figures.counts.in_time), (8, 4));
        for _ in 0..3 * MOST_RECENT {
            figures.answered(2.0, 0.1);
        }
        assert_eq!(figures.recent.len(), MOST_RECENT);
        assert!(figures.lately(2.0).is_met);
    }
}
