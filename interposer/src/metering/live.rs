//! What is live, by address or handle. Sharded, so that threads rarely meet; a look-up costs the
//! same at any number of live allocations.
//!
//! A device hands memory out in granules of 2 MiB (its page size; `cuMemGetAllocationGranularity`
//! says the same), and small allocations share them. What a quota is charged is what the device
//! lacks: the granules that live allocations lie in, each once. Granules that an allocation fills
//! are its own; those that it fills in part are counted here.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ground::lock::{Guard, Lock};

/// Bytes that a device gives out at least.
pub(crate) const GRANULE: u64 = 2 << 20;

/// More than any device has: what is asked for beyond this is accounted as this, so that no sum
/// outgrows its word.
const MOST: u64 = 8 << 40;

/// Whole granules for `bytes`.
#[inline]
pub(crate) fn granules(bytes: u64) -> u64 {
    bytes.div_ceil(GRANULE).saturating_mul(GRANULE).min(MOST)
}

/// Allocations up to this size may share granules.
pub(crate) const SMALL: u64 = GRANULE / 2;
/// Least bytes that drivers hand out, and what they align to.
const UNIT: u64 = 512;

/// Which account an entry was charged to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A device's memory: the granules that `bytes` from the key on lie in.
    Device,
    /// The same, with granules that allocations of other kinds do not share.
    Apart,
    /// A device's memory that has no address: `bytes`.
    Whole,
    /// A block of a pool, which is charged as a whole; `context` is the pool.
    Pooled,
    /// Pinned host memory.
    Host,
    /// Nothing: only frees of what was at this address before are still to come.
    Gone,
}

/// One live allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Live {
    pub(crate) bytes: u64,
    /// Context that it goes with, 0 for none.
    pub(crate) context: usize,
    /// Device index of the pages.
    pub(crate) device: u16,
    pub(crate) kind: Kind,
    /// Allocations that were at this address before and whose frees have not come back yet, see
    /// [`insert`].
    pub(crate) overtaken: u8,
}

impl Live {
    fn by_address(&self) -> bool {
        matches!(self.kind, Kind::Device | Kind::Apart)
    }
}

/// Keeps neighbours together: programs allocate and free close to what they touched last, and a
/// table that scatters addresses pays a cache miss for each. The low bits count units of 512 bytes
/// (the least that drivers hand out), 2 MiB and 1 GiB at once, so that neither small nor huge
/// alignments collide; the upper seven, which the table compares first, are mixed.
#[derive(Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        let key = self.0;
        let near = (key >> 9).wrapping_add(key >> 21).wrapping_add(key >> 30);
        // Fibonacci hashing (Knuth, The Art of Computer Programming, vol. 3, 6.4) for the part that
        // must look random.
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

type Map<T> = HashMap<u64, T, BuildHasherDefault<AddressHasher>>;

/// Entries by key. The one that came last is kept out of the map: programs free what they have just
/// allocated over and over, and that costs a comparison.
struct Entries {
    last: Option<(u64, Live)>,
    map: Map<Live>,
}

impl Entries {
    const EMPTY: Self = Self {
        last: None,
        map: HashMap::with_hasher(BuildHasherDefault::new()),
    };

    /// Puts an entry in; the one that was there.
    #[inline]
    fn insert(&mut self, key: u64, live: Live) -> Option<Live> {
        let before = match self.last.replace((key, live)) {
            Some((same, before)) if same == key => return Some(before),
            Some((other, before)) => self.map.insert(other, before),
            None => None,
        };
        debug_assert!(before.is_none(), "in both places");
        if self.map.is_empty() {
            return None;
        }
        self.map.remove(&key)
    }

    #[inline]
    fn remove(&mut self, key: u64) -> Option<Live> {
        if let Some((_, live)) = self.last.take_if(|last| last.0 == key) {
            return Some(live);
        }
        self.map.remove(&key)
    }

    fn get_mut(&mut self, key: u64) -> Option<&mut Live> {
        match &mut self.last {
            Some((last, live)) if *last == key => Some(live),
            _ => self.map.get_mut(&key),
        }
    }

    fn iter(&self) -> impl Iterator<Item = (u64, &Live)> {
        let last = self.last.iter().map(|(key, live)| (*key, live));
        last.chain(self.map.iter().map(|(key, live)| (*key, live)))
    }

    fn retain(&mut self, mut keep: impl FnMut(u64, &mut Live) -> bool) {
        self.last.take_if(|(key, live)| !keep(*key, live));
        self.map.retain(|key, live| keep(*key, live));
    }
}

struct Shard {
    live: Entries,
    /// Live allocations in each granule that none of them fills, by its start.
    shared: Map<u32>,
    /// The granule used last, kept out of `shared`: its start, and its count.
    last: (u64, u32),
}

impl Shard {
    const EMPTY: Self = Self {
        live: Entries::EMPTY,
        shared: HashMap::with_hasher(BuildHasherDefault::new()),
        last: (0, 0),
    };

