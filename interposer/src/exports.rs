//! Every driver symbol, exported: expanded from the one table.
//!
//! | action | what stands here |
//! |---|---|
//! | pass-through | a jump to the real function |
//! | gate-submission | [`gate`], then the real function, then completion marks |
//! | meter-alloc, meter-free, virtualise-report | the hook of the same name in [`memory`] or [`proc_address`] |
//! | observe-sync | what is in flight is marked first |
//! | observe-context | the thread's device is looked up again afterwards |
//! | track-handle | a jump, or the note in [`track`] |
//!
//! An entry does three things: guard against panics, convert, call. Gated entries take machine words: every parameter of
//! the gated functions is an integer or a pointer (the table's test of signatures holds them to that), so words in the
//! right order are the same call.
//!
//! What the driver ends otherwise than by returning (a cancelled thread in a wait, an exception of a callback) passes through
//! entries of words as it would through the driver: they unwind, and catch nothing around the call.

use std::ffi::c_void;

use shim_ffi::*;

use crate::{capture, context, cost, gate, marks, memory, real, residency, signature};

/// Runs a hook; a panic in it becomes `fallback`'s answer, and never leaves the entry.
#[inline(always)]
fn guard(hook: impl FnOnce() -> CUresult, fallback: impl FnOnce() -> CUresult) -> CUresult {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(hook)) {
        Ok(result) => result,
        Err(_) => fallback(),
    }
}

/// Hooks by the symbol's name, wherever they are written.
mod hooks {
    pub(super) use crate::memory::*;
    pub(super) use crate::proc_address::*;
}

// ---------------------------------------------------------------------------------------------------------------------
// Shapes of an entry
// ---------------------------------------------------------------------------------------------------------------------

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
        // SAFETY: the driver's function of this name takes this many integer or pointer parameters; passing each as a
        // machine word puts it where the ABI expects it. The caller's own arguments.
        unsafe {
            let function: unsafe extern "C-unwind" fn($(word!($arg)),*) -> CUresult =
                std::mem::transmute(real::address(Symbol::$symbol));
            function($($arg),*)
        }
    }};
}

/// A jump to the real function; nothing is touched but the scratch register that the ABI leaves to linkage.
macro_rules! forward {
    ($symbol:ident) => {
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $symbol() -> CUresult {
            std::arch::naked_asm!(
                "mov rax, qword ptr [rip + {slots} + {offset}]",
                "test rax, rax",
                "je 2f",
                "jmp rax",
                "2: mov eax, {index}",
                "jmp {bind}",
                slots = sym real::SLOTS,
                offset = const Symbol::$symbol as usize * 8,
                index = const Symbol::$symbol as usize,
                bind = sym bind_and_jump,
            )
        }
    };
}

/// Where a forwarder goes the first time: finds the real function of row `eax` with every argument register kept, and jumps
/// there.
#[unsafe(naked)]
unsafe extern "C" fn bind_and_jump() {
    std::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 128",
        "movups [rsp], xmm0",
        "movups [rsp + 16], xmm1",
        "movups [rsp + 32], xmm2",
        "movups [rsp + 48], xmm3",
        "movups [rsp + 64], xmm4",
        "movups [rsp + 80], xmm5",
        "movups [rsp + 96], xmm6",
        "movups [rsp + 112], xmm7",
        "mov edi, eax",
        "call {bind}",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "movups xmm2, [rsp + 32]",
        "movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]",
        "movups xmm5, [rsp + 80]",
        "movups xmm6, [rsp + 96]",
        "movups xmm7, [rsp + 112]",
        "add rsp, 128",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rbp",
        "jmp rax",
        bind = sym real::bind_index,
    )
}

/// A jump to the real function, but for tenants whose memory may be away: they pass the latch. For up to six integer or pointer
/// parameters, which travel in registers.
macro_rules! latched {
    ($symbol:ident) => {
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $symbol() -> CUresult {
            std::arch::naked_asm!(
                "cmp byte ptr [rip + {active}], 0",
                "jne {latched}",
                "mov rax, qword ptr [rip + {slots} + {offset}]",
                "test rax, rax",
                "je 2f",
                "jmp rax",
                "2: mov eax, {index}",
                "jmp {bind}",
                active = sym residency::ACTIVE,
                latched = sym past_the_latch::<{ Symbol::$symbol as usize }>,
                slots = sym real::SLOTS,
                offset = const Symbol::$symbol as usize * 8,
                index = const Symbol::$symbol as usize,
                bind = sym bind_and_jump,
            )
        }
    };
}

