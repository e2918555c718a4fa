//! Virtual private clusters as an admission.

use std::collections::{BTreeMap, HashMap};

use super::cells::{Cell, Cells, UNITS_PER_GPU, equal_reservations};
use super::{Admission, Admit, Promises};
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, GpuId, Job, JobId, Manner, Objective, Tags, UserId};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static CELLS: Entry<dyn Admission> = Registration {
    name: "cells",
    summary: "users own equal virtual clusters; the others' free GPUs are lent",
    params: &[ParamSpec {
        name: "tenants",
        summary: "number of virtual clusters, one each for the first users",
        kind: Kind::Number {
            min: 1.0,
            max: 4096.0,
            default: 4.0,
        },
    }],
    build: |settings, _| Ok(Box::new(Tenants::new(settings.number("tenants") as usize))),
};

/// HiveD's guarantee (OSDI'20) between users: the cluster is cut into as many equal virtual private
/// clusters as there are tenants, and the first users to come own one each. A job that finds cells
/// in its user's own virtual cluster is guaranteed: it comes first and has exactly the GPUs of
/// those cells; other jobs on them are displaced. All other jobs are opportunistic and run on
/// unbound GPUs. Works with a preemptive order.
///
/// Nodes are used up to the greatest power of two of their GPUs. A job larger than a node takes
/// whole nodes and one part.
#[derive(Debug)]
pub struct Tenants {
    count: usize,
    cells: Option<Cells>,
    /// Units of a node are 2^level.
    level: usize,
    owners: HashMap<UserId, usize>,
    held: BTreeMap<JobId, (Vec<Cell>, Vec<GpuId>)>,
}

impl Tenants {
    /// With so many virtual clusters.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self {
            count: count.max(1),
            cells: None,
            level: 0,
            owners: HashMap::new(),
            held: BTreeMap::new(),
        }
    }

    /// Lay the virtual clusters out, once: each has an equal number of units, as the fewest cells.
    fn lay_out(&mut self, state: &ClusterState) {
        let narrowest = state
            .nodes()
            .iter()
            .map(|node| node.gpus)
            .min()
            .unwrap_or(1);
        self.level = (narrowest as usize * UNITS_PER_GPU).ilog2() as usize;
        let nodes = state.nodes().len();
        let reserved = equal_reservations(nodes, self.level, self.count);
        self.cells = Cells::new(nodes, self.level, &reserved).ok();
    }

    /// GPUs of a cell, in order.
    fn gpus_of(&self, state: &ClusterState, cell: &Cell, most: usize) -> Vec<GpuId> {
        let (node, unit) = (
            cell.first_unit >> self.level,
            cell.first_unit & ((1 << self.level) - 1),
        );
        let first = state.nodes()[node].first.0 + (unit / UNITS_PER_GPU) as u32;
        (first..).take(most).map(GpuId).collect()
    }

    /// Take cells for a job, all or none.
    fn request(&mut self, state: &ClusterState, job: &Job) -> bool {
        if self.cells.is_none() {
            self.lay_out(state);
        }
        let next = self.owners.len();
        if next < self.count {
            self.owners.entry(job.user).or_insert(next);
        }
        let Some((tenant, cells)) = self.owners.get(&job.user).zip(self.cells.as_mut()) else {
            return false;
        };
        let width = (1_usize << self.level) / UNITS_PER_GPU;
        let (mut taken, mut left) = (Vec::new(), job.gpus as usize);
        while left > 0 {
            let part = left.min(width);
            let level = (part.next_power_of_two() * UNITS_PER_GPU).ilog2() as usize;
            let Some((cell, _)) = cells.request(*tenant, level) else {
                taken.into_iter().for_each(|(cell, _)| cells.release(cell));
                return false;
            };
            taken.push((cell, part));
            left -= part;
        }
        let gpus = taken
            .iter()
            .flat_map(|(cell, part)| self.gpus_of(state, cell, *part));
        let gpus = gpus.collect();
        let cells = taken.into_iter().map(|(cell, _)| cell).collect();
        self.held.insert(job.id, (cells, gpus));
        true
    }

    fn release_done(&mut self, state: &ClusterState) {
        let done: Vec<JobId> = self.held.keys().copied().collect();
        for id in done.into_iter().filter(|id| state.job(*id).is_done()) {
            if let (Some((held, _)), Some(cells)) = (self.held.remove(&id), &mut self.cells) {
                held.into_iter().for_each(|cell| cells.release(cell));
            }
        }
    }
}

impl Admission for Tenants {
    fn name(&self) -> &'static str {
        "cells"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Fairness],
            manners: &[Manner::Exclusive, Manner::Topology],
            source: "HiveD, OSDI'20",
        }
    }
    fn admit(&mut self, state: &ClusterState, _: &Promises, job: &Job) -> Admit {
        self.release_done(state);
        if self.request(state, job) {
            Admit::Accept
        } else {
            Admit::BestEffort
        }
    }
    fn refresh(&mut self, state: &ClusterState, _: &Promises) {
        self.release_done(state);
        // Jobs without a cell, by arrival: there may be space now.
        let without: Vec<JobId> = state
            .active()
            .map(|job| job.id)
            .filter(|id| !self.held.contains_key(id))
            .collect();
        let mut full: HashMap<UserId, u32> = HashMap::new();
        let mut without: Vec<&Job> = without.into_iter().map(|id| state.job(id)).collect();
        without.sort_by_key(|job| job.id);
        for job in without {
            // What did not fit for a smaller gang does not fit for a larger one.
            if full.get(&job.user).is_some_and(|gpus| *gpus <= job.gpus) {
                continue;
            }
            if !self.request(state, job) {
                full.insert(job.user, job.gpus);
            }
        }
    }
    fn rank(&self, _: &ClusterState, _: &Promises, job: &Job) -> u32 {
        u32::from(!self.held.contains_key(&job.id))
    }
    fn ranks_drift(&self) -> bool {
        true
    }
    fn gpus(&self, job: JobId) -> Option<&[GpuId]> {
        self.held.get(&job).map(|(_, gpus)| gpus.as_slice())
    }
    fn places(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::JobType;

    #[test]
    fn each_user_has_its_own_part_in_any_order_of_arrival() {
        let mut state = ClusterState::uniform(16, 8);
        let (mut tenants, promises) = (Tenants::new(2), Promises::default());
        let mut come = |user, gpus| {
            let mut job = Job::rigid(JobType(0), gpus, 0.0, 10.0);
            job.user = UserId(user);
            let id = state.arrive(job);
            let admit = tenants.admit(&state, &promises, state.job(id));
            (admit, tenants.gpus(id).map(<[GpuId]>::len))
        };
        assert_eq!(come(0, 8), (Admit::Accept, Some(8)));
        assert_eq!(come(0, 1), (Admit::BestEffort, None), "its part is in use");
        assert_eq!(come(1, 3), (Admit::Accept, Some(3)));
        assert_eq!(come(1, 4), (Admit::Accept, Some(4)));
        assert_eq!(come(1, 1), (Admit::BestEffort, None), "3 took a cell of 4");
        assert_eq!(
            come(2, 1),
            (Admit::BestEffort, None),
            "a third user owns nothing"
        );
    }
}
