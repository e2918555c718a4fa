//! What a hand-over costs, as far as the host can see, and how long slices are for it.
//!
//! From the end of the work before it, or of the slice where nothing was left of that, to the moment at which the first thread that
//! waited was let in. The end of a tail is found between two looks, and is taken to be half way. What the device itself needs to turn
//! from one to the other is not in it.

use policy::{Class, TenantId};

use super::Lane;

/// A hand-over leaves no more than this out of the new holder's account.
const FORGIVEN_NS: u64 = 200_000;

/// For so long after a gate has opened the cores are left to whoever was woken, in nanoseconds.
const NEAR_NS: u64 = 100_000;

/// A hand-over that is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Handover {
    /// To whom.
    tenant: TenantId,
    /// From the end of what was before it to the opening of the gate.
    gap_ns: u64,
    opened_ns: u64,
}

impl Lane {
    /// Takes note of the slice that begins at `now_ns` after somebody else's.
    pub(super) fn note_handover(&mut self, now_ns: u64, at: usize) {
        let drained_ns = self.drained_ns.take().unwrap_or(now_ns);
        // What nobody can use is nobody's: those with many hand-overs would pay for more of them.
        self.seats[at].forgiven_ns = self.cost.ns().min(FORGIVEN_NS);
        self.handover = Some(Handover {
            tenant: self.seats[at].tenant,
            gap_ns: now_ns.saturating_sub(drained_ns),
            opened_ns: now_ns,
        });
    }

    /// Looks whether the new holder has come, and when.
    pub(super) fn learn_cost(&mut self, now_ns: u64) {
        let Some(handover) = self.handover else {
            return;
        };
        let holder = self.seat(handover.tenant);
        let Some(holder) = holder.filter(|seat| seat.opened_at(handover.opened_ns)) else {
            self.handover = None;
            return;
        };
        let clients = holder.clients.iter();
        let let_in = clients
            .filter_map(|(_, pages)| {
                pages
                    .client
                    .let_in_since(self.device, handover.opened_ns)
                    .filter(|let_in_ns| *let_in_ns <= now_ns)
            })
            .min();
        if let Some(let_in_ns) = let_in {
            let idle_ns = handover.gap_ns + (let_in_ns - handover.opened_ns);
            self.cost.note(idle_ns);
            self.handover = None;
        }
    }

    /// Until when a hand-over is under way or near, where one is: who has other work leaves it until then.
    pub fn hands_over_until(&self, now_ns: u64) -> Option<u64> {
        let under_way = self.coming.is_some() || self.announced.is_some();
        let opened_ns = self.handover.map(|handover| handover.opened_ns + NEAR_NS);
        let opened_ns = opened_ns.filter(|until_ns| now_ns < *until_ns);
        opened_ns.or(under_way.then_some(now_ns + NEAR_NS))
    }

    /// How long slices are now.
    pub(super) fn adapt(&mut self, now_ns: u64) {
        let promised = self
            .seats
            .iter()
            .any(|seat| seat.competes(now_ns) && seat.class(now_ns) == Class::Guaranteed);
        self.quantum = self.pace.quantum.now(self.cost.ns(), promised);
    }
}
