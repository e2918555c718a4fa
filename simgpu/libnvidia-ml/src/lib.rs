//! The simulated GPU's management library as `libnvidia-ml.so.1`.

#![allow(non_snake_case, reason = "NVML's own names")]

mod table;

use simgpu::nvml;

macro_rules! export {
    ($symbol:ident sim) => {
        #[doc = concat!("`", stringify!($symbol), "` of NVML.")]
        ///
        /// # Safety
        /// As NVML says.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $symbol() {
            core::arch::naked_asm!("jmp {function}", function = sym nvml::$symbol)
        }
    };
    ($symbol:ident nosim) => {
        #[doc = concat!("`", stringify!($symbol), "`: not simulated.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $symbol() -> nvml::Status {
            nvml::unsupported(stringify!($symbol))
        }
    };
}

macro_rules! exports {
    ($($symbol:ident $sim:ident;)*) => { $(export! { $symbol $sim })* };
}
table::nvml_table!(exports);

/// The mark by which a reader of NVML tells simulated devices from real ones, wherever it found the
/// library.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_simgpu() -> nvml::Status {
    nvml::Status::NOT_SUPPORTED
}

/// What all times of the simulated devices are multiplied by; 0: not known.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_simgpu_dilation() -> u32 {
    nvml::dilation()
}

/// What a turn from one process to another costs on the simulated devices, in ns.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_simgpu_turn_ns() -> u64 {
    nvml::turn_ns()
}
