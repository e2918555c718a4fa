//! A tenant's run entity on a device: the one place that moves its parts together.
//!
//! Its parts keep their own invariants: `clients` has the processes and their gates, `hold` the
//! slice that it has, `in_flight` what its slices leave on the device, `co_ranks` who is let in
//! beside that, `demand` whether it wants and uses the device, `responsiveness` whether it comes
//! when it is let in, `submissions` what it submits, `account` what it used, `closed_gate` what it
//! submits past its gate, `rivalry` whether anybody else wants the device, `profile` what a policy
//! may know beyond that.
//!
//! Invariants: the account has the floor and the cap of the terms; what a tenant is charged in
//! memory outlives new terms; a tenant without clients neither holds the device nor wants it.

mod account;
mod clients;
mod closed_gate;
mod co_ranks;
mod demand;
mod hold;
mod in_flight;
mod profile;
mod responsiveness;
mod rivalry;
mod submissions;
mod trace;

use std::rc::Rc;

use channel::arbiter::ClientPages;
use channel::{Grant, Window};
use policy::residency::Standing;
use policy::{Class, Holder, Iterations, Memory, TenantId, TenantView};

use super::bounds::Bounds;
use super::drain::Drain;
use super::pace::{Answer, Pace};
use super::progress::Boundaries;
use super::violation::{Violation, ViolationRecord};
use crate::peer::Activity;
use crate::terms::Terms;
use crate::timeline::{Kind, Span};
use crate::usage::Usage;
pub(super) use account::Stretch;
use account::{Account, Stood};
use clients::Clients;
use closed_gate::ClosedGate;
use co_ranks::CoRanks;
pub(super) use co_ranks::Standstill;
use demand::{Demand, Look};
use hold::{Hold, Holding};
use in_flight::InFlight;
use profile::Profile;
use responsiveness::Responsiveness;
use rivalry::Rivalry;
use submissions::Submissions;
use trace::Trace;

/// A thread that was let in says so within this time; later its waiting is no sign of life.
/// TIMEOUT: the wake-up of a thread on a host with more threads than cores takes a few
/// milliseconds.
const WAKE_NS: u64 = 10_000_000;

/// A departure for which the work of a process has not ended by then may wait for what its threads
/// would submit. TIMEOUT: the longest that in-flight work of one device is given for that.
const DEPARTURE_NS: u64 = 50_000_000;

/// A tenant of the device.
#[derive(Debug)]
pub(super) struct RunEntity {
    pub tenant: TenantId,
    /// Whether its memory is where it can be used.
    pub standing: Standing,
    /// Its memory is to leave, once its work has ended.
    pub leaves: bool,
    /// It is granted together with its run entities on other devices or not at all, by the gang
    /// scheduler.
    pub gang: bool,
    terms: Terms,
    clients: Clients,
    holding: Holding,
    in_flight: InFlight,
    /// Those that its in-flight work waits for.
    co_ranks: CoRanks,
    /// Since when its memory has been about to leave.
    leaving_since_ns: Option<u64>,
    demand: Demand,
    rivalry: Rivalry,
    responsiveness: Responsiveness,
    submissions: Submissions,
    account: Account,
    record: ViolationRecord,
    closed_gate: ClosedGate,
    profile: Profile,
    trace: Trace,
}

/// What a tenant is in the middle of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Open {
    /// Device time charged, ever.
    pub device_ns: u64,
    /// Of that, what is in no span yet.
    pub pending_ns: u64,
    /// What has not ended, and since when.
    pub spans: Vec<(Kind, u64)>,
}

