//! The thunks that stand between an entry and the driver while a recording runs, and what each
//! call's record says.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use shim_ffi::recording::{Awaited, Kind, NAME_MOST, Raw, Ring, Taken, Way, flags, stopped};
use shim_ffi::*;

use super::{device_plus_one, finish, flag, gap, graph, ring, text, timing};
use crate::attachment::verdict::ours;
use crate::driver::{addresses, real};
use crate::gate::{LEGACY, PER_THREAD, capture};
use crate::ground::clock::now_ns;
use crate::ground::errno::Preserve;
use crate::ground::thread::thread;

/// Where each recorded symbol's calls went before [`install`].
static BEHIND: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];

struct Thunk(*const c_void);

// SAFETY: the address of code, or null; never written.
unsafe impl Sync for Thunk {}

/// Puts a thunk in the place of every symbol that is recorded.
pub(super) fn install() {
    for (row, symbol) in SYMBOLS.iter().enumerate() {
        let (Some(thunk), Some(behind), Some(slot)) =
            (THUNKS.get(row), BEHIND.get(row), addresses::SLOTS.get(row))
        else {
            continue;
        };
        if !thunk.0.is_null() && real::exported(*symbol) {
            behind.store(real::address(*symbol), Ordering::Release);
            slot.store(thunk.0.cast_mut(), Ordering::Release);
        }
    }
}

/// A call that is being made.
struct Began {
    raw: Raw,
    called_ns: u64,
    stream: usize,
    timed: Option<timing::Timed>,
    captured: bool,
}

/// Expands `$then! { ... [a0 a1 ...] }` with as many names as the symbol has parameters.
macro_rules! with_words {
    (_ $then:ident $symbol:ident) => {};
    // More than any call that is recorded has.
    (12 $then:ident $symbol:ident) => {};
    (15 $then:ident $symbol:ident) => {};
    (16 $then:ident $symbol:ident) => {};
    (0 $then:ident $symbol:ident) => {
        $then! { $symbol [] }
    };
    (1 $then:ident $symbol:ident) => {
        $then! { $symbol [a0] }
    };
    (2 $then:ident $symbol:ident) => {
        $then! { $symbol [a0 a1] }
    };
    (3 $then:ident $symbol:ident) => {
        $then! { $symbol [a0 a1 a2] }
    };
    (4 $then:ident $symbol:ident) => {
        $then! { $symbol [a0 a1 a2 a3] }
    };
    (5 $then:ident $symbol:ident) => {
        $then! { $symbol [a0 a1 a2 a3 a4] }
    };
    (6 $then:ident $symbol:ident) => {
        $then! { $symbol [a0 a1 a2 a3 a4 a5] }
    };
    (7 $then:ident $symbol:ident) => {
        $then! { $symbol [a0 a1 a2 a3 a4 a5 a6] }
    };
    (8 $then:ident $symbol:ident) => {
        $then! { $symbol [a0 a1 a2 a3 a4 a5 a6 a7] }
    };
    (9 $then:ident $symbol:ident) => {
        $then! { $symbol [a0 a1 a2 a3 a4 a5 a6 a7 a8] }
    };
    (10 $then:ident $symbol:ident) => {
        $then! { $symbol [a0 a1 a2 a3 a4 a5 a6 a7 a8 a9] }
    };
    (11 $then:ident $symbol:ident) => {
        $then! { $symbol [a0 a1 a2 a3 a4 a5 a6 a7 a8 a9 a10] }
    };
}

macro_rules! word {
    ($word:ident) => {
        usize
    };
}

macro_rules! thunk {
    ($symbol:ident [$($arg:ident)*]) => {
        #[allow(dead_code, reason = "only those of rows that are recorded are taken")]
        pub(super) unsafe extern "C-unwind" fn $symbol($($arg: usize),*) -> CUresult {
            let began = began(Symbol::$symbol, &[$($arg),*]);
            // SAFETY: what stood in the slot before the thunk: the driver's function of this name,
            // or one that counts and goes there. Each parameter is an integer or a pointer, in a
            // word of its own. The caller's own arguments.
            let result = unsafe {
                let function: unsafe extern "C-unwind" fn($(word!($arg)),*) -> CUresult =
                    std::mem::transmute(behind(Symbol::$symbol));
                function($($arg),*)
            };
            if let Some(began) = began {
                ended(Symbol::$symbol, began, &[$($arg),*], result);
            }
            result
        }
    };
}

