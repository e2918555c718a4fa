//! Clients that are in: processes of jobs with their pages, their doorbells and their journals.
//!
//! Owns every attached client by its number. A client's doorbell is listened to unless it is muted
//! (it rang too often, and is only looked at once a period) or hung up (its other end is closed),
//! and no longer than it is in. What a client writes into its journal is read once, and what no
//! library of ours writes there is counted against its job.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use channel::arbiter::{Bell, ClientPages};
use channel::{BadRecord, MAX_DEVICES, Record};
use policy::TenantId;

use crate::peer;
use crate::reactor::{Event, Interest, Poller};
use crate::tally::Tally;

/// Doorbells answered one by one within a housekeeping period; beyond them the client is only
/// looked at once a period. A waiting thread rings once, and a gate opens and closes some hundred
/// times a second.
const RINGS_PER_PERIOD: u32 = 2000;
/// Doorbells within a period that came although one before them was not answered yet. Our library
/// sends none of these but from threads that ring in the same moment ([`channel::LastBell`]),
/// however often the program has it ring; a peer that floods sends no others.
const NEEDLESS_PER_PERIOD: u32 = 4096;
/// Periods in a row with too many of these that make a flood: half a second of it.
const FLOOD_PERIODS: u32 = 5;

/// An attached client.
#[derive(Debug)]
pub struct Client {
    /// Whose.
    pub tenant: TenantId,
    /// Process id.
    pub pid: u32,
    /// Start time of the process in clock ticks since boot; with the pid it names a process for
    /// good.
    pub started_ticks: u64,
    /// Readable once the process has ended.
    pub process: OwnedFd,
    /// Both halves.
    pub pages: Rc<ClientPages>,
    /// Slot in the tenant's page.
    pub slot: u32,
    /// Devices it can be granted, as bits.
    pub devices: u32,
    /// What its own driver says that each device has, in bytes: a little less than NVML says. 0:
    /// unknown.
    pub totals: [u64; MAX_DEVICES],
    /// Devices of its driver that the job may not use: ordinal and UUID.
    pub other_devices: Vec<(u32, [u8; 16])>,
    /// Of those, the ones that it uses, or would if it used any.
    pub ungoverned: Vec<[u8; 16]>,
    /// Name of the program, for people.
    pub command: String,
    /// When it attached.
    pub attached_unix_ms: u64,
    /// What it rings on. Kept open: closing it says goodbye. `None` until the welcome is sent.
    socket: Option<OwnedFd>,
    /// The other side has closed its end.
    hung_up: bool,
    /// Doorbells answered in this period.
    rings: u32,
    /// Doorbells in it that came although one before them was not answered yet.
    needless: u32,
    /// Its doorbell is not listened to until the period ends.
    muted: bool,
    /// Periods in a row with too many needless ones.
    floods: u32,
    /// Number of its last question about space that was heard.
    asked: u32,
    /// What it has submitted, to all devices.
    launches: Cell<Tally>,
    /// Next record to read from its ring.
    journal_next: u64,
    /// Records in its ring that no library of ours writes, since that was looked at last.
    bad_records: u32,
    /// Number of the last question about ended processes that was answered.
    credit_answered: u32,
}

/// What a client has written into its ring since that was read last.
#[derive(Debug)]
pub struct Records {
    /// In their order.
    pub records: Vec<Result<Record, BadRecord>>,
    /// So many before them were overwritten unread.
    pub missed: u64,
}

/// What a client does that no library of ours does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Breach {
    /// It rings without end.
    Flood,
    /// It writes nonsense into its ring.
    Nonsense,
}

impl Client {
    /// Of a process, with its pages: nothing else is known of it, and it has no doorbell yet. The
    /// first of its records to be read is `journal_next`.
    pub fn new(
        tenant: TenantId,
        (pid, process): (u32, OwnedFd),
        pages: Rc<ClientPages>,
        journal_next: u64,
    ) -> Self {
        Self {
            tenant,
            pid,
            started_ticks: 0,
            process,
            pages,
            slot: channel::NO_SLOT,
            devices: 0,
            totals: [0; MAX_DEVICES],
            other_devices: Vec::new(),
            ungoverned: Vec::new(),
            command: String::new(),
            attached_unix_ms: 0,
            socket: None,
            hung_up: false,
            rings: 0,
            needless: 0,
            muted: false,
            floods: 0,
            asked: 0,
            launches: Cell::new(Tally::whole()),
            journal_next,
            bad_records: 0,
            credit_answered: 0,
        }
    }

