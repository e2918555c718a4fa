//! Gangs: the ranks of a job on several devices run at the same time or not at all.
//!
//! A collective ends when all ranks have launched it; a rank that runs while another waits at a gate spins through its slice, and two jobs
//! that each hold the device the other's rank waits for stand still for ever. So one object decides for all devices
//! that gangs span.
//!
//! Source: S. Chaudhary et al., "Balancing Efficiency and Fairness in Heterogeneous GPU Clusters for Deep Learning"
//! (Gandiva-fair), EuroSys 2020: gang-aware stride, in which a job whose gang does not fit is passed over without losing its pass.
//!
//! Every device ranks its own tenants by the policy in use, and is charged on its own. A gang wants if one of its ranks does. It is *due* when on
//! each of its devices no tenant of that device alone ranks before it. One that is due gets all its devices at once, also those
//! in the middle of somebody's slice (who is charged for what it used and no more), as soon as a slice ends on one of them;
//! its own slice begins and ends everywhere together. Of two that are due and share a device the better ranked there comes first.
//!
//! *Nobody starves.* While a gang waits, its passes stand still and those of the others grow, so it becomes the first on each of
//! its devices, and stays that until it has run. On a device with less competition than on its others it is passed over more often than
//! its share says; that device has more for the others, and the gang keeps no more than a slice of what it is owed there. In the end it
//! has on all its devices what it is due on the one where that is least: with one other tenant on the first device and three on the second, a
//! quarter of both.

use crate::registry::{Param, PolicyError};
use crate::slice::{Decision, GangId, Holder, Slice, TenantId, TenantView, View};
use crate::stride::Passes;
use crate::turns::{Candidate, Order, Turns};

/// See the module's documentation.
#[derive(Debug)]
pub struct Gangs {
    devices: Vec<Turns<Box<dyn Order>>>,
    /// The tenants of each device, with gangs seen as one. Kept to allocate little.
    seen: Vec<Vec<TenantView>>,
}

/// A gang in the views.
#[derive(Debug)]
struct Gang {
    id: GangId,
    class: crate::slice::Class,
    members: Vec<(usize, TenantId)>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// It gets nothing now.
    Waits,
    /// It holds all its devices and keeps them.
    Stays,
    /// It gets all its devices now, or a new slice of them.
    Begins,
}

impl Gangs {
    /// So many devices, by stride.
    pub fn stride(devices: usize) -> Self {
        Self::of((0..devices).map(|_| Box::new(Passes::default()) as Box<dyn Order>))
    }

    /// So many devices, each by the policy of this name.
    ///
    /// # Errors
    ///
    /// As [`crate::by_name`].
    pub fn by_name(name: &str, params: &[Param], devices: usize) -> Result<Self, PolicyError> {
        let orders: Result<Vec<_>, _> = (0..devices)
            .map(|_| crate::registry::order(name, params))
            .collect();
        Ok(Self::of(orders?.into_iter()))
    }

    fn of(orders: impl Iterator<Item = Box<dyn Order>>) -> Self {
        let devices: Vec<_> = orders.map(Turns::new).collect();
        Self {
            seen: vec![Vec::new(); devices.len()],
            devices,
        }
    }

    /// `id` has used this device.
    pub fn charge(&mut self, device: usize, id: TenantId, device_ns: u64) {
        if let Some(turns) = self.devices.get_mut(device) {
            crate::SlicePolicy::charge(turns, id, device_ns);
        }
    }

    /// See [`crate::SlicePolicy::debt_ns`], on this device.
    pub fn debt_ns(&self, device: usize, id: TenantId) -> Option<i64> {
        self.devices.get(device)?.order.debt_ns(id)
    }

