//! Graphs: nodes and what they do, and executable graphs.
//!
//! An executable graph runs its nodes one after another in an order that respects all edges. That is one of the orders a real
//! device may choose; branches of a graph do not overlap here.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::lock::Mutex;
use shim_ffi::{CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUfunction, CUhostFn, CUresult, c_void};

use crate::driver::Driver;
use crate::exec::work::{Copy, Fill, KernelLaunch, Record, UserData, Work};
use crate::memory::pool::Pool;
use crate::registry;

type Result<T> = std::result::Result<T, CUresult>;

/// Memory that an allocation node owns. It lives as long as a graph that has the node.
pub struct Block {
    /// First address.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    pool: Arc<Pool>,
    driver: &'static Driver,
}

impl Block {
    /// Takes memory for a node.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`, or `INVALID_VALUE` for no bytes.
    pub fn take(
        driver: &'static Driver,
        device: usize,
        context: u64,
        bytes: u64,
    ) -> Result<Arc<Self>> {
        let pool = driver.graph_pools[device].clone();
        let address = pool.alloc(&driver.memory, &driver.card, context, bytes)?;
        driver.memory.own_by_graph(address);
        Ok(Arc::new(Self {
            address,
            bytes,
            pool,
            driver,
        }))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Ok(region) = self.driver.memory.free(&self.driver.card, self.address) {
            self.pool
                .give_back(&self.driver.memory, &self.driver.card, &region);
        }
    }
}

/// What a node does.
#[derive(Clone)]
pub enum Action {
    /// A kernel, with the handle that the program gave.
    Kernel(Box<KernelLaunch>, CUfunction),
    /// A copy; the parameters as given, where it was not captured.
    Copy(Option<Box<Copy>>, Box<CopyParams>),
    /// A fill.
    Fill(Fill),
    /// A host function.
    Host(CUhostFn, UserData),
    /// Another graph.
    Graph(Arc<Graph>),
    /// Nothing.
    Empty,
    /// Waits for an event's last record.
    Wait(u64),
    /// Records an event.
    Record(u64),
    /// Allocates.
    Alloc(Arc<Block>),
    /// Frees what an allocation node gave.
    Free(u64),
    /// Memory operations.
    Operations(Vec<Work>),
}

/// A copy node's parameters.
#[derive(Clone, Copy)]
pub struct CopyParams(pub CUDA_MEMCPY3D);

// SAFETY: its pointers are addresses for copies; nothing here follows them.
unsafe impl Send for CopyParams {}
// SAFETY: as above.
unsafe impl Sync for CopyParams {}

impl Action {
    /// `CUgraphNodeType`.
    pub fn kind(&self) -> u32 {
        match self {
            Self::Kernel(..) => 0,
            Self::Copy(..) => 1,
            Self::Fill(_) => 2,
            Self::Host(..) => 3,
            Self::Graph(_) => 4,
            Self::Empty => 5,
            Self::Wait(_) => 6,
            Self::Record(_) => 7,
            Self::Alloc(_) => 10,
            Self::Free(_) => 11,
            Self::Operations(_) => 12,
        }
    }

    /// What a stream would have done, as a node.
    pub fn of(work: Work) -> Self {
        match work {
            Work::Kernel(launch) => {
                let function = CUfunction(launch.function.id as *mut c_void);
                Self::Kernel(launch, function)
            }
            Work::Copy(copy) => {
                let params = describe(&copy);
                Self::Copy(Some(copy), Box::new(CopyParams(params)))
            }
            Work::Fill(fill) => Self::Fill(fill),
            Work::Host(function, data) => Self::Host(function, data),
            Work::PoolFree { address } => Self::Free(address),
            work @ (Work::Write { .. } | Work::Await { .. }) => Self::Operations(vec![work]),
            Work::Callback(..) | Work::Record(_) | Work::Wait(_) => Self::Empty,
        }
    }
}

