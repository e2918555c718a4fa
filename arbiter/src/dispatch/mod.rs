//! The fast loop of one device: looks at its tenants, charges them, asks the policy and moves the gates.
//!
//! In slices the gates of the tenants that hold the device are open, all others closed; usually one holds it, and a policy with
//! lanes may have several. What a tenant has queued when its gate closes (its *tail*) is still charged to it while it lasts;
//! the next tenant's gate opens when it has ended. A tail that is too long to wait for overlaps with the next tenant; time in
//! which several are busy is split equally between them. All at once, everybody holds the device.
//!
//! A tenant alone pays nothing: its gate stays open, without a deadline, until another tenant waits. Only then does the lane
//! look at the holder every few hundred microseconds, to pass the device on as soon as it is idle.
//!
//! Who holds the device is decided here first, and left to the policy where nothing of this applies: a tenant that is paused or
//! has used up its cap does not; a gang has its turn on all of its devices (`gang`); one that is owed its floor (`bounds`)
//! comes next.
//!
//! `pace` has what can be chosen, `seat` one tenant, `switch` the hand-overs, `announce` what is told of them beforehand, `bounds`
//! floors and caps, `late` what a look costs that comes too late, `conduct` what is done about tenants that harm the others, `auto` the choice between slices and all at once,
//! `told` what is told about a lane. They take the time as an argument and pages as they are; none owns a clock, a socket or a
//! journal.

mod announce;
mod auto;
mod bounds;
mod company;
mod conduct;
mod cost;
mod gang;
mod late;
mod pace;
mod progress;
mod residence;
mod seat;
mod switch;
mod tail;
mod told;

use std::rc::Rc;

use channel::Grant;
use channel::arbiter::ClientPages;
use policy::quantum::SwitchCost;
use policy::{
    Class, Holder, Iterations, Memory, QuantumBounds, Slice, SlicePolicy, TenantId, TenantView,
};

use crate::residency::Keeper;
use crate::terms::Terms;
use crate::usage::{Recent, Usage};
use auto::{Auto, Running, Sample};
use bounds::Slices;
pub use conduct::Offence;
use cost::Handover;
pub use gang::Conductor;
pub use pace::{Answer, Mode, Pace, Setup};
pub use progress::Boundaries;
use seat::Seat;

/// For how long after a moment of contention the small window stays.
const CROWDED_NS: u64 = 1_000_000_000;
/// A tenant that has not wanted the device for so long is not at work.
const AT_WORK_NS: u64 = 1_000_000_000;
/// How long after a turn that was told it is confirmed: the threads that turn by the clock have the cores to themselves first.
const CONFIRM_NS: u64 = 50_000;
/// While nothing happens at all.
const IDLE_TICK_NS: u64 = 100_000_000;

/// One device.
#[derive(Debug)]
pub struct Lane {
    device: usize,
    mode: Mode,
    pace: Pace,
    /// Between what a slice lasts now.
    quantum: QuantumBounds,
    /// What the last slice was given, in microseconds.
    slice_us: u32,
    cost: SwitchCost,
    /// One whose first submission has not been seen yet.
    handover: Option<Handover>,
    /// When the tail that was waited for has ended, where it was found to have ended in this step.
    drained_ns: Option<u64>,
    holders: usize,
    answer: Answer,
    memory_bytes: u64,
    policy: Box<dyn SlicePolicy>,
    auto: Auto,
    seats: Vec<Seat>,
    /// A gang's turn, which no policy touches.
    turn: Option<Turn>,
    /// Everybody was let in.
    all_in: bool,
    /// Only opportunistic tenants wait.
    gap: bool,
    /// Who runs for the sake of its floor, likewise.
    floor: Option<TenantId>,
    /// The slice that begins when the tails before it have ended.
    coming: Option<Slice>,
    /// When it begins although they have not, where their end is known well enough.
    entry_ns: Option<u64>,
    /// Whose gate is about to open; at a time that it and the holder have been told, or when a tail has ended.
    announced: Option<(TenantId, Option<u64>)>,
    /// Threads were woken since that was asked last.
    woken: bool,
    grants: u64,
    /// When time was charged last.
    charged_ns: u64,
    /// When the next look was planned.
    planned_ns: Option<u64>,
    crowded_until_ns: u64,
    busy: Recent,
    offences: Vec<(TenantId, Offence)>,
    /// Where its tenants' memory is.
    keeper: Keeper,
    /// Scratch of `decide`, kept to allocate nothing.
    view: Vec<TenantView>,
    held: Vec<Holder>,
}