/// The real function of a row, called inside the latch.
extern "C-unwind" fn past_the_latch<const INDEX: usize>(
    a0: usize,
    a1: usize,
    a2: usize,
    a3: usize,
    a4: usize,
    a5: usize,
) -> CUresult {
    let _pass = match residency::pass() {
        Ok(pass) => pass,
        Err(status) => return status,
    };
    // PANIC: rows of the table alone come here.
    let symbol = SYMBOLS[INDEX];
    let address = real::address(symbol);
    let mut words = [a0, a1, a2, a3, a4, a5];
    if track::takes_handle(symbol) {
        residency::translate(symbol, &mut words);
    }
    let [a0, a1, a2, a3, a4, a5] = words;
    // SAFETY: the driver's function takes at most six words, each in its register; the caller's own arguments.
    unsafe {
        let function: unsafe extern "C-unwind" fn(
            usize,
            usize,
            usize,
            usize,
            usize,
            usize,
        ) -> CUresult = std::mem::transmute(address);
        function(a0, a1, a2, a3, a4, a5)
    }
}

/// The stream of a gated call as a key: 1 and 2 are the default streams.
macro_rules! stream_key {
    ($default:expr, 0, [$($arg:ident)*]) => { $default };
    ($default:expr, in_struct, [$first:ident $($rest:ident)*]) => { stream_in_struct($first, $default) };
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
fn stream_in_struct(structure: usize, default: usize) -> usize {
    if structure == 0 {
        return default;
    }
    // SAFETY: the caller's launch configuration, which the driver is about to read as well.
    let stream = unsafe { (*(structure as *const CUlaunchConfig)).hStream.0 as usize };
    if stream == 0 { default } else { stream }
}

macro_rules! gated {
    ($symbol:ident $variant:ident $stream:tt [$($arg:ident)*]) => {
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments, reason = "the driver's own parameters")]
        pub unsafe extern "C-unwind" fn $symbol($($arg: usize),*) -> CUresult {
            /// Apart, so that the fast path is a handful of loads and a jump.
            #[cold]
            #[inline(never)]
            extern "C-unwind" fn slow($($arg: usize),*) -> CUresult {
                let stream = stream_key!(default_stream!($variant), $stream, [$($arg)*]);
                let seen = signature::of(Symbol::$symbol, &[$($arg),*], stream);
                if residency::active()
                    && !blocks!($stream)
                    && !track::may_allocate(Symbol::$symbol)
                    && let Some(_pass) = gate::open_latched(stream, seen)
                {
                    return call_words!($symbol $($arg)*);
                }
                let admitted = std::panic::catch_unwind(|| gate::admit(stream, blocks!($stream), seen));
                let ticket = admitted.unwrap_or(gate::Ticket::Pass);
                if matches!(ticket, gate::Ticket::Deny) {
                    return CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
                }
                let pass = match residency::pass() {
                    Ok(pass) => pass,
                    Err(status) => {
                        gate::withdraw(ticket);
                        return status;
                    }
                };
                if track::may_allocate(Symbol::$symbol) {
                    let exec = [$($arg),*][0];
                    let prepaid = std::panic::catch_unwind(|| memory::before_graph(exec)).unwrap_or(Ok(None));
                    let (result, prepaid) = match prepaid {
                        Ok(prepaid) => (call_words!($symbol $($arg)*), prepaid),
                        Err(refusal) => (refusal, None),
                    };
                    drop(pass);
                    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        gate::settle(ticket, seen);
                        memory::after_graph(prepaid, result);
                    }));
                    return result;
                }
                let result = call_words!($symbol $($arg)*);
                drop(pass);
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    gate::settle(ticket, seen);
                    marks::after_error(result);
                }));
                result
            }
            let stream = stream_key!(default_stream!($variant), $stream, [$($arg)*]);
            let function = real::bound(Symbol::$symbol);
            let mut next: unsafe extern "C-unwind" fn($(word!($arg)),*) -> CUresult = slow;
            if !blocks!($stream)
                && !track::may_allocate(Symbol::$symbol)
                && !function.is_null()
                && gate::open(stream, signature::of(Symbol::$symbol, &[$($arg),*], stream))
            {
                // SAFETY: the driver's function of this name, which takes these words.
                next = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($(word!($arg)),*) -> CUresult>(function) };
            }
            // SAFETY: the caller's own arguments.
            unsafe { next($($arg),*) }
        }
    };
}