    /// Whether the other end of its doorbell is closed by now.
    fn has_hung_up(&self) -> bool {
        let socket = self.socket.as_ref();
        self.hung_up || socket.is_some_and(|socket| channel::arbiter::has_hung_up(socket.as_fd()))
    }

    /// The question about ended processes of its job that is still to be answered.
    pub fn credit_asked(&self) -> Option<u32> {
        let asked = self.pages.client.credit_asked();
        (asked != self.credit_answered).then_some(asked)
    }

    /// Answers it.
    pub fn answer_credit(&mut self, asked: u32) {
        self.credit_answered = asked;
        self.pages.arbiter.answer_credit(asked);
    }

    /// What it has submitted, to all devices: never less than before, whatever it writes.
    pub fn launches(&self) -> u64 {
        let mut launches = self.launches.get();
        let total = launches.look(self.pages.client.launches());
        self.launches.set(launches);
        total
    }

    /// Indices of its devices.
    pub fn device_indices(&self) -> impl Iterator<Item = usize> + use<> {
        let devices = self.devices;
        (0..MAX_DEVICES).filter(move |device| devices & (1 << device) != 0)
    }

    /// Next record to read from its ring.
    pub fn journal_next(&self) -> u64 {
        self.journal_next
    }

    /// Reads what it has written since; `None`: nothing.
    pub fn read_records(&mut self) -> Option<Records> {
        let (before, mut records) = (self.journal_next, Vec::new());
        let ring = &self.pages.client;
        let missed = ring.read_records(&mut self.journal_next, |record| records.push(record));
        if self.journal_next == before {
            return None;
        }
        let sound = |record: &Record| (record.device as usize) < MAX_DEVICES;
        let bad = records
            .iter()
            .filter(|read| !read.as_ref().is_ok_and(sound));
        self.bad_records += u32::try_from(bad.count()).unwrap_or(u32::MAX);
        Some(Records { records, missed })
    }

