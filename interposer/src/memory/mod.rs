//! Hooks of the driver's memory functions, each by the symbol's name: what they do is metered
//! ([`metering`](crate::metering)), and what may be moved is ([`residency`](crate::residency)).

mod array;
mod graph;
mod host;
mod plain;
mod pool;
mod report;
mod vmm;

pub(crate) use array::*;
pub(crate) use graph::*;
pub(crate) use host::*;
pub(crate) use plain::*;
pub(crate) use pool::*;
pub(crate) use report::*;
pub(crate) use vmm::*;
