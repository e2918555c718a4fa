//! One job's figures: counts the boundaries, bytes and charges that are reported to it, and says
//! what an iteration is made of. Knows neither pages nor clocks.

use std::collections::VecDeque;

use channel::Noted;
use control::{Profile, SoloSource};

use crate::tally::growth;

/// Intervals that are kept.
const KEPT: usize = 1024;
/// What the figures are over: half a minute, and never less than a few iterations.
const WINDOW_NS: u64 = 30_000_000_000;
const FEW: usize = 16;
/// What "now" means for the slowdown.
const NOW_NS: u64 = 3_000_000_000;
const NOW_FEW: usize = 4;
/// Where iterations are not timed one by one: what is timed together.
const BLOCK_NS: u64 = 250_000_000;
/// A baseline is made of that many iterations and that much time.
const SOLO_ITERATIONS: f64 = 10.0;
const SOLO_NS: f64 = 1_000_000_000.0;
/// What comes first is no measure: memory is allocated, kernels are chosen.
const WARM_UP_NS: u64 = 1_000_000_000;
/// Older iterations count half in it when there are more than that.
const SOLO_MANY: f64 = 512.0;
/// Nanoseconds, or launches, between two boundaries above which they are nonsense: three days.
const ABSURD: u64 = 1 << 48;
/// Between two snapshots of the counters.
const SNAPSHOT_NS: u64 = 500_000_000;
const SNAPSHOTS: usize = 64;
/// Extremes of memory are those of the last one to two such spans.
const SPAN_ITERATIONS: f64 = 32.0;
const SPAN_NS: u64 = 5_000_000_000;

/// Time between boundaries.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Interval {
    end_ns: u64,
    ns: u64,
    iterations: f64,
    /// Timed alone, and not with others in a block.
    single: bool,
}

/// Counters of a job at a time. All count up.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Counters {
    /// Device time charged, all devices, in nanoseconds.
    pub device_ns: u64,
    /// Time in which another job wanted a device too.
    pub contended_ns: u64,
    /// Bytes copied between host and device.
    pub copied_bytes: u64,
    /// Submissions of the process by which iterations are counted.
    pub launches: u64,
    /// Memory held now, in bytes.
    pub held_bytes: u64,
    /// Most memory held ever, in bytes.
    pub peak_bytes: u64,
}

/// The time of an iteration without others.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Baseline {
    /// In nanoseconds.
    pub iteration_ns: f64,
    /// Submissions per iteration; 0: whatever they are.
    pub launches: f64,
    /// An operator has set it.
    pub set: bool,
}

/// What is measured of a job.
#[derive(Debug, Default)]
pub struct Meter {
    intervals: VecDeque<Interval>,
    /// The last boundary, or the start of the block.
    last: Option<Noted>,
    iterations: f64,
    /// Launches between boundaries, and those that are as many as an iteration has.
    between: u64,
    fitting: u64,
    /// When contention was last seen to have been.
    contended_ns: u64,
    contended_seen_ns: u64,
    /// When the first interval began.
    since_ns: Option<u64>,
    solo_ns: f64,
    solo_iterations: f64,
    snapshots: VecDeque<(u64, Counters, f64)>,
    span: Span,
    before: Option<Span>,
}

#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Span {
    since_ns: u64,
    since_iterations: f64,
    least: u64,
    most: u64,
}

impl Meter {
    /// The boundaries are other ones from now on: what was measured between the old ones means
    /// nothing.
    pub fn restart(&mut self) {
        self.intervals.clear();
        self.last = None;
        self.since_ns = None;
        self.iterations = 0.0;
        (self.between, self.fitting) = (0, 0);
        (self.solo_ns, self.solo_iterations) = (0.0, 0.0);
        self.snapshots.clear();
        self.span = Span::default();
        self.before = None;
    }

    /// The boundaries are found in another way, and are the same.
    pub fn change_over(&mut self) {
        self.last = None;
        (self.between, self.fitting) = (0, 0);
    }

