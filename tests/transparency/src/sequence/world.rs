//! What exists in a sequence: contexts, streams, events, buffers, and which stream used each buffer
//! last.

use shim_ffi::*;

use super::{Plan, call, call_on, stream};
use crate::api::Api;
use crate::rng::Rng;
use crate::transcript::Transcript;
use crate::transcript::Word::{Name, New, Raw};

/// Bytes of the program's own memory that copies go to and from.
pub const SCRATCH_BYTES: usize = 256 << 10;
/// Live buffers of a context, at most.
pub const BUFFERS: usize = 48;
const STREAMS: usize = 6;
const EVENTS: usize = 8;
/// Contexts besides the primary one.
pub const CONTEXTS: usize = 2;

/// A queue of a context: the legacy stream, a thread's stream, or a created one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queue {
    Legacy,
    PerThread(usize),
    Created { handle: u64, blocking: bool },
}

/// Where a buffer's bytes are and who frees them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Plain,
    Pitched { pitch: usize, height: usize },
    Managed,
    Async,
    Mapped { handle: u64, reserved: usize },
    Pinned,
    Registered,
}

#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Address on the device.
    pub at: u64,
    /// Address on the host, 0 where it has none.
    pub host: u64,
    pub bytes: usize,
    pub kind: Kind,
    /// Who used it last.
    pub queue: Queue,
    /// Who used it before, where only the legacy stream's rule orders that and `queue`: the rule
    /// holds for work, and the last use may have been refused.
    pub before: [Option<Queue>; 2],
}

impl Buffer {
    /// Everybody whose work on it may not be over.
    pub fn users(&self) -> impl Iterator<Item = Queue> + use<> {
        self.before.into_iter().flatten().chain([self.queue])
    }
}

/// Kernels in the order of [`super::launch::NAMES`].
pub type Functions = Vec<u64>;

#[derive(Default, Debug)]
pub struct Context {
    pub handle: u64,
    pub primary: bool,
    /// Created streams.
    pub streams: Vec<Queue>,
    pub events: Vec<u64>,
    pub buffers: Vec<Buffer>,
    pub module: u64,
    pub functions: Functions,
    pub pools: Vec<u64>,
}

pub struct World {
    pub api: Api,
    pub log: Transcript,
    pub rng: Rng,
    pub plan: Plan,
    pub device: i32,
    pub contexts: Vec<Context>,
    /// The context that this turn works in.
    pub here: usize,
    /// The thread whose turn it is.
    pub thread: usize,
    /// Program memory that is written to.
    pub scratch: Vec<u8>,
    /// Program memory that is only read.
    pub source: Vec<u8>,
    /// Registered with the driver from time to time; each half is a range of its own.
    pub registrable: Vec<u8>,
    /// Handles and addresses that were valid once.
    pub stale: Vec<u64>,
    /// Two words that host functions write to.
    pub noted: Box<[std::sync::atomic::AtomicU64; 2]>,
}

impl World {
    pub fn new(api: Api, log: Transcript, plan: Plan) -> Self {
        let mut rng = Rng::new(plan.seed);
        let mut bytes = |count: usize| -> Vec<u8> {
            (0..count / 8)
                .flat_map(|_| rng.word().to_le_bytes())
                .collect()
        };
        let (scratch, source, registrable) =
            (bytes(SCRATCH_BYTES), bytes(SCRATCH_BYTES), bytes(4 * 65536));
        let mut world = Self {
            api,
            log,
            rng,
            plan,
            device: 0,
            contexts: Vec::new(),
            here: 0,
            thread: 0,
            scratch,
            source,
            registrable,
            stale: Vec::new(),
            noted: Box::default(),
        };
        let _ = call!(world, cuInit(0) [Raw(0)] => []);
        let mut device = CUdevice(-1);
        let _ = call!(world, cuDeviceGet(&raw mut device, 0) [Raw(0)] => [Raw(device.0 as u64)]);
        world.device = device.0;
        world.retain_primary();
        world
    }