/// What it is, and what it is given.
impl RunEntity {
    pub fn new(now_ns: u64, tenant: TenantId, terms: Terms, pace: &Pace) -> Self {
        Self {
            tenant,
            standing: Standing::In,
            leaves: false,
            gang: false,
            terms,
            clients: Clients::new(Window::always(pace.lone_window_us)),
            holding: Holding::default(),
            in_flight: InFlight::default(),
            co_ranks: CoRanks::default(),
            leaving_since_ns: None,
            demand: Demand::new(pace),
            rivalry: Rivalry::default(),
            responsiveness: Responsiveness::default(),
            submissions: Submissions::default(),
            account: Account::new(now_ns, terms.min_ppm, terms.max_ppm),
            record: ViolationRecord::default(),
            closed_gate: ClosedGate::new(now_ns),
            profile: Profile::default(),
            trace: Trace::default(),
        }
    }

    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// New terms. What it is charged in memory is noted apart from them.
    pub fn set_terms(&mut self, terms: Terms) {
        let before = self.terms.residency;
        self.terms = terms;
        self.note_memory(before.used_bytes, before.limit_bytes);
        self.account.set_bounds(terms.min_ppm, terms.max_ppm);
    }

    /// What it is charged in memory, and its limit, in bytes.
    pub fn note_memory(&mut self, used_bytes: u64, limit_bytes: Option<u64>) {
        self.terms.residency.used_bytes = used_bytes;
        self.terms.residency.limit_bytes = limit_bytes;
    }

    /// What is known of its memory and its iterations.
    pub fn inform(
        &mut self,
        memory: Memory,
        iterations: Iterations,
        boundaries: Option<Boundaries>,
    ) {
        self.profile.inform(memory, iterations, boundaries);
    }

    /// The device runs at another pace.
    pub fn adapt(&mut self, pace: &Pace) {
        self.demand.adapt(pace);
        self.holding.shorten(pace.quantum.max_us);
    }

    /// A client comes.
    pub fn add_client(&mut self, client: u64, pages: Rc<ClientPages>, device: usize) {
        self.clients.add(client, pages);
        self.submissions.count_from(self.clients.sample(device));
    }

    /// A client is gone, if it is one of these.
    pub fn remove_client(&mut self, client: u64, device: usize) {
        if !self.clients.remove(client, device) {
            return;
        }
        self.submissions.count_from(self.clients.sample(device));
        if self.clients().is_empty() {
            self.demand.clear();
            self.in_flight.clear();
            self.holding.end();
        }
    }

    /// What it had used before it was retired, where it has come back.
    pub fn carry_over(&mut self, usage: Usage) {
        self.trace.begin_at(usage.device_ns);
        self.account.carry_over(usage);
    }

    /// It is gone; what it used.
    pub fn into_usage(self) -> Usage {
        self.account.into_usage()
    }

    /// Gives its clients an in-flight bound.
    pub fn set_window(&mut self, device: usize, window: Window) {
        self.clients.set_window(device, window);
    }
}

/// How it stands.
impl RunEntity {
    /// Its clients, by number.
    pub fn clients(&self) -> &[(u64, Rc<ClientPages>)] {
        self.clients.all()
    }

    /// The in-flight bound of its clients.
    pub fn window_us(&self) -> u32 {
        self.clients.window_us()
    }

    pub fn sample(&self, device: usize) -> Activity {
        self.clients.sample(device)
    }

    /// The slice that it has.
    pub fn hold(&self) -> Option<Hold> {
        self.holding.hold()
    }

    /// Whether it holds the device.
    pub fn holds(&self) -> bool {
        self.hold().is_some()
    }

    /// For how long a slice that began now would wait for it to come.
    pub fn grace_ns(&self) -> u64 {
        if self.holds() {
            return 0;
        }
        self.holding.grace_ns(self.demand.waits())
    }

    /// The drain under way, and since when.
    pub fn drain(&self) -> Option<(u64, &Drain)> {
        self.in_flight.drain()
    }

    /// Whether in-flight work of it is left after its slice.
    pub fn drains(&self) -> bool {
        self.in_flight.drains()
    }

    /// How long its drains are.
    pub fn mean_drain_ns(&self) -> u64 {
        self.in_flight.mean_ns()
    }

    /// The co-ranks that its in-flight work waits for.
    pub fn co_ranks(&self) -> &CoRanks {
        &self.co_ranks
    }

