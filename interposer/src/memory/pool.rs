//! Stream-ordered allocation and graph memory: memory that the driver keeps in pools.
//!
//! What a pool has *reserved* is what the device lacks, whether or not the program uses it now. So a pool is charged for its
//! reserved bytes, read from the driver after each call that may have changed them. Where the driver does not tell, each
//! allocation is charged for itself.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use shim_ffi::*;

use super::{Meter, freed, live};
use crate::{capture, client, gate, real};

/// What is charged for: a pool, or the graph memory of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Source {
    Pool(usize),
    Graph(i32),
}

/// What is charged for one source.
#[derive(Clone, Copy, Default)]
struct Charge {
    ordinal: i32,
    charged_bytes: u64,
    /// Changes at each settlement: a reading that another one has overtaken is read again.
    version: u64,
    /// Memory of this source is not a device's.
    off_device: bool,
}

static SOURCES: Mutex<Option<HashMap<Source, Charge>>> = Mutex::new(None);
/// Sources known, so that programs without pools pay one load.
static COUNT: AtomicU32 = AtomicU32::new(0);
/// Whether this process has ever put allocations into a graph.
static GRAPHS_ALLOCATE: AtomicBool = AtomicBool::new(false);

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
fn settle(source: Source, ordinal: i32, prepaid: u64) -> bool {
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

/// Brings every charge up to date.
pub(crate) fn reconcile() {
    if COUNT.load(Ordering::Relaxed) == 0 || client::current().is_none() {
        return;
    }
    let known: Vec<_> = with(|sources| {
        sources
            .iter()
            .map(|(source, charge)| (*source, charge.ordinal))
            .collect()
    });
    for (source, ordinal) in known {
        settle(source, ordinal, 0);
    }
}

/// After a free of any kind.
#[inline]
pub(crate) fn after_free() {
    if COUNT.load(Ordering::Relaxed) != 0 {
        reconcile();
    }
}

/// After a call that may have allocated or freed the memory of graphs.
pub(crate) fn after_graph() {
    if !GRAPHS_ALLOCATE.load(Ordering::Relaxed) || client::current().is_none() {
        return;
    }
    let mut device = CUdevice::default();
    // SAFETY: valid pointer to a local.
    if unsafe { real::cuCtxGetDevice(&raw mut device) }.is_ok() {
        settle(Source::Graph(device.0), device.0, 0);
    }
}

/// A graph allocates from here on.
pub(crate) fn graph_allocates() {
    GRAPHS_ALLOCATE.store(true, Ordering::Relaxed);
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
        graph_allocates();
        return call();
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
    if let Err(refusal) = meter.reserve(bytes as u64) {
        return refusal;
    }
    let result = call();
    if !result.is_ok() {
        meter.release(bytes as u64);
    } else if !settle(source, ordinal, bytes as u64) {
        live::insert(key(), meter.live(bytes as u64));
    }
    result
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
    let result = freed(dptr.0, || unsafe { real::cuMemFreeAsync(dptr, stream) });
    after_free();
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemFreeAsync_ptsz(dptr: CUdeviceptr, stream: CUstream) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = freed(dptr.0, || unsafe {
        real::cuMemFreeAsync_ptsz(dptr, stream)
    });
    after_free();
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemPoolTrimTo(pool: CUmemoryPool, keep_bytes: usize) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real::cuMemPoolTrimTo(pool, keep_bytes) };
    after_free();
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemPoolDestroy(pool: CUmemoryPool) -> CUresult {
    // SAFETY: the caller's own argument.
    let result = unsafe { real::cuMemPoolDestroy(pool) };
    if result.is_ok() && COUNT.load(Ordering::Relaxed) != 0 {
        let charge = with(|sources| sources.remove(&Source::Pool(pool.0 as usize)));
        if let Some(charge) = charge
            && let Some(meter) = Meter::of(charge.ordinal)
        {
            meter.release(charge.charged_bytes);
        }
    }
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuDeviceGraphMemTrim(device: CUdevice) -> CUresult {
    // SAFETY: the caller's own argument.
    let result = unsafe { real::cuDeviceGraphMemTrim(device) };
    if GRAPHS_ALLOCATE.load(Ordering::Relaxed) && client::current().is_some() {
        settle(Source::Graph(device.0), device.0, 0);
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
