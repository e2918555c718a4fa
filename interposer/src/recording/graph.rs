//! The nodes of a graph, when an executable one is made of it.

use shim_ffi::recording::{Kind, NODES_MOST};
use shim_ffi::*;

use super::calls::{launch, line, volume};
use super::note;
use crate::driver::real;

/// Records the nodes of `graph`, and which come before which; answers how many there are. Beyond
/// [`NODES_MOST`] the first are recorded.
pub(super) fn nodes(graph: usize, exec: u64) -> u64 {
    let graph = CUgraph(std::ptr::without_provenance_mut(graph));
    let mut count = 0;
    // SAFETY: the program's own graph, of which an executable one was just made; no array asks for
    // the number.
    let asked = unsafe { real::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count) };
    if !asked.is_ok() {
        return 0;
    }
    let all = count as u64;
    let mut nodes = vec![CUgraphNode(std::ptr::null_mut()); count.min(NODES_MOST)];
    count = nodes.len();
    // SAFETY: an array of that many elements.
    let asked = unsafe { real::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count) };
    if !asked.is_ok() {
        return all;
    }
    nodes.truncate(count);
    let mut places: Vec<(usize, u64)> = nodes
        .iter()
        .enumerate()
        .map(|(place, node)| (node.0 as usize, place as u64))
        .collect();
    places.sort_unstable();
    for (place, node) in nodes.iter().enumerate() {
        record(exec, place as u64, *node);
        edges(exec, place as u64, *node, &places);
    }
    all
}

fn record(exec: u64, place: u64, node: CUgraphNode) {
    let mut kind = CUgraphNodeType(u32::MAX);
    // SAFETY: a node of the program's graph, and a valid pointer to a local.
    let asked = unsafe { real::cuGraphNodeGetType(node, &raw mut kind) };
    if !asked.is_ok() {
        return;
    }
    let about = if kind == CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
        kernel(node)
    } else if kind == CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY {
        // SAFETY: all-zero is a valid description; a node of that type, a valid pointer.
        let copy = unsafe {
            let mut copy: CUDA_MEMCPY3D = std::mem::zeroed();
            real::cuGraphMemcpyNodeGetParams(node, &raw mut copy)
                .is_ok()
                .then_some(copy)
        };
        let copy = copy.as_ref().and_then(volume);
        copy.map_or([0; 8], line)
    } else if kind == CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET {
        // SAFETY: as above.
        let fill = unsafe {
            let mut fill: CUDA_MEMSET_NODE_PARAMS = std::mem::zeroed();
            real::cuGraphMemsetNodeGetParams(node, &raw mut fill)
                .is_ok()
                .then_some(fill)
        };
        fill.map_or([0; 8], |fill| {
            let elements = fill.width.saturating_mul(fill.height.max(1));
            line([
                fill.dst.0,
                elements.saturating_mul(fill.elementSize as usize) as u64,
            ])
        })
    } else {
        [0; 8]
    };
    let [a, b, c, d, ..] = about;
    note(
        Kind::Node,
        0,
        line([exec, place | u64::from(kind.0) << 32, a, b, c, d]),
    );
}

fn kernel(node: CUgraphNode) -> [u64; 8] {
    // SAFETY: all-zero is valid; a node of that type, and valid pointers. The older structure is
    // the beginning of the newer one.
    let found = unsafe {
        let mut found: CUDA_KERNEL_NODE_PARAMS = std::mem::zeroed();
        let is_known = real::cuGraphKernelNodeGetParams_v2(node, &raw mut found).is_ok()
            || real::cuGraphKernelNodeGetParams(node, (&raw mut found).cast()).is_ok();
        is_known.then_some(found)
    };
    found.map_or([0; 8], |found| {
        let function = match found.func.0 as u64 {
            0 => found.kern.0 as u64,
            function => function,
        };
        launch(
            function,
            [found.gridDimX, found.gridDimY, found.gridDimZ].map(u64::from),
            [found.blockDimX, found.blockDimY, found.blockDimZ].map(u64::from),
            u64::from(found.sharedMemBytes),
            0,
        )
    })
}

/// Most nodes before one that are looked at.
const BEFORE_MOST: usize = 256;

fn edges(exec: u64, place: u64, node: CUgraphNode, places: &[(usize, u64)]) {
    let mut before = [CUgraphNode(std::ptr::null_mut()); BEFORE_MOST];
    let mut count = BEFORE_MOST;
    // SAFETY: a node of the program's graph, and an array of that many elements.
    let asked =
        unsafe { real::cuGraphNodeGetDependencies(node, before.as_mut_ptr(), &raw mut count) };
    if !asked.is_ok() {
        return;
    }
    for other in before.iter().take(count) {
        let found = places.binary_search_by_key(&(other.0 as usize), |(node, _)| *node);
        if let Some((_, from)) = found.ok().and_then(|at| places.get(at)) {
            note(Kind::Edge, 0, line([exec, *from, place]));
        }
    }
}