fn describe(copy: &Copy) -> CUDA_MEMCPY3D {
    const UNIFIED: shim_ffi::CUmemorytype = shim_ffi::CUmemorytype(4);
    let rows = |slice: u64, pitch: u64| slice.checked_div(pitch).unwrap_or(0) as usize;
    CUDA_MEMCPY3D {
        srcMemoryType: UNIFIED,
        srcDevice: shim_ffi::CUdeviceptr(copy.from.address),
        srcPitch: copy.from.pitch as usize,
        srcHeight: rows(copy.from.slice, copy.from.pitch),
        dstMemoryType: UNIFIED,
        dstDevice: shim_ffi::CUdeviceptr(copy.to.address),
        dstPitch: copy.to.pitch as usize,
        dstHeight: rows(copy.to.slice, copy.to.pitch),
        WidthInBytes: copy.width as usize,
        Height: copy.height as usize,
        Depth: copy.depth as usize,
        ..CUDA_MEMCPY3D::default()
    }
}

/// The parameters of a fill node.
pub fn fill_params(fill: &Fill) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS {
        dst: shim_ffi::CUdeviceptr(fill.address),
        pitch: fill.pitch as usize,
        value: fill.value,
        elementSize: fill.element,
        width: fill.width as usize,
        height: fill.height as usize,
    }
}

/// A node.
pub struct Node {
    /// Handle.
    pub id: u64,
    /// Graph.
    pub graph: u64,
    /// Number within the graph.
    pub local: u32,
    /// What it does.
    pub action: Mutex<Action>,
    /// Argument pointers that the program was shown.
    pub shown: Mutex<Vec<usize>>,
    /// Launch attributes, by id.
    pub attributes: Mutex<BTreeMap<u32, [u64; 8]>>,
}

/// A graph.
pub struct Graph {
    /// Handle.
    pub id: u64,
    /// Small number for `cuGraphGetId`.
    pub number: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// In the order of creation.
    nodes: Vec<Arc<Node>>,
    /// From, to.
    edges: BTreeSet<(u64, u64)>,
    next_local: u32,
    /// Original node to this graph's node, when this is a clone.
    origins: BTreeMap<u64, u64>,
    /// References to user objects.
    objects: Vec<(Arc<UserObject>, u32)>,
}

static NUMBERS: AtomicU32 = AtomicU32::new(1);

impl Graph {
    /// An empty graph.
    pub fn create(driver: &Driver) -> Arc<Self> {
        let number = NUMBERS.fetch_add(1, Relaxed);
        let graph = Arc::new(Self {
            id: registry::fresh(),
            number,
            state: Mutex::default(),
        });
        driver.graphs.insert(graph.id, graph.clone());
        graph
    }

    /// Adds a node after others of this graph.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a dependency that is not in this graph or given twice.
    pub fn add(&self, driver: &Driver, after: &[u64], action: Action) -> Result<Arc<Node>> {
        let mut state = self.state.lock();
        let distinct: BTreeSet<u64> = after.iter().copied().collect();
        let known = |id: &u64| state.nodes.iter().any(|node| node.id == *id);
        if distinct.len() != after.len() || !distinct.iter().all(known) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let node = Arc::new(Node {
            id: registry::fresh(),
            graph: self.id,
            local: state.next_local,
            action: Mutex::new(action),
            shown: Mutex::default(),
            attributes: Mutex::default(),
        });
        state.next_local += 1;
        state
            .edges
            .extend(distinct.into_iter().map(|from| (from, node.id)));
        state.nodes.push(node.clone());
        driver.nodes.insert(node.id, node.clone());
        Ok(node)
    }

