//! Plain device memory, managed memory and page-locked host memory.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use shim_ffi::{CUdeviceptr, CUresult};

use super::Done;
use crate::clock::now_ns;
use crate::context::{Context, current};
use crate::driver::{Advice, Driver, Location};
use crate::entry::{In, Out, api};
use crate::memory::{Kind, Region};

const HOST_ALLOC_FLAGS: u32 = 7;
const HOST_REGISTER_FLAGS: u32 = 15;
const ATTACH_GLOBAL: u32 = 1;
const ATTACH_HOST: u32 = 2;
const LOCATION_DEVICE: u32 = 1;
const LOCATION_HOST: u32 = 2;

/// The current context, for a call that may allocate.
pub(super) fn allocating() -> Result<(&'static Driver, Arc<Context>), CUresult> {
    let (driver, context) = current()?;
    crate::capture::forbid_unsafe(driver)?;
    driver.faults.allocation()?;
    Ok((driver, context))
}

fn alloc(to: Out<CUdeviceptr>, bytes: usize, kind: Kind) -> Done {
    let (driver, context) = allocating()?;
    to.check()?;
    let began = now_ns();
    let address = driver.memory.alloc(
        &driver.device_state,
        context.device,
        context.id,
        bytes as u64,
        kind,
    );
    driver.spend_if_failed(began, &address);
    let address = address?;
    driver.spend(began, driver.costs().alloc_ns);
    to.put(CUdeviceptr(address))
}

fn pitched(
    to: Out<CUdeviceptr>,
    pitch: Out<usize>,
    width: usize,
    height: usize,
    element: u32,
) -> Done {
    const PITCH: usize = 512;
    pitch.check()?;
    if width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let row = width
        .checked_next_multiple_of(PITCH)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    alloc(
        to,
        row.checked_mul(height)
            .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?,
        Kind::Large,
    )?;
    pitch.put(row)
}

fn free(address: u64) -> Done {
    let (driver, context) = current()?;
    crate::capture::forbid_unsafe(driver)?;
    if address == 0 {
        return Ok(());
    }
    let region = driver
        .memory
        .region(address)
        .filter(|region| region.start == address);
    let region = region.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    driver
        .engine
        .wait_streams(|stream| stream.device == region.device);
    driver.synchronised();
    context.check()?;
    if matches!(region.kind, Kind::Graph(_)) {
        // The graph keeps its node's memory for its next launch.
        driver.given_by_graphs.lock().remove(&address);
        return Ok(());
    }
    if matches!(region.kind, Kind::Imported { of_pool: true, .. }) {
        return driver.memory.close_import(address);
    }
    driver.advice.lock().remove(&region.id);
    let began = now_ns();
    let region = driver.memory.free(&driver.device_state, address)?;
    driver.spend(began, driver.costs().alloc_ns);
    if let Kind::Pool(pool) = region.kind
        && let Some(pool) = driver.pools.get(pool.0 as u64)
    {
        if pool.give_back(&driver.memory, &driver.device_state, &region) {
            driver.pools.remove(pool.id);
        }
        pool.synchronised(&driver.memory, &driver.device_state);
    }
    Ok(())
}

fn info(free: Out<usize>, total: Out<usize>) -> Done {
    let (driver, context) = current()?;
    free.check()?;
    total.check()?;
    let usable = driver.device_state.profile().usable_bytes();
    free.put(usable.saturating_sub(driver.device_state.used(context.device)) as usize)?;
    total.put(usable as usize)
}

fn range(base: Out<CUdeviceptr>, bytes: Out<usize>, address: u64) -> Done {
    let (driver, _) = current()?;
    let region = driver
        .memory
        .region(address)
        .ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
    base.put_if(CUdeviceptr(region.start));
    bytes.put_if(region.bytes as usize);
    Ok(())
}

fn host_alloc(to: Out<*mut c_void>, bytes: usize, flags: u32) -> Done {
    let (driver, context) = allocating()?;
    to.check()?;
    if flags & !HOST_ALLOC_FLAGS != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let (device_state, bytes, began) = (&driver.device_state, bytes as u64, now_ns());
    let address = driver
        .memory
        .alloc_host(device_state, context.device, context.id, bytes, flags);
    driver.spend_if_failed(began, &address);
    let address = address?;
    let ns = device_state.profile().costs.pin_ns(bytes);
    driver.spend(began, ns);
    to.put(address as *mut c_void)
}

