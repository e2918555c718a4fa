//! Events.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use crate::exec::aside;
use shim_ffi::{CUevent, CUipcEventHandle, CUresult, CUstream};

use super::Done;
use crate::clock;
use crate::context::{current, current_any};
use crate::device_state::{OpenError, SharedEvent};
use crate::driver::driver;
use crate::entry::{Out, api};
use crate::event::Event;
use crate::exec::work::Record;
use crate::stream::{Default, Stream};

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
/// What handles of events begin with.
const MAGIC: u64 = 0x5355_424c_4556_5431;

fn find(event: CUevent) -> Result<Arc<Event>, CUresult> {
    driver()?
        .events
        .get(event.0 as u64)
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

/// Makes an event known to the program.
fn register(to: Out<CUevent>, event: Event) -> Done {
    to.put(CUevent(event.id as *mut c_void))?;
    driver()?.events.insert(event.id, Arc::new(event));
    Ok(())
}

/// The first words of a handle.
const WORDS: usize = 3;

fn encode(words: [u64; WORDS]) -> CUipcEventHandle {
    let mut handle = CUipcEventHandle::default();
    let bytes = words.iter().flat_map(|word| word.to_ne_bytes());
    for (to, byte) in handle.reserved.iter_mut().zip(bytes) {
        *to = byte as c_char;
    }
    handle
}

fn decode(handle: &CUipcEventHandle) -> [u64; WORDS] {
    // PANIC: a handle has 64 bytes.
    let byte = |at: usize| handle.reserved[at] as u8;
    std::array::from_fn(|word| u64::from_ne_bytes(std::array::from_fn(|at| byte(word * 8 + at))))
}

fn record(event: CUevent, stream: CUstream, default: Default, flags: u32) -> Done {
    let event = find(event)?;
    let (driver, context, stream) = Stream::of(stream, default)?;
    if flags > 1 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if event.context != context.id {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    stream.record_event(driver, &event, flags == 1)
}

fn destroy(event: CUevent) -> Done {
    current_any()?;
    driver()?
        .events
        .remove(event.0 as u64)
        .map(|_| ())
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

fn elapsed(to: Out<f32>, from: CUevent, until: CUevent) -> Done {
    to.check()?;
    let (from, until) = (find(from)?, find(until)?);
    if (from.flags | until.flags) & DISABLE_TIMING != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    let recorded = |event: &Event| event.last().ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE);
    // An event that was never recorded is an error at any time, also while the other one is not
    // reached yet.
    let (from, until) = (recorded(&from)?, recorded(&until)?);
    let time = |record: &Record| {
        record
            .reached()
            .filter(|time| *time <= clock::now_ns())
            .ok_or(CUresult::CUDA_ERROR_NOT_READY)
    };
    let (from, until) = (time(&from)?, time(&until)?);
    to.put(((until as i64 - from as i64) as f64 / 1e6) as f32)
}

api! {
    fn cuEventCreate(to: Out<CUevent>, flags: u32) {
        let (driver, context) = current()?;
        to.check()?;
        if flags > 7 || (flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let shared = match flags & INTERPROCESS {
            0 => None,
            _ => {
                let shared = SharedEvent::create(&driver.device_state);
                Some(shared.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?)
            }
        };
        register(to, Event::new(context.id, flags, shared))
    }

    fn cuEventDestroy(event: CUevent) {
        destroy(event)
    }

    fn cuEventDestroy_v2(event: CUevent) {
        destroy(event)
    }

    stream fn cuEventRecord, cuEventRecord_ptsz(default; event: CUevent, stream: CUstream) {
        record(event, stream, default, 0)
    }

    stream fn cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz(default; event: CUevent, stream: CUstream, flags: u32) {
        record(event, stream, default, flags)
    }

    fn cuEventQuery(event: CUevent) {
        aside::called();
        let event = find(event)?;
        let driver = driver()?;
        event.forbid_captured()?;
        let reached = event.last().is_none_or(|record| {
            record.reached().is_some_and(|time| time <= clock::now_ns())
        });
        if let Some(context) = driver.contexts.get(event.context) {
            context.check()?;
        }
        if reached { Ok(()) } else { Err(CUresult::CUDA_ERROR_NOT_READY) }
    }

    fn cuEventSynchronize(event: CUevent) {
        let event = find(event)?;
        let driver = driver()?;
        event.forbid_captured()?;
        if let Some(record) = event.last() {
            driver.engine.wait_record(&record);
            driver.synchronised();
        }
        match driver.contexts.get(event.context) {
            Some(context) => context.check(),
            None => Ok(()),
        }
    }

    fn cuEventElapsedTime(to: Out<f32>, from: CUevent, until: CUevent) {
        elapsed(to, from, until)
    }

    fn cuEventElapsedTime_v2(to: Out<f32>, from: CUevent, until: CUevent) {
        elapsed(to, from, until)
    }

    fn cuIpcGetEventHandle(to: Out<CUipcEventHandle>, event: CUevent) {
        to.check()?;
        let event = find(event)?;
        let name = event.shared.as_ref().and_then(|shared| shared.name());
        let (at, key) = name.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        to.put(encode([MAGIC, at as u64, key]))
    }

    fn cuIpcOpenEventHandle(to: Out<CUevent>, handle: CUipcEventHandle) {
        let (driver, context) = current()?;
        to.check()?;
        let [magic, at, key] = decode(&handle);
        if magic != MAGIC {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let at = usize::try_from(at).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let opened = SharedEvent::open(&driver.device_state, at, key).map_err(|error| match error {
            OpenError::Own => CUresult::CUDA_ERROR_INVALID_CONTEXT,
            OpenError::Gone => CUresult::CUDA_ERROR_INVALID_HANDLE,
        })?;
        register(to, Event::new(context.id, DISABLE_TIMING, Some(opened)))
    }
}
