//! Who holds the device, and how it passes from one tenant to the next: gates close, work drains,
//! gates open.

use policy::{Class, Decision, QuantumBounds, Slice, TenantId};

use super::entity::RunEntity;
use super::{DeviceScheduler, drain};

/// A hand-over leaves no more than this out of the new holder's account.
const FORGIVEN_NS: u64 = 200_000;

impl DeviceScheduler {
    /// Who holds the device, when to decide again, and who comes next.
    pub(super) fn decide(&mut self, now_ns: u64) -> Decision {
        let competing = self.roster.iter().filter(|entity| entity.competes(now_ns));
        let contended = competing.count() >= 2;
        if contended {
            self.windows.note_contention(now_ns);
        }
        if let Some(slice) = self.hand_over.coming() {
            // Who has gone in the meantime, or been stopped, does not keep the others waiting.
            let there = |entity: &RunEntity| {
                let its_turn = match self.precedence.turn() {
                    Some(turn) => turn.tenant == entity.tenant && entity.may_run(),
                    None => !entity.gang && entity.competes(now_ns),
                };
                entity.tenant == slice.tenant && !entity.clients().is_empty() && its_turn
            };
            if self.roster.iter().any(there) {
                return self.begin_after_drains(now_ns, slice);
            }
            self.hand_over.none_is_coming();
        }
        if let Some(turn) = self.precedence.turn() {
            return self.hand_to(now_ns, turn.tenant, turn.quantum_us, turn.contended);
        }
        for at in 0..self.roster.len() {
            if self.roster[at].gang && self.roster[at].holds() {
                self.take(now_ns, at);
            }
        }
        if let Some(decision) = self.serve_floor(now_ns) {
            return decision;
        }
        let decision = self.choice.decide(now_ns, &self.roster);
        self.carry_out(now_ns, decision, contended)
    }

    /// Gates close, work drains, gates open.
    fn carry_out(&mut self, now_ns: u64, decision: Decision, contended: bool) -> Decision {
        let decision = self.switch_first(now_ns, decision);
        for id in &decision.revoke {
            if let Some(at) = self.roster.position(*id) {
                self.take(now_ns, at);
            }
        }
        // Of several holders nobody can say whose work is in flight anyway.
        let drains = self.choice.is_exclusive() && !decision.revoke.is_empty();
        for slice in &decision.grant {
            let at = self.roster.position(slice.tenant);
            let Some(at) = at.filter(|at| self.roster[*at].may_run()) else {
                continue;
            };
            // A tenant that knows when to come is there already; the drain before it is short.
            let there = self.hand_over.turn_of(slice.tenant) == Some(now_ns);
            if drains && !there {
                return self.begin_after_drains(now_ns, *slice);
            }
            self.begin(now_ns, at, slice.quantum_us, contended);
        }
        let holds = self
            .roster
            .iter()
            .filter_map(|entity| Some((entity, entity.hold()?)));
        // Where a drain is to be waited for there is time to wake the next tenant after the end of
        // the slice.
        let ends = holds.map(|(entity, hold)| (hold.due_ns(), entity.mean_drain_ns()));
        let (Some(again_ns), Some((due_ns, drain_ns))) = (decision.again_ns, ends.min()) else {
            return decision;
        };
        Decision {
            // One that is over was left to its holder by the policy.
            again_ns: Some(if due_ns > now_ns {
                again_ns.min(due_ns)
            } else {
                again_ns
            }),
            // With several holders nobody knows whose slice it is that ends then.
            next: decision
                .next
                .filter(|_| self.choice.is_exclusive() && drain_ns < self.pace.lead_ns),
            ..decision
        }
    }

