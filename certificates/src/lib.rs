//! Certificates and keys of this host: files that count as they are now, what both ends of a TLS
//! connection make of them, and an authority for a lab that has none.
//!
//! What is said over such a connection, and who listens, is for others.

mod client;
mod explain;
mod followed;
mod make;
mod names;
mod revoked;
mod server;
#[cfg(test)]
mod tests;

pub use client::{Client, ClientFiles};
pub use explain::{explain, is_no_tls, is_refusal};
pub use followed::{Followed, Notice, Stamp, Taken, Wrong, read};
pub use make::{Authority, Lab, Made, MakeError, Purpose, check_names, write_pair};
pub use names::names;
pub use server::{Server, ServerFiles, Versions};

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

/// TLS of this process, by ring alone.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