    /// Retains the primary context, and fills it.
    pub fn retain_primary(&mut self) {
        let mut handle = CUcontext::NULL;
        let device = CUdevice(self.device);
        let _ = call!(self, cuDevicePrimaryCtxRetain(&raw mut handle, device) [Raw(device.0 as u64)]
            => [New(handle.0 as u64)]);
        let context = Context {
            handle: handle.0 as u64,
            primary: true,
            ..Context::default()
        };
        if self.contexts.is_empty() {
            self.contexts.push(context);
        } else {
            self.contexts[0] = context;
        }
        self.enter(0);
        self.furnish();
    }

    /// Makes a context current on the calling thread.
    pub fn enter(&mut self, which: usize) {
        self.here = which;
        let handle = self.contexts[which].handle;
        let _ = call!(self, cuCtxSetCurrent(CUcontext(handle as *mut c_void)) [Name(handle)] => []);
    }

    /// Gives the current context what every step relies on: two streams, two events, the kernels.
    pub fn furnish(&mut self) {
        for flags in [0, 1] {
            self.create_stream(flags, None);
            self.create_event(2 * flags);
        }
        super::launch::load_functions(self);
    }

    pub fn begin_turn(&mut self, thread: usize) {
        self.thread = thread;
        let resolver = self.rng.one_in(2);
        self.api.use_resolver(resolver);
        let which = self.rng.below(self.contexts.len());
        self.enter(which);
    }

    pub fn end_turn(&mut self) {
        if self.rng.one_in(3) {
            let _ = call!(self, cuCtxSynchronize() [] => []);
        }
        if self.rng.one_in(4) {
            let _ = call!(self, cuCtxSetCurrent(CUcontext::NULL) [Raw(0)] => []);
        }
    }

    pub fn context(&mut self) -> &mut Context {
        let here = self.here;
        // PANIC: `here` is set to an index of the list wherever the list changes.
        &mut self.contexts[here]
    }

    pub fn create_stream(&mut self, flags: u32, priority: Option<i32>) {
        if self.context().streams.len() >= STREAMS {
            return;
        }
        let mut handle = CUstream::NULL;
        let result = match priority {
            None => call!(self, cuStreamCreate(&raw mut handle, flags) [Raw(u64::from(flags))]
                => [New(handle.0 as u64)]),
            Some(priority) => {
                call!(self, cuStreamCreateWithPriority(&raw mut handle, flags, priority)
                    [Raw(u64::from(flags)), Raw(priority as u64)] => [New(handle.0 as u64)])
            }
        };
        if result.is_ok() {
            let queue = Queue::Created {
                handle: handle.0 as u64,
                blocking: flags & 1 == 0,
            };
            self.context().streams.push(queue);
        }
    }

    pub fn create_event(&mut self, flags: u32) {
        if self.context().events.len() >= EVENTS {
            return;
        }
        let mut event = CUevent::NULL;
        let result = call!(self, cuEventCreate(&raw mut event, flags) [Raw(u64::from(flags))]
            => [New(event.0 as u64)]);
        if result.is_ok() {
            self.context().events.push(event.0 as u64);
        }
    }

    /// Remembers a number that is valid no more.
    pub fn gone(&mut self, number: u64) {
        self.log.forget(number);
        if self.stale.len() >= 32 {
            self.stale.remove(0);
        }
        self.stale.push(number);
    }

    /// Some queue that the calling thread can submit to.
    pub fn any_queue(&mut self) -> Queue {
        let created = self.context().streams.len();
        match self.rng.below(created + 3) {
            0 | 1 => Queue::Legacy,
            2 => Queue::PerThread(self.thread),
            at => self.context().streams[at - 3],
        }
    }

    /// One of the ways to name a queue: the handle, and whether the symbol has to be the per-thread
    /// one.
    pub fn form(&mut self, queue: Queue) -> (u64, bool) {
        match queue {
            Queue::Legacy if self.rng.one_in(3) => (1, self.rng.one_in(2)),
            Queue::Legacy => (0, false),
            Queue::PerThread(_) if self.rng.one_in(2) => (2, self.rng.one_in(2)),
            Queue::PerThread(_) => (0, true),
            Queue::Created { handle, .. } => (handle, self.rng.one_in(2)),
        }
    }

