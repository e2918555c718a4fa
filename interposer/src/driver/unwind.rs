//! The unwinder, found when it is first needed.
//!
//! The standard library needs `libgcc_s` for panics, which do not happen, and for what the host
//! unwinds through us: cancelled threads, exceptions of callbacks. As a needed library it is mapped
//! and relocated in every program that we are loaded into; that is half of what our loading costs.
//! So its functions are defined here, unseen by others: each jumps to the process's own one. They
//! are looked up when the driver is opened, where the process has an unwinder by then; else by the
//! first call, which opens it. A linked copy would not do: what the host's unwinder hands to our
//! personality routine must go back to that same unwinder.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver::loader;
use crate::ground::errno::Preserve;

/// As the standard library refers to them, in the order of the slots.
const NAMES: [&CStr; 12] = [
    c"_Unwind_Backtrace",
    c"_Unwind_DeleteException",
    c"_Unwind_GetDataRelBase",
    c"_Unwind_GetIP",
    c"_Unwind_GetIPInfo",
    c"_Unwind_GetLanguageSpecificData",
    c"_Unwind_GetRegionStart",
    c"_Unwind_GetTextRelBase",
    c"_Unwind_RaiseException",
    c"_Unwind_Resume",
    c"_Unwind_SetGR",
    c"_Unwind_SetIP",
];

static SLOTS: [AtomicPtr<c_void>; NAMES.len()] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; NAMES.len()];

/// Answers where there is no unwinder. 5 is `_URC_END_OF_STACK`: nobody catches.
extern "C" fn missing() -> i32 {
    5
}

const LIBRARY: &CStr = c"libgcc_s.so.1";

/// Looks every function up if the process has an unwinder already: unwinding may begin on a small
/// stack.
pub(crate) fn prepare() {
    let library = loader::loaded(LIBRARY);
    if library.is_null() {
        return;
    }
    for (name, slot) in NAMES.iter().zip(&SLOTS) {
        let at = find(name, library);
        if !at.is_null() {
            slot.store(at, Ordering::Release);
        }
    }
}

/// As the dynamic linker would have bound it, or in `library` if that is not null.
fn find(name: &CStr, library: *mut c_void) -> *mut c_void {
    let at = loader::real_dlsym(libc::RTLD_DEFAULT, name);
    if at.is_null() && !library.is_null() {
        return loader::real_dlsym(library, name);
    }
    at
}

extern "C" fn bind(index: u32) -> *mut c_void {
    let _errno = Preserve::new();
    let Some((name, slot)) = NAMES.get(index as usize).zip(SLOTS.get(index as usize)) else {
        return missing as *mut c_void;
    };
    let mut at = find(name, loader::open(LIBRARY));
    if at.is_null() {
        at = missing as *mut c_void;
    }
    slot.store(at, Ordering::Release);
    at
}

// A jump leaves the frame of a thread that calls as the one that the unwinder begins with.
#[cfg(not(test))]
std::arch::global_asm!(
    ".text",
    ".macro sublet_unwind name, index",
    ".globl \\name",
    ".hidden \\name",
    ".type \\name, @function",
    "\\name:",
    "mov rax, qword ptr [rip + {slots} + 8 * \\index]",
    "test rax, rax",
    "je 2f",
    "jmp rax",
    "2: mov eax, \\index",
    "jmp sublet_unwind_bind",
    ".size \\name, . - \\name",
    ".endm",
    "sublet_unwind _Unwind_Backtrace, 0",
    "sublet_unwind _Unwind_DeleteException, 1",
    "sublet_unwind _Unwind_GetDataRelBase, 2",
    "sublet_unwind _Unwind_GetIP, 3",
    "sublet_unwind _Unwind_GetIPInfo, 4",
    "sublet_unwind _Unwind_GetLanguageSpecificData, 5",
    "sublet_unwind _Unwind_GetRegionStart, 6",
    "sublet_unwind _Unwind_GetTextRelBase, 7",
    "sublet_unwind _Unwind_RaiseException, 8",
    "sublet_unwind _Unwind_Resume, 9",
    "sublet_unwind _Unwind_SetGR, 10",
    "sublet_unwind _Unwind_SetIP, 11",
    ".purgem sublet_unwind",
    // Row eax is looked up with the arguments kept: pointers and integers, three at most.
    "sublet_unwind_bind:",
    "push rdi",
    "push rsi",
    "push rdx",
    "mov edi, eax",
    "call {bind}",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "jmp rax",
    slots = sym SLOTS,
    bind = sym bind,
);
