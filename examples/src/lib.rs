//! What the example programs share: the device through cudarc's driver API, the digits, a small
//! network on the kernels of `simgpu/kernels`, checkpoints, and the handling of arguments and
//! errors.
//!
//! The programs are ordinary CUDA programs. They link nothing of sublet; what asks it anything
//! looks it up by name.

pub mod app;
pub mod bounded_stream;
pub mod checkpoint;
pub mod digits;
pub mod gpu;
pub mod link;
pub mod mlp;
pub mod pipeline;
pub mod resize;
pub mod rng;
pub mod size;
pub mod stripes;
pub mod train;
