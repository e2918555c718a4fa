//! What is live, by address or handle. Sharded, so that threads rarely meet; a look-up costs the same at any number of
//! live allocations.
//!
//! A device hands memory out in granules of 2 MiB (its page size; `cuMemGetAllocationGranularity` says the same), and small
//! allocations share them. What a quota is charged is what the device lacks: the granules that live allocations lie in,
//! each once. Granules that an allocation fills are its own; those that it fills in part are counted here.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes that a device gives out at least.
pub(crate) const GRANULE: u64 = 2 << 20;

/// Whole granules for `bytes`.
#[inline]
pub(crate) fn granules(bytes: u64) -> u64 {
    bytes.div_ceil(GRANULE).saturating_mul(GRANULE)
}

/// Which account an entry was charged to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A device's memory: the granules that `bytes` from the key on lie in.
    Device,
    /// A device's memory that has no address: `bytes`.
    Whole,
    /// A block of a pool, which is charged as a whole; `context` is the pool.
    Pooled,
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

#[derive(Default)]
struct Shard {
    live: HashMap<u64, Live, BuildHasherDefault<AddressHasher>>,
    /// Live allocations in each granule that none of them fills, by its start.
    shared: HashMap<u64, u32, BuildHasherDefault<AddressHasher>>,
    /// The granule used last, kept out of `shared`: its start, and its count.
    last: (u64, u32),
}

impl Shard {
    const EMPTY: Self = Self {
        live: HashMap::with_hasher(BuildHasherDefault::new()),
        shared: HashMap::with_hasher(BuildHasherDefault::new()),
        last: (0, 0),
    };

    /// The count of a granule. Programs allocate and free in the same one over and over: that costs a comparison.
    #[inline]
    fn count(&mut self, granule: u64) -> &mut u32 {
        let start = granule * GRANULE;
        if self.last.0 != start {
            let (before, count) = self.last;
            if count > 0 {
                self.shared.insert(before, count);
            }
            self.last = (start, self.shared.remove(&start).unwrap_or(0));
        }
        &mut self.last.1
    }

    /// One more allocation in a granule; bytes newly taken.
    #[inline]
    fn enter(&mut self, granule: u64) -> u64 {
        let count = self.count(granule);
        *count += 1;
        if *count == 1 { GRANULE } else { 0 }
    }

    /// One allocation less; bytes no longer taken.
    #[inline]
    fn leave(&mut self, granule: u64) -> u64 {
        let count = self.count(granule);
        if *count == 0 {
            return 0;
        }
        *count -= 1;
        if *count == 0 { GRANULE } else { 0 }
    }
}

/// How a range lies in granules.
struct Cover {
    /// Bytes of granules that it fills.
    filled: u64,
    /// The granules at its ends that it fills in part; the first is that of its start where it is.
    first: Option<u64>,
    last: Option<u64>,
}

#[inline]
fn cover(start: u64, bytes: u64) -> Cover {
    let end = start.saturating_add(bytes);
    let (head, tail) = (start / GRANULE, end.saturating_sub(1) / GRANULE);
    let (inner_start, inner_end) = (start.div_ceil(GRANULE), end / GRANULE);
    let filled = inner_end
        .saturating_sub(inner_start)
        .saturating_mul(GRANULE);
    let first = (bytes != 0 && inner_start != head).then_some(head);
    let last = (bytes != 0 && !end.is_multiple_of(GRANULE) && first != Some(tail)).then_some(tail);
    Cover {
        filled,
        first,
        last,
    }
}

const SHARDS: usize = 64;

/// A shard on a line of its own.
#[repr(align(64))]
struct Padded(Mutex<Shard>);

static TABLE: [Padded; SHARDS] = [const { Padded(Mutex::new(Shard::EMPTY)) }; SHARDS];

#[inline]
fn shard(key: u64) -> MutexGuard<'static, Shard> {
    // By the granule, so that an allocation and its granule are found under one lock, and neighbours stay together.
    // PANIC: the modulus is the length.
    let granule = key / GRANULE;
    let block = granule ^ (granule >> 5) ^ (granule >> 11);
    lock(&TABLE[block as usize % SHARDS])
}

