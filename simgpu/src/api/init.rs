//! Initialisation, versions, error texts and symbol resolution.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use shim_ffi::{CUresult, CUuuid, Symbol, resolve};

use crate::attributes::VERSION;
use crate::driver;
use crate::entry::{In, Out, api};
use crate::settings;

/// Finds the exported address of a symbol. Set by the library that exports them.
pub type Exports = fn(Symbol) -> Option<*const c_void>;
static EXPORTS: OnceLock<Exports> = OnceLock::new();

/// Tells how symbols are found by `cuGetProcAddress`.
pub fn set_exports(exports: Exports) {
    let _ = EXPORTS.set(exports);
}

fn address(name: &CStr, version: c_int, flags: u64) -> Result<*const c_void, CUresult> {
    let exports = EXPORTS.get().ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
    if version < 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    resolve::select(name.to_bytes(), version as u32, flags, |_| true)
        .and_then(exports)
        .ok_or(CUresult::CUDA_ERROR_NOT_FOUND)
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

    fn cuDriverGetVersion(version: Out<c_int>) {
        version.put(VERSION)
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
        let name = std::ffi::CString::new(name.text()?).unwrap_or_default();
        function.put(std::ptr::null())?;
        function.put(address(&name, version, flags)?)
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
        let name = std::ffi::CString::new(name.text()?).unwrap_or_default();
        function.put(std::ptr::null())?;
        match address(&name, version, flags) {
            Ok(address) => {
                found.put_if(SUCCESS);
                function.put(address)
            }
            Err(CUresult::CUDA_ERROR_NOT_FOUND) => {
                let known = resolve::select(name.to_bytes(), u32::MAX, flags, |_| true).is_some();
                found.put_if(if known { VERSION_NOT_SUFFICIENT } else { SYMBOL_NOT_FOUND });
                Err(CUresult::CUDA_ERROR_NOT_FOUND)
            }
            Err(status) => Err(status),
        }
    }

    fn cuGetExportTable(table: Out<*const c_void>, id: In<CUuuid>) {
        // Private tables are between NVIDIA's runtime and NVIDIA's driver. There are none here,
        // whatever the id.
        let _ = id;
        table.put_if(std::ptr::null());
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }
}
