//! Short stretches alone for a job that was never seen alone: what it does then is what its speed
//! is compared with, and where the scale of its weights is learnt.

use super::account::Account;
use super::constants::Constants;
use crate::slice::TenantId;

/// Who is measured alone now, and when the next one may be.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Solo {
    stretch: Option<(TenantId, u64)>,
    next_ns: Option<u64>,
}

impl Solo {
    pub fn tenant(&self) -> Option<TenantId> {
        self.stretch.map(|(tenant, _)| tenant)
    }

    pub fn forget(&mut self, tenant: TenantId) {
        if self.tenant() == Some(tenant) {
            self.stretch = None;
        }
    }

    /// Ends a stretch, begins one. `busy`: a request is served, nobody may be kept from it.
    pub fn choose(
        &mut self,
        now_ns: u64,
        accounts: &mut [Account],
        busy: bool,
        constants: &Constants,
    ) {
        let gone = |tenant: TenantId| {
            let of = accounts.iter().find(|of| of.tenant == tenant);
            of.is_none_or(|of| of.look.banned || of.capped())
        };
        if let Some((tenant, end_ns)) = self.stretch
            && (busy || now_ns >= end_ns || gone(tenant))
        {
            self.stretch = None;
        }
        let next_ns = *self
            .next_ns
            .get_or_insert(now_ns.saturating_add(constants.solo_every_ns));
        if self.stretch.is_some() || busy || now_ns < next_ns || accounts.len() < 2 {
            return;
        }
        // A neighbour whose kernels do not end in time leaves nobody alone, however often.
        let unknown = |of: &&mut Account| {
            of.solo_ns < constants.solo_enough_ns as f64
                && of.solo_stretches < constants.solo_stretches
                && of.look.wants()
                && !of.look.banned
                && !of.capped()
        };
        let least = accounts
            .iter_mut()
            .filter(unknown)
            .min_by_key(|of| of.solo_stretches);
        if let Some(of) = least {
            of.solo_stretches += 1;
            self.stretch = Some((of.tenant, now_ns.saturating_add(constants.solo_ns)));
            self.next_ns = Some(now_ns.saturating_add(constants.solo_every_ns));
        }
    }
}
