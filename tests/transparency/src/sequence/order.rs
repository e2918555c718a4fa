//! Streams, events and synchronisation.

use shim_ffi::*;

use super::world::{Queue, World};
use super::{call, call_on, stream as as_stream};
use crate::api::timeless;
use crate::transcript::Word::{Hidden, Name, Raw};

/// Notes a query whose answer depends on time.
macro_rules! query {
    ($world:expr, $symbol:ident($($arg:expr),*) [$($noted:expr),*] => [$($out:expr),*]) => {{
        // SAFETY: valid handles or documented errors; outputs are locals.
        let result = unsafe { $world.api.$symbol($($arg),*) };
        $world.log.note(Symbol::$symbol, &[$($noted),*], timeless(result), &[$($out),*]);
    }};
}

/// Creates, destroys or asks a stream.
pub fn stream(world: &mut World) {
    match world.rng.below(10) {
        0 => {
            let flags = world.rng.below(2) as u32;
            world.create_stream(flags, None);
        }
        1 => {
            let (flags, priority) = (
                world.rng.below(2) as u32,
                world.rng.between(0, 8) as i32 - 6,
            );
            world.create_stream(flags, Some(priority));
        }
        2 if world.context().streams.len() > 2 => destroy(world),
        3..=5 => {
            let queue = world.any_queue();
            let (handle, by_thread) = world.form(queue);
            if by_thread {
                query!(world, cuStreamQuery_ptsz(as_stream(handle)) [Name(handle)] => []);
            } else {
                query!(world, cuStreamQuery(as_stream(handle)) [Name(handle)] => []);
            }
        }
        _ => ask(world),
    }
}

/// Destroys a created stream; what used it last is waited for where another one uses it next.
fn destroy(world: &mut World) {
    let count = world.context().streams.len();
    let which = world.rng.below(count);
    let queue = world.context().streams[which];
    let Queue::Created { handle, .. } = queue else {
        return;
    };
    let uses = |buffer: &super::world::Buffer| buffer.users().any(|user| user == queue);
    if world.context().buffers.iter().any(uses) {
        world.synchronise(queue);
        for buffer in &mut world.context().buffers {
            if buffer.queue == queue {
                buffer.queue = Queue::Legacy;
            }
            for before in &mut buffer.before {
                *before = before.filter(|user| *user != queue);
            }
        }
    }
    if world.rng.one_in(2) {
        let _ = call!(world, cuStreamDestroy_v2(as_stream(handle)) [Name(handle)] => []);
    } else {
        let _ = call!(world, cuStreamDestroy(as_stream(handle)) [Name(handle)] => []);
    }
    world.context().streams.swap_remove(which);
    world.gone(handle);
}

fn ask(world: &mut World) {
    let queue = world.any_queue();
    let (handle, by_thread) = world.form(queue);
    let (s, n) = (as_stream(handle), Name(handle));
    let _ = match world.rng.below(7) {
        0 => {
            let mut value = -9;
            call_on!(world, by_thread, cuStreamGetPriority | cuStreamGetPriority_ptsz(s, &raw mut value) [n]
                => [Raw(value as u64)])
        }
        1 => {
            let mut value = 99;
            call_on!(world, by_thread, cuStreamGetFlags | cuStreamGetFlags_ptsz(s, &raw mut value) [n]
                => [Raw(value.into())])
        }
        2 => {
            let mut value = 0;
            call_on!(world, by_thread, cuStreamGetId | cuStreamGetId_ptsz(s, &raw mut value) [n]
                => [Name(value | 1 << 61)])
        }
        3 => {
            let mut value = CUcontext::NULL;
            call_on!(world, by_thread, cuStreamGetCtx | cuStreamGetCtx_ptsz(s, &raw mut value) [n]
                => [Name(value.0 as u64)])
        }
        4 => {
            let (mut value, mut green) = (CUcontext::NULL, CUgreenCtx::NULL);
            call_on!(world, by_thread, cuStreamGetCtx_v2 | cuStreamGetCtx_v2_ptsz(s, &raw mut value, &raw mut green) [n]
                => [Name(value.0 as u64), Name(green.0 as u64)])
        }
        5 => {
            let mut value = CUdevice(-1);
            call_on!(world, by_thread, cuStreamGetDevice | cuStreamGetDevice_ptsz(s, &raw mut value) [n]
                => [Raw(value.0 as u64)])
        }
        _ => {
            let mut value = CUstreamCaptureStatus::default();
            call_on!(world, by_thread, cuStreamIsCapturing | cuStreamIsCapturing_ptsz(s, &raw mut value) [n]
                => [Raw(value.0.into())])
        }
    };
}

/// Creates, records, awaits, asks or destroys an event.
pub fn event(world: &mut World) {
    let count = world.context().events.len();
    let action = world.rng.below(12);
    if count < 2 || action == 0 {
        let flags = world.rng.pick(&[0, 1, 2, 3, 8]);
        return world.create_event(flags);
    }
    let which = world.rng.below(count);
    let event = CUevent(world.context().events[which] as *mut c_void);
    let e = Name(event.0 as u64);
    match action {
        1 if count > 3 => {
            if world.rng.one_in(2) {
                let _ = call!(world, cuEventDestroy_v2(event) [e] => []);
            } else {
                let _ = call!(world, cuEventDestroy(event) [e] => []);
            }
            world.context().events.swap_remove(which);
            world.gone(event.0 as u64);
        }
        2..=4 => {
            let queue = world.any_queue();
            let (handle, by_thread) = world.form(queue);
            if world.rng.one_in(3) {
                let _ = call_on!(world, by_thread, cuEventRecordWithFlags | cuEventRecordWithFlags_ptsz(
                    event, as_stream(handle), 0) [e, Name(handle)] => []);
            } else {
                let _ = call_on!(world, by_thread, cuEventRecord | cuEventRecord_ptsz(event, as_stream(handle))
                    [e, Name(handle)] => []);
            }
        }
        5 | 6 => {
            let queue = world.any_queue();
            let (handle, by_thread) = world.form(queue);
            let _ = call_on!(world, by_thread, cuStreamWaitEvent | cuStreamWaitEvent_ptsz(
                as_stream(handle), event, 0) [Name(handle), e] => []);
        }
        7 | 8 => {
            let _ = call!(world, cuEventSynchronize(event) [e] => []);
        }
        9 => {
            let other = CUevent(world.context().events[(which + 1) % count] as *mut c_void);
            let mut ms = 0f32;
            query!(world, cuEventElapsedTime(&raw mut ms, event, other) [e, Name(other.0 as u64)] => [Hidden]);
        }
        _ => query!(world, cuEventQuery(event) [e] => []),
    }
}

/// Waits for a stream or the context; nothing may be left to do then.
pub fn synchronise(world: &mut World) {
    match world.rng.below(6) {
        0 => {
            let _ = call!(world, cuCtxSynchronize() [] => []);
        }
        1 => {
            let context = CUcontext(world.context().handle as *mut c_void);
            let _ = call!(world, cuCtxSynchronize_v2(context) [Name(context.0 as u64)] => []);
        }
        _ => {
            let queue = world.any_queue();
            world.synchronise(queue);
            // Nobody else submits meanwhile, so a created stream is idle now: the answer counts as
            // it is. The legacy stream's answer may depend on others.
            if matches!(queue, Queue::Created { .. }) {
                let (handle, _) = world.form(queue);
                let _ = call!(world, cuStreamQuery(as_stream(handle)) [Name(handle)] => []);
            }
        }
    }
}
