//! Waking the next tenant before its slice, so that a hand-over costs a look at a gate or at the
//! clock and not the waking of a thread.

use policy::{Decision, TenantId};

use super::entity::RunEntity;
use super::{CONFIRM_NS, DeviceScheduler};

/// A holder that may be falling idle is looked at again after so long, and the next tenant is woken
/// so long before it would count as idle, in nanoseconds. Below the 0.2 ms for which a thread looks
/// at a gate that is about to open.
const IDLE_LEAD_NS: u64 = 150_000;

impl DeviceScheduler {
    /// Shortly before a slice begins: wakes the tenant that waits for it. Where it begins at the
    /// end of another slice, the gates of both are given the time of the turn. Their threads go by
    /// the clock then, whether the arbiter is given a core at that moment or not; so do those that
    /// go in shortly before the end of a drain. Where the time is not known well enough, or when a
    /// silent holder counts as idle, the threads look at their gate. Returns when to decide again,
    /// or to do this.
    pub(super) fn pre_wake(&mut self, now_ns: u64, decision: &Decision) -> Option<u64> {
        let turn_ns = match self.hand_over.coming() {
            Some(_) => self.hand_over.entry_ns(),
            None => decision.again_ns,
        };
        let (idle_ns, successor) = self.expect_idle(now_ns);
        let sooner = |ns: u64| idle_ns.map_or(ns, |idle_ns| ns.min(idle_ns));
        let next = decision.next.filter(|_| self.pace.lead_ns > 0);
        let successor = successor.map(|successor| (successor, None));
        let early_ns = next
            .and(turn_ns)
            .map(|turn_ns| turn_ns.saturating_sub(self.pace.lead_ns));
        if let Some(early_ns) = early_ns.filter(|early_ns| now_ns < *early_ns) {
            self.tell(successor);
            let look_ns = decision
                .again_ns
                .filter(|_| self.hand_over.coming().is_some());
            return Some(sooner(look_ns.map_or(early_ns, |ns| ns.min(early_ns))));
        }
        self.tell(next.map(|next| (next, turn_ns)).or(successor));
        match next.and(turn_ns) {
            Some(turn_ns) => Some(turn_ns + CONFIRM_NS),
            None => decision.again_ns.map(sooner).or(idle_ns),
        }
    }

    /// When to look again at a holder with nothing on the device, which counts as idle when it has
    /// been silent for long enough; and who has the device then, once that is near and only one
    /// tenant waits.
    fn expect_idle(&self, now_ns: u64) -> (Option<u64>, Option<TenantId>) {
        let nothing = (None, None);
        if !self.choice.is_exclusive()
            || self.precedence.turn().is_some()
            || self.hand_over.coming().is_some()
        {
            return nothing;
        }
        let mut waiting = self
            .roster
            .iter()
            .filter(|entity| entity.is_kept_waiting() && entity.may_run() && !entity.gang);
        let Some(first) = waiting.next() else {
            return nothing;
        };
        let holder = self.roster.iter().find(|entity| entity.holds());
        let idle_ns = holder.and_then(RunEntity::idle_ns);
        let Some(idle_ns) = idle_ns.filter(|idle_ns| now_ns < *idle_ns) else {
            return nothing;
        };
        if idle_ns - now_ns > IDLE_LEAD_NS {
            return (Some(idle_ns - IDLE_LEAD_NS), None);
        }
        let only = waiting.next().is_none() && first.standing.is_in() && self.pace.lead_ns > 0;
        (Some(idle_ns), only.then_some(first.tenant))
    }

    /// When a gate opens in front of threads that sleep until then, as far as that is known.
    pub fn wakes_at(&self) -> Option<u64> {
        let waits = self.roster.iter().any(RunEntity::is_kept_waiting);
        let scheduled = self.pace.lead_ns > 0 || !waits || self.at_once();
        self.roster.first_due_ns().filter(|_| !scheduled)
    }

    /// Writes to the gates who comes next, and takes back what was written before.
    pub(super) fn tell(&mut self, pre_woken: Option<(TenantId, Option<u64>)>) {
        let Some(before) = self.hand_over.pre_wake(pre_woken) else {
            return;
        };
        let device = self.device;
        for entity in self.roster.iter_mut() {
            let holds = entity.holds();
            let scheduled = pre_woken.filter(|(next, _)| holds || *next == entity.tenant);
            let was_scheduled = before.is_some_and(|(next, _)| holds || next == entity.tenant);
            if let Some((_, Some(turn_ns))) = scheduled.filter(|_| !holds) {
                // When the turn is confirmed it no longer waits: it went in by the clock.
                entity.expect_turn(turn_ns);
            }
            for (_, pages) in entity.clients() {
                match scheduled {
                    Some((_, Some(turn_ns))) if holds => pages.arbiter.expire(device, turn_ns),
                    Some(_) if holds => pages.arbiter.keep(device),
                    Some((_, turn_ns)) => {
                        pages.arbiter.pre_wake(device, turn_ns);
                    }
                    None if was_scheduled && holds => pages.arbiter.keep(device),
                    None if was_scheduled => pages.arbiter.close(device),
                    None => {}
                }
            }
        }
    }
}
