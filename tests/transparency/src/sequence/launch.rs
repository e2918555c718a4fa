//! Modules, libraries, and what runs: kernels by every way of launching, host functions, words
//! written and awaited.

use std::sync::atomic::{AtomicU64, Ordering};

use shim_ffi::*;

use super::world::World;
use super::{call, call_on, stream};
use crate::rng::mix;
use crate::transcript::Word::{Name, New, Raw};

const ELEMENTWISE: &str = concat!(
    include_str!("../../../../simgpu/kernels/elementwise.ptx"),
    "\0"
);
const HASH: &str = concat!(include_str!("../../../../simgpu/kernels/hash.ptx"), "\0");

/// Kernels of the module, in the order of a context's functions.
pub const NAMES: [&std::ffi::CStr; 4] = [
    c"sublet_fill_f32",
    c"sublet_axpy_f32",
    c"sublet_bias_act_f32",
    c"sublet_gather_rows_b32",
];

/// Loads the module that every context has.
pub fn load_functions(world: &mut World) {
    let mut module = CUmodule::NULL;
    let image = ELEMENTWISE.as_ptr().cast::<c_void>();
    let loaded =
        call!(world, cuModuleLoadData(&raw mut module, image) [] => [New(module.0 as u64)]);
    if !loaded.is_ok() {
        return;
    }
    world.context().module = module.0 as u64;
    for (at, name) in NAMES.iter().enumerate() {
        let mut function = CUfunction::NULL;
        let found = call!(world, cuModuleGetFunction(&raw mut function, module, name.as_ptr())
            [Name(module.0 as u64), Raw(at as u64)] => [New(function.0 as u64)]);
        if found.is_ok() {
            world.context().functions.push(function.0 as u64);
        }
    }
}

/// Arguments of a launch as the driver reads them.
pub struct Arguments {
    words: [u64; 6],
    /// Byte sizes by parameter.
    sizes: &'static [usize],
    used: usize,
}

impl Arguments {
    fn new(words: &[u64], sizes: &'static [usize]) -> Self {
        let mut all = [0; 6];
        all[..words.len()].copy_from_slice(words);
        Self {
            words: all,
            sizes,
            used: words.len(),
        }
    }

    pub fn pointers(&mut self) -> [*mut c_void; 6] {
        std::array::from_fn(|at| (&raw mut self.words[at]).cast())
    }

    /// One block with every parameter at its natural alignment.
    fn packed(&self) -> ([u8; 48], usize) {
        let (mut block, mut end) = ([0; 48], 0usize);
        for (word, size) in self.words[..self.used].iter().zip(self.sizes) {
            let at = end.next_multiple_of(*size);
            block[at..at + size].copy_from_slice(&word.to_le_bytes()[..*size]);
            end = at + size;
        }
        (block, end)
    }
}

/// A kernel with its arguments and the buffers that it touches, ordered into `queue` already.
pub fn prepare(world: &mut World, queue: super::world::Queue) -> Option<(u64, Arguments, u64)> {
    let which = world.rng.below(world.contexts[world.here].functions.len());
    let function = *world.context().functions.get(which)?;
    let (to, from) = (world.any_buffer()?, world.any_buffer()?);
    let (a, b) = (world.context().buffers[to], world.context().buffers[from]);
    let aligned = |at: u64| at.is_multiple_of(4);
    if to == from || !aligned(a.at) || !aligned(b.at) {
        return None;
    }
    let n = (a.bytes / 4).min(b.bytes / 4).min(2048);
    if n < 4 {
        return None;
    }
    world.order(from, queue);
    world.order(to, queue);
    let factor = (world.rng.between(1, 9) as f32 / 4.0).to_bits().into();
    let words = world.rng.between(1, n) as u64;
    let arguments = match which {
        0 => Arguments::new(&[a.at, factor, words], &[8, 4, 8]),
        1 => Arguments::new(&[a.at, b.at, factor, words], &[8, 8, 4, 8]),
        2 => {
            let cols = world.rng.between(1, n.min(32)) as u64;
            let act = world.rng.below(2) as u64;
            Arguments::new(
                &[a.at, b.at, b.at, words / cols, cols, act],
                &[8, 8, 8, 4, 4, 4],
            )
        }
        _ => {
            let cols = world.rng.between(1, n.min(16)) as u64;
            let rows = n as u64 / cols;
            Arguments::new(&[a.at, b.at, b.at, rows, cols, rows], &[8, 8, 8, 4, 4, 4])
        }
    };
    Some((function, arguments, mix(which as u64 ^ mix(words) ^ factor)))
}

