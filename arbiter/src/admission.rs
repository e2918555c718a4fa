//! Whether what a job asks for can be promised beside what others were promised.
//!
//! A named share is a weight and a promise. Guaranteed jobs without one split what the others
//! leave; opportunistic jobs promise each other nothing, their shares are weights among themselves.
//! `share_min` is a promise whatever the class.

use policy::Class;

use crate::refusal::{AIR, LEAST_SHARE, Refusal};
use crate::spec::Spec;
use crate::tenant::Tenant;

/// What a job is promised by name.
fn promised(spec: &Spec) -> Option<f64> {
    match spec.class() {
        Class::Guaranteed => spec.settings.share.or(spec.settings.share_min),
        Class::Opportunistic => spec.settings.share_min,
    }
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
}
