//! `dlsym` and `dlvsym`, in front of the C library's.
//!
//! Programs that open the driver by another name than its SONAME hold a handle of the real library;
//! what they look up through it is swapped for ours here. Programs that open it by its SONAME hold
//! a handle of ours: what they look up through that is answered as the real library answers, which
//! has names that we do not know, and may lack names that we have. Anything else must reach the C
//! library's function by a *jump*: `RTLD_NEXT` and `RTLD_DEFAULT` mean something relative to the
//! caller's return address.

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
    if name.is_null() {
        return pass;
    }
    // SAFETY: the caller's name, NUL-terminated by the contract of `dlsym`.
    let name = unsafe { CStr::from_ptr(name) };
    // RTLD_NEXT means to find somebody after the caller, or us by the ordinary search; the driver
    // itself where the program has begun with it.
    if handle == libc::RTLD_NEXT {
        if may_be_newer(name) && !thread().opening.get() && !real::is_open() {
            let _errno = Preserve::new();
            let _ = loader::driver_is_needed() && real::found();
        }
        return pass;
    }
    // What the driver's own constructors look up, while we open it, they are to find.
    let opening = thread().opening.get();
    if !handle.is_null() && handle == loader::own_handle() && !opening {
        return own_filter(name, version);
    }
    if let Some(function) = shim_ffi::nvml::Function::from_name(name.to_bytes()) {
        return nvml_filter(function, handle, name, version);
    }
    if opening {
        return pass;
    }
    let Some(symbol) = Symbol::from_name(name.to_bytes()) else {
        return unknown_filter(handle, name, version);
    };
    let _errno = Preserve::new();
    if handle.is_null() {
        return default_filter(symbol, name, version);
    }
    let found = loader::real_dlvsym(handle, name, version);
    if found.is_null() || !real::found() {
        return pass;
    }
    if found == own(symbol) {
        return lacking(symbol, name);
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

/// What a look-up is to answer that finds our function for `symbol`: that, or where the driver
/// lacks it, that there is none.
fn lacking(symbol: Symbol, name: &CStr) -> *mut c_void {
    if real::exported(symbol) {
        return std::ptr::null_mut();
    }
    loader::fail_to_find(name);
    NOT_FOUND
}

/// A look-up of `symbol` by `RTLD_DEFAULT`, which finds us. It is no reason to open a driver,
/// except where the program would have begun with it.
fn default_filter(symbol: Symbol, name: &CStr, version: *const c_char) -> *mut c_void {
    let pass = std::ptr::null_mut();
    if !real::is_open() && !loader::driver_is_needed() {
        return pass;
    }
    let found = loader::real_dlvsym(libc::RTLD_DEFAULT, name, version);
    if found != own(symbol) || !real::found() {
        return pass;
    }
    lacking(symbol, name)
}

/// A look-up through our own handle, as a program has it that has opened the driver by its SONAME:
/// answered by the driver's library, and where nothing is found, its error is the driver's too.
fn own_filter(name: &CStr, version: *const c_char) -> *mut c_void {
    let _errno = Preserve::new();
    let bytes = name.to_bytes();
    // What programs ask us for, and what the driver would have from the C library.
    let ours = bytes.starts_with(b"sublet_") || matches!(bytes, b"dlsym" | b"dlvsym");
    if ours || !real::found() {
        return std::ptr::null_mut();
    }
    let found = real::look_up(name, version);
    if found.is_null() {
        return NOT_FOUND;
    }
    Symbol::from_name(bytes).map_or_else(|| governed(found), own)
}

/// Whether the name may be one of a driver's that is newer than our table: all that drivers export
/// begins so, and all other look-ups go on unhindered.
fn may_be_newer(name: &CStr) -> bool {
    let bytes = name.to_bytes();
    bytes.starts_with(b"cu") && Symbol::from_name(bytes).is_none()
}

/// A look-up of a name that we know nothing of, in the global scope, or through the handle of a
/// library that may be linked against the driver: where we are found, the driver would be.
fn unknown_filter(handle: *mut c_void, name: &CStr, version: *const c_char) -> *mut c_void {
    let pass = std::ptr::null_mut();
    if !may_be_newer(name) {
        return pass;
    }
    let _errno = Preserve::new();
    let found = loader::real_dlvsym(handle, name, version);
    if !found.is_null() {
        let governed = governed(found);
        return if governed == found { pass } else { governed };
    }
    // SAFETY: the C library has just looked something up through this handle.
    let global = handle.is_null() || unsafe { loader::is_program(handle) };
    let visible = if global {
        real::is_open() || loader::driver_is_needed()
    } else {
        loader::real_dlsym(handle, c"sublet_version") == super::sublet_version as *mut c_void
    };
    if !visible || !real::found() {
        return pass;
    }
    let found = real::look_up(name, version);
    if !found.is_null() {
        return governed(found);
    }
    // The caller's own scope may have it still.
    if global { pass } else { NOT_FOUND }
}

/// What was found for a name that we know nothing of, as this process may have it: where the
/// process is refused, a function of the driver's is one that refuses.
fn governed(found: *mut c_void) -> *mut c_void {
    if real::is_refused() && loader::is_code_of_a_driver(found) {
        real::refused as *mut c_void
    } else {
        found
    }
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
