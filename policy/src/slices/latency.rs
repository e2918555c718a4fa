//! A latency target for some jobs, what is left for the others.
//!
//! Sources: the earliest deadline first: C. L. Liu and J. W. Layland, "Scheduling Algorithms for
//! Multiprogramming in a Hard-Real-Time Environment", JACM 20(1), 1973. To begin when the slack is
//! used up and not before: A. K. Mok, "Fundamental Design Problems of Distributed Systems for the
//! Hard-Real-Time Environment", MIT/LCS/TR-297, 1983. To bound what best-effort work has on a GPU
//! beside work with a latency target, at the granularity of kernels: F. Strati, X. Ma, A.
//! Klimovic, "Orion", EuroSys 2024; M. Han et al., "Microsecond-scale Preemption for Concurrent
//! GPU-accelerated DNN Inferences" (REEF), OSDI 2022.
//!
//! A *burst* is what a tenant submits until it wants the device no longer; in a program that
//! reports its iterations, one iteration at most. A tenant with a target has a deadline for each
//! burst:
//!
//! ```text
//! deadline = first waiting launch + target
//! slack    = deadline - now - expected rest - wait - margin
//! ```
//!
//! The *expected rest* is the 99th percentile of the device time of its recent bursts, less what
//! this one has had. The *wait* is what others may have on the device when they are asked for it
//! (of the one whose work stays longest, the 99th percentile of what was seen) and the turn: a
//! kernel that runs is never interrupted. The *margin* is a part of the target. Order:
//!
//! 1. bursts whose slack is used up, by deadline, the earliest first; the device is taken for them
//!    inside the slices of others;
//! 2. bursts that are late already, likewise: what is lost must not make others late;
//! 3. everybody, by share, exactly as under `stride`. Bursts with slack are among these.
//!
//! *What the others have on the device.* Their slices are no longer than the smallest slack that a
//! burst has when it comes, and what they may queue is a quarter of that, whether a burst is there
//! or not: the one that comes has to wait for it.
//!
//! *Nobody pays more than its share.* 1 and 2 are for a tenant with an *allowance*: it grows with
//! its part of the weights among those that want the device, up to `window_ms` of that, and what
//! the tenant uses is taken from it. One that always has a burst has its share, and no more. Within
//! the allowance a burst that was served at once leaves no debt behind: without that a service that
//! uses less than its share would end up behind everybody in 3.
//!
//! *What cannot be met is reported* ([`Unmet`]): a target below what the others have on the device
//! and the burst's own time together, a share that is too small, bursts that were late.
//!
//! Without a target among the tenants this is `stride`, decision by decision.

use std::collections::BTreeMap;

use super::SliceRegistration;
use super::stride::Passes;
use crate::quantile::Quantile;
use crate::registry::{Kind, ParamSpec, Registration, Settings};
use crate::slice::{Class, LatencyReport, SlicePolicy, TenantId, TenantView, Unmet, View};
use crate::turns::{Order, Rank, Turns};

/// How it is chosen.
pub(super) static LATENCY: SliceRegistration = Registration {
    name: "latency",
    summary: "bursts done within a latency target, the rest by share",
    params: PARAMS,
    build,
};

const PARAMS: &[ParamSpec] = &[
    ParamSpec {
        name: "margin_percent",
        summary: "part of the target by which a burst is begun earlier than it has to be",
        kind: Kind::Number {
            min: 0.0,
            max: 90.0,
            default: 20.0,
        },
    },
    ParamSpec {
        name: "window_ms",
        summary: "for so long a tenant with a target may save up its share for bursts",
        kind: Kind::Number {
            min: 10.0,
            max: 60_000.0,
            default: 500.0,
        },
    },
];

fn build(settings: &Settings<'_>) -> Box<dyn SlicePolicy> {
    Box::new(Turns::new(Latency {
        margin: settings.number("margin_percent") / 100.0,
        window_ns: settings.number("window_ms") * 1e6,
        at_ns: None,
        passes: Passes::default(),
        members: BTreeMap::new(),
    }))
}