#[inline]
fn lock(shard: &'static Padded) -> MutexGuard<'static, Shard> {
    shard.0.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Remembers an allocation of device memory; bytes of the device that are newly taken by it.
#[inline]
pub(crate) fn insert(key: u64, live: Live) -> u64 {
    let Cover {
        filled,
        first,
        last,
    } = if live.kind == Kind::Device {
        cover(key, live.bytes)
    } else {
        Cover {
            filled: live.bytes,
            first: None,
            last: None,
        }
    };
    let mut taken = filled;
    let home = key / GRANULE;
    let before;
    {
        let mut shard = shard(key);
        before = shard.live.insert(key, live);
        for granule in [first, last].into_iter().flatten() {
            if granule == home {
                taken += shard.enter(granule);
            }
        }
    }
    for granule in [first, last].into_iter().flatten() {
        if granule != home {
            taken += shard(granule * GRANULE).enter(granule);
        }
    }
    if let Some(before) = before {
        // The driver gives an address away once: what was there went with its context, whose call has not come back yet.
        super::give_back(key, &before);
    }
    taken
}

/// Remembers again what was taken out for a call that then failed.
pub(crate) fn put_back(key: u64, live: Live) {
    shard(key).live.insert(key, live);
}

/// Takes an allocation out and says what it was. What it covers stays charged until [`uncover`].
#[inline]
pub(crate) fn remove(key: u64) -> Option<Live> {
    shard(key).live.remove(&key)
}

/// After the driver has freed what was at `key`: bytes of the device that are no longer taken.
#[inline]
pub(crate) fn uncover(key: u64, live: &Live) -> u64 {
    if live.kind != Kind::Device {
        return live.bytes;
    }
    let Cover {
        filled,
        first,
        last,
    } = cover(key, live.bytes);
    [first, last]
        .into_iter()
        .flatten()
        .fold(filled, |freed, granule| {
            freed + shard(granule * GRANULE).leave(granule)
        })
}

/// Forgets everything of one context.
pub(crate) fn drain_context(context: usize, mut each: impl FnMut(u64, &Live)) {
    for padded in &TABLE {
        let mut gone = Vec::new();
        lock(padded).live.retain(|key, live| {
            let goes = live.context == context && live.kind != Kind::Pooled;
            if goes {
                gone.push((*key, *live));
            }
            !goes
        });
        gone.iter().for_each(|(key, live)| each(*key, live));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(bytes: u64) -> Live {
        Live {
            bytes,
            device: 0,
            kind: Kind::Device,
            context: 0,
        }
    }

    fn free(key: u64) -> u64 {
        let live = remove(key).unwrap();
        uncover(key, &live)
    }

    #[test]
    fn a_granule_is_charged_once_however_many_share_it() {
        let base = 0x7000_0000_0000;
        assert_eq!(insert(base, plain(512)), GRANULE);
        assert_eq!(insert(base + 512, plain(1000)), 0);
        assert_eq!(free(base), 0);
        assert_eq!(insert(base + 4096, plain(4096)), 0);
        assert_eq!(free(base + 512), 0);
        assert_eq!(free(base + 4096), GRANULE);
    }

    #[test]
    fn granules_that_are_filled_are_ones_own() {
        let base = 0x7100_0000_0000;
        assert_eq!(insert(base, plain(3 * GRANULE)), 3 * GRANULE);
        assert_eq!(free(base), 3 * GRANULE);
    }

    #[test]
    fn the_ends_of_a_large_allocation_are_shared() {
        let base = 0x7200_0000_0000;
        assert_eq!(insert(base + 512, plain(2 * GRANULE)), 3 * GRANULE);
        assert_eq!(insert(base, plain(512)), 0);
        assert_eq!(insert(base + 3 * GRANULE - 512, plain(512)), 0);
        assert_eq!(free(base + 512), GRANULE);
        assert_eq!(free(base), GRANULE);
        assert_eq!(free(base + 3 * GRANULE - 512), GRANULE);
    }
}
