//! Graphs: captured from streams (with calls that a capture forbids), built by hand, instantiated,
//! launched, updated.

use shim_ffi::*;

use super::world::{Queue, World};
use super::{call, call_on, stream};
use crate::transcript::Word::{Hidden, Name, New, Raw};

/// Buffers of one graph, ordered into a created stream and at rest, so that a capture needs no
/// synchronisation.
fn stage(world: &mut World) -> Option<(Queue, u64, usize, usize)> {
    let to = world.buffer_where(|buffer| buffer.bytes >= 1024 && buffer.at.is_multiple_of(4))?;
    let from = world.buffer_where(|buffer| buffer.bytes >= 1024 && buffer.at.is_multiple_of(4))?;
    let count = world.context().streams.len();
    if to == from || count == 0 {
        return None;
    }
    let which = world.rng.below(count);
    let queue = world.context().streams[which];
    let Queue::Created { handle, .. } = queue else {
        return None;
    };
    world.order(to, queue);
    world.order(from, queue);
    world.settle(to);
    Some((queue, handle, to, from))
}

/// Captures a few operations, and what the driver makes of them.
pub fn captured(world: &mut World) {
    let Some((queue, handle, to, from)) = stage(world) else {
        return;
    };
    let (s, n) = (stream(handle), Name(handle));
    let mode = CUstreamCaptureMode(world.rng.below(3) as u32);
    let begun = if world.rng.one_in(5) {
        let by_thread = world.rng.one_in(2);
        call_on!(world, by_thread, cuStreamBeginCapture | cuStreamBeginCapture_ptsz(s) [n] => [])
    } else {
        let by_thread = world.rng.one_in(2);
        call_on!(world, by_thread, cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz(s, mode)
            [n, Raw(mode.0.into())] => [])
    };
    if !begun.is_ok() {
        return;
    }
    let steps = world.rng.between(1, 6);
    for _ in 0..steps {
        submit(world, handle, to, from);
        if world.rng.one_in(10) {
            forbidden(world, handle);
        }
    }
    if world.rng.one_in(3) {
        fork(world, handle, to);
    }
    let _ = status(world, handle);
    let mut graph = CUgraph::NULL;
    let by_thread = world.rng.one_in(2);
    let ended = call_on!(world, by_thread, cuStreamEndCapture | cuStreamEndCapture_ptsz(s, &raw mut graph) [n]
        => [New(graph.0 as u64)]);
    let _ = status(world, handle);
    if ended.is_ok() && !graph.is_null() {
        use_graph(world, graph, queue, &[to, from]);
    }
}

/// One operation in a stream that may be capturing.
fn submit(world: &mut World, handle: u64, to: usize, from: usize) {
    let (a, b) = (world.context().buffers[to], world.context().buffers[from]);
    let (s, n) = (stream(handle), Name(handle));
    let count = world.rng.between(1, 200);
    let by_thread = world.rng.one_in(2);
    match world.rng.below(4) {
        0 => {
            let value = world.rng.word() as u32;
            let _ = call_on!(world, by_thread, cuMemsetD32Async | cuMemsetD32Async_ptsz(
                CUdeviceptr(a.at), value, count, s) [Name(a.at), Raw(value.into()), Raw(count as u64), n] => []);
        }
        1 => {
            let _ = call_on!(world, by_thread, cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz(
                CUdeviceptr(a.at), CUdeviceptr(b.at), count * 4, s)
                [Name(a.at), Name(b.at), Raw(count as u64), n] => []);
        }
        _ => {
            let Some(function) = world.context().functions.get(1).copied() else {
                return;
            };
            let factor = (world.rng.between(1, 9) as f32 / 4.0).to_bits();
            let mut words = [a.at, b.at, u64::from(factor), count as u64];
            let mut parameters: [*mut c_void; 4] =
                std::array::from_fn(|at| (&raw mut words[at]).cast());
            let f = CUfunction(function as *mut c_void);
            let _ = call_on!(world, by_thread, cuLaunchKernel | cuLaunchKernel_ptsz(
                f, 2, 1, 1, 128, 1, 1, 0, s, parameters.as_mut_ptr(), std::ptr::null_mut())
                [Name(function), Name(a.at), Name(b.at), Raw(factor.into()), Raw(count as u64), n] => []);
        }
    }
}

