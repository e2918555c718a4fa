//! The safety net: the driver's own symbol table leads to us.
//!
//! A library that was opened with `RTLD_DEEPBIND` finds the C library's `dlsym` before ours; if it
//! has opened the driver by path as well, nothing of ours is asked. So, once the driver is open,
//! the values in its `.dynsym` are changed to our functions: a thread that looks a name up in it
//! finds us, by whatever `dlsym`. The driver itself is linked `-Bsymbolic` and does not look there.
//! What remains out of reach is such a library in a process that has not called the driver in any
//! other way before, and a new link namespace; [`crate::driver::audit`] reaches those.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use shim_ffi::Symbol;
use shim_ffi::counts::Note;

use crate::driver::elf::{Symbols, holds, segments};
use crate::driver::own::own;
use crate::driver::{addresses, trace};

/// Redirects every symbol of the table that the driver behind `handle` exports, and learns their
/// addresses on the way. On failure (a host that forbids changing the protection of pages) nothing
/// has changed. May be done again, and by several threads at once: the dynamic linker calls
/// [`visit`] for one at a time.
pub(crate) fn spread(handle: *mut c_void) {
    let symbol = Symbol::cuDriverGetVersion;
    let mut version = known(symbol).load(Ordering::Acquire);
    if version.is_null() {
        version = crate::driver::loader::real_dlsym(handle, symbol.entry().symbol);
    }
    if version == own(symbol) {
        // Another thread's net is being spread, and has noted the address before.
        version = known(symbol).load(Ordering::Acquire);
    }
    if version.is_null() {
        return;
    }
    let mut search = Search {
        inside: version as usize,
    };
    // SAFETY: the callback matches the prototype and its data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
}

struct Search {
    /// An address inside the driver.
    inside: usize,
}

unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    // SAFETY: the dynamic linker hands us a valid object description and our own data.
    let (info, search) = unsafe { (&*info, &*data.cast::<Search>()) };
    if !holds(info, search.inside) {
        return 0;
    }
    // SAFETY: the object is mapped while the dynamic linker iterates over it, and the driver is
    // never closed.
    if let Some(symbols) = unsafe { Symbols::of(info) } {
        let redirected = redirect(info, &symbols, |name| {
            let symbol = Symbol::from_name(name.to_bytes())?;
            Some((own(symbol), known(symbol)))
        });
        trace::notes(Note::Redirected, redirected);
    }
    1
}

/// Leads the functions of a library to ours: `own` tells for a name which is ours, and where the
/// library's own address is to be noted first. Returns how many were redirected.
pub(crate) fn redirect(
    info: &libc::dl_phdr_info,
    symbols: &Symbols,
    own: impl Fn(&CStr) -> Option<(*mut c_void, &'static AtomicPtr<c_void>)>,
) -> u64 {
    let (first, end) = symbols.span();
    let Some((_, _, flags)) = segments(info).find(|(from, to, _)| *from <= first && end <= *to)
    else {
        return 0;
    };
    let mut now = 0;
    for (flag, protection) in [
        (libc::PF_R, libc::PROT_READ),
        (libc::PF_W, libc::PROT_WRITE),
        (libc::PF_X, libc::PROT_EXEC),
    ] {
        if flags & flag != 0 {
            now |= protection;
        }
    }
    // PAGE: 4 KiB on x86-64.
    let from = first & !0xfff;
    let bytes = ((end + 0xfff) & !0xfff) - from;
    let protect = |protection| {
        // SAFETY: whole pages of the driver's segment, whose present protection is only added to;
        // other threads may run code of the same pages meanwhile.
        unsafe { libc::mprotect(from as *mut c_void, bytes, protection) == 0 }
    };
    if !protect(now | libc::PROT_WRITE) {
        return 0;
    }
    let mut redirected = 0;
    for (entry, name) in symbols.functions() {
        let Some((own, known)) = own(name) else {
            continue;
        };
        // SAFETY: a symbol in pages that are writable now. Other threads may read the value
        // meanwhile: they find the old one or the new one.
        let value = unsafe { AtomicU64::from_ptr((&raw const (*entry).st_value).cast_mut()) };
        let address = symbols
            .base
            .wrapping_add(value.load(Ordering::Relaxed) as usize);
        let own = own as usize;
        if address == own {
            continue;
        }
        known.store(address as *mut c_void, Ordering::Release);
        value.store(own.wrapping_sub(symbols.base) as u64, Ordering::Release);
        redirected += 1;
    }
    protect(now);
    redirected
}

fn known(symbol: Symbol) -> &'static AtomicPtr<c_void> {
    // PANIC: the enumeration and the array have the same length.
    &addresses::DRIVER[symbol as usize]
}
