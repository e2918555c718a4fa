//! Stream-ordered allocation and graph memory: memory that the driver keeps in pools.
//!
//! What a pool has *reserved* is what the device lacks, whether or not the program uses it now. So a pool is charged for its
//! reserved bytes, read from the driver after each call that may have changed them. Where the driver does not tell, each
//! allocation is charged for itself. A call that may make a pool grow is prepaid in whole granules, so that a pool never
//! has more than was reserved for it; what it did not take is given back at once.
//!
//! A destroyed pool lives on with what the program still has of it, and answers no questions: it stays charged with what it
//! had last, until all of it has been given back and the program has waited for that.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use shim_ffi::*;

use super::live::{self, Kind};
use super::{Meter, granules};
use crate::{capture, client, gate, real};

/// What is charged for: a pool, or the graph memory of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Source {
    Pool(usize),
    Graph(i32),
}

/// What is charged for one source.
#[derive(Clone, Default)]
struct Charge {
    ordinal: i32,
    charged_bytes: u64,
    /// Changes at each settlement: a reading that another one has overtaken is read again.
    version: u64,
    /// Memory of this source is not a device's.
    off_device: bool,
    /// Blocks that the program has.
    blocks: u64,
    /// Streams that blocks were given back in and that the program has not waited for since; as keys, never as handles.
    freeing: Vec<usize>,
    /// No pool any more, but memory of one.
    destroyed: bool,
}

static SOURCES: Mutex<Option<HashMap<Source, Charge>>> = Mutex::new(None);
/// Sources known, so that programs without pools pay one load.
static COUNT: AtomicU32 = AtomicU32::new(0);

fn with<T>(act: impl FnOnce(&mut HashMap<Source, Charge>) -> T) -> T {
    let mut sources = SOURCES.lock().unwrap_or_else(PoisonError::into_inner);
    let sources = sources.get_or_insert_with(HashMap::new);
    let result = act(sources);
    COUNT.store(
        u32::try_from(sources.len()).unwrap_or(u32::MAX),
        Ordering::Relaxed,
    );
    result
}

/// Whether pools and graphs hold memory of each device.
pub(super) fn held(attached: &client::Attached) -> [(bool, bool); channel::MAX_DEVICES] {
    let mut held = [(false, false); channel::MAX_DEVICES];
    with(|sources| {
        for (source, charge) in sources.iter() {
            let device = crate::context::index_of(attached, charge.ordinal);
            let Some(held) = device.and_then(|device| held.get_mut(device)) else {
                continue;
            };
            if charge.charged_bytes != 0 && !charge.off_device {
                match source {
                    Source::Pool(_) => held.0 = true,
                    Source::Graph(_) => held.1 = true,
                }
            }
        }
    });
    held
}

/// What the driver says is reserved.
fn reserved(source: Source) -> Option<u64> {
    let mut bytes = 0u64;
    // SAFETY: valid pointer to a local of the attribute's type; neither call touches a stream.
    let result = unsafe {
        match source {
            Source::Pool(pool) => real::cuMemPoolGetAttribute(
                CUmemoryPool(pool as *mut c_void),
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                (&raw mut bytes).cast(),
            ),
            Source::Graph(ordinal) => real::cuDeviceGetGraphMemAttribute(
                CUdevice(ordinal),
                CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
                (&raw mut bytes).cast(),
            ),
        }
    };
    result.is_ok().then_some(bytes)
}

/// Brings the charge of `source` to what the driver says. `prepaid` bytes were reserved for it just now. False where the
/// driver does not tell (nothing was changed then).
pub(super) fn settle(source: Source, ordinal: i32, prepaid: u64) -> bool {
    let Some(meter) = Meter::of(ordinal) else {
        return true;
    };
    loop {
        let version = with(|sources| {
            sources
                .entry(source)
                .or_insert(Charge {
                    ordinal,
                    ..Charge::default()
                })
                .version
        });
        let Some(now) = reserved(source) else {
            return false;
        };
        let settled = with(|sources| {
            let charge = sources.entry(source).or_insert(Charge {
                ordinal,
                ..Charge::default()
            });
            if charge.version != version {
                return false;
            }
            let target = if charge.off_device { 0 } else { now };
            let held = charge.charged_bytes + prepaid;
            if target > held {
                meter.force(target - held);
            } else {
                meter.release(held - target);
            }
            charge.charged_bytes = target;
            charge.version += 1;
            true
        });
        if settled {
            return true;
        }
    }
}

