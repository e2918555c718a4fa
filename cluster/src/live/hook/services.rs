//! What past jobs were given: the GPU time of jobs that are done, for the Gittins index.
//!
//! Jobs that are over are forgotten one day, and who submits many short ones would fill any list of
//! the latest. So this is a list of its own: of a user with most entries the oldest makes way, what
//! is too old goes, and enough to decide by always stays.

use std::collections::BTreeMap;

use super::Hook;
use crate::live::adapt::LEAST_PAST_JOBS;
use crate::live::records::Service;

/// Past jobs that are remembered at most.
const KEPT: usize = 1024;
/// For so long, in seconds of the cluster's clock: 180 days.
const KEPT_S: f64 = 180.0 * 86_400.0;
/// A service beyond this, in GPU-seconds, is a clock that was wrong: 64 GPUs for ten years.
const MOST_GPU_S: f64 = 64.0 * 10.0 * 365.0 * 86_400.0;

impl Hook {
    /// A job is done: what it was given is remembered.
    pub(super) fn keep_service(&mut self, id: u64) {
        let Some(record) = self.jobs.get(&id) else {
            return;
        };
        let gpu_s = record.gpu_s;
        if !(gpu_s > 0.0 && gpu_s <= MOST_GPU_S) {
            return;
        }
        let service = Service {
            job: id,
            user: record.submission.user.clone(),
            gpu_s,
            ended_s: self.now_s,
        };
        self.changes.services.push(service.clone());
        self.services.insert(id, service);
        self.forget_services();
        self.unlearnt.services = true;
    }

    /// Makes space, and drops what is too old.
    pub(super) fn forget_services(&mut self) {
        while self.services.len() > KEPT {
            let mut by_user: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
            for (job, service) in &self.services {
                // Jobs are numbered in the order in which they came: the first is the oldest.
                by_user.entry(&service.user).or_insert((0, *job)).0 += 1;
            }
            let most = by_user.values().max_by_key(|(count, _)| *count);
            let Some(oldest) = most.map(|(_, job)| *job) else {
                return;
            };
            self.drop_service(oldest);
        }
        let from_s = self.now_s - KEPT_S;
        let mut old: Vec<(f64, u64)> = self
            .services
            .values()
            .filter(|service| service.ended_s < from_s)
            .map(|service| (service.ended_s, service.job))
            .collect();
        old.sort_by(|a, b| a.0.total_cmp(&b.0));
        let most = self.services.len().saturating_sub(LEAST_PAST_JOBS);
        for (_, job) in old.into_iter().take(most) {
            self.drop_service(job);
        }
    }

    fn drop_service(&mut self, job: u64) {
        self.services.remove(&job);
        self.changes.services.retain(|service| service.job != job);
        self.changes.dropped_services.push(job);
    }

    /// GPU-seconds of past jobs.
    pub(super) fn past_gpu_s(&self) -> Vec<f64> {
        self.services.values().map(|one| one.gpu_s).collect()
    }
}
