//! Streams as the program knows them; their queues are in [`crate::exec::engine`].

use std::sync::Arc;

use crate::lock::Mutex;
use shim_ffi::{CUresult, CUstream};

use crate::capture::{self, Capture};
use crate::context::{Context, current};
use crate::driver::Driver;
use crate::event::Event;
use crate::exec::engine::StreamInfo;
use crate::exec::work::Work;
use crate::graph::{Action, Block};
use crate::registry::{self, NumberMap};
use crate::settings::BadConfig;

type Result<T> = std::result::Result<T, CUresult>;

/// What stream 0 means to an entry point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Default {
    /// The context's legacy stream.
    Legacy,
    /// The calling thread's stream.
    PerThread,
}

/// Handles of streams that were destroyed. A real driver does not look such a handle up: using one
/// is undefined, and crashes or reaches another stream. Here it ends the process, so that it is
/// seen.
#[derive(Default)]
pub struct Freed {
    handles: Mutex<(std::collections::VecDeque<u64>, NumberMap<()>)>,
    refuse: bool,
    reuse: bool,
}

impl Freed {
    /// Destroyed streams that are remembered.
    const MOST: usize = 1 << 16;

    /// As the environment asks: `SUBLET_SIM_FREED_STREAM`, `SUBLET_SIM_REUSE_STREAMS`.
    ///
    /// # Errors
    /// A value that neither can have.
    pub fn from_env(env: impl Fn(&str) -> Option<String>) -> std::result::Result<Self, BadConfig> {
        let one_of = |name: &str, first: &str, second: &str| match env(name).as_deref() {
            None => Ok(false),
            Some(value) if value == first => Ok(false),
            Some(value) if value == second => Ok(true),
            Some(value) => Err(BadConfig(format!(
                "{name}={value}: expected {first} or {second}"
            ))),
        };
        Ok(Self {
            handles: Mutex::default(),
            refuse: one_of("SUBLET_SIM_FREED_STREAM", "abort", "refuse")?,
            reuse: one_of("SUBLET_SIM_REUSE_STREAMS", "0", "1")?,
        })
    }

    fn add(&self, handle: u64) {
        let mut handles = self.handles.lock();
        let (order, known) = &mut *handles;
        order.push_back(handle);
        known.insert(handle, ());
        if order.len() > Self::MOST
            && let Some(oldest) = order.pop_front()
        {
            known.remove(&oldest);
        }
    }

    /// A handle for a new stream: that of the one destroyed last, where handles are to come again
    /// and nothing is left of it.
    pub fn handle(&self, driver: &Driver) -> u64 {
        if self.reuse {
            let mut handles = self.handles.lock();
            if let Some(last) = handles.0.back().copied()
                && driver.engine.has_forgotten(last)
            {
                handles.0.pop_back();
                handles.1.remove(&last);
                return last;
            }
        }
        registry::fresh()
    }

    /// What a call with a handle that no stream has is answered, if it returns.
    pub fn answer(&self, handle: u64) -> CUresult {
        if !self.refuse && self.handles.lock().1.contains_key(&handle) {
            eprintln!(
                "sublet simgpu: a call of the driver was given stream {handle:#x}, which has been destroyed. With a real driver that is \
                 undefined: it crashes, or reaches another stream. SUBLET_SIM_FREED_STREAM=refuse answers CUDA_ERROR_INVALID_HANDLE instead"
            );
            std::process::abort();
        }
        CUresult::CUDA_ERROR_INVALID_HANDLE
    }
}

/// A stream.
pub struct Stream {
    /// Handle.
    pub id: u64,
    /// Context.
    pub context: u64,
    /// What its queue knows.
    pub info: StreamInfo,
    /// Flags.
    pub flags: u32,
    /// The capture that it is in.
    pub capture: Mutex<Option<Arc<Capture>>>,
    /// `cuStreamSetAttribute`, by id.
    pub attributes: Mutex<std::collections::BTreeMap<u32, [u64; 8]>>,
}

impl Stream {
    /// Makes a stream known to the engine and to the program.
    pub fn register(driver: &'static Driver, info: StreamInfo, flags: u32) -> Arc<Self> {
        driver.engine.add_stream(info.clone());
        let capture = Mutex::new(None);
        let stream = Arc::new(Self {
            id: info.id,
            context: info.context,
            info,
            flags,
            capture,
            attributes: Mutex::default(),
        });
        driver.streams.insert(stream.id, stream.clone());
        stream
    }

