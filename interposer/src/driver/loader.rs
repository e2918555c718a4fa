//! The dynamic linker: the C library's `dlopen` and `dlsym`, wherever the host has them.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver::elf::{self, Dynamic, LinkMap, Symbols};
use crate::ground::errno::Preserve;

/// The C library's own; null until [`find_real`].
pub(crate) static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
pub(crate) static REAL_DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
type Dlerror = unsafe extern "C" fn() -> *mut c_char;
type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// Opens a library by absolute path, with its symbols to itself. Null where that fails, without a
/// trace for `dlerror`.
pub(crate) fn open(path: &CStr) -> *mut c_void {
    open_as(path, libc::RTLD_NOW | libc::RTLD_LOCAL)
}

/// Opens a library by absolute path, with its symbols in the global scope, behind everybody else's.
/// Null as above.
pub(crate) fn open_for_all(path: &CStr) -> *mut c_void {
    open_as(path, libc::RTLD_NOW | libc::RTLD_GLOBAL)
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
    real_dlvsym(handle, name, std::ptr::null())
}

/// Finds the C library's `dlsym` and `dlvsym`.
///
/// A library that wraps functions of the C library may look them up before it can be called itself,
/// and to iterate over the objects by the C library's function would be such a call. So the dynamic
/// linker's list of them is read. It is before `main`, as a rule, and nobody unloads anything.
pub(crate) fn find_real() {
    if !REAL_DLSYM.load(Ordering::Acquire).is_null() {
        return;
    }
    let find = |name: &CStr| {
        let listed = in_listed_c_library(name);
        if listed.is_null() {
            in_c_library(name)
        } else {
            listed
        }
    };
    REAL_DLVSYM.store(find(c"dlvsym"), Ordering::Release);
    REAL_DLSYM.store(find(c"dlsym"), Ordering::Release);
}

unsafe extern "C" {
    /// The dynamic section of this library, by the linker.
    static _DYNAMIC: Dynamic;
}

/// A function of the C library, by the dynamic linker's list; null where that does not have it, or
/// has not us: then we are in another link namespace, with a C library of its own.
fn in_listed_c_library(name: &CStr) -> *mut c_void {
    let (mut next, mut own) = (elf::first_object(), false);
    let mut found: *mut c_void = std::ptr::null_mut();
    while !next.is_null() {
        // SAFETY: an object of the list, which none leaves meanwhile.
        let object = unsafe { &*next };
        next = object.next;
        own |= std::ptr::eq(object.section, &raw const _DYNAMIC);
        // SAFETY: names are NUL-terminated.
        if !found.is_null() || object.name.is_null() || !unsafe { is_c_library(object.name) } {
            continue;
        }
        // SAFETY: the object is mapped as the list says.
        if let Some(symbols) = unsafe { Symbols::at(object.address, object.section) } {
            found = symbols.find(name);
        }
    }
    if own { found } else { std::ptr::null_mut() }
}

