//! Which GPUs nobody holds, as one word of bits per node.

use super::{GpuId, Node};

/// The free GPUs of a cluster. Cloning costs a word per node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FreeGpus {
    /// First GPU of each node.
    first: std::sync::Arc<[u32]>,
    masks: Vec<u64>,
    total: u32,
}

impl FreeGpus {
    /// All GPUs of these nodes. Nodes have at most 64.
    #[must_use]
    pub fn all(nodes: &[Node]) -> Self {
        let mask = |gpus: u32| {
            if gpus >= 64 {
                u64::MAX
            } else {
                (1 << gpus) - 1
            }
        };
        Self {
            first: nodes.iter().map(|node| node.first.0).collect(),
            masks: nodes.iter().map(|node| mask(node.gpus)).collect(),
            total: nodes.iter().map(|node| node.gpus).sum(),
        }
    }

    /// How many are free.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total
    }

    /// How many are free on one node.
    #[must_use]
    pub fn on(&self, node: usize) -> u32 {
        self.masks[node].count_ones()
    }

    /// Number of nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.masks.len()
    }

    fn node_of(&self, gpu: GpuId) -> usize {
        self.first.partition_point(|first| *first <= gpu.0) - 1
    }

    /// Whether this one is free.
    #[must_use]
    pub fn contains(&self, gpu: GpuId) -> bool {
        let node = self.node_of(gpu);
        self.masks[node] >> (gpu.0 - self.first[node]) & 1 == 1
    }

    /// Take one; `false` where it is not free.
    pub fn take(&mut self, gpu: GpuId) -> bool {
        let node = self.node_of(gpu);
        let bit = 1 << (gpu.0 - self.first[node]);
        let free = self.masks[node] & bit != 0;
        if free {
            self.masks[node] &= !bit;
            self.total -= 1;
        }
        free
    }

    /// Give one back; `false` where it was free.
    pub fn give(&mut self, gpu: GpuId) -> bool {
        let node = self.node_of(gpu);
        let bit = 1 << (gpu.0 - self.first[node]);
        let held = self.masks[node] & bit == 0;
        if held {
            self.masks[node] |= bit;
            self.total += 1;
        }
        held
    }

    /// Take up to `count` of one node and append them.
    pub fn take_on(&mut self, node: usize, count: u32, into: &mut Vec<GpuId>) {
        for _ in 0..count {
            let bit = self.masks[node].trailing_zeros();
            if bit == 64 {
                return;
            }
            self.masks[node] &= self.masks[node] - 1;
            self.total -= 1;
            into.push(GpuId(self.first[node] + bit));
        }
    }

    /// The free ones on some nodes only.
    #[must_use]
    pub fn only(&self, keep: impl Fn(usize) -> bool) -> Self {
        let mut some = self.clone();
        for node in (0..some.nodes()).filter(|node| !keep(*node)) {
            some.total -= some.on(node);
            some.masks[node] = 0;
        }
        some
    }
}
