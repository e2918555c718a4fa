//! The simulated GPU as `libcuda.so.1`: one exported symbol per row of the table, each a jump to its implementation in
//! `simgpu::api`, or to the answer "not supported", which is counted.

#![allow(non_snake_case, reason = "the driver's own names")]

use std::ffi::c_void;

use shim_ffi::{CUresult, Symbol};
use simgpu::api;

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
            // The resolver needs to know our exports; that is told once, before anybody can have an answer. The caller's
            // argument registers are kept meanwhile.
            core::arch::naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8",
                "call {prepare}",
                "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp {function}",
                prepare = sym prepare,
                function = sym api::$symbol,
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
            core::arch::naked_asm!("jmp {function}", function = sym api::$symbol)
        }
    };
    ($symbol:ident nosim) => {
        #[doc = concat!("`", stringify!($symbol), "`: not simulated.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $symbol() -> CUresult {
            simgpu::entry::unsupported(Symbol::$symbol)
        }
    };
}

macro_rules! exports {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $signature:tt;)*) => {
        $(export! { $symbol $sim })*

        fn address(symbol: Symbol) -> Option<*const c_void> {
            Some(match symbol {
                $(Symbol::$symbol => $symbol as *const c_void,)*
            })
        }
    };
}
shim_ffi::driver_table!(exports);

extern "C" fn prepare() {
    api::set_exports(address);
}
