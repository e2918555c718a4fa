//! Streams with a bounded number of launches in flight.

use std::rc::Rc;

use cudarc::driver::{result, sys};

use crate::gpu::{Arg, Gpu, GpuError, Shape, failed};

/// A stream of its own that keeps a few launches in flight.
pub struct BoundedStream {
    gpu: Rc<Gpu>,
    stream: sys::CUstream,
    ends: Vec<sys::CUevent>,
    launches: u64,
}

impl BoundedStream {
    /// Opens a stream that lets `depth` launches be queued.
    ///
    /// # Errors
    /// What the driver says.
    pub fn open(gpu: &Rc<Gpu>, depth: usize) -> Result<BoundedStream, GpuError> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| failed("cannot create a stream", error))?;
        let mut opened = BoundedStream {
            gpu: Rc::clone(gpu),
            stream,
            ends: Vec::new(),
            launches: 0,
        };
        for _ in 0..depth.max(1) {
            let end = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
            opened
                .ends
                .push(end.map_err(|error| failed("cannot create an event", error))?);
        }
        Ok(opened)
    }

    /// Queues the kernel `name`, first waiting for the launch `depth` before this one.
    ///
    /// # Errors
    /// What the driver says to the launch, or to work before it.
    pub fn launch(
        &mut self,
        name: &'static str,
        shape: Shape,
        args: &[Arg],
    ) -> Result<(), GpuError> {
        let depth = self.ends.len() as u64; // CAST: a length fits 64 bits.
        // CAST: below the length.
        let end = self.ends[(self.launches % depth) as usize];
        if self.launches >= depth {
            // SAFETY: the event is this one's and was recorded by an earlier launch.
            unsafe { result::event::synchronize(end) }
                .map_err(|error| failed(format!("waiting for {name}"), error))?;
        }
        self.gpu.launch_on(self.stream, name, shape, args)?;
        // SAFETY: the event and the stream are this one's, of the same context.
        unsafe { result::event::record(end, self.stream) }
            .map_err(|error| failed("cannot record an event", error))?;
        self.launches += 1;
        Ok(())
    }

    /// Launches so far.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.launches
    }

    /// Waits until all of them are done.
    ///
    /// # Errors
    /// The error of work that failed.
    pub fn wait(&self) -> Result<(), GpuError> {
        // SAFETY: the stream is this one's.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|error| failed("waiting for a stream", error))
    }
}

impl Drop for BoundedStream {
    fn drop(&mut self) {
        // SAFETY: all were created by `open` and are destroyed once; the driver lets queued work
        // finish. Nothing more can be done about a failure on the way out.
        unsafe {
            for end in self.ends.drain(..) {
                let _ = result::event::destroy(end);
            }
            let _ = result::stream::destroy(self.stream);
        }
    }
}
