//! Streams' queues, and which operation may run when. The threads that carry them out are in
//! [`super::threads`].
//!
//! Order: operations of a stream run one after another. An operation on a context's legacy stream
//! waits for all earlier ones of its blocking streams, and theirs wait for the legacy stream's
//! earlier ones. Waiting for an event is waiting for its record. Every device has a thread for its
//! compute engine and one for each copy engine; host functions have their own. All of them start
//! with the first operation that needs them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::*};

use crate::lock::{Condvar, Mutex};
use shim_ffi::CUresult;

use super::aside;
use super::threads::start_thread;
use super::work::{Direction, Record, Work, word_reached, write_word};
use crate::clock;
use crate::device_state::DeviceState;
use crate::memory::Memory;
use crate::profile::MAX_DEVICES;
use crate::registry::NumberMap;

/// Operations that a stream takes before the submitting call waits.
const QUEUE_LIMIT: usize = 1024;

pub(super) const PER_DEVICE: usize = 3;
pub(super) const HOST: usize = MAX_DEVICES * PER_DEVICE;
pub(super) const POLL: usize = HOST + 1;
const THREADS: usize = POLL + 1;

/// How a stream relates to the legacy stream of its context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ordering {
    /// It is the legacy stream.
    Legacy,
    /// Synchronises with it.
    Blocking,
    /// Does not.
    NonBlocking,
}

/// What a queue needs to know of its stream.
#[derive(Clone)]
pub struct StreamInfo {
    /// Handle of the stream.
    pub id: u64,
    /// Handle of its context.
    pub context: u64,
    /// Ordinal of its device.
    pub device: usize,
    /// Relation to the legacy stream.
    pub ordering: Ordering,
    /// Smaller runs first.
    pub priority: i32,
    /// The context's sticky error.
    pub failure: Arc<AtomicU32>,
}

#[derive(Clone)]
pub(super) enum Dependency {
    Stream { id: u64, index: u64 },
    Record(Arc<Record>),
}

pub(super) struct Op {
    pub(super) work: Work,
    pub(super) waits: Vec<Dependency>,
    pub(super) submitted_ns: u64,
    pub(super) sequence: u64,
}

impl Op {
    /// Whether it waits for what another process does, of which nobody tells.
    fn waits_elsewhere(&self) -> bool {
        self.waits
            .iter()
            .any(|wait| matches!(wait, Dependency::Record(record) if record.is_elsewhere()))
    }
}

pub(super) struct Queue {
    pub(super) info: StreamInfo,
    pub(super) ops: VecDeque<Op>,
    pub(super) enqueued: u64,
    pub(super) completed: u64,
    /// When the last completed operation ended on the timeline.
    pub(super) ended_ns: u64,
    /// The head is with a thread, or waits for one.
    pub(super) dispatched: bool,
    /// Smallest completion count that somebody waits for.
    pub(super) wake_at: u64,
    pub(super) destroyed: bool,
}

pub(super) struct Ready {
    pub(super) priority: i32,
    pub(super) sequence: u64,
    pub(super) stream: u64,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) queues: NumberMap<Queue>,
    /// Streams with operations.
    pub(super) active: Vec<u64>,
    pub(super) ready: Vec<Vec<Ready>>,
    pub(super) spawned: Vec<bool>,
    pub(super) sequence: u64,
    /// Some stream waits for a word in memory.
    pub(super) polling: bool,
    pub(super) full_waiters: usize,
}

/// All streams of the process.
pub struct Engine {
    pub(super) device_state: Arc<DeviceState>,
    pub(super) memory: Arc<Memory>,
    pub(super) state: Mutex<State>,
    pub(super) wake: [Condvar; THREADS],
    pub(super) done: Condvar,
    /// A value that a stream writes waits for its process's turn.
    marks_need_turn: bool,
    /// Called when a pool block is free, with its address.
    pub(super) pool_free: Box<dyn Fn(u64) + Send + Sync>,
}

impl Engine {
    /// An engine without streams.
    pub fn new(
        device_state: Arc<DeviceState>,
        memory: Arc<Memory>,
        pool_free: Box<dyn Fn(u64) + Send + Sync>,
    ) -> Self {
        let state = State {
            ready: (0..THREADS).map(|_| Vec::new()).collect(),
            spawned: vec![false; THREADS],
            ..State::default()
        };
        Self {
            marks_need_turn: device_state.profile().costs.marks_need_turn,
            device_state,
            memory,
            state: Mutex::new(state),
            wake: std::array::from_fn(|_| Condvar::new()),
            done: Condvar::new(),
            pool_free,
        }
    }

