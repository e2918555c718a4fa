//! Events.

use std::ffi::c_void;
use std::sync::Arc;

use crate::exec::aside;
use crate::lock::Mutex;
use shim_ffi::{CUevent, CUresult, CUstream};

use super::Done;
use crate::clock;
use crate::context::{current, current_any};
use crate::driver::driver;
use crate::entry::{Out, api};
use crate::event::Event;
use crate::exec::work::Record;
use crate::registry;
use crate::stream::{Default, Stream};

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

fn find(event: CUevent) -> Result<Arc<Event>, CUresult> {
    driver()?
        .events
        .get(event.0 as u64)
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
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
    let recorded = |event: &Event| {
        let last = event.last.lock().clone();
        last.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    };
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
        let event = Event { id: registry::fresh(), context: context.id, flags, last: Mutex::new(None), captured: Mutex::new(None) };
        to.put(CUevent(event.id as *mut c_void))?;
        driver.events.insert(event.id, Arc::new(event));
        Ok(())
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
        let reached = event.last.lock().as_ref().is_none_or(|record| {
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
        let last = event.last.lock().clone();
        if let Some(record) = last {
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
}
