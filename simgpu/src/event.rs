//! Events.

use std::sync::Arc;

use crate::lock::Mutex;
use shim_ffi::CUresult;

use crate::capture::Point;
use crate::context::Context;
use crate::driver::Driver;
use crate::exec::work::Record;

/// An event.
pub struct Event {
    /// Handle.
    pub id: u64,
    /// Context.
    pub context: u64,
    /// Flags.
    pub flags: u32,
    /// What was recorded last.
    pub last: Mutex<Option<Arc<Record>>>,
    /// Set while its last record is a point of a capture.
    pub captured: Mutex<Option<Point>>,
}

impl Event {
    /// Records all work of a context.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when the context has been destroyed meanwhile.
    pub fn record_all(&self, driver: &'static Driver, context: &Context) -> Result<(), CUresult> {
        let record = Arc::new(Record::default());
        *self.captured.lock() = None;
        *self.last.lock() = Some(record.clone());
        driver
            .engine
            .submit_after_all(context.barrier_stream(driver), record)
    }
}
