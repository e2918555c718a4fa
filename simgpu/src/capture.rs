//! Stream capture: what streams would do becomes nodes of a graph.
//!
//! A capture starts in one stream and spreads to others through events. Calls that could wait for
//! captured work, or that a device might turn into synchronisation, are refused and invalidate the
//! captures that they endanger.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::*};

use crate::lock::Mutex;
use shim_ffi::{CUgraphNode, CUresult, c_void};

use crate::context::thread_number;
use crate::driver::Driver;
use crate::event::Event;
use crate::exec::engine::Ordering;
use crate::graph::{Action, Graph};
use crate::registry;
use crate::stream::Stream;

type Result<T> = std::result::Result<T, CUresult>;

/// `CU_STREAM_CAPTURE_MODE_*`.
pub const GLOBAL: u32 = 0;
/// Only this thread's unsafe calls are refused.
pub const THREAD_LOCAL: u32 = 1;
/// Nothing is refused.
pub const RELAXED: u32 = 2;

static ACTIVE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Changes how the calling thread's unsafe calls are treated; returns the mode before.
pub fn exchange_mode(mode: u32) -> u32 {
    MODE.with(|own| own.replace(mode))
}

/// A capture in progress.
pub struct Capture {
    /// Unique in the process.
    pub id: u64,
    /// Graph that grows.
    pub graph: Arc<Graph>,
    mode: u32,
    origin: u64,
    context: u64,
    thread: u64,
    /// The program's graph, which outlives an invalid capture.
    foreign_graph: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    invalid: bool,
    /// Over: nothing can be added, and nobody can join.
    ended: bool,
    /// What the next node of each stream waits for.
    frontiers: BTreeMap<u64, Vec<u64>>,
    /// Lists that the program was shown.
    shown: BTreeMap<u64, Vec<usize>>,
}

/// A point of a capture that an event stands for.
#[derive(Clone)]
pub struct Point {
    capture: Arc<Capture>,
    nodes: Vec<u64>,
}

