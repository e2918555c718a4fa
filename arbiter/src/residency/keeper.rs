//! The residency of one device: who is where, who goes next, and how far that is.
//!
//! Driven by the lane, which tells who wants the device and whose work has ended ([`Guest`]), closes the gates of those that
//! are not [in](Standing::may_run), and asks for a switch where its policy grants a slice to one that is out. A *departure* is: the gate
//! is closed, the tail ends, the host is asked for room, the order goes out to every process of the job, all of them
//! answer; if one refuses, those that have left are called back, so that a job is never half away. An *arrival* is ordered as
//! soon as every departure before it is: what comes takes the memory as what leaves gives it back, and both directions of the
//! link are at work.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use channel::Verb;
use channel::arbiter::ClientPages;
use policy::residency::{Arbitration, Link, Lodger, Lodgers, Standing};
use policy::{Class, TenantId};

use super::books::HostBooks;
use super::station::{State, Station, Why};

/// How long a job's work may take to end once its gate is closed, before its processes are told to see to it themselves.
/// TIMEOUT: tails end within the in-flight window, milliseconds; kernels of a second are rare.
const DRAIN_NS: u64 = 1_000_000_000;
/// Beside what the bytes take at a quarter of the measured rate. TIMEOUT: pinning the host's memory for the first time goes at a
/// few GB/s, and a loaded host lets a thread wait.
const ORDER_NS: u64 = 20_000_000_000;
/// How long one that could not be moved is left alone, at first and at most.
const BACKOFF_NS: u64 = 500_000_000;
const BACKOFF_MAX_NS: u64 = 30_000_000_000;
/// Between two looks at moves. Answers ring the doorbell as well.
const LOOK_NS: u64 = 500_000;
/// Between two looks at who waits.
const TICK_NS: u64 = 20_000_000;
/// Least bytes from which a rate is learnt.
const LEARN_BYTES: u64 = 32 << 20;
/// Host memory is moved back and forth for no less than this, or for all that is missing.
const FIT_BYTES: u64 = 64 << 20;
/// And no sooner than this after the last time.
const FIT_NS: u64 = 1_000_000_000;

/// A tenant as its lane sees it.
#[derive(Clone, Copy, Debug)]
pub struct Guest<'a> {
    pub id: TenantId,
    pub class: Class,
    pub weight_ppm: u32,
    pub arrived_ns: u64,
    /// It would run if it were in, as far as its terms let it.
    pub wants: bool,
    /// It is at work on the device, or was a moment ago.
    pub active: bool,
    /// Its gate is closed and nothing of it runs.
    pub drained: bool,
    pub terms: Lodging,
    pub clients: &'a [(u64, Rc<ClientPages>)],
}

/// What a job's terms say about its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lodging {
    /// It may leave the device.
    pub evictable: bool,
    /// What is beyond its limit may live in host memory.
    pub overflow: bool,
    /// Its operator keeps it away.
    pub kept_away: bool,
    /// Its own limit of host memory in bytes.
    pub host_bytes: Option<u64>,
    /// Its limit on this device in bytes.
    pub limit_bytes: Option<u64>,
    /// What it is charged on this device in bytes.
    pub used_bytes: u64,
}

/// What a tenant is in the middle of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    /// Nothing.
    #[default]
    Settled,
    /// Its work is to end first.
    Draining { verb: Verb, since_ns: u64 },
    /// Its processes were told.
    Ordered { verb: Verb },
    /// It comes when every departure has been ordered.
    Called,
}

/// One tenant.
#[derive(Clone, Debug, Default)]
struct Record {
    phase: Phase,
    standing: Standing,
    since_ns: u64,
    active_ns: u64,
    fixed_bytes: u64,
    stuck_until_ns: u64,
    backoff_ns: u64,
    fitted_ns: u64,
    /// Called back by its operator, whether it wants the device or not.
    wished: bool,
    /// What is under way was asked for by hand, and its figures are told.
    by_hand: bool,
    /// For whom a switch is on: it is the reason for what keeps the device, since then.
    switch_ns: Option<u64>,
    figures: Figures,
}

