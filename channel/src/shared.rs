//! Blocks of device memory that several processes of a tenant hold: an exported physical handle and
//! its imports.
//!
//! Such a block lives until the last process has given it back, so it belongs to no single slot.
//! Every process that holds it lists it next to its slot, under a number that all of them find
//! alike, and it counts once for the tenant. When its owner gives it back first, or is killed, it
//! is still in the lists of the others.
//!
//! A list has one writer, as its slot has. A sum must not miss a block that goes from one list to
//! another meanwhile: an addition is counted when it begins and when it is done, and a sum during
//! which one was under way is taken again.

use crate::layout::{MAX_DEVICES, NO_LIMIT, SHARED_BLOCKS, SharedBlock, SharedBlocks, TenantPage};
use crate::reservation::{Account, OverLimit};
use crate::sync::{Relaxed, SeqCst};

const DEVICE_SHIFT: u32 = 56;
const BYTES: u64 = (1 << DEVICE_SHIFT) - 1;
/// How often a sum is taken again. Additions are rare and short; a process killed within one leaves
/// its counts apart only until the arbiter clears its slot. The arbiter itself reads with fewer
/// ([`Accounts`](crate::Accounts)).
const TRIES: u32 = if cfg!(loom) { 3 } else { 64 };
/// Blocks that a sum knows again by looking once. Beyond them it looks through the lists of the
/// slots below.
const KNOWN: usize = if cfg!(loom) { 4 } else { 256 };
/// Entries of lists that one sum reads again at most to decide whether a block was counted: what 64
/// processes with full lists take. Beyond it a block counts once for each process that lists it:
/// more than there is, and never less.
const LOOKS_BELOW: usize = 1 << 25;
/// Places at which a block is looked for among the known ones.
const PROBES: usize = 8;

/// A block as it stands in a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// Its number, the same for all processes; never 0.
    pub id: u64,
    /// Device index of the pages.
    pub device: usize,
    /// Bytes.
    pub bytes: u64,
}

impl SharedBlock {
    pub(crate) fn read(&self) -> Option<Block> {
        let id = self.id.load(SeqCst);
        let word = self.bytes_and_device.load(SeqCst);
        (id != 0).then_some(Block {
            id,
            device: (word >> DEVICE_SHIFT) as usize,
            bytes: word & BYTES,
        })
    }
}

impl SharedBlocks {
    /// Entries that were ever used.
    fn used(&self) -> impl Iterator<Item = &SharedBlock> {
        let used = (self.used.load(SeqCst) as usize).min(SHARED_BLOCKS);
        self.blocks.iter().take(used)
    }

    fn listed(&self) -> impl Iterator<Item = Block> {
        self.used().filter_map(SharedBlock::read)
    }
}

#[cfg(loom)]
impl Default for SharedBlocks {
    fn default() -> Self {
        Self {
            begun: Default::default(),
            done: Default::default(),
            used: Default::default(),
            reserved0: 0,
            reserved: Default::default(),
            blocks: std::array::from_fn::<_, SHARED_BLOCKS, _>(|_| SharedBlock::default()),
        }
    }
}

impl Account<'_> {
    fn list(&self) -> Option<&SharedBlocks> {
        self.page.shared.get(self.slot as usize)
    }

    /// Lists a block whose bytes this process has been charged until now: they count as shared from
    /// here on. False where the list is full, and nothing has changed then. One thread of a process
    /// at a time.
    pub fn share_own(&self, block: Block) -> bool {
        let listed = self.enlist(block);
        if listed {
            // After it is listed, never before: nobody may see it in neither place.
            self.release(block.device, block.bytes);
        }
        listed
    }

    /// Lists a block that this process is about to get from another one: charged unless another
    /// process of the tenant has it listed. False where the list is full, and nothing has changed
    /// then. One thread of a process at a time.
    ///
    /// # Errors
    /// It is nobody else's, and does not fit into `limit_bytes`.
    pub fn share(&self, block: Block, limit_bytes: u64) -> Result<bool, OverLimit> {
        if block.device >= MAX_DEVICES || !self.enlist(block) {
            return Ok(false);
        }
        let sum = self.used_bytes(block.device);
        if limit_bytes != NO_LIMIT && sum > limit_bytes && !self.others_have(block.id) {
            self.unshare(block.id);
            return Err(OverLimit {
                limit_bytes,
                used_bytes: self.used_bytes(block.device),
                requested_bytes: block.bytes,
            });
        }
        self.raise_peak(block.device, sum);
        Ok(true)
    }

    /// Takes a block off the list: its bytes are given back unless another process has it. One
    /// thread of a process at a time.
    pub fn unshare(&self, id: u64) {
        let Some(list) = self.list() else {
            return;
        };
        if let Some(block) = list.blocks.iter().find(|one| one.id.load(Relaxed) == id) {
            block.id.store(0, SeqCst);
        }
    }

    /// A block as any process of the tenant has it listed.
    pub fn find_shared(&self, id: u64) -> Option<Block> {
        self.page
            .lists()
            .find_map(|(_, list)| list.listed().find(|block| block.id == id))
    }

    fn others_have(&self, id: u64) -> bool {
        self.page
            .lists()
            .filter(|(slot, _)| *slot != self.slot)
            .any(|(_, list)| list.listed().any(|block| block.id == id))
    }

    fn enlist(&self, block: Block) -> bool {
        let Some(list) = self.list() else {
            return false;
        };
        let Some((at, free)) = list
            .blocks
            .iter()
            .enumerate()
            .find(|(_, one)| one.id.load(Relaxed) == 0)
        else {
            return false;
        };
        // SYNC(sharing): everything here and in `shared_bytes` is in the single total order of
        // SeqCst. A process that does not see this flag sums before the block is listed.
        self.page.sharing.store(1, SeqCst);
        list.begun.fetch_add(1, SeqCst);
        // CAST: an index of a page, below MAX_DEVICES.
        let word = (block.bytes & BYTES) | ((block.device as u64) << DEVICE_SHIFT);
        free.bytes_and_device.store(word, SeqCst);
        free.id.store(block.id, SeqCst);
        list.used.fetch_max(at as u32 + 1, SeqCst);
        list.done.fetch_add(1, SeqCst);
        true
    }
}

