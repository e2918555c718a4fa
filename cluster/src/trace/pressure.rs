//! How busy kinds of job are, as measured pairs show it.
//!
//! A trace with measured pairs but without profiles says how much a kind takes from others: the
//! mean part of its speed that a job beside it loses. For a packer that goes by busy fractions that
//! stands for the busy fraction. It is taken from pairs with *reference kinds* alone, as a profiler
//! would measure it; pairs of two other kinds stay unseen by the packer, and are what it is judged
//! by.

use std::collections::{BTreeMap, BTreeSet};

use policy::cluster::{GpuType, JobType, Profile};

use super::Trace;

impl Trace {
    /// Gives jobs a busy fraction from their pairs with every third kind; the pairs that were
    /// looked at are there for packers that learn.
    pub fn tell_pressure(&mut self) {
        let Some(pairs) = self.pairs.clone() else {
            return;
        };
        let kinds: BTreeSet<JobType> = self.jobs.iter().map(|job| job.profile.kind).collect();
        let reference: BTreeSet<JobType> = kinds.iter().copied().step_by(3).collect();
        // Sum of what partners lose, and how many.
        let mut lost: BTreeMap<JobType, (f64, f64)> = BTreeMap::new();
        let mut seen = Vec::new();
        for (kind, gpus, a, b, [speed_a, speed_b]) in pairs.iter() {
            let fits = speed_a > 0.0 && speed_b > 0.0;
            if kind != GpuType(0) || gpus != 1 || !reference.contains(&b) || !fits {
                continue;
            }
            let sum = lost.entry(a).or_default();
            *sum = (sum.0 + (1.0 - speed_b).clamp(0.0, 1.0), sum.1 + 1.0);
            seen.push((a, b, [speed_a, speed_b]));
        }
        let busy = |kind: JobType| lost.get(&kind).map(|(sum, count)| sum / count);
        for job in &mut self.jobs {
            if let Some(busy) = busy(job.profile.kind) {
                job.profile.busy = busy;
            }
        }
        let class = policy::cluster::Class::Guaranteed;
        let profile = |kind: JobType| {
            let mut profile = Profile::unknown(kind, 1, class);
            profile.busy = busy(kind)?;
            Some(profile)
        };
        seen.sort_by_key(|(a, b, _)| (*a, *b));
        self.sharing = seen
            .into_iter()
            .filter_map(|(a, b, speeds)| Some((profile(a)?, profile(b)?, speeds)))
            .collect();
    }
}
