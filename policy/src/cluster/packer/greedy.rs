//! By a table of measured pairs.

use std::sync::Arc;

use super::crowd::{self, Crowds};
use super::measured::Measured;
use super::{PackScore, Packer, Verdict};
use crate::PolicyError;
use crate::cluster::catalogue::Entry;
use crate::cluster::{
    GpuType, JOBS_ON_GPU, Manner, Objective, PairTable, Profile, Reason, Tags, Throughputs,
};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static GREEDY: Entry<dyn Packer> = Registration {
    name: "greedy",
    summary: "best sum by the table of measured pairs",
    params: &[
        ParamSpec {
            name: "least",
            summary: "least sum of both speeds, relative to running solo",
            kind: Kind::Number {
                min: 0.0,
                max: 2.0,
                default: 1.0,
            },
        },
        crowd::JOBS,
    ],
    build: |settings, context| {
        let pairs = context.pairs.clone().ok_or(PolicyError::Needs {
            policy: "greedy",
            what: "measured pairs: a trace that comes with some, or, live, those that `--packer trial` has measured on the same state",
        })?;
        let greedy = Greedy::new(pairs, settings.number("least"));
        Ok(Box::new(greedy.with_most_jobs(crowd::jobs(settings))))
    },
};

/// The pair with the highest sum of normalised speeds, if that is at least `least`. 1.0 says
/// "better than taking turns". Measured pairs (Gavel, OSDI'20) average 1.31 on V100, 1.19 on P100,
/// 1.07 on K80: on a GPU with little spare capacity a clairvoyant order needs 1.2 for packing not
/// to hurt. With `jobs` above 2 a further one comes where it adds most, `least` - 1 at least, to
/// what the others do, by the table and by what they cost each other.
#[derive(Clone, Debug)]
pub struct Greedy {
    table: Arc<PairTable>,
    /// Measured here; wins over the table.
    own: Measured,
    crowds: Crowds,
    least: f64,
    most_jobs: u32,
}

impl Greedy {
    /// By this table.
    #[must_use]
    pub fn new(table: Arc<PairTable>, least: f64) -> Self {
        Self {
            table,
            own: Measured::default(),
            crowds: Crowds::default(),
            least,
            most_jobs: JOBS_ON_GPU,
        }
    }

    /// Up to so many jobs on a GPU.
    #[must_use]
    pub fn with_most_jobs(self, most_jobs: u32) -> Self {
        Self { most_jobs, ..self }
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
    fn most_jobs(&self) -> u32 {
        self.most_jobs
    }
    fn score_beside(
        &self,
        there: &[&Profile],
        joiner: &Profile,
        kind: GpuType,
    ) -> Option<PackScore> {
        let pairs = |a: &Profile, b: &Profile| self.pair(a, b, kind);
        let all = crowd::with(there, joiner);
        let good = there
            .iter()
            .all(|other| self.score(other, joiner, kind).is_some());
        let adds = self.crowds.adds(there, joiner, kind, &pairs)?;
        let ok = good && adds >= self.least - 1.0 && self.refused_several(&all, kind).is_none();
        // As a pair is worth the sum of both: what one alone does, and what is added.
        ok.then_some(PackScore(1.0 + adds))
    }
    fn judge_several(&self, all: &[&Profile], kind: GpuType, measured: &[f64]) -> Option<Reason> {
        let pairs = |a: &Profile, b: &Profile| self.pair(a, b, kind);
        let least = (self.least, &pairs as crowd::Pairs<'_>);
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
}
