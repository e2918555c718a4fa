//! Memory of graphs: what their allocation nodes take, when they are made or when they first run,
//! as the driver chooses.
//!
//! A device's graph memory is a source like a pool, charged for what the driver says it has
//! reserved. What a call may add is prepaid: an allocation node when it is added or captured, all
//! nodes of an executable graph at its first launch or upload after it was instantiated or graph
//! memory was trimmed. What was not taken is given back at once. Where a driver is seen to take the
//! memory of a node when that is made, the first launch of a graph is not prepaid again, unless
//! graph memory was trimmed in between.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use shim_ffi::*;

use super::pool::{Source, reserved, settle};
use super::{Meter, granules};
use crate::attachment::client;
use crate::driver::real;

/// Whether this process has ever put allocations into a graph.
static ALLOCATES: AtomicBool = AtomicBool::new(false);
/// Counts trims: afterwards graphs take their memory anew.
static TRIMS: AtomicU64 = AtomicU64::new(1);
/// [`TRIMS`] when the first of the nodes was made that no executable graph has yet, where their
/// memory was taken with them; 0: there are none, or it was not.
static TAKEN_AT: AtomicU64 = AtomicU64::new(0);
/// Executable graphs that may wait for the host, or for others: each in one of [`PROBES`] places,
/// by its handle. Launches look here, without a lock. Graphs that find no place count as graphs
/// that do not wait.
static WAITING: [AtomicUsize; 1024] = [const { AtomicUsize::new(0) }; 1024];
/// Whether there ever was one.
static WAITS: AtomicBool = AtomicBool::new(false);
const PROBES: usize = 8;
/// Executable graphs that allocate.
static EXECS: Mutex<Option<HashMap<usize, Weight>>> = Mutex::new(None);

#[derive(Clone, Copy)]
struct Weight {
    bytes: u64,
    /// [`TRIMS`] when it last took its memory, 0 for never.
    taken_at: u64,
}

/// Where an executable graph may be that waits.
fn places(exec: usize) -> impl Iterator<Item = &'static AtomicUsize> {
    // Fibonacci hashing of a pointer, or of a number.
    let at = (exec as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    // PANIC: the modulus is the length.
    (0..PROBES).map(move |step| &WAITING[(at as usize + step) % WAITING.len()])
}

/// Whether a node of an executable graph waits for something that is not the device's work.
#[inline]
pub(crate) fn waits(exec: usize) -> bool {
    WAITS.load(Ordering::Relaxed) && places(exec).any(|place| place.load(Ordering::Relaxed) == exec)
}

