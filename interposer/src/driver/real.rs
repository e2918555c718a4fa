//! The real driver: found by absolute path, opened once, its functions looked up on first use.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use shim_ffi::*;

use crate::driver::addresses::{DRIVER, SLOTS};
use crate::driver::own::own;
use crate::driver::{loader, net, trace, unwind};
use crate::ground::environment::{variable, variable_at_start};
use crate::ground::errno::Preserve;
use crate::ground::thread::thread;

/// The driver's handle; null until it was looked for, [`NONE`] where there is none.
static HANDLE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// In place of a handle: there is no driver.
const NONE: *mut c_void = std::ptr::without_provenance_mut(1);
/// Set for good once this process was refused: see [`refuse`].
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Where drivers are installed. Absolute, because the bare name is ours.
const DIRECTORIES: [&CStr; 9] = [
    c"/usr/lib/x86_64-linux-gnu",
    c"/lib/x86_64-linux-gnu",
    c"/usr/lib64",
    c"/lib64",
    c"/usr/lib",
    c"/usr/local/nvidia/lib64",
    c"/usr/local/nvidia/lib",
    c"/usr/lib/wsl/lib",
    c"/run/opengl-driver/lib",
];

/// Answers where the driver lacks the symbol.
extern "C" fn missing() -> CUresult {
    CUresult::CUDA_ERROR_NOT_FOUND
}

/// Answers where there is no driver: what the driver itself says on a machine without a GPU.
extern "C" fn no_driver() -> CUresult {
    CUresult::CUDA_ERROR_NO_DEVICE
}

/// Answers every call of a process that must not run ungoverned and cannot be governed.
pub(crate) extern "C" fn refused() -> CUresult {
    CUresult::CUDA_ERROR_SYSTEM_NOT_READY
}

/// From here on every call of the driver answers `CUDA_ERROR_SYSTEM_NOT_READY` without reaching it,
/// in this process and in the children that it forks: every entry goes where [`SLOTS`] says, so the
/// launch path has nothing to ask.
pub(crate) fn refuse() {
    // SYNC(refused): SeqCst with the stores and the load in `bind`: either it sees this, or its
    // store comes before ours.
    REFUSED.store(true, Ordering::SeqCst);
    for (symbol, slot) in SYMBOLS.iter().zip(&SLOTS) {
        if !symbol.traits().always {
            slot.store(refused as *mut c_void, Ordering::SeqCst);
        }
    }
}

/// Whether this process was refused.
pub(crate) fn is_refused() -> bool {
    REFUSED.load(Ordering::Relaxed)
}

/// Where calls of `symbol` go, or a function that says why there is no such place. Never null.
#[inline(always)]
pub(crate) fn address(symbol: Symbol) -> *mut c_void {
    // PANIC: the enumeration and the slots have the same length.
    let at = SLOTS[symbol as usize].load(Ordering::Acquire);
    if at.is_null() { bind(symbol) } else { at }
}

/// Where calls of `symbol` go if that was needed before, else null.
#[inline(always)]
pub(crate) fn bound(symbol: Symbol) -> *mut c_void {
    // PANIC: the enumeration and the slots have the same length.
    SLOTS[symbol as usize].load(Ordering::Acquire)
}

/// Address of the real function of `symbol`, to compare an answer with. Never null.
pub(crate) fn driver_address(symbol: Symbol) -> *mut c_void {
    // PANIC: the enumeration and the array have the same length.
    let driver = &DRIVER[symbol as usize];
    if driver.load(Ordering::Acquire).is_null() {
        bind(symbol);
    }
    driver.load(Ordering::Acquire)
}

/// Whether the real driver exports `symbol`.
pub(crate) fn exported(symbol: Symbol) -> bool {
    let at = driver_address(symbol);
    at != missing as *mut c_void && at != no_driver as *mut c_void
}

/// Whether a real driver was found (and opened).
pub(crate) fn found() -> bool {
    !handle().is_null()
}

/// Whether a real driver is open already.
pub(crate) fn is_open() -> bool {
    let handle = HANDLE.load(Ordering::Acquire);
    !handle.is_null() && handle != NONE
}

/// Looks a name up in the real driver, which was found, for the program itself: where there is
/// none, its `dlerror` says so. A name of the table leads to us, since the driver's own symbols do;
/// where they could not be made to, to the driver.
pub(crate) fn look_up(name: &CStr, version: *const c_char) -> *mut c_void {
    loader::look_up(handle(), name, version)
}

