//! Turns of jobs that fill the device: gates that open for all would give each what its queue wins,
//! and a job that waits after each kernel would win nothing.
//!
//! Of several such jobs one is open, the most owed first, for a quantum. The next one enters when
//! the last one's queue is nearly empty, and a gap of the holder opens to all.

use super::account::Account;
use super::constants::Constants;
use crate::slice::TenantId;

/// Who takes turns, and whose it is.
#[derive(Clone, Debug, Default)]
pub(super) struct Rotation {
    /// Jobs that take turns; none where there is only one.
    pub members: Vec<TenantId>,
    pub holder: Option<TenantId>,
    /// Had it before, and may still have work in flight.
    before: Option<TenantId>,
    since_ns: u64,
}

impl Rotation {
    pub fn is_member(&self, tenant: TenantId) -> bool {
        self.members.contains(&tenant)
    }

    /// Whose turn it is, where jobs take turns.
    pub fn turn(&self) -> Option<TenantId> {
        if self.members.is_empty() {
            return None;
        }
        self.holder
    }

    pub fn forget(&mut self, tenant: TenantId) {
        self.members.retain(|member| *member != tenant);
        for of in [&mut self.holder, &mut self.before] {
            if *of == Some(tenant) {
                *of = None;
            }
        }
    }

    /// Chooses members and holder anew; `pair`: two that take turns whatever they look like.
    pub fn choose(
        &mut self,
        now_ns: u64,
        accounts: &[Account],
        pair: Option<[TenantId; 2]>,
        constants: &Constants,
    ) {
        let member = |of: &&Account| {
            let recent = of
                .wanted_at_ns
                .is_some_and(|at| now_ns.saturating_sub(at) <= constants.absent_ns);
            let fills = of.submits > constants.fills * of.unbothered.max(0.02);
            let visits = of.delay > constants.visits_delay && of.visits > constants.visits;
            // A short visitor that has what it was promised needs no turns, which would idle the
            // device between its visits.
            let visits = visits && of.promise_ns > 0.0;
            let paired = pair.is_some_and(|pair| pair.contains(&of.tenant));
            let eligible = !of.priority() && of.guaranteed() && !of.capped();
            let eligible = eligible && (of.look.wants() || !of.look.banned);
            recent && eligible && (fills || visits || paired)
        };
        self.members.clear();
        self.members
            .extend(accounts.iter().filter(member).map(|of| of.tenant));
        if self.members.len() < 2 {
            self.members.clear();
            return;
        }
        let over = now_ns.saturating_sub(self.since_ns) >= constants.quantum_ns;
        if over || self.holder.is_none_or(|holder| !self.is_member(holder)) {
            let next = accounts
                .iter()
                .filter(|of| self.members.contains(&of.tenant))
                .max_by(|a, b| a.owed_ns.total_cmp(&b.owed_ns))
                .map(|of| of.tenant);
            if next != self.holder {
                self.before = self.holder;
                self.holder = next;
            }
            self.since_ns = now_ns;
        }
    }

    /// Calls `shut` with each member that has to wait.
    pub fn shut(
        &mut self,
        now_ns: u64,
        accounts: &[Account],
        constants: &Constants,
        mut shut: impl FnMut(TenantId, Option<TenantId>),
    ) {
        let Some(holder) = self.turn() else {
            return;
        };
        let of = |tenant: TenantId| accounts.iter().find(|of| of.tenant == tenant);
        // A kernel that is too long for that is left to the hardware's slices.
        let drains = now_ns.saturating_sub(self.since_ns) < constants.drain_ns
            && self
                .before
                .and_then(of)
                .is_some_and(|before| before.look.pending_ns > constants.enter_ns);
        let there = of(holder)
            .and_then(|of| of.wanted_at_ns)
            .is_some_and(|at| now_ns.saturating_sub(at) <= constants.enter_ns);
        if there || drains {
            let others = self.members.iter().filter(|member| **member != holder);
            others.for_each(|member| shut(*member, Some(holder)));
        }
        if drains {
            shut(holder, None);
        } else {
            self.before = None;
        }
    }
}
