//! Every driver symbol, exported: expanded from the one table.
//!
//! | shape | what stands here |
//! |---|---|
//! | jump | a jump to the real function |
//! | quiesced | a jump, through the quiesce gate where memory may be moved |
//! | hook | the hook of the same name in [`memory`] or [`proc_address`] |
//! | gated, gated list | [`gate`], then the real function, then completion marks |
//! | sync, query | what is in flight is marked first |
//! | context | the thread's device is looked up again afterwards |
//! | tracked | what the row's traits say is noted by [`track`] |
//! | init | `cuInit`: attaches |
//!
//! What a shape has to know of a symbol stands in the row's [`Traits`], which are constants in the
//! entry.
//!
//! An entry does three things: guard against panics, convert, call. Gated entries take machine
//! words: every parameter of the gated functions is an integer or a pointer (the table's test of
//! signatures holds them to that), so words in the right order are the same call.
//!
//! What the driver ends otherwise than by returning (a cancelled thread in a wait, an exception of
//! a callback) passes through entries of words as it would through the driver: they unwind, and
//! catch nothing around the call.

use std::ffi::c_void;

use shim_ffi::*;

use crate::attachment::verdict::{self, insist, ours};
use crate::driver::own::{Own, publish_own};
use crate::driver::{addresses, real};
use crate::gate::{failure, signature};
use crate::ground::stretch::here;
use crate::{gate, lifecycle, metering, residency};

mod context;
pub(crate) mod dlsym;
#[macro_use]
mod jumps;
#[macro_use]
mod submissions;
mod pipeline;
pub(crate) mod proc_address;
mod resize;
mod step;
mod track;

/// Hooks by the symbol's name, wherever they are written.
mod hooks {
    pub(super) use crate::entry::proc_address::*;
    pub(super) use crate::memory::*;
}

// ----------------------------------------------------------------------------------------------
// Shapes of an entry
// ----------------------------------------------------------------------------------------------

/// Expands `$then! { ... [a0 a1 ...] }` with as many names as the symbol has parameters.
macro_rules! with_words {
    (0 $then:ident $($rest:tt)*) => { $then! { $($rest)* [] } };
    (1 $then:ident $($rest:tt)*) => { $then! { $($rest)* [a0] } };
    (2 $then:ident $($rest:tt)*) => { $then! { $($rest)* [a0 a1] } };
    (3 $then:ident $($rest:tt)*) => { $then! { $($rest)* [a0 a1 a2] } };
    (4 $then:ident $($rest:tt)*) => { $then! { $($rest)* [a0 a1 a2 a3] } };
    (5 $then:ident $($rest:tt)*) => { $then! { $($rest)* [a0 a1 a2 a3 a4] } };
    (6 $then:ident $($rest:tt)*) => { $then! { $($rest)* [a0 a1 a2 a3 a4 a5] } };
    (7 $then:ident $($rest:tt)*) => { $then! { $($rest)* [a0 a1 a2 a3 a4 a5 a6] } };
    (8 $then:ident $($rest:tt)*) => { $then! { $($rest)* [a0 a1 a2 a3 a4 a5 a6 a7] } };
    (9 $then:ident $($rest:tt)*) => { $then! { $($rest)* [a0 a1 a2 a3 a4 a5 a6 a7 a8] } };
    (10 $then:ident $($rest:tt)*) => { $then! { $($rest)* [a0 a1 a2 a3 a4 a5 a6 a7 a8 a9] } };
    (11 $then:ident $($rest:tt)*) => { $then! { $($rest)* [a0 a1 a2 a3 a4 a5 a6 a7 a8 a9 a10] } };
}

macro_rules! word {
    ($word:ident) => {
        usize
    };
}

/// The real function of a symbol, called with words.
macro_rules! call_words {
    ($symbol:ident $($arg:ident)*) => {{
        // SAFETY: the driver's function of this name takes this many integer or pointer parameters;
        // passing each as a machine word puts it where the ABI expects it. The caller's own
        // arguments.
        unsafe {
            let function: unsafe extern "C-unwind" fn($(word!($arg)),*) -> CUresult =
                std::mem::transmute(real::address(Symbol::$symbol));
            function($($arg),*)
        }
    }};
}

