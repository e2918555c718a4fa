//! Any GPUs, or GPUs close together.

use super::{Placer, Regroup, spread};
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, FreeGpus, GpuId, Job, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static ANYWHERE: Entry<dyn Placer> = Registration {
    name: "anywhere",
    summary: "the first free GPUs",
    params: &[],
    build: |_, _| Ok(Box::new(Anywhere)),
};

/// How it is chosen.
pub(super) static CONSOLIDATE: Entry<dyn Placer> = Registration {
    name: "consolidate",
    summary: "on as few nodes as can be, or not at all",
    params: &[],
    build: |_, _| Ok(Box::new(Consolidate { relaxed: false })),
};

/// How it is chosen.
pub(super) static CONSOLIDATE_RELAXED: Entry<dyn Placer> = Registration {
    name: "consolidate-relaxed",
    summary: "on as few nodes as are free",
    params: &[],
    build: |_, _| Ok(Box::new(Consolidate { relaxed: true })),
};

/// The first free GPUs: only their number matters.
#[derive(Clone, Copy, Debug)]
pub struct Anywhere;

impl Placer for Anywhere {
    fn name(&self) -> &'static str {
        "anywhere"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Utilisation],
            manners: &[Manner::Exclusive],
            source: "textbook",
        }
    }
    fn place(
        &self,
        _: &ClusterState,
        free: &mut FreeGpus,
        _: &Job,
        gpus: u32,
    ) -> Option<Vec<GpuId>> {
        if free.total() < gpus {
            return None;
        }
        let mut taken = Vec::with_capacity(gpus as usize);
        for node in 0..free.nodes() {
            let missing = gpus - taken.len() as u32;
            if missing == 0 {
                break;
            }
            free.take_on(node, missing, &mut taken);
        }
        Some(taken)
    }
}

/// On as few nodes as possible: on the node with the fewest free GPUs that still suffice (best
/// fit); a gang larger than a node on wholly free nodes plus one part. A job that cannot be
/// consolidated waits, unless `relaxed`: then it takes the fullest nodes with space. Philly's
/// scheduler relaxed locality over time; Tiresias consolidates only models with skewed tensors.
#[derive(Clone, Copy, Debug)]
pub struct Consolidate {
    /// Spread what cannot be consolidated.
    pub relaxed: bool,
}

impl Placer for Consolidate {
    fn name(&self) -> &'static str {
        if self.relaxed {
            "consolidate-relaxed"
        } else {
            "consolidate"
        }
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Completion],
            manners: &[Manner::Topology],
            source: "Philly analysis, ATC'19",
        }
    }
    fn place(
        &self,
        state: &ClusterState,
        free: &mut FreeGpus,
        _: &Job,
        gpus: u32,
    ) -> Option<Vec<GpuId>> {
        if free.total() < gpus {
            return None;
        }
        let mut taken = Vec::with_capacity(gpus as usize);
        let best_fit = |free: &FreeGpus, need: u32| {
            (0..free.nodes())
                .filter(|node| free.on(*node) >= need)
                .min_by_key(|node| free.on(*node))
        };
        if let Some(node) = best_fit(free, gpus) {
            free.take_on(node, gpus, &mut taken);
            return Some(taken);
        }
        let before = free.clone();
        for node in 0..free.nodes() {
            let (width, missing) = (state.nodes()[node].gpus, gpus - taken.len() as u32);
            if free.on(node) == width && width <= missing {
                free.take_on(node, width, &mut taken);
            }
        }
        let missing = gpus - taken.len() as u32;
        if missing > 0
            && !taken.is_empty()
            && let Some(node) = best_fit(free, missing)
        {
            free.take_on(node, missing, &mut taken);
        }
        if taken.len() as u32 == gpus {
            return Some(taken);
        }
        *free = before;
        if !self.relaxed {
            return None;
        }
        let nodes = 0..free.nodes();
        spread(free, gpus, nodes)
    }
    fn regroup(&self) -> Regroup {
        Regroup::LargeFirst
    }
}
