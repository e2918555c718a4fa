//! Our own functions, by row of the table.
//!
//! They are expanded where everything that they call is known, at the top (`entry`); who swaps an
//! address needs them down here. So the linker says where the list of them is.

use std::ffi::c_void;

use shim_ffi::{COUNT, Symbol};

/// Address of a function of ours.
#[repr(transparent)]
pub(crate) struct Own(*const c_void);

// SAFETY: the address of code; never written.
unsafe impl Sync for Own {}

impl Own {
    pub(crate) const fn new(function: *const c_void) -> Self {
        Self(function)
    }
}

unsafe extern "C" {
    /// [`publish_own!`] defines it.
    safe static sublet_own: &'static [Own; COUNT];
}

/// Makes a static known as the list of our functions. Hidden, so that nobody but this library finds
/// it.
macro_rules! publish_own {
    ($list:ident) => {
        std::arch::global_asm!(
            ".section .data.rel.ro.sublet_own,\"aw\",@progbits",
            ".balign 8",
            ".globl sublet_own",
            ".hidden sublet_own",
            ".type sublet_own, @object",
            ".size sublet_own, 8",
            "sublet_own:",
            ".quad {list}",
            ".text",
            list = sym $list,
        );
    };
}
pub(crate) use publish_own;

/// Our function for `symbol`.
pub(crate) fn own(symbol: Symbol) -> *mut c_void {
    // PANIC: the enumeration and the list expand from the same rows.
    sublet_own[symbol as usize].0.cast_mut()
}