/// What may be queued beside a target is a slack divided by this.
const IN_FLIGHT_PART: u64 = 4;
/// Less than this is not asked of anybody, in microseconds: a device that runs dry between two
/// launches helps nobody.
const LEAST_IN_FLIGHT_US: u32 = 100;
/// An iteration that a program reports itself is as sure as this.
const REPORTED_PPM: u32 = 1_000_000;
/// One late burst alone is an accident.
const MISSED: usize = 2;

/// See the module's documentation.
#[derive(Debug)]
struct Latency {
    /// Part of a target.
    margin: f64,
    window_ns: f64,
    at_ns: Option<u64>,
    passes: Passes,
    /// Those with a target.
    members: BTreeMap<TenantId, Member>,
}

#[derive(Debug, Default)]
struct Member {
    target_ns: u64,
    paused: bool,
    /// Its part of the weights among those that want the device.
    rate: f64,
    /// Device time that it may have before others, in nanoseconds.
    allowance_ns: f64,
    burst: Option<Burst>,
    /// Device time of its bursts.
    service: Quantile,
    /// What they took.
    took: Quantile,
    bursts: u64,
    missed: u64,
    /// The last one that was late had to wait for its share.
    short_of_share: bool,
    /// How long it may have to wait for the device, and for whose work.
    wait_ns: u64,
    behind: Option<TenantId>,
}

#[derive(Clone, Copy, Debug)]
struct Burst {
    arrived_ns: u64,
    /// Device time that it has had, in nanoseconds.
    done_ns: u64,
    /// Its slack was used up.
    urgent: bool,
    /// It was urgent, and its share was used up.
    short_of_share: bool,
}

impl Burst {
    fn begin(arrived_ns: u64) -> Self {
        Self {
            arrived_ns,
            done_ns: 0,
            urgent: false,
            short_of_share: false,
        }
    }
}

impl Member {
    fn deadline_ns(&self, burst: &Burst) -> u64 {
        burst.arrived_ns.saturating_add(self.target_ns)
    }

    /// When a burst has to have the device at the latest; at once where it is not known how long it
    /// is, or it is longer than they are.
    fn begin_by_ns(&self, burst: &Burst, margin: f64) -> u64 {
        let service_ns = self.service.p99_ns().unwrap_or(0);
        let rest_ns = service_ns.saturating_sub(burst.done_ns);
        if rest_ns == 0 {
            return burst.arrived_ns;
        }
        let before_ns = rest_ns
            .saturating_add(self.wait_ns)
            .saturating_add(self.margin_ns(margin));
        (self.deadline_ns(burst))
            .saturating_sub(before_ns)
            .max(burst.arrived_ns)
    }

    fn margin_ns(&self, margin: f64) -> u64 {
        (self.target_ns as f64 * margin) as u64
    }

    /// What a burst that comes now could spare before it has to be asked for the device.
    fn spare_ns(&self, margin: f64) -> u64 {
        (self.target_ns)
            .saturating_sub(self.service.p99_ns().unwrap_or(0))
            .saturating_sub(self.margin_ns(margin))
    }

    /// The allowance with which it may go before others: some of it, where it does not hold the
    /// device, so that it is not given for nothing.
    fn needs_ns(&self, held: bool, view: &View<'_>, window_ns: f64) -> f64 {
        if held {
            0.0
        } else {
            (f64::from(view.quantum.max_us) * 500.0).min(window_ns * self.rate / 2.0)
        }
    }

    fn end(&mut self, burst: Burst, at_ns: u64) {
        let took_ns = at_ns.saturating_sub(burst.arrived_ns);
        self.service.note(burst.done_ns);
        self.took.note(took_ns);
        self.bursts += 1;
        if took_ns > self.target_ns {
            self.missed += 1;
            self.short_of_share = burst.short_of_share;
        }
    }

    fn unmet(&self) -> Option<Unmet> {
        let service_ns = self.service.p99_ns().unwrap_or(0);
        let needs_ns = service_ns.saturating_add(self.wait_ns);
        if needs_ns > self.target_ns {
            return Some(Unmet::TooShort {
                needs_ns,
                service_ns,
                behind: self.behind,
                wait_ns: self.wait_ns,
            });
        }
        let missed = self.took.p99_ns().is_some_and(|ns| ns > self.target_ns);
        if !missed || self.took.above(self.target_ns) < MISSED {
            None
        } else if self.short_of_share {
            Some(Unmet::Share)
        } else {
            Some(Unmet::Missed)
        }
    }
}