    /// Nodes in the order of creation.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        self.state.lock().nodes.clone()
    }

    /// Nodes that wait for no other.
    pub fn roots(&self) -> Vec<u64> {
        let state = self.state.lock();
        let waits = |id: u64| state.edges.iter().any(|(_, to)| *to == id);
        state
            .nodes
            .iter()
            .map(|node| node.id)
            .filter(|id| !waits(*id))
            .collect()
    }

    /// Edges.
    pub fn edges(&self) -> Vec<(u64, u64)> {
        self.state.lock().edges.iter().copied().collect()
    }

    /// Adds an edge.
    ///
    /// # Errors
    /// `INVALID_VALUE` for strangers, the same node twice, an edge that exists, or a circle.
    pub fn connect(&self, from: u64, to: u64) -> Result<()> {
        let mut state = self.state.lock();
        let known = |id: u64| state.nodes.iter().any(|node| node.id == id);
        if from == to || !known(from) || !known(to) || state.edges.contains(&(from, to)) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        state.edges.insert((from, to));
        if order(&state).is_none() {
            state.edges.remove(&(from, to));
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        Ok(())
    }

    /// Removes an edge.
    ///
    /// # Errors
    /// `INVALID_VALUE` where there is none.
    pub fn disconnect(&self, from: u64, to: u64) -> Result<()> {
        let removed = self.state.lock().edges.remove(&(from, to));
        if removed {
            Ok(())
        } else {
            Err(CUresult::CUDA_ERROR_INVALID_VALUE)
        }
    }

    /// Removes a node and its edges.
    pub fn remove(&self, driver: &Driver, id: u64) {
        let mut state = self.state.lock();
        state.nodes.retain(|node| node.id != id);
        state.edges.retain(|(from, to)| *from != id && *to != id);
        driver.nodes.remove(id);
    }

    /// True when `node` is among `of` or something that they wait for.
    pub fn precedes(&self, node: u64, of: &[u64]) -> bool {
        let state = self.state.lock();
        let mut open: Vec<u64> = of.to_vec();
        let mut seen = BTreeSet::new();
        while let Some(at) = open.pop() {
            if at == node {
                return true;
            }
            if seen.insert(at) {
                open.extend(
                    state
                        .edges
                        .iter()
                        .filter(|(_, to)| *to == at)
                        .map(|(from, _)| *from),
                );
            }
        }
        false
    }

    /// A copy with nodes of its own.
    pub fn duplicate(&self, driver: &Driver) -> Arc<Self> {
        let copy = Self::create(driver);
        let state = self.state.lock();
        let mut copied = copy.state.lock();
        for node in &state.nodes {
            let action = match &*node.action.lock() {
                Action::Graph(child) => Action::Graph(child.duplicate(driver)),
                action => action.clone(),
            };
            let twin = Arc::new(Node {
                id: registry::fresh(),
                graph: copy.id,
                local: node.local,
                action: Mutex::new(action),
                shown: Mutex::default(),
                attributes: Mutex::new(node.attributes.lock().clone()),
            });
            driver.nodes.insert(twin.id, twin.clone());
            copied.origins.insert(node.id, twin.id);
            copied.nodes.push(twin);
        }
        copied.next_local = state.next_local;
        copied.objects = state.objects.clone();
        copied
            .objects
            .iter()
            .for_each(|(object, count)| object.retain(*count));
        let edges = state
            .edges
            .iter()
            .filter_map(|(from, to)| Some((*copied.origins.get(from)?, *copied.origins.get(to)?)));
        let edges: Vec<_> = edges.collect();
        copied.edges.extend(edges);
        drop(copied);
        copy
    }

    /// The node of this clone that stands for a node of the original.
    pub fn twin_of(&self, original: u64) -> Option<u64> {
        self.state.lock().origins.get(&original).copied()
    }

    /// Gives the graph a share of a user object.
    pub fn keep(&self, object: Arc<UserObject>, count: u32) {
        self.state.lock().objects.push((object, count));
    }

    /// Takes a share of a user object back.
    ///
    /// # Errors
    /// `INVALID_VALUE` where the graph has not so many.
    pub fn let_go(&self, id: u64, count: u32) -> Result<()> {
        let mut state = self.state.lock();
        let held = state
            .objects
            .iter_mut()
            .find(|(object, held)| object.id == id && *held >= count);
        let (object, held) = held.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        *held -= count;
        object.release(count);
        Ok(())
    }

    /// Forgets nodes and user objects.
    pub fn destroy(&self, driver: &Driver) {
        driver.graphs.remove(self.id);
        let mut state = self.state.lock();
        for node in std::mem::take(&mut state.nodes) {
            driver.nodes.remove(node.id);
            if let Action::Graph(child) = &*node.action.lock() {
                child.destroy(driver);
            }
        }
        state.edges.clear();
        for (object, count) in std::mem::take(&mut state.objects) {
            object.release(count);
        }
    }
}

