//! Which device the calling thread's work goes to.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use shim_ffi::*;

use crate::attachment::client::{self, Attached};
use crate::attachment::verdict::ours;
use crate::driver::{injection, real};
use crate::gate::{capture, marks, registration, signature, slots};
use crate::ground::thread::{Thread, thread};
use crate::memory::Meter;
use crate::{memory, residency};

/// Primary context of each device, as far as we have seen it retained. For implicit frees.
static PRIMARY: [AtomicUsize; channel::MAX_DEVICES] =
    [const { AtomicUsize::new(0) }; channel::MAX_DEVICES];

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
    thread.unknown_ns.set(crate::ground::thread::UNKNOWN_NS);
    signature::arm(thread, attached);
    if thread.context_known.get() {
        return;
    }
    thread.give_credit(0);
    thread.device_plus_one.set(0);
    thread.ordinal.set(-1);
    thread.context.set(0);
    let mut device = CUdevice::default();
    let mut context = CUcontext::NULL;
    // SAFETY: valid pointers to locals. Both calls only read the thread's current context, also
    // during a capture.
    unsafe {
        if !real::cuCtxGetDevice(&raw mut device).is_ok() {
            return;
        }
        if real::cuCtxGetCurrent(&raw mut context).is_ok() {
            thread.context.set(context.0 as usize);
        }
    }
    thread.ordinal.set(device.0);
    if residency::active() && thread.context.get() != 0 {
        residency::note_context(device.0, thread.context.get());
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
    let thread = crate::ground::thread::thread();
    if let Some(attached) = client::current() {
        refresh(thread, attached);
    }
    thread.ordinal.get()
}

/// The calling thread's context, as the driver knows it.
pub(crate) fn current() -> usize {
    let mut context = CUcontext::NULL;
    // SAFETY: valid pointer to a local; the call only reads, also during a capture.
    match unsafe { real::cuCtxGetCurrent(&raw mut context) } {
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

/// Before a call that may change or destroy a context.
pub(crate) fn before(meaning: Context, args: &[usize]) {
    injection::attach_if_due();
    let destroyed = destroyed(meaning, args);
    if let Some(context) = destroyed {
        memory::context_dies(context);
    }
    // Its streams outlive it, and take nothing any more. Which ones they are is not known.
    if matches!(meaning, Context::DestroysGreen) {
        marks::context_goes(None);
    }
    if meaning.may_end() {
        marks::context_goes(destroyed);
        // The registration of our marks goes with the context that made it.
        registration::withdraw(destroyed);
    }
}

/// What a context is taken to need when the device has no space for it, in bytes: some 430 MiB on
/// recent devices. What others leave too much is theirs again with their next turn.
const NEW_CONTEXT_BYTES: u64 = 512 << 20;

/// Makes a call of the program's; where it creates a context for which the device has no space,
/// again and again while other tenants make some, as for an allocation. In tenants whose own memory
/// can be moved.
pub(crate) fn with_space(
    symbol: Symbol,
    meaning: Context,
    args: &[usize],
    call: impl Fn() -> CUresult,
) -> CUresult {
    let meter = created_on(meaning, args)
        .filter(|_| residency::active())
        .and_then(Meter::of);
    let Some(meter) = meter else {
        return call();
    };
    let answer = Cell::new(None);
    let noted = || {
        let result = call();
        answer.set(Some(result));
        result
    };
    ours(symbol, || {
        residency::patiently(&meter, NEW_CONTEXT_BYTES, noted)
    })
    .unwrap_or_else(|_| answer.get().unwrap_or_else(call))
}

/// The device, by the driver's ordinal, of the context that a call creates or keeps.
fn created_on(meaning: Context, args: &[usize]) -> Option<i32> {
    let at = usize::from(meaning.created_on()?);
    // CAST: arguments arrive as machine words; a CUdevice is the low half.
    args.get(at).map(|word| *word as i32)
}

/// After a call that may have changed the calling thread's context.
pub(crate) fn after(meaning: Context, args: &[usize], result: CUresult) {
    let thread = thread();
    thread.context_known.set(false);
    thread.give_credit(0);
    if let Some(context) = destroyed(meaning, args) {
        memory::context_died(context, result.is_ok());
        if result.is_ok() {
            marks::context_gone(context);
            capture::context_gone(context);
        }
    }
    if meaning.may_end() {
        registration::left();
    }
    if !result.is_ok() {
        return;
    }
    // CAST: arguments arrive as machine words; a CUdevice is the low half.
    let device = |at: usize| args.get(at).map_or(-1, |word| *word as i32);
    match meaning {
        Context::RetainsPrimary => {
            let at = args.first().copied().unwrap_or(0) as *const usize;
            // SAFETY: not null, and the driver has just written a handle there.
            let context = if at.is_null() { 0 } else { unsafe { *at } };
            if let Some(primary) = usize::try_from(device(1))
                .ok()
                .and_then(|device| PRIMARY.get(device))
            {
                primary.store(context, Ordering::Relaxed);
            }
        }
        Context::ReleasesPrimary => {
            let (mut flags, mut active) = (0, 0);
            // SAFETY: valid pointers to locals.
            let state = unsafe {
                real::cuDevicePrimaryCtxGetState(
                    CUdevice(device(0)),
                    &raw mut flags,
                    &raw mut active,
                )
            };
            if state.is_ok()
                && active == 0
                && let Some(context) = primary(device(0))
            {
                memory::context_died(context, true);
                marks::context_gone(context);
                capture::context_gone(context);
            }
        }
        _ => {}
    }
}

/// The context that a call destroys for certain if it succeeds.
fn destroyed(meaning: Context, args: &[usize]) -> Option<usize> {
    let first = args.first().copied()?;
    match meaning {
        Context::Destroys => Some(first),
        // CAST: arguments arrive as machine words; a CUdevice is the low half.
        Context::ResetsPrimary => primary(first as i32),
        _ => None,
    }
}

/// A device's primary context, where the program has ever retained it.
fn primary(device: i32) -> Option<usize> {
    let primary = PRIMARY.get(usize::try_from(device).ok()?)?;
    Some(primary.load(Ordering::Relaxed)).filter(|context| *context != 0)
}
