//! Profiler control, the driver's log, stream attributes, batched copies, whole-context events and
//! the PTX linker.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use crate::lock::Mutex;
use shim_ffi::{
    CUcontext, CUdeviceptr, CUevent, CUlinkState, CUlogsCallback, CUlogsCallbackHandle,
    CUmemcpyAttributes, CUresult, CUstream,
};

use super::Done;
use super::copy::{copy, unified};
use crate::context::{Context, current, current_any};
use crate::driver::{Driver, driver};
use crate::entry::{In, Out, api};
use crate::event::Event;
use crate::module::Link;
use crate::registry;
use crate::stream::{Default, Stream};

fn batch(
    to: In<CUdeviceptr>,
    from: In<CUdeviceptr>,
    bytes: In<usize>,
    count: usize,
    stream: CUstream,
    default: Default,
) -> Result<(), (usize, CUresult)> {
    for at in 0..count {
        let one = || {
            copy(
                stream,
                default,
                true,
                unified(to.at(at)?, from.at(at)?, bytes.at(at)?),
            )
        };
        one().map_err(|status| (at, status))?;
    }
    Ok(())
}

fn context_event(
    context: CUcontext,
    event: CUevent,
) -> Result<(&'static Driver, Arc<Context>, Arc<Event>), CUresult> {
    let driver = driver()?;
    let context = if context.is_null() {
        current_any()?.1
    } else {
        driver
            .contexts
            .get(context.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?
    };
    let event = driver
        .events
        .get(event.0 as u64)
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    crate::capture::forbid_synchronisation(driver, context.id)?;
    Ok((driver, context, event))
}

fn link(state: CUlinkState) -> Result<Arc<Link>, CUresult> {
    driver()?
        .links
        .get(state.0 as u64)
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

fn link_create(to: Out<CUlinkState>) -> Done {
    let (driver, _) = current()?;
    to.check()?;
    let id = registry::fresh();
    driver.links.insert(
        id,
        Arc::new(Link {
            parts: Mutex::default(),
            complete: Mutex::default(),
        }),
    );
    to.put(CUlinkState(id as *mut c_void))
}

fn link_add(state: CUlinkState, kind: u32, part: &[u8]) -> Done {
    const PTX: u32 = 1;
    let link = link(state)?;
    if kind != PTX {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let text = part.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut parts = link.parts.lock();
    if parts.is_empty() {
        parts.extend_from_slice(text);
    } else {
        // One module has one version and one target: those of the first part.
        for line in text.split(|byte| *byte == b'\n') {
            let directive = [&b".version"[..], b".target", b".address_size"]
                .iter()
                .any(|word| line.trim_ascii().starts_with(word));
            if !directive {
                parts.extend_from_slice(line);
                parts.push(b'\n');
            }
        }
    }
    Ok(())
}

fn link_data(state: CUlinkState, kind: u32, data: *mut c_void, bytes: usize) -> Done {
    if data.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the program vouches for this many bytes.
    link_add(state, kind, unsafe {
        std::slice::from_raw_parts(data.cast_const().cast(), bytes)
    })
}

fn link_file(state: CUlinkState, kind: u32, path: In<c_char>) -> Done {
    link_add(
        state,
        kind,
        &std::fs::read(path.text()?).map_err(|_| CUresult::CUDA_ERROR_FILE_NOT_FOUND)?,
    )
}

api! {
    fn cuProfilerInitialize(_config: In<c_char>, _output: In<c_char>, _mode: u32) {
        // Never of use with a profiler attached elsewhere, and none can be attached here.
        Err(CUresult::CUDA_ERROR_PROFILER_DISABLED)
    }

    fn cuProfilerStart() {
        current().map(|_| ())
    }

    fn cuProfilerStop() {
        current().map(|_| ())
    }

    fn cuLogsRegisterCallback(callback: CUlogsCallback, _data: *mut c_void, to: Out<CUlogsCallbackHandle>) {
        // This driver logs nothing, so nothing will be called.
        if callback.is_none() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        to.put_if(CUlogsCallbackHandle(registry::fresh() as *mut c_void));
        Ok(())
    }

    fn cuLogsUnregisterCallback(_callback: CUlogsCallbackHandle) {
        Ok(())
    }

    fn cuLogsCurrent(to: Out<u32>, flags: u32) {
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        to.put(0)
    }

    stream fn cuStreamGetAttribute, cuStreamGetAttribute_ptsz(
        default; stream: CUstream, id: u32, value: Out<[u64; 8]>,
    ) {
        let (_, _, stream) = Stream::of(stream, default)?;
        value.put(stream.attributes.lock().get(&id).copied().unwrap_or_default())
    }

    stream fn cuStreamSetAttribute, cuStreamSetAttribute_ptsz(default; stream: CUstream, id: u32, value: In<[u64; 8]>) {
        let (_, _, stream) = Stream::of(stream, default)?;
        stream.attributes.lock().insert(id, value.get()?);
        Ok(())
    }

    stream fn cuStreamCopyAttributes, cuStreamCopyAttributes_ptsz(default; to: CUstream, from: CUstream) {
        let attributes = Stream::of(from, default)?.2.attributes.lock().clone();
        *Stream::of(to, default)?.2.attributes.lock() = attributes;
        Ok(())
    }

    stream fn cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz(
        default; stream: CUstream, address: CUdeviceptr, _bytes: usize, flags: u32,
    ) {
        Stream::of(stream, default)?;
        if !matches!(flags, 1 | 2 | 4) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        super::memory::managed(address, 1)
    }

    stream fn cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz(
        default; to: In<CUdeviceptr>, from: In<CUdeviceptr>, bytes: In<usize>, count: usize,
        _attributes: In<CUmemcpyAttributes>, _indices: In<usize>, _attribute_count: usize, failed: Out<usize>,
        stream: CUstream,
    ) {
        batch(to, from, bytes, count, stream, default).map_err(|(at, status)| {
            failed.put_if(at);
            status
        })
    }

    stream fn cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz(
        default; to: In<CUdeviceptr>, from: In<CUdeviceptr>, bytes: In<usize>, count: usize,
        _attributes: In<CUmemcpyAttributes>, _indices: In<usize>, _attribute_count: usize, stream: CUstream,
    ) {
        batch(to, from, bytes, count, stream, default).map_err(|(_, status)| status)
    }

    fn cuCtxRecordEvent(context: CUcontext, event: CUevent) {
        let (driver, context, event) = context_event(context, event)?;
        event.record_all(driver, &context)
    }

    fn cuCtxWaitEvent(context: CUcontext, event: CUevent) {
        let (driver, context, event) = context_event(context, event)?;
        for stream in driver.streams.all(|stream| stream.context == context.id) {
            stream.wait_event(driver, &event, false)?;
        }
        Ok(())
    }

    fn cuLinkCreate(_count: u32, _options: In<u32>, _values: In<*mut c_void>, to: Out<CUlinkState>) {
        link_create(to)
    }

    fn cuLinkCreate_v2(_count: u32, _options: In<u32>, _values: In<*mut c_void>, to: Out<CUlinkState>) {
        link_create(to)
    }

    fn cuLinkAddData(
        state: CUlinkState, kind: u32, data: *mut c_void, bytes: usize, _name: In<c_char>, _count: u32, _options: In<u32>,
        _values: In<*mut c_void>,
    ) {
        link_data(state, kind, data, bytes)
    }

    fn cuLinkAddData_v2(
        state: CUlinkState, kind: u32, data: *mut c_void, bytes: usize, _name: In<c_char>, _count: u32, _options: In<u32>,
        _values: In<*mut c_void>,
    ) {
        link_data(state, kind, data, bytes)
    }

    fn cuLinkAddFile(
        state: CUlinkState, kind: u32, path: In<c_char>, _count: u32, _options: In<u32>, _values: In<*mut c_void>,
    ) {
        link_file(state, kind, path)
    }

    fn cuLinkAddFile_v2(
        state: CUlinkState, kind: u32, path: In<c_char>, _count: u32, _options: In<u32>, _values: In<*mut c_void>,
    ) {
        link_file(state, kind, path)
    }

    fn cuLinkComplete(state: CUlinkState, image: Out<*const c_void>, bytes: Out<usize>) {
        let link = link(state)?;
        image.check()?;
        let mut text = link.parts.lock().clone();
        text.push(0);
        let profile = driver()?.device_state.profile();
        crate::image::read(&text, (profile.major, profile.minor))?;
        let mut complete = link.complete.lock();
        let shown = complete.insert(text.into_boxed_slice());
        bytes.put_if(shown.len());
        image.put(shown.as_ptr().cast())
    }

    fn cuLinkDestroy(state: CUlinkState) {
        driver()?.links.remove(state.0 as u64).map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }
}
