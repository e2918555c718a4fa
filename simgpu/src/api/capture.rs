//! Stream capture.

use std::ffi::c_void;

use shim_ffi::{CUgraph, CUgraphEdgeData, CUgraphNode, CUresult, CUstream};

use super::Done;
use crate::capture::{Capture, GLOBAL, RELAXED, exchange_mode};
use crate::driver::driver;
use crate::entry::{In, Out, api};
use crate::stream::{Default, Stream};

const NONE: u32 = 0;
const ACTIVE: u32 = 1;
const INVALIDATED: u32 = 2;

fn end(stream: CUstream, default: Default, to: Out<CUgraph>) -> Done {
    let (driver, _, stream) = Stream::of(stream, default)?;
    to.put(CUgraph::NULL)?;
    to.put(CUgraph(Capture::end(driver, &stream)?.id as *mut c_void))
}

fn status(stream: &Stream) -> u32 {
    match &*stream.capture.lock() {
        None => NONE,
        Some(capture) if capture.is_invalid() => INVALIDATED,
        Some(_) => ACTIVE,
    }
}

/// Where the parts of the answer go.
struct Info {
    status: Out<u32>,
    id: Out<u64>,
    graph: Out<CUgraph>,
    nodes: Out<*const CUgraphNode>,
    count: Out<usize>,
}

fn info(stream: CUstream, default: Default, to: &Info) -> Done {
    let (_, _, stream) = Stream::of(stream, default)?;
    let status = status(&stream);
    to.status.put(status)?;
    if status != ACTIVE {
        return Ok(());
    }
    if let Some(capture) = stream.capture.lock().clone() {
        to.id.put_if(capture.id);
        to.graph.put_if(CUgraph(capture.graph.id as *mut c_void));
        let (nodes, count) = capture.show_frontier(stream.id);
        to.nodes.put_if(nodes);
        to.count.put_if(count);
    }
    Ok(())
}

fn update(
    stream: CUstream,
    default: Default,
    nodes: In<CUgraphNode>,
    count: usize,
    flags: u32,
) -> Done {
    const ADD: u32 = 0;
    const SET: u32 = 1;
    let (_, _, stream) = Stream::of(stream, default)?;
    let capture = stream
        .capture
        .lock()
        .clone()
        .ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
    let nodes: Vec<u64> = nodes
        .list(count)?
        .iter()
        .map(|node| node.0 as u64)
        .collect();
    match flags {
        ADD => capture.set_frontier(stream.id, &nodes, false),
        SET => capture.set_frontier(stream.id, &nodes, true),
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

fn nowhere<T>() -> Out<T> {
    // SAFETY: null stands for "not asked for".
    unsafe { Out::new(std::ptr::null_mut()) }
}

api! {
    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        driver()?;
        let wanted = mode.get()?;
        if wanted > RELAXED {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        mode.put(exchange_mode(wanted))
    }

    stream fn cuStreamBeginCapture, cuStreamBeginCapture_ptsz(default; stream: CUstream) {
        let (driver, _, stream) = Stream::of(stream, default)?;
        Capture::begin(driver, &stream, GLOBAL, None)
    }

    stream fn cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz(default; stream: CUstream, mode: u32) {
        let (driver, _, stream) = Stream::of(stream, default)?;
        Capture::begin(driver, &stream, mode, None)
    }

    stream fn cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz(
        default; stream: CUstream, graph: CUgraph, nodes: In<CUgraphNode>, _edges: In<CUgraphEdgeData>, count: usize,
        mode: u32,
    ) {
        let (driver, _, stream) = Stream::of(stream, default)?;
        let graph = driver.graphs.get(graph.0 as u64).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let frontier = nodes.list(count)?.iter().map(|node| node.0 as u64).collect();
        Capture::begin(driver, &stream, mode, Some((graph, frontier)))
    }

    stream fn cuStreamEndCapture, cuStreamEndCapture_ptsz(default; stream: CUstream, to: Out<CUgraph>) {
        end(stream, default, to)
    }

    stream fn cuStreamIsCapturing, cuStreamIsCapturing_ptsz(default; stream: CUstream, to: Out<u32>) {
        to.check()?;
        to.put(status(&Stream::of(stream, default)?.2))
    }

    stream fn cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz(
        default; stream: CUstream, status: Out<u32>, id: Out<u64>,
    ) {
        info(stream, default, &Info { status, id, graph: nowhere(), nodes: nowhere(), count: nowhere() })
    }

    stream fn cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz(
        default; stream: CUstream, status: Out<u32>, id: Out<u64>, graph: Out<CUgraph>, nodes: Out<*const CUgraphNode>,
        count: Out<usize>,
    ) {
        info(stream, default, &Info { status, id, graph, nodes, count })
    }

    stream fn cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz(
        default; stream: CUstream, status: Out<u32>, id: Out<u64>, graph: Out<CUgraph>, nodes: Out<*const CUgraphNode>,
        edges: Out<*const CUgraphEdgeData>, count: Out<usize>,
    ) {
        // All edges here are plain ones, which a null list stands for.
        edges.put_if(std::ptr::null());
        info(stream, default, &Info { status, id, graph, nodes, count })
    }

    stream fn cuStreamUpdateCaptureDependencies, cuStreamUpdateCaptureDependencies_ptsz(
        default; stream: CUstream, nodes: In<CUgraphNode>, count: usize, flags: u32,
    ) {
        update(stream, default, nodes, count, flags)
    }

    stream fn cuStreamUpdateCaptureDependencies_v2, cuStreamUpdateCaptureDependencies_v2_ptsz(
        default; stream: CUstream, nodes: In<CUgraphNode>, _edges: In<CUgraphEdgeData>, count: usize, flags: u32,
    ) {
        update(stream, default, nodes, count, flags)
    }
}
