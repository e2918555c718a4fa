//! Two tests of the whole: *transparency* (with no limit set a program behaves under the preload
//! library exactly as without it) and *exactness* (what a quota charges is what the device lacks).
//!
//! Transparency is checked by the transcript of a run: the same calls, chosen by a seed, made
//! against the bare driver and against the preload library, compared call by call.

pub mod accounting;
pub mod api;
pub mod compare;
mod last_calls;
pub mod probe;
pub mod rng;
pub mod sequence;
pub mod transcript;