impl Latency {
    fn follow_member(&mut self, tenant: &TenantView, view: &View<'_>, dt_ns: u64) {
        let (margin, window_ns) = (self.margin, self.window_ns);
        let Some(target_ns) = tenant.latency_target_ns else {
            self.members.remove(&tenant.id);
            return;
        };
        let weight = |tenant: &TenantView| f64::from(tenant.weight_ppm.max(1));
        let others = view.tenants.iter().filter(|other| other.id != tenant.id);
        let competing = others
            .clone()
            .filter(|other| other.class == tenant.class && other.is_ready())
            .map(weight);
        let rate = weight(tenant) / (weight(tenant) + competing.sum::<f64>());
        let longest = others
            .filter(|other| !other.paused && other.drain_ns > 0)
            .max_by_key(|other| other.drain_ns);
        let member = self.members.entry(tenant.id).or_insert_with(|| Member {
            allowance_ns: window_ns * rate,
            ..Member::default()
        });
        (member.target_ns, member.paused, member.rate) = (target_ns, tenant.paused, rate);
        member.allowance_ns = (member.allowance_ns + rate * dt_ns as f64).min(window_ns * rate);
        let drain_ns = longest.map_or(0, |other| other.drain_ns);
        member.wait_ns = drain_ns.saturating_add(view.device.turn_ns);
        member.behind = longest.map(|other| other.id);
        match member.burst {
            None if tenant.is_ready() => {
                let most_ns = (-member.allowance_ns).max(0.0) as u64;
                self.passes.forgive(tenant.id, most_ns);
                member.burst = Some(Burst::begin(view.now_ns));
            }
            // One that is paused has not ended its burst.
            Some(burst) if !tenant.wants && !tenant.paused => {
                member.end(burst, view.now_ns);
                member.burst = None;
            }
            Some(burst) if tenant.iterations.confidence_ppm >= REPORTED_PPM => {
                let began_ns = tenant.iterations.began_ns;
                let began_ns = began_ns.filter(|ns| *ns > burst.arrived_ns && *ns <= view.now_ns);
                if let Some(began_ns) = began_ns {
                    member.end(burst, began_ns);
                    member.burst = Some(Burst::begin(began_ns));
                }
            }
            _ => {}
        }
        if let Some(mut burst) = member.burst {
            burst.urgent |= view.now_ns >= member.begin_by_ns(&burst, margin);
            let held = view.held(tenant.id).is_some();
            let needs_ns = member.needs_ns(held, view, window_ns);
            burst.short_of_share |= burst.urgent && member.allowance_ns <= needs_ns;
            member.burst = Some(burst);
        }
    }

    /// Whether a burst goes before everybody without one: its tier, and its deadline.
    fn due(&self, tenant: &TenantView, view: &View<'_>, ahead_ns: u64) -> Option<(u8, u64)> {
        let member = self.members.get(&tenant.id)?;
        let burst = member.burst.filter(|burst| burst.urgent)?;
        let needs_ns = member.needs_ns(view.held(tenant.id).is_some(), view, self.window_ns);
        if member.allowance_ns - ahead_ns as f64 <= needs_ns {
            return None;
        }
        let deadline_ns = member.deadline_ns(&burst);
        Some((u8::from(view.now_ns > deadline_ns), deadline_ns))
    }

    /// The smallest of something among the tenants with a target, this one apart.
    fn least_beside(&self, id: TenantId, of: impl Fn(&Member) -> u64) -> Option<u64> {
        (self.members.iter())
            .filter(|(other, member)| **other != id && !member.paused)
            .map(|(_, member)| of(member))
            .min()
    }
}

