//! Just enough for the deadline, the rest by attained service.
//!
//! Source: L. Chen, K. Chen, W. Bai, M. Alizadeh, "Scheduling Mix-flows in Commodity Datacenters
//! with Karuna", SIGCOMM 2016; there for flows in a network. The queues of the rest: J. Gu et al.,
//! "Tiresias", NSDI 2019 (discretised least attained service).
//!
//! A job with a deadline gains nothing by ending early. So it gets the rate that ends it just in
//! time,
//!
//! ```text
//! rate = margin x remaining device time / time left          margin = 1.15
//! ```
//!
//! and not the whole device. A job of 2 s with 10 s to go gets 23 % at once, and if it falls behind
//! the rate rises by itself: with 1 s of work and 1.5 s to go it is 77 %. Under strict priority it
//! would take all of the first 2 s, and jobs without a deadline would wait that long.
//!
//! The rate fills a credit, charges drain it. Order:
//!
//! 1. with credit for half a slice (the holder: with any), or with no more time to spare than
//!    `reserve`: by deadline, the earliest first;
//! 2. without a deadline: by queue of attained service (up to `first_queue_ms`, then `queue_factor`
//!    times as much each), inside a queue in turns, as packets of flows pass the queues of a
//!    switch. A job that has waited `promote` times as long as it has run starts again in the first
//!    queue;
//! 3. with a deadline and no credit: they take the time that nobody else wants, the earliest
//!    deadline first.
//!
//! A deadline that has passed, or that the whole device could not meet any more, binds nobody: such
//! a job counts as a job without a deadline and keeps its attained service. (Chasing it would make
//! the next job miss as well.) If not all deadlines can be met, the policy gives up the fewest (J.
//! Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs",
//! Management Science 15(1), 1968): it takes jobs by deadline and, whenever the work up to a
//! deadline does not fit before it, drops the job with most work left. A job with a deadline and
//! unknown remaining work is in the first group until its deadline. One that has had all of its
//! work and goes on is taken to need a twentieth more, again and again.

use std::collections::BTreeMap;

use super::SliceRegistration;
use crate::registry::{Kind, ParamSpec, Registration, Settings};
use crate::slice::SlicePolicy;
use crate::slice::{TenantId, TenantView, View};
use crate::turns::Turns;
use crate::turns::{Order, Rank};

/// How it is chosen.
pub(super) static DEADLINE: SliceRegistration = Registration {
    name: "deadline",
    summary: "just enough for deadlines, the rest by least attained service",
    params: PARAMS,
    build,
};

const PARAMS: &[ParamSpec] = &[
    ParamSpec {
        name: "margin_percent",
        summary: "how much more than needed a deadline gets",
        kind: Kind::Number {
            min: 0.0,
            max: 100.0,
            default: 15.0,
        },
    },
    ParamSpec {
        name: "first_queue_ms",
        summary: "attained service up to which a tenant without a deadline is in the first queue",
        kind: Kind::Number {
            min: 1.0,
            max: 86_400_000.0,
            default: 500.0,
        },
    },
    ParamSpec {
        name: "queue_factor",
        summary: "how many times longer each queue is than the one before",
        kind: Kind::Number {
            min: 2.0,
            max: 1000.0,
            default: 4.0,
        },
    },
    ParamSpec {
        name: "promote",
        summary: "a tenant that waited so many times as long as it ran starts in the first queue again; 0: never",
        kind: Kind::Number {
            min: 0.0,
            max: 1000.0,
            default: 8.0,
        },
    },
    ParamSpec {
        name: "deadlines_first",
        summary: "tenants with a deadline run as fast as they can, before all others",
        kind: Kind::Flag { default: false },
    },
];

fn build(settings: &Settings<'_>) -> Box<dyn SlicePolicy> {
    Box::new(Turns::new(Deadline {
        margin: 1.0 + settings.number("margin_percent") / 100.0,
        first_queue_ns: (settings.number("first_queue_ms") * 1e6) as u64,
        queue_factor: settings.number("queue_factor") as u64,
        promote: settings.number("promote"),
        strict: settings.flag("deadlines_first"),
        at_ns: None,
        members: BTreeMap::new(),
        booked: Vec::new(),
    }))
}

/// See the module's documentation.
#[derive(Debug)]
struct Deadline {
    /// Over what is needed.
    pub(crate) margin: f64,
    pub(crate) first_queue_ns: u64,
    pub(crate) queue_factor: u64,
    /// 0: never.
    pub(crate) promote: f64,
    /// Every job with a deadline first, as fast as it can: what the policy is measured against.
    pub(crate) strict: bool,
    pub(crate) at_ns: Option<u64>,
    pub(crate) members: BTreeMap<TenantId, Member>,
    /// Scratch of `give_up`: deadline, work left, who.
    pub(crate) booked: Vec<(u64, u64, TenantId)>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Member {
    /// Of device time that its rate has earned, in nanoseconds.
    credit_ns: f64,
    /// Attained service at which it was promoted last, in nanoseconds.
    since_ns: u64,
    attained_ns: u64,
    /// When it had the device last, or arrived.
    served_ns: u64,
    /// It has waited for so long since it ran last, in nanoseconds.
    waited_ns: u64,
    /// Its deadline cannot be met together with the others.
    given_up: bool,
}

/// How many queues there are.
const QUEUES: u32 = 8;

/// What is promised to a tenant at a moment.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Promise {
    /// It has no deadline, or none that could be met.
    None,
    /// Its deadline at this rate of the device.
    Rate {
        deadline_ns: u64,
        rate: f64,
        spare_ns: u64,
    },
}

