//! Events.

use std::sync::Arc;

use parking_lot::Mutex;
use shim_ffi::CUresult;

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
    /// Set while its last record is part of a capture.
    pub captured: Mutex<Option<u64>>,
}

impl Event {
    /// Refuses to look at an event that was recorded in a capture.
    ///
    /// # Errors
    /// `CAPTURED_EVENT`.
    pub fn forbid_captured(&self) -> Result<(), CUresult> {
        if self.captured.lock().is_some() {
            Err(CUresult::CUDA_ERROR_CAPTURED_EVENT)
        } else {
            Ok(())
        }
    }
}
