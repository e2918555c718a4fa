//! When gates do not do: slices for two jobs of which one has kernels too long for a gate, and for
//! the whole device where the pages cannot be believed.

use super::account::{Account, DeviceMeans};
use super::constants::Constants;
use super::decision::{SliceReason, Slices};
use crate::slice::TenantId;

/// Which jobs have slices, and why.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Escape {
    pair: Option<[TenantId; 2]>,
    /// Why, and until when.
    doubt: Option<(SliceReason, u64)>,
    doubted: bool,
}

impl Escape {
    pub fn pair(&self) -> Option<[TenantId; 2]> {
        self.pair
    }

    pub fn whole_device(&self) -> bool {
        self.doubt.is_some()
    }

    pub fn forget(&mut self, tenant: TenantId) {
        if self.pair.is_some_and(|pair| pair.contains(&tenant)) {
            self.pair = None;
        }
    }

    /// A page says what cannot be.
    pub fn doubt(&mut self, now_ns: u64, reason: SliceReason) {
        self.doubt = Some((reason, now_ns));
        self.doubted = true;
    }

    /// What the executor is asked for.
    pub fn wish(&self) -> Option<Slices> {
        if let Some((reason, _)) = self.doubt {
            return Some(Slices { pair: None, reason });
        }
        self.pair.map(|pair| Slices {
            pair: Some(pair),
            reason: SliceReason::BelowFloor,
        })
    }

    /// Judges this look.
    pub fn watch(
        &mut self,
        now_ns: u64,
        accounts: &[Account],
        means: &DeviceMeans,
        constants: &Constants,
    ) {
        if means.excess_ns > constants.excess_ns as f64 {
            self.doubt(now_ns, SliceReason::MoreThanTime);
        } else if means.hidden_ns > means.believed_ns {
            self.doubt(now_ns, SliceReason::HiddenWork);
        }
        if let Some((_, at_ns)) = self.doubt
            && now_ns.saturating_sub(at_ns) > constants.doubt_ns
        {
            self.doubt = None;
        }
        let long = |of: &Account| of.largest_ns >= constants.long_kernel_ns;
        let of = |tenant: TenantId| accounts.iter().find(|of| of.tenant == tenant);
        if let Some([_, neighbour]) = self.pair {
            if !of(neighbour).is_some_and(long) {
                self.pair = None;
            }
            return;
        }
        let below =
            |of: &&Account| of.guaranteed() && of.below_floor_ns > constants.below_floor_ns as f64;
        let worst = accounts
            .iter()
            .filter(below)
            .max_by(|a, b| a.promise_ns.total_cmp(&b.promise_ns));
        let Some(worst) = worst else {
            return;
        };
        let neighbour = accounts
            .iter()
            .filter(|of| of.tenant != worst.tenant && long(of) && of.look.wants())
            .min_by(|a, b| a.owed_ns.total_cmp(&b.owed_ns));
        self.pair = neighbour.map(|neighbour| [worst.tenant, neighbour.tenant]);
    }
}
