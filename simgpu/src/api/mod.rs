//! The entry points, one file per noun. All are flat here under the driver's own names.

mod array;
mod capture;
mod context;
mod copy;
mod coredump;
mod device;
mod event;
mod graph;
mod graph_exec;
mod graph_node;
mod green;
mod init;
mod launch;
mod memory;
mod memset;
mod misc;
mod module;
mod occupancy;
mod pointer;
mod pool;
mod stream;
mod vmm;

pub use array::*;
pub use capture::*;
pub use context::*;
pub use copy::*;
pub use coredump::*;
pub use device::*;
pub use event::*;
pub use graph::*;
pub use graph_exec::*;
pub use graph_node::*;
pub use green::*;
pub use init::*;
pub use launch::*;
pub use memory::*;
pub use memset::*;
pub use misc::*;
pub use module::*;
pub use occupancy::*;
pub use pointer::*;
pub use pool::*;
pub use stream::*;
pub use vmm::*;

use shim_ffi::CUresult;

/// What a body answers.
type Done = Result<(), CUresult>;
