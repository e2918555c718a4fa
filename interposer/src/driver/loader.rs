//! The dynamic linker: the real `dlsym`, and ours in front of it.
//!
//! Programs that open the driver by another name than its SONAME hold a handle of the real library;
//! what they look up through it is swapped for ours here. Anything else must reach the C library's
//! `dlsym` by a *jump*: `RTLD_NEXT` and `RTLD_DEFAULT` mean something relative to the caller's
//! return address.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use shim_ffi::Symbol;
use shim_ffi::counts::Note;

use crate::driver::elf::{self, Symbols};
use crate::driver::{real, trace};
use crate::entry as exports;
use crate::ground::errno::Preserve;
use crate::ground::thread::thread;
use crate::nvml;

static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static REAL_DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
type Dlerror = unsafe extern "C" fn() -> *mut c_char;
type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// Opens a library by absolute path, with its symbols to itself. Null where that fails, without a
/// trace for `dlerror`.
pub(crate) fn open(path: &CStr) -> *mut c_void {
    open_as(path, libc::RTLD_NOW | libc::RTLD_LOCAL)
}

/// A handle of a library that is loaded already, by its SONAME, or null. Nothing is searched for on
/// disk.
pub(crate) fn loaded(soname: &CStr) -> *mut c_void {
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the dynamic linker hands us a valid object description and our own data; names
        // are NUL-terminated.
        let (name, soname) = unsafe {
            let name = (*info).dlpi_name;
            if name.is_null() {
                return 0;
            }
            (
                CStr::from_ptr(name).to_bytes(),
                (*data.cast::<&CStr>()).to_bytes(),
            )
        };
        c_int::from(name.rsplit(|byte| *byte == b'/').next() == Some(soname))
    }
    let mut sought = soname;
    // SAFETY: the callback matches the prototype and its data outlives the call.
    if unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut sought).cast()) } == 0 {
        return std::ptr::null_mut();
    }
    open_as(
        soname,
        libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NOLOAD,
    )
}

fn open_as(name: &CStr, flags: c_int) -> *mut c_void {
    let mut at = in_c_library(c"dlopen");
    if at.is_null() {
        // Before glibc 2.34 it is in libdl, which a program need not have; the C library can always
        // load it.
        let load = in_c_library(c"__libc_dlopen_mode");
        if load.is_null() {
            return at;
        }
        // FLAG: __RTLD_DLOPEN.
        let dlopen_flags = libc::RTLD_NOW | i32::MIN;
        // SAFETY: the C library's own function, as its name service calls it: a name and flags.
        unsafe {
            std::mem::transmute::<*mut c_void, Dlopen>(load)(c"libdl.so.2".as_ptr(), dlopen_flags)
        };
        at = in_c_library(c"dlopen");
        if at.is_null() {
            return at;
        }
    }
    // SAFETY: the C library's `dlopen`, with a NUL-terminated name. The library's constructors run,
    // as they would for the program itself.
    let handle = unsafe { std::mem::transmute::<*mut c_void, Dlopen>(at)(name.as_ptr(), flags) };
    if handle.is_null() {
        forget_error();
    }
    handle
}

/// Clears the error that a look-up of our own has left for the program's next `dlerror`.
fn forget_error() {
    let at = in_c_library(c"dlerror");
    if !at.is_null() {
        // SAFETY: the C library's `dlerror`.
        unsafe { std::mem::transmute::<*mut c_void, Dlerror>(at)() };
    }
}

/// `dlsym` of the C library, for handles (not for `RTLD_NEXT`, which would mean next after us).
pub(crate) fn real_dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    find_real();
    let at = REAL_DLSYM.load(Ordering::Acquire);
    if at.is_null() {
        return at;
    }
    // SAFETY: the address of the C library's `dlsym`; the name is NUL-terminated.
    let found = unsafe { std::mem::transmute::<*mut c_void, Dlsym>(at)(handle, name.as_ptr()) };
    if found.is_null() {
        forget_error();
    }
    found
}

fn find_real() {
    if !REAL_DLSYM.load(Ordering::Acquire).is_null() {
        return;
    }
    REAL_DLVSYM.store(in_c_library(c"dlvsym"), Ordering::Release);
    REAL_DLSYM.store(in_c_library(c"dlsym"), Ordering::Release);
}

struct Search<'a> {
    name: &'a CStr,
    found: *mut c_void,
}

