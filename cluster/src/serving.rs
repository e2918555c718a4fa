//! Requests to the instances of one service in virtual time: how many instances are ready, who
//! decides that, and whether responses come in time.
//!
//! An instance answers one request at a time. It is *cold* (no process), *standing by* (a process
//! whose memory is evicted to the host), *coming* (its memory returns, or it starts) or *resident*.
//! Frontends get equal parts of the requests and hold what they cannot pass on. A frontend that has
//! a request asks instances in use at random until one accepts, which is a random idle one; the
//! time of asking, far below that of a service, is not counted. Where all are busy it asks again
//! [`Setup::retry_s`] later, and when a response comes back to it.
//!
//! How many are in use is decided by [`Scaling`]: by each frontend from what it has seen itself
//! ([`policy::standbys`], Swayam), by a fixed number, or by a plan that knows what will come.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use policy::cluster::Random;
use policy::standbys::{Frontend, Sla, Wanted};

use crate::trace::Request;

/// Length of a window in which the agreement is checked, in seconds.
pub const WINDOW_S: f64 = 60.0;
/// A window with more than so many times the requests of the one before is a burst.
pub const BURST: f64 = 2.0;
/// Most instances: as many as a frontend looks at in a decision.
pub const MOST_INSTANCES: u32 = 10_000;

/// What does not depend on who decides.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Instances that there may be, 1 to [`MOST_INSTANCES`].
    pub instances: u32,
    /// Frontends, each with an equal part of the requests.
    pub frontends: u32,
    /// What was agreed.
    pub sla: Sla,
    /// Seconds until the memory of an instance that stands by is back.
    pub return_s: f64,
    /// Seconds until a cold instance can answer.
    pub start_s: f64,
    /// An instance that heard nothing for so many seconds gives its memory back.
    pub keep_s: f64,
    /// One that stands by for so many seconds ends; infinite: never.
    pub standby_s: f64,
    /// The first so many stand by in the beginning; the others are cold.
    pub warm: u32,
    /// Seconds of a frontend's history, of requests and of times of service.
    pub history_s: usize,
    /// Seconds between two decisions of a frontend.
    pub decide_s: f64,
    /// Seconds until a frontend asks busy instances again.
    pub retry_s: f64,
    /// A request that has waited longer than its response may take is dropped.
    pub prune: bool,
    /// Which frontend gets a request, and which instance.
    pub seed: u64,
}

/// Who decides how many instances are in use.
#[derive(Clone, PartialEq, Debug)]
pub enum Scaling {
    /// Each frontend, from its own requests.
    Predicted,
    /// So many, always resident.
    Fixed(u32),
    /// So many in each window, resident from its beginning to its end.
    Planned(Vec<u32>),
}

/// Why a run was refused.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ServingError {
    /// Not a number that a run can have.
    #[error("{what} is {value}; {expected}")]
    Range {
        /// Which.
        what: &'static str,
        /// What was given.
        value: f64,
        /// What would do.
        expected: &'static str,
    },
}

/// What happened in a window to the requests that came in it.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Window {
    /// How many came.
    pub requests: u32,
    /// How many were answered in time.
    pub in_time: u32,
    /// Most instances in use or coming at once.
    pub resident: u32,
}

/// What came out.
#[derive(Clone, PartialEq, Debug)]
pub struct Served {
    /// By time.
    pub windows: Vec<Window>,
    /// Level of the agreement.
    level: f64,
    /// Instance-seconds with memory on a device, coming ones included.
    pub resident_s: f64,
    /// Instance-seconds with memory on the host.
    pub standby_s: f64,
    /// Instances whose memory returned.
    pub returns: u64,
    /// Cold instances that were started.
    pub starts: u64,
    /// Requests that were dropped.
    pub dropped: u64,
    /// Times of response in seconds, of the requests that were answered, ascending.
    pub responses_s: Vec<f64>,
}

impl Served {
    fn is_met(&self, window: &Window) -> bool {
        f64::from(window.in_time) >= self.level * f64::from(window.requests) - 1e-9
    }

    /// Windows with requests.
    fn used(&self) -> impl Iterator<Item = (usize, &Window)> {
        let all = self.windows.iter().enumerate();
        all.filter(|(_, window)| window.requests > 0)
    }

