//! A discrete-event model of one time-sliced device, its copy engine, and the jobs on it.
//!
//! A process is a program of [`Op`]s. The device runs the kernels of one process (context) at a
//! time, for a slice of [`Hardware::slice_ns`]; it leaves a context whose queue is empty, and a
//! change of context costs [`Hardware::turn_ns`]. Times in nanoseconds.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use policy::Class;
use policy::cluster::Random;

use crate::governor::Governor;

pub const US: u64 = 1000;
pub const MS: u64 = 1_000_000;
pub const SECOND: u64 = 1_000_000_000;

/// What a process does next.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    /// After `host` on the host: a kernel of `len`.
    Kernel {
        host: u64,
        len: u64,
    },
    /// A copy in the process's only stream.
    Copy {
        host: u64,
        len: u64,
    },
    /// A host function or a peer holds up the stream for `len`.
    Stall {
        host: u64,
        len: u64,
    },
    /// The host waits until its own queue is empty.
    Wait,
    Sleep(u64),
    Until(u64),
    /// The host polls until less than this is in flight.
    Poll(u64),
    /// A step ends.
    Step,
    /// A request that arrived at this time is answered.
    Answer(u64),
    /// The job's share changes.
    Share(f64),
}

/// Refills a process's queue of operations; the first argument is the time.
pub type Program = Box<dyn FnMut(u64, &mut VecDeque<Op>)>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Kernel,
    Copy,
    Stall,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Host {
    Computes,
    /// At the gate, the cap or a full queue.
    AtGate,
    /// In a call that waits for the device.
    Waits,
    Sleeps,
}

#[derive(Clone, Copy, Debug)]
struct Work {
    len: u64,
    kind: Kind,
    /// What the device writes at its end: all work issued up to here.
    mark: Option<u64>,
}

pub struct Process {
    pub job: usize,
    program: Program,
    ahead: VecDeque<Op>,
    op: Option<Op>,
    queue: VecDeque<Work>,
    pub host: Host,
    in_flight: u64,
    pub issued: u64,
    pub passed: u64,
    marked: u64,
    /// Launches that found the own queue empty and had not waited at the gate.
    pub fresh: u64,
    pub largest: u64,
    due: bool,
    head_runs: bool,
}

impl Process {
    pub fn waits_for_device(&self) -> bool {
        self.host == Host::Waits && !self.queue.is_empty()
    }

    pub fn pending(&self) -> u64 {
        self.issued - self.passed
    }
}

pub struct Job {
    pub share: f64,
    /// What a mark says of a kernel, over its true length.
    pub charge_error: f64,
    pub latency: bool,
    pub class: Class,
    pub share_max: Option<f64>,
    pub processes: Vec<usize>,
    /// Kernel time that the device has finished.
    pub got: u64,
    pub copied: u64,
    pub steps: u64,
    /// Of each request: when it was answered, and how long after it arrived.
    pub answers: Vec<(u64, u64)>,
}

/// A job to be built: its share, its terms, and its programs.
pub struct Plan {
    pub share: f64,
    pub charge_error: f64,
    pub latency: bool,
    pub class: Class,
    pub share_max: Option<f64>,
    pub programs: Vec<Program>,
}