/// Brings every charge up to date. Pools grow only by calls that are settled on the spot, so empty ones need no look.
pub(crate) fn reconcile() {
    if COUNT.load(Ordering::Relaxed) == 0 || client::current().is_none() {
        return;
    }
    let known: Vec<_> = with(|sources| {
        sources
            .iter()
            .filter(|(_, charge)| !charge.destroyed && charge.charged_bytes != 0)
            .map(|(source, charge)| (*source, charge.ordinal))
            .collect()
    });
    for (source, ordinal) in known {
        settle(source, ordinal, 0);
    }
}

/// What can be done about a refused reservation, in the order of what it costs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Effort {
    /// See what pools have given back themselves.
    Reconcile,
    /// Let pools give back what lies unused in them, as the driver lets them when the device is full.
    Trim,
}

impl Effort {
    pub(super) const ALL: [Self; 2] = [Self::Reconcile, Self::Trim];
}

/// Makes an effort; false where there are no pools.
pub(super) fn relieve(effort: Effort) -> bool {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return false;
    }
    if effort == Effort::Trim {
        let living: Vec<_> = with(|sources| {
            sources
                .iter()
                .filter(|(_, charge)| !charge.destroyed && charge.charged_bytes != 0)
                .map(|(source, _)| *source)
                .collect()
        });
        capture::relaxed(|| living.into_iter().for_each(trim));
    }
    reconcile();
    true
}

fn trim(source: Source) {
    // SAFETY: a living pool, or an ordinal that the driver has named; what is in use stays.
    let _ = unsafe {
        match source {
            Source::Pool(pool) => real::cuMemPoolTrimTo(CUmemoryPool(pool as *mut c_void), 0),
            Source::Graph(ordinal) => real::cuDeviceGraphMemTrim(CUdevice(ordinal)),
        }
    };
}

/// The program has given back a block of `pool`.
pub(super) fn given_back(pool: usize) {
    with(|sources| {
        if let Some(charge) = sources.get_mut(&Source::Pool(pool)) {
            charge.blocks = charge.blocks.saturating_sub(1);
        }
    });
}

/// As [`super::freed`], in the order of a stream.
fn freed_in(key: u64, stream: usize, call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    if result.is_ok()
        && client::current().is_some()
        && let Some((known, bytes)) = live::remove(key)
    {
        if known.kind == Kind::Pooled {
            with(|sources| {
                if let Some(charge) = sources.get_mut(&Source::Pool(known.context))
                    && !charge.freeing.contains(&stream)
                {
                    charge.freeing.push(stream);
                }
            });
        }
        super::give_back(&known, bytes);
    }
    result
}

/// After the program has waited for a stream, by its key, or for a whole context: destroyed pools whose blocks have all been
/// given back in streams that were waited for are gone.
pub(crate) fn after_wait(stream: Option<usize>) {
    if COUNT.load(Ordering::Relaxed) == 0 || client::current().is_none() {
        return;
    }
    let gone: Vec<Charge> = with(|sources| {
        for charge in sources.values_mut() {
            // Each thread has a default stream of its own, all with one key.
            let stays = |one: usize| {
                stream.is_some_and(|stream| one != stream || stream == gate::PER_THREAD)
            };
            charge.freeing.retain(|one| stays(*one));
        }
        let over =
            |charge: &Charge| charge.destroyed && charge.blocks == 0 && charge.freeing.is_empty();
        let gone = sources.values().filter(|one| over(one)).cloned().collect();
        sources.retain(|_, charge| !over(charge));
        gone
    });
    for charge in gone {
        if let Some(meter) = Meter::of(charge.ordinal) {
            meter.release(charge.charged_bytes);
        }
    }
}

