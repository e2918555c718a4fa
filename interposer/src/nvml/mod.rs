//! The management library (NVML), where the program itself has loaded it: what it says of memory
//! and processes agrees with the job's quota.
//!
//! We never load it. Programs reach us in three ways, for the functions of `nvml_table!` alone:
//!
//! * by looking one up (`dlsym`, in [`crate::driver::loader`]): the answer is swapped for ours, by
//!   address;
//! * by being linked against the library: we export the functions ([`hooks`]), and come first in
//!   the search order;
//! * by the library's own symbol table, which leads to us once we have seen the library (as
//!   [`crate::driver::net`] does for the driver).
//!
//! An export that is not the library's must not be found by a program that asks whether there is
//! one: [`answer`].

mod hooks;
mod quota;
mod reader;

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use shim_ffi::nvml::{FUNCTIONS, Function, SONAME};

use crate::driver::elf::{self, Symbols};
use crate::driver::{loader, net};

const COUNT: usize = FUNCTIONS.len();

/// The library's own functions; null until it was seen.
static REAL: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];

/// What we ask of it ourselves.
#[derive(Clone, Copy)]
enum Helper {
    Uuid,
    Count,
    ByIndex,
}

/// Their names, by their numbers.
const HELPERS: [&CStr; 3] = [
    c"nvmlDeviceGetUUID",
    c"nvmlDeviceGetCount_v2",
    c"nvmlDeviceGetHandleByIndex_v2",
];
static HELP: [AtomicPtr<c_void>; HELPERS.len()] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; HELPERS.len()];

/// What a look-up is to be answered.
pub(crate) enum Answer {
    /// What the C library says.
    Pass,
    /// Our function.
    Own(*mut c_void),
    /// That there is none; the C library's error is set.
    None,
}

/// Answers a look-up of `function` through `handle`, in which the C library has found `found`.
pub(crate) fn answer(
    function: Function,
    handle: *mut c_void,
    name: &CStr,
    found: *mut c_void,
) -> Answer {
    let own = hooks::own(function);
    if found.is_null() {
        return Answer::Pass;
    }
    if found != own {
        return if adopt(found) {
            Answer::Own(own)
        } else {
            Answer::Pass
        };
    }
    // Ours: because the library's symbol table leads to us, or because we export the name. It
    // counts where a thread that asks could have found the library; that is reported by a function
    // which we do not export.
    let sibling = if handle.is_null() {
        // The next one in the global order, after us.
        loader::real_dlsym(libc::RTLD_NEXT, name)
    } else {
        loader::real_dlsym(handle, c"nvmlInit_v2")
    };
    if !sibling.is_null() {
        if handle.is_null() && sibling != own && !adopt(sibling) {
            return Answer::Own(sibling); // somebody else's function of that name
        }
        return Answer::Own(own);
    }
    loader::fail_to_find(name);
    Answer::None
}

/// Where the library is loaded already, leads its symbol table to us: for those who look it up past
/// our `dlsym`.
pub(crate) fn meet() {
    if REAL
        .iter()
        .all(|real| real.load(Ordering::Acquire).is_null())
        && let Some(library) = Library::loaded()
    {
        library.spread();
    }
}

/// Whether `found` is a function of the library that this process uses; the library is redirected
/// to us if it was not yet.
fn adopt(found: *mut c_void) -> bool {
    if REAL
        .iter()
        .any(|real| real.load(Ordering::Acquire) == found)
    {
        return true;
    }
    // One process has one such library. Another copy's handles are its own, so it is left alone;
    // but a program may close the library, and open it again elsewhere.
    let known = REAL
        .iter()
        .map(|real| real.load(Ordering::Acquire))
        .find(|real| !real.is_null());
    if known.is_some_and(|known| Library::holding(known).is_some()) {
        return false;
    }
    let Some(library) = Library::holding(found) else {
        return false;
    };
    library.spread();
    REAL.iter()
        .any(|real| real.load(Ordering::Acquire) == found)
}

/// The library's function, or null where it lacks it, or there is no library.
fn real(function: Function) -> *mut c_void {
    // PANIC: the array has a place for every function.
    let at = REAL[function as usize].load(Ordering::Acquire);
    if at.is_null() { bind(function) } else { at }
}

