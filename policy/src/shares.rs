//! Floors and caps of the share, for every policy.
//!
//! Two leaky buckets per tenant, in nanoseconds of device time (J. Turner, "New directions in
//! communications (or which way to the information age?)", IEEE Communications Magazine 24(10),
//! 1986):
//!
//! * *Floor.* While the tenant wants the device, `min_share` of the passing time flows in and what
//!   it is charged flows out. With a slice in it, the tenant comes before all tenants of its class
//!   that are owed none. It holds [`FLOOR_HOLDS_NS`] at most.
//! * *Cap.* `max_share` of the passing time flows in, asleep or awake, up to one slice; what it is
//!   charged flows out. Empty: the tenant does not run, even if the device stays idle for it. A
//!   kernel that overruns leaves it below zero, to be made up.
//!
//! For policies that work by weights the floors and caps are also turned into weights
//! ([`Shares::reweigh`]), so that the buckets only catch what rounding leaves: with weights 1 : 1 :
//! 2 and a floor of 40 % for the first, its weight is raised to 2 of 5, and the others keep 1 : 2
//! of the rest.

use std::collections::BTreeMap;

use crate::slice::{Class, TenantId, TenantView, View};

/// Most that a floor saves up, in nanoseconds: a tenant that could not be served for longer
/// (another's kernel does not end) gets no more back.
const FLOOR_HOLDS_NS: i64 = 200_000_000;
const PPM: i64 = 1_000_000;

#[derive(Clone, Copy, Debug, Default)]
struct Buckets {
    floor_ns: i64,
    cap_ns: i64,
    capped: bool,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    at_ns: Option<u64>,
    buckets: BTreeMap<TenantId, Buckets>,
}

impl Shares {
    pub(crate) fn charge(&mut self, id: TenantId, device_ns: u64) {
        if let Some(buckets) = self.buckets.get_mut(&id) {
            let device_ns = i64::try_from(device_ns).unwrap_or(i64::MAX);
            buckets.floor_ns = buckets.floor_ns.saturating_sub(device_ns);
            buckets.cap_ns = buckets.cap_ns.saturating_sub(device_ns);
        }
    }

    /// Lets the time pass up to the view's.
    pub(crate) fn follow(&mut self, view: &View<'_>) {
        let dt_ns = view
            .now_ns
            .saturating_sub(self.at_ns.unwrap_or(view.now_ns));
        let dt_ns = i64::try_from(dt_ns).unwrap_or(i64::MAX);
        self.at_ns = Some(view.now_ns);
        let bounded = |tenant: &TenantView| {
            tenant.min_share_ppm > 0 || tenant.max_share_ppm.is_some_and(|cap| cap < 1_000_000)
        };
        if self.buckets.is_empty() && !view.tenants.iter().any(bounded) {
            return;
        }
        self.buckets
            .retain(|id, _| view.tenant(*id).is_some_and(bounded));
        let slice_ns = i64::from(view.quantum.max_us) * 1000;
        for tenant in view.tenants.iter().filter(|tenant| bounded(tenant)) {
            let buckets = self.buckets.entry(tenant.id).or_insert(Buckets {
                floor_ns: 0,
                cap_ns: slice_ns,
                capped: false,
            });
            let flow = |ppm: u32| {
                i64::try_from(i128::from(dt_ns) * i128::from(ppm) / i128::from(PPM))
                    .unwrap_or(i64::MAX)
            };
            buckets.floor_ns = if tenant.is_ready() {
                (buckets.floor_ns.saturating_add(flow(tenant.min_share_ppm)))
                    .clamp(-slice_ns, FLOOR_HOLDS_NS)
            } else {
                buckets.floor_ns.clamp(-slice_ns, 0)
            };
            match tenant.max_share_ppm {
                Some(cap_ppm) => {
                    buckets.cap_ns = (buckets.cap_ns.saturating_add(flow(cap_ppm))).min(slice_ns);
                    buckets.capped = if buckets.capped {
                        buckets.cap_ns < slice_ns / 2
                    } else {
                        buckets.cap_ns <= 0
                    };
                }
                None => buckets.capped = false,
            }
        }
    }

    /// Its floor comes before the policy's order.
    pub(crate) fn is_owed(&self, tenant: &TenantView, view: &View<'_>) -> bool {
        let slice_ns = i64::from(view.quantum.min_us) * 1000;
        tenant.min_share_ppm > 0
            && self
                .buckets
                .get(&tenant.id)
                .is_some_and(|buckets| buckets.floor_ns >= slice_ns)
    }

    /// It has used up its cap for now.
    pub(crate) fn is_capped(&self, id: TenantId) -> bool {
        self.buckets.get(&id).is_some_and(|buckets| buckets.capped)
    }

