//! Occupancy: how many blocks of a kernel fit on a multiprocessor.

use std::ffi::c_int;
use std::sync::atomic::Ordering::Relaxed;

use shim_ffi::{CUfunction, CUlaunchConfig, CUoccupancyB2DSize, CUresult};

use super::Done;
use crate::context::current;
use crate::driver::Driver;
use crate::entry::{In, Out, api};
use crate::function::Function;

/// Shared memory that the system keeps of every block.
const RESERVED_SHARED: i64 = 1024;
const REGISTERS: i64 = 65_536;
/// Registers are given to warps in multiples of this.
const REGISTER_UNIT: i64 = 256;
const WARP: i64 = 32;
const CLUSTER_DIMENSION: u32 = 4;
const MAX_CLUSTER: c_int = 8;

fn blocks(
    driver: &Driver,
    function: &Function,
    threads: i64,
    dynamic_bytes: usize,
) -> Result<i64, CUresult> {
    let profile = driver.device_state.profile();
    if threads < 1 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let limit = i64::from(function.dynamic_shared_limit.load(Relaxed));
    if threads > i64::from(function.max_threads) || dynamic_bytes as i64 > limit.max(48 << 10) {
        return Ok(0);
    }
    let threads = (threads + WARP - 1) / WARP * WARP;
    let shared = i64::from(function.shared_bytes) + dynamic_bytes as i64 + RESERVED_SHARED;
    let by_threads = i64::from(profile.threads_per_multiprocessor) / threads;
    let by_shared = i64::from(profile.shared_per_multiprocessor_bytes) / shared;
    let of_a_warp = (i64::from(function.registers) * WARP + REGISTER_UNIT - 1) / REGISTER_UNIT;
    let by_registers = REGISTERS / (of_a_warp * REGISTER_UNIT) / (threads / WARP);
    Ok(by_threads
        .min(by_shared)
        .min(by_registers)
        .min(i64::from(profile.blocks_per_multiprocessor)))
}

fn max_blocks(to: Out<c_int>, function: CUfunction, threads: c_int, dynamic_bytes: usize) -> Done {
    to.check()?;
    let (driver, _) = current()?;
    let function = super::function(driver, function)?;
    to.put(blocks(driver, &function, threads.into(), dynamic_bytes)? as c_int)
}

fn block_size(
    grid: Out<c_int>,
    block: Out<c_int>,
    function: CUfunction,
    dynamic: CUoccupancyB2DSize,
    fixed_bytes: usize,
    limit: c_int,
) -> Done {
    grid.check()?;
    block.check()?;
    let (driver, _) = current()?;
    let function = super::function(driver, function)?;
    let most = match limit {
        limit if limit < 0 => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        0 => i64::from(function.max_threads),
        limit => i64::from(limit).min(i64::from(function.max_threads)),
    };
    let bytes = |threads: i64| match dynamic {
        // SAFETY: the program gave the function to be called with block sizes.
        Some(dynamic) => unsafe { dynamic(threads as c_int) },
        None => fixed_bytes,
    };
    let (mut best, mut best_threads, mut best_blocks) = (0, 0, 0);
    // The largest block that keeps most threads resident.
    let mut threads = (most / WARP * WARP).max(most.min(WARP));
    while threads > 0 {
        let resident = blocks(driver, &function, threads, bytes(threads))?;
        if resident * threads > best {
            (best, best_threads, best_blocks) = (resident * threads, threads, resident);
        }
        threads -= WARP;
    }
    block.put(best_threads as c_int)?;
    grid.put(best_blocks as c_int * driver.device_state.profile().multiprocessors)
}

fn cluster(config: &CUlaunchConfig) -> Result<i64, CUresult> {
    // SAFETY: the program vouches for `numAttrs` attributes.
    let attributes = unsafe { In::new(config.attrs.cast_const()) };
    let attributes = attributes.list(if config.attrs.is_null() {
        0
    } else {
        config.numAttrs as usize
    })?;
    let found = attributes.iter().find(|one| one.id.0 == CLUSTER_DIMENSION);
    Ok(found.map_or(1, |one| {
        let [x, y, z] = [
            one.value[0] as u32,
            (one.value[0] >> 32) as u32,
            one.value[1] as u32,
        ];
        i64::from(x.max(1)) * i64::from(y.max(1)) * i64::from(z.max(1))
    }))
}

api! {
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        to: Out<c_int>, function: CUfunction, threads: c_int, dynamic_bytes: usize,
    ) {
        max_blocks(to, function, threads, dynamic_bytes)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        to: Out<c_int>, function: CUfunction, threads: c_int, dynamic_bytes: usize, flags: u32,
    ) {
        if flags > 1 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        max_blocks(to, function, threads, dynamic_bytes)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<c_int>, block: Out<c_int>, function: CUfunction, dynamic: CUoccupancyB2DSize, fixed_bytes: usize,
        limit: c_int,
    ) {
        block_size(grid, block, function, dynamic, fixed_bytes, limit)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<c_int>, block: Out<c_int>, function: CUfunction, dynamic: CUoccupancyB2DSize, fixed_bytes: usize,
        limit: c_int, flags: u32,
    ) {
        if flags > 1 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        block_size(grid, block, function, dynamic, fixed_bytes, limit)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(to: Out<usize>, function: CUfunction, count: c_int, threads: c_int) {
        to.check()?;
        let (driver, _) = current()?;
        let function = super::function(driver, function)?;
        let profile = driver.device_state.profile();
        if count < 1 || threads < 1 || threads > function.max_threads as c_int {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let share = i64::from(profile.shared_per_multiprocessor_bytes / count);
        let rest = share - RESERVED_SHARED - i64::from(function.shared_bytes);
        // As much as the function may have: what it was given by attribute, or the usual 48 KiB.
        let allowed = i64::from(function.dynamic_shared_limit.load(Relaxed));
        let most = allowed.min(i64::from(profile.shared_per_block_optin_bytes) - i64::from(function.shared_bytes));
        to.put(rest.clamp(0, most) as usize)
    }

    fn cuOccupancyMaxActiveClusters(to: Out<c_int>, function: CUfunction, config: In<CUlaunchConfig>) {
        to.check()?;
        let (driver, _) = current()?;
        let function = super::function(driver, function)?;
        let config = config.get()?;
        let profile = driver.device_state.profile();
        if !profile.cluster_launch {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let threads = i64::from(config.blockDimX) * i64::from(config.blockDimY) * i64::from(config.blockDimZ);
        let resident = blocks(driver, &function, threads, config.sharedMemBytes as usize)?;
        let size = cluster(&config)?;
        if size > i64::from(MAX_CLUSTER) {
            return Err(CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE);
        }
        to.put((resident * i64::from(profile.multiprocessors) / size) as c_int)
    }

    fn cuOccupancyMaxPotentialClusterSize(to: Out<c_int>, function: CUfunction, config: In<CUlaunchConfig>) {
        to.check()?;
        let (driver, _) = current()?;
        super::function(driver, function)?;
        config.get()?;
        if !driver.device_state.profile().cluster_launch {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        to.put(MAX_CLUSTER)
    }
}
