//! Stride scheduling on measured device time.
//!
//! Source: C. A. Waldspurger and W. E. Weihl, "Stride Scheduling: Deterministic Proportional-Share
//! Resource Management", MIT/LCS/TM-528, 1995. Its use for GPUs with unequal jobs: S. Chaudhary et
//! al., "Balancing Efficiency and Fairness in Heterogeneous GPU Clusters for Deep Learning"
//! (Gandiva-fair), EuroSys 2020.
//!
//! Every tenant has a *pass*: the device time it has used, divided by its weight. Of the tenants
//! that want the device, the one with the lowest pass runs next. With weights 3 and 1 and quanta of
//! 5 ms:
//!
//! ```text
//! time    0    5   10   15   20   25 ...
//! runs      A    B    A    A    A    B        A: weight 3, a quantum adds 5/3 = 1.67
//! pass A  0   1.67 1.67 3.33 5.00 6.67        B: weight 1, a quantum adds 5
//! pass B  0   0    5    5    5    5
//! ```
//!
//! so in any time t, tenant i gets t * w_i / sum(w), off by at most about one quantum: 5 ms in a
//! second is half a point. (A lottery with the same weights would be off by a multiple of the
//! square root of the number of quanta, some 7 points.)
//!
//! *Charges, not quanta.* A pass grows by what was measured. A tenant whose last kernel runs 3 ms
//! past its slice is charged those 3 ms as well: its pass is higher, and the others come first
//! until it is even. Overrun is debt and needs no rule of its own. A tenant that gives the device
//! back after 1 ms of 5 is charged 1 ms and is soon next.
//!
//! *Coming and going.* The *global pass* is what the pass of a tenant exactly on schedule would be:
//! it grows by the charged time divided by the sum of the weights of all who want the device. A
//! tenant that stops wanting takes the difference between its pass and the global pass along (its
//! *remain*) and adds it to the then global pass when it comes back. So sleeping earns nothing: a
//! week of sleep leaves the difference as it was. A remain above zero is debt and kept whole; a
//! remain below zero is what the schedule still owed it, kept up to one quantum.
//!
//! *Slices after none.* Where everybody had the device at once for a while (another mode of the
//! device), all start anew at the same pass: what each could use then was not the schedule's.
//!
//! *Classes.* Guaranteed tenants come first; opportunistic tenants share what is left, and lose the
//! device as soon as a guaranteed tenant wants it. The policy is work-conserving: a tenant without
//! competitors keeps running.

use std::collections::BTreeMap;

use super::SliceRegistration;
use crate::registry::Registration;
use crate::slice::{Class, Decision, QuantumBounds, SlicePolicy, TenantId, TenantView, View};
use crate::turns::{Order, Rank, Turns};

/// How it is chosen.
pub(super) static STRIDE: SliceRegistration = Registration {
    name: "stride",
    summary: "device time in proportion to weights, exact to about a slice",
    params: &[],
    build: |_| Box::new(Turns::new(Passes::default())),
};

/// Weights are millionths.
const PPM: i128 = 1_000_000;

/// See the module's documentation.
#[derive(Debug)]
pub struct Stride(Turns<Passes>);

/// The order of the passes.
#[derive(Debug, Default)]
pub(crate) struct Passes {
    members: BTreeMap<TenantId, Member>,
    guaranteed: Field,
    opportunistic: Field,
}

/// The tenants of one class that compete.
#[derive(Debug, Default)]
struct Field {
    /// In weighted nanoseconds.
    global_pass: i128,
    /// Sum of the weights of those who want, in millionths.
    weight_ppm: i128,
}

#[derive(Debug)]
struct Member {
    class: Class,
    weight_ppm: i128,
    standing: Standing,
}

#[derive(Clone, Copy, Debug)]
enum Standing {
    /// Wants the device; in weighted nanoseconds.
    Competing { pass: i128 },
    /// Does not; its pass minus the global pass when it left.
    Away { remain: i128 },
}

impl Stride {
    /// Without tenants; they come with the first view that names them.
    pub fn new() -> Self {
        Self(Turns::new(Passes::default()))
    }

    /// How far `id` is ahead of its schedule, in nanoseconds of device time: above zero it owes,
    /// below it is owed.
    pub fn debt_ns(&self, id: TenantId) -> i64 {
        self.0.order.debt_ns(id).unwrap_or(0)
    }
}

impl Default for Stride {
    fn default() -> Self {
        Self::new()
    }
}

