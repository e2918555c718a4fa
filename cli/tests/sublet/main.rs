//! The real `sublet` binary, against an arbiter of the test's own making.
//!
//! What is said to the arbiter is checked here; that the real one understands it is for
//! `with_arbiter` and the workspace's integration suite.

mod bad_input;
mod config;
mod events;
mod fixture;
mod interfere;
mod json;
mod ps_and_set;
mod run;
mod top;
mod with_arbiter;

testbed::starts_clean!();