macro_rules! address {
    (_ $symbol:ident) => {
        std::ptr::null()
    };
    (12 $symbol:ident) => {
        std::ptr::null()
    };
    (15 $symbol:ident) => {
        std::ptr::null()
    };
    (16 $symbol:ident) => {
        std::ptr::null()
    };
    ($params:literal $symbol:ident) => {
        match Symbol::$symbol.traits().records {
            Records::Nothing => std::ptr::null(),
            _ => thunk::$symbol as *const c_void,
        }
    };
}

macro_rules! thunks {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $shape:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $traits:tt $signature:tt;)*) => {
        mod thunk {
            use super::*;
            $(with_words! { $params thunk $symbol })*
        }
        static THUNKS: [Thunk; COUNT] = [$(Thunk(address! { $params $symbol })),*];
    };
}
shim_ffi::driver_table!(thunks);

fn behind(symbol: Symbol) -> *mut c_void {
    // PANIC: the enumeration and the array have the same length.
    BEHIND[symbol as usize].load(Ordering::Acquire)
}

/// Before a call; `None` where it is not recorded.
fn began(symbol: Symbol, words: &[usize]) -> Option<Began> {
    if thread().is_inside() {
        return None;
    }
    let ring = ring()?;
    if ring.stopped() != stopped::NOT {
        return None;
    }
    ours(symbol, || before(ring, symbol, words)).ok()
}

fn before(ring: &Ring, symbol: Symbol, words: &[usize]) -> Began {
    let _errno = Preserve::new();
    let _ours = thread().enter();
    let at_ns = now_ns();
    let row = symbol.entry();
    let stream = stream(row, words);
    let records = row.traits.records;
    let on_stream = !matches!(row.stream, StreamAt::Implicit) || is_work(records);
    let capturing = capture::any();
    let captured = capturing && on_stream && !waits(records) && capture::is_capturing(stream);
    if matches!(records, Records::ContextGone) {
        // The events that launches were measured by go with it.
        timing::harvest();
        timing::forget();
    }
    let timed = match records {
        Records::Launch | Records::LaunchOf | Records::Graph if !capturing => {
            timing::before(stream)
        }
        _ => None,
    };
    Began {
        raw: Raw {
            flags: flag(matches!(row.stream, StreamAt::Implicit), flags::BLOCKS),
            device_plus_one: device_plus_one(),
            order: ring.next_order(),
            at_ns,
            gap_ns: gap(at_ns),
            ..Raw::default()
        },
        called_ns: now_ns(),
        stream,
        timed,
        captured,
    }
}

fn is_work(records: Records) -> bool {
    matches!(records, Records::Copy { .. } | Records::Fill)
}

fn waits(records: Records) -> bool {
    matches!(records, Records::Waits { .. })
}

/// The stream of a call as its handle; the default streams by the handles that name them.
fn stream(row: &Entry, words: &[usize]) -> usize {
    let default = match row.variant {
        Variant::Legacy => LEGACY,
        Variant::Ptsz | Variant::Ptds => PER_THREAD,
    };
    let given = match row.stream {
        StreamAt::Param(at) => words.get(usize::from(at)).copied().unwrap_or(0),
        StreamAt::InStruct => match row.traits.records {
            Records::LaunchOf => config(words).map_or(0, |config| config.hStream.0 as usize),
            _ => 0,
        },
        StreamAt::Implicit => 0,
    };
    if given == 0 { default } else { given }
}

fn config(words: &[usize]) -> Option<&CUlaunchConfig> {
    let at = *words.first()? as *const CUlaunchConfig;
    // SAFETY: the caller's launch configuration, which the driver reads as well; null is seen.
    unsafe { at.as_ref() }
}

/// After a call.
fn ended(symbol: Symbol, began: Began, words: &[usize], result: CUresult) {
    let _ = ours(symbol, || {
        let _errno = Preserve::new();
        let _ours = thread().enter();
        let recorded = ring().is_some_and(|ring| after(ring, symbol, began, words, result));
        // What is not recorded is time between the calls that are.
        if recorded {
            thread().recorded_ns.set(now_ns());
        }
    });
}