impl Deadline {
    fn promise(&self, tenant: &TenantView, now_ns: u64) -> Promise {
        let Some(deadline_ns) = tenant.deadline_ns.filter(|ns| *ns > now_ns) else {
            return Promise::None;
        };
        let left_ns = deadline_ns - now_ns;
        let needs_ns = match tenant.remaining_ns {
            None => left_ns,
            // It is not done, so its work was guessed too low: by a twentieth at first.
            Some(0) => (tenant.attained_ns / 20).clamp(1, left_ns),
            Some(ns) => ns,
        };
        let given_up = (self.members.get(&tenant.id)).is_some_and(|member| member.given_up);
        if needs_ns > left_ns || given_up {
            return Promise::None;
        }
        Promise::Rate {
            deadline_ns,
            rate: (self.margin * needs_ns as f64 / left_ns as f64).min(1.0),
            spare_ns: left_ns - needs_ns,
        }
    }

    /// Finds the deadlines that cannot be met together with the others.
    fn give_up(&mut self, view: &View<'_>) {
        self.booked.clear();
        for tenant in view.tenants {
            let deadline_ns = tenant.deadline_ns.filter(|ns| *ns > view.now_ns);
            if let (Some(deadline_ns), Some(remaining_ns)) = (deadline_ns, tenant.remaining_ns)
                && !tenant.paused
            {
                self.booked.push((deadline_ns, remaining_ns, tenant.id));
            }
        }
        self.booked.sort_unstable();
        self.members
            .values_mut()
            .for_each(|member| member.given_up = false);
        let mut kept_ns = 0u64;
        for at in 0..self.booked.len() {
            let (deadline_ns, remaining_ns, _) = self.booked[at];
            kept_ns = kept_ns.saturating_add(remaining_ns);
            while kept_ns > deadline_ns - view.now_ns {
                let kept = self.booked[..=at].iter().enumerate();
                let Some((most, _)) = kept.max_by_key(|(_, (_, left_ns, _))| *left_ns) else {
                    break;
                };
                let (_, left_ns, id) = self.booked[most];
                if left_ns == 0 {
                    break;
                }
                kept_ns -= left_ns;
                self.booked[most].1 = 0;
                if let Some(member) = self.members.get_mut(&id) {
                    member.given_up = true;
                }
            }
        }
    }

    /// Two slices: less would be lost to the slices of others.
    fn reserve_ns(view: &View<'_>) -> u64 {
        u64::from(view.quantum.max_us) * 2000
    }

    fn queue(&self, member: &Member, ahead_ns: u64) -> u32 {
        let attained_ns = (member.attained_ns + ahead_ns).saturating_sub(member.since_ns);
        let mut bound_ns = self.first_queue_ns;
        for queue in 0..QUEUES {
            if attained_ns < bound_ns {
                return queue;
            }
            bound_ns = bound_ns.saturating_mul(self.queue_factor);
        }
        QUEUES
    }
}

