//! How much of a device's memory opportunistic jobs may have while guaranteed ones need it.
//!
//! Source: W. Xiao et al., "AntMan: Dynamic Scaling on GPU Clusters for Deep Learning", OSDI 2020.
//! There a local coordinator lowers the upper limit of an opportunistic job's allocator when a
//! guaranteed job runs short; what is beyond it lies in host memory until the limit rises again.
//! The thresholds are ours: the paper gives none.
//!
//! *Pressure.* Free memory is what nobody has, less what a guaranteed job waits for. A part `keep`
//! of the device is to be free, but no more than guaranteed jobs may still take by their limits,
//! and nothing where there is none of them.
//!
//! ```text
//! a guaranteed job waits:       shrink now, until keep + band / 2 are free
//! free < keep for half a second: the same
//! free >= keep for `calm`:      grow to what leaves keep + band / 2, if that is a change at all
//! ```
//!
//! So a guaranteed job whose use goes up and down by less than half a band moves nobody's memory,
//! and one that takes memory at intervals shorter than `calm` gets it once. 16 GiB, keep and band 5
//! %: below 0.8 GiB free jobs shrink until 1.2 GiB are.
//!
//! *Fairness.* What is left of the device is divided between the opportunistic jobs by max-min, by
//! weight: each gets what it has use for or as much as the others, whichever is less. What of a job
//! cannot be moved is its least part. Those that have most are the first to shrink, and the first
//! to stop growing; space is made for a job that came later after `calm` as well.

use std::collections::BTreeMap;

use crate::slice::{CoordinatorTerms, TenantId};

/// A change of less than this is none, or than a 32nd of a smaller device.
const STEP_BYTES: u64 = 64 << 20;
/// TIMEOUT: how long little has to be free before jobs shrink for whom nobody waits. What the
/// device has free and what jobs say they have are looked at a few times a second, not at once.
const SETTLED_NS: u64 = 500_000_000;

/// A job whose memory is coordinated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Coordinated {
    /// Which one.
    pub id: TenantId,
    /// Its weight in millionths; 0 counts as 1.
    pub weight_ppm: u32,
    /// What can be moved, wherever it is.
    pub movable_bytes: u64,
    /// Of that, what is on the device.
    pub resident_bytes: u64,
    /// What stays on the device.
    pub fixed_bytes: u64,
    /// What it waits for and cannot have anywhere else.
    pub waits_bytes: u64,
    /// Nothing of it can be moved at present.
    pub stuck: bool,
}

impl Coordinated {
    fn has_bytes(&self) -> u64 {
        self.least_bytes()
            .saturating_add(if self.stuck { 0 } else { self.resident_bytes })
    }

    fn least_bytes(&self) -> u64 {
        let stuck = if self.stuck { self.resident_bytes } else { 0 };
        self.fixed_bytes
            .saturating_add(self.waits_bytes)
            .saturating_add(stuck)
    }

    fn most_bytes(&self) -> u64 {
        self.fixed_bytes
            .saturating_add(self.waits_bytes)
            .saturating_add(self.movable_bytes)
    }
}

/// The device as the coordinator sees it.
#[derive(Clone, Copy, Debug)]
pub struct Occupancy<'a> {
    /// Now, in nanoseconds of any monotonic clock.
    pub now_ns: u64,
    /// What the device has for jobs; 0: not known, nothing is done.
    pub capacity_bytes: u64,
    /// What all other jobs have, and what guaranteed ones wait for.
    pub others_bytes: u64,
    /// A guaranteed job that waits for memory.
    pub waiting: Option<TenantId>,
    /// What guaranteed jobs may take beyond that by their limits; `None`: there is no such job.
    pub guaranteed_left_bytes: Option<u64>,
    /// Those that can be shrunk.
    pub jobs: &'a [Coordinated],
}

/// Why a job may have no more than it may.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// A guaranteed job waits for memory.
    Waits(TenantId),
    /// Less than is to be kept for guaranteed jobs is free.
    Low,
    /// There is enough for all again, or for more of it.
    Calm,
    /// Others of its class have as much use for it.
    Fair,
}

/// How much of a job's movable memory may be on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cap {
    /// `None`: all of it.
    pub bytes: Option<u64>,
    /// Somebody waits for what it has to give.
    pub urgent: bool,
    /// Why it last changed.
    pub cause: Cause,
}

/// One device.
#[derive(Clone, Debug)]
pub struct Coordinator {
    terms: CoordinatorTerms,
    caps: BTreeMap<TenantId, Cap>,
    /// Since when there has been enough for other caps than these.
    calm_since_ns: Option<u64>,
    /// Since when less has been free than is to be kept.
    short_since_ns: Option<u64>,
}

impl Coordinator {
    /// One by which nobody has been shrunk.
    pub fn new(terms: CoordinatorTerms) -> Self {
        Self {
            terms,
            caps: BTreeMap::new(),
            calm_since_ns: None,
            short_since_ns: None,
        }
    }

    /// By what it goes.
    pub fn terms(&self) -> CoordinatorTerms {
        self.terms
    }

    /// What a job may have; `None`: it is not coordinated.
    pub fn cap(&self, id: TenantId) -> Option<Cap> {
        self.caps.get(&id).copied()
    }

