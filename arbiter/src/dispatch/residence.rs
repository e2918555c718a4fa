//! The scheduler's side of residency: a tenant whose memory is away does not run, and a slice that
//! is granted to it begins with its switch. The
//! [`ResidencyManager`](crate::residency::ResidencyManager) knows who is away and what is moved.

use std::cell::RefCell;
use std::rc::Rc;

use policy::residency::{Arbitration, Standing};
use policy::{Decision, TenantId};

use super::DeviceScheduler;
use super::entity::RunEntity;
use super::roster::Roster;
use crate::residency::{Crowd, HostBooks, JobView, News, ResidencyStatus};

impl DeviceScheduler {
    /// Looks where everybody's memory is and what may follow. Returns when to look again.
    pub(super) fn keep(&mut self, now_ns: u64) -> Option<u64> {
        if self.residency.is_idle() {
            return None;
        }
        let device = self.device;
        let again_ns = {
            let jobs: Vec<JobView<'_>> = self
                .roster
                .iter()
                .map(|entity| entity.job(now_ns, device))
                .collect();
            self.residency.step(now_ns, &jobs)
        };
        self.stand();
        if self.at_once() && again_ns.is_some() {
            // Nobody grants slices here: every tenant that may come and wants to does.
            let coming: Vec<TenantId> = self
                .roster
                .iter()
                .filter(|entity| entity.standing == Standing::MayCome && entity.competes(now_ns))
                .map(|entity| entity.tenant)
                .collect();
            for tenant in coming {
                self.residency.begin_switch(now_ns, tenant);
            }
            self.stand();
        }
        again_ns
    }

    /// Counts everybody's memory anew.
    pub(super) fn recount(&mut self, now_ns: u64) {
        let device = self.device;
        let jobs: Vec<JobView<'_>> = (self.roster.iter())
            .map(|entity| entity.job(now_ns, device))
            .collect();
        self.residency.recount(now_ns, &jobs);
    }

    /// Promises host memory for a tenant's departure; false where there is not enough.
    pub(super) fn promise_departure(&mut self, now_ns: u64, tenant: TenantId) -> bool {
        let (device, entity) = (self.device, self.roster.find(tenant));
        entity.is_some_and(|entity| {
            (self.residency).promise_departure(now_ns, &entity.job(now_ns, device))
        })
    }

    /// What was promised for it is not needed.
    pub(super) fn take_back_promise(&mut self, now_ns: u64, tenant: TenantId) {
        if let Some(entity) = self.roster.find(tenant) {
            let job = entity.job(now_ns, self.device);
            self.residency.take_back_promise(&job);
        }
    }

    pub(super) fn stand(&mut self) {
        for entity in self.roster.iter_mut() {
            entity.standing = self.residency.standing(entity.tenant);
            entity.leaves = self.residency.is_about_to_leave(entity.tenant);
        }
    }

    /// Slices for those that are out become switches. Those that hold the device keep it until
    /// then, unless their own memory gives way.
    pub(super) fn switch_first(&mut self, now_ns: u64, decision: Decision) -> Decision {
        let out = |roster: &Roster, id: TenantId| {
            roster
                .find(id)
                .is_some_and(|entity| entity.standing != Standing::In)
        };
        // A gate that opens by the clock would open for one that has nothing on the device.
        let next = decision.next.filter(|id| !out(&self.roster, *id));
        let switches: Vec<TenantId> = decision
            .grant
            .iter()
            .map(|slice| slice.tenant)
            .filter(|id| out(&self.roster, *id))
            .collect();
        if switches.is_empty() {
            return Decision { next, ..decision };
        }
        for tenant in switches {
            self.residency.begin_switch(now_ns, tenant);
        }
        self.stand();
        for at in 0..self.roster.len() {
            if self.roster[at].holds() && !self.roster[at].may_run() {
                self.take(now_ns, at);
            }
        }
        let mut kept = Decision {
            next,
            again_ns: Some(now_ns + self.pace.drain_look_ns),
            ..Decision::default()
        };
        for slice in &decision.grant {
            if !out(&self.roster, slice.tenant) {
                kept.grant.push(*slice);
            }
        }
        kept
    }