impl Order for Deadline {
    fn name(&self) -> &'static str {
        "deadline"
    }

    fn charge(&mut self, id: TenantId, device_ns: u64) {
        if let Some(member) = self.members.get_mut(&id) {
            member.credit_ns -= device_ns as f64;
            member.attained_ns += device_ns;
        }
    }

    fn follow(&mut self, view: &View<'_>) {
        let dt_ns = view
            .now_ns
            .saturating_sub(self.at_ns.unwrap_or(view.now_ns));
        self.at_ns = Some(view.now_ns);
        self.members.retain(|id, _| view.tenant(*id).is_some());
        let slice_ns = f64::from(view.quantum.max_us) * 1000.0;
        self.give_up(view);
        for tenant in view.tenants {
            let promise = self.promise(tenant, view.now_ns);
            let promote = self.promote;
            let member = self.members.entry(tenant.id).or_insert_with(|| Member {
                served_ns: tenant.arrived_ns,
                ..Member::default()
            });
            if view.held(tenant.id).is_some() {
                member.served_ns = view.now_ns;
            }
            match promise {
                Promise::Rate { rate, .. } => {
                    // What it did beyond its credit has lowered its rate already.
                    let credit_ns = member.credit_ns + rate * dt_ns as f64;
                    member.credit_ns = credit_ns.clamp(-slice_ns, 2.0 * slice_ns);
                }
                Promise::None => member.credit_ns = 0.0,
            }
            if !tenant.is_ready() || view.held(tenant.id).is_some() {
                member.waited_ns = 0;
            } else {
                member.waited_ns += dt_ns;
                let ran_ns = member.attained_ns.saturating_sub(member.since_ns);
                if promote > 0.0 && ran_ns > 0 && member.waited_ns as f64 > promote * ran_ns as f64
                {
                    member.since_ns = member.attained_ns;
                    member.waited_ns = 0;
                }
            }
        }
    }

    fn rank(&self, tenant: &TenantView, view: &View<'_>, ahead_ns: u64) -> Option<Rank> {
        let member = self.members.get(&tenant.id)?;
        Some(match self.promise(tenant, view.now_ns) {
            Promise::Rate {
                deadline_ns,
                spare_ns,
                ..
            } => {
                let needs_ns = if view.held(tenant.id).is_some() {
                    0.0
                } else {
                    f64::from(view.quantum.max_us) * 500.0
                };
                let due = self.strict
                    || tenant.remaining_ns.is_none()
                    || spare_ns <= Self::reserve_ns(view)
                    || member.credit_ns - ahead_ns as f64 > needs_ns;
                Rank::new(if due { 0 } else { 2 }, i128::from(deadline_ns))
            }
            Promise::None => Rank {
                tier: 1,
                key: i128::from(self.queue(member, ahead_ns)),
                tie: if ahead_ns > 0 {
                    view.now_ns
                } else {
                    member.served_ns
                },
            },
        })
    }

    /// What nobody else wanted is given back at once.
    fn goes_for(&self, holder: &TenantView, better: &TenantView, view: &View<'_>) -> bool {
        let tier = |tenant| self.rank(tenant, view, 0).map(|rank| rank.tier);
        tier(holder) == Some(2) && tier(better) < Some(2)
    }

    /// When the first credit is enough for half a slice.
    fn again_ns(&self, view: &View<'_>) -> Option<u64> {
        let half_ns = f64::from(view.quantum.max_us) * 500.0;
        (view.tenants.iter())
            .filter(|tenant| tenant.is_ready() && view.held(tenant.id).is_none())
            .filter_map(|tenant| {
                let Promise::Rate { rate, .. } = self.promise(tenant, view.now_ns) else {
                    return None;
                };
                let lacks_ns = half_ns - self.members.get(&tenant.id)?.credit_ns;
                (lacks_ns > 0.0 && rate > 0.0)
                    .then(|| view.now_ns.saturating_add((lacks_ns / rate) as u64 + 1))
            })
            .min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slice::{Class, Device, Holder, QuantumBounds};

    const SLICES: QuantumBounds = QuantumBounds {
        min_us: 2000,
        max_us: 5000,
    };

    #[test]
    fn a_job_with_more_work_than_it_said_is_not_left_behind() {
        let mut dated = TenantView::new(TenantId(1), Class::Guaranteed, 1, true);
        dated.deadline_ns = Some(10_000_000_000);
        dated.attained_ns = 2_000_000_000;
        dated.remaining_ns = Some(0);
        let free = TenantView::new(TenantId(2), Class::Guaranteed, 1, true);
        let mut policy = crate::slices::by_name("deadline", &[]).expect("known");
        let mut turns = 0;
        for at in 0..200u64 {
            let decision = policy.decide(&View {
                now_ns: 9_000_000_000 + at * 5_000_000,
                tenants: &[dated, free],
                holders: &[],
                quantum: SLICES,
                device: Device::EXCLUSIVE,
            });
            let its = decision
                .grant
                .iter()
                .any(|slice| slice.tenant == TenantId(1));
            turns += u32::from(its);
            policy.charge(TenantId(if its { 1 } else { 2 }), 5_000_000);
        }
        // A twentieth of what it had is a tenth of what is left.
        assert!(turns >= 15, "{turns} of 200 turns");
    }

    #[test]
    fn jobs_without_a_deadline_take_turns_inside_a_queue() {
        let free = |id, arrived_ns| {
            let mut tenant = TenantView::new(TenantId(id), Class::Guaranteed, 1, true);
            tenant.arrived_ns = arrived_ns;
            tenant
        };
        let tenants = [free(1, 0), free(2, 1), free(3, 2)];
        let mut policy = crate::slices::by_name("deadline", &[]).expect("known");
        // All are in the third queue, from 2 to 8 s.
        for id in 1..=3 {
            policy.decide(&View {
                now_ns: 0,
                tenants: &tenants,
                holders: &[],
                quantum: SLICES,
                device: Device::EXCLUSIVE,
            });
            policy.charge(TenantId(id), 2_500_000_000);
        }
        let mut order = Vec::new();
        let mut holders: Vec<Holder> = Vec::new();
        for at in 1..=9u64 {
            let now_ns = at * 5_000_000;
            let decision = policy.decide(&View {
                now_ns,
                tenants: &tenants,
                holders: &holders,
                quantum: SLICES,
                device: Device::EXCLUSIVE,
            });
            let next = decision.grant.first().expect("all of them want it").tenant;
            order.push(next.0);
            holders = vec![Holder {
                id: next,
                since_ns: now_ns,
                quantum_us: 5000,
            }];
            policy.charge(next, 5_000_000);
        }
        assert_eq!(order, [1, 2, 3, 1, 2, 3, 1, 2, 3]);
    }
}