    /// What to do on each device, given a view of each with the same time.
    pub fn decide(&mut self, views: &[View<'_>]) -> Vec<Decision> {
        let mut gangs = gather(views);
        let mut seen = std::mem::take(&mut self.seen);
        seen.resize(views.len().max(seen.len()), Vec::new());
        for (device, view) in views.iter().enumerate() {
            seen[device].clear();
            seen[device].extend(view.tenants.iter().map(|tenant| as_one(tenant, views)));
        }
        let views: Vec<View<'_>> = views
            .iter()
            .zip(&seen)
            .map(|(view, tenants)| View { tenants, ..*view })
            .collect();
        for (turns, view) in self.devices.iter_mut().zip(&views) {
            turns.rank_all(view);
        }
        self.choose(&mut gangs, &views);
        let decisions = (0..views.len().min(self.devices.len()))
            .map(|device| self.settle(device, &gangs, &views))
            .collect();
        self.seen = seen;
        decisions
    }

    fn candidate(&self, device: usize, id: TenantId) -> Option<&Candidate> {
        let turns = self.devices.get(device)?;
        turns
            .candidates()
            .iter()
            .find(|candidate| candidate.id == id)
    }

    /// Sets the gangs' states.
    fn choose(&mut self, gangs: &mut [Gang], views: &[View<'_>]) {
        let mut taken = vec![false; views.len()];
        for gang in gangs.iter_mut() {
            let stays = gang.members.iter().all(|(device, id)| {
                let held = views[*device].held(*id);
                held.is_some_and(|holder| views[*device].now_ns < holder.due_ns())
                    && self.candidate(*device, *id).is_some()
            });
            if stays {
                gang.state = State::Stays;
                (gang.members.iter()).for_each(|(device, _)| taken[*device] = true);
            }
        }
        let mut due: Vec<usize> = (0..gangs.len())
            .filter(|at| gangs[*at].state == State::Waits && self.is_due(&gangs[*at], gangs, views))
            .collect();
        while !due.is_empty() {
            due.retain(|at| gangs[*at].members.iter().all(|(device, _)| !taken[*device]));
            // The one that no other goes before; in a ring of those, the first of them.
            let first = (due.iter().copied())
                .find(|at| {
                    due.iter()
                        .all(|other| !self.before(&gangs[*other], &gangs[*at]))
                })
                .or(due.first().copied());
            let Some(first) = first else { break };
            gangs[first].state = State::Begins;
            (gangs[first].members.iter()).for_each(|(device, _)| taken[*device] = true);
            due.retain(|at| *at != first);
        }
        for gang in gangs.iter().filter(|gang| gang.state == State::Waits) {
            for (device, id) in &gang.members {
                let keep_ns = u64::from(views[*device].quantum.max_us) * 1000;
                self.devices[*device].order.forgive(*id, keep_ns);
            }
        }
    }

    /// Whether it is the first of all that are on one device only, everywhere, and a slice has ended somewhere.
    fn is_due(&self, gang: &Gang, gangs: &[Gang], views: &[View<'_>]) -> bool {
        let in_gang = |device: usize, id: TenantId| {
            gangs
                .iter()
                .any(|gang| gang.members.contains(&(device, id)))
        };
        let first = gang.members.iter().all(|(device, id)| {
            self.candidate(*device, *id).is_some_and(|own| {
                (self.devices[*device].candidates().iter())
                    .take_while(|other| *other < own)
                    .all(|other| in_gang(*device, other.id))
            })
        });
        let now = gang.members.iter().any(|(device, id)| {
            let view = &views[*device];
            let goes = |holder: &Holder| {
                let over = view.now_ns >= holder.due_ns() || holder.id == *id;
                let below = view.tenant(holder.id).is_none_or(|tenant| {
                    tenant.class != gang.class && gang.class == crate::slice::Class::Guaranteed
                });
                over || below || self.candidate(*device, holder.id).is_none()
            };
            view.holders.is_empty() || view.holders.iter().any(goes)
        });
        first && now
    }

    /// Whether `one` goes before `other` on the first device that both need.
    fn before(&self, one: &Gang, other: &Gang) -> bool {
        one.id != other.id
            && (one.members.iter())
                .find_map(|(device, id)| {
                    let (_, theirs) = other.members.iter().find(|(at, _)| at == device)?;
                    Some(self.candidate(*device, *id)? < self.candidate(*device, *theirs)?)
                })
                .unwrap_or(false)
    }

    fn settle(&mut self, device: usize, gangs: &[Gang], views: &[View<'_>]) -> Decision {
        let view = &views[device];
        let here = |gang: &Gang| {
            (gang.members.iter())
                .find(|(at, _)| *at == device)
                .map(|(_, id)| *id)
        };
        let held_by = gangs
            .iter()
            .filter(|gang| gang.state != State::Waits)
            .find_map(|gang| Some((gang, here(gang)?)));
        let Some((gang, id)) = held_by else {
            let barred: Vec<TenantId> = gangs.iter().filter_map(here).collect();
            return self.devices[device].settle(view, &barred);
        };
        let others = |at: usize, own: TenantId| {
            (self.devices[at].candidates().iter())
                .map(|candidate| candidate.id)
                .find(|other| *other != own)
        };
        let contended = gang
            .members
            .iter()
            .any(|(at, own)| others(*at, *own).is_some());
        let quantum_us = (gang.members.iter())
            .map(|(at, _)| self.devices[*at].quantum_us(&views[*at]))
            .max()
            .unwrap_or(view.quantum.max_us);
        let held = view.held(id);
        let begins = gang.state == State::Begins && (held.is_none() || contended);
        let due_ns = match held {
            Some(holder) if !begins => holder.due_ns(),
            _ => view.now_ns + u64::from(quantum_us) * 1000,
        };
        Decision {
            revoke: (view.holders.iter())
                .map(|holder| holder.id)
                .filter(|holder| *holder != id)
                .collect(),
            grant: begins
                .then_some(Slice {
                    tenant: id,
                    quantum_us,
                })
                .into_iter()
                .collect(),
            next: others(device, id),
            again_ns: (contended && due_ns > view.now_ns).then_some(due_ns),
        }
    }
}

/// The gangs of the views, with all their ranks.
fn gather(views: &[View<'_>]) -> Vec<Gang> {
    let mut gangs: Vec<Gang> = Vec::new();
    for (device, view) in views.iter().enumerate() {
        for tenant in view.tenants {
            let Some(id) = tenant.gang else { continue };
            let member = (device, tenant.id);
            match gangs.iter_mut().find(|gang| gang.id == id) {
                Some(gang) => gang.members.push(member),
                None => gangs.push(Gang {
                    id,
                    class: tenant.class,
                    members: vec![member],
                    state: State::Waits,
                }),
            }
        }
    }
    gangs
}

/// A tenant as the whole of its gang: wants if one wants, is paused if one is.
fn as_one(tenant: &TenantView, views: &[View<'_>]) -> TenantView {
    let Some(gang) = tenant.gang else {
        return *tenant;
    };
    let mut ranks = (views.iter())
        .flat_map(|view| view.tenants)
        .filter(|other| other.gang == Some(gang));
    TenantView {
        wants: ranks.clone().any(|rank| rank.wants),
        paused: ranks.any(|rank| rank.paused),
        ..*tenant
    }
}