    /// Begins a slice once the drains before it have ended; says when to look again, and whom to
    /// wake.
    ///
    /// The time of two tenants that are on the device at once cannot be separated: the hardware
    /// slices between them as it likes, and splitting by halves is wrong for each by a good part of
    /// every drain. So a drain ends first, or all but its last 0.1 ms where its end is known
    /// beforehand ([`drain`]): what is submitted then is queued behind it. Otherwise the device has
    /// nothing to do between that end and our look at it. No drain is waited for without end: a
    /// guaranteed tenant waits for an opportunistic one's no longer than the window, and nobody
    /// waits for that of a gang, whose kernels may be waiting for others of the same gang.
    fn begin_after_drains(&mut self, now_ns: u64, slice: Slice) -> Decision {
        let class = self
            .roster
            .find(slice.tenant)
            .map(|entity| entity.class(now_ns));
        let window_ns = u64::from(self.pace.window_us) * 1000;
        let patience_ns = |entity: &RunEntity| match (class, entity.class(now_ns)) {
            _ if entity.gang || entity.demoted(now_ns).is_some() => window_ns,
            (Some(Class::Guaranteed), Class::Opportunistic) => window_ns,
            _ => self.pace.drain_ns,
        };
        let others = self.roster.iter().filter(|it| it.tenant != slice.tenant);
        let waited_for = others.filter_map(|entity| {
            let (since_ns, drain) = entity.drain()?;
            let waits = now_ns < since_ns + patience_ns(entity);
            waits.then_some((entity, since_ns, drain))
        });
        let (mut ends_ns, mut entry) = (None, Some((0, u64::MAX)));
        let mut look_out_ns = 0;
        for (entity, since_ns, drain) in waited_for {
            ends_ns = ends_ns.max(Some(drain.ends_ns(since_ns)));
            look_out_ns = look_out_ns.max(drain.look_out_ns(since_ns, self.pace.lead_ns));
            // Its last kernels are not put behind a lesser one's.
            let lesser =
                class == Some(Class::Opportunistic) && entity.class(now_ns) != Class::Opportunistic;
            let own = drain.entry_ns(since_ns).filter(|_| !lesser && !entity.gang);
            entry = entry
                .zip(own)
                .map(|(all, own): ((u64, u64), (u64, u64))| (all.0.max(own.0), all.1.min(own.1)));
        }
        let entry = entry.filter(|_| self.precedence.turn().is_none());
        if let Some(ends_ns) = ends_ns {
            let look_ns = drain::look_again_ns(now_ns, ends_ns, self.pace.drain_look_ns);
            // A planned time holds, whatever the next marks say.
            let planned_ns = self.hand_over.turn_of(slice.tenant);
            let entry_ns =
                entry.and_then(|(entry_ns, ends_ns)| (now_ns <= ends_ns).then_some(entry_ns));
            let entry_ns = planned_ns.or(entry_ns);
            if entry_ns.is_none_or(|entry_ns| now_ns < entry_ns) {
                self.hand_over.wait_to_begin(slice, entry_ns);
                let soon = look_out_ns <= now_ns;
                return Decision {
                    again_ns: Some(entry_ns.map_or(look_ns, |entry_ns| look_ns.min(entry_ns))),
                    next: (soon || entry_ns.is_some()).then_some(slice.tenant),
                    ..Decision::default()
                };
            }
        }
        self.hand_over.none_is_coming();
        let mut again_ns = None;
        if let Some(at) = self.roster.position(slice.tenant) {
            self.begin(now_ns, at, slice.quantum_us, true);
            again_ns = self.roster[at].hold().map(|hold| hold.due_ns());
        }
        Decision {
            again_ns,
            ..Decision::default()
        }
    }

    /// The time has come at which the next tenant was to go in, before the end of the
    /// drains.
    pub(super) fn enter(&mut self, turn_ns: u64, slice: Slice) {
        let turn_ns = turn_ns.max(self.time.charged_ns());
        self.charge(turn_ns);
        let at = self.roster.iter().position(|entity| {
            entity.tenant == slice.tenant
                && !entity.clients().is_empty()
                && entity.competes(turn_ns)
        });
        if let Some(at) = at {
            self.hand_over.none_is_coming();
            self.begin(turn_ns, at, slice.quantum_us, true);
        }
    }

    /// Gives the device to one tenant alone, unless it has it.
    fn hand_to(
        &mut self,
        now_ns: u64,
        tenant: TenantId,
        quantum_us: u32,
        contended: bool,
    ) -> Decision {
        let mut decision = Decision::default();
        for entity in self.roster.iter() {
            if entity.holds() && entity.tenant != tenant {
                decision.revoke.push(entity.tenant);
            }
            if entity.tenant == tenant && !entity.holds() && !entity.clients().is_empty() {
                decision.grant.push(Slice { tenant, quantum_us });
            }
        }
        self.carry_out(now_ns, decision, contended)
    }

