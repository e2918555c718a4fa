//! placeholder

pub mod kernels;
