//! `dlsym` and `dlvsym`, in front of the C library's.
//!
//! Programs that open the driver by another name than its SONAME hold a handle of the real library;
//! what they look up through it is swapped for ours here. Anything else must reach the C library's
//! function by a *jump*: `RTLD_NEXT` and `RTLD_DEFAULT` mean something relative to the caller's
//! return address.

use std::ffi::{CStr, c_char, c_void};

use shim_ffi::Symbol;
use shim_ffi::counts::Note;

use crate::driver::loader::{self, REAL_DLSYM, REAL_DLVSYM};
use crate::driver::own::own;
use crate::driver::{real, trace};
use crate::ground::errno::Preserve;
use crate::ground::thread::thread;
use crate::nvml;

/// In place of an address: the look-up has failed, and null is the answer.
const NOT_FOUND: *mut c_void = std::ptr::without_provenance_mut(1);

/// What a look-up of a function of the management library is to answer.
fn nvml_filter(
    function: shim_ffi::nvml::Function,
    handle: *mut c_void,
    name: &CStr,
    version: *const c_char,
) -> *mut c_void {
    let _errno = Preserve::new();
    let found = loader::real_dlvsym(handle, name, version);
    match nvml::answer(function, handle, name, found) {
        nvml::Answer::Pass => std::ptr::null_mut(),
        nvml::Answer::Own(own) => own,
        nvml::Answer::None => NOT_FOUND,
    }
}

/// What a look-up of `name` through `handle` is to answer, [`NOT_FOUND`], or null for "ask the C
/// library, by jumping there".
extern "C" fn filter(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    loader::find_real();
    let pass = std::ptr::null_mut();
    // RTLD_NEXT means to find somebody after the caller, or us by the ordinary search.
    if name.is_null() || handle == libc::RTLD_NEXT {
        return pass;
    }
    // SAFETY: the caller's name, NUL-terminated by the contract of `dlsym`.
    let name = unsafe { CStr::from_ptr(name) };
    if let Some(function) = shim_ffi::nvml::Function::from_name(name.to_bytes()) {
        return nvml_filter(function, handle, name, version);
    }
    // So does RTLD_DEFAULT find us. And what the driver's own constructors look up, while we open
    // it, they are to find.
    if handle.is_null() || thread().opening.get() {
        return pass;
    }
    let Some(symbol) = Symbol::from_name(name.to_bytes()) else {
        return if real::is_refused() {
            refused_filter(handle, name, version)
        } else {
            pass
        };
    };
    let _errno = Preserve::new();
    let found = loader::real_dlvsym(handle, name, version);
    if found.is_null() || !real::found() || found == own(symbol) {
        return pass;
    }
    // By address: only a driver's own function is ours to replace. Another library's function of
    // the same name stays as it is.
    if found == real::driver_address(symbol) {
        trace::note(Note::LookUps);
        own(symbol)
    } else if loader::belongs_to_a_driver(found) {
        // Another copy of the file. One process has one driver, and that is the one that its job
        // was given.
        trace::note(Note::SecondDriver);
        own(symbol)
    } else {
        pass
    }
}

/// What a look-up is to answer, in a process that is refused, for a name that we know nothing of: a
/// function of the driver is one that refuses.
fn refused_filter(handle: *mut c_void, name: &CStr, version: *const c_char) -> *mut c_void {
    let _errno = Preserve::new();
    let found = loader::real_dlvsym(handle, name, version);
    if !found.is_null() && name.to_bytes().starts_with(b"cu") && loader::belongs_to_a_driver(found)
    {
        return real::refused as *mut c_void;
    }
    std::ptr::null_mut()
}

/// A look-up: what the filter answers, or a jump to the C library's function. `$keep` keeps the
/// arguments on the stack, which is aligned then, and puts the version where the filter expects it;
/// `$give_back` takes them from there.
macro_rules! look_up {
    ($symbol:ident($($arg:ident: $ty:ty),*) $real:ident [$($keep:literal)*] [$($give_back:literal)*]) => {
        #[doc = concat!("In front of the C library's `", stringify!($symbol), "`.")]
        ///
        /// # Safety
        /// As the C library says; every argument is passed on as it came.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> *mut c_void {
            std::arch::naked_asm!(
                $($keep,)*
                "call {filter}",
                $($give_back,)*
                "test rax, rax",
                "jne 2f",
                "mov rax, qword ptr [rip + {real}]",
                "test rax, rax",
                "je 2f",
                "jmp rax",
                "2: cmp rax, 1",
                "jne 3f",
                "xor eax, eax",
                "3: ret",
                filter = sym filter,
                real = sym $real,
            )
        }
    };
}

look_up! {
    dlsym(handle: *mut c_void, name: *const c_char) REAL_DLSYM
    ["push rdi" "push rsi" "sub rsp, 8" "xor edx, edx"]
    ["add rsp, 8" "pop rsi" "pop rdi"]
}

look_up! {
    dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) REAL_DLVSYM
    ["push rdi" "push rsi" "push rdx"]
    ["pop rdx" "pop rsi" "pop rdi"]
}