impl SlicePolicy for Stride {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn charge(&mut self, id: TenantId, device_ns: u64) {
        self.0.charge(id, device_ns);
    }

    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.0.decide(view)
    }

    fn resume(&mut self) {
        self.0.resume();
    }

    fn debt_ns(&self, id: TenantId) -> Option<i64> {
        self.0.debt_ns(id)
    }
}

impl Passes {
    fn field(&self, class: Class) -> &Field {
        match class {
            Class::Guaranteed => &self.guaranteed,
            Class::Opportunistic => &self.opportunistic,
        }
    }

    fn field_mut(&mut self, class: Class) -> &mut Field {
        match class {
            Class::Guaranteed => &mut self.guaranteed,
            Class::Opportunistic => &mut self.opportunistic,
        }
    }

    fn follow_one(&mut self, tenant: &TenantView, quantum: QuantumBounds) {
        let weight_ppm = i128::from(tenant.weight_ppm.max(1));
        let unchanged = self.members.get(&tenant.id).is_some_and(|member| {
            let competes = matches!(member.standing, Standing::Competing { .. });
            member.class == tenant.class
                && member.weight_ppm == weight_ppm
                && competes == tenant.is_ready()
        });
        if unchanged {
            return;
        }
        // Leave as it was and come back as it is: one road for every change.
        self.retire(tenant.id);
        let member = self.members.entry(tenant.id).or_insert(Member {
            class: tenant.class,
            weight_ppm,
            standing: Standing::Away { remain: 0 },
        });
        if let Standing::Away { remain } = &mut member.standing {
            // The same device time is more passes at a lower weight.
            *remain = *remain * member.weight_ppm / weight_ppm;
        }
        member.class = tenant.class;
        member.weight_ppm = weight_ppm;
        if tenant.is_ready() {
            let Standing::Away { remain } = member.standing else {
                return;
            };
            let credit = i128::from(quantum.max_us) * 1000 * PPM / weight_ppm;
            let field = self.field_mut(tenant.class);
            field.weight_ppm += weight_ppm;
            let pass = field.global_pass + remain.max(-credit);
            if let Some(member) = self.members.get_mut(&tenant.id) {
                member.standing = Standing::Competing { pass };
            }
        }
    }

    /// A tenant that is away owes no more than this when it comes back, in nanoseconds.
    pub(crate) fn forgive(&mut self, id: TenantId, most_ns: u64) {
        if let Some(member) = self.members.get_mut(&id)
            && let Standing::Away { remain } = &mut member.standing
        {
            *remain = (*remain).min(i128::from(most_ns) * PPM / member.weight_ppm);
        }
    }

    /// Takes a competing member out of its field.
    fn retire(&mut self, id: TenantId) {
        let Some(member) = self.members.get(&id) else {
            return;
        };
        let (class, weight_ppm) = (member.class, member.weight_ppm);
        if let Standing::Competing { pass } = member.standing {
            let field = self.field_mut(class);
            field.weight_ppm -= weight_ppm;
            let remain = pass - field.global_pass;
            if let Some(member) = self.members.get_mut(&id) {
                member.standing = Standing::Away { remain };
            }
        }
    }
}