/// The turn of a gang.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Whose.
    pub tenant: TenantId,
    /// Number of the turn, so that the same tenant's next one is told from this one.
    pub number: u64,
    /// How long, in microseconds.
    pub quantum_us: u32,
    /// Others wait for its end.
    pub contended: bool,
}

impl Lane {
    /// A device without tenants.
    pub fn new(device: usize, setup: Setup, now_ns: u64) -> Self {
        Self {
            device,
            mode: setup.mode,
            pace: setup.pace,
            quantum: setup.pace.quantum.now(0, true),
            slice_us: 0,
            cost: SwitchCost::default(),
            handover: None,
            drained_ns: None,
            holders: setup.holders.max(1),
            answer: setup.answer,
            memory_bytes: setup.memory_bytes,
            policy: setup
                .policy
                .unwrap_or_else(|| Box::new(policy::Stride::new())),
            auto: Auto::new(now_ns),
            seats: Vec::new(),
            turn: None,
            all_in: false,
            gap: false,
            floor: None,
            coming: None,
            entry_ns: None,
            announced: None,
            woken: false,
            grants: 0,
            charged_ns: now_ns,
            planned_ns: None,
            crowded_until_ns: 0,
            busy: Recent::default(),
            offences: Vec::new(),
            keeper: Self::keeper(device),
            view: Vec::new(),
            held: Vec::new(),
        }
    }

    /// Runs the device in another way from here on; the next step acts on it. What was charged stays charged, and a policy
    /// that is replaced leaves its accounts behind.
    pub fn run_as(&mut self, now_ns: u64, setup: Setup) {
        self.charge(now_ns);
        let shorter = setup.pace.quantum.max_us;
        (self.pace, self.answer) = (setup.pace, setup.answer);
        (self.holders, self.memory_bytes) = (setup.holders.max(1), setup.memory_bytes);
        if let Some(policy) = setup.policy {
            self.policy = policy;
        }
        for seat in &mut self.seats {
            seat.quiet_ns = seat
                .quiet_ns
                .clamp(self.pace.quiet_ns, self.pace.quiet_max_ns);
            if let Some(hold) = &mut seat.hold {
                hold.quantum_us = hold.quantum_us.min(shorter);
            }
        }
        if self.mode != setup.mode {
            self.mode = setup.mode;
            self.auto = Auto::new(now_ns);
        }
    }

    /// A client of `tenant` comes. Its gate opens at once where its tenant holds the device or nobody does.
    pub fn add(
        &mut self,
        now_ns: u64,
        tenant: TenantId,
        terms: Terms,
        client: u64,
        pages: Rc<ClientPages>,
    ) {
        self.charge(now_ns);
        let at = match self.seats.iter().position(|seat| seat.tenant == tenant) {
            Some(at) => at,
            None => {
                self.seats
                    .push(Seat::new(now_ns, tenant, terms, &self.pace));
                self.seats.len() - 1
            }
        };
        self.keeper.add(tenant, client, &pages);
        let nobody = self.seats.iter().all(|seat| seat.hold.is_none());
        let free = nobody && self.turn.is_none() && self.coming.is_none();
        let grant = self.grant_of(&self.seats[at], now_ns, 0, 0);
        let seat = &mut self.seats[at];
        // Also before its first grant: it may come in by the clock, before that is written.
        pages.arbiter.set_window(self.device, grant.window_us);
        seat.standing = self.keeper.standing(tenant);
        seat.clients.push((client, Rc::clone(&pages)));
        seat.launches = seat.sample(self.device).launches;
        if seat.hold.is_some() {
            pages.arbiter.open(self.device, &grant);
        } else if (free || self.at_once())
            && self.seats[at].may_run()
            && self.seats[at].standing.is_in()
        {
            self.begin(now_ns, at, self.pace.quantum.promised_us, false);
        }
    }

    /// A client is gone. What it had in flight is no longer charged.
    pub fn remove(&mut self, now_ns: u64, client: u64) {
        self.charge(now_ns);
        self.keeper.remove(client);
        for seat in &mut self.seats {
            let before = seat.clients.len();
            seat.clients.retain(|(id, _)| *id != client);
            if seat.clients.len() == before {
                continue;
            }
            seat.launches = seat.sample(self.device).launches;
            if seat.clients.is_empty() {
                seat.empty();
            }
        }
    }

