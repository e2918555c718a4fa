//! What a replay calls of the driver, found by name as any program finds it.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use libloading::Library;
use shim_ffi::{CUDA_KERNEL_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUresult};

/// A handle or an address.
pub type Word = usize;

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($arg:ident: $ty:ty),*);)*) => {
        /// The driver's functions.
        pub struct Cuda {
            $($name: unsafe extern "C" fn($($ty),*) -> CUresult,)*
            error_name: unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult,
            dilation: Option<unsafe extern "C" fn() -> u32>,
            step: Option<unsafe extern "C" fn() -> i32>,
            /// The functions lie in it.
            _library: Library,
        }

        impl Cuda {
            fn of(library: Library) -> anyhow::Result<Self> {
                // SAFETY: each is a function of the driver's of that name, by its documentation of
                // these parameters, or of the simulated one's; they are kept no longer than the
                // library. The last one is the preload library's own, where that is there.
                unsafe {
                    Ok(Self {
                        $($name: *library
                            .get(concat!($symbol, "\0").as_bytes())
                            .with_context(|| concat!("the driver has no ", $symbol))?,)*
                        error_name: *library
                            .get(b"cuGetErrorName\0")
                            .context("the driver has no cuGetErrorName")?,
                        dilation: library
                            .get(b"sublet_simgpu_dilation\0")
                            .ok()
                            .map(|function| *function),
                        step: {
                            let at = nix::libc::dlsym(nix::libc::RTLD_DEFAULT, c"sublet_step".as_ptr());
                            (!at.is_null()).then(|| {
                                std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> i32>(at)
                            })
                        },
                        _library: library,
                    })
                }
            }

            $(
                /// The driver's function.
                ///
                /// # Errors
                /// What the driver answers.
                ///
                /// # Safety
                /// As its documentation says.
                #[allow(clippy::too_many_arguments, reason = "the driver's own parameters")]
                pub unsafe fn $name(&self, $($arg: $ty),*) -> anyhow::Result<()> {
                    // SAFETY: the caller's own promise.
                    let status = unsafe { (self.$name)($($arg),*) };
                    match status.is_ok() {
                        true => Ok(()),
                        false => Err(self.failed($symbol, status)),
                    }
                }
            )*
        }
    };
}

functions! {
    init = "cuInit" (flags: u32);
    device_get = "cuDeviceGet" (device: *mut i32, ordinal: i32);
    device_name = "cuDeviceGetName" (name: *mut c_char, bytes: i32, device: i32);
    device_attribute = "cuDeviceGetAttribute" (value: *mut i32, attribute: u32, device: i32);
    primary_retain = "cuDevicePrimaryCtxRetain" (context: *mut Word, device: i32);
    set_current = "cuCtxSetCurrent" (context: Word);
    synchronize = "cuCtxSynchronize" ();
    module_load = "cuModuleLoadData" (module: *mut Word, image: *const c_void);
    function = "cuModuleGetFunction" (function: *mut Word, module: Word, name: *const c_char);
    function_set = "cuFuncSetAttribute" (function: Word, attribute: u32, value: i32);
    occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor" (blocks: *mut i32, function: Word, threads: i32, shared: usize);
    launch = "cuLaunchKernel" (function: Word, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Word, parameters: *mut *mut c_void, extra: *mut *mut c_void);
    alloc = "cuMemAlloc_v2" (address: *mut Word, bytes: usize);
    free = "cuMemFree_v2" (address: Word);
    alloc_async = "cuMemAllocAsync" (address: *mut Word, bytes: usize, stream: Word);
    free_async = "cuMemFreeAsync" (address: Word, stream: Word);
    alloc_managed = "cuMemAllocManaged" (address: *mut Word, bytes: usize, flags: u32);
    alloc_host = "cuMemHostAlloc" (address: *mut Word, bytes: usize, flags: u32);
    free_host = "cuMemFreeHost" (address: Word);
    lock = "cuMemHostRegister_v2" (address: Word, bytes: usize, flags: u32);
    unlock = "cuMemHostUnregister" (address: Word);
    copy_in = "cuMemcpyHtoD_v2" (to: Word, from: Word, bytes: usize);
    copy_out = "cuMemcpyDtoH_v2" (to: Word, from: Word, bytes: usize);
    copy_within = "cuMemcpyDtoD_v2" (to: Word, from: Word, bytes: usize);
    copy_in_async = "cuMemcpyHtoDAsync_v2" (to: Word, from: Word, bytes: usize, stream: Word);
    copy_out_async = "cuMemcpyDtoHAsync_v2" (to: Word, from: Word, bytes: usize, stream: Word);
    copy_within_async = "cuMemcpyDtoDAsync_v2" (to: Word, from: Word, bytes: usize, stream: Word);
    fill = "cuMemsetD8_v2" (at: Word, value: u8, bytes: usize);
    fill_async = "cuMemsetD8Async" (at: Word, value: u8, bytes: usize, stream: Word);
    stream_create = "cuStreamCreateWithPriority" (stream: *mut Word, flags: u32, priority: i32);
    stream_destroy = "cuStreamDestroy_v2" (stream: Word);
    stream_wait = "cuStreamSynchronize" (stream: Word);
    stream_wait_event = "cuStreamWaitEvent" (stream: Word, event: Word, flags: u32);
    event_create = "cuEventCreate" (event: *mut Word, flags: u32);
    event_destroy = "cuEventDestroy_v2" (event: Word);
    event_record = "cuEventRecord" (event: Word, stream: Word);
    event_wait = "cuEventSynchronize" (event: Word);
    event_time = "cuEventElapsedTime" (ms: *mut f32, from: Word, to: Word);
    graph_create = "cuGraphCreate" (graph: *mut Word, flags: u32);
    graph_destroy = "cuGraphDestroy" (graph: Word);
    graph_kernel = "cuGraphAddKernelNode_v2" (node: *mut Word, graph: Word, before: *const Word, count: usize, parameters: *const CUDA_KERNEL_NODE_PARAMS);
    graph_copy = "cuGraphAddMemcpyNode" (node: *mut Word, graph: Word, before: *const Word, count: usize, parameters: *const CUDA_MEMCPY3D, context: Word);
    graph_fill = "cuGraphAddMemsetNode" (node: *mut Word, graph: Word, before: *const Word, count: usize, parameters: *const CUDA_MEMSET_NODE_PARAMS, context: Word);
    graph_empty = "cuGraphAddEmptyNode" (node: *mut Word, graph: Word, before: *const Word, count: usize);
    graph_edges = "cuGraphAddDependencies" (graph: Word, from: *const Word, to: *const Word, count: usize);
    graph_instantiate = "cuGraphInstantiateWithFlags" (exec: *mut Word, graph: Word, flags: u64);
    graph_launch = "cuGraphLaunch" (exec: Word, stream: Word);
    graph_exec_destroy = "cuGraphExecDestroy" (exec: Word);
}

