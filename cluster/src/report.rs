//! What a run was like, in numbers.

use serde::Serialize;

use crate::sim::{Fate, Outcome};

/// Numbers over the jobs that completed, unless they say otherwise. Times are seconds of virtual
/// time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Jobs of the trace.
    pub jobs: usize,
    /// Jobs that completed.
    pub completed: usize,
    /// Jobs refused by the admission.
    pub rejected: usize,
    /// GPUs of the cluster.
    pub gpus: u32,
    /// Completion time, arrival to end: mean.
    pub jct_mean_s: f64,
    /// Its median.
    pub jct_median_s: f64,
    /// Its 99th percentile.
    pub jct_p99_s: f64,
    /// Mean completion time of jobs without a deadline.
    pub best_effort_jct_mean_s: f64,
    /// First arrival to last end.
    pub makespan_s: f64,
    /// Mean time without GPUs.
    pub wait_mean_s: f64,
    /// Of it: while enough GPUs were free, but not where the placer wants them.
    pub wait_fragmentation_s: f64,
    /// Of it: because others were before it.
    pub wait_fairness_s: f64,
    /// GPU time held, by one job or by two, over GPU time there was until the last end.
    pub utilisation: f64,
    /// Finish-time fairness: mean.
    pub rho_mean: f64,
    /// Its 99th percentile.
    pub rho_p99: f64,
    /// Its greatest.
    pub rho_max: f64,
    /// Part of the jobs above 1.05, in per cent.
    pub rho_unfair_pct: f64,
    /// Jobs with a deadline.
    pub deadlines: usize,
    /// Of them, in per cent, those that kept it.
    pub deadlines_met_pct: f64,
    /// Running jobs stopped in favour of others.
    pub preemptions: u64,
    /// Times a job went on after it was stopped.
    pub resumes: u64,
    /// Running jobs moved.
    pub migrations: u64,
    /// Running jobs resized.
    pub resizes: u64,
    /// Pairs made.
    pub packs: u64,
    /// Pairs split because they did not pay.
    pub unpacks: u64,
    /// Decisions taken.
    pub decisions: u64,
}

/// Value below which this part of sorted values lies (nearest rank); 0 of nothing.
#[must_use]
pub fn percentile(sorted: &[f64], part: f64) -> f64 {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    if count > 0.0 { sum / count } else { 0.0 }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn jct(fate: &Fate) -> Option<f64> {
    fate.end_s.map(|end_s| end_s - fate.arrival_s)
}

/// Completion times, sorted.
#[must_use]
pub fn completion_times(outcome: &Outcome) -> Vec<f64> {
    sorted(outcome.fates.iter().filter_map(jct))
}

impl Report {
    /// Of one run.
    #[must_use]
    pub fn of(outcome: &Outcome) -> Self {
        let fates = &outcome.fates;
        let done = || fates.iter().filter(|fate| fate.end_s.is_some());
        let jcts = completion_times(outcome);
        let rhos = sorted(done().map(|fate| fate.rho));
        let unfair = rhos.iter().filter(|rho| **rho > 1.05).count();
        let due = || fates.iter().filter(|fate| fate.deadline_s.is_some());
        let met = due().filter(|fate| fate.end_s.is_some() && fate.end_s <= fate.deadline_s);
        let percent = |part: usize, whole: usize| 100.0 * part as f64 / whole.max(1) as f64;
        let wait = mean(done().map(|fate| fate.waited_s));
        let fragmented = mean(done().map(|fate| fate.fragmented_s.min(fate.waited_s)));
        Self {
            jobs: fates.len(),
            completed: jcts.len(),
            rejected: fates.len() - jcts.len(),
            gpus: outcome.gpus,
            jct_mean_s: mean(jcts.iter().copied()),
            jct_median_s: percentile(&jcts, 0.5),
            jct_p99_s: percentile(&jcts, 0.99),
            best_effort_jct_mean_s: mean(done().filter(|fate| fate.best_effort).filter_map(jct)),
            makespan_s: outcome.makespan_s,
            wait_mean_s: wait,
            wait_fragmentation_s: fragmented,
            wait_fairness_s: wait - fragmented,
            utilisation: outcome.held_gpu_s
                / (f64::from(outcome.gpus) * outcome.makespan_s).max(1e-9),
            rho_mean: mean(rhos.iter().copied()),
            rho_p99: percentile(&rhos, 0.99),
            rho_max: rhos.last().copied().unwrap_or(0.0),
            rho_unfair_pct: percent(unfair, rhos.len()),
            deadlines: due().count(),
            deadlines_met_pct: percent(met.count(), due().count()),
            preemptions: outcome.preemptions,
            resumes: outcome.resumes,
            migrations: outcome.migrations,
            resizes: outcome.resizes,
            packs: outcome.packs,
            unpacks: outcome.unpacks,
            decisions: outcome.decisions,
        }
    }
}
