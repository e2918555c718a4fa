//! Telling beforehand who comes next, so that a hand-over costs a look at a gate or at the clock and not the waking of a thread.

use policy::{Decision, TenantId};

use super::{CONFIRM_NS, Lane};

impl Lane {
    /// Shortly before a slice begins: wakes who waits for it. Where it begins at the end of another one the gates of both are
    /// told when to turn over, and their threads go by the clock then, whether the arbiter is given a core at that
    /// moment or not; where it begins at the end of a tail the threads look at their gate. Returns when to decide again, or to do
    /// this.
    pub(super) fn announce(&mut self, now_ns: u64, decision: &Decision) -> Option<u64> {
        let drains = self.coming.is_some();
        let next = decision.next.filter(|_| self.pace.lead_ns > 0);
        let early_ns = decision
            .again_ns
            .filter(|_| next.is_some() && !drains)
            .map(|turn_ns| turn_ns.saturating_sub(self.pace.lead_ns));
        if let Some(early_ns) = early_ns.filter(|early_ns| now_ns < *early_ns) {
            self.tell(None);
            return Some(early_ns);
        }
        let turn_ns = decision.again_ns.filter(|_| !drains);
        self.tell(next.map(|next| (next, turn_ns)));
        match next.and(turn_ns) {
            Some(turn_ns) => Some(turn_ns + CONFIRM_NS),
            None => decision.again_ns,
        }
    }

    /// Tells the gates who comes next, and takes back what they were told before.
    pub(super) fn tell(&mut self, announced: Option<(TenantId, Option<u64>)>) {
        if announced == self.announced {
            return;
        }
        let before = std::mem::replace(&mut self.announced, announced);
        let device = self.device;
        for seat in &mut self.seats {
            let holds = seat.hold.is_some();
            let told = announced.filter(|(next, _)| holds || *next == seat.tenant);
            let was_told = before.is_some_and(|(next, _)| holds || next == seat.tenant);
            if let Some((_, Some(turn_ns))) = told.filter(|_| !holds) {
                // When the turn is confirmed it no longer waits: it went in by the clock.
                seat.ready_until_ns = seat.ready_until_ns.max(turn_ns + seat.quiet_ns);
            }
            for (_, pages) in &seat.clients {
                match told {
                    Some((_, Some(turn_ns))) if holds => pages.arbiter.expire(device, turn_ns),
                    Some(_) if holds => pages.arbiter.keep(device),
                    Some((_, turn_ns)) => {
                        pages.arbiter.announce(device, turn_ns);
                    }
                    None if was_told && holds => pages.arbiter.keep(device),
                    None if was_told => pages.arbiter.close(device),
                    None => {}
                }
            }
        }
    }
}
