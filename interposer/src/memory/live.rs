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

/// Keeps neighbours together: programs allocate and free close to what they touched last, and a table that scatters
/// addresses pays a cache miss for each. The low bits count units of 512 bytes (the least that drivers hand out), 2 MiB
/// and 1 GiB at once, so that neither small nor huge alignments collide; the upper seven, which the table compares
/// first, are mixed.
#[derive(Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        let key = self.0;
        let near = (key >> 9).wrapping_add(key >> 21).wrapping_add(key >> 30);
        // Fibonacci hashing (Knuth, The Art of Computer Programming, vol. 3, 6.4) for the part that must look random.
        let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (near & (u64::MAX >> 7)) | (mixed & !(u64::MAX >> 7))
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = self.0.rotate_left(8) ^ value;
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
    // By the mebibyte, for the same reason. PANIC: the modulus is the length.
    let block = (key >> 20) ^ (key >> 26) ^ (key >> 32);
    lock(&TABLE[block as usize % SHARDS])
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
