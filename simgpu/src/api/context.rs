//! Contexts and primary contexts.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::*;

use shim_ffi::{CUcontext, CUdevice, CUresult};

use crate::context::{self, Context, current, current_any};
use crate::driver::{Driver, driver};
use crate::entry::{In, Out, api};

const FLAGS_MASK: u32 = 0xff;
const SCHED_MASK: u32 = 0x7;
const PRIORITY_LEAST: c_int = 0;
const PRIORITY_GREATEST: c_int = -5;

fn handle(id: u64) -> CUcontext {
    CUcontext(id as *mut c_void)
}

fn check_flags(flags: u32) -> Result<(), CUresult> {
    let valid = flags & !FLAGS_MASK == 0 && matches!(flags & SCHED_MASK, 0 | 1 | 2 | 4);
    if valid {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}

fn create(to: Out<CUcontext>, flags: u32, device: CUdevice) -> Result<(), CUresult> {
    let driver = driver()?;
    to.check()?;
    check_flags(flags)?;
    let context = Context::create(driver, driver.device(device.0)?, flags, false)?;
    context::push(context.id);
    to.put(handle(context.id))
}

/// The context of a handle, the current one for null.
fn of(driver: &Driver, wanted: CUcontext) -> Result<std::sync::Arc<Context>, CUresult> {
    if wanted.is_null() {
        return current_any().map(|(_, context)| context);
    }
    driver
        .contexts
        .get(wanted.0 as u64)
        .ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
}

fn destroy(context: CUcontext) -> Result<(), CUresult> {
    let driver = driver()?;
    let context = driver
        .contexts
        .get(context.0 as u64)
        .ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
    if context.primary {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    context.destroy(driver);
    if context::current_id() == context.id {
        context::pop();
    }
    Ok(())
}

fn pop(to: Out<CUcontext>) -> Result<(), CUresult> {
    driver()?;
    match context::pop() {
        0 => Err(CUresult::CUDA_ERROR_INVALID_CONTEXT),
        id => {
            to.put_if(handle(id));
            Ok(())
        }
    }
}

fn release(device: CUdevice) -> Result<(), CUresult> {
    let driver = driver()?;
    let mut primary = driver.primaries[driver.device(device.0)?].lock();
    if primary.retained == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    primary.retained -= 1;
    if primary.retained == 0
        && let Some(context) = primary.context.take()
    {
        context.destroy(driver);
    }
    Ok(())
}

fn reset(device: CUdevice) -> Result<(), CUresult> {
    let driver = driver()?;
    let mut primary = driver.primaries[driver.device(device.0)?].lock();
    primary.retained = 0;
    if let Some(context) = primary.context.take() {
        context.destroy(driver);
    }
    Ok(())
}

fn set_primary_flags(device: CUdevice, flags: u32) -> Result<(), CUresult> {
    let driver = driver()?;
    check_flags(flags)?;
    let mut primary = driver.primaries[driver.device(device.0)?].lock();
    primary.flags = flags;
    if let Some(context) = &primary.context {
        context.flags.store(flags, Relaxed);
    }
    Ok(())
}

fn synchronize(context: &Context, driver: &'static Driver) -> Result<(), CUresult> {
    driver
        .engine
        .wait_streams(|stream| stream.context == context.id);
    driver.synchronised();
    context.check()
}

fn default_limit(limit: u32) -> Option<usize> {
    Some(match limit {
        0 => 1024,
        1 => 1 << 20,
        2 => 8 << 20,
        3 => 2,
        4 => 2048,
        5 => 128,
        6 => 0,
        _ => return None,
    })
}

api! {
    fn cuCtxCreate(to: Out<CUcontext>, flags: u32, device: CUdevice) {
        create(to, flags, device)
    }

    fn cuCtxCreate_v2(to: Out<CUcontext>, flags: u32, device: CUdevice) {
        create(to, flags, device)
    }

    fn cuCtxCreate_v3(to: Out<CUcontext>, affinity: In<u64>, count: c_int, flags: u32, device: CUdevice) {
        if count != 0 || !affinity.is_null() {
            return Err(CUresult::CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
        }
        create(to, flags, device)
    }

    fn cuCtxCreate_v4(to: Out<CUcontext>, params: In<shim_ffi::CUctxCreateParams>, flags: u32, device: CUdevice) {
        if !params.is_null() && (params.get()?.numExecAffinityParams != 0 || !params.get()?.cigParams.is_null()) {
            return Err(CUresult::CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
        }
        create(to, flags, device)
    }

    fn cuCtxDestroy(context: CUcontext) {
        destroy(context)
    }

    fn cuCtxDestroy_v2(context: CUcontext) {
        destroy(context)
    }

    fn cuCtxAttach(to: Out<CUcontext>, flags: u32) {
        let (_, context) = current_any()?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        to.put(handle(context.id))?;
        context.attached.fetch_add(1, Relaxed);
        Ok(())
    }

    fn cuCtxDetach(context: CUcontext) {
        let found = of(driver()?, context)?;
        if found.attached.fetch_sub(1, Relaxed) == 1 {
            destroy(handle(found.id))?;
        }
        Ok(())
    }

    fn cuCtxPushCurrent(context: CUcontext) {
        context::push(of(driver()?, context).ok().filter(|_| !context.is_null()).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?.id);
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) {
        context::push(of(driver()?, context).ok().filter(|_| !context.is_null()).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?.id);
        Ok(())
    }

    fn cuCtxPopCurrent(to: Out<CUcontext>) {
        pop(to)
    }

    fn cuCtxPopCurrent_v2(to: Out<CUcontext>) {
        pop(to)
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        let driver = driver()?;
        let id = context.0 as u64;
        if id != 0 && driver.contexts.get(id).is_none() {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        context::set_current(id);
        Ok(())
    }

    fn cuCtxGetCurrent(to: Out<CUcontext>) {
        driver()?;
        to.put(handle(context::current_id()))
    }

    fn cuCtxGetDevice(to: Out<CUdevice>) {
        to.check()?;
        let (_, context) = current_any()?;
        to.put(CUdevice(driver()?.ordinal(context.device)))
    }

    fn cuCtxGetDevice_v2(to: Out<CUdevice>, context: CUcontext) {
        to.check()?;
        let driver = driver()?;
        to.put(CUdevice(driver.ordinal(of(driver, context)?.device)))
    }

    fn cuCtxGetFlags(to: Out<u32>) {
        to.check()?;
        to.put(current_any()?.1.flags.load(Relaxed))
    }

    fn cuCtxSetFlags(flags: u32) {
        check_flags(flags)?;
        current_any()?.1.flags.store(flags, Relaxed);
        Ok(())
    }

    fn cuCtxGetId(context: CUcontext, to: Out<u64>) {
        to.check()?;
        to.put(of(driver()?, context)?.id)
    }

    fn cuCtxGetApiVersion(context: CUcontext, to: Out<u32>) {
        const CONTEXT_API: u32 = 3020;
        of(driver()?, context)?;
        to.put(CONTEXT_API)
    }

    fn cuCtxSynchronize() {
        let (driver, context) = current()?;
        crate::capture::forbid_synchronisation(driver, context.id)?;
        synchronize(&context, driver)
    }

    fn cuCtxSynchronize_v2(context: CUcontext) {
        let driver = driver()?;
        let context = of(driver, context)?;
        context.check()?;
        crate::capture::forbid_synchronisation(driver, context.id)?;
        synchronize(&context, driver)
    }

    fn cuCtxGetLimit(to: Out<usize>, limit: u32) {
        to.check()?;
        let (_, context) = current_any()?;
        let default = default_limit(limit).ok_or(CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT)?;
        to.put(context.limits.lock().get(&limit).copied().unwrap_or(default))
    }

    fn cuCtxSetLimit(limit: u32, value: usize) {
        let (_, context) = current()?;
        default_limit(limit).ok_or(CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT)?;
        context.limits.lock().insert(limit, value);
        Ok(())
    }

    fn cuCtxGetCacheConfig(to: Out<u32>) {
        to.check()?;
        to.put(current_any()?.1.cache_config.load(Relaxed))
    }

    fn cuCtxSetCacheConfig(config: u32) {
        if config > 3 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        current()?.1.cache_config.store(config, Relaxed);
        Ok(())
    }

    fn cuCtxGetSharedMemConfig(to: Out<u32>) {
        to.check()?;
        to.put(current_any()?.1.shared_config.load(Relaxed))
    }

    fn cuCtxSetSharedMemConfig(config: u32) {
        if config > 2 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        current()?.1.shared_config.store(config, Relaxed);
        Ok(())
    }

    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        current_any()?;
        least.put_if(PRIORITY_LEAST);
        greatest.put_if(PRIORITY_GREATEST);
        Ok(())
    }

    fn cuCtxResetPersistingL2Cache() {
        current().map(|_| ())
    }

    fn cuCtxEnablePeerAccess(peer: CUcontext, flags: u32) {
        let (driver, context) = current()?;
        let peer = driver.contexts.get(peer.0 as u64).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if peer.device == context.device {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        if !context.peers.lock().insert(peer.id) {
            return Err(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
        }
        driver.memory.set_peer(context.device, peer.device, true);
        Ok(())
    }

    fn cuCtxDisablePeerAccess(peer: CUcontext) {
        let (driver, context) = current()?;
        if !context.peers.lock().remove(&(peer.0 as u64)) {
            return Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
        }
        if let Some(peer) = driver.contexts.get(peer.0 as u64) {
            driver.memory.set_peer(context.device, peer.device, false);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxRetain(to: Out<CUcontext>, device: CUdevice) {
        let driver = driver()?;
        to.check()?;
        let device = driver.device(device.0)?;
        let mut primary = driver.primaries[device].lock();
        let context = match &primary.context {
            Some(context) => context.clone(),
            None => {
                let context = Context::create(driver, device, primary.flags, true)?;
                primary.context = Some(context.clone());
                context
            }
        };
        primary.retained += 1;
        to.put(handle(context.id))
    }

    fn cuDevicePrimaryCtxRelease(device: CUdevice) {
        release(device)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) {
        release(device)
    }

    fn cuDevicePrimaryCtxReset(device: CUdevice) {
        reset(device)
    }

    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) {
        reset(device)
    }

    fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: Out<u32>, active: Out<c_int>) {
        let driver = driver()?;
        let primary = driver.primaries[driver.device(device.0)?].lock();
        flags.put(primary.flags)?;
        active.put(c_int::from(primary.context.is_some()))
    }

    fn cuDevicePrimaryCtxSetFlags(device: CUdevice, flags: u32) {
        set_primary_flags(device, flags)
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: u32) {
        set_primary_flags(device, flags)
    }
}