/// A branch by an event into another stream, joined again most of the time.
fn fork(world: &mut World, handle: u64, to: usize) {
    let (streams, events) = (
        world.context().streams.clone(),
        world.context().events.clone(),
    );
    let Some(Queue::Created { handle: other, .. }) = streams
        .iter()
        .copied()
        .find(|queue| !matches!(queue, Queue::Created { handle: one, .. } if *one == handle))
    else {
        return;
    };
    let [first, second, ..] = events[..] else {
        return;
    };
    let (first, second) = (
        CUevent(first as *mut c_void),
        CUevent(second as *mut c_void),
    );
    let (e0, e1) = (Name(first.0 as u64), Name(second.0 as u64));
    let (s0, s1) = (stream(handle), stream(other));
    if !call!(world, cuEventRecord(first, s0) [e0, Name(handle)] => []).is_ok() {
        return;
    }
    let _ = call!(world, cuStreamWaitEvent(s1, first, 0) [Name(other), e0] => []);
    if !status(world, other) {
        // The capture has been invalidated: work would run now, and race.
        return;
    }
    let at = CUdeviceptr(world.context().buffers[to].at);
    let _ = call!(world, cuMemsetD8Async(at, 7, 64, s1) [Name(at.0), Name(other)] => []);
    let _ = call!(world, cuEventRecord(second, s1) [e1, Name(other)] => []);
    if !world.rng.one_in(6) {
        let _ = call!(world, cuStreamWaitEvent(s0, second, 0) [Name(handle), e1] => []);
    }
}

/// What may not be done while something is captured. What the driver says depends on the mode.
fn forbidden(world: &mut World, handle: u64) {
    let (s, n) = (stream(handle), Name(handle));
    match world.rng.below(8) {
        0 => {
            let _ = call!(world, cuStreamSynchronize(s) [n] => []);
        }
        1 => {
            let _ = call!(world, cuStreamQuery(s) [n] => []);
        }
        2 => {
            let _ = call!(world, cuCtxSynchronize() [] => []);
        }
        3 => {
            let mut at = CUdeviceptr(0);
            let made = call!(world, cuMemAlloc_v2(&raw mut at, 512) [Raw(512)] => [New(at.0)]);
            if made.is_ok() {
                let _ = call!(world, cuMemFree_v2(at) [Name(at.0)] => []);
                world.gone(at.0);
            }
        }
        4 => {
            // In the legacy stream, where the capture's mode lets it run: on a buffer that was last
            // used there.
            let Some(which) = world
                .buffer_where(|buffer| buffer.queue == Queue::Legacy && buffer.before == [None; 2])
            else {
                return;
            };
            let buffer = world.context().buffers[which];
            let _ =
                call!(world, cuMemsetD8_v2(CUdeviceptr(buffer.at), 1, 1) [Name(buffer.at)] => []);
        }
        5 => {
            let mut mode = CUstreamCaptureMode(2);
            let _ = call!(world, cuThreadExchangeStreamCaptureMode(&raw mut mode) [Raw(2)] => [Raw(mode.0.into())]);
            let mut at = CUdeviceptr(0);
            let made = call!(world, cuMemAlloc_v2(&raw mut at, 512) [Raw(512)] => [New(at.0)]);
            if made.is_ok() {
                let _ = call!(world, cuMemFree_v2(at) [Name(at.0)] => []);
                world.gone(at.0);
            }
            let _ = call!(world, cuThreadExchangeStreamCaptureMode(&raw mut mode) [] => [Raw(mode.0.into())]);
        }
        6 => {
            let _ = call!(world, cuStreamBeginCapture_v2(s, CUstreamCaptureMode(0)) [n] => []);
        }
        _ => {
            let (mut free, mut total) = (0, 0);
            let _ = call!(world, cuMemGetInfo_v2(&raw mut free, &raw mut total) [] => [Hidden, Raw(total as u64)]);
        }
    }
}