impl Capture {
    /// Starts capturing a stream.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_UNSUPPORTED` for the legacy stream, `ILLEGAL_STATE` when it is being
    /// captured already.
    pub fn begin(
        driver: &Driver,
        stream: &Stream,
        mode: u32,
        into: Option<(Arc<Graph>, Vec<u64>)>,
    ) -> Result<()> {
        if mode > RELAXED {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if stream.info.ordering == Ordering::Legacy {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        let mut slot = stream.capture.lock();
        if slot.is_some() {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        let foreign_graph = into.is_some();
        let (graph, frontier) = into.unwrap_or_else(|| (Graph::create(driver), Vec::new()));
        let capture = Arc::new(Self {
            id: registry::fresh(),
            graph,
            mode,
            origin: stream.id,
            context: stream.context,
            thread: thread_number(),
            foreign_graph,
            state: Mutex::new(State {
                frontiers: BTreeMap::from([(stream.id, frontier)]),
                ..State::default()
            }),
        });
        *slot = Some(capture.clone());
        driver.captures.lock().push(capture);
        ACTIVE.fetch_add(1, AcqRel);
        Ok(())
    }

    /// Ends the capture of its origin stream.
    ///
    /// # Errors
    /// `ILLEGAL_STATE` without a capture, `STREAM_CAPTURE_UNMATCHED` for a stream that joined it,
    /// `STREAM_CAPTURE_WRONG_THREAD`, `STREAM_CAPTURE_INVALIDATED`, `STREAM_CAPTURE_UNJOINED`.
    pub fn end(driver: &Driver, stream: &Stream) -> Result<Arc<Graph>> {
        let capture = stream
            .capture
            .lock()
            .clone()
            .ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        if capture.origin != stream.id {
            capture.invalidate();
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != thread_number() {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        let outcome = {
            let state = capture.state.lock();
            let frontier = state.frontiers.get(&stream.id).cloned().unwrap_or_default();
            let joined = state.frontiers.iter().all(|(_, nodes)| {
                nodes
                    .iter()
                    .all(|node| capture.graph.precedes(*node, &frontier))
            });
            match (state.invalid, joined) {
                (true, _) => Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
                (_, false) => Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED),
                _ => Ok(capture.graph.clone()),
            }
        };
        capture.close(driver);
        if outcome.is_err() && !capture.foreign_graph {
            capture.graph.destroy(driver);
        }
        outcome
    }

    /// A stream goes that is being captured: with the one in which the capture began the capture is
    /// over, and nobody has its graph. What another one has captured stays, and has to be joined
    /// before the end as ever.
    pub fn detach(&self, driver: &Driver, stream: &Stream) {
        if self.origin != stream.id {
            *stream.capture.lock() = None;
            return;
        }
        self.invalidate();
        self.close(driver);
        if !self.foreign_graph {
            self.graph.destroy(driver);
        }
    }

    /// Takes the capture off all its streams.
    pub fn close(&self, driver: &Driver) {
        let streams: Vec<u64> = {
            let mut state = self.state.lock();
            state.ended = true;
            state.frontiers.keys().copied().collect()
        };
        for stream in streams {
            if let Some(stream) = driver.streams.get(stream) {
                *stream.capture.lock() = None;
            }
        }
        let mut captures = driver.captures.lock();
        let before = captures.len();
        captures.retain(|other| other.id != self.id);
        ACTIVE.fetch_sub(before - captures.len(), AcqRel);
    }

    /// Makes the capture end with an error.
    pub fn invalidate(&self) {
        self.state.lock().invalid = true;
    }

    /// True once it has been invalidated.
    pub fn is_invalid(&self) -> bool {
        self.state.lock().invalid
    }

    /// Adds a node to what a stream has captured.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_INVALIDATED`.
    pub fn add(&self, driver: &Driver, stream: u64, action: Action) -> Result<()> {
        let mut state = self.state.lock();
        if state.invalid {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        let after = state.frontiers.get(&stream).cloned().unwrap_or_default();
        let node = self.graph.add(driver, &after, action)?;
        state.frontiers.insert(stream, vec![node.id]);
        Ok(())
    }

    /// Where a stream stands, for an event to remember.
    pub fn point(self: &Arc<Self>, stream: u64) -> Point {
        let nodes = self
            .state
            .lock()
            .frontiers
            .get(&stream)
            .cloned()
            .unwrap_or_default();
        Point {
            capture: self.clone(),
            nodes,
        }
    }

    /// What the next node of a stream waits for, as a list of handles that stays until the next
    /// question.
    pub fn show_frontier(&self, stream: u64) -> (*const CUgraphNode, usize) {
        let mut state = self.state.lock();
        let nodes: Vec<usize> = state
            .frontiers
            .get(&stream)
            .into_iter()
            .flatten()
            .map(|node| *node as usize)
            .collect();
        let shown = state.shown.entry(stream).or_default();
        *shown = nodes;
        // A handle is a pointer-sized number.
        (shown.as_ptr().cast(), shown.len())
    }

    /// Sets, or adds to, what the next node of a stream waits for.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a node of another graph.
    pub fn set_frontier(&self, stream: u64, nodes: &[u64], replace: bool) -> Result<()> {
        let known = self.graph.nodes();
        if !nodes
            .iter()
            .all(|id| known.iter().any(|node| node.id == *id))
        {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let mut state = self.state.lock();
        let frontier = state.frontiers.entry(stream).or_default();
        if replace {
            frontier.clear();
        }
        join(frontier, nodes);
        Ok(())
    }
}

fn join(frontier: &mut Vec<u64>, nodes: &[u64]) {
    for node in nodes {
        if !frontier.contains(node) {
            frontier.push(*node);
        }
    }
}

impl Point {
    /// Lets a stream go on from here, joining the capture if it is not in one.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_MERGE` from another capture, `STREAM_CAPTURE_IMPLICIT` for the legacy
    /// stream, `CAPTURED_EVENT` once the capture has ended: a stream that joined it then could
    /// never leave.
    pub fn join(&self, stream: &Stream) -> Result<()> {
        if self.capture.state.lock().ended {
            return Err(CUresult::CUDA_ERROR_CAPTURED_EVENT);
        }
        if stream.info.ordering == Ordering::Legacy {
            self.capture.invalidate();
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        let mut slot = stream.capture.lock();
        match &*slot {
            Some(own) if own.id != self.capture.id => {
                own.invalidate();
                self.capture.invalidate();
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE);
            }
            Some(_) => {}
            None => *slot = Some(self.capture.clone()),
        }
        let mut state = self.capture.state.lock();
        if state.invalid {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        join(state.frontiers.entry(stream.id).or_default(), &self.nodes);
        Ok(())
    }
}

impl Event {
    /// Refuses to look at an event that stands for a point of a capture.
    ///
    /// # Errors
    /// `CAPTURED_EVENT`.
    pub fn forbid_captured(&self) -> Result<()> {
        match &*self.captured.lock() {
            Some(point) => {
                point.capture.invalidate();
                Err(CUresult::CUDA_ERROR_CAPTURED_EVENT)
            }
            None => Ok(()),
        }
    }
}

fn invalidate_where(driver: &Driver, endangered: impl Fn(&Capture) -> bool) -> Result<()> {
    if ACTIVE.load(Acquire) == 0 {
        return Ok(());
    }
    let captures: Vec<_> = driver
        .captures
        .lock()
        .iter()
        .filter(|capture| endangered(capture))
        .cloned()
        .collect();
    captures.iter().for_each(|capture| capture.invalidate());
    if captures.is_empty() {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }
}

/// Refuses a call that is unsafe while captures are in progress, by the calling thread's mode.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED`.
pub fn forbid_unsafe(driver: &Driver) -> Result<()> {
    let (mode, thread) = (MODE.with(Cell::get), thread_number());
    invalidate_where(driver, |capture| match mode {
        RELAXED => false,
        THREAD_LOCAL => capture.thread == thread && capture.mode != RELAXED,
        _ => (capture.thread == thread && capture.mode != RELAXED) || capture.mode == GLOBAL,
    })
}

/// Refuses to wait for a context that has a capture in it.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED`.
pub fn forbid_synchronisation(driver: &Driver, context: u64) -> Result<()> {
    invalidate_where(driver, |capture| capture.context == context)
}

/// Refuses work on a context's legacy stream while a stream that synchronises with it is being
/// captured.
///
/// # Errors
/// `STREAM_CAPTURE_IMPLICIT`.
pub fn forbid_implicit(driver: &Driver, stream: &Stream) -> Result<()> {
    if stream.info.ordering != Ordering::Legacy {
        return Ok(());
    }
    let blocking = |id: &u64| {
        driver
            .streams
            .get(*id)
            .is_some_and(|other| other.info.ordering == Ordering::Blocking)
    };
    invalidate_where(driver, |capture| {
        capture.context == stream.context && capture.state.lock().frontiers.keys().any(blocking)
    })
    .map_err(|_| CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
}

/// Handle of a node.
pub fn node_handle(id: u64) -> CUgraphNode {
    CUgraphNode(id as *mut c_void)
}
