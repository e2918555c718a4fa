//! A tenant: one job with its terms, its processes and the page in which they account their memory.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use channel::arbiter::TenantMemory;
use channel::wire::TOKEN_BYTES;
use channel::{Accounts, MAX_DEVICES, TENANT_SLOTS};
use control::{DeviceSelector, FailMode, MemLimit, Overflow};
use policy::{Class, TenantId};

use crate::journal::Allowance;
use crate::peer;

/// What a job asked for, as far as it was granted.
#[derive(Clone, PartialEq, Debug)]
pub struct Spec {
    /// Unique among living jobs.
    pub name: String,
    /// Its class.
    pub class: Class,
    /// Part of each device's time; `None`: an equal part of what is left.
    pub share: Option<f64>,
    /// Never less while it wants a device.
    pub share_min: Option<f64>,
    /// Never more.
    pub share_max: Option<f64>,
    /// All of its devices at once or none; `None`: so where it has several.
    pub gang: Option<bool>,
    /// By when its work should be done, in Unix milliseconds.
    pub deadline_unix_ms: Option<u64>,
    /// Device time that its work takes in all, in nanoseconds.
    pub work_ns: Option<u64>,
    /// It gets no device time.
    pub paused: bool,
    /// Per device.
    pub mem: Option<MemLimit>,
    /// Empty: every device of its driver.
    pub devices: Vec<DeviceSelector>,
    /// The process that registered it and became it by `exec`.
    pub pid: u32,
    /// For display, cut short.
    pub command: Vec<String>,
    /// The driver library that it opens.
    pub driver: PathBuf,
    /// That driver simulates.
    pub simulated: bool,
    /// What it does without an arbiter.
    pub on_loss: FailMode,
    /// Submissions that make an iteration, if its owner says so.
    pub iteration_launches: Option<u64>,
    /// Its memory may leave its devices.
    pub evictable: bool,
    /// Of what its limit has no room for.
    pub overflow: Overflow,
    /// Host memory that it may take.
    pub host_memory: Option<MemLimit>,
    /// Its operator keeps it away.
    pub evicted: bool,
}

/// A job.
#[derive(Debug)]
pub struct Tenant {
    /// Its number.
    pub id: TenantId,
    /// Its terms.
    pub spec: Spec,
    /// Whoever presents it belongs to this job.
    pub token: [u8; TOKEN_BYTES],
    /// User who registered it.
    pub uid: u32,
    /// Login name of `uid`; empty where the host does not know it.
    pub user: String,
    /// Readable once the registering process has ended; `None`: it has.
    pub process: Option<OwnedFd>,
    /// Start time of that process.
    pub started_ticks: u64,
    /// When it registered.
    pub started_unix_ms: u64,
    /// Where its processes account their memory; made for the first one.
    pub memory: Option<TenantMemory>,
    /// What that page said when it was read last.
    pub accounts: Accounts,
    /// Taken slots of that page, as bits.
    slots: u64,
    /// A process of it has attached.
    pub has_attached: bool,
    /// What it was promised is kept free for it.
    pub promises: bool,
    /// When it was registered, by our clock.
    pub registered_ns: u64,
    /// Number of the first state that has it; 0: none has yet.
    pub saved_as: u64,
    /// Its attached clients.
    pub clients: Vec<u64>,
    /// Clients of an earlier arbiter that have not come back yet.
    pub missing: Vec<Missing>,
    /// Until then a page of an earlier arbiter may still turn up.
    pub adopt_until_ns: u64,
    /// Limit on each device in bytes; `None`: the device.
    pub limits: [Option<u64>; MAX_DEVICES],
    /// Allocations refused for the limit.
    pub oom_count: u64,
    /// Submissions of clients that have gone.
    pub launches_gone: u64,
    /// Journal lines that it may still cause.
    pub allowance: Allowance,
    /// The size that it was asked to change to, and when.
    pub resize: Option<(channel::Resize, u64)>,
    /// Number of the last such request.
    pub resized: u64,
}

/// A client that was attached to an arbiter before this one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Missing {
    /// Its process.
    pub pid: u32,
    /// Start time of that process.
    pub started_ticks: u64,
    /// Its slot in the tenant's page.
    pub slot: u32,
    /// Next record of its ring.
    pub journal_next: u64,
}

const _: () = assert!(TENANT_SLOTS == 64, "one bit for each slot");

impl Tenant {
    /// A new job.
    pub fn new(
        id: TenantId,
        spec: Spec,
        token: [u8; TOKEN_BYTES],
        (uid, user): (u32, String),
        now_ns: u64,
    ) -> Self {
        Self {
            id,
            spec,
            token,
            uid,
            user,
            process: None,
            started_ticks: 0,
            started_unix_ms: crate::clock::unix_ms(),
            memory: None,
            accounts: Accounts::new(),
            slots: 0,
            has_attached: false,
            promises: true,
            registered_ns: now_ns,
            saved_as: 0,
            clients: Vec::new(),
            missing: Vec::new(),
            adopt_until_ns: 0,
            limits: [None; MAX_DEVICES],
            oom_count: 0,
            launches_gone: 0,
            allowance: Allowance::new(now_ns),
            resize: None,
            resized: 0,
        }
    }