/// Asks for a stream's capture; true while it is a valid one.
fn status(world: &mut World, handle: u64) -> bool {
    let (s, n) = (stream(handle), Name(handle));
    let mut status = CUstreamCaptureStatus::default();
    let by_thread = world.rng.one_in(2);
    let _ = call_on!(world, by_thread, cuStreamIsCapturing | cuStreamIsCapturing_ptsz(s, &raw mut status) [n]
        => [Raw(status.0.into())]);
    let (mut id, mut graph, mut nodes, mut count) = (0, CUgraph::NULL, std::ptr::null(), 0);
    let _ = call_on!(world, by_thread, cuStreamGetCaptureInfo_v2 | cuStreamGetCaptureInfo_v2_ptsz(
        s, &raw mut status, &raw mut id, &raw mut graph, &raw mut nodes, &raw mut count) [n]
        => [Raw(status.0.into()), Hidden, Hidden, Raw(count as u64)]);
    status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
}

/// Builds a chain of nodes by hand.
pub fn built(world: &mut World) {
    let Some((queue, _, to, from)) = stage(world) else {
        return;
    };
    let mut graph = CUgraph::NULL;
    let made = call!(world, cuGraphCreate(&raw mut graph, 0) [Raw(0)] => [New(graph.0 as u64)]);
    if !made.is_ok() {
        return;
    }
    let g = Name(graph.0 as u64);
    let context = CUcontext(world.context().handle as *mut c_void);
    let (a, b) = (world.context().buffers[to], world.context().buffers[from]);
    let mut last: Option<CUgraphNode> = None;
    for _ in 0..world.rng.between(1, 6) {
        let mut node = CUgraphNode::NULL;
        let before = last.as_slice();
        let (list, count) = (before.as_ptr(), before.len());
        let c = Raw(count as u64);
        let result = match world.rng.below(6) {
            0 => {
                call!(world, cuGraphAddEmptyNode(&raw mut node, graph, list, count) [g, c] => [New(node.0 as u64)])
            }
            1 => {
                let parameters = CUDA_MEMSET_NODE_PARAMS {
                    dst: CUdeviceptr(a.at),
                    pitch: 0,
                    value: world.rng.below(255) as u32,
                    elementSize: 1,
                    width: world.rng.between(1, 512),
                    height: 1,
                };
                call!(world, cuGraphAddMemsetNode(&raw mut node, graph, list, count, &raw const parameters, context)
                    [g, c, Raw(parameters.value.into()), Raw(parameters.width as u64)] => [New(node.0 as u64)])
            }
            2 => {
                let parameters = CUDA_MEMCPY3D {
                    srcMemoryType: CUmemorytype(2),
                    srcDevice: CUdeviceptr(b.at),
                    dstMemoryType: CUmemorytype(2),
                    dstDevice: CUdeviceptr(a.at),
                    WidthInBytes: world.rng.between(1, 512),
                    Height: 1,
                    Depth: 1,
                    ..CUDA_MEMCPY3D::default()
                };
                call!(world, cuGraphAddMemcpyNode(&raw mut node, graph, list, count, &raw const parameters, context)
                    [g, c, Raw(parameters.WidthInBytes as u64)] => [New(node.0 as u64)])
            }
            3 => {
                let event = world.context().events.first().copied().unwrap_or(0);
                let e = CUevent(event as *mut c_void);
                call!(world, cuGraphAddEventRecordNode(&raw mut node, graph, list, count, e) [g, c, Name(event)]
                    => [New(node.0 as u64)])
            }
            _ => {
                let Some(function) = world.context().functions.first().copied() else {
                    break;
                };
                let count_words = world.rng.between(1, 200) as u64;
                let mut words = [a.at, u64::from(2.5f32.to_bits()), count_words];
                let mut pointers: [*mut c_void; 3] =
                    std::array::from_fn(|at| (&raw mut words[at]).cast());
                let parameters = CUDA_KERNEL_NODE_PARAMS {
                    func: CUfunction(function as *mut c_void),
                    gridDimX: 1,
                    gridDimY: 1,
                    gridDimZ: 1,
                    blockDimX: 64,
                    blockDimY: 1,
                    blockDimZ: 1,
                    kernelParams: pointers.as_mut_ptr(),
                    ..CUDA_KERNEL_NODE_PARAMS::default()
                };
                call!(world, cuGraphAddKernelNode_v2(&raw mut node, graph, list, count, &raw const parameters)
                    [g, c, Raw(count_words)] => [New(node.0 as u64)])
            }
        };
        if result.is_ok() {
            let mut kind = CUgraphNodeType::default();
            let _ = call!(world, cuGraphNodeGetType(node, &raw mut kind) [Name(node.0 as u64)] => [Raw(kind.0.into())]);
            last = Some(node);
        }
    }
    use_graph(world, graph, queue, &[to, from]);
}