impl Cuda {
    /// Opens the driver: this library, or the one that the dynamic linker finds.
    ///
    /// # Errors
    /// There is none, or it lacks a function.
    pub fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let name = path.unwrap_or(Path::new("libcuda.so.1"));
        // SAFETY: the driver's initialisers are the driver's own.
        let library = unsafe { Library::new(name) }.map_err(|error| {
            anyhow!(error).context(format!(
                "cannot open the CUDA driver {} (--sim replays on the simulated GPU)",
                name.display()
            ))
        })?;
        let cuda = Self::of(library)?;
        // SAFETY: no flags.
        unsafe { cuda.init(0) }.context("there is no GPU that could be used")?;
        Ok(cuda)
    }

    fn failed(&self, call: &str, status: CUresult) -> anyhow::Error {
        let mut name = std::ptr::null();
        // SAFETY: a valid pointer to a local; the name is a static string of the driver's.
        let name = unsafe {
            let _ = (self.error_name)(status, &raw mut name);
            match name.is_null() {
                true => "an unknown error".into(),
                false => CStr::from_ptr(name).to_string_lossy(),
            }
        };
        anyhow!("{call} answers {name} ({})", status.0)
    }

    /// What a simulated driver multiplies all times by, which is `asked` where a job's preload
    /// library is before it: the arbiter has seen to that. `None`: a real one.
    pub fn dilation(&self, asked: u32) -> Option<u32> {
        match self.dilation {
            // SAFETY: callable at any time after `cuInit`.
            Some(dilation) => Some(unsafe { dilation() }),
            None => self.name(0).contains("simulated").then_some(asked),
        }
    }

    /// The end of an iteration, where somebody asks for it.
    pub fn step(&self) {
        if let Some(step) = self.step {
            // SAFETY: callable from any thread at any time.
            unsafe { step() };
        }
    }

    /// The primary context of a device.
    ///
    /// # Errors
    /// There is no such device.
    pub fn primary(&self, ordinal: u32) -> anyhow::Result<(i32, Word)> {
        let (mut device, mut context) = (0, 0);
        let Ok(number) = i32::try_from(ordinal) else {
            bail!("there is no device {ordinal}");
        };
        // SAFETY: valid pointers to locals.
        unsafe {
            self.device_get(&raw mut device, number)
                .with_context(|| format!("the recording uses device {ordinal}"))?;
            self.primary_retain(&raw mut context, device)?;
        }
        Ok((device, context))
    }

    /// A device's name.
    pub fn name(&self, device: i32) -> String {
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: a buffer of that many bytes, which stays zero-terminated.
        unsafe {
            let _ = self.device_name(name.as_mut_ptr(), 255, device);
            CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
        }
    }
}
