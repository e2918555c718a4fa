//! The entry points, one file per noun. All are flat here under the driver's own names.

mod context;
mod copy;
mod device;
mod event;
mod init;
mod launch;
mod memory;
mod memset;
mod module;
mod pointer;
mod pool;
mod stream;
mod vmm;

pub use context::*;
pub use copy::*;
pub use device::*;
pub use event::*;
pub use init::*;
pub use launch::*;
pub use memory::*;
pub use memset::*;
pub use module::*;
pub use pointer::*;
pub use pool::*;
pub use stream::*;
pub use vmm::*;

use shim_ffi::CUresult;

use memory::allocating;

/// What a body answers.
type Done = Result<(), CUresult>;

/// Base, pitch and height of an array.
fn array_layout(_array: u64) -> Result<(u64, usize, usize), CUresult> {
    Err(CUresult::CUDA_ERROR_INVALID_HANDLE)
}