/// Finds the library for a program that is linked against it: the next in the search order after
/// us, or where the program's part is not in the global scope, the one that is loaded.
#[cold]
fn bind(function: Function) -> *mut c_void {
    let _errno = crate::ground::errno::Preserve::new();
    // PANIC: the table has a row for every function.
    let place = &REAL[function as usize];
    let Ok(name) = std::ffi::CString::new(FUNCTIONS[function as usize].1) else {
        return std::ptr::null_mut();
    };
    let next = loader::real_dlsym(libc::RTLD_NEXT, &name);
    if next != hooks::own(function) && !next.is_null() {
        if !adopt(next) {
            // A stand-in of the program's own.
            place.store(next, Ordering::Release);
        }
    } else if let Some(library) = Library::loaded() {
        library.spread();
    }
    place.load(Ordering::Acquire)
}

fn helper(helper: Helper) -> *mut c_void {
    // PANIC: the array has a place for every helper.
    HELP[helper as usize].load(Ordering::Acquire)
}

/// An object that bears the library's SONAME.
struct Library {
    /// An address inside it.
    inside: usize,
}

/// What is looked for among the loaded objects.
struct Search {
    /// An address that it holds; 0: any.
    inside: usize,
    found: bool,
}

impl Library {
    /// The one that holds `address`.
    fn holding(address: *mut c_void) -> Option<Self> {
        Self::search(address as usize)
    }

    /// Any that is loaded.
    fn loaded() -> Option<Self> {
        Self::search(0)
    }

    fn search(inside: usize) -> Option<Self> {
        let mut search = Search {
            inside,
            found: false,
        };
        // SAFETY: the callback matches the prototype and its data outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
        search.found.then_some(Self {
            inside: search.inside,
        })
    }

    /// Learns its functions, and leads its symbol table to ours.
    fn spread(&self) {
        let mut inside = self.inside;
        // SAFETY: the callback matches the prototype and its data outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(redirect), (&raw mut inside).cast()) };
    }
}

unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    // SAFETY: the dynamic linker hands us a valid object description and our own data.
    let (info, search) = unsafe { (&*info, &mut *data.cast::<Search>()) };
    if search.inside != 0 && !elf::holds(info, search.inside) {
        return 0;
    }
    // SAFETY: the object is mapped while the dynamic linker iterates over it.
    let named =
        unsafe { Symbols::of(info) }.is_some_and(|symbols| symbols.soname() == Some(SONAME));
    if named && search.inside == 0 {
        search.inside = elf::segments(info).next().map_or(0, |(first, ..)| first);
    }
    search.found = named;
    c_int::from(named || search.inside != 0)
}

unsafe extern "C" fn redirect(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    // SAFETY: the dynamic linker hands us a valid object description and our own data.
    let (info, inside) = unsafe { (&*info, *data.cast::<usize>()) };
    if !elf::holds(info, inside) {
        return 0;
    }
    // SAFETY: the object is mapped while the dynamic linker iterates over it.
    let Some(symbols) = (unsafe { Symbols::of(info) }) else {
        return 1;
    };
    for (name, place) in HELPERS.iter().zip(&HELP) {
        place.store(symbols.find(name), Ordering::Release);
    }
    // Addresses of a library that is gone must not be taken for this one's.
    for place in &REAL {
        place.store(std::ptr::null_mut(), Ordering::Release);
    }
    // Learnt first, so that they are known also where pages cannot be written.
    for (entry, name) in symbols.functions() {
        if let Some(function) = Function::from_name(name.to_bytes()) {
            // SAFETY: a symbol of the table.
            let value = unsafe { (*entry).st_value } as usize;
            let at = symbols.base.wrapping_add(value) as *mut c_void;
            if at != hooks::own(function) {
                // PANIC: the array has a place for every function.
                REAL[function as usize].store(at, Ordering::Release);
            }
        }
    }
    net::redirect(info, &symbols, |name| {
        Function::from_name(name.to_bytes()).map(|function| {
            // PANIC: as above.
            (hooks::own(function), &REAL[function as usize])
        })
    });
    1
}
