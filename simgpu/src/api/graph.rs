//! Graphs: building, instantiating, launching, asking.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use shim_ffi::{
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUDA_HOST_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS,
    CUDA_KERNEL_NODE_PARAMS_v1, CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS,
    CUcontext, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphEdgeData, CUgraphExec,
    CUgraphExecUpdateResultInfo, CUgraphNode, CUgraphNodeParams, CUhostFn, CUkernel, CUresult,
    CUstream, CUuserObject,
};

use super::Done;
use crate::capture::node_handle;
use crate::context::current;
use crate::driver::{Driver, driver};
use crate::entry::{In, Out, api};
use crate::exec::work::{Fill, UserData};
use crate::graph::{Action, Block, CopyParams, Graph, GraphExec, Node, UserObject, fill_params};
use crate::stream::{Default, Stream};

/// Flags that an instantiation knows.
const INSTANTIATE_FLAGS: u64 = 15;
const DEVICE_LAUNCH: u64 = 4;

fn graph(handle: CUgraph) -> Result<(&'static Driver, Arc<Graph>), CUresult> {
    let driver = driver()?;
    Ok((
        driver,
        driver
            .graphs
            .get(handle.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?,
    ))
}

fn node(handle: CUgraphNode) -> Result<(&'static Driver, Arc<Node>), CUresult> {
    let driver = driver()?;
    Ok((
        driver,
        driver
            .nodes
            .get(handle.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?,
    ))
}

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

fn ids(list: In<CUgraphNode>, count: usize) -> Result<Vec<u64>, CUresult> {
    Ok(list.list(count)?.iter().map(|node| node.0 as u64).collect())
}

fn add(
    to: Out<CUgraphNode>,
    graph: CUgraph,
    after: In<CUgraphNode>,
    count: usize,
    action: Action,
) -> Done {
    to.check()?;
    let (driver, graph) = self::graph(graph)?;
    to.put(node_handle(
        graph.add(driver, &ids(after, count)?, action)?.id,
    ))
}

/// Gives a list the way graph queries do: without room only the count, else what fits and nothing in the rest.
fn put_list(to: Out<CUgraphNode>, count: Out<usize>, found: &[u64]) -> Done {
    if to.is_null() {
        return count.put(found.len());
    }
    let room = count.get()?;
    let mut list: Vec<_> = found.iter().map(|id| node_handle(*id)).collect();
    list.resize(list.len().max(room), CUgraphNode::NULL);
    to.put_all(&list, room)?;
    count.put(found.len().min(room))
}

fn kernel(params: &CUDA_KERNEL_NODE_PARAMS) -> Result<Action, CUresult> {
    let driver = driver()?;
    let handle = if params.func.is_null() {
        CUfunction(params.kern.0)
    } else {
        params.func
    };
    let function = super::function(driver, handle)?;
    let shape = super::Shape {
        grid: [params.gridDimX, params.gridDimY, params.gridDimZ],
        block: [params.blockDimX, params.blockDimY, params.blockDimZ],
        shared_bytes: params.sharedMemBytes,
    };
    // SAFETY: the program vouches for its arguments in either form.
    let (plain, extra) = unsafe {
        (
            In::new(params.kernelParams.cast_const()),
            In::new(params.extra.cast_const()),
        )
    };
    let raw = super::arguments(&function, plain, extra)?;
    Ok(Action::Kernel(
        Box::new(super::prepare(driver, &function, shape, raw)?),
        handle,
    ))
}

fn second(params: &CUDA_KERNEL_NODE_PARAMS_v1) -> CUDA_KERNEL_NODE_PARAMS {
    CUDA_KERNEL_NODE_PARAMS {
        func: params.func,
        gridDimX: params.gridDimX,
        gridDimY: params.gridDimY,
        gridDimZ: params.gridDimZ,
        blockDimX: params.blockDimX,
        blockDimY: params.blockDimY,
        blockDimZ: params.blockDimZ,
        sharedMemBytes: params.sharedMemBytes,
        kernelParams: params.kernelParams,
        extra: params.extra,
        ..CUDA_KERNEL_NODE_PARAMS::default()
    }
}

fn kernel_params(handle: CUgraphNode) -> Result<CUDA_KERNEL_NODE_PARAMS, CUresult> {
    let (driver, node) = node(handle)?;
    let action = node.action.lock();
    let Action::Kernel(launch, function) = &*action else {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    };
    // The node owns the arguments and this list of where they are.
    let mut shown = node.shown.lock();
    *shown = launch
        .raw
        .iter()
        .map(|bytes| bytes.as_ptr() as usize)
        .collect();
    let is_kernel = driver.kernels.get(function.0 as u64).is_some();
    Ok(CUDA_KERNEL_NODE_PARAMS {
        func: if is_kernel {
            CUfunction::NULL
        } else {
            *function
        },
        gridDimX: launch.grid[0],
        gridDimY: launch.grid[1],
        gridDimZ: launch.grid[2],
        blockDimX: launch.block[0],
        blockDimY: launch.block[1],
        blockDimZ: launch.block[2],
        sharedMemBytes: launch.shared_bytes,
        kernelParams: shown.as_mut_ptr().cast(),
        extra: std::ptr::null_mut(),
        kern: if is_kernel {
            CUkernel(function.0)
        } else {
            CUkernel::NULL
        },
        ctx: CUcontext::NULL,
    })
}

fn copy(params: &CUDA_MEMCPY3D) -> Result<Action, CUresult> {
    let driver = driver()?;
    let copy = super::volume(params)?
        .check(driver)?
        .map(|(copy, _)| Box::new(copy));
    Ok(Action::Copy(copy, Box::new(CopyParams(*params))))
}

fn fill(params: &CUDA_MEMSET_NODE_PARAMS) -> Result<Action, CUresult> {
    let driver = driver()?;
    let fill = Fill {
        address: params.dst.0,
        pitch: params.pitch as u64,
        value: params.value,
        element: params.elementSize,
        width: params.width as u64,
        height: params.height as u64,
    };
    if !matches!(fill.element, 1 | 2 | 4) || fill.width == 0 || fill.height == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    super::check_fill(driver, &fill)?;
    Ok(Action::Fill(fill))
}

fn host(params: &CUDA_HOST_NODE_PARAMS) -> Result<Action, CUresult> {
    if params.func.is_none() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(Action::Host(params.func, UserData(params.userData)))
}

fn child(handle: CUgraph) -> Result<Action, CUresult> {
    let (driver, graph) = graph(handle)?;
    Ok(Action::Graph(graph.duplicate(driver)))
}

fn event(handle: CUevent) -> Result<u64, CUresult> {
    let driver = driver()?;
    driver
        .events
        .get(handle.0 as u64)
        .map(|event| event.id)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

fn alloc(params: &mut CUDA_MEM_ALLOC_NODE_PARAMS) -> Result<Action, CUresult> {
    const ON_DEVICE: u32 = 1;
    let (driver, context) = current()?;
    if params.poolProps.location.r#type.0 != ON_DEVICE {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let device = driver.device(params.poolProps.location.id)?;
    let block = Block::take(driver, device, context.id, params.bytesize as u64)?;
    params.dptr = CUdeviceptr(block.address);
    Ok(Action::Alloc(block))
}

fn free(address: CUdeviceptr) -> Result<Action, CUresult> {
    let driver = driver()?;
    let owned = driver
        .memory
        .region(address.0)
        .is_some_and(|region| region.start == address.0);
    if owned {
        Ok(Action::Free(address.0))
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}

/// A node of any kind from the tagged union.
fn any(params: Out<CUgraphNodeParams>) -> Result<Action, CUresult> {
    let tagged = params.get()?;
    let payload = params.raw().wrapping_byte_add(16);
    // SAFETY: the payload starts at byte 16 and holds, for each kind, the structure of that kind.
    unsafe {
        match tagged.r#type.0 {
            0 => kernel(&In::new(payload.cast::<CUDA_KERNEL_NODE_PARAMS>()).get()?),
            // Flags, a reserved word and the context come before the copy's parameters.
            1 => copy(&In::new(payload.wrapping_byte_add(16).cast::<CUDA_MEMCPY3D>()).get()?),
            2 => fill(&In::new(payload.cast::<CUDA_MEMSET_NODE_PARAMS>()).get()?),
            3 => host(&In::new(payload.cast::<CUDA_HOST_NODE_PARAMS>()).get()?),
            4 => child(In::new(payload.cast::<CUgraph>()).get()?),
            5 => Ok(Action::Empty),
            6 => event(In::new(payload.cast::<CUevent>()).get()?).map(Action::Wait),
            7 => event(In::new(payload.cast::<CUevent>()).get()?).map(Action::Record),
            10 => {
                let to = Out::new(payload.cast::<CUDA_MEM_ALLOC_NODE_PARAMS>());
                let mut params = to.get()?;
                let action = alloc(&mut params)?;
                to.put(params)?;
                Ok(action)
            }
            11 => free(In::new(payload.cast::<CUdeviceptr>()).get()?),
            _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }
}

fn set(handle: CUgraphNode, action: Action) -> Done {
    let (_, node) = node(handle)?;
    let mut own = node.action.lock();
    if own.kind() != action.kind() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    *own = action;
    Ok(())
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
    if flags & DEVICE_LAUNCH != 0 {
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
    let (driver, exec) = self::exec(exec)?;
    let (_, _, stream) = Stream::of(stream, default)?;
    if stream.is_capturing() {
        // A launch in a capture becomes a child with the same work.
        return exec.capture_into(driver, &stream);
    }
    crate::capture::forbid_implicit(driver, &stream)?;
    driver.engine.submit(stream.id, exec.work(driver)?)
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

fn connect(
    graph: CUgraph,
    from: In<CUgraphNode>,
    to: In<CUgraphNode>,
    count: usize,
    remove: bool,
) -> Done {
    let (_, graph) = self::graph(graph)?;
    for (from, to) in ids(from, count)?.into_iter().zip(ids(to, count)?) {
        if remove {
            graph.disconnect(from, to)?
        } else {
            graph.connect(from, to)?
        }
    }
    Ok(())
}

fn edges(graph: CUgraph, from: Out<CUgraphNode>, to: Out<CUgraphNode>, count: Out<usize>) -> Done {
    let all = self::graph(graph)?.1.edges();
    if from.is_null() != to.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let room = if from.is_null() { 0 } else { count.get()? };
    let (starts, ends): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    put_list(from, count, &starts)?;
    if !to.is_null() {
        count.put(room)?;
        put_list(to, count, &ends)?;
    }
    Ok(())
}

fn neighbours(of: CUgraphNode, before: bool) -> Result<Vec<u64>, CUresult> {
    let (driver, node) = node(of)?;
    let graph = driver
        .graphs
        .get(node.graph)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let edges = graph.edges().into_iter();
    Ok(if before {
        edges
            .filter(|(_, to)| *to == node.id)
            .map(|(from, _)| from)
            .collect()
    } else {
        edges
            .filter(|(from, _)| *from == node.id)
            .map(|(_, to)| to)
            .collect()
    })
}

/// Edge data of plain edges, which are all that there are.
fn plain_edges(to: Out<CUgraphEdgeData>, count: Out<usize>) -> Done {
    if to.is_null() {
        return Ok(());
    }
    let room = count.get()?;
    to.put_all(&vec![CUgraphEdgeData::default(); room], room)
}

fn check_edges(edges: In<CUgraphEdgeData>, count: usize) -> Done {
    if edges.is_null() {
        return Ok(());
    }
    let plain = edges
        .list(count)?
        .iter()
        .all(|edge| edge.from_port == 0 && edge.to_port == 0 && edge.r#type == 0);
    if plain {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }
}

fn event_of(handle: CUgraphNode, to: Out<CUevent>) -> Done {
    match *node(handle)?.1.action.lock() {
        Action::Wait(event) | Action::Record(event) => to.put(CUevent(event as *mut c_void)),
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

fn user_object(handle: CUuserObject) -> Result<(&'static Driver, Arc<UserObject>), CUresult> {
    let driver = driver()?;
    Ok((
        driver,
        driver
            .user_objects
            .get(handle.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?,
    ))
}

api! {
    fn cuGraphCreate(to: Out<CUgraph>, flags: u32) {
        let driver = driver()?;
        to.check()?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        to.put(CUgraph(Graph::create(driver).id as *mut c_void))
    }

    fn cuGraphDestroy(graph: CUgraph) {
        let (driver, graph) = self::graph(graph)?;
        graph.destroy(driver);
        Ok(())
    }

    fn cuGraphClone(to: Out<CUgraph>, graph: CUgraph) {
        to.check()?;
        let (driver, graph) = self::graph(graph)?;
        to.put(CUgraph(graph.duplicate(driver).id as *mut c_void))
    }

    fn cuGraphNodeFindInClone(to: Out<CUgraphNode>, original: CUgraphNode, clone: CUgraph) {
        to.check()?;
        let twin = self::graph(clone)?.1.twin_of(original.0 as u64);
        to.put(node_handle(twin.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?))
    }

    fn cuGraphAddKernelNode(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize,
        params: In<CUDA_KERNEL_NODE_PARAMS_v1>,
    ) {
        add(to, graph, after, count, kernel(&second(&params.get()?))?)
    }

    fn cuGraphAddKernelNode_v2(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize,
        params: In<CUDA_KERNEL_NODE_PARAMS>,
    ) {
        add(to, graph, after, count, kernel(&params.get()?)?)
    }

    fn cuGraphAddMemcpyNode(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, params: In<CUDA_MEMCPY3D>,
        _context: CUcontext,
    ) {
        add(to, graph, after, count, copy(&params.get()?)?)
    }

    fn cuGraphAddMemsetNode(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize,
        params: In<CUDA_MEMSET_NODE_PARAMS>, _context: CUcontext,
    ) {
        add(to, graph, after, count, fill(&params.get()?)?)
    }

    fn cuGraphAddHostNode(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, params: In<CUDA_HOST_NODE_PARAMS>,
    ) {
        add(to, graph, after, count, host(&params.get()?)?)
    }

    fn cuGraphAddChildGraphNode(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, inner: CUgraph,
    ) {
        add(to, graph, after, count, child(inner)?)
    }

    fn cuGraphAddEmptyNode(to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize) {
        add(to, graph, after, count, Action::Empty)
    }

    fn cuGraphAddEventRecordNode(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, event: CUevent,
    ) {
        add(to, graph, after, count, Action::Record(self::event(event)?))
    }

    fn cuGraphAddEventWaitNode(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, event: CUevent,
    ) {
        add(to, graph, after, count, Action::Wait(self::event(event)?))
    }

    fn cuGraphAddMemAllocNode(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize,
        params: Out<CUDA_MEM_ALLOC_NODE_PARAMS>,
    ) {
        let mut asked = params.get()?;
        let action = alloc(&mut asked)?;
        params.put(asked)?;
        add(to, graph, after, count, action)
    }

    fn cuGraphAddMemFreeNode(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, address: CUdeviceptr,
    ) {
        add(to, graph, after, count, free(address)?)
    }

    fn cuGraphAddNode(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, params: Out<CUgraphNodeParams>,
    ) {
        add(to, graph, after, count, any(params)?)
    }

    fn cuGraphAddNode_v2(
        to: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, edges: In<CUgraphEdgeData>, count: usize,
        params: Out<CUgraphNodeParams>,
    ) {
        check_edges(edges, count)?;
        add(to, graph, after, count, any(params)?)
    }

    fn cuGraphKernelNodeGetParams(node: CUgraphNode, to: Out<CUDA_KERNEL_NODE_PARAMS_v1>) {
        let params = kernel_params(node)?;
        to.put(CUDA_KERNEL_NODE_PARAMS_v1 {
            func: if params.func.is_null() { CUfunction(params.kern.0) } else { params.func },
            gridDimX: params.gridDimX,
            gridDimY: params.gridDimY,
            gridDimZ: params.gridDimZ,
            blockDimX: params.blockDimX,
            blockDimY: params.blockDimY,
            blockDimZ: params.blockDimZ,
            sharedMemBytes: params.sharedMemBytes,
            kernelParams: params.kernelParams,
            extra: params.extra,
        })
    }

    fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, to: Out<CUDA_KERNEL_NODE_PARAMS>) {
        to.put(kernel_params(node)?)
    }

    fn cuGraphKernelNodeSetParams(node: CUgraphNode, params: In<CUDA_KERNEL_NODE_PARAMS_v1>) {
        set(node, kernel(&second(&params.get()?))?)
    }

    fn cuGraphKernelNodeSetParams_v2(node: CUgraphNode, params: In<CUDA_KERNEL_NODE_PARAMS>) {
        set(node, kernel(&params.get()?)?)
    }

    fn cuGraphKernelNodeGetAttribute(node: CUgraphNode, id: u32, value: Out<[u64; 8]>) {
        let (_, node) = self::node(node)?;
        value.put(node.attributes.lock().get(&id).copied().unwrap_or_default())
    }

    fn cuGraphKernelNodeSetAttribute(node: CUgraphNode, id: u32, value: In<[u64; 8]>) {
        let (_, node) = self::node(node)?;
        node.attributes.lock().insert(id, value.get()?);
        Ok(())
    }

    fn cuGraphKernelNodeCopyAttributes(to: CUgraphNode, from: CUgraphNode) {
        let attributes = self::node(from)?.1.attributes.lock().clone();
        *self::node(to)?.1.attributes.lock() = attributes;
        Ok(())
    }

    fn cuGraphMemcpyNodeGetParams(node: CUgraphNode, to: Out<CUDA_MEMCPY3D>) {
        match &*self::node(node)?.1.action.lock() {
            Action::Copy(_, params) => to.put(params.0),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuGraphMemcpyNodeSetParams(node: CUgraphNode, params: In<CUDA_MEMCPY3D>) {
        set(node, copy(&params.get()?)?)
    }

    fn cuGraphMemsetNodeGetParams(node: CUgraphNode, to: Out<CUDA_MEMSET_NODE_PARAMS>) {
        match &*self::node(node)?.1.action.lock() {
            Action::Fill(fill) => to.put(fill_params(fill)),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuGraphMemsetNodeSetParams(node: CUgraphNode, params: In<CUDA_MEMSET_NODE_PARAMS>) {
        set(node, fill(&params.get()?)?)
    }

    fn cuGraphHostNodeGetParams(node: CUgraphNode, to: Out<CUDA_HOST_NODE_PARAMS>) {
        match &*self::node(node)?.1.action.lock() {
            Action::Host(func, data) => to.put(CUDA_HOST_NODE_PARAMS { func: *func, userData: data.0 }),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuGraphHostNodeSetParams(node: CUgraphNode, params: In<CUDA_HOST_NODE_PARAMS>) {
        set(node, host(&params.get()?)?)
    }

    fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, to: Out<CUgraph>) {
        match &*self::node(node)?.1.action.lock() {
            Action::Graph(graph) => to.put(CUgraph(graph.id as *mut c_void)),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuGraphEventRecordNodeGetEvent(node: CUgraphNode, to: Out<CUevent>) {
        event_of(node, to)
    }

    fn cuGraphEventWaitNodeGetEvent(node: CUgraphNode, to: Out<CUevent>) {
        event_of(node, to)
    }

    fn cuGraphEventRecordNodeSetEvent(node: CUgraphNode, event: CUevent) {
        set(node, Action::Record(self::event(event)?))
    }

    fn cuGraphEventWaitNodeSetEvent(node: CUgraphNode, event: CUevent) {
        set(node, Action::Wait(self::event(event)?))
    }

    fn cuGraphMemAllocNodeGetParams(node: CUgraphNode, to: Out<CUDA_MEM_ALLOC_NODE_PARAMS>) {
        match &*self::node(node)?.1.action.lock() {
            Action::Alloc(block) => {
                let mut params = CUDA_MEM_ALLOC_NODE_PARAMS::default();
                params.poolProps.location.r#type.0 = 1;
                params.bytesize = block.bytes as usize;
                params.dptr = CUdeviceptr(block.address);
                to.put(params)
            }
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuGraphMemFreeNodeGetParams(node: CUgraphNode, to: Out<CUdeviceptr>) {
        match &*self::node(node)?.1.action.lock() {
            Action::Free(address) => to.put(CUdeviceptr(*address)),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuGraphNodeSetParams(node: CUgraphNode, params: Out<CUgraphNodeParams>) {
        set(node, any(params)?)
    }

    fn cuGraphNodeGetType(node: CUgraphNode, to: Out<u32>) {
        let kind = self::node(node)?.1.action.lock().kind();
        to.put(kind)
    }

    fn cuGraphNodeGetContainingGraph(node: CUgraphNode, to: Out<CUgraph>) {
        to.put(CUgraph(self::node(node)?.1.graph as *mut c_void))
    }

    fn cuGraphNodeGetLocalId(node: CUgraphNode, to: Out<u32>) {
        to.put(self::node(node)?.1.local)
    }

    fn cuGraphNodeGetToolsId(node: CUgraphNode, to: Out<u64>) {
        to.put(self::node(node)?.1.id)
    }

    fn cuGraphGetId(graph: CUgraph, to: Out<u32>) {
        to.put(self::graph(graph)?.1.number)
    }

    fn cuGraphGetNodes(graph: CUgraph, to: Out<CUgraphNode>, count: Out<usize>) {
        let nodes: Vec<u64> = self::graph(graph)?.1.nodes().iter().map(|node| node.id).collect();
        put_list(to, count, &nodes)
    }

    fn cuGraphGetRootNodes(graph: CUgraph, to: Out<CUgraphNode>, count: Out<usize>) {
        put_list(to, count, &self::graph(graph)?.1.roots())
    }

    fn cuGraphGetEdges(graph: CUgraph, from: Out<CUgraphNode>, to: Out<CUgraphNode>, count: Out<usize>) {
        edges(graph, from, to, count)
    }

    fn cuGraphGetEdges_v2(
        graph: CUgraph, from: Out<CUgraphNode>, to: Out<CUgraphNode>, data: Out<CUgraphEdgeData>, count: Out<usize>,
    ) {
        plain_edges(data, count)?;
        edges(graph, from, to, count)
    }

    fn cuGraphNodeGetDependencies(node: CUgraphNode, to: Out<CUgraphNode>, count: Out<usize>) {
        put_list(to, count, &neighbours(node, true)?)
    }

    fn cuGraphNodeGetDependencies_v2(
        node: CUgraphNode, to: Out<CUgraphNode>, data: Out<CUgraphEdgeData>, count: Out<usize>,
    ) {
        plain_edges(data, count)?;
        put_list(to, count, &neighbours(node, true)?)
    }

    fn cuGraphNodeGetDependentNodes(node: CUgraphNode, to: Out<CUgraphNode>, count: Out<usize>) {
        put_list(to, count, &neighbours(node, false)?)
    }

    fn cuGraphNodeGetDependentNodes_v2(
        node: CUgraphNode, to: Out<CUgraphNode>, data: Out<CUgraphEdgeData>, count: Out<usize>,
    ) {
        plain_edges(data, count)?;
        put_list(to, count, &neighbours(node, false)?)
    }

    fn cuGraphAddDependencies(graph: CUgraph, from: In<CUgraphNode>, to: In<CUgraphNode>, count: usize) {
        connect(graph, from, to, count, false)
    }

    fn cuGraphAddDependencies_v2(
        graph: CUgraph, from: In<CUgraphNode>, to: In<CUgraphNode>, edges: In<CUgraphEdgeData>, count: usize,
    ) {
        check_edges(edges, count)?;
        connect(graph, from, to, count, false)
    }

    fn cuGraphRemoveDependencies(graph: CUgraph, from: In<CUgraphNode>, to: In<CUgraphNode>, count: usize) {
        connect(graph, from, to, count, true)
    }

    fn cuGraphRemoveDependencies_v2(
        graph: CUgraph, from: In<CUgraphNode>, to: In<CUgraphNode>, _edges: In<CUgraphEdgeData>, count: usize,
    ) {
        connect(graph, from, to, count, true)
    }

    fn cuGraphDestroyNode(node: CUgraphNode) {
        let (driver, node) = self::node(node)?;
        let graph = driver.graphs.get(node.graph).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        graph.remove(driver, node.id);
        Ok(())
    }

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

    fn cuUserObjectCreate(to: Out<CUuserObject>, data: *mut c_void, destroy: CUhostFn, count: u32, flags: u32) {
        const NO_DESTRUCTOR_SYNC: u32 = 1;
        let driver = driver()?;
        to.check()?;
        if count == 0 || flags != NO_DESTRUCTOR_SYNC || destroy.is_none() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        to.put(CUuserObject(UserObject::create(driver, destroy, data, count).id as *mut c_void))
    }

    fn cuUserObjectRetain(object: CUuserObject, count: u32) {
        user_object(object)?.1.retain(count);
        Ok(())
    }

    fn cuUserObjectRelease(object: CUuserObject, count: u32) {
        user_object(object)?.1.release(count);
        Ok(())
    }

    fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: u32, flags: u32) {
        const MOVE: u32 = 1;
        let (_, graph) = self::graph(graph)?;
        let (_, object) = user_object(object)?;
        if flags & MOVE == 0 {
            object.retain(count);
        }
        graph.keep(object, count);
        Ok(())
    }

    fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: u32) {
        self::graph(graph)?.1.let_go(object.0 as u64, count)
    }
}
