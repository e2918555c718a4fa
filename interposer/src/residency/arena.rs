//! Arenas: `cuMemAlloc` out of reserved addresses and few physical handles.
//!
//! One arena per context. It reserves twice the device's size in addresses, once; what it has
//! mapped there are *chunks* of up to 64 MiB, each one [chunk](super::chunk). Blocks of up to a
//! quarter of that share chunks; a larger block has a range of chunks of its own. Between ranges
//! one granule of addresses stays unmapped, so that an access past the end of one still fails.
//!
//! Chunks grow with the arena: a new one is a quarter of what the arena has, and no smaller than
//! the block it is for. A program of a few allocations pays for a few granules, one of many for few
//! handles, and what lies unused is a quarter at most. Where the quota has no space for that, the
//! chunk is as small as the block. An empty chunk is released, but for one, which goes when the
//! quota needs it.
//!
//! Charged is what the device lacks: whole chunks, on the device or not.

mod aside;
mod backing;
mod ending;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use channel::Prepaid;
use shim_ffi::*;

use self::aside::{Aside, Patience};
use super::chunk::GRANULE;
use super::ranges::Ranges;
use super::space::{self, Needs};
use super::{agent, copy_streams, endings, quiesce, tuning};
use crate::attachment::client;
use crate::driver::real;
use crate::ground::thread::thread;
use crate::metering::{Meter, granules};

pub(crate) use aside::capture_ended;
pub(super) use backing::host_has_space;
pub(crate) use ending::{context_died, free};

/// Least bytes that a block takes, and what it is aligned to: as drivers do.
const UNIT: u64 = 512;
/// Arenas of a process; contexts beyond them get plain memory, which stays resident.
const ARENAS: usize = 32;
/// More than any device has.
const MOST: u64 = 8 << 40;

/// One live allocation.
#[derive(Debug)]
struct Block {
    /// As the program asked for.
    bytes: u64,
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    id: u64,
    sync_memops: bool,
    /// Chunks of its own, in order; none for one that lies in a shared chunk.
    chunks: Vec<u64>,
}

/// A chunk that blocks share.
#[derive(Debug)]
struct Shared {
    bytes: u64,
    used_bytes: u64,
    chunk: u64,
}

#[derive(Default, Debug)]
struct Inner {
    /// Addresses where nothing is mapped.
    space: Ranges,
    /// Free parts of chunks.
    free: Ranges,
    blocks: BTreeMap<u64, Block>,
    shared: BTreeMap<u64, Shared>,
    /// An empty chunk that is kept, by its start.
    spare: Option<u64>,
    /// Bytes of all chunks.
    chunk_bytes: u64,
    /// Freed, and nobody's yet, the oldest first.
    aside: Vec<Aside>,
    /// How many have ever been put there.
    asides: u64,
    /// Events of ours in the context that nobody uses.
    events: Vec<usize>,
}

/// Memory of one context.
#[derive(Debug)]
struct Arena {
    context: usize,
    /// Device index of the pages.
    device: usize,
    ordinal: i32,
    base: u64,
    bytes: u64,
    inner: Mutex<Inner>,
    dead: AtomicBool,
    /// [`copy_streams::struck`] when its context was last noted.
    noted: AtomicU32,
}

/// Arenas that were made; never freed, because threads may be looking at them.
static TABLE: [AtomicPtr<Arena>; ARENAS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; ARENAS];
/// Number of the next allocation, for `BUFFER_ID`: far from the driver's own numbers.
static NEXT_ID: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1 << 48);

/// Arenas of live contexts.
fn arenas() -> impl Iterator<Item = &'static Arena> {
    TABLE
        .iter()
        .filter_map(|slot| {
            // SAFETY: null, or leaked by `make` and never freed.
            unsafe { slot.load(Ordering::Acquire).as_ref() }
        })
        .filter(|arena| !arena.dead.load(Ordering::Acquire))
}