/// After a call that may have made pools give memory back to the device: a synchronisation or a trim. A free alone does not.
#[inline]
pub(crate) fn after_sync() {
    if COUNT.load(Ordering::Relaxed) != 0 {
        reconcile();
    }
}

fn allocate(
    pool: Option<(CUmemoryPool, i32)>,
    bytes: usize,
    stream: usize,
    call: impl FnOnce() -> CUresult,
    key: impl FnOnce() -> u64,
) -> CUresult {
    if client::current().is_none() {
        return call();
    }
    if capture::any() && capture::is_capturing(stream) {
        return super::graph::allocate(bytes as u64, call);
    }
    let Some((pool, ordinal)) = pool else {
        return call();
    };
    let source = Source::Pool(pool.0 as usize);
    let off_device = with(|sources| {
        sources
            .entry(source)
            .or_insert(Charge {
                ordinal,
                ..Charge::default()
            })
            .off_device
    });
    let Some(meter) = Meter::of(ordinal) else {
        return call();
    };
    if off_device {
        return call();
    }
    let most = granules(bytes as u64);
    if let Err(over) = meter.try_reserve(most) {
        // What the stream is about to free may be enough; the driver waits for that, too, when the device is full.
        if !wait_idle(stream) {
            return meter.refuse(over, bytes as u64);
        }
        if let Err(over) = meter.try_reserve(most) {
            return meter.refuse(over, bytes as u64);
        }
    }
    let result = call();
    if !result.is_ok() {
        meter.release(most);
        return result;
    }
    let mut live = meter.live(bytes as u64);
    live.context = 0;
    // Counted before it is settled: from here on it can be given back.
    if settle(source, ordinal, most) {
        live.kind = Kind::Pooled;
        live.bytes = 0;
        live.context = pool.0 as usize;
        with(|sources| {
            if let Some(charge) = sources.get_mut(&source) {
                charge.blocks += 1;
            }
        });
        live::insert(key(), live);
    } else {
        live.kind = Kind::Apart;
        super::correct(&meter, most, live::insert(key(), live));
    }
    result
}

/// Waits until a stream has nothing left to do, or for long enough. False where it had nothing to do.
fn wait_idle(stream: usize) -> bool {
    // TIMEOUT: a stream that waits for the program itself would never be idle.
    const LONG_ENOUGH_NS: u64 = 1_000_000_000;
    let stream = CUstream(std::ptr::without_provenance_mut(stream));
    let begun = client::now_ns();
    let mut waited = false;
    // SAFETY: the stream that the program allocates in; the query changes nothing.
    while unsafe { real::cuStreamQuery(stream) } == CUresult::CUDA_ERROR_NOT_READY
        && client::now_ns().saturating_sub(begun) < LONG_ENOUGH_NS
    {
        waited = true;
        client::pause(std::time::Duration::from_micros(100));
    }
    waited
}

/// The pool that `cuMemAllocAsync` uses on the calling thread, and its device.
fn current_pool() -> Option<(CUmemoryPool, i32)> {
    let (mut device, mut pool) = (CUdevice::default(), CUmemoryPool::NULL);
    // SAFETY: valid pointers to locals.
    unsafe {
        real::cuCtxGetDevice(&raw mut device).ok().ok()?;
        real::cuDeviceGetMemPool(&raw mut pool, device).ok().ok()?;
    }
    Some((pool, device.0))
}

/// A pool that the program names, and its device: as it was created, or the calling thread's.
fn named_pool(pool: CUmemoryPool) -> Option<(CUmemoryPool, i32)> {
    let known = with(|sources| {
        sources
            .get(&Source::Pool(pool.0 as usize))
            .map(|charge| charge.ordinal)
    });
    let ordinal = known.or_else(|| {
        let mut device = CUdevice::default();
        // SAFETY: valid pointer to a local.
        unsafe { real::cuCtxGetDevice(&raw mut device) }
            .is_ok()
            .then_some(device.0)
    })?;
    Some((pool, ordinal))
}

