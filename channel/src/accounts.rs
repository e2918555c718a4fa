//! The arbiter's reading of a tenant's page: what its processes say they hold, copied out within
//! bounds.
//!
//! Every process of the tenant can write to every word of the page, so nothing here depends on a
//! count that stands in it: the arbiter knows how many slots it has handed out, lists are as long
//! as the layout says at most, and a reading looks at each entry a constant number of times. Its
//! cost is proportional to what is listed, and it reports that cost ([`Accounts::read`]), so that
//! the caller can spread readings over time.
//!
//! Blocks that go from one list to another while they are summed would be counted twice or not at
//! all: such a sum is taken again, [`TRIES`] times at most. Where it does not settle, the sum
//! before it stays.

use crate::layout::{MAX_DEVICES, SHARED_BLOCKS, SharedBlocks, TENANT_SLOTS, TenantPage};
use crate::shared::Block;
use crate::sync::{Relaxed, SeqCst};

/// How often a sum of shared blocks is taken again within one reading.
const TRIES: u32 = 3;
/// Readings in a row that do not settle although the counts go on: no library of ours shares blocks
/// at such a rate.
const RESTLESS: u32 = 20;

/// What no library of ours writes into a tenant's page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageViolation {
    /// The number of slots is not the one that the arbiter has written.
    Slots,
    /// A list of shared blocks is longer than there is space for, or has more additions under way
    /// than there can be.
    Lists,
    /// A shared block lies on no device.
    Device,
    /// The lists change without end.
    Restless,
}

impl std::fmt::Display for PageViolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Slots => "the number of slots was overwritten",
            Self::Lists => "a list of shared blocks has impossible counts",
            Self::Device => "a shared block lies on no device",
            Self::Restless => "the lists of shared blocks change without end",
        })
    }
}

/// What a tenant holds, as it was read last.
#[derive(Debug)]
pub struct Accounts {
    /// The highest slot that is handed out, plus one.
    slots: u32,
    /// Own bytes by slot, and shared ones by the lowest slot that lists them.
    held: Vec<[u64; MAX_DEVICES]>,
    /// What of the own bytes may yet be given back.
    undecided: [u64; MAX_DEVICES],
    shared: Vec<[u64; MAX_DEVICES]>,
    peak: [u64; MAX_DEVICES],
    /// Blocks as they are listed, with their slots: kept to allocate nothing.
    listed: Vec<(u64, u32, Block)>,
    unsettled: u32,
    violation: Option<PageViolation>,
}

impl Default for Accounts {
    fn default() -> Self {
        Self::new()
    }
}

impl Accounts {
    /// Of a page that nobody has written to.
    pub fn new() -> Self {
        Self {
            slots: 0,
            held: Vec::new(),
            undecided: [0; MAX_DEVICES],
            shared: Vec::new(),
            peak: [0; MAX_DEVICES],
            listed: Vec::new(),
            unsettled: 0,
            violation: None,
        }
    }

    /// Of a page that an arbiter before this one has made: its number of slots is believed once, as
    /// far as it can be.
    pub fn adopting(page: &TenantPage) -> Self {
        let slots = page.slots_used.load(SeqCst).min(TENANT_SLOTS as u32);
        Self {
            slots,
            ..Self::new()
        }
    }

    /// Slots in use, as they were handed out.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Sets the number of slots in use: every one above is empty and nobody's. Raised before a
    /// process is welcomed, lowered after its slot was cleared.
    pub fn use_slots(&mut self, page: &TenantPage, slots: u32) {
        self.slots = slots.min(TENANT_SLOTS as u32);
        page.slots_used.store(self.slots, SeqCst);
    }