/// What is told about a tenant.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Figures {
    pub evictions: u64,
    pub restores: u64,
    pub moving_ns: u64,
    /// Why the last thing asked of it was not done.
    pub reason: String,
    /// Of the last move: when it was asked for, when its work had ended, when it was over; 0: not yet.
    pub asked_ns: u64,
    pub drained_ns: u64,
    pub ended_ns: u64,
    /// Copied by the last move, both ways.
    pub copied_bytes: u64,
    /// The last thing asked of it was not done.
    pub failed: bool,
}

/// Where a tenant is, for reports.
#[derive(Clone, PartialEq, Debug)]
pub struct Whereabouts {
    pub state: State,
    pub evictable_bytes: u64,
    pub resident_bytes: u64,
    pub fixed_bytes: u64,
    pub host_bytes: u64,
    pub moved_out_bytes: u64,
    pub moved_in_bytes: u64,
    pub standing: Standing,
    pub parked: bool,
    /// Nothing is under way.
    pub settled: bool,
    pub figures: Figures,
}

/// Something that people want to know of.
#[derive(Clone, PartialEq, Debug)]
pub enum News {
    /// It could not be moved.
    NotMoved {
        id: TenantId,
        verb: Verb,
        why: String,
    },
    /// It is left aside, or no longer.
    Parked { id: TenantId, parked: bool },
}

/// One device.
#[derive(Debug)]
pub struct Keeper {
    device: usize,
    capacity_bytes: u64,
    arbitration: Arbitration,
    books: Rc<RefCell<HostBooks>>,
    stations: BTreeMap<u64, (TenantId, Station)>,
    records: BTreeMap<TenantId, Record>,
    /// When memory was last on its way.
    moved_ns: u64,
    news: Vec<News>,
    lodgers: Vec<Lodger>,
}

impl Keeper {
    /// Of a device whose jobs all stay.
    pub fn new(device: usize) -> Self {
        Self {
            device,
            capacity_bytes: 0,
            arbitration: Arbitration::new(10.0),
            books: Rc::default(),
            stations: BTreeMap::new(),
            records: BTreeMap::new(),
            moved_ns: 0,
            news: Vec::new(),
            lodgers: Vec::new(),
        }
    }

    /// How long jobs stay, and the books that all devices share.
    pub fn set_up(&mut self, slice_over_switch: f64, books: &Rc<RefCell<HostBooks>>) {
        self.arbitration.set_slice_over_switch(slice_over_switch);
        self.books = Rc::clone(books);
    }

    /// What the device has for jobs; 0: not known.
    pub fn set_capacity(&mut self, capacity_bytes: u64) {
        self.capacity_bytes = capacity_bytes;
    }

    /// Whether memory has been on its way since `since_ns`.
    pub fn has_moved(&self, since_ns: u64) -> bool {
        self.moved_ns >= since_ns
    }

    /// A client comes.
    pub fn add(&mut self, tenant: TenantId, client: u64, pages: &ClientPages) {
        if pages.arbiter.residency().evictable {
            let station = Station::new(pages, self.device);
            self.stations.insert(client, (tenant, station));
        }
    }

    /// A client is gone.
    pub fn remove(&mut self, client: u64) {
        self.stations.remove(&client);
        self.books.borrow_mut().forget(client);
    }

    /// A tenant is gone.
    pub fn retire(&mut self, tenant: TenantId) {
        self.records.remove(&tenant);
    }

    /// The operator calls a tenant back; it comes although it may not want the device.
    pub fn wish(&mut self, now_ns: u64, tenant: TenantId) {
        let record = self.records.entry(tenant).or_default();
        record.wished = true;
        record.ask(now_ns);
    }

    /// The operator sends a tenant away: what was tried before counts no longer.
    pub fn dismiss(&mut self, now_ns: u64, tenant: TenantId) {
        let record = self.records.entry(tenant).or_default();
        record.wished = false;
        record.ask(now_ns);
    }

