//! Kernel launches.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use shim_ffi::counts::Note;
use shim_ffi::{CUfunction, CUlaunchConfig, CUresult, CUstream};

use super::Done;
use crate::clock;
use crate::context::Context;
use crate::driver::Driver;
use crate::entry::{In, api};
use crate::exec::work::{KernelLaunch, Work};
use crate::function::Function;
use crate::stream::{Default, Stream};

const PARAM_END: usize = 0;
const PARAM_BUFFER_POINTER: usize = 1;
const PARAM_BUFFER_SIZE: usize = 2;

/// Shape of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
}

/// The parameters' bytes, copied from either form of argument passing.
pub(crate) fn arguments(
    function: &Function,
    params: In<*mut c_void>,
    extra: In<*mut c_void>,
) -> Result<Vec<Vec<u8>>, CUresult> {
    let bad = CUresult::CUDA_ERROR_INVALID_VALUE;
    if !params.is_null() && !extra.is_null() {
        return Err(bad);
    }
    // Without the parameter list nothing can be copied; such a kernel has no host kernel that would
    // read it.
    let Some(layout) = &function.params else {
        return Ok(Vec::new());
    };
    if layout.is_empty() {
        return Ok(Vec::new());
    }
    if extra.is_null() {
        let read = |(index, param): (usize, &crate::image::Param)| {
            let pointer = params.at(index)?;
            if pointer.is_null() {
                return Err(bad);
            }
            // SAFETY: the program vouches for as many bytes as the kernel's parameter has.
            Ok(unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), param.bytes) }.to_vec())
        };
        return layout.iter().enumerate().map(read).collect();
    }
    let (mut buffer, mut bytes) = (std::ptr::null::<u8>(), 0_usize);
    for pair in 0..8 {
        match extra.at(pair * 2)? as usize {
            PARAM_END => break,
            PARAM_BUFFER_POINTER => buffer = extra.at(pair * 2 + 1)?.cast_const().cast(),
            PARAM_BUFFER_SIZE => {
                // SAFETY: the program points to a usize here.
                bytes = unsafe { In::new(extra.at(pair * 2 + 1)?.cast_const().cast::<usize>()) }
                    .get()?;
            }
            _ => return Err(bad),
        }
    }
    if buffer.is_null() {
        return Err(bad);
    }
    // SAFETY: the program vouches for this many bytes of arguments.
    let block = unsafe { std::slice::from_raw_parts(buffer, bytes) };
    layout
        .iter()
        .map(|param| {
            block
                .get(param.offset..param.offset + param.bytes)
                .map(<[u8]>::to_vec)
                .ok_or(bad)
        })
        .collect()
}

