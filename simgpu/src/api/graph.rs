//! Graphs: making, cloning, edges and questions. Nodes are in `graph_node`, executable graphs in
//! `graph_exec`.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use shim_ffi::{CUgraph, CUgraphEdgeData, CUgraphNode, CUhostFn, CUresult, CUuserObject};

use super::Done;
use crate::capture::node_handle;
use crate::driver::{Driver, driver};
use crate::entry::{In, Out, api};
use crate::graph::{Action, Graph, Node, UserObject};

pub(super) fn graph(handle: CUgraph) -> Result<(&'static Driver, Arc<Graph>), CUresult> {
    let driver = driver()?;
    Ok((
        driver,
        driver
            .graphs
            .get(handle.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?,
    ))
}

pub(super) fn node(handle: CUgraphNode) -> Result<(&'static Driver, Arc<Node>), CUresult> {
    let driver = driver()?;
    Ok((
        driver,
        driver
            .nodes
            .get(handle.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?,
    ))
}

pub(super) fn ids(list: In<CUgraphNode>, count: usize) -> Result<Vec<u64>, CUresult> {
    Ok(list.list(count)?.iter().map(|node| node.0 as u64).collect())
}

/// Gives a list the way graph queries do: without space only the count, else what fits and nothing
/// in the rest.
fn put_list(to: Out<CUgraphNode>, count: Out<usize>, found: &[u64]) -> Done {
    if to.is_null() {
        return count.put(found.len());
    }
    let capacity = count.get()?;
    let mut list: Vec<_> = found.iter().map(|id| node_handle(*id)).collect();
    list.resize(list.len().max(capacity), CUgraphNode::NULL);
    to.put_all(&list, capacity)?;
    count.put(found.len().min(capacity))
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
    let capacity = if from.is_null() { 0 } else { count.get()? };
    let (starts, ends): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    put_list(from, count, &starts)?;
    if !to.is_null() {
        count.put(capacity)?;
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
    let capacity = count.get()?;
    to.put_all(&vec![CUgraphEdgeData::default(); capacity], capacity)
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

pub(super) fn check_edges(edges: In<CUgraphEdgeData>, count: usize) -> Done {
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

/// A graph, and those inside it, in the language of Graphviz.
fn dot(graph: &Graph, to: &mut String) {
    use std::fmt::Write as _;
    const NAMES: [&str; 14] = [
        "KERNEL",
        "MEMCPY",
        "MEMSET",
        "HOST",
        "GRAPH",
        "EMPTY",
        "WAIT_EVENT",
        "EVENT_RECORD",
        "EXT_SEMAS_SIGNAL",
        "EXT_SEMAS_WAIT",
        "MEM_ALLOC",
        "MEM_FREE",
        "BATCH_MEM_OP",
        "CONDITIONAL",
    ];
    let number = graph.number;
    // Writing to a string cannot fail.
    let _ = writeln!(
        to,
        "subgraph cluster_{number} {{\nlabel=\"graph_{number}\" graph[style=\"dashed\"];"
    );
    let name = |node: &Node| format!("\"graph_{number}_node_{}\"", node.local);
    let nodes = graph.nodes();
    for node in &nodes {
        let action = node.action.lock();
        let kind = NAMES
            .get(action.kind() as usize)
            .copied()
            .unwrap_or("UNKNOWN");
        let what = match &*action {
            Action::Kernel(launch, _) => format!("\\n{}", launch.function.name.to_string_lossy()),
            _ => String::new(),
        };
        let _ = writeln!(
            to,
            "{} [label=\"{}\\n{kind}{what}\"];",
            name(node),
            node.local
        );
        match &*action {
            Action::Graph(child) => dot(child, to),
            Action::Conditional(own) => own.bodies.iter().for_each(|body| dot(body, to)),
            _ => {}
        }
    }
    let by_id = |id: u64| nodes.iter().find(|node| node.id == id);
    for (from, until) in graph.edges() {
        if let (Some(from), Some(until)) = (by_id(from), by_id(until)) {
            let _ = writeln!(to, "{} -> {};", name(from), name(until));
        }
    }
    to.push_str("}\n");
}

api! {
    fn cuGraphDebugDotPrint(graph: CUgraph, path: In<c_char>, _flags: u32) {
        let (_, graph) = self::graph(graph)?;
        let mut text = String::from("digraph dot {\n");
        dot(&graph, &mut text);
        text.push_str("}\n");
        std::fs::write(path.text()?, text).map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
    }

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
        let host_kernel = self::graph(clone)?.1.host_kernel_of(original.0 as u64);
        to.put(node_handle(host_kernel.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?))
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
