//! Initialisation, versions, error texts and symbol resolution.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use shim_ffi::{CUresult, CUuuid, Symbol, resolve};

use crate::entry::{In, Out, api};
use crate::profile::{CUDA_VERSION, Profile};
use crate::{driver, settings};

/// Finds the exported address of a symbol. Set by the library that exports them.
pub type Exports = fn(Symbol) -> Option<*const c_void>;
static EXPORTS: OnceLock<Exports> = OnceLock::new();

/// Tells how symbols are found by `cuGetProcAddress`.
pub fn set_exports(exports: Exports) {
    let _ = EXPORTS.set(exports);
}

/// Version that this driver says it is of: it resolves what came with that, or before.
fn version() -> c_int {
    static VERSION: OnceLock<c_int> = OnceLock::new();
    *VERSION.get_or_init(|| {
        let text = Profile::text_from_env(settings::env);
        text.and_then(|text| Profile::parse(&text))
            .map_or(CUDA_VERSION, |profile| profile.cuda_version)
    })
}

/// What a look-up by `cuGetProcAddress` comes to.
enum Resolved {
    Address(*const c_void),
    /// The name is known; the version asked for is older.
    Older,
    Unknown,
}

fn resolve(name: In<c_char>, asked: c_int, flags: u64) -> Result<Resolved, CUresult> {
    /// Legacy and per-thread default stream.
    const FLAGS: u64 = 3;
    let exports = EXPORTS.get().ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
    if flags & !FLAGS != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let name = std::ffi::CString::new(name.text()?).unwrap_or_default();
    // CAST: versions are not negative, and those of the table neither.
    let own = version() as u32;
    let found = |asked| {
        resolve::select(name.to_bytes(), asked, flags, |symbol| {
            symbol.entry().introduced <= own
        })
    };
    // CAST: as real drivers do, to whom a version below zero is newer than all.
    Ok(match found(asked as u32).and_then(exports) {
        Some(address) => Resolved::Address(address),
        None if found(u32::MAX).is_some() => Resolved::Older,
        None => Resolved::Unknown,
    })
}

fn describe(status: CUresult) -> Option<&'static CStr> {
    Some(match status {
        CUresult::CUDA_SUCCESS => c"no error",
        CUresult::CUDA_ERROR_INVALID_VALUE => c"invalid argument",
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => c"out of memory",
        CUresult::CUDA_ERROR_NOT_INITIALIZED => c"initialization error",
        CUresult::CUDA_ERROR_DEINITIALIZED => c"driver shutting down",
        CUresult::CUDA_ERROR_NO_DEVICE => c"no CUDA-capable device is detected",
        CUresult::CUDA_ERROR_INVALID_DEVICE => c"invalid device ordinal",
        CUresult::CUDA_ERROR_INVALID_IMAGE => c"device kernel image is invalid",
        CUresult::CUDA_ERROR_INVALID_CONTEXT => c"invalid device context",
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => {
            c"no kernel image is available for execution on the device"
        }
        CUresult::CUDA_ERROR_INVALID_PTX => c"a PTX JIT compilation failed",
        CUresult::CUDA_ERROR_FILE_NOT_FOUND => c"file not found",
        CUresult::CUDA_ERROR_INVALID_HANDLE => c"invalid resource handle",
        CUresult::CUDA_ERROR_NOT_FOUND => c"named symbol not found",
        CUresult::CUDA_ERROR_NOT_READY => c"device not ready",
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => c"an illegal memory access was encountered",
        CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES => c"too many resources requested for launch",
        CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED => c"context is destroyed",
        CUresult::CUDA_ERROR_LAUNCH_FAILED => c"unspecified launch failure",
        CUresult::CUDA_ERROR_NOT_PERMITTED => c"operation not permitted",
        CUresult::CUDA_ERROR_NOT_SUPPORTED => c"operation not supported",
        CUresult::CUDA_ERROR_UNKNOWN => c"unknown error",
        status => return status.name(),
    })
}

/// As the real driver does at its first initialisation: loads the tool that `CUDA_INJECTION64_PATH`
/// names and calls its `InitializeInjection`. What cannot be loaded is passed over.
fn inject() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    let Some(path) = settings::env("CUDA_INJECTION64_PATH").filter(|path| !path.is_empty()) else {
        return;
    };
    ONCE.call_once(|| {
        let Ok(path) = std::ffi::CString::new(path) else {
            return;
        };
        // SAFETY: NUL-terminated names; the tool's function takes nothing and answers a number, by
        // its documentation.
        unsafe {
            let tool = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            if tool.is_null() {
                return;
            }
            let entry = libc::dlsym(tool, c"InitializeInjection".as_ptr());
            if !entry.is_null() {
                std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(entry)();
            }
        }
    });
}

api! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        driver::init()?;
        inject();
        Ok(())
    }

    fn cuDriverGetVersion(to: Out<c_int>) {
        to.put(version())
    }

    fn cuGetErrorName(status: CUresult, text: Out<*const c_char>) {
        text.put(status.name().map_or(std::ptr::null(), CStr::as_ptr))?;
        status.name().map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    fn cuGetErrorString(status: CUresult, text: Out<*const c_char>) {
        text.put(describe(status).map_or(std::ptr::null(), CStr::as_ptr))?;
        describe(status).map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    fn cuGetProcAddress(name: In<c_char>, function: Out<*const c_void>, version: c_int, flags: u64) {
        if name.is_null() || function.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        match resolve(name, version, flags)? {
            Resolved::Address(address) => function.put(address),
            Resolved::Older | Resolved::Unknown => Err(CUresult::CUDA_ERROR_NOT_FOUND),
        }
    }

    fn cuGetProcAddress_v2(
        name: In<c_char>,
        function: Out<*const c_void>,
        version: c_int,
        flags: u64,
        found: Out<u32>,
    ) {
        const SUCCESS: u32 = 0;
        const SYMBOL_NOT_FOUND: u32 = 1;
        const VERSION_NOT_SUFFICIENT: u32 = 2;
        if name.is_null() || function.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let (address, status) = match resolve(name, version, flags)? {
            Resolved::Address(address) => (address, SUCCESS),
            Resolved::Older => (std::ptr::null(), VERSION_NOT_SUFFICIENT),
            Resolved::Unknown => (std::ptr::null(), SYMBOL_NOT_FOUND),
        };
        found.put_if(status);
        function.put(address)
    }

    fn cuGetExportTable(table: Out<*const c_void>, id: In<CUuuid>) {
        // Private tables are between NVIDIA's runtime and NVIDIA's driver. There are none here,
        // whatever the id.
        let _ = id;
        table.put_if(std::ptr::null());
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }
}
