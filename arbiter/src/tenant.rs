//! A tenant: one job with its terms, its processes and the page in which they account their memory.

use std::os::fd::OwnedFd;

use channel::arbiter::TenantMemory;
use channel::wire::TOKEN_BYTES;
use channel::{Accounts, MAX_DEVICES, TENANT_SLOTS};
use control::place::Identity;
use control::{EscapedProcess, JobStatus, Layer};
use policy::TenantId;

use crate::census::Process;
use crate::clock::Clock;
use crate::container::{InContainer, Origin, is_nameless};
use crate::journal::{About, Allowance};
use crate::peer;
use crate::spec::Spec;
use crate::usage::Usage;

/// A job.
#[derive(Debug)]
pub struct Tenant {
    /// Its number.
    pub id: TenantId,
    /// Its terms.
    pub spec: Spec,
    /// Who registered it, beside its user.
    pub identity: Identity,
    /// The container whose processes are this job; `None`: it has a launcher.
    pub container: Option<InContainer>,
    /// What the container is known by in which it was registered; empty: it was in none.
    pub registered_in: String,
    /// Its part of what its user's jobs have together, where that has become less than they had.
    pub user_caps: Vec<Layer>,
    /// A process that presents it belongs to this job.
    pub token: [u8; TOKEN_BYTES],
    /// User who registered it.
    pub uid: u32,
    /// Login name of `uid`; empty where the host does not know it.
    pub user: String,
    /// Readable once the registering process has ended; `None`: it has.
    pub process: Option<OwnedFd>,
    /// Start time of that process.
    pub started_ticks: u64,
    /// Processes that have joined the registering one; the first of them takes its place when it
    /// ends.
    pub joined: Vec<Process>,
    /// When it registered.
    pub started_unix_ms: u64,
    /// Where its processes account their memory; made for the first one.
    pub memory: Option<TenantMemory>,
    /// What that page said when it was read last.
    pub accounts: Accounts,
    /// Taken slots of that page, as bits.
    slots: Vec<u64>,
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
    /// Bytes that the largest of these asked for, and the limit that was in force then.
    pub oom_largest_bytes: u64,
    pub oom_limit_bytes: u64,
    /// Submissions of clients that have gone.
    pub launches_gone: u64,
    /// Journal lines that it may still cause.
    pub allowance: Allowance,
    /// The size that it was asked to change to, and when.
    pub resize: Option<(channel::Resize, u64)>,
    /// Number of the last such request.
    pub resized: u64,
    /// Questions whether processes of it have ended are not answered before that.
    pub credit_again_ns: u64,
    /// When it registered, in clock ticks since boot: no older process belongs to it.
    pub since_ticks: u64,
    /// Session that its launcher led; 0: none.
    pub session: u32,
    /// Processes that belong to it without being attached, as they were last seen.
    pub members: Vec<Process>,
    /// Its launcher is gone and nothing of it is attached.
    pub dormant: Option<Dormant>,
    /// Processes of it that used a device outside its limits; some of them, if there were many.
    pub escaped: Vec<EscapedProcess>,
    /// How many there were.
    pub escaped_count: u64,
    /// It is being ended, and why, as a clause after "because".
    pub ending: Option<String>,
    /// What it had used of each device before it was dormant.
    pub usages: Vec<(usize, Usage)>,
    /// What the turn of its group means for it.
    pub turn: TurnTerms,
    /// That its latency target is not met was reported: as what, and when that was the case last.
    pub unmet: Option<(&'static str, u64)>,
    /// Most memory ever held on each device, before the page that is there.
    peaks: [u64; MAX_DEVICES],
}

/// What the turn of its group means for a job; of a job in no group nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TurnTerms {
    /// It is not its turn: its gate stays closed.
    pub is_over: bool,
    /// Another one's turn has begun since: its memory leaves.
    pub is_away: bool,
    /// It was reported that it waits for a turn that it has not asked for.
    pub was_reported: bool,
}

/// What is left of a job without launcher and clients: it has neither share nor memory, and its
/// token is still good.
#[derive(Debug)]
pub struct Dormant {
    /// Since when.
    pub since_unix_ms: u64,
    /// The same on the monotonic clock.
    pub since_ns: u64,
    /// Living processes of it, once they were counted.
    pub living: Option<u32>,
    /// How it stood before.
    pub status: Option<Box<JobStatus>>,
    /// What it had used of each device.
    pub usages: Vec<(usize, Usage)>,
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

impl Tenant {
    /// For a line of the journal about it.
    pub fn about(&self) -> About<'_> {
        About::job(&self.spec.name, self.id.0)
    }

    /// Whether it is a container of this key, or was registered in it. The kernel uses the number
    /// of a PID namespace again once nobody is in it.
    pub fn is_of_container(&self, key: &str) -> bool {
        self.registered_in == key && (self.process.is_some() || !is_nameless(key))
    }

