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
//!
//! Beside other jobs the host's clock says little of what a submission takes, and the device's own
//! is asked (see [`crate::gate::weighing`]). What that has measured the host's clock changes only
//! where the job has the device to itself. A measurement may have a time slice of another context
//! in it: the class weighs the median of the last three, without those that are much longer.

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

/// With the nanoseconds of a class: the device's clock says so.
const MEASURED: u32 = 1 << 31;
/// Likewise: it says that a submission takes no longer.
const AT_MOST: u32 = 1 << 30;
const NS: u32 = AT_MOST - 1;
const _: () = assert!(MOST_NS < AT_MOST as u64);

static NEAR_TABLE: [AtomicU64; NEAR] = [const { AtomicU64::new(0) }; NEAR];
static CLASS_TABLE: [AtomicU64; CLASSES] = [const { AtomicU64::new(0) }; CLASSES];
/// What was measured of the class at the same index, see [`Samples`].
static SAMPLES: [AtomicU64; CLASSES] = [const { AtomicU64::new(0) }; CLASSES];

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

/// The indices at which a class may be.
fn indices(class: u32) -> impl Iterator<Item = usize> {
    (0..PROBES).map(move |step| (class as usize / 2 + step) % CLASSES)
}

/// A class that is known.
struct Known {
    at: usize,
    ns: u32,
    /// [`MEASURED`], [`AT_MOST`], or 0.
    how: u32,
}

impl Known {
    fn of(class: u32) -> Option<Self> {
        indices(class).find_map(|at| {
            // PANIC: below the length.
            let low = ns_of(CLASS_TABLE[at].load(Relaxed), class)?;
            let (ns, how) = (low & NS, low & !NS);
            Some(Self { at, ns, how })
        })
    }
}

/// Where a class is that is not known yet is to be entered.
fn index_for(class: u32) -> usize {
    // PANIC: below the length.
    let free = indices(class).find(|at| CLASS_TABLE[*at].load(Relaxed) == 0);
    // Where all places are taken the first one goes: any choice is as good.
    free.or_else(|| indices(class).next()).unwrap_or(0)
}

/// Enters what a submission takes.
fn enter(signature: u32, class: u32, known: Known) {
    // PANIC: below the length.
    CLASS_TABLE[known.at].store(word(class, known.ns | known.how), Relaxed);
    if signature != 0 {
        near(signature).store(word(signature, known.ns), Relaxed);
    }
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
    Known::of(class).map(|known| known.ns)
}

/// One submission was seen to take so long, by the host's clock and more or less.
///
/// What takes longer than was known is believed by a quarter, what takes less by three: times are
/// seen too long where the host looks late, and too short hardly ever. Beside other jobs they are
/// seen too short as well: what the device's clock has measured stays.
pub(crate) fn learn(signature: u32, class: u32, took_ns: u64) {
    let known = Known::of(class);
    let sample = took_ns.clamp(LEAST_NS, MOST_NS);
    match known {
        Some(known) if known.how == MEASURED => enter(signature, class, known),
        Some(known) if known.how == AT_MOST && sample >= u64::from(known.ns) => {
            enter(signature, class, known);
        }
        known => mix(signature, class, known, sample),
    }
}

/// One submission was seen to take just so long by the host's clock, with nobody else on the
/// device.
pub(crate) fn learn_exactly(signature: u32, class: u32, took_ns: u64) {
    let sample = took_ns.clamp(LEAST_NS, MOST_NS);
    mix(signature, class, Known::of(class), sample);
}

fn mix(signature: u32, class: u32, known: Option<Known>, sample: u64) {
    let ns = match &known {
        Some(known) if u64::from(known.ns) < sample => (u64::from(known.ns) * 3 + sample) / 4,
        Some(known) => (u64::from(known.ns) + sample * 3) / 4,
        None => sample,
    };
    let ns = ns as u32; // CAST: at most `MOST_NS`.
    let (at, how) = known.map_or_else(|| (index_for(class), 0), |known| (known.at, known.how));
    enter(signature, class, Known { at, ns, how });
}

// ----------------------------------------------------------------------------------------------
// By the device's clock
// ----------------------------------------------------------------------------------------------

/// How often a class is measured apart from its turn, at most: in vain, or because its measurements
/// differ.
const MOST_TRIES: u64 = 7;