/// A kernel launch by one of the four calls, with parameters by pointer or packed.
pub fn kernel(world: &mut World) {
    let queue = world.any_queue();
    let Some((function, mut arguments, shape)) = prepare(world, queue) else {
        return;
    };
    let (handle, by_thread) = world.form(queue);
    let (grid, block) = (
        world.rng.between(1, 8) as u32,
        world.rng.pick(&[32u32, 64, 256, 1024]),
    );
    let mut pointers = arguments.pointers();
    let parameters = pointers.as_mut_ptr();
    let (mut packed, mut bytes) = arguments.packed();
    let mut extra = [
        std::ptr::without_provenance_mut(1),
        packed.as_mut_ptr().cast(),
        std::ptr::without_provenance_mut(2),
        (&raw mut bytes).cast(),
        std::ptr::null_mut(),
    ];
    let packed_form = world.rng.one_in(3);
    let (by_pointer, by_block) = if packed_form {
        (std::ptr::null_mut(), extra.as_mut_ptr())
    } else {
        (parameters, std::ptr::null_mut())
    };
    let f = CUfunction(function as *mut c_void);
    let noted = [
        Name(function),
        Raw(u64::from(grid)),
        Raw(u64::from(block)),
        Name(handle),
        Raw(shape),
    ];
    let [n0, n1, n2, n3, n4] = noted;
    match world.rng.below(6) {
        0 => {
            let _ = call_on!(world, by_thread, cuLaunchCooperativeKernel | cuLaunchCooperativeKernel_ptsz(
                f, grid, 1, 1, block, 1, 1, 0, stream(handle), parameters) [n0, n1, n2, n3, n4] => []);
        }
        1 | 2 => {
            let mut attribute = CUlaunchAttribute {
                id: CUlaunchAttributeID(2),
                ..CUlaunchAttribute::default()
            };
            attribute.value[0] = world.rng.below(2) as u64;
            let config = CUlaunchConfig {
                gridDimX: grid,
                gridDimY: 1,
                gridDimZ: 1,
                blockDimX: block,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: 0,
                hStream: stream(handle),
                attrs: &raw mut attribute,
                numAttrs: world.rng.below(2) as u32,
            };
            let _ = call_on!(world, by_thread, cuLaunchKernelEx | cuLaunchKernelEx_ptsz(
                &raw const config, f, by_pointer, by_block) [n0, n1, n2, n3, n4] => []);
        }
        _ => {
            let _ = call_on!(world, by_thread, cuLaunchKernel | cuLaunchKernel_ptsz(
                f, grid, 1, 1, block, 1, 1, 0, stream(handle), by_pointer, by_block) [n0, n1, n2, n3, n4] => []);
        }
    }
}

/// A module loaded, looked into and unloaded.
pub fn module(world: &mut World) {
    let mut module = CUmodule::NULL;
    let image = HASH.as_ptr().cast::<c_void>();
    let result = match world.rng.below(4) {
        0 => call!(world, cuModuleLoadData(&raw mut module, image) [] => [New(module.0 as u64)]),
        1 => {
            call!(world, cuModuleLoadFatBinary(&raw mut module, image) [] => [New(module.0 as u64)])
        }
        2 => {
            call!(world, cuModuleLoadData(&raw mut module, c"no image".as_ptr().cast()) [] => [New(module.0 as u64)])
        }
        _ => {
            call!(world, cuModuleLoadDataEx(&raw mut module, image, 0, std::ptr::null_mut(), std::ptr::null_mut())
            [] => [New(module.0 as u64)])
        }
    };
    if !result.is_ok() {
        return;
    }
    let m = Name(module.0 as u64);
    let mut count = 0;
    let _ =
        call!(world, cuModuleGetFunctionCount(&raw mut count, module) [m] => [Raw(count.into())]);
    let mut function = CUfunction::NULL;
    let name = world.rng.pick(&[
        c"sublet_content_hash",
        c"sublet_hash_fold",
        c"no_such_kernel",
    ]);
    let found = call!(world, cuModuleGetFunction(&raw mut function, module, name.as_ptr())
        [m, Raw(name.to_bytes().len() as u64)] => [New(function.0 as u64)]);
    if found.is_ok() {
        super::query::of_function(world, function);
    }
    let (mut at, mut bytes) = (CUdeviceptr(0), 0);
    let _ = call!(world, cuModuleGetGlobal_v2(&raw mut at, &raw mut bytes, module, c"nothing".as_ptr())
        [m] => [Name(at.0), Raw(bytes as u64)]);
    let mut functions = [CUfunction::NULL; 8];
    let _ = call!(world, cuModuleEnumerateFunctions(functions.as_mut_ptr(), count.min(8), module) [m]
        => [Raw(functions.iter().filter(|one| !one.is_null()).count() as u64)]);
    let _ = call!(world, cuModuleUnload(module) [m] => []);
    world.gone(function.0 as u64);
    world.gone(module.0 as u64);
}

