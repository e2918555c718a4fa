//! What a submission takes on the device, in nanoseconds, learnt per kernel and size of its grid.
//!
//! Credits and queues are counted in these (see [`crate::gate::marks`]), so that a kernel of 50 ms
//! among kernels of 10 us weighs what it takes from its second launch on. A mean over a stream's
//! submissions knows of it only after the fact, and forgets it among the others. A *class* is a
//! kernel with the binary logarithm of its number of blocks (a kind of call with that of its
//! bytes): programs with ever new shapes would otherwise never launch anything that is known.
//!
//! Two tables of words, a key above and nanoseconds below, without locks: racing writers lose an
//! entry at worst, and what is lost is learnt again. The near one is by signature, for the launch
//! path: one load and a comparison. The other is by class. Executable graphs are entered with the
//! sum of their nodes when they are instantiated.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shim_ffi::*;

use crate::driver::real;
use crate::gate::signature::{self, Seen};

/// Programs launch some hundred different kernels, many in several streams.
const NEAR: usize = 4096;
const CLASSES: usize = 4096;
/// Places next to its own in which a class may be.
const PROBES: usize = 8;
/// Nothing that a device is asked for takes less.
const LEAST_NS: u64 = 1_000;
/// More is not distinguished, so that credits stay within their word.
const MOST_NS: u64 = 1_000_000_000;

static NEAR_TABLE: [AtomicU64; NEAR] = [const { AtomicU64::new(0) }; NEAR];
static CLASS_TABLE: [AtomicU64; CLASSES] = [const { AtomicU64::new(0) }; CLASSES];

#[inline(always)]
const fn word(key: u32, ns: u32) -> u64 {
    (key as u64) << 32 | ns as u64
}

/// `None` where the word is another key's.
#[inline(always)]
const fn ns_of(word: u64, key: u32) -> Option<u32> {
    // CAST: both halves.
    if (word >> 32) as u32 == key {
        Some(word as u32)
    } else {
        None
    }
}

#[inline(always)]
fn near(signature: u32) -> &'static AtomicU64 {
    // The lowest bit is always set. PANIC: the modulus is the length.
    &NEAR_TABLE[((signature >> 1) ^ (signature >> 17)) as usize % NEAR]
}

fn places(class: u32) -> impl Iterator<Item = &'static AtomicU64> {
    // PANIC: the modulus is the length.
    (0..PROBES).map(move |step| &CLASS_TABLE[(class as usize / 2 + step) % CLASSES])
}

/// What a submission takes, for the launch path; `unknown_ns` where nothing near says so.
#[inline(always)]
pub(crate) fn quickly(signature: u32, unknown_ns: i32) -> i32 {
    match ns_of(near(signature).load(Relaxed), signature) {
        Some(ns) => ns as i32, // CAST: at most `MOST_NS`.
        None => unknown_ns,
    }
}

/// What a submission takes, if it or one of its class is known.
pub(crate) fn of(seen: Seen) -> Option<u32> {
    let here = near(seen.signature);
    // What one stream has taught of the class is so for the others.
    let Some(ns) = of_class(seen.class) else {
        return ns_of(here.load(Relaxed), seen.signature);
    };
    here.store(word(seen.signature, ns), Relaxed);
    Some(ns)
}

/// What is known of a class.
pub(crate) fn of_class(class: u32) -> Option<u32> {
    places(class).find_map(|place| ns_of(place.load(Relaxed), class))
}

/// One submission was seen to take so long.
///
/// What takes longer than was known is believed by a quarter, what takes less by three: times are
/// seen too long where the host looks late, and too short hardly ever.
pub(crate) fn learn(signature: u32, class: u32, took_ns: u64) {
    let sample = took_ns.clamp(LEAST_NS, MOST_NS);
    let known = places(class).find(|place| ns_of(place.load(Relaxed), class).is_some());
    let ns = match known.and_then(|place| ns_of(place.load(Relaxed), class)) {
        Some(ns) if u64::from(ns) < sample => (u64::from(ns) * 3 + sample) / 4,
        Some(ns) => (u64::from(ns) + sample * 3) / 4,
        None => sample,
    };
    let ns = ns as u32; // CAST: at most `MOST_NS`.
    let place = known.or_else(|| places(class).find(|place| place.load(Relaxed) == 0));
    // Where all places are taken the first one goes: any choice is as good.
    if let Some(place) = place.or_else(|| places(class).next()) {
        place.store(word(class, ns), Relaxed);
    }
    if signature != 0 {
        near(signature).store(word(signature, ns), Relaxed);
    }
}

