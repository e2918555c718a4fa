//! What the tests of real programs taught: answers of the driver that they depend on.

use std::ffi::{CString, c_int, c_void};

use shim_ffi::{
    CUdevice, CUdeviceptr, CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeParams, CUmemoryPool,
    CUresult, CUstream,
};
use simgpu::api;
use simgpu::entry::{In, Out};

use crate::support::*;

const BAD: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

#[test]
fn a_fill_of_memory_that_the_host_sees_is_done_when_the_call_returns() {
    driver();
    const BYTES: usize = 1 << 20;
    let mut own = vec![0_u8; BYTES];
    // SAFETY: out-parameters are locals; the vector outlives its registration; the host may read
    // all three ranges.
    unsafe {
        let locked = out(|to| api::cuMemHostAlloc(to, BYTES, 0)).cast::<u8>();
        let managed = out(|to| api::cuMemAllocManaged(to, BYTES, 1));
        ok(api::cuMemHostRegister_v2(own.as_mut_ptr().cast(), BYTES, 0));
        for (at, name) in [
            (locked, "page-locked"),
            (managed.0 as *mut u8, "managed"),
            (own.as_mut_ptr(), "registered"),
        ] {
            for round in 1..=50_u8 {
                ok(api::cuMemsetD8_v2(CUdeviceptr(at as u64), round, BYTES));
                let seen = [at.read_volatile(), at.add(BYTES - 1).read_volatile()];
                assert_eq!(seen, [round; 2], "{name} memory");
            }
        }
        ok(api::cuMemHostUnregister(own.as_mut_ptr().cast()));
        ok(api::cuMemFreeHost(locked.cast()));
        free(managed);
    }
}

#[test]
fn launches_of_the_first_interface_use_what_was_set_before() {
    driver();
    let module = module(&[("sublet_fill_f32", &["u64", "f32", "u64"])]);
    let fill = function(module, "sublet_fill_f32");
    let address = alloc(64);
    let (stream, value) = (stream(1), 2.5_f32);
    // SAFETY: pointers are to locals of the sizes that are named.
    unsafe {
        // Nothing was set yet: no block, no arguments.
        assert_eq!(api::cuLaunchGrid(fill, 1, 1), BAD);
        ok(api::cuFuncSetBlockShape(fill, 32, 1, 1));
        assert_eq!(api::cuFuncSetBlockShape(fill, 0, 1, 1), BAD);
        assert_eq!(api::cuFuncSetBlockShape(fill, 1024, 2, 1), BAD);
        ok(api::cuFuncSetSharedSize(fill, 128));
        assert_eq!(api::cuLaunchGrid(fill, 1, 1), BAD);
        ok(api::cuParamSetSize(fill, 24));
        let mut target = address.0;
        ok(api::cuParamSetv(fill, 0, (&raw mut target).cast(), 8));
        ok(api::cuParamSetf(fill, 8, value));
        ok(api::cuParamSeti(fill, 16, 16));
        ok(api::cuParamSeti(fill, 20, 0));
        assert_eq!(api::cuParamSeti(fill, -4, 0), BAD);
        assert_eq!(api::cuParamSetv(fill, 0, std::ptr::null_mut(), 8), BAD);
        ok(api::cuLaunchGrid(fill, 1, 1));
        assert_eq!(download::<f32>(address, 16), [value; 16]);
        ok(api::cuParamSetf(fill, 8, 3.0));
        ok(api::cuLaunch(fill));
        assert_eq!(download::<f32>(address, 16), [3.0; 16]);
        ok(api::cuParamSetf(fill, 8, 4.0));
        ok(api::cuLaunchGridAsync(fill, 2, 1, stream));
        ok(api::cuStreamSynchronize(stream));
        assert_eq!(download::<f32>(address, 16), [4.0; 16]);
        assert_eq!(api::cuLaunchGrid(fill, 0, 1), BAD);
    }
    free(address);
}

#[test]
fn a_null_kernel_or_function_has_no_name_and_that_is_a_wrong_value() {
    driver();
    // SAFETY: the out-parameters are locals.
    unsafe {
        let name = |call: &dyn Fn(Out<usize>) -> CUresult| try_out(call);
        let none = name(&|to| api::cuFuncGetName(Out::new(to.raw().cast()), NULL_FUNCTION));
        assert_eq!(none, Err(BAD));
        let none = name(&|to| api::cuKernelGetName(Out::new(to.raw().cast()), NULL_KERNEL));
        assert_eq!(none, Err(BAD));
    }
}
const NULL_FUNCTION: shim_ffi::CUfunction = shim_ffi::CUfunction::NULL;
const NULL_KERNEL: shim_ffi::CUkernel = shim_ffi::CUkernel::NULL;

