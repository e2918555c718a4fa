//! Executable graphs.
//!
//! An executable graph runs its nodes one after another in an order that respects all edges. That
//! is one of the orders a real device may choose; branches of a graph do not overlap here.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use shim_ffi::CUresult;

use super::{Action, Graph, NUMBERS, Result, UserObject, order};
use crate::driver::Driver;
use crate::exec::work::Work;
use crate::lock::Mutex;
use crate::memory::Kind;
use crate::memory::pool::Pool;
use crate::registry;

/// One node of an executable graph.
struct Step {
    /// Node of the graph that it was made from.
    origin: u64,
    action: Action,
    enabled: bool,
    /// A conditional node's bodies.
    bodies: Vec<Vec<Self>>,
}

/// The step of a node, also where it is inside of a conditional node.
fn find(steps: &mut [Step], origin: u64) -> Option<&mut Step> {
    steps.iter_mut().find_map(|step| {
        if step.origin == origin {
            return Some(step);
        }
        step.bodies.iter_mut().find_map(|body| find(body, origin))
    })
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
        let steps = self.steps.lock();
        put(driver, &steps, &mut work)?;
        give(driver, &steps);
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
        let step = find(&mut steps, origin).filter(|step| step.action.kind() == action.kind());
        step.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.action = action;
        Ok(())
    }

    /// Whether a node runs.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a node that is not in here.
    pub fn enabled(&self, origin: u64) -> Result<bool> {
        find(&mut self.steps.lock(), origin)
            .map(|step| step.enabled)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    /// Lets a kernel, copy or fill node run or not.
    ///
    /// # Errors
    /// `INVALID_VALUE` for another node.
    pub fn enable(&self, origin: u64, enabled: bool) -> Result<()> {
        let mut steps = self.steps.lock();
        let step = find(&mut steps, origin).filter(|step| step.action.kind() <= 2);
        step.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.enabled = enabled;
        Ok(())
    }

    /// Takes over everything from a graph of the same shape.
    ///
    /// # Errors
    /// The result code of `cuGraphExecUpdate` and the node of the graph that differs.
    pub fn update(&self, graph: &Graph) -> std::result::Result<(), (u32, u64)> {
        let mut fresh = Vec::new();
        flatten(graph, &mut fresh).map_err(|_| (TOPOLOGY_CHANGED, 0))?;
        let mut steps = self.steps.lock();
        may_take_over(&steps, &fresh)?;
        take_over(&mut steps, fresh);
        Ok(())
    }
}

/// What a launch allocates and does not free is the program's from then on.
fn give(driver: &Driver, steps: &[Step]) {
    let allocates = |step: &Step| matches!(step.action, Action::Alloc(_) | Action::Free(_));
    if !steps.iter().any(allocates) {
        return;
    }
    let mut given = driver.given_by_graphs.lock();
    for step in steps {
        match &step.action {
            Action::Alloc(block) => {
                given.insert(block.address);
            }
            Action::Free(address) => {
                given.remove(address);
            }
            _ => {}
        }
    }
}

/// Whether memory is the program's and came from a graph that is gone; then its end has begun.
fn outlived(driver: &Driver, address: u64) -> bool {
    let region = driver.memory.region(address);
    let Some(Kind::Pool(pool)) = region.map(|region| region.kind) else {
        return false;
    };
    let of_graphs = |other: &Arc<Pool>| other.id == pool.0 as u64;
    driver.graph_pools.iter().any(of_graphs) && driver.memory.begin_free(address)
}

/// What enabled steps put into a stream.
fn put(driver: &Driver, steps: &[Step], work: &mut Vec<Work>) -> Result<()> {
    for step in steps.iter().filter(|step| step.enabled) {
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
            Action::Wait(id) => work.extend(event(*id)?.last().map(Work::Wait)),
            Action::Record(id) => work.push(Work::Record(event(*id)?.begin_record()?)),
            Action::Conditional(own) => {
                if let Some(body) = own.chosen().and_then(|number| step.bodies.get(number)) {
                    put(driver, body, work)?;
                }
            }
            Action::Free(address) if outlived(driver, *address) => {
                work.push(Work::PoolFree { address: *address });
            }
            Action::Copy(None, _)
            | Action::Graph(_)
            | Action::Empty
            | Action::Alloc(_)
            | Action::Free(_) => {}
        }
    }
    Ok(())
}

const TOPOLOGY_CHANGED: u32 = 2;
const NODE_TYPE_CHANGED: u32 = 3;

/// Whether steps are of the same shape; else the result code of `cuGraphExecUpdate` and the node.
fn may_take_over(steps: &[Step], fresh: &[Step]) -> std::result::Result<(), (u32, u64)> {
    if steps.len() != fresh.len() {
        return Err((TOPOLOGY_CHANGED, 0));
    }
    for (step, other) in steps.iter().zip(fresh) {
        if step.action.kind() != other.action.kind() {
            return Err((NODE_TYPE_CHANGED, other.origin));
        }
        if step.bodies.len() != other.bodies.len() {
            return Err((TOPOLOGY_CHANGED, other.origin));
        }
        for (body, other) in step.bodies.iter().zip(&other.bodies) {
            may_take_over(body, other)?;
        }
    }
    Ok(())
}

/// Takes what steps do; nodes are still named by the graph that they were made from.
fn take_over(steps: &mut [Step], fresh: Vec<Step>) {
    for (step, other) in steps.iter_mut().zip(fresh) {
        step.action = other.action;
        for (body, other) in step.bodies.iter_mut().zip(other.bodies) {
            take_over(body, other);
        }
    }
}

fn flatten(graph: &Graph, steps: &mut Vec<Step>) -> Result<()> {
    let ordered = order(&graph.state.lock()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    for node in ordered {
        let action = node.action.lock().clone();
        if let Action::Graph(child) = &action {
            flatten(child, steps)?;
        }
        let mut bodies = Vec::new();
        if let Action::Conditional(own) = &action {
            for graph in &own.bodies {
                let mut body = Vec::new();
                flatten(graph, &mut body)?;
                bodies.push(body);
            }
        }
        steps.push(Step {
            origin: node.id,
            action,
            enabled: true,
            bodies,
        });
    }
    Ok(())
}