/// Nodes in an order that respects the edges; none where there is a circle.
fn order(state: &State) -> Option<Vec<Arc<Node>>> {
    let mut waits: BTreeMap<u64, usize> = state.nodes.iter().map(|node| (node.id, 0)).collect();
    let mut next: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for (from, to) in &state.edges {
        *waits.get_mut(to)? += 1;
        next.entry(*from).or_default().push(*to);
    }
    let by_id: BTreeMap<u64, &Arc<Node>> = state.nodes.iter().map(|node| (node.id, node)).collect();
    let mut open: VecDeque<u64> = state
        .nodes
        .iter()
        .map(|node| node.id)
        .filter(|id| waits[id] == 0)
        .collect();
    let mut ordered = Vec::new();
    while let Some(id) = open.pop_front() {
        ordered.push((*by_id.get(&id)?).clone());
        for to in next.get(&id).into_iter().flatten() {
            let left = waits.get_mut(to)?;
            *left -= 1;
            if *left == 0 {
                open.push_back(*to);
            }
        }
    }
    (ordered.len() == state.nodes.len()).then_some(ordered)
}

/// One node of an executable graph.
struct Step {
    /// Node of the graph that it was made from.
    origin: u64,
    action: Action,
    enabled: bool,
}

/// An executable graph.
pub struct GraphExec {
    /// Handle.
    pub id: u64,
    /// Small number for `cuGraphExecGetId`.
    pub number: u32,
    /// Instantiation flags.
    pub flags: u64,
    steps: Mutex<Vec<Step>>,
    objects: Vec<(Arc<UserObject>, u32)>,
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        self.objects
            .iter()
            .for_each(|(object, count)| object.release(*count));
    }
}

impl GraphExec {
    /// Makes a graph executable. Later changes to the graph change nothing here.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a circle.
    pub fn create(driver: &Driver, graph: &Graph, flags: u64) -> Result<Arc<Self>> {
        let mut steps = Vec::new();
        flatten(graph, &mut steps)?;
        let objects = graph.state.lock().objects.clone();
        objects
            .iter()
            .for_each(|(object, count)| object.retain(*count));
        let number = NUMBERS.fetch_add(1, Relaxed);
        let exec = Arc::new(Self {
            id: registry::fresh(),
            number,
            flags,
            steps: Mutex::new(steps),
            objects,
        });
        driver.execs.insert(exec.id, exec.clone());
        Ok(exec)
    }

    /// What a launch puts into a stream.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for an event that has been destroyed.
    pub fn work(&self, driver: &Driver) -> Result<Vec<Work>> {
        let mut work = Vec::new();
        for step in self.steps.lock().iter().filter(|step| step.enabled) {
            let event = |id: u64| {
                driver
                    .events
                    .get(id)
                    .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
            };
            match &step.action {
                Action::Kernel(launch, _) => work.push(Work::Kernel(launch.clone())),
                Action::Copy(Some(copy), _) => work.push(Work::Copy(copy.clone())),
                Action::Fill(fill) => work.push(Work::Fill(*fill)),
                Action::Host(function, data) => work.push(Work::Host(*function, *data)),
                Action::Operations(operations) => work.extend(operations.iter().cloned()),
                Action::Wait(id) => work.extend(event(*id)?.last.lock().clone().map(Work::Wait)),
                Action::Record(id) => {
                    let record = Arc::new(Record::default());
                    *event(*id)?.last.lock() = Some(record.clone());
                    work.push(Work::Record(record));
                }
                Action::Copy(None, _)
                | Action::Graph(_)
                | Action::Empty
                | Action::Alloc(_)
                | Action::Free(_) => {}
            }
        }
        Ok(work)
    }