#[test]
fn the_shared_memory_that_is_left_is_what_the_function_may_have() {
    driver();
    let kernel = function(module(&[("sublet_busy_us", &["u64"])]), "sublet_busy_us");
    // SAFETY: the out-parameters are locals.
    unsafe {
        let left = || -> usize {
            out(|to| api::cuOccupancyAvailableDynamicSMemPerBlock(to, kernel, 1, 256))
        };
        assert_eq!(left(), 48 << 10);
        ok(api::cuFuncSetAttribute(kernel, 8, 100 << 10));
        assert_eq!(left(), 100 << 10);
    }
}

#[test]
fn a_pool_with_a_small_bound_has_one_granule() {
    driver();
    let mut props = shim_ffi::CUmemPoolProps::default();
    props.allocType.0 = 1;
    props.location.r#type.0 = 1;
    props.maxSize = 2048;
    let stream = stream(1);
    // SAFETY: pointers are to locals.
    unsafe {
        let pool: CUmemoryPool = out(|to| api::cuMemPoolCreate(to, In::new(&raw const props)));
        let first = out(|to| api::cuMemAllocFromPoolAsync(to, 2048, pool, stream));
        let more: Result<CUdeviceptr, _> =
            try_out(|to| api::cuMemAllocFromPoolAsync(to, 4 << 20, pool, stream));
        assert_eq!(more, Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        ok(api::cuMemFreeAsync(first, stream));
        ok(api::cuStreamSynchronize(stream));
        ok(api::cuMemPoolDestroy(pool));
    }
}

#[test]
fn a_stream_that_joined_a_capture_may_be_destroyed_in_it() {
    driver();
    let (origin, forked) = (stream(1), stream(1));
    let (begin, end) = (event(2), event(2));
    let address = alloc(64);
    upload(address, &[0_u32; 16]);
    // SAFETY: handles, device addresses and out-parameters that are locals.
    unsafe {
        ok(api::cuStreamBeginCapture_v2(origin, 1));
        ok(api::cuEventRecord(begin, origin));
        ok(api::cuStreamWaitEvent(forked, begin, 0));
        ok(api::cuMemsetD32Async(address, 7, 4, forked));
        ok(api::cuEventRecord(end, forked));
        ok(api::cuStreamWaitEvent(origin, end, 0));
        ok(api::cuStreamDestroy_v2(forked));
        ok(api::cuMemsetD32Async(
            CUdeviceptr(address.0 + 16),
            8,
            4,
            origin,
        ));
        let graph: CUgraph = out(|to| api::cuStreamEndCapture(origin, to));
        let exec: CUgraphExec = out(|to| api::cuGraphInstantiateWithFlags(to, graph, 0));
        ok(api::cuGraphLaunch(exec, origin));
        ok(api::cuStreamSynchronize(origin));
    }
    assert_eq!(download::<u32>(address, 8), [7, 7, 7, 7, 8, 8, 8, 8]);
    free(address);
}

/// `CUDA_CONDITIONAL_NODE_PARAMS`, in the words of the union that it is in.
fn conditional_params(handle: u64, kind: u32, bodies: u32) -> CUgraphNodeParams {
    let mut params = CUgraphNodeParams::default();
    params.r#type.0 = 13;
    params.payload[0] = handle;
    params.payload[1] = u64::from(kind) | u64::from(bodies) << 32;
    params
}

/// A graph with one conditional node whose bodies write their number.
fn conditional(address: CUdeviceptr, kind: u32, bodies: u32, default: u32) -> CUgraph {
    // SAFETY: handles, locals, and the list of bodies that the driver gives.
    unsafe {
        let graph: CUgraph = out(|to| api::cuGraphCreate(to, 0));
        let none = shim_ffi::CUcontext::NULL;
        let handle = out(|to| api::cuGraphConditionalHandleCreate(to, graph, none, default, 1));
        let mut params = conditional_params(handle, kind, bodies);
        let nothing = || In::new(std::ptr::null());
        let _: CUgraphNode =
            out(|to| api::cuGraphAddNode(to, graph, nothing(), 0, Out::new(&raw mut params)));
        let shown = params.payload[2] as *const CUgraph;
        for number in 0..bodies {
            let fill = shim_ffi::CUDA_MEMSET_NODE_PARAMS {
                dst: address,
                pitch: 0,
                value: number + 1,
                elementSize: 4,
                width: 1,
                height: 1,
            };
            let body = shown.add(number as usize).read();
            let _: CUgraphNode = out(|to| {
                api::cuGraphAddMemsetNode(to, body, nothing(), 0, In::new(&raw const fill), none)
            });
        }
        graph
    }
}

#[test]
fn a_conditional_node_runs_the_body_that_its_default_chooses() {
    driver();
    let stream = stream(1);
    let address = alloc(4);
    let result = |exec: CUgraphExec| {
        upload(address, &[0_u32]);
        // SAFETY: handles only.
        unsafe {
            ok(api::cuGraphLaunch(exec, stream));
            ok(api::cuStreamSynchronize(stream));
        }
        download::<u32>(address, 1)[0]
    };
    let instantiate = |graph: CUgraph| -> CUgraphExec {
        // SAFETY: the out-parameter is a local.
        out(|to| unsafe { api::cuGraphInstantiateWithFlags(to, graph, 0) })
    };
    const IF: u32 = 0;
    const WHILE: u32 = 1;
    const SWITCH: u32 = 2;
    for (kind, bodies, default, expected) in [
        (IF, 1, 1, 1),
        (IF, 1, 0, 0),
        (IF, 2, 0, 2),
        (WHILE, 1, 0, 0),
        // What would end the loop is a kernel, and those compute nothing here.
        (WHILE, 1, 1, 1),
        (SWITCH, 3, 2, 3),
        (SWITCH, 3, 3, 0),
    ] {
        let exec = instantiate(conditional(address, kind, bodies, default));
        let found = result(exec);
        assert_eq!(
            found, expected,
            "kind {kind}, {bodies} bodies, default {default}"
        );
    }
    // An executable graph takes over another one's condition.
    let exec = instantiate(conditional(address, SWITCH, 3, 0));
    assert_eq!(result(exec), 1);
    let other = conditional(address, SWITCH, 3, 1);
    let mut info = shim_ffi::CUgraphExecUpdateResultInfo::default();
    // SAFETY: handles and a local.
    ok(unsafe { api::cuGraphExecUpdate_v2(exec, other, Out::new(&raw mut info)) });
    assert_eq!(result(exec), 2);
    let fewer = conditional(address, SWITCH, 2, 1);
    // SAFETY: handles and a local.
    let refused = unsafe { api::cuGraphExecUpdate_v2(exec, fewer, Out::new(&raw mut info)) };
    assert_eq!(refused, CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
    free(address);
}

#[test]
fn a_graph_is_drawn_with_its_nodes_and_edges() {
    driver();
    let address = alloc(4);
    let graph = conditional(address, 2, 2, 0);
    let path = state_dir("dot").join("graph.dot");
    let name = CString::new(path.to_str().expect("a path in UTF-8")).expect("no NUL");
    // SAFETY: a NUL-terminated path.
    ok(unsafe { api::cuGraphDebugDotPrint(graph, In::new(name.as_ptr()), 0) });
    let text = std::fs::read_to_string(path).expect("the file");
    assert!(text.starts_with("digraph dot {"), "{text}");
    assert!(text.contains("CONDITIONAL"), "{text}");
    assert_eq!(text.matches("MEMSET").count(), 2, "{text}");
    free(address);
}

#[test]
fn settings_of_core_dumps_are_given_back() {
    driver();
    const SWITCH: u32 = 2;
    const FILE: u32 = 5;
    // SAFETY: pointers are to locals of the sizes that are named.
    unsafe {
        let mut one = 1_usize;
        ok(api::cuCoredumpSetAttributeGlobal(
            SWITCH,
            (&raw const one).cast::<c_void>(),
            In::new(&raw const one),
        ));
        let mut value = 0_u8;
        let to = Out::new((&raw mut value).cast::<c_void>());
        ok(api::cuCoredumpGetAttributeGlobal(
            SWITCH,
            to,
            Out::new(&raw mut one),
        ));
        assert_eq!((value, one), (1, 1));
        let length = 8_usize;
        ok(api::cuCoredumpSetAttributeGlobal(
            FILE,
            c"corefile".as_ptr().cast(),
            In::new(&raw const length),
        ));
        let (mut name, mut space) = ([0_u8; 64], 64_usize);
        let to = Out::new((&raw mut name).cast::<c_void>());
        ok(api::cuCoredumpGetAttribute(
            FILE,
            to,
            Out::new(&raw mut space),
        ));
        assert_eq!(&name[..space], b"corefile\0");
        let wrong = api::cuCoredumpGetAttributeGlobal(
            99,
            Out::new((&raw mut value).cast()),
            Out::new(&raw mut one),
        );
        assert_eq!(wrong, BAD);
    }
}

#[test]
fn advice_for_managed_memory_is_given_back() {
    driver();
    const MOSTLY_READ: u32 = 1;
    const PREFERRED: u32 = 2;
    const ACCESSED_BY: u32 = 3;
    const PREFETCHED: u32 = 4;
    // SAFETY: out-parameters are locals of the sizes that are named.
    unsafe {
        let address: CUdeviceptr = out(|to| api::cuMemAllocManaged(to, 1 << 20, 1));
        let ask = |attribute: u32| -> [c_int; 2] {
            let mut list = [9; 2];
            let bytes = if attribute == ACCESSED_BY { 8 } else { 4 };
            let to = Out::new((&raw mut list).cast::<c_void>());
            ok(api::cuMemRangeGetAttribute(
                to,
                bytes,
                attribute,
                address,
                1 << 20,
            ));
            list
        };
        assert_eq!(ask(MOSTLY_READ)[0], 0);
        assert_eq!(ask(PREFERRED)[0], -2);
        ok(api::cuMemAdvise(address, 1 << 20, 1, 0));
        ok(api::cuMemAdvise(address, 1 << 20, 3, -1));
        ok(api::cuMemAdvise(address, 1 << 20, 5, 0));
        ok(api::cuMemPrefetchAsync(address, 1 << 20, 0, CUstream::NULL));
        assert_eq!(ask(MOSTLY_READ)[0], 1);
        assert_eq!(ask(PREFERRED)[0], -1);
        assert_eq!(ask(ACCESSED_BY), [0, -2]);
        assert_eq!(ask(PREFETCHED)[0], 0);
        let plain = alloc(4096);
        let mut word = 0;
        let to = Out::new((&raw mut word).cast::<c_void>());
        assert_eq!(api::cuMemRangeGetAttribute(to, 4, 1, plain, 4096), BAD);
        free(plain);
        free(address);
    }
}

#[test]
fn a_green_context_has_the_part_that_it_was_made_from() {
    driver();
    const SM: u32 = 1;
    // SAFETY: out-parameters are locals; handles otherwise.
    unsafe {
        let before = out(|to| api::cuCtxGetCurrent(to));
        let mut whole = std::mem::MaybeUninit::uninit();
        ok(api::cuDeviceGetDevResource(
            CUdevice(0),
            Out::new(whole.as_mut_ptr()),
            SM,
        ));
        let whole = whole.assume_init();
        let mut parts = [whole; 3];
        let mut rest = whole;
        let mut count = 3;
        ok(api::cuDevSmResourceSplitByCount(
            Out::new(parts.as_mut_ptr()),
            Out::new(&raw mut count),
            In::new(&raw const whole),
            Out::new(&raw mut rest),
            0,
            10,
        ));
        assert_eq!(count, 3);
        // H200: 132 multiprocessors, in parts of eight.
        assert_eq!(parts.map(|part| part.count), [16; 3]);
        assert_eq!(rest.count, 132 - 48);
        let made = out(|to| api::cuDevResourceGenerateDesc(to, In::new(parts.as_ptr()), 1));
        let wrong = try_out(|to| api::cuGreenCtxCreate(to, made, CUdevice(0), 0));
        assert_eq!(wrong, Err(BAD));
        let green = out(|to| api::cuGreenCtxCreate(to, made, CUdevice(0), 1));
        let context = out(|to| api::cuCtxFromGreenCtx(to, green));
        ok(api::cuCtxSetCurrent(context));
        let stream: CUstream = out(|to| api::cuGreenCtxStreamCreate(to, green, 1, 0));
        assert_eq!(out(|to| api::cuStreamGetGreenCtx(stream, to)), green);
        ok(api::cuStreamGetDevResource(
            stream,
            Out::new(&raw mut rest),
            SM,
        ));
        assert_eq!(rest.count, 16);
        let address = alloc(64);
        ok(api::cuMemsetD32Async(address, 5, 16, stream));
        ok(api::cuStreamSynchronize(stream));
        assert_eq!(download::<u32>(address, 16), [5; 16]);
        free(address);
        ok(api::cuGreenCtxDestroy(green));
        assert_eq!(
            api::cuGreenCtxDestroy(green),
            CUresult::CUDA_ERROR_INVALID_CONTEXT
        );
        ok(api::cuCtxSetCurrent(before));
    }
}
