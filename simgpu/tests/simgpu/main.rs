//! The simulated driver through its entry points, in one process and across processes.

mod compute;
mod memory;
mod processes;
mod support;
