//! Requests that wait for an instance, in the order in which they came, and what became of all.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use tokio::sync::oneshot;

use super::Shared;
use super::figures::Figures;
use super::fleet::{End, Fleet, Given};

/// See the module's documentation.
pub struct Gate {
    /// The instances.
    pub fleet: Fleet,
    /// What became of requests.
    pub figures: Figures,
    line: VecDeque<Waiter>,
}

struct Waiter {
    /// When its request was here.
    came_s: f64,
    /// It has been at this one.
    not: Option<usize>,
    answer: oneshot::Sender<Option<Given>>,
}

impl Gate {
    /// Nobody waits.
    pub fn new(fleet: Fleet) -> Self {
        Self {
            figures: Figures::new(fleet.terms().sla),
            fleet,
            line: VecDeque::new(),
        }
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        let is_there = |waiter: &&Waiter| !waiter.answer.is_closed();
        self.line.iter().filter(is_there).count()
    }

    /// Looks at the load, and gives out what there is.
    pub fn decide(&mut self, now_s: f64) {
        self.line.retain(|waiter| !waiter.answer.is_closed());
        let waiting = self.line.len();
        self.fleet.decide(now_s, waiting);
        self.pass(now_s);
    }

    /// Gives instances to those that wait, the first ones first.
    pub fn pass(&mut self, now_s: f64) {
        let terms = *self.fleet.terms();
        while let Some(waiter) = self.line.front() {
            let is_late = terms.prune && now_s - waiter.came_s > terms.sla.within_s;
            let answer = match (waiter.answer.is_closed(), is_late) {
                (true, _) => None,
                (false, true) => Some(None),
                (false, false) => match self.fleet.give(now_s, waiter.not) {
                    None => return,
                    given => Some(given),
                },
            };
            let Some(waiter) = self.line.pop_front() else {
                return;
            };
            if let Some(answer) = answer
                && let Err(Some(given)) = waiter.answer.send(answer)
            {
                self.fleet.release(now_s, given, End::Nothing);
            }
        }
    }
}

/// A request that was counted; when it is dropped, it has ended.
pub struct Asked {
    shared: Arc<Shared>,
    /// When it was here.
    pub came_s: f64,
    service_s: Option<f64>,
    is_counted: bool,
}

impl Asked {
    /// A request is here, whole.
    pub fn new(shared: &Arc<Shared>) -> Self {
        let now_s = shared.now_s();
        let mut gate = shared.gate.lock();
        gate.fleet.request(now_s);
        gate.figures.counts.requests += 1;
        Self {
            shared: Arc::clone(shared),
            came_s: now_s,
            service_s: None,
            is_counted: false,
        }
    }

    /// An instance has answered it.
    pub fn answered(mut self, service_s: Option<f64>) {
        let now_s = self.shared.now_s();
        (self.service_s, self.is_counted) = (service_s, true);
        let took_s = now_s - self.came_s;
        self.shared.gate.lock().figures.answered(now_s, took_s);
    }

    /// It was refused for having waited.
    pub fn pruned(mut self) {
        self.is_counted = true;
        let now_s = self.shared.now_s();
        self.shared.gate.lock().figures.pruned(now_s);
    }

    /// No instance answered it.
    pub fn failed(mut self) {
        self.is_counted = true;
        let now_s = self.shared.now_s();
        self.shared.gate.lock().figures.failed(now_s);
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let now_s = self.shared.now_s();
        let mut gate = self.shared.gate.lock();
        gate.fleet.ended(now_s, self.service_s);
        gate.figures.counts.left += u64::from(!self.is_counted);
    }
}

/// A request's place at an instance. When it is dropped, who asked has gone.
pub struct Place {
    shared: Weak<Shared>,
    given: Option<Given>,
    /// Which instance.
    pub at: usize,
}

impl Place {
    /// Waits for one; `None`: it has waited too long by the agreement. `not` is where it was.
    pub async fn wait(shared: &Arc<Shared>, came_s: f64, not: Option<usize>) -> Option<Self> {
        let receiver = {
            let (answer, receiver) = oneshot::channel();
            let now_s = shared.now_s();
            let mut gate = shared.gate.lock();
            let waiter = Waiter {
                came_s,
                not,
                answer,
            };
            match not {
                // It has waited once.
                Some(_) => gate.line.push_front(waiter),
                None => gate.line.push_back(waiter),
            }
            if gate.fleet.wanted().in_use == 0 {
                gate.decide(now_s);
            } else {
                gate.pass(now_s);
            }
            receiver
        };
        let waiting = Waiting {
            shared: Arc::downgrade(shared),
            receiver,
        };
        waiting.await
    }

    /// It is over, one way or the other; the time of service, where it is one.
    pub fn end(mut self, end: End) -> Option<f64> {
        let given = self.given.take()?;
        free(&self.shared, given, end)
    }
}

fn free(shared: &Weak<Shared>, given: Given, end: End) -> Option<f64> {
    let shared = shared.upgrade()?;
    let now_s = shared.now_s();
    let mut gate = shared.gate.lock();
    let service_s = gate.fleet.release(now_s, given, end);
    gate.pass(now_s);
    service_s
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(given) = self.given.take() {
            free(&self.shared, given, End::Nothing);
        }
    }
}

/// A place that was given out and not taken is given back.
struct Waiting {
    shared: Weak<Shared>,
    receiver: oneshot::Receiver<Option<Given>>,
}

impl Future for Waiting {
    type Output = Option<Place>;

    fn poll(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Self::Output> {
        let receiver = std::pin::Pin::new(&mut self.receiver);
        receiver.poll(context).map(|given| {
            let given = given.ok().flatten()?;
            Some(Place {
                shared: Weak::clone(&self.shared),
                given: Some(given),
                at: given.at,
            })
        })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // Nothing comes from here on; what has come already is not lost.
        self.receiver.close();
        if let Ok(Some(given)) = self.receiver.try_recv() {
            free(&self.shared, given, End::Nothing);
        }
    }
}