    /// Takes note of the counters.
    pub fn look(&mut self, now_ns: u64, now: &Counters) {
        if now.contended_ns != self.contended_ns {
            (self.contended_ns, self.contended_seen_ns) = (now.contended_ns, now_ns);
        }
        let due = self
            .snapshots
            .back()
            .is_none_or(|(at_ns, ..)| now_ns.saturating_sub(*at_ns) >= SNAPSHOT_NS);
        let grown = self
            .snapshots
            .back()
            .is_some_and(|(_, counters, _)| now.peak_bytes > counters.peak_bytes);
        let most = if grown {
            now.peak_bytes
        } else {
            now.held_bytes
        };
        if due {
            self.snapshots.push_back((now_ns, *now, self.iterations));
            if self.snapshots.len() > SNAPSHOTS {
                self.snapshots.pop_front();
            }
        }
        let whole = self.iterations - self.span.since_iterations;
        if self.span.since_ns == 0 {
            self.span = Span {
                since_ns: now_ns,
                since_iterations: self.iterations,
                least: now.held_bytes,
                most,
            };
        } else if whole >= SPAN_ITERATIONS
            || (whole >= 2.0 && now_ns.saturating_sub(self.span.since_ns) >= SPAN_NS)
        {
            self.before = Some(self.span);
            self.span = Span {
                since_ns: now_ns,
                since_iterations: self.iterations,
                least: now.held_bytes,
                most,
            };
        }
        self.span.least = self.span.least.min(now.held_bytes);
        self.span.most = self.span.most.max(most);
    }

    /// A boundary. `period`: launches that an iteration has at least; boundaries that come earlier
    /// are none.
    pub fn boundary(&mut self, noted: Noted, period: Option<u64>, solo: bool) {
        let Some(last) = self.last else {
            self.last = Some(noted);
            return;
        };
        // WRAPPING: what has gone back is above the bound.
        let launches = noted.launches.wrapping_sub(last.launches);
        let ns = noted.mono_ns.saturating_sub(last.mono_ns);
        // What goes backwards, or by days, is a client's invention.
        if launches > ABSURD || ns > ABSURD {
            self.last = Some(noted);
            return;
        }
        if period.is_some_and(|period| launches.saturating_mul(100) < period.saturating_mul(98)) {
            return;
        }
        // Several where boundaries were overwritten before they were read, or where an iteration
        // had another shape and so no anchor: then there are as many launches as in several to the
        // last one. CAST: small numbers.
        let numbers = growth(last.number, noted.number).unwrap_or(1).max(1) as f64;
        let iterations = match period {
            Some(period) if launches.is_multiple_of(period) => launches as f64 / period as f64,
            // What was inserted is less than an iteration more often than not.
            Some(period) => (launches as f64 / period as f64 + 0.1)
                .floor()
                .clamp(1.0, numbers),
            None => numbers,
        };
        if let Some(period) = period {
            self.between = self.between.saturating_add(launches);
            if launches as f64 <= iterations * period as f64 * 1.02 {
                self.fitting = self.fitting.saturating_add(launches);
            }
        }
        if solo {
            self.note_held(noted.held_bytes);
        }
        self.last = Some(noted);
        self.interval(noted.mono_ns, ns, iterations, iterations == 1.0);
    }

    /// Iterations of `per_iteration` launches that are too short, or too little known, to be timed
    /// one by one.
    pub fn progress(&mut self, now_ns: u64, launches: u64, per_iteration: f64) {
        let here = Noted {
            launches,
            mono_ns: now_ns,
            ..Noted::default()
        };
        let last = *self.last.get_or_insert(here);
        let Some(new) = growth(last.launches, launches) else {
            self.last = Some(here);
            return;
        };
        let ns = now_ns.saturating_sub(last.mono_ns);
        // CAST: far below 2^53.
        let iterations = new as f64 / per_iteration.max(1.0);
        if ns < BLOCK_NS || iterations < 1.0 {
            return;
        }
        self.last = Some(here);
        self.interval(now_ns, ns, iterations, false);
    }

    fn interval(&mut self, end_ns: u64, ns: u64, iterations: f64, single: bool) {
        if ns == 0 {
            return;
        }
        self.iterations += iterations;
        self.intervals.push_back(Interval {
            end_ns,
            ns,
            iterations,
            single,
        });
        if self.intervals.len() > KEPT {
            self.intervals.pop_front();
        }
        let begun_ns = end_ns.saturating_sub(ns);
        let since_ns = *self.since_ns.get_or_insert(begun_ns);
        let warm = begun_ns >= since_ns.saturating_add(WARM_UP_NS);
        if warm && self.contended_seen_ns <= begun_ns {
            self.solo_ns += ns as f64; // CAST: far below 2^53.
            self.solo_iterations += iterations;
            if self.solo_iterations > SOLO_MANY {
                (self.solo_ns, self.solo_iterations) =
                    (self.solo_ns / 2.0, self.solo_iterations / 2.0);
            }
        }
    }