#[cold]
#[inline(never)]
fn bind(symbol: Symbol) -> *mut c_void {
    let _errno = Preserve::new();
    let handle = handle();
    // PANIC: the enumeration and both arrays have the same length.
    let (driver, slot) = (&DRIVER[symbol as usize], &SLOTS[symbol as usize]);
    // What the net has redirected is no longer found by name.
    let known = driver.load(Ordering::Acquire);
    let at = if handle.is_null() {
        no_driver as *mut c_void
    } else if !known.is_null() {
        known
    } else {
        let at = loader::real_dlsym(handle, symbol.entry().symbol);
        if at.is_null() {
            missing as *mut c_void
        } else if at == own(symbol) {
            // Another thread's net was faster; it has noted the address before.
            driver.load(Ordering::Acquire)
        } else {
            at
        }
    };
    let real = at != missing as *mut c_void && at != no_driver as *mut c_void;
    let target = || {
        if real { trace::counted(symbol, at) } else { at }
    };
    // Racing threads find the same addresses.
    driver.store(at, Ordering::Release);
    slot.store(target(), Ordering::Release);
    // Asked again: another thread may have begun to count meanwhile.
    let target = target();
    // SYNC(refused): see `refuse`.
    slot.store(target, Ordering::SeqCst);
    if REFUSED.load(Ordering::SeqCst) && !symbol.traits().always {
        slot.store(refused as *mut c_void, Ordering::SeqCst);
        return refused as *mut c_void;
    }
    target
}

/// For the forwarders' slow path: `index` is a row of the table.
pub(crate) extern "C" fn bind_index(index: u32) -> *mut c_void {
    match SYMBOLS.get(index as usize) {
        Some(symbol) => bind(*symbol),
        None => missing as *mut c_void,
    }
}

fn handle() -> *mut c_void {
    let mut handle = HANDLE.load(Ordering::Acquire);
    if handle.is_null() {
        handle = search();
    }
    if handle == NONE {
        std::ptr::null_mut()
    } else {
        handle
    }
}

/// Opens the driver. Threads that come at the same time all do it, and none waits for another: one
/// of them may hold the dynamic linker's lock (a library's constructor that uses the driver) while
/// another waits for that very lock. Opening twice is opening once, and each step after it may be
/// taken again. A constructor of the driver itself comes here a second time.
#[cold]
fn search() -> *mut c_void {
    let opening = thread().opening.replace(true);
    let handle = open();
    if !handle.is_null() {
        unwind::prepare();
        trace::begin();
        net::spread(handle);
    }
    thread().opening.set(opening);
    let found = if handle.is_null() { NONE } else { handle };
    match HANDLE.compare_exchange(
        std::ptr::null_mut(),
        found,
        Ordering::AcqRel,
        Ordering::Acquire,
    ) {
        Ok(_) => found,
        Err(first) => first,
    }
}

fn open() -> *mut c_void {
    let _errno = Preserve::new();
    if let Some(named) = variable(c"SUBLET_DRIVER") {
        return open_path(named);
    }
    // The dynamic linker's variable: it reads it once.
    if let Some(search) = variable_at_start(c"LD_LIBRARY_PATH") {
        for directory in search.split(|byte| matches!(byte, b':' | b';')) {
            let handle = open_in(directory);
            if !handle.is_null() {
                return handle;
            }
        }
    }
    for directory in DIRECTORIES {
        let handle = open_in(directory.to_bytes());
        if !handle.is_null() {
            return handle;
        }
    }
    std::ptr::null_mut()
}

fn open_in(directory: &[u8]) -> *mut c_void {
    if directory.first() != Some(&b'/') {
        return std::ptr::null_mut();
    }
    open_path(&[directory, b"/libcuda.so.1"].concat())
}

fn open_path(path: &[u8]) -> *mut c_void {
    if path.first() != Some(&b'/') {
        return std::ptr::null_mut();
    }
    let Ok(path) = std::ffi::CString::new(path) else {
        return std::ptr::null_mut();
    };
    // Where something is linked against the driver, its symbols are in the global scope. Ours stand
    // before them; those that we do not have are found there.
    let handle = if loader::driver_is_needed() {
        loader::open_for_all(&path)
    } else {
        loader::open(&path)
    };
    if handle.is_null() {
        return handle;
    }
    // A directory may hold a copy of ourselves under the driver's name.
    if !loader::real_dlsym(handle, c"sublet_version").is_null() {
        return std::ptr::null_mut();
    }
    handle
}

macro_rules! functions {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $shape:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $traits:tt $signature:tt;)*) => { $(function! { $symbol $shape $signature })* };
}
macro_rules! function {
    ($symbol:ident $shape:ident _) => {};
    ($symbol:ident $shape:ident ($($arg:ident: $ty:ty),*)) => {
        /// The real function.
        ///
        /// # Safety
        /// As the driver's documentation of the function says.
        #[allow(dead_code, reason = "expanded for every row of the table")]
        #[allow(clippy::too_many_arguments, reason = "the driver's own parameters")]
        #[inline(always)]
        pub(crate) unsafe fn $symbol($($arg: $ty),*) -> CUresult {
            // SAFETY: the address is the driver's function of this name (or one that ignores its
            // arguments); the table spells out its parameters.
            let result = unsafe {
                let function: unsafe extern "C" fn($($ty),*) -> CUresult =
                    std::mem::transmute(address(Symbol::$symbol));
                function($($arg),*)
            };
            answered!($symbol $shape result);
            result
        }
    };
}
/// Hooks call the driver themselves.
macro_rules! answered {
    ($symbol:ident hook $result:ident) => {
        // CAST: fewer symbols than that.
        thread().note_answer(Symbol::$symbol as u32, $result.0);
    };
    ($symbol:ident $shape:ident $result:ident) => {};
}
shim_ffi::driver_table!(functions);
