//! Moments: the order of uses, and no time.

use std::sync::atomic::{AtomicU64, Ordering};

static CLOCK: AtomicU64 = AtomicU64::new(0);

/// The next moment, for [`Chunk::used`](super::chunk::Chunk::used).
pub(super) fn tick() -> u64 {
    CLOCK.fetch_add(1, Ordering::Relaxed) + 1
}
