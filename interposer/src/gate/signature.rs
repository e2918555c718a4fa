//! What a submission looks like, as a number, and the boundaries between iterations.
//!
//! A signature says "the same kernel, with the same grid, in the same stream" within one process;
//! the arbiter looks for a period in them. Handles are stable while the process lives, so nothing
//! is looked up. The work is a dozen instructions beside the launch path's loads; the result is
//! stored in a ring of the thread's own.
//!
//! A boundary is noted in the slow path, which the thread's *anchor* forces: the one signature that
//! the arbiter has named.

use shim_ffi::*;

use crate::attachment::client::{self, Attached};
use crate::ground::clock::now_ns;
use crate::ground::thread::{Thread, thread};

/// What a gated call knows about itself.
#[derive(Clone, Copy)]
pub(crate) struct Seen {
    /// Never 0.
    pub(crate) signature: u32,
    /// Bytes that it copies between host and device.
    pub(crate) copies: u64,
    /// What is like it in the time that it takes, see [`crate::gate::cost`]; neither 0 nor odd. Not
    /// computed where nobody asks.
    pub(crate) class: u32,
}

/// Odd constants with well-mixed bits: the fractional parts of the golden ratio and of the square
/// root of 3.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;
const MIX_SHAPE: u64 = 0xbb67_ae85_84ca_a73b;

/// `what` fills the upper bits, the shape the lower ones; see [`channel::KIND_BITS`].
#[inline(always)]
const fn fold(what: u64, shape: u64) -> u32 {
    const LOW: u32 = u32::MAX >> channel::KIND_BITS;
    // CAST: the upper halves of the products.
    let what = (what.wrapping_mul(MIX) >> 32) as u32;
    let shape = (shape.wrapping_mul(MIX_SHAPE) >> 32) as u32 >> channel::KIND_BITS;
    (what & !LOW) | (shape & LOW) | 1
}

/// The class of what does `what`, so much of it.
#[inline(always)]
pub(crate) const fn class(symbol: u64, what: u64, size: u64) -> u32 {
    let magnitude = 64 - size.leading_zeros() as u64;
    let mixed = what.wrapping_mul(MIX) ^ (symbol << 8 | magnitude).wrapping_mul(MIX_SHAPE);
    // CAST: the upper half; and neither 0 nor odd.
    ((mixed.wrapping_mul(MIX) >> 32) as u32 | 2) & !1
}

/// The class of a kernel's launch, by whichever function.
#[inline(always)]
pub(crate) fn class_of_kernel(kernel: u64, (x, y, z): (u32, u32, u32)) -> u32 {
    // What the driver allows fits.
    let blocks = u64::from(x)
        .wrapping_mul(u64::from(y))
        .wrapping_mul(u64::from(z));
    class(0, kernel, blocks)
}

/// The class of an executable graph's launch.
#[inline(always)]
pub(crate) const fn class_of_graph(exec: u64) -> u32 {
    class(Symbol::cuGraphLaunch as u64 + 1, exec, 1)
}

