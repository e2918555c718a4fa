//! The residency of one device: who is where, who goes next, and how far that is.
//!
//! Driven by the device scheduler. The scheduler says who wants the device and whose work has ended
//! ([`JobView`]), closes the gates of those that are not [in](Standing::may_run), and asks for a
//! switch where its policy grants a slice to one that is out. In a *departure* the gate is closed,
//! the work drains, the host is asked for space, the order goes out to every process of the job,
//! and all of them answer. If one refuses, those that have left are called back, so that a job is
//! never half away. An *arrival* is ordered as soon as every departure before it is: an arriving
//! job takes the memory as the leaving one gives it back, and both directions of the link are at
//! work.

mod coordination;
mod linked;
mod moves;
mod questions;
mod report;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use channel::Verb;
use channel::arbiter::ClientPages;
use policy::coordinator::Coordinator;
use policy::residency::{Arbitration, ResidentJob, ResidentJobs, Standing};
use policy::{Class, TenantId};

use super::books::HostBooks;
use super::client_state::{ClientStateMachine, State};
use super::job_view::JobView;
use questions::Questions;
pub use report::{Crowd, Figures, News, ResidencyStatus};

/// Between two looks at moves. Answers ring the doorbell as well.
const LOOK_NS: u64 = 500_000;
/// The same while one has only begun: the gate of a job that has no work is as good as closed.
const SOON_NS: u64 = 50_000;
/// What has not begun to move by then has work that takes its time.
const BEGUN_NS: u64 = 1_000_000;
/// Between two looks at who waits.
const TICK_NS: u64 = 20_000_000;
/// The same while somebody locks host memory, or waits for a turn.
const PIN_NS: u64 = 2_000_000;
/// Host memory is moved back and forth for no less than this, or for all that is missing.
const FIT_BYTES: u64 = 64 << 20;
/// And no sooner than this after the last time.
const FIT_NS: u64 = 1_000_000_000;

/// What a tenant is in the middle of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    /// Nothing.
    #[default]
    Settled,
    /// Its work is to end first.
    Draining { verb: Verb, since_ns: u64 },
    /// Its processes have their orders.
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
    /// What its processes have submitted, as last looked at.
    submitted: u64,
    /// When that changed last, or somebody said that it is about to be used.
    used_ns: u64,
    fixed_bytes: u64,
    stuck_until_ns: u64,
    backoff_ns: u64,
    fitted_ns: u64,
    /// To what, and what was on the device then.
    fitted: Option<(u64, u64)>,
    /// To what its present move fits it.
    fits_to: u64,
    /// What was on the device when the present move began.
    before_bytes: u64,
    /// What was on the device when an arrival that is under way last got on, and when.
    got_on: (u64, u64),
    /// An arrival has lacked memory that nobody gives since then.
    lacks_since_ns: Option<u64>,
    /// Since when it is out, where an arrival was called off.
    in_line_ns: Option<u64>,
    /// What it may do, where that is decided over several devices.
    joint: Option<Standing>,
    /// Called back by its operator, whether it wants the device or not.
    wished: bool,
    /// The present move was asked for by hand, and its figures are reported.
    by_hand: bool,
    /// For whom a switch is on: it is the reason for what keeps the device, since then.
    switch_ns: Option<u64>,
    figures: Figures,
}

/// One device.
#[derive(Debug)]
pub struct ResidencyManager {
    device: usize,
    capacity_bytes: u64,
    questions: Questions,
    arbitration: Arbitration,
    /// Where opportunistic jobs shrink for guaranteed ones.
    coordinator: Option<Coordinator>,
    books: Rc<RefCell<HostBooks>>,
    machines: BTreeMap<u64, (TenantId, ClientStateMachine)>,
    records: BTreeMap<TenantId, Record>,
    /// When memory was last on its way.
    moved_ns: u64,
    news: Vec<News>,
    residents: Vec<ResidentJob>,
    /// What each job had on the device at the last look.
    occupied: Vec<(TenantId, u64)>,
    /// Arrivals are decided over several devices, of which this is one.
    linked: bool,
    /// To whom slices were granted although they are out.
    granted: Vec<TenantId>,
    /// Processes with memory that can be moved have come or gone since that was asked last.
    crew_changed: bool,
}

