//! Try it and see.

use super::crowd::{self, Crowds};
use super::measured::Measured;
use super::{PackScore, Packer, Verdict};
use crate::cluster::catalogue::Entry;
use crate::cluster::{GpuType, JOBS_ON_GPU, Manner, Objective, Profile, Reason, Tags};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static TRIAL: Entry<dyn Packer> = Registration {
    name: "trial",
    summary: "try, measure, unpack what does not pay",
    params: &[
        ParamSpec {
            name: "margin",
            summary: "a pair must run at 1 + this of one job by itself",
            kind: Kind::Number {
                min: -1.0,
                max: 1.0,
                default: 0.05,
            },
        },
        ParamSpec {
            name: "floor",
            summary: "least speed of each, relative to running solo",
            kind: Kind::Number {
                min: 0.0,
                max: 1.0,
                default: 0.0,
            },
        },
        crowd::JOBS,
    ],
    build: |settings, _| {
        let trial = Trial::new(settings.number("margin"), settings.number("floor"));
        Ok(Box::new(trial.with_most_jobs(crowd::jobs(settings))))
    },
};

/// Gandiva's packing (OSDI'18): put two jobs together without knowing anything, measure both, and
/// keep them together only if the sum of their normalised speeds is at least 1 + `margin` and
/// neither falls below `floor`.
///
/// The trial lasts max(20 iterations, 30 s) ([`Trial::window_s`]): long enough for a mean over
/// iterations, short against a job. A refusal is remembered by the two kinds of job, their number
/// of GPUs and the type of GPU, so each bad pair of kinds costs one trial; the last measurement
/// counts. On the calibration trace pairs chosen by trial are 6 to 8 % behind pairs chosen by a
/// full table: a packer without profiles is a sound first version.
///
/// With `jobs` above 2 a further job comes only where each two of all that would be there were
/// measured as a pair, and where it adds at least `margin` by what they cost each other. All of
/// them are then measured together, before another one comes, and the one that came last goes where
/// it does not add that much.
#[derive(Clone, Debug)]
pub struct Trial {
    margin: f64,
    floor: f64,
    most_jobs: u32,
    tried: Measured,
    crowds: Crowds,
}

impl Trial {
    /// Keep pairs whose sum is at least 1 + `margin` and where each runs at `floor` of its speed
    /// alone.
    #[must_use]
    pub fn new(margin: f64, floor: f64) -> Self {
        Self {
            margin,
            floor,
            most_jobs: JOBS_ON_GPU,
            tried: Measured::default(),
            crowds: Crowds::default(),
        }
    }

    /// Up to so many jobs on a GPU.
    #[must_use]
    pub fn with_most_jobs(self, most_jobs: u32) -> Self {
        Self { most_jobs, ..self }
    }

    fn below_floor(&self, speeds: &[f64]) -> Option<Reason> {
        let rate = speeds.iter().copied().fold(f64::INFINITY, f64::min);
        let floor = self.floor;
        (rate < floor).then_some(Reason::Floor { rate, floor })
    }

    /// How long a pair runs before it is judged, in seconds, given the longer iteration time of the
    /// two.
    #[must_use]
    pub fn window_s(iteration_s: f64) -> f64 {
        (20.0 * iteration_s).max(30.0)
    }

    fn judge(&self, [host, joiner]: [f64; 2]) -> Option<Reason> {
        let (sum, least, rate) = (host + joiner, 1.0 + self.margin, host.min(joiner));
        if sum.is_nan() || sum < least {
            Some(Reason::Sum { sum, least })
        } else if rate < self.floor {
            let floor = self.floor;
            Some(Reason::Floor { rate, floor })
        } else {
            None
        }
    }
}