    /// Whether somebody waits at its gate.
    pub fn waits(&self) -> bool {
        self.demand.waits()
    }

    /// Whether somebody waits at its gate, which is closed.
    pub fn is_kept_waiting(&self) -> bool {
        self.demand.waits() && !self.holds()
    }

    /// Whether it is charged for the time from here on.
    pub fn is_busy(&self) -> bool {
        self.demand.is_busy()
    }

    /// When it counts as idle, where it holds the device and has nothing on it.
    pub fn idle_ns(&self) -> Option<u64> {
        self.demand.idle_ns()
    }

    /// Whether it would use the device if it were let in.
    pub fn wants(&self, now_ns: u64) -> bool {
        self.demand.wants(now_ns)
    }

    /// Whether it may run at all: neither its owner, nor its cap, nor the place of its memory holds
    /// it back.
    pub fn may_run(&self) -> bool {
        !self.terms.paused && !self.bounds().is_barred() && self.standing.may_run()
    }

    /// Whether it is to be let in: it wants the device, or has it and uses it, and may.
    pub fn competes(&self, now_ns: u64) -> bool {
        self.may_run()
            && if self.holds() {
                self.is_busy()
            } else {
                self.wants(now_ns) && !self.is_stuck(now_ns)
            }
    }

    /// Whether it is demoted for endless work that is still on the device, where more of its work
    /// would only come behind that. Streams that get on beside it do not: the endless one may even
    /// wait for what they do. Nor is it in anybody's way while nobody else wants the device.
    fn is_stuck(&self, now_ns: u64) -> bool {
        self.has_endless_work(now_ns) && !self.rivalry.is_over(now_ns)
    }

    fn has_endless_work(&self, now_ns: u64) -> bool {
        let endless = matches!(self.demoted(now_ns), Some(Violation::Endless { .. }));
        endless && self.in_flight.is_in_the_way()
    }

    /// Whether others have to wait where it is let in: it uses the device, or wants to, and not
    /// only to come behind its own endless work.
    pub fn is_a_rival(&self, now_ns: u64) -> bool {
        let at_it = if self.holds() {
            self.is_busy()
        } else {
            self.wants(now_ns) && !self.has_endless_work(now_ns)
        };
        at_it && self.may_run() && !self.clients().is_empty()
    }

    /// Whether others use the device or want it, or did a moment ago.
    pub fn has_rivals(&self, now_ns: u64) -> bool {
        !self.rivalry.is_over(now_ns)
    }

    /// Whether it may be let in beside its own work that stands still, to a bounded extent: neither
    /// its owner nor the place of its memory holds it back. A cap does not, for what stands there
    /// may use it up for good. While its memory is about to move the work has to end first.
    pub fn may_help(&self) -> bool {
        !self.terms.paused && matches!(self.standing, Standing::In | Standing::Moving)
    }

    /// Whether streams that it has left wait for the host.
    pub fn waits_for_host(&self) -> bool {
        self.in_flight.waits_for_host()
    }

    /// Whether the device works for it. `drains`: work of others is left of earlier slices.
    pub fn is_served(&self, now_ns: u64, drains: bool) -> bool {
        self.is_busy() && !(drains && self.holding.is_behind(now_ns))
    }

    /// The same from the moment on at which drains were found to have ended. `drains`: others have
    /// not.
    pub fn is_served_then(&self, now_ns: u64, drains: bool) -> bool {
        self.is_served(now_ns, drains) && !self.in_flight.has_ended()
    }

    /// Whether it drains still, where that was looked at.
    pub fn drains_on(&self) -> bool {
        self.drains() && !self.in_flight.has_ended()
    }

    /// Whether what it has on the device can be kept apart from what others have there: no work of
    /// theirs belongs to it.
    pub fn is_by_itself(&self) -> bool {
        !self.gang && !self.co_ranks.are_here()
    }

    /// What it submitted.
    pub fn submissions(&self) -> &Submissions {
        &self.submissions
    }