    /// Puts all steps, in order, into a stream that is being captured.
    ///
    /// # Errors
    /// The capture's.
    pub fn capture_into(&self, driver: &Driver, stream: &crate::stream::Stream) -> Result<()> {
        for step in self.steps.lock().iter().filter(|step| step.enabled) {
            if !matches!(step.action, Action::Graph(_)) {
                stream.submit_captured(driver, || step.action.clone())?;
            }
        }
        Ok(())
    }

    /// Replaces what a node does by something of the same kind.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a node that is not in here or of another kind.
    pub fn replace(&self, origin: u64, action: Action) -> Result<()> {
        let mut steps = self.steps.lock();
        let step = steps
            .iter_mut()
            .find(|step| step.origin == origin && step.action.kind() == action.kind());
        step.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.action = action;
        Ok(())
    }

    /// Whether a node runs.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a node that is not in here.
    pub fn enabled(&self, origin: u64) -> Result<bool> {
        let steps = self.steps.lock();
        steps
            .iter()
            .find(|step| step.origin == origin)
            .map(|step| step.enabled)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    /// Lets a kernel, copy or fill node run or not.
    ///
    /// # Errors
    /// `INVALID_VALUE` for another node.
    pub fn enable(&self, origin: u64, enabled: bool) -> Result<()> {
        let mut steps = self.steps.lock();
        let step = steps
            .iter_mut()
            .find(|step| step.origin == origin && step.action.kind() <= 2);
        step.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.enabled = enabled;
        Ok(())
    }

    /// Takes over everything from a graph of the same shape.
    ///
    /// # Errors
    /// The result code of `cuGraphExecUpdate` and the node of the graph that differs.
    pub fn update(&self, graph: &Graph) -> std::result::Result<(), (u32, u64)> {
        const TOPOLOGY_CHANGED: u32 = 2;
        const NODE_TYPE_CHANGED: u32 = 3;
        let mut fresh = Vec::new();
        flatten(graph, &mut fresh).map_err(|_| (TOPOLOGY_CHANGED, 0))?;
        let mut steps = self.steps.lock();
        if steps.len() != fresh.len() {
            return Err((TOPOLOGY_CHANGED, 0));
        }
        if let Some((_, other)) = steps
            .iter()
            .zip(&fresh)
            .find(|(a, b)| a.action.kind() != b.action.kind())
        {
            return Err((NODE_TYPE_CHANGED, other.origin));
        }
        for (step, other) in steps.iter_mut().zip(fresh) {
            // Nodes are still named by the graph that this was made from.
            step.action = other.action;
        }
        Ok(())
    }
}

fn flatten(graph: &Graph, steps: &mut Vec<Step>) -> Result<()> {
    let ordered = order(&graph.state.lock()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    for node in ordered {
        let action = node.action.lock().clone();
        if let Action::Graph(child) = &action {
            flatten(child, steps)?;
        }
        steps.push(Step {
            origin: node.id,
            action,
            enabled: true,
        });
    }
    Ok(())
}

/// Something of the program's that graphs keep alive.
pub struct UserObject {
    /// Handle.
    pub id: u64,
    destroy: CUhostFn,
    data: UserData,
    references: Mutex<u32>,
}

impl UserObject {
    /// With `references` held by the program.
    pub fn create(
        driver: &Driver,
        destroy: CUhostFn,
        data: *mut c_void,
        references: u32,
    ) -> Arc<Self> {
        let object = Self {
            id: registry::fresh(),
            destroy,
            data: UserData(data),
            references: Mutex::new(references),
        };
        let object = Arc::new(object);
        driver.user_objects.insert(object.id, object.clone());
        object
    }

    /// Adds references.
    pub fn retain(&self, count: u32) {
        *self.references.lock() += count;
    }

    /// Drops references; the last one calls the program's destructor.
    pub fn release(&self, count: u32) {
        let last = {
            let mut references = self.references.lock();
            let before = *references;
            *references = before.saturating_sub(count);
            before > 0 && *references == 0
        };
        if let (true, Some(destroy)) = (last, self.destroy) {
            // SAFETY: the program gave the destructor to be called once with this pointer.
            unsafe { destroy(self.data.0) };
        }
    }
}
