//! Handles that mean something to accounting or to captures.

use std::ffi::c_void;

use shim_ffi::*;

use crate::{capture, context, cost, gate, marks, memory, residency};

const fn begins_capture(symbol: Symbol) -> bool {
    matches!(
        symbol,
        Symbol::cuStreamBeginCapture
            | Symbol::cuStreamBeginCapture_ptsz
            | Symbol::cuStreamBeginCapture_v2
            | Symbol::cuStreamBeginCapture_v2_ptsz
            | Symbol::cuStreamBeginCaptureToCig
            | Symbol::cuStreamBeginCaptureToCig_ptsz
            | Symbol::cuStreamBeginCaptureToGraph
            | Symbol::cuStreamBeginCaptureToGraph_ptsz
            | Symbol::cuStreamBeginRecaptureToGraph
            | Symbol::cuStreamBeginRecaptureToGraph_ptsz
    )
}

const fn ends_capture(symbol: Symbol) -> bool {
    matches!(
        symbol,
        Symbol::cuStreamEndCapture
            | Symbol::cuStreamEndCapture_ptsz
            | Symbol::cuStreamEndCaptureToCig
            | Symbol::cuStreamEndCaptureToCig_ptsz
    )
}

/// The stream of a call about captures, as a key.
fn captured(symbol: Symbol, args: &[usize]) -> usize {
    match args.first().copied() {
        None | Some(0) if symbol.entry().name().ends_with("_ptsz") => gate::PER_THREAD,
        None | Some(0) => gate::LEGACY,
        Some(stream) => stream,
    }
}

const fn destroys_stream(symbol: Symbol) -> bool {
    matches!(symbol, Symbol::cuStreamDestroy | Symbol::cuStreamDestroy_v2)
}

/// Calls whose arguments the driver checks against what is mapped, or that make it mean something else; and beginnings of
/// captures, during which nothing is moved.
pub(super) const fn sees_memory(symbol: Symbol) -> bool {
    use Symbol::*;
    begins_capture(symbol)
        || matches!(
            symbol,
            cuGraphAddChildGraphNode
                | cuGraphAddKernelNode
                | cuGraphAddKernelNode_v2
                | cuGraphAddNode
                | cuGraphAddNode_v2
                | cuGraphAddNode_v3
                | cuGraphExecKernelNodeSetParams
                | cuGraphExecKernelNodeSetParams_v2
                | cuGraphExecNodeSetParams
                | cuGraphExecUpdate
                | cuGraphExecUpdate_v2
                | cuGraphInstantiate
                | cuGraphInstantiateWithFlags
                | cuGraphInstantiateWithParams
                | cuGraphInstantiateWithParams_ptsz
                | cuGraphInstantiate_v2
                | cuGraphKernelNodeSetParams
                | cuGraphKernelNodeSetParams_v2
                | cuGraphNodeSetParams
                | cuGraphNodeSetParams_v2
                | cuIpcGetMemHandle
                | cuMemExportToShareableHandle
                | cuMemGetHandleForAddressRange
                | cuMemMap
                | cuMemRetainAllocationHandle
                | cuMemSetAccess
                | cuMulticastBindAddr
                | cuMulticastBindAddr_v2
                | cuMulticastBindMem
                | cuMulticastBindMem_v2
                | cuLogicalEndpointBindMem
                | cuPointerSetAttribute
                | cuTexObjectCreate
                | cuCtxEnablePeerAccess
                | cuCtxDisablePeerAccess
        )
}

