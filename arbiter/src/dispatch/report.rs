//! What others ask about a device: which tenants harm the others, how it runs, who holds it and
//! what each tenant used.

use policy::quantum::Lengths;
use policy::{LatencyReport, QuantumBounds, TenantId};

use super::DeviceScheduler;
use super::entity::RunEntity;
use super::pace::Answer;
use super::violation::Violation;
use crate::usage::Usage;

/// What becomes of a latency target on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Targeted {
    /// The policy of this name looks at no target.
    NotBy(&'static str),
    /// All jobs run at once: nobody decides whose turn it is.
    AtOnce,
    /// The job runs on all of its devices at once, and its turns are dealt to gangs.
    Gang,
    /// The policy has not seen the job yet.
    NotYet,
    /// How it fares.
    By(LatencyReport),
}

impl DeviceScheduler {
    /// Looks how tenants behave, a few times a second. Returns those whose penalty is over.
    /// `excused`: whether the host stands still, rather than the tenant's work or its process.
    pub fn inspect(
        &mut self,
        now_ns: u64,
        excused: &mut dyn FnMut(TenantId) -> bool,
    ) -> Vec<TenantId> {
        let slices = !self.at_once();
        for at in 0..self.roster.len() {
            let violation = self.roster[at].inspect(now_ns, self.device);
            if let Some(violation) = violation.filter(|_| slices) {
                let tenant = self.roster[at].tenant;
                let by_host = matches!(
                    violation,
                    Violation::Unresponsive | Violation::Endless { .. }
                );
                if !(by_host && excused(tenant)) {
                    self.find(now_ns, tenant, violation);
                }
            }
        }
        let entities = self.roster.iter_mut();
        entities
            .filter_map(|entity| entity.end_penalty(now_ns).then_some(entity.tenant))
            .collect()
    }

    /// A tenant was found to harm the others.
    pub fn find(&mut self, now_ns: u64, tenant: TenantId, violation: Violation) {
        let answer = self.answer;
        if let Some(entity) = self.roster.find_mut(tenant)
            && entity.find(now_ns, violation, answer)
        {
            self.violations.push((tenant, violation));
        }
    }

    /// New violations, once.
    pub fn take_violations(&mut self) -> Vec<(TenantId, Violation)> {
        std::mem::take(&mut self.violations)
    }

    /// What becomes of a tenant that harms the others.
    pub fn answer(&self) -> Answer {
        self.answer
    }

    /// Why a tenant runs after all others, and how often it was found out.
    pub fn record(&self, tenant: TenantId, now_ns: u64) -> (Option<Violation>, u64) {
        let entity = self.roster.find(tenant);
        entity.map_or((None, 0), |entity| {
            (entity.demoted(now_ns), entity.violations())
        })
    }

    // --- reports ---

    /// Whether it runs all at once now, and why, where that is left to us.
    pub fn running(&self) -> (bool, &str) {
        let reason = match self.mode.is_lend() {
            true => self.lending.reason(),
            false => self.mode.reason(),
        };
        (self.at_once(), reason)
    }

    /// Between what a slice lasts now.
    pub fn quantum(&self) -> QuantumBounds {
        self.choice.quantum()
    }

    /// What a slice may last.
    pub fn lengths(&self) -> Lengths {
        self.pace.quantum
    }

    /// What the last slice was given in microseconds, and what a hand-over costs in nanoseconds; 0:
    /// not known.
    pub fn slice(&self) -> (u32, u64) {
        (self.choice.slice_us(), self.hand_over.cost_ns())
    }

    /// What becomes of a tenant's latency target; `None`: the tenant is not on this device.
    pub fn targeted(&self, tenant: TenantId) -> Option<Targeted> {
        let entity = self.roster.find(tenant)?;
        // A policy that looks at targets has a report for each one it has seen.
        let by_policy = || match (self.choice.name(), self.choice.latency(tenant)) {
            (_, Some(report)) => Targeted::By(report),
            ("latency", None) => Targeted::NotYet,
            (name, None) => Targeted::NotBy(name),
        };
        Some(if self.at_once() {
            Targeted::AtOnce
        } else if entity.gang {
            Targeted::Gang
        } else {
            by_policy()
        })
    }

    /// Who holds the device. All at once, those who use it.
    pub fn holding(&self) -> impl Iterator<Item = TenantId> {
        let at_once = self.at_once();
        let holds = move |entity: &&RunEntity| entity.holds() && (!at_once || entity.is_busy());
        self.roster.iter().filter(holds).map(|entity| entity.tenant)
    }

    /// Part of the last second in which the device was in use.
    pub fn busy_part(&self, now_ns: u64) -> f64 {
        self.time.busy_part(now_ns)
    }

    /// How long it was in use, in nanoseconds.
    pub fn busy_ns(&self) -> u64 {
        self.time.busy_ns()
    }

    /// How many slices were granted.
    pub fn grants(&self) -> u64 {
        self.grants
    }

    /// What a tenant used.
    pub fn usage(&self, tenant: TenantId) -> Option<&Usage> {
        Some(self.roster.find(tenant)?.usage())
    }

    /// Whether a tenant uses the device, and whether it waits for it.
    pub fn standing(&self, tenant: TenantId) -> (bool, bool) {
        let entity = self.roster.find(tenant);
        entity.map_or((false, false), |entity| {
            (entity.is_busy(), entity.is_kept_waiting())
        })
    }
}
