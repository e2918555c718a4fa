//! The integration suite: one binary, a module per topic, a directory per test.

mod api;
mod bounds;
mod cluster;
mod collective;
mod config;
mod demo;
mod descriptors;
mod documents;
mod exports;
mod hooks;
mod host_process;
mod hostile;
mod imports;
mod interfere;
mod lease;
mod loading;
mod membership;
mod metrics;
mod namespaces;
mod one_table;
mod python;
mod quota;
mod recording;
mod refusal;
mod residency;
mod resize;
mod service;
mod shared_events;
mod shares;
mod soak;
mod streams;
mod stuck;
mod survival;
mod top;
mod trace;

testbed::starts_clean!();