/// Numbers of blocks that a sum has come by.
struct Known([u64; KNOWN]);

impl Default for Known {
    fn default() -> Self {
        Self([0; KNOWN])
    }
}

impl Known {
    /// Whether this one is new; `None`: the memory of known blocks is full.
    fn meet(&mut self, id: u64) -> Option<bool> {
        // CAST: the upper bits of a product, of which the modulus takes some. Any number will do.
        let at = (id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        for probe in 0..PROBES {
            let place = &mut self.0[(at + probe) % KNOWN]; // PANIC: the modulus is the length.
            if *place == 0 {
                *place = id;
                return Some(true);
            }
            if *place == id {
                return Some(false);
            }
        }
        None
    }
}

impl TenantPage {
    /// Lists of the slots in use.
    fn lists(&self) -> impl Iterator<Item = (u32, &SharedBlocks)> {
        (0..self.slots_used.load(SeqCst)).zip(&self.shared)
    }

    /// Shared blocks on `device`, each once, in bytes.
    #[inline]
    pub(crate) fn shared_bytes(&self, device: usize) -> u64 {
        if self.sharing.load(SeqCst) == 0 {
            return 0;
        }
        self.sum_shared(device)
    }

    #[cold]
    fn sum_shared(&self, device: usize) -> u64 {
        let (mut most, mut looks) = (0, LOOKS_BELOW);
        for _ in 0..TRIES {
            let done = self.additions(|list| list.done.load(SeqCst));
            let sum = self.distinct_bytes(device, &mut looks);
            most = sum.max(most);
            // An addition that was not over when we began may have come with a removal that we saw.
            if self.additions(|list| list.begun.load(SeqCst)) == done {
                return sum;
            }
            std::hint::spin_loop();
        }
        most
    }

    fn additions(&self, count: impl Fn(&SharedBlocks) -> u64) -> u64 {
        self.lists()
            .fold(0, |sum: u64, (_, list)| sum.wrapping_add(count(list)))
    }

    /// Shared blocks on `device`, each once, in one pass over the lists and `looks` more reads at
    /// most.
    fn distinct_bytes(&self, device: usize, looks: &mut usize) -> u64 {
        let (mut known, mut sum) = (Known::default(), 0u64);
        for (slot, list) in self.lists() {
            for block in list.listed().filter(|block| block.device == device) {
                let is_new = known
                    .meet(block.id)
                    .unwrap_or_else(|| !self.is_below(slot, block.id, looks));
                if is_new {
                    sum = sum.saturating_add(block.bytes);
                }
            }
        }
        sum
    }

    /// Whether a slot below `slot` lists the block, as far as `looks` reads show; those that it
    /// took are taken off.
    fn is_below(&self, slot: u32, id: u64, looks: &mut usize) -> bool {
        let below = self.shared.iter().take(slot as usize);
        for one in below.flat_map(SharedBlocks::used).take(*looks) {
            *looks -= 1;
            if one.id.load(SeqCst) == id {
                return true;
            }
        }
        false
    }

    /// Shared blocks that count for slot `slot` on `device`: those that no lower slot has, in
    /// bytes.
    pub(crate) fn slot_shared_bytes(&self, slot: u32, device: usize) -> u64 {
        let Some(list) = self.shared.get(slot as usize) else {
            return 0;
        };
        let mut looks = LOOKS_BELOW;
        list.listed()
            .filter(|block| block.device == device && !self.is_below(slot, block.id, &mut looks))
            .fold(0, |sum: u64, block| sum.saturating_add(block.bytes))
    }

    /// Empties a dead process's list.
    pub(crate) fn clear_shared(&self, slot: u32) {
        if let Some(list) = self.shared.get(slot as usize) {
            for block in &list.blocks {
                block.id.store(0, SeqCst);
            }
            list.used.store(0, SeqCst);
            // It may have died within an addition.
            list.begun.store(list.done.load(SeqCst), SeqCst);
        }
    }
}
