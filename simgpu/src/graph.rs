//! Graphs: nodes, the edges between them, and the order that they make.

mod action;
mod conditional;
mod exec;
mod object;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use shim_ffi::CUresult;

use crate::driver::Driver;
use crate::lock::Mutex;
use crate::registry;

pub use action::{Action, Block, CopyParams, fill_params};
pub use conditional::{Choice, Condition, Conditional};
pub use exec::GraphExec;
pub use object::UserObject;

type Result<T> = std::result::Result<T, CUresult>;

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
                Action::Conditional(own) => Action::Conditional(own.duplicate(driver)),
                action => action.clone(),
            };
            let host_kernel = Arc::new(Node {
                id: registry::fresh(),
                graph: copy.id,
                local: node.local,
                action: Mutex::new(action),
                shown: Mutex::default(),
                attributes: Mutex::new(node.attributes.lock().clone()),
            });
            driver.nodes.insert(host_kernel.id, host_kernel.clone());
            copied.origins.insert(node.id, host_kernel.id);
            copied.nodes.push(host_kernel);
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
    pub fn host_kernel_of(&self, original: u64) -> Option<u64> {
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
            match &*node.action.lock() {
                Action::Graph(child) => child.destroy(driver),
                Action::Conditional(own) => {
                    own.bodies.iter().for_each(|body| body.destroy(driver));
                }
                _ => {}
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
