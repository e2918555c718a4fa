//! Submissions: which device and stream they go to, what they weigh, when they may pass, and what
//! of them is in flight.

mod admit;
pub(crate) mod capture;
pub(crate) mod context;
pub(crate) mod cost;
pub(crate) mod failure;
pub(crate) mod follow;
pub(crate) mod lookers;
pub(crate) mod marks;
pub(crate) mod pace;
pub(crate) mod patience;
pub(crate) mod quiesce;
pub(crate) mod registration;
pub(crate) mod signature;
pub(crate) mod slots;
pub(crate) mod streams;
pub(crate) mod throughput;
pub(crate) mod weighing;

pub(crate) use admit::*;
pub(crate) use streams::*;
