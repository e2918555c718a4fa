//! What operators ask for: jobs that are to leave their devices, or to come back, all at once.
//!
//! A request is answered when every job has arrived or cannot, or when the operator's time is up;
//! the jobs go on moving then.

use control::{ControlError, ErrorCode, JobMoved, MoveOutcome, Moved, Moves, Reply, exact_bytes};
use policy::TenantId;
use policy::residency::Standing;
use serde_json::Value;

use super::{ResidencyStatus, State};
use crate::control_server::Peer;
use crate::serve::Arbiter;

/// How long a move may take where the operator does not say.
const PATIENCE_NS: u64 = 120_000_000_000;
/// Requests that wait at a time; the sockets' own bound is near.
const MOST: usize = 32;

/// A request that waits for its jobs.
#[derive(Debug)]
pub struct MoveRequest {
    connection: u64,
    jobs: Vec<(TenantId, bool)>,
    began_ns: u64,
    deadline_ns: u64,
    /// The answer in the end.
    moved: Vec<JobMoved>,
}

impl Arbiter {
    /// Begins to move jobs; the answer comes when they have arrived.
    pub(crate) fn begin_move(
        &mut self,
        connection: u64,
        moves: &Moves,
        peer: Peer,
    ) -> Result<(), ControlError> {
        let invalid = |message: String| ControlError::new(ErrorCode::Invalid, message);
        let both: Vec<(&String, bool)> = moves
            .evict
            .iter()
            .map(|name| (name, true))
            .chain(moves.restore.iter().map(|name| (name, false)))
            .collect();
        if both.is_empty() {
            return Err(invalid("no job to move".into()).with_hint("name one"));
        }
        if self.move_requests.len() >= MOST {
            let message = format!("{MOST} requests to move jobs are under way");
            return Err(ControlError::new(ErrorCode::Refused, message)
                .with_hint("try again when one of them has ended"));
        }
        let mut jobs: Vec<(TenantId, bool)> = Vec::new();
        for (name, evict) in &both {
            let tenant = self.tenant_of(name, peer)?;
            if jobs.iter().any(|(id, _)| *id == tenant.id) {
                return Err(invalid(format!("job `{name}` is named twice"))
                    .with_hint("name every job once"));
            }
            if !tenant.spec.evictable() {
                let message = format!("job `{name}` stays on its devices: it is not evictable");
                return Err(ControlError::new(ErrorCode::Refused, message).with_hint(
                    "start it with `sublet run --evictable`, or with evictable = true in the quota file",
                ));
            }
            jobs.push((tenant.id, *evict));
        }
        let now_ns = self.clock.mono_ns();
        let patience_ns = match moves.deadline_ms {
            0 => PATIENCE_NS,
            ms => ms.saturating_mul(1_000_000),
        };
        let deadline_ns = now_ns.saturating_add(patience_ns);
        for (id, evict) in &jobs {
            if let Some(tenant) = self.ledger.get_mut(*id) {
                tenant.spec.evicted = *evict;
            }
            for scheduler in self.schedulers.iter_mut() {
                if scheduler.residency_status(*id).is_some() {
                    scheduler.call(now_ns, *id, !*evict);
                }
            }
        }
        self.survey_residency(now_ns);
        self.publish_terms();
        self.persistence.mark_old();
        self.control.wait_until(connection, deadline_ns);
        let moved = both
            .iter()
            .map(|(name, evicted)| JobMoved {
                job: (*name).clone(),
                evicted: *evicted,
                ..JobMoved::default()
            })
            .collect();
        self.move_requests.push(MoveRequest {
            connection,
            jobs,
            began_ns: now_ns,
            deadline_ns,
            moved,
        });
        Ok(())
    }

    /// Answers the requests whose jobs have arrived, or whose time is up. Returns when the next
    /// one's is.
    pub(crate) fn step_moves(&mut self, now_ns: u64) -> Option<u64> {
        let mut at = 0;
        while at < self.move_requests.len() {
            let mut request = self.move_requests.swap_remove(at);
            let over = now_ns >= request.deadline_ns;
            let mut waiting = false;
            for (at, (id, evict)) in request.jobs.iter().enumerate() {
                // PANIC: one for each job.
                let reported = &mut request.moved[at];
                if reported.outcome == MoveOutcome::Unknown {
                    self.see_to(*id, *evict, (request.began_ns, over), reported);
                }
                waiting |= reported.outcome == MoveOutcome::Unknown;
            }
            if waiting {
                self.move_requests.push(request);
                let last = self.move_requests.len() - 1;
                self.move_requests.swap(at, last);
                at += 1;
                continue;
            }
            self.finish_move(request, now_ns);
        }
        self.move_requests
            .iter()
            .map(|request| request.deadline_ns)
            .min()
    }