/// What is known of an allocation, for reports.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) start: u64,
    pub(super) bytes: u64,
    pub(super) id: u64,
    pub(super) sync_memops: bool,
    pub(super) context: usize,
    pub(super) ordinal: i32,
}

/// Why no memory was had.
enum Short {
    /// The program is answered this.
    Refused(CUresult),
    /// The quota has no space, and blocks are aside.
    Aside,
    /// The quota has space for so many bytes, the device has none now.
    Device(u64),
}

/// The arena that an address belongs to, whether anything is there or not.
fn at(address: u64) -> Option<&'static Arena> {
    arenas().find(|arena| address.wrapping_sub(arena.base) < arena.bytes)
}

/// Whether an address is one of an arena's.
pub(crate) fn owns(address: u64) -> bool {
    super::active() && at(address).is_some()
}

/// The allocation that an address lies in.
pub(super) fn known(address: u64) -> Option<Known> {
    let arena = at(address)?;
    let inner = arena.inner();
    let (start, block) = inner.blocks.range(..=address).next_back()?;
    (address - start < block.bytes).then_some(Known {
        start: *start,
        bytes: block.bytes,
        id: block.id,
        sync_memops: block.sync_memops,
        context: arena.context,
        ordinal: arena.ordinal,
    })
}

/// Where allocations lie from `start` to `end`.
pub(super) fn live(start: u64, end: u64) -> Vec<(u64, u64)> {
    let Some(arena) = at(start) else {
        return Vec::new();
    };
    let inner = arena.inner();
    let first = inner.blocks.range(..=start).next_back();
    first
        .into_iter()
        .chain(
            inner
                .blocks
                .range(start.saturating_add(1)..end.max(start.saturating_add(1))),
        )
        .map(|(at, block)| ((*at).max(start), at.saturating_add(block.bytes).min(end)))
        .filter(|(from, to)| from < to)
        .collect()
}

/// Notes `SYNC_MEMOPS` of the allocation that an address lies in.
pub(super) fn note_sync_memops(address: u64, on: bool) {
    if let Some(arena) = at(address)
        && let Some((_, block)) = arena.inner().blocks.range_mut(..=address).next_back()
    {
        block.sync_memops = on;
    }
}

/// Bytes on `device` that are charged and that nobody lies in: the next allocations get them.
pub(crate) fn spare_bytes(device: usize) -> u64 {
    let of = |arena: &Arena| {
        let inner = arena.inner();
        let shared = inner.spare.and_then(|start| inner.shared.get(&start));
        let aside = inner.aside.iter().map(|aside| &aside.block);
        let aside = aside.filter(|block| !block.chunks.is_empty());
        let aside: u64 = aside.map(|block| granules(block.bytes)).sum();
        shared.map_or(0, |shared| shared.bytes) + aside
    };
    arenas()
        .filter(|arena| arena.device == device)
        .map(of)
        .sum()
}

/// Allocates `asked` bytes for the calling thread's context. `None`: the driver is to do it, and
/// what it gives stays resident.
pub(crate) fn allocate(meter: &Meter, asked: u64) -> Option<Result<u64, CUresult>> {
    if !client::current()?.end.arbiter.residency().evictable || asked == 0 {
        return None;
    }
    let arena = of(meter)?;
    Some(arena.allocate(meter, asked))
}

/// The arena of the current context, made where there is none yet.
fn of(meter: &Meter) -> Option<&'static Arena> {
    let (context, ordinal) = (meter.context(), thread().ordinal.get());
    if context == 0 || ordinal < 0 {
        return None;
    }
    endings::await_going(context);
    let find = || arenas().find(|arena| arena.context == context);
    let arena = find().or_else(|| make(meter, context, ordinal).or_else(find))?;
    // A context that has ended and left its memory may have been struck out, and another one has
    // its handle.
    let struck = copy_streams::struck();
    if arena.noted.load(Ordering::Relaxed) != struck {
        copy_streams::note_context(ordinal, context);
        arena.noted.store(struck, Ordering::Relaxed);
    }
    Some(arena)
}

