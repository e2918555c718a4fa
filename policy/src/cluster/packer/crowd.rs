//! More than two jobs on a GPU: what is known of them, and what was measured.
//!
//! A packer is asked about one more job beside those that are there. What it knows is pairs. Jobs
//! that were measured together, three or more, say nothing certain about any two of them: so that
//! measurement is kept of all of their kinds as one, and no pair learns from it. How fast they
//! would be together follows from pairs by one rule: what each of the others costs adds up
//! ([`beside_all`]).
//!
//! One more job has to be worth it as the second had to be: the second must bring both to at least
//! `least` of what one job does by itself, which is 1, so it adds at least `least` - 1. That is
//! what each further job must add to what the others do without it.

use std::collections::{BTreeMap, HashMap};

use crate::cluster::{
    GpuType, JOBS_ON_GPU, JobType, MOST_JOBS_ON_GPU, Profile, Reason, beside_all,
};
use crate::registry::{Kind, ParamSpec, Settings};

/// Most groups of kinds that are remembered.
const KEPT: usize = 16_384;

/// The parameter of every packer.
pub(super) const JOBS: ParamSpec = ParamSpec {
    name: "jobs",
    summary: "most jobs on a GPU",
    kind: Kind::Whole {
        min: JOBS_ON_GPU,
        max: MOST_JOBS_ON_GPU,
        default: JOBS_ON_GPU,
    },
};

/// Its value.
pub(super) fn jobs(settings: &Settings<'_>) -> u32 {
    // CAST: a whole number from 2 to 64.
    settings.number(JOBS.name) as u32
}

/// What is known of a pair, host first.
pub(super) type Pairs<'a> = &'a dyn Fn(&Profile, &Profile) -> Option<[f64; 2]>;

/// All of them, the joiner last.
pub(super) fn with<'a>(there: &[&'a Profile], joiner: &'a Profile) -> Vec<&'a Profile> {
    there.iter().copied().chain([joiner]).collect()
}

/// How fast each of several is beside all others, by pairs; `None`: one of the pairs is not known.
pub(super) fn speeds(all: &[&Profile], pairs: Pairs<'_>) -> Option<Vec<f64>> {
    let beside = |own: usize, other: usize| {
        if own < other {
            Some(pairs(all[own], all[other])?[0])
        } else {
            Some(pairs(all[other], all[own])?[1])
        }
    };
    let one = |own: usize| {
        let others = (0..all.len()).filter(|other| *other != own);
        let speeds: Option<Vec<f64>> = others.map(|other| beside(own, other)).collect();
        Some(beside_all(speeds?))
    };
    (0..all.len()).map(one).collect()
}

/// Kinds that were together: type and number of GPUs, the first one's where it counts, all kinds.
type Key = (GpuType, u32, Option<JobType>, Vec<JobType>);

/// The last measurement of each group of three kinds or more.
#[derive(Clone, Debug, Default)]
pub(super) struct Crowds {
    /// Age, sum of the speeds, and why the last one had to go.
    seen: HashMap<Key, (u64, f64, Option<Reason>)>,
    by_age: BTreeMap<u64, Key>,
    next: u64,
    /// The one that came first is another thing than those that joined it.
    host_counts: bool,
}

impl Crowds {
    /// For a packer that protects the job that came first.
    pub(super) fn of_hosts() -> Self {
        Self {
            host_counts: true,
            ..Self::default()
        }
    }

    fn key(&self, all: &[&Profile], kind: GpuType) -> Key {
        let mut kinds: Vec<JobType> = all.iter().map(|profile| profile.kind).collect();
        kinds.sort_unstable();
        let gpus = all.first().map_or(1, |profile| profile.gpus);
        let host = all.first().filter(|_| self.host_counts);
        (kind, gpus, host.map(|host| host.kind), kinds)
    }