    /// The stream that a handle means to the calling thread.
    ///
    /// # Errors
    /// Those of [`current`], and `INVALID_HANDLE`.
    pub fn of(
        handle: CUstream,
        default: Default,
    ) -> Result<(&'static Driver, Arc<Context>, Arc<Self>)> {
        let (driver, context) = current()?;
        let id = match handle.0 as u64 {
            0 if default == Default::Legacy => context.legacy,
            1 => context.legacy,
            0 | 2 => context.per_thread_stream(driver),
            id => id,
        };
        let stream = driver
            .streams
            .get(id)
            .ok_or_else(|| driver.freed.answer(id))?;
        let context = if stream.context == context.id {
            context
        } else {
            let other = driver
                .contexts
                .get(stream.context)
                .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
            other.check()?;
            other
        };
        Ok((driver, context, stream))
    }

    fn captured_by(&self) -> Option<Arc<Capture>> {
        self.capture.lock().clone()
    }

    /// Puts work into the stream, or into the graph that it is being captured into.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when it has been destroyed meanwhile, and the capture's errors.
    pub fn submit(&self, driver: &'static Driver, work: Work) -> Result<()> {
        match self.captured_by() {
            Some(capture) => capture.add(driver, self.id, Action::of(work)),
            None => {
                capture::forbid_implicit(driver, self)?;
                driver.engine.submit(self.id, [work])
            }
        }
    }

    /// Puts a node's action into a stream that is being captured; false when it is not.
    ///
    /// # Errors
    /// The capture's.
    pub fn submit_captured(
        &self,
        driver: &Driver,
        action: impl FnOnce() -> Action,
    ) -> Result<bool> {
        match self.captured_by() {
            Some(capture) => capture.add(driver, self.id, action()).map(|()| true),
            None => Ok(false),
        }
    }

    /// True while it is being captured.
    pub fn is_capturing(&self) -> bool {
        self.capture.lock().is_some()
    }

    /// Refuses what a capturing stream cannot do.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_UNSUPPORTED`, after which the capture is invalid.
    pub fn forbid_capture(&self, driver: &Driver) -> Result<()> {
        if let Some(capture) = self.captured_by() {
            capture.invalidate();
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        capture::forbid_implicit(driver, self)
    }

    /// Adds an allocation to the graph being captured; returns its address.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`, and the capture's errors.
    pub fn capture_alloc(&self, driver: &'static Driver, bytes: u64) -> Result<u64> {
        let block = Block::take(driver, self.info.device, self.context, bytes)?;
        let address = block.address;
        self.submit_captured(driver, || Action::Alloc(block))?;
        Ok(address)
    }

    /// Takes it away; what was put into it is still carried out. A capture that began in it is
    /// over; one that it has joined goes on.
    pub fn destroy(&self, driver: &'static Driver) {
        if let Some(capture) = self.captured_by() {
            capture.detach(driver, self);
        }
        driver.streams.remove(self.id);
        driver.engine.remove_stream(self.id);
        driver.freed.add(self.id);
    }

    /// Lets what follows wait for what an event recorded last.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_ISOLATION` in a capture, for an event from outside of it, and the capture's
    /// errors.
    pub fn wait_event(&self, driver: &'static Driver, event: &Event, external: bool) -> Result<()> {
        let point = event.captured.lock().clone();
        if let Some(point) = point {
            return point.join(self);
        }
        if let Some(capture) = self.captured_by() {
            if external {
                return capture.add(driver, self.id, Action::Wait(event.id));
            }
            if event.last().is_none() {
                return Ok(());
            }
            capture.invalidate();
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        }
        match event.last() {
            Some(record) if record.reached().is_none() => self.submit(driver, Work::Wait(record)),
            _ => Ok(()),
        }
    }

    /// Records an event.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when the stream has been destroyed meanwhile, and the capture's errors.
    pub fn record_event(
        &self,
        driver: &'static Driver,
        event: &Event,
        external: bool,
    ) -> Result<()> {
        if let Some(capture) = self.captured_by() {
            if capture.is_invalid() {
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            }
            if external {
                return capture.add(driver, self.id, Action::Record(event.id));
            }
            *event.captured.lock() = Some(capture.point(self.id));
            return Ok(());
        }
        capture::forbid_implicit(driver, self)?;
        driver
            .engine
            .submit(self.id, [Work::Record(event.begin_record()?)])
    }

    /// Waits for everything in it.
    ///
    /// # Errors
    /// The context's sticky error.
    pub fn synchronize(&self, driver: &'static Driver, context: &Context) -> Result<()> {
        driver.engine.wait_stream(self.id);
        driver.synchronised();
        context.check()
    }
}
