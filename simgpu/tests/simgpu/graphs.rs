//! Graphs, built and captured.

use shim_ffi::{
    CUDA_KERNEL_NODE_PARAMS, CUdeviceptr, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUresult,
    CUstream,
};
use simgpu::api;
use simgpu::entry::{In, Out};

use crate::support::*;

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

fn fill_kernel() -> CUfunction {
    function(
        module(&[("sublet_fill_f32", &["u64", "f32", "u64"])]),
        "sublet_fill_f32",
    )
}

fn begin(stream: CUstream, mode: u32) {
    // SAFETY: handles only.
    ok(unsafe { api::cuStreamBeginCapture_v2(stream, mode) });
}

fn end(stream: CUstream) -> Result<CUgraph, CUresult> {
    // SAFETY: the out-parameter is a local.
    try_out(|to| unsafe { api::cuStreamEndCapture(stream, to) })
}

fn instantiate(graph: CUgraph) -> CUgraphExec {
    // SAFETY: the out-parameter is a local.
    out(|to| unsafe { api::cuGraphInstantiateWithFlags(to, graph, 0) })
}

fn run(exec: CUgraphExec, stream: CUstream) {
    // SAFETY: handles only.
    unsafe {
        ok(api::cuGraphLaunch(exec, stream));
        ok(api::cuStreamSynchronize(stream));
    }
}

fn count(graph: CUgraph) -> usize {
    // SAFETY: null asks for the count only.
    out(|to| unsafe { api::cuGraphGetNodes(graph, Out::new(std::ptr::null_mut()), to) })
}

