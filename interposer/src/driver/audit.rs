//! The dynamic linker's audit interface (rtld-audit(7)), for `LD_AUDIT=libsublet.so`: an option,
//! because auditing costs every program start a millisecond or so.
//!
//! It reaches what a preload library cannot: a new link namespace, and a library that opens the
//! driver by path with `RTLD_DEEPBIND` before anything else in the process has asked for the
//! driver. A thread that looks for the driver, by name or by path, is given this library instead,
//! in the namespace that it looks in; except this library itself.
//!
//! This code runs in a copy of the library of its own, in the auditors' namespace, that never sees
//! a driver call.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver::elf::LinkMap;
use crate::driver::elf::holds;

/// Cookie of an object that is this library.
const OURS: usize = usize::MAX;
/// `LA_SER_ORIG`: the name as it was asked for.
const ORIGINAL: c_uint = 1;

/// Path of this library, as it was loaded.
static PATH: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());

/// Answers the version of the interface: the linker's own, of which the functions here are a part
/// since the first.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn la_version(version: c_uint) -> c_uint {
    // SAFETY: the callback matches the prototype.
    unsafe { libc::dl_iterate_phdr(Some(find_path), std::ptr::null_mut()) };
    version
}

unsafe extern "C" fn find_path(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    _data: *mut c_void,
) -> c_int {
    // SAFETY: the dynamic linker hands us a valid object description.
    let info = unsafe { &*info };
    if !holds(info, la_version as *const () as usize) {
        return 0;
    }
    PATH.store(info.dlpi_name.cast_mut(), Ordering::Release);
    1
}

fn path() -> Option<&'static CStr> {
    let path = PATH.load(Ordering::Acquire);
    // SAFETY: null, or the name of this library, which an auditor keeps as long as the process
    // lives.
    (!path.is_null()).then(|| unsafe { CStr::from_ptr(path) })
}

/// A library was loaded: marks copies of this one.
///
/// # Safety
/// As the dynamic linker calls it.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn la_objopen(map: *mut LinkMap, _lmid: isize, cookie: *mut usize) -> c_uint {
    if map.is_null() || cookie.is_null() {
        return 0;
    }
    // SAFETY: the linker's own description of the object, and its word for us.
    unsafe {
        let name = (*map).name;
        if !name.is_null() && path().is_some_and(|path| CStr::from_ptr(name) == path) {
            *cookie = OURS;
        }
    }
    // Bindings are nobody's business.
    0
}

/// A library is looked for by the object with this cookie.
///
/// # Safety
/// As the dynamic linker calls it.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn la_objsearch(
    name: *const c_char,
    cookie: *mut usize,
    flag: c_uint,
) -> *mut c_char {
    if name.is_null() || flag != ORIGINAL {
        return name.cast_mut();
    }
    // SAFETY: the name that is looked for, and the linker's word for us.
    let (wanted, by_us) = unsafe {
        (
            CStr::from_ptr(name).to_bytes(),
            !cookie.is_null() && *cookie == OURS,
        )
    };
    let file = wanted.rsplit(|byte| *byte == b'/').next().unwrap_or(wanted);
    match path() {
        Some(path) if !by_us && matches!(file, b"libcuda.so.1" | b"libcuda.so") => {
            path.as_ptr().cast_mut()
        }
        _ => name.cast_mut(),
    }
}
