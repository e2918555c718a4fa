//! Green contexts: contexts with a part of a device's multiprocessors.
//!
//! Kernels of one process run one after another here, so a part is as fast as the whole: what is
//! asked for is kept and given back, and changes no duration.

use std::sync::Arc;

use crate::context::Context;

/// What a green context is made from.
pub struct Resource {
    /// Multiprocessors.
    pub multiprocessors: u32,
}

/// A green context.
pub struct Green {
    /// Handle.
    pub id: u64,
    /// The context that it is to calls that know nothing of it.
    pub context: Arc<Context>,
    /// Multiprocessors.
    pub multiprocessors: u32,
}
