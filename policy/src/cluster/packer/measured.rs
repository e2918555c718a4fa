//! What was measured of pairs, by the kinds of both jobs.
//!
//! A bad pair of kinds costs each packer one measurement. Kinds come and go for as long as a hook
//! lives, so what was measured longest ago makes way.

use std::collections::{BTreeMap, HashMap};

use crate::cluster::{GpuType, JobType, Profile, Reason};

/// Most pairs of kinds that are remembered.
const KEPT: usize = 16_384;

type Key = (GpuType, u32, JobType, JobType);

/// The last measurement of each pair of kinds, for a type and number of GPUs.
#[derive(Clone, Debug, Default)]
pub(super) struct Measured {
    speeds: HashMap<Key, (u64, [f64; 2])>,
    /// When each was measured, counted in measurements.
    by_age: BTreeMap<u64, Key>,
    next: u64,
}

/// The key, and whether host and joiner stand the other way round in it.
fn key(host: &Profile, joiner: &Profile, kind: GpuType) -> (Key, bool) {
    let turned = joiner.kind < host.kind;
    let (a, b) = if turned {
        (joiner.kind, host.kind)
    } else {
        (host.kind, joiner.kind)
    };
    ((kind, host.gpus, a, b), turned)
}

impl Measured {
    /// Takes note of a measurement, host first.
    pub(super) fn note(
        &mut self,
        host: &Profile,
        joiner: &Profile,
        kind: GpuType,
        [a, b]: [f64; 2],
    ) {
        let (key, turned) = key(host, joiner, kind);
        let speeds = if turned { [b, a] } else { [a, b] };
        let age = self.next;
        self.next += 1;
        if let Some((old, _)) = self.speeds.insert(key, (age, speeds)) {
            self.by_age.remove(&old);
        }
        self.by_age.insert(age, key);
        if self.speeds.len() > KEPT
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.speeds.remove(&oldest);
        }
    }

    /// The last measurement, host first.
    pub(super) fn of(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<[f64; 2]> {
        let (key, turned) = key(host, joiner, kind);
        let (_, [a, b]) = self.speeds.get(&key)?;
        Some(if turned { [*b, *a] } else { [*a, *b] })
    }

    /// Why a pair is refused of which the sum was measured to be below `least`.
    pub(super) fn below(
        &self,
        host: &Profile,
        joiner: &Profile,
        kind: GpuType,
        least: f64,
    ) -> Option<Reason> {
        let [a, b] = self.of(host, joiner, kind)?;
        let sum = a + b;
        (sum.is_nan() || sum < least).then_some(Reason::Sum { sum, least })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Class;

    fn profile(kind: u32) -> Profile {
        Profile::unknown(JobType(kind), 1, Class::Guaranteed)
    }

    #[test]
    fn the_last_measurement_counts_in_both_directions() {
        let mut measured = Measured::default();
        let (a, b) = (profile(1), profile(2));
        measured.note(&b, &a, GpuType(0), [0.4, 0.9]);
        assert_eq!(measured.of(&a, &b, GpuType(0)), Some([0.9, 0.4]));
        measured.note(&a, &b, GpuType(0), [0.7, 0.6]);
        assert_eq!(measured.of(&b, &a, GpuType(0)), Some([0.6, 0.7]));
        assert_eq!(measured.of(&a, &b, GpuType(1)), None);
        assert!(measured.below(&a, &b, GpuType(0), 1.4).is_some());
        assert!(measured.below(&a, &b, GpuType(0), 1.2).is_none());
    }

    #[test]
    fn a_million_kinds_take_no_more_than_what_is_kept() {
        let mut measured = Measured::default();
        let mut kept_all = true;
        for kind in 0..1_000_000 {
            measured.note(&profile(kind), &profile(kind + 1), GpuType(0), [0.5, 0.5]);
            kept_all &= measured.speeds.len() <= KEPT && measured.by_age.len() <= KEPT;
        }
        assert!(kept_all);
        let last = measured.of(&profile(999_999), &profile(1_000_000), GpuType(0));
        assert_eq!(last, Some([0.5, 0.5]));
        assert_eq!(measured.of(&profile(0), &profile(1), GpuType(0)), None);
    }
}
