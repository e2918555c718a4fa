//! How fast elastic jobs are on how many GPUs: as measured where they ran, by Optimus' model
//! elsewhere.
//!
//! Only iterations count: a job on more GPUs launches more whether it gets on faster or not. A kind
//! that was seen on one number of GPUs counts as faster in proportion, as nothing else is known.

use std::collections::BTreeMap;

use policy::cluster::{JobId, Speed, scaling};

use super::Hook;
use super::learned::of_nodes;

/// Iterations per second by number of GPUs, by type of GPU.
type Sizes<'a> = BTreeMap<&'a str, Vec<(u32, f64)>>;

impl Hook {
    /// Shows the policies how elastic jobs scale.
    pub(super) fn tell_sizes(&mut self) {
        let elastic = |id: &u64| {
            let asked = &self.jobs.get(id)?.submission;
            let gpus = asked.gpus.max(1);
            let most = asked.max_gpus.filter(|most| *most > gpus)?;
            Some((asked.kind.as_str(), gpus, most))
        };
        let jobs: Vec<(JobId, (&str, u32, u32))> = self
            .live
            .iter()
            .filter_map(|(id, at)| Some((*at, elastic(id)?)))
            .collect();
        if jobs.is_empty() {
            return;
        }
        let mut by_kind: BTreeMap<&str, Sizes<'_>> = BTreeMap::new();
        for record in self.speeds.values() {
            if let Some((_, Some(per_s))) = of_nodes(record) {
                let of_kind = by_kind.entry(&record.kind).or_default();
                let of_type = of_kind.entry(&record.gpu).or_default();
                of_type.push((record.gpus, per_s));
            }
        }
        let inferred = jobs.into_iter().filter_map(|(at, (kind, gpus, most))| {
            // Of one type of GPU, the one with most sizes: how a job scales is said to be the same.
            let sizes = by_kind
                .get(kind)?
                .values()
                .max_by_key(|sizes| sizes.len())?;
            let curve = scaling::curve(sizes, gpus, most)?;
            let job = self.state.job(at);
            let known = matches!(&job.speed, Speed::Curve(own) if **own == curve[..]);
            (!known).then_some((at, curve, most))
        });
        let inferred: Vec<(JobId, Vec<f64>, u32)> = inferred.collect();
        for (at, curve, most) in inferred {
            self.state.set_speed(at, Speed::Curve(curve.into()), most);
            if self.state.job(at).run().is_some() {
                self.pace(at);
            }
            self.changed = true;
        }
    }
}
