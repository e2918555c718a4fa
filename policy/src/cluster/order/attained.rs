//! Orders that know only what a job has had so far: least attained service, its discrete form, and
//! the Gittins index.
//!
//! Tiresias (NSDI'19) measures a job by GPUs x time. Serving the least attained service first (LAS)
//! needs no estimate, but two jobs with the same service then alternate at each decision: on the
//! trace of the calibration LAS preempts 76,408 times where the discrete form preempts 1,442 times.
//! 2D-LAS puts jobs into K queues by thresholds on the attained service, first come first served
//! inside a queue; a job is demoted when it crosses a threshold. The default is one threshold of
//! 57,600 GPU-seconds (16 GPU-hours), the value in the Pollux artifact; Tiresias' own simulator has
//! 3,250 / 7,200 / 18,000, with which queues hardly separate long jobs from very long ones (see
//! docs/explanation/simulation.md: 1.2x instead of 2.7x over FIFO).

use std::collections::HashMap;

use super::{Drift, Key, Order};
use crate::PolicyError;
use crate::cluster::catalogue::Entry;
use crate::cluster::{ClusterState, Job, JobId, Manner, Objective, Phase, Tags};
use crate::registry::{Kind, ParamSpec, Registration};

/// How it is chosen.
pub(super) static LAS: Entry<dyn Order> = Registration {
    name: "las",
    summary: "least attained GPU time first",
    params: &[],
    build: |_, _| Ok(Box::new(Las)),
};

/// How it is chosen.
pub(super) static TWO_D_LAS: Entry<dyn Order> = Registration {
    name: "2d-las",
    summary: "queues of attained GPU time, by arrival inside",
    params: &[AT, PROMOTE],
    build: |settings, _| {
        Ok(Box::new(TwoDLas::new(
            settings.numbers("at"),
            settings.some("promote"),
        )))
    },
};

/// How it is chosen.
pub(super) static GITTINS: Entry<dyn Order> = Registration {
    name: "gittins",
    summary: "queues of attained GPU time, by Gittins index inside",
    params: &[AT, PROMOTE],
    build: |settings, context| {
        if context.past_gpu_s.is_empty() {
            return Err(PolicyError::Needs {
                policy: "gittins",
                what: "the GPU times of past jobs: `--past FILE` of the simulator; a live hook keeps \
                       those of jobs that are done, and needs 20 of them: run another order first, \
                       such as `2d-las`, on the same --state",
            });
        }
        let queues = TwoDLas::new(settings.numbers("at"), settings.some("promote"));
        Ok(Box::new(Gittins::new(context.past_gpu_s.clone(), queues)))
    },
};

const AT: ParamSpec = ParamSpec {
    name: "at",
    summary: "queue thresholds in GPU-seconds",
    kind: Kind::Numbers {
        min: 0.0,
        max: f64::INFINITY,
        default: &[TwoDLas::DEFAULT_THRESHOLD_GPU_S],
    },
};

const PROMOTE: ParamSpec = ParamSpec {
    name: "promote",
    summary: "back to the first queue after waiting this many times as long as it ran; 0: never",
    kind: Kind::Number {
        min: 0.0,
        max: f64::INFINITY,
        default: 0.0,
    },
};

const TIRESIAS: Tags = Tags {
    objectives: &[Objective::Completion],
    manners: &[Manner::Exclusive],
    source: "Tiresias, NSDI'19",
};

/// Least attained service first.
#[derive(Clone, Copy, Debug)]
pub struct Las;

impl Order for Las {
    fn name(&self) -> &'static str {
        "las"
    }
    fn tags(&self) -> Tags {
        TIRESIAS
    }
    fn key(&self, state: &ClusterState, job: &Job) -> Key {
        Key::of(job.service_gpu_s(state.now_s()), job)
    }
    fn preemptive(&self) -> bool {
        true
    }
    fn skips(&self) -> bool {
        true
    }
    fn drift(&self) -> Drift {
        Drift::Running
    }
}