/// Whether every process of a tenant can run, some of them before all of their memory is back.
fn begun(machines: &BTreeMap<u64, (TenantId, ClientStateMachine)>, job: &JobView<'_>) -> bool {
    let mut own = job
        .clients
        .iter()
        .filter_map(|(client, _)| machines.get(client));
    own.all(|(_, machine)| machine.may_run())
}

impl ResidencyManager {
    /// Of a device whose jobs all stay.
    pub fn new(device: usize) -> Self {
        Self {
            device,
            capacity_bytes: 0,
            questions: Questions::default(),
            arbitration: Arbitration::new(10.0),
            coordinator: None,
            books: Rc::default(),
            machines: BTreeMap::new(),
            records: BTreeMap::new(),
            moved_ns: 0,
            news: Vec::new(),
            residents: Vec::new(),
            occupied: Vec::new(),
            linked: false,
            granted: Vec::new(),
            crew_changed: true,
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
            let machine = ClientStateMachine::new(pages, self.device);
            if !machine.state().is_usable() {
                let record = self.records.entry(tenant).or_default();
                record.standing = Standing::Waits(None);
            }
            self.machines.insert(client, (tenant, machine));
            self.crew_changed = true;
        }
    }

    /// Whether nothing of anybody can be moved.
    pub fn is_idle(&self) -> bool {
        self.machines.is_empty() && self.records.is_empty()
    }

    /// A client is gone.
    pub fn remove(&mut self, client: u64) {
        self.crew_changed |= self.machines.remove(&client).is_some();
        self.questions.forget(client);
        self.books.borrow_mut().forget(client);
    }

