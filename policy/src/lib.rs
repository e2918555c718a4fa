//! Who runs next, as arithmetic.
//!
//! A policy sees a read-only view and a time, is fed with charges, and answers with a decision. It does no I/O, owns no
//! clock and imports nothing of ours, so that the daemon, the tests and a simulator run the very same code:
//!
//! * [`SlicePolicy`]: which tenant holds one device, and for how long. [`Stride`] is the one in use.
//! * [`cluster`]: what runs where above the node: the slots, the policies that fill them, and the scheduler that asks them.
//! * [`stepper`]: drives a [`SlicePolicy`] through virtual time with simulated tenants.

#![forbid(unsafe_code)]

pub mod cluster;
mod slice;
pub mod stepper;
mod stride;

pub use slice::{
    Class, Decision, Holder, QuantumBounds, Slice, SlicePolicy, TenantId, TenantView, View,
};
pub use stride::Stride;