    /// Begins and sees through a slice for one that is owed its floor; `None`: there is none.
    fn serve_floor(&mut self, now_ns: u64) -> Option<Decision> {
        let slices = self.slices();
        if let Some(entity) = self.precedence.floor().and_then(|id| self.roster.find(id)) {
            let due_ns = entity.hold().map_or(0, |hold| hold.due_ns());
            if entity.competes(now_ns) && entity.bounds().is_owed() && now_ns < due_ns {
                return Some(Decision {
                    again_ns: Some(due_ns),
                    ..Decision::default()
                });
            }
        }
        self.precedence.set_floor(None);
        // A slice that has begun goes on to its end.
        let begun = |entity: &RunEntity| entity.hold().is_some_and(|hold| now_ns < hold.due_ns());
        if self
            .roster
            .iter()
            .any(|entity| begun(entity) && entity.is_busy())
        {
            return None;
        }
        let (tenant, owed_ns) = self
            .roster
            .iter()
            .filter(|entity| !entity.holds() && !entity.gang && entity.competes(now_ns))
            .filter_map(|entity| Some((entity.tenant, entity.bounds().due_ns(slices)?)))
            .max_by_key(|(_, owed_ns)| *owed_ns)?;
        let owed_us = u32::try_from(owed_ns / 1000).unwrap_or(u32::MAX);
        let QuantumBounds { min_us, max_us } = self.choice.quantum();
        let quantum_us = owed_us.clamp(min_us.min(max_us), max_us);
        self.precedence.set_floor(Some(tenant));
        let decision = self.hand_to(now_ns, tenant, quantum_us, true);
        let due_ns = now_ns + u64::from(quantum_us) * 1000;
        Some(Decision {
            again_ns: decision.again_ns.or(Some(due_ns)),
            ..decision
        })
    }

    /// Opens the gates of a tenant, or begins its slice anew.
    pub(super) fn begin(&mut self, now_ns: u64, at: usize, quantum_us: u32, contended: bool) {
        self.grants += 1;
        let grace_ns = self.roster[at].grace_ns();
        let deadline_ns = if contended {
            now_ns + grace_ns + u64::from(quantum_us) * 1000
        } else {
            0
        };
        let grant = self.grant_of(&self.roster[at], now_ns, quantum_us, deadline_ns);
        let handed_over = contended && !self.roster[at].holds();
        self.woken |= self.roster[at].begin(now_ns, self.device, &grant);
        if contended {
            self.choice.note_slice(quantum_us);
        }
        if handed_over {
            let behind_until_ns = self.behind_until_ns(now_ns, at);
            let (tenant, drains) = (self.roster[at].tenant, self.roster.is_draining());
            self.hand_over.begin(now_ns, tenant, drains);
            // What nobody can use is nobody's, or those with many hand-overs would pay for more of
            // them.
            let others_ns = self.roster.hand_over_ns(|other| other != tenant);
            let most_ns = others_ns.unwrap_or(0);
            self.roster[at].excuse(most_ns.min(FORGIVEN_NS), behind_until_ns);
        }
    }

    /// Until when the device is expected to be busy with the work that was there before this
    /// entity's slice; 0: unknown, and the device turns from the one to the other as it likes.
    fn behind_until_ns(&self, now_ns: u64, at: usize) -> u64 {
        let others = self.roster.iter().enumerate().filter(|(n, _)| *n != at);
        let drains = others.filter_map(|(_, entity)| entity.drain());
        let ends = drains.map(|(since_ns, drain)| drain.ends_ns(since_ns));
        let ends_ns = ends.max().unwrap_or(0);
        if ends_ns <= now_ns + drain::SHORT_NS {
            ends_ns
        } else {
            0
        }
    }

    /// Takes the device from a tenant that holds it.
    pub(super) fn take(&mut self, now_ns: u64, at: usize) {
        if self.roster[at].holds() {
            self.end_contest(now_ns);
        }
        self.roster[at].end(now_ns, self.device);
    }
}