macro_rules! hooked {
    ($symbol:ident ($($arg:ident: $ty:ty),*)) => {
        /// # Safety
        /// As the driver's function.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(clippy::too_many_arguments, reason = "the driver's own parameters")]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> CUresult {
            residency::give_back(here());
            // SAFETY: the caller's own arguments, in both.
            verdict::hooked(Symbol::$symbol, || unsafe { hooks::$symbol($($arg),*) }, || unsafe { real::$symbol($($arg),*) })
        }
    };
}

macro_rules! observed_sync {
    ($symbol:ident [$($arg:ident)*]) => {
        /// # Safety
        /// As the driver's function.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $symbol($($arg: usize),*) -> CUresult {
            let at = here();
            let waits = ours(Symbol::$symbol, || {
                gate::before_sync();
                gate::wait_for_device(at)
            });
            let result = call_words!($symbol $($arg)*);
            drop(waits);
            let _ = ours(Symbol::$symbol, || {
                if !result.is_ok() {
                    failure::after_error(result);
                }
                gate::after_sync();
                // Pools give memory back to the device when the program synchronises.
                if let Some(stream) = track::waited_for(Symbol::$symbol, &[$($arg),*]) {
                    metering::pool::after_wait(stream);
                }
                metering::pool::after_sync();
            });
            result
        }
    };
}

macro_rules! observed_query {
    ($symbol:ident [$($arg:ident)*]) => {
        /// # Safety
        /// As the driver's function.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $symbol($($arg: usize),*) -> CUresult {
            let _ = ours(Symbol::$symbol, gate::before_sync);
            let result = call_words!($symbol $($arg)*);
            if !result.is_ok() {
                let _ = ours(Symbol::$symbol, || failure::after_error(result));
            }
            result
        }
    };
}

macro_rules! observed_context {
    ($symbol:ident [$($arg:ident)*]) => {
        /// # Safety
        /// As the driver's function.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $symbol($($arg: usize),*) -> CUresult {
            const MEANING: Context = Symbol::$symbol.traits().context;
            let at = here();
            residency::give_back(at);
            let _ = ours(Symbol::$symbol, gate::before_sync);
            let _ = insist(Symbol::$symbol, || lifecycle::before_context(MEANING, &[$($arg),*], at));
            // A thread that ends a context takes away what memory is moved by. One that cannot be
            // brought back goes all the same.
            let pass = MEANING
                .takes_away()
                .then(|| ours(Symbol::$symbol, || lifecycle::end_context(MEANING, &[$($arg),*], at)));
            let result = context::with_space(Symbol::$symbol, MEANING, &[$($arg),*], || call_words!($symbol $($arg)*));
            let _ = insist(Symbol::$symbol, || lifecycle::after_context(MEANING, &[$($arg),*], result));
            drop(pass);
            result
        }
    };
}

macro_rules! tracked {
    ($symbol:ident [$($arg:ident)*]) => {
        /// # Safety
        /// As the driver's function.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(clippy::too_many_arguments, reason = "the driver's own parameters")]
        pub unsafe extern "C-unwind" fn $symbol($($arg: usize),*) -> CUresult {
            const TRAITS: Traits = Symbol::$symbol.traits();
            let pass = if TRAITS.quiesced {
                match ours(Symbol::$symbol, residency::pass) {
                    Ok(Ok(pass)) => Some(pass),
                    Ok(Err(status)) => return status,
                    Err(_) => None,
                }
            } else {
                None
            };
            if TRAITS.unmovable.is_some()
                && let Ok(Some(status)) = ours(Symbol::$symbol, || track::answered(TRAITS, &[$($arg),*]))
            {
                return status;
            }
            if track::NAMES_A_DEVICE[Symbol::$symbol as usize]
                && let Ok(Some(status)) = ours(Symbol::$symbol, || track::kept_off(TRAITS, &[$($arg),*]))
            {
                return status;
            }
            let turn = matches!(TRAITS.tracks, Tracks::PoolAttribute).then(|| {
                ours(Symbol::$symbol, || metering::pool::turn_at([$($arg),*].first().copied().unwrap_or(0)))
            });
            track::before(Symbol::$symbol, TRAITS, &[$($arg),*]);
            let result = if TRAITS.physical.is_some() {
                let mut words = [$($arg),*];
                let _ = insist(Symbol::$symbol, || track::translated(TRAITS, &[$($arg),*])).map(|handle| {
                    if let Some((at, handle)) = handle {
                        words[at] = handle;
                    }
                });
                let [$($arg),*] = words;
                call_words!($symbol $($arg)*)
            } else {
                call_words!($symbol $($arg)*)
            };
            drop(turn);
            track::after(Symbol::$symbol, TRAITS, &[$($arg),*], result);
            drop(pass);
            result
        }
    };
}

