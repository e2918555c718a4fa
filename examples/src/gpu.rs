//! One CUDA device through cudarc's driver API, with the kernel library loaded.
//!
//! Memory comes from `cuMemAlloc` and work goes to the default stream unless a program asks for
//! streams of its own: what most programs do. The library is found by the dynamic linker, so a
//! preload or `LD_LIBRARY_PATH` decides which driver it is.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};

/// The kernel library, as C strings for `cuModuleLoadData`.
const MODULES: [(&str, &str); 7] = [
    (
        "elementwise",
        concat!(include_str!("../../simgpu/kernels/elementwise.ptx"), "\0"),
    ),
    (
        "matmul",
        concat!(include_str!("../../simgpu/kernels/matmul.ptx"), "\0"),
    ),
    (
        "loss",
        concat!(include_str!("../../simgpu/kernels/loss.ptx"), "\0"),
    ),
    (
        "reduce",
        concat!(include_str!("../../simgpu/kernels/reduce.ptx"), "\0"),
    ),
    (
        "optim",
        concat!(include_str!("../../simgpu/kernels/optim.ptx"), "\0"),
    ),
    (
        "busy",
        concat!(include_str!("../../simgpu/kernels/busy.ptx"), "\0"),
    ),
    (
        "chunks",
        concat!(include_str!("../../simgpu/kernels/chunks.ptx"), "\0"),
    ),
];

/// What can go wrong with the device.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The dynamic linker finds no driver.
    #[error(
        "no CUDA driver: libcuda.so.1 is not found; install the NVIDIA driver, or run this under `sublet run --sim`"
    )]
    NoDriver,
    /// `CUDA_ERROR_OUT_OF_MEMORY` on an allocation.
    #[error("out of device memory: asked for {bytes} bytes ({}) for {what}; the device reports {}", crate::size::show(*.bytes), .available)]
    OutOfMemory {
        /// The size of the allocation.
        bytes: u64,
        /// What it was for.
        what: &'static str,
        /// Free and total memory, or why they are unknown.
        available: String,
    },
    /// Another error of the driver.
    #[error("{what}: {status}")]
    Driver {
        /// What was tried.
        what: String,
        /// The error's name and number.
        status: String,
        /// Whether it is `CUDA_ERROR_OUT_OF_MEMORY`, of a call whose need is not known.
        out_of_memory: bool,
    },
}

pub(crate) fn failed(what: impl Into<String>, error: DriverError) -> GpuError {
    let name = error.error_name().ok().map(CStr::to_string_lossy);
    // CAST: the number of the status, for a reader who looks it up.
    let number = error.0 as u32;
    GpuError::Driver {
        what: what.into(),
        status: format!(
            "{} ({number})",
            name.as_deref().unwrap_or("an unknown CUDA error")
        ),
        out_of_memory: error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    }
}

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Arg {
    /// A device address or a 64-bit count.
    U64(u64),
    /// A 32-bit count.
    U32(u32),
    /// A number.
    F32(f32),
}

/// The shape of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    grid: (u32, u32, u32),
    block: (u32, u32, u32),
}

impl Shape {
    /// One block of 256 threads.
    pub const BLOCK: Shape = Shape {
        grid: (1, 1, 1),
        block: (256, 1, 1),
    };

    /// One block of one thread.
    pub const THREAD: Shape = Shape {
        grid: (1, 1, 1),
        block: (1, 1, 1),
    };

    /// Blocks of 256 threads, one thread per element up to 1024 blocks; the kernels stride over the
    /// rest.
    #[must_use]
    pub fn elements(count: u64) -> Shape {
        // CAST: clamped to 1024.
        Shape {
            grid: (count.div_ceil(256).clamp(1, 1024) as u32, 1, 1),
            ..Shape::BLOCK
        }
    }

    /// Blocks of 16 x 16 threads, one block per tile of 64 x 64 elements of a matrix; the kernel
    /// strides over the rest.
    #[must_use]
    pub fn tiles(rows: u32, cols: u32) -> Shape {
        let side = |extent: u32| extent.div_ceil(64).clamp(1, 1024);
        Shape {
            grid: (side(cols), side(rows), 1),
            block: (16, 16, 1),
        }
    }
}

/// A device's primary context with the kernels.
pub struct Gpu {
    context: Arc<CudaContext>,
    modules: Vec<sys::CUmodule>,
    kernels: HashMap<&'static str, sys::CUfunction>,
    allocated_bytes: Cell<u64>,
}

