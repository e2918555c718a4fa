//! Which device the calling thread's work goes to.

use std::sync::{Mutex, PoisonError};

use shim_ffi::*;

use crate::attachment::client::{self, Attached};
use crate::driver::real;
use crate::gate::{marks, quiesce, signature, slots};
use crate::ground::thread::{Thread, UNKNOWN_NS, thread};

/// Contexts that threads were found in, with the driver's ordinal of the device, where memory may
/// be moved: [`take_found`] takes them.
static FOUND: Mutex<Vec<(i32, usize)>> = Mutex::new(Vec::new());

fn note_found(ordinal: i32, context: usize) {
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if !found.contains(&(ordinal, context)) {
        found.push((ordinal, context));
    }
}

/// Contexts in which the program works, with the driver's ordinal of the device, that were found
/// since this was asked last.
pub(crate) fn take_found() -> Vec<(i32, usize)> {
    std::mem::take(&mut *FOUND.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Whether what the thread knows of its context is up to date.
#[inline]
pub(crate) fn is_known(thread: &Thread) -> bool {
    thread.context_known.get() && thread.generation.get() == client::generation()
}

/// Brings what the thread knows of its context and of our attachment up to date.
pub(crate) fn refresh(thread: &Thread, attached: &'static Attached) {
    let generation = client::generation();
    if thread.generation.get() != generation {
        thread.forget();
        thread.generation.set(generation);
    }
    if thread.slot_plus_one.get() == 0 {
        let slot = marks::next_thread_slot();
        let line = attached.end.client.thread(slot);
        line.all_marked();
        thread.marked.set(line.launches());
        if thread.who.get() == 0 {
            thread.who.set(slots::number());
            thread.renew_turn();
        }
        thread.slot_plus_one.set(slot as u32 + 1);
        thread.budget_ns.set(marks::FIRST_BUDGET_NS);
    }
    // Also back from the counter of an ungoverned thread.
    let line = attached
        .end
        .client
        .thread(thread.slot_plus_one.get() as usize - 1);
    thread.launches.set(line);
    thread.unknown_ns.set(UNKNOWN_NS);
    signature::arm(thread, attached);
    if thread.context_known.get() {
        return;
    }
    thread.give_credit(0);
    thread.device_plus_one.set(0);
    thread.ordinal.set(-1);
    let context_before = thread.context.replace(0);
    let mut device = CUdevice::default();
    let mut context = CUcontext::NULL;
    // SAFETY: valid pointers to locals. Both calls only read the thread's current context, also
    // during a capture.
    let known = thread.own(|| unsafe {
        let known = real::cuCtxGetDevice(&raw mut device).is_ok();
        known.then(|| real::cuCtxGetCurrent(&raw mut context).is_ok())
    });
    match known {
        None => return,
        Some(true) => thread.context.set(context.0 as usize),
        Some(false) => {}
    }
    if thread.context.get() != context_before {
        thread.renew_turn();
    }
    thread.ordinal.set(device.0);
    if quiesce::active() && thread.context.get() != 0 {
        note_found(device.0, thread.context.get());
    }
    let index = usize::try_from(device.0)
        .ok()
        .and_then(|ordinal| *attached.end.device_map.get(ordinal)?);
    if let Some(index) = index {
        thread.device_plus_one.set(u32::from(index) + 1);
        attached
            .end
            .client
            .thread(thread.slot_plus_one.get() as usize - 1)
            .set_device(u32::from(index));
    } else {
        attached.tell_other_device(device.0);
    }
    thread.context_known.set(true);
}

/// The driver's ordinal of the calling thread's device; -1: none.
pub(crate) fn here() -> i32 {
    let thread = thread();
    if let Some(attached) = client::current() {
        refresh(thread, attached);
    }
    thread.ordinal.get()
}

/// The calling thread's context, as the driver knows it.
pub(crate) fn current() -> usize {
    let mut context = CUcontext::NULL;
    // SAFETY: valid pointer to a local; the call only reads, also during a capture.
    match thread().own(|| unsafe { real::cuCtxGetCurrent(&raw mut context) }) {
        CUresult::CUDA_SUCCESS => context.0.addr(),
        _ => 0,
    }
}

/// Device index of the pages for a driver ordinal.
pub(crate) fn index_of(attached: &Attached, ordinal: i32) -> Option<usize> {
    usize::try_from(ordinal)
        .ok()
        .and_then(|ordinal| *attached.end.device_map.get(ordinal)?)
        .map(usize::from)
}