#[cold]
#[inline(never)]
fn make(meter: &Meter, context: usize, ordinal: i32) -> Option<&'static Arena> {
    static MAKING: Mutex<()> = Mutex::new(());
    let physical = {
        let mut total = 0;
        // SAFETY: valid pointer to a local.
        let result = unsafe { real::cuDeviceTotalMem_v2(&raw mut total, CUdevice(ordinal)) };
        result.is_ok().then_some(total as u64)?
    };
    // Twice the device, and a little for the gaps; less where a process has few addresses to give.
    let mut bytes = granules(physical.saturating_mul(2)).max(64 * GRANULE);
    let mut base = CUdeviceptr::default();
    loop {
        // SAFETY: valid pointer to a local; addresses alone, with nothing behind them.
        let result = unsafe {
            real::cuMemAddressReserve(&raw mut base, bytes as usize, 0, CUdeviceptr::default(), 0)
        };
        if result.is_ok() {
            break;
        }
        bytes /= 2;
        if bytes < physical / 4 || bytes < GRANULE {
            return None;
        }
        bytes = granules(bytes);
    }
    let mut inner = Inner::default();
    inner.space.insert(base.0, bytes);
    let arena = Box::new(Arena {
        context,
        device: meter.device(),
        ordinal,
        base: base.0,
        bytes,
        inner: Mutex::new(inner),
        dead: AtomicBool::new(false),
        noted: AtomicU32::new(copy_streams::struck()),
    });
    // Two threads may come at once: one of them gives its addresses back. No driver call under this
    // lock.
    let placed = {
        let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let twice = arenas().any(|other| other.context == context);
        let slot = TABLE.iter().find(|slot| {
            // SAFETY: null, or leaked here and never freed.
            let arena = unsafe { slot.load(Ordering::Acquire).as_ref() };
            arena.is_none_or(|arena| arena.dead.load(Ordering::Acquire))
        });
        match slot {
            Some(slot) if !twice => {
                let arena = Box::into_raw(arena);
                slot.store(arena, Ordering::Release);
                // SAFETY: leaked on the line before.
                Ok(unsafe { &*arena })
            }
            _ => Err(arena),
        }
    };
    match placed {
        Ok(arena) => {
            copy_streams::note_context(ordinal, context);
            agent::start();
            Some(arena)
        }
        Err(arena) => {
            // SAFETY: the reservation just made, which nobody has seen.
            let _ =
                unsafe { real::cuMemAddressFree(CUdeviceptr(arena.base), arena.bytes as usize) };
            None
        }
    }
}