    /// What it used.
    pub fn usage(&self) -> &Usage {
        self.account.usage()
    }

    /// Its floor and its cap.
    pub fn bounds(&self) -> &Bounds {
        self.account.bounds()
    }

    /// The most memory that it is known to need, in bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.profile.memory().peak_bytes()
    }

    /// Why it runs after all others.
    pub fn demoted(&self, now_ns: u64) -> Option<Violation> {
        self.record.demoted(now_ns)
    }

    /// How often it was found to harm the others.
    pub fn violations(&self) -> u64 {
        self.record.count()
    }

    /// Its class as it is treated.
    pub fn class(&self, now_ns: u64) -> Class {
        if self.demoted(now_ns).is_some() {
            Class::Opportunistic
        } else {
            self.terms.class
        }
    }

    /// Its weight as it is treated, in millionths.
    pub fn weight_ppm(&self, now_ns: u64) -> u32 {
        match self.demoted(now_ns) {
            Some(_) => 1,
            None => self.terms.weight_ppm,
        }
    }

    /// As a policy sees it.
    pub fn view(&self, now_ns: u64) -> TenantView {
        let weight_ppm = self.weight_ppm(now_ns);
        let wants = !self.gang && self.competes(now_ns);
        let device_ns = self.usage().device_ns;
        TenantView {
            min_share_ppm: self.terms.min_ppm,
            max_share_ppm: self.terms.max_ppm,
            paused: !self.may_run(),
            arrived_ns: self.usage().since_ns,
            memory: self.profile.memory(),
            attained_ns: device_ns,
            remaining_ns: self
                .terms
                .work_ns
                .map(|work_ns| work_ns.saturating_sub(device_ns)),
            deadline_ns: self.terms.deadline_ns,
            latency_target_ns: self.terms.latency_target_ns,
            drain_ns: self.in_flight.longest_ns(),
            iterations: self.profile.iterations(device_ns),
            ..TenantView::new(self.tenant, self.class(now_ns), weight_ppm, wants)
        }
    }

    /// The slice that it has, as a policy sees it.
    pub fn holder(&self) -> Option<Holder> {
        self.holding.holder(self.tenant)
    }
}

/// What happens to it.
impl RunEntity {
    /// Copies out what the clients claim. `gap`: only opportunistic tenants wait for it to fall
    /// silent. Returns when its in-flight work has ended, where that was found now.
    pub fn look(&mut self, now_ns: u64, device: usize, pace: &Pace, gap: bool) -> Option<u64> {
        let device_ns = self.usage().device_ns;
        let hold = self.hold();
        if hold.is_none() && !self.drains() {
            self.in_flight.resume(now_ns, device, &self.clients);
        }
        if hold.is_none() && !self.drains() {
            let waits = self.responsiveness.counts(now_ns) && self.clients.wait(device);
            self.demand.look_outside(now_ns, waits, pace);
            self.profile
                .look(now_ns, self.clients.all(), device_ns, true);
            return None;
        }
        let seen = self.sample(device);
        let moved = self.submissions.look(seen);
        self.holding
            .note_coming(now_ns, seen.waits && !moved.submitted);
        let holds = hold.is_some();
        let drained_ns = self
            .in_flight
            .look(now_ns, device, &self.clients, holds, seen, moved);
        let look = Look {
            seen,
            submitted: moved.submitted,
            hold,
            drains: self.in_flight.drains(),
            gap,
        };
        self.demand.look(now_ns, look, pace);
        let idle = !seen.is_on_device();
        self.profile
            .look(now_ns, self.clients.all(), device_ns, idle);
        drained_ns
    }

    /// Looks whether its drain has ended, for the account only. `beside`: another one is on the
    /// device already. True where it has.
    pub fn peek(&mut self, device: usize, beside: bool) -> bool {
        self.in_flight.peek(device, &self.clients, beside)
    }

