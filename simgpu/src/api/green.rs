//! Green contexts, and the resources of devices that they are made from.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use shim_ffi::{CUcontext, CUdevResourceDesc, CUdevice, CUevent, CUgreenCtx, CUresult, CUstream};

use super::Done;
use crate::context::{Context, current_any};
use crate::driver::{Driver, driver};
use crate::entry::{In, Out, api};
use crate::green::{Green, Resource};
use crate::registry;
use crate::stream::Stream;

const SM: u32 = 1;
const WORK_QUEUE_CONFIG: u32 = 1000;
const WORK_QUEUE: u32 = 10_000;
const IGNORES_COSCHEDULING: u32 = 1;
const MAXIMUM_POTENTIAL_CLUSTER_SIZE: u32 = 2;

/// ABI: `CUdevResource` with multiprocessors in it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DevResource {
    pub kind: u32,
    pub internal: [u8; 92],
    pub count: u32,
    pub least: u32,
    pub alignment: u32,
    pub flags: u32,
    pub rest: [u64; 4],
}
const _: () = assert!(size_of::<DevResource>() == 144);

/// ABI: `CU_DEV_SM_RESOURCE_GROUP_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Group {
    pub count: u32,
    pub coscheduled: u32,
    pub preferred_coscheduled: u32,
    pub flags: u32,
    pub reserved: [u32; 12],
}

/// Multiprocessors of one part, at least and in steps of.
fn unit(driver: &Driver) -> u32 {
    match driver.device_state.profile().major {
        ..=6 => 1,
        7 => 2,
        8 => 4,
        _ => 8,
    }
}

fn resource(driver: &Driver, count: u32) -> DevResource {
    DevResource {
        kind: SM,
        internal: [0; 92],
        count,
        least: unit(driver),
        alignment: unit(driver),
        flags: 0,
        rest: [0; 4],
    }
}

fn give(driver: &Driver, to: Out<DevResource>, kind: u32, count: u32) -> Done {
    match kind {
        SM => to.put(resource(driver, count)),
        WORK_QUEUE_CONFIG | WORK_QUEUE => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        _ => Err(CUresult::CUDA_ERROR_INVALID_RESOURCE_TYPE),
    }
}

fn whole(driver: &Driver) -> u32 {
    // CAST: a positive number of the profile.
    driver.device_state.profile().multiprocessors as u32
}

fn of_context(driver: &Driver, context: u64) -> u32 {
    let green = driver.greens.all(|green| green.context.id == context);
    green
        .first()
        .map_or_else(|| whole(driver), |green| green.multiprocessors)
}

fn green(handle: CUgreenCtx) -> Result<(&'static Driver, Arc<Green>), CUresult> {
    let driver = driver()?;
    let green = driver.greens.get(handle.0 as u64);
    Ok((driver, green.ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?))
}

fn event(driver: &Driver, event: CUevent) -> Result<Arc<crate::event::Event>, CUresult> {
    driver
        .events
        .get(event.0 as u64)
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

/// The multiprocessors of a resource that is to be divided.
fn divisible(from: In<DevResource>) -> Result<u32, CUresult> {
    let from = from.get()?;
    if from.kind == SM {
        Ok(from.count)
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_RESOURCE_TYPE)
    }
}