    /// Looks at the device.
    pub fn step(&mut self, of: &Occupancy<'_>) {
        self.caps
            .retain(|id, _| of.jobs.iter().any(|job| job.id == *id));
        for job in of.jobs {
            self.caps.entry(job.id).or_insert(Cap {
                bytes: None,
                urgent: false,
                cause: Cause::Calm,
            });
        }
        if of.capacity_bytes == 0 || of.jobs.is_empty() {
            (self.calm_since_ns, self.short_since_ns) = (None, None);
            return;
        }
        let part = |ppm: u32| {
            let bytes = u128::from(of.capacity_bytes) * u128::from(ppm) / 1_000_000;
            u64::try_from(bytes).unwrap_or(u64::MAX)
        };
        let keep = of
            .guaranteed_left_bytes
            .map_or(0, |left| part(self.terms.keep_ppm).min(left));
        let band = of
            .guaranteed_left_bytes
            .map_or(0, |_| part(self.terms.band_ppm));
        let has: u64 = sum(of.jobs.iter().map(Coordinated::has_bytes));
        let taken = of.others_bytes.saturating_add(has).saturating_add(keep);
        let budget = of
            .capacity_bytes
            .saturating_sub(of.others_bytes)
            .saturating_sub(keep)
            .saturating_sub(band / 2);
        if taken > of.capacity_bytes {
            self.calm_since_ns = None;
            let since_ns = *self.short_since_ns.get_or_insert(of.now_ns);
            let urgent = of.waiting.is_some() || of.jobs.iter().any(|job| job.waits_bytes > 0);
            if urgent || of.now_ns.saturating_sub(since_ns) >= SETTLED_NS {
                self.shrink(of, budget);
            }
            return;
        }
        self.short_since_ns = None;
        for cap in self.caps.values_mut() {
            cap.urgent = false;
        }
        let Some(new) = self.level(of, budget, band / 2) else {
            self.calm_since_ns = None;
            return;
        };
        let since_ns = *self.calm_since_ns.get_or_insert(of.now_ns);
        if of.now_ns.saturating_sub(since_ns) >= self.terms.calm_ns {
            self.calm_since_ns = None;
            self.take_over(&new);
        }
    }

    /// Those above the level come down to it; nobody rises.
    fn shrink(&mut self, of: &Occupancy<'_>, budget: u64) {
        let cause = of.waiting.map_or(Cause::Low, Cause::Waits);
        for (job, bytes) in of.jobs.iter().zip(divide(of.jobs, budget)) {
            let bytes = bytes.saturating_sub(job.fixed_bytes.saturating_add(job.waits_bytes));
            let Some(cap) = self.caps.get_mut(&job.id) else {
                continue;
            };
            cap.urgent = of.waiting.is_some() || job.waits_bytes > 0;
            if bytes
                < cap
                    .bytes
                    .unwrap_or(job.movable_bytes)
                    .min(job.movable_bytes)
            {
                (cap.bytes, cap.cause) = (Some(bytes), cause);
            }
        }
    }

    /// What all may have at the level, if that changes anything to speak of.
    fn level(
        &self,
        of: &Occupancy<'_>,
        budget: u64,
        half_band: u64,
    ) -> Option<Vec<(TenantId, Option<u64>)>> {
        let step = STEP_BYTES.min(of.capacity_bytes / 32);
        let mut new = Vec::new();
        let (mut more, mut moves, mut all, mut any) = (0u64, false, true, false);
        for (job, bytes) in of.jobs.iter().zip(divide(of.jobs, budget)) {
            let bytes = if bytes >= job.most_bytes() {
                None
            } else {
                Some(bytes.saturating_sub(job.fixed_bytes.saturating_add(job.waits_bytes)))
            };
            let before = self.caps.get(&job.id).and_then(|cap| cap.bytes);
            let of_job = |bytes: Option<u64>| bytes.unwrap_or(u64::MAX).min(job.movable_bytes);
            more = more.saturating_add(of_job(bytes).saturating_sub(of_job(before)));
            // A cap that is above what a job has takes nothing from it.
            let less = job.resident_bytes.saturating_sub(of_job(bytes));
            moves |= less >= step.max(job.resident_bytes / 8);
            all &= bytes.is_none();
            any |= before.is_some();
            new.push((job.id, bytes));
        }
        (moves || (all && any) || more >= step.max(half_band)).then_some(new)
    }

    fn take_over(&mut self, new: &[(TenantId, Option<u64>)]) {
        for (id, bytes) in new {
            let Some(cap) = self.caps.get_mut(id) else {
                continue;
            };
            if cap.bytes != *bytes {
                let falls = bytes.is_some_and(|new| cap.bytes.is_none_or(|old| new < old));
                cap.cause = if falls { Cause::Fair } else { Cause::Calm };
                cap.bytes = *bytes;
            }
        }
    }
}

fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

/// Max-min by weight: what each of them may have of `budget`, no less than its least and no more
/// than it has use for.
fn divide(jobs: &[Coordinated], budget: u64) -> Vec<u64> {
    let at = |level: f64| -> Vec<u64> {
        jobs.iter()
            .map(|job| {
                // CAST: `as` saturates.
                let part = (f64::from(job.weight_ppm.max(1)) * level) as u64;
                part.max(job.least_bytes()).min(job.most_bytes())
            })
            .collect()
    };
    if sum(jobs.iter().map(Coordinated::most_bytes)) <= budget {
        return jobs.iter().map(Coordinated::most_bytes).collect();
    }
    // Sums rise with the level; 80 halvings are finer than a byte.
    let (mut low, mut high) = (0.0, budget as f64);
    for _ in 0..80 {
        let middle = (low + high) / 2.0;
        if sum(at(middle).into_iter()) <= budget {
            low = middle;
        } else {
            high = middle;
        }
    }
    at(low)
}

#[cfg(test)]
mod tests;
