//! Opaque handles: numbers that are looked up, never pointers that are followed.
//!
//! Numbers are unique over all kinds, so the handle of one kind is garbage to another.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::lock::RwLock;

/// Handles are multiples of 64 above this; nothing is ever mapped there.
const FIRST: u64 = 0x0051_b1e7_0000_0000;
static NEXT: AtomicU64 = AtomicU64::new(FIRST);

/// A handle that no object has yet.
pub fn fresh() -> u64 {
    NEXT.fetch_add(64, Relaxed)
}

/// Spreads handle numbers; they are unique, so that is all a hash needs to do.
#[derive(Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29);
    }
}

/// A map from handle numbers.
pub type NumberMap<T> = HashMap<u64, T, BuildHasherDefault<NumberHasher>>;

/// Live objects of one kind.
pub struct Registry<T>(RwLock<NumberMap<Arc<T>>>);

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<T> Registry<T> {
    /// Registers an object under its handle.
    pub fn insert(&self, handle: u64, object: Arc<T>) {
        self.0.write().insert(handle, object);
    }

    /// The object of a handle.
    pub fn get(&self, handle: u64) -> Option<Arc<T>> {
        self.0.read().get(&handle).cloned()
    }

    /// Takes the object of a handle out.
    pub fn remove(&self, handle: u64) -> Option<Arc<T>> {
        self.0.write().remove(&handle)
    }

    /// Objects for which `wanted` holds.
    pub fn all(&self, wanted: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        self.0
            .read()
            .values()
            .filter(|object| wanted(object))
            .cloned()
            .collect()
    }
}
