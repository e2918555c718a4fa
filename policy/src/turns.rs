//! The common part of all slice policies: slices, classes, pauses, floors and caps, several
//! holders.
//!
//! A policy proper is an [`Order`]: it ranks the tenants that want the device. [`Turns`] turns
//! ranks into decisions:
//!
//! 1. A tenant competes if it wants the device, is not paused, is below its cap, and its order
//!    admits it. While a guaranteed tenant competes, opportunistic ones do not.
//! 2. A holder keeps the device until its slice is over; after that, until it reaches the end of an
//!    iteration, as long as its order has patience. It loses the device earlier if a tenant of a
//!    better rank appears that must run at once.
//! 3. The other places go by floor first ([`crate::shares`]), then by rank.
//! 4. A holder that no longer competes loses its place when another tenant needs it; a holder that
//!    must not run loses it now.

use crate::shares::Shares;
use crate::slice::{
    Class, CoordinatorTerms, Decision, Holder, LatencyReport, QuantumBounds, Slice, SlicePolicy,
    TenantId, TenantView, View,
};

/// Where a tenant stands among those that compete; the lowest runs first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Rank {
    /// Comes before everything else.
    pub tier: u8,
    /// Inside the tier.
    pub key: i128,
    /// At equal keys.
    pub tie: u64,
}

impl Rank {
    pub(crate) fn new(tier: u8, key: i128) -> Self {
        Self { tier, key, tie: 0 }
    }
}

/// Places that only one tenant can have at a time, among those that run at once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PartitionId(pub u32);

/// Ranks the tenants of one device.
pub(crate) trait Order: std::fmt::Debug + Send {
    /// By what name the policy is chosen.
    fn name(&self) -> &'static str;

    /// `id` has used the device.
    fn charge(&mut self, id: TenantId, device_ns: u64);

