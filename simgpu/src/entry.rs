//! What every entry point does around its work: no panic leaves it, faults on demand apply, null
//! pointers are errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

use shim_ffi::{CUresult, Symbol};

use crate::driver::driver;
use crate::{uninitialised, unsupported};

/// A pointer that an entry point writes through.
#[repr(transparent)]
pub struct Out<T>(*mut T);

/// A pointer that an entry point reads through.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}
impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for In<T> {}

impl<T> Out<T> {
    /// For callers in Rust, who vouch for the pointer as a C caller would.
    ///
    /// # Safety
    /// Null, or valid for a write until the entry point returns.
    pub const unsafe fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// True for a null pointer.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Writes.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a null pointer.
    pub fn put(self, value: T) -> Result<(), CUresult> {
        self.check()?;
        // SAFETY: not null, and the caller of the entry point vouches for the rest. Programs need
        // not align.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes unless the pointer is null.
    pub fn put_if(self, value: T) {
        let _ = self.put(value);
    }

    /// Refuses a null pointer before anything is done.
    ///
    /// # Errors
    /// `INVALID_VALUE`.
    pub fn check(self) -> Result<(), CUresult> {
        if self.0.is_null() {
            Err(CUresult::CUDA_ERROR_INVALID_VALUE)
        } else {
            Ok(())
        }
    }

    /// Reads what is there.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a null pointer.
    pub fn get(self) -> Result<T, CUresult>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }

    /// Writes the elements that fit into `capacity`.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a null pointer.
    pub fn put_all(self, values: &[T], capacity: usize) -> Result<(), CUresult>
    where
        T: Copy,
    {
        self.check()?;
        let count = values.len().min(capacity);
        // SAFETY: not null, and the caller vouches for `capacity` elements.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0, count) };
        Ok(())
    }

    /// The pointer.
    pub fn raw(self) -> *mut T {
        self.0
    }
}

impl<T: Copy> In<T> {
    /// For callers in Rust, who vouch for the pointer as a C caller would.
    ///
    /// # Safety
    /// Null, or valid for reads until the entry point returns.
    pub const unsafe fn new(pointer: *const T) -> Self {
        Self(pointer)
    }

    /// True for a null pointer.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Reads.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a null pointer.
    pub fn get(self) -> Result<T, CUresult> {
        self.at(0)
    }

    /// Reads element `index`.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a null pointer.
    pub fn at(self, index: usize) -> Result<T, CUresult> {
        if self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller of the entry point vouches for as many elements as it
        // says.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// Reads `count` elements; none are allowed to be at a null pointer.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a null pointer.
    pub fn list(self, count: usize) -> Result<Vec<T>, CUresult> {
        (0..count).map(|index| self.at(index)).collect()
    }

    /// The pointer.
    pub fn raw(self) -> *const T {
        self.0
    }
}

impl In<std::ffi::c_char> {
    /// Reads NUL-terminated text.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a null pointer.
    pub fn text(self) -> Result<String, CUresult> {
        if self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller vouches for a terminated string.
        Ok(unsafe { std::ffi::CStr::from_ptr(self.0) }
            .to_string_lossy()
            .into_owned())
    }
}

/// Writes text with its NUL, cut to `capacity` bytes.
///
/// # Errors
/// `INVALID_VALUE` for a null pointer or no capacity.
pub fn put_text(to: Out<std::ffi::c_char>, text: &str, capacity: i32) -> Result<(), CUresult> {
    let capacity = usize::try_from(capacity)
        .ok()
        .filter(|n| *n > 0)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let mut bytes: Vec<std::ffi::c_char> = text
        .bytes()
        .take(capacity - 1)
        .map(|byte| byte as std::ffi::c_char)
        .collect();
    bytes.push(0);
    to.put_all(&bytes, capacity)
}

/// A thread is not cancelled inside the driver, but at its next cancellation point after it:
/// nothing here could unwind.
struct Uncancelled(libc::c_int);

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, old: *mut libc::c_int) -> libc::c_int;
}

impl Uncancelled {
    fn new() -> Self {
        /// ABI: `PTHREAD_CANCEL_DISABLE` of glibc and musl.
        const DISABLE: libc::c_int = 1;
        let mut before = 0;
        // SAFETY: a valid state, and a pointer to a local.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self(before)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        let mut before = 0;
        // SAFETY: the state that this thread had.
        unsafe { pthread_setcancelstate(self.0, &raw mut before) };
    }
}