impl Plan {
    pub fn new(share: f64, programs: Vec<Program>) -> Self {
        Self {
            share,
            charge_error: 1.0,
            latency: false,
            class: Class::Guaranteed,
            share_max: None,
            programs,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Hardware {
    pub turn_ns: u64,
    pub slice_ns: u64,
    /// How long a context keeps the device after its queue is empty.
    pub linger_ns: u64,
    /// More of a turn for each waiting context beyond the second.
    pub turn_more_ns: u64,
    /// A kernel is preempted at multiples of this; `None`: never.
    pub chunk_ns: Option<u64>,
    /// Weight between two marks of a process; 0: after each launch.
    pub mark_ns: u64,
    pub queue_limit: usize,
}

impl Default for Hardware {
    fn default() -> Self {
        Self {
            turn_ns: 140 * US,
            slice_ns: 2 * MS,
            linger_ns: 0,
            turn_more_ns: 0,
            chunk_ns: Some(500 * US),
            mark_ns: 0,
            queue_limit: 1024,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Event {
    Host(usize),
    Done(usize),
    Dispatch,
    Copied(usize),
    Stalled(usize),
    Look,
    Ring,
    Expiry(usize),
}

pub struct Sim {
    pub now: u64,
    pub jobs: Vec<Job>,
    pub processes: Vec<Process>,
    pub hardware: Hardware,
    pub random: Random,
    /// Time that turns took, kernels ran, and how many turns there were.
    pub turn_time: u64,
    pub kernel_time: u64,
    pub turns: u64,
    pub share_changed: bool,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    count: u64,
    current: Option<usize>,
    busy: bool,
    slice_end: u64,
    hold_until: u64,
    copies: VecDeque<usize>,
    copying: bool,
}

impl Sim {
    pub fn new(plans: Vec<Plan>, governor: &mut Governor, hardware: Hardware, seed: u64) -> Self {
        let mut sim = Self {
            now: 0,
            jobs: Vec::new(),
            processes: Vec::new(),
            hardware,
            random: Random::new(seed),
            turn_time: 0,
            kernel_time: 0,
            turns: 0,
            share_changed: false,
            events: BinaryHeap::new(),
            count: 0,
            current: None,
            busy: false,
            slice_end: 0,
            hold_until: 0,
            copies: VecDeque::new(),
            copying: false,
        };
        for plan in plans {
            let job = sim.jobs.len();
            let first = sim.processes.len();
            for program in plan.programs {
                sim.processes.push(Process {
                    job,
                    program,
                    ahead: VecDeque::new(),
                    op: None,
                    queue: VecDeque::new(),
                    host: Host::Computes,
                    in_flight: 0,
                    issued: 0,
                    passed: 0,
                    marked: 0,
                    fresh: 0,
                    largest: 0,
                    due: false,
                    head_runs: false,
                });
            }
            sim.jobs.push(Job {
                share: plan.share,
                charge_error: plan.charge_error,
                latency: plan.latency,
                class: plan.class,
                share_max: plan.share_max,
                processes: (first..sim.processes.len()).collect(),
                got: 0,
                copied: 0,
                steps: 0,
                answers: Vec::new(),
            });
        }
        governor.start(&mut sim);
        for at in 0..sim.processes.len() {
            sim.next(at, governor);
        }
        sim
    }

    pub fn pending(&self, job: usize) -> u64 {
        let of = |at: &usize| self.processes[*at].pending();
        self.jobs[job].processes.iter().map(of).sum()
    }

    pub fn at(&mut self, time: u64, event: Event) {
        self.count += 1;
        self.events.push(Reverse((time, self.count, event)));
    }

    pub fn run(&mut self, until: u64, governor: &mut Governor) {
        while let Some(Reverse((time, _, event))) = self.events.peek().copied() {
            if time > until {
                break;
            }
            self.events.pop();
            self.now = time;
            match event {
                Event::Host(at) => self.host(at, governor),
                Event::Done(at) => {
                    self.busy = false;
                    let len = self.processes[at].queue[0].len;
                    self.jobs[self.processes[at].job].got += len;
                    self.kernel_time += len;
                    self.finish(at, governor);
                }
                Event::Dispatch => self.dispatch(),
                Event::Copied(at) => {
                    self.processes[at].head_runs = false;
                    let len = self.processes[at].queue[0].len;
                    self.jobs[self.processes[at].job].copied += len;
                    self.next_copy();
                    self.finish(at, governor);
                }
                Event::Stalled(at) => {
                    self.processes[at].head_runs = false;
                    self.finish(at, governor);
                }
                Event::Look => governor.look(self, true),
                Event::Ring => governor.look(self, false),
                Event::Expiry(job) => governor.expired(self, job),
            }
        }
        self.now = until;
    }

    /// Wakes a process that waits at the gate.
    pub fn poke(&mut self, at: usize, delay: u64) {
        if self.processes[at].host == Host::AtGate {
            self.later(at, delay);
        }
    }

    fn later(&mut self, at: usize, delay: u64) {
        if !self.processes[at].due {
            self.processes[at].due = true;
            self.at(self.now + delay, Event::Host(at));
        }
    }

    /// Takes operations until one needs time.
    fn next(&mut self, at: usize, governor: &mut Governor) {
        loop {
            let now = self.now;
            let process = &mut self.processes[at];
            if process.ahead.is_empty() {
                (process.program)(now, &mut process.ahead);
            }
            let Some(op) = process.ahead.pop_front() else {
                process.host = Host::Sleeps;
                return;
            };
            process.op = None;
            match op {
                Op::Kernel { host, .. } | Op::Copy { host, .. } | Op::Stall { host, .. } => {
                    process.op = Some(op);
                    process.host = Host::Computes;
                    return self.later(at, host);
                }
                Op::Wait if !process.queue.is_empty() => {
                    process.host = Host::Waits;
                    return self.mark(at);
                }
                Op::Sleep(span) => {
                    process.host = Host::Sleeps;
                    return self.later(at, span);
                }
                Op::Until(time) if time > now => {
                    process.host = Host::Sleeps;
                    return self.later(at, time - now);
                }
                Op::Poll(below) if process.in_flight >= below => {
                    process.op = Some(op);
                    process.host = Host::Computes;
                    return self.later(at, 30 * US);
                }
                Op::Wait | Op::Until(_) | Op::Poll(_) => {}
                Op::Step => {
                    let job = process.job;
                    self.jobs[job].steps += 1;
                }
                Op::Answer(arrived) => {
                    let job = process.job;
                    self.jobs[job].answers.push((now, now - arrived));
                }
                Op::Share(share) => {
                    let job = process.job;
                    self.jobs[job].share = share;
                    self.share_changed = true;
                    governor.share_changed(self, job);
                }
            }
        }
    }

    fn mark(&mut self, at: usize) {
        let process = &mut self.processes[at];
        if process.marked < process.issued
            && let Some(last) = process.queue.back_mut()
        {
            last.mark = Some(process.issued);
            process.marked = process.issued;
        }
    }

    fn host(&mut self, at: usize, governor: &mut Governor) {
        self.processes[at].due = false;
        let (kind, len) = match self.processes[at].op {
            None => return self.next(at, governor),
            Some(Op::Poll(below)) => {
                if self.processes[at].in_flight >= below {
                    return self.later(at, 30 * US);
                }
                return self.next(at, governor);
            }
            Some(Op::Kernel { len, .. }) => (Kind::Kernel, len),
            Some(Op::Copy { len, .. }) => (Kind::Copy, len),
            Some(Op::Stall { len, .. }) => (Kind::Stall, len),
            Some(other) => unreachable!("{other:?} takes no time"),
        };
        let job = self.processes[at].job;
        let weight = if kind == Kind::Kernel { len } else { 0 };
        if !governor.may(self, job, weight)
            || self.processes[at].queue.len() >= self.hardware.queue_limit
        {
            self.processes[at].host = Host::AtGate;
            return;
        }
        let chunk = self.hardware.chunk_ns;
        let process = &mut self.processes[at];
        let waited = process.host == Host::AtGate;
        let empty = process.queue.is_empty();
        let parts = match chunk {
            Some(chunk) if kind == Kind::Kernel && len * 5 > chunk * 6 => len / chunk + 1,
            _ => 1,
        };
        for part in 0..parts {
            let len = len / parts + u64::from(part < len % parts);
            let mark = None;
            process.queue.push_back(Work { len, kind, mark });
        }
        process.in_flight += weight;
        process.issued += weight;
        process.largest = process.largest.max(weight);
        process.op = None;
        process.host = Host::Computes;
        if empty && !waited {
            process.fresh += 1;
        }
        if process.issued - process.marked >= self.hardware.mark_ns {
            self.mark(at);
        }
        if empty {
            governor.arrives(self, job);
        }
        if kind != Kind::Kernel && self.processes[at].queue.len() == 1 {
            self.start_head(at);
        }
        if !self.busy {
            self.dispatch();
        }
        self.next(at, governor);
    }

    /// Starts a copy or a stall that has come to the head of its stream.
    fn start_head(&mut self, at: usize) {
        let process = &mut self.processes[at];
        let Some(head) = process.queue.front().copied() else {
            return;
        };
        if process.head_runs {
            return;
        }
        match head.kind {
            Kind::Kernel => {}
            Kind::Copy => {
                process.head_runs = true;
                self.copies.push_back(at);
                if !self.copying {
                    self.next_copy();
                }
            }
            Kind::Stall => {
                process.head_runs = true;
                self.at(self.now + head.len, Event::Stalled(at));
            }
        }
    }

    fn next_copy(&mut self) {
        self.copying = false;
        if let Some(at) = self.copies.pop_front() {
            self.copying = true;
            let len = self.processes[at].queue[0].len;
            self.at(self.now + len, Event::Copied(at));
        }
    }

    fn finish(&mut self, at: usize, governor: &mut Governor) {
        let process = &mut self.processes[at];
        let work = process.queue.pop_front().expect("something ran");
        if work.kind == Kind::Kernel {
            process.in_flight -= work.len;
        }
        if let Some(mark) = work.mark {
            process.passed = mark;
        }
        let empty = process.queue.is_empty();
        if empty && self.hardware.linger_ns > 0 && self.current == Some(at) {
            self.hold_until = self.now + self.hardware.linger_ns;
            self.at(self.hold_until, Event::Dispatch);
        }
        if !empty {
            self.start_head(at);
        }
        match self.processes[at].host {
            Host::AtGate => governor.retry(self, at),
            Host::Waits if empty => {
                self.processes[at].host = Host::Computes;
                self.processes[at].op = None;
                self.later(at, 8 * US);
            }
            _ => {}
        }
        self.dispatch();
    }

    pub fn retry_soon(&mut self, at: usize) {
        self.later(at, 5 * US);
    }

    fn runnable(&self, at: usize) -> bool {
        let head = self.processes[at].queue.front();
        head.is_some_and(|work| work.kind == Kind::Kernel)
    }

    fn dispatch(&mut self) {
        if self.busy {
            return;
        }
        let many = self.processes.len();
        let waiting = (0..many).filter(|at| self.runnable(*at)).count();
        if waiting == 0 {
            return;
        }
        let (pick, start) = match self.current {
            Some(now) if self.runnable(now) && (self.now < self.slice_end || waiting == 1) => {
                if self.now >= self.slice_end {
                    self.slice_end = self.now + self.hardware.slice_ns;
                }
                (now, self.now)
            }
            current => {
                if current.is_some_and(|now| !self.runnable(now)) && self.now < self.hold_until {
                    return;
                }
                let first = current.map_or(0, |now| now + 1);
                let pick = (0..many)
                    .map(|step| (first + step) % many)
                    .find(|at| Some(*at) != current && self.runnable(*at))
                    .or(current)
                    .expect("somebody waits");
                let mut cost = 0;
                if current.is_some_and(|now| now != pick) {
                    let more = self.hardware.turn_more_ns * (waiting.max(2) - 2) as u64;
                    cost = self.hardware.turn_ns + more;
                    self.turns += 1;
                    self.turn_time += cost;
                }
                self.current = Some(pick);
                self.slice_end = self.now + cost + self.hardware.slice_ns;
                (pick, self.now + cost)
            }
        };
        self.busy = true;
        let len = self.processes[pick].queue[0].len;
        self.at(start + len, Event::Done(pick));
    }
}