    /// Copies out what the page says. Returns how many shared blocks were looked at: the part of
    /// the cost that a tenant can raise.
    pub fn read(&mut self, page: &TenantPage) -> usize {
        if page.slots_used.load(SeqCst) != self.slots {
            self.violation = Some(PageViolation::Slots);
            page.slots_used.store(self.slots, SeqCst);
        }
        for (to, from) in self.peak.iter_mut().zip(&page.peak_bytes) {
            *to = from.load(Relaxed) & crate::reservation::BYTES;
        }
        // A process adds a block to the shared list before it takes it off its own: so read in the
        // opposite order.
        self.held.resize(self.slots as usize, [0; MAX_DEVICES]);
        self.undecided = [0; MAX_DEVICES];
        for (held, slot) in self.held.iter_mut().zip(&page.slots) {
            let words = held.iter_mut().zip(&mut self.undecided);
            for ((to, undecided), from) in words.zip(&slot.held_bytes) {
                let word = from.load(SeqCst);
                *to = word & crate::reservation::BYTES;
                let settled = crate::reservation::settled(word);
                *undecided = undecided.saturating_add(*to - settled);
            }
        }
        self.read_shared(page)
    }

    fn read_shared(&mut self, page: &TenantPage) -> usize {
        self.shared.resize(self.slots as usize, [0; MAX_DEVICES]);
        if page.sharing.load(SeqCst) == 0 {
            self.shared.fill([0; MAX_DEVICES]);
            return 0;
        }
        let (mut looked_at, mut moved) = (0, false);
        for _ in 0..TRIES {
            let done = self.additions(page, |list| list.done.load(SeqCst));
            let begun = self.additions(page, |list| list.begun.load(SeqCst));
            looked_at += self.list(page);
            // An addition that was not over when we began may have come with a removal that we saw.
            let after = self.additions(page, |list| list.begun.load(SeqCst));
            if after == done {
                self.unsettled = 0;
                self.sum_shared();
                return looked_at;
            }
            moved |= after != begun;
        }
        // A process that is stopped within an addition is no offender.
        self.unsettled = if moved { self.unsettled + 1 } else { 0 };
        if self.unsettled >= RESTLESS {
            self.unsettled = 0;
            self.violation = Some(PageViolation::Restless);
        }
        looked_at
    }

