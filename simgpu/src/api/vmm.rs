//! Virtual memory management, peer-to-peer sharing of it, and IPC handles of plain memory.

use std::ffi::{c_int, c_void};

use shim_ffi::{
    CUdeviceptr, CUipcMemHandle, CUmemAccessDesc, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemLocation, CUresult,
};

use super::Done;
use crate::clock::now_ns;
use crate::context::{current, current_any};
use crate::costs::Costs;
use crate::driver::{Driver, driver};
use crate::entry::{In, Out, api};
use crate::memory::window::GRANULE;

const PINNED: u32 = 1;
const LOCATION_DEVICE: u32 = 1;
const LOCATION_HOST: u32 = 2;
const LOCATION_HOST_NUMA: u32 = 3;
const LOCATION_HOST_NUMA_CURRENT: u32 = 4;
const POSIX_FD: u32 = 1;

/// Device of a location, none for the host.
fn location(driver: &Driver, location: CUmemLocation) -> Result<Option<usize>, CUresult> {
    match location.r#type.0 {
        LOCATION_DEVICE => driver.device(location.id).map(Some),
        LOCATION_HOST | LOCATION_HOST_NUMA_CURRENT => Ok(None),
        // The simulated host has one node.
        LOCATION_HOST_NUMA if location.id == 0 => Ok(None),
        LOCATION_HOST_NUMA => Err(CUresult::CUDA_ERROR_INVALID_DEVICE),
        _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
    }
}

fn check_prop(driver: &Driver, prop: &CUmemAllocationProp) -> Result<Option<usize>, CUresult> {
    if prop.r#type.0 != PINNED {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if prop.requestedHandleTypes.0 & !POSIX_FD != 0 {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    location(driver, prop.location)
}

/// What a call that may synchronise does first, where the profile says so.
fn synchronise(driver: &Driver) {
    if driver.device_state.profile().costs.synchronise {
        driver.engine.wait_streams(|_| true);
    }
}

/// Takes the time that a call takes by the profile, which began at `began_ns`.
fn spend(driver: &Driver, began_ns: u64, ns: impl FnOnce(&Costs) -> u64) {
    let ns = ns(&driver.device_state.profile().costs);
    driver.spend(began_ns, ns);
}

fn open(to: Out<CUdeviceptr>, handle: CUipcMemHandle, flags: u32) -> Done {
    let (driver, context) = super::memory::allocating()?;
    to.check()?;
    if flags & !1 != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let handle = handle.reserved.map(|byte| byte as u8);
    to.put(CUdeviceptr(driver.memory.open_import(
        context.id,
        driver.all_devices(),
        &handle,
        false,
    )?))
}

