//! Streams as the program knows them; their queues are in [`crate::exec::engine`].

use std::sync::Arc;

use shim_ffi::{CUresult, CUstream};

use crate::context::{Context, current};
use crate::driver::Driver;
use crate::event::Event;
use crate::exec::engine::StreamInfo;
use crate::exec::work::{Record, Work};
use crate::memory::pool::Pool;

type Result<T> = std::result::Result<T, CUresult>;

/// What stream 0 means to an entry point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Default {
    /// The context's legacy stream.
    Legacy,
    /// The calling thread's stream.
    PerThread,
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
}

impl Stream {
    /// Makes a stream known to the engine and to the program.
    pub fn register(driver: &'static Driver, info: StreamInfo, flags: u32) -> Arc<Self> {
        driver.engine.add_stream(info.clone());
        let stream = Arc::new(Self {
            id: info.id,
            context: info.context,
            info,
            flags,
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
            .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
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

    /// Puts work into the stream.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when it has been destroyed meanwhile.
    pub fn submit(&self, driver: &'static Driver, work: Work) -> Result<()> {
        driver.engine.submit(self.id, [work])
    }

    /// True while it is being captured.
    pub fn is_capturing(&self) -> bool {
        false
    }

    /// Refuses what a capturing stream cannot do.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_UNSUPPORTED`.
    pub fn forbid_capture(&self) -> Result<()> {
        Ok(())
    }

    /// Adds an allocation to the graph being captured.
    ///
    /// # Errors
    /// `NOT_SUPPORTED`.
    pub fn capture_alloc(&self, _driver: &Driver, _pool: &Pool, _bytes: u64) -> Result<u64> {
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }

    /// Ends a capture that will not be finished.
    pub fn abandon_capture(&self) {}

    /// Lets what follows wait for what an event recorded last.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when the stream has been destroyed meanwhile.
    pub fn wait_event(&self, driver: &'static Driver, event: &Event) -> Result<()> {
        let last = event.last.lock().clone();
        match last {
            Some(record) if record.reached().is_none() => self.submit(driver, Work::Wait(record)),
            _ => Ok(()),
        }
    }

    /// Records an event.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when the stream has been destroyed meanwhile.
    pub fn record_event(
        &self,
        driver: &'static Driver,
        event: &Event,
        _external: bool,
    ) -> Result<()> {
        let record = Arc::new(Record::default());
        *event.last.lock() = Some(record.clone());
        self.submit(driver, Work::Record(record))
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
