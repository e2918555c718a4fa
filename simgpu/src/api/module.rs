//! Modules, libraries, kernels and functions.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering::*;

use shim_ffi::{CUdevice, CUdeviceptr, CUfunction, CUkernel, CUlibrary, CUmodule, CUresult};

use super::Done;
use crate::context::{current, current_any};
use crate::driver::{Driver, driver};
use crate::entry::{In, Out, api};
use crate::function::Function;
use crate::image::{self, Image};
use crate::module::{Library, Module};

const MAX_THREADS: u32 = 0;
const SHARED: u32 = 1;
const CONST: u32 = 2;
const LOCAL: u32 = 3;
const REGISTERS: u32 = 4;
const PTX_VERSION: u32 = 5;
const BINARY_VERSION: u32 = 6;
const CACHE_MODE: u32 = 7;
const MAX_DYNAMIC_SHARED: u32 = 8;
const CARVEOUT: u32 = 9;
const LAST_ATTRIBUTE: u32 = 15;

fn capability(driver: &Driver) -> (i32, i32) {
    (
        driver.device_state.profile().major,
        driver.device_state.profile().minor,
    )
}

fn load(to: Out<CUmodule>, image: *const c_void) -> Done {
    let (driver, context) = super::memory::allocating()?;
    to.check()?;
    // SAFETY: the program vouches for a complete image.
    let image = unsafe { image::read_pointer(image.cast(), capability(driver)) }?;
    let module = Module::load(driver, &context, &image)?;
    to.put(CUmodule(module.id as *mut c_void))
}

fn read_file(driver: &Driver, path: In<c_char>) -> Result<Image, CUresult> {
    let bytes = std::fs::read(path.text()?).map_err(|_| CUresult::CUDA_ERROR_FILE_NOT_FOUND)?;
    image::read(&bytes, capability(driver))
}