/// A library, its kernels, and a launch of a kernel handle in place of a function.
pub fn library(world: &mut World) {
    let mut library = CUlibrary::NULL;
    let image = HASH.as_ptr().cast::<c_void>();
    let none = std::ptr::null_mut();
    let loaded = call!(world, cuLibraryLoadData(&raw mut library, image, none, none.cast(), 0, none.cast(), none.cast(), 0)
        [] => [New(library.0 as u64)]);
    if !loaded.is_ok() {
        return;
    }
    let l = Name(library.0 as u64);
    let (mut count, mut kernel, mut function, mut module) =
        (0, CUkernel::NULL, CUfunction::NULL, CUmodule::NULL);
    let _ =
        call!(world, cuLibraryGetKernelCount(&raw mut count, library) [l] => [Raw(count.into())]);
    let _ =
        call!(world, cuLibraryGetModule(&raw mut module, library) [l] => [New(module.0 as u64)]);
    let _ = call!(world, cuLibraryGetKernel(&raw mut kernel, library, c"absent".as_ptr()) [l] => [Name(kernel.0 as u64)]);
    let found = call!(world, cuLibraryGetKernel(&raw mut kernel, library, c"sublet_content_hash".as_ptr())
        [l] => [New(kernel.0 as u64)]);
    if found.is_ok() {
        let _ = call!(world, cuKernelGetFunction(&raw mut function, kernel) [Name(kernel.0 as u64)]
            => [New(function.0 as u64)]);
        let mut owner = CUlibrary::NULL;
        let _ = call!(world, cuKernelGetLibrary(&raw mut owner, kernel) [Name(kernel.0 as u64)] => [Name(owner.0 as u64)]);
        super::query::of_kernel(world, kernel);
        hash_kernel(world, kernel, function);
    }
    let _ = call!(world, cuCtxSynchronize() [] => []);
    let _ = call!(world, cuLibraryUnload(library) [l] => []);
    for gone in [kernel.0, function.0, module.0, library.0] {
        world.gone(gone as u64);
    }
}

/// Hashes one buffer into another on the device.
fn hash_kernel(world: &mut World, kernel: CUkernel, function: CUfunction) {
    let Some(to) = world.buffer_where(|buffer| buffer.bytes >= 4096 && buffer.at.is_multiple_of(8))
    else {
        return;
    };
    let Some(from) = world.any_buffer() else {
        return;
    };
    if to == from {
        return;
    }
    let queue = world.any_queue();
    world.order(from, queue);
    world.order(to, queue);
    let (a, b) = (world.context().buffers[to], world.context().buffers[from]);
    let bytes = b.bytes.min(32 << 10) as u64;
    let mut arguments = Arguments::new(&[a.at, b.at, bytes, 4096], &[8, 8, 8, 8]);
    let mut pointers = arguments.pointers();
    let (handle, by_thread) = world.form(queue);
    let f = if world.rng.one_in(2) {
        CUfunction(kernel.0)
    } else {
        function
    };
    let _ = call_on!(world, by_thread, cuLaunchKernel | cuLaunchKernel_ptsz(
        f, 4, 1, 1, 256, 1, 1, 0, stream(handle), pointers.as_mut_ptr(), std::ptr::null_mut())
        [Name(f.0 as u64), Name(a.at), Name(b.at), Raw(bytes), Name(handle)] => []);
}

unsafe extern "C" fn tell(at: *mut c_void) {
    // SAFETY: the word that `host_function` passed, which lives as long as the world.
    let word = unsafe { &*at.cast::<AtomicU64>() };
    word.fetch_add(1, Ordering::Relaxed);
}

unsafe extern "C" fn tell_status(_stream: CUstream, status: CUresult, at: *mut c_void) {
    // SAFETY: as above.
    let word = unsafe { &*at.cast::<AtomicU64>() };
    word.fetch_add(1 + u64::from(status.0), Ordering::Relaxed);
}

