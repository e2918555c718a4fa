//! A guaranteed host, an opportunistic joiner.

use super::crowd::{self, Crowds};
use super::measured::Measured;
use super::{PackScore, Packer, Verdict, all_fit, fits};
use crate::Class;
use crate::PolicyError;
use crate::cluster::catalogue::Busy;
use crate::cluster::catalogue::Entry;
use crate::cluster::{GpuType, Manner, Objective, Profile, Reason, Tags, beside_all};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static OPPORTUNISTIC: Entry<dyn Packer> = Registration {
    name: "opportunistic",
    summary: "an opportunistic job beside a guaranteed host",
    params: &[
        ParamSpec {
            name: "busy",
            summary: "a host must be less busy than this",
            kind: Kind::Number {
                min: 0.0,
                max: 1.0,
                default: 0.7,
            },
        },
        ParamSpec {
            name: "floor",
            summary: "what the host keeps of its solo speed",
            kind: Kind::Number {
                min: 0.0,
                max: 1.0,
                default: 0.98,
            },
        },
        crowd::JOBS,
    ],
    build: |settings, context| {
        if context.busy == Busy::Unknown || !context.opportunistic || context.gpu_bytes == 0 {
            return Err(PolicyError::Needs {
                policy: "opportunistic",
                what: "jobs of both classes with a known busy fraction, which this trace does not have",
            });
        }
        Ok(Box::new(Opportunistic {
            host_busy: settings.number("busy"),
            host_floor: settings.number("floor"),
            gpu_bytes: context.gpu_bytes,
            most_jobs: crowd::jobs(settings),
            measured: Measured::default(),
            crowds: Crowds::of_hosts(),
        }))
    },
};

/// AntMan (OSDI'20): an opportunistic job may join a guaranteed one that leaves the device idle;
/// the node's guard protects the host, and if it cannot (the host is below 0.98 of its solo speed)
/// the joiner is removed, and joins no host of that kind again.
///
/// With `jobs` above 2 a further opportunistic one comes once the host was measured beside each of
/// those that are there, and by what they cost it together it keeps its speed.
#[derive(Clone, Debug)]
pub struct Opportunistic {
    /// A host must be less busy than this.
    pub host_busy: f64,
    /// What the host keeps of its speed alone.
    pub host_floor: f64,
    /// Memory of a device, in bytes.
    pub gpu_bytes: u64,
    most_jobs: u32,
    measured: Measured,
    crowds: Crowds,
}

impl Packer for Opportunistic {
    fn name(&self) -> &'static str {
        "opportunistic"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Utilisation],
            manners: &[Manner::Sharing],
            source: "AntMan, OSDI'20",
        }
    }
    fn score(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<PackScore> {
        let ok = host.class == Class::Guaranteed
            && joiner.class == Class::Opportunistic
            && host.busy < self.host_busy
            && fits(host, joiner, self.gpu_bytes)
            && self.refused(host, joiner, kind).is_none();
        ok.then_some(PackScore(1.0 - host.busy))
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
        let [rate, _] = self.measured.of(host, joiner, kind)?;
        (rate.is_nan() || rate < self.host_floor).then_some(Reason::Host { rate })
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
        let (host, others) = there.split_first()?;
        let mut rates = Vec::with_capacity(there.len());
        for other in others {
            rates.push(self.measured.of(host, other, kind)?[0]);
        }
        rates.extend(self.measured.of(host, joiner, kind).map(|[rate, _]| rate));
        let opportunistic = |profile: &&Profile| profile.class == Class::Opportunistic;
        let ok = others.iter().all(opportunistic)
            && self.score(host, joiner, kind).is_some()
            && all_fit(there, joiner, self.gpu_bytes)
            && beside_all(rates) >= self.host_floor
            && self
                .refused_several(&crowd::with(there, joiner), kind)
                .is_none();
        ok.then(|| PackScore((1.0 - host.busy) / there.len() as f64))
    }
    fn judge_several(&self, _: &[&Profile], _: GpuType, measured: &[f64]) -> Option<Reason> {
        let rate = measured.first().copied().unwrap_or(f64::NAN);
        (rate.is_nan() || rate < self.host_floor).then_some(Reason::Host { rate })
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
