//! What begins and ends, for everybody who has to know: the attachment, a fork, the exit, and the
//! end of a context are taken to each part of the library from here, and from nowhere else.

use std::sync::atomic::{AtomicUsize, Ordering};

use shim_ffi::*;

use crate::attachment::{client, verdict};
use crate::driver::{injection, real};
use crate::gate::{capture, follow, marks, registration, weighing};
use crate::ground::process::{self, Handlers};
use crate::ground::thread::thread;
use crate::{metering, nvml, recording, residency};

static HANDLERS: Handlers = Handlers { in_child, at_exit };

/// After a successful `cuInit`: attaches to the arbiter, once. Says what the program is answered
/// instead of success, if it must not run ungoverned.
pub(crate) fn attach() -> Result<(), CUresult> {
    let _ = std::panic::catch_unwind(recording::begin);
    client::attach(&client::Steps {
        prepare,
        attached: residency::begin,
    })
}

/// Before the first attachment: all that may take the dynamic linker's lock.
fn prepare() {
    process::handle(&HANDLERS);
    nvml::meet();
    residency::prepare();
}

/// In a forked child: nothing of the parent's attachment is ours. The child is unattached until it
/// calls `cuInit` itself.
fn in_child() {
    client::forget();
    verdict::forget();
    marks::forget();
    residency::forget();
    thread().forget();
}

/// At exit: forward only. The driver is about to go: what threads of ours have begun is waited for.
fn at_exit() {
    client::stop();
    residency::stop();
    follow::stop();
}

// ----------------------------------------------------------------------------------------------
// Contexts
// ----------------------------------------------------------------------------------------------

/// Primary context of each device, as far as we have seen it retained. For implicit frees.
static PRIMARY: [AtomicUsize; channel::MAX_DEVICES] =
    [const { AtomicUsize::new(0) }; channel::MAX_DEVICES];

/// Before a call that may change or destroy a context. `at`: where the stack is in the entry.
pub(crate) fn before_context(meaning: Context, args: &[usize], at: usize) {
    if injection::take_due() {
        // Where the process is refused, the call that is about to be made is the first to be
        // answered so.
        let _ = attach();
    }
    let destroyed = destroyed(meaning, args);
    if let Some(context) = destroyed {
        metering::context_dies(context);
    }
    // Its streams outlive it, and take nothing any more. Which ones they are is not known.
    if matches!(meaning, Context::DestroysGreen) {
        marks::context_goes(None);
        weighing::stop();
    }
    if meaning.may_end() {
        marks::context_goes(destroyed);
    }
    // The registration of our marks goes with the context that made it, perhaps also where that is
    // a green one.
    if meaning.takes_away() {
        registration::withdraw(destroyed, at);
    }
}

/// A call that may end a context, until dropped: no other call of ours is in one.
#[derive(Debug)]
pub(crate) struct Ending {
    // Dropped in this order: leaving is a part of going.
    _leaving: Option<residency::Leaving>,
    _going: residency::Going,
    _withdrawn: registration::Withdrawn,
    /// An error where memory could not be brought back; a context goes all the same.
    _pass: Result<residency::Pass, CUresult>,
}

/// Around a call that may end a context, after [`before_context`].
pub(crate) fn end_context(meaning: Context, args: &[usize], at: usize) -> Ending {
    let going = residency::Going::begin(may_go(meaning, args), at);
    let ending = Ending {
        _leaving: residency::leaving(&going),
        _going: going,
        _withdrawn: registration::Withdrawn,
        _pass: residency::pass_to_end(),
    };
    if let (Context::DestroysGreen, Some(green)) = (meaning, args.first()) {
        residency::green_goes(*green);
    }
    ending
}

/// After a call that may have changed the calling thread's context.
pub(crate) fn after_context(meaning: Context, args: &[usize], result: CUresult) {
    let thread = thread();
    thread.context_known.set(false);
    thread.give_credit(0);
    if let Some(context) = destroyed(meaning, args) {
        match result.is_ok() {
            true => context_died(context),
            false => metering::context_stays(context),
        }
    }
    if meaning.takes_away() {
        // Before the context may be another's.
        registration::left();
    }
    if !result.is_ok() {
        if let (Context::DestroysGreen, Some(green)) = (meaning, args.first()) {
            residency::green_stays(*green);
        }
        return;
    }
    if meaning.created_on().is_some() {
        let at = args.first().copied().unwrap_or(0) as *const usize;
        // SAFETY: not null, and the driver has just written a handle there.
        let context = if at.is_null() { 0 } else { unsafe { *at } };
        residency::await_going(context);
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
        // Where nobody governs the process nothing belongs to a context.
        Context::Detaches if client::current().is_some() => {
            let context = args.first().copied().unwrap_or(0);
            let handle = CUcontext(std::ptr::with_exposed_provenance_mut(context));
            let mut version = 0;
            // SAFETY: valid pointer to a local. The driver looks a handle up.
            let there = unsafe { real::cuCtxGetApiVersion(handle, &raw mut version) };
            if context != 0 && there == CUresult::CUDA_ERROR_INVALID_CONTEXT {
                context_died(context);
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
                context_died(context);
            }
        }
        _ => {}
    }
}

/// A context has gone, and with it everything in it.
fn context_died(context: usize) {
    residency::context_died(context);
    metering::context_died(context);
    marks::context_gone(context);
    capture::context_gone(context);
}

/// The context that may be gone after a call; 0: none that is known.
fn may_go(meaning: Context, args: &[usize]) -> usize {
    let first = args.first().copied().unwrap_or(0);
    match meaning {
        Context::Destroys | Context::Detaches => first,
        // CAST: arguments arrive as machine words; a CUdevice is the low half.
        Context::ResetsPrimary | Context::ReleasesPrimary => primary(first as i32).unwrap_or(0),
        Context::DestroysGreen if residency::active() => residency::of_green(first),
        _ => 0,
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
