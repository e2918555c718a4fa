//! The live hook: what the simulator does in virtual time, done to real jobs on real nodes.
//!
//! * [`wire`]: what travels, JSON over HTTP; [`http`]: as much of HTTP as that needs; [`openapi`]: the document.
//! * [`store`]: what survives `kill -9`.
//! * [`hook`]: the state machine around the same [`policy::cluster::Scheduler`]; [`adapt`]: what nodes that live add to policies that are pure.
//! * [`service`]: routes, token, ticks.

pub mod adapt;
pub mod hook;
pub mod http;
pub mod openapi;
pub mod service;
pub mod store;
pub mod wire;