    /// Its gate opens at that time by itself.
    pub fn expect_turn(&mut self, turn_ns: u64) {
        self.demand.expect_turn(turn_ns);
    }

    /// Opens its gates, or begins its slice anew. True where threads were woken.
    pub fn begin(&mut self, now_ns: u64, device: usize, grant: &Grant) -> bool {
        let woken = self.clients.open(device, grant);
        if self.holds() {
            self.in_flight.go_on(now_ns, device, &self.clients);
        } else {
            self.account.count_grant();
            self.demand.begin_slice(now_ns);
            self.in_flight.begin_slice();
        }
        // Its gate closes so much earlier that the slice ends with the drain, but is open for half
        // of it at least.
        let drain_us = u32::try_from(self.mean_drain_ns() / 1000).unwrap_or(u32::MAX);
        let quantum_us = grant.quantum_us - (grant.quantum_us / 2).min(drain_us);
        self.holding.begin(now_ns, self.demand.waits(), quantum_us);
        woken
    }

    /// Closes its gates for a moment: it keeps the device, and they open by themselves then.
    pub fn shut(&mut self, device: usize, until_ns: u64) {
        self.clients.shut(device, until_ns);
    }

    /// Whether its gates are closed so.
    pub fn is_shut(&self) -> bool {
        self.clients.are_shut()
    }

    /// Opens them again before that. True where threads were woken.
    pub fn open_again(&mut self, device: usize, grant: &Grant) -> bool {
        self.clients.open(device, grant)
    }

    /// The device was handed over to it: it is not charged for what that costs, `most_ns` at most,
    /// nor until `behind_until_ns` while what was there before drains.
    pub fn excuse(&mut self, most_ns: u64, behind_until_ns: u64) {
        self.holding.excuse(most_ns, behind_until_ns);
    }

    /// A hand-over to it left the device idle for so long.
    pub fn note_hand_over(&mut self, idle_ns: u64) {
        self.holding.note_hand_over(idle_ns);
    }

    /// For how long hand-overs to it leave the device idle, as learnt; `None`: none was seen.
    pub fn hand_over_ns(&self) -> Option<u64> {
        self.holding.hand_over_ns()
    }

    /// Others wait: it is charged for all of a slice that it has.
    pub fn note_contention(&mut self) {
        if self.holds() {
            self.demand.keep_busy();
        }
    }

    /// Closes its gates, and looks what it has on the device and what its slice has taught.
    pub fn end(&mut self, now_ns: u64, device: usize) {
        let Some(ended) = self.holding.end() else {
            return;
        };
        self.clients.close(device);
        self.closed_gate.close(now_ns);
        let seen = self.sample(device);
        self.in_flight
            .end_slice(now_ns, device, &self.clients, seen);
        let away = seen.waits && !self.submissions.has_changed(seen);
        let attendance = self.holding.attendance(now_ns, ended, away);
        let unresponsive = self.responsiveness.note(now_ns, attendance);
        let waits = seen.waits && !unresponsive;
        self.demand
            .end_slice(now_ns, self.in_flight.drains(), waits);
    }

    /// Without a slice, and with nothing left of one, its next drain starts afresh, and so does its
    /// next departure.
    pub fn renew_co_ranks(&mut self, now_ns: u64) {
        let leaves = self.leaves && self.standing == Standing::Moving;
        self.leaving_since_ns = leaves.then_some(self.leaving_since_ns.unwrap_or(now_ns));
        if !self.drains() && !self.holds() && !leaves {
            self.co_ranks.renew();
        }
    }

    /// Whether its memory has been about to leave for longer than its work usually takes to end.
    pub fn departure_is_overdue(&self, now_ns: u64) -> bool {
        let since_ns = self.leaving_since_ns.filter(|_| self.leaves);
        since_ns.is_some_and(|since_ns| now_ns >= since_ns.saturating_add(DEPARTURE_NS))
    }

