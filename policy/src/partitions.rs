//! Memory partitions of a device: how much memory the jobs that share it may have.
//!
//! Source: P. Yu, M. Chowdhury, "Salus: Fine-Grained GPU Sharing Primitives for Deep Learning
//! Applications", MLSys 2020.
//!
//! A job's memory is a persistent part P (model, optimiser) and an ephemeral part E that each
//! iteration takes and gives back. The jobs of one *partition* (the paper's "GPU lane") run one at
//! a time, so their ephemeral parts never coexist, and a partition is safe when
//!
//! ```text
//! P_1 + P_2 + ... + max(E_1, E_2, ...) <= size of the partition
//! ```
//!
//! while jobs of different partitions run at once. With jobs of P = 1 GiB and E = 6 GiB, 16 GiB
//! hold two of them by their peaks, two partitions of one job each, or one partition of ten jobs.
//!
//! A job is admitted to a new partition if its peak P + E is free; else to the partition with the
//! least space in which it fits (best fit); else to the partition that has to grow least, as far as
//! there is memory free; else it waits. Partitions are accounts, not addresses: they grow and
//! shrink without moving anything (in Salus they could not). [`HOLD_BACK_BYTES`] of the device are
//! left to contexts and libraries, as in the authors' code.

use std::fmt;

use crate::slice::{Memory, TenantId};
use crate::turns::PartitionId;

/// Held back for what is nobody's: 300 MiB (the authors' artifact).
pub const HOLD_BACK_BYTES: u64 = 300 << 20;

/// The partitions of one device.
#[derive(Clone, Debug)]
pub struct PartitionTable {
    /// Without what is held back; `None`: not known, and everybody fits.
    capacity_bytes: Option<u64>,
    hold_back_bytes: u64,
    partitions: Vec<Partition>,
    partition_ids: u32,
}

#[derive(Clone, Debug)]
struct Partition {
    id: PartitionId,
    size_bytes: u64,
    members: Vec<(TenantId, Memory)>,
}

/// A job fits in no partition for now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoPartition {
    /// What its peak needs, in bytes.
    pub needs_bytes: u64,
    /// What no partition has taken, in bytes.
    pub free_bytes: u64,
}

impl fmt::Display for NoPartition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no partition has space: the job needs {} bytes at its peak, {} are free; it waits until another job ends",
            self.needs_bytes, self.free_bytes
        )
    }
}

impl std::error::Error for NoPartition {}

impl Partition {
    /// What the partition needs with its members changed: without `without`, with `with`.
    fn needs_bytes(&self, without: Option<TenantId>, with: Option<Memory>) -> u64 {
        let memories = (self.members.iter())
            .filter(|(id, _)| Some(*id) != without)
            .map(|(_, memory)| *memory)
            .chain(with);
        let (persistent, ephemeral) = memories.fold((0u64, 0u64), |(sum, max), memory| {
            (
                sum.saturating_add(memory.persistent_bytes),
                max.max(memory.ephemeral_bytes),
            )
        });
        persistent.saturating_add(ephemeral)
    }
}

impl PartitionTable {
    /// A device of which nothing is known yet.
    pub fn new(hold_back_bytes: u64) -> Self {
        Self {
            capacity_bytes: None,
            hold_back_bytes,
            partitions: Vec::new(),
            partition_ids: 0,
        }
    }

    /// Sets how much memory the device has; 0: not known. Existing partitions stay.
    pub fn set_device_bytes(&mut self, bytes: u64) {
        self.capacity_bytes = (bytes > 0).then(|| bytes.saturating_sub(self.hold_back_bytes));
    }

    /// What no partition has taken, in bytes.
    pub fn free_bytes(&self) -> u64 {
        let Some(capacity_bytes) = self.capacity_bytes else {
            return u64::MAX;
        };
        let taken = (self.partitions.iter()).fold(0u64, |sum, partition| {
            sum.saturating_add(partition.size_bytes)
        });
        capacity_bytes.saturating_sub(taken)
    }

    /// The partition of a job.
    pub fn partition(&self, id: TenantId) -> Option<PartitionId> {
        self.place(id)
            .map(|(partition, _)| self.partitions[partition].id)
    }

    /// Every partition with its size in bytes and its jobs.
    pub fn partitions(&self) -> impl Iterator<Item = (PartitionId, u64, &[(TenantId, Memory)])> {
        (self.partitions.iter()).map(|partition| {
            (
                partition.id,
                partition.size_bytes,
                partition.members.as_slice(),
            )
        })
    }

    fn place(&self, id: TenantId) -> Option<(usize, usize)> {
        self.partitions
            .iter()
            .enumerate()
            .find_map(|(at, partition)| {
                let member = partition
                    .members
                    .iter()
                    .position(|(member, _)| *member == id)?;
                Some((at, member))
            })
    }

