//! A simulated GPU behind the CUDA driver API.
//!
//! One device_state (or several) is shared by all processes of a host through a mapped file
//! ([`device_state`]): capacity, the compute engine's turns, copy engines. Within a process,
//! [`driver`] holds contexts, memory with real bytes ([`memory`]), streams and their execution
//! ([`exec`]), modules ([`module`]) and graphs. [`api`] has the entry points, named as the
//! driver's; the cdylibs next to this crate export them. [`observe`] tells what processes use, for
//! tests and for NVML.
//!
//! Every figure from here is simulated. It does not pose as NVIDIA's driver towards NVIDIA's
//! runtime.

#[allow(
    non_snake_case,
    clippy::too_many_arguments,
    reason = "the driver's own names and parameters"
)]
pub mod api;
mod array;
mod attributes;
mod capture;
pub mod clock;
mod context;
pub mod costs;
pub mod device_state;
mod driver;
pub mod entry;
mod event;
mod exec;
mod faults;
mod function;
mod graph;
mod green;
pub mod image;
pub mod kernels;
mod lock;
pub mod memory;
mod module;
#[allow(non_snake_case, reason = "the library's own names")]
pub mod nvml;
pub mod observe;
pub mod profile;
#[cfg(test)]
#[path = "../tests/simgpu/random.rs"]
mod random;
pub mod received;
mod registry;
pub mod settings;
mod stream;
mod uninitialised;
pub mod unsupported;
mod visible;

pub use settings::set;

#[cfg(test)]
testbed::starts_clean!();