    /// Makes a stream known.
    pub fn add_stream(&self, info: StreamInfo) {
        let queue = Queue {
            info: info.clone(),
            ops: VecDeque::new(),
            enqueued: 0,
            completed: 0,
            ended_ns: 0,
            dispatched: false,
            wake_at: u64::MAX,
            destroyed: false,
        };
        self.state.lock().queues.insert(info.id, queue);
    }

    /// Forgets a stream once its operations are done.
    pub fn remove_stream(&self, id: u64) {
        let mut state = self.state.lock();
        if let Some(queue) = state.queues.get_mut(&id) {
            queue.destroyed = true;
            if queue.ops.is_empty() && !queue.dispatched {
                state.queues.remove(&id);
            }
        }
    }

    /// Whether nothing is left of a stream that was taken away.
    pub fn has_forgotten(&self, id: u64) -> bool {
        !self.state.lock().queues.contains_key(&id)
    }

    /// Puts work into a stream, in order and as one unit. Waits while the stream is full.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for an unknown stream.
    pub fn submit(
        &'static self,
        stream: u64,
        work: impl IntoIterator<Item = Work>,
    ) -> Result<(), CUresult> {
        let mut state = self.state.lock();
        loop {
            match state.queues.get(&stream) {
                None => return Err(never(work)),
                Some(queue) if queue.ops.len() < QUEUE_LIMIT => break,
                Some(_) => {}
            }
            state.full_waiters += 1;
            self.done.wait(&mut state);
            state.full_waiters -= 1;
        }
        aside::called();
        let now = clock::now_ns();
        let mut waits = Self::legacy_waits(&state, stream);
        for work in work {
            let sequence = state.sequence;
            state.sequence += 1;
            let mut waits = std::mem::take(&mut waits);
            if let Work::Wait(record) = &work {
                waits.push(Dependency::Record(record.clone()));
            }
            self.start_thread(&mut state, stream, &work);
            // PANIC: looked up above, and removed by this thread only.
            let queue = state
                .queues
                .get_mut(&stream)
                .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
            queue.ops.push_back(Op {
                work,
                waits,
                submitted_ns: now,
                sequence,
            });
            queue.enqueued += 1;
        }
        if !state.active.contains(&stream) {
            state.active.push(stream);
        }
        if self.pump(&mut state, stream) {
            self.pump_all(&mut state);
        }
        Ok(())
    }

    /// Puts a record into a stream that waits for everything in the context so far.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for an unknown stream.
    pub fn submit_after_all(&self, stream: u64, record: Arc<Record>) -> Result<(), CUresult> {
        let mut state = self.state.lock();
        let Some(own) = state.queues.get(&stream) else {
            return Err(never([Work::Record(record)]));
        };
        let context = own.info.context;
        let others = state
            .queues
            .values()
            .filter(|other| other.info.context == context && other.info.id != stream);
        let waits = others
            .map(|other| Dependency::Stream {
                id: other.info.id,
                index: other.enqueued,
            })
            .collect();
        let sequence = state.sequence;
        state.sequence += 1;
        if let Some(queue) = state.queues.get_mut(&stream) {
            let work = Work::Record(record);
            queue.ops.push_back(Op {
                work,
                waits,
                submitted_ns: clock::now_ns(),
                sequence,
            });
            queue.enqueued += 1;
        }
        if !state.active.contains(&stream) {
            state.active.push(stream);
        }
        if self.pump(&mut state, stream) {
            self.pump_all(&mut state);
        }
        Ok(())
    }

    /// What the next operation of `stream` has to wait for because of the legacy stream's rule.
    fn legacy_waits(state: &State, stream: u64) -> Vec<Dependency> {
        let Some(own) = state.queues.get(&stream) else {
            return Vec::new();
        };
        let relevant = |other: &Queue| {
            other.info.context == own.info.context
                && other.info.id != stream
                && match own.info.ordering {
                    Ordering::Legacy => other.info.ordering == Ordering::Blocking,
                    Ordering::Blocking => other.info.ordering == Ordering::Legacy,
                    Ordering::NonBlocking => false,
                }
        };
        if own.info.ordering == Ordering::NonBlocking {
            return Vec::new();
        }
        state
            .active
            .iter()
            .filter_map(|id| state.queues.get(id))
            .filter(|other| relevant(other))
            .map(|other| Dependency::Stream {
                id: other.info.id,
                index: other.enqueued,
            })
            .collect()
    }