/// A function of the C library, wherever the host has it, or null.
pub(crate) fn in_c_library(name: &CStr) -> *mut c_void {
    let _errno = Preserve::new();
    let mut search = Search {
        name,
        found: std::ptr::null_mut(),
    };
    // SAFETY: the callback matches the prototype and its data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

/// Looks into one loaded object: the C library (which since 2.34 is all of it), libdl or
/// libpthread.
unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    const FILES: [&[u8]; 4] = [b"libc.so", b"libc-", b"libdl", b"libpthread"];
    // SAFETY: the dynamic linker hands us a valid object description and our own data.
    let (info, search) = unsafe { (&*info, &mut *data.cast::<Search<'_>>()) };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: a NUL-terminated name.
    let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    let file = name.rsplit(|byte| *byte == b'/').next().unwrap_or(name);
    if !FILES.iter().any(|start| file.starts_with(start)) {
        return 0;
    }
    // SAFETY: the object is mapped while the dynamic linker iterates over it.
    if let Some(symbols) = unsafe { Symbols::of(info) } {
        search.found = symbols.find(search.name);
    }
    c_int::from(!search.found.is_null())
}

/// Fails a look-up of `name` through the C library, so that `dlerror` has something to say. The
/// name of the object that it mentions is the C library's and not the caller's.
pub(crate) fn fail_to_find(name: &CStr) {
    find_real();
    let (open, look_up) = (in_c_library(c"dlopen"), REAL_DLSYM.load(Ordering::Acquire));
    if open.is_null() || look_up.is_null() {
        return;
    }
    // SAFETY: the C library's `dlopen` and `dlsym`; its own SONAME, which is loaded, and a
    // NUL-terminated name.
    unsafe {
        let open = std::mem::transmute::<*mut c_void, Dlopen>(open);
        let handle = open(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if !handle.is_null() {
            std::mem::transmute::<*mut c_void, Dlsym>(look_up)(handle, name.as_ptr());
        }
    }
}

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
    let found = if version.is_null() {
        real_dlsym(handle, name)
    } else {
        versioned(handle, name, version)
    };
    match nvml::answer(function, handle, name, found) {
        nvml::Answer::Pass => std::ptr::null_mut(),
        nvml::Answer::Own(own) => own,
        nvml::Answer::None => NOT_FOUND,
    }
}

/// `dlvsym` of the C library, for handles.
fn versioned(handle: *mut c_void, name: &CStr, version: *const c_char) -> *mut c_void {
    let at = REAL_DLVSYM.load(Ordering::Acquire);
    if at.is_null() {
        return at;
    }
    // SAFETY: the C library's `dlvsym` with the caller's own arguments; an explicit handle needs no
    // return address.
    let found =
        unsafe { std::mem::transmute::<*mut c_void, Dlvsym>(at)(handle, name.as_ptr(), version) };
    if found.is_null() {
        forget_error();
    }
    found
}

/// What a look-up of `name` through `handle` is to answer, [`NOT_FOUND`], or null for "ask the C
/// library, by jumping there".
extern "C" fn filter(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    find_real();
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
    let found = if version.is_null() {
        real_dlsym(handle, name)
    } else {
        versioned(handle, name, version)
    };
    if found.is_null() || !real::found() || found == exports::own(symbol) {
        return pass;
    }
    // By address: only a driver's own function is ours to replace. Another library's function of
    // the same name stays as it is.
    if found == real::driver_address(symbol) {
        trace::note(Note::LookUps);
        exports::own(symbol)
    } else if belongs_to_a_driver(found) {
        // Another copy of the file. One process has one driver, and that is the one that its job
        // was given.
        trace::note(Note::SecondDriver);
        exports::own(symbol)
    } else {
        pass
    }
}

/// What a look-up is to answer, in a process that is refused, for a name that we know nothing of: a
/// function of the driver is one that refuses.
fn refused_filter(handle: *mut c_void, name: &CStr, version: *const c_char) -> *mut c_void {
    let _errno = Preserve::new();
    let found = if version.is_null() {
        real_dlsym(handle, name)
    } else {
        versioned(handle, name, version)
    };
    if !found.is_null() && name.to_bytes().starts_with(b"cu") && belongs_to_a_driver(found) {
        return real::refused as *mut c_void;
    }
    std::ptr::null_mut()
}

/// Whether the object that holds `address` bears the driver's SONAME.
fn belongs_to_a_driver(address: *mut c_void) -> bool {
    struct Asked {
        address: usize,
        driver: bool,
    }
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the dynamic linker hands us a valid object description and our own data.
        let (info, asked) = unsafe { (&*info, &mut *data.cast::<Asked>()) };
        if !elf::holds(info, asked.address) {
            return 0;
        }
        // SAFETY: the object is mapped while the dynamic linker iterates over it.
        asked.driver = unsafe { Symbols::of(info) }
            .is_some_and(|symbols| symbols.soname() == Some(c"libcuda.so.1"));
        1
    }
    let mut asked = Asked {
        address: address as usize,
        driver: false,
    };
    // SAFETY: the callback matches the prototype and its data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut asked).cast()) };
    asked.driver
}

/// In front of the C library's `dlsym`.
///
/// # Safety
/// As the C library says; every argument is passed on as it came.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "xor edx, edx",
        "call {filter}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
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
        real = sym REAL_DLSYM,
    )
}

/// In front of the C library's `dlvsym`.
///
/// # Safety
/// As the C library says; every argument is passed on as it came.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {filter}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
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
        real = sym REAL_DLVSYM,
    )
}
