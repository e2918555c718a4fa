//! The terms of every job on a device, from what all of them were promised.
//!
//! A named share is a weight and a promise. Guaranteed jobs without one split what the others
//! leave; opportunistic jobs promise each other nothing, their shares are weights among themselves.
//! `share_min` is a promise whatever the class.

use control::Overflow;
use policy::{Class, TenantId};

use crate::clock::Clock;
use crate::devices::Devices;
use crate::ledger::{LEAST_SHARE, Ledger, Refusal};
use crate::residency::ResidencyTerms;
use crate::tenant::{Spec, Tenant};

/// Shares are decimal fractions of people; sums are compared with this much air.
pub const AIR: f64 = 1e-9;

/// Of one job on one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Its class.
    pub class: Class,
    /// Its weight in millionths.
    pub weight_ppm: u32,
    /// Never less than this part of the device while it wants it, in millionths; 0: no floor.
    pub min_ppm: u32,
    /// Never more, in millionths; `None`: no cap.
    pub max_ppm: Option<u32>,
    /// It gets nothing.
    pub paused: bool,
    /// All of its devices at once or none, where it uses several.
    pub gang: bool,
    /// By when its work should be done, in nanoseconds of the schedulers' clock.
    pub deadline_ns: Option<u64>,
    /// Device time that its work takes in all, in nanoseconds.
    pub work_ns: Option<u64>,
    /// Where its memory may be.
    pub residency: ResidencyTerms,
}

impl Terms {
    /// Those of a job that asks for nothing but a class and a weight.
    pub fn plain(class: Class, weight_ppm: u32) -> Self {
        Self {
            class,
            weight_ppm,
            min_ppm: 0,
            max_ppm: None,
            paused: false,
            gang: false,
            deadline_ns: None,
            work_ns: None,
            residency: ResidencyTerms::default(),
        }
    }
}