/// A slice of another context, with the turns to it and back, takes no less; and launches of one
/// class differ by no such factor.
const FOREIGN_NS: u32 = 50_000;
const FOREIGN_FACTOR: u32 = 2;
/// Measurements in a row that look as if they had such a slice in them, after which the class is
/// believed to take longer than it did. Of kernels of 1 ms every other one has, by slices of 2 ms.
const MOST_FOREIGN: u64 = 7;

/// The last measurements of a class, in a word: three of 15 bits, the newest lowest and 0 where
/// there is none; tries; how many that were much longer came in a row; and of the class what its
/// index does not say.
#[derive(Clone, Copy)]
struct Samples(u64);

impl Samples {
    const KEPT: usize = 3;
    /// Bits of each: its mantissa, and by how much that is shifted.
    const BITS: u32 = 15;
    const MANTISSA: u32 = 10;
    const TRIES_AT: u32 = 3 * Self::BITS;
    const FOREIGN_AT: u32 = Self::TRIES_AT + MOST_TRIES.count_ones();
    const CLASS_AT: u32 = Self::FOREIGN_AT + MOST_FOREIGN.count_ones();

    fn of(known: &Known, class: u32) -> Self {
        let samples = Self(SAMPLES[known.at].load(Relaxed)); // PANIC: below the length.
        let none = Self(u64::from(class) >> (Self::CLASS_AT - 32) << Self::CLASS_AT);
        match samples.0 >> Self::CLASS_AT == none.0 >> Self::CLASS_AT {
            true => samples,
            false => none,
        }
    }

    fn keep(self, known: &Known) {
        SAMPLES[known.at].store(self.0, Relaxed); // PANIC: below the length.
    }

    /// With one more, and without the oldest. One that is much longer only counts at first.
    fn with(self, ns: u32) -> Self {
        let foreign = self.0 >> Self::FOREIGN_AT & MOST_FOREIGN;
        let none = self.0 & !(MOST_FOREIGN << Self::FOREIGN_AT);
        let ([shortest, ..], count) = self.sorted();
        let is_foreign = count != 0 && is_foreign(ns, shortest);
        if is_foreign && foreign < MOST_FOREIGN {
            return Self(none | (foreign + 1) << Self::FOREIGN_AT);
        }
        let rest = if is_foreign { self.0 } else { none };
        let all = (1 << Self::TRIES_AT) - 1;
        let shift = (u32::BITS - ns.leading_zeros()).saturating_sub(Self::MANTISSA);
        let code = shift << Self::MANTISSA | ns >> shift;
        Self(rest & !all | (self.0 << Self::BITS | u64::from(code)) & all)
    }

    /// The shortest first.
    fn sorted(self) -> ([u32; Self::KEPT], usize) {
        let (mut sorted, mut count) = ([u32::MAX; Self::KEPT], 0);
        let mut rest = self.0;
        for ns in &mut sorted {
            // CAST: the lowest bits.
            let code = rest as u32 & ((1 << Self::BITS) - 1);
            rest >>= Self::BITS;
            if code != 0 && count < Self::KEPT {
                let shift = code >> Self::MANTISSA;
                // The middle of what is kept as the same.
                let half = (1 << shift) >> 1;
                *ns = ((code & ((1 << Self::MANTISSA) - 1)) << shift) + half;
                count += 1;
            }
        }
        sorted.sort_unstable();
        (sorted, count)
    }

    /// Of three the one in the middle, else the shortest: what comes between makes it longer.
    fn median_ns(self) -> u32 {
        let ([shortest, middle, longest], count) = self.sorted();
        match count == Self::KEPT && !is_foreign(longest, shortest) {
            true => middle,
            false => shortest,
        }
    }

    fn tries(self) -> u64 {
        self.0 >> Self::TRIES_AT & MOST_TRIES
    }

    /// With one more of them; not for the last.
    fn tried(self) -> Self {
        Self(self.0 + (1 << Self::TRIES_AT))
    }

    /// Whether there are as many as are kept, and they agree.
    fn agree(self) -> bool {
        let ([shortest, _, longest], count) = self.sorted();
        count == Self::KEPT && longest - shortest <= shortest / 4
    }
}

/// Whether one measurement is so much longer than another that it has another context's slice in
/// it.
fn is_foreign(longer: u32, shorter: u32) -> bool {
    longer >= shorter.saturating_mul(FOREIGN_FACTOR) && longer >= shorter.saturating_add(FOREIGN_NS)
}