    fn note_held(&mut self, held_bytes: u64) {
        if self.span.since_ns != 0 {
            self.span.least = self.span.least.min(held_bytes);
            self.span.most = self.span.most.max(held_bytes);
        }
    }

    /// Part of the launches between boundaries that is where the period says; `None`: too few to
    /// tell.
    pub fn fit(&self, period: u64) -> Option<f64> {
        // CAST: a ratio.
        (self.between >= 32 * period).then(|| self.fitting as f64 / self.between as f64)
    }

    /// Whether the fit is over so many iterations that the last ones no longer show.
    pub fn fit_is_old(&self, period: u64) -> bool {
        self.between >= 256 * period
    }

    /// Begins to count the fit anew.
    pub fn forget_fit(&mut self) {
        (self.between, self.fitting) = (0, 0);
    }

    /// Submissions at the last boundary.
    pub fn last_launches(&self) -> Option<u64> {
        self.last.map(|last| last.launches)
    }

    /// Mean time of an iteration over the last `ns` before the end, and `few` intervals at least.
    fn mean_ns(&self, window_ns: u64, few: usize) -> Option<f64> {
        let end_ns = self.intervals.back()?.end_ns;
        let recent = self.recent(end_ns, window_ns, few);
        let (ns, iterations) = recent.fold((0.0, 0.0), |(ns, iterations), interval| {
            (ns + interval.ns as f64, iterations + interval.iterations)
        });
        (iterations > 0.0).then(|| ns / iterations)
    }

    /// Standard deviation over mean of the iterations that were timed alone, where those are most.
    fn cov(&self, end_ns: u64) -> Option<f64> {
        let recent = || self.recent(end_ns, WINDOW_NS, FEW);
        let all: f64 = recent().map(|interval| interval.iterations).sum();
        // CAST: far below 2^53.
        let single = || {
            recent()
                .filter(|interval| interval.single)
                .map(|i| i.ns as f64)
        };
        let count = single().count();
        if count < FEW / 2 || (count as f64) < all / 2.0 {
            return None;
        }
        let mean = single().sum::<f64>() / count as f64;
        let squares: f64 = single().map(|ns| (ns - mean).powi(2)).sum();
        Some((squares / (count as f64 - 1.0)).sqrt() / mean)
    }

    fn recent(&self, end_ns: u64, window_ns: u64, few: usize) -> impl Iterator<Item = &Interval> {
        let from_ns = end_ns.saturating_sub(window_ns);
        let newest_first = self.intervals.iter().rev().enumerate();
        newest_first
            .take_while(move |(at, interval)| *at < few || interval.end_ns > from_ns)
            .map(|(_, interval)| interval)
    }

    /// What was learnt about iterations without others.
    pub fn learnt(&self) -> Option<Baseline> {
        let enough = self.solo_iterations >= SOLO_ITERATIONS && self.solo_ns >= SOLO_NS;
        enough.then(|| Baseline {
            iteration_ns: self.solo_ns / self.solo_iterations,
            launches: self.rates().map_or(0.0, |rates| rates.launches),
            set: false,
        })
    }

    /// The baseline in force: what an operator has set, else what was learnt, else what was
    /// recorded for a job that makes as many launches per iteration, within a tenth.
    fn baseline(&self, kept: Option<&Baseline>) -> Option<(f64, SoloSource)> {
        if let Some(set) = kept.filter(|kept| kept.set) {
            return Some((set.iteration_ns, SoloSource::Set));
        }
        if let Some(learnt) = self.learnt() {
            return Some((learnt.iteration_ns, SoloSource::Learnt));
        }
        let (kept, launches) = (kept?, self.rates()?.launches);
        let same = (kept.launches - launches).abs() <= 0.1 * launches;
        same.then_some((kept.iteration_ns, SoloSource::Recorded))
    }

    /// The figures per iteration over the snapshots.
    fn rates(&self) -> Option<Rates> {
        let (from, to) = (self.snapshots.front()?, self.snapshots.back()?);
        let iterations = to.2 - from.2;
        (iterations >= 1.0).then(|| Rates {
            // CAST: far below 2^53.
            launches: to.1.launches.saturating_sub(from.1.launches) as f64 / iterations,
            device_ns: to.1.device_ns.saturating_sub(from.1.device_ns) as f64 / iterations,
            copied: to.1.copied_bytes.saturating_sub(from.1.copied_bytes) as f64 / iterations,
        })
    }