    /// A tenant is gone; what it used.
    pub fn retire(&mut self, now_ns: u64, tenant: TenantId) -> Option<Usage> {
        self.charge(now_ns);
        let at = self.seats.iter().position(|seat| seat.tenant == tenant)?;
        self.keeper.retire(tenant);
        self.turn = self.turn.filter(|turn| turn.tenant != tenant);
        self.floor = self.floor.filter(|id| *id != tenant);
        Some(self.seats.swap_remove(at).usage)
    }

    /// What a tenant had used before it was retired, for one that has come back.
    pub fn go_on_with(&mut self, tenant: TenantId, usage: Usage) {
        if let Some(seat) = self.seat_mut(tenant) {
            seat.usage = usage;
        }
    }

    /// New terms of a tenant.
    pub fn set_terms(&mut self, tenant: TenantId, terms: Terms) {
        if let Some(seat) = self.seat_mut(tenant) {
            let told = seat.terms.lodging;
            seat.terms = terms;
            (
                seat.terms.lodging.used_bytes,
                seat.terms.lodging.limit_bytes,
            ) = (told.used_bytes, told.limit_bytes);
            seat.bounds.set(terms.min_ppm, terms.max_ppm);
        }
    }

    /// What is known of a tenant's memory and its iterations, for policies that ask.
    pub fn inform(
        &mut self,
        tenant: TenantId,
        memory: Memory,
        iterations: Iterations,
        boundaries: Option<Boundaries>,
    ) {
        if let Some(seat) = self.seat_mut(tenant) {
            (seat.memory, seat.iterations) = (memory, iterations);
            seat.progress.follow(boundaries);
        }
    }

    /// Whether threads were woken, by the opening of a gate or before it, since this was asked last.
    pub fn take_woken(&mut self) -> bool {
        std::mem::take(&mut self.woken)
    }

    /// Opens every gate for good: the arbiter leaves.
    pub fn open_all(&mut self) {
        // One whose memory is away brings it back itself when it finds us gone, and must not run before.
        let there = self.seats.iter().filter(|seat| seat.standing.is_in());
        for seat in there {
            let grant = self.grant_of(seat, self.charged_ns, 0, 0);
            for (_, pages) in &seat.clients {
                pages.arbiter.open(self.device, &grant);
            }
        }
    }

    /// Looks, charges, decides and moves gates. Returns when to do it again at the latest; `None`: nobody is here.
    pub fn step(&mut self, now_ns: u64) -> Option<u64> {
        let planned_ns = self.look_and_decide(now_ns);
        self.planned_ns = planned_ns;
        planned_ns
    }

    fn look_and_decide(&mut self, now_ns: u64) -> Option<u64> {
        // A turn that was told beforehand has happened when it was to happen, however late it is confirmed.
        let now_ns = match (self.announced, self.coming) {
            (Some((tenant, Some(turn_ns))), Some(slice))
                if turn_ns <= now_ns && slice.tenant == tenant =>
            {
                self.enter(turn_ns, slice);
                now_ns
            }
            (Some((_, Some(turn_ns))), _) if turn_ns <= now_ns => turn_ns.max(self.charged_ns),
            _ => now_ns,
        };
        self.charge(now_ns);
        if self.seats.iter().all(|seat| seat.clients.is_empty()) {
            return None;
        }
        self.look(now_ns);
        let kept_ns = self.keep(now_ns);
        self.adapt(now_ns);
        let mut again_ns = self.bar(now_ns);
        let mut sooner = |ns: Option<u64>| {
            again_ns = match (again_ns, ns) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        };
        sooner(kept_ns);
        sooner(self.choose(now_ns));
        if self.at_once() {
            self.let_all_in(now_ns);
        } else {
            if std::mem::take(&mut self.all_in) {
                (0..self.seats.len()).for_each(|at| self.take(now_ns, at));
            }
            let decision = self.decide(now_ns);
            sooner(self.announce(now_ns, &decision));
            sooner(self.keep_company(now_ns));
        }
        self.set_windows(now_ns);
        self.mark_busy(now_ns);

        let contended = self.is_contended(now_ns);
        let tails = self.seats.iter().any(|seat| seat.tail_since_ns.is_some());
        let next_ns = if self.at_once() {
            now_ns + self.pace.tick_ns
        } else if contended && self.gap {
            now_ns + self.pace.gap_look_ns
        } else if contended || tails {
            now_ns + self.pace.look_ns
        } else if self.seats.iter().any(|seat| seat.busy) {
            now_ns + self.pace.tick_ns
        } else {
            now_ns + IDLE_TICK_NS
        };
        let next_ns = self
            .look_for_ends(now_ns)
            .map_or(next_ns, |ns| next_ns.min(ns));
        Some(again_ns.map_or(next_ns, |again_ns| next_ns.min(again_ns)))
    }