/// A submission that has a mark of its own.
#[derive(Clone, Copy)]
pub(crate) struct SoloSample {
    pub(crate) signature: u32,
    pub(crate) class: u32,
    /// Nobody knows what it takes; its weight is a guess.
    pub(crate) guessed: bool,
}

impl SoloSample {
    /// As a word that is not 0: classes are even.
    pub(crate) fn word(self) -> u64 {
        u64::from(self.signature) << 32 | u64::from(self.class) | u64::from(self.guessed)
    }

    pub(crate) fn from_word(word: u64) -> Option<Self> {
        (word != 0).then_some(Self {
            signature: (word >> 32) as u32, // CAST: both halves.
            class: word as u32 & !1,
            guessed: word & 1 == 1,
        })
    }

    pub(crate) fn learn(self, took_ns: u64) {
        learn(self.signature, self.class, took_ns);
    }
}

/// The class of launches of an executable graph.
fn class_of_graph(exec: usize) -> u32 {
    signature::class_of_graph(exec as u64)
}

/// After a graph has become executable: it weighs what its nodes do, as far as they are known.
pub(crate) fn graph_instantiated(exec: usize, graph: CUgraph) {
    let mut weight = Weight::default();
    weight.add(graph, DEPTH);
    // What is not known of takes what the known ones take on average; with none there is nothing to
    // say.
    if let Some(mean_ns) = weight.ns.checked_div(weight.known) {
        let ns = weight
            .ns
            .saturating_add(mean_ns.saturating_mul(weight.unknown));
        graph_gone(exec);
        learn(0, class_of_graph(exec), ns);
    }
}

/// An executable graph is gone, or does something else now: its handle may come again.
pub(crate) fn graph_gone(exec: usize) {
    let class = class_of_graph(exec);
    for place in places(class) {
        if ns_of(place.load(Relaxed), class).is_some() {
            place.store(0, Relaxed);
        }
    }
}

/// Graphs in graphs; the driver allows no more in practice.
const DEPTH: u32 = 8;

#[derive(Default)]
struct Weight {
    ns: u64,
    known: u64,
    unknown: u64,
}

impl Weight {
    fn add(&mut self, graph: CUgraph, depth: u32) {
        let mut count = 0;
        // SAFETY: a graph that the program has just instantiated, or one in it; asks for the number
        // of nodes only.
        let counted = unsafe { real::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count) };
        if !counted.is_ok() || count == 0 || depth == 0 {
            return;
        }
        let mut nodes = vec![CUgraphNode::NULL; count];
        // SAFETY: space for as many nodes as is said.
        if !unsafe { real::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count) }.is_ok() {
            return;
        }
        nodes.truncate(count);
        nodes.into_iter().for_each(|node| self.node(node, depth));
    }

    fn node(&mut self, node: CUgraphNode, depth: u32) {
        let mut kind = CUgraphNodeType::default();
        // SAFETY: a node of the graph; the output is a local.
        if !unsafe { real::cuGraphNodeGetType(node, &raw mut kind) }.is_ok() {
            return;
        }
        match kind {
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL => {
                match kernel_class(node)
                    .and_then(|class| places(class).find_map(|at| ns_of(at.load(Relaxed), class)))
                {
                    Some(ns) => {
                        self.ns = self.ns.saturating_add(u64::from(ns));
                        self.known += 1;
                    }
                    None => self.unknown += 1,
                }
            }
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH => {
                let mut inner = CUgraph::NULL;
                // SAFETY: a child node; the output is a local.
                let found = unsafe { real::cuGraphChildGraphNodeGetGraph(node, &raw mut inner) };
                if found.is_ok() {
                    self.add(inner, depth - 1);
                }
            }
            _ => {}
        }
    }
}

