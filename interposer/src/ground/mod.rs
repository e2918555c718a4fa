//! What everything else stands on: nothing here knows of the driver, the arbiter, or a job.

pub(crate) mod clock;
pub(crate) mod environment;
pub(crate) mod errno;
pub(crate) mod fault;
pub(crate) mod lock;
pub(crate) mod process;
pub(crate) mod stretch;
pub(crate) mod thread;