impl Packer for Trial {
    fn name(&self) -> &'static str {
        "trial"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Utilisation],
            manners: &[Manner::Sharing],
            source: "Gandiva, OSDI'18",
        }
    }
    fn score(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<PackScore> {
        match self.refused(host, joiner, kind) {
            None => Some(PackScore(1.0)),
            Some(_) => None,
        }
    }
    fn observe(
        &mut self,
        host: &Profile,
        joiner: &Profile,
        kind: GpuType,
        measured: [f64; 2],
    ) -> Verdict {
        self.tried.note(host, joiner, kind, measured);
        self.judge(measured).into()
    }
    fn refused(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<Reason> {
        self.judge(self.tried.of(host, joiner, kind)?)
    }
    fn most_jobs(&self) -> u32 {
        self.most_jobs
    }
    fn score_beside(
        &self,
        there: &[&Profile],
        joiner: &Profile,
        kind: GpuType,
    ) -> Option<PackScore> {
        let pairs = |a: &Profile, b: &Profile| self.tried.of(a, b, kind);
        // One more at a time.
        if there.len() > 2 && !self.crowds.are_known(there, kind) {
            return None;
        }
        let all = crowd::with(there, joiner);
        let refused = self.refused_several(&all, kind);
        let two = there
            .iter()
            .find_map(|other| self.refused(other, joiner, kind));
        let adds = self.crowds.adds(there, joiner, kind, &pairs)?;
        let slow = self.below_floor(&crowd::speeds(&all, &pairs)?);
        let ok = refused.or(two).or(slow).is_none() && adds >= self.margin;
        // Where fewest are, among those that it may join.
        ok.then(|| PackScore(1.0 / there.len() as f64))
    }
    fn judge_several(&self, all: &[&Profile], kind: GpuType, measured: &[f64]) -> Option<Reason> {
        let pairs = |a: &Profile, b: &Profile| self.tried.of(a, b, kind);
        let least = (1.0 + self.margin, &pairs as crowd::Pairs<'_>);
        let below = self.crowds.below(all, kind, measured, least);
        below.or_else(|| self.below_floor(measured))
    }
    fn observe_several(&mut self, all: &[&Profile], kind: GpuType, measured: &[f64]) -> Verdict {
        let refused = self.judge_several(all, kind, measured);
        self.crowds.note(all, kind, measured, refused);
        refused.into()
    }
    fn refused_several(&self, all: &[&Profile], kind: GpuType) -> Option<Reason> {
        self.crowds.refused(all, kind)
    }
    fn keeps_pairs(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Class;
    use crate::cluster::JobType;

    #[test]
    fn a_bad_pair_is_refused_and_remembered_in_both_directions() {
        let profile = |kind| Profile::unknown(JobType(kind), 1, Class::Guaranteed);
        let (a, b) = (profile(0), profile(1));
        let mut trial = Trial::new(0.05, 0.3);
        assert!(trial.score(&a, &b, GpuType(0)).is_some());
        let verdict = trial.observe(&a, &b, GpuType(0), [0.7, 0.3]);
        assert!(matches!(verdict, Verdict::Unpack(Reason::Sum { .. })));
        assert!(trial.score(&b, &a, GpuType(0)).is_none());
        assert!(
            trial.score(&a, &b, GpuType(1)).is_some(),
            "another GPU type"
        );
        let verdict = trial.observe(&a, &b, GpuType(0), [0.9, 0.25]);
        assert!(matches!(verdict, Verdict::Unpack(Reason::Floor { .. })));
        assert_eq!(trial.observe(&b, &a, GpuType(0), [0.6, 0.6]), Verdict::Keep);
        assert!(
            trial.score(&a, &b, GpuType(0)).is_some(),
            "the last one counts"
        );
        let verdict = trial.observe(&a, &b, GpuType(0), [f64::NAN, 1.0]);
        assert!(matches!(verdict, Verdict::Unpack(_)), "no number, no pair");
    }

    #[test]
    fn the_window_is_twenty_iterations_but_at_least_half_a_minute() {
        assert_eq!(Trial::window_s(0.1), 30.0);
        assert_eq!(Trial::window_s(4.0), 80.0);
    }
}
