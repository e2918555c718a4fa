//! Counting calls, while a diagnosis asks for it (`SUBLET_TRACE_COUNTS` names a directory), and
//! only then.
//!
//! Calls go where [`addresses::SLOTS`] says. While nobody asks, that is the driver; while somebody
//! does, it is one of the thunks here, which count and jump to the driver. So what nobody asks for
//! costs nothing, on no path: there is no flag to look at. What is counted is what was *let
//! through*, our own calls included; the simulated driver counts what it *receives*, and where that
//! is more, something went past us.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use shim_ffi::counts::{Counts, Note};
use shim_ffi::*;

use crate::driver::addresses;
use crate::ground::environment::variable;

static PAGE: AtomicPtr<Counts> = AtomicPtr::new(std::ptr::null_mut());
/// Set by the first that comes to [`begin`].
static BEGUN: AtomicBool = AtomicBool::new(false);

/// Opens this process's page, if a diagnosis runs. Called before any symbol is bound; of threads
/// that come at the same time one opens it, and the others do not wait.
pub(crate) fn begin() {
    if BEGUN.swap(true, Ordering::AcqRel) {
        return;
    }
    if let Some(page) = variable(c"SUBLET_TRACE_COUNTS").and_then(open) {
        PAGE.store(page, Ordering::Release);
    }
}

/// A new file for this process image: `PID-N.seen`, mapped.
fn open(directory: &[u8]) -> Option<*mut Counts> {
    // TRIES: as many images as one process is likely to execute one after the other.
    for image in 0..1000 {
        let name = format!("/{}-{image}{}", std::process::id(), counts::SEEN);
        let path = std::ffi::CString::new([directory, name.as_bytes()].concat()).ok()?;
        // SAFETY: a NUL-terminated path; a new file of ours, mapped whole and shared, whose
        // descriptor is closed again.
        unsafe {
            let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC;
            let file = libc::open(path.as_ptr(), flags, 0o600);
            if file < 0 {
                if *libc::__errno_location() == libc::EEXIST {
                    continue;
                }
                return None;
            }
            // CAST: some tens of KiB.
            let sized = libc::ftruncate(file, Counts::BYTES as libc::off_t) == 0;
            let page = if sized {
                libc::mmap(
                    std::ptr::null_mut(),
                    Counts::BYTES,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED,
                    file,
                    0,
                )
            } else {
                libc::MAP_FAILED
            };
            libc::close(file);
            if page == libc::MAP_FAILED {
                return None;
            }
            Counts::begin(page.cast(), std::process::id());
            return Some(page.cast());
        }
    }
    None
}

fn page() -> Option<&'static Counts> {
    let page = PAGE.load(Ordering::Acquire);
    // SAFETY: null, or begun and never unmapped.
    unsafe { page.as_ref() }
}

/// Notes something besides calls.
pub(crate) fn note(note: Note) {
    notes(note, 1);
}

/// Notes something besides calls, several times.
pub(crate) fn notes(note: Note, times: u64) {
    if let Some(page) = page() {
        page.note(note, times);
    }
}

/// Where calls of `symbol` are to go, when the real function is at `address`.
pub(crate) fn counted(symbol: Symbol, address: *mut c_void) -> *mut c_void {
    if page().is_none() {
        return address;
    }
    // PANIC: the enumeration and the array expand from the same rows.
    THUNKS[symbol as usize].0.cast_mut()
}

struct Thunk(*const c_void);

// SAFETY: the address of code; never written.
unsafe impl Sync for Thunk {}

macro_rules! thunks {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $shape:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $traits:tt $signature:tt;)*) => {
        /// A counter and a jump each; nothing is touched but the scratch register that the ABI
        /// leaves to linkage.
        mod thunk {
            use super::*;
            $(
                #[unsafe(naked)]
                pub(super) unsafe extern "C" fn $symbol() {
                    std::arch::naked_asm!(
                        "mov r11, qword ptr [rip + {page}]",
                        "lock inc qword ptr [r11 + {counter}]",
                        "jmp qword ptr [rip + {driver} + {slot}]",
                        page = sym PAGE,
                        counter = const Counts::offset(Symbol::$symbol as usize),
                        driver = sym addresses::DRIVER,
                        slot = const Symbol::$symbol as usize * 8,
                    )
                }
            )*
        }
        static THUNKS: [Thunk; COUNT] = [$(Thunk(thunk::$symbol as *const c_void)),*];
    };
}
shim_ffi::driver_table!(thunks);
