//! Who runs next, as arithmetic.
//!
//! A policy sees a read-only view and a time, is fed with charges, and answers with a decision. It does no I/O, owns no
//! clock and imports nothing of ours, so that the daemon, the tests and a simulator run the very same code:
//!
//! * [`SlicePolicy`]: which tenants hold one device, and for how long. [`by_name`] builds one.
//! * [`iterations`]: where the iterations of a program begin, from the sequence of its launches.
//! * [`stepper`]: drives a [`SlicePolicy`] through virtual time with simulated tenants.

#![forbid(unsafe_code)]

mod few;
pub mod iterations;
mod registry;
mod slice;
pub mod stepper;
mod stride;

pub use few::Few;
pub use registry::{
    Kind, POLICIES, Param, ParamSpec, PolicyError, PolicySpec, Value, by_name, spec,
};
pub use slice::{
    Class, Decision, Device, GangId, Holder, Iterations, Memory, QuantumBounds, Slice, SlicePolicy,
    TenantId, TenantView, View,
};
pub use stride::Stride;