/// What a job is promised by name.
fn promised(spec: &Spec) -> Option<f64> {
    match spec.class() {
        Class::Guaranteed => spec.settings.share.or(spec.settings.share_min),
        Class::Opportunistic => spec.settings.share_min,
    }
}

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
                let terms = Terms {
                    min_ppm: spec.settings.share_min.map_or(0, ppm),
                    max_ppm: spec.settings.share_max.map(ppm),
                    paused: spec.paused,
                    gang: spec.settings.gang.unwrap_or(true),
                    deadline_ns: spec.settings.deadline_unix_ms().map(mono),
                    work_ns: spec.settings.work.map(control::Span::nanos),
                    residency: ResidencyTerms {
                        evictable: spec.evictable(),
                        overflow: spec.overflow() == Overflow::Host,
                        kept_away: spec.evicted,
                        host_bytes: self.host_limit_bytes(spec),
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

/// Whether the bounds of a job agree with its share.
pub fn admit_bounds(spec: &Spec) -> Result<(), Refusal> {
    for bound in [
        spec.settings.share,
        spec.settings.share_min,
        spec.settings.share_max,
    ]
    .into_iter()
    .flatten()
    {
        if !(bound > 0.0 && bound <= 1.0) {
            return Err(Refusal::ShareRange(bound));
        }
    }
    let (min, max) = (
        spec.settings.share_min.unwrap_or(0.0),
        spec.settings.share_max.unwrap_or(f64::INFINITY),
    );
    let share = spec.settings.share.unwrap_or(min);
    // Among opportunistic jobs a share is a weight, and a floor may well be above it.
    let guaranteed = spec.class() == Class::Guaranteed;
    if min > max || share > max || (guaranteed && min > share) {
        return Err(Refusal::Bounds {
            min: spec.settings.share_min,
            share: spec.settings.share,
            max: spec.settings.share_max,
        });
    }
    Ok(())
}

/// Whether the promises of a job and of the `others` on a device can all be kept.
pub fn admit_share<'a>(
    spec: &Spec,
    others: impl Iterator<Item = &'a Tenant>,
) -> Result<(), Refusal> {
    let own = promised(spec);
    let (mut theirs, mut unnamed) = (0.0, 0);
    let is_unnamed = |spec: &Spec| spec.class() == Class::Guaranteed && promised(spec).is_none();
    for other in others {
        theirs += promised(&other.spec).unwrap_or(0.0);
        unnamed += usize::from(is_unnamed(&other.spec));
    }
    if let Some(asked) = own
        && theirs + asked > 1.0 + AIR
    {
        return Err(Refusal::ShareSum {
            asked,
            promised: theirs,
        });
    }
    if own.is_none() && !is_unnamed(spec) {
        return Ok(());
    }
    unnamed += usize::from(is_unnamed(spec));
    let promised = theirs + own.unwrap_or(0.0);
    if 1.0 - promised < LEAST_SHARE * unnamed as f64 - AIR {
        return Err(Refusal::NothingLeft {
            promised,
            waiting: unnamed,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use channel::wire::DeviceId;

    use super::*;
    use crate::tenant::example;

    fn spec(change: impl FnOnce(&mut Spec)) -> Spec {
        let mut spec = example(0, "a").spec;
        change(&mut spec);
        spec
    }

    fn tenant(id: u64, change: impl FnOnce(&mut Spec)) -> Tenant {
        let mut tenant = example(id, &format!("t{id}"));
        change(&mut tenant.spec);
        tenant
    }

    #[test]
    fn a_floor_is_a_promise_whatever_the_class() {
        let others = [
            tenant(1, |spec| spec.settings.share = Some(0.75)),
            tenant(2, |spec| {
                spec.settings.class = Some(control::Class::Opportunistic);
                spec.settings.share = Some(0.9);
                spec.settings.share_min = Some(0.125);
            }),
        ];
        let admit = |spec: &Spec| admit_share(spec, others.iter());
        let with_share = |share| spec(|spec| spec.settings.share = Some(share));
        assert_eq!(admit(&with_share(0.125)), Ok(()));
        let refused = Refusal::ShareSum {
            asked: 0.25,
            promised: 0.875,
        };
        assert_eq!(admit(&with_share(0.25)), Err(refused.clone()));
        let floor = spec(|spec| {
            spec.settings.class = Some(control::Class::Opportunistic);
            spec.settings.share_min = Some(0.25);
        });
        assert_eq!(admit(&floor), Err(refused));
        let without = spec(|spec| spec.settings.class = Some(control::Class::Opportunistic));
        assert_eq!(admit(&without), Ok(()));
    }

    #[test]
    fn bounds_agree_with_the_share() {
        let bounds = |class, min, share, max| {
            admit_bounds(&spec(|spec| {
                spec.settings.class = Some(class);
                (
                    spec.settings.share_min,
                    spec.settings.share,
                    spec.settings.share_max,
                ) = (min, share, max);
            }))
        };
        let guaranteed = control::Class::Guaranteed;
        assert_eq!(bounds(guaranteed, None, None, Some(0.1)), Ok(()));
        assert_eq!(bounds(guaranteed, Some(0.1), Some(0.2), Some(0.2)), Ok(()));
        for (min, share, max) in [
            (Some(0.3), Some(0.2), None),
            (None, Some(0.3), Some(0.2)),
            (Some(0.3), None, Some(0.2)),
        ] {
            assert!(
                matches!(
                    bounds(guaranteed, min, share, max),
                    Err(Refusal::Bounds { .. })
                ),
                "{min:?} {share:?} {max:?}"
            );
        }
        let weight = bounds(control::Class::Opportunistic, Some(0.3), Some(0.2), None);
        assert_eq!(weight, Ok(()), "a weight among opportunistic jobs");
        assert_eq!(
            bounds(guaranteed, Some(f64::NAN), None, None).map_err(|_| ()),
            Err(())
        );
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
