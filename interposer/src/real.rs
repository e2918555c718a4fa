//! The real driver: found by absolute path, opened once, its functions looked up on first use.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use shim_ffi::*;

use crate::errno::Preserve;
use crate::{loader, net, trace, unwind};

/// Where calls of each symbol go: the real function, or the thunk that counts and goes there while a diagnosis runs
/// ([`trace`]). Null until it is first needed.
pub(crate) static SLOTS: [AtomicPtr<c_void>; COUNT] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];
/// Address of each real function, for comparing; null until it is first needed.
pub(crate) static DRIVER: [AtomicPtr<c_void>; COUNT] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];

static HANDLE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// 0: not looked for, 1: somebody is looking, 2: found, 3: there is none.
static SEARCH: AtomicU32 = AtomicU32::new(0);

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
    address(symbol);
    // PANIC: the enumeration and the array have the same length.
    DRIVER[symbol as usize].load(Ordering::Acquire)
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
        } else {
            at
        }
    };
    let real = at != missing as *mut c_void && at != no_driver as *mut c_void;
    let target = if real { trace::counted(symbol, at) } else { at };
    // Racing threads find the same addresses.
    driver.store(at, Ordering::Release);
    slot.store(target, Ordering::Release);
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
    loop {
        match SEARCH.load(Ordering::Acquire) {
            0 => {
                if SEARCH
                    .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
                {
                    let handle = open();
                    if !handle.is_null() {
                        unwind::prepare();
                        trace::begin();
                        net::spread(handle);
                    }
                    HANDLE.store(handle, Ordering::Release);
                    SEARCH.store(if handle.is_null() { 3 } else { 2 }, Ordering::Release);
                    return handle;
                }
            }
            // Opening takes a millisecond at most; whoever does it cannot wait for us.
            1 => rustix::thread::sched_yield(),
            _ => return HANDLE.load(Ordering::Acquire),
        }
    }
}

/// In a forked child: a search that the parent's other thread had begun will never end here.
pub(crate) fn restart_search() {
    let _ = SEARCH.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Relaxed);
}

fn open() -> *mut c_void {
    let _errno = Preserve::new();
    // SAFETY: the names are NUL-terminated; the environment is only read.
    let (named, search) = unsafe {
        (
            libc::getenv(c"SUBLET_DRIVER".as_ptr()),
            libc::getenv(c"LD_LIBRARY_PATH".as_ptr()),
        )
    };
    if !named.is_null() {
        // SAFETY: `getenv` answers a NUL-terminated string.
        return open_path(unsafe { CStr::from_ptr(named) }.to_bytes());
    }
    if !search.is_null() {
        // SAFETY: as above.
        for directory in unsafe { CStr::from_ptr(search) }
            .to_bytes()
            .split(|byte| *byte == b':')
        {
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
    let handle = loader::open(&path);
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
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $signature:tt;)*) => { $(function! { $symbol $signature })* };
}
macro_rules! function {
    ($symbol:ident _) => {};
    ($symbol:ident ($($arg:ident: $ty:ty),*)) => {
        /// The real function.
        ///
        /// # Safety
        /// As the driver's documentation of the function says.
        #[allow(dead_code, reason = "expanded for every row of the table")]
        #[allow(clippy::too_many_arguments, reason = "the driver's own parameters")]
        #[inline(always)]
        pub(crate) unsafe fn $symbol($($arg: $ty),*) -> CUresult {
            // SAFETY: the address is the driver's function of this name (or one that ignores its arguments); the table
            // spells out its parameters.
            unsafe {
                let function: unsafe extern "C" fn($($ty),*) -> CUresult =
                    std::mem::transmute(address(Symbol::$symbol));
                function($($arg),*)
            }
        }
    };
}
shim_ffi::driver_table!(functions);