/// What cannot be had of memory that can be moved is answered as it would be of plain memory.
#[inline(always)]
pub(super) fn answered(symbol: Symbol, args: &[usize]) -> Option<CUresult> {
    let address = match symbol {
        Symbol::cuMemMap | Symbol::cuMemSetAccess | Symbol::cuMemAddressFree => args.first(),
        Symbol::cuMemRetainAllocationHandle | Symbol::cuIpcGetMemHandle => args.get(1),
        _ => None,
    };
    let address = *address? as u64;
    if !residency::active() {
        return None;
    }
    if residency::owns(address) {
        return Some(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if matches!(symbol, Symbol::cuMemRetainAllocationHandle) && args.first() != Some(&0) {
        let handle = residency::retain(address)?;
        // SAFETY: not null, and the caller's to write to.
        unsafe { *(args.first().copied().unwrap_or(0) as *mut u64) = handle };
        memory::retained(handle, address);
        return Some(CUresult::CUDA_SUCCESS);
    }
    None
}

/// Calls that take a handle of physical memory, which may be a number of ours.
pub(super) const fn takes_handle(symbol: Symbol) -> bool {
    matches!(
        symbol,
        Symbol::cuMemMap
            | Symbol::cuMemExportToShareableHandle
            | Symbol::cuMemGetAllocationPropertiesFromHandle
            | Symbol::cuMulticastBindMem
            | Symbol::cuMulticastBindMem_v2
            | Symbol::cuLogicalEndpointBindMem
    )
}

pub(super) fn translate(symbol: Symbol, words: &mut [usize]) {
    if residency::active() {
        residency::translate(symbol, words);
    }
}

/// Calls that may end a context.
pub(super) const fn ends_context(symbol: Symbol) -> bool {
    use Symbol::*;
    matches!(
        symbol,
        cuCtxDestroy
            | cuCtxDestroy_v2
            | cuCtxDetach
            | cuDevicePrimaryCtxReset
            | cuDevicePrimaryCtxReset_v2
            | cuDevicePrimaryCtxRelease
            | cuDevicePrimaryCtxRelease_v2
    )
}

#[inline(always)]
pub(super) fn before(symbol: Symbol, args: &[usize]) {
    if destroys_stream(symbol) {
        marks::stream_goes(args.first().copied().unwrap_or(0));
    }
    if begins_capture(symbol) {
        // What was submitted so far is marked now: a stream that is captured is not marked any more.
        gate::before_sync();
        capture::before_begin();
        residency::before_capture();
    }
}

#[inline(always)]
pub(super) fn after(symbol: Symbol, args: &[usize], result: CUresult) {
    if begins_capture(symbol) {
        let context = match crate::client::current() {
            Some(_) if result.is_ok() => context::current(),
            _ => 0,
        };
        capture::after_begin(captured(symbol, args), context, result);
        return;
    }
    if ends_capture(symbol) {
        capture::after_end(captured(symbol, args), result);
        return;
    }
    if destroys_stream(symbol) && result.is_ok() {
        capture::stream_gone(args.first().copied().unwrap_or(0));
    }
    if !result.is_ok() || crate::client::current().is_none() {
        return;
    }
    let arg = |at: usize| args.get(at).copied().unwrap_or(0);
    if residency::active() {
        residency::noted(symbol, args);
    }
    match symbol {
        Symbol::cuMemExportToShareableHandle => {
            memory::exported(arg(1) as u64, arg(0), arg(2) as u32)
        }
        Symbol::cuMemMap => memory::mapped(arg(0) as u64, arg(1) as u64, arg(3) as u64),
        Symbol::cuMemRetainAllocationHandle => {
            // SAFETY: the driver has just written a handle there.
            let handle = unsafe { *(arg(0) as *const u64) };
            memory::retained(handle, arg(1) as u64);
        }
        Symbol::cuCtxEnablePeerAccess | Symbol::cuCtxDisablePeerAccess if residency::active() => {
            let on = symbol as u16 == Symbol::cuCtxEnablePeerAccess as u16;
            residency::peers(context::here(), arg(0), on);
        }
        Symbol::cuPointerSetAttribute => {
            // CAST: an enumerator in the low half of its word.
            residency::set_attribute(arg(0), arg(1) as u32, arg(2) as u64);
        }
        Symbol::cuMemPoolCreate => {
            // SAFETY: the driver has just written a handle, after reading the properties.
            let (pool, properties) = unsafe {
                (
                    *(arg(0) as *const CUmemoryPool),
                    &*(arg(1) as *const CUmemPoolProps),
                )
            };
            memory::pool_created(pool, properties.location);
        }
        Symbol::cuGraphInstantiate
        | Symbol::cuGraphInstantiate_v2
        | Symbol::cuGraphInstantiateWithFlags
        | Symbol::cuGraphInstantiateWithParams
        | Symbol::cuGraphInstantiateWithParams_ptsz => {
            // SAFETY: the driver has just written a handle there.
            let exec = unsafe { *(arg(0) as *const usize) };
            let graph = CUgraph(arg(1) as *mut c_void);
            memory::instantiated(exec, graph);
            cost::graph_instantiated(exec, graph);
        }
        Symbol::cuGraphExecDestroy => {
            memory::exec_destroyed(arg(0));
            cost::graph_gone(arg(0));
        }
        Symbol::cuGraphExecUpdate | Symbol::cuGraphExecUpdate_v2 => {
            cost::graph_instantiated(arg(0), CUgraph(arg(1) as *mut c_void));
        }
        Symbol::cuGraphAddNode | Symbol::cuGraphAddNode_v2 | Symbol::cuGraphAddNode_v3 => {
            let parameters = if symbol as u16 == Symbol::cuGraphAddNode as u16 {
                arg(4)
            } else {
                arg(5)
            };
            // SAFETY: the driver has just read the structure.
            let kind = unsafe { (*(parameters as *const CUgraphNodeParams)).r#type };
            if kind == CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC {
                memory::after_node();
            }
        }
        _ => {}
    }
}

/// What has nothing left to do afterwards: a stream, by its key, or (`Some(None)`) a whole context.
#[inline(always)]
pub(super) fn waited_for(symbol: Symbol, args: &[usize]) -> Option<Option<usize>> {
    let key = |default: usize| match args.first() {
        Some(0) | None => default,
        Some(stream) => *stream,
    };
    match symbol {
        Symbol::cuCtxSynchronize | Symbol::cuCtxSynchronize_v2 => Some(None),
        Symbol::cuStreamSynchronize => Some(Some(key(gate::LEGACY))),
        Symbol::cuStreamSynchronize_ptsz => Some(Some(key(gate::PER_THREAD))),
        _ => None,
    }
}

/// Queries: they never block, and programs poll them.
pub(super) const fn only_asks(symbol: Symbol) -> bool {
    matches!(
        symbol,
        Symbol::cuStreamQuery
            | Symbol::cuStreamQuery_ptsz
            | Symbol::cuEventQuery
            | Symbol::cuEventElapsedTime
    )
}

/// Graph launches: rare, heavy, and what they allocate is charged when they are over.
pub(super) const fn may_allocate(symbol: Symbol) -> bool {
    matches!(
        symbol,
        Symbol::cuGraphLaunch
            | Symbol::cuGraphLaunch_ptsz
            | Symbol::cuGraphUpload
            | Symbol::cuGraphUpload_ptsz
    )
}
