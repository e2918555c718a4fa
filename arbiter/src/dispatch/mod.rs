//! The fast loop of one device: looks at its tenants, charges them, asks the policy and moves the
//! gates.
//!
//! In slices the gates of the tenants that hold the device are open, all others closed; usually one
//! tenant holds it, and a policy that packs several may let in more. Work that a tenant has in
//! flight when its gate closes is still charged to it while it lasts (its *drain*); the next
//! tenant's gate opens when it has ended. A drain that is too long to wait for overlaps with the
//! next tenant; time in which several are busy is split equally between them. In the mode
//! `concurrent` all tenants hold the device at once.
//!
//! A tenant that has the device to itself pays nothing: its gate stays open, without a deadline,
//! until another tenant waits. Only then does the scheduler look at the holder every few hundred
//! microseconds, to pass the device on as soon as it is idle.
//!
//! Some decisions come before the policy's: a tenant that is paused or has used up its cap does not
//! run; a gang has its turn on all of its devices (`gang`); a tenant that is owed its floor
//! (`bounds`) comes next.
//!
//! `pace` has what can be chosen, `entity` one tenant, `switch` the hand-overs, `pre_wake` the
//! wake-ups before them, `bounds` floors and caps, `host_stall` the cost of a look that comes too
//! late, `violation` the penalties of tenants that harm the others, `auto` the choice between
//! slices and all at once, `report` what others ask about a device. They take the time as an
//! argument and pages as they are; none owns a clock, a socket or a journal.

mod auto;
mod bounds;
mod co_ranks;
mod cost;
mod drain;
mod entity;
mod gang;
mod host_stall;
mod pace;
mod pre_wake;
mod progress;
mod report;
mod residence;
mod switch;
mod unfinished;
mod violation;

use std::rc::Rc;

use channel::Grant;
use channel::arbiter::ClientPages;
use policy::quantum::SwitchCost;
use policy::{
    Class, Holder, Iterations, Memory, QuantumBounds, Slice, SlicePolicy, TenantId, TenantView,
};

use crate::residency::ResidencyManager;
use crate::terms::Terms;
use crate::usage::{Recent, Usage};
use auto::{Auto, Running, Sample};
use bounds::Slices;
use cost::Handover;
use entity::RunEntity;
pub use gang::GangScheduler;
pub use pace::{Answer, Mode, Pace, Setup};
pub use progress::Boundaries;
pub use violation::Violation;

/// For how long after a moment of contention the small window stays.
const CROWDED_NS: u64 = 1_000_000_000;
/// A tenant that has not wanted the device for so long is not at work.
const AT_WORK_NS: u64 = 1_000_000_000;
/// How long after a planned turn it is confirmed: the threads that turn by the clock have the
/// cores to themselves first.
const CONFIRM_NS: u64 = 50_000;
/// While nothing happens at all.
const IDLE_TICK_NS: u64 = 100_000_000;

/// One device.
#[derive(Debug)]
pub struct DeviceScheduler {
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
    /// When the drain that was waited for has ended, where that was found in this step.
    drained_ns: Option<u64>,
    holders: usize,
    answer: Answer,
    memory_bytes: u64,
    policy: Box<dyn SlicePolicy>,
    auto: Auto,
    entities: Vec<RunEntity>,
    /// A gang's turn, which no policy touches.
    turn: Option<Turn>,
    /// Everybody was let in.
    all_in: bool,
    /// Only opportunistic tenants wait.
    gap: bool,
    /// Who runs for the sake of its floor, likewise.
    floor: Option<TenantId>,
    /// The slice that begins when the drains before it have ended.
    coming: Option<Slice>,
    /// When it begins although they have not, where their end is known well enough.
    entry_ns: Option<u64>,
    /// The tenant whose gate is about to open, and when: at a time that it and the holder know, or
    /// (`None`) when a drain has ended.
    pre_woken: Option<(TenantId, Option<u64>)>,
    /// Threads were woken since that was asked last.
    woken: bool,
    grants: u64,
    /// When time was charged last.
    charged_ns: u64,
    /// When the next look was planned.
    planned_ns: Option<u64>,
    crowded_until_ns: u64,
    busy: Recent,
    violations: Vec<(TenantId, Violation)>,
    /// Where its tenants' memory is.
    residency: ResidencyManager,
    /// Scratch of `decide`, kept to allocate nothing.
    view: Vec<TenantView>,
    held: Vec<Holder>,
}

/// The turn of a gang.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Whose.
    pub tenant: TenantId,
    /// Number of the turn, which distinguishes it from the same tenant's next one.
    pub number: u64,
    /// How long, in microseconds.
    pub quantum_us: u32,
    /// Others wait for its end.
    pub contended: bool,
}

