//! What operators ask for: jobs that are to leave their devices, or to come back, all at once.
//!
//! A request is answered when every job has arrived or cannot, or when the operator's time is up;
//! the jobs go on moving then.

use control::{ControlError, ErrorCode, JobMoved, MoveOutcome, Moved, Moves, Reply, exact_bytes};
use policy::TenantId;
use policy::residency::Standing;
use serde_json::Value;

use crate::journal::About;
use crate::residency::{MAX_MOVE_REQUESTS, MoveRequest, ResidencyStatus, State};
use crate::serve::Arbiter;
use crate::who::Peer;

/// Jobs that are woken by one request.
const MOST_WOKEN: usize = 256;

impl Arbiter {
    /// Begins to move jobs; the answer comes when they have arrived.
    pub(crate) fn begin_move(
        &mut self,
        number: u64,
        moves: &Moves,
        peer: &Peer,
    ) -> Result<(), ControlError> {
        let invalid = |message: String| ControlError::new(ErrorCode::Invalid, message);
        let both: Vec<(&String, bool)> = moves
            .evict
            .iter()
            .map(|name| (name, true))
            .chain(moves.restore.iter().map(|name| (name, false)))
            .collect();
        if !moves.wake.is_empty() {
            if !both.is_empty() {
                return Err(invalid("`wake` with `evict` or `restore`".into())
                    .with_hint("ask for it by itself: it is answered at once"));
            }
            return self.wake_jobs(number, &moves.wake, peer);
        }
        if both.is_empty() {
            return Err(invalid("no job to move".into()).with_hint("name one"));
        }
        if self.moves.is_full() {
            let message = format!("{MAX_MOVE_REQUESTS} requests to move jobs are under way");
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
            if !*evict && tenant.turn.is_away {
                let message = format!(
                    "job `{name}` is away because another job of its group has the turn, or had it last"
                );
                return Err(ControlError::new(ErrorCode::Refused, message)
                    .with_hint("it comes back with `sublet acquire`"));
            }
            jobs.push((tenant.id, *evict));
        }
        let now_ns = self.clock.mono_ns();
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
        let named = jobs.into_iter().zip(both);
        let named = named.map(|((id, evict), (name, _))| (id, name.clone(), evict));
        let request = MoveRequest::new(number, named, now_ns, moves.deadline_ms);
        self.moves.wait(request);
        Ok(())
    }

    /// Jobs will be used soon. What is wrong with one of them holds up no other.
    fn wake_jobs(
        &mut self,
        number: u64,
        names: &[String],
        peer: &Peer,
    ) -> Result<(), ControlError> {
        if names.len() > MOST_WOKEN {
            let message = format!("{} jobs to wake, and {MOST_WOKEN} at a time", names.len());
            return Err(ControlError::new(ErrorCode::Invalid, message).with_hint("name fewer"));
        }
        let now_ns = self.clock.mono_ns();
        let mut jobs = Vec::new();
        for name in names {
            let mut job = JobMoved {
                job: name.chars().take(control::NAME_MAX_BYTES).collect(),
                ..JobMoved::default()
            };
            match self.woken(now_ns, name, peer) {
                Ok((outcome, evictable_bytes, reason)) => {
                    (job.outcome, job.evictable_bytes, job.reason) =
                        (outcome, evictable_bytes, reason);
                }
                Err(error) => {
                    (job.outcome, job.reason) = (MoveOutcome::Failed, error.to_string());
                }
            }
            jobs.push(job);
        }
        let reply = Reply::Moved(Moved {
            jobs,
            ..Moved::default()
        });
        self.reply(number, Ok(reply));
        Ok(())
    }

    fn woken(
        &mut self,
        now_ns: u64,
        name: &str,
        peer: &Peer,
    ) -> Result<(MoveOutcome, u64, String), ControlError> {
        let tenant = self.tenant_of(name, peer)?;
        let refused = |reason: &str| Ok((MoveOutcome::Refused, 0, reason.to_owned()));
        if tenant.spec.evicted {
            return refused("it was evicted by hand: `sublet restore` brings it back");
        }
        if tenant.turn.is_away {
            return refused("another job of its group has the turn, or had it last");
        }
        let id = tenant.id;
        for scheduler in self.schedulers.iter_mut() {
            scheduler.wake(now_ns, id);
        }
        let all = self.schedulers.iter();
        let all: Vec<ResidencyStatus> = all.filter_map(|s| s.residency_status(id)).collect();
        let bytes = all.iter().map(|one| one.evictable_bytes);
        let evictable_bytes = bytes.fold(0, u64::saturating_add);
        if all.iter().any(|one| one.state == State::Failed) {
            return Ok((MoveOutcome::Failed, evictable_bytes, String::new()));
        }
        if all.iter().all(|one| one.settled && one.state.is_usable()) {
            return Ok((MoveOutcome::Done, evictable_bytes, String::new()));
        }
        let failed = all.iter().find(|one| one.figures.failed);
        let reason = failed.map_or_else(
            || all.iter().map(waits_for).next().unwrap_or_default(),
            |one| one.figures.reason.clone(),
        );
        Ok((MoveOutcome::Waiting, evictable_bytes, reason))
    }

    /// Answers the requests whose jobs have arrived, or whose time is up. Returns when the next
    /// one's is.
    pub(crate) fn step_moves(&mut self, now_ns: u64) -> Option<u64> {
        for mut request in self.moves.take() {
            let (began_ns, over) = (request.began_ns(), request.is_over(now_ns));
            let is_known = request.look(|id, job| self.see_to(id, (began_ns, over), job));
            if is_known {
                self.finish_move(request);
            } else {
                self.moves.wait(request);
            }
        }
        self.moves.due_ns()
    }

    /// What has become of one job, once that is known or the time is up.
    fn see_to(&mut self, id: TenantId, (began_ns, over): (u64, bool), reported: &mut JobMoved) {
        let evict = reported.evicted;
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

    fn finish_move(&mut self, request: MoveRequest) {
        for (id, job) in request.moved() {
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
            let about = About::job(&job.job, id.0);
            self.journal.write(kind, about, message, &fields);
        }
        let simulated = request.moved().iter().all(|(id, _)| {
            self.ledger
                .get(*id)
                .is_none_or(|tenant| tenant.spec.simulated)
        });
        let ends = request.moved().iter().map(|(_, job)| job.elapsed_ns);
        let elapsed_ns = ends.max().unwrap_or(0);
        let number = request.number();
        let reply = Reply::Moved(Moved {
            elapsed_ns,
            simulated,
            jobs: request.into_answer(),
        });
        self.persistence.mark_old();
        self.reply(number, Ok(reply));
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