/// The signature of a call of `symbol`, which does `work`, to `stream`; and what it copies.
#[inline(always)]
pub(crate) fn of(symbol: Symbol, work: Work, args: &[usize], stream: usize) -> Seen {
    let arg = |at: usize| args.get(at).copied().unwrap_or(0) as u64;
    let (mut what, mut shape, mut copies) = (symbol as u64 + 1, 0, 0);
    let mut kernel_grid = None;
    match work {
        Work::Any | Work::HostWait => {}
        Work::Kernel { blocks } => {
            // CAST, here and below: the upper halves of the registers of 32-bit parameters are
            // anything.
            (what, kernel_grid) = match blocks {
                Blocks::Words => (arg(0), Some((arg(1) as u32, arg(2) as u32, arg(3) as u32))),
                Blocks::Plane => (arg(0), Some((arg(1) as u32, arg(2) as u32, 1))),
                Blocks::Structure if arg(0) == 0 => (arg(1), None),
                Blocks::Structure => {
                    // SAFETY: the caller's launch configuration, which the driver is about to read
                    // as well.
                    let config = unsafe { &*(arg(0) as *const CUlaunchConfig) };
                    (
                        arg(1),
                        Some((config.gridDimX, config.gridDimY, config.gridDimZ)),
                    )
                }
            };
        }
        Work::Function | Work::Graph => what = arg(0),
        Work::CopyAcross { bytes } => {
            copies = arg(bytes as usize);
            shape = copies;
        }
        Work::CopyWithin { bytes } => shape = arg(bytes as usize),
    }
    let class = match (kernel_grid, work) {
        (Some(blocks), _) => {
            shape = grid(blocks);
            class_of_kernel(what, blocks)
        }
        // The same graph, by either function.
        (None, Work::Graph) => class_of_graph(what),
        (None, _) => class(symbol as u64 + 1, what, shape),
    };
    Seen {
        signature: fold(what, shape ^ ((stream as u64) << 20)),
        copies,
        class,
    }
}

#[inline(always)]
fn grid((x, y, z): (u32, u32, u32)) -> u64 {
    (x as u64) ^ ((y as u64) << 24) ^ ((z as u64) << 44)
}

/// Points the thread at its ring, if it has one, and at its anchor. In the slow path, because both
/// come and go.
pub(crate) fn arm(thread: &Thread, attached: &Attached) {
    let slot = thread.slot_plus_one.get().wrapping_sub(1);
    let ring = attached
        .end
        .signatures
        .and_then(|page| page.ring(slot as usize));
    thread
        .ring
        .set(ring.map_or(std::ptr::null(), std::ptr::from_ref));
    thread.anchor.set(match ring {
        Some(_) => attached.end.arbiter.anchor(slot),
        None => 0,
    });
}

/// Notes a submission in the slow path, before it is counted: the fast path did not. Whether an
/// iteration of the program has ended with it.
pub(crate) fn record(thread: &Thread, attached: &Attached, launches: u64, seen: Seen) -> bool {
    // SAFETY: null, or set by `arm` to a ring in a page that is never unmapped.
    let Some(ring) = (unsafe { thread.ring.get().as_ref() }) else {
        return false;
    };
    ring.record(launches, seen.signature);
    let is_boundary = seen.signature == thread.anchor.get();
    if is_boundary {
        let device = (thread.device_plus_one.get() as usize).wrapping_sub(1);
        let held = attached.account().map_or(0, |own| own.own_bytes(device));
        ring.boundaries().note(launches, now_ns(), held);
    }
    is_boundary
}

/// Fastest copies are learnt from those of this size at least: smaller ones show the cost of the
/// call.
const TELLING_BYTES: u64 = 256 << 10;

/// Whether a call copies enough to tell how fast the device copies.
pub(crate) fn tells_rate(seen: Seen) -> bool {
    seen.copies >= TELLING_BYTES
}

/// Notes how fast a blocking copy was that tells, has ended just now, and began when the device was
/// idle, as far as the caller knows.
pub(crate) fn learn_rate(line: &channel::ThreadSlot, seen: Seen, begun_ns: u64) {
    let took_ns = now_ns().saturating_sub(begun_ns).max(1);
    line.note_copy_rate(seen.copies.saturating_mul(1000) / took_ns);
}

/// Notes that an iteration has ended, as the program says. Whether anybody asks for that.
pub(crate) fn note_step() -> bool {
    let Some(attached) = client::current() else {
        return false;
    };
    let Some(page) = attached.end.signatures else {
        return false;
    };
    let thread = thread();
    let device = match thread.generation.get() == client::generation() {
        true => (thread.device_plus_one.get() as usize).saturating_sub(1),
        false => 0,
    };
    let held = attached.account().map_or(0, |own| own.own_bytes(device));
    page.steps()
        .note(attached.end.client.launches(), now_ns(), held);
    true
}
