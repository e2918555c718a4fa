//! Aligned power-of-two blocks.

use super::Placer;
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, FreeGpus, GpuId, Job, Manner, Objective, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static BUDDY: Entry<dyn Placer> = Registration {
    name: "buddy",
    summary: "aligned blocks of a power of two",
    params: &[],
    build: |_, _| Ok(Box::new(Buddy)),
};

/// Buddy placement inside a node (HiveD, OSDI'20; ElasticFlow, ASPLOS'23): the number of GPUs is
/// rounded up to a power of two, and a block of that size starts at a multiple of it, taken from
/// the smallest free block that suffices. Blocks then merge again when they are free, and a request
/// of half a node never finds the node cut into quarters by others. Whole nodes beyond that.
#[derive(Clone, Copy, Debug)]
pub struct Buddy;

/// The block of `size` GPUs (a power of two) on this node inside the smallest free aligned block:
/// offset and that block's size.
fn smallest(free: &[bool], size: usize) -> Option<(usize, usize)> {
    let is_free = |offset: usize, block: usize| {
        free.get(offset..offset + block)
            .is_some_and(|bits| bits.iter().all(|free| *free))
    };
    let mut block = size;
    while block <= free.len() {
        // Free, and not part of a larger free block.
        let found = (0..free.len()).step_by(block).find(|offset| {
            let around = offset / (2 * block) * (2 * block);
            is_free(*offset, block) && !is_free(around, 2 * block)
        });
        if let Some(offset) = found {
            return Some((offset, block));
        }
        block *= 2;
    }
    None
}

impl Placer for Buddy {
    fn name(&self) -> &'static str {
        "buddy"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Utilisation],
            manners: &[Manner::Topology],
            source: "HiveD, OSDI'20",
        }
    }
    fn place(
        &self,
        state: &ClusterState,
        free: &mut FreeGpus,
        _: &Job,
        gpus: u32,
    ) -> Option<Vec<GpuId>> {
        if free.total() < gpus || gpus == 0 {
            return None;
        }
        let ids = |node: usize, offset: usize, count: usize| {
            let first = state.nodes()[node].first.0 + offset as u32;
            (first..first + count as u32).map(GpuId)
        };
        let size = (gpus as usize).next_power_of_two();
        let best = (0..free.nodes())
            .filter(|node| free.on(*node) >= gpus)
            .filter_map(|node| {
                let width = state.nodes()[node].gpus as usize;
                let bits: Vec<bool> = ids(node, 0, width).map(|gpu| free.contains(gpu)).collect();
                smallest(&bits, size).map(|(offset, block)| (block, node, offset))
            })
            .min();
        let taken: Vec<GpuId> = match best {
            Some((_, node, offset)) => ids(node, offset, gpus as usize).collect(),
            None => {
                let mut taken = Vec::new();
                for node in 0..free.nodes() {
                    let width = state.nodes()[node].gpus;
                    let missing = gpus - taken.len() as u32;
                    if missing > 0 && free.on(node) == width {
                        taken.extend(ids(node, 0, width.min(missing) as usize));
                    }
                }
                taken
            }
        };
        if taken.len() as u32 != gpus {
            return None;
        }
        for gpu in &taken {
            free.take(*gpu);
        }
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::JobType;

    #[test]
    fn a_small_block_comes_from_the_smallest_free_one() {
        // Free: 2, 3, 4..8. One GPU comes from the pair, not from the four.
        let free = [false, false, true, true, true, true, true, true];
        assert_eq!(smallest(&free, 1), Some((2, 2)));
        assert_eq!(smallest(&free, 2), Some((2, 2)));
        assert_eq!(smallest(&free, 4), Some((4, 4)));
        assert_eq!(smallest(&free, 8), None);
    }

    #[test]
    fn halves_stay_whole_while_singles_come() {
        let state = ClusterState::uniform(16, 8);
        let mut free = state.free().clone();
        let job = Job::rigid(JobType(0), 1, 0.0, 1.0);
        for _ in 0..4 {
            Buddy.place(&state, &mut free, &job, 1).unwrap();
        }
        assert!(Buddy.place(&state, &mut free, &job, 4).is_some());
        assert!(Buddy.place(&state, &mut free, &job, 8).is_some());
        assert!(Buddy.place(&state, &mut free, &job, 1).is_none());
    }
}
