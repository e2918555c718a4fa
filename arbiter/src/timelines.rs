//! What is reported of a device's timeline: a bounded part of its ring, and what its jobs are in
//! the middle of. Everybody who may list the jobs may see it.

use std::collections::BTreeSet;

use control::{ControlError, ErrorCode, TIMELINE_MOST, Timeline, TimelineJob};
use policy::TenantId;

use crate::convert;
use crate::serve::Arbiter;

/// Jobs in one answer at most.
const JOBS_MOST: usize = 256;

impl Arbiter {
    pub(crate) fn timeline(
        &self,
        device: u32,
        since_seq: u64,
        limit: u32,
    ) -> Result<Timeline, ControlError> {
        let index = usize::try_from(device).unwrap_or(usize::MAX);
        let Some(scheduler) = self.schedulers.get(index) else {
            let known = self.schedulers.len();
            let message = format!("no device has the index {device}; {known} are known");
            return Err(ControlError::new(ErrorCode::NoSuchDevice, message)
                .with_hint("see `sublet ps` for the devices"));
        };
        let ring = scheduler.timeline();
        let limit = match limit {
            0 => TIMELINE_MOST,
            limit => limit.min(TIMELINE_MOST),
        };
        let (from_seq, spans) = ring.since(since_seq, limit as usize);
        let spans: Vec<_> = spans.map(convert::span).collect();
        let mut jobs: Vec<TimelineJob> = scheduler
            .open_spans()
            .take(JOBS_MOST)
            .map(|(id, open)| TimelineJob {
                id: id.0,
                name: self.name_of(id.0),
                device_ns: open.device_ns,
                pending_ns: open.pending_ns,
                open: convert::open_spans(&open.spans),
            })
            .collect();
        let there: BTreeSet<u64> = jobs.iter().map(|job| job.id).collect();
        let gone: BTreeSet<u64> = spans.iter().map(|span| span.job_id).collect();
        let gone = gone.difference(&there).filter(|id| **id != 0);
        jobs.extend(gone.take(JOBS_MOST).map(|id| TimelineJob {
            id: *id,
            name: self.name_of(*id),
            ..TimelineJob::default()
        }));
        Ok(Timeline {
            device,
            ring: ring.id(),
            first_seq: ring.first(),
            last_seq: ring.last(),
            from_seq,
            spans,
            jobs,
            now_ns: self.clock.mono_ns(),
        })
    }

    /// Empty where it ended long ago.
    fn name_of(&self, id: u64) -> String {
        let name = self
            .ledger
            .get(TenantId(id))
            .map(|tenant| &tenant.spec.name);
        let ended = || {
            self.ended
                .iter()
                .find(|job| job.id == id)
                .map(|job| &job.name)
        };
        name.or_else(ended).cloned().unwrap_or_default()
    }
}