    /// Takes note of what several were measured at, and of what follows from it.
    pub(super) fn note(
        &mut self,
        all: &[&Profile],
        kind: GpuType,
        measured: &[f64],
        refused: Option<Reason>,
    ) {
        let (key, age) = (self.key(all, kind), self.next);
        self.next += 1;
        let seen = (age, measured.iter().sum(), refused);
        if let Some((old, ..)) = self.seen.insert(key.clone(), seen) {
            self.by_age.remove(&old);
        }
        self.by_age.insert(age, key);
        if self.seen.len() > KEPT
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.seen.remove(&oldest);
        }
    }

    /// Such jobs were measured together.
    pub(super) fn are_known(&self, all: &[&Profile], kind: GpuType) -> bool {
        self.seen.contains_key(&self.key(all, kind))
    }

    /// Why such jobs are not put together again.
    pub(super) fn refused(&self, all: &[&Profile], kind: GpuType) -> Option<Reason> {
        if self.seen.is_empty() {
            return None;
        }
        let (.., refused) = self.seen.get(&self.key(all, kind))?;
        *refused
    }

    /// What jobs do together, in jobs that are alone: as measured, else by pairs.
    fn sum(&self, all: &[&Profile], kind: GpuType, pairs: Pairs<'_>) -> Option<f64> {
        let measured = self.seen.get(&self.key(all, kind));
        match measured.filter(|(_, sum, _)| all.len() > 2 && sum.is_finite()) {
            Some((_, sum, _)) => Some(*sum),
            None => Some(speeds(all, pairs)?.iter().sum()),
        }
    }

    /// What one more job would add to what the others do; `None`: too little is known.
    pub(super) fn adds(
        &self,
        there: &[&Profile],
        joiner: &Profile,
        kind: GpuType,
        pairs: Pairs<'_>,
    ) -> Option<f64> {
        let after = self.sum(&with(there, joiner), kind, pairs)?;
        Some(after - self.sum(there, kind, pairs)?)
    }

    /// Why the one that came last has to go: it adds less than `least` - 1 to what the others did
    /// without it.
    pub(super) fn below(
        &self,
        all: &[&Profile],
        kind: GpuType,
        measured: &[f64],
        (least, pairs): (f64, Pairs<'_>),
    ) -> Option<Reason> {
        let before = &all[..all.len().saturating_sub(1)];
        let least = self.sum(before, kind, pairs).unwrap_or(1.0) + least - 1.0;
        let sum: f64 = measured.iter().sum();
        let few = measured.len() != all.len() || sum.is_nan() || sum < least;
        // CAST: at most 64.
        let jobs = all.len() as u32;
        few.then_some(Reason::Several { jobs, sum, least })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Class;

    fn profile(kind: u32) -> Profile {
        Profile::unknown(JobType(kind), 1, Class::Guaranteed)
    }

    /// Kinds 0 and 1 keep 0.8 beside each other, kind 2 keeps and leaves a half, kind 9 is unknown.
    fn pairs(host: &Profile, joiner: &Profile) -> Option<[f64; 2]> {
        match (host.kind.0, joiner.kind.0) {
            (9, _) | (_, 9) => None,
            (2, _) | (_, 2) => Some([0.5, 0.5]),
            _ => Some([0.8, 0.8]),
        }
    }

    #[test]
    fn what_three_do_follows_from_their_pairs() {
        let (a, b, c) = (profile(0), profile(1), profile(2));
        let near = |found: Option<f64>, wanted: f64| {
            assert!((found.unwrap() - wanted).abs() < 1e-12, "{found:?}");
        };
        let crowds = Crowds::default();
        let adds = |there: &[&Profile], joiner| crowds.adds(there, joiner, GpuType(0), &pairs);
        // A second one: 0.8 + 0.8 - 1. A third like them: 3 / (1 + 2 x 0.25) - 1.6.
        near(adds(&[&a], &b), 0.6);
        near(adds(&[&a, &b], &a), 0.4);
        // One that fills the device by itself: 2 / (1 + 0.25 + 1) + 1 / (1 + 1 + 1) - 1.6.
        near(adds(&[&a, &b], &c), 8.0 / 9.0 + 1.0 / 3.0 - 1.6);
        assert_eq!(adds(&[&a, &profile(9)], &b), None);
        assert_eq!(adds(&[&a, &b], &profile(9)), None);
    }

    #[test]
    fn what_was_measured_of_several_counts_for_them_and_for_no_pair() {
        let (a, b) = (profile(0), profile(1));
        let mut crowds = Crowds::default();
        let bad = [0.4, 0.4, 0.4];
        let all = [&a, &b, &a];
        let why = crowds.below(&all, GpuType(0), &bad, (1.0, &pairs));
        assert!(
            matches!(why, Some(Reason::Several { jobs: 3, least, .. }) if (least - 1.6).abs() < 1e-12),
            "{why:?}"
        );
        crowds.note(&all, GpuType(0), &bad, why);
        // In any order of coming, on this type of GPU alone.
        assert_eq!(crowds.refused(&[&b, &a, &a], GpuType(0)), why);
        assert_eq!(crowds.refused(&[&b, &a, &a], GpuType(1)), None);
        assert_eq!(crowds.refused(&[&a, &b], GpuType(0)), None);
        // What a fourth adds is counted from what the three were measured at.
        let adds = crowds.adds(&all, &b, GpuType(0), &pairs).unwrap();
        assert!((adds - (4.0 / 1.75 - 1.2)).abs() < 1e-12, "{adds}");
        // The last measurement counts.
        crowds.note(&all, GpuType(0), &[0.7; 3], None);
        assert_eq!(crowds.refused(&all, GpuType(0)), None);
        for wrong in [vec![f64::NAN, 1.0, 1.0], vec![1.0, 1.0], Vec::new()] {
            let why = crowds.below(&all, GpuType(0), &wrong, (1.0, &pairs));
            assert!(why.is_some(), "{wrong:?} is no measurement of three");
        }
    }

    #[test]
    fn a_hundred_thousand_groups_take_no_more_than_what_is_kept() {
        let mut crowds = Crowds::default();
        for kind in 0..100_000 {
            let (a, b, c) = (profile(kind), profile(kind + 1), profile(kind + 2));
            crowds.note(&[&a, &b, &c], GpuType(0), &[0.3; 3], None);
            assert!(crowds.seen.len() <= KEPT && crowds.by_age.len() <= KEPT);
        }
    }

    #[test]
    fn where_the_host_counts_another_host_is_another_group() {
        let (a, b) = (profile(0), profile(1));
        let mut crowds = Crowds::of_hosts();
        let why = Some(Reason::Host { rate: 0.5 });
        crowds.note(&[&a, &b, &b], GpuType(0), &[0.5; 3], why);
        assert_eq!(crowds.refused(&[&a, &b, &b], GpuType(0)), why);
        assert_eq!(crowds.refused(&[&b, &a, &b], GpuType(0)), None);
    }
}