/// Whether a file is the C library (which since 2.34 is all of it), libdl or libpthread.
///
/// # Safety
/// The name is NUL-terminated.
unsafe fn is_c_library(path: *const c_char) -> bool {
    const FILES: [&[u8]; 4] = [b"libc.so", b"libc-", b"libdl", b"libpthread"];
    // SAFETY: as the caller promises.
    let name = unsafe { CStr::from_ptr(path) }.to_bytes();
    let file = name.rsplit(|byte| *byte == b'/').next().unwrap_or(name);
    FILES.iter().any(|start| file.starts_with(start))
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

/// Looks into one loaded object, if it is one of the C library's.
unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    // SAFETY: the dynamic linker hands us a valid object description and our own data.
    let (info, search) = unsafe { (&*info, &mut *data.cast::<Search<'_>>()) };
    // SAFETY: a NUL-terminated name.
    if info.dlpi_name.is_null() || !unsafe { is_c_library(info.dlpi_name) } {
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

/// The same for a version of the symbol, by `dlvsym`; null: no one version, by `dlsym`.
pub(crate) fn real_dlvsym(handle: *mut c_void, name: &CStr, version: *const c_char) -> *mut c_void {
    let found = look_up(handle, name, version);
    if found.is_null() {
        forget_error();
    }
    found
}

/// The same for the program itself: where nothing is found, its `dlerror` says so.
pub(crate) fn look_up(handle: *mut c_void, name: &CStr, version: *const c_char) -> *mut c_void {
    find_real();
    let real = if version.is_null() {
        &REAL_DLSYM
    } else {
        &REAL_DLVSYM
    };
    let at = real.load(Ordering::Acquire);
    if at.is_null() {
        return at;
    }
    // SAFETY: the address of the C library's `dlsym` or `dlvsym`, with the caller's own arguments;
    // the name is NUL-terminated, and an explicit handle needs no return address.
    unsafe {
        if version.is_null() {
            std::mem::transmute::<*mut c_void, Dlsym>(at)(handle, name.as_ptr())
        } else {
            std::mem::transmute::<*mut c_void, Dlvsym>(at)(handle, name.as_ptr(), version)
        }
    }
}

/// The handle of this library, which a program holds that has opened the driver by its SONAME. Null
/// where the C library does not say.
pub(crate) fn own_handle() -> *mut c_void {
    type Dladdr1 =
        unsafe extern "C" fn(*const c_void, *mut libc::Dl_info, *mut *mut c_void, c_int) -> c_int;
    /// `RTLD_DL_LINKMAP`.
    const LINK_MAP: c_int = 2;
    static OWN: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let known = OWN.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    let at = in_c_library(c"dladdr1");
    if at.is_null() {
        return at;
    }
    let mut own = std::ptr::null_mut();
    // SAFETY: all zeros are a value of this structure; the C library's function of this name, with
    // an address of ours and valid pointers to locals.
    unsafe {
        let mut info = std::mem::zeroed::<libc::Dl_info>();
        let dladdr1 = std::mem::transmute::<*mut c_void, Dladdr1>(at);
        let inside = own_handle as *const c_void;
        if dladdr1(inside, &raw mut info, &raw mut own, LINK_MAP) == 0 {
            return std::ptr::null_mut();
        }
    }
    OWN.store(own, Ordering::Release);
    own
}

/// Whether `handle` is the program's own, as `dlopen` answers for no name: it stands for the global
/// scope.
///
/// # Safety
/// `handle` is one of the dynamic linker's.
pub(crate) unsafe fn is_program(handle: *mut c_void) -> bool {
    // SAFETY: as the caller promises; names are NUL-terminated, the program's is empty.
    unsafe {
        let name = (*handle.cast::<LinkMap>()).name;
        !name.is_null() && *name == 0
    }
}

/// Whether a loaded object is linked against the driver: without us it would have come with it.
/// Only objects of our own namespace are seen, and only where that is the program's.
pub(crate) fn driver_is_needed() -> bool {
    struct Asked {
        first: bool,
        needed: bool,
    }
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the dynamic linker hands us a valid object description and our own data; names
        // are NUL-terminated.
        let (info, asked) = unsafe { (&*info, &mut *data.cast::<Asked>()) };
        // SAFETY: as above.
        let named = unsafe { !info.dlpi_name.is_null() && *info.dlpi_name != 0 };
        if std::mem::take(&mut asked.first) && named {
            return 1;
        }
        // SAFETY: the object is mapped while the dynamic linker iterates over it.
        asked.needed = unsafe { elf::needs(info, c"libcuda.so.1") };
        c_int::from(asked.needed)
    }
    let mut asked = Asked {
        first: true,
        needed: false,
    };
    // SAFETY: the callback matches the prototype and its data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut asked).cast()) };
    asked.needed
}

/// Whether the object that holds `address` bears the driver's SONAME.
pub(crate) fn belongs_to_a_driver(address: *mut c_void) -> bool {
    in_a_driver(address, 0)
}

/// Whether `address` is code of an object that bears the driver's SONAME.
pub(crate) fn is_code_of_a_driver(address: *mut c_void) -> bool {
    in_a_driver(address, libc::PF_X)
}

/// Whether a segment with these flags of an object that bears the driver's SONAME holds `address`.
fn in_a_driver(address: *mut c_void, flags: u32) -> bool {
    struct Asked {
        address: usize,
        flags: u32,
        driver: bool,
    }
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the dynamic linker hands us a valid object description and our own data.
        let (info, asked) = unsafe { (&*info, &mut *data.cast::<Asked>()) };
        let segment =
            elf::segments(info).find(|(first, end, _)| (*first..*end).contains(&asked.address));
        let Some((_, _, flags)) = segment else {
            return 0;
        };
        // SAFETY: the object is mapped while the dynamic linker iterates over it.
        asked.driver = flags & asked.flags == asked.flags
            && unsafe { Symbols::of(info) }
                .is_some_and(|symbols| symbols.soname() == Some(c"libcuda.so.1"));
        1
    }
    let mut asked = Asked {
        address: address as usize,
        flags,
        driver: false,
    };
    // SAFETY: the callback matches the prototype and its data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut asked).cast()) };
    asked.driver
}
