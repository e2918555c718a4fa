//! What is live, by address or handle. Sharded, so that threads rarely meet; a look-up costs the same at any number of
//! live allocations.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Which account an entry was charged to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A device's memory.
    Device,
    /// Pinned host memory.
    Host,
}

/// One live allocation.
#[derive(Clone, Copy)]
pub(crate) struct Live {
    pub(crate) bytes: u64,
    /// Device index of the pages.
    pub(crate) device: u32,
    pub(crate) kind: Kind,
    /// Context that it goes with, 0 for none.
    pub(crate) context: usize,
}

/// Addresses are multiples of their alignment: mix the upper bits down.
#[derive(Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        // Fibonacci hashing (Knuth, The Art of Computer Programming, vol. 3, 6.4), folded.
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

type Shard = HashMap<u64, Live, BuildHasherDefault<AddressHasher>>;

const SHARDS: usize = 64;

/// A shard on a line of its own.
#[repr(align(64))]
struct Padded(Mutex<Shard>);

static TABLE: [Padded; SHARDS] =
    [const { Padded(Mutex::new(HashMap::with_hasher(BuildHasherDefault::new()))) }; SHARDS];

#[inline]
fn shard(key: u64) -> MutexGuard<'static, Shard> {
    let mut hasher = AddressHasher::default();
    hasher.write_u64(key);
    // PANIC: the modulus is the length. The upper bits: the map itself uses the others.
    lock(&TABLE[(hasher.finish() >> 40) as usize % SHARDS])
}

#[inline]
fn lock(shard: &'static Padded) -> MutexGuard<'static, Shard> {
    shard.0.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Remembers an allocation.
#[inline]
pub(crate) fn insert(key: u64, live: Live) {
    shard(key).insert(key, live);
}

/// Forgets an allocation and says what it was.
#[inline]
pub(crate) fn remove(key: u64) -> Option<Live> {
    shard(key).remove(&key)
}

/// Forgets everything of one context.
pub(crate) fn drain_context(context: usize, mut each: impl FnMut(&Live)) {
    for shard in &TABLE {
        lock(shard).retain(|_, live| {
            let goes = live.context == context;
            if goes {
                each(live);
            }
            !goes
        });
    }
}
