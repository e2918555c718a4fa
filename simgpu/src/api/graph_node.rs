//! Nodes of graphs: adding them, and their parameters.

use std::ffi::c_void;

use shim_ffi::{
    CUDA_HOST_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS_v1,
    CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUdeviceptr,
    CUevent, CUfunction, CUgraph, CUgraphEdgeData, CUgraphNode, CUgraphNodeParams, CUkernel,
    CUresult,
};

use super::Done;
use super::graph::{check_edges, graph, ids, node};
use crate::capture::node_handle;
use crate::context::current;
use crate::driver::driver;
use crate::entry::{In, Out, api};
use crate::exec::work::{Fill, UserData};
use crate::graph::{Action, Block, Choice, Condition, Conditional, CopyParams, fill_params};

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

pub(super) fn kernel(params: &CUDA_KERNEL_NODE_PARAMS) -> Result<Action, CUresult> {
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

pub(super) fn second(params: &CUDA_KERNEL_NODE_PARAMS_v1) -> CUDA_KERNEL_NODE_PARAMS {
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

pub(super) fn copy(params: &CUDA_MEMCPY3D) -> Result<Action, CUresult> {
    let driver = driver()?;
    let copy = super::volume(params)?
        .check(driver)?
        .map(|(copy, _)| Box::new(copy));
    Ok(Action::Copy(copy, Box::new(CopyParams(*params))))
}

pub(super) fn fill(params: &CUDA_MEMSET_NODE_PARAMS) -> Result<Action, CUresult> {
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
    super::memset::check(driver, &fill)?;
    Ok(Action::Fill(fill))
}

pub(super) fn host(params: &CUDA_HOST_NODE_PARAMS) -> Result<Action, CUresult> {
    if params.func.is_none() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(Action::Host(params.func, UserData(params.userData)))
}

fn child(handle: CUgraph) -> Result<Action, CUresult> {
    let (driver, graph) = graph(handle)?;
    Ok(Action::Graph(graph.duplicate(driver)))
}

pub(super) fn event(handle: CUevent) -> Result<u64, CUresult> {
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

/// ABI: `CUDA_CONDITIONAL_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ConditionalParams {
    handle: u64,
    kind: u32,
    bodies: u32,
    shown: *const usize,
    _context: CUcontext,
}

fn conditional(to: Out<ConditionalParams>) -> Result<Action, CUresult> {
    let driver = driver()?;
    let mut params = to.get()?;
    let bad = CUresult::CUDA_ERROR_INVALID_VALUE;
    let condition = driver.conditions.get(params.handle).ok_or(bad)?;
    let choice = match params.kind {
        0 => Choice::If,
        1 => Choice::While,
        2 => Choice::Switch,
        _ => return Err(bad),
    };
    let own = Conditional::create(driver, condition, choice, params.bodies)?;
    params.shown = own.shown.as_ptr();
    to.put(params)?;
    Ok(Action::Conditional(own))
}

/// A node of any kind from the tagged union.
pub(super) fn any(params: Out<CUgraphNodeParams>) -> Result<Action, CUresult> {
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
            13 => conditional(Out::new(payload.cast::<ConditionalParams>())),
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

fn event_of(handle: CUgraphNode, to: Out<CUevent>) -> Done {
    match *node(handle)?.1.action.lock() {
        Action::Wait(event) | Action::Record(event) => to.put(CUevent(event as *mut c_void)),
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

api! {
    fn cuGraphConditionalHandleCreate(
        to: Out<u64>, graph: CUgraph, _context: CUcontext, default: u32, flags: u32,
    ) {
        const ASSIGNS_DEFAULT: u32 = 1;
        to.check()?;
        let (driver, _) = self::graph(graph)?;
        if flags & !ASSIGNS_DEFAULT != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        to.put(Condition::create(driver, default, flags == ASSIGNS_DEFAULT).id)
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
}