    /// When to look for the end of tails that nobody waits for, but that are learnt from.
    fn look_for_ends(&self, now_ns: u64) -> Option<u64> {
        if self.handover.is_none() || self.announced.is_some() {
            return None;
        }
        let tails = self.seats.iter();
        tails
            .filter_map(|seat| seat.tail.look_ns(seat.tail_since_ns?, now_ns))
            .min()
    }

    /// Somebody wants the device and does not have it.
    fn is_contended(&self, now_ns: u64) -> bool {
        let mut seats = self.seats.iter();
        seats.any(|seat| seat.hold.is_none() && seat.wants(now_ns) && seat.may_run())
    }

    /// Charges the time since the last look to those that were busy then.
    fn charge(&mut self, now_ns: u64) {
        let late_ns = late::late_ns(self.planned_ns, self.charged_ns, now_ns);
        // What nobody supervised is in no account.
        let unsupervised_ns = late::unsupervised_ns(late_ns);
        let late_ns = late_ns - unsupervised_ns;
        let until_ns = now_ns.saturating_sub(unsupervised_ns);
        let dt_ns = until_ns.saturating_sub(self.charged_ns);
        self.charged_ns = now_ns.max(self.charged_ns);
        if dt_ns == 0 {
            return;
        }
        let slices = self.slices();
        let tails = self.seats.iter().any(|seat| seat.tail_since_ns.is_some());
        let uses = |seat: &Seat| seat.busy && !(tails && now_ns <= seat.behind_until_ns);
        let busy = self.seats.iter().filter(|seat| uses(seat)).count() as u64;
        let wanting = self.seats.iter().filter(|seat| seat.busy || seat.waits);
        let contended = wanting.count() >= 2;
        for seat in &mut self.seats {
            let got_ns = if uses(seat) { dt_ns / busy.max(1) } else { 0 };
            seat.stand(got_ns, late_ns);
            let got_ns = seat.forgive(got_ns);
            let got_ns = if contended {
                seat.got_while_late_ns(until_ns, self.device, got_ns, late_ns / busy.max(1))
            } else {
                got_ns
            };
            if got_ns > 0 {
                self.policy.charge(seat.tenant, got_ns);
            }
            seat.charge(now_ns, dt_ns, got_ns, contended, slices);
        }
        if busy > 0 {
            self.busy.add(now_ns, dt_ns);
        }
    }

    /// Copies out what the clients claim.
    fn look(&mut self, now_ns: u64) {
        let mut waiting = self
            .seats
            .iter()
            .filter(|seat| seat.waits && seat.hold.is_none())
            .map(|seat| seat.class(now_ns))
            .peekable();
        self.gap = waiting.peek().is_some() && waiting.all(|class| class == Class::Opportunistic);
        self.drained_ns = None;
        for seat in &mut self.seats {
            let gap = self.gap && seat.terms.class == Class::Guaranteed;
            let drained_ns = seat.look(now_ns, self.device, &self.pace, gap);
            self.drained_ns = self.drained_ns.max(drained_ns);
        }
        self.learn_cost(now_ns);
    }

    /// Takes the device from those that may not run. Returns when one of them may again, or one that runs may not.
    fn bar(&mut self, now_ns: u64) -> Option<u64> {
        let slices = self.slices();
        for at in 0..self.seats.len() {
            if self.seats[at].hold.is_some() && !self.seats[at].may_run() {
                self.take(now_ns, at);
            }
        }
        let seats = self.seats.iter().filter(|seat| !seat.terms.paused);
        let active = seats.filter(|seat| seat.hold.is_some() || seat.waits);
        active
            .filter_map(|seat| Some(now_ns + seat.bounds.change_ns(slices)?))
            .min()
    }

