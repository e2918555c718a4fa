//! By how busy each is alone.

use super::measured::Measured;
use super::{PackScore, Packer, Verdict, fits};
use crate::PolicyError;
use crate::cluster::catalogue::Busy;
use crate::cluster::catalogue::Entry;
use crate::cluster::{GpuType, Manner, Objective, Profile, Reason, Tags};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static UTIL_SUM: Entry<dyn Packer> = Registration {
    name: "util-sum",
    summary: "both busy fractions add up to little enough",
    params: &[ParamSpec {
        name: "limit",
        summary: "greatest sum of the busy fractions",
        kind: Kind::Number {
            min: 0.0,
            max: 2.0,
            default: 1.0,
        },
    }],
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
            measured: Measured::default(),
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
/// what one job does by itself is split, and remembered.
#[derive(Clone, Debug)]
pub struct UtilSum {
    /// Greatest sum of the two busy fractions.
    pub limit: f64,
    /// Memory of a device, in bytes.
    pub gpu_bytes: u64,
    measured: Measured,
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
    fn keeps_pairs(&self) -> bool {
        true
    }
}
