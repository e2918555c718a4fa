//! The fast loop of one device: looks at its tenants, charges them, asks the policy and moves the
//! gates.
//!
//! In slices the gates of the tenants that hold the device are open, all others closed; usually one
//! tenant holds it, and a policy that packs several may let in more. Work that a tenant has in
//! flight when its gate closes is still charged to it while it lasts (its *drain*); the next
//! tenant's gate opens when it has ended. A drain that is too long to wait for overlaps with the
//! next tenant; time in which several are busy is split equally between them, unless the marks of
//! the holder tell that it had more of it (`contest`). In the mode `concurrent` all tenants hold
//! the device at once.
//!
//! A tenant that has the device to itself pays nothing: its gate stays open, without a deadline,
//! until another tenant waits. Only then does the scheduler look at the holder every few hundred
//! microseconds, to pass the device on as soon as it is idle.
//!
//! Some decisions come before the policy's: a tenant that is paused or has used up its cap does not
//! run; a gang has its turn on all of its devices (`gang`); a tenant that is owed its floor
//! (`bounds`) comes next.
//!
//! The parts of a [`DeviceScheduler`] have a file each, in which their invariants stand. `pace` has
//! what can be chosen, `entity` one tenant with parts of its own, `switch` the hand-overs,
//! `pre_wake` the wake-ups before them, `bounds` floors and caps, `host_stall` the cost of a look
//! that comes too late, `violation` the penalties of tenants that harm the others, `auto` the
//! choice between slices and all at once, `report` what others ask about a device. They take the
//! time as an argument and pages as they are; none owns a clock, a socket or a journal.

mod auto;
mod beside;
mod bounds;
mod co_ranks;
mod contest;
mod drain;
mod entity;
mod gang;
mod hand_over;
mod host_stall;
pub mod joint;
mod lend;
mod mode_switch;
mod pace;
mod pre_wake;
mod precedence;
mod progress;
mod report;
mod residence;
mod roster;
mod slice_choice;
mod switch;
mod time_account;
mod timeline;
mod unfinished;
mod violation;
mod windows;

use std::rc::Rc;

use channel::arbiter::ClientPages;
use channel::{Grant, Window};
use policy::{Class, Iterations, Memory, QuantumBounds, TenantId};

use crate::residency::ResidencyManager;
use crate::terms::Terms;
use crate::timeline::Ring;
use crate::usage::Usage;
use auto::Sample;
use bounds::Slices;
use contest::Contest;
use entity::{RunEntity, Stretch};
pub use gang::GangScheduler;
use hand_over::HandOver;
use lend::Lending;
use mode_switch::ModeSwitch;
pub use pace::{Answer, Mode, Pace, Setup};
use precedence::Precedence;
pub use precedence::Turn;
pub use progress::Boundaries;
pub use report::Targeted;
use roster::Roster;
use slice_choice::SliceChoice;
use time_account::{Passed, TimeAccount};
pub use violation::Violation;
use windows::Windows;

/// A tenant that has not wanted the device for so long is not at work. TIMEOUT: longer than a job
/// pauses to save or to evaluate: it is at work all the same.
const AT_WORK_NS: u64 = 10_000_000_000;
/// How long after a planned turn it is confirmed: the threads that turn by the clock have the
/// cores to themselves first.
const CONFIRM_NS: u64 = 50_000;
/// How often work that waits for the host is looked at beside others: what goes on has to be
/// charged. TIMEOUT: an alarm and a look cost a few microseconds.
const HOST_LOOK_NS: u64 = 1_000_000;
/// While nothing happens at all.
const IDLE_TICK_NS: u64 = 100_000_000;

/// One device.
///
/// Its parts keep their own invariants: `roster` has the tenants, `mode` the change between slices
/// and all at once, `hand_over` the passing of the device, `precedence` what comes before the
/// policy, `choice` the policy itself, `windows` how much may stay queued, `time` what is
/// accounted, `contest` what of that is not known yet to be whose, `timeline` the spans that have
/// ended, `residency` where memory is.
#[derive(Debug)]
pub struct DeviceScheduler {
    device: usize,
    pace: Pace,
    answer: Answer,
    roster: Roster,
    mode: ModeSwitch,
    lending: Lending,
    hand_over: HandOver,
    precedence: Precedence,
    choice: SliceChoice,
    windows: Windows,
    time: TimeAccount,
    contest: Contest,
    timeline: Ring,
    residency: ResidencyManager,
    /// Only opportunistic tenants wait.
    gap: bool,
    grants: u64,
    /// Threads were woken since that was asked last.
    woken: bool,
    violations: Vec<(TenantId, Violation)>,
}

