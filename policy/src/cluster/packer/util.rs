//! By how busy each is alone.

use super::{PackScore, Packer, Verdict, fits};
use crate::cluster::{GpuType, Manner, Objective, Profile, Reason, Tags};

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