    /// Chooses between slices and all at once, where that is left to us.
    fn choose(&mut self, now_ns: u64) -> Option<u64> {
        if self.mode != Mode::Auto {
            return None;
        }
        let before = self.auto.running();
        let at_work: Vec<Sample> = self
            .seats
            .iter()
            .filter(|seat| !seat.terms.paused && seat.usage.was_at_work(now_ns, AT_WORK_NS))
            .map(|seat| Sample {
                tenant: seat.tenant,
                class: seat.class(now_ns),
                launches: seat.sample(self.device).launches,
                wait_ns: seat.usage.wait_ns,
            })
            .collect();
        let peak = |seat: &Seat| seat.memory.peak_bytes();
        let needed = self.seats.iter().map(peak).fold(0, u64::saturating_add);
        let fits = self.memory_bytes == 0 || needed <= self.memory_bytes;
        // A gang is conducted, and its ranks on other devices may be in slices.
        let fits = fits && !self.seats.iter().any(|seat| seat.gang);
        let after = self.auto.step(now_ns, &at_work, fits);
        if before != after {
            tracing::info!("device {}: {}", self.device, self.auto.reason());
        }
        Some(self.auto.again_ns())
    }

    /// Everybody who may holds the device.
    fn let_all_in(&mut self, now_ns: u64) {
        self.tell(None);
        (self.turn, self.floor, self.coming) = (None, None, None);
        self.all_in = true;
        for at in 0..self.seats.len() {
            let seat = &self.seats[at];
            let there = seat.standing.is_in() && !seat.clients.is_empty();
            if seat.hold.is_none() && seat.may_run() && there {
                self.begin(now_ns, at, self.pace.quantum.promised_us, false);
            }
        }
    }

    /// A holder is charged for all of its slice while others wait: nobody else could use that time. Alone it is charged
    /// for what it uses.
    fn mark_busy(&mut self, now_ns: u64) {
        if self.at_once() || !self.is_contended(now_ns) {
            return;
        }
        for seat in &mut self.seats {
            seat.busy |= seat.hold.is_some();
        }
    }

    fn set_windows(&mut self, now_ns: u64) {
        for at in 0..self.seats.len() {
            let window_us = self.window_of(&self.seats[at], now_ns);
            let seat = &mut self.seats[at];
            if window_us != seat.window_us {
                seat.window_us = window_us;
                for (_, pages) in &seat.clients {
                    pages.arbiter.set_window(self.device, window_us);
                }
            }
        }
    }

    /// How much of a tenant's work may stay queued.
    fn window_of(&self, seat: &Seat, now_ns: u64) -> u32 {
        let guaranteed = |other: &Seat| {
            other.tenant != seat.tenant
                && !other.clients.is_empty()
                && other.class(now_ns) == Class::Guaranteed
                && !other.terms.paused
        };
        if seat.class(now_ns) == Class::Opportunistic && self.seats.iter().any(guaranteed) {
            self.pace.gap_window_us
        } else if now_ns < self.crowded_until_ns {
            self.pace.window_us
        } else {
            self.pace.lone_window_us
        }
    }

    fn grant_of(&self, seat: &Seat, now_ns: u64, quantum_us: u32, deadline_mono_ns: u64) -> Grant {
        Grant {
            number: self.grants,
            quantum_us,
            deadline_mono_ns,
            window_us: self.window_of(seat, now_ns),
        }
    }

    fn slices(&self) -> Slices {
        let QuantumBounds { min_us, max_us } = self.quantum;
        Slices {
            min_ns: i64::from(min_us) * 1000,
            max_ns: i64::from(max_us) * 1000,
        }
    }

    fn at_once(&self) -> bool {
        match self.mode {
            Mode::Exclusive => false,
            Mode::Concurrent => true,
            Mode::Auto => self.auto.running() == Running::AtOnce,
        }
    }

    fn seat(&self, tenant: TenantId) -> Option<&Seat> {
        self.seats.iter().find(|seat| seat.tenant == tenant)
    }

    fn seat_mut(&mut self, tenant: TenantId) -> Option<&mut Seat> {
        self.seats.iter_mut().find(|seat| seat.tenant == tenant)
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_control;
#[cfg(test)]
mod tests_gangs;
#[cfg(test)]
mod tests_residence;
#[cfg(test)]
mod tests_switch;