/// Checks a launch against device and function, and makes the work of it.
pub(crate) fn prepare(
    driver: &Driver,
    function: &Arc<Function>,
    shape: Shape,
    raw: Vec<Vec<u8>>,
) -> Result<KernelLaunch, CUresult> {
    let Shape {
        grid,
        block,
        shared_bytes,
    } = shape;
    let profile = driver.device_state.profile();
    let threads = block.iter().map(|side| u64::from(*side)).product::<u64>();
    let bad_shape = grid.contains(&0)
        || block.contains(&0)
        || block[0] > 1024
        || block[1] > 1024
        || block[2] > 64
        || grid[0] > i32::MAX as u32
        || grid[1] > 65_535
        || grid[2] > 65_535
        || threads > 1024;
    if bad_shape {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if threads > u64::from(function.max_threads) {
        return Err(CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    }
    let limit = function
        .dynamic_shared_limit
        .load(std::sync::atomic::Ordering::Relaxed)
        .max(48 << 10);
    let shared = shared_bytes.saturating_add(function.shared_bytes);
    if shared_bytes as i64 > i64::from(limit)
        || shared as i64 > i64::from(profile.shared_per_block_optin_bytes)
    {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let args = raw
        .iter()
        .map(|bytes| {
            let mut word = [0; 8];
            let count = bytes.len().min(8);
            word[..count].copy_from_slice(&bytes[..count]);
            u64::from_le_bytes(word)
        })
        .collect();
    if function.host_kernel.is_none() {
        crate::received::note(Note::NotComputed);
    }
    let name = function.name.to_str().unwrap_or_default();
    let (forced, endless) = if driver.faults.is_empty() {
        (None, false)
    } else {
        driver.faults.kernel(name)
    };
    Ok(KernelLaunch {
        function: function.clone(),
        grid,
        block,
        shared_bytes,
        args,
        raw,
        forced,
        endless,
    })
}

/// The first launch of a kernel loads its code, in the time of the calling thread.
fn load(driver: &Driver, function: &Function) {
    let ns = driver.device_state.scaled(driver.costs().first_launch_ns);
    if ns > 0 && !function.launched.swap(true, Relaxed) {
        clock::work_until(clock::now_ns() + ns);
    }
}

/// A launch takes its time of the calling thread.
pub(super) fn take_time(driver: &Driver, began_ns: u64) {
    let profile = driver.device_state.profile();
    if profile.launch_call_ns > 0 {
        clock::work_until(began_ns + driver.device_state.scaled(profile.launch_call_ns));
    }
}

fn launch(
    stream: CUstream,
    default: Default,
    handle: CUfunction,
    shape: Shape,
    params: In<*mut c_void>,
    extra: In<*mut c_void>,
    check: impl FnOnce(&Driver, &Context) -> Done,
) -> Done {
    let began_ns = clock::now_ns();
    let (driver, context, stream) = Stream::of(stream, default)?;
    let function = super::function(driver, handle)?;
    check(driver, &context)?;
    let raw = arguments(&function, params, extra)?;
    let launch = prepare(driver, &function, shape, raw)?;
    load(driver, &function);
    stream.submit(driver, Work::Kernel(Box::new(launch)))?;
    take_time(driver, began_ns);
    Ok(())
}

/// Most bytes of arguments.
const MOST_ARGUMENTS: usize = 4096;

/// Writes a part of the arguments of later launches by [`launch_prepared`].
fn set_arguments(handle: CUfunction, offset: c_int, bytes: &[u8]) -> Done {
    let (_, function) = super::known_in_context(handle)?;
    let bad = CUresult::CUDA_ERROR_INVALID_VALUE;
    let from = usize::try_from(offset).map_err(|_| bad)?;
    let end = from.checked_add(bytes.len()).ok_or(bad)?;
    if end > MOST_ARGUMENTS {
        return Err(bad);
    }
    let mut prepared = function.prepared.lock();
    if prepared.arguments.len() < end {
        prepared.arguments.resize(end, 0);
    }
    prepared.arguments[from..end].copy_from_slice(bytes);
    Ok(())
}

/// Launches with what was set before, as programs did before CUDA 4.
fn launch_prepared(handle: CUfunction, width: c_int, height: c_int, stream: CUstream) -> Done {
    let bad = CUresult::CUDA_ERROR_INVALID_VALUE;
    let (driver, _, stream) = Stream::of(stream, Default::Legacy)?;
    let function = super::function(driver, handle)?;
    let prepared = function.prepared.lock().clone();
    let side = |side: c_int| u32::try_from(side).map_err(|_| bad);
    let shape = Shape {
        grid: [side(width)?, side(height)?, 1],
        block: prepared.block,
        shared_bytes: prepared.shared_bytes,
    };
    let of = |param: &crate::image::Param| {
        let end = param.offset.checked_add(param.bytes).ok_or(bad)?;
        let bytes = prepared.arguments.get(param.offset..end).ok_or(bad)?;
        Ok(bytes.to_vec())
    };
    let layout = function.params.as_deref().unwrap_or_default();
    let raw = layout.iter().map(of).collect::<Result<_, CUresult>>()?;
    let launch = prepare(driver, &function, shape, raw)?;
    load(driver, &function);
    stream.submit(driver, Work::Kernel(Box::new(launch)))
}

/// A cooperative grid has to be resident at once.
fn cooperative(driver: &Driver, shape: Shape) -> Done {
    let profile = driver.device_state.profile();
    let threads = shape
        .block
        .iter()
        .map(|side| u64::from(*side))
        .product::<u64>()
        .max(1);
    let per_multiprocessor = (profile.threads_per_multiprocessor as u64 / threads)
        .min(profile.blocks_per_multiprocessor as u64);
    let blocks = shape
        .grid
        .iter()
        .map(|side| u64::from(*side))
        .product::<u64>();
    if blocks <= per_multiprocessor * profile.multiprocessors as u64 {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
    }
}

api! {
    fn cuFuncSetBlockShape(function: CUfunction, x: c_int, y: c_int, z: c_int) {
        let (_, found) = super::known_in_context(function)?;
        let side = |side: c_int, most: u32| {
            u32::try_from(side).ok().filter(|side| (1..=most).contains(side))
        };
        let (Some(x), Some(y), Some(z)) = (side(x, 1024), side(y, 1024), side(z, 64)) else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        if u64::from(x) * u64::from(y) * u64::from(z) > 1024 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        found.prepared.lock().block = [x, y, z];
        Ok(())
    }

    fn cuFuncSetSharedSize(function: CUfunction, bytes: u32) {
        super::known_in_context(function)?.1.prepared.lock().shared_bytes = bytes;
        Ok(())
    }

    fn cuParamSetSize(function: CUfunction, bytes: u32) {
        let (_, found) = super::known_in_context(function)?;
        if bytes as usize > MOST_ARGUMENTS {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        found.prepared.lock().arguments.resize(bytes as usize, 0);
        Ok(())
    }

    fn cuParamSeti(function: CUfunction, offset: c_int, value: u32) {
        set_arguments(function, offset, &value.to_ne_bytes())
    }

    fn cuParamSetf(function: CUfunction, offset: c_int, value: f32) {
        set_arguments(function, offset, &value.to_ne_bytes())
    }

    fn cuParamSetv(function: CUfunction, offset: c_int, value: *mut c_void, bytes: u32) {
        if value.is_null() || bytes as usize > MOST_ARGUMENTS {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the program vouches for this many bytes.
        let value = unsafe { std::slice::from_raw_parts(value.cast_const().cast::<u8>(), bytes as usize) };
        set_arguments(function, offset, value)
    }

    fn cuLaunch(function: CUfunction) {
        launch_prepared(function, 1, 1, CUstream::NULL)
    }

    fn cuLaunchGrid(function: CUfunction, width: c_int, height: c_int) {
        launch_prepared(function, width, height, CUstream::NULL)
    }

    fn cuLaunchGridAsync(function: CUfunction, width: c_int, height: c_int, stream: CUstream) {
        launch_prepared(function, width, height, stream)
    }

    stream fn cuLaunchKernel, cuLaunchKernel_ptsz(
        default; function: CUfunction, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32, stream: CUstream, params: In<*mut c_void>, extra: In<*mut c_void>,
    ) {
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared_bytes };
        launch(stream, default, function, shape, params, extra, |_, _| Ok(()))
    }

    stream fn cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz(
        default; function: CUfunction, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32, stream: CUstream, params: In<*mut c_void>,
    ) {
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared_bytes };
        // SAFETY: null stands for "no extra arguments".
        let extra = unsafe { In::new(std::ptr::null()) };
        launch(stream, default, function, shape, params, extra, |driver, _| cooperative(driver, shape))
    }

    stream fn cuLaunchKernelEx, cuLaunchKernelEx_ptsz(
        default; config: In<CUlaunchConfig>, function: CUfunction, params: In<*mut c_void>, extra: In<*mut c_void>,
    ) {
        const COOPERATIVE: u32 = 2;
        let config = config.get()?;
        let shape = Shape {
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: [config.blockDimX, config.blockDimY, config.blockDimZ],
            shared_bytes: config.sharedMemBytes,
        };
        // SAFETY: the program vouches for `numAttrs` attributes.
        let attributes = unsafe { In::new(config.attrs.cast_const()) };
        let attributes = attributes.list(if config.attrs.is_null() { 0 } else { config.numAttrs as usize })?;
        let is_cooperative = attributes.iter().any(|one| one.id.0 == COOPERATIVE && one.value[0] as u32 != 0);
        launch(config.hStream, default, function, shape, params, extra, |driver, _| {
            if is_cooperative { cooperative(driver, shape) } else { Ok(()) }
        })
    }
}