impl Gpu {
    /// Opens device `ordinal` and loads the entries `names` of the kernel library.
    ///
    /// # Errors
    /// When there is no driver or no such device, or when the driver refuses the kernels.
    pub fn open(ordinal: usize, names: &[&'static str]) -> Result<Rc<Gpu>, GpuError> {
        // SAFETY: loads the driver's library by name and unloads it again; its initialisers are the
        // driver's own.
        if !unsafe { sys::is_culib_present() } {
            return Err(GpuError::NoDriver);
        }
        let context = CudaContext::new(ordinal)
            .map_err(|error| failed(format!("cannot open CUDA device {ordinal}"), error))?;
        let mut gpu = Gpu {
            context,
            modules: Vec::new(),
            kernels: HashMap::new(),
            allocated_bytes: Cell::new(0),
        };
        for (module, ptx) in MODULES {
            let wanted = names
                .iter()
                .filter(|name| ptx.contains(&format!(".entry {name}(")));
            let mut wanted = wanted.peekable();
            if wanted.peek().is_none() {
                continue;
            }
            // SAFETY: the PTX is a static string that ends with a zero byte.
            let handle = unsafe { result::module::load_data(ptx.as_ptr().cast()) }
                .map_err(|error| failed(format!("cannot load the kernels `{module}`"), error))?;
            gpu.modules.push(handle);
            for name in wanted {
                let symbol = CString::new(*name).unwrap_or_default();
                // SAFETY: the module was just loaded and is unloaded only when `gpu` is dropped.
                let function = unsafe { result::module::get_function(handle, symbol) }
                    .map_err(|error| failed(format!("cannot find the kernel `{name}`"), error))?;
                gpu.kernels.insert(name, function);
            }
        }
        Ok(Rc::new(gpu))
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> String {
        self.context.name().unwrap_or_else(|_| "unknown".to_owned())
    }

    /// Bytes that the program's living buffers have.
    #[must_use]
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.get()
    }

    /// Allocates `count` elements of unknown content.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] when the device, or the job's quota, has no space.
    pub fn alloc<T: Element>(
        self: &Rc<Gpu>,
        what: &'static str,
        count: u64,
    ) -> Result<Buffer<T>, GpuError> {
        // CAST: an element has a few bytes. The driver refuses 0 bytes, and so never sees them.
        let bytes = count
            .saturating_mul(size_of::<T>() as u64)
            .max(size_of::<T>() as u64);
        // CAST: pointers have 64 bits on every platform with CUDA.
        // SAFETY: the context was made current on this thread by `open`, and `Gpu` cannot leave it.
        // What the memory holds is not read before it is written: buffers are `Element`s, valid for
        // all bits anyway.
        let dptr = unsafe { result::malloc_sync(bytes as usize) }.map_err(|error| {
            if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                GpuError::OutOfMemory {
                    bytes,
                    what,
                    available: self.available(),
                }
            } else {
                failed(format!("cannot allocate {bytes} bytes for {what}"), error)
            }
        })?;
        self.allocated_bytes.set(self.allocated_bytes.get() + bytes);
        Ok(Buffer {
            gpu: Rc::clone(self),
            dptr,
            count,
            bytes,
            what,
            element: PhantomData,
        })
    }

    fn available(&self) -> String {
        match self.context.mem_get_info() {
            Ok((free, total)) => {
                // CAST: sizes have 64 bits on every platform with CUDA.
                format!(
                    "{} free of {}",
                    crate::size::show(free as u64),
                    crate::size::show(total as u64)
                )
            }
            Err(_) => "no figures".to_owned(),
        }
    }