/// The caller's `errno`, put back when dropped: what a call waited for on its way, which time
/// decides, is not seen in it, so two runs of a program read the same there.
pub struct Errno(libc::c_int);

impl Errno {
    /// As it is now.
    #[expect(
        clippy::new_without_default,
        reason = "what it takes is this thread's, no default"
    )]
    pub fn new() -> Self {
        // SAFETY: the C library's per-thread location is always valid.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl Drop for Errno {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

/// Whether an argument is null, or zero.
pub fn is_zero<T: Copy>(argument: &T) -> bool {
    let word = std::ptr::from_ref(argument).cast::<u8>();
    // SAFETY: arguments of the driver's functions are integers, handles and pointers, or structures
    // of these, whose bytes are all there.
    (0..size_of::<T>()).all(|at| unsafe { word.add(at).read() } == 0)
}

/// Functions that answer whether the driver is initialised or not.
const fn needs_no_driver(symbol: Symbol) -> bool {
    symbol.traits().always || matches!(symbol, Symbol::cuInit | Symbol::cuGetExportTable)
}

/// Runs the body of an entry point. `first_is_zero`: its first argument is.
pub fn guard(
    symbol: Symbol,
    first_is_zero: bool,
    body: impl FnOnce() -> Result<(), CUresult>,
) -> CUresult {
    let checked = || {
        match driver() {
            Ok(driver) if !driver.faults.is_empty() => driver.faults.call(symbol)?,
            Err(status) if !needs_no_driver(symbol) => {
                return Err(match status {
                    CUresult::CUDA_ERROR_NOT_INITIALIZED => {
                        uninitialised::answer(symbol, first_is_zero)
                    }
                    status => status,
                });
            }
            _ => {}
        }
        body()
    };
    let _errno = Errno::new();
    let _uncancelled = Uncancelled::new();
    match catch_unwind(AssertUnwindSafe(checked)) {
        Ok(Ok(())) => CUresult::CUDA_SUCCESS,
        Ok(Err(status)) => status,
        Err(_) => CUresult::CUDA_ERROR_UNKNOWN,
    }
}

/// Runs an entry point that is not simulated.
pub fn not_simulated(symbol: Symbol, first_is_zero: bool) -> CUresult {
    guard(symbol, first_is_zero, || Err(unsupported::call(symbol)))
}

/// Defines entry points. `stream fn a, a_ptsz (default; ...)` defines the two that differ in what
/// stream 0 means.
macro_rules! api {
    () => {};
    (fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block $($rest:tt)*) => {
        #[doc = concat!("`", stringify!($name), "` of the driver API.")]
        ///
        /// # Safety
        /// As the driver API says: pointers are null or valid for what the call reads or writes
        /// through them.
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> ::shim_ffi::CUresult {
            $crate::entry::guard(::shim_ffi::Symbol::$name, $crate::entry::first_is_zero!($($arg)*), move || $body)
        }
        $crate::entry::api! { $($rest)* }
    };
    (stream fn $legacy:ident, $per_thread:ident($default:ident; $($arg:ident: $ty:ty),* $(,)?) $body:block $($rest:tt)*) => {
        #[doc = concat!("`", stringify!($legacy), "` of the driver API.")]
        ///
        /// # Safety
        /// As the driver API says: pointers are null or valid for what the call reads or writes
        /// through them.
        pub unsafe extern "C" fn $legacy($($arg: $ty),*) -> ::shim_ffi::CUresult {
            let $default = $crate::stream::Default::Legacy;
            $crate::entry::guard(::shim_ffi::Symbol::$legacy, $crate::entry::first_is_zero!($($arg)*), move || $body)
        }
        #[doc = concat!("`", stringify!($per_thread), "` of the driver API.")]
        ///
        /// # Safety
        /// As the driver API says: pointers are null or valid for what the call reads or writes
        /// through them.
        pub unsafe extern "C" fn $per_thread($($arg: $ty),*) -> ::shim_ffi::CUresult {
            let $default = $crate::stream::Default::PerThread;
            $crate::entry::guard(::shim_ffi::Symbol::$per_thread, $crate::entry::first_is_zero!($($arg)*), move || $body)
        }
        $crate::entry::api! { $($rest)* }
    };
}
pub(crate) use api;

macro_rules! first_is_zero {
    () => {
        false
    };
    ($first:ident $($rest:ident)*) => {
        $crate::entry::is_zero(&$first)
    };
}
pub(crate) use first_is_zero;