macro_rules! hooked {
    ($symbol:ident ($($arg:ident: $ty:ty),*)) => {
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments, reason = "the driver's own parameters")]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> CUresult {
            // SAFETY: the caller's own arguments, in both.
            guard(|| unsafe { hooks::$symbol($($arg),*) }, || CUresult::CUDA_ERROR_UNKNOWN)
        }
    };
}

macro_rules! observed_sync {
    ($symbol:ident [$($arg:ident)*]) => {
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $symbol($($arg: usize),*) -> CUresult {
            let _ = std::panic::catch_unwind(gate::before_sync);
            let result = call_words!($symbol $($arg)*);
            if !result.is_ok() {
                let _ = std::panic::catch_unwind(|| marks::after_error(result));
            }
            if !track::only_asks(Symbol::$symbol) {
                let _ = std::panic::catch_unwind(gate::after_sync);
                // Pools give memory back to the device when the program synchronises.
                if let Some(stream) = track::waited_for(Symbol::$symbol, &[$($arg),*]) {
                    memory::after_wait(stream);
                }
                memory::after_sync();
            }
            result
        }
    };
}

macro_rules! observed_context {
    ($symbol:ident [$($arg:ident)*]) => {
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $symbol($($arg: usize),*) -> CUresult {
            let _ = std::panic::catch_unwind(|| {
                gate::before_sync();
                context::before(Symbol::$symbol, &[$($arg),*]);
            });
            // Whoever ends a context takes away what memory is moved by. One that cannot be brought back goes all the same.
            let pass = track::ends_context(Symbol::$symbol).then(residency::pass);
            let result = call_words!($symbol $($arg)*);
            let _ = std::panic::catch_unwind(|| context::after(Symbol::$symbol, &[$($arg),*], result));
            drop(pass);
            result
        }
    };
}

macro_rules! tracked {
    ($symbol:ident [$($arg:ident)*]) => {
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments, reason = "the driver's own parameters")]
        pub unsafe extern "C-unwind" fn $symbol($($arg: usize),*) -> CUresult {
            let pass = if track::sees_memory(Symbol::$symbol) {
                match residency::pass() {
                    Ok(pass) => Some(pass),
                    Err(status) => return status,
                }
            } else {
                None
            };
            if let Some(status) = track::answered(Symbol::$symbol, &[$($arg),*]) {
                return status;
            }
            let _ = std::panic::catch_unwind(|| track::before(Symbol::$symbol));
            let result = if track::takes_handle(Symbol::$symbol) {
                let mut told = [$($arg),*];
                track::translate(Symbol::$symbol, &mut told);
                let [$($arg),*] = told;
                call_words!($symbol $($arg)*)
            } else {
                call_words!($symbol $($arg)*)
            };
            let _ = std::panic::catch_unwind(|| track::after(Symbol::$symbol, &[$($arg),*], result));
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
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(flags: u32) -> CUresult {
            // SAFETY: the caller's own argument.
            let result = unsafe { real::$symbol(flags) };
            if !result.is_ok() {
                return result;
            }
            match std::panic::catch_unwind(crate::client::attach) {
                Ok(Err(refusal)) => refusal,
                _ => result,
            }
        }
    };
}

// ---------------------------------------------------------------------------------------------------------------------
// Which symbol gets which shape
// ---------------------------------------------------------------------------------------------------------------------