    /// These of its clients are admitted beside its drain. `marks`: what the others have on the
    /// device; `stood`: its streams that do not get on.
    pub fn admit_co_ranks(
        &mut self,
        now_ns: u64,
        clients: Vec<u64>,
        marks: u64,
        stood: Vec<Standstill>,
    ) {
        self.in_flight.help();
        self.co_ranks.come(now_ns, clients, marks, stood);
    }

    /// Others use the device, or want it, or nobody does.
    pub fn note_rivals(&mut self, now_ns: u64, rivals: bool) {
        self.rivalry.note(now_ns, rivals);
    }

    /// They are admitted no longer. Returns which they are.
    pub fn dismiss_co_ranks(&mut self, now_ns: u64, drain_ns: u64) -> Vec<u64> {
        self.closed_gate.close(now_ns);
        self.co_ranks.end(now_ns, drain_ns)
    }

    /// It was given so much of the device, of which `stall_ns` was a time in which nobody looked.
    pub fn stand(&mut self, got_ns: u64, stall_ns: u64) {
        self.in_flight.pass(got_ns.saturating_sub(stall_ns));
    }

    /// What remains of a charge once what is nobody's was taken off.
    pub fn forgive(&mut self, got_ns: u64) -> u64 {
        self.holding.forgive(got_ns)
    }

    /// Takes a stretch of time to its account, of which it used `got_ns`.
    pub fn charge(&mut self, stretch: Stretch, got_ns: u64) {
        let stood = Stood {
            waits: self.waits(),
            busy: self.is_busy(),
            holds: self.holds(),
        };
        self.account.charge(stretch, got_ns, stood);
        if got_ns > 0 {
            self.submissions.charge(got_ns);
        }
    }

    /// What marks take shows in a slice. `beside`: work of others is on the device as well, or was.
    pub fn learn_marks(&mut self, beside: bool) {
        let whole = self.holds() && !beside;
        self.submissions.learn_marks(whole);
    }

    /// How it behaves, looked at a few times a second.
    pub fn inspect(&mut self, now_ns: u64, device: usize) -> Option<Violation> {
        if let Some(since_ns) = self.in_flight.find_endless() {
            let ns = now_ns.saturating_sub(since_ns);
            return Some(Violation::Endless { ms: ns / 1_000_000 });
        }
        if self.responsiveness.take_suspicion() {
            return Some(Violation::Unresponsive);
        }
        let open = self.holds() || self.co_ranks.are_here();
        let clients = &self.clients;
        let launches = || clients.sample(device).launches;
        self.closed_gate.inspect(now_ns, open, launches)
    }

    /// Its drain has ended then.
    pub fn note_drained(&mut self, drained_ns: u64) {
        self.trace.note_drained(drained_ns);
    }

    /// Hands on the spans that have ended. `moves`: what its memory does, and what that has copied.
    pub fn trace(
        &mut self,
        now_ns: u64,
        (moves, copied_bytes): (Option<Kind>, u64),
        ended: impl FnMut(Span),
    ) {
        let standing = trace::Standing {
            slice: self.hold().map(|hold| hold.opened()),
            drain_ns: self.drain().map(|(since_ns, _)| since_ns),
            waits: self.is_kept_waiting(),
            moves,
            copied_bytes,
            boundary: self.profile.boundary(),
            device_ns: self.usage().device_ns,
        };
        self.trace.look(self.tenant, now_ns, standing, ended);
    }

    /// It is about to go: its spans end.
    pub fn end_spans(&mut self, now_ns: u64, ended: impl FnMut(Span)) {
        let standing = trace::Standing {
            device_ns: self.usage().device_ns,
            ..trace::Standing::default()
        };
        self.trace.look(self.tenant, now_ns, standing, ended);
    }

    /// Whether its memory was on its way when it was looked at last.
    pub fn moves(&self) -> bool {
        self.trace.moves()
    }

    /// What it is in the middle of.
    pub fn open_spans(&self) -> Open {
        let device_ns = self.usage().device_ns;
        Open {
            device_ns,
            pending_ns: self.trace.pending_ns(device_ns),
            spans: self.trace.open(),
        }
    }

