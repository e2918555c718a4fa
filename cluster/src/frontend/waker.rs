//! What the node's arbiter says of the instances, and what it is asked: to have those back that
//! will be needed soon, and to keep those a while that are needed and have nothing to do.
//!
//! A thread of its own asks, so that a slow arbiter holds up no request. Without an answer nothing
//! is known, and every instance is used as if it were here: its first launch brings its memory
//! back, as that of any evicted job.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control::{Client, JobStatus, MoveOutcome, Moves, ResidenceState};

use super::Shared;
use super::fleet::Memory;

/// Connects to the arbiter of the node; an error is a sentence.
pub type Reach = Box<dyn FnMut() -> Result<Client, String> + Send>;

/// Between two looks at all instances.
const LOOK: Duration = Duration::from_secs(1);
/// Between two questions about those that are wanted.
const ASK: Duration = Duration::from_millis(100);
/// The same while one of them is on its way.
const SOON: Duration = Duration::from_millis(20);
/// After an arbiter that did not answer.
const GONE: Duration = Duration::from_secs(1);

/// What was heard last.
#[derive(Default)]
pub struct Said {
    /// Whether the arbiter answers; `None`: it was not asked yet.
    pub answers: Option<bool>,
    /// What it said last of each instance that it cannot bring back, by place.
    pub reasons: std::collections::BTreeMap<usize, String>,
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
            for at in 0..gate.fleet.instances().len() {
                let name = &gate.fleet.instances()[at].name;
                let job = jobs.iter().find(|job| job.name == *name);
                let after_ns = job.and_then(|job| job.evict_after_ns);
                // CAST: a length of time.
                let after_s = after_ns.map(|ns| ns as f64 / 1e9);
                gate.fleet.leaves_after(at, after_s);
                let memory = job.map(memory_of).unwrap_or_default();
                gate.fleet.hear(now_s, at, memory);
            }
            gate.pass(now_s);
        }
        let (places, names) = {
            let now_s = self.shared.now_s();
            let mut gate = self.shared.gate.lock();
            let places = gate.fleet.to_wake(now_s);
            let known = |at: &usize| gate.fleet.instances()[*at].memory != Memory::Unknown;
            let places: Vec<usize> = places.into_iter().filter(known).collect();
            let name = |at: &usize| gate.fleet.instances()[*at].name.clone();
            let names: Vec<String> = places.iter().map(name).collect();
            (places, names)
        };
        if !places.is_empty() {
            let moves = Moves {
                wake: names,
                ..Moves::default()
            };
            let moved = client
                .move_jobs(&moves)
                .map_err(|error| error.to_string())?;
            let now_s = self.shared.now_s();
            let mut gate = self.shared.gate.lock();
            let mut said = self.shared.waker.lock();
            for (at, job) in places.into_iter().zip(moved.jobs) {
                let memory = match job.outcome {
                    MoveOutcome::Done => Some(Memory::Resident),
                    MoveOutcome::Waiting => Some(Memory::Away),
                    MoveOutcome::Refused => Some(Memory::Held),
                    // Not ours, or gone: it is used as it is.
                    _ => None,
                };
                match job.reason.is_empty() {
                    true => said.reasons.remove(&at),
                    false => said.reasons.insert(at, job.reason),
                };
                if let Some(memory) = memory {
                    gate.fleet.hear(now_s, at, memory);
                }
            }
            gate.pass(now_s);
        }
        self.client = Some(client);
        Ok(())
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