    /// Allocates a buffer with the content of `values`.
    ///
    /// # Errors
    /// As [`Gpu::alloc`] and [`Buffer::write`].
    pub fn upload<T: Element>(
        self: &Rc<Gpu>,
        what: &'static str,
        values: &[T],
    ) -> Result<Buffer<T>, GpuError> {
        // CAST: a length fits 64 bits.
        let buffer = self.alloc(what, values.len() as u64)?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// Queues the kernel `name` on the default stream.
    ///
    /// # Errors
    /// What the driver says to the launch, or to work before it.
    ///
    /// # Panics
    /// When `name` was not among those given to [`Gpu::open`].
    pub fn launch(&self, name: &'static str, shape: Shape, args: &[Arg]) -> Result<(), GpuError> {
        self.launch_on(result::stream::null(), name, shape, args)
    }

    /// Queues the kernel `name` on a stream, which may be one that is being captured.
    ///
    /// # Errors
    /// What the driver says to the launch, or to work before it.
    ///
    /// # Panics
    /// When `name` was not among those given to [`Gpu::open`].
    pub fn launch_into(
        &self,
        stream: sys::CUstream,
        name: &'static str,
        shape: Shape,
        args: &[Arg],
    ) -> Result<(), GpuError> {
        self.launch_on(stream, name, shape, args)
    }

    pub(crate) fn launch_on(
        &self,
        stream: sys::CUstream,
        name: &'static str,
        shape: Shape,
        args: &[Arg],
    ) -> Result<(), GpuError> {
        let function = self.kernels[name];
        // Little-endian, so a 32-bit parameter is the first half of the 64 bits.
        let mut bits = [0u64; 16];
        for (bits, arg) in bits.iter_mut().zip(args) {
            *bits = match arg {
                Arg::U64(value) => *value,
                Arg::U32(value) => u64::from(*value),
                Arg::F32(value) => u64::from(value.to_bits()),
            };
        }
        assert!(
            args.len() <= bits.len(),
            "{name} has {} parameters",
            args.len()
        );
        let mut pointers = bits
            .each_mut()
            .map(|bits| std::ptr::from_mut(bits).cast::<c_void>());
        // SAFETY: the function's module is loaded as long as `self`; the driver copies the
        // parameters, each at least as long as the kernel's own, before it returns; the callers in
        // this crate pass the addresses of living buffers with the lengths that the kernel expects,
        // and `Buffer`'s drop waits for the device.
        unsafe {
            result::launch_kernel(
                function,
                shape.grid,
                shape.block,
                0,
                stream,
                &mut pointers[..args.len()],
            )
        }
        .map_err(|error| failed(format!("cannot launch {name}"), error))
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// The error of work that failed.
    pub fn wait(&self) -> Result<(), GpuError> {
        self.context
            .synchronize()
            .map_err(|error| failed("waiting for the device", error))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        for module in self.modules.drain(..) {
            // SAFETY: loaded by `open`, unloaded once. Nothing more can be done about a failure on
            // the way out.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

/// What a buffer may hold: numbers that are valid for any bits.
pub trait Element: Copy + Default {}
impl Element for u8 {}
impl Element for u32 {}
impl Element for u64 {}
impl Element for f32 {}

/// Device memory, freed on drop.
pub struct Buffer<T> {
    gpu: Rc<Gpu>,
    dptr: u64,
    count: u64,
    bytes: u64,
    what: &'static str,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// The address of the buffer as a kernel's parameter.
    #[must_use]
    pub fn arg(&self) -> Arg {
        self.arg_at(0)
    }

    /// Bytes that the buffer takes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address of the first element.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.dptr
    }

    /// The address of element `index` as a kernel's parameter.
    ///
    /// # Panics
    /// When the buffer has no such element.
    #[must_use]
    pub fn arg_at(&self, index: u64) -> Arg {
        assert!(
            index == 0 || index < self.count,
            "{} has {} elements, not {index}",
            self.what,
            self.count
        );
        Arg::U64(self.dptr + index * size_of::<T>() as u64) // CAST: an element has a few bytes.
    }

    /// Writes `values` to the start of the buffer.
    ///
    /// # Errors
    /// What the driver says to the copy.
    ///
    /// # Panics
    /// When there are more values than elements.
    pub fn write(&self, values: &[T]) -> Result<(), GpuError> {
        self.write_at(0, values)
    }

    /// Writes `values` from element `index` on.
    ///
    /// # Errors
    /// What the driver says to the copy.
    ///
    /// # Panics
    /// When there are more values than elements from there on.
    pub fn write_at(&self, index: u64, values: &[T]) -> Result<(), GpuError> {
        assert!(
            index.saturating_add(values.len() as u64) <= self.count,
            "{} has {} elements",
            self.what,
            self.count
        );
        if values.is_empty() {
            return Ok(());
        }
        let to = self.dptr + index * size_of::<T>() as u64; // CAST: an element has a few bytes.
        // SAFETY: the buffer has space for `values` there, and the copy has read them when the call
        // returns.
        unsafe { result::memcpy_htod_sync(to, values) }
            .map_err(|error| failed(format!("copying {} to the device", self.what), error))
    }

    /// Reads the first `count` elements, after all work queued on the default stream.
    ///
    /// # Errors
    /// What the driver says to the copy, or to work before it.
    ///
    /// # Panics
    /// When the buffer has fewer elements.
    pub fn read(&self, count: usize) -> Result<Vec<T>, GpuError> {
        self.read_at(0, count)
    }

    /// Reads `count` elements from element `index` on, after all work queued on the default stream.
    ///
    /// # Errors
    /// As [`Buffer::read`].
    ///
    /// # Panics
    /// When the buffer has fewer elements from there on.
    pub fn read_at(&self, index: u64, count: usize) -> Result<Vec<T>, GpuError> {
        assert!(
            index.saturating_add(count as u64) <= self.count,
            "{} has {} elements",
            self.what,
            self.count
        );
        let from = self.dptr + index * size_of::<T>() as u64; // CAST: an element has a few bytes.
        let mut values = vec![T::default(); count];
        if count > 0 {
            // SAFETY: the buffer has `count` elements, `values` has space for them, and the copy is
            // done when the call returns.
            unsafe { result::memcpy_dtoh_sync(&mut values, from) }
                .map_err(|error| failed(format!("copying {} from the device", self.what), error))?;
        }
        Ok(values)
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        self.gpu
            .allocated_bytes
            .set(self.gpu.allocated_bytes.get() - self.bytes);
        // SAFETY: allocated by `Gpu::alloc` and freed once; cuMemFree waits for work that uses the
        // memory. Nothing more can be done about a failure on the way out.
        let _ = unsafe { result::free_sync(self.dptr) };
    }
}