macro_rules! export {
    // Symbols with a shape of their own.
    (cuInit $($rest:tt)*) => {
        initialise! { cuInit }
    };
    (cuLaunchCooperativeKernelMultiDevice $($rest:tt)*) => {
        with_words! { 3 gated_list cuLaunchCooperativeKernelMultiDevice }
    };
    // Takes a structure by value, which does not travel as a word.
    (cuIpcOpenMemHandle $($rest:tt)*) => {
        forward! { cuIpcOpenMemHandle }
    };
    (cuIpcOpenMemHandle_v2 $($rest:tt)*) => {
        forward! { cuIpcOpenMemHandle_v2 }
    };
    (cuIpcOpenEventHandle $($rest:tt)*) => {
        forward! { cuIpcOpenEventHandle }
    };
    // Takes memory, where the classification says that it makes a handle.
    (cuGraphAddMemAllocNode $variant:ident track_handle $params:tt $stream:tt $signature:tt) => {
        hooked! { cuGraphAddMemAllocNode $signature }
    };
    // Comes to hold memory that may be nobody else's any more.
    (cuMemImportFromShareableHandle $variant:ident track_handle $params:tt $stream:tt $signature:tt) => {
        hooked! { cuMemImportFromShareableHandle $signature }
    };
    // Nothing is asked of these but that what they name is there: see `residency`.
    (cuStreamWriteValue32 $($rest:tt)*) => {
        latched! { cuStreamWriteValue32 }
    };
    (cuStreamWriteValue32_ptsz $($rest:tt)*) => {
        latched! { cuStreamWriteValue32_ptsz }
    };
    (cuStreamWriteValue32_v2 $($rest:tt)*) => {
        latched! { cuStreamWriteValue32_v2 }
    };
    (cuStreamWriteValue32_v2_ptsz $($rest:tt)*) => {
        latched! { cuStreamWriteValue32_v2_ptsz }
    };
    (cuStreamWriteValue64 $($rest:tt)*) => {
        latched! { cuStreamWriteValue64 }
    };
    (cuStreamWriteValue64_ptsz $($rest:tt)*) => {
        latched! { cuStreamWriteValue64_ptsz }
    };
    (cuStreamWriteValue64_v2 $($rest:tt)*) => {
        latched! { cuStreamWriteValue64_v2 }
    };
    (cuStreamWriteValue64_v2_ptsz $($rest:tt)*) => {
        latched! { cuStreamWriteValue64_v2_ptsz }
    };
    (cuStreamBatchMemOp $($rest:tt)*) => {
        latched! { cuStreamBatchMemOp }
    };
    (cuStreamBatchMemOp_ptsz $($rest:tt)*) => {
        latched! { cuStreamBatchMemOp_ptsz }
    };
    (cuStreamBatchMemOp_v2 $($rest:tt)*) => {
        latched! { cuStreamBatchMemOp_v2 }
    };
    (cuStreamBatchMemOp_v2_ptsz $($rest:tt)*) => {
        latched! { cuStreamBatchMemOp_v2_ptsz }
    };
    (cuGraphAddMemcpyNode $($rest:tt)*) => {
        latched! { cuGraphAddMemcpyNode }
    };
    (cuGraphAddMemsetNode $($rest:tt)*) => {
        latched! { cuGraphAddMemsetNode }
    };
    (cuGraphAddBatchMemOpNode $($rest:tt)*) => {
        latched! { cuGraphAddBatchMemOpNode }
    };
    (cuGraphBatchMemOpNodeSetParams $($rest:tt)*) => {
        latched! { cuGraphBatchMemOpNodeSetParams }
    };
    (cuGraphExecBatchMemOpNodeSetParams $($rest:tt)*) => {
        latched! { cuGraphExecBatchMemOpNodeSetParams }
    };
    (cuGraphExecChildGraphNodeSetParams $($rest:tt)*) => {
        latched! { cuGraphExecChildGraphNodeSetParams }
    };
    (cuGraphExecMemcpyNodeSetParams $($rest:tt)*) => {
        latched! { cuGraphExecMemcpyNodeSetParams }
    };
    (cuGraphExecMemsetNodeSetParams $($rest:tt)*) => {
        latched! { cuGraphExecMemsetNodeSetParams }
    };
    (cuGraphMemcpyNodeSetParams $($rest:tt)*) => {
        latched! { cuGraphMemcpyNodeSetParams }
    };
    (cuGraphMemsetNodeSetParams $($rest:tt)*) => {
        latched! { cuGraphMemsetNodeSetParams }
    };
    (cuMemGetAccess $($rest:tt)*) => {
        latched! { cuMemGetAccess }
    };
    (cuMemGetAllocationPropertiesFromHandle $($rest:tt)*) => {
        latched! { cuMemGetAllocationPropertiesFromHandle }
    };
    // By action.
    ($symbol:ident $variant:ident pass_through $($rest:tt)*) => {
        forward! { $symbol }
    };
    ($symbol:ident $variant:ident gate_submission $params:tt $stream:tt $signature:tt) => {
        with_words! { $params gated $symbol $variant $stream }
    };
    ($symbol:ident $variant:ident meter_alloc $params:tt $stream:tt $signature:tt) => {
        hooked! { $symbol $signature }
    };
    ($symbol:ident $variant:ident meter_free $params:tt $stream:tt $signature:tt) => {
        hooked! { $symbol $signature }
    };
    ($symbol:ident $variant:ident virtualise_report $params:tt $stream:tt $signature:tt) => {
        hooked! { $symbol $signature }
    };
    ($symbol:ident $variant:ident observe_sync $params:tt $stream:tt $signature:tt) => {
        with_words! { $params observed_sync $symbol }
    };
    ($symbol:ident $variant:ident observe_context $params:tt $stream:tt $signature:tt) => {
        with_words! { $params observed_context $symbol }
    };
    ($symbol:ident $variant:ident track_handle $params:tt $stream:tt $signature:tt) => {
        with_words! { $params tracked $symbol }
    };
}