    /// The thread that carries an operation out; none where it takes no time.
    fn thread_of(&self, device: usize, work: &Work) -> Option<usize> {
        match work {
            Work::Write { .. } if self.marks_need_turn => Some(device * PER_DEVICE),
            Work::Kernel(_) | Work::Fill(_) => Some(device * PER_DEVICE),
            Work::Copy(copy) => Some(match copy.direction {
                Direction::Within => device * PER_DEVICE,
                Direction::In => device * PER_DEVICE + 1,
                Direction::Out | Direction::Peer => device * PER_DEVICE + 2,
            }),
            Work::Host(..) | Work::Callback(..) => Some(HOST),
            Work::Await { .. } => Some(POLL),
            Work::Wait(record) if record.is_elsewhere() => Some(POLL),
            _ => None,
        }
    }

    fn start_thread(&'static self, state: &mut State, stream: u64, work: &Work) {
        let Some(queue) = state.queues.get(&stream) else {
            return;
        };
        let Some(thread) = self.thread_of(queue.info.device, work) else {
            return;
        };
        if std::mem::replace(&mut state.spawned[thread], true) {
            return;
        }
        let name = match thread {
            HOST => "simgpu-host".to_owned(),
            POLL => "simgpu-poll".to_owned(),
            _ => format!(
                "simgpu-{}-{}",
                ["compute", "in", "out"][thread % PER_DEVICE],
                thread / PER_DEVICE
            ),
        };
        let body = move || {
            clock::fine_sleeps();
            match thread {
                HOST => self.run_host(),
                POLL => self.run_poll(),
                _ if thread.is_multiple_of(PER_DEVICE) => self.run_compute(thread / PER_DEVICE),
                _ => self.run_copies(thread),
            }
        };
        // Without its thread the operation stays queued; the next submission tries again.
        state.spawned[thread] = start_thread(name, body);
    }

    /// Carries out what takes no time at the head of a stream and hands the next operation to its
    /// thread. True when something completed.
    fn pump(&self, state: &mut State, stream: u64) -> bool {
        let mut progress = false;
        while let Some(queue) = state.queues.get(&stream) {
            if queue.dispatched {
                break;
            }
            let Some(head) = queue.ops.front() else {
                state.active.retain(|id| *id != stream);
                if state
                    .queues
                    .get(&stream)
                    .is_some_and(|queue| queue.destroyed)
                {
                    state.queues.remove(&stream);
                }
                break;
            };
            let Some(ready_ns) = Self::ready(state, queue, head) else {
                if head.waits_elsewhere() {
                    state.polling = true;
                    self.wake[POLL].notify_one();
                }
                break;
            };
            let failed = queue.info.failure.load(Acquire) != 0;
            let thread = self.thread_of(queue.info.device, &head.work);
            if let (Some(thread), false) = (thread, failed) {
                if thread == POLL {
                    match self.awaited(&head.work) {
                        Ok(false) => {
                            state.polling = true;
                            self.wake[POLL].notify_one();
                            break;
                        }
                        Ok(true) => {}
                        Err(status) => fail(queue, status),
                    }
                } else {
                    let entry = Ready {
                        priority: queue.info.priority,
                        sequence: head.sequence,
                        stream,
                    };
                    state.ready[thread].push(entry);
                    if let Some(queue) = state.queues.get_mut(&stream) {
                        queue.dispatched = true;
                    }
                    self.wake[thread].notify_one();
                    break;
                }
            }
            let Some(queue) = state.queues.get_mut(&stream) else {
                break;
            };
            let Some(op) = queue.ops.pop_front() else {
                break;
            };
            match op.work {
                Work::Record(record) => record.complete(ready_ns),
                Work::Write {
                    address,
                    value,
                    wide,
                } if !failed => {
                    if let Err(status) = write_word(&self.memory, address, value, wide) {
                        fail(queue, status);
                    }
                }
                Work::PoolFree { address } => (self.pool_free)(address),
                _ => {}
            }
            self.completed(state, stream, ready_ns);
            progress = true;
        }
        progress
    }