/// `cuInit`: attaches to the arbiter when it has succeeded.
macro_rules! initialise {
    ($symbol:ident) => {
        /// # Safety
        /// As the driver's function.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $symbol(flags: u32) -> CUresult {
            // SAFETY: the caller's own argument.
            let result = unsafe { real::$symbol(flags) };
            if !result.is_ok() {
                return result;
            }
            match lifecycle::attach() {
                Ok(()) => result,
                Err(refusal) => refusal,
            }
        }
    };
}

// ----------------------------------------------------------------------------------------------
// Which symbol gets which shape
// ----------------------------------------------------------------------------------------------

macro_rules! export {
    ($symbol:ident $variant:ident jump $params:tt $stream:tt $signature:tt) => {
        forward! { $symbol }
    };
    ($symbol:ident $variant:ident quiesced $params:tt $stream:tt $signature:tt) => {
        quiesced! { $symbol }
    };
    ($symbol:ident $variant:ident hook $params:tt $stream:tt $signature:tt) => {
        hooked! { $symbol $signature }
    };
    ($symbol:ident $variant:ident gated $params:tt $stream:tt $signature:tt) => {
        with_words! { $params gated $symbol $variant $stream }
    };
    ($symbol:ident $variant:ident gated_list $params:tt $stream:tt $signature:tt) => {
        with_words! { $params gated_list $symbol }
    };
    ($symbol:ident $variant:ident sync $params:tt $stream:tt $signature:tt) => {
        with_words! { $params observed_sync $symbol }
    };
    ($symbol:ident $variant:ident query $params:tt $stream:tt $signature:tt) => {
        with_words! { $params observed_query $symbol }
    };
    ($symbol:ident $variant:ident context $params:tt $stream:tt $signature:tt) => {
        with_words! { $params observed_context $symbol }
    };
    ($symbol:ident $variant:ident tracked $params:tt $stream:tt $signature:tt) => {
        with_words! { $params tracked $symbol }
    };
    ($symbol:ident $variant:ident init $params:tt $stream:tt $signature:tt) => {
        initialise! { $symbol }
    };
}

macro_rules! expand {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $shape:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $traits:tt $signature:tt;)*) => {
        $(export! { $symbol $variant $shape $params $stream $signature })*

        /// Our functions, by row.
        static OWN: [Own; COUNT] = [$(Own::new($symbol as *const c_void)),*];
    };
}
shim_ffi::driver_table!(expand);

publish_own!(OWN);

/// The address sanitizer asks the program for options by this function, where its environment says
/// nothing of them. A program that is linked against its runtime does not start where another
/// library comes first, for that might bring an allocator of its own; ours brings none. Source: the
/// sanitizer's flag `verify_asan_link_order`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn __asan_default_options() -> *const std::ffi::c_char {
    c"verify_asan_link_order=0".as_ptr()
}

/// Version of this library, for tools and for telling ourselves from a driver.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn sublet_version() -> u32 {
    (channel::LAYOUT_MAJOR << 16) | channel::LAYOUT_MINOR
}