/// The one launch that takes an array of launches: gated by the stream of the first.
macro_rules! gated_list {
    ($symbol:ident [$list:ident $count:ident $flags:ident]) => {
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $symbol($list: usize, $count: usize, $flags: usize) -> CUresult {
            let stream = if $list == 0 || $count as u32 == 0 {
                gate::LEGACY
            } else {
                // SAFETY: at least one element, which the driver is about to read as well.
                let stream = unsafe { (*($list as *const CUDA_LAUNCH_PARAMS)).hStream.0 as usize };
                if stream == 0 { gate::LEGACY } else { stream }
            };
            let seen = signature::of(Symbol::$symbol, &[], stream);
            let ticket = std::panic::catch_unwind(|| gate::admit(stream, false, seen)).unwrap_or(gate::Ticket::Pass);
            if matches!(ticket, gate::Ticket::Deny) {
                return CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
            }
            let pass = match residency::pass() {
                Ok(pass) => pass,
                Err(status) => {
                    gate::withdraw(ticket);
                    return status;
                }
            };
            let result = call_words!($symbol $list $count $flags);
            drop(pass);
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| gate::settle(ticket, seen)));
            result
        }
    };
}

macro_rules! expand {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $signature:tt;)*) => {
        $(export! { $symbol $variant $action $params $stream $signature })*

        /// Our functions, by row.
        static OWN: [Own; COUNT] = [$(Own($symbol as *const c_void)),*];
    };
}
shim_ffi::driver_table!(expand);

/// Address of a function of ours.
struct Own(*const c_void);

// SAFETY: the address of code; never written.
unsafe impl Sync for Own {}

/// Our function for `symbol`.
pub(crate) fn own(symbol: Symbol) -> *mut c_void {
    // PANIC: the enumeration and the array expand from the same rows.
    OWN[symbol as usize].0.cast_mut()
}

/// Version of this library, for tools and for telling ourselves from a driver.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_version() -> u32 {
    (channel::LAYOUT_MAJOR << 16) | channel::LAYOUT_MINOR
}

/// Handles that mean something to accounting or to captures.
mod track {
    use super::*;

    const fn begins_capture(symbol: Symbol) -> bool {
        matches!(
            symbol,
            Symbol::cuStreamBeginCapture
                | Symbol::cuStreamBeginCapture_ptsz
                | Symbol::cuStreamBeginCapture_v2
                | Symbol::cuStreamBeginCapture_v2_ptsz
                | Symbol::cuStreamBeginCaptureToCig
                | Symbol::cuStreamBeginCaptureToCig_ptsz
                | Symbol::cuStreamBeginCaptureToGraph
                | Symbol::cuStreamBeginCaptureToGraph_ptsz
                | Symbol::cuStreamBeginRecaptureToGraph
                | Symbol::cuStreamBeginRecaptureToGraph_ptsz
        )
    }

    const fn ends_capture(symbol: Symbol) -> bool {
        matches!(
            symbol,
            Symbol::cuStreamEndCapture
                | Symbol::cuStreamEndCapture_ptsz
                | Symbol::cuStreamEndCaptureToCig
                | Symbol::cuStreamEndCaptureToCig_ptsz
        )
    }

