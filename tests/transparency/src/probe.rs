//! Every symbol of a known signature, called with nothing (null pointers, zeros), with empty memory
//! in place of pointers, and, for drivers that check their handles, with handles that never were;
//! before `cuInit`, without and with a context.
//!
//! Some of these calls are valid and change the state, so the state is put back before each of
//! them. Where a driver does not survive a call, the process ends and the parent goes on behind it:
//! that the driver crashes is an answer, too.

use shim_ffi::*;

use crate::api::{Api, timeless};

/// What pointers and handles are in a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Round {
    /// Null and zero, before `cuInit`.
    Uninitialised,
    /// Null and zero, without a context.
    Nothing,
    /// Null and zero, in a context.
    NothingInContext,
    /// Empty memory for pointers, zero for the rest, in a context.
    Memory,
    /// Empty memory for pointers, handles that never were, in a context.
    Handles,
}

impl Round {
    /// All rounds in order.
    pub const ALL: [Self; 5] = [
        Self::Uninitialised,
        Self::Nothing,
        Self::NothingInContext,
        Self::Memory,
        Self::Handles,
    ];
}

const MEMORY_BYTES: usize = 64 << 10;
/// A number that no driver gives away as a handle.
const NEVER: usize = 0x7ff0_dead_0000;

/// Where a probe's pointers point to.
pub struct Scratch {
    words: Vec<u64>,
    round: Round,
}

impl Scratch {
    fn new(round: Round) -> Self {
        Self {
            words: vec![0; MEMORY_BYTES / 8],
            round,
        }
    }

    /// An argument of any type that the driver's functions take.
    fn argument<T>(&mut self) -> T {
        let name = std::any::type_name::<T>();
        // SAFETY: the table's types are integers, pointers, nullable functions, and structures and
        // newtypes of those; zero is valid for each.
        let mut value: T = unsafe { std::mem::zeroed() };
        let filled = match self.round {
            Round::Memory | Round::Handles if name.starts_with('*') => {
                self.words.as_mut_ptr() as usize
            }
            Round::Handles if name.starts_with("shim_ffi::handles::CU") => NEVER,
            _ => 0,
        };
        if filled != 0 && size_of::<T>() == size_of::<usize>() {
            // SAFETY: `T` is as long as the word: a raw pointer or a transparent handle.
            unsafe { (&raw mut value).cast::<usize>().write(filled) };
        }
        value
    }
}

macro_rules! probes {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $shape:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $traits:tt $signature:tt;)*) => {
        /// Calls `symbol` with the round's arguments; `None` where the table does not spell out its
        /// parameters.
        fn probe(api: &Api, symbol: Symbol, scratch: &mut Scratch) -> Option<CUresult> {
            match symbol { $(Symbol::$symbol => probe_one!(api scratch $symbol $signature),)* }
        }
    };
}
macro_rules! probe_one {
    ($api:ident $scratch:ident $symbol:ident _) => {
        None
    };
    ($api:ident $scratch:ident $symbol:ident ($($arg:ident: $ty:ty),*)) => {{
        // SAFETY: what an argument is in each round is what drivers document errors for, or
        // harmless; a driver that crashes here ends a process that the parent expects to end.
        Some(unsafe { $api.$symbol($($scratch.argument::<$ty>()),*) })
    }};
}
shim_ffi::driver_table!(probes);

/// Symbols that are not called this way at all: they would end or stop the process, write files, or
/// need other hardware.
fn left_out(symbol: Symbol) -> bool {
    matches!(
        symbol.entry().category,
        "graphics-interop" | "coredump" | "checkpoint" | "logs"
    ) && !symbol.entry().simulated
}

/// Puts the state back to a current primary context, no capture.
fn restore(api: &Api, round: Round) {
    if round == Round::Uninitialised {
        return;
    }
    // SAFETY: plain calls with valid arguments.
    unsafe {
        let (mut graph, mut status) = (CUgraph::NULL, CUstreamCaptureStatus::default());
        let own = CUstream::PER_THREAD;
        let mut current = CUcontext::NULL;
        while api.cuCtxPopCurrent_v2(&raw mut current).is_ok() {}
        if round == Round::Nothing {
            return;
        }
        let device = CUdevice(0);
        let (mut flags, mut active, mut context) = (0, 0, CUcontext::NULL);
        let _ = api.cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active);
        let _ = api.cuDevicePrimaryCtxRetain(&raw mut context, device);
        if active != 0 {
            let _ = api.cuDevicePrimaryCtxRelease_v2(device);
        }
        let _ = api.cuCtxSetCurrent(context);
        if api.cuStreamIsCapturing(own, &raw mut status).is_ok()
            && status.0 != 0
            && api.cuStreamEndCapture(own, &raw mut graph).is_ok()
        {
            let _ = api.cuGraphDestroy(graph);
        }
    }
}

/// What a probe run tells as it goes.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// This symbol is called next.
    About(Symbol),
    /// It answered.
    Answered(Symbol, CUresult),
}

/// Probes every symbol from index `from` on.
pub fn run(api: &Api, round: Round, from: usize, mut tell: impl FnMut(Event)) {
    if round != Round::Uninitialised {
        // SAFETY: a plain call.
        let _ = unsafe { api.cuInit(0) };
    }
    let mut scratch = Scratch::new(round);
    for symbol in SYMBOLS.into_iter().skip(from) {
        let initialises = round == Round::Uninitialised && matches!(symbol, Symbol::cuInit);
        if left_out(symbol) || initialises {
            continue;
        }
        restore(api, round);
        scratch.words.fill(0);
        tell(Event::About(symbol));
        if let Some(result) = probe(api, symbol, &mut scratch) {
            tell(Event::Answered(symbol, timeless(result)));
        }
    }
    restore(api, round);
}