    /// What a tenant is charged for on the device: its processes cannot have more, whatever they
    /// say, nor more than there is on the device and for all jobs together on the host.
    pub fn bound(&mut self, tenant: TenantId, charged_bytes: u64) {
        let there = match self.capacity_bytes {
            0 => u64::MAX,
            capacity => capacity.saturating_add(self.books.borrow().limit_bytes()),
        };
        let own = self.machines.values_mut().filter(|(id, _)| *id == tenant);
        for (_, machine) in own {
            machine.bound(charged_bytes.min(there));
        }
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

    /// Nobody calls a tenant back any more. One that is on its way comes.
    pub fn forget_wish(&mut self, tenant: TenantId) {
        if let Some(record) = self.records.get_mut(&tenant) {
            record.wished = false;
        }
    }

    /// A tenant will be needed soon: if it is away it comes, where it may, and if it is here it
    /// stays as if it had just been used. What could not be done before is not tried any sooner.
    pub fn wake(&mut self, now_ns: u64, tenant: TenantId) {
        let Some(record) = self.records.get_mut(&tenant) else {
            return;
        };
        record.used_ns = now_ns;
        let own = self.machines.values().filter(|(id, _)| *id == tenant);
        let mut states = own.map(|(_, machine)| machine.state());
        record.wished |= states.any(|state| !state.is_usable());
    }

    /// The operator sends a tenant away: what was tried before counts no longer.
    pub fn dismiss(&mut self, now_ns: u64, tenant: TenantId) {
        let record = self.records.entry(tenant).or_default();
        record.wished = false;
        record.ask(now_ns);
    }

    /// Where the memory of a tenant is on its way to, from the order to drain on; `None`: it stays.
    pub fn verb(&self, tenant: TenantId) -> Option<Verb> {
        match self.phase_of(tenant) {
            Phase::Settled => None,
            Phase::Draining { verb, .. } | Phase::Ordered { verb } => Some(verb),
            Phase::Called => Some(Verb::Restore),
        }
    }

    /// What the last move of a tenant has copied, both ways, in bytes.
    pub fn copied_bytes(&self, tenant: TenantId) -> u64 {
        let record = self.records.get(&tenant);
        record.map_or(0, |record| record.figures.copied_bytes)
    }

    /// Whether a tenant's memory is to leave, and none of it has yet: its work is to end first.
    pub fn is_about_to_leave(&self, id: TenantId) -> bool {
        let Some(record) = self.records.get(&id) else {
            return false;
        };
        let leaves = match record.phase {
            Phase::Draining { .. } => true,
            Phase::Ordered { verb } => verb != Verb::Restore,
            Phase::Settled | Phase::Called => false,
        };
        leaves && self.resident_bytes(id) >= record.before_bytes
    }

    /// Whether a tenant's gate may be open.
    pub fn standing(&self, tenant: TenantId) -> Standing {
        self.records
            .get(&tenant)
            .map_or(Standing::In, |record| record.standing)
    }

    /// Looks at every move, begins those that are due, and says when to look again; `None`: nobody
    /// can be moved.
    pub fn step(&mut self, now_ns: u64, jobs: &[JobView<'_>]) -> Option<u64> {
        if self.machines.is_empty() {
            self.records.clear();
            return None;
        }
        self.records
            .retain(|id, _| jobs.iter().any(|job| job.id == *id));
        for job in jobs {
            self.look(now_ns, job);
        }
        let pinning = self.permit_pinning(now_ns, jobs);
        self.count(jobs);
        self.notify_of_space(jobs);
        self.divide(now_ns, jobs);
        for job in jobs {
            self.begin_what_is_due(now_ns, job);
        }
        if !self.linked {
            self.make_space(now_ns, jobs);
        }
        for job in jobs {
            self.proceed(now_ns, job);
        }
        self.rescue(now_ns, jobs);
        self.call_in(now_ns, jobs);
        let again_ns = if self.linked {
            self.stand_jointly(jobs);
            None
        } else {
            self.stand(now_ns, jobs)
        };
        self.answer_questions(jobs);
        let moving = self
            .records
            .values()
            .any(|record| record.phase != Phase::Settled);
        if moving {
            self.moved_ns = now_ns;
            return Some(now_ns + self.look_again_in(now_ns));
        }
        let again_ns = again_ns.filter(|again_ns| *again_ns > now_ns);
        let tick_ns = now_ns + if pinning { PIN_NS } else { TICK_NS };
        Some(again_ns.map_or(tick_ns, |again_ns| again_ns.min(tick_ns)))
    }

    /// Hands out turns to lock host memory; whether anybody on the host has one or waits for it.
    fn permit_pinning(&mut self, now_ns: u64, jobs: &[JobView<'_>]) -> bool {
        let pins = &mut self.books.borrow_mut().pins;
        for (client, pages) in jobs.iter().flat_map(|job| job.clients) {
            if !self.machines.contains_key(client) {
                continue;
            }
            let wanted = pages.client.wants_to_pin();
            if let Some(until_ns) = pins.look(now_ns, *client, wanted) {
                pages.arbiter.permit_pinning(wanted, until_ns);
            }
        }
        pins.is_busy()
    }

    /// Wakes threads that wait for memory of the device, where some has become free since the last
    /// look.
    fn notify_of_space(&mut self, jobs: &[JobView<'_>]) {
        let now = |one: &ResidentJob| (one.id, one.resident_bytes.saturating_add(one.fixed_bytes));
        // By job: what one leaves another may have taken already, and wants more.
        let less = self.occupied.iter().any(|(id, before)| {
            let mut same = self.residents.iter().map(now);
            same.find(|(one, _)| one == id)
                .is_none_or(|(_, bytes)| bytes < *before)
        });
        self.occupied.clear();
        self.occupied.extend(self.residents.iter().map(now));
        if !less {
            return;
        }
        for job in jobs {
            let arrives = self.phase_of(job.id)
                == Phase::Ordered {
                    verb: Verb::Restore,
                };
            let waits = self
                .residents
                .iter()
                .any(|one| one.id == job.id && one.space_bytes > 0);
            if arrives || waits {
                for (_, pages) in job.clients {
                    pages.arbiter.nudge();
                }
            }
        }
    }

    /// Until the next look at moves, of which there are some.
    fn look_again_in(&self, now_ns: u64) -> u64 {
        let mut called = false;
        for record in self.records.values() {
            match record.phase {
                // Those that were called wait for it as well.
                Phase::Draining { since_ns, .. } => {
                    let young = now_ns < since_ns.saturating_add(BEGUN_NS);
                    return if young { SOON_NS } else { LOOK_NS };
                }
                Phase::Called => called = true,
                Phase::Settled | Phase::Ordered { .. } => {}
            }
        }
        if called { SOON_NS } else { LOOK_NS }
    }

    /// A slice was granted to one that is out: its switch begins, if it can.
    pub fn begin_switch(&mut self, now_ns: u64, id: TenantId) {
        if self.linked {
            self.granted.push(id);
            return;
        }
        // A slice does not bring back what somebody keeps away.
        let residents = self.residents.iter();
        if residents
            .filter(|one| one.id == id)
            .any(|one| one.kept_away)
        {
            return;
        }
        let Some(space) = self.arbitration.space_for(&self.residents(now_ns), id) else {
            return;
        };
        if space.from_ns > now_ns {
            return;
        }
        // Those that shrink for it do so first; then it comes without anybody's leaving.
        if !space.victims.is_empty() && self.shrinks_for(now_ns, id) {
            return;
        }
        for victim in space.victims {
            self.depart(now_ns, victim, Verb::Evict);
        }
        let record = self.records.entry(id).or_default();
        if record.phase == Phase::Settled {
            record.call(now_ns);
        }
        record.standing = Standing::Moving;
    }

    fn residents(&self, now_ns: u64) -> ResidentJobs<'_> {
        ResidentJobs {
            now_ns,
            capacity_bytes: self.capacity_bytes,
            all: &self.residents,
        }
    }

    fn depart(&mut self, now_ns: u64, id: TenantId, verb: Verb) {
        let before_bytes = self.resident_bytes(id);
        let record = self.records.entry(id).or_default();
        if record.phase == Phase::Settled {
            record.before_bytes = before_bytes;
            record.phase = Phase::Draining {
                verb,
                since_ns: now_ns,
            };
            record.standing = Standing::Moving;
            record.begin(now_ns);
        }
    }

    fn footprints<'s>(
        &'s self,
        job: &'s JobView<'_>,
    ) -> impl Iterator<Item = channel::Footprint> + 's {
        job.clients
            .iter()
            .filter_map(|(client, _)| Some(self.machines.get(client)?.1.footprint()))
    }

    /// What the processes of a job can have moved, in bytes.
    fn evictable_bytes(&self, job: &JobView<'_>) -> u64 {
        self.footprints(job)
            .map(|f| f.evictable_bytes)
            .fold(0, u64::saturating_add)
    }

    /// Evictable bytes that may be on the device by the job's limit, and by what others leave it.
    fn fit_target(&self, job: &JobView<'_>) -> u64 {
        let fixed = self.records.get(&job.id).map_or(0, |r| r.fixed_bytes);
        let by_limit = job
            .terms
            .limit_bytes
            .map_or(u64::MAX, |limit| limit.saturating_sub(fixed));
        let cap = self.cap(job.id).and_then(|cap| cap.bytes);
        by_limit.min(cap.unwrap_or(u64::MAX))
    }

    /// Bytes and states, as the arbitration takes them.
    fn count(&mut self, jobs: &[JobView<'_>]) {
        let mut residents = std::mem::take(&mut self.residents);
        residents.clear();
        for job in jobs {
            let resident = self.resident(job);
            residents.push(resident);
        }
        self.residents = residents;
        for (at, job) in jobs.iter().enumerate() {
            let bytes = self.claimed_bytes(job);
            let one = &mut self.residents[at];
            one.space_bytes = bytes;
            // One that waits for memory inside an allocation does not come to its gate.
            one.wants |= bytes > 0;
        }
    }

    fn resident(&mut self, job: &JobView<'_>) -> ResidentJob {
        let (mut evictable_bytes, mut resident_bytes) = (0u64, 0u64);
        for footprint in self.footprints(job) {
            evictable_bytes = evictable_bytes.saturating_add(footprint.evictable_bytes);
            resident_bytes = resident_bytes.saturating_add(footprint.resident_bytes);
        }
        let state = self.state_of(job);
        let record = self.records.entry(job.id).or_default();
        // The charge is for what it has, on the device or usable on the host; what is not evictable
        // does not change by moving.
        let usable = matches!(state, State::Resident | State::Partly);
        if usable && record.phase == Phase::Settled {
            record.fixed_bytes = job.terms.used_bytes.saturating_sub(evictable_bytes);
        } else if evictable_bytes == 0 {
            record.fixed_bytes = job.terms.used_bytes;
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
        ResidentJob {
            id: job.id,
            class: job.class,
            weight_ppm: job.weight_ppm,
            arrived_ns: job.arrived_ns,
            evictable_bytes,
            resident_bytes,
            fixed_bytes: record.fixed_bytes,
            // What it waits for is counted when what all others have is known.
            space_bytes: 0,
            out: !state.is_usable(),
            wants: job.wants || record.wished,
            active_ns: record.active_ns,
            since_ns: record.since_ns,
            leaving,
            coming,
            stuck_until_ns: record.stuck_until_ns,
            kept_away: job.terms.kept_away,
        }
    }

    /// Of all its processes together: the one that is furthest away counts.
    fn state_of(&self, job: &JobView<'_>) -> State {
        let rank = |state: &State| match state {
            State::Resident => 0,
            State::Failed => 1,
            State::Partly => 2,
            State::Evicted => 3,
            State::Restoring => 4,
            State::Evicting => 5,
        };
        job.clients
            .iter()
            .filter_map(|(client, _)| Some(self.machines.get(client)?.1.state()))
            .max_by_key(rank)
            .unwrap_or_default()
    }

    /// Departures that the operator or a limit asks for.
    fn begin_what_is_due(&mut self, now_ns: u64, job: &JobView<'_>) {
        let state = self.state_of(job);
        let Some(record) = self.records.get(&job.id) else {
            return;
        };
        if record.phase != Phase::Settled || now_ns < record.stuck_until_ns {
            return;
        }
        let resident = self
            .footprints(job)
            .map(|f| f.resident_bytes)
            .fold(0, u64::saturating_add);
        let all = self.evictable_bytes(job);
        if job.terms.kept_away {
            if resident > 0 && state != State::Failed {
                self.depart(now_ns, job.id, Verb::Evict);
            }
            return;
        }
        if self.is_idle_for_long(now_ns, job, resident)
            && matches!(state, State::Resident | State::Partly)
        {
            self.depart(now_ns, job.id, Verb::Evict);
            return;
        }
        // What lies in host memory after the reason for it is gone comes back as well.
        let fits = job.terms.overflow || self.cap(job.id).is_some() || state == State::Partly;
        if !fits || !matches!(state, State::Resident | State::Partly) {
            return;
        }
        let urgent = self.cap(job.id).is_some_and(|cap| cap.urgent);
        let target = self.fit_target(job);
        let over = resident.saturating_sub(target);
        let under = target.min(all).saturating_sub(resident);
        let space = self.residents(now_ns).free_bytes();
        // Of a small device less is worth a move.
        let least = match self.capacity_bytes {
            0 => FIT_BYTES,
            capacity => FIT_BYTES.min(capacity / 32),
        };
        let comes_back = under >= least.min(all.saturating_sub(resident))
            && under > 0
            && under <= space
            // What is left may be of larger chunks than that.
            && record.fitted != Some((target, resident));
        // Others wait for what is over by no more than the least that is moved, too.
        if (over > 0 && urgent) || ((over > 0 || comes_back) && now_ns >= record.fitted_ns + FIT_NS)
        {
            self.depart(now_ns, job.id, Verb::Fit);
            if let Some(record) = self.records.get_mut(&job.id) {
                record.fits_to = target;
            }
        }
    }

    /// Whether nothing of a job has used the device for as long as its terms say, and for no less
    /// than its way out and back takes.
    fn is_idle_for_long(&self, now_ns: u64, job: &JobView<'_>, resident_bytes: u64) -> bool {
        let (Some(after_ns), Some(record)) = (job.terms.evict_after_ns, self.records.get(&job.id))
        else {
            return false;
        };
        let waits_inside = || {
            let mut same = self.residents.iter().filter(|one| one.id == job.id);
            same.any(|one| one.space_bytes > 0)
        };
        if resident_bytes == 0 || job.wants || job.active || record.wished || waits_inside() {
            return false;
        }
        let switch_ns = self
            .arbitration
            .link
            .switch_ns(resident_bytes, resident_bytes);
        let used_ns = record.used_ns.max(record.active_ns).max(record.since_ns);
        now_ns.saturating_sub(used_ns) >= after_ns.max(switch_ns)
    }

    /// Allocations of those that are in wait for memory: others give way.
    fn make_space(&mut self, now_ns: u64, jobs: &[JobView<'_>]) {
        let mut waiting: Vec<(bool, u64, TenantId)> = self
            .residents
            .iter()
            .filter(|one| one.space_bytes > 0 && !one.out && !one.leaving && !one.kept_away)
            .map(|one| (one.class == Class::Opportunistic, one.arrived_ns, one.id))
            .collect();
        waiting.sort_unstable();
        for (_, _, id) in waiting {
            self.count(jobs);
            if self.phase_of(id) != Phase::Settled || self.shrinks_for(now_ns, id) {
                continue;
            }
            let space = self.arbitration.more_space_for(&self.residents(now_ns), id);
            let victims = space.map(|space| space.victims).unwrap_or_default();
            if victims.is_empty() {
                continue;
            }
            for victim in victims {
                self.depart(now_ns, victim, Verb::Evict);
            }
            // It has taken a place as one that comes does, and stays as long.
            if let Some(record) = self.records.get_mut(&id) {
                record.since_ns = now_ns;
            }
        }
    }

    fn phase_of(&self, id: TenantId) -> Phase {
        self.records.get(&id).map_or(Phase::Settled, |r| r.phase)
    }

    /// What everybody may do now; those that the operator has called come as soon as they may.
    fn stand(&mut self, now_ns: u64, jobs: &[JobView<'_>]) -> Option<u64> {
        let mut again_ns;
        let mut rounds = 0;
        loop {
            self.count(jobs);
            let residents = ResidentJobs {
                now_ns,
                capacity_bytes: self.capacity_bytes,
                all: &self.residents,
            };
            let before: Vec<bool> = jobs
                .iter()
                .map(|job| self.arbitration.is_parked(job.id))
                .collect();
            let standings;
            (standings, again_ns) = self.arbitration.standings(&residents);
            let mut wished = None;
            for ((job, standing), before) in jobs.iter().zip(standings).zip(before) {
                let parked = self.arbitration.is_parked(job.id);
                if parked != before {
                    let id = job.id;
                    self.news.push(News::Parked { id, parked });
                }
                let Some(record) = self.records.get_mut(&job.id) else {
                    continue;
                };
                record.standing = match (record.phase, standing) {
                    // A departure that is over before its gate was closed has nothing to move.
                    (Phase::Settled, standing) => standing,
                    // The space is its own already; it uses as much of it as is there.
                    (
                        Phase::Ordered {
                            verb: Verb::Restore,
                        },
                        _,
                    ) if begun(&self.machines, job) => Standing::In,
                    _ => Standing::Moving,
                };
                let waits_inside = self
                    .residents
                    .iter()
                    .any(|one| one.id == job.id && one.space_bytes > 0);
                if record.standing == Standing::MayCome && (record.wished || waits_inside) {
                    wished = Some(job.id);
                }
            }
            let Some(wished) = wished else { break };
            self.begin_switch(now_ns, wished);
            rounds += 1;
            if rounds > jobs.len() {
                break;
            }
        }
        again_ns
    }
}
