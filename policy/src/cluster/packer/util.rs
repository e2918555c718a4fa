//! By how busy each is alone.

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
        if context.busy != Busy::FromArrival || context.gpu_bytes == 0 {
            return Err(PolicyError::Needs {
                policy: "util-sum",
                what: "the busy fraction of each job before it runs, which neither this trace nor a live hook has (see `trial`)",
            });
        }
        Ok(Box::new(UtilSum {
            limit: settings.number("limit"),
            gpu_bytes: context.gpu_bytes,
        }))
    },
};

/// Pairs jobs whose solo busy fractions add up to at most `limit`, the greatest sum first. On
/// Lucid's measurements (ASPLOS'23, RTX 3090, 1,388 pairs) a sum of at most 1.0 keeps a mean speed
/// of 0.9 in 95 % of the chosen pairs, 1.2 in 89 %: as good as its decision tree. Those figures use
/// the driver's coarse utilisation; the interposer meters GPU time, so the limit is a parameter.
#[derive(Clone, Copy, Debug)]
pub struct UtilSum {
    /// Greatest sum of the two busy fractions.
    pub limit: f64,
    /// Memory of a device, in bytes.
    pub gpu_bytes: u64,
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
    fn score(&self, host: &Profile, joiner: &Profile, _: GpuType) -> Option<PackScore> {
        let sum = host.busy + joiner.busy;
        (sum <= self.limit && fits(host, joiner, self.gpu_bytes)).then_some(PackScore(sum))
    }
    fn observe(&mut self, _: &Profile, _: &Profile, _: GpuType, [a, b]: [f64; 2]) -> Verdict {
        if a + b >= 1.0 {
            return Verdict::Keep;
        }
        Verdict::Unpack(Reason::Sum {
            sum: a + b,
            least: 1.0,
        })
    }
}