impl DeviceScheduler {
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
            entities: Vec::new(),
            turn: None,
            all_in: false,
            gap: false,
            floor: None,
            coming: None,
            entry_ns: None,
            pre_woken: None,
            woken: false,
            grants: 0,
            charged_ns: now_ns,
            planned_ns: None,
            crowded_until_ns: 0,
            busy: Recent::default(),
            violations: Vec::new(),
            residency: Self::residency(device),
            view: Vec::new(),
            held: Vec::new(),
        }
    }

    /// Changes how the device runs; the next step acts on it. What was charged stays charged, and a
    /// policy that is replaced leaves its accounts behind.
    pub fn run_as(&mut self, now_ns: u64, setup: Setup) {
        self.charge(now_ns);
        let shorter = setup.pace.quantum.max_us;
        (self.pace, self.answer) = (setup.pace, setup.answer);
        (self.holders, self.memory_bytes) = (setup.holders.max(1), setup.memory_bytes);
        if let Some(policy) = setup.policy {
            self.policy = policy;
        }
        for entity in &mut self.entities {
            entity.quiet_ns = entity
                .quiet_ns
                .clamp(self.pace.quiet_ns, self.pace.quiet_max_ns);
            if let Some(hold) = &mut entity.hold {
                hold.quantum_us = hold.quantum_us.min(shorter);
            }
        }
        if self.mode != setup.mode {
            self.mode = setup.mode;
            self.auto = Auto::new(now_ns);
        }
    }

    /// A client of `tenant` comes. Its gate opens at once where its tenant holds the device or
    /// nobody does.
    pub fn add(
        &mut self,
        now_ns: u64,
        tenant: TenantId,
        terms: Terms,
        client: u64,
        pages: Rc<ClientPages>,
    ) {
        self.charge(now_ns);
        let at = match self
            .entities
            .iter()
            .position(|entity| entity.tenant == tenant)
        {
            Some(at) => at,
            None => {
                self.entities
                    .push(RunEntity::new(now_ns, tenant, terms, &self.pace));
                self.entities.len() - 1
            }
        };
        self.residency.add(tenant, client, &pages);
        let nobody = self.entities.iter().all(|entity| entity.hold.is_none());
        let free = nobody && self.turn.is_none() && self.coming.is_none();
        let grant = self.grant_of(&self.entities[at], now_ns, 0, 0);
        let entity = &mut self.entities[at];
        // Also before its first grant: it may come in by the clock, before that is written.
        pages.arbiter.set_window(self.device, grant.window_us);
        entity.standing = self.residency.standing(tenant);
        entity.clients.push((client, Rc::clone(&pages)));
        entity.launches = entity.sample(self.device).launches;
        if entity.hold.is_some() {
            pages.arbiter.open(self.device, &grant);
        } else if (free || self.at_once())
            && self.entities[at].may_run()
            && self.entities[at].standing.is_in()
        {
            self.begin(now_ns, at, self.pace.quantum.promised_us, false);
        }
    }

    /// A client is gone. What it had in flight is no longer charged.
    pub fn remove(&mut self, now_ns: u64, client: u64) {
        self.charge(now_ns);
        self.residency.remove(client);
        for entity in &mut self.entities {
            let before = entity.clients.len();
            entity.clients.retain(|(id, _)| *id != client);
            if entity.clients.len() == before {
                continue;
            }
            entity.launches = entity.sample(self.device).launches;
            if entity.clients.is_empty() {
                entity.empty();
            }
        }
    }

    /// A tenant is gone; what it used.
    pub fn retire(&mut self, now_ns: u64, tenant: TenantId) -> Option<Usage> {
        self.charge(now_ns);
        let at = self
            .entities
            .iter()
            .position(|entity| entity.tenant == tenant)?;
        self.residency.retire(tenant);
        self.turn = self.turn.filter(|turn| turn.tenant != tenant);
        self.floor = self.floor.filter(|id| *id != tenant);
        Some(self.entities.swap_remove(at).usage)
    }

    /// What a tenant had used before it was retired, for one that has come back.
    pub fn carry_over(&mut self, tenant: TenantId, usage: Usage) {
        if let Some(entity) = self.entity_mut(tenant) {
            entity.usage = usage;
        }
    }

    /// New terms of a tenant.
    pub fn set_terms(&mut self, tenant: TenantId, terms: Terms) {
        if let Some(entity) = self.entity_mut(tenant) {
            let report = entity.terms.residency;
            entity.terms = terms;
            (
                entity.terms.residency.used_bytes,
                entity.terms.residency.limit_bytes,
            ) = (report.used_bytes, report.limit_bytes);
            entity.bounds.set(terms.min_ppm, terms.max_ppm);
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
        if let Some(entity) = self.entity_mut(tenant) {
            (entity.memory, entity.iterations) = (memory, iterations);
            entity.progress.follow(boundaries);
        }
    }

    /// Whether threads were woken, by the opening of a gate or before it, since this was asked
    /// last.
    pub fn take_woken(&mut self) -> bool {
        std::mem::take(&mut self.woken)
    }

    /// Opens every gate for good: the arbiter leaves.
    pub fn open_all(&mut self) {
        // A client whose memory is away brings it back itself when it finds us gone, and must not
        // run before.
        let there = self
            .entities
            .iter()
            .filter(|entity| entity.standing.is_in());
        for entity in there {
            let grant = self.grant_of(entity, self.charged_ns, 0, 0);
            for (_, pages) in &entity.clients {
                pages.arbiter.open(self.device, &grant);
            }
        }
    }

    /// Looks, charges, decides and moves gates. Returns when to do it again at the latest; `None`:
    /// nobody is here.
    pub fn step(&mut self, now_ns: u64) -> Option<u64> {
        let planned_ns = self.look_and_decide(now_ns);
        self.planned_ns = planned_ns;
        planned_ns
    }

    fn look_and_decide(&mut self, now_ns: u64) -> Option<u64> {
        // A planned turn has happened when it was due, however late it is confirmed.
        let now_ns = match (self.pre_woken, self.coming) {
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
        if self.entities.iter().all(|entity| entity.clients.is_empty()) {
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
                (0..self.entities.len()).for_each(|at| self.take(now_ns, at));
            }
            let decision = self.decide(now_ns);
            sooner(self.pre_wake(now_ns, &decision));
            sooner(self.admit_co_ranks(now_ns));
        }
        self.set_windows(now_ns);
        self.mark_busy(now_ns);

        let contended = self.is_contended(now_ns);
        let drains = self
            .entities
            .iter()
            .any(|entity| entity.drain_since_ns.is_some());
        let next_ns = if self.at_once() {
            now_ns + self.pace.tick_ns
        } else if contended && self.gap {
            now_ns + self.pace.gap_look_ns
        } else if contended || drains {
            now_ns + self.pace.look_ns
        } else if self.entities.iter().any(|entity| entity.busy) {
            now_ns + self.pace.tick_ns
        } else {
            now_ns + IDLE_TICK_NS
        };
        let next_ns = self
            .look_for_ends(now_ns)
            .map_or(next_ns, |ns| next_ns.min(ns));
        Some(again_ns.map_or(next_ns, |again_ns| next_ns.min(again_ns)))
    }

    /// When to look for the end of drains that nobody waits for, but that are learnt from.
    fn look_for_ends(&self, now_ns: u64) -> Option<u64> {
        if self.handover.is_none() || self.pre_woken.is_some() {
            return None;
        }
        let drains = self.entities.iter();
        drains
            .filter_map(|entity| entity.drain.look_ns(entity.drain_since_ns?, now_ns))
            .min()
    }

    /// Somebody wants the device and does not have it.
    fn is_contended(&self, now_ns: u64) -> bool {
        let mut entities = self.entities.iter();
        entities.any(|entity| entity.hold.is_none() && entity.wants(now_ns) && entity.may_run())
    }

    /// Charges the time since the last look to those that were busy then.
    fn charge(&mut self, now_ns: u64) {
        let stall_ns = host_stall::stall_ns(self.planned_ns, self.charged_ns, now_ns);
        // What nobody supervised is in no account.
        let unsupervised_ns = host_stall::unsupervised_ns(stall_ns);
        let stall_ns = stall_ns - unsupervised_ns;
        let until_ns = now_ns.saturating_sub(unsupervised_ns);
        let dt_ns = until_ns.saturating_sub(self.charged_ns);
        self.charged_ns = now_ns.max(self.charged_ns);
        if dt_ns == 0 {
            return;
        }
        let slices = self.slices();
        let drains = self
            .entities
            .iter()
            .any(|entity| entity.drain_since_ns.is_some());
        let uses =
            |entity: &RunEntity| entity.busy && !(drains && now_ns <= entity.behind_until_ns);
        let busy = self.entities.iter().filter(|entity| uses(entity)).count() as u64;
        let wanting = self
            .entities
            .iter()
            .filter(|entity| entity.busy || entity.waits);
        let contended = wanting.count() >= 2;
        for entity in &mut self.entities {
            let got_ns = if uses(entity) { dt_ns / busy.max(1) } else { 0 };
            entity.stand(got_ns, stall_ns);
            let got_ns = entity.forgive(got_ns);
            let got_ns = if contended {
                entity.got_while_stalled_ns(until_ns, self.device, got_ns, stall_ns / busy.max(1))
            } else {
                got_ns
            };
            if got_ns > 0 {
                self.policy.charge(entity.tenant, got_ns);
            }
            entity.charge(now_ns, dt_ns, got_ns, contended, slices);
        }
        if busy > 0 {
            self.busy.add(now_ns, dt_ns);
        }
    }

    /// Copies out what the clients claim.
    fn look(&mut self, now_ns: u64) {
        let mut waiting = self
            .entities
            .iter()
            .filter(|entity| entity.waits && entity.hold.is_none())
            .map(|entity| entity.class(now_ns))
            .peekable();
        self.gap = waiting.peek().is_some() && waiting.all(|class| class == Class::Opportunistic);
        self.drained_ns = None;
        for entity in &mut self.entities {
            let gap = self.gap && entity.terms.class == Class::Guaranteed;
            let drained_ns = entity.look(now_ns, self.device, &self.pace, gap);
            self.drained_ns = self.drained_ns.max(drained_ns);
        }
        self.learn_cost(now_ns);
    }

    /// Takes the device from those that may not run. Returns when one of them may again, or one
    /// that runs may not.
    fn bar(&mut self, now_ns: u64) -> Option<u64> {
        let slices = self.slices();
        for at in 0..self.entities.len() {
            if self.entities[at].hold.is_some() && !self.entities[at].may_run() {
                self.take(now_ns, at);
            }
        }
        let entities = self.entities.iter().filter(|entity| !entity.terms.paused);
        let active = entities.filter(|entity| entity.hold.is_some() || entity.waits);
        active
            .filter_map(|entity| Some(now_ns + entity.bounds.change_ns(slices)?))
            .min()
    }

    /// Chooses between slices and all at once, where that is left to us.
    fn choose(&mut self, now_ns: u64) -> Option<u64> {
        if self.mode != Mode::Auto {
            return None;
        }
        let before = self.auto.running();
        let at_work: Vec<Sample> = self
            .entities
            .iter()
            .filter(|entity| !entity.terms.paused && entity.usage.was_at_work(now_ns, AT_WORK_NS))
            .map(|entity| Sample {
                tenant: entity.tenant,
                class: entity.class(now_ns),
                launches: entity.sample(self.device).launches,
                wait_ns: entity.usage.wait_ns,
            })
            .collect();
        let peak = |entity: &RunEntity| entity.memory.peak_bytes();
        let needed = self.entities.iter().map(peak).fold(0, u64::saturating_add);
        let fits = self.memory_bytes == 0 || needed <= self.memory_bytes;
        // A gang is conducted, and its ranks on other devices may be in slices.
        let fits = fits && !self.entities.iter().any(|entity| entity.gang);
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
        for at in 0..self.entities.len() {
            let entity = &self.entities[at];
            let there = entity.standing.is_in() && !entity.clients.is_empty();
            if entity.hold.is_none() && entity.may_run() && there {
                self.begin(now_ns, at, self.pace.quantum.promised_us, false);
            }
        }
    }

    /// A holder is charged for all of its slice while others wait: nobody else could use that time.
    /// Without others it is charged for what it uses.
    fn mark_busy(&mut self, now_ns: u64) {
        if self.at_once() || !self.is_contended(now_ns) {
            return;
        }
        for entity in &mut self.entities {
            entity.busy |= entity.hold.is_some();
        }
    }

    fn set_windows(&mut self, now_ns: u64) {
        for at in 0..self.entities.len() {
            let window_us = self.window_of(&self.entities[at], now_ns);
            let entity = &mut self.entities[at];
            if window_us != entity.window_us {
                entity.window_us = window_us;
                for (_, pages) in &entity.clients {
                    pages.arbiter.set_window(self.device, window_us);
                }
            }
        }
    }

    /// How much of a tenant's work may stay queued.
    fn window_of(&self, entity: &RunEntity, now_ns: u64) -> u32 {
        let guaranteed = |other: &RunEntity| {
            other.tenant != entity.tenant
                && !other.clients.is_empty()
                && other.class(now_ns) == Class::Guaranteed
                && !other.terms.paused
        };
        if entity.class(now_ns) == Class::Opportunistic && self.entities.iter().any(guaranteed) {
            self.pace.gap_window_us
        } else if now_ns < self.crowded_until_ns {
            self.pace.window_us
        } else {
            self.pace.lone_window_us
        }
    }

    fn grant_of(
        &self,
        entity: &RunEntity,
        now_ns: u64,
        quantum_us: u32,
        deadline_mono_ns: u64,
    ) -> Grant {
        Grant {
            number: self.grants,
            quantum_us,
            deadline_mono_ns,
            window_us: self.window_of(entity, now_ns),
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

    fn entity(&self, tenant: TenantId) -> Option<&RunEntity> {
        self.entities.iter().find(|entity| entity.tenant == tenant)
    }

    fn entity_mut(&mut self, tenant: TenantId) -> Option<&mut RunEntity> {
        self.entities
            .iter_mut()
            .find(|entity| entity.tenant == tenant)
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
