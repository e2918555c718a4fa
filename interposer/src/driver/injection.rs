//! A second entry, by the driver's own hand: `CUDA_INJECTION64_PATH=libsublet.so`.
//!
//! The driver loads the library that this variable names, and calls its `InitializeInjection`,
//! inside `cuInit`. Where a program has lost `LD_PRELOAD` but kept the rest of its environment,
//! that is how we get in after all: the driver's symbol table leads to us from then on
//! ([`crate::driver::net`]), and so do the calls of libraries that are linked against the driver.
//! Function pointers that a program has asked for *before* `cuInit`, as NVIDIA's runtime does, stay
//! the driver's.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use shim_ffi::Symbol;
use shim_ffi::counts::Note;

use crate::driver::elf::{Symbols, filled_words, holds, sealed};
use crate::driver::own::own;
use crate::driver::{real, trace};

/// Whether we were called, and have not attached since.
static DUE: AtomicBool = AtomicBool::new(false);

/// What the driver calls, once. Answers 1, for "go on".
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn InitializeInjection() -> c_int {
    let _errno = crate::ground::errno::Preserve::new();
    let _ = std::panic::catch_unwind(|| {
        if real::found() {
            trace::note(Note::Injected);
            // SAFETY: the callback matches the prototype.
            unsafe { libc::dl_iterate_phdr(Some(visit), std::ptr::null_mut()) };
            DUE.store(true, Ordering::Release);
        }
    });
    1
}

/// Whether an attachment is due, to whom asks first: it was the driver that called us, and so no
/// `cuInit` of ours will attach. To be asked not from within the driver's, but before the first
/// context.
#[inline]
pub(crate) fn take_due() -> bool {
    DUE.load(Ordering::Relaxed) && DUE.swap(false, Ordering::AcqRel)
}

/// Leads one object's calls of the driver to us.
unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    _data: *mut c_void,
) -> c_int {
    // SAFETY: the dynamic linker hands us a valid object description.
    let info = unsafe { &*info };
    let ours = InitializeInjection as *const () as usize;
    let driver = real::driver_address(Symbol::cuDriverGetVersion) as usize;
    if holds(info, ours) || holds(info, driver) {
        return 0;
    }
    // SAFETY: the object is mapped while the dynamic linker iterates over it.
    if let Some(symbols) = unsafe { Symbols::of(info) } {
        // SAFETY: as above; the symbols are the object's own.
        unsafe { filled_words(info, &symbols, |at, name| redirect(info, at, name)) };
    }
    0
}

fn redirect(info: &libc::dl_phdr_info, at: usize, name: &CStr) {
    let Some(symbol) = Symbol::from_name(name.to_bytes()) else {
        return;
    };
    // SAFETY: a word that the dynamic linker has filled, aligned as it fills them.
    let word = unsafe { AtomicPtr::from_ptr(at as *mut *mut c_void) };
    if word.load(Ordering::Acquire) != real::driver_address(symbol) {
        return;
    }
    let is_sealed = sealed(info).is_some_and(|(first, end)| (first..end).contains(&at));
    let protect = |protection| {
        // PAGE: 4 KiB on x86-64. A word does not cross pages.
        // SAFETY: a page of the object's data.
        unsafe { libc::mprotect((at & !0xfff) as *mut c_void, 0x1000, protection) == 0 }
    };
    if is_sealed && !protect(libc::PROT_READ | libc::PROT_WRITE) {
        return;
    }
    word.store(own(symbol), Ordering::Release);
    if is_sealed {
        protect(libc::PROT_READ);
    }
    trace::note(Note::Redirected);
}
