//! Questions about devices, contexts and functions.

use shim_ffi::*;

use super::call;
use super::world::World;
use crate::transcript::Word::{Hidden, Name, Raw};

fn text(bytes: &[c_char]) -> u64 {
    bytes
        .iter()
        .take_while(|byte| **byte != 0)
        .fold(7, |state, byte| crate::rng::mix(state ^ *byte as u64))
}

/// Devices.
pub fn device(world: &mut World) {
    let device = CUdevice(world.device);
    match world.rng.below(10) {
        0 => {
            let mut count = -1;
            let _ = call!(world, cuDeviceGetCount(&raw mut count) [] => [Raw(count as u64)]);
        }
        1 => {
            let mut version = 0;
            let _ = call!(world, cuDriverGetVersion(&raw mut version) [] => [Raw(version as u64)]);
        }
        2 => {
            let mut total = 0;
            let _ =
                call!(world, cuDeviceTotalMem_v2(&raw mut total, device) [] => [Raw(total as u64)]);
        }
        3 => {
            let (mut free, mut total) = (0usize, 0usize);
            // What is free is other processes' business too; that it is no more than everything is
            // ours.
            let _ = call!(world, cuMemGetInfo_v2(&raw mut free, &raw mut total) []
                => [Raw(u64::from(free <= total)), Raw(total as u64)]);
        }
        4 => {
            let mut name = [0; 64];
            // Without space for a name, where a driver checks that: NVIDIA's (580) does not.
            let lengths: &[i32] = match world.plan.hostile {
                true => &[64, 8, 1, 0, -1],
                false => &[64, 8, 1],
            };
            let length = world.rng.pick(lengths);
            let _ = call!(world, cuDeviceGetName(name.as_mut_ptr(), length, device) [Raw(length as u64)]
                => [Raw(text(&name))]);
            let _ = call!(world, cuDeviceGetPCIBusId(name.as_mut_ptr(), length, device) [Raw(length as u64)]
                => [Raw(text(&name))]);
        }
        5 => {
            let mut uuid = CUuuid::default();
            let words = |uuid: &CUuuid| {
                let (words, _) = uuid.bytes.as_chunks::<8>();
                words.iter().fold(0, |state, word| {
                    crate::rng::mix(state ^ u64::from_ne_bytes(*word))
                })
            };
            let _ =
                call!(world, cuDeviceGetUuid_v2(&raw mut uuid, device) [] => [Raw(words(&uuid))]);
            let _ = call!(world, cuDeviceGetUuid(&raw mut uuid, device) [] => [Raw(words(&uuid))]);
        }
        6 => {
            let (mut pool, mut other) = (CUmemoryPool::NULL, CUmemoryPool::NULL);
            let _ = call!(world, cuDeviceGetDefaultMemPool(&raw mut pool, device) [] => [Name(pool.0 as u64)]);
            let _ = call!(world, cuDeviceGetMemPool(&raw mut other, device) [] => [Name(other.0 as u64)]);
        }
        7 => {
            let code = world
                .rng
                .pick(&[0u32, 1, 2, 100, 201, 400, 600, 700, 719, 999, 12345]);
            let (mut name, mut words) = (std::ptr::null(), std::ptr::null());
            let read = |at: *const c_char| {
                if at.is_null() {
                    0
                } else {
                    // SAFETY: the driver answers a NUL-terminated string that lives as long as it.
                    let bytes = unsafe { std::ffi::CStr::from_ptr(at) };
                    bytes
                        .to_bytes()
                        .iter()
                        .fold(7, |state, byte| crate::rng::mix(state ^ u64::from(*byte)))
                }
            };
            let _ = call!(world, cuGetErrorName(CUresult(code), &raw mut name) [Raw(code.into())] => [Raw(read(name))]);
            let _ = call!(world, cuGetErrorString(CUresult(code), &raw mut words) [Raw(code.into())] => [Raw(read(words))]);
        }
        8 => {
            // By name and version, as runtimes do.
            let symbol = world.rng.pick(&SYMBOLS).entry();
            let version =
                world
                    .rng
                    .pick(&[5000, 11000, 12000, 12080, 13000, symbol.introduced as i32]);
            let flags = world.rng.pick(&[0u64, 1, 2, 3, 99]);
            let name = std::ffi::CString::new(symbol.base_name).unwrap_or_default();
            let (mut at, mut status) = (
                std::ptr::null_mut(),
                CUdriverProcAddressQueryResult::default(),
            );
            let n = Raw(name
                .to_bytes()
                .iter()
                .fold(7, |state, byte| crate::rng::mix(state ^ u64::from(*byte))));
            if world.rng.one_in(3) {
                let _ = call!(world, cuGetProcAddress(name.as_ptr(), &raw mut at, version, flags)
                    [n, Raw(version as u64), Raw(flags)] => [Name(at as u64)]);
            } else {
                let _ = call!(world, cuGetProcAddress_v2(name.as_ptr(), &raw mut at, version, flags, &raw mut status)
                    [n, Raw(version as u64), Raw(flags)] => [Name(at as u64), Raw(status.0.into())]);
            }
        }
        _ => {
            let attribute = world.rng.between(0, 160) as u32;
            let mut value = -7;
            let _ = call!(world, cuDeviceGetAttribute(&raw mut value, CUdevice_attribute(attribute), device)
                [Raw(attribute.into())] => [Raw(value as u64)]);
        }
    }
}

