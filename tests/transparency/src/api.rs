//! The driver as programs reach it: `dlopen("libcuda.so.1")`, then `dlsym` or `cuGetProcAddress`.

use std::ffi::{CStr, c_void};

use shim_ffi::*;

use crate::last_calls;

/// What a call answers here when the driver has no such function; an older driver lacks the newer
/// ones.
const MISSING: CUresult = CUresult::CUDA_ERROR_NOT_FOUND;

/// Whether work is still going on is a matter of time: both answers count as the same.
pub fn timeless(result: CUresult) -> CUresult {
    if result == CUresult::CUDA_ERROR_NOT_READY {
        CUresult::CUDA_SUCCESS
    } else {
        result
    }
}

/// Every driver function by two ways.
pub struct Api {
    exported: [*mut c_void; COUNT],
    resolved: [*mut c_void; COUNT],
    preloaded: bool,
    /// Which of the two the next call takes.
    by_resolver: std::cell::Cell<bool>,
}

// SAFETY: addresses of code, and a flag that only the thread with the turn touches (see
// `sequence`).
unsafe impl Send for Api {}

impl Api {
    /// Opens the driver under its usual name.
    ///
    /// # Errors
    /// What the dynamic linker says.
    pub fn open() -> Result<Self, String> {
        // SAFETY: the name is NUL-terminated; constructors run as for any program.
        let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: after a failure `dlerror` answers a NUL-terminated string.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(format!(
                "libcuda.so.1 cannot be opened: {}",
                why.to_string_lossy()
            ));
        }
        let exported = SYMBOLS.map(|symbol| {
            // SAFETY: a handle from `dlopen` and a NUL-terminated name.
            unsafe { libc::dlsym(handle, symbol.entry().symbol.as_ptr()) }
        });
        Ok(Self {
            exported,
            resolved: exported,
            // SAFETY: as above. Only the preload library exports this.
            preloaded: unsafe { !libc::dlsym(handle, c"sublet_version".as_ptr()).is_null() },
            by_resolver: std::cell::Cell::new(false),
        })
    }

    /// Whether the preload library answers under the driver's name.
    pub fn preloaded(&self) -> bool {
        self.preloaded
    }

    /// Looks every function up by `cuGetProcAddress_v2` as well, in the version that its symbol was
    /// introduced with. Answers what the driver said for each: status, query result, and the index
    /// of the export at the same address.
    pub fn resolve(&mut self) -> Vec<(Symbol, CUresult, u32, Option<usize>)> {
        let mut answers = Vec::new();
        for symbol in SYMBOLS {
            let entry = symbol.entry();
            if entry.introduced == 0 {
                continue;
            }
            let name = std::ffi::CString::new(entry.base_name).unwrap_or_default();
            let flags = if entry.variant == Variant::Legacy {
                1
            } else {
                2
            };
            let mut found = std::ptr::null_mut();
            let mut status = CUdriverProcAddressQueryResult::default();
            // SAFETY: a NUL-terminated name and two places to write to.
            let result = unsafe {
                self.cuGetProcAddress_v2(
                    name.as_ptr(),
                    &raw mut found,
                    entry.introduced as i32,
                    flags,
                    &raw mut status,
                )
            };
            let at = self
                .exported
                .iter()
                .position(|address| !found.is_null() && *address == found);
            if result.is_ok() && at == Some(symbol as usize) {
                self.resolved[symbol as usize] = found;
            }
            answers.push((symbol, result, status.0, at));
        }
        answers
    }

    /// Lets the following calls go through the addresses that `cuGetProcAddress` gave, or through
    /// the exported ones.
    pub fn use_resolver(&self, yes: bool) {
        self.by_resolver.set(yes);
    }

    /// Address of a function, null where the driver has none.
    #[inline]
    pub fn at(&self, symbol: Symbol) -> *mut c_void {
        let table = if self.by_resolver.get() {
            &self.resolved
        } else {
            &self.exported
        };
        // PANIC: the enumeration and the tables have the same length.
        table[symbol as usize]
    }
}

macro_rules! functions {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $shape:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $traits:tt $signature:tt;)*) => {
        #[allow(non_snake_case, reason = "the driver's own names")]
        #[allow(clippy::too_many_arguments, reason = "the driver's own parameters")]
        impl Api { $(function! { $symbol $signature })* }
    };
}
macro_rules! function {
    ($symbol:ident _) => {};
    ($symbol:ident ($($arg:ident: $ty:ty),*)) => {
        /// The driver's function of this name.
        ///
        /// # Safety
        /// As the driver's documentation says.
        pub unsafe fn $symbol(&self, $($arg: $ty),*) -> CUresult {
            let at = self.at(Symbol::$symbol);
            if at.is_null() {
                return MISSING;
            }
            last_calls::note(Symbol::$symbol);
            // SAFETY: the driver's function of this name, whose parameters the table spells out.
            unsafe {
                let function: unsafe extern "C" fn($($ty),*) -> CUresult = std::mem::transmute(at);
                function($($arg),*)
            }
        }
    };
}
shim_ffi::driver_table!(functions);