fn key_of(stream: CUstream, default: usize) -> usize {
    if stream.is_null() {
        default
    } else {
        stream.0 as usize
    }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemAllocAsync(
    dptr: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let pool = client::current().and_then(|_| current_pool());
    // SAFETY: the caller's own arguments; on success the driver has written the address.
    unsafe {
        let call = || real::cuMemAllocAsync(dptr, bytes, stream);
        allocate(pool, bytes, key_of(stream, gate::LEGACY), call, || {
            (*dptr).0
        })
    }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemAllocAsync_ptsz(
    dptr: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let pool = client::current().and_then(|_| current_pool());
    // SAFETY: the caller's own arguments; on success the driver has written the address.
    unsafe {
        let call = || real::cuMemAllocAsync_ptsz(dptr, bytes, stream);
        allocate(pool, bytes, key_of(stream, gate::PER_THREAD), call, || {
            (*dptr).0
        })
    }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemAllocFromPoolAsync(
    dptr: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's own arguments; on success the driver has written the address.
    unsafe {
        let call = || real::cuMemAllocFromPoolAsync(dptr, bytes, pool, stream);
        allocate(
            client::current().and_then(|_| named_pool(pool)),
            bytes,
            key_of(stream, gate::LEGACY),
            call,
            || (*dptr).0,
        )
    }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemAllocFromPoolAsync_ptsz(
    dptr: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's own arguments; on success the driver has written the address.
    unsafe {
        let call = || real::cuMemAllocFromPoolAsync_ptsz(dptr, bytes, pool, stream);
        allocate(
            client::current().and_then(|_| named_pool(pool)),
            bytes,
            key_of(stream, gate::PER_THREAD),
            call,
            || (*dptr).0,
        )
    }
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemFreeAsync(dptr: CUdeviceptr, stream: CUstream) -> CUresult {
    // SAFETY: the caller's own arguments.
    freed_in(dptr.0, key_of(stream, gate::LEGACY), || unsafe {
        real::cuMemFreeAsync(dptr, stream)
    })
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemFreeAsync_ptsz(dptr: CUdeviceptr, stream: CUstream) -> CUresult {
    // SAFETY: the caller's own arguments.
    freed_in(dptr.0, key_of(stream, gate::PER_THREAD), || unsafe {
        real::cuMemFreeAsync_ptsz(dptr, stream)
    })
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemPoolTrimTo(pool: CUmemoryPool, keep_bytes: usize) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real::cuMemPoolTrimTo(pool, keep_bytes) };
    after_sync();
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemPoolDestroy(pool: CUmemoryPool) -> CUresult {
    let source = Source::Pool(pool.0 as usize);
    let known = (COUNT.load(Ordering::Relaxed) != 0)
        .then(|| with(|sources| sources.get(&source).cloned()))
        .flatten()
        .filter(|charge| !charge.destroyed && client::current().is_some());
    if let Some(charge) = &known {
        // It is about to give back what is not in use, and will not answer afterwards.
        capture::relaxed(|| trim(source));
        settle(source, charge.ordinal, 0);
    }
    // SAFETY: the caller's own argument.
    let result = unsafe { real::cuMemPoolDestroy(pool) };
    if result.is_ok() && known.is_some() {
        with(|sources| match sources.get_mut(&source) {
            Some(charge) if charge.blocks != 0 || charge.charged_bytes != 0 => {
                charge.destroyed = true;
            }
            _ => {
                sources.remove(&source);
            }
        });
    }
    result
}

/// After a pool was made: whose memory it will hold.
pub(crate) fn pool_created(pool: CUmemoryPool, location: CUmemLocation) {
    if client::current().is_none() {
        return;
    }
    let on_device = location.r#type == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    let charge = Charge {
        ordinal: if on_device { location.id } else { 0 },
        off_device: !on_device,
        ..Charge::default()
    };
    with(|sources| sources.insert(Source::Pool(pool.0 as usize), charge));
}
