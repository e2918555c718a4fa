//! Who runs next, as arithmetic.
//!
//! A policy sees a read-only view and a time, receives charges, and answers with a decision. It
//! does no I/O, owns no clock and imports no other crate of the workspace, so that the daemon, the
//! tests and a simulator run the same code:
//!
//! * [`SlicePolicy`]: which tenants hold one device, and for how long. [`by_name`] builds one.
//! * [`quantum`]: how long a slice lasts, by what a hand-over costs.
//! * [`Quantile`]: a high quantile of what was seen of late.
//! * [`residency`]: which jobs stay in a device's memory when not all fit.
//! * [`coordinator`]: how much of a device's memory opportunistic jobs leave to guaranteed ones.
//! * [`lend`]: which jobs may submit where all of them are in at once.
//! * [`gangs`]: whose turn it is on devices that jobs use together.
//! * [`iterations`]: where the iterations of a program begin, from the sequence of its launches.
//! * [`standbys`]: how many instances of a service have to be ready.
//! * [`cluster`]: what runs where above the node: the slots, the policies that fill them, and the
//!   scheduler that asks them.
//! * [`stepper`]: drives a [`SlicePolicy`] through virtual time with simulated tenants.

#![forbid(unsafe_code)]

pub mod cluster;
pub mod coordinator;
mod few;
pub mod gangs;
pub mod iterations;
pub mod lend;
pub mod names;
mod partitions;
mod quantile;
pub mod quantum;
pub mod registry;
pub mod residency;
mod shares;
mod slice;
mod slices;
pub mod standbys;
pub mod stepper;
mod turns;

pub use few::Few;
pub use partitions::{HOLD_BACK_BYTES, NoPartition, PartitionTable};
pub use quantile::Quantile;
pub use registry::{Kind, Param, ParamSpec, PolicyError, Registration, Value};
pub use slice::{
    Class, CoordinatorTerms, Decision, Device, Holder, Iterations, LatencyReport, Memory,
    QuantumBounds, Slice, SlicePolicy, TenantId, TenantView, Unmet, View,
};
pub use slices::{POLICIES, SliceRegistration, Stride, by_name, spec};
pub use turns::PartitionId;
