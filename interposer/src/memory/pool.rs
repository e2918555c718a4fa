//! Stream-ordered allocation, and pools.

use shim_ffi::*;

use crate::attachment::client;
use crate::driver::real;
use crate::gate;
use crate::metering::pool;
use crate::residency;

fn key_of(stream: CUstream, default: usize) -> usize {
    if stream.is_null() {
        default
    } else {
        stream.0 as usize
    }
}

/// A function that takes memory of a pool in a stream's order, the stream being that of a default.
macro_rules! allocating {
    ($name:ident ( $($from:ident)? ), $of:path, $default:expr) => {
        /// # Safety
        /// As the driver's function.
        pub(crate) unsafe fn $name(
            dptr: *mut CUdeviceptr,
            bytes: usize,
            $($from: CUmemoryPool,)?
            stream: CUstream,
        ) -> CUresult {
            let pool = client::current().and_then(|_| $of($($from)?));
            residency::with_space(bytes as u64, |short| {
                // SAFETY: the caller's own arguments; on success there is an address.
                unsafe {
                    let call = || short.note(real::$name(dptr, bytes, $($from,)? stream));
                    pool::allocate(pool, bytes, key_of(stream, $default), call, || (*dptr).0)
                }
            })
        }
    };
}

allocating!(cuMemAllocAsync(), pool::current_pool, gate::LEGACY);
allocating!(cuMemAllocAsync_ptsz(), pool::current_pool, gate::PER_THREAD);
allocating!(
    cuMemAllocFromPoolAsync(from),
    pool::named_pool,
    gate::LEGACY
);
allocating!(
    cuMemAllocFromPoolAsync_ptsz(from),
    pool::named_pool,
    gate::PER_THREAD
);

/// A function that gives memory of a pool back in a stream's order.
macro_rules! freeing {
    ($name:ident, $default:expr) => {
        /// # Safety
        /// As the driver's function.
        pub(crate) unsafe fn $name(dptr: CUdeviceptr, stream: CUstream) -> CUresult {
            // SAFETY: the caller's own arguments.
            pool::freed_in(dptr.0, key_of(stream, $default), || unsafe {
                real::$name(dptr, stream)
            })
        }
    };
}

freeing!(cuMemFreeAsync, gate::LEGACY);
freeing!(cuMemFreeAsync_ptsz, gate::PER_THREAD);

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