    /// From when on an operation can run, or none while it has to wait.
    pub(super) fn ready(state: &State, queue: &Queue, op: &Op) -> Option<u64> {
        let mut ready_ns = queue.ended_ns.max(op.submitted_ns);
        for wait in &op.waits {
            match wait {
                Dependency::Stream { id, index } => {
                    if let Some(other) = state.queues.get(id) {
                        if other.completed < *index {
                            return None;
                        }
                        ready_ns = ready_ns.max(other.ended_ns);
                    }
                }
                Dependency::Record(record) => ready_ns = ready_ns.max(record.reached()?),
            }
        }
        Some(ready_ns)
    }

    fn awaited(&self, work: &Work) -> Result<bool, CUresult> {
        match *work {
            Work::Await {
                address,
                value,
                wide,
                until,
            } => word_reached(&self.memory, address, value, wide, until),
            _ => Ok(true),
        }
    }

    pub(super) fn completed(&self, state: &mut State, stream: u64, ended_ns: u64) {
        let full_waiters = state.full_waiters > 0;
        if let Some(queue) = state.queues.get_mut(&stream) {
            queue.completed += 1;
            queue.ended_ns = queue.ended_ns.max(ended_ns);
            if queue.completed >= queue.wake_at {
                queue.wake_at = u64::MAX;
                self.done.notify_all();
            } else if full_waiters && queue.ops.len() <= QUEUE_LIMIT / 2 {
                self.done.notify_all();
            }
        }
    }

    pub(super) fn pump_all(&self, state: &mut State) {
        loop {
            let mut progress = false;
            for stream in state.active.clone() {
                progress |= self.pump(state, stream);
            }
            if !progress {
                break;
            }
        }
    }

    /// Waits until everything put into a stream so far is done.
    pub fn wait_stream(&self, stream: u64) {
        let mut state = self.state.lock();
        let Some(target) = state.queues.get(&stream).map(|queue| queue.enqueued) else {
            return;
        };
        let ended_ns = loop {
            match state.queues.get_mut(&stream) {
                None => break 0,
                Some(queue) if queue.completed >= target => break queue.ended_ns,
                Some(queue) => queue.wake_at = queue.wake_at.min(target),
            }
            self.done.wait(&mut state);
        };
        drop(state);
        clock::wait_until(ended_ns);
    }

    /// True when a stream has nothing left to do.
    pub fn is_idle(&self, stream: u64) -> bool {
        let state = self.state.lock();
        state.queues.get(&stream).is_none_or(|queue| {
            queue.completed == queue.enqueued && queue.ended_ns <= clock::now_ns()
        })
    }

    /// Waits for all streams for which `wanted` holds.
    pub fn wait_streams(&self, wanted: impl Fn(&StreamInfo) -> bool) {
        let streams: Vec<u64> = {
            let state = self.state.lock();
            state
                .queues
                .values()
                .filter(|queue| wanted(&queue.info))
                .map(|queue| queue.info.id)
                .collect()
        };
        streams
            .into_iter()
            .for_each(|stream| self.wait_stream(stream));
    }

    /// Waits until a record is reached.
    pub fn wait_record(&self, record: &Record) {
        if let Some(reached_ns) = record.wait_elsewhere() {
            return clock::wait_until(reached_ns);
        }
        let mut state = self.state.lock();
        let reached_ns = loop {
            if let Some(reached_ns) = record.reached() {
                break reached_ns;
            }
            // Any active stream may complete an operation up to the record, and wakes us then.
            for stream in state.active.clone() {
                if let Some(queue) = state.queues.get_mut(&stream) {
                    queue.wake_at = queue.wake_at.min(queue.completed + 1);
                }
            }
            self.done.wait(&mut state);
        };
        drop(state);
        clock::wait_until(reached_ns);
    }
}

/// What work is answered that no stream takes: nobody is to wait for its records.
fn never(work: impl IntoIterator<Item = Work>) -> CUresult {
    for one in work {
        if let Work::Record(record) = one {
            record.complete(clock::now_ns());
        }
    }
    CUresult::CUDA_ERROR_INVALID_HANDLE
}

/// Makes an error stick to the stream's context.
pub(super) fn fail(queue: &Queue, status: CUresult) {
    let _ = queue
        .info
        .failure
        .compare_exchange(0, status.0, AcqRel, Acquire);
}