    /// Calls whose arguments the driver checks against what is mapped, or that make it mean something else; and beginnings of
    /// captures, during which nothing is moved.
    pub(super) const fn sees_memory(symbol: Symbol) -> bool {
        use Symbol::*;
        begins_capture(symbol)
            || matches!(
                symbol,
                cuGraphAddChildGraphNode
                    | cuGraphAddKernelNode
                    | cuGraphAddKernelNode_v2
                    | cuGraphAddNode
                    | cuGraphAddNode_v2
                    | cuGraphAddNode_v3
                    | cuGraphExecKernelNodeSetParams
                    | cuGraphExecKernelNodeSetParams_v2
                    | cuGraphExecNodeSetParams
                    | cuGraphExecUpdate
                    | cuGraphExecUpdate_v2
                    | cuGraphInstantiate
                    | cuGraphInstantiateWithFlags
                    | cuGraphInstantiateWithParams
                    | cuGraphInstantiateWithParams_ptsz
                    | cuGraphInstantiate_v2
                    | cuGraphKernelNodeSetParams
                    | cuGraphKernelNodeSetParams_v2
                    | cuGraphNodeSetParams
                    | cuGraphNodeSetParams_v2
                    | cuIpcGetMemHandle
                    | cuMemExportToShareableHandle
                    | cuMemGetHandleForAddressRange
                    | cuMemMap
                    | cuMemRetainAllocationHandle
                    | cuMemSetAccess
                    | cuMulticastBindAddr
                    | cuMulticastBindAddr_v2
                    | cuMulticastBindMem
                    | cuMulticastBindMem_v2
                    | cuLogicalEndpointBindMem
                    | cuPointerSetAttribute
                    | cuTexObjectCreate
                    | cuCtxEnablePeerAccess
                    | cuCtxDisablePeerAccess
            )
    }

