//! Allocations in graphs, and what the driver keeps for them.

use shim_ffi::*;

use crate::attachment::client;
use crate::driver::real;
use crate::metering::graph;
use crate::residency;

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuGraphAddMemAllocNode(
    node: *mut CUgraphNode,
    graph: CUgraph,
    before: *const CUgraphNode,
    count: usize,
    parameters: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real::cuGraphAddMemAllocNode(node, graph, before, count, parameters) };
    if parameters.is_null() || client::current().is_none() {
        return call();
    }
    // SAFETY: not null; the driver is about to read the same structure.
    let location = unsafe { (*parameters).poolProps.location };
    if location.r#type == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE
        && let Some(status) = client::kept_off(location.id)
    {
        return status;
    }
    // SAFETY: as above.
    let bytes = unsafe { (*parameters).bytesize } as u64;
    residency::with_space(bytes, |short| graph::allocate(bytes, || short.note(call())))
}

/// # Safety
/// As the driver's function.
pub(crate) unsafe fn cuDeviceGraphMemTrim(device: CUdevice) -> CUresult {
    // SAFETY: the caller's own argument.
    graph::trimmed(device.0, || unsafe { real::cuDeviceGraphMemTrim(device) })
}