    /// Once before every decision. Tenants over their cap do not want in this view.
    fn follow(&mut self, view: &View<'_>);

    /// The rank of `tenant` after it has used `ahead_ns` more of the device; `None`: it may not
    /// run.
    fn rank(&self, tenant: &TenantView, view: &View<'_>, ahead_ns: u64) -> Option<Rank>;

    /// Whether a holder inside its slice goes at once for `better`, who has a better rank.
    fn goes_for(&self, _holder: &TenantView, _better: &TenantView, _view: &View<'_>) -> bool {
        false
    }

    /// How long after the end of its slice a holder may stay to finish its iteration, in
    /// nanoseconds.
    fn patience_ns(&self, _holder: &TenantView) -> u64 {
        0
    }

    /// How many tenants may run at once.
    fn places(&self, view: &View<'_>) -> usize {
        view.device.holders.max(1)
    }

    /// The partition a tenant runs in; one of each runs at a time. `None`: in none of them.
    fn partition(&self, _id: TenantId) -> Option<PartitionId> {
        None
    }

    /// Opportunistic tenants may run beside guaranteed ones, where there is a place left.
    fn runs_beside(&self) -> bool {
        false
    }

    /// When to ask again because of the order itself, in nanoseconds.
    fn again_ns(&self, _view: &View<'_>) -> Option<u64> {
        None
    }

    /// How long a slice of `tenant` is where others have `usual_us`, in microseconds.
    fn slice_us(&self, _tenant: &TenantView, _view: &View<'_>, usual_us: u32) -> u32 {
        usual_us
    }

    /// A waiting tenant that will go before a holder although that one's slice has not ended, and
    /// when, in nanoseconds; of several the first.
    fn takes_over(&self, _view: &View<'_>) -> Option<(TenantId, u64)> {
        None
    }

    /// See [`SlicePolicy::resume`].
    fn resume(&mut self) {}

    /// See [`SlicePolicy::debt_ns`].
    fn debt_ns(&self, _id: TenantId) -> Option<i64> {
        None
    }

    /// See [`SlicePolicy::coordinates`].
    fn coordinates(&self) -> Option<CoordinatorTerms> {
        None
    }

    /// See [`SlicePolicy::latency`].
    fn latency(&self, _id: TenantId) -> Option<LatencyReport> {
        None
    }

    /// See [`SlicePolicy::in_flight_us`].
    fn in_flight_us(&self, _id: TenantId) -> Option<u32> {
        None
    }
}

impl<O: Order + ?Sized> Order for Box<O> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn charge(&mut self, id: TenantId, device_ns: u64) {
        (**self).charge(id, device_ns);
    }

    fn follow(&mut self, view: &View<'_>) {
        (**self).follow(view);
    }

    fn rank(&self, tenant: &TenantView, view: &View<'_>, ahead_ns: u64) -> Option<Rank> {
        (**self).rank(tenant, view, ahead_ns)
    }

    fn goes_for(&self, holder: &TenantView, better: &TenantView, view: &View<'_>) -> bool {
        (**self).goes_for(holder, better, view)
    }

    fn patience_ns(&self, holder: &TenantView) -> u64 {
        (**self).patience_ns(holder)
    }

    fn places(&self, view: &View<'_>) -> usize {
        (**self).places(view)
    }

    fn partition(&self, id: TenantId) -> Option<PartitionId> {
        (**self).partition(id)
    }

    fn runs_beside(&self) -> bool {
        (**self).runs_beside()
    }

    fn again_ns(&self, view: &View<'_>) -> Option<u64> {
        (**self).again_ns(view)
    }

    fn slice_us(&self, tenant: &TenantView, view: &View<'_>, usual_us: u32) -> u32 {
        (**self).slice_us(tenant, view, usual_us)
    }

    fn takes_over(&self, view: &View<'_>) -> Option<(TenantId, u64)> {
        (**self).takes_over(view)
    }

    fn resume(&mut self) {
        (**self).resume();
    }

    fn debt_ns(&self, id: TenantId) -> Option<i64> {
        (**self).debt_ns(id)
    }

    fn coordinates(&self) -> Option<CoordinatorTerms> {
        (**self).coordinates()
    }

    fn latency(&self, id: TenantId) -> Option<LatencyReport> {
        (**self).latency(id)
    }

    fn in_flight_us(&self, id: TenantId) -> Option<u32> {
        (**self).in_flight_us(id)
    }
}

/// One that competes, in the order in which places are given.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Candidate {
    opportunistic: bool,
    not_owed: bool,
    rank: Rank,
    pub(crate) id: TenantId,
    /// In the view's tenants.
    at: usize,
}

/// A slice policy made of an order.
#[derive(Debug)]
pub(crate) struct Turns<O> {
    pub(crate) order: O,
    shares: Shares,
    /// Since when somebody competes who holds nothing.
    crowded_ns: Option<u64>,
    /// The tenants as the order sees them. Kept to allocate nothing, as the lists below.
    tenants: Vec<TenantView>,
    candidates: Vec<Candidate>,
    chosen: Vec<usize>,
}

impl<O: Order> Turns<O> {
    pub(crate) fn new(order: O) -> Self {
        Self {
            order,
            shares: Shares::default(),
            crowded_ns: None,
            tenants: Vec::new(),
            candidates: Vec::new(),
            chosen: Vec::new(),
        }
    }