    /// Admits a job, or brings its memory up to date.
    ///
    /// # Errors
    ///
    /// There is no space. The job is in no partition then, even if it was in one before.
    pub fn admit(&mut self, id: TenantId, memory: Memory) -> Result<PartitionId, NoPartition> {
        if let Some((at, member)) = self.place(id) {
            let free_bytes = self.free_bytes();
            let partition = &mut self.partitions[at];
            if partition.members[member].1 == memory {
                return Ok(partition.id);
            }
            let needs_bytes = partition.needs_bytes(Some(id), Some(memory));
            if needs_bytes.saturating_sub(partition.size_bytes) <= free_bytes {
                partition.members[member].1 = memory;
                partition.size_bytes = needs_bytes;
                return Ok(partition.id);
            }
            self.remove(id);
        }
        let peak_bytes = memory.peak_bytes();
        let free_bytes = self.free_bytes();
        if peak_bytes <= free_bytes {
            // WRAPPING: a name; as many partitions never live at once.
            self.partition_ids = self.partition_ids.wrapping_add(1);
            let partition = PartitionId(self.partition_ids);
            self.partitions.push(Partition {
                id: partition,
                size_bytes: peak_bytes,
                members: vec![(id, memory)],
            });
            return Ok(partition);
        }
        // Where it has to grow least; among those that need not, the one with the least space left.
        let best = (self.partitions.iter_mut())
            .map(|partition| {
                let needs_bytes = partition.needs_bytes(None, Some(memory));
                let growth_bytes = needs_bytes.saturating_sub(partition.size_bytes);
                let space_bytes = partition.size_bytes.saturating_sub(needs_bytes);
                (growth_bytes, space_bytes, partition)
            })
            .min_by_key(|(growth_bytes, space_bytes, partition)| {
                (*growth_bytes, *space_bytes, partition.id)
            });
        match best {
            Some((growth_bytes, _, partition)) if growth_bytes <= free_bytes => {
                partition.size_bytes = partition.size_bytes.saturating_add(growth_bytes);
                partition.members.push((id, memory));
                Ok(partition.id)
            }
            _ => Err(NoPartition {
                needs_bytes: peak_bytes,
                free_bytes,
            }),
        }
    }

    /// A job is gone. Its partition shrinks to what the others need.
    pub fn remove(&mut self, id: TenantId) {
        if let Some((at, member)) = self.place(id) {
            let partition = &mut self.partitions[at];
            partition.members.swap_remove(member);
            partition.size_bytes = partition.needs_bytes(None, None);
            if partition.members.is_empty() {
                self.partitions.swap_remove(at);
            }
        }
    }

    /// Removes the jobs for which `stays` says no.
    pub fn retain(&mut self, stays: impl Fn(TenantId) -> bool) {
        while let Some(id) = (self.partitions.iter())
            .flat_map(|partition| &partition.members)
            .map(|(id, _)| *id)
            .find(|id| !stays(*id))
        {
            self.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn memory(persistent: u64, ephemeral: u64) -> Memory {
        Memory {
            persistent_bytes: persistent * GIB,
            ephemeral_bytes: ephemeral * GIB,
        }
    }

    fn table(gib: u64) -> PartitionTable {
        let mut table = PartitionTable::new(0);
        table.set_device_bytes(gib * GIB);
        table
    }

    #[test]
    fn the_numbers_of_the_module_documentation_hold() {
        let mut table = table(16);
        let job = memory(1, 6);
        let partitions: Vec<_> = (0..12).map(|id| table.admit(TenantId(id), job)).collect();
        let ok: Vec<PartitionId> = partitions
            .iter()
            .filter_map(|partition| partition.ok())
            .collect();
        assert_ne!(ok[0], ok[1], "while there is space, a partition for each");
        assert_eq!(ok.len(), 4, "then two more in the 2 GiB that are left");
        assert_eq!(
            partitions[4],
            Err(NoPartition {
                needs_bytes: 7 * GIB,
                free_bytes: 0
            })
        );
        let mut one = PartitionTable::new(0);
        one.set_device_bytes(7 * GIB);
        one.admit(TenantId(99), job).expect("the first partition");
        one.set_device_bytes(16 * GIB);
        let many = (0..20)
            .filter(|id| {
                // Six of the nine free GiB would make a partition of its own; take them away first.
                one.set_device_bytes(if *id < 9 { 8 + id } else { 16 } * GIB);
                one.admit(TenantId(*id), job).is_ok()
            })
            .count();
        assert_eq!(many + 1, 10, "one partition of ten jobs");
    }

    #[test]
    fn a_job_that_ends_makes_space_for_one_that_waits() {
        let mut table = table(10);
        table.admit(TenantId(1), memory(4, 4)).expect("fits");
        table
            .admit(TenantId(2), memory(2, 3))
            .expect("shares a partition");
        table
            .admit(TenantId(3), memory(1, 4))
            .expect_err("11 of 10");
        table.remove(TenantId(2));
        table.admit(TenantId(3), memory(1, 4)).expect("9 of 10");
    }

    #[test]
    fn growth_beyond_the_device_loses_the_partition_and_nobody_elses() {
        let mut table = table(10);
        table.admit(TenantId(1), memory(4, 1)).expect("fits");
        table.admit(TenantId(2), memory(4, 1)).expect("fits");
        table
            .admit(TenantId(2), memory(7, 1))
            .expect_err("12 of 10");
        assert!(table.partition(TenantId(1)).is_some());
        assert!(table.partition(TenantId(2)).is_none());
        assert_eq!(table.free_bytes(), 5 * GIB);
    }

    #[test]
    fn of_an_unknown_device_everybody_has_a_partition() {
        let mut table = PartitionTable::new(HOLD_BACK_BYTES);
        for id in 0..100 {
            table
                .admit(TenantId(id), memory(100, 100))
                .expect("no limit");
        }
        assert_eq!(table.partitions().count(), 100);
    }
}