impl Order for Latency {
    fn name(&self) -> &'static str {
        "latency"
    }

    fn charge(&mut self, id: TenantId, device_ns: u64) {
        self.passes.charge(id, device_ns);
        if let Some(member) = self.members.get_mut(&id) {
            member.allowance_ns -= device_ns as f64;
            if let Some(burst) = &mut member.burst {
                burst.done_ns += device_ns;
            }
        }
    }

    fn follow(&mut self, view: &View<'_>) {
        let dt_ns = view
            .now_ns
            .saturating_sub(self.at_ns.unwrap_or(view.now_ns));
        self.at_ns = Some(view.now_ns);
        self.members.retain(|id, _| view.tenant(*id).is_some());
        for tenant in view.tenants {
            self.follow_member(tenant, view, dt_ns);
        }
        self.passes.follow(view);
    }

    fn resume(&mut self) {
        self.passes.resume();
    }

    fn rank(&self, tenant: &TenantView, view: &View<'_>, ahead_ns: u64) -> Option<Rank> {
        if let Some((tier, deadline_ns)) = self.due(tenant, view, ahead_ns) {
            return Some(Rank::new(tier, i128::from(deadline_ns)));
        }
        let rank = self.passes.rank(tenant, view, ahead_ns)?;
        Some(Rank { tier: 2, ..rank })
    }

    fn goes_for(&self, holder: &TenantView, better: &TenantView, view: &View<'_>) -> bool {
        self.due(better, view, 0).is_some()
            && self.rank(better, view, 0) < self.rank(holder, view, 0)
    }

    fn slice_us(&self, tenant: &TenantView, view: &View<'_>, usual_us: u32) -> u32 {
        let slack_ns = self.least_beside(tenant.id, |member| {
            let spare_ns = member.spare_ns(self.margin);
            spare_ns.saturating_sub(member.wait_ns)
        });
        let Some(slack_ns) = slack_ns else {
            return usual_us;
        };
        let slack_us = u32::try_from(slack_ns / 1000).unwrap_or(u32::MAX);
        slack_us.max(view.quantum.min_us).min(usual_us)
    }

    /// When the first slack of those that wait is used up.
    fn takes_over(&self, view: &View<'_>) -> Option<(TenantId, u64)> {
        let guaranteed = (view.tenants.iter())
            .any(|tenant| tenant.is_ready() && tenant.class == Class::Guaranteed);
        (view.tenants.iter())
            .filter(|tenant| tenant.is_ready() && view.held(tenant.id).is_none())
            .filter(|tenant| tenant.class == Class::Guaranteed || !guaranteed)
            .filter_map(|tenant| {
                let member = self.members.get(&tenant.id)?;
                let burst = member.burst?;
                let deadline_ns = member.deadline_ns(&burst);
                // A holder that is before it then is so until its own burst has ended.
                let yields = view.holders.iter().any(|holder| {
                    let holder = view.tenant(holder.id);
                    let due = holder.and_then(|holder| self.due(holder, view, 0));
                    due.is_none_or(|due| due > (0, deadline_ns))
                });
                let lacks_ns = member.needs_ns(false, view, self.window_ns) - member.allowance_ns;
                let saved_ns = if lacks_ns < 0.0 {
                    0
                } else {
                    let wait_ns = (lacks_ns / member.rate) as u64 + 1;
                    view.now_ns.saturating_add(wait_ns)
                };
                let at_ns = member.begin_by_ns(&burst, self.margin).max(saved_ns);
                (yields && at_ns > view.now_ns).then_some((tenant.id, at_ns))
            })
            .min_by_key(|(_, at_ns)| *at_ns)
    }

    fn debt_ns(&self, id: TenantId) -> Option<i64> {
        self.passes.debt_ns(id)
    }

    fn latency(&self, id: TenantId) -> Option<LatencyReport> {
        let member = self.members.get(&id)?;
        Some(LatencyReport {
            target_ns: member.target_ns,
            bursts: member.bursts,
            missed: member.missed,
            p99_ns: member.took.p99_ns(),
            unmet: member.unmet(),
        })
    }

    fn in_flight_us(&self, id: TenantId) -> Option<u32> {
        let spare_ns = self.least_beside(id, |member| member.spare_ns(self.margin))?;
        let most_us = u32::try_from(spare_ns / IN_FLIGHT_PART / 1000).unwrap_or(u32::MAX);
        Some(most_us.max(LEAST_IN_FLIGHT_US))
    }
}