#[test]
fn captured_work_runs_at_launch_and_not_before() {
    driver();
    let stream = stream(1);
    let address = alloc(64);
    upload(address, &[0_f32; 16]);
    begin(stream, THREAD_LOCAL);
    launch(
        fill_kernel_relaxed(),
        stream,
        &[address.0, u64::from(3.0_f32.to_bits()), 16],
    );
    // SAFETY: device addresses only.
    ok(unsafe { api::cuMemsetD32Async(CUdeviceptr(address.0 + 60), 0, 1, stream) });
    let graph = end(stream).unwrap();
    assert_eq!(count(graph), 2);
    assert_eq!(download::<f32>(address, 1), [0.0]);
    let exec = instantiate(graph);
    for _ in 0..2 {
        run(exec, stream);
        assert_eq!(download::<f32>(address, 16)[14..], [3.0, 0.0]);
        upload(address, &[0_f32; 16]);
    }
    // SAFETY: handles only.
    unsafe {
        ok(api::cuGraphExecDestroy(exec));
        ok(api::cuGraphDestroy(graph));
        assert_eq!(
            api::cuGraphLaunch(exec, stream),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
    }
    free(address);
}

/// Loading a module is unsafe in a capture, unless the thread says otherwise.
fn fill_kernel_relaxed() -> CUfunction {
    let exchange = |mode: u32| {
        let mut mode = mode;
        // SAFETY: the pointer is to a local.
        ok(unsafe { api::cuThreadExchangeStreamCaptureMode(Out::new(&raw mut mode)) });
        mode
    };
    let before = exchange(RELAXED);
    let kernel = fill_kernel();
    assert_eq!(exchange(before), RELAXED);
    kernel
}

#[test]
fn a_capture_spreads_through_events_and_has_to_join() {
    driver();
    let (origin, side) = (stream(1), stream(1));
    let (fork, join) = (event(2), event(2));
    let words = alloc(8);
    // SAFETY: handles and device addresses only.
    unsafe {
        begin(origin, RELAXED);
        ok(api::cuMemsetD32Async(words, 1, 1, origin));
        ok(api::cuEventRecord(fork, origin));
        ok(api::cuStreamWaitEvent(side, fork, 0));
        ok(api::cuMemsetD32Async(CUdeviceptr(words.0 + 4), 2, 1, side));
        let status = out(|to| api::cuStreamIsCapturing(side, to));
        assert_eq!(status, 1_u32);
        assert_eq!(
            end(side),
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
        );
        assert_eq!(
            end(origin),
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        );

        begin(origin, RELAXED);
        ok(api::cuEventRecord(fork, origin));
        ok(api::cuStreamWaitEvent(side, fork, 0));
        ok(api::cuMemsetD32Async(words, 2, 1, side));
        assert_eq!(
            end(origin),
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
        );

        begin(origin, RELAXED);
        ok(api::cuMemsetD32Async(words, 7, 1, origin));
        ok(api::cuEventRecord(fork, origin));
        ok(api::cuStreamWaitEvent(side, fork, 0));
        ok(api::cuMemsetD32Async(CUdeviceptr(words.0 + 4), 8, 1, side));
        ok(api::cuEventRecord(join, side));
        ok(api::cuStreamWaitEvent(origin, join, 0));
        let graph = end(origin).unwrap();
        assert_eq!(count(graph), 2);
        run(instantiate(graph), side);
        assert_eq!(download::<u32>(words, 2), [7, 8]);
    }
    free(words);
}

#[test]
fn an_event_of_an_ended_capture_draws_nobody_into_it() {
    driver();
    let (origin, side) = (stream(1), stream(1));
    let fork = event(2);
    let word = alloc(4);
    // SAFETY: handles and device addresses only.
    unsafe {
        begin(origin, RELAXED);
        ok(api::cuMemsetD32Async(word, 1, 1, origin));
        ok(api::cuEventRecord(fork, origin));
        ok(api::cuGraphDestroy(end(origin).unwrap()));
        assert_eq!(
            api::cuStreamWaitEvent(side, fork, 0),
            CUresult::CUDA_ERROR_CAPTURED_EVENT
        );
        let status = out(|to| api::cuStreamIsCapturing(side, to));
        assert_eq!(status, 0_u32);
        ok(api::cuMemsetD32Async(word, 7, 1, side));
        ok(api::cuStreamSynchronize(side));
    }
    assert_eq!(download::<u32>(word, 1), [7]);
}

#[test]
fn unsafe_calls_invalidate_a_capture() {
    // Global captures endanger, and are endangered by, every other thread: alone in a process.
    if !in_own_process("graphs::unsafe_calls_invalidate_a_capture") {
        return;
    }
    driver();
    let stream = stream(0);
    begin(stream, GLOBAL);
    assert_eq!(
        try_alloc(16),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    );
    assert_eq!(
        end(stream),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    );

    // SAFETY: handles only.
    unsafe {
        begin(stream, RELAXED);
        free(alloc(16));
        assert_eq!(
            api::cuStreamSynchronize(stream),
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        );
        assert_eq!(
            end(stream),
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        );

        // The legacy stream would have to wait for the capturing one.
        begin(stream, RELAXED);
        let busy = busy();
        assert_eq!(
            try_launch(busy, CUstream::NULL, &[1]),
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        );
        assert_eq!(
            end(stream),
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        );
        assert_eq!(
            api::cuStreamBeginCapture_v2(CUstream::NULL, RELAXED),
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        );
    }
    launch(busy(), CUstream::NULL, &[1]);
    synchronize();
}

#[test]
fn built_graphs_respect_their_edges_and_take_new_parameters() {
    driver();
    let stream = stream(1);
    let address = alloc(64);
    let fill = fill_kernel();
    let word = |value: f32| [address.0, u64::from(value.to_bits()), 16];
    let params = |args: &[u64; 3]| {
        let pointers: Box<[*mut std::ffi::c_void; 3]> = Box::new(std::array::from_fn(|at| {
            (&raw const args[at]).cast_mut().cast()
        }));
        CUDA_KERNEL_NODE_PARAMS {
            func: fill,
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 32,
            blockDimY: 1,
            blockDimZ: 1,
            kernelParams: Box::leak(pointers).as_mut_ptr(),
            ..Default::default()
        }
    };
    // SAFETY: pointers are to locals.
    unsafe {
        let graph = out(|to| api::cuGraphCreate(to, 0));
        let none = In::new(std::ptr::null());
        let (first, second, third) = (word(1.0), word(2.0), word(3.0));
        let (first_params, second_params, third_params) =
            (params(&first), params(&second), params(&third));
        // Made in the wrong order; the edge puts it right.
        let last = out(|to| {
            api::cuGraphAddKernelNode_v2(to, graph, none, 0, In::new(&raw const second_params))
        });
        let early = out(|to| {
            api::cuGraphAddKernelNode_v2(to, graph, none, 0, In::new(&raw const first_params))
        });
        let (from, to) = (early, last);
        ok(api::cuGraphAddDependencies(
            graph,
            In::new(&raw const from),
            In::new(&raw const to),
            1,
        ));
        let circle =
            api::cuGraphAddDependencies(graph, In::new(&raw const to), In::new(&raw const from), 1);
        assert_eq!(circle, CUresult::CUDA_ERROR_INVALID_VALUE);
        let exec = instantiate(graph);
        run(exec, stream);
        assert_eq!(download::<f32>(address, 1), [2.0]);

        ok(api::cuGraphExecKernelNodeSetParams_v2(
            exec,
            last,
            In::new(&raw const third_params),
        ));
        run(exec, stream);
        assert_eq!(download::<f32>(address, 1), [3.0]);
        ok(api::cuGraphNodeSetEnabled(exec, last, 0));
        run(exec, stream);
        assert_eq!(download::<f32>(address, 1), [1.0]);

        let got: CUDA_KERNEL_NODE_PARAMS = out(|to| api::cuGraphKernelNodeGetParams_v2(last, to));
        assert_eq!((got.func, got.blockDimX), (fill, 32));
        assert_eq!(got.kernelParams.add(1).read().cast::<f32>().read(), 2.0);

        let clone = out(|to| api::cuGraphClone(to, graph));
        let copy: CUgraphNode = out(|to| api::cuGraphNodeFindInClone(to, last, clone));
        assert_ne!(copy, last);
        let parent = out(|to| api::cuGraphCreate(to, 0));
        out(|to| api::cuGraphAddChildGraphNode(to, parent, none, 0, clone));
        run(instantiate(parent), stream);
        assert_eq!(download::<f32>(address, 1), [2.0]);
    }
    free(address);
}

#[test]
fn a_graph_keeps_the_memory_of_its_allocation_nodes() {
    driver();
    let stream = stream(1);
    // SAFETY: out-parameters are locals; handles otherwise.
    unsafe {
        begin(stream, RELAXED);
        let block = out(|to| api::cuMemAllocAsync(to, 1 << 20, stream));
        ok(api::cuMemsetD32Async(block, 9, 4, stream));
        ok(api::cuMemFreeAsync(block, stream));
        let graph = end(stream).unwrap();
        let exec = instantiate(graph);
        ok(api::cuGraphDestroy(graph));
        run(exec, stream);
        assert_eq!(download::<u32>(block, 1), [9]);
        ok(api::cuGraphExecDestroy(exec));
        let mut data = 0_u32;
        let status = api::cuMemcpyDtoH_v2((&raw mut data).cast(), block, 4);
        assert_eq!(status, CUresult::CUDA_ERROR_INVALID_VALUE);
    }
}

#[test]
fn graph_memory_is_used_until_it_is_freed_and_reserved_until_it_is_trimmed() {
    if !in_own_process(
        "graphs::graph_memory_is_used_until_it_is_freed_and_reserved_until_it_is_trimmed",
    ) {
        return;
    }
    driver();
    let device = shim_ffi::CUdevice(0);
    let stream = stream(1);
    const MIB: u64 = 1 << 20;
    // Used now and at most, reserved now and at most.
    let figures = || {
        let figure = |which| {
            // SAFETY: the out-parameter is a local of `out`.
            out(|to| unsafe { api::cuDeviceGetGraphMemAttribute(device, which, to) })
        };
        [0, 1, 2, 3].map(|which| figure(which) / MIB)
    };
    let set = |which, value: u64| {
        // SAFETY: a pointer to a local.
        unsafe { api::cuDeviceSetGraphMemAttribute(device, which, In::new(&raw const value)) }
    };
    // SAFETY: no pointers.
    let trim = || ok(unsafe { api::cuDeviceGraphMemTrim(device) });
    assert_eq!(figures(), [0; 4]);
    // SAFETY: out-parameters are locals; handles otherwise.
    unsafe {
        let captured = |free: bool| {
            begin(stream, RELAXED);
            let block = out(|to| api::cuMemAllocAsync(to, 3 << 20, stream));
            ok(api::cuMemsetD32Async(block, 9, 4, stream));
            if free {
                ok(api::cuMemFreeAsync(block, stream));
            }
            let graph = end(stream).unwrap();
            let exec = instantiate(graph);
            run(exec, stream);
            ok(api::cuGraphDestroy(graph));
            (block, exec)
        };
        let gone = |block| {
            let mut data = 0_u32;
            let status = api::cuMemcpyDtoH_v2((&raw mut data).cast(), block, 4);
            assert_eq!(status, CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        // What a graph has given the program outlives it.
        let (block, exec) = captured(false);
        assert_eq!(figures(), [3, 3, 4, 4]);
        ok(api::cuGraphExecDestroy(exec));
        synchronize();
        trim();
        assert_eq!(download::<u32>(block, 1), [9]);
        assert_eq!(figures(), [3, 3, 4, 4]);
        ok(api::cuMemFreeAsync(block, stream));
        ok(api::cuStreamSynchronize(stream));
        gone(block);
        assert_eq!(figures(), [3, 3, 4, 4], "kept until it is trimmed");
        // The next graph has it again.
        let (block, exec) = captured(true);
        assert_eq!(figures(), [3, 3, 4, 4]);
        let (second, other) = captured(true);
        assert_eq!(figures(), [6, 6, 8, 8]);
        ok(api::cuGraphExecDestroy(exec));
        ok(api::cuGraphExecDestroy(other));
        gone(block);
        gone(second);
        synchronize();
        assert_eq!(figures(), [6, 6, 8, 8]);
        trim();
        assert_eq!(figures(), [0, 6, 0, 8]);
        // Only the highest can be set, and to nothing but 0.
        for (which, value) in [(0, 0), (2, 0), (1, 1), (3, 1), (4, 0)] {
            assert_eq!(set(which, value), CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        ok(set(1, 0));
        assert_eq!(figures(), [0, 0, 0, 8]);
        ok(set(3, 0));
        assert_eq!(figures(), [0; 4]);
        // Freed before its graph is gone, by either call.
        for free_async in [true, false] {
            let (block, exec) = captured(false);
            if free_async {
                ok(api::cuMemFreeAsync(block, stream));
            } else {
                free(block);
            }
            ok(api::cuGraphExecDestroy(exec));
            gone(block);
            trim();
            assert_eq!(figures(), [0, 3, 0, 4]);
        }
        // And after it, by the one that waits.
        let (block, exec) = captured(false);
        ok(api::cuGraphExecDestroy(exec));
        free(block);
        gone(block);
        // Another graph's node frees it, before or after its own is gone.
        for before in [true, false] {
            let (block, exec) = captured(false);
            begin(stream, RELAXED);
            ok(api::cuMemFreeAsync(block, stream));
            let graph = end(stream).unwrap();
            let freeing = instantiate(graph);
            ok(api::cuGraphDestroy(graph));
            if before {
                run(freeing, stream);
                ok(api::cuGraphExecDestroy(exec));
            } else {
                ok(api::cuGraphExecDestroy(exec));
                assert_eq!(download::<u32>(block, 1), [9]);
                run(freeing, stream);
            }
            gone(block);
            ok(api::cuGraphExecDestroy(freeing));
        }
        trim();
        assert_eq!(figures(), [0, 3, 0, 4]);
    }
}