    /// Brings everything up to date and ranks those that compete.
    fn rank_all(&mut self, view: &View<'_>) {
        self.shares.follow(view);
        self.tenants.clear();
        self.tenants
            .extend(view.tenants.iter().map(|tenant| TenantView {
                wants: tenant.wants && !self.shares.is_capped(tenant.id),
                ..*tenant
            }));
        Shares::reweigh(&mut self.tenants, Class::Guaranteed);
        Shares::reweigh(&mut self.tenants, Class::Opportunistic);
        let seen = View {
            tenants: &self.tenants,
            ..*view
        };
        self.order.follow(&seen);
        self.candidates.clear();
        for (at, tenant) in self.tenants.iter().enumerate() {
            if tenant.is_ready()
                && let Some(rank) = self.order.rank(tenant, &seen, 0)
            {
                self.candidates.push(Candidate {
                    opportunistic: tenant.class == Class::Opportunistic,
                    not_owed: !self.shares.is_owed(tenant, &seen),
                    rank,
                    id: tenant.id,
                    at,
                });
            }
        }
        self.candidates.sort_unstable();
        if !self.order.runs_beside()
            && self
                .candidates
                .first()
                .is_some_and(|first| !first.opportunistic)
        {
            self.candidates.retain(|candidate| !candidate.opportunistic);
        }
        let crowded = (self.candidates.iter()).any(|candidate| view.held(candidate.id).is_none());
        self.crowded_ns = crowded.then(|| self.crowded_ns.unwrap_or(view.now_ns));
    }

    /// When a holder's slice ends: a slice that was given while fewer competed is cut to the
    /// present length.
    fn due_ns(&self, holder: &Holder, view: &View<'_>) -> u64 {
        let quantum_us = holder.quantum_us.min(self.slice_us(holder.id, view));
        holder.since_ns.saturating_add(u64::from(quantum_us) * 1000)
    }

    /// When the patience with a holder ends.
    fn patient_until_ns(&self, holder: &Holder, patience_ns: u64, view: &View<'_>) -> u64 {
        let due_ns = self.due_ns(holder, view);
        let from_ns = due_ns.max(self.crowded_ns.unwrap_or(0));
        if patience_ns == 0 {
            due_ns
        } else {
            from_ns.saturating_add(patience_ns)
        }
    }

    /// How long a slice is with so many competing.
    fn quantum_us(&self, view: &View<'_>) -> u32 {
        let places = self.order.places(view).clamp(1, view.device.holders.max(1));
        quantum_us(view.quantum, self.candidates.len().div_ceil(places))
    }

    /// How long a slice of this tenant is with so many competing.
    fn slice_us(&self, id: TenantId, view: &View<'_>) -> u32 {
        let usual_us = self.quantum_us(view);
        let tenant = self.tenants.iter().find(|tenant| tenant.id == id);
        tenant.map_or(usual_us, |tenant| {
            self.order.slice_us(tenant, view, usual_us).min(usual_us)
        })
    }

    /// Whether a holder keeps the device for now, whichever tenants compete.
    fn keeps(&self, holder: &Holder, candidate: &Candidate, seen: &View<'_>) -> bool {
        let tenant = &self.tenants[candidate.at];
        let better = self
            .candidates
            .iter()
            .take_while(|other| *other < candidate);
        for other in better.filter(|other| seen.held(other.id).is_none()) {
            if (candidate.opportunistic && !other.opportunistic)
                || self.order.goes_for(tenant, &self.tenants[other.at], seen)
            {
                return false;
            }
        }
        let patience_ns = if self.has_ended(holder, tenant, seen) {
            0
        } else {
            self.order.patience_ns(tenant)
        };
        seen.now_ns < self.patient_until_ns(holder, patience_ns, seen)
    }

    /// Whether the iteration that a holder was to finish is over: it stands between two, or has
    /// begun another since its slice ended. A program that submits ahead of the device is never
    /// seen between two.
    fn has_ended(&self, holder: &Holder, tenant: &TenantView, view: &View<'_>) -> bool {
        let iterations = tenant.iterations;
        let from_ns = self.due_ns(holder, view).max(self.crowded_ns.unwrap_or(0));
        iterations.at_boundary
            || iterations
                .began_ns
                .is_some_and(|began_ns| began_ns >= from_ns)
    }

    /// The decision, after [`Turns::rank_all`] with the same view.
    fn settle(&mut self, view: &View<'_>) -> Decision {
        let mut chosen = std::mem::take(&mut self.chosen);
        chosen.clear();
        let decision = self.settle_into(view, &mut chosen);
        self.chosen = chosen;
        decision
    }