/// The class that a kernel node's launch would have.
fn kernel_class(node: CUgraphNode) -> Option<u32> {
    if real::exported(Symbol::cuGraphKernelNodeGetParams_v2) {
        let mut node_params = CUDA_KERNEL_NODE_PARAMS::default();
        // SAFETY: a kernel node; the output is a local.
        let found =
            unsafe { real::cuGraphKernelNodeGetParams_v2(node, &raw mut node_params) }.is_ok();
        let kernel = match node_params.func.0.is_null() {
            true => node_params.kern.0 as usize,
            false => node_params.func.0 as usize,
        };
        return found.then(|| {
            let grid = (
                node_params.gridDimX,
                node_params.gridDimY,
                node_params.gridDimZ,
            );
            signature::class_of_kernel(kernel as u64, grid)
        });
    }
    let mut node_params = CUDA_KERNEL_NODE_PARAMS_v1::default();
    // SAFETY: as above.
    let found = unsafe { real::cuGraphKernelNodeGetParams(node, &raw mut node_params) }.is_ok();
    found.then(|| {
        let grid = (
            node_params.gridDimX,
            node_params.gridDimY,
            node_params.gridDimZ,
        );
        signature::class_of_kernel(node_params.func.0 as u64, grid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(signature: u32, class: u32) -> Seen {
        Seen {
            signature,
            copies: 0,
            class,
        }
    }

    #[test]
    fn a_class_is_known_by_its_first_launch_and_every_shape_of_it_with_it() {
        let class = signature::class_of_kernel(0x1234_5670, (96, 1, 1));
        assert_eq!(class, signature::class_of_kernel(0x1234_5670, (2, 40, 1)));
        assert_ne!(class, signature::class_of_kernel(0x1234_5670, (128, 1, 1)));
        assert_ne!(class, signature::class_of_kernel(0x1234_5678, (96, 1, 1)));
        assert_eq!(of(seen(0x7001, class)), None);
        learn(0x7001, class, 50_000_000);
        assert_eq!(quickly(0x7001, 5), 50_000_000);
        assert_eq!(quickly(0x7003, 5), 5, "not near yet");
        assert_eq!(of(seen(0x7003, class)), Some(50_000_000));
        assert_eq!(quickly(0x7003, 5), 50_000_000);
    }

    #[test]
    fn what_is_seen_shorter_counts_for_more() {
        let class = signature::class_of_kernel(0x9990, (1, 1, 1));
        learn(0x9991, class, 1_000_000);
        learn(0x9991, class, 100_000);
        assert_eq!(quickly(0x9991, 0), 325_000);
        learn(0x9991, class, 1_325_000);
        assert_eq!(quickly(0x9991, 0), 575_000);
        learn(0x9991, class, u64::MAX);
        assert!(quickly(0x9991, 0) > 0, "stays within its word");
    }

    #[test]
    fn a_graph_that_is_gone_weighs_nothing() {
        let class = class_of_graph(0x5550);
        learn(0, class, 7_000_000);
        assert_eq!(of(seen(0x5551, class)), Some(7_000_000));
        graph_gone(0x5550);
        assert_eq!(of(seen(0x5553, class)), None);
    }

    #[test]
    fn more_classes_than_places_drive_each_other_out() {
        // All at the same place.
        let class = |index: u32| 0x0666 + index * 2 * CLASSES as u32;
        for index in 0..20 {
            learn(0, class(index), 1_000 + u64::from(index));
        }
        assert_eq!(of(seen(0xabcd_ef01, class(19))), Some(1_019));
        let kept = (0..20).filter(|index| {
            let found = places(class(*index)).find_map(|at| ns_of(at.load(Relaxed), class(*index)));
            found.is_some_and(|ns| ns == 1_000 + index)
        });
        assert_eq!(kept.count(), PROBES);
    }
}