/// A host function or callback, and what it has noted after a synchronisation.
pub fn host_function(world: &mut World) {
    let queue = world.any_queue();
    let (handle, by_thread) = world.form(queue);
    let which = world.rng.below(2);
    let data = (&raw const world.noted[which]).cast_mut().cast::<c_void>();
    let (s, n) = (stream(handle), Name(handle));
    let _ = match world.rng.below(4) {
        0 => call_on!(world, by_thread, cuStreamAddCallback | cuStreamAddCallback_ptsz(
            s, Some(tell_status), data, 0) [n] => []),
        1 => {
            call_on!(world, by_thread, cuLaunchHostFunc_v2 | cuLaunchHostFunc_v2_ptsz(s, Some(tell), data, 0) [n] => [])
        }
        _ => {
            call_on!(world, by_thread, cuLaunchHostFunc | cuLaunchHostFunc_ptsz(s, Some(tell), data) [n] => [])
        }
    };
    let _ = call_on!(world, by_thread, cuStreamSynchronize | cuStreamSynchronize_ptsz(s) [n] => []);
    let seen = world.noted[which].load(Ordering::Relaxed);
    // Others of this word are at rest only after the whole context: shown there.
    let _ = seen;
    if world.rng.one_in(4) {
        for which in 0..world.contexts.len() {
            world.enter(which);
            let _ = call!(world, cuCtxSynchronize() [] => []);
        }
        let noted = [0, 1].map(|at: usize| world.noted[at].load(Ordering::Relaxed));
        let _ = call!(world, cuCtxSynchronize() [] => [Raw(noted[0]), Raw(noted[1])]);
    }
}

/// A word written in stream order and awaited in the same order, so that nothing can wait for ever.
pub fn word(world: &mut World) {
    let Some(which) =
        world.buffer_where(|buffer| buffer.bytes >= 64 && buffer.at.is_multiple_of(8))
    else {
        return;
    };
    let queue = world.any_queue();
    world.order(which, queue);
    let (handle, by_thread) = world.form(queue);
    let buffer = world.context().buffers[which];
    let offset = world.rng.below(8) as u64 * 8;
    let at = CUdeviceptr(buffer.at + offset);
    let (value, wide) = (world.rng.word(), world.rng.one_in(2));
    let (s, n0, n1, n2) = (stream(handle), Name(buffer.at), Raw(offset), Name(handle));
    let short = value as u32;
    match world.rng.below(6) {
        0 | 1 => {
            let payload = |kind: u32| CUstreamBatchMemOpParams {
                operation: CUstreamBatchMemOpType(kind),
                payload: [at.0, u64::from(short), 0, 0, 0],
            };
            // Write, wait, write; sometimes an operation that there is not.
            let last = world.rng.pick(&[2, 2, 2, 77]);
            let mut list = [payload(2), payload(1), payload(last)];
            let _ = call_on!(world, by_thread, cuStreamBatchMemOp_v2 | cuStreamBatchMemOp_v2_ptsz(
                s, 3, list.as_mut_ptr(), 0) [n0, n1, n2, Raw(short.into()), Raw(last.into())] => []);
        }
        2 if wide => {
            let _ = call_on!(world, by_thread, cuStreamWriteValue64 | cuStreamWriteValue64_ptsz(s, at, value, 0)
                [n0, n1, n2, Raw(value)] => []);
            let _ = call_on!(world, by_thread, cuStreamWaitValue64 | cuStreamWaitValue64_ptsz(s, at, value, 1)
                [n0, n1, n2, Raw(value)] => []);
        }
        2 => {
            let _ = call_on!(world, by_thread, cuStreamWriteValue32 | cuStreamWriteValue32_ptsz(s, at, short, 0)
                [n0, n1, n2, Raw(value)] => []);
            let _ = call_on!(world, by_thread, cuStreamWaitValue32 | cuStreamWaitValue32_ptsz(s, at, short, 1)
                [n0, n1, n2, Raw(value)] => []);
        }
        _ if wide => {
            let _ = call_on!(world, by_thread, cuStreamWriteValue64_v2 | cuStreamWriteValue64_v2_ptsz(s, at, value, 0)
                [n0, n1, n2, Raw(value)] => []);
            let _ = call_on!(world, by_thread, cuStreamWaitValue64_v2 | cuStreamWaitValue64_v2_ptsz(s, at, value, 0)
                [n0, n1, n2, Raw(value)] => []);
        }
        _ => {
            let _ = call_on!(world, by_thread, cuStreamWriteValue32_v2 | cuStreamWriteValue32_v2_ptsz(s, at, short, 0)
                [n0, n1, n2, Raw(value)] => []);
            let _ = call_on!(world, by_thread, cuStreamWaitValue32_v2 | cuStreamWaitValue32_v2_ptsz(s, at, short, 0)
                [n0, n1, n2, Raw(value)] => []);
        }
    }
}