    fn settle_into(&self, view: &View<'_>, chosen: &mut Vec<usize>) -> Decision {
        let seen = View {
            tenants: &self.tenants,
            ..*view
        };
        let places = self
            .order
            .places(&seen)
            .clamp(1, view.device.holders.max(1));
        let partition_is_free = |chosen: &[usize], id: TenantId| {
            self.order.partition(id).is_none_or(|partition| {
                chosen
                    .iter()
                    .all(|at| self.order.partition(self.candidates[*at].id) != Some(partition))
            })
        };
        // Those that stay, then the others in their order.
        let mut stay = 0;
        for keeps in [true, false] {
            for (at, candidate) in self.candidates.iter().enumerate() {
                let kept = seen
                    .held(candidate.id)
                    .is_some_and(|holder| self.keeps(holder, candidate, &seen));
                if kept == keeps && chosen.len() < places && partition_is_free(chosen, candidate.id)
                {
                    chosen.push(at);
                    stay += usize::from(keeps);
                }
            }
        }
        let is_chosen = |id| chosen.iter().any(|at| self.candidates[*at].id == id);
        let waiting = || {
            self.candidates
                .iter()
                .filter(|candidate| !is_chosen(candidate.id))
        };
        let contended = waiting().next().is_some();
        let mut decision = Decision::default();

        let newcomers = chosen
            .iter()
            .filter(|at| seen.held(self.candidates[**at].id).is_none())
            .count();
        let mut idle = view.device.holders.max(1).saturating_sub(
            view.holders.len() - view.holders.iter().filter(|h| !is_chosen(h.id)).count(),
        );
        idle = idle.saturating_sub(newcomers);
        for holder in view.holders.iter().filter(|holder| !is_chosen(holder.id)) {
            let may_stay = idle > 0 && self.may_idle(holder, view);
            if may_stay {
                idle -= 1;
            } else {
                decision.revoke.push(holder.id);
            }
        }
        for (nth, at) in chosen.iter().enumerate() {
            let id = self.candidates[*at].id;
            let begins = match seen.held(id) {
                None => true,
                Some(holder) => {
                    nth >= stay && contended && view.now_ns >= self.due_ns(holder, view)
                }
            };
            if begins {
                decision.grant.push(Slice {
                    tenant: id,
                    quantum_us: self.slice_us(id, &seen),
                });
            }
        }
        if contended {
            decision.again_ns = self.ends_ns(&seen, chosen, stay);
            decision.next = self.next(&seen, chosen, stay, waiting());
            // Who goes before a holder inside its slice is the next one then.
            let takes_over = self
                .order
                .takes_over(&seen)
                .filter(|(id, _)| !is_chosen(*id));
            if let Some((id, at_ns)) = takes_over
                && decision.again_ns.is_none_or(|ns| at_ns < ns)
            {
                decision.again_ns = Some(at_ns.max(view.now_ns.saturating_add(1)));
                decision.next = Some(id).filter(|id| view.held(*id).is_none());
            }
        }
        let others = [self.shares.again_ns(view), self.order.again_ns(&seen)];
        for again_ns in others.into_iter().flatten() {
            let again_ns = again_ns.max(view.now_ns.saturating_add(1));
            decision.again_ns = Some(decision.again_ns.map_or(again_ns, |ns| ns.min(again_ns)));
        }
        decision
    }

    /// A holder that does not compete may keep its gate open if it wants nothing now and nothing
    /// forbids it to run.
    fn may_idle(&self, holder: &Holder, view: &View<'_>) -> bool {
        let Some(tenant) = view.tenant(holder.id) else {
            return false;
        };
        let guaranteed_competes = self
            .candidates
            .first()
            .is_some_and(|candidate| !candidate.opportunistic);
        let unopposed = tenant.class == Class::Guaranteed || !guaranteed_competes;
        let partition_is_free = self.order.partition(holder.id).is_none_or(|partition| {
            (self.candidates.iter())
                .all(|candidate| self.order.partition(candidate.id) != Some(partition))
        });
        !tenant.wants && !tenant.paused && unopposed && partition_is_free
    }