    /// Whether its user may change it from there: the users of a container have the numbers of
    /// others on the host, root's above all.
    pub fn is_in_reach_of(&self, origin: &Origin) -> bool {
        match origin {
            // Whose job it is is another question.
            Origin::Here | Origin::Remote(_) => true,
            Origin::Container(key) => self.is_of_container(key),
            Origin::Unknown | Origin::NotLookedAt => false,
        }
    }

    /// A new job.
    pub fn new(
        id: TenantId,
        spec: Spec,
        token: [u8; TOKEN_BYTES],
        (uid, user): (u32, String),
        clock: &Clock,
    ) -> Self {
        let now_ns = clock.mono_ns();
        Self {
            id,
            spec,
            identity: Identity::default(),
            container: None,
            registered_in: String::new(),
            user_caps: Vec::new(),
            token,
            uid,
            user,
            process: None,
            started_ticks: 0,
            joined: Vec::new(),
            started_unix_ms: clock.unix_ms(),
            memory: None,
            accounts: Accounts::new(),
            slots: Vec::new(),
            has_attached: false,
            promises: true,
            registered_ns: now_ns,
            saved_as: 0,
            clients: Vec::new(),
            missing: Vec::new(),
            adopt_until_ns: 0,
            limits: [None; MAX_DEVICES],
            oom_count: 0,
            oom_largest_bytes: 0,
            oom_limit_bytes: 0,
            launches_gone: 0,
            allowance: Allowance::new(now_ns),
            resize: None,
            resized: 0,
            credit_again_ns: 0,
            since_ticks: clock.boot_ticks(),
            session: 0,
            members: Vec::new(),
            dormant: None,
            escaped: Vec::new(),
            escaped_count: 0,
            ending: None,
            usages: Vec::new(),
            turn: TurnTerms::default(),
            unmet: None,
            peaks: [0; MAX_DEVICES],
        }
    }

    /// Takes the lowest free slot below `most`: the sum of the page goes over all slots up to the
    /// highest that is taken.
    pub fn take_slot(&mut self, most: u32) -> Option<u32> {
        let free = |(at, bits): (usize, &u64)| {
            // CAST: slots are some thousands.
            (*bits != u64::MAX).then(|| at as u32 * 64 + bits.trailing_ones())
        };
        let slot = self.slots.iter().enumerate().find_map(free);
        let slot = slot.unwrap_or(self.slots.len() as u32 * 64);
        (slot < most && self.take_this_slot(slot)).then_some(slot)
    }

    /// Takes this slot; false where it is taken or there is none.
    pub fn take_this_slot(&mut self, slot: u32) -> bool {
        let free = slot < TENANT_SLOTS as u32 && !self.has_slot(slot);
        if free {
            let at = slot as usize / 64;
            if self.slots.len() <= at {
                self.slots.resize(at + 1, 0);
            }
            self.slots[at] |= 1 << (slot % 64);
        }
        free
    }

    fn has_slot(&self, slot: u32) -> bool {
        let bits = self.slots.get(slot as usize / 64).copied().unwrap_or(0);
        bits & (1 << (slot % 64)) != 0
    }

    /// The highest slot that is taken, plus one.
    pub fn slots_used(&self) -> u32 {
        let last = self.slots.iter().rposition(|bits| *bits != 0);
        // CAST: slots are some thousands.
        last.map_or(0, |at| at as u32 * 64 + 64 - self.slots[at].leading_zeros())
    }

    /// Writes to the page which slots are in use. While processes of an earlier arbiter may still
    /// come with slots of theirs, none is left out.
    pub fn publish_slots(&mut self) {
        let used = match self.adopt_until_ns {
            0 => self.slots_used(),
            _ => self.slots_used().max(self.accounts.slots()),
        };
        if let Some(memory) = &self.memory {
            self.accounts.use_slots(&memory.page, used);
        }
    }

