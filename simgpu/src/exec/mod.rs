//! Execution: streams' queues, the device's engines, and the timelines on which work takes its
//! modelled time.

pub mod aside;
pub mod compute;
pub mod engine;
mod threads;
pub mod work;