    fn lists<'p>(&self, page: &'p TenantPage) -> impl Iterator<Item = (u32, &'p SharedBlocks)> {
        (0..self.slots).zip(&page.shared)
    }

    fn additions(&self, page: &TenantPage, count: impl Fn(&SharedBlocks) -> u64) -> u64 {
        self.lists(page)
            .fold(0, |sum: u64, (_, list)| sum.wrapping_add(count(list)))
    }

    /// Copies all lists out, each entry once.
    fn list(&mut self, page: &TenantPage) -> usize {
        let mut listed = std::mem::take(&mut self.listed);
        listed.clear();
        let (mut looked_at, mut violation) = (0, None);
        for (slot, list) in self.lists(page) {
            // In this order one addition at a time makes a difference of one at most.
            let begun = list.begun.load(SeqCst);
            let under_way = begun.wrapping_sub(list.done.load(SeqCst));
            let used = list.used.load(SeqCst) as usize;
            if used > SHARED_BLOCKS || (under_way > 1 && under_way < u64::MAX / 2) {
                violation = Some(PageViolation::Lists);
            }
            for block in list.blocks.iter().take(used) {
                looked_at += 1;
                match block.read() {
                    Some(block) if block.device < MAX_DEVICES => {
                        listed.push((block.id, slot, block));
                    }
                    Some(_) => violation = Some(PageViolation::Device),
                    None => {}
                }
            }
        }
        self.listed = listed;
        self.violation = violation.or(self.violation);
        looked_at
    }

    /// Counts each listed block once, for the lowest slot that has it.
    fn sum_shared(&mut self) {
        self.shared.fill([0; MAX_DEVICES]);
        self.listed
            .sort_unstable_by_key(|(id, slot, _)| (*id, *slot));
        let mut last = None;
        for (id, slot, block) in &self.listed {
            if last.replace(*id) == Some(*id) {
                continue;
            }
            // PANIC: slots below `self.slots` and devices below MAX_DEVICES alone were listed.
            let sum = &mut self.shared[*slot as usize][block.device];
            *sum = sum.saturating_add(block.bytes);
        }
    }

    /// What the tenant holds on `device`, in bytes.
    pub fn used_bytes(&self, device: usize) -> u64 {
        (0..self.slots).fold(0, |sum: u64, slot| {
            sum.saturating_add(self.slot_bytes(slot, device))
        })
    }

    /// The same without what its processes may yet give back: calls under way whose outcome the
    /// driver alone knows.
    pub fn settled_bytes(&self, device: usize) -> u64 {
        let undecided = self.undecided.get(device).copied().unwrap_or(0);
        self.used_bytes(device).saturating_sub(undecided)
    }

    /// What slot `slot` holds on `device`, in bytes; what it shares with a lower slot is counted
    /// there.
    pub fn slot_bytes(&self, slot: u32, device: usize) -> u64 {
        let of = |of: &[[u64; MAX_DEVICES]]| of.get(slot as usize)?.get(device).copied();
        of(&self.held)
            .unwrap_or(0)
            .saturating_add(of(&self.shared).unwrap_or(0))
    }

    /// Most that the tenant ever held on `device` at once, by its own word, in bytes.
    pub fn peak_bytes(&self, device: usize) -> u64 {
        self.peak.get(device).copied().unwrap_or(0)
    }

    /// What was found that no library of ours writes, once.
    pub fn take_violation(&mut self) -> Option<PageViolation> {
        self.violation.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{Mapped, Writers};
    use crate::reservation::Account;
    use crate::{NO_LIMIT, layout::SHARED_BLOCKS};

    fn page() -> Mapped<TenantPage> {
        Mapped::<TenantPage>::create(Writers::Holders)
            .expect("page")
            .0
    }

    const fn block(id: u64, bytes: u64) -> Block {
        Block {
            id,
            device: 0,
            bytes,
        }
    }

    /// Every block of every list taken, each by itself.
    fn fill(page: &TenantPage) {
        page.sharing.store(1, SeqCst);
        for (slot, list) in (0u64..).zip(&page.shared) {
            list.used.store(u32::MAX, SeqCst);
            for (at, block) in (0u64..).zip(&list.blocks) {
                block.bytes_and_device.store(u64::MAX >> 8, SeqCst);
                block.id.store(slot << 32 | at << 1 | 1, SeqCst);
            }
        }
    }

    #[test]
    fn what_is_held_and_shared_is_what_its_processes_say() {
        let page = page();
        let mut accounts = Accounts::new();
        accounts.use_slots(&page, 2);
        let [one, other] = [0, 1].map(|slot| Account::new(&page, slot).expect("slot"));
        one.reserve(0, 300, NO_LIMIT).expect("no limit");
        other.reserve(3, 50, NO_LIMIT).expect("no limit");
        assert!(one.share_own(block(7, 100)));
        assert_eq!(other.share(block(7, 100), NO_LIMIT), Ok(true));
        assert_eq!(accounts.read(&page), 2);
        assert_eq!((accounts.used_bytes(0), accounts.used_bytes(3)), (300, 50));
        assert_eq!([0, 1].map(|slot| accounts.slot_bytes(slot, 0)), [300, 0]);
        one.unshare(7);
        accounts.read(&page);
        assert_eq!([0, 1].map(|slot| accounts.slot_bytes(slot, 0)), [200, 100]);
        assert_eq!(accounts.peak_bytes(0), 300);
        let prepaid = other.prepay(0, 4 << 20, NO_LIMIT, false).expect("no limit");
        accounts.read(&page);
        let both = |accounts: &Accounts| (accounts.used_bytes(0), accounts.settled_bytes(0));
        assert_eq!(both(&accounts), ((4 << 20) + 300, 300));
        other.settle(0, prepaid, 40);
        accounts.read(&page);
        assert_eq!(both(&accounts), (340, 340));
        other.release(0, 40);
        accounts.read(&page);
        assert_eq!(accounts.take_violation(), None);
        assert_eq!(accounts.used_bytes(MAX_DEVICES), 0);
    }

    #[test]
    fn no_word_of_a_page_makes_a_reading_longer_than_its_lists() {
        let page = page();
        let mut accounts = Accounts::new();
        accounts.use_slots(&page, TENANT_SLOTS as u32);
        fill(&page);
        page.slots_used.store(u32::MAX, SeqCst);
        page.shared[0].begun.store(1, SeqCst);
        let most = TENANT_SLOTS * SHARED_BLOCKS * TRIES as usize;
        assert_eq!(accounts.read(&page), most);
        assert_eq!(accounts.take_violation(), Some(PageViolation::Lists));
        assert_eq!(accounts.take_violation(), None, "once");
        assert_eq!(page.slots_used.load(SeqCst), TENANT_SLOTS as u32);
        // The processes themselves are not held up either.
        page.slots_used.store(u32::MAX, SeqCst);
        assert!(page.used_bytes(0) > 0);
    }

    #[test]
    fn a_sum_that_does_not_settle_keeps_the_one_before_it() {
        let page = page();
        let mut accounts = Accounts::new();
        accounts.use_slots(&page, 2);
        let one = Account::new(&page, 0).expect("slot");
        assert_eq!(one.share(block(1, 100), NO_LIMIT), Ok(true));
        accounts.read(&page);
        assert_eq!(accounts.used_bytes(0), 100);
        // Stopped within an addition.
        page.shared[1].begun.store(1, SeqCst);
        page.shared[1].blocks[0].id.store(9, SeqCst);
        page.shared[1].blocks[0].bytes_and_device.store(55, SeqCst);
        page.shared[1].used.store(1, SeqCst);
        for _ in 0..2 * RESTLESS {
            assert_eq!(accounts.read(&page), 2 * TRIES as usize);
            assert_eq!(accounts.used_bytes(0), 100);
        }
        assert_eq!(accounts.take_violation(), None, "that is no violation");
        page.shared[1].done.store(1, SeqCst);
        accounts.read(&page);
        assert_eq!(accounts.used_bytes(0), 155);
    }

    #[test]
    fn impossible_counts_are_reported() {
        let page = page();
        let mut accounts = Accounts::new();
        accounts.use_slots(&page, 3);
        let mut reported = |page: &TenantPage| {
            accounts.read(page);
            accounts.take_violation()
        };
        assert_eq!(reported(&page), None);
        for slots in [0, 2, 64, u32::MAX] {
            page.slots_used.store(slots, SeqCst);
            assert_eq!(reported(&page), Some(PageViolation::Slots));
            assert_eq!(reported(&page), None, "put right");
        }
        page.sharing.store(7, SeqCst);
        page.shared[2].begun.store(5, SeqCst);
        assert_eq!(reported(&page), Some(PageViolation::Lists));
        page.shared[2].begun.store(0, SeqCst);
        page.shared[1].used.store(129, SeqCst);
        assert_eq!(reported(&page), Some(PageViolation::Lists));
        page.shared[1].used.store(1, SeqCst);
        page.shared[1].blocks[0].id.store(1, SeqCst);
        page.shared[1].blocks[0]
            .bytes_and_device
            .store(u64::MAX, SeqCst);
        assert_eq!(reported(&page), Some(PageViolation::Device));
        page.shared[1].blocks[0].id.store(0, SeqCst);
        assert_eq!(reported(&page), None);
    }

    #[test]
    fn a_page_of_an_earlier_arbiter_is_believed_as_far_as_it_can_be() {
        let page = page();
        page.use_slots(5);
        page.slots[4].held_bytes[0].store(77, SeqCst);
        let mut accounts = Accounts::adopting(&page);
        accounts.read(&page);
        assert_eq!(
            (accounts.used_bytes(0), accounts.take_violation()),
            (77, None)
        );
        page.slots_used.store(u32::MAX, SeqCst);
        let mut accounts = Accounts::adopting(&page);
        accounts.read(&page);
        assert_eq!(accounts.used_bytes(0), 77);
    }
}