    /// When the first of the chosen is to be looked at again.
    fn ends_ns(&self, seen: &View<'_>, chosen: &[usize], stay: usize) -> Option<u64> {
        chosen
            .iter()
            .enumerate()
            .map(|(nth, at)| {
                let candidate = &self.candidates[*at];
                match seen.held(candidate.id).filter(|_| nth < stay) {
                    Some(holder) if seen.now_ns < self.due_ns(holder, seen) => {
                        self.due_ns(holder, seen)
                    }
                    Some(holder) => {
                        let patience_ns = self.order.patience_ns(&self.tenants[candidate.at]);
                        self.patient_until_ns(holder, patience_ns, seen)
                    }
                    None => seen.now_ns + u64::from(self.slice_us(candidate.id, seen)) * 1000,
                }
            })
            .min()
    }

    /// Who would take the place of the first of the chosen whose slice ends.
    fn next<'a>(
        &self,
        seen: &View<'_>,
        chosen: &[usize],
        stay: usize,
        mut waiting: impl Iterator<Item = &'a Candidate>,
    ) -> Option<TenantId> {
        let first = waiting.next()?;
        let overtaken = chosen.iter().enumerate().any(|(nth, at)| {
            let candidate = &self.candidates[*at];
            let left_ns = match seen.held(candidate.id).filter(|_| nth < stay) {
                Some(holder) => self.due_ns(holder, seen).saturating_sub(seen.now_ns),
                None => u64::from(self.slice_us(candidate.id, seen)) * 1000,
            };
            let tenant = &self.tenants[candidate.at];
            self.order
                .rank(tenant, seen, left_ns)
                .is_none_or(|rank| Candidate { rank, ..*candidate } > *first)
        });
        overtaken.then_some(first.id)
    }
}

/// Two tenants get the longest slices; more tenants get shorter ones, so that a round stays about
/// as long.
fn quantum_us(bounds: QuantumBounds, wanting: usize) -> u32 {
    let wanting = u32::try_from(wanting).unwrap_or(u32::MAX).max(2);
    (bounds.max_us / wanting)
        .saturating_mul(2)
        .clamp(bounds.min_us.min(bounds.max_us), bounds.max_us)
}

impl<O: Order> SlicePolicy for Turns<O> {
    fn name(&self) -> &'static str {
        self.order.name()
    }

    fn charge(&mut self, id: TenantId, device_ns: u64) {
        self.shares.charge(id, device_ns);
        self.order.charge(id, device_ns);
    }

    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.rank_all(view);
        self.settle(view)
    }

    fn resume(&mut self) {
        self.order.resume();
    }

    fn debt_ns(&self, id: TenantId) -> Option<i64> {
        self.order.debt_ns(id)
    }

    fn coordinates(&self) -> Option<CoordinatorTerms> {
        self.order.coordinates()
    }

    fn latency(&self, id: TenantId) -> Option<LatencyReport> {
        self.order.latency(id)
    }

    fn in_flight_us(&self, id: TenantId) -> Option<u32> {
        self.order.in_flight_us(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_tenants_get_shorter_slices_down_to_the_minimum() {
        let bounds = QuantumBounds {
            min_us: 2000,
            max_us: 5000,
        };
        assert_eq!(quantum_us(bounds, 1), 5000);
        assert_eq!(quantum_us(bounds, 2), 5000);
        assert_eq!(quantum_us(bounds, 4), 2500);
        assert_eq!(quantum_us(bounds, 100), 2000);
        let inverted = QuantumBounds {
            min_us: 9,
            max_us: 5,
        };
        assert_eq!(quantum_us(inverted, 3), 5);
    }
}
