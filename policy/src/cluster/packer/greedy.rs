//! By a table of measured pairs.

use std::sync::Arc;

use super::measured::Measured;
use super::{PackScore, Packer, Verdict};
use crate::PolicyError;
use crate::cluster::catalogue::Entry;
use crate::cluster::{GpuType, Manner, Objective, PairTable, Profile, Reason, Tags, Throughputs};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static GREEDY: Entry<dyn Packer> = Registration {
    name: "greedy",
    summary: "best sum by the table of measured pairs",
    params: &[ParamSpec {
        name: "least",
        summary: "least sum of both speeds, relative to running solo",
        kind: Kind::Number {
            min: 0.0,
            max: 2.0,
            default: 1.0,
        },
    }],
    build: |settings, context| {
        let pairs = context.pairs.clone().ok_or(PolicyError::Needs {
            policy: "greedy",
            what: "measured pairs: a trace that comes with some, or, live, those that `--packer trial` has measured on the same state",
        })?;
        Ok(Box::new(Greedy::new(pairs, settings.number("least"))))
    },
};

/// The pair with the highest sum of normalised speeds, if that is at least `least`. 1.0 says
/// "better than taking turns". Measured pairs (Gavel, OSDI'20) average 1.31 on V100, 1.19 on P100,
/// 1.07 on K80: on a GPU with little spare capacity a clairvoyant order needs 1.2 for packing not
/// to hurt.
#[derive(Clone, Debug)]
pub struct Greedy {
    table: Arc<PairTable>,
    /// Measured here; wins over the table.
    own: Measured,
    least: f64,
}

impl Greedy {
    /// By this table.
    #[must_use]
    pub fn new(table: Arc<PairTable>, least: f64) -> Self {
        Self {
            table,
            own: Measured::default(),
            least,
        }
    }

    fn pair(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<[f64; 2]> {
        let table = || self.table.pair(host.kind, joiner.kind, kind, host.gpus);
        self.own.of(host, joiner, kind).or_else(table)
    }
}

impl Packer for Greedy {
    fn name(&self) -> &'static str {
        "greedy"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Utilisation, Objective::Completion],
            manners: &[Manner::Sharing],
            source: "Gavel, OSDI'20",
        }
    }
    fn score(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<PackScore> {
        let [a, b] = self.pair(host, joiner, kind)?;
        (a > 0.0 && b > 0.0 && a + b >= self.least).then_some(PackScore(a + b))
    }
    fn observe(
        &mut self,
        host: &Profile,
        joiner: &Profile,
        kind: GpuType,
        measured: [f64; 2],
    ) -> Verdict {
        self.own.note(host, joiner, kind, measured);
        self.refused(host, joiner, kind).into()
    }
    fn refused(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<Reason> {
        self.own.below(host, joiner, kind, self.least)
    }
}
