//! The passing of the device from one tenant to the next: the slice that is to begin, who is
//! pre-woken for it, and what a hand-over costs as far as the host can see.
//!
//! A hand-over lasts from the end of the work before it (or of the slice, where nothing was left of
//! that) to the moment at which the first waiting thread was let in; it costs nothing where that
//! thread was there before. The end of a drain is found between two looks, and is taken to be half
//! way between them. The time that the device itself needs to turn from one context to the other
//! cannot be seen: it is a figure of the device ([`super::pace::Pace::turn_ns`]).
//!
//! When a thread was let in is its client's word. So what was learnt from a tenant is that tenant's
//! own figure, and the device's is the middle one of its tenants', of two the smaller: who says
//! that it comes late makes nobody else's slices longer, unless most of the tenants say so. It
//! cannot say that it came before its gate was opened, which is seen here.
//!
//! Invariants: one slice at most waits to begin (`coming`), and only it has a time at which it
//! begins although the drains before it have not ended; one tenant at most is pre-woken; the cost
//! of one hand-over at a time is looked for.

use policy::{Slice, TenantId};

use super::roster::Roster;

/// For so long after a gate has opened the cores are left to the threads that were woken, in
/// nanoseconds.
const NEAR_NS: u64 = 100_000;

/// A pre-wake: whose gate is about to open, and at which time. `None`: when a drain has ended, or a
/// silent holder counts as idle.
pub(super) type PreWake = (TenantId, Option<u64>);

/// A hand-over whose first submission has not been seen yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct UnderWay {
    /// To whom.
    tenant: TenantId,
    /// When what was before it had ended; `None`: it has not.
    over_ns: Option<u64>,
    opened_ns: u64,
}

/// The hand-overs of one device.
#[derive(Debug, Default)]
pub(super) struct HandOver {
    /// What one costs, as far as the host can see; 0: not known.
    cost_ns: u64,
    under_way: Option<UnderWay>,
    /// When the drain that was waited for has ended, where that was found in this step.
    drained_ns: Option<u64>,
    /// The slice that begins when the drains before it have ended.
    coming: Option<Slice>,
    /// When it begins although they have not, where their end is known well enough.
    entry_ns: Option<u64>,
    pre_woken: Option<PreWake>,
}

impl HandOver {
    /// The slice that waits to begin.
    pub fn coming(&self) -> Option<Slice> {
        self.coming
    }

    /// When it begins although the drains before it have not ended, as far as that is known.
    pub fn entry_ns(&self) -> Option<u64> {
        self.entry_ns
    }

    /// A slice waits for the drains before it, until `entry_ns` at most.
    pub fn wait_to_begin(&mut self, slice: Slice, entry_ns: Option<u64>) {
        (self.coming, self.entry_ns) = (Some(slice), entry_ns);
    }

    /// No slice waits any more: it has begun, or is called off.
    pub fn none_is_coming(&mut self) {
        (self.coming, self.entry_ns) = (None, None);
    }

    /// Who is pre-woken.
    pub fn pre_woken(&self) -> Option<PreWake> {
        self.pre_woken
    }

    /// Whether `tenant` is, and the time at which its gate opens by itself.
    pub fn turn_of(&self, tenant: TenantId) -> Option<u64> {
        let (next, turn_ns) = self.pre_woken?;
        turn_ns.filter(|_| next == tenant)
    }

    /// Another pre-wake, or none; returns the one before where it differs.
    pub fn pre_wake(&mut self, next: Option<PreWake>) -> Option<Option<PreWake>> {
        let before = std::mem::replace(&mut self.pre_woken, next);
        (before != next).then_some(before)
    }

    /// A step begins: no drain has been found to have ended yet.
    pub fn begin_step(&mut self) {
        self.drained_ns = None;
    }

    /// A drain was found to have ended.
    pub fn note_drained(&mut self, drained_ns: Option<u64>) {
        self.drained_ns = self.drained_ns.max(drained_ns);
    }

    /// A slice begins at `now_ns` after somebody else's; `drains`: in-flight work is left of that.
    pub fn begin(&mut self, now_ns: u64, tenant: TenantId, drains: bool) {
        let drained_ns = self.drained_ns.take();
        self.under_way = Some(UnderWay {
            tenant,
            over_ns: drained_ns.or((!drains).then_some(now_ns)),
            opened_ns: now_ns,
        });
    }

    /// Whether the end of drains tells what a hand-over costs.
    pub fn learns_from_drains(&self) -> bool {
        self.under_way.is_some() && self.pre_woken.is_none()
    }

    /// Looks whether the new holder has come, and when.
    pub fn learn(&mut self, now_ns: u64, device: usize, roster: &mut Roster) {
        let Some(under_way) = &mut self.under_way else {
            return;
        };
        // The drain that it began before.
        under_way.over_ns = under_way.over_ns.or(self.drained_ns);
        let under_way = *under_way;
        let holder = roster.find_mut(under_way.tenant);
        let Some(holder) = holder.filter(|entity| {
            let hold = entity.hold();
            hold.is_some_and(|hold| hold.was_opened_at(under_way.opened_ns))
        }) else {
            self.under_way = None;
            return;
        };
        let clients = holder.clients().iter();
        let let_in = clients
            .filter_map(|(_, pages)| {
                pages
                    .client
                    .let_in_since(device, under_way.opened_ns)
                    .filter(|let_in_ns| *let_in_ns <= now_ns)
            })
            .min();
        if let (Some(let_in_ns), Some(over_ns)) = (let_in, under_way.over_ns) {
            // Nothing where it was there before that.
            let cost_ns = let_in_ns.saturating_sub(over_ns);
            holder.note_hand_over(cost_ns);
            self.under_way = None;
            self.cost_ns = roster.hand_over_ns(|_| true).unwrap_or(self.cost_ns);
        }
    }

    /// Until when a hand-over is under way or near, where one is: other work of the arbiter waits
    /// until then.
    pub fn busy_until(&self, now_ns: u64) -> Option<u64> {
        let near = self.coming.is_some() || self.pre_woken.is_some();
        let opened_ns = self.under_way.map(|it| it.opened_ns + NEAR_NS);
        let opened_ns = opened_ns.filter(|until_ns| now_ns < *until_ns);
        opened_ns.or(near.then_some(now_ns + NEAR_NS))
    }

    /// What one costs, as far as the host can see, in nanoseconds; 0: not known.
    pub fn cost_ns(&self) -> u64 {
        self.cost_ns
    }

    /// What one costs with the device's own part, `turn_ns`.
    pub fn whole_cost_ns(&self, turn_ns: u64) -> u64 {
        self.cost_ns + turn_ns
    }
}