impl Order for Passes {
    fn name(&self) -> &'static str {
        "stride"
    }

    fn charge(&mut self, id: TenantId, device_ns: u64) {
        let Some(member) = self.members.get_mut(&id) else {
            return;
        };
        let weighted = i128::from(device_ns) * PPM;
        match &mut member.standing {
            Standing::Competing { pass } => {
                *pass += weighted / member.weight_ppm;
                let class = member.class;
                let field = self.field_mut(class);
                field.global_pass += weighted / field.weight_ppm.max(1);
            }
            Standing::Away { remain } => *remain += weighted / member.weight_ppm,
        }
    }

    /// Updates the members from the view: which tenants came, left, began or ceased to want, or
    /// have another weight.
    fn follow(&mut self, view: &View<'_>) {
        while let Some(id) = (self.members.keys().copied()).find(|id| view.tenant(*id).is_none()) {
            self.retire(id);
            self.members.remove(&id);
        }
        for tenant in view.tenants {
            self.follow_one(tenant, view.quantum);
        }
    }

    /// The pass; of equal ones somebody else's than the holder's comes first.
    fn rank(&self, tenant: &TenantView, view: &View<'_>, ahead_ns: u64) -> Option<Rank> {
        let member = self.members.get(&tenant.id)?;
        let Standing::Competing { pass } = member.standing else {
            return None;
        };
        Some(Rank {
            tier: 0,
            key: pass + i128::from(ahead_ns) * PPM / member.weight_ppm,
            tie: u64::from(view.held(tenant.id).is_some()),
        })
    }

    fn resume(&mut self) {
        *self = Self::default();
    }

    fn debt_ns(&self, id: TenantId) -> Option<i64> {
        let member = self.members.get(&id)?;
        let ahead = match member.standing {
            Standing::Competing { pass } => pass - self.field(member.class).global_pass,
            Standing::Away { remain } => remain,
        };
        Some(i64::try_from(ahead * member.weight_ppm / PPM).unwrap_or(i64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slice::{Device, Holder};

    const QUANTUM: QuantumBounds = QuantumBounds {
        min_us: 2000,
        max_us: 5000,
    };
    const MS: u64 = 1_000_000;

    fn tenant(id: u64, weight_ppm: u32, wants: bool) -> TenantView {
        TenantView::new(TenantId(id), Class::Guaranteed, weight_ppm, wants)
    }

    fn decide(
        stride: &mut Stride,
        now_ns: u64,
        tenants: &[TenantView],
        holder: Option<(u64, u64)>,
    ) -> Decision {
        let holders: Vec<Holder> = holder
            .map(|(id, since_ns)| Holder {
                id: TenantId(id),
                since_ns,
                quantum_us: 5000,
            })
            .into_iter()
            .collect();
        stride.decide(&View {
            now_ns,
            tenants,
            holders: &holders,
            quantum: QUANTUM,
            device: Device::EXCLUSIVE,
        })
    }

    #[test]
    fn what_was_charged_while_all_ran_at_once_is_nobodys_debt() {
        let mut stride = Stride::new();
        let tenants = [tenant(1, 500_000, true), tenant(2, 500_000, true)];
        decide(&mut stride, 0, &tenants, None);
        stride.charge(TenantId(1), 3000 * MS);
        stride.charge(TenantId(2), 100 * MS);
        assert!(stride.debt_ns(TenantId(1)) > 0);
        stride.resume();
        decide(&mut stride, 3000 * MS, &tenants, None);
        assert_eq!(
            (stride.debt_ns(TenantId(1)), stride.debt_ns(TenantId(2))),
            (0, 0)
        );
    }

    #[test]
    fn the_table_of_the_module_documentation_is_what_happens() {
        let tenants = [tenant(1, 750_000, true), tenant(2, 250_000, true)];
        let (mut stride, mut holder, mut order) = (Stride::new(), None, String::new());
        for quantum in 0..8 {
            let now = quantum * 5 * MS;
            if let Some((id, _)) = holder {
                stride.charge(TenantId(id), 5 * MS);
            }
            let decision = decide(&mut stride, now, &tenants, holder);
            let slice = decision.grant.first().expect("a slice begins");
            assert_eq!(decision.again_ns, Some(now + 5 * MS));
            holder = Some((slice.tenant.0, now));
            order.push(if slice.tenant.0 == 1 { 'A' } else { 'B' });
        }
        assert_eq!(order, "ABAAABAA");
    }

    #[test]
    fn inside_its_slice_the_holder_keeps_the_device() {
        let tenants = [tenant(1, 500_000, true), tenant(2, 500_000, true)];
        let mut stride = Stride::new();
        decide(&mut stride, 0, &tenants, None);
        stride.charge(TenantId(1), 3 * MS);
        let decision = decide(&mut stride, 3 * MS, &tenants, Some((1, 0)));
        assert_eq!(
            decision,
            Decision {
                next: Some(TenantId(2)),
                again_ns: Some(5 * MS),
                ..Decision::default()
            }
        );
    }

    #[test]
    fn the_named_successor_is_the_one_that_comes() {
        let tenants = [
            tenant(1, 600_000, true),
            tenant(2, 300_000, true),
            tenant(3, 100_000, true),
        ];
        let (mut stride, mut holder, mut said) = (Stride::new(), None, None);
        for quantum in 0..100 {
            // What a slice is with three tenants.
            let slice_ns = 3_332_000;
            let now = quantum * slice_ns;
            let decision = decide(&mut stride, now, &tenants, holder);
            let slice = *decision.grant.first().expect("a slice begins");
            if let Some((before, _)) = holder {
                let changed = (slice.tenant.0 != before).then_some(slice.tenant);
                assert_eq!(said, changed, "quantum {quantum}");
            }
            holder = Some((slice.tenant.0, now));
            // Asked in the middle of the slice, who comes next?
            stride.charge(slice.tenant, 2 * MS);
            said = decide(&mut stride, now + 2 * MS, &tenants, holder).next;
            stride.charge(slice.tenant, slice_ns - 2 * MS);
        }
    }

    #[test]
    fn a_holder_that_stops_wanting_is_followed_at_once() {
        let mut stride = Stride::new();
        let both = [tenant(1, 500_000, true), tenant(2, 500_000, true)];
        decide(&mut stride, 0, &both, None);
        stride.charge(TenantId(1), MS);
        let one = [tenant(1, 500_000, false), tenant(2, 500_000, true)];
        let decision = decide(&mut stride, MS, &one, Some((1, 0)));
        assert_eq!(*decision.revoke, [TenantId(1)]);
        assert_eq!(
            decision.grant.first().map(|slice| slice.tenant),
            Some(TenantId(2))
        );
        assert_eq!(decision.again_ns, None, "solo it runs without end");
    }

    #[test]
    fn with_nobody_waiting_the_holder_keeps_the_device() {
        let tenants = [tenant(1, 1, false), tenant(2, 1, false)];
        let decision = decide(&mut Stride::new(), 9, &tenants, Some((1, 0)));
        assert_eq!(decision, Decision::default());
    }

    #[test]
    fn sleep_earns_nothing_and_debt_is_kept() {
        let mut stride = Stride::new();
        let both = [tenant(1, 500_000, true), tenant(2, 500_000, true)];
        let one_wants = [tenant(1, 500_000, true), tenant(2, 500_000, false)];
        decide(&mut stride, 0, &both, None);
        stride.charge(TenantId(1), 5 * MS);
        stride.charge(TenantId(2), 5 * MS);
        decide(&mut stride, 0, &one_wants, None);
        assert_eq!(stride.debt_ns(TenantId(2)), 0);
        // Its last kernel is still running and ends 40 ms later.
        stride.charge(TenantId(2), 40 * MS);
        stride.charge(TenantId(1), 3_600_000 * MS);
        decide(&mut stride, 0, &one_wants, None);
        assert_eq!(stride.debt_ns(TenantId(2)) / 1_000_000, 40);
        decide(&mut stride, 0, &both, None);
        assert_eq!(stride.debt_ns(TenantId(2)) / 1_000_000, 40);
        assert_eq!(stride.debt_ns(TenantId(1)), 0);
    }

    #[test]
    fn what_is_owed_to_a_tenant_that_ends_is_kept_up_to_a_quantum() {
        let mut stride = Stride::new();
        let both = [tenant(1, 500_000, true), tenant(2, 500_000, true)];
        let one_wants = [tenant(1, 500_000, true), tenant(2, 500_000, false)];
        decide(&mut stride, 0, &both, None);
        stride.charge(TenantId(1), 400 * MS);
        assert_eq!(stride.debt_ns(TenantId(2)), -200_000_000);
        decide(&mut stride, 0, &one_wants, None);
        decide(&mut stride, 0, &both, None);
        assert_eq!(stride.debt_ns(TenantId(2)), -5_000_000);
    }

    #[test]
    fn a_new_weight_keeps_the_debt_in_device_time() {
        let mut stride = Stride::new();
        decide(
            &mut stride,
            0,
            &[tenant(1, 500_000, true), tenant(2, 500_000, true)],
            None,
        );
        stride.charge(TenantId(1), 10 * MS);
        assert_eq!(stride.debt_ns(TenantId(1)), 5_000_000);
        decide(
            &mut stride,
            0,
            &[tenant(1, 100_000, true), tenant(2, 500_000, true)],
            None,
        );
        assert_eq!(stride.debt_ns(TenantId(1)), 5_000_000);
    }

    #[test]
    fn a_guaranteed_tenant_takes_the_device_from_an_opportunistic_one_at_once() {
        let mut stride = Stride::new();
        let opportunistic = TenantView {
            class: Class::Opportunistic,
            ..tenant(1, 900_000, true)
        };
        let first = decide(&mut stride, 0, &[opportunistic, tenant(2, 1, false)], None);
        assert_eq!(
            first.grant.first().map(|slice| slice.tenant),
            Some(TenantId(1))
        );
        let then = decide(
            &mut stride,
            MS,
            &[opportunistic, tenant(2, 1, true)],
            Some((1, 0)),
        );
        assert_eq!(*then.revoke, [TenantId(1)]);
        assert_eq!(
            then.grant.first().map(|slice| slice.tenant),
            Some(TenantId(2))
        );
    }
}