    /// How residency is run here.
    pub fn set_up_residency(
        &mut self,
        slice_over_switch: f64,
        books: &Rc<RefCell<HostBooks>>,
        capacity_bytes: u64,
    ) {
        self.residency.set_up(slice_over_switch, books);
        self.residency.set_capacity(capacity_bytes);
    }

    /// What the device has for jobs if nothing is on it but what they account for, and when the
    /// figures were taken that say what else is.
    pub fn set_ceiling(&mut self, ceiling_bytes: u64, taken_ns: u64) {
        self.residency.set_ceiling(ceiling_bytes, taken_ns);
    }

    /// A client asks what it can come to have here; what jobs hold was read after that. So many
    /// bytes were too few for a context of its user's; 0: that is not known.
    pub fn hear(&mut self, now_ns: u64, client: u64, number: u32, context_bytes: u64) {
        self.residency.hear(now_ns, client, number, context_bytes);
    }

    /// What a tenant is charged here, what of that it will not give back in the middle of a call,
    /// and its limit, in bytes.
    pub fn note_memory(
        &mut self,
        tenant: TenantId,
        (used_bytes, settled_bytes): (u64, u64),
        limit_bytes: Option<u64>,
    ) {
        if let Some(entity) = self.roster.find_mut(tenant) {
            entity.note_memory(settled_bytes, limit_bytes);
        }
        self.residency.bound(tenant, used_bytes);
    }

    /// The operator calls a tenant back, or sends it away; its terms, which are set separately, say
    /// which.
    pub fn call(&mut self, now_ns: u64, tenant: TenantId, back: bool) {
        if back {
            self.residency.wish(now_ns, tenant);
        } else {
            self.residency.dismiss(now_ns, tenant);
        }
    }

    /// A tenant will be needed soon.
    pub fn wake(&mut self, now_ns: u64, tenant: TenantId) {
        self.residency.wake(now_ns, tenant);
    }

    /// A tenant that was called back is not wanted any more: it comes when it wants the device.
    pub fn forget_call(&mut self, tenant: TenantId) {
        self.residency.forget_wish(tenant);
    }

    /// Whether memory has been on its way since `since_ns`.
    pub fn has_moved(&self, since_ns: u64) -> bool {
        self.residency.has_moved(since_ns)
    }

    /// Where a tenant's memory is; `None`: none of it can be moved.
    pub fn residency_status(&self, tenant: TenantId) -> Option<ResidencyStatus> {
        let entity = self.roster.find(tenant)?;
        self.residency.residency_status(tenant, entity.clients())
    }

    /// What can be moved here in all, and whether the jobs together want more memory than the
    /// device has.
    pub fn crowd(&self) -> Crowd {
        self.residency.crowd()
    }

    /// Whether jobs shrink here for guaranteed ones, and there is something to shrink.
    pub fn gives_space(&self) -> bool {
        self.residency.gives_space()
    }

    /// How residency is arbitrated here.
    pub fn arbitration(&self) -> &Arbitration {
        self.residency.arbitration()
    }

    /// News about residency, once.
    pub fn take_residency_news(&mut self) -> Vec<News> {
        self.residency.take_news()
    }
}

impl RunEntity {
    fn job(&self, now_ns: u64, device: usize) -> JobView<'_> {
        let may = !self.terms().paused && !self.bounds().is_barred();
        let wants = if self.holds() {
            self.is_busy()
        } else {
            self.wants(now_ns)
        };
        let gone = !self.holds() && !self.drains();
        // Threads that go in by the clock may have done so before anybody looked.
        let quiet = || !self.sample(device).is_on_device();
        JobView {
            id: self.tenant,
            class: self.class(now_ns),
            weight_ppm: self.terms().weight_ppm,
            arrived_ns: self.usage().since_ns,
            wants: may && wants,
            active: self.is_busy(),
            drained: gone && (self.standing.may_run() || quiet()),
            terms: self.terms().residency,
            clients: self.clients(),
        }
    }
}