/// The current context.
pub fn context(world: &mut World) {
    let handle = CUcontext(world.context().handle as *mut c_void);
    let n = Name(handle.0 as u64);
    match world.rng.below(8) {
        0 => {
            let mut value = 0;
            let _ = call!(world, cuCtxGetId(handle, &raw mut value) [n] => [Name(value | 1 << 61)]);
        }
        1 => {
            let mut value = 0;
            let _ =
                call!(world, cuCtxGetApiVersion(handle, &raw mut value) [n] => [Raw(value.into())]);
        }
        2 => {
            let mut value = 0;
            let _ = call!(world, cuCtxGetFlags(&raw mut value) [] => [Raw(value.into())]);
        }
        3 => {
            let (mut least, mut greatest) = (9, 9);
            let _ = call!(world, cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) []
                => [Raw(least as u64), Raw(greatest as u64)]);
        }
        4 => {
            let limit = CUlimit(world.rng.below(9) as u32);
            let mut value = 0;
            let _ = call!(world, cuCtxGetLimit(&raw mut value, limit) [Raw(limit.0.into())] => [Raw(value as u64)]);
        }
        5 => {
            let mut value = CUfunc_cache::default();
            let wanted = CUfunc_cache(world.rng.below(5) as u32);
            let _ = call!(world, cuCtxSetCacheConfig(wanted) [Raw(wanted.0.into())] => []);
            let _ = call!(world, cuCtxGetCacheConfig(&raw mut value) [] => [Raw(value.0.into())]);
        }
        6 => {
            let mut device = CUdevice(-1);
            let _ = call!(world, cuCtxGetDevice_v2(&raw mut device, handle) [n] => [Raw(device.0 as u64)]);
            let _ = call!(world, cuCtxGetDevice(&raw mut device) [] => [Raw(device.0 as u64)]);
        }
        _ => {
            let mut current = CUcontext::NULL;
            let _ = call!(world, cuCtxGetCurrent(&raw mut current) [] => [Name(current.0 as u64)]);
            let (mut free, mut total) = (0u32, 0u32);
            let _ = call!(world, cuMemGetInfo(&raw mut free, &raw mut total) [] => [Hidden, Raw(total.into())]);
        }
    }
}

/// A function of the context's module.
pub fn function(world: &mut World) {
    let count = world.context().functions.len();
    if count == 0 {
        return;
    }
    let which = world.rng.below(count);
    let function = CUfunction(world.context().functions[which] as *mut c_void);
    of_function(world, function);
}

/// What the driver says of a function.
pub fn of_function(world: &mut World, function: CUfunction) {
    let n = Name(function.0 as u64);
    match world.rng.below(7) {
        0 => {
            let mut name = std::ptr::null();
            let _ = call!(world, cuFuncGetName(&raw mut name, function) [n] => [Raw(u64::from(name.is_null()))]);
        }
        1 => {
            let mut module = CUmodule::NULL;
            let _ = call!(world, cuFuncGetModule(&raw mut module, function) [n] => [Name(module.0 as u64)]);
        }
        2 => {
            let (at, mut offset, mut bytes) = (world.rng.below(8), 0, 0);
            let _ = call!(world, cuFuncGetParamInfo(function, at, &raw mut offset, &raw mut bytes) [n, Raw(at as u64)]
                => [Raw(offset as u64), Raw(bytes as u64)]);
        }
        3 => {
            let (mut blocks, block) = (0, world.rng.pick(&[32, 64, 256, 1024, 4096]));
            let _ = call!(world, cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut blocks, function, block, 0)
                [n, Raw(block as u64)] => [Raw(blocks as u64)]);
        }
        4 => {
            let bytes = world.rng.pick(&[0, 1024, 65536, 1 << 22, -1]);
            let attribute = CUfunction_attribute(8);
            let _ = call!(world, cuFuncSetAttribute(function, attribute, bytes) [n, Raw(bytes as u64)] => []);
        }
        5 => {
            let mut state = CUfunctionLoadingState::default();
            let _ = call!(world, cuFuncLoad(function) [n] => []);
            let _ =
                call!(world, cuFuncIsLoaded(&raw mut state, function) [n] => [Raw(state.0.into())]);
        }
        _ => {
            let (mut value, attribute) = (-1, world.rng.below(20) as _);
            let _ = call!(world, cuFuncGetAttribute(&raw mut value, CUfunction_attribute(attribute), function)
                [Raw(attribute.into()), n] => [Raw(value as u64)]);
        }
    }
}

/// What the driver says of a library's kernel.
pub fn of_kernel(world: &mut World, kernel: CUkernel) {
    let n = Name(kernel.0 as u64);
    let device = CUdevice(world.device);
    let (mut value, attribute) = (-1, world.rng.below(16) as _);
    let _ = call!(world, cuKernelGetAttribute(&raw mut value, CUfunction_attribute(attribute), kernel, device)
        [Raw(attribute.into()), n] => [Raw(value as u64)]);
    let (at, mut offset, mut bytes) = (world.rng.below(6), 0, 0);
    let _ = call!(world, cuKernelGetParamInfo(kernel, at, &raw mut offset, &raw mut bytes) [n, Raw(at as u64)]
        => [Raw(offset as u64), Raw(bytes as u64)]);
    let mut count = 0;
    let _ = call!(world, cuKernelGetParamCount(kernel, &raw mut count) [n] => [Raw(count as u64)]);
}
