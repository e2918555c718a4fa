//! Events.

use std::sync::Arc;

use crate::lock::Mutex;
use shim_ffi::CUresult;

use crate::capture::Point;
use crate::context::Context;
use crate::device_state::SharedEvent;
use crate::driver::Driver;
use crate::exec::work::Record;
use crate::registry;

/// An event.
pub struct Event {
    /// Handle.
    pub id: u64,
    /// Context.
    pub context: u64,
    /// Flags.
    pub flags: u32,
    /// What other processes have of it.
    pub shared: Option<Arc<SharedEvent>>,
    /// What was recorded last in this process.
    own: Mutex<Option<Arc<Record>>>,
    /// Set while its last record is a point of a capture.
    pub captured: Mutex<Option<Point>>,
}

impl Event {
    /// One in which nothing was recorded here.
    pub fn new(context: u64, flags: u32, shared: Option<Arc<SharedEvent>>) -> Self {
        Self {
            id: registry::fresh(),
            context,
            flags,
            shared,
            own: Mutex::default(),
            captured: Mutex::default(),
        }
    }

    /// What was recorded last, by this process or another.
    pub fn last(&self) -> Option<Arc<Record>> {
        let own = self.own.lock().clone();
        let Some(shared) = &self.shared else {
            return own;
        };
        let number = shared.last()?;
        own.filter(|record| record.number() == Some(number))
            .or_else(|| Some(Arc::new(Record::elsewhere(shared.clone(), number))))
    }

    /// A new last record, which must go into a stream.
    ///
    /// # Errors
    /// `OPERATING_SYSTEM` where the event's record lock cannot be had.
    pub fn begin_record(&self) -> Result<Arc<Record>, CUresult> {
        let record = Arc::new(match &self.shared {
            None => Record::default(),
            Some(shared) => {
                let number = shared
                    .begin()
                    .ok_or(CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
                Record::shared(shared.clone(), number)
            }
        });
        *self.captured.lock() = None;
        *self.own.lock() = Some(record.clone());
        Ok(record)
    }

    /// Records all work of a context.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when the context has been destroyed meanwhile.
    pub fn record_all(&self, driver: &'static Driver, context: &Context) -> Result<(), CUresult> {
        let stream = context.barrier_stream(driver);
        driver.engine.submit_after_all(stream, self.begin_record()?)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.withdraw();
        }
    }
}
