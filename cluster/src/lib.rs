//! Above the node: traces, the simulator that runs the cluster slots of `policy` on them, reports,
//! and the live hook.
//!
//! * [`trace`]: readers of public traces and of speed tables, with the line and column of every
//!   mistake.
//! * [`training`]: jobs whose speed is known down to placement, batch size and epoch.
//! * [`spec`]: what a cluster consists of.
//! * [`sim`]: discrete events in virtual time, driving the same [`policy::cluster::Scheduler`] that
//!   a live hook drives.
//! * [`cells`]: tenants with reserved cells, down to a quarter of a GPU.
//! * [`serving`]: requests to the instances of a service, and who decides how many are ready.
//! * [`frontend`]: the same live: between clients and instances, and which of these are used.
//! * [`dl2`]: trains the network of a sizer on simulated runs.
//! * [`report`]: the figures of a run; [`plot`]: its pictures; [`reward`]: its worth.
//!
//! * [`live`]: the hook itself: nodes that report, jobs that are submitted, decisions that are
//!   carried out.

pub mod cells;
pub mod dl2;
pub mod fractions;
pub mod frontend;
pub mod live;
pub mod plot;
pub mod report;
pub mod reward;
pub mod serving;
pub mod sim;
pub mod spec;
pub mod sweep;
pub mod trace;
pub mod training;

pub use policy::cluster::host::HostDivision;

#[cfg(test)]
testbed::starts_clean!();
