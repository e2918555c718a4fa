//! The messages that a kubelet and its plugins exchange.
//!
//! Transcribed by hand from the published API, as far as it is used here; numbers of fields are
//! what travels. Fields that are not here are skipped by the reader, as protobuf has it.

pub mod device_plugin;
pub mod dra;
pub mod nri;
pub mod plugin_registration;
pub mod pod_resources;
pub mod timeslice;
