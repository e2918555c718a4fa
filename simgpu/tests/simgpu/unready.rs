//! What the driver answers before it is initialised, and on a machine without a device: as real
//! drivers do (`scripts/real-driver`).

use std::ffi::{CStr, c_void};

use shim_ffi::{CUresult, Symbol};
use simgpu::api;
use simgpu::entry::{In, Out, not_simulated};

use crate::support::*;

/// Stands for the exported address of a symbol.
fn address(symbol: Symbol) -> *const c_void {
    std::ptr::without_provenance(symbol as usize + 1)
}

#[test]
fn a_machine_without_a_device_says_so_and_stays_uninitialised() {
    if !in_own_process("unready::a_machine_without_a_device_says_so_and_stays_uninitialised") {
        return;
    }
    simgpu::set("SUBLET_SIM_DEVICES", "0");
    let path = state_dir("none");
    simgpu::set("SUBLET_SIM_STATE", path.to_str().expect("a path in UTF-8"));
    let uninitialised = || {
        // SAFETY: the out-parameter is a local of `try_out`.
        let count = try_out::<i32>(|to| unsafe { api::cuDeviceGetCount(to) });
        assert_eq!(count, Err(CUresult::CUDA_ERROR_NOT_INITIALIZED));
        // SAFETY: no pointers but a null one.
        let no_event = unsafe { api::cuEventQuery(Default::default()) };
        assert_eq!(no_event, CUresult::CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(
            not_simulated(Symbol::cuMemGetHandleForAddressRange, false),
            CUresult::CUDA_ERROR_NOT_INITIALIZED
        );
    };
    uninitialised();
    for _ in 0..2 {
        // SAFETY: no pointers.
        assert_eq!(unsafe { api::cuInit(0) }, CUresult::CUDA_ERROR_NO_DEVICE);
        uninitialised();
    }
}

/// What both forms of the resolver answer: of the first the status and the place, of the second the
/// status, the query's result and the place. A place that was not written to is `None`.
type Answers = (u32, Option<usize>, u32, u32, Option<usize>);

fn resolve(name: &CStr, version: i32, flags: u64) -> Answers {
    const UNTOUCHED: *const c_void = std::ptr::without_provenance(usize::MAX);
    let place = |at: *const c_void| (at != UNTOUCHED).then_some(at as usize);
    let (mut first, mut second, mut found) = (UNTOUCHED, UNTOUCHED, 77);
    // SAFETY: a NUL-terminated name and valid pointers to locals.
    let (status, status_v2) = unsafe {
        let name = || In::new(name.as_ptr());
        (
            api::cuGetProcAddress(name(), Out::new(&raw mut first), version, flags),
            api::cuGetProcAddress_v2(
                name(),
                Out::new(&raw mut second),
                version,
                flags,
                Out::new(&raw mut found),
            ),
        )
    };
    (status.0, place(first), status_v2.0, found, place(second))
}

#[test]
fn the_resolver_answers_as_real_drivers_do() {
    if !in_own_process("unready::the_resolver_answers_as_real_drivers_do") {
        return;
    }
    simgpu::set("SUBLET_SIM_SET", "cuda_version=12020");
    api::set_exports(|symbol| Some(address(symbol)));
    let is = |symbol: Symbol| {
        let at = Some(address(symbol) as usize);
        (0, at, 0, 0, at)
    };
    const OLDER: Answers = (500, None, 0, 2, Some(0));
    const UNKNOWN: Answers = (500, None, 0, 1, Some(0));
    const WRONG: Answers = (1, None, 1, 77, None);
    assert_eq!(resolve(c"cuMemAlloc", 12000, 0), is(Symbol::cuMemAlloc_v2));
    assert_eq!(resolve(c"cuMemAlloc", 1000, 0), OLDER);
    assert_eq!(resolve(c"cuNobodyHasIt", 12000, 0), UNKNOWN);
    assert_eq!(resolve(c"cuMemAlloc_v2", 12000, 0), UNKNOWN);
    // The per-thread variant came later, and nothing stands in for it.
    assert_eq!(resolve(c"cuEventRecord", 6050, 2), OLDER);
    assert_eq!(
        resolve(c"cuEventRecord", 7000, 2),
        is(Symbol::cuEventRecord_ptsz)
    );
    assert_eq!(resolve(c"cuInit", 12000, 3), is(Symbol::cuInit));
    assert_eq!(resolve(c"cuInit", 12000, 4), WRONG);
    // Newer than all.
    assert_eq!(resolve(c"cuInit", -1, 0), is(Symbol::cuInit));
    // This driver is of 12.2, whatever is asked for.
    assert_eq!(
        resolve(c"cuCtxCreate", 13000, 0),
        is(Symbol::cuCtxCreate_v3)
    );
    assert_eq!(resolve(c"cuStreamGetDevice", 13000, 0), UNKNOWN);
    // SAFETY: the out-parameter is a local of `out`.
    let version = out::<i32>(|to| unsafe { api::cuDriverGetVersion(to) });
    assert_eq!(version, 12020);
}
