//! Calls of the driver as a program makes them, with statuses turned into panics or results.

use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::sync::Once;

use shim_ffi::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUresult, CUstream,
};
use simgpu::api;
use simgpu::entry::{In, Out};
use testbed::CommandWithin;

/// Panics unless the call succeeded.
#[track_caller]
pub fn ok(status: CUresult) {
    assert_eq!(
        status.name(),
        CUresult::CUDA_SUCCESS.name(),
        "status {}",
        status.0
    );
}

/// Calls with an out-parameter and returns what was written.
#[track_caller]
pub fn out<T: Default>(call: impl FnOnce(Out<T>) -> CUresult) -> T {
    try_out(call).unwrap_or_else(|status| panic!("status {}", status.0))
}

/// The same with the status.
pub fn try_out<T: Default>(call: impl FnOnce(Out<T>) -> CUresult) -> Result<T, CUresult> {
    let mut value = T::default();
    // SAFETY: a local that outlives the call.
    let status = call(unsafe { Out::new(&raw mut value) });
    status.ok().map(|()| value)
}

/// A directory of its own for shared state.
pub fn state_dir(name: &str) -> PathBuf {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    dir
}

/// Settings of the driver that the tests of this process share.
const SETTINGS: &[(&str, &str)] = &[
    ("SUBLET_SIM_PROFILE", "h200"),
    ("SUBLET_SIM_DEVICES", "2"),
    ("SUBLET_SIM_CAPACITY", "8GiB"),
    ("SUBLET_SIM_CONTEXT", "64MiB"),
    ("SUBLET_SIM_FAULT", "sticky:kernel=poison"),
];

/// Initialises the driver of this process once, with state of its own, and makes device 0's context
/// current.
pub fn driver() -> CUcontext {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let inherited = std::env::var("SUBLET_SIM_STATE").is_ok();
        if !inherited {
            simgpu::set(
                "SUBLET_SIM_STATE",
                state_dir("own").to_str().expect("a path in UTF-8"),
            );
            SETTINGS
                .iter()
                .for_each(|(name, value)| simgpu::set(name, value));
        }
        // SAFETY: no pointers.
        ok(unsafe { api::cuInit(0) });
    });
    context(0)
}

/// Retains and makes current the primary context of a device.
pub fn context(device: i32) -> CUcontext {
    // SAFETY: the out-parameter is a local of `out`.
    let context = out(|to| unsafe { api::cuDevicePrimaryCtxRetain(to, CUdevice(device)) });
    // SAFETY: no pointers.
    ok(unsafe { api::cuCtxSetCurrent(context) });
    context
}

pub fn alloc(bytes: usize) -> CUdeviceptr {
    try_alloc(bytes).unwrap_or_else(|status| panic!("cuMemAlloc({bytes}) -> {}", status.0))
}

pub fn try_alloc(bytes: usize) -> Result<CUdeviceptr, CUresult> {
    // SAFETY: the out-parameter is a local of `try_out`.
    try_out(|to| unsafe { api::cuMemAlloc_v2(to, bytes) })
}

pub fn free(address: CUdeviceptr) {
    // SAFETY: no pointers of ours.
    ok(unsafe { api::cuMemFree_v2(address) });
}

pub fn upload<T: Copy>(to: CUdeviceptr, data: &[T]) {
    // SAFETY: the slice has as many bytes as are copied.
    ok(unsafe { api::cuMemcpyHtoD_v2(to, data.as_ptr().cast(), size_of_val(data)) });
}

pub fn download<T: Copy + Default>(from: CUdeviceptr, count: usize) -> Vec<T> {
    let mut data = vec![T::default(); count];
    // SAFETY: the vector has as many bytes as are copied.
    ok(unsafe { api::cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), from, size_of_val(&data[..])) });
    data
}

pub fn stream(flags: u32) -> CUstream {
    // SAFETY: the out-parameter is a local of `out`.
    out(|to| unsafe { api::cuStreamCreate(to, flags) })
}

pub fn event(flags: u32) -> CUevent {
    // SAFETY: the out-parameter is a local of `out`.
    out(|to| unsafe { api::cuEventCreate(to, flags) })
}

pub fn synchronize() {
    // SAFETY: no pointers.
    ok(unsafe { api::cuCtxSynchronize() });
}

/// A PTX module that declares kernels by name and parameter types.
pub fn module(kernels: &[(&str, &[&str])]) -> CUmodule {
    let mut text = String::from(
        ".version 7.0\n.target sm_70\n.address_size 64\n.visible .global .align 4 .u32 answer = 42;\n",
    );
    for (name, params) in kernels {
        let list: Vec<String> = params
            .iter()
            .enumerate()
            .map(|(at, ty)| format!(".param .{ty} {name}_param_{at}"))
            .collect();
        text.push_str(&format!(
            ".visible .entry {name}({}) {{ ret; }}\n",
            list.join(", ")
        ));
    }
    let text = CString::new(text).expect("no NUL");
    // SAFETY: the text is NUL-terminated.
    out(|to| unsafe { api::cuModuleLoadData(to, text.as_ptr().cast()) })
}

pub fn function(module: CUmodule, name: &str) -> CUfunction {
    let name = CString::new(name).expect("no NUL");
    // SAFETY: the name is NUL-terminated.
    out(|to| unsafe { api::cuModuleGetFunction(to, module, In::new(name.as_ptr())) })
}

/// Launches one block of one thread; each argument is a word of 8 bytes.
pub fn try_launch(function: CUfunction, stream: CUstream, args: &[u64]) -> Result<(), CUresult> {
    try_launch_block(function, stream, 1, args)
}

/// Launches one block of some threads; each argument is a word of 8 bytes.
pub fn try_launch_block(
    function: CUfunction,
    stream: CUstream,
    threads: u32,
    args: &[u64],
) -> Result<(), CUresult> {
    let pointers: Vec<*mut c_void> = args
        .iter()
        .map(|arg| std::ptr::from_ref(arg).cast_mut().cast())
        .collect();
    // SAFETY: one pointer per parameter, each to at least as many bytes as the parameter has.
    let status = unsafe {
        api::cuLaunchKernel(
            function,
            1,
            1,
            1,
            threads,
            1,
            1,
            0,
            stream,
            In::new(pointers.as_ptr()),
            In::new(std::ptr::null()),
        )
    };
    status.ok()
}

#[track_caller]
pub fn launch(function: CUfunction, stream: CUstream, args: &[u64]) {
    try_launch(function, stream, args).unwrap_or_else(|status| panic!("launch -> {}", status.0));
}

/// The library's kernel that keeps the device busy for a number of microseconds.
pub fn busy() -> CUfunction {
    function(module(&[("sublet_busy_us", &["u64"])]), "sublet_busy_us")
}

/// True in a process that runs this test only; otherwise starts one and waits for it.
pub fn in_own_process(test: &str) -> bool {
    const MARK: &str = "SIMGPU_TEST_ALONE";
    if std::env::var(MARK).is_ok() {
        return true;
    }
    let status = std::process::Command::new(std::env::current_exe().expect("a path"))
        .args(["--exact", test, "--test-threads=1"])
        .env(MARK, "1")
        .status_within(testbed::PATIENCE);
    assert!(status.success(), "{test} failed in its own process");
    false
}