impl Arena {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allocate(&'static self, meter: &Meter, asked: u64) -> Result<u64, CUresult> {
        if asked > MOST {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        aside::allowed()?;
        self.mark_aside();
        let (address, patience) = (Cell::new(0), Cell::new(Patience::Some));
        let result = space::with_space_on(meter, Needs::Bytes(granules(asked)), |short| {
            loop {
                let made = {
                    let _pass = match quiesce::pass() {
                        Ok(pass) => pass,
                        Err(status) => return status,
                    };
                    self.try_allocate(meter, asked, patience.get())
                };
                match made {
                    Ok(made) => {
                        address.set(made);
                        return CUresult::CUDA_SUCCESS;
                    }
                    Err(Short::Refused(status)) => return status,
                    Err(Short::Aside) => patience.set(self.reclaim()),
                    Err(Short::Device(bytes)) => {
                        let has_aside = patience.get() == Patience::Some && self.has_aside();
                        if has_aside {
                            patience.set(self.reclaim());
                        }
                        if !has_aside || patience.get() == Patience::None {
                            return short.lacks(bytes);
                        }
                    }
                }
            }
        });
        result.ok().map(|()| address.get())
    }

    fn try_allocate(
        &'static self,
        meter: &Meter,
        asked: u64,
        patience: Patience,
    ) -> Result<u64, Short> {
        let bytes = asked.next_multiple_of(UNIT);
        if bytes > tuning::chunk_bytes() / 4 {
            return self.large(meter, asked, patience);
        }
        let mut made = None;
        loop {
            let found = self.small(asked, bytes);
            if let Some(start) = made {
                self.keep_one(meter, start);
            }
            if let Some(address) = found {
                return Ok(address);
            }
            // Another thread may be faster and take what was made; then one more is made.
            made = Some(self.grow(meter, asked, bytes, patience)?);
        }
    }

    /// Gives back a chunk that was made in vain, because another thread's free was faster, where an
    /// empty one is kept already.
    fn keep_one(&self, meter: &Meter, start: u64) {
        let gone = {
            let mut inner = self.inner();
            let unused = inner
                .shared
                .get(&start)
                .is_some_and(|shared| shared.used_bytes == 0);
            match inner.spare {
                _ if !unused => None,
                None => {
                    inner.spare = Some(start);
                    None
                }
                Some(spare) if spare == start => None,
                Some(_) => inner.take_shared(start),
            }
        };
        if let Some((start, shared)) = gone {
            let bytes = self.dispose(start, shared.bytes, &[shared.chunk]);
            meter.release(bytes);
        }
    }

    /// A block out of a shared chunk, if one has space.
    #[inline]
    fn small(&self, asked: u64, bytes: u64) -> Option<u64> {
        let mut inner = self.inner();
        let inner = &mut *inner;
        let start = inner.free.take(bytes)?;
        if let Some((at, shared)) = inner.shared.range_mut(..=start).next_back() {
            shared.used_bytes += bytes;
            if inner.spare == Some(*at) {
                inner.spare = None;
            }
        }
        let block = Block {
            bytes: asked,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            sync_memops: false,
            chunks: Vec::new(),
        };
        inner.blocks.insert(start, block);
        Some(start)
    }

    /// One more shared chunk, for a block of `bytes`.
    #[cold]
    #[inline(never)]
    fn grow(
        &'static self,
        meter: &Meter,
        asked: u64,
        bytes: u64,
        patience: Patience,
    ) -> Result<u64, Short> {
        let least = granules(bytes);
        let best = {
            let has = self.inner().chunk_bytes / 4;
            let most = tuning::chunk_bytes();
            has.next_power_of_two().clamp(GRANULE, most).max(least)
        };
        let mut size = best;
        let mut prepaid = loop {
            match meter.try_prepay(size) {
                Ok(prepaid) => break Some(prepaid),
                Err(_) if size > least => size = least,
                Err(_) if self.drop_spare(meter) => {}
                Err(_) if patience == Patience::Some && self.has_aside() => {
                    return Err(Short::Aside);
                }
                Err(over) => {
                    if !self.overflows() {
                        return Err(Short::Refused(meter.refuse(over, asked)));
                    }
                    meter.force(size);
                    break None;
                }
            }
        };
        let on_device = prepaid.is_some();
        let mut made = self.back_within_cap(meter, &[size], on_device);
        if made == Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY) && size > least {
            // Less may be there, and what it is short of is not this.
            if let Some(more) = prepaid.take() {
                meter.settle(more, 0);
                let less = meter.try_prepay(least);
                prepaid = Some(less.map_err(|over| Short::Refused(meter.refuse(over, asked)))?);
            } else {
                meter.release(size - least);
            }
            size = least;
            made = self.back_within_cap(meter, &[size], on_device);
        }
        settle(meter, prepaid, size, made.is_ok());
        match made {
            Ok((start, chunks)) => {
                let mut inner = self.inner();
                inner.free.insert(start, size);
                inner.chunk_bytes += size;
                let shared = Shared {
                    bytes: size,
                    used_bytes: 0,
                    chunk: chunks.first().copied().unwrap_or(0),
                };
                inner.shared.insert(start, shared);
                Ok(start)
            }
            Err(status) => Err(short(status, size, on_device)),
        }
    }