    /// Takes the lowest free slot.
    pub fn take_slot(&mut self) -> Option<u32> {
        let slot = self.slots.trailing_ones();
        (slot < TENANT_SLOTS as u32).then(|| {
            self.slots |= 1 << slot;
            slot
        })
    }

    /// Takes this slot; false where it is taken or there is none.
    pub fn take_this_slot(&mut self, slot: u32) -> bool {
        let free = slot < TENANT_SLOTS as u32 && self.slots & (1 << slot) == 0;
        if free {
            self.slots |= 1 << slot;
        }
        free
    }

    /// Gives a dead process's slot back, with the memory it held, which is returned.
    pub fn clear_slot(&mut self, slot: u32) -> u64 {
        self.slots &= !(1u64.checked_shl(slot).unwrap_or(0));
        let Some(memory) = &self.memory else { return 0 };
        self.accounts.read(&memory.page);
        let held = (0..MAX_DEVICES).fold(0u64, |sum, device| {
            sum.saturating_add(self.accounts.slot_bytes(slot, device))
        });
        memory.page.clear_slot(slot);
        self.accounts.read(&memory.page);
        held
    }

    /// Reads what its processes hold. Returns how many shared blocks were looked at for that.
    pub fn read_accounts(&mut self) -> usize {
        match &self.memory {
            Some(memory) => self.accounts.read(&memory.page),
            None => 0,
        }
    }

    /// Gives up on missing clients whose process has ended; true where there were any.
    pub fn bury_missing(&mut self) -> bool {
        let (alive, dead): (Vec<Missing>, Vec<Missing>) = std::mem::take(&mut self.missing)
            .into_iter()
            .partition(|client| peer::started_ticks(client.pid) == Some(client.started_ticks));
        self.missing = alive;
        for client in &dead {
            self.clear_slot(client.slot);
        }
        !dead.is_empty()
    }

    /// Clears every slot that nobody has claimed.
    pub fn sweep_slots(&mut self) {
        for slot in 0..TENANT_SLOTS as u32 {
            let taken = self.slots & (1 << slot) != 0;
            if !taken && let Some(memory) = &self.memory {
                memory.page.clear_slot(slot);
            }
        }
    }

    /// Whether anything of it still lives.
    pub fn lives(&self) -> bool {
        self.process.is_some() || !self.clients.is_empty() || !self.missing.is_empty()
    }

    /// Memory that it held on a device when its page was read last, in bytes.
    pub fn used_bytes(&self, device: usize) -> u64 {
        self.accounts.used_bytes(device)
    }

    /// Most memory that it ever held on a device, in bytes.
    pub fn peak_bytes(&self, device: usize) -> u64 {
        self.accounts.peak_bytes(device)
    }
}

#[cfg(test)]
pub(crate) fn example(id: u64, name: &str) -> Tenant {
    let spec = Spec {
        name: name.into(),
        class: Class::Guaranteed,
        share: None,
        share_min: None,
        share_max: None,
        gang: None,
        deadline_unix_ms: None,
        work_ns: None,
        paused: false,
        mem: None,
        devices: Vec::new(),
        pid: 0,
        command: Vec::new(),
        driver: PathBuf::new(),
        simulated: true,
        on_loss: FailMode::Open,
        iteration_launches: None,
        evictable: false,
        overflow: Overflow::Fail,
        host_memory: None,
        evicted: false,
    };
    Tenant::new(
        TenantId(id),
        spec,
        [b'0'; TOKEN_BYTES],
        (1, "one".into()),
        0,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_handed_out_once_and_come_back_empty() {
        let mut tenant = example(1, "a");
        let memory = TenantMemory::create().expect("page");
        tenant.accounts.use_slots(&memory.page, 64);
        for slot in 0..64 {
            assert_eq!(tenant.take_slot(), Some(slot));
        }
        assert_eq!(tenant.take_slot(), None);
        let account = channel::Account::new(&memory.page, 7).expect("slot");
        account.reserve(3, 500, u64::MAX).expect("no limit");
        tenant.memory = Some(memory);
        tenant.read_accounts();
        assert_eq!(tenant.used_bytes(3), 500);
        assert_eq!(tenant.clear_slot(7), 500);
        assert_eq!((tenant.used_bytes(3), tenant.peak_bytes(3)), (0, 500));
        assert!(!tenant.take_this_slot(6) && !tenant.take_this_slot(64));
        assert_eq!(tenant.take_slot(), Some(7));
    }

    #[test]
    fn a_missing_client_whose_process_is_gone_is_buried() {
        let mut tenant = example(1, "a");
        let us = std::process::id();
        let ours = peer::started_ticks(us).expect("we live");
        for (slot, started_ticks) in [(0, ours), (1, ours + 1)] {
            assert!(tenant.take_this_slot(slot));
            tenant.missing.push(Missing {
                pid: us,
                started_ticks,
                slot,
                journal_next: 0,
            });
        }
        assert!(tenant.bury_missing());
        assert_eq!(tenant.missing.len(), 1);
        assert!(tenant.lives() && !tenant.bury_missing());
        assert_eq!(tenant.take_slot(), Some(1));
    }
}