fn module(module: CUmodule) -> Result<(&'static Driver, Arc<Module>), CUresult> {
    let (driver, _) = current()?;
    Ok((
        driver,
        driver
            .modules
            .get(module.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?,
    ))
}

fn library(library: CUlibrary) -> Result<(&'static Driver, Arc<Library>), CUresult> {
    let driver = driver()?;
    Ok((
        driver,
        driver
            .libraries
            .get(library.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?,
    ))
}

fn kernel(kernel: CUkernel) -> Result<(&'static Driver, Arc<Function>), CUresult> {
    let driver = driver()?;
    Ok((
        driver,
        driver
            .kernels
            .get(kernel.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?,
    ))
}

/// The function of a handle; a kernel's handle will do.
pub(crate) fn function(driver: &Driver, handle: CUfunction) -> Result<Arc<Function>, CUresult> {
    let id = handle.0 as u64;
    driver
        .functions
        .get(id)
        .or_else(|| driver.kernels.get(id))
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

/// The function of a handle that is asked about. A kernel's handle will not do: the vendor's driver
/// calls it no handle (seen of `cuFuncGetAttribute` by accel-sim, pull request 521).
fn known(handle: CUfunction) -> Result<(&'static Driver, Arc<Function>), CUresult> {
    let driver = driver()?;
    let function = driver
        .functions
        .get(handle.0 as u64)
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    Ok((driver, function))
}

/// The same, with the current context in order.
pub(super) fn known_in_context(
    handle: CUfunction,
) -> Result<(&'static Driver, Arc<Function>), CUresult> {
    current()?;
    known(handle)
}

fn attribute(driver: &Driver, function: &Function, id: u32) -> Result<i32, CUresult> {
    let version = driver.device_state.profile().major * 10 + driver.device_state.profile().minor;
    let stored = |default| {
        function
            .attributes
            .lock()
            .get(&id)
            .copied()
            .unwrap_or(default)
    };
    Ok(match id {
        MAX_THREADS => function.max_threads as i32,
        SHARED => function.shared_bytes as i32,
        CONST => function.const_bytes as i32,
        LOCAL => function.local_bytes as i32,
        REGISTERS => function.registers as i32,
        CACHE_MODE => 0,
        PTX_VERSION | BINARY_VERSION => version,
        MAX_DYNAMIC_SHARED => function.dynamic_shared_limit.load(Relaxed),
        CARVEOUT => stored(-1),
        10..=LAST_ATTRIBUTE => stored(0),
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    })
}

fn set_attribute(driver: &Driver, function: &Function, id: u32, value: i32) -> Done {
    match id {
        MAX_DYNAMIC_SHARED => {
            let most = driver.device_state.profile().shared_per_block_optin_bytes
                - function.shared_bytes as i32;
            if !(0..=most).contains(&value) {
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
            function.dynamic_shared_limit.store(value, Relaxed);
        }
        CARVEOUT if (-1..=100).contains(&value) => {
            function.attributes.lock().insert(id, value);
        }
        10..=LAST_ATTRIBUTE => {
            function.attributes.lock().insert(id, value);
        }
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
    Ok(())
}

fn param_info(function: &Function, index: usize, offset: Out<usize>, bytes: Out<usize>) -> Done {
    let params = function
        .params
        .as_ref()
        .ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
    let param = params
        .get(index)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    offset.put(param.offset)?;
    bytes.put_if(param.bytes);
    Ok(())
}

fn global(module: CUmodule, name: In<c_char>) -> Result<(u64, u64), CUresult> {
    let (_, found) = self::module(module)?;
    found
        .globals
        .get(&name.text()?)
        .copied()
        .ok_or(CUresult::CUDA_ERROR_NOT_FOUND)
}

api! {
    fn cuModuleLoad(to: Out<CUmodule>, path: In<c_char>) {
        let (driver, context) = super::memory::allocating()?;
        to.check()?;
        let image = read_file(driver, path)?;
        to.put(CUmodule(Module::load(driver, &context, &image)?.id as *mut c_void))
    }

    fn cuModuleLoadData(to: Out<CUmodule>, image: *const c_void) {
        load(to, image)
    }

    fn cuModuleLoadDataEx(
        to: Out<CUmodule>, image: *const c_void, _count: u32, _options: In<u32>, _values: In<*mut c_void>,
    ) {
        load(to, image)
    }

    fn cuModuleLoadFatBinary(to: Out<CUmodule>, image: *const c_void) {
        load(to, image)
    }

    fn cuModuleUnload(module: CUmodule) {
        let (driver, found) = self::module(module)?;
        crate::capture::forbid_unsafe(driver)?;
        driver.engine.wait_streams(|stream| stream.context == found.context);
        driver.modules.remove(found.id);
        found.unload(driver);
        Ok(())
    }

    fn cuModuleGetFunction(to: Out<CUfunction>, module: CUmodule, name: In<c_char>) {
        to.check()?;
        let (_, found) = self::module(module)?;
        let function = found.functions.get(&name.text()?).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        to.put(CUfunction(function.id as *mut c_void))
    }

    fn cuModuleGetFunctionCount(to: Out<u32>, module: CUmodule) {
        let (_, found) = self::module(module)?;
        to.put(found.functions.len() as u32)
    }

    fn cuModuleEnumerateFunctions(to: Out<CUfunction>, count: u32, module: CUmodule) {
        let (_, found) = self::module(module)?;
        let all: Vec<_> = found.functions.values().map(|function| CUfunction(function.id as *mut c_void)).collect();
        to.put_all(&all, count as usize)
    }

    fn cuModuleGetGlobal(to: Out<u32>, bytes: Out<u32>, module: CUmodule, name: In<c_char>) {
        // Addresses of the first ABI have 32 bits; this device's do not fit.
        global(module, name)?;
        let _ = (to, bytes);
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }

    fn cuModuleGetGlobal_v2(to: Out<CUdeviceptr>, bytes: Out<usize>, module: CUmodule, name: In<c_char>) {
        let (address, length) = global(module, name)?;
        to.put_if(CUdeviceptr(address));
        bytes.put_if(length as usize);
        Ok(())
    }

    fn cuModuleGetLoadingMode(to: Out<u32>) {
        const LAZY: u32 = 2;
        driver()?;
        to.put(LAZY)
    }

    fn cuLibraryLoadData(
        to: Out<CUlibrary>, image: *const c_void, _jit: In<u32>, _jit_values: In<*mut c_void>, _jit_count: u32,
        _options: In<u32>, _values: In<*mut c_void>, _count: u32,
    ) {
        let driver = driver()?;
        to.check()?;
        // SAFETY: the program vouches for a complete image.
        let image = unsafe { image::read_pointer(image.cast(), capability(driver)) }?;
        to.put(CUlibrary(Library::load(driver, image).id as *mut c_void))
    }

    fn cuLibraryLoadFromFile(
        to: Out<CUlibrary>, path: In<c_char>, _jit: In<u32>, _jit_values: In<*mut c_void>, _jit_count: u32,
        _options: In<u32>, _values: In<*mut c_void>, _count: u32,
    ) {
        let driver = driver()?;
        to.check()?;
        to.put(CUlibrary(Library::load(driver, read_file(driver, path)?).id as *mut c_void))
    }

    fn cuLibraryUnload(library: CUlibrary) {
        let (driver, found) = self::library(library)?;
        driver.engine.wait_streams(|_| true);
        driver.libraries.remove(found.id);
        found.unload(driver);
        Ok(())
    }

    fn cuLibraryGetKernel(to: Out<CUkernel>, library: CUlibrary, name: In<c_char>) {
        to.check()?;
        let (_, found) = self::library(library)?;
        let kernel = found.kernels.get(&name.text()?).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        to.put(CUkernel(kernel.id as *mut c_void))
    }

    fn cuLibraryGetKernelCount(to: Out<u32>, library: CUlibrary) {
        to.put(self::library(library)?.1.kernels.len() as u32)
    }

    fn cuLibraryEnumerateKernels(to: Out<CUkernel>, count: u32, library: CUlibrary) {
        let (_, found) = self::library(library)?;
        let all: Vec<_> = found.kernels.values().map(|kernel| CUkernel(kernel.id as *mut c_void)).collect();
        to.put_all(&all, count as usize)
    }

    fn cuLibraryGetGlobal(to: Out<CUdeviceptr>, bytes: Out<usize>, library: CUlibrary, name: In<c_char>) {
        let (driver, found) = self::library(library)?;
        let (_, context) = current()?;
        let (address, length) = found.global(driver, &context, &name.text()?)?;
        to.put_if(CUdeviceptr(address));
        bytes.put_if(length as usize);
        Ok(())
    }

    fn cuLibraryGetModule(to: Out<CUmodule>, library: CUlibrary) {
        to.check()?;
        let (driver, found) = self::library(library)?;
        let (_, context) = current()?;
        let mut modules = found.modules.lock();
        if let Some(module) = modules.get(&context.id) {
            return to.put(CUmodule(*module as *mut c_void));
        }
        let mut globals = std::collections::BTreeMap::new();
        for variable in &found.variables {
            globals.insert(variable.name.clone(), found.global(driver, &context, &variable.name)?);
        }
        let functions = found.kernels.iter().map(|(name, kernel)| {
            let id = Library::function(driver, kernel);
            (name.clone(), driver.functions.get(id).unwrap_or_else(|| kernel.clone()))
        });
        let id = crate::registry::fresh();
        let module = Module { id, context: context.id, functions: functions.collect(), globals };
        driver.modules.insert(id, Arc::new(module));
        modules.insert(context.id, id);
        to.put(CUmodule(id as *mut c_void))
    }

    fn cuKernelGetFunction(to: Out<CUfunction>, kernel: CUkernel) {
        to.check()?;
        let (driver, found) = self::kernel(kernel)?;
        current()?;
        to.put(CUfunction(Library::function(driver, &found) as *mut c_void))
    }

    fn cuKernelGetLibrary(to: Out<CUlibrary>, kernel: CUkernel) {
        to.put(CUlibrary(self::kernel(kernel)?.1.owner as *mut c_void))
    }

    fn cuKernelGetName(to: Out<*const c_char>, kernel: CUkernel) {
        if kernel.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        to.put(self::kernel(kernel)?.1.name.as_ptr())
    }

    fn cuKernelGetAttribute(to: Out<c_int>, id: u32, kernel: CUkernel, device: CUdevice) {
        to.check()?;
        let (driver, found) = self::kernel(kernel)?;
        driver.device(device.0)?;
        to.put(attribute(driver, &found, id)?)
    }

    fn cuKernelSetAttribute(id: u32, value: c_int, kernel: CUkernel, device: CUdevice) {
        let (driver, found) = self::kernel(kernel)?;
        driver.device(device.0)?;
        set_attribute(driver, &found, id, value)
    }

    fn cuKernelSetCacheConfig(kernel: CUkernel, _config: u32, device: CUdevice) {
        let (driver, _) = self::kernel(kernel)?;
        driver.device(device.0).map(|_| ())
    }

    fn cuKernelGetParamInfo(kernel: CUkernel, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        current_any()?;
        param_info(&self::kernel(kernel)?.1, index, offset, bytes)
    }

    fn cuKernelGetParamCount(kernel: CUkernel, to: Out<usize>) {
        let (_, found) = self::kernel(kernel)?;
        to.put(found.params.as_ref().ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?.len())
    }

    fn cuFuncGetParamInfo(function: CUfunction, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        param_info(&known(function)?.1, index, offset, bytes)
    }

    fn cuFuncGetParamCount(function: CUfunction, to: Out<usize>) {
        let (_, found) = known(function)?;
        to.put(found.params.as_ref().ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?.len())
    }

    fn cuFuncGetAttribute(to: Out<c_int>, id: u32, function: CUfunction) {
        to.check()?;
        current_any()?;
        let (driver, found) = known(function)?;
        to.put(attribute(driver, &found, id)?)
    }

    fn cuFuncSetAttribute(function: CUfunction, id: u32, value: c_int) {
        current()?;
        let (driver, found) = known(function)?;
        set_attribute(driver, &found, id, value)
    }

    fn cuFuncSetCacheConfig(function: CUfunction, config: u32) {
        known(function)?;
        if config > 3 { Err(CUresult::CUDA_ERROR_INVALID_VALUE) } else { Ok(()) }
    }

    fn cuFuncSetSharedMemConfig(function: CUfunction, config: u32) {
        known(function)?;
        if config > 2 { Err(CUresult::CUDA_ERROR_INVALID_VALUE) } else { Ok(()) }
    }

    fn cuFuncGetModule(to: Out<CUmodule>, function: CUfunction) {
        to.check()?;
        let (driver, found) = known(function)?;
        let module = driver.modules.get(found.owner).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        to.put(CUmodule(module.id as *mut c_void))
    }

    fn cuFuncGetName(to: Out<*const c_char>, function: CUfunction) {
        if function.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        to.put(known(function)?.1.name.as_ptr())
    }

    fn cuFuncIsLoaded(to: Out<u32>, function: CUfunction) {
        const LOADED: u32 = 1;
        known(function)?;
        to.put(LOADED)
    }

    fn cuFuncLoad(function: CUfunction) {
        known(function).map(|_| ())
    }
}