/// The device's clock says that one submission took so long.
pub(crate) fn measured(signature: u32, class: u32, took_ns: u64) {
    let took_ns = took_ns.clamp(LEAST_NS, MOST_NS) as u32; // CAST: at most that.
    let (ns, how) = (took_ns, MEASURED);
    let mut known = Known::of(class).unwrap_or_else(|| Known {
        at: index_for(class),
        ns,
        how,
    });
    let samples = Samples::of(&known, class).with(took_ns);
    samples.keep(&known);
    known.ns = samples.median_ns();
    known.how = how;
    enter(signature, class, known);
}

/// The device's clock says that one submission took no longer.
pub(crate) fn measured_at_most(signature: u32, class: u32, took_ns: u64) {
    let ns = took_ns.clamp(LEAST_NS, MOST_NS) as u32; // CAST: at most that.
    let how = AT_MOST;
    match Known::of(class) {
        Some(known) if known.ns < ns => {}
        Some(known) => {
            let how = known.how.max(how);
            enter(signature, class, Known { ns, how, ..known });
        }
        None => {
            let at = index_for(class);
            enter(signature, class, Known { at, ns, how });
        }
    }
}

/// Whether a class that is known is to be measured before its turn comes.
pub(crate) fn is_to_be_tried(class: u32) -> bool {
    Known::of(class).is_some_and(|known| {
        let samples = Samples::of(&known, class);
        samples.tries() < MOST_TRIES && !samples.agree()
    })
}

