//! The simulated driver through its entry points, in one process and across processes.

mod compute;
mod graphs;
mod management;
mod memory;
mod processes;
mod random;
mod residency;
mod shared_events;
mod stress;
mod support;
mod taught;
mod unready;
mod written;

testbed::starts_clean!();