/// Whether it is recorded.
fn after(ring: &Ring, symbol: Symbol, began: Began, words: &[usize], result: CUresult) -> bool {
    let now = now_ns();
    let Began {
        mut raw,
        called_ns,
        stream,
        timed,
        captured,
    } = began;
    if let Some(timed) = timed {
        timing::after(timed, stream, called_ns, raw.order, result.is_ok());
    }
    if !result.is_ok() || captured {
        return false;
    }
    raw.took_ns = now.saturating_sub(called_ns);
    let traits = symbol.traits();
    let word = |at: usize| words.get(at).copied().unwrap_or(0) as u64;
    // CAST: 32-bit parameters; the upper half of their word is unspecified.
    let low = |at: usize| word(at) & 0xffff_ffff;
    let written = |at: usize| read_word(word(at));
    let stream = stream as u64;
    let (kind, words) = match traits.records {
        Records::Nothing => return false,
        Records::Launch => (
            Kind::Launch,
            launch(
                word(0),
                [low(1), low(2), low(3)],
                [low(4), low(5), low(6)],
                low(7),
                stream,
            ),
        ),
        Records::LaunchOf => {
            let Some(config) = config(words) else {
                return false;
            };
            let grid = [config.gridDimX, config.gridDimY, config.gridDimZ].map(u64::from);
            let block = [config.blockDimX, config.blockDimY, config.blockDimZ].map(u64::from);
            let shared = u64::from(config.sharedMemBytes);
            (Kind::Launch, launch(word(1), grid, block, shared, stream))
        }
        Records::Graph => (Kind::GraphLaunch, line([word(0), stream])),
        Records::GraphMade => {
            let exec = written(0);
            let nodes = graph::nodes(word(1) as usize, exec);
            (Kind::GraphMade, line([exec, nodes]))
        }
        Records::GraphGone => (Kind::GraphGone, line([word(0)])),
        Records::Function => {
            let function = written(0);
            (Kind::Function, line([function, name(function, word(2))]))
        }
        Records::FunctionOf => (Kind::FunctionOf, line([written(0), word(1)])),
        Records::Takes { bytes, kind } => (
            Kind::Take,
            line([written(0), word(usize::from(bytes)), kind as u64, stream]),
        ),
        Records::TakesRows => (
            Kind::Take,
            line([
                written(0),
                written(1).saturating_mul(word(3)),
                Taken::Device as u64,
                stream,
            ]),
        ),
        Records::Locks => (
            Kind::Take,
            line([word(0), word(1), Taken::Registered as u64, stream]),
        ),
        Records::Gives => (Kind::Give, line([word(0), stream])),
        Records::Maps => (Kind::Map, line([word(0), word(1), word(3)])),
        Records::Copy { way } => match copy(traits.operands, way, words) {
            Some([to, from, bytes, way]) => {
                // Where the program has waited for a copy, launches before it are over.
                if raw.flags & flags::BLOCKS != 0 && !capture::any() {
                    timing::harvest();
                }
                (Kind::Copy, line([to, from, bytes, way, stream]))
            }
            None => return false,
        },
        Records::Fill => {
            let (at, bytes) = match traits.operands {
                Operands::One { at, count, unit } => (
                    word(usize::from(at)),
                    word(usize::from(count)).saturating_mul(u64::from(unit)),
                ),
                Operands::Rows { unit } => (
                    word(0),
                    word(3)
                        .saturating_mul(word(4))
                        .saturating_mul(u64::from(unit)),
                ),
                _ => return false,
            };
            (Kind::Fill, line([at, bytes, stream]))
        }
        Records::StreamMade { priority } => {
            let priority = priority.map_or(0, |at| low(usize::from(at)));
            (Kind::StreamMade, line([written(0), low(1), priority]))
        }
        Records::StreamGone => (Kind::StreamGone, line([word(0)])),
        Records::EventMade => (Kind::EventMade, line([written(0), low(1)])),
        Records::EventGone => (Kind::EventGone, line([word(0)])),
        Records::EventRecorded => (Kind::EventRecorded, line([word(0), stream])),
        Records::EventAwaited => (Kind::EventAwaited, line([word(1), stream])),
        Records::Waits { what } => {
            if !capture::any() {
                timing::harvest();
            }
            let handle = match what {
                Awaited::Context => 0,
                Awaited::Stream => stream,
                Awaited::Event => word(0),
            };
            (Kind::Wait, line([what as u64, handle]))
        }
        Records::ContextGone => (Kind::ContextGone, line([])),
    };
    raw.kind = kind.0;
    raw.words = words;
    finish(ring, raw);
    true
}