    /// The count of a granule. Programs allocate and free in the same one over and over: that costs
    /// a comparison.
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
    fn vacate(&mut self, granule: u64) -> u64 {
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
    let (lowest, highest) = (start / GRANULE, end.saturating_sub(1) / GRANULE);
    let (inner_start, inner_end) = (start.div_ceil(GRANULE), end / GRANULE);
    let filled = inner_end
        .saturating_sub(inner_start)
        .saturating_mul(GRANULE);
    let first = (bytes != 0 && inner_start != lowest).then_some(lowest);
    let last =
        (bytes != 0 && !end.is_multiple_of(GRANULE) && first != Some(highest)).then_some(highest);
    Cover {
        filled,
        first,
        last,
    }
}

const SHARDS: usize = 64;

/// A shard on a line of its own.
#[repr(align(64))]
struct Padded(Lock<Shard>);

static TABLE: [Padded; SHARDS] = [const { Padded(Lock::new(Shard::EMPTY)) }; SHARDS];

#[inline]
fn shard(key: u64) -> Guard<'static, Shard> {
    // By the granule, so that an allocation and its granule are found under one lock, and
    // neighbours stay together.
    // PANIC: the modulus is the length.
    let granule = key / GRANULE;
    let block = granule ^ (granule >> 5) ^ (granule >> 11);
    TABLE[block as usize % SHARDS].0.lock()
}

/// Contexts that are being destroyed: what they held goes without a free of its own.
static DYING: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn dying() -> MutexGuard<'static, Vec<usize>> {
    DYING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Before the driver destroys a context.
pub(crate) fn context_dies(context: usize) {
    dying().push(context);
}

/// After the driver has been asked to destroy a context, and what it held has been drained.
pub(crate) fn context_died(context: usize) {
    let mut dying = dying();
    if let Some(at) = dying.iter().position(|one| *one == context) {
        dying.swap_remove(at);
    }
}

fn shape(key: u64, live: &Live) -> Cover {
    if live.by_address() {
        cover(key, live.bytes)
    } else {
        Cover {
            filled: live.bytes,
            first: None,
            last: None,
        }
    }
}

/// Remembers an allocation of device memory; bytes of the device that are newly taken by it.
///
/// Frees are noted after the driver's call. So there may still be an entry of what was at this
/// address before, whose free has not come back yet: it is given back here, and that free will find
/// nothing to do.
#[inline]
pub(crate) fn insert(key: u64, live: Live) -> u64 {
    let Cover {
        filled,
        first,
        last,
    } = shape(key, &live);
    let mut taken = filled;
    let home = key / GRANULE;
    let before;
    {
        let mut shard = shard(key);
        before = shard.live.insert(key, live);
        if let Some(before) = &before {
            overtake(&mut shard, key, before);
        }
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
        super::give_back(&before, uncover(key, &before));
    }
    taken
}

/// A new entry has taken the place of `before`. Unless that went with its context, its free is
/// still to come, and must not take the new entry for it.
#[cold]
fn overtake(shard: &mut Shard, key: u64, before: &Live) {
    let goes_without_free = before.kind == Kind::Gone
        || before.kind != Kind::Pooled && dying().contains(&before.context);
    if let Some(live) = shard.live.get_mut(key) {
        live.overtaken = before
            .overtaken
            .saturating_add(u8::from(!goes_without_free));
    }
}

/// After the driver has freed what was at `key`: takes the entry out; it, and bytes of the device
/// that are no longer taken.
#[inline]
pub(crate) fn remove(key: u64) -> Option<(Live, u64)> {
    let mut home = shard(key);
    let mut live = home.live.remove(key)?;
    if live.overtaken != 0 {
        // A thread that was given the address after it has given it back already.
        live.overtaken -= 1;
        if live.kind != Kind::Gone || live.overtaken != 0 {
            home.live.insert(key, live);
        }
        return None;
    }
    if !live.by_address() {
        return Some((live, live.bytes));
    }
    let Cover {
        filled,
        first,
        last,
    } = cover(key, live.bytes);
    let mut freed = filled;
    let mut elsewhere = None;
    for granule in [first, last].into_iter().flatten() {
        if granule == key / GRANULE {
            freed += home.vacate(granule);
        } else {
            elsewhere = Some(granule);
        }
    }
    drop(home);
    if let Some(granule) = elsewhere {
        freed += shard(granule * GRANULE).vacate(granule);
    }
    Some((live, freed))
}

/// What is live at `key`.
pub(crate) fn peek(key: u64) -> Option<Live> {
    shard(key).live.get_mut(key).copied()
}

/// Bytes of the device that are no longer taken when `live` at `key`, whose entry is gone, is gone.
fn uncover(key: u64, live: &Live) -> u64 {
    let Cover {
        filled,
        first,
        last,
    } = shape(key, live);
    [first, last]
        .into_iter()
        .flatten()
        .fold(filled, |freed, granule| {
            freed + shard(granule * GRANULE).vacate(granule)
        })
}

