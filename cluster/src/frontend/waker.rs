//! What the node's arbiter says of the instances, and what it is asked: to have those back that
//! will be needed soon, and to keep those a while that are needed and have nothing to do.
//!
//! A thread of its own asks, so that a slow arbiter holds up no request. Without an answer nothing
//! is known, and every instance is used as if it were here: its first launch brings its memory
//! back, as that of any evicted job.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control::{Client, JobMoved, JobStatus, MoveOutcome, Moves, ResidenceState};

use super::Shared;
use super::fleet::{Fleet, Memory};

/// Connects to the arbiter of the node; an error is a sentence.
pub type Reach = Box<dyn FnMut() -> Result<Client, String> + Send>;

/// Between two looks at all instances.
const LOOK: Duration = Duration::from_secs(1);
/// Between two questions about those that are wanted.
const ASK: Duration = Duration::from_millis(100);
/// The same while one of them is on its way.
const SOON: Duration = Duration::from_millis(20);
/// After the arbiter has said that an instance may not come back, such as one whose group has given
/// its turn to another job.
const REFUSED_S: f64 = 15.0;
/// After an arbiter that did not answer.
const GONE: Duration = Duration::from_secs(1);

/// What was heard last.
#[derive(Default)]
pub struct Said {
    /// Whether the arbiter answers; `None`: it was not asked yet.
    pub answers: Option<bool>,
    /// What it said last of each instance that it cannot bring back, by place.
    pub reasons: BTreeMap<usize, String>,
    /// Those that may not come back, by place, and until when that is believed.
    refused_until_s: BTreeMap<usize, f64>,
}

/// The thread that asks.
pub struct Asking {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Asking {
    /// Ends it; a question that is under way is not waited for.
    pub fn stop(self) {
        drop(self.stop);
        if self.thread.is_finished() {
            let _ = self.thread.join();
        }
    }
}

/// Starts to ask.
///
/// # Errors
/// A thread cannot be started.
pub fn start(
    shared: Arc<Shared>,
    reach: Reach,
    tell: Arc<dyn Fn(&str) + Send + Sync>,
) -> io::Result<Asking> {
    let (stop, stopped) = channel::<()>();
    let thread = std::thread::Builder::new()
        .name("asks-arbiter".into())
        .spawn(move || {
            let mut waker = Waker {
                shared,
                reach,
                tell,
                client: None,
                looked: None,
            };
            let mut pause = Duration::ZERO;
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                pause = waker.round();
            }
        })?;
    Ok(Asking { stop, thread })
}

struct Waker {
    shared: Arc<Shared>,
    reach: Reach,
    tell: Arc<dyn Fn(&str) + Send + Sync>,
    client: Option<Client>,
    looked: Option<Instant>,
}

impl Waker {
    /// Asks what there is to ask; until the next time.
    fn round(&mut self) -> Duration {
        match self.ask() {
            Ok(()) => {
                self.heard(None);
                let now_s = self.shared.now_s();
                match self.shared.gate.lock().fleet.is_waiting_for_one(now_s) {
                    true => SOON,
                    false => ASK,
                }
            }
            Err(why) => {
                self.client = None;
                self.looked = None;
                self.heard(Some(&why));
                let mut gate = self.shared.gate.lock();
                let now_s = self.shared.now_s();
                for at in 0..gate.fleet.instances().len() {
                    gate.fleet.hear(now_s, at, Memory::Unknown);
                }
                gate.pass(now_s);
                GONE
            }
        }
    }

    /// Whether the arbiter answers; said where that has changed.
    fn heard(&self, why_not: Option<&str>) {
        let mut said = self.shared.waker.lock();
        let before = said.answers.replace(why_not.is_none());
        match (why_not, before) {
            (Some(why), None | Some(true)) => {
                said.reasons.clear();
                said.refused_until_s.clear();
                (self.tell)(&format!(
                    "the arbiter does not say where instances are, so none is brought back before \
                     a request reaches it: {why}"
                ));
            }
            (None, Some(false)) => (self.tell)("the arbiter says again where instances are"),
            _ => {}
        }
    }

    fn ask(&mut self) -> Result<(), String> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => (self.reach)()?,
        };
        if self.looked.is_none_or(|looked| looked.elapsed() >= LOOK) {
            let jobs = client.list().map_err(|error| error.to_string())?;
            self.looked = Some(Instant::now());
            let now_s = self.shared.now_s();
            let mut gate = self.shared.gate.lock();
            let mut said = self.shared.waker.lock();
            hear_jobs(&mut gate.fleet, &mut said, now_s, &jobs);
            gate.pass(now_s);
        }
        let asked = {
            let now_s = self.shared.now_s();
            let mut gate = self.shared.gate.lock();
            let mut places = gate.fleet.to_wake(now_s);
            places.retain(|at| gate.fleet.instances()[*at].memory != Memory::Unknown);
            let named = |at: usize| (at, gate.fleet.instances()[at].name.clone());
            places.into_iter().map(named).collect::<Vec<_>>()
        };
        if !asked.is_empty() {
            let moves = Moves {
                wake: asked.iter().map(|(_, name)| name.clone()).collect(),
                ..Moves::default()
            };
            let moved = client
                .move_jobs(&moves)
                .map_err(|error| error.to_string())?;
            let now_s = self.shared.now_s();
            let mut gate = self.shared.gate.lock();
            let mut said = self.shared.waker.lock();
            hear_moved(&mut gate.fleet, &mut said, now_s, &asked, &moved.jobs);
            gate.pass(now_s);
        }
        self.client = Some(client);
        Ok(())
    }
}