/// A job's service and since when it counts: Tiresias' promotion resets that of a starved job.
#[derive(Clone, Debug, Default)]
struct Promotion {
    knob: Option<f64>,
    /// Service and held time at the last promotion.
    since: HashMap<JobId, (f64, f64)>,
}

impl Promotion {
    /// Moves a job back to the first queue after it has waited `knob` times as long as it ran since
    /// it was last there.
    fn refresh(&mut self, state: &ClusterState) {
        let Some(knob) = self.knob else { return };
        let now_s = state.now_s();
        for id in state.waiting() {
            let job = state.job(*id);
            let Phase::Waiting { since_s } = job.phase else {
                continue;
            };
            let (service, held) = (job.service_gpu_s(now_s), job.held_s(now_s));
            let base = self.since.get(id).map_or(0.0, |(_, held)| *held);
            let ran = held - base;
            if ran > 0.0 && now_s - since_s >= knob * ran {
                self.since.insert(*id, (service, held));
            }
        }
        if self.since.len() > 1024 {
            self.since.retain(|id, _| !state.job(*id).is_done());
        }
    }

    fn service(&self, state: &ClusterState, job: &Job) -> f64 {
        let base = self.since.get(&job.id).map_or(0.0, |(service, _)| *service);
        job.service_gpu_s(state.now_s()) - base
    }

    fn drift(&self) -> Drift {
        if self.knob.is_some() {
            Drift::Always
        } else {
            Drift::Running
        }
    }
}

/// Discrete two-dimensional LAS.
#[derive(Clone, Debug)]
pub struct TwoDLas {
    thresholds: Vec<f64>,
    promotion: Promotion,
}

impl TwoDLas {
    /// 16 GPU-hours.
    pub const DEFAULT_THRESHOLD_GPU_S: f64 = 57_600.0;

    /// Queues at these thresholds (GPU-seconds, sorted here); `promote`: back to the first queue
    /// after waiting this many times as long as it ran.
    #[must_use]
    pub fn new(mut thresholds_gpu_s: Vec<f64>, promote: Option<f64>) -> Self {
        thresholds_gpu_s.sort_by(f64::total_cmp);
        Self {
            thresholds: thresholds_gpu_s,
            promotion: Promotion {
                knob: promote,
                since: HashMap::new(),
            },
        }
    }

    /// What a job has had since it was last promoted, and its queue.
    fn place(&self, state: &ClusterState, job: &Job) -> (f64, u32) {
        let service = self.promotion.service(state, job);
        let queue = self.thresholds.partition_point(|limit| *limit <= service);
        (service, queue as u32)
    }
}

impl Order for TwoDLas {
    fn name(&self) -> &'static str {
        "2d-las"
    }
    fn tags(&self) -> Tags {
        TIRESIAS
    }
    fn key(&self, state: &ClusterState, job: &Job) -> Key {
        let (_, queue) = self.place(state, job);
        Key::new(queue, job.arrival_s, job)
    }
    fn preemptive(&self) -> bool {
        true
    }
    fn skips(&self) -> bool {
        true
    }
    fn drift(&self) -> Drift {
        self.promotion.drift()
    }
    fn refresh(&mut self, state: &ClusterState) {
        self.promotion.refresh(state);
    }
}

/// 2D-Gittins: by the Gittins index of the attained service, from the GPU time of past jobs.
///
/// The index of a job with service `a` is the best ratio, over a quantum d, of the chance to finish
/// within it to the expected service spent: `max_d P(S <= a + d | S > a) / E[min(S - a, d) | S >
/// a]`. With past samples sorted, `d` need only end at a sample: with n samples above `a` the index
/// is `max_k k / (sum of the first k of (s_i - a) + (n - k)(s_k - a))`. Indices are computed for
/// each service that a sample has, and looked up; like Tiresias the result is used in levels: the
/// same two queues as 2D-LAS by default, the index deciding inside a queue in place of the arrival.
#[derive(Clone, Debug)]
pub struct Gittins {
    services: Vec<f64>,
    indices: Vec<f64>,
    queues: TwoDLas,
}

