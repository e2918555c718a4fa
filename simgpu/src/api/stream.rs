//! Streams: creation, queries, synchronisation, host functions and memory operations.

use std::ffi::{c_int, c_void};

use shim_ffi::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUhostFn, CUresult, CUstream,
    CUstreamBatchMemOpParams, CUstreamCallback,
};

use super::Done;
use crate::context::current;
use crate::driver::green_of;
use crate::entry::{In, Out, api};
use crate::exec::engine::{Ordering, StreamInfo};
use crate::exec::work::{Until, UserData, Work};
use crate::stream::{Default, Stream};

const NON_BLOCKING: u32 = 1;
const PRIORITIES: std::ops::RangeInclusive<i32> = -5..=0;

fn create(to: Out<CUstream>, flags: u32, priority: i32) -> Done {
    let (driver, context) = current()?;
    create_in(driver, &context, to, flags, priority)
}

/// A stream of a context.
pub(super) fn create_in(
    driver: &'static crate::driver::Driver,
    context: &crate::context::Context,
    to: Out<CUstream>,
    flags: u32,
    priority: i32,
) -> Done {
    to.check()?;
    if flags > NON_BLOCKING {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let info = StreamInfo {
        id: driver.freed.handle(driver),
        context: context.id,
        device: context.device,
        ordering: if flags == NON_BLOCKING {
            Ordering::NonBlocking
        } else {
            Ordering::Blocking
        },
        priority: priority.clamp(*PRIORITIES.start(), *PRIORITIES.end()),
        failure: context.failure.clone(),
    };
    let stream = Stream::register(driver, info, flags);
    to.put(CUstream(stream.id as *mut c_void))
}

fn destroy(stream: CUstream) -> Done {
    let (driver, context) = crate::context::current_any()?;
    let id = stream.0 as u64;
    let found = driver
        .streams
        .get(id)
        .ok_or_else(|| driver.freed.answer(id))?;
    if found.id == context.legacy {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    found.destroy(driver);
    Ok(())
}

fn await_word(
    stream: CUstream,
    default: Default,
    address: u64,
    value: u64,
    flags: u32,
    wide: bool,
) -> Done {
    let (driver, _, stream) = Stream::of(stream, default)?;
    let until = match flags & 3 {
        0 => Until::GreaterOrEqual,
        1 => Until::Equal,
        2 => Until::And,
        _ => Until::Nor,
    };
    check_word(driver, address, wide)?;
    stream.submit(
        driver,
        Work::Await {
            address,
            value,
            wide,
            until,
        },
    )
}

fn write_word(stream: CUstream, default: Default, address: u64, value: u64, wide: bool) -> Done {
    let (driver, _, stream) = Stream::of(stream, default)?;
    check_word(driver, address, wide)?;
    stream.submit(
        driver,
        Work::Write {
            address,
            value,
            wide,
        },
    )
}

pub(super) fn check_word(driver: &crate::driver::Driver, address: u64, wide: bool) -> Done {
    let bytes = if wide { 8 } else { 4 };
    let valid =
        address.is_multiple_of(bytes) && driver.memory.translate(address, bytes, None).is_some();
    if valid {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}

fn batch(
    stream: CUstream,
    default: Default,
    count: u32,
    list: In<CUstreamBatchMemOpParams>,
    flags: u32,
) -> Done {
    const WAIT_32: u32 = 1;
    const WRITE_32: u32 = 2;
    const WAIT_64: u32 = 4;
    const WRITE_64: u32 = 5;
    const FLUSH: u32 = 3;
    const BARRIER: u32 = 6;
    if flags != 0 || count > 256 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    for op in list.list(count as usize)? {
        // The union starts with the operation: address, value, flags as for the single calls.
        let [address, value, flags, ..] = op.payload;
        match op.operation.0 {
            WAIT_32 => await_word(
                stream,
                default,
                address,
                value & 0xffff_ffff,
                flags as u32,
                false,
            )?,
            WAIT_64 => await_word(stream, default, address, value, flags as u32, true)?,
            WRITE_32 => write_word(stream, default, address, value & 0xffff_ffff, false)?,
            WRITE_64 => write_word(stream, default, address, value, true)?,
            FLUSH | BARRIER => {}
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }
    Ok(())
}

api! {
    fn cuStreamCreate(to: Out<CUstream>, flags: u32) {
        create(to, flags, 0)
    }

    fn cuStreamCreateWithPriority(to: Out<CUstream>, flags: u32, priority: c_int) {
        create(to, flags, priority)
    }

    fn cuStreamDestroy(stream: CUstream) {
        destroy(stream)
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        destroy(stream)
    }

    stream fn cuStreamSynchronize, cuStreamSynchronize_ptsz(default; stream: CUstream) {
        let (driver, context, stream) = Stream::of(stream, default)?;
        stream.forbid_capture(driver)?;
        stream.synchronize(driver, &context)
    }

    stream fn cuStreamQuery, cuStreamQuery_ptsz(default; stream: CUstream) {
        let (driver, context, stream) = Stream::of(stream, default)?;
        stream.forbid_capture(driver)?;
        let idle = driver.engine.is_idle(stream.id);
        context.check()?;
        if idle { Ok(()) } else { Err(CUresult::CUDA_ERROR_NOT_READY) }
    }

    stream fn cuStreamGetPriority, cuStreamGetPriority_ptsz(default; stream: CUstream, to: Out<c_int>) {
        to.put(Stream::of(stream, default)?.2.info.priority)
    }

    stream fn cuStreamGetFlags, cuStreamGetFlags_ptsz(default; stream: CUstream, to: Out<u32>) {
        to.put(Stream::of(stream, default)?.2.flags)
    }

    stream fn cuStreamGetId, cuStreamGetId_ptsz(default; stream: CUstream, to: Out<u64>) {
        to.put(Stream::of(stream, default)?.2.id)
    }

    stream fn cuStreamGetCtx, cuStreamGetCtx_ptsz(default; stream: CUstream, to: Out<CUcontext>) {
        to.put(CUcontext(Stream::of(stream, default)?.2.context as *mut c_void))
    }

    stream fn cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz(
        default; stream: CUstream, to: Out<CUcontext>, green: Out<shim_ffi::CUgreenCtx>,
    ) {
        let (driver, _, stream) = Stream::of(stream, default)?;
        green.put_if(shim_ffi::CUgreenCtx(green_of(driver, stream.context) as *mut c_void));
        to.put(CUcontext(stream.context as *mut c_void))
    }

    stream fn cuStreamGetDevice, cuStreamGetDevice_ptsz(default; stream: CUstream, to: Out<CUdevice>) {
        let device = Stream::of(stream, default)?.2.info.device;
        to.put(CUdevice(crate::driver::driver()?.ordinal(device)))
    }

    fn cuStreamGetGreenCtx(stream: CUstream, to: Out<shim_ffi::CUgreenCtx>) {
        let (driver, _, stream) = Stream::of(stream, Default::Legacy)?;
        to.put(shim_ffi::CUgreenCtx(green_of(driver, stream.context) as *mut c_void))
    }

    stream fn cuStreamWaitEvent, cuStreamWaitEvent_ptsz(default; stream: CUstream, event: CUevent, flags: u32) {
        let (driver, _, stream) = Stream::of(stream, default)?;
        let event = driver.events.get(event.0 as u64).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        stream.wait_event(driver, &event, flags == 1)
    }

    stream fn cuLaunchHostFunc, cuLaunchHostFunc_ptsz(
        default; stream: CUstream, function: CUhostFn, data: *mut c_void,
    ) {
        let (driver, _, stream) = Stream::of(stream, default)?;
        if function.is_none() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        stream.submit(driver, Work::Host(function, UserData(data)))
    }

    stream fn cuLaunchHostFunc_v2, cuLaunchHostFunc_v2_ptsz(
        default; stream: CUstream, function: CUhostFn, data: *mut c_void, _mode: u32,
    ) {
        let (driver, _, stream) = Stream::of(stream, default)?;
        if function.is_none() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        stream.submit(driver, Work::Host(function, UserData(data)))
    }

    stream fn cuStreamAddCallback, cuStreamAddCallback_ptsz(
        default; handle: CUstream, function: CUstreamCallback, data: *mut c_void, flags: u32,
    ) {
        let (driver, _, stream) = Stream::of(handle, default)?;
        if function.is_none() || flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        stream.forbid_capture(driver)?;
        stream.submit(driver, Work::Callback(function, handle, UserData(data)))
    }

    stream fn cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz(
        default; stream: CUstream, address: CUdeviceptr, value: u32, flags: u32,
    ) {
        await_word(stream, default, address.0, value.into(), flags, false)
    }

    stream fn cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz(
        default; stream: CUstream, address: CUdeviceptr, value: u64, flags: u32,
    ) {
        await_word(stream, default, address.0, value, flags, true)
    }

    stream fn cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz(
        default; stream: CUstream, address: CUdeviceptr, value: u32, _flags: u32,
    ) {
        write_word(stream, default, address.0, value.into(), false)
    }

    stream fn cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz(
        default; stream: CUstream, address: CUdeviceptr, value: u64, _flags: u32,
    ) {
        write_word(stream, default, address.0, value, true)
    }

    stream fn cuStreamWaitValue32, cuStreamWaitValue32_ptsz(
        default; stream: CUstream, address: CUdeviceptr, value: u32, flags: u32,
    ) {
        await_word(stream, default, address.0, value.into(), flags, false)
    }

    stream fn cuStreamWaitValue64, cuStreamWaitValue64_ptsz(
        default; stream: CUstream, address: CUdeviceptr, value: u64, flags: u32,
    ) {
        await_word(stream, default, address.0, value, flags, true)
    }

    stream fn cuStreamWriteValue32, cuStreamWriteValue32_ptsz(
        default; stream: CUstream, address: CUdeviceptr, value: u32, _flags: u32,
    ) {
        write_word(stream, default, address.0, value.into(), false)
    }

    stream fn cuStreamWriteValue64, cuStreamWriteValue64_ptsz(
        default; stream: CUstream, address: CUdeviceptr, value: u64, _flags: u32,
    ) {
        write_word(stream, default, address.0, value, true)
    }

    stream fn cuStreamBatchMemOp, cuStreamBatchMemOp_ptsz(
        default; stream: CUstream, count: u32, list: In<CUstreamBatchMemOpParams>, flags: u32,
    ) {
        batch(stream, default, count, list, flags)
    }

    stream fn cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz(
        default; stream: CUstream, count: u32, list: In<CUstreamBatchMemOpParams>, flags: u32,
    ) {
        batch(stream, default, count, list, flags)
    }
}