fn register(pointer: *mut c_void, bytes: usize, flags: u32) -> Done {
    let (driver, context) = current()?;
    crate::capture::forbid_unsafe(driver)?;
    if flags & !HOST_REGISTER_FLAGS != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let (device_state, bytes, began) = (&driver.device_state, bytes as u64, now_ns());
    let registered = driver.memory.register_host(
        device_state,
        context.device,
        context.id,
        pointer as u64,
        bytes,
        flags,
    );
    driver.spend_if_failed(began, &registered);
    registered?;
    let ns = device_state.profile().costs.pin_ns(bytes);
    driver.spend(began, ns);
    Ok(())
}

fn host_region(pointer: *mut c_void) -> Result<Region, CUresult> {
    let (driver, _) = current()?;
    driver
        .memory
        .region(pointer as u64)
        .filter(Region::is_host)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

api! {
    fn cuMemGetInfo(free: Out<u32>, total: Out<u32>) {
        let (mut wide_free, mut wide_total) = (0_usize, 0_usize);
        // SAFETY: both are locals.
        info(unsafe { Out::new(&raw mut wide_free) }, unsafe { Out::new(&raw mut wide_total) })?;
        free.put(wide_free.min(u32::MAX as usize) as u32)?;
        total.put(wide_total.min(u32::MAX as usize) as u32)
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        info(free, total)
    }

    fn cuMemAlloc_v2(to: Out<CUdeviceptr>, bytes: usize) {
        alloc(to, bytes, Kind::Large)
    }

    fn cuMemAllocPitch_v2(to: Out<CUdeviceptr>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        pitched(to, pitch, width, height, element)
    }

    fn cuMemAllocManaged(to: Out<CUdeviceptr>, bytes: usize, flags: u32) {
        if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        alloc(to, bytes, Kind::Managed)
    }

    fn cuMemFree_v2(address: CUdeviceptr) {
        free(address.0)
    }

    fn cuMemGetAddressRange_v2(base: Out<CUdeviceptr>, bytes: Out<usize>, address: CUdeviceptr) {
        range(base, bytes, address.0)
    }

    fn cuMemAllocHost(to: Out<*mut c_void>, bytes: u32) {
        host_alloc(to, bytes as usize, 0)
    }

    fn cuMemAllocHost_v2(to: Out<*mut c_void>, bytes: usize) {
        host_alloc(to, bytes, 0)
    }

    fn cuMemHostAlloc(to: Out<*mut c_void>, bytes: usize, flags: u32) {
        host_alloc(to, bytes, flags)
    }

    fn cuMemFreeHost(pointer: *mut c_void) {
        let (driver, _) = current()?;
        crate::capture::forbid_unsafe(driver)?;
        if pointer.is_null() {
            return Ok(());
        }
        let bytes = host_region(pointer)?.bytes;
        driver.engine.wait_streams(|_| true);
        let began = now_ns();
        driver.memory.free_host(&driver.device_state, pointer as u64)?;
        let ns = driver.device_state.profile().costs.unpin_ns(bytes);
        driver.spend(began, ns);
        Ok(())
    }

    fn cuMemHostRegister(pointer: *mut c_void, bytes: usize, flags: u32) {
        register(pointer, bytes, flags)
    }

    fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: u32) {
        register(pointer, bytes, flags)
    }

    fn cuMemHostUnregister(pointer: *mut c_void) {
        let (driver, _) = current()?;
        crate::capture::forbid_unsafe(driver)?;
        driver.engine.wait_streams(|_| true);
        let (bytes, began) = (host_region(pointer).map_or(0, |region| region.bytes), now_ns());
        driver.memory.unregister_host(&driver.device_state, pointer as u64)?;
        let ns = driver.device_state.profile().costs.unpin_ns(bytes);
        driver.spend(began, ns);
        Ok(())
    }

    fn cuMemHostGetDevicePointer_v2(to: Out<CUdeviceptr>, pointer: *mut c_void, flags: u32) {
        to.check()?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        host_region(pointer)?;
        to.put(CUdeviceptr(pointer as u64))
    }

    fn cuMemHostGetFlags(to: Out<u32>, pointer: *mut c_void) {
        to.check()?;
        match host_region(pointer)?.kind {
            Kind::HostAlloc { flags } => to.put(flags),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuMemAdvise(address: CUdeviceptr, bytes: usize, advice: u32, device: c_int) {
        advise(address, bytes, advice, of_ordinal(device))
    }

    fn cuMemAdvise_v2(address: CUdeviceptr, bytes: usize, advice: u32, location: shim_ffi::CUmemLocation) {
        advise(address, bytes, advice, (location.r#type.0, location.id))
    }

    fn cuMemRangeGetAttribute(
        to: Out<c_void>, capacity: usize, attribute: u32, address: CUdeviceptr, bytes: usize,
    ) {
        range_attribute(to, capacity, attribute, address, bytes)
    }

    fn cuMemRangeGetAttributes(
        to: In<*mut c_void>, capacities: In<usize>, attributes: In<u32>, count: usize, address: CUdeviceptr, bytes: usize,
    ) {
        if count == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        for at in 0..count {
            // SAFETY: the program vouches for as many pointers, each to as many bytes as it says.
            let one = unsafe { Out::new(to.at(at)?) };
            range_attribute(one, capacities.at(at)?, attributes.at(at)?, address, bytes)?;
        }
        Ok(())
    }

    stream fn cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz(
        default; address: CUdeviceptr, bytes: usize, device: c_int, stream: shim_ffi::CUstream,
    ) {
        managed(address, bytes)?;
        crate::stream::Stream::of(stream, default)?;
        prefetched(address, of_ordinal(device))
    }

    stream fn cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz(
        default; address: CUdeviceptr, bytes: usize, location: shim_ffi::CUmemLocation, _flags: u32,
        stream: shim_ffi::CUstream,
    ) {
        managed(address, bytes)?;
        crate::stream::Stream::of(stream, default)?;
        prefetched(address, (location.r#type.0, location.id))
    }
}

/// Type and number of a location, as device ordinals say it.
fn of_ordinal(device: c_int) -> Location {
    if device < 0 {
        (LOCATION_HOST, 0)
    } else {
        (LOCATION_DEVICE, device)
    }
}

fn of_region(address: CUdeviceptr, change: impl FnOnce(&mut Advice)) -> Done {
    let (driver, _) = current()?;
    let region = driver.memory.region(address.0);
    let region = region.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    change(driver.advice.lock().entry(region.id).or_default());
    Ok(())
}

fn prefetched(address: CUdeviceptr, to: Location) -> Done {
    of_region(address, |advice| advice.prefetched = Some(to))
}

fn advise(address: CUdeviceptr, bytes: usize, what: u32, location: Location) -> Done {
    managed(address, bytes)?;
    if !(1..=6).contains(&what) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    of_region(address, |advice| match what {
        1 => advice.mostly_read = true,
        2 => advice.mostly_read = false,
        3 => advice.preferred = Some(location),
        4 => advice.preferred = None,
        5 if !advice.accessed_by.contains(&location) => advice.accessed_by.push(location),
        5 => {}
        _ => advice.accessed_by.retain(|other| *other != location),
    })
}

/// What was advised for managed memory. Advice is for whole allocations here.
fn range_attribute(
    to: Out<c_void>,
    capacity: usize,
    attribute: u32,
    address: CUdeviceptr,
    bytes: usize,
) -> Done {
    const NOWHERE: c_int = -2;
    to.check()?;
    managed(address, bytes)?;
    let (driver, _) = current()?;
    let advice = driver
        .memory
        .region(address.0)
        .and_then(|region| driver.advice.lock().get(&region.id).cloned())
        .unwrap_or_default();
    let ordinal = |location: Option<Location>| match location {
        Some((LOCATION_DEVICE, device)) => device,
        Some(_) => -1,
        None => NOWHERE,
    };
    let kind = |location: Option<Location>| location.map_or(0, |(kind, _)| kind as c_int);
    let number = |location: Option<Location>| location.map_or(0, |(_, id)| id);
    let values = match attribute {
        1 => vec![c_int::from(advice.mostly_read)],
        2 => vec![ordinal(advice.preferred)],
        3 => {
            let list = advice.accessed_by.iter().map(|one| ordinal(Some(*one)));
            let mut list: Vec<c_int> = list.collect();
            list.resize((capacity / 4).max(1), NOWHERE);
            list
        }
        4 => vec![ordinal(advice.prefetched)],
        5 => vec![kind(advice.preferred)],
        6 => vec![number(advice.preferred)],
        7 => vec![kind(advice.prefetched)],
        8 => vec![number(advice.prefetched)],
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    };
    if capacity == 0 || !capacity.is_multiple_of(4) || (attribute != 3 && capacity != 4) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the program says that it has space for so many bytes.
    unsafe { Out::new(to.raw().cast::<c_int>()) }.put_all(&values, capacity / 4)
}

/// Whether advice may be given about a range: managed memory, whose pages never move here.
pub(super) fn managed(address: CUdeviceptr, bytes: usize) -> Done {
    let (driver, _) = current()?;
    let region = driver
        .memory
        .region(address.0)
        .filter(|region| matches!(region.kind, Kind::Managed));
    let inside = region.is_some_and(|region| {
        address
            .0
            .checked_add(bytes as u64)
            .is_some_and(|end| bytes > 0 && end <= region.start + region.bytes)
    });
    if inside {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}