    /// Whether more than [`BURST`] times as many came in this window as in the one before.
    #[must_use]
    pub fn is_burst(&self, at: usize) -> bool {
        let before = at.checked_sub(1).and_then(|at| self.windows.get(at));
        let now = self.windows.get(at).map_or(0, |window| window.requests);
        before.is_some_and(|before| f64::from(now) > BURST * f64::from(before.requests))
    }

    /// Windows, of those with requests, in which the agreement was kept, in percent.
    #[must_use]
    pub fn met_pct(&self) -> f64 {
        percent(self.used().map(|(_, window)| self.is_met(window)))
    }

    /// The same of the windows that are no bursts.
    #[must_use]
    pub fn met_without_bursts_pct(&self) -> f64 {
        let calm = self.used().filter(|(at, _)| !self.is_burst(*at));
        percent(calm.map(|(_, window)| self.is_met(window)))
    }

    /// Windows that were missed, by number from 0.
    #[must_use]
    pub fn missed(&self) -> Vec<usize> {
        let missed = self.used().filter(|(_, window)| !self.is_met(window));
        missed.map(|(at, _)| at).collect()
    }

    /// Requests that were answered in time, in percent.
    #[must_use]
    pub fn in_time_pct(&self) -> f64 {
        let sum = |of: fn(&Window) -> u32| self.windows.iter().map(|w| f64::from(of(w))).sum();
        let (all, in_time): (f64, f64) = (sum(|w| w.requests), sum(|w| w.in_time));
        100.0 * in_time / f64::max(all, 1.0)
    }
}

