//! The arbiter as this process knows it: the attachment, what becomes of a process that has none,
//! and what the arbiter hears of a hook that fails.

mod asked;
pub(crate) mod client;
pub(crate) mod job;
pub(crate) mod refusal;
pub(crate) mod verdict;