    /// True where the driver itself lets work of `next` wait for work of `last`.
    fn ordered(last: Queue, next: Queue) -> bool {
        let blocking = |queue| {
            !matches!(
                queue,
                Queue::Created {
                    blocking: false,
                    ..
                }
            )
        };
        last == next
            || (last == Queue::Legacy && blocking(next))
            || (next == Queue::Legacy && blocking(last))
    }

    /// Orders what `queue` does next after what was done to a buffer, and notes it as its user.
    pub fn order(&mut self, buffer: usize, queue: Queue) {
        let now = self.context().buffers[buffer];
        let mut before = now.before;
        if now.queue == queue && before == [None; 2] {
            return;
        }
        let free = before.iter_mut().find(|place| place.is_none());
        match free {
            Some(place) if now.users().all(|user| Self::ordered(user, queue)) => {
                *place = Some(now.queue);
            }
            _ => {
                for user in now.users().filter(|user| *user != queue) {
                    self.wait_between(user, queue);
                }
                before = [None; 2];
            }
        }
        let buffer = &mut self.context().buffers[buffer];
        (buffer.queue, buffer.before) = (queue, before);
    }

    /// Lets `next` wait for everything submitted to `last`.
    pub fn wait_between(&mut self, last: Queue, next: Queue) {
        let foreign = matches!(last, Queue::PerThread(thread) if thread != self.thread);
        let events = self.context().events.len();
        if foreign || events == 0 || self.rng.one_in(8) {
            let _ = call!(self, cuCtxSynchronize() [] => []);
        } else if self.rng.one_in(3) {
            self.synchronise(last);
        } else {
            let at = self.rng.below(events);
            let event = CUevent(self.context().events[at] as *mut c_void);
            let (from, by_thread) = self.form(last);
            let _ = call_on!(self, by_thread, cuEventRecord | cuEventRecord_ptsz(event, stream(from))
                [Name(event.0 as u64), Name(from)] => []);
            let (to, by_thread) = self.form(next);
            let _ = call_on!(self, by_thread, cuStreamWaitEvent | cuStreamWaitEvent_ptsz(stream(to), event, 0)
                [Name(to), Name(event.0 as u64), Raw(0)] => []);
        }
    }

    pub fn synchronise(&mut self, queue: Queue) {
        let (handle, by_thread) = self.form(queue);
        let _ = call_on!(self, by_thread, cuStreamSynchronize | cuStreamSynchronize_ptsz(stream(handle))
            [Name(handle)] => []);
    }

    /// Waits on the host until a buffer is at rest.
    pub fn settle(&mut self, buffer: usize) {
        let me = self.thread;
        for queue in self.context().buffers[buffer].users() {
            match queue {
                Queue::PerThread(thread) if thread != me => {
                    let _ = call!(self, cuCtxSynchronize() [] => []);
                }
                queue => self.synchronise(queue),
            }
        }
        self.context().buffers[buffer].before = [None; 2];
    }

    /// A live buffer, if there is one.
    pub fn any_buffer(&mut self) -> Option<usize> {
        let count = self.context().buffers.len();
        (count > 0).then(|| self.rng.below(count))
    }

    /// A live buffer that satisfies a condition.
    pub fn buffer_where(&mut self, wanted: impl Fn(&Buffer) -> bool) -> Option<usize> {
        let all: Vec<usize> = self
            .context()
            .buffers
            .iter()
            .enumerate()
            .filter(|(_, buffer)| wanted(buffer))
            .map(|(at, _)| at)
            .collect();
        (!all.is_empty()).then(|| self.rng.pick(&all))
    }

    /// Destroys everything, so that clean-up is compared too.
    pub fn finish(&mut self) {
        self.begin_turn(0);
        for which in (0..self.contexts.len()).rev() {
            self.enter(which);
            let _ = call!(self, cuCtxSynchronize() [] => []);
            while !self.context().buffers.is_empty() {
                super::memory::free_at(self, 0);
            }
            super::context::destroy(self, which);
        }
    }
}
