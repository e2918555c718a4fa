//! By how busy each is alone.

use super::crowd::{self, Crowds};
use super::measured::Measured;
use super::{PackScore, Packer, Verdict, all_fit, fits};
use crate::PolicyError;
use crate::cluster::catalogue::Busy;
use crate::cluster::catalogue::Entry;
use crate::cluster::{GpuType, Manner, Objective, Profile, Reason, Tags};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static UTIL_SUM: Entry<dyn Packer> = Registration {
    name: "util-sum",
    summary: "both busy fractions add up to little enough",
    params: &[
        ParamSpec {
            name: "limit",
            summary: "greatest sum of the busy fractions",
            kind: Kind::Number {
                min: 0.0,
                max: 2.0,
                default: 1.0,
            },
        },
        crowd::JOBS,
    ],
    build: |settings, context| {
        if context.busy == Busy::Unknown || context.gpu_bytes == 0 {
            return Err(PolicyError::Needs {
                policy: "util-sum",
                what: "the busy fractions of jobs, which this trace does not have (column `busy`; see also `trial`)",
            });
        }
        Ok(Box::new(UtilSum {
            limit: settings.number("limit"),
            gpu_bytes: context.gpu_bytes,
            most_jobs: crowd::jobs(settings),
            measured: Measured::default(),
            crowds: Crowds::default(),
        }))
    },
};

/// Pairs jobs whose solo busy fractions add up to at most `limit`, the greatest sum first. On
/// Lucid's measurements (ASPLOS'23, RTX 3090, 1,388 pairs) a sum of at most 1.0 keeps a mean speed
/// of 0.9 in 95 % of the chosen pairs, 1.2 in 89 %: as good as its decision tree. Those figures use
/// the driver's coarse utilisation; the interposer meters GPU time, so the limit is a parameter.
///
/// A job of which nothing is known counts as busy all the time: a live job of a new kind runs by
/// itself first, and its kind is packed from then on. A pair that was measured and does not reach
/// what one job does by itself is split, and remembered. With `jobs` above 2 the busy fractions of
/// all of them have to add up to no more.
#[derive(Clone, Debug)]
pub struct UtilSum {
    /// Greatest sum of the two busy fractions.
    pub limit: f64,
    /// Memory of a device, in bytes.
    pub gpu_bytes: u64,
    most_jobs: u32,
    measured: Measured,
    crowds: Crowds,
}

impl Packer for UtilSum {
    fn name(&self) -> &'static str {
        "util-sum"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Utilisation],
            manners: &[Manner::Sharing],
            source: "Lucid, ASPLOS'23",
        }
    }
    fn score(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<PackScore> {
        let sum = host.busy + joiner.busy;
        let ok = sum <= self.limit
            && fits(host, joiner, self.gpu_bytes)
            && self.refused(host, joiner, kind).is_none();
        ok.then_some(PackScore(sum))
    }
    fn observe(
        &mut self,
        host: &Profile,
        joiner: &Profile,
        kind: GpuType,
        measured: [f64; 2],
    ) -> Verdict {
        self.measured.note(host, joiner, kind, measured);
        self.refused(host, joiner, kind).into()
    }
    fn refused(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<Reason> {
        self.measured.below(host, joiner, kind, 1.0)
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
        let sum = there.iter().map(|other| other.busy).sum::<f64>() + joiner.busy;
        let bad = |other: &&Profile| self.refused(other, joiner, kind).is_some();
        let ok = sum <= self.limit
            && all_fit(there, joiner, self.gpu_bytes)
            && !there.iter().any(bad)
            && self
                .refused_several(&crowd::with(there, joiner), kind)
                .is_none();
        ok.then_some(PackScore(sum))
    }
    fn judge_several(&self, all: &[&Profile], kind: GpuType, measured: &[f64]) -> Option<Reason> {
        let pairs = |a: &Profile, b: &Profile| self.measured.of(a, b, kind);
        let least = (1.0, &pairs as crowd::Pairs<'_>);
        self.crowds.below(all, kind, measured, least)
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
