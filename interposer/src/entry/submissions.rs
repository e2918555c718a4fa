//! Entries that may have to wait for the device.

use shim_ffi::{CUlaunchConfig, CUresult, Symbol};

use crate::attachment::verdict::ours;
use crate::gate::signature::Seen;
use crate::gate::{self, Ticket};
use crate::ground::stretch::here;
use crate::metering;
use crate::residency::{self, Needs, SpaceWait};

/// The stream of a gated call as a key: 1 and 2 are the default streams.
macro_rules! stream_key {
    ($default:expr, 0, [$($arg:ident)*]) => { $default };
    ($default:expr, in_struct, [$first:ident $($rest:ident)*]) => { submissions::stream_in_struct($first, $default) };
    ($default:expr, $position:literal, [$($arg:ident)*]) => {{
        let stream = [$($arg),*][$position - 1];
        if stream == 0 { $default } else { stream }
    }};
}

macro_rules! default_stream {
    (legacy) => {
        gate::LEGACY
    };
    (ptsz) => {
        gate::PER_THREAD
    };
    (ptds) => {
        gate::PER_THREAD
    };
}

/// Position 0 is a call without a stream: it blocks until its work is done.
macro_rules! blocks {
    (0) => {
        true
    };
    ($stream:tt) => {
        false
    };
}

/// The stream inside a `CUlaunchConfig`.
#[inline(always)]
pub(super) fn stream_in_struct(structure: usize, default: usize) -> usize {
    if structure == 0 {
        return default;
    }
    // SAFETY: the caller's launch configuration, which the driver is about to read as well.
    let stream = unsafe { (*(structure as *const CUlaunchConfig)).hStream.0 as usize };
    if stream == 0 { default } else { stream }
}

/// After the driver's call, where it did not go the fast path.
#[cold]
#[inline(never)]
pub(super) fn settle(ticket: Ticket, seen: Seen) {
    if gate::settle(ticket, seen) {
        residency::iteration_ended();
    }
}

/// A submission that takes device memory when it runs first, until the device has space for it, by
/// the rule of [`residency`]. Between two tries it holds nothing: no slice, and no pass. `once`
/// says also whether the driver had no memory.
#[inline]
pub(super) fn allocating(
    symbol: Symbol,
    exec: usize,
    once: impl Fn() -> (CUresult, bool),
) -> CUresult {
    let (mut wait, at) = (None, here());
    loop {
        let (result, short) = once();
        if !short || !matches!(ours(symbol, || waits_for(exec, &mut wait, at)), Ok(true)) {
            return result;
        }
    }
}

#[cold]
#[inline(never)]
fn waits_for(exec: usize, wait: &mut Option<SpaceWait>, at: usize) -> bool {
    if !residency::waits() {
        return false;
    }
    if wait.is_none() {
        *wait = metering::graph::weight(exec)
            .map(|(meter, bytes)| SpaceWait::begin(&meter, Needs::Bytes(bytes), at));
    }
    wait.as_mut().is_some_and(SpaceWait::wait)
}

