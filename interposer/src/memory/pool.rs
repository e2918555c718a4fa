//! Stream-ordered allocation, and pools.

use shim_ffi::*;

use crate::attachment::client;
use crate::driver::real;
use crate::gate;
use crate::metering::pool;

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
    let pool = client::current().and_then(|_| pool::current_pool());
    // SAFETY: the caller's own arguments; on success the driver has written the address.
    unsafe {
        let call = || real::cuMemAllocAsync(dptr, bytes, stream);
        pool::allocate(pool, bytes, key_of(stream, gate::LEGACY), call, || {
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
    let pool = client::current().and_then(|_| pool::current_pool());
    // SAFETY: the caller's own arguments; on success the driver has written the address.
    unsafe {
        let call = || real::cuMemAllocAsync_ptsz(dptr, bytes, stream);
        pool::allocate(pool, bytes, key_of(stream, gate::PER_THREAD), call, || {
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
        pool::allocate(
            client::current().and_then(|_| pool::named_pool(pool)),
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
        pool::allocate(
            client::current().and_then(|_| pool::named_pool(pool)),
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
    pool::freed_in(dptr.0, key_of(stream, gate::LEGACY), || unsafe {
        real::cuMemFreeAsync(dptr, stream)
    })
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemFreeAsync_ptsz(dptr: CUdeviceptr, stream: CUstream) -> CUresult {
    // SAFETY: the caller's own arguments.
    pool::freed_in(dptr.0, key_of(stream, gate::PER_THREAD), || unsafe {
        real::cuMemFreeAsync_ptsz(dptr, stream)
    })
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemPoolTrimTo(pool: CUmemoryPool, keep_bytes: usize) -> CUresult {
    let turn = pool::turn_at(pool.0 as usize);
    // SAFETY: the caller's own arguments.
    let result = unsafe { real::cuMemPoolTrimTo(pool, keep_bytes) };
    drop(turn);
    pool::after_sync();
    result
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuMemPoolDestroy(pool: CUmemoryPool) -> CUresult {
    // SAFETY: the caller's own argument.
    pool::destroyed(pool, || unsafe { real::cuMemPoolDestroy(pool) })
}