    /// What has become of one job, once that is known or the time is up.
    fn see_to(
        &mut self,
        id: TenantId,
        evict: bool,
        (began_ns, over): (u64, bool),
        reported: &mut JobMoved,
    ) {
        if self.ledger.get(id).is_none() {
            reported.outcome = MoveOutcome::Failed;
            reported.reason = "the job has ended".into();
            return;
        }
        let all: Vec<ResidencyStatus> = self
            .schedulers
            .iter()
            .filter_map(|scheduler| scheduler.residency_status(id))
            .collect();
        reported.outcome = outcome(&all, evict, over);
        if reported.outcome == MoveOutcome::Unknown {
            return;
        }
        let sum = |of: fn(&ResidencyStatus) -> u64| all.iter().map(of).fold(0, u64::saturating_add);
        let since = |ns: u64| ns.saturating_sub(began_ns);
        let last = |of: fn(&ResidencyStatus) -> u64| all.iter().map(of).max().unwrap_or(0);
        reported.evictable_bytes = sum(|one| one.evictable_bytes);
        reported.copied_bytes = sum(|one| one.figures.copied_bytes);
        reported.elapsed_ns = since(last(|one| one.figures.ended_ns));
        reported.drain_ns = since(last(|one| one.figures.drained_ns));
        reported.moving_ns =
            last(|one| one.figures.ended_ns.saturating_sub(one.figures.drained_ns));
        if reported.outcome == MoveOutcome::Done {
            return;
        }
        reported.reason = all
            .iter()
            .map(|one| one.figures.reason.clone())
            .find(|reason| !reason.is_empty())
            .unwrap_or_else(|| match reported.outcome {
                MoveOutcome::Waiting => all.iter().map(waits_for).next().unwrap_or_default(),
                _ => "it has not arrived in time, and goes on".into(),
            });
        if evict && reported.outcome == MoveOutcome::Refused {
            // What cannot leave goes on where it is.
            if let Some(tenant) = self.ledger.get_mut(id) {
                tenant.spec.evicted = false;
            }
            self.publish_terms();
        }
    }

    fn finish_move(&mut self, request: MoveRequest, now_ns: u64) {
        for (job, (id, _)) in request.moved.iter().zip(&request.jobs) {
            if self.ledger.get(*id).is_none() {
                continue;
            }
            let (kind, verb) = if job.evicted {
                ("evicted", "evicted")
            } else {
                ("restored_bytes", "restored")
            };
            let fields = [
                ("outcome", Value::from(job.outcome.as_str())),
                ("evictable_bytes", Value::from(job.evictable_bytes)),
                ("copied_bytes", Value::from(job.copied_bytes)),
                ("elapsed_ns", Value::from(job.elapsed_ns)),
                ("reason", Value::from(job.reason.clone())),
            ];
            let message = if job.outcome == MoveOutcome::Done {
                format!(
                    "job `{}` is {verb} by hand: {} copied in {} ms",
                    job.job,
                    exact_bytes(job.copied_bytes),
                    job.elapsed_ns / 1_000_000
                )
            } else {
                format!("job `{}` is not {verb}: {}", job.job, job.reason)
            };
            self.journal.write(kind, &job.job, message, &fields);
        }
        let simulated = request.jobs.iter().all(|(id, _)| {
            self.ledger
                .get(*id)
                .is_none_or(|tenant| tenant.spec.simulated)
        });
        let ends = request.moved.iter().map(|job| job.elapsed_ns).max();
        let reply = Reply::Moved(Moved {
            elapsed_ns: ends.unwrap_or(0),
            simulated,
            jobs: request.moved,
        });
        self.persistence.mark_old();
        self.control
            .reply(request.connection, &Ok(reply), now_ns, &self.poller);
    }
}

/// What has become of a job on all of its devices; `Unknown`: that will show.
fn outcome(all: &[ResidencyStatus], evict: bool, over: bool) -> MoveOutcome {
    let arrived = |one: &ResidencyStatus| {
        one.settled
            && if evict {
                one.resident_bytes == 0 || one.state == State::Evicted
            } else {
                one.state.is_usable() && one.state != State::Failed
            }
    };
    let refused = |one: &ResidencyStatus| one.settled && one.figures.failed;
    let cannot_come = |one: &ResidencyStatus| {
        matches!(one.standing, Standing::Parked | Standing::TooLarge { .. })
    };
    if all.iter().any(|one| one.state == State::Failed) {
        MoveOutcome::Failed
    } else if all.iter().any(refused) {
        MoveOutcome::Refused
    } else if all.iter().all(arrived) {
        MoveOutcome::Done
    } else if all.iter().any(cannot_come) || (over && all.iter().all(|one| one.settled)) {
        MoveOutcome::Waiting
    } else if over {
        MoveOutcome::TimedOut
    } else {
        MoveOutcome::Unknown
    }
}

fn waits_for(one: &ResidencyStatus) -> String {
    match one.standing {
        Standing::TooLarge {
            needed_bytes,
            available_bytes,
        } => format!(
            "it needs {} and the device has {} once the others have left",
            exact_bytes(needed_bytes),
            exact_bytes(available_bytes)
        ),
        Standing::Parked => "it is parked until there is space for it".into(),
        _ => "it waits for the end of another job's term, and comes in its turn".into(),
    }
}
