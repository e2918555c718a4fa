//! Events.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::capture::Point;
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
