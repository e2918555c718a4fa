//! What the traits of a row ask to be done before and after the driver's call.

use std::ffi::c_void;

use shim_ffi::*;

use crate::attachment::client;
use crate::attachment::verdict::{insist, ours};
use crate::gate::{capture, context, cost, marks};
use crate::metering::{graph, physical, pool};
use crate::{gate, residency};

/// The stream at the first argument, as a key.
fn stream_of(symbol: Symbol, args: &[usize]) -> usize {
    match args.first().copied() {
        None | Some(0) => gate::default_stream(symbol.entry().variant),
        Some(stream) => stream,
    }
}

/// What cannot be had of memory that can be moved is answered as it would be of plain memory.
#[inline(always)]
pub(super) fn answered(traits: Traits, args: &[usize]) -> Option<CUresult> {
    let address = *args.get(usize::from(traits.unmovable?))? as u64;
    if !residency::active() {
        return None;
    }
    if residency::owns(address) {
        return Some(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if matches!(traits.tracks, Tracks::MemoryRetain) && args.first() != Some(&0) {
        let handle = residency::retain(address)?;
        // SAFETY: not null, and the caller's to write to.
        unsafe { *(args.first().copied().unwrap_or(0) as *mut u64) = handle };
        physical::retained(handle, address);
        return Some(CUresult::CUDA_SUCCESS);
    }
    None
}

/// Rows of the calls that give a pool of a device which they name.
pub(super) const NAMES_A_DEVICE: [bool; COUNT] = {
    let mut rows = [false; COUNT];
    rows[Symbol::cuMemPoolCreate as usize] = true;
    rows[Symbol::cuDeviceGetDefaultMemPool as usize] = true;
    rows[Symbol::cuDeviceGetMemPool as usize] = true;
    rows[Symbol::cuMemGetDefaultMemPool as usize] = true;
    rows[Symbol::cuMemGetMemPool as usize] = true;
    rows
};

/// What such a call is answered where a strict job may not use that device.
pub(super) fn kept_off(traits: Traits, args: &[usize]) -> Option<CUresult> {
    // Nothing of the program's is read for a job that may use any device.
    if !client::is_strict() {
        return None;
    }
    let named = *args.get(1)?;
    // A device has a small number, and nothing lies at such an address.
    let device = if matches!(traits.tracks, Tracks::PoolCreate) {
        let properties = named as *const CUmemPoolProps;
        if properties.is_null() {
            return None;
        }
        // SAFETY: the properties that the driver is about to read, aligned or not.
        located(unsafe { properties.read_unaligned() }.location)?
    } else if named > usize::from(u16::MAX) {
        // SAFETY: where no device is named, the location that the driver is about to read, aligned
        // or not.
        located(unsafe { (named as *const CUmemLocation).read_unaligned() })?
    } else {
        // CAST: 16 bits.
        named as i32
    };
    client::kept_off(device)
}

fn located(location: CUmemLocation) -> Option<i32> {
    (location.r#type == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE).then_some(location.id)
}

/// Position of a handle of physical memory that is a number of ours, and the driver's handle to put
/// there.
#[inline(always)]
pub(super) fn translated(traits: Traits, words: &[usize]) -> Option<(usize, usize)> {
    let at = usize::from(traits.physical?);
    if !residency::active() {
        return None;
    }
    Some((at, residency::translated(*words.get(at)?)?))
}

#[inline(always)]
pub(super) fn before(symbol: Symbol, traits: Traits, args: &[usize]) {
    if matches!(traits.tracks, Tracks::StreamEnd) {
        let stream = args.first().copied().unwrap_or(0);
        let _ = insist(symbol, || marks::stream_goes(stream));
        let _ = insist(symbol, || pool::stream_goes(stream));
    }
    if matches!(traits.capture, Capture::Begins) {
        // What was submitted so far is marked now: a stream that is captured is not marked any
        // more.
        let _ = ours(symbol, gate::before_sync);
        capture::before_begin();
        let _ = ours(symbol, residency::before_capture);
    }
}

#[inline(always)]
pub(super) fn after(symbol: Symbol, traits: Traits, args: &[usize], result: CUresult) {
    match traits.capture {
        Capture::Begins => {
            let context = ours(symbol, || match client::current() {
                Some(_) if result.is_ok() => context::current(),
                _ => 0,
            });
            let context = context.unwrap_or(0);
            capture::after_begin(stream_of(symbol, args), context, result);
        }
        Capture::Ends => {
            let _ = insist(symbol, || {
                capture::after_end(stream_of(symbol, args), result)
            });
            let _ = ours(symbol, residency::capture_ended);
        }
        Capture::None if result.is_ok() => {
            let _ = ours(symbol, || succeeded(traits, args));
        }
        Capture::None => {}
    }
}

/// After a call that has succeeded.
#[inline(always)]
fn succeeded(traits: Traits, args: &[usize]) {
    let arg = |at: usize| args.get(at).copied().unwrap_or(0);
    if matches!(traits.tracks, Tracks::StreamEnd) {
        capture::stream_gone(arg(0));
    }
    if client::current().is_none() {
        return;
    }
    if residency::active() {
        residency::noted(traits, args);
    }
    match traits.tracks {
        Tracks::Nothing | Tracks::StreamEnd | Tracks::PoolAttribute | Tracks::MemoryAccess => {}
        Tracks::MemoryExport => physical::exported(arg(1) as u64, arg(0), arg(2) as u32),
        Tracks::MemoryMap => physical::mapped(arg(0) as u64, arg(1) as u64, arg(3) as u64),
        Tracks::MemoryRetain => {
            // SAFETY: the driver has just written a handle there.
            let handle = unsafe { *(arg(0) as *const u64) };
            physical::retained(handle, arg(1) as u64);
        }
        Tracks::PeerAccess { on } => {
            if residency::active() {
                residency::peers(context::here(), arg(0), on);
            }
        }
        Tracks::PointerAttribute => {
            // CAST: an enumerator in the low half of its word.
            residency::set_attribute(arg(0), arg(1) as u32, arg(2) as u64);
        }
        Tracks::PoolCreate => {
            // SAFETY: the driver has just written a handle, after reading the properties.
            let (pool, properties) = unsafe {
                (
                    *(arg(0) as *const CUmemoryPool),
                    &*(arg(1) as *const CUmemPoolProps),
                )
            };
            pool::created(pool, properties.location);
        }
        Tracks::GraphInstantiate => {
            // SAFETY: the driver has just written a handle there.
            let exec = unsafe { *(arg(0) as *const usize) };
            let from = CUgraph(arg(1) as *mut c_void);
            graph::instantiated(exec, from);
            cost::graph_instantiated(exec, from);
        }
        Tracks::GraphExecEnd => {
            graph::exec_destroyed(arg(0));
            cost::graph_gone(arg(0));
        }
        Tracks::GraphExecUpdate => {
            cost::graph_instantiated(arg(0), CUgraph(arg(1) as *mut c_void));
        }
        Tracks::GraphNode { parameters } => {
            let parameters = arg(usize::from(parameters)) as *const CUgraphNodeParams;
            // SAFETY: the driver has just read the structure.
            let kind = unsafe { (*parameters).r#type };
            if kind == CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC {
                graph::after_node();
            }
        }
    }
}

/// What has nothing left to do afterwards: a stream, by its key, or (`Some(None)`) a whole context.
#[inline(always)]
pub(super) fn waited_for(symbol: Symbol, args: &[usize]) -> Option<Option<usize>> {
    match symbol.traits().waits {
        Waits::Nothing => None,
        Waits::Context => Some(None),
        Waits::Stream => Some(Some(stream_of(symbol, args))),
    }
}