impl Gittins {
    /// From the GPU-seconds of past jobs. Beyond the longest one a job has index 0: it comes last.
    #[must_use]
    pub fn new(samples_gpu_s: Vec<f64>, queues: TwoDLas) -> Self {
        let (services, indices) = indices(samples_gpu_s);
        Self {
            services,
            indices,
            queues,
        }
    }

    /// The index of a job with this much service.
    #[must_use]
    pub fn index(&self, service_gpu_s: f64) -> f64 {
        let at = self.services.partition_point(|s| *s <= service_gpu_s);
        self.indices[at.saturating_sub(1)]
    }
}

/// Services that samples have, and the index of each.
fn indices(mut samples_gpu_s: Vec<f64>) -> (Vec<f64>, Vec<f64>) {
    samples_gpu_s.retain(|sample| sample.is_finite() && *sample > 0.0);
    samples_gpu_s.sort_by(f64::total_cmp);
    let mut services = vec![0.0];
    services.extend_from_slice(&samples_gpu_s);
    services.dedup();
    let of = |service: &f64| index(&samples_gpu_s, *service);
    let indices = services.iter().map(of).collect();
    (services, indices)
}

fn index(sorted: &[f64], service: f64) -> f64 {
    let above = &sorted[sorted.partition_point(|s| *s <= service)..];
    let n = above.len() as f64;
    let (mut sum, mut best) = (0.0, 0.0_f64);
    for (i, sample) in above.iter().enumerate() {
        let (k, d) = (i as f64 + 1.0, sample - service);
        sum += d;
        best = best.max(k / (sum + (n - k) * d));
    }
    best
}

impl Order for Gittins {
    fn name(&self) -> &'static str {
        "gittins"
    }
    fn tags(&self) -> Tags {
        TIRESIAS
    }
    fn key(&self, state: &ClusterState, job: &Job) -> Key {
        let (service, queue) = self.queues.place(state, job);
        Key::new(queue, -self.index(service), job)
    }
    fn preemptive(&self) -> bool {
        true
    }
    fn skips(&self) -> bool {
        true
    }
    fn drift(&self) -> Drift {
        self.queues.promotion.drift()
    }
    fn refresh(&mut self, state: &ClusterState) {
        self.queues.promotion.refresh(state);
    }
    fn learn(&mut self, past_gpu_s: &[f64]) {
        if !past_gpu_s.is_empty() {
            (self.services, self.indices) = indices(past_gpu_s.to_vec());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_of_two_points_is_the_hand_calculated_one() {
        // Half the jobs take 1, half take 9. New: stop at 1: (1/2) / 1; go on to 9: 1 / (0.5 + 4.5)
        // = 0.2. After 1: 1 / 8.
        let gittins = Gittins::new(vec![1.0, 9.0], TwoDLas::new(vec![], None));
        assert_eq!(gittins.index(0.0), 0.5);
        assert_eq!(gittins.index(1.0), 1.0 / 8.0);
        assert_eq!(
            gittins.index(5.0),
            1.0 / 8.0,
            "between samples, that of the last one"
        );
        assert_eq!(gittins.index(9.0), 0.0);
    }

    #[test]
    fn what_is_learnt_of_past_jobs_counts_from_then_on() {
        let mut gittins = Gittins::new(vec![1.0, 9.0], TwoDLas::new(vec![], None));
        gittins.learn(&[]);
        assert_eq!(
            gittins.index(0.0),
            0.5,
            "nothing learnt is nothing forgotten"
        );
        gittins.learn(&[4.0, f64::NAN, -1.0]);
        assert_eq!((gittins.index(0.0), gittins.index(2.0)), (0.25, 0.25));
        assert_eq!(gittins.index(4.0), 0.0);
    }
}