impl DeviceScheduler {
    /// A device without tenants.
    pub fn new(device: usize, setup: Setup, now_ns: u64) -> Self {
        let mut new = Self {
            device,
            pace: setup.pace,
            answer: setup.answer,
            roster: Roster::default(),
            mode: ModeSwitch::new(setup.mode, now_ns),
            lending: Lending::new(),
            hand_over: HandOver::default(),
            precedence: Precedence::default(),
            choice: SliceChoice::new(
                setup.policy,
                setup.holders,
                setup.memory_bytes,
                setup.pace.quantum,
            ),
            windows: Windows::default(),
            time: TimeAccount::new(now_ns),
            contest: Contest::default(),
            timeline: Ring::new(now_ns),
            residency: ResidencyManager::new(device),
            gap: false,
            grants: 0,
            woken: false,
            violations: Vec::new(),
        };
        new.residency.coordinate(new.choice.coordinates());
        new
    }

    /// Changes how the device runs; the next step acts on it. What was charged stays charged, and a
    /// policy that is replaced leaves its accounts behind.
    pub fn run_as(&mut self, now_ns: u64, setup: Setup) {
        self.charge(now_ns);
        self.end_contest(now_ns);
        (self.pace, self.answer) = (setup.pace, setup.answer);
        self.choice
            .set(setup.policy, setup.holders, setup.memory_bytes);
        self.residency.coordinate(self.choice.coordinates());
        for entity in self.roster.iter_mut() {
            entity.adapt(&self.pace);
        }
        let before = self.at_once();
        if !self.mode.is(setup.mode) {
            self.lending = Lending::new();
        }
        self.mode.set(setup.mode, now_ns);
        if self.at_once() != before {
            self.trace_mode(now_ns);
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
        let pace = &self.pace;
        let new = || RunEntity::new(now_ns, tenant, terms, pace);
        let at = self.roster.position_or_add(tenant, new);
        self.residency.add(tenant, client, &pages);
        let free = self.roster.is_free()
            && self.precedence.turn().is_none()
            && self.hand_over.coming().is_none();
        let grant = self.grant_of(&self.roster[at], now_ns, 0, 0);
        let entity = &mut self.roster[at];
        // Also before its first grant: it may come in by the clock, before that is written.
        pages.arbiter.set_window(self.device, grant.window);
        entity.standing = self.residency.standing(tenant);
        entity.add_client(client, Rc::clone(&pages), self.device);
        if entity.holds() {
            pages.arbiter.open(self.device, &grant);
        } else if (free || self.at_once())
            && self.roster[at].may_run()
            && self.roster[at].standing.is_in()
        {
            self.begin(now_ns, at, self.pace.quantum.promised_us, false);
        }
    }

    /// A client is gone. What it had in flight is no longer charged.
    pub fn remove(&mut self, now_ns: u64, client: u64) {
        self.charge(now_ns);
        self.residency.remove(client);
        for entity in self.roster.iter_mut() {
            entity.remove_client(client, self.device);
        }
    }

    /// A tenant is gone; what it used.
    pub fn retire(&mut self, now_ns: u64, tenant: TenantId) -> Option<Usage> {
        self.charge(now_ns);
        self.end_contest(now_ns);
        let mut entity = self.roster.remove(tenant)?;
        self.end_trace(now_ns, &mut entity);
        self.residency.retire(tenant);
        self.precedence.retire(tenant);
        Some(entity.into_usage())
    }

    /// What a tenant had used before it was retired, for one that has come back.
    pub fn carry_over(&mut self, tenant: TenantId, usage: Usage) {
        if let Some(entity) = self.roster.find_mut(tenant) {
            entity.carry_over(usage);
        }
    }

    /// New terms of a tenant.
    pub fn set_terms(&mut self, tenant: TenantId, terms: Terms) {
        if let Some(entity) = self.roster.find_mut(tenant) {
            entity.set_terms(terms);
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
        if let Some(entity) = self.roster.find_mut(tenant) {
            entity.inform(memory, iterations, boundaries);
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
        let there = self.roster.iter().filter(|entity| entity.standing.is_in());
        for entity in there {
            let grant = self.grant_of(entity, self.time.charged_ns(), 0, 0);
            for (_, pages) in entity.clients() {
                pages.arbiter.open(self.device, &grant);
            }
        }
    }

    /// Looks, charges, decides and moves gates. Returns when to do it again at the latest; `None`:
    /// nobody is here.
    pub fn step(&mut self, now_ns: u64) -> Option<u64> {
        let planned_ns = self.look_and_decide(now_ns);
        // The gates have moved: nobody waits for this.
        self.trace(now_ns);
        self.time.plan(planned_ns);
        planned_ns
    }

    fn look_and_decide(&mut self, now_ns: u64) -> Option<u64> {
        // A planned turn has happened when it was due, however late it is confirmed.
        let now_ns = match (self.hand_over.pre_woken(), self.hand_over.coming()) {
            (Some((tenant, Some(turn_ns))), Some(slice))
                if turn_ns <= now_ns && slice.tenant == tenant =>
            {
                self.enter(turn_ns, slice);
                now_ns
            }
            (Some((_, Some(turn_ns))), _) if turn_ns <= now_ns => {
                turn_ns.max(self.time.charged_ns())
            }
            _ => now_ns,
        };
        self.charge(now_ns);
        if self.roster.is_deserted() {
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
        sooner(self.lend(now_ns));
        if self.at_once() {
            self.let_all_in(now_ns);
            self.move_gates(now_ns);
        } else {
            if self.mode.take_all_in() {
                (0..self.roster.len()).for_each(|at| self.take(now_ns, at));
                self.choice.resume();
            }
            let decision = self.decide(now_ns);
            sooner(self.pre_wake(now_ns, &decision));
            sooner(self.admit_co_ranks(now_ns));
        }
        self.set_windows(now_ns);
        self.mark_busy(now_ns);

        let contended = self.roster.is_contended(now_ns);
        let drains = self.roster.is_draining();
        let next_ns = if self.at_once() {
            now_ns + self.pace.tick_ns
        } else if contended && self.gap {
            now_ns + self.pace.gap_look_ns
        } else if contended || drains {
            now_ns + self.pace.look_ns
        } else if self.roster.iter().any(RunEntity::is_busy) {
            let waits = |entity: &RunEntity| !entity.holds() && entity.waits_for_host();
            if self.roster.iter().any(waits) {
                now_ns + HOST_LOOK_NS
            } else {
                now_ns + self.pace.tick_ns
            }
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
        if !self.hand_over.learns_from_drains() {
            return None;
        }
        let drains = self.roster.iter();
        drains
            .filter_map(RunEntity::drain)
            .filter_map(|(since_ns, drain)| drain.look_ns(since_ns, now_ns))
            .min()
    }

    /// Charges the time since the last look to those that were busy then.
    fn charge(&mut self, now_ns: u64) {
        let Some(passed) = self.time.pass(now_ns) else {
            return;
        };
        let Passed {
            until_ns,
            dt_ns,
            stall_ns,
        } = passed;
        let slices = self.slices();
        let beside = self.beside();
        let drains = self.roster.is_draining();
        let drain_on = self.roster.iter().any(RunEntity::drains_on);
        let served = |entity: &RunEntity| entity.is_served(now_ns, drains);
        let served_then = |entity: &RunEntity| entity.is_served_then(now_ns, drain_on);
        let count = |served: &dyn Fn(&RunEntity) -> bool| {
            self.roster.iter().filter(|entity| served(entity)).count() as u64
        };
        let (busy, busy_then) = (count(&served), count(&served_then));
        // A drain that was found to have ended is taken to have done so half way between the looks.
        let then_ns = if beside.ended && stall_ns == 0 {
            dt_ns / 2
        } else {
            0
        };
        let wanting = self
            .roster
            .iter()
            .filter(|entity| entity.is_busy() || entity.waits());
        let contended = wanting.count() >= 2;
        let stretch = Stretch {
            now_ns,
            dt_ns,
            contended,
            slices,
        };
        if self
            .contest
            .holder()
            .is_some_and(|it| beside.holder != Some(it))
        {
            // Its clients went away with its slice.
            self.end_contest(now_ns);
        }
        let holder = beside.holder.and_then(|holder| self.roster.find(holder));
        let holder_is_served = holder.is_some_and(served);
        let may_keep_back = beside
            .holder
            .is_some_and(|it| self.contest.may_keep_back(it));
        let contested = drains && holder_is_served && busy >= 2 && stall_ns == 0 && may_keep_back;
        if let Some(holder) = beside.holder.filter(|_| holder_is_served) {
            if contested {
                self.contest.share(holder, dt_ns - then_ns);
            }
            let own_ns = if contested { then_ns } else { dt_ns };
            self.contest.add_own(own_ns);
        }
        let splits = self.lending.splits();
        for entity in self.roster.iter_mut() {
            let part_ns = |ns: u64, served: bool, busy: u64| {
                if served { ns / busy.max(1) } else { 0 }
            };
            let first_ns = part_ns(dt_ns - then_ns, served(entity), busy);
            let got_ns = match splits {
                true => self.lending.take_charge(entity.tenant, dt_ns),
                false => first_ns + part_ns(then_ns, served_then(entity), busy_then),
            };
            entity.stand(got_ns, stall_ns);
            let got_ns = if contested && entity.drains() && first_ns > 0 {
                self.contest.keep_back(entity.tenant, first_ns);
                got_ns - first_ns
            } else {
                entity.forgive(got_ns)
            };
            let got_ns = if contended {
                entity.got_while_stalled_ns(until_ns, self.device, got_ns, stall_ns / busy.max(1))
            } else {
                got_ns
            };
            if got_ns > 0 {
                self.choice.charge(entity.tenant, got_ns);
            }
            entity.charge(stretch, got_ns);
        }
        if busy > 0 {
            self.time.add_busy(now_ns, dt_ns);
        }
    }

    /// Copies out what the clients claim.
    fn look(&mut self, now_ns: u64) {
        let mut waiting = self
            .roster
            .iter()
            .filter(|entity| entity.is_kept_waiting())
            .map(|entity| entity.class(now_ns))
            .peekable();
        self.gap = waiting.peek().is_some() && waiting.all(|class| class == Class::Opportunistic);
        self.hand_over.begin_step();
        for entity in self.roster.iter_mut() {
            let gap = self.gap && entity.terms().class == Class::Guaranteed;
            let drained_ns = entity.look(now_ns, self.device, &self.pace, gap);
            if let Some(drained_ns) = drained_ns {
                entity.note_drained(drained_ns);
            }
            self.hand_over.note_drained(drained_ns);
        }
        self.note_rivals(now_ns);
        self.settle_contest(now_ns);
        self.hand_over.learn(now_ns, self.device, &mut self.roster);
    }

    /// Tells each tenant whether another one uses the device or wants to.
    fn note_rivals(&mut self, now_ns: u64) {
        let rivals = self.roster.iter().filter(|it| it.is_a_rival(now_ns));
        let (first, several) = {
            let mut rivals = rivals.map(|it| it.tenant);
            (rivals.next(), rivals.next().is_some())
        };
        for entity in self.roster.iter_mut() {
            let rivals = several || first.is_some_and(|tenant| tenant != entity.tenant);
            entity.note_rivals(now_ns, rivals);
        }
    }

    /// Takes the device from those that may not run. Returns when one of them may again, or one
    /// that runs may not.
    fn bar(&mut self, now_ns: u64) -> Option<u64> {
        let slices = self.slices();
        for at in 0..self.roster.len() {
            if self.roster[at].holds() && !self.roster[at].may_run() {
                self.take(now_ns, at);
            }
        }
        let entities = self.roster.iter().filter(|entity| !entity.terms().paused);
        let active = entities.filter(|entity| entity.holds() || entity.waits());
        active
            .filter_map(|entity| Some(now_ns + entity.bounds().change_ns(slices)?))
            .min()
    }

    /// Chooses between slices and all at once, where that is left to us.
    fn choose(&mut self, now_ns: u64) -> Option<u64> {
        if !self.mode.is_auto() {
            return None;
        }
        let at_work: Vec<Sample> = self
            .roster
            .iter()
            .filter(|entity| {
                !entity.terms().paused && entity.usage().was_at_work(now_ns, AT_WORK_NS)
            })
            .map(|entity| {
                let seen = entity.sample(self.device);
                Sample {
                    tenant: entity.tenant,
                    class: entity.class(now_ns),
                    launches: seen.launches,
                    wait_ns: entity.usage().wait_ns,
                    at_rest: !seen.waits && !seen.is_on_device(),
                }
            })
            .collect();
        let peaks = self.roster.iter().map(RunEntity::peak_bytes);
        let needed = peaks.fold(0, u64::saturating_add);
        let fits = self.choice.fits(needed);
        // A gang is conducted, and its ranks on other devices may be in slices.
        let fits = fits && !self.roster.iter().any(|entity| entity.gang);
        let (again_ns, changed) = self.mode.step(now_ns, &at_work, fits);
        if changed {
            tracing::info!("device {}: {}", self.device, self.mode.reason());
            self.trace_mode(now_ns);
        }
        Some(again_ns)
    }

    /// Everybody who may holds the device.
    fn let_all_in(&mut self, now_ns: u64) {
        self.tell(None);
        self.precedence.clear();
        self.hand_over.none_is_coming();
        self.mode.note_all_in();
        for at in 0..self.roster.len() {
            let entity = &self.roster[at];
            let there = entity.standing.is_in() && !entity.clients().is_empty();
            if !entity.holds() && entity.may_run() && there {
                self.begin(now_ns, at, self.pace.quantum.promised_us, false);
            }
        }
    }

    /// A holder is charged for all of its slice while others wait: nobody else could use that time.
    /// Without others it is charged for what it uses.
    fn mark_busy(&mut self, now_ns: u64) {
        if self.at_once() || !self.roster.is_contended(now_ns) {
            return;
        }
        for entity in self.roster.iter_mut() {
            entity.note_contention();
        }
    }

    /// Gives everybody the bound that holds now.
    fn set_windows(&mut self, now_ns: u64) {
        for at in 0..self.roster.len() {
            let window = self.window_of(&self.roster[at], now_ns);
            self.roster[at].set_window(self.device, window);
        }
    }

    /// What opens a tenant's gates now.
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
            window: self.window_of(entity, now_ns),
        }
    }

    fn window_of(&self, entity: &RunEntity, now_ns: u64) -> Window {
        let most_us = self.choice.in_flight_us(entity.tenant);
        let beside = self.at_once() && entity.has_rivals(now_ns);
        if beside
            && self.mode.is_lend()
            && let Some(cap_us) = self.lending.cap_us(entity.tenant)
        {
            return Window::beside(cap_us.min(most_us.unwrap_or(u32::MAX)).max(1));
        }
        (self.windows).of(now_ns, (entity, beside), &self.roster, &self.pace, most_us)
    }

    fn slices(&self) -> Slices {
        let QuantumBounds { min_us, max_us } = self.choice.quantum();
        Slices {
            min_ns: i64::from(min_us) * 1000,
            max_ns: i64::from(max_us) * 1000,
        }
    }

    fn at_once(&self) -> bool {
        self.mode.at_once()
    }

    /// How long slices are from here on.
    fn adapt(&mut self, now_ns: u64) {
        let promised = self
            .roster
            .iter()
            .any(|entity| entity.competes(now_ns) && entity.class(now_ns) == Class::Guaranteed);
        let cost_ns = self.hand_over.whole_cost_ns(self.pace.turn_ns);
        self.choice.adapt(self.pace.quantum, cost_ns, promised);
    }

    /// Until when a hand-over is under way or near, where one is: other work of the arbiter waits
    /// until then.
    pub fn hands_over_until(&self, now_ns: u64) -> Option<u64> {
        self.hand_over.busy_until(now_ns)
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_control;
#[cfg(test)]
mod tests_gangs;
#[cfg(test)]
mod tests_host_waits;
#[cfg(test)]
mod tests_joint;
#[cfg(test)]
mod tests_lend;
#[cfg(test)]
mod tests_residence;
#[cfg(test)]
mod tests_switch;
