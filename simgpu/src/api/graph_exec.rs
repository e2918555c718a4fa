//! Executable graphs: instantiating, launching, changing.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use shim_ffi::{
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUDA_HOST_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS,
    CUDA_KERNEL_NODE_PARAMS_v1, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUevent,
    CUgraph, CUgraphExec, CUgraphExecUpdateResultInfo, CUgraphNode, CUgraphNodeParams, CUresult,
    CUstream,
};

use super::Done;
use super::graph::{graph, node};
use super::graph_node::{any, copy, event, fill, host, kernel, second};
use super::launch::take_time;
use crate::capture::node_handle;
use crate::clock;
use crate::driver::{Driver, driver};
use crate::entry::{In, Out, api};
use crate::graph::{Action, GraphExec};
use crate::stream::{Default, Stream};

/// Flags that an instantiation knows.
const INSTANTIATE_FLAGS: u64 = 15;

const DEVICE_LAUNCH: u64 = 4;
const KERNEL: u32 = 0;
const COPY: u32 = 1;
const FILL: u32 = 2;
const CHILD: u32 = 4;
const EMPTY: u32 = 5;

fn exec(handle: CUgraphExec) -> Result<(&'static Driver, Arc<GraphExec>), CUresult> {
    let driver = driver()?;
    Ok((
        driver,
        driver
            .execs
            .get(handle.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?,
    ))
}

fn exec_set(exec: CUgraphExec, handle: CUgraphNode, action: Action) -> Done {
    self::exec(exec)?.1.replace(node(handle)?.1.id, action)
}

fn instantiate(to: Out<CUgraphExec>, handle: CUgraph, flags: u64) -> Done {
    to.check()?;
    let (driver, graph) = graph(handle)?;
    if flags & !INSTANTIATE_FLAGS != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // Whether it may be launched from the device: it may only have what the device can start.
    let startable = |kind: u32| matches!(kind, KERNEL | COPY | FILL | CHILD | EMPTY);
    let nodes = graph.nodes();
    if flags & DEVICE_LAUNCH != 0
        && (nodes.is_empty()
            || !nodes
                .iter()
                .all(|node| startable(node.action.lock().kind())))
    {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    to.put(CUgraphExec(
        GraphExec::create(driver, &graph, flags)?.id as *mut c_void,
    ))
}

fn instantiate_with(
    to: Out<CUgraphExec>,
    graph: CUgraph,
    params: Out<CUDA_GRAPH_INSTANTIATE_PARAMS>,
) -> Done {
    let mut asked = params.get()?;
    let outcome = instantiate(to, graph, asked.flags);
    asked.hErrNode_out = CUgraphNode::NULL;
    asked.result_out.0 = u32::from(outcome.is_err());
    params.put(asked)?;
    outcome
}

fn launch(exec: CUgraphExec, stream: CUstream, default: Default) -> Done {
    let began_ns = clock::now_ns();
    let (driver, exec) = self::exec(exec)?;
    let (_, _, stream) = Stream::of(stream, default)?;
    if stream.is_capturing() {
        // A launch in a capture becomes a child with the same work.
        return exec.capture_into(driver, &stream);
    }
    crate::capture::forbid_implicit(driver, &stream)?;
    driver.engine.submit(stream.id, exec.work(driver)?)?;
    take_time(driver, began_ns);
    Ok(())
}

fn update(exec: CUgraphExec, graph: CUgraph, info: Out<CUgraphExecUpdateResultInfo>) -> Done {
    info.check()?;
    let (_, exec) = self::exec(exec)?;
    let (_, graph) = self::graph(graph)?;
    let mut result = CUgraphExecUpdateResultInfo::default();
    let outcome = exec.update(&graph);
    if let Err((code, node)) = outcome {
        result.result.0 = code;
        result.errorFromNode = node_handle(node);
    }
    info.put(result)?;
    outcome.map_err(|_| CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
}

api! {
    fn cuGraphInstantiate(
        to: Out<CUgraphExec>, graph: CUgraph, error: Out<CUgraphNode>, _log: Out<c_char>, _bytes: usize,
    ) {
        error.put_if(CUgraphNode::NULL);
        instantiate(to, graph, 0)
    }

    fn cuGraphInstantiate_v2(
        to: Out<CUgraphExec>, graph: CUgraph, error: Out<CUgraphNode>, _log: Out<c_char>, _bytes: usize,
    ) {
        error.put_if(CUgraphNode::NULL);
        instantiate(to, graph, 0)
    }

    fn cuGraphInstantiateWithFlags(to: Out<CUgraphExec>, graph: CUgraph, flags: u64) {
        instantiate(to, graph, flags)
    }

    fn cuGraphInstantiateWithParams(
        to: Out<CUgraphExec>, graph: CUgraph, params: Out<CUDA_GRAPH_INSTANTIATE_PARAMS>,
    ) {
        instantiate_with(to, graph, params)
    }

    fn cuGraphInstantiateWithParams_ptsz(
        to: Out<CUgraphExec>, graph: CUgraph, params: Out<CUDA_GRAPH_INSTANTIATE_PARAMS>,
    ) {
        instantiate_with(to, graph, params)
    }

    fn cuGraphExecDestroy(exec: CUgraphExec) {
        let (driver, exec) = self::exec(exec)?;
        driver.execs.remove(exec.id);
        Ok(())
    }

    fn cuGraphExecGetFlags(exec: CUgraphExec, to: Out<u64>) {
        to.put(self::exec(exec)?.1.flags)
    }

    fn cuGraphExecGetId(exec: CUgraphExec, to: Out<u32>) {
        to.put(self::exec(exec)?.1.number)
    }

    fn cuGraphExecUpdate(exec: CUgraphExec, graph: CUgraph, error: Out<CUgraphNode>, result: Out<u32>) {
        let mut info = CUgraphExecUpdateResultInfo::default();
        // SAFETY: a local that outlives the call.
        let outcome = update(exec, graph, unsafe { Out::new(&raw mut info) });
        error.put_if(info.errorFromNode);
        result.put_if(info.result.0);
        outcome
    }

    fn cuGraphExecUpdate_v2(exec: CUgraphExec, graph: CUgraph, info: Out<CUgraphExecUpdateResultInfo>) {
        update(exec, graph, info)
    }

    fn cuGraphExecKernelNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: In<CUDA_KERNEL_NODE_PARAMS_v1>) {
        exec_set(exec, node, kernel(&second(&params.get()?))?)
    }

    fn cuGraphExecKernelNodeSetParams_v2(exec: CUgraphExec, node: CUgraphNode, params: In<CUDA_KERNEL_NODE_PARAMS>) {
        exec_set(exec, node, kernel(&params.get()?)?)
    }

    fn cuGraphExecMemcpyNodeSetParams(
        exec: CUgraphExec, node: CUgraphNode, params: In<CUDA_MEMCPY3D>, _context: CUcontext,
    ) {
        exec_set(exec, node, copy(&params.get()?)?)
    }

    fn cuGraphExecMemsetNodeSetParams(
        exec: CUgraphExec, node: CUgraphNode, params: In<CUDA_MEMSET_NODE_PARAMS>, _context: CUcontext,
    ) {
        exec_set(exec, node, fill(&params.get()?)?)
    }

    fn cuGraphExecHostNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: In<CUDA_HOST_NODE_PARAMS>) {
        exec_set(exec, node, host(&params.get()?)?)
    }

    fn cuGraphExecEventRecordNodeSetEvent(exec: CUgraphExec, node: CUgraphNode, event: CUevent) {
        exec_set(exec, node, Action::Record(self::event(event)?))
    }

    fn cuGraphExecEventWaitNodeSetEvent(exec: CUgraphExec, node: CUgraphNode, event: CUevent) {
        exec_set(exec, node, Action::Wait(self::event(event)?))
    }

    fn cuGraphExecNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: Out<CUgraphNodeParams>) {
        exec_set(exec, node, any(params)?)
    }

    fn cuGraphNodeGetEnabled(exec: CUgraphExec, node: CUgraphNode, to: Out<u32>) {
        to.put(u32::from(self::exec(exec)?.1.enabled(self::node(node)?.1.id)?))
    }

    fn cuGraphNodeSetEnabled(exec: CUgraphExec, node: CUgraphNode, enabled: u32) {
        self::exec(exec)?.1.enable(self::node(node)?.1.id, enabled != 0)
    }

    stream fn cuGraphLaunch, cuGraphLaunch_ptsz(default; exec: CUgraphExec, stream: CUstream) {
        launch(exec, stream, default)
    }

    stream fn cuGraphUpload, cuGraphUpload_ptsz(default; exec: CUgraphExec, stream: CUstream) {
        self::exec(exec)?;
        Stream::of(stream, default).map(|_| ())
    }
}