    /// What cannot be had of memory that can be moved is answered as it would be of plain memory.
    #[inline(always)]
    pub(super) fn answered(symbol: Symbol, args: &[usize]) -> Option<CUresult> {
        let address = match symbol {
            Symbol::cuMemMap | Symbol::cuMemSetAccess | Symbol::cuMemAddressFree => args.first(),
            Symbol::cuMemRetainAllocationHandle => args.get(1),
            _ => None,
        };
        let address = *address? as u64;
        if !residency::active() {
            return None;
        }
        if residency::owns(address) {
            return Some(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if matches!(symbol, Symbol::cuMemRetainAllocationHandle) && args.first() != Some(&0) {
            let handle = residency::retain(address)?;
            // SAFETY: not null, and the caller's to write to.
            unsafe { *(args.first().copied().unwrap_or(0) as *mut u64) = handle };
            memory::retained(handle, address);
            return Some(CUresult::CUDA_SUCCESS);
        }
        None
    }

    /// Calls that take a handle of physical memory, which may be a number of ours.
    pub(super) const fn takes_handle(symbol: Symbol) -> bool {
        matches!(
            symbol,
            Symbol::cuMemMap
                | Symbol::cuMemExportToShareableHandle
                | Symbol::cuMemGetAllocationPropertiesFromHandle
                | Symbol::cuMulticastBindMem
                | Symbol::cuMulticastBindMem_v2
                | Symbol::cuLogicalEndpointBindMem
        )
    }

    pub(super) fn translate(symbol: Symbol, words: &mut [usize]) {
        if residency::active() {
            residency::translate(symbol, words);
        }
    }

    /// Calls that may end a context.
    pub(super) const fn ends_context(symbol: Symbol) -> bool {
        use Symbol::*;
        matches!(
            symbol,
            cuCtxDestroy
                | cuCtxDestroy_v2
                | cuCtxDetach
                | cuDevicePrimaryCtxReset
                | cuDevicePrimaryCtxReset_v2
                | cuDevicePrimaryCtxRelease
                | cuDevicePrimaryCtxRelease_v2
        )
    }

    #[inline(always)]
    pub(super) fn before(symbol: Symbol) {
        if begins_capture(symbol) {
            // What was submitted so far is marked now: a stream that is captured is not marked any more.
            gate::before_sync();
            capture::before_begin();
        }
    }

    #[inline(always)]
    pub(super) fn after(symbol: Symbol, args: &[usize], result: CUresult) {
        if begins_capture(symbol) {
            capture::after_begin(result);
            return;
        }
        if ends_capture(symbol) {
            capture::after_end(result);
            return;
        }
        if !result.is_ok() || crate::client::current().is_none() {
            return;
        }
        let arg = |at: usize| args.get(at).copied().unwrap_or(0);
        if residency::active() {
            residency::noted(symbol, args);
        }
        match symbol {
            Symbol::cuMemExportToShareableHandle => {
                memory::exported(arg(1) as u64, arg(0), arg(2) as u32)
            }
            Symbol::cuMemMap => memory::mapped(arg(0) as u64, arg(1) as u64, arg(3) as u64),
            Symbol::cuMemRetainAllocationHandle => {
                // SAFETY: the driver has just written a handle there.
                let handle = unsafe { *(arg(0) as *const u64) };
                memory::retained(handle, arg(1) as u64);
            }
            Symbol::cuCtxEnablePeerAccess | Symbol::cuCtxDisablePeerAccess
                if residency::active() =>
            {
                let on = symbol as u16 == Symbol::cuCtxEnablePeerAccess as u16;
                residency::peers(context::here(), arg(0), on);
            }
            Symbol::cuPointerSetAttribute => {
                // CAST: an enumerator in the low half of its word.
                residency::set_attribute(arg(0), arg(1) as u32, arg(2) as u64);
            }
            Symbol::cuMemPoolCreate => {
                // SAFETY: the driver has just written a handle, after reading the properties.
                let (pool, properties) = unsafe {
                    (
                        *(arg(0) as *const CUmemoryPool),
                        &*(arg(1) as *const CUmemPoolProps),
                    )
                };
                memory::pool_created(pool, properties.location);
            }
            Symbol::cuGraphInstantiate
            | Symbol::cuGraphInstantiate_v2
            | Symbol::cuGraphInstantiateWithFlags
            | Symbol::cuGraphInstantiateWithParams
            | Symbol::cuGraphInstantiateWithParams_ptsz => {
                // SAFETY: the driver has just written a handle there.
                let exec = unsafe { *(arg(0) as *const usize) };
                let graph = CUgraph(arg(1) as *mut c_void);
                memory::instantiated(exec, graph);
                cost::graph_instantiated(exec, graph);
            }
            Symbol::cuGraphExecDestroy => {
                memory::exec_destroyed(arg(0));
                cost::graph_gone(arg(0));
            }
            Symbol::cuGraphExecUpdate | Symbol::cuGraphExecUpdate_v2 => {
                cost::graph_instantiated(arg(0), CUgraph(arg(1) as *mut c_void));
            }
            Symbol::cuGraphAddNode | Symbol::cuGraphAddNode_v2 | Symbol::cuGraphAddNode_v3 => {
                let parameters = if symbol as u16 == Symbol::cuGraphAddNode as u16 {
                    arg(4)
                } else {
                    arg(5)
                };
                // SAFETY: the driver has just read the structure.
                let kind = unsafe { (*(parameters as *const CUgraphNodeParams)).r#type };
                if kind == CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC {
                    memory::after_node();
                }
            }
            _ => {}
        }
    }

    /// What has nothing left to do afterwards: a stream, by its key, or (`Some(None)`) a whole context.
    #[inline(always)]
    pub(super) fn waited_for(symbol: Symbol, args: &[usize]) -> Option<Option<usize>> {
        let key = |default: usize| match args.first() {
            Some(0) | None => default,
            Some(stream) => *stream,
        };
        match symbol {
            Symbol::cuCtxSynchronize | Symbol::cuCtxSynchronize_v2 => Some(None),
            Symbol::cuStreamSynchronize => Some(Some(key(gate::LEGACY))),
            Symbol::cuStreamSynchronize_ptsz => Some(Some(key(gate::PER_THREAD))),
            _ => None,
        }
    }

    /// Queries: they never block, and programs poll them.
    pub(super) const fn only_asks(symbol: Symbol) -> bool {
        matches!(
            symbol,
            Symbol::cuStreamQuery
                | Symbol::cuStreamQuery_ptsz
                | Symbol::cuEventQuery
                | Symbol::cuEventElapsedTime
        )
    }

    /// Graph launches: rare, heavy, and what they allocate is charged when they are over.
    pub(super) const fn may_allocate(symbol: Symbol) -> bool {
        matches!(
            symbol,
            Symbol::cuGraphLaunch
                | Symbol::cuGraphLaunch_ptsz
                | Symbol::cuGraphUpload
                | Symbol::cuGraphUpload_ptsz
        )
    }
}