    /// Gives a dead process's slot back, with the memory it held, which is returned.
    pub fn clear_slot(&mut self, slot: u32) -> u64 {
        if let Some(bits) = self.slots.get_mut(slot as usize / 64) {
            *bits &= !(1 << (slot % 64));
        }
        let Some(memory) = &self.memory else { return 0 };
        self.accounts.read(&memory.page);
        let held = (0..MAX_DEVICES).fold(0u64, |sum, device| {
            sum.saturating_add(self.accounts.slot_bytes(slot, device))
        });
        memory.page.clear_slot(slot);
        self.publish_slots();
        self.read_accounts();
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
    pub fn reap_missing(&mut self) -> bool {
        let (alive, dead): (Vec<Missing>, Vec<Missing>) = std::mem::take(&mut self.missing)
            .into_iter()
            .partition(|client| {
                // What it holds is not free before it is known to have ended.
                peer::is_alive(client.pid, client.started_ticks).unwrap_or(true)
            });
        self.missing = alive;
        for client in &dead {
            self.clear_slot(client.slot);
        }
        !dead.is_empty()
    }

    /// Clears every slot that nobody has claimed.
    pub fn sweep_slots(&mut self) {
        let used = self.accounts.slots();
        for slot in (0..used).filter(|slot| !self.has_slot(*slot)) {
            if let Some(memory) = &self.memory {
                memory.page.clear_slot(slot);
            }
        }
        self.publish_slots();
    }

    /// Forgets processes that have joined and have ended since.
    pub fn forget_dead_joined(&mut self) {
        self.joined
            .retain(|one| peer::is_alive(one.pid, one.started_ticks).unwrap_or(true));
    }

    /// Whether anything of it still lives, or may.
    pub fn lives(&self) -> bool {
        self.process.is_some()
            || !self.joined.is_empty()
            || !self.clients.is_empty()
            || !self.missing.is_empty()
    }

    /// Memory that it held on a device when its page was read last, in bytes.
    pub fn used_bytes(&self, device: usize) -> u64 {
        self.accounts.used_bytes(device)
    }

    /// The same without what its processes may yet give back.
    pub fn settled_bytes(&self, device: usize) -> u64 {
        self.accounts.settled_bytes(device)
    }

    /// Most memory that it ever held on a device, in bytes.
    pub fn peak_bytes(&self, device: usize) -> u64 {
        let before = self.peaks.get(device).copied().unwrap_or(0);
        self.accounts.peak_bytes(device).max(before)
    }

    /// Lets the page go in which nobody accounts any more.
    pub fn close_page(&mut self) {
        self.peaks = std::array::from_fn(|device| self.peak_bytes(device));
        self.memory = None;
        self.accounts = Accounts::new();
    }
}

#[cfg(test)]
pub(crate) fn example(id: u64, name: &str) -> Tenant {
    let spec = Spec {
        name: name.into(),
        settings: control::JobSettings::default(),
        bounds: control::Bounds::default(),
        own: control::JobSettings::default(),
        own_caps: Vec::new(),
        unbound: false,
        on_behalf_of: None,
        paused: false,
        pid: 0,
        command: Vec::new(),
        driver: std::path::PathBuf::new(),
        simulated: true,
        evicted: false,
        strict: false,
        any_user: false,
    };
    Tenant::new(
        TenantId(id),
        spec,
        [b'0'; TOKEN_BYTES],
        (1, "one".into()),
        &crate::clock::tests::at(0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_handed_out_once_and_come_back_empty() {
        let mut tenant = example(1, "a");
        let memory = TenantMemory::create().expect("page");
        tenant.accounts.use_slots(&memory.page, 70);
        for slot in 0..70 {
            assert_eq!(tenant.take_slot(70), Some(slot));
        }
        assert_eq!((tenant.take_slot(70), tenant.slots_used()), (None, 70));
        let account = channel::Account::new(&memory.page, 7).expect("slot");
        account.reserve(3, 500, u64::MAX).expect("no limit");
        tenant.memory = Some(memory);
        tenant.read_accounts();
        assert_eq!(tenant.used_bytes(3), 500);
        assert_eq!(tenant.clear_slot(7), 500);
        assert_eq!((tenant.used_bytes(3), tenant.peak_bytes(3)), (0, 500));
        assert!(!tenant.take_this_slot(6) && !tenant.take_this_slot(TENANT_SLOTS as u32));
        assert_eq!(tenant.take_slot(70), Some(7));
        // Who sums looks no further than the highest that is taken.
        (3..70).for_each(|slot| {
            tenant.clear_slot(slot);
        });
        let page = &tenant.memory.as_ref().expect("page").page;
        assert_eq!((tenant.slots_used(), page.slots_used()), (3, 3));
    }

    #[test]
    fn a_job_is_changed_from_its_own_container_and_from_the_host() {
        let reach =
            |tenant: &Tenant, key: &str| tenant.is_in_reach_of(&Origin::Container(key.into()));
        let mut tenant = example(1, "a");
        assert!(tenant.is_in_reach_of(&Origin::Here));
        assert!(!tenant.is_in_reach_of(&Origin::Unknown) && !reach(&tenant, "/docker/0"));
        tenant.registered_in = "/docker/0".into();
        assert!(reach(&tenant, "/docker/0") && !reach(&tenant, "/docker/1"));
        tenant.registered_in = "pid:[4026532180]".into();
        assert!(
            !reach(&tenant, "pid:[4026532180]"),
            "that number may be another's by now"
        );
        tenant.process = Some(tempfile::tempfile().expect("a descriptor").into());
        assert!(reach(&tenant, "pid:[4026532180]"));
    }

    #[test]
    fn a_missing_client_whose_process_is_gone_is_reaped() {
        let mut tenant = example(1, "a");
        let us = std::process::id();
        let ours = peer::started_ticks(us).expect("a line").expect("we live");
        for (slot, started_ticks) in [(0, ours), (1, ours + 1)] {
            assert!(tenant.take_this_slot(slot));
            tenant.missing.push(Missing {
                pid: us,
                started_ticks,
                slot,
                journal_next: 0,
            });
        }
        assert!(tenant.reap_missing());
        assert_eq!(tenant.missing.len(), 1);
        assert!(tenant.lives() && !tenant.reap_missing());
        assert_eq!(tenant.take_slot(64), Some(1));
    }
}