macro_rules! gated {
    ($symbol:ident $variant:ident $stream:tt [$($arg:ident)*]) => {
        /// # Safety
        /// As the driver's function.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(clippy::too_many_arguments, reason = "the driver's own parameters")]
        pub unsafe extern "C-unwind" fn $symbol($($arg: usize),*) -> CUresult {
            const TRAITS: Traits = Symbol::$symbol.traits();
            /// It has a mark of its own each time: the device does nothing for it.
            const WAITS_FOR_HOST: bool = matches!(TRAITS.work, Work::HostWait);
            const LAUNCHES_GRAPH: bool = matches!(TRAITS.work, Work::Graph);
            /// Apart, so that the fast path is a handful of loads and a jump.
            #[cold]
            #[inline(never)]
            extern "C-unwind" fn slow($($arg: usize),*) -> CUresult {
                residency::give_back(here());
                let stream = stream_key!(default_stream!($variant), $stream, [$($arg)*]);
                let seen = signature::of(Symbol::$symbol, TRAITS.work, &[$($arg),*], stream);
                if residency::active()
                    && !blocks!($stream)
                    && !TRAITS.allocates
                    && !WAITS_FOR_HOST
                {
                    gate::turn_to(stream);
                    if let Some(_pass) = gate::open_quiesced(stream, seen) {
                        let result = call_words!($symbol $($arg)*);
                        residency::used(TRAITS.operands, &[$($arg),*], result);
                        return result;
                    }
                }
                if TRAITS.allocates {
                    let exec = [$($arg),*][0];
                    return submissions::allocating(Symbol::$symbol, exec, || {
                        let ticket = ours(Symbol::$symbol, || gate::admit(stream, blocks!($stream), seen))
                            .unwrap_or_else(gate::Ticket::Pass);
                        if matches!(ticket, gate::Ticket::Deny) {
                            return (CUresult::CUDA_ERROR_SYSTEM_NOT_READY, false);
                        }
                        let pass = ours(Symbol::$symbol, || residency::pass_submission(TRAITS.operands, &[$($arg),*]));
                        let pass = match pass.unwrap_or_else(|_| Ok(residency::Pass::uncounted())) {
                            Ok(pass) => pass,
                            Err(status) => return (status, false),
                        };
                        let ticket = match LAUNCHES_GRAPH && metering::graph::waits(exec) {
                            true => ticket.may_wait(),
                            false => ticket,
                        };
                        let prepaid = ours(Symbol::$symbol, || metering::graph::before(exec)).unwrap_or(Ok(None));
                        let (result, prepaid, called) = match prepaid {
                            Ok(prepaid) => (call_words!($symbol $($arg)*), prepaid, true),
                            Err(refusal) => (refusal, None, false),
                        };
                        drop(pass);
                        let _ = ours(Symbol::$symbol, || {
                            submissions::settle(ticket.answered(result), seen);
                            metering::graph::after(prepaid, result);
                        });
                        (result, called && result == CUresult::CUDA_ERROR_OUT_OF_MEMORY)
                    });
                }
                let ticket = ours(Symbol::$symbol, || gate::admit(stream, blocks!($stream), seen))
                    .unwrap_or_else(gate::Ticket::Pass);
                if matches!(ticket, gate::Ticket::Deny) {
                    return CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
                }
                let ticket = match WAITS_FOR_HOST {
                    true => ours(Symbol::$symbol, || gate::before_host_wait(ticket))
                        .unwrap_or_else(gate::Ticket::Pass),
                    false => ticket,
                };
                let pass = ours(Symbol::$symbol, || residency::pass_submission(TRAITS.operands, &[$($arg),*]));
                let pass = match pass.unwrap_or_else(|_| Ok(residency::Pass::uncounted())) {
                    Ok(pass) => pass,
                    Err(status) => return status,
                };
                let result = call_words!($symbol $($arg)*);
                if pass.counts() {
                    residency::used(TRAITS.operands, &[$($arg),*], result);
                }
                drop(pass);
                let _ = ours(Symbol::$symbol, || {
                    submissions::settle(ticket.answered(result), seen);
                    failure::after_error(result);
                });
                result
            }
            /// A thread that goes to another stream than the last time. Apart, for it calls.
            #[inline(never)]
            extern "C-unwind" fn sought($($arg: usize),*) -> CUresult {
                let stream = stream_key!(default_stream!($variant), $stream, [$($arg)*]);
                let seen = signature::of(Symbol::$symbol, TRAITS.work, &[$($arg),*], stream);
                let mut next: unsafe extern "C-unwind" fn($(word!($arg)),*) -> CUresult = slow;
                if let Ok(function) = gate::open::<true>(stream, seen, || real::bound(Symbol::$symbol)) {
                    // SAFETY: the driver's function of this name, which takes these words.
                    next = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($(word!($arg)),*) -> CUresult>(function) };
                }
                // SAFETY: the caller's own arguments.
                unsafe { next($($arg),*) }
            }
            if blocks!($stream) || TRAITS.allocates || WAITS_FOR_HOST {
                return slow($($arg),*);
            }
            let stream = stream_key!(default_stream!($variant), $stream, [$($arg)*]);
            let seen = signature::of(Symbol::$symbol, TRAITS.work, &[$($arg),*], stream);
            let next: unsafe extern "C-unwind" fn($(word!($arg)),*) -> CUresult =
                match gate::open::<false>(stream, seen, || real::bound(Symbol::$symbol)) {
                    // SAFETY: the driver's function of this name, which takes these words.
                    Ok(function) => unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($(word!($arg)),*) -> CUresult>(function) },
                    Err(gate::NotOpen::Elsewhere) => sought,
                    Err(gate::NotOpen::Slow) => slow,
                };
            // SAFETY: the caller's own arguments.
            unsafe { next($($arg),*) }
        }
    };
}
/// The one launch that takes an array of launches: gated by the stream of the first.
macro_rules! gated_list {
    ($symbol:ident [$list:ident $count:ident $flags:ident]) => {
        /// # Safety
        /// As the driver's function.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $symbol($list: usize, $count: usize, $flags: usize) -> CUresult {
            let stream = if $list == 0 || $count as u32 == 0 {
                gate::LEGACY
            } else {
                // SAFETY: at least one element, which the driver is about to read as well.
                let stream = unsafe { (*($list as *const CUDA_LAUNCH_PARAMS)).hStream.0 as usize };
                if stream == 0 { gate::LEGACY } else { stream }
            };
            let seen = signature::of(Symbol::$symbol, Work::Any, &[], stream);
            let ticket = ours(Symbol::$symbol, || gate::admit(stream, false, seen))
                .unwrap_or_else(gate::Ticket::Pass);
            if matches!(ticket, gate::Ticket::Deny) {
                return CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
            }
            let pass = match ours(Symbol::$symbol, residency::pass) {
                Ok(Err(status)) => return status,
                pass => pass,
            };
            let result = call_words!($symbol $list $count $flags);
            drop(pass);
            let _ = ours(Symbol::$symbol, || submissions::settle(ticket.answered(result), seen));
            result
        }
    };
}