    /// It submits to a device of its driver that its job may not use; which one, where that is new.
    pub fn uses_other(&mut self, ordinal: u32) -> Option<[u8; 16]> {
        let mut others = self.other_devices.iter();
        let (_, uuid) = others.find(|(at, _)| *at == ordinal)?;
        if self.ungoverned.contains(uuid) {
            return None;
        }
        self.ungoverned.push(*uuid);
        Some(*uuid)
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Clients {
    all: BTreeMap<u64, Client>,
}

impl Clients {
    /// One of them.
    pub fn get(&self, id: u64) -> Option<&Client> {
        self.all.get(&id)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, id: u64) -> Option<&mut Client> {
        self.all.get_mut(&id)
    }

    /// All of them, in the order in which they came.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Client)> {
        self.all.iter().map(|(id, client)| (*id, client))
    }

    /// Their numbers.
    pub fn ids(&self) -> Vec<u64> {
        self.all.keys().copied().collect()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether any of them is this process.
    pub fn has_process(&self, pid: u32) -> bool {
        self.all.values().any(|client| client.pid == pid)
    }

    /// Whether any of them is this process and can use a device.
    pub fn has_user(&self, pid: u32) -> bool {
        let mut all = self.all.values();
        all.any(|client| client.pid == pid && client.slot != channel::NO_SLOT)
    }

    /// Devices of these clients together, as bits.
    pub fn devices_of(&self, ids: &[u64]) -> u32 {
        let clients = ids.iter().filter_map(|id| self.get(*id));
        clients.fold(0, |devices, client| devices | client.devices)
    }

    /// Devices of any of them, as bits.
    pub fn devices(&self) -> u32 {
        let all = self.all.values();
        all.fold(0, |devices, client| devices | client.devices)
    }

    /// Whether a client is what a process was before it said hello again: its end is closed, it
    /// has that slot, or the process has executed another program since. The kernel is asked: what
    /// it has to say about the end may be waiting behind the hello.
    pub fn is_former(&self, id: u64, pid: u32, slot: Option<u32>) -> bool {
        self.get(id).is_some_and(|client| {
            client.pid == pid
                && (slot == Some(client.slot)
                    || client.has_hung_up()
                    // A child that it forked before may hold the socket's other end.
                    || client.pages.are_mapped_by(pid) == Some(false))
        })
    }

    /// Takes one in. It is [listened to](Self::watch) once it was welcomed.
    pub fn insert(&mut self, id: u64, client: Client) {
        self.all.insert(id, client);
    }

    /// Waits for the end of a client, and for what it rings on, where it has something.
    ///
    /// # Errors
    /// The set of descriptors does not take them.
    pub fn watch(&mut self, id: u64, socket: Option<OwnedFd>, poller: &Poller) -> io::Result<()> {
        let Some(client) = self.all.get_mut(&id) else {
            return Ok(());
        };
        // After the welcome: the client waits for that, and nobody asks for this before.
        client.started_ticks = peer::started_ticks(client.pid)?.unwrap_or(0);
        if let Some(socket) = socket {
            let socket = client.socket.insert(socket);
            poller.add(&*socket, Event::Doorbell(id), Interest::Bell)?;
        }
        poller.add(&client.process, Event::ClientEnded(id), Interest::Read)
    }

    /// Lets one go.
    pub fn remove(&mut self, id: u64, poller: &Poller) -> Option<Client> {
        let client = self.all.remove(&id)?;
        if let Some(socket) = &client.socket {
            poller.remove(socket);
        }
        Some(client)
    }

    /// Answers a doorbell: what it did, and why its process has refused itself, where it has. Its
    /// devices are looked at after this.
    pub fn answer(&self, id: u64) -> Option<(Bell, Option<String>)> {
        let client = self.get(id)?;
        let mut farewell = None;
        let socket = client.socket.as_ref()?.as_fd();
        let bell = channel::arbiter::answer_bell(socket, &mut farewell);
        client.pages.arbiter.answer_bells();
        Some((bell, farewell))
    }

    /// The number of a client's question about space, where it has asked one since that was looked
    /// at last.
    pub fn take_question(&mut self, id: u64) -> Option<u32> {
        let client = self.all.get_mut(&id)?;
        let number = client.pages.client.space_asked();
        (std::mem::replace(&mut client.asked, number) != number).then_some(number)
    }

    /// One has rung by so many messages, and is muted where that was once too often; the devices to
    /// look at, as bits.
    pub fn count_rings(&mut self, id: u64, bells: u32, poller: &Poller) -> u32 {
        let Some(client) = self.all.get_mut(&id) else {
            return 0;
        };
        client.rings += 1;
        client.needless = client.needless.saturating_add(bells.saturating_sub(1));
        let too_often = client.rings > RINGS_PER_PERIOD || client.needless > NEEDLESS_PER_PERIOD;
        if too_often && !client.muted {
            client.muted = true;
            if let Some(socket) = &client.socket {
                poller.remove(socket);
            }
            let pid = client.pid;
            tracing::debug!("process {pid} rings too often; it is looked at ten times a second");
        }
        client.devices
    }

    /// A new period begins for one; the devices to look at for it, as bits.
    pub fn begin_period(&mut self, id: u64, poller: &Poller) -> u32 {
        let Some(client) = self.all.get_mut(&id) else {
            return 0;
        };
        client.rings = 0;
        let flooded = std::mem::take(&mut client.needless) > NEEDLESS_PER_PERIOD;
        client.floods = if flooded { client.floods + 1 } else { 0 };
        if client.hung_up {
            // It has no bell any more. Where it waits it is seen here.
            return client.devices;
        }
        if !std::mem::take(&mut client.muted) {
            return 0;
        }
        if let Some(socket) = &client.socket {
            let _ = poller.add(socket, Event::Doorbell(id), Interest::Bell);
        }
        client.devices
    }

    /// The other end of one's doorbell is closed.
    pub fn hang_up(&mut self, id: u64, poller: &Poller) {
        let Some(client) = self.all.get_mut(&id) else {
            return;
        };
        client.hung_up = true;
        if let Some(socket) = &client.socket {
            poller.remove(socket);
        }
    }

    /// What clients do that no library of ours does, since that was asked last, each with its
    /// devices as bits.
    pub fn take_breaches(&mut self) -> Vec<(u32, TenantId, Breach)> {
        let mut found = Vec::new();
        for client in self.all.values_mut() {
            if client.floods >= FLOOD_PERIODS {
                found.push((client.devices, client.tenant, Breach::Flood));
            }
            if std::mem::take(&mut client.bad_records) > 0 {
                found.push((client.devices, client.tenant, Breach::Nonsense));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: u64 = 7;

    fn clients() -> (Clients, Poller) {
        let flags = rustix::process::PidfdFlags::empty();
        let process = rustix::process::pidfd_open(rustix::process::getpid(), flags);
        let process = process.expect("this process");
        let pages = Rc::new(ClientPages::create().expect("pages"));
        let mut client = Client::new(TenantId(1), (std::process::id(), process), pages, 0);
        client.devices = 0b101;
        client.other_devices = vec![(1, [9; 16])];
        let mut clients = Clients::default();
        clients.insert(ID, client);
        (clients, Poller::new().expect("an epoll set"))
    }

    /// A period in which it rings by so many messages for each answer.
    fn rings(clients: &mut Clients, poller: &Poller, answers: u32, bells: u32) -> u32 {
        for _ in 0..answers {
            assert_eq!(clients.count_rings(ID, bells, poller), 0b101);
        }
        clients.begin_period(ID, poller)
    }

    #[test]
    fn one_that_rings_too_often_is_muted_for_a_period_and_that_alone_is_no_violation() {
        let (mut clients, poller) = clients();
        let mut breaches = 0;
        for _ in 0..10 * FLOOD_PERIODS {
            assert_eq!(rings(&mut clients, &poller, RINGS_PER_PERIOD, 1), 0);
            assert_eq!(rings(&mut clients, &poller, RINGS_PER_PERIOD + 1, 1), 0b101);
            // Threads that ring in the same moment.
            let few = NEEDLESS_PER_PERIOD / 8;
            assert_eq!(rings(&mut clients, &poller, few, 1 + 8), 0);
            breaches += clients.take_breaches().len();
        }
        assert_eq!(breaches, 0);
    }

    #[test]
    fn one_that_rings_again_before_it_is_answered_floods_after_some_periods() {
        let (mut clients, poller) = clients();
        for _ in 0..FLOOD_PERIODS {
            assert_eq!(clients.take_breaches(), []);
            let answers = NEEDLESS_PER_PERIOD / 8 + 1;
            assert_eq!(rings(&mut clients, &poller, answers, 1 + 8), 0b101);
        }
        let flood = (0b101, TenantId(1), Breach::Flood);
        assert_eq!(clients.take_breaches(), [flood]);
        assert_eq!(clients.begin_period(ID, &poller), 0, "it was quiet");
        assert_eq!(clients.take_breaches(), []);
    }

    #[test]
    fn one_that_has_hung_up_is_looked_at_every_period() {
        let (mut clients, poller) = clients();
        assert_eq!(clients.begin_period(ID, &poller), 0);
        let pid = std::process::id();
        assert!(!clients.is_former(ID, pid, None));
        clients.hang_up(ID, &poller);
        assert_eq!(clients.begin_period(ID, &poller), 0b101);
        assert!(clients.is_former(ID, pid, None) && !clients.is_former(ID, pid + 1, None));
        assert!(clients.remove(ID, &poller).is_some() && clients.is_empty());
    }

    #[test]
    fn a_device_that_is_not_the_jobs_is_reported_once() {
        let (mut clients, _) = clients();
        let client = clients.get_mut(ID).expect("a client");
        assert_eq!(client.uses_other(0), None, "it may use that one");
        assert_eq!(client.uses_other(1), Some([9; 16]));
        assert_eq!(client.uses_other(1), None);
        assert!(client.read_records().is_none());
    }
}