api! {
    fn cuDeviceGetDevResource(device: CUdevice, to: Out<DevResource>, kind: u32) {
        let driver = driver()?;
        driver.device(device.0)?;
        give(driver, to, kind, whole(driver))
    }

    fn cuCtxGetDevResource(context: CUcontext, to: Out<DevResource>, kind: u32) {
        let driver = driver()?;
        let context = driver.contexts.get(context.0 as u64).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        give(driver, to, kind, of_context(driver, context.id))
    }

    stream fn cuStreamGetDevResource, cuStreamGetDevResource_ptsz(
        default; stream: CUstream, to: Out<DevResource>, kind: u32,
    ) {
        let (driver, context, _) = Stream::of(stream, default)?;
        give(driver, to, kind, of_context(driver, context.id))
    }

    fn cuGreenCtxGetDevResource(context: CUgreenCtx, to: Out<DevResource>, kind: u32) {
        let (driver, green) = self::green(context)?;
        give(driver, to, kind, green.multiprocessors)
    }

    fn cuDevSmResourceSplitByCount(
        to: Out<DevResource>, groups: Out<u32>, from: In<DevResource>, rest: Out<DevResource>, flags: u32, least: u32,
    ) {
        let driver = driver()?;
        groups.check()?;
        let all = divisible(from)?;
        if flags & !(IGNORES_COSCHEDULING | MAXIMUM_POTENTIAL_CLUSTER_SIZE) != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let step = if flags & IGNORES_COSCHEDULING != 0 { 2 } else { unit(driver) };
        let each = least.max(step).next_multiple_of(step);
        let possible = all / each;
        if possible == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
        }
        if to.is_null() {
            return groups.put(possible);
        }
        let made = groups.get()?.min(possible);
        to.put_all(&vec![resource(driver, each); made as usize], made as usize)?;
        rest.put_if(resource(driver, all - each * made));
        groups.put(made)
    }

    fn cuDevSmResourceSplit(
        to: Out<DevResource>, groups: u32, from: In<DevResource>, rest: Out<DevResource>, flags: u32, params: In<Group>,
    ) {
        let driver = driver()?;
        let all = divisible(from)?;
        if flags != 0 || groups == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let mut made = Vec::new();
        let mut left = all;
        for group in params.list(groups as usize)? {
            let step = group.coscheduled.max(2);
            let count = if group.count == 0 { left / step * step } else { group.count };
            if count == 0 || !count.is_multiple_of(step) || count > left {
                return Err(CUresult::CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
            }
            left -= count;
            made.push(resource(driver, count));
        }
        if !to.is_null() {
            to.put_all(&made, made.len())?;
        }
        rest.put_if(resource(driver, left));
        Ok(())
    }

    fn cuDevResourceGenerateDesc(to: Out<CUdevResourceDesc>, list: In<DevResource>, count: u32) {
        let driver = driver()?;
        to.check()?;
        let list = list.list(count as usize)?;
        if list.is_empty() || list.iter().any(|one| one.kind != SM) {
            return Err(CUresult::CUDA_ERROR_INVALID_RESOURCE_TYPE);
        }
        let id = registry::fresh();
        let multiprocessors = list.iter().map(|one| one.count).sum();
        driver.resources.insert(id, Arc::new(Resource { multiprocessors }));
        to.put(CUdevResourceDesc(id as *mut c_void))
    }

    fn cuGreenCtxCreate(to: Out<CUgreenCtx>, from: CUdevResourceDesc, device: CUdevice, flags: u32) {
        const DEFAULT_STREAM: u32 = 1;
        let driver = driver()?;
        to.check()?;
        if flags != DEFAULT_STREAM {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let resource = driver.resources.get(from.0 as u64);
        let resource = resource.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let context = Context::create(driver, driver.device(device.0)?, 0, false)?;
        let green = Arc::new(Green { id: registry::fresh(), context, multiprocessors: resource.multiprocessors });
        driver.greens.insert(green.id, green.clone());
        to.put(CUgreenCtx(green.id as *mut c_void))
    }

    fn cuGreenCtxDestroy(context: CUgreenCtx) {
        let (driver, green) = self::green(context)?;
        driver.greens.remove(green.id);
        green.context.destroy(driver);
        if crate::context::current_id() == green.context.id {
            crate::context::pop();
        }
        Ok(())
    }

    fn cuCtxFromGreenCtx(to: Out<CUcontext>, context: CUgreenCtx) {
        to.check()?;
        to.put(CUcontext(self::green(context)?.1.context.id as *mut c_void))
    }

    fn cuGreenCtxGetId(context: CUgreenCtx, to: Out<u64>) {
        to.check()?;
        let id = if context.is_null() { current_any()?.1.id } else { self::green(context)?.1.context.id };
        to.put(id)
    }

    fn cuGreenCtxStreamCreate(to: Out<CUstream>, context: CUgreenCtx, flags: u32, priority: c_int) {
        const NON_BLOCKING: u32 = 1;
        to.check()?;
        let (driver, green) = self::green(context)?;
        if flags != NON_BLOCKING {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        green.context.check()?;
        super::stream::create_in(driver, &green.context, to, flags, priority)
    }

    fn cuGreenCtxRecordEvent(context: CUgreenCtx, event: CUevent) {
        let (driver, green) = self::green(context)?;
        let event = self::event(driver, event)?;
        crate::capture::forbid_synchronisation(driver, green.context.id)?;
        event.record_all(driver, &green.context)
    }

    fn cuGreenCtxWaitEvent(context: CUgreenCtx, event: CUevent) {
        let (driver, green) = self::green(context)?;
        let event = self::event(driver, event)?;
        crate::capture::forbid_synchronisation(driver, green.context.id)?;
        for stream in driver.streams.all(|stream| stream.context == green.context.id) {
            stream.wait_event(driver, &event, false)?;
        }
        Ok(())
    }
}
