//! The integration suite: one binary, a module per topic, a directory per test.

mod bounds;
mod cluster;
mod documents;
mod exports;
mod guest;
mod hooks;
mod hostile;
mod imports;
mod quota;
mod residency;
mod resize;
mod shares;
mod soak;
mod survival;
