//! The simulated GPU as `libcuda.so.1`: one exported symbol per row of the table, each a jump to
//! its implementation in `simgpu::api`, or to the answer "not supported", which is counted.

#![allow(non_snake_case, reason = "the driver's own names")]

use std::ffi::c_void;

use shim_ffi::counts::Counts;
use shim_ffi::{CUresult, Symbol};
use simgpu::{api, received};

/// Counts one call, where counting was asked for. Only the register that the ABI leaves to linkage
/// is touched.
macro_rules! count {
    () => {
        "mov r11, qword ptr [rip + {page}]
         test r11, r11
         je 3f
         lock inc qword ptr [r11 + {counter}]
         3:"
    };
}

/// One exported function: a jump, so that the signature is the implementation's business.
macro_rules! export {
    (cuGetProcAddress sim) => {
        export! { @resolver cuGetProcAddress }
    };
    (cuGetProcAddress_v2 sim) => {
        export! { @resolver cuGetProcAddress_v2 }
    };
    (@resolver $symbol:ident) => {
        #[doc = concat!("`", stringify!($symbol), "` of the driver API.")]
        ///
        /// # Safety
        /// As the driver API says.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $symbol() {
            // The resolver needs to know our exports; they are handed over once, before anybody can
            // have an answer. The caller's argument registers are kept meanwhile.
            core::arch::naked_asm!(
                count!(),
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8",
                "call {prepare}",
                "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp {function}",
                prepare = sym prepare,
                function = sym api::$symbol,
                page = sym received::PAGE,
                counter = const Counts::offset(Symbol::$symbol as usize),
            )
        }
    };
    ($symbol:ident sim) => {
        #[doc = concat!("`", stringify!($symbol), "` of the driver API.")]
        ///
        /// # Safety
        /// As the driver API says.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $symbol() {
            core::arch::naked_asm!(
                count!(),
                "jmp {function}",
                function = sym api::$symbol,
                page = sym received::PAGE,
                counter = const Counts::offset(Symbol::$symbol as usize),
            )
        }
    };
    ($symbol:ident nosim) => {
        #[doc = concat!("`", stringify!($symbol), "`: not simulated.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $symbol(first: usize) -> CUresult {
            received::count(Symbol::$symbol);
            simgpu::entry::not_simulated(Symbol::$symbol, first == 0)
        }
    };
}

macro_rules! exports {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $shape:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $traits:tt $signature:tt;)*) => {
        $(export! { $symbol $sim })*

        fn address(symbol: Symbol) -> Option<*const c_void> {
            Some(match symbol {
                $(Symbol::$symbol => $symbol as *const c_void,)*
            })
        }
    };
}
shim_ffi::driver_table!(exports);

/// What all times of the simulated devices are multiplied by, once the driver is initialised.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_simgpu_dilation() -> u32 {
    simgpu::clock::dilation()
}

extern "C" fn prepare() {
    api::set_exports(address);
}

/// Opens the page of received calls when the library is loaded, so that the first call is counted;
/// and takes as long for it as was asked for, under the loader's lock, as a large driver does.
extern "C" fn loaded() {
    simgpu::settings::load();
    received::begin();
}

#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;