/// Which kinds of device memory there are: what is made with a kind's bit, by device index. Looks
/// at every entry.
pub(crate) fn kinds<const DEVICES: usize>(bit: impl Fn(Kind) -> u8) -> [u8; DEVICES] {
    let mut found = [0; DEVICES];
    for padded in &TABLE {
        for (_, live) in padded.0.lock().live.iter() {
            if let Some(kinds) = found.get_mut(usize::from(live.device)) {
                *kinds |= bit(live.kind);
            }
        }
    }
    found
}

/// Forgets everything of one context: entries, and bytes of the device that are no longer taken.
pub(crate) fn drain_context(context: usize, mut each: impl FnMut(&Live, u64)) {
    for padded in &TABLE {
        let mut gone = Vec::new();
        padded.0.lock().live.retain(|key, live| {
            let goes = live.context == context && !matches!(live.kind, Kind::Pooled | Kind::Gone);
            if goes {
                gone.push((key, *live));
                // Late frees of what was here before must not take a later entry for theirs.
                (live.kind, live.bytes) = (Kind::Gone, 0);
            }
            !goes || live.overtaken != 0
        });
        gone.iter()
            .for_each(|(key, live)| each(live, uncover(*key, live)));
    }
}

/// Whether there is space for `bytes` between small allocations of `context` in a granule that they
/// have already. Entries outlive the driver's free, so that what looks free here is free there;
/// unless it was just given to somebody whose allocation has not come back yet.
#[cold]
pub(crate) fn space(context: usize, device: u16, bytes: u64) -> bool {
    let mut parts = Vec::new();
    for padded in &TABLE {
        for (start, live) in padded.0.lock().live.iter() {
            if !live.by_address() || live.device != device {
                continue;
            }
            let fits_in =
                live.kind == Kind::Device && live.bytes <= SMALL && live.context == context;
            let end = start.saturating_add(live.bytes).next_multiple_of(UNIT);
            let (lowest, highest) = (start / GRANULE, end.saturating_sub(1) / GRANULE);
            parts.push((lowest, start, end.min((lowest + 1) * GRANULE), fits_in));
            if highest != lowest {
                parts.push((highest, highest * GRANULE, end, fits_in));
            }
        }
    }
    parts.sort_unstable();
    parts
        .chunk_by(|one, other| one.0 == other.0)
        .filter(|granule| granule.iter().all(|part| part.3))
        .any(|granule| {
            let begin = granule.first().map_or(0, |part| part.0 * GRANULE);
            let mut free_from = begin;
            let between = granule.iter().any(|(_, start, end, _)| {
                let fits = start.saturating_sub(free_from) >= bytes.next_multiple_of(UNIT);
                free_from = free_from.max(*end);
                fits
            });
            between || (begin + GRANULE).saturating_sub(free_from) >= bytes.next_multiple_of(UNIT)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(bytes: u64) -> Live {
        Live {
            bytes,
            context: 0,
            device: 0,
            kind: Kind::Device,
            overtaken: 0,
        }
    }

    fn free(key: u64) -> u64 {
        remove(key).unwrap().1
    }

    #[test]
    fn a_free_that_comes_after_its_context_and_its_address_went_on_takes_nobody_elses() {
        let at = 0x6f00_0000_0000;
        let of = |context| Live {
            context,
            ..plain(GRANULE)
        };
        assert_eq!(insert(at, of(71)), GRANULE);
        // The driver has freed it and given the address away; the first free is still under way.
        assert_eq!(insert(at, of(72)), GRANULE);
        let mut drained = 0;
        drain_context(72, |_, bytes| drained += bytes);
        assert_eq!(drained, GRANULE);
        assert_eq!(insert(at, of(73)), GRANULE);
        assert_eq!(remove(at).map(|(_, bytes)| bytes), None, "the late one");
        assert_eq!(free(at), GRANULE);
        assert!(remove(at).is_none());
        // The same without anybody at the address: nothing stays.
        insert(at, of(71));
        insert(at, of(72));
        drain_context(72, |_, _| ());
        assert!(remove(at).is_none());
        assert!(shard(at).live.get_mut(at).is_none());
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

    #[test]
    fn space_is_between_small_allocations_of_the_same_context_only() {
        let base = 0x7400_0000_0000;
        let of = |context: usize, bytes: u64| Live {
            context,
            device: 7,
            ..plain(bytes)
        };
        assert!(!space(11, 7, 512), "nothing is there");
        insert(base, of(11, GRANULE / 2));
        assert!(space(11, 7, GRANULE / 2));
        assert!(!space(11, 7, GRANULE / 2 + 1));
        assert!(!space(12, 7, 512), "another context's granule");
        insert(base + GRANULE / 2 + 1024, of(11, GRANULE / 2 - 1024 - 600));
        assert!(space(11, 7, 1024));
        assert!(!space(11, 7, 1025));
        insert(base + GRANULE / 2, of(11, 1000));
        assert!(space(11, 7, 512), "what is left of a granule");
        assert!(!space(11, 7, 513));
        insert(base + GRANULE - 512, of(12, 1));
        assert!(!space(11, 7, 1));
        insert(base + GRANULE, of(11, 3 * SMALL));
        assert!(!space(11, 7, 1), "large allocations share with nobody");
    }
}
