//! What runs where, above the node: questions that are slots for small policies, and one slot that
//! answers most of them at once.
//!
//! | slot | question |
//! |---|---|
//! | [`Order`] | who is next? |
//! | [`Admission`] | is the job's deadline promised, and in which leases does it run? |
//! | [`Sizer`] | how many GPUs does each elastic job get? |
//! | [`Packer`] | who shares a GPU with whom, and what did it cost? |
//! | [`Placer`] | which GPUs? |
//! | [`Throughputs`] | how fast do two jobs run together? |
//! | [`RoundAllocator`] | all of these at once, in rounds: who runs where? |
//! | [`SlicePolicy`](crate::SlicePolicy) | on the node: who holds the device now? |
//!
//! [`Scheduler`] asks them and answers with a batch of [`Decision`]s. Everything is arithmetic on a
//! [`ClusterState`] whose clock is a number: the live hook and the simulator run the same objects,
//! each keeping its own state. [`catalogue`] knows every policy by name, and [`Choice`] builds a
//! scheduler of several.

pub mod admission;
pub mod catalogue;
mod choice;
pub mod completion;
pub mod convergence;
mod decision;
pub mod fair;
mod free;
pub mod goodput;
pub mod host;
mod job;
pub mod order;
pub mod packer;
pub mod placer;
pub mod planner;
mod random;
pub mod round_allocator;
pub mod scaling;
mod scheduler;
pub mod sizer;
mod state;
mod tags;
mod throughput;
pub mod wait;

pub use admission::{Admission, Admit};
pub use choice::{Choice, Policies};
pub use decision::{Decision, Reason};
pub use free::FreeGpus;
pub use job::{Class, Job, JobId, JobType, Part, Phase, Profile, Run, Speed, UserId};
pub use order::{Drift, Key, Order};
pub use packer::{PackScore, Packer, Past, Verdict};
pub use placer::Placer;
pub use random::Random;
pub use round_allocator::{RoundAllocator, Turn};
pub use scheduler::{Learnt, Scheduler, Waits, keep_where_nobody_comes};
pub use sizer::Sizer;
pub use state::{
    ClusterState, GpuId, GpuType, JOBS_ON_GPU, MOST_JOBS_ON_GPU, Node, NodeId, PART_TOLERANCE,
    Refused,
};
pub use tags::{Manner, Objective, Tags};
pub use throughput::{PairTable, Throughputs, beside_all, beside_others};