    /// A violation was found. True where that is to be reported.
    pub fn find(&mut self, now_ns: u64, violation: Violation, answer: Answer) -> bool {
        self.record.find(now_ns, violation, answer)
    }

    /// True once, when its penalty is over.
    pub fn end_penalty(&mut self, now_ns: u64) -> bool {
        self.record.forgive(now_ns)
    }
}

/// What tests of other modules prepare.
#[cfg(test)]
impl RunEntity {
    /// A drain of one mark begins.
    pub fn begin_drain(&mut self, now_ns: u64) {
        let one = Activity {
            marks: 1,
            ..Activity::default()
        };
        self.in_flight
            .end_slice(now_ns, 0, &Clients::new(Window::always(0)), one);
    }

    /// It is found to have ended.
    pub fn end_drain(&mut self, now_ns: u64) {
        let (clients, nothing) = (Clients::new(Window::always(0)), Activity::default());
        let moved = super::unfinished::Moved::default();
        self.in_flight
            .look(now_ns, 0, &clients, false, nothing, moved);
    }

    /// So many submissions have taken so long.
    pub fn learn_rate(&mut self, launches: u64, ns: u64) {
        let counted = Activity {
            launches,
            ..Activity::default()
        };
        self.submissions.look(counted);
        self.submissions.charge(ns);
        self.submissions.count_from(Activity::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::Mode;
    use crate::dispatch::tests::{MS, setup};

    fn entity(terms: Terms) -> RunEntity {
        RunEntity::new(0, TenantId(7), terms, &setup(Mode::Exclusive).pace)
    }

    #[test]
    fn new_terms_set_floor_and_cap_and_leave_what_is_charged_in_memory() {
        let plain = Terms::plain(Class::Guaranteed, 500_000);
        let mut entity = entity(plain);
        entity.note_memory(3000, Some(5000));
        let stretch = Stretch {
            now_ns: 100 * MS,
            dt_ns: 100 * MS,
            contended: true,
            slices: super::super::bounds::Slices {
                min_ns: 2_000_000,
                max_ns: 5_000_000,
            },
        };
        entity.charge(stretch, 100 * MS);
        assert!(entity.may_run(), "it has no cap");
        entity.set_terms(Terms {
            max_ppm: Some(100_000),
            ..plain
        });
        let residency = entity.terms().residency;
        assert_eq!(
            (residency.used_bytes, residency.limit_bytes),
            (3000, Some(5000))
        );
        entity.charge(stretch, 100 * MS);
        assert!(!entity.may_run());
    }

    #[test]
    fn without_clients_it_neither_holds_the_device_nor_wants_it() {
        let mut entity = entity(Terms::plain(Class::Guaranteed, 500_000));
        let pages = Rc::new(ClientPages::create().expect("pages"));
        entity.add_client(1, Rc::clone(&pages), 0);
        pages.client.want(0).expect("device").begin_waiting();
        pages.client.claim_stream(0).expect("slot").1.issue();
        let pace = setup(Mode::Exclusive).pace;
        entity.look(MS, 0, &pace, false);
        assert!(entity.is_kept_waiting() && entity.competes(MS));
        let grant = Grant {
            number: 1,
            quantum_us: 3000,
            deadline_mono_ns: 0,
            window: Window::always(2000),
        };
        entity.begin(MS, 0, &grant);
        assert!(entity.holds() && entity.is_busy() && pages.arbiter.is_open(0));
        entity.end(4 * MS, 0);
        assert!(entity.drains() && !entity.holds() && !pages.arbiter.is_open(0));
        entity.begin(5 * MS, 0, &grant);
        assert!(entity.holds() && !entity.drains());
        entity.remove_client(2, 0);
        assert!(entity.holds(), "another one's");
        entity.remove_client(1, 0);
        assert!(!entity.holds() && !entity.is_busy() && !entity.wants(5 * MS));
    }
}