    /// Persistent and ephemeral bytes.
    fn memory(&self) -> Option<(u64, u64)> {
        if self.iterations < 2.0 || self.span.since_ns == 0 {
            return None;
        }
        let spans = [Some(self.span), self.before];
        let least = spans.iter().flatten().map(|span| span.least).min()?;
        let most = spans.iter().flatten().map(|span| span.most).max()?;
        Some((least, most - least))
    }

    /// The figures. What is about the way in which iterations were found is the caller's.
    pub fn profile(&self, kept: Option<&Baseline>, copy_bytes_per_us: u64) -> Profile {
        let mut profile = Profile {
            iterations: self.iterations as u64, // CAST: rounded down.
            ..Profile::default()
        };
        if let (Some(from), Some(to)) = (self.snapshots.front(), self.snapshots.back()) {
            // CAST: far below 2^53, here and below.
            let ns = to.0.saturating_sub(from.0).max(1) as f64;
            let copied = to.1.copied_bytes.saturating_sub(from.1.copied_bytes) as f64;
            profile.busy_fraction =
                (to.1.device_ns.saturating_sub(from.1.device_ns) as f64 / ns).min(1.0);
            profile.copied_bytes = to.1.copied_bytes;
            profile.copy_bytes_per_s = copied / ns * 1e9;
            profile.copy_fraction = (copy_bytes_per_us > 0)
                .then(|| (copied / copy_bytes_per_us as f64 * 1000.0 / ns).min(1.0));
        }
        let Some(mean_ns) = self.mean_ns(WINDOW_NS, FEW) else {
            return profile;
        };
        profile.iteration_ns = Some(mean_ns as u64);
        let end_ns = self.intervals.back().map_or(0, |last| last.end_ns);
        let mut each: Vec<f64> = self
            .recent(end_ns, WINDOW_NS, FEW)
            .map(|interval| interval.ns as f64 / interval.iterations)
            .collect();
        each.sort_unstable_by(f64::total_cmp);
        profile.iteration_p50_ns = each.get(each.len() / 2).map(|ns| *ns as u64);
        profile.iteration_cov = self.cov(end_ns);
        if let Some(rates) = self.rates() {
            profile.launches_per_iteration = Some(rates.launches);
            profile.device_ns_per_iteration = Some(rates.device_ns as u64);
            profile.copied_bytes_per_iteration = Some(rates.copied as u64);
        }
        if let Some((persistent, ephemeral)) = self.memory() {
            profile.persistent_bytes = Some(persistent);
            profile.ephemeral_bytes = Some(ephemeral);
        }
        if let Some((solo_ns, source)) = self.baseline(kept) {
            profile.solo_iteration_ns = Some(solo_ns as u64);
            profile.solo_source = source;
            profile.slowdown = self.mean_ns(NOW_NS, NOW_FEW).map(|now_ns| now_ns / solo_ns);
        }
        profile
    }

    /// Mean time of an iteration, in nanoseconds; `None` while it is over too little.
    pub fn mean_iteration_ns(&self) -> Option<u64> {
        if self.intervals.len() < NOW_FEW {
            return None;
        }
        self.mean_ns(WINDOW_NS, FEW).map(|ns| ns as u64) // CAST: rounded down.
    }

    /// Iterations counted.
    pub fn iterations(&self) -> u64 {
        self.iterations as u64 // CAST: rounded down.
    }

    /// Mean time of the last few iterations, in nanoseconds; for decisions that cannot wait.
    pub fn last_iteration_ns(&self) -> Option<u64> {
        self.mean_ns(0, 1).map(|ns| ns as u64) // CAST: rounded down.
    }

    /// The baseline in force, in nanoseconds.
    pub fn solo_ns(&self, kept: Option<&Baseline>) -> Option<u64> {
        self.baseline(kept).map(|(ns, _)| ns as u64) // CAST: rounded down.
    }

    /// Device time of an iteration, in nanoseconds.
    pub fn device_ns(&self) -> Option<u64> {
        self.rates().map(|rates| rates.device_ns as u64) // CAST: rounded down.
    }

    /// Persistent and ephemeral bytes, once known.
    pub fn memory_bytes(&self) -> Option<(u64, u64)> {
        self.memory()
    }
}

struct Rates {
    launches: f64,
    device_ns: f64,
    copied: f64,
}

#[cfg(test)]
#[path = "meter_tests.rs"]
mod tests;