/// The words of a record, the rest of them 0.
pub(super) fn line<const N: usize>(words: [u64; N]) -> [u64; 8] {
    let mut all = [0; 8];
    for (to, from) in all.iter_mut().zip(words) {
        *to = from;
    }
    all
}

/// What a launch is, in words.
pub(super) fn launch(
    function: u64,
    grid: [u64; 3],
    block: [u64; 3],
    shared: u64,
    stream: u64,
) -> [u64; 8] {
    let [x, y, z] = grid;
    // A block has 1024 threads at most in each direction.
    let [bx, by, bz] = block.map(|threads| threads.min(0xffff));
    line([
        function,
        x | y << 32,
        z | shared << 32,
        bx | by << 16 | bz << 32,
        stream,
    ])
}

/// What the driver has written where the program asked it to.
fn read_word(at: u64) -> u64 {
    let at = at as *const u64;
    // SAFETY: the call has succeeded, and so the driver has written a word there; null is seen.
    unsafe { at.as_ref() }.copied().unwrap_or(0)
}

/// Records a kernel's name; answers how long it is.
fn name(function: u64, at: u64) -> u64 {
    let at = at as *const std::ffi::c_char;
    if at.is_null() {
        return 0;
    }
    // SAFETY: the driver has found a function of this name, which ends with a zero byte.
    let name = unsafe { CStr::from_ptr(at) }.to_bytes();
    let name = name.get(..NAME_MOST).unwrap_or(name);
    text(function, name);
    name.len() as u64
}

/// Destination, source, bytes and way of a copy.
fn copy(operands: Operands, way: Way, words: &[usize]) -> Option<[u64; 4]> {
    let word = |at: u8| words.get(usize::from(at)).copied().unwrap_or(0) as u64;
    match operands {
        Operands::Two { to, from, bytes } => Some([word(to), word(from), word(bytes), way as u64]),
        Operands::Plane => {
            let at = *words.first()? as *const CUDA_MEMCPY2D;
            // SAFETY: the caller's description of a copy that the driver has accepted; null is
            // seen.
            let copy = unsafe { at.as_ref() }?;
            let bytes = copy.WidthInBytes.saturating_mul(copy.Height) as u64;
            let (to, into) = side(copy.dstMemoryType, copy.dstHost as u64, copy.dstDevice.0);
            let (from, out) = side(copy.srcMemoryType, copy.srcHost as u64, copy.srcDevice.0);
            Some([to, from, bytes, between(out, into) as u64])
        }
        Operands::Volume => {
            let at = *words.first()? as *const CUDA_MEMCPY3D;
            // SAFETY: as above.
            volume(unsafe { at.as_ref() }?)
        }
        _ => None,
    }
}

/// The same of a copy in three dimensions.
pub(super) fn volume(copy: &CUDA_MEMCPY3D) -> Option<[u64; 4]> {
    let rows = copy.Height.saturating_mul(copy.Depth);
    let bytes = copy.WidthInBytes.saturating_mul(rows) as u64;
    let (to, into) = side(copy.dstMemoryType, copy.dstHost as u64, copy.dstDevice.0);
    let (from, out) = side(copy.srcMemoryType, copy.srcHost as u64, copy.srcDevice.0);
    Some([to, from, bytes, between(out, into) as u64])
}

/// Address of one side of a copy, and whether it is the host's; `None`: its address says it.
fn side(kind: CUmemorytype, host: u64, device: u64) -> (u64, Option<bool>) {
    if kind == CUmemorytype::CU_MEMORYTYPE_HOST {
        (host, Some(true))
    } else if kind == CUmemorytype::CU_MEMORYTYPE_UNIFIED {
        (device, None)
    } else {
        (device, Some(false))
    }
}

fn between(from_host: Option<bool>, to_host: Option<bool>) -> Way {
    match (from_host, to_host) {
        (Some(true), Some(false)) => Way::In,
        (Some(false), Some(true)) => Way::Out,
        (Some(false), Some(false)) => Way::Within,
        _ => Way::Any,
    }
}