    /// A block with chunks of its own.
    #[cold]
    #[inline(never)]
    fn large(&'static self, meter: &Meter, asked: u64, patience: Patience) -> Result<u64, Short> {
        let bytes = granules(asked);
        let prepaid = loop {
            match meter.try_prepay(bytes) {
                Ok(prepaid) => break Some(prepaid),
                Err(_) if self.drop_spare(meter) => {}
                Err(_) if patience == Patience::Some && self.has_aside() => {
                    return Err(Short::Aside);
                }
                Err(over) => {
                    if !self.overflows() {
                        return Err(Short::Refused(meter.refuse(over, asked)));
                    }
                    meter.force(bytes);
                    break None;
                }
            }
        };
        let on_device = prepaid.is_some();
        let most = tuning::chunk_bytes();
        let parts: Vec<u64> = (0..bytes.div_ceil(most))
            .map(|at| most.min(bytes - at * most))
            .collect();
        let made = self.back_within_cap(meter, &parts, on_device);
        settle(meter, prepaid, bytes, made.is_ok());
        match made {
            Ok((start, chunks)) => {
                let block = Block {
                    bytes: asked,
                    id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
                    sync_memops: false,
                    chunks,
                };
                self.inner().blocks.insert(start, block);
                Ok(start)
            }
            Err(status) => Err(short(status, bytes, on_device)),
        }
    }

    /// Whether what is beyond the quota may live in host memory.
    fn overflows(&self) -> bool {
        client::current().is_some_and(|attached| attached.end.arbiter.residency().overflow)
    }
}

impl Inner {
    /// Takes an empty chunk out of what is free.
    fn take_shared(&mut self, start: u64) -> Option<(u64, Shared)> {
        let bytes = self.shared.get(&start)?.bytes;
        if !self.free.take_at(start, bytes) {
            return None;
        }
        self.chunk_bytes -= bytes;
        self.shared.remove(&start).map(|shared| (start, shared))
    }

    /// Takes a block out; what its end leaves to be disposed of: start, bytes and chunks.
    fn remove(&mut self, address: u64) -> Option<Option<(u64, u64, Vec<u64>)>> {
        let block = self.blocks.remove(&address)?;
        Some(self.end(address, block))
    }

    /// What the end of a block leaves to be disposed of, as above.
    fn end(&mut self, address: u64, block: Block) -> Option<(u64, u64, Vec<u64>)> {
        if !block.chunks.is_empty() {
            return Some((address, granules(block.bytes), block.chunks));
        }
        let bytes = block.bytes.next_multiple_of(UNIT);
        self.free.insert(address, bytes);
        let (start, shared) = self.shared.range_mut(..=address).next_back()?;
        let start = *start;
        shared.used_bytes -= bytes;
        if shared.used_bytes != 0 {
            return None;
        }
        if self.spare.is_none() {
            self.spare = Some(start);
            return None;
        }
        let (start, shared) = self.take_shared(start)?;
        Some((start, shared.bytes, vec![shared.chunk]))
    }
}

/// Brings a charge of `bytes`, prepaid or beyond the quota, to what was made.
fn settle(meter: &Meter, prepaid: Option<Prepaid>, bytes: u64, made: bool) {
    match prepaid {
        Some(prepaid) => meter.settle(prepaid, if made { bytes } else { 0 }),
        None if made => {}
        None => meter.release(bytes),
    }
}

fn short(status: CUresult, bytes: u64, on_device: bool) -> Short {
    if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY && on_device {
        Short::Device(bytes)
    } else {
        Short::Refused(status)
    }
}