    /// Whether a tenant's gate may be open.
    pub fn standing(&self, tenant: TenantId) -> Standing {
        self.records
            .get(&tenant)
            .map_or(Standing::In, |record| record.standing)
    }

    /// Looks at every move, begins those that are due, and says when to look again; `None`: nobody can be moved.
    pub fn step(&mut self, now_ns: u64, guests: &[Guest<'_>]) -> Option<u64> {
        if self.stations.is_empty() {
            self.records.clear();
            return None;
        }
        self.records
            .retain(|id, _| guests.iter().any(|guest| guest.id == *id));
        for guest in guests {
            self.look(now_ns, guest);
        }
        self.count(guests);
        for guest in guests {
            self.begin_what_is_due(now_ns, guest);
        }
        self.make_room(now_ns, guests);
        for guest in guests {
            self.proceed(now_ns, guest);
        }
        self.rescue(now_ns, guests);
        self.call_in(now_ns, guests);
        let again_ns = self.stand(now_ns, guests);
        let moving = self
            .records
            .values()
            .any(|record| record.phase != Phase::Settled);
        if moving {
            self.moved_ns = now_ns;
            return Some(now_ns + LOOK_NS);
        }
        let again_ns = again_ns.filter(|again_ns| *again_ns > now_ns);
        Some(again_ns.map_or(now_ns + TICK_NS, |again_ns| again_ns.min(now_ns + TICK_NS)))
    }

    /// A slice was granted to one that is out: its switch begins, if it can.
    pub fn begin_switch(&mut self, now_ns: u64, id: TenantId) {
        let lodgers = Lodgers {
            now_ns,
            capacity_bytes: self.capacity_bytes,
            all: &self.lodgers,
        };
        let Some(room) = self.arbitration.room_for(&lodgers, id) else {
            return;
        };
        if room.from_ns > now_ns {
            return;
        }
        for victim in room.victims {
            self.depart(now_ns, victim, Verb::Evict);
        }
        let record = self.records.entry(id).or_default();
        if record.phase == Phase::Settled {
            record.phase = Phase::Called;
            record.switch_ns = Some(now_ns);
            record.begin(now_ns);
        }
        record.standing = Standing::Moving;
    }

    fn depart(&mut self, now_ns: u64, id: TenantId, verb: Verb) {
        let record = self.records.entry(id).or_default();
        if record.phase == Phase::Settled {
            record.phase = Phase::Draining {
                verb,
                since_ns: now_ns,
            };
            record.standing = Standing::Moving;
            record.begin(now_ns);
        }
    }

    /// What the processes of a tenant say, and what follows from it.
    fn look(&mut self, now_ns: u64, guest: &Guest<'_>) {
        let record = self.records.entry(guest.id).or_insert_with(|| Record {
            since_ns: now_ns,
            ..Record::default()
        });
        if guest.active {
            record.active_ns = now_ns;
        }
        let (mut refused, mut longest_ns) = (None, 0);
        for (client, pages) in guest.clients {
            let Some((_, station)) = self.stations.get_mut(client) else {
                continue;
            };
            let ended = station.look(now_ns, pages, self.device);
            let held = station.footprint().host_bytes;
            let mut books = self.books.borrow_mut();
            books.hold(*client, self.device, guest.id, held);
            let Some(ended) = ended else { continue };
            books.promise(*client, self.device, guest.id, 0);
            drop(books);
            longest_ns = longest_ns.max(ended.ns);
            record.figures.copied_bytes += ended.copied.0 + ended.copied.1;
            let link = &mut self.arbitration.link;
            match ended.failed {
                None => learn(link, ended.copied, ended.ns),
                Some(why) => refused = Some(why),
            }
        }
        record.figures.moving_ns += longest_ns;
        if let Some(why) = refused {
            self.undo(now_ns, guest, why);
        }
    }

    /// One process of a tenant has not done as it was told: the others go back to where they were.
    fn undo(&mut self, now_ns: u64, guest: &Guest<'_>, why: Why) {
        let Some(record) = self.records.get_mut(&guest.id) else {
            return;
        };
        let Phase::Ordered { verb } = record.phase else {
            return;
        };
        let text = why.text();
        record.figures.failed = true;
        record.figures.reason.clone_from(&text);
        record.backoff_ns = (record.backoff_ns * 2).clamp(BACKOFF_NS, BACKOFF_MAX_NS);
        record.stuck_until_ns = now_ns + record.backoff_ns;
        record.wished = false;
        record.switch_ns = None;
        self.news.push(News::NotMoved {
            id: guest.id,
            verb,
            why: text,
        });
        match verb {
            // Whoever has left already is called back, and whoever has not said anything is to.
            Verb::Evict => self.order(now_ns, guest, Verb::Restore, |state| !state.is_usable()),
            // Those that have arrived wait with the others; nothing of the job runs meanwhile.
            Verb::Restore => self.order(now_ns, guest, Verb::Evict, |state| {
                matches!(state, State::Resident | State::Restoring)
            }),
            Verb::Fit => self.order(now_ns, guest, Verb::Restore, |state| !state.is_usable()),
        }
    }

    /// Tells those processes of a tenant whose state asks for it; where there is none the tenant has settled.
    fn order(&mut self, now_ns: u64, guest: &Guest<'_>, verb: Verb, which: impl Fn(State) -> bool) {
        let bytes: u64 = self.footprints(guest).map(|f| f.evictable_bytes).sum();
        // Both ways at once, and at a quarter of the rate at worst.
        let moving_ns = self.arbitration.link.switch_ns(bytes, bytes);
        let deadline_ns = now_ns + ORDER_NS + moving_ns.saturating_mul(4);
        let mut told = false;
        let target = self.fit_target(guest);
        let resident: u64 = self.footprints(guest).map(|f| f.evictable_bytes).sum();
        for (client, pages) in guest.clients {
            let Some((_, station)) = self.stations.get_mut(client) else {
                continue;
            };
            if !which(station.state()) {
                continue;
            }
            // Each process keeps its part of what the job keeps.
            let own = u128::from(station.footprint().evictable_bytes) * u128::from(target)
                / u128::from(resident.max(1));
            let own = u64::try_from(own).unwrap_or(u64::MAX);
            station.give(now_ns, pages, self.device, (verb, own), deadline_ns);
            told = true;
        }
        if let Some(record) = self.records.get_mut(&guest.id) {
            record.phase = if told {
                Phase::Ordered { verb }
            } else {
                Phase::Settled
            };
        }
    }

    fn footprints<'s>(
        &'s self,
        guest: &'s Guest<'_>,
    ) -> impl Iterator<Item = channel::Footprint> + 's {
        guest
            .clients
            .iter()
            .filter_map(|(client, _)| Some(self.stations.get(client)?.1.footprint()))
    }

    /// Evictable bytes that may be on the device by the job's limit.
    fn fit_target(&self, guest: &Guest<'_>) -> u64 {
        let fixed = self.records.get(&guest.id).map_or(0, |r| r.fixed_bytes);
        guest
            .terms
            .limit_bytes
            .map_or(u64::MAX, |limit| limit.saturating_sub(fixed))
    }

    /// Bytes and states, as the arbitration takes them.
    fn count(&mut self, guests: &[Guest<'_>]) {
        let mut lodgers = std::mem::take(&mut self.lodgers);
        lodgers.clear();
        for guest in guests {
            let lodger = self.lodger(guest);
            lodgers.push(lodger);
        }
        self.lodgers = lodgers;
    }

    fn lodger(&mut self, guest: &Guest<'_>) -> Lodger {
        let (mut evictable_bytes, mut resident_bytes) = (0u64, 0u64);
        for footprint in self.footprints(guest) {
            evictable_bytes = evictable_bytes.saturating_add(footprint.evictable_bytes);
            resident_bytes = resident_bytes.saturating_add(footprint.resident_bytes);
        }
        let state = self.state_of(guest);
        let record = self.records.entry(guest.id).or_default();
        // While all is on the device the charge is what it has there; what is not evictable does not change by moving.
        if state == State::Resident && record.phase == Phase::Settled {
            record.fixed_bytes = guest.terms.used_bytes.saturating_sub(evictable_bytes);
        } else if evictable_bytes == 0 {
            record.fixed_bytes = guest.terms.used_bytes;
        }
        let (leaving, coming) = match record.phase {
            Phase::Settled => (false, false),
            Phase::Draining { verb, .. } | Phase::Ordered { verb } => {
                (verb == Verb::Evict, verb == Verb::Restore)
            }
            Phase::Called => (false, true),
        };
        // Its host memory is used where it is; to the arbitration nothing of it is missing.
        let evictable_bytes = if state == State::Partly {
            resident_bytes
        } else {
            evictable_bytes
        };
        Lodger {
            id: guest.id,
            class: guest.class,
            weight_ppm: guest.weight_ppm,
            arrived_ns: guest.arrived_ns,
            evictable_bytes,
            resident_bytes,
            fixed_bytes: record.fixed_bytes,
            out: !state.is_usable(),
            wants: guest.wants || record.wished,
            active_ns: record.active_ns,
            since_ns: record.since_ns,
            leaving,
            coming,
            stuck_until_ns: record.stuck_until_ns,
            kept_away: guest.terms.kept_away,
        }
    }

    /// Of all its processes together: the one that is furthest away counts.
    fn state_of(&self, guest: &Guest<'_>) -> State {
        let rank = |state: &State| match state {
            State::Resident => 0,
            State::Failed => 1,
            State::Partly => 2,
            State::Evicted => 3,
            State::Restoring => 4,
            State::Evicting => 5,
        };
        guest
            .clients
            .iter()
            .filter_map(|(client, _)| Some(self.stations.get(client)?.1.state()))
            .max_by_key(rank)
            .unwrap_or_default()
    }

    /// Departures that the operator or a limit asks for.
    fn begin_what_is_due(&mut self, now_ns: u64, guest: &Guest<'_>) {
        let state = self.state_of(guest);
        let Some(record) = self.records.get(&guest.id) else {
            return;
        };
        if record.phase != Phase::Settled || now_ns < record.stuck_until_ns {
            return;
        }
        let resident: u64 = self.footprints(guest).map(|f| f.resident_bytes).sum();
        let all: u64 = self.footprints(guest).map(|f| f.evictable_bytes).sum();
        if guest.terms.kept_away {
            if resident > 0 && state != State::Failed {
                self.depart(now_ns, guest.id, Verb::Evict);
            }
            return;
        }
        if !guest.terms.overflow || !matches!(state, State::Resident | State::Partly) {
            return;
        }
        let target = self.fit_target(guest);
        let over = resident.saturating_sub(target);
        let under = target.min(all).saturating_sub(resident);
        let room = Lodgers {
            now_ns,
            capacity_bytes: self.capacity_bytes,
            all: &self.lodgers,
        }
        .free_bytes();
        let comes_back = under >= FIT_BYTES.min(all - resident) && under > 0 && under <= room;
        if (over > 0 || comes_back) && now_ns >= record.fitted_ns + FIT_NS {
            self.depart(now_ns, guest.id, Verb::Fit);
        }
    }

    /// Allocations of those that are in wait for memory: others give way.
    fn make_room(&mut self, now_ns: u64, guests: &[Guest<'_>]) {
        for guest in guests {
            let waits_for: u64 = guest
                .clients
                .iter()
                .map(|(_, pages)| pages.client.room_bytes(self.device))
                .fold(0, u64::saturating_add);
            let is_in = self.state_of(guest).is_usable();
            if waits_for == 0 || !is_in {
                continue;
            }
            let lodgers = Lodgers {
                now_ns,
                capacity_bytes: self.capacity_bytes,
                all: &self.lodgers,
            };
            let room = self
                .arbitration
                .more_room_for(&lodgers, guest.id, waits_for);
            for victim in room.into_iter().flat_map(|room| room.victims) {
                self.depart(now_ns, victim, Verb::Evict);
                if let Some(lodger) = self.lodgers.iter_mut().find(|one| one.id == victim) {
                    lodger.leaving = true;
                }
            }
        }
    }

    /// Departures whose work has ended are ordered; what is over is told.
    fn proceed(&mut self, now_ns: u64, guest: &Guest<'_>) {
        let Some(record) = self.records.get_mut(&guest.id) else {
            return;
        };
        match record.phase {
            Phase::Settled | Phase::Called => {}
            Phase::Draining { verb, since_ns } => {
                if !guest.drained && now_ns < since_ns + DRAIN_NS {
                    return;
                }
                record.figures.drained_ns = now_ns;
                if let Err(why) = self.host_has_room(guest, verb) {
                    self.refuse(now_ns, guest.id, verb, why);
                    return;
                }
                match verb {
                    Verb::Evict => self.order(now_ns, guest, verb, |state| {
                        matches!(state, State::Resident | State::Partly)
                    }),
                    _ => self.order(now_ns, guest, verb, State::is_usable),
                }
                if self.phase_of(guest.id) == Phase::Settled {
                    self.conclude(now_ns, guest.id, verb);
                }
            }
            Phase::Ordered { verb } => {
                let busy = guest.clients.iter().any(|(client, _)| {
                    self.stations
                        .get(client)
                        .is_some_and(|(_, station)| station.is_busy())
                });
                if !busy {
                    self.conclude(now_ns, guest.id, verb);
                }
            }
        }
    }

    fn phase_of(&self, id: TenantId) -> Phase {
        self.records.get(&id).map_or(Phase::Settled, |r| r.phase)
    }

    /// Nothing has moved, and nothing will for a while.
    fn refuse(&mut self, now_ns: u64, id: TenantId, verb: Verb, why: String) {
        let Some(record) = self.records.get_mut(&id) else {
            return;
        };
        record.phase = Phase::Settled;
        record.by_hand = false;
        record.backoff_ns = (record.backoff_ns * 2).clamp(BACKOFF_NS, BACKOFF_MAX_NS);
        record.stuck_until_ns = now_ns + record.backoff_ns;
        record.wished = false;
        record.switch_ns = None;
        record.figures.failed = true;
        record.figures.ended_ns = now_ns;
        record.figures.reason.clone_from(&why);
        self.news.push(News::NotMoved { id, verb, why });
    }

    /// A move is over, one way or the other.
    fn conclude(&mut self, now_ns: u64, id: TenantId, verb: Verb) {
        let Some(record) = self.records.get_mut(&id) else {
            return;
        };
        record.phase = Phase::Settled;
        record.by_hand = false;
        record.figures.ended_ns = now_ns;
        match verb {
            Verb::Fit => record.fitted_ns = now_ns,
            Verb::Evict | Verb::Restore => record.since_ns = now_ns,
        }
        if record.figures.failed {
            return;
        }
        (record.backoff_ns, record.stuck_until_ns) = (0, 0);
        match verb {
            Verb::Evict => record.figures.evictions += 1,
            Verb::Restore => {
                record.figures.restores += 1;
                record.wished = false;
                if let Some(began_ns) = record.switch_ns.take() {
                    self.arbitration
                        .switched(now_ns, now_ns.saturating_sub(began_ns));
                }
            }
            Verb::Fit => {}
        }
    }

    /// Whether the host can take what leaves; promises it.
    fn host_has_room(&self, guest: &Guest<'_>, verb: Verb) -> Result<(), String> {
        let own: Vec<(u64, channel::Footprint)> = guest
            .clients
            .iter()
            .filter_map(|(client, _)| Some((*client, self.stations.get(client)?.1.footprint())))
            .collect();
        let all: u64 = own.iter().map(|(_, f)| f.evictable_bytes).sum();
        let kept = match verb {
            Verb::Evict => 0,
            Verb::Restore => return Ok(()),
            Verb::Fit => self.fit_target(guest),
        };
        let needs: Vec<(u64, u64)> = own
            .iter()
            .map(|(client, f)| {
                let stays =
                    u128::from(f.evictable_bytes) * u128::from(kept) / u128::from(all.max(1));
                let stays = u64::try_from(stays).unwrap_or(u64::MAX);
                (*client, f.evictable_bytes.saturating_sub(stays))
            })
            .collect();
        let mut books = self.books.borrow_mut();
        books.set_free(super::books::Memory::of_this_host());
        books
            .check(guest.id, self.device, &needs, guest.terms.host_bytes)
            .map_err(|short| short.text())?;
        for (client, bytes) in needs {
            books.promise(client, self.device, guest.id, bytes);
            if let Some((_, pages)) = guest.clients.iter().find(|(id, _)| *id == client) {
                let budget = books.budget_bytes(client, guest.id, guest.terms.host_bytes);
                pages
                    .arbiter
                    .set_residency(guest.terms.mode(), Some(budget));
            }
        }
        Ok(())
    }

    /// Arrivals whose room is not given after all take that of others, or go back: better than to wait for their deadline.
    fn rescue(&mut self, now_ns: u64, guests: &[Guest<'_>]) {
        let arriving = |phase| {
            matches!(
                phase,
                Phase::Called
                    | Phase::Ordered {
                        verb: Verb::Restore
                    }
            )
        };
        for guest in guests {
            if !arriving(self.phase_of(guest.id)) {
                continue;
            }
            self.count(guests);
            let lodgers = Lodgers {
                now_ns,
                capacity_bytes: self.capacity_bytes,
                all: &self.lodgers,
            };
            if lodgers.lacking_bytes(0) == 0 {
                return;
            }
            if let Some(room) = self.arbitration.more_room_for(&lodgers, guest.id, 0) {
                for victim in room.victims {
                    self.depart(now_ns, victim, Verb::Evict);
                }
                continue;
            }
            let why = "the job whose room it was to have cannot leave".to_owned();
            self.refuse(now_ns, guest.id, Verb::Restore, why);
            self.order(now_ns, guest, Verb::Evict, |state| {
                state == State::Restoring
            });
        }
    }

    /// Those that were called come once every departure is on its way.
    fn call_in(&mut self, now_ns: u64, guests: &[Guest<'_>]) {
        let leaving = |record: &Record| matches!(record.phase, Phase::Draining { .. });
        if self.records.values().any(leaving) {
            return;
        }
        for guest in guests {
            if self.phase_of(guest.id) == Phase::Called {
                if let Some(record) = self.records.get_mut(&guest.id) {
                    record.figures.drained_ns = now_ns;
                }
                self.order(now_ns, guest, Verb::Restore, |state| !state.is_usable());
                if self.phase_of(guest.id) == Phase::Settled {
                    self.conclude(now_ns, guest.id, Verb::Restore);
                }
            }
        }
    }

    /// What everybody may do now; those that the operator has called come as soon as they may.
    fn stand(&mut self, now_ns: u64, guests: &[Guest<'_>]) -> Option<u64> {
        let mut again_ns;
        let mut rounds = 0;
        loop {
            self.count(guests);
            let lodgers = Lodgers {
                now_ns,
                capacity_bytes: self.capacity_bytes,
                all: &self.lodgers,
            };
            let before: Vec<bool> = guests
                .iter()
                .map(|guest| self.arbitration.is_parked(guest.id))
                .collect();
            let standings;
            (standings, again_ns) = self.arbitration.standings(&lodgers);
            let mut wished = None;
            for ((guest, standing), before) in guests.iter().zip(standings).zip(before) {
                let parked = self.arbitration.is_parked(guest.id);
                if parked != before {
                    let id = guest.id;
                    self.news.push(News::Parked { id, parked });
                }
                let Some(record) = self.records.get_mut(&guest.id) else {
                    continue;
                };
                record.standing = match (record.phase, standing) {
                    // A departure that is over before its gate was closed has nothing to move.
                    (Phase::Settled, standing) => standing,
                    _ => Standing::Moving,
                };
                // One that waits for memory inside an allocation does not come to its gate.
                let stands_inside = guest
                    .clients
                    .iter()
                    .any(|(_, pages)| pages.client.room_bytes(self.device) > 0);
                if record.standing == Standing::MayCome && (record.wished || stands_inside) {
                    wished = Some(guest.id);
                }
            }
            let Some(wished) = wished else { break };
            self.begin_switch(now_ns, wished);
            rounds += 1;
            if rounds > guests.len() {
                break;
            }
        }
        again_ns
    }

    // --- what is told about it ---

    /// What has happened since the last time.
    pub fn take_news(&mut self) -> Vec<News> {
        std::mem::take(&mut self.news)
    }

    /// How much of the time goes into switches, and how fast memory moves.
    pub fn arbitration(&self) -> &Arbitration {
        &self.arbitration
    }

    /// Where a tenant's memory is; `None`: none of it can be moved.
    pub fn whereabouts(
        &self,
        id: TenantId,
        clients: &[(u64, Rc<ClientPages>)],
    ) -> Option<Whereabouts> {
        let stations: Vec<&Station> = clients
            .iter()
            .filter_map(|(client, _)| Some(&self.stations.get(client)?.1))
            .collect();
        if stations.is_empty() {
            return None;
        }
        let guest = Guest {
            id,
            class: Class::default(),
            weight_ppm: 0,
            arrived_ns: 0,
            wants: false,
            active: false,
            drained: false,
            terms: Lodging::default(),
            clients,
        };
        let sum = |of: fn(&channel::Footprint) -> u64| {
            stations
                .iter()
                .map(|station| of(&station.footprint()))
                .fold(0, u64::saturating_add)
        };
        let record = self.records.get(&id).cloned().unwrap_or_default();
        Some(Whereabouts {
            state: match (record.phase, self.state_of(&guest)) {
                (Phase::Draining { .. }, State::Resident) => State::Evicting,
                (Phase::Called, _) => State::Restoring,
                (_, state) => state,
            },
            evictable_bytes: sum(|f| f.evictable_bytes),
            resident_bytes: sum(|f| f.resident_bytes),
            fixed_bytes: record.fixed_bytes,
            host_bytes: sum(|f| f.host_bytes),
            moved_out_bytes: sum(|f| f.moved_out_bytes),
            moved_in_bytes: sum(|f| f.moved_in_bytes),
            standing: record.standing,
            parked: self.arbitration.is_parked(id),
            settled: record.phase == Phase::Settled,
            figures: record.figures,
        })
    }
}

impl Lodging {
    /// As the client is told.
    pub fn mode(&self) -> channel::ResidencyMode {
        channel::ResidencyMode {
            evictable: self.evictable,
            overflow: self.overflow,
        }
    }
}

impl Record {
    /// Something is asked of it by hand; what was tried before counts no longer.
    fn ask(&mut self, now_ns: u64) {
        (self.stuck_until_ns, self.backoff_ns) = (0, 0);
        self.by_hand = false;
        self.begin(now_ns);
        self.by_hand = true;
    }

    /// A move begins; one that was asked for by hand has begun when it was asked for.
    fn begin(&mut self, now_ns: u64) {
        if self.by_hand {
            return;
        }
        let figures = &mut self.figures;
        (figures.asked_ns, figures.drained_ns, figures.ended_ns) = (now_ns, 0, 0);
        (figures.copied_bytes, figures.failed) = (0, false);
        figures.reason.clear();
    }
}

/// Takes over what a move shows of the link. What is unchanged is not copied, so little of it is no sign of slowness.
fn learn(link: &mut Link, (out, back): (u64, u64), ns: u64) {
    let blend = |rate: &mut u64, bytes: u64| {
        if bytes < LEARN_BYTES || ns == 0 {
            return;
        }
        let seen = u64::try_from(u128::from(bytes) * 1000 / u128::from(ns)).unwrap_or(u64::MAX);
        *rate = match *rate {
            0 => seen.max(1),
            before => (before - before / 4 + seen / 4).max(1),
        };
    };
    blend(&mut link.out, out);
    blend(&mut link.back, back);
}