fn note_waits(exec: usize) {
    WAITS.store(true, Ordering::Relaxed);
    let take = |place: &AtomicUsize| {
        place
            .compare_exchange(0, exec, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    };
    let _ = !waits(exec) && places(exec).any(take);
}

fn forget_waits(exec: usize) {
    for place in places(exec) {
        let _ = place.compare_exchange(exec, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

fn with<T>(act: impl FnOnce(&mut HashMap<usize, Weight>) -> T) -> T {
    let mut execs = EXECS.lock().unwrap_or_else(PoisonError::into_inner);
    act(execs.get_or_insert_with(HashMap::new))
}

fn here() -> Option<i32> {
    let mut device = CUdevice::default();
    // SAFETY: valid pointer to a local.
    unsafe { real::cuCtxGetDevice(&raw mut device) }
        .is_ok()
        .then_some(device.0)
}

fn governed() -> bool {
    ALLOCATES.load(Ordering::Relaxed) && client::current().is_some()
}

/// A graph allocates from here on.
fn graph_allocates() {
    ALLOCATES.store(true, Ordering::Relaxed);
}

/// Makes a call that puts an allocation of `bytes` into a graph on the calling thread's device.
pub(crate) fn allocate(bytes: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    graph_allocates();
    let Some((ordinal, meter)) = here().and_then(|ordinal| Some((ordinal, Meter::of(ordinal)?)))
    else {
        return call();
    };
    let most = granules(bytes);
    if let Err(refusal) = meter.reserve(most, bytes) {
        return refusal;
    }
    let source = Source::Graph(ordinal);
    let (trims, before) = (TRIMS.load(Ordering::Relaxed), reserved(source));
    let result = call();
    if !settle(source, ordinal, most) {
        meter.release(most);
    }
    let grown = |(before, after): (u64, u64)| after.saturating_sub(before);
    let taken = before.zip(reserved(source)).map_or(0, grown) >= bytes;
    if result.is_ok() && !taken {
        TAKEN_AT.store(0, Ordering::Relaxed);
    } else if result.is_ok() {
        let _ = TAKEN_AT.compare_exchange(0, trims, Ordering::Relaxed, Ordering::Relaxed);
    }
    result
}

/// Makes a call that trims the graph memory of a device.
pub(crate) fn trimmed(ordinal: i32, call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    TRIMS.fetch_add(1, Ordering::Relaxed);
    if governed() {
        settle(Source::Graph(ordinal), ordinal, 0);
    }
    result
}

/// What the nodes of a graph, and of graphs in it, ask for.
#[derive(Clone, Copy, Default)]
struct Content {
    /// To be allocated.
    bytes: u64,
    waits: bool,
}

impl Content {
    fn of(graph: CUgraph, depth: u32) -> Self {
        let mut count = 0;
        // SAFETY: a graph that the program has just instantiated; asks for the number of nodes
        // only.
        let counted = unsafe { real::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count) };
        if !counted.is_ok() || count == 0 || depth == 0 {
            return Self::default();
        }
        let mut nodes = vec![CUgraphNode::NULL; count];
        // SAFETY: space for as many nodes as is said.
        if !unsafe { real::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count) }.is_ok() {
            return Self::default();
        }
        nodes.truncate(count);
        let each = nodes.into_iter().map(|node| Self::of_node(node, depth));
        each.fold(Self::default(), |sum, one| Self {
            bytes: sum.bytes.saturating_add(one.bytes),
            waits: sum.waits || one.waits,
        })
    }

    fn of_node(node: CUgraphNode, depth: u32) -> Self {
        let mut kind = CUgraphNodeType::default();
        let mut parameters = CUDA_MEM_ALLOC_NODE_PARAMS::default();
        let mut inner = CUgraph::NULL;
        // SAFETY: a node of the graph; outputs are locals.
        unsafe {
            let _ = real::cuGraphNodeGetType(node, &raw mut kind);
            match kind {
                CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
                    let _ = real::cuGraphMemAllocNodeGetParams(node, &raw mut parameters);
                    Self {
                        bytes: granules(parameters.bytesize as u64),
                        waits: false,
                    }
                }
                CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH => {
                    let found = real::cuGraphChildGraphNodeGetGraph(node, &raw mut inner);
                    match found.is_ok() {
                        true => Self::of(inner, depth - 1),
                        false => Self::default(),
                    }
                }
                CUgraphNodeType::CU_GRAPH_NODE_TYPE_HOST
                | CUgraphNodeType::CU_GRAPH_NODE_TYPE_WAIT_EVENT
                | CUgraphNodeType::CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT
                | CUgraphNodeType::CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => Self {
                    bytes: 0,
                    waits: true,
                },
                _ => Self::default(),
            }
        }
    }
}

/// After `graph` has become the executable graph `exec`.
pub(crate) fn instantiated(exec: usize, graph: CUgraph) {
    /// Graphs in graphs; the driver allows no more in practice.
    const DEPTH: u32 = 8;
    if client::current().is_none() {
        return;
    }
    let Content { bytes, waits } = Content::of(graph, DEPTH);
    if waits {
        note_waits(exec);
    }
    if bytes != 0 {
        // Nodes that allocate are known when they are made.
        let taken_at = TAKEN_AT.swap(0, Ordering::Relaxed);
        with(|execs| execs.insert(exec, Weight { bytes, taken_at }));
    }
}

/// After an executable graph is gone.
pub(crate) fn exec_destroyed(exec: usize) {
    if WAITS.load(Ordering::Relaxed) {
        forget_waits(exec);
    }
    if governed() {
        with(|execs| execs.remove(&exec));
    }
}

/// What was reserved for a launch.
pub(crate) struct Prepaid {
    ordinal: i32,
    bytes: u64,
    exec: usize,
    trims: u64,
}

/// What the allocation nodes of an executable graph take together, in bytes, and on which device.
pub(crate) fn weight(exec: usize) -> Option<(Meter, u64)> {
    let bytes = with(|execs| execs.get(&exec).map(|weight| weight.bytes))?;
    if bytes == 0 {
        return None;
    }
    let meter = here().and_then(Meter::of)?;
    Some((meter, granules(bytes)))
}

/// Before an executable graph is launched or uploaded: reserves what it may take.
///
/// # Errors
/// What the program is answered.
pub(crate) fn before(exec: usize) -> Result<Option<Prepaid>, CUresult> {
    if !governed() {
        return Ok(None);
    }
    let Some(ordinal) = here() else {
        return Ok(None);
    };
    let trims = TRIMS.load(Ordering::Relaxed);
    let weight = with(|execs| execs.get(&exec).copied());
    let bytes = weight.map_or(0, |weight| {
        if weight.taken_at == trims {
            0
        } else {
            granules(weight.bytes)
        }
    });
    if bytes != 0
        && let Some(meter) = Meter::of(ordinal)
    {
        meter.reserve(bytes, bytes)?;
    }
    Ok(Some(Prepaid {
        ordinal,
        bytes,
        exec,
        trims,
    }))
}

/// After the launch or upload.
pub(crate) fn after(prepaid: Option<Prepaid>, result: CUresult) {
    let Some(prepaid) = prepaid else {
        return;
    };
    let source = Source::Graph(prepaid.ordinal);
    if !settle(source, prepaid.ordinal, prepaid.bytes)
        && let Some(meter) = Meter::of(prepaid.ordinal)
    {
        meter.release(prepaid.bytes);
    }
    if result.is_ok() && prepaid.bytes != 0 {
        with(|execs| {
            if let Some(weight) = execs.get_mut(&prepaid.exec) {
                weight.taken_at = prepaid.trims;
            }
        });
    }
}

/// After a call that put an allocation into a graph without being prepaid.
pub(crate) fn after_node() {
    graph_allocates();
    if governed()
        && let Some(ordinal) = here()
    {
        settle(Source::Graph(ordinal), ordinal, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_that_wait_are_known_without_a_lock_until_they_are_destroyed() {
        let _locked = EXECS.lock().unwrap_or_else(PoisonError::into_inner);
        let execs = || (1..=200).map(|number: usize| 0x7f00_0000_0000 + number * 0x140);
        execs().for_each(note_waits);
        execs().for_each(note_waits);
        let known = execs().filter(|exec| waits(*exec)).count();
        println!("now: {known} of 200 graphs that wait are known");
        assert!(known >= 190, "{known}");
        assert!(!waits(0x7f00_0000_0000));
        execs().for_each(forget_waits);
        assert!(!execs().any(waits));
        assert!(
            WAITING
                .iter()
                .all(|place| place.load(Ordering::Relaxed) == 0)
        );
    }
}
