//! What a hand-over costs, as far as the host can see, and how long slices are for it.
//!
//! A hand-over lasts from the end of the work before it (or of the slice, where nothing was left of
//! that) to the moment at which the first waiting thread was let in; it costs nothing where that
//! thread was there before. The end of a drain is found between two looks, and is taken to be half
//! way between them. The time that the device itself needs to turn from one context to the other
//! cannot be seen, and is taken to be [`TURN_NS`].

use policy::{Class, TenantId};

use super::DeviceScheduler;

/// A hand-over leaves no more than this out of the new holder's account.
const FORGIVEN_NS: u64 = 200_000;

/// What a device takes to turn from one process's context to another's, in nanoseconds: tens of
/// microseconds (`docs/reference/simgpu.md`). Slices are long enough for that as well: with
/// hand-overs of 15 us alone they would be 2 ms, and lose 1.75 %.
const TURN_NS: u64 = 20_000;

/// For so long after a gate has opened the cores are left to the threads that were woken, in
/// nanoseconds.
const NEAR_NS: u64 = 100_000;

/// A hand-over that is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Handover {
    /// To whom.
    tenant: TenantId,
    /// When what was before it had ended; `None`: it has not.
    over_ns: Option<u64>,
    opened_ns: u64,
}

impl DeviceScheduler {
    /// Takes note of the slice that begins at `now_ns` after somebody else's.
    pub(super) fn note_handover(&mut self, now_ns: u64, at: usize) {
        let drained_ns = self.drained_ns.take();
        let drains = self
            .entities
            .iter()
            .any(|entity| entity.drain_since_ns.is_some());
        // What nobody can use is nobody's: those with many hand-overs would pay for more of them.
        self.entities[at].forgiven_ns = self.cost.ns().min(FORGIVEN_NS);
        self.handover = Some(Handover {
            tenant: self.entities[at].tenant,
            over_ns: drained_ns.or((!drains).then_some(now_ns)),
            opened_ns: now_ns,
        });
    }

    /// Looks whether the new holder has come, and when.
    pub(super) fn learn_cost(&mut self, now_ns: u64) {
        let Some(handover) = &mut self.handover else {
            return;
        };
        // The drain that it began before.
        handover.over_ns = handover.over_ns.or(self.drained_ns);
        let handover = *handover;
        let holder = self.entity(handover.tenant);
        let Some(holder) = holder.filter(|entity| entity.opened_at(handover.opened_ns)) else {
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
        if let (Some(let_in_ns), Some(over_ns)) = (let_in, handover.over_ns) {
            // Nothing where it was there before that.
            self.cost.note(let_in_ns.saturating_sub(over_ns));
            self.handover = None;
        }
    }

    /// Until when a hand-over is under way or near, where one is: other work of the arbiter waits
    /// until then.
    pub fn hands_over_until(&self, now_ns: u64) -> Option<u64> {
        let under_way = self.coming.is_some() || self.pre_woken.is_some();
        let opened_ns = self.handover.map(|handover| handover.opened_ns + NEAR_NS);
        let opened_ns = opened_ns.filter(|until_ns| now_ns < *until_ns);
        opened_ns.or(under_way.then_some(now_ns + NEAR_NS))
    }

    /// How long slices are now.
    pub(super) fn adapt(&mut self, now_ns: u64) {
        let promised = self
            .entities
            .iter()
            .any(|entity| entity.competes(now_ns) && entity.class(now_ns) == Class::Guaranteed);
        let cost_ns = self.cost.ns() + TURN_NS;
        self.quantum = self.pace.quantum.now(cost_ns, promised);
    }
}