/// Asks, instantiates, uploads, launches and destroys a graph.
fn use_graph(world: &mut World, graph: CUgraph, queue: Queue, touched: &[usize]) {
    let g = Name(graph.0 as u64);
    let none = std::ptr::null_mut::<c_void>();
    let mut count = 0;
    let _ = call!(world, cuGraphGetNodes(graph, none.cast(), &raw mut count) [g] => [Raw(count as u64)]);
    let _ = call!(world, cuGraphGetRootNodes(graph, none.cast(), &raw mut count) [g] => [Raw(count as u64)]);
    let _ = call!(world, cuGraphGetEdges(graph, none.cast(), none.cast(), &raw mut count) [g] => [Raw(count as u64)]);
    let mut copy = CUgraph::NULL;
    if world.rng.one_in(3) {
        let _ = call!(world, cuGraphClone(&raw mut copy, graph) [g] => [New(copy.0 as u64)]);
    }
    let mut exec = CUgraphExec::NULL;
    let result = match world.rng.below(3) {
        0 => {
            call!(world, cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) [g] => [New(exec.0 as u64)])
        }
        1 => {
            let mut parameters = CUDA_GRAPH_INSTANTIATE_PARAMS::default();
            call!(world, cuGraphInstantiateWithParams(&raw mut exec, graph, &raw mut parameters) [g]
                => [New(exec.0 as u64), Raw(parameters.result_out.0.into())])
        }
        _ => {
            call!(world, cuGraphInstantiate_v2(&raw mut exec, graph, none.cast(), none.cast(), 0) [g]
            => [New(exec.0 as u64)])
        }
    };
    if result.is_ok() {
        let x = Name(exec.0 as u64);
        let mut queue = queue;
        for _ in 0..world.rng.between(1, 3) {
            for buffer in touched {
                world.order(*buffer, queue);
            }
            let (handle, by_thread) = world.form(queue);
            if world.rng.one_in(3) {
                let _ = call_on!(world, by_thread, cuGraphUpload | cuGraphUpload_ptsz(exec, stream(handle))
                    [x, Name(handle)] => []);
            }
            let _ = call_on!(world, by_thread, cuGraphLaunch | cuGraphLaunch_ptsz(exec, stream(handle))
                [x, Name(handle)] => []);
            // Launches of one executable graph are ordered by the driver; its buffers follow the
            // last one.
            for buffer in touched {
                world.settle(*buffer);
            }
            queue = world.any_queue();
        }
        if world.rng.one_in(2) {
            let mut info = CUgraphExecUpdateResultInfo::default();
            let _ = call!(world, cuGraphExecUpdate_v2(exec, graph, &raw mut info) [x, g] => [Raw(info.result.0.into())]);
        }
        let _ = call!(world, cuGraphExecDestroy(exec) [x] => []);
        world.gone(exec.0 as u64);
    }
    if !copy.is_null() {
        let _ = call!(world, cuGraphDestroy(copy) [Name(copy.0 as u64)] => []);
        world.gone(copy.0 as u64);
    }
    let _ = call!(world, cuGraphDestroy(graph) [g] => []);
    world.gone(graph.0 as u64);
}