    /// When to look again because of caps: the first capped tenant may run again, or the first
    /// other may run out.
    pub(crate) fn again_ns(&self, view: &View<'_>) -> Option<u64> {
        let slice_ns = i64::from(view.quantum.max_us) * 1000;
        view.tenants
            .iter()
            .filter(|tenant| tenant.is_ready())
            .filter_map(|tenant| {
                let cap_ppm = i64::from(tenant.max_share_ppm.filter(|cap| *cap < 1_000_000)?);
                let buckets = self.buckets.get(&tenant.id)?;
                let in_ns = if buckets.capped {
                    let lacks_ns = (slice_ns / 2).saturating_sub(buckets.cap_ns).max(1);
                    lacks_ns.saturating_mul(PPM) / cap_ppm.max(1) + 1
                } else {
                    buckets.cap_ns.max(1)
                };
                Some(view.now_ns.saturating_add(in_ns.unsigned_abs()))
            })
            .min()
    }

    /// Sets the weights of the tenants that compete (those that are ready) so that each part of the
    /// class is between its floor and its cap, as far as that is possible; the others keep their
    /// proportions.
    pub(crate) fn reweigh(tenants: &mut [TenantView], class: Class) {
        let competes = |tenant: &TenantView| tenant.is_ready() && tenant.class == class;
        let bound = |tenant: &TenantView| {
            tenant.min_share_ppm > 0 || tenant.max_share_ppm.is_some_and(|cap| cap < 1_000_000)
        };
        if !tenants
            .iter()
            .any(|tenant| competes(tenant) && bound(tenant))
        {
            return;
        }
        // Every round fixes one tenant at its bound, the one that is furthest from it; the rest
        // share what is left.
        let mut fixed: Vec<(TenantId, u32)> = Vec::new();
        loop {
            let is_fixed = |id: TenantId| fixed.iter().any(|(other, _)| *other == id);
            let spent: f64 = fixed.iter().map(|(_, ppm)| f64::from(*ppm)).sum();
            let rest_ppm = (1e6 - spent).max(0.0);
            let free = || {
                tenants
                    .iter()
                    .filter(|tenant| competes(tenant) && !is_fixed(tenant.id))
            };
            let weights: f64 = free()
                .map(|tenant| f64::from(tenant.weight_ppm.max(1)))
                .sum();
            let part =
                |tenant: &TenantView| f64::from(tenant.weight_ppm.max(1)) / weights * rest_ppm;
            let worst = free()
                .filter_map(|tenant| {
                    let part = part(tenant);
                    let floor = f64::from(tenant.min_share_ppm.min(1_000_000));
                    let cap = f64::from(tenant.max_share_ppm.unwrap_or(1_000_000));
                    let to = if part < floor {
                        floor
                    } else if part > cap {
                        cap
                    } else {
                        return None;
                    };
                    Some(((to - part).abs(), tenant.id, to))
                })
                .max_by(|a, b| a.0.total_cmp(&b.0));
            let Some((_, id, to)) = worst else {
                let parts: Vec<(TenantId, u32)> = free()
                    .map(|tenant| (tenant.id, part(tenant).max(1.0) as u32))
                    .collect();
                for tenant in tenants.iter_mut() {
                    let of = fixed.iter().chain(&parts).find(|(id, _)| *id == tenant.id);
                    if let Some((_, ppm)) = of {
                        tenant.weight_ppm = (*ppm).max(1);
                    }
                }
                return;
            };
            fixed.push((id, to as u32));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reweighed(tenants: &[(u32, u32, Option<u32>)]) -> Vec<u32> {
        let mut views: Vec<TenantView> = tenants
            .iter()
            .enumerate()
            .map(|(id, (weight, floor, cap))| TenantView {
                min_share_ppm: *floor,
                max_share_ppm: *cap,
                ..TenantView::new(TenantId(id as u64), Class::Guaranteed, *weight, true)
            })
            .collect();
        Shares::reweigh(&mut views, Class::Guaranteed);
        views.iter().map(|view| view.weight_ppm).collect()
    }

    #[test]
    fn without_bounds_weights_stay() {
        assert_eq!(reweighed(&[(1, 0, None), (3, 0, None)]), [1, 3]);
    }

    #[test]
    fn a_floor_is_met_and_the_rest_keeps_its_proportions() {
        let got = reweighed(&[(1, 400_000, None), (1, 0, None), (2, 0, None)]);
        assert_eq!(got, [400_000, 200_000, 400_000]);
    }

    #[test]
    fn a_cap_is_kept_and_the_rest_goes_to_the_others() {
        let got = reweighed(&[(8, 0, Some(100_000)), (1, 0, None), (2, 0, None)]);
        assert_eq!(got, [100_000, 300_000, 600_000]);
    }

    #[test]
    fn floors_that_fill_the_device_give_the_rest_a_weight_of_one() {
        let got = reweighed(&[(1, 600_000, None), (1, 400_000, None), (9, 0, None)]);
        assert_eq!(got, [600_000, 400_000, 1]);
    }
}