/// What the arbiter says of all jobs.
fn hear_jobs(fleet: &mut Fleet, said: &mut Said, now_s: f64, jobs: &[JobStatus]) {
    said.refused_until_s.retain(|_, until_s| now_s < *until_s);
    for at in 0..fleet.instances().len() {
        let name = &fleet.instances()[at].name;
        let job = jobs.iter().find(|job| job.name == *name);
        let after_ns = job.and_then(|job| job.evict_after_ns);
        // CAST: a length of time.
        let after_s = after_ns.map(|ns| ns as f64 / 1e9);
        fleet.leaves_after(at, after_s);
        let memory = job.map(memory_of).unwrap_or_default();
        if memory == Memory::Away && said.refused_until_s.contains_key(&at) {
            // Where it is says nothing of why it may not come.
            continue;
        }
        if memory != Memory::Away {
            said.reasons.remove(&at);
            said.refused_until_s.remove(&at);
        }
        fleet.hear(now_s, at, memory);
    }
}

/// What the arbiter answers of those that it was asked for, by place and name.
fn hear_moved(
    fleet: &mut Fleet,
    said: &mut Said,
    now_s: f64,
    asked: &[(usize, String)],
    jobs: &[JobMoved],
) {
    for (at, name) in asked {
        let Some(job) = jobs.iter().find(|job| job.job == *name) else {
            continue;
        };
        let memory = match job.outcome {
            MoveOutcome::Done => Memory::Resident,
            MoveOutcome::Waiting => Memory::Away,
            MoveOutcome::Refused => Memory::Held,
            // Not ours, or gone: it is used as it is.
            _ => fleet.instances()[*at].memory,
        };
        if memory == Memory::Held {
            said.refused_until_s.insert(*at, now_s + REFUSED_S);
        }
        match job.reason.is_empty() {
            true => said.reasons.remove(at),
            false => said.reasons.insert(*at, job.reason.clone()),
        };
        fleet.hear(now_s, *at, memory);
    }
}

fn memory_of(job: &JobStatus) -> Memory {
    if job.evicted || job.paused {
        return Memory::Held;
    }
    let state = job.residence.as_ref().map(|residence| residence.state);
    match state {
        None | Some(ResidenceState::Resident | ResidenceState::Partly) => Memory::Resident,
        Some(ResidenceState::Evicting | ResidenceState::Evicted | ResidenceState::Restoring) => {
            Memory::Away
        }
        Some(ResidenceState::Failed | ResidenceState::Unknown) => Memory::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::super::fleet::{Role, Terms};
    use super::*;

    fn fleet() -> Fleet {
        let terms = Terms {
            sla: policy::standbys::Sla {
                within_s: 1.0,
                level: 0.99,
                burst: 1.0,
            },
            frontends: 1,
            history_s: 60,
            concurrency: 1,
            least: 2,
            most: 2,
            prune: false,
        };
        let mut fleet = Fleet::new(terms, &["a".into(), "b".into()], 1);
        fleet.decide(0.0, 0);
        fleet
    }

    fn moved(job: &str, outcome: MoveOutcome, reason: &str) -> JobMoved {
        JobMoved {
            job: job.into(),
            outcome,
            reason: reason.into(),
            ..JobMoved::default()
        }
    }

    fn job(name: &str, state: ResidenceState) -> JobStatus {
        JobStatus {
            name: name.into(),
            residence: Some(Box::new(control::Residence {
                state,
                ..control::Residence::default()
            })),
            ..JobStatus::default()
        }
    }

    #[test]
    fn an_answer_is_that_of_the_job_that_it_names() {
        let (mut fleet, mut said) = (fleet(), Said::default());
        let asked = [(0, "a".to_owned()), (1, "b".to_owned())];
        let answers = [
            moved("b", MoveOutcome::Waiting, "no space"),
            moved("x", MoveOutcome::Refused, ""),
            moved("a", MoveOutcome::Done, ""),
        ];
        hear_moved(&mut fleet, &mut said, 1.0, &asked, &answers);
        let memory: Vec<Memory> = fleet.instances().iter().map(|one| one.memory).collect();
        assert_eq!(memory, [Memory::Resident, Memory::Away]);
        assert_eq!(said.reasons, BTreeMap::from([(1, "no space".to_owned())]));
        // It is here, so nothing is in its way.
        let here = [job("b", ResidenceState::Resident)];
        hear_jobs(&mut fleet, &mut said, 2.0, &here);
        assert_eq!(said.reasons, BTreeMap::new());
    }

    #[test]
    fn one_that_may_not_come_gets_no_request_for_being_away() {
        let (mut fleet, mut said) = (fleet(), Said::default());
        let away = [job("a", ResidenceState::Evicted)];
        let asked = [(0, "a".to_owned())];
        let refused = [moved("a", MoveOutcome::Refused, "another job has the turn")];
        hear_moved(&mut fleet, &mut said, 1.0, &asked, &refused);
        for now_s in [2.0, 3.0, 15.9] {
            hear_jobs(&mut fleet, &mut said, now_s, &away);
            assert_eq!(fleet.role(0, now_s), Role::Held, "{now_s}");
        }
        assert_eq!(said.reasons.len(), 1);
        // It may be otherwise by now, and is asked again.
        hear_jobs(&mut fleet, &mut said, 16.0, &away);
        assert_eq!(fleet.instances()[0].memory, Memory::Away);
        hear_moved(&mut fleet, &mut said, 17.0, &asked, &refused);
        hear_jobs(
            &mut fleet,
            &mut said,
            18.0,
            &[job("a", ResidenceState::Resident)],
        );
        assert_eq!(fleet.instances()[0].memory, Memory::Resident);
    }
}