api! {
    fn cuMemGetAllocationGranularity(to: Out<usize>, prop: In<CUmemAllocationProp>, option: u32) {
        let driver = driver()?;
        to.check()?;
        check_prop(driver, &prop.get()?)?;
        if option > 1 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        to.put(GRANULE as usize)
    }

    fn cuMemCreate(to: Out<CUmemGenericAllocationHandle>, bytes: usize, prop: In<CUmemAllocationProp>, flags: u64) {
        let driver = driver()?;
        to.check()?;
        crate::capture::forbid_unsafe(driver)?;
        driver.faults.allocation()?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let prop = prop.get()?;
        let device = check_prop(driver, &prop)?;
        let exportable = prop.requestedHandleTypes.0 & POSIX_FD != 0;
        let began = now_ns();
        let handle = driver.memory.create_handle(&driver.device_state, device, bytes as u64, prop, exportable);
        driver.spend_if_failed(began, &handle);
        let handle = handle?;
        // Pages of the host are taken and locked as well.
        let locked = if device.is_none() { bytes as u64 } else { 0 };
        spend(driver, began, |costs| costs.create_ns + costs.pin_ns(locked));
        to.put(CUmemGenericAllocationHandle(handle))
    }

    fn cuMemRelease(handle: CUmemGenericAllocationHandle) {
        let driver = driver()?;
        crate::capture::forbid_unsafe(driver)?;
        let began = now_ns();
        driver.memory.release_handle(&driver.device_state, handle.0)?;
        spend(driver, began, |costs| costs.release_ns);
        Ok(())
    }

    fn cuMemRetainAllocationHandle(to: Out<CUmemGenericAllocationHandle>, address: *mut c_void) {
        to.check()?;
        to.put(CUmemGenericAllocationHandle(driver()?.memory.retain_handle(address as u64)?))
    }

    fn cuMemGetAllocationPropertiesFromHandle(
        to: Out<CUmemAllocationProp>, handle: CUmemGenericAllocationHandle,
    ) {
        let driver = driver()?;
        let prop = driver.memory.handles.lock().get(handle.0)?.prop;
        to.put(prop)
    }

    fn cuMemAddressReserve(to: Out<CUdeviceptr>, bytes: usize, align: usize, hint: CUdeviceptr, flags: u64) {
        let driver = driver()?;
        to.check()?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        to.put(CUdeviceptr(driver.memory.reserve_addresses(bytes as u64, align as u64, hint.0)?))
    }

    fn cuMemAddressFree(address: CUdeviceptr, bytes: usize) {
        driver()?.memory.free_addresses(address.0, bytes as u64)
    }

    fn cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64) {
        let driver = driver()?;
        crate::capture::forbid_unsafe(driver)?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let context = crate::context::current_id();
        let began = now_ns();
        driver.memory.map_handle(context, address.0, bytes as u64, offset as u64, handle.0)?;
        spend(driver, began, |costs| costs.map_ns);
        Ok(())
    }

    fn cuMemUnmap(address: CUdeviceptr, bytes: usize) {
        let driver = driver()?;
        crate::capture::forbid_unsafe(driver)?;
        synchronise(driver);
        let began = now_ns();
        let mappings = driver.memory.unmap_handles(&driver.device_state, address.0, bytes as u64)?;
        spend(driver, began, |costs| mappings * costs.unmap_ns);
        Ok(())
    }

    fn cuMemSetAccess(address: CUdeviceptr, bytes: usize, list: In<CUmemAccessDesc>, count: usize) {
        let driver = driver()?;
        crate::capture::forbid_unsafe(driver)?;
        if count == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        synchronise(driver);
        for one in list.list(count)? {
            if !matches!(one.flags.0, 0 | 1 | 3) {
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
            let device = location(driver, one.location)?.map_or(-1, |device| device as i32);
            let began = now_ns();
            let mappings = driver.memory.set_access(address.0, bytes as u64, device, one.flags.0)?;
            spend(driver, began, |costs| mappings * costs.access_ns);
        }
        Ok(())
    }

    fn cuMemGetAccess(to: Out<u64>, at: In<CUmemLocation>, address: CUdeviceptr) {
        let driver = driver()?;
        to.check()?;
        let device = location(driver, at.get()?)?.map_or(-1, |device| device as i32);
        to.put(driver.memory.access(address.0, device)?.into())
    }

    fn cuMemExportToShareableHandle(
        to: Out<c_void>, handle: CUmemGenericAllocationHandle, kind: u32, flags: u64,
    ) {
        let driver = driver()?;
        to.check()?;
        if kind != POSIX_FD || flags != 0 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let fd = driver.memory.export_handle(&driver.device_state, handle.0)?;
        // SAFETY: for this kind of handle the program points to an int.
        unsafe { Out::new(to.raw().cast::<c_int>()) }.put(fd)
    }

    fn cuMemImportFromShareableHandle(to: Out<CUmemGenericAllocationHandle>, handle: *mut c_void, kind: u32) {
        let driver = driver()?;
        to.check()?;
        if kind != POSIX_FD {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        // CAST: the API passes the descriptor itself in the pointer.
        let fd = handle as usize as c_int;
        to.put(CUmemGenericAllocationHandle(driver.memory.import_handle(
            &driver.device_state,
            fd,
            driver.all_devices(),
            |device| driver.ordinal(device),
        )?))
    }

    fn cuMemGetHandleForAddressRange(
        to: Out<c_void>, address: CUdeviceptr, bytes: usize, kind: u32, flags: u64,
    ) {
        const DMA_BUF_FD: u32 = 1;
        let driver = driver()?;
        to.check()?;
        if kind != DMA_BUF_FD || flags & !1 != 0 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let fd = driver.memory.range_descriptor(address.0, bytes as u64)?;
        // SAFETY: for this kind of handle the program points to an int.
        unsafe { Out::new(to.raw().cast::<c_int>()) }.put(fd)
    }

    fn cuIpcGetMemHandle(to: Out<CUipcMemHandle>, address: CUdeviceptr) {
        let (driver, _) = current()?;
        to.check()?;
        let handle = driver.memory.share(address.0)?;
        to.put(CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) })
    }

    fn cuIpcOpenMemHandle(to: Out<CUdeviceptr>, handle: CUipcMemHandle, flags: u32) {
        open(to, handle, flags)
    }

    fn cuIpcOpenMemHandle_v2(to: Out<CUdeviceptr>, handle: CUipcMemHandle, flags: u32) {
        open(to, handle, flags)
    }

    fn cuIpcCloseMemHandle(address: CUdeviceptr) {
        let (driver, _) = current_any()?;
        driver.engine.wait_streams(|_| true);
        driver.memory.close_import(address.0)
    }
}
