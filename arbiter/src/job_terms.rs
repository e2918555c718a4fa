//! The terms of every job on a device, from what all of them were promised.

use control::Overflow;
use policy::{Class, TenantId};

use crate::clock::Clock;
use crate::devices::Devices;
use crate::ledger::Ledger;
use crate::refusal::LEAST_SHARE;
use crate::residency::ResidencyTerms;
use crate::terms::Terms;

impl Ledger {
    /// The terms of every job on a device.
    pub fn terms(&self, devices: &Devices, device: usize, clock: &Clock) -> Vec<(TenantId, Terms)> {
        let (now_unix_ms, now_ns) = (clock.unix_ms(), clock.mono_ns());
        let mono = |at_ms: u64| {
            now_ns.saturating_add(at_ms.saturating_sub(now_unix_ms).saturating_mul(1_000_000))
        };
        let there = || {
            self.awake()
                .filter(|t| devices.entitled(device, t.spec.settings.devices(), t.spec.simulated))
        };
        let unnamed = |class| {
            let of = there().filter(|t| t.promises);
            let of = of.filter(|t| t.spec.class() == class && t.spec.settings.share.is_none());
            of.count().max(1) as f64
        };
        let named: f64 = there()
            .filter(|tenant| tenant.promises)
            .filter_map(|tenant| match tenant.spec.class() {
                Class::Guaranteed => tenant.spec.settings.share,
                Class::Opportunistic => tenant.spec.settings.share_min,
            })
            .sum();
        let guaranteed = ((1.0 - named) / unnamed(Class::Guaranteed)).max(LEAST_SHARE);
        let opportunistic = 1.0 / unnamed(Class::Opportunistic);
        there()
            .map(|tenant| {
                let spec = &tenant.spec;
                let unnamed = match spec.class() {
                    Class::Guaranteed => guaranteed.max(spec.settings.share_min.unwrap_or(0.0)),
                    Class::Opportunistic => opportunistic,
                };
                let unnamed = spec.bounds.share.map_or(unnamed, |most| unnamed.min(most));
                let terms = Terms {
                    min_ppm: spec.settings.share_min.map_or(0, ppm),
                    max_ppm: spec.settings.share_max.map(ppm),
                    paused: spec.paused || tenant.turn.is_over,
                    gang: spec.settings.gang.unwrap_or(true),
                    deadline_ns: spec.settings.deadline_unix_ms().map(mono),
                    work_ns: spec.settings.work.map(control::Span::nanos),
                    latency_target_ns: spec.settings.latency_target.map(control::Span::nanos),
                    residency: ResidencyTerms {
                        evictable: spec.evictable(),
                        overflow: spec.overflow() == Overflow::Host,
                        kept_away: spec.evicted || tenant.turn.is_away,
                        host_bytes: self.host_limit_bytes(spec),
                        evict_after_ns: spec.settings.evict_after.map(control::Span::nanos),
                        ..ResidencyTerms::default()
                    },
                    ..Terms::plain(spec.class(), ppm(spec.settings.share.unwrap_or(unnamed)))
                };
                (tenant.id, terms)
            })
            .collect()
    }
}

fn ppm(share: f64) -> u32 {
    // CAST: shares are in (0, 1].
    (share * 1e6).round().max(1.0) as u32
}

#[cfg(test)]
mod tests {
    use channel::wire::DeviceId;

    use super::*;
    use crate::spec::Spec;
    use crate::tenant::{Tenant, example};

    fn tenant(id: u64, change: impl FnOnce(&mut Spec)) -> Tenant {
        let mut tenant = example(id, &format!("t{id}"));
        change(&mut tenant.spec);
        tenant
    }

    #[test]
    fn terms_carry_floors_caps_and_the_rest() {
        let mut devices = Devices::default();
        let id = DeviceId {
            uuid: [1; 16],
            total_bytes: 100,
        };
        devices.meet(&id, true, &mut 0);
        let mut ledger = Ledger::default();
        ledger.insert(tenant(1, |spec| spec.settings.share = Some(0.5)));
        ledger.insert(tenant(2, |spec| {
            spec.settings.share_min = Some(0.375);
            spec.settings.share_max = Some(0.75);
            spec.paused = true;
            spec.settings.gang = Some(false);
        }));
        ledger.insert(tenant(3, |_| ()));
        let terms = ledger.terms(&devices, 0, &crate::clock::host());
        let weights: Vec<u32> = terms.iter().map(|(_, terms)| terms.weight_ppm).collect();
        assert_eq!(weights, [500_000, 375_000, 250_000]);
        let second = terms[1].1;
        assert_eq!((second.min_ppm, second.max_ppm), (375_000, Some(750_000)));
        assert!(second.paused && !second.gang && terms[0].1.gang);
    }
}