/// A class is about to be measured.
pub(crate) fn tried(class: u32) {
    if let Some(known) = Known::of(class) {
        let samples = Samples::of(&known, class);
        if samples.tries() < MOST_TRIES {
            samples.tried().keep(&known);
        }
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

    pub(crate) fn learn_exactly(self, took_ns: u64) {
        learn_exactly(self.signature, self.class, took_ns);
    }

    pub(crate) fn measured(self, took_ns: u64) {
        measured(self.signature, self.class, took_ns);
    }

    pub(crate) fn measured_at_most(self, took_ns: u64) {
        measured_at_most(self.signature, self.class, took_ns);
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
    for at in indices(class) {
        // PANIC: below the length, in all three.
        if ns_of(CLASS_TABLE[at].load(Relaxed), class).is_some() {
            SAMPLES[at].store(0, Relaxed);
            CLASS_TABLE[at].store(0, Relaxed);
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
                match kernel_class(node).and_then(of_class) {
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

    /// A class of a test's own that was measured so, and what it weighs.
    fn measured_as(kernel: u64, samples: &[u64]) -> (u32, u32) {
        let class = signature::class_of_kernel(kernel, (1, 1, 1));
        for took_ns in samples {
            measured(0, class, *took_ns);
        }
        (class, of_class(class).expect("measured"))
    }

    #[track_caller]
    fn assert_about(ns: u32, expected_ns: u32) {
        assert!(ns.abs_diff(expected_ns) <= expected_ns / 1000, "{ns}");
    }

    #[test]
    fn a_class_weighs_the_median_of_its_last_three_measurements() {
        let (class, ns) = measured_as(0xa_0000, &[290_000]);
        assert_about(ns, 290_000);
        measured(0, class, 200_000);
        assert_about(of_class(class).unwrap(), 200_000);
        measured(0x9a01, class, 210_000);
        assert_about(of_class(class).unwrap(), 210_000);
        assert_about(quickly(0x9a01, 5) as u32, 210_000);
        // The first is forgotten.
        measured(0, class, 190_000);
        assert_about(of_class(class).unwrap(), 200_000);
        let samples = [0, 1_000, 1_023, 1_025, 777_777, 123_456_789, u64::MAX];
        for (kernel, took_ns) in (0xa_0001..).zip(samples) {
            let expected_ns = took_ns.clamp(LEAST_NS, MOST_NS) as u32;
            assert_about(measured_as(kernel, &[took_ns; 3]).1, expected_ns);
        }
    }

    #[test]
    fn slices_of_other_contexts_do_not_count_even_if_every_other_measurement_has_one() {
        let mut random = 1_u64;
        let (class, _) = measured_as(0xa_0040, &[3_280_000]);
        let mut right = 0;
        for _ in 0..1_000 {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            measured(
                0,
                class,
                if random >> 63 == 0 {
                    1_000_000
                } else {
                    3_280_000
                },
            );
            right += u64::from(of_class(class).unwrap() < 1_010_000);
        }
        assert!(right > 980, "{right} of 1000");
        // Short ones, and turns alone.
        let (_, ns) = measured_as(0xa_0041, &[5_000, 150_000, 5_010, 2_150_000, 5_020]);
        assert_about(ns, 5_010);
    }

    #[test]
    fn what_takes_much_longer_from_now_on_is_believed_after_a_while() {
        let (class, _) = measured_as(0xa_0050, &[1_000_000; 3]);
        let measurements = (1..100).find(|_| {
            measured(0, class, 5_000_000);
            of_class(class).unwrap() > 4_000_000
        });
        assert_eq!(measurements, Some(MOST_FOREIGN + 3));
        measured(0, class, 1_000_000);
        assert_about(of_class(class).unwrap(), 1_000_000);
    }

    #[test]
    fn what_was_measured_the_hosts_clock_does_not_change_beside_others() {
        let (class, ns) = measured_as(0xa_0010, &[200_000; 3]);
        for took_ns in [20_000, 67_000, 5_000_000] {
            learn(0x9a11, class, took_ns);
            assert_eq!(of_class(class), Some(ns));
            assert_eq!(quickly(0x9a11, 5) as u32, ns);
        }
        // Without others it does, and what is measured next is again what counts.
        learn_exactly(0x9a11, class, 400_000);
        assert_about(quickly(0x9a11, 5) as u32, 250_000);
        measured(0x9a11, class, 200_000);
        assert_eq!(quickly(0x9a11, 5) as u32, ns);
    }

    #[test]
    fn at_most_makes_nothing_heavier() {
        let (class, ns) = measured_as(0xa_0020, &[100_000; 3]);
        measured_at_most(0, class, 150_000);
        assert_eq!(of_class(class), Some(ns));
        measured_at_most(0, class, 90_000);
        assert_eq!(of_class(class), Some(90_000));
        measured(0, class, 100_000);
        assert_eq!(of_class(class), Some(ns), "it was none of the three");

        let class = signature::class_of_kernel(0xa_0021, (1, 1, 1));
        learn(0, class, 67_000);
        measured_at_most(0, class, 200_000);
        learn(0, class, 467_000);
        assert_eq!(of_class(class), Some(167_000), "nothing was measured");
        measured_at_most(0, class, 30_000);
        learn(0, class, 400_000);
        assert_eq!(of_class(class), Some(30_000), "that is too long");
        learn(0, class, 10_000);
        assert_eq!(of_class(class), Some(15_000));

        let class = signature::class_of_kernel(0xa_0022, (1, 1, 1));
        measured_at_most(0x9a21, class, 30_000);
        assert_eq!(quickly(0x9a21, 0), 30_000, "better than nothing");
    }

    #[test]
    fn a_class_is_tried_until_three_measurements_agree_and_a_few_times_at_most() {
        let class = signature::class_of_kernel(0xa_0030, (1, 1, 1));
        assert!(!is_to_be_tried(class), "it is measured for it is not known");
        learn(0, class, 50_000);
        for took_ns in [200_000, 2_200_000, 190_000, 210_000] {
            assert!(is_to_be_tried(class));
            tried(class);
            measured(0, class, took_ns);
        }
        assert!(!is_to_be_tried(class), "one does not count");

        let class = signature::class_of_kernel(0xa_0031, (1, 1, 1));
        learn(0, class, 50_000);
        let tries = (0..100).take_while(|_| {
            let is = is_to_be_tried(class);
            tried(class);
            is
        });
        assert_eq!(tries.count() as u64, MOST_TRIES, "in vain");
        measured(0, class, 200_000);
        assert_about(of_class(class).unwrap(), 200_000);
    }

    #[test]
    fn what_was_measured_goes_with_its_class() {
        let class = class_of_graph(0x5560);
        learn(0, class, 1_000_000);
        for _ in 0..MOST_TRIES {
            measured(0, class, 7_000_000);
            tried(class);
        }
        graph_gone(0x5560);
        assert_eq!(of_class(class), None);
        learn(0, class, 1_000_000);
        assert!(is_to_be_tried(class));
        measured(0, class, 3_000_000);
        assert_about(of_class(class).unwrap(), 3_000_000);
        // Another one in its place, by chance.
        let other = class ^ 1 << 31;
        let at = Known::of(class).unwrap().at;
        let known = Known {
            at,
            ns: 5_000,
            how: 0,
        };
        assert!(Samples::of(&known, other).sorted().1 == 0);
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
        let kept =
            (0..20).filter(|index| of_class(class(*index)).is_some_and(|ns| ns == 1_000 + index));
        assert_eq!(kept.count(), PROBES);
    }
}