fn percent(each: impl Iterator<Item = bool>) -> f64 {
    let (mut all, mut true_ones) = (0.0, 0.0);
    for one in each {
        all += 1.0;
        true_ones += f64::from(u8::from(one));
    }
    if all > 0.0 {
        100.0 * true_ones / all
    } else {
        100.0
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum At {
    Cold,
    Standby,
    Coming,
    Idle,
    /// With a request of this frontend.
    Busy(usize),
}

struct Instance {
    at: At,
    /// Since when it is where it is.
    since_s: f64,
    /// When it was last used or asked to stay.
    heard_s: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// An instance is resident.
    Ready(usize),
    /// An instance has answered a request.
    Answered(usize, usize),
    /// A window begins.
    Window,
    /// A frontend decides.
    Decide(usize),
    /// A frontend asks again.
    Retry(usize),
}

/// Orders events by time, then by when they were planned.
#[derive(PartialEq)]
struct Planned {
    at_s: f64,
    number: u64,
    event: Event,
}

impl Eq for Planned {}

impl Ord for Planned {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at_s
            .total_cmp(&other.at_s)
            .then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

struct Door {
    frontend: Frontend,
    waiting: VecDeque<usize>,
    wanted: Wanted,
    retries: bool,
}

struct Run<'a> {
    setup: &'a Setup,
    scaling: &'a Scaling,
    requests: &'a [Request],
    instances: Vec<Instance>,
    doors: Vec<Door>,
    events: BinaryHeap<Reverse<Planned>>,
    planned: u64,
    random: Random,
    now_s: f64,
    /// Instances with memory on a device.
    resident: u32,
    /// Requests that are neither answered nor dropped.
    open: usize,
    served: Served,
}

/// Plays requests, which are ordered by arrival.
///
/// # Errors
/// [`ServingError`]: a number of the setup that is out of range.
pub fn serve(
    requests: &[Request],
    setup: &Setup,
    scaling: &Scaling,
) -> Result<Served, ServingError> {
    check(setup)?;
    let mut run = Run::new(requests, setup, scaling);
    run.begin();
    let mut next = 0;
    loop {
        let event_s = run.events.peek().map(|event| event.0.at_s);
        let arrival_s = requests.get(next).map(|request| request.arrival_s);
        match (event_s, arrival_s) {
            (None, None) => break,
            (event_s, Some(arrival_s)) if event_s.is_none_or(|at_s| arrival_s <= at_s) => {
                run.advance(arrival_s);
                run.arrive(next);
                next += 1;
            }
            (Some(at_s), arrival_s) => {
                // Decisions and windows go on as long as there is something to decide about.
                if arrival_s.is_none() && run.open == 0 {
                    break;
                }
                run.advance(at_s);
                if let Some(Reverse(planned)) = run.events.pop() {
                    run.happen(planned.event);
                }
            }
            (None, Some(_)) => break,
        }
    }
    Ok(run.end())
}

/// The least fixed number of instances with which at least so many windows are met, in percent;
/// `None` where [`Setup::instances`] are too few.
///
/// # Errors
/// As [`serve`].
pub fn least_fixed(
    requests: &[Request],
    setup: &Setup,
    met_pct: f64,
) -> Result<Option<u32>, ServingError> {
    let met = |n: u32| {
        let served = serve(requests, setup, &Scaling::Fixed(n))?;
        Ok(served.met_pct() >= met_pct - 1e-9)
    };
    let (mut few, mut many) = (1, setup.instances);
    while few < many {
        let middle = few + (many - few) / 2;
        if met(middle)? {
            many = middle;
        } else {
            few = middle + 1;
        }
    }
    Ok(met(many)?.then_some(many))
}

/// A plan that knows all requests and meets every window that all instances together would meet:
/// from as many as the work of each window needs, one more in each window that is missed, until
/// none is.
///
/// # Errors
/// As [`serve`].
pub fn clairvoyant(
    requests: &[Request],
    setup: &Setup,
) -> Result<(Vec<u32>, Served), ServingError> {
    let hopeless = serve(requests, setup, &Scaling::Fixed(setup.instances))?.missed();
    let last_s = requests.last().map_or(0.0, |request| request.arrival_s);
    let mut work = vec![0.0; (last_s / WINDOW_S) as usize + 1];
    for request in requests {
        work[(request.arrival_s / WINDOW_S) as usize] += request.service_s;
    }
    let mut plan: Vec<u32> = (work.iter())
        .map(|work| ((work / WINDOW_S).ceil() as u32).min(setup.instances))
        .collect();
    loop {
        let served = serve(requests, setup, &Scaling::Planned(plan.clone()))?;
        let mut missed = served.missed();
        missed.retain(|at| !hopeless.contains(at));
        let mut raised = false;
        for at in missed {
            // What comes at the end of a window is answered in the next.
            for window in [at, at + 1] {
                if let Some(n) = plan.get_mut(window).filter(|n| **n < setup.instances) {
                    *n += 1;
                    raised = true;
                }
            }
        }
        if !raised {
            return Ok((plan, served));
        }
    }
}

fn check(setup: &Setup) -> Result<(), ServingError> {
    let wrong = |what, value, expected| {
        Err(ServingError::Range {
            what,
            value,
            expected,
        })
    };
    for (what, value) in [
        ("the number of instances", setup.instances),
        ("the number of frontends", setup.frontends),
    ] {
        if !(1..=MOST_INSTANCES).contains(&value) {
            return wrong(what, f64::from(value), "1 to 10000 are expected");
        }
    }
    if !(2..=86_400).contains(&setup.history_s) {
        return wrong(
            "the history",
            setup.history_s as f64,
            "2 to 86400 seconds are expected",
        );
    }
    for (what, value, least) in [
        ("the time of response", setup.sla.within_s, 1e-6),
        ("the time of return", setup.return_s, 0.0),
        ("the time of a start", setup.start_s, 0.0),
        ("the time without a request", setup.keep_s, 0.0),
        ("the time between decisions", setup.decide_s, 1e-3),
        ("the time until it is asked again", setup.retry_s, 1e-3),
    ] {
        if !(least..=1e6).contains(&value) {
            let expected = match least {
                0.0 => "0 to 1000000 seconds are expected",
                least if least < 1e-4 => "0.000001 to 1000000 seconds are expected",
                _ => "0.001 to 1000000 seconds are expected",
            };
            return wrong(what, value, expected);
        }
    }
    if setup.standby_s.is_nan() || setup.standby_s < 0.0 {
        let what = "the time of standing by";
        return wrong(what, setup.standby_s, "at least 0 seconds are expected");
    }
    if !(setup.sla.level > 0.0 && setup.sla.level < 1.0) {
        let expected = "a part above 0 and below 1 is expected";
        return wrong("the part in time", setup.sla.level, expected);
    }
    if !(1.0..=100.0).contains(&setup.sla.burst) {
        return wrong("the burst", setup.sla.burst, "1 to 100 is expected");
    }
    Ok(())
}

impl<'a> Run<'a> {
    fn new(requests: &'a [Request], setup: &'a Setup, scaling: &'a Scaling) -> Self {
        let instance = |n: u32| Instance {
            at: if n < setup.warm {
                At::Standby
            } else {
                At::Cold
            },
            since_s: 0.0,
            heard_s: 0.0,
        };
        let door = || Door {
            frontend: Frontend::new(setup.frontends, setup.history_s),
            waiting: VecDeque::new(),
            wanted: Wanted {
                in_use: 0,
                ready: 0,
            },
            retries: false,
        };
        Self {
            setup,
            scaling,
            requests,
            instances: (0..setup.instances).map(instance).collect(),
            doors: (0..setup.frontends).map(|_| door()).collect(),
            events: BinaryHeap::new(),
            planned: 0,
            random: Random::new(setup.seed),
            now_s: 0.0,
            resident: 0,
            open: 0,
            served: Served {
                windows: Vec::new(),
                level: setup.sla.level,
                resident_s: 0.0,
                standby_s: 0.0,
                returns: 0,
                starts: 0,
                dropped: 0,
                responses_s: Vec::new(),
            },
        }
    }

    fn plan(&mut self, at_s: f64, event: Event) {
        let number = self.planned;
        self.planned += 1;
        self.events.push(Reverse(Planned {
            at_s,
            number,
            event,
        }));
    }

    fn begin(&mut self) {
        match self.scaling {
            Scaling::Predicted => {
                for door in 0..self.doors.len() {
                    let part = door as f64 / self.doors.len() as f64;
                    self.plan(part * self.setup.decide_s, Event::Decide(door));
                }
            }
            Scaling::Fixed(n) => self.use_known(*n),
            Scaling::Planned(_) => self.plan(0.0, Event::Window),
        }
    }

    fn advance(&mut self, to_s: f64) {
        self.now_s = self.now_s.max(to_s);
        let at = self.window(self.now_s);
        let resident = self.resident;
        let window = &mut self.served.windows[at];
        window.resident = window.resident.max(resident);
    }

    fn window(&mut self, at_s: f64) -> usize {
        let at = (at_s / WINDOW_S) as usize;
        if self.served.windows.len() <= at {
            self.served.windows.resize(at + 1, Window::default());
        }
        at
    }

    /// Moves an instance, and counts the time that it was where it was.
    fn put(&mut self, instance: usize, to: At) {
        let now_s = self.now_s;
        let of = &mut self.instances[instance];
        let held = |at: At| !matches!(at, At::Cold | At::Standby);
        let time_s = now_s - of.since_s;
        match of.at {
            At::Cold => {}
            At::Standby => self.served.standby_s += time_s,
            At::Coming | At::Idle | At::Busy(_) => self.served.resident_s += time_s,
        }
        let before = held(of.at);
        (of.at, of.since_s) = (to, now_s);
        match (before, held(to)) {
            (false, true) => self.resident += 1,
            (true, false) => self.resident -= 1,
            _ => {}
        }
    }

    fn arrive(&mut self, request: usize) {
        let at = self.window(self.now_s);
        self.served.windows[at].requests += 1;
        self.open += 1;
        let door = self.random.below(self.doors.len());
        self.doors[door].frontend.request(self.now_s);
        self.doors[door].waiting.push_back(request);
        self.pass_on(door);
    }

    /// Gives what waits at a frontend to idle instances in use.
    fn pass_on(&mut self, door: usize) {
        while let Some(request) = self.doors[door].waiting.front().copied() {
            let Request {
                arrival_s,
                service_s,
            } = self.requests[request];
            let end_s = self.now_s + service_s;
            if self.setup.prune && self.now_s - arrival_s > self.setup.sla.within_s {
                self.doors[door].waiting.pop_front();
                self.doors[door].frontend.ended(self.now_s, None);
                self.served.dropped += 1;
                self.open -= 1;
                continue;
            }
            let in_use = match self.scaling {
                Scaling::Predicted => self.doors[door].wanted.in_use as usize,
                Scaling::Fixed(_) | Scaling::Planned(_) => self.instances.len(),
            };
            let idle: Vec<usize> = (0..in_use.min(self.instances.len()))
                .filter(|n| self.instances[*n].at == At::Idle)
                .collect();
            if idle.is_empty() {
                if !self.doors[door].retries {
                    self.doors[door].retries = true;
                    self.plan(self.now_s + self.setup.retry_s, Event::Retry(door));
                }
                return;
            }
            let instance = idle[self.random.below(idle.len())];
            self.doors[door].waiting.pop_front();
            self.put(instance, At::Busy(door));
            self.instances[instance].heard_s = self.now_s;
            self.plan(end_s, Event::Answered(instance, request));
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Ready(instance) => self.put(instance, At::Idle),
            Event::Answered(instance, request) => self.answered(instance, request),
            Event::Window => {
                let at = self.window(self.now_s);
                if let Scaling::Planned(plan) = self.scaling {
                    let n = plan.get(at).or(plan.last()).copied().unwrap_or(0);
                    // Beyond the plan what is left over is still answered.
                    self.use_known(n.max(u32::from(at >= plan.len())));
                }
                self.plan((at + 1) as f64 * WINDOW_S, Event::Window);
                (0..self.doors.len()).for_each(|door| self.pass_on(door));
            }
            Event::Decide(door) => {
                self.decide(door);
                self.plan(self.now_s + self.setup.decide_s, Event::Decide(door));
                self.pass_on(door);
            }
            Event::Retry(door) => {
                self.doors[door].retries = false;
                self.pass_on(door);
            }
        }
    }

    fn answered(&mut self, instance: usize, request: usize) {
        let Request {
            arrival_s,
            service_s,
        } = self.requests[request];
        let At::Busy(door) = self.instances[instance].at else {
            return;
        };
        let known = match self.scaling {
            Scaling::Predicted | Scaling::Fixed(_) => true,
            Scaling::Planned(plan) => {
                let at = (self.now_s / WINDOW_S) as usize;
                let n = plan.get(at).or(plan.last()).copied().unwrap_or(0);
                instance < n.max(u32::from(at >= plan.len())) as usize
            }
        };
        self.put(instance, if known { At::Idle } else { At::Standby });
        self.instances[instance].heard_s = self.now_s;
        let response_s = self.now_s - arrival_s;
        self.served.responses_s.push(response_s);
        if response_s <= self.setup.sla.within_s + 1e-9 {
            let at = self.window(arrival_s);
            self.served.windows[at].in_time += 1;
        }
        self.open -= 1;
        self.doors[door].frontend.ended(self.now_s, Some(service_s));
        self.pass_on(door);
    }

    /// A frontend looks at what it has seen; instances that hear of nobody give memory back.
    fn decide(&mut self, door: usize) {
        let (now_s, setup) = (self.now_s, self.setup);
        let Door {
            frontend,
            waiting,
            wanted,
            ..
        } = &mut self.doors[door];
        let coming = (setup_s(setup, &self.instances), waiting.len());
        *wanted = frontend.decide(now_s, &setup.sla, coming, setup.instances);
        let ready = wanted.ready as usize;
        for instance in 0..self.instances.len() {
            if instance < ready {
                self.instances[instance].heard_s = now_s;
                self.wake(instance);
            }
            let Instance {
                at,
                since_s,
                heard_s,
            } = self.instances[instance];
            if at == At::Idle && now_s - heard_s >= setup.keep_s {
                self.put(instance, At::Standby);
            }
            if at == At::Standby && now_s - since_s >= setup.standby_s {
                self.put(instance, At::Cold);
            }
        }
    }

    fn wake(&mut self, instance: usize) {
        let takes_s = match self.instances[instance].at {
            At::Standby => {
                self.served.returns += 1;
                self.setup.return_s
            }
            At::Cold => {
                self.served.starts += 1;
                self.setup.start_s
            }
            At::Coming | At::Idle | At::Busy(_) => return,
        };
        self.put(instance, At::Coming);
        self.plan(self.now_s + takes_s, Event::Ready(instance));
    }

    /// Exactly the first so many are resident at once, as somebody knew before. A busy one beyond
    /// them answers first.
    fn use_known(&mut self, n: u32) {
        for instance in 0..self.instances.len() {
            match (self.instances[instance].at, instance < n as usize) {
                (At::Cold | At::Standby | At::Coming, true) => self.put(instance, At::Idle),
                (At::Idle, false) => self.put(instance, At::Standby),
                _ => {}
            }
        }
    }

    fn end(mut self) -> Served {
        for instance in 0..self.instances.len() {
            let at = self.instances[instance].at;
            self.put(instance, at);
        }
        self.served.responses_s.sort_by(f64::total_cmp);
        self.served
    }
}

/// How long the next instance takes to become ready: what predictions have to look ahead.
fn setup_s(setup: &Setup, instances: &[Instance]) -> f64 {
    match instances.iter().any(|instance| instance.at == At::Standby) {
        true => setup.return_s,
        false => setup.start_s,
    }
}

#[cfg(test)]
#[path = "serving_tests.rs"]
mod tests;
