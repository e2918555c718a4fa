//! What we keep in the program's contexts: streams of our own, an event, a kernel; and waiting for
//! what is under way there.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use channel::Reason;
use shim_ffi::*;

use super::{beginnings, chunk, endings};
use crate::attachment::client;
use crate::driver::real;
use crate::gate::{capture, context};
use crate::ground::clock::{self, now_ns};
use crate::ground::process;

/// Why a step did not work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stopped {
    pub(super) reason: Reason,
    pub(super) status: CUresult,
}

impl Stopped {
    pub(super) fn by(status: CUresult) -> Self {
        let reason = if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            Reason::DeviceMemory
        } else {
            Reason::Driver
        };
        Self { reason, status }
    }
}

pub(super) type Step<T> = Result<T, Stopped>;

pub(super) fn done(result: CUresult) -> Step<()> {
    if result.is_ok() {
        Ok(())
    } else {
        Err(Stopped::by(result))
    }
}

/// A live context of the program's.
#[derive(Clone, Copy)]
struct Context {
    ordinal: i32,
    context: usize,
    copy_streams: Option<CopyStreams>,
    /// How often it was noted: once more where another one has its handle by now.
    notes: u32,
}

/// Our own streams in a context, one per direction, and an event.
#[derive(Clone, Copy)]
pub(super) struct CopyStreams {
    pub(super) out: CUstream,
    pub(super) back: CUstream,
    event: CUevent,
    /// The kernel that hashes; null until it is loaded.
    pub(super) hash: CUfunction,
}

static CONTEXTS: Mutex<Vec<Context>> = Mutex::new(Vec::new());
/// Devices that may touch the memory of another one: (who touches, whose), by ordinal.
static PEERS: Mutex<Vec<(i32, i32)>> = Mutex::new(Vec::new());

/// Not to be asked with the table of chunks locked.
fn contexts<T>(act: impl FnOnce(&mut Vec<Context>) -> T) -> T {
    let found = context::take_found();
    let answer = {
        let mut all = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        for (ordinal, context) in &found {
            note(&mut all, *ordinal, *context);
        }
        act(&mut all)
    };
    for (ordinal, context) in found {
        adopt(ordinal, context);
    }
    answer
}

/// Memory of a device whose last context has gone is copied in the next one that it has.
fn adopt(ordinal: i32, context: usize) {
    chunk::with(|chunks| {
        let orphans = chunks.all.values_mut().filter(|chunk| {
            chunk.context == 0 && chunk.ordinal == ordinal && !chunk.mappings.is_empty()
        });
        let devices: Vec<usize> = orphans
            .map(|chunk| {
                chunk.context = context;
                chunk.device
            })
            .collect();
        if let Some(device) = devices.first() {
            chunks.publish(*device);
        }
    });
}

fn note(all: &mut Vec<Context>, ordinal: i32, context: usize) {
    match all.iter_mut().find(|known| known.context == context) {
        Some(known) => known.notes = known.notes.wrapping_add(1),
        None => all.push(Context {
            ordinal,
            context,
            copy_streams: None,
            notes: 0,
        }),
    }
}

/// Whether the driver has what moving needs.
pub(super) fn driver_can() -> bool {
    [
        Symbol::cuMemCreate,
        Symbol::cuMemAddressReserve,
        Symbol::cuMemMap,
        Symbol::cuMemSetAccess,
        Symbol::cuMemUnmap,
        Symbol::cuMemRelease,
    ]
    .into_iter()
    .all(real::exported)
}

/// How often a context was struck out.
static STRUCK: AtomicU32 = AtomicU32::new(0);

/// Who has noted a context since then need not do so again.
#[inline]
pub(super) fn struck() -> u32 {
    STRUCK.load(Ordering::Acquire)
}

/// A context in which the program works: its streams have to be done before anything moves.
pub(super) fn note_context(ordinal: i32, context: usize) {
    contexts(|all| note(all, ordinal, context));
    adopt(ordinal, context);
}

/// After a context has gone, and what was pinned in it is pinned no longer. Chunks that were copied
/// in it are copied in another one of their device from now on.
pub(super) fn context_died(context: usize) {
    unpinned(context);
    use_no_more(context);
}

fn unpinned(context: usize) {
    chunk::with(|chunks| {
        let of_it = chunks.all.values_mut();
        for chunk in of_it.filter(|chunk| chunk.context == context) {
            if let Some(host_copy) = &mut chunk.host_copy {
                host_copy.unpinned();
            }
        }
    });
}

/// Nothing is done in a context any more.
fn use_no_more(context: usize) {
    strike_out(context, |_| true);
}

/// Takes a context out of the list, if it is as it `is` said to be; whether it is not there any
/// more.
fn strike_out(context: usize, is: impl Fn(&Context) -> bool) -> bool {
    let left: Option<Vec<(i32, usize)>> = contexts(|all| {
        let known = all.iter_mut().find(|known| known.context == context);
        if let Some(known) = known
            && !is(known)
        {
            // Of another one.
            known.copy_streams = None;
            return None;
        }
        all.retain(|known| known.context != context);
        // SYNC(struck): after it is out, with the list locked. Who sees the new number notes its
        // context anew, and does not find the old entry.
        STRUCK.fetch_add(1, Ordering::AcqRel);
        Some(
            all.iter()
                .map(|known| (known.ordinal, known.context))
                .collect(),
        )
    });
    let Some(left) = left else {
        return false;
    };
    chunk::with(|chunks| {
        for chunk in chunks.all.values_mut() {
            if chunk.context == context {
                let other = left.iter().find(|(ordinal, _)| *ordinal == chunk.ordinal);
                chunk.context = other.map_or(0, |(_, context)| *context);
            }
        }
    });
    true
}

/// The context that a green context is to most calls; 0: it is none.
pub(crate) fn of_green(green: usize) -> usize {
    let mut context = CUcontext::NULL;
    let green = CUgreenCtx(std::ptr::with_exposed_provenance_mut(green));
    // SAFETY: valid pointer to a local; a handle that the program is about to use itself.
    let result = unsafe { real::cuCtxFromGreenCtx(&raw mut context, green) };
    if result.is_ok() { context.0.addr() } else { 0 }
}

/// Before a green context ends. Nothing is done in it any more; memory that was allocated in it
/// stays, for what goes is a part of the multiprocessors. Inside the quiesce gate.
pub(crate) fn green_goes(green: usize) {
    if super::active() {
        use_no_more(of_green(green));
    }
}

/// After a green context that was to end has not.
pub(crate) fn green_stays(green: usize) {
    if !super::active() {
        return;
    }
    let context = of_green(green);
    let mut device = CUdevice::default();
    let handle = CUcontext(std::ptr::with_exposed_provenance_mut(context));
    if context == 0 {
        return;
    }
    // SAFETY: valid pointer to a local; a live context.
    if unsafe { real::cuCtxGetDevice_v2(&raw mut device, handle) }.is_ok() {
        note_context(device.0, context);
    }
}

/// A live context of the device; 0: none is known.
pub(super) fn any_context(ordinal: i32) -> usize {
    contexts(|all| {
        let known = all.iter().find(|known| known.ordinal == ordinal);
        known.map_or(0, |known| known.context)
    })
}

/// After `cuCtxEnablePeerAccess` or `cuCtxDisablePeerAccess` of a thread on the device `toucher`:
/// plain memory of the other context's device can be touched from there, or no longer. The driver
/// knows that of its own allocations; mappings have to be set. Inside the quiesce gate.
pub(crate) fn peers(toucher: i32, other: usize, on: bool) {
    let owner = contexts(|all| {
        let known = all.iter().find(|known| known.context == other);
        known.map(|known| known.ordinal)
    });
    let Some(owner) = owner.filter(|owner| *owner != toucher && toucher >= 0) else {
        return;
    };
    {
        let mut peers = PEERS.lock().unwrap_or_else(PoisonError::into_inner);
        peers.retain(|pair| *pair != (toucher, owner));
        if on {
            peers.push((toucher, owner));
        }
    }
    let mut access = chunk::access_from(toucher);
    if !on {
        access.flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE;
    }
    let ranges: Vec<(u64, u64)> = chunk::with(|chunks| {
        let arenas = chunks
            .all
            .values_mut()
            .filter(|chunk| chunk.ordinal == owner && chunk.of_arena);
        arenas
            .map(|chunk| {
                for mapping in &mut chunk.mappings {
                    mapping.access.retain(|one| one.location.id != toucher);
                    if on {
                        mapping.access.push(access);
                    }
                }
                (chunk.address(), chunk.bytes)
            })
            .collect()
    });
    chunk::quietly(|| {
        for (address, bytes) in ranges {
            // SAFETY: mapped by us; the quiesce gate is open and passed, so that nothing is away.
            let _ = unsafe {
                real::cuMemSetAccess(CUdeviceptr(address), bytes as usize, &raw const access, 1)
            };
        }
    });
}

/// Who may touch memory of the device `ordinal`.
pub(super) fn readers_of(ordinal: i32) -> Vec<CUmemAccessDesc> {
    let mut access = vec![chunk::access_from(ordinal)];
    let peers = PEERS.lock().unwrap_or_else(PoisonError::into_inner);
    let others = peers.iter().filter(|(_, owner)| *owner == ordinal);
    access.extend(others.map(|(toucher, _)| chunk::access_from(*toucher)));
    access
}

fn set_current(context: usize) -> Step<()> {
    let context = CUcontext(std::ptr::with_exposed_provenance_mut(context));
    // SAFETY: a context of the program's that is alive: a thread that destroys one passes the
    // quiesce gate. This is our own thread.
    done(unsafe { real::cuCtxSetCurrent(context) })
}

const NON_BLOCKING: u32 = 1;
const DISABLE_TIMING: u32 = 2;

/// Makes `context` current, with our streams in it.
pub(super) fn enter(context: usize) -> Step<CopyStreams> {
    set_current(context)?;
    let known = contexts(|all| {
        all.iter()
            .find(|known| known.context == context)
            .and_then(|known| known.copy_streams)
    });
    if let Some(copy_streams) = known {
        return Ok(copy_streams);
    }
    let mut copy_streams = CopyStreams {
        out: CUstream::NULL,
        back: CUstream::NULL,
        event: CUevent::NULL,
        hash: CUfunction::NULL,
    };
    // SAFETY: valid pointers to locals. They go with the context.
    unsafe {
        done(real::cuStreamCreate(
            &raw mut copy_streams.out,
            NON_BLOCKING,
        ))?;
        done(real::cuStreamCreate(
            &raw mut copy_streams.back,
            NON_BLOCKING,
        ))?;
        done(real::cuEventCreate(
            &raw mut copy_streams.event,
            DISABLE_TIMING,
        ))?;
    }
    contexts(|all| {
        if let Some(known) = all.iter_mut().find(|known| known.context == context) {
            known.copy_streams = Some(copy_streams);
        }
    });
    Ok(copy_streams)
}

/// As [`enter`] for a context of which it is not certain that it is there: one that has gone in a
/// way that we have not seen is forgotten. Unless a thread has noted its handle meanwhile: then
/// another one has it.
fn enter_if_there(context: usize) -> Step<Option<CopyStreams>> {
    loop {
        let seen = notes(context);
        match enter(context) {
            Ok(copy_streams) => return Ok(Some(copy_streams)),
            Err(Stopped {
                status:
                    CUresult::CUDA_ERROR_INVALID_CONTEXT | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
                ..
            }) => {
                if is_gone(context, seen) {
                    return Ok(None);
                }
            }
            Err(stopped) => return Err(stopped),
        }
    }
}

/// How often a context has been noted; `None`: it is not known.
fn notes(context: usize) -> Option<u32> {
    contexts(|all| {
        let known = all.iter().find(|known| known.context == context);
        known.map(|known| known.notes)
    })
}

/// A context was found gone that had been noted so often before: forgets it, and says that it has.
fn is_gone(context: usize, seen: Option<u32>) -> bool {
    let same = |known: &Context| Some(known.notes) == seen;
    let gone = strike_out(context, same);
    if gone {
        unpinned(context);
    }
    gone
}

/// Whether an event of ours is there, in a context that is.
fn keeps(context: usize, event: CUevent) -> bool {
    contexts(|all| {
        let known = all.iter().find(|known| known.context == context);
        known.is_some_and(|known| known.copy_streams.is_some_and(|ours| ours.event == event))
    })
}

/// Remembers the kernel that was loaded into a context.
pub(super) fn keep_kernel(context: usize, hash: CUfunction) {
    contexts(|all| {
        if let Some(known) = all.iter_mut().find(|known| known.context == context)
            && let Some(copy_streams) = &mut known.copy_streams
        {
            copy_streams.hash = hash;
        }
    });
}

/// Asks until `ask` says something other than "not ready", with naps that grow a little.
fn poll(
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
    mut ask: impl FnMut() -> CUresult,
) -> Step<()> {
    let mut nap = Duration::from_micros(10);
    loop {
        match ask() {
            CUresult::CUDA_ERROR_NOT_READY => {}
            result => return done(result),
        }
        if now_ns() > deadline_ns || process::exiting() || given_up() {
            return Err(Stopped {
                reason: Reason::NotDrained,
                status: CUresult::CUDA_ERROR_NOT_READY,
            });
        }
        clock::pause(nap);
        nap = (nap * 2).min(Duration::from_micros(100));
    }
}

/// As [`drain`], with the quiesce gate open, where captures may begin and contexts end at any time:
/// what would invalidate a capture is done while none can begin, what is done in a context while
/// none can end, and what waits disturbs neither. A context that has ended has done its work.
pub(super) fn drain_beside_captures(
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
) -> Result<(), Reason> {
    if !real::exported(Symbol::cuCtxRecordEvent) {
        // What no mark covers is waited for when nobody is let in any more.
        return poll(deadline_ns, given_up, marked_work).map_err(|stopped| stopped.reason);
    }
    let drained = capture::relaxed(|| {
        let mut recorded = Ok(Vec::new());
        poll(deadline_ns, given_up, || match endings::hold_off() {
            Some(_held) => {
                recorded = record_everywhere();
                CUresult::CUDA_SUCCESS
            }
            None => CUresult::CUDA_ERROR_NOT_READY,
        })?;
        recorded?.into_iter().try_for_each(|(context, event)| {
            poll(deadline_ns, given_up, || match endings::hold_off() {
                // SAFETY: our own event.
                Some(_held) if keeps(context, event) => unsafe { real::cuEventQuery(event) },
                Some(_held) => CUresult::CUDA_SUCCESS,
                None => CUresult::CUDA_ERROR_NOT_READY,
            })
        })
    });
    drained.map_err(|stopped| stopped.reason)
}

/// An event behind everything in each context, with the context. While no context ends.
fn record_everywhere() -> Step<Vec<(usize, CUevent)>> {
    let known: Vec<usize> = contexts(|all| all.iter().map(|known| known.context).collect());
    let mut events = Vec::new();
    for context in known {
        let there = enter_if_there(context)?;
        events.extend(there.map(|copy_streams| (context, copy_streams.event)));
    }
    let recorded = beginnings::held_off(|| {
        events
            .iter()
            .try_for_each(|(context, event)| record_all(*context, *event))
    });
    recorded.unwrap_or(Err(Stopped {
        reason: Reason::Capturing,
        status: CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    }))?;
    Ok(events)
}

/// An event behind everything in a context. It invalidates captures in it.
fn record_all(context: usize, event: CUevent) -> Step<()> {
    let handle = CUcontext(std::ptr::with_exposed_provenance_mut(context));
    // SAFETY: a live context and an event of our own in it.
    done(unsafe { real::cuCtxRecordEvent(handle, event) })
}

/// Waits until the devices have done everything that this process has submitted, in all of its
/// contexts. With the quiesce gate closed and no capture in progress, so that none is invalidated.
pub(super) fn drain(deadline_ns: u64, given_up: &dyn Fn() -> bool) -> Result<(), Reason> {
    let known: Vec<usize> = contexts(|all| all.iter().map(|known| known.context).collect());
    let whole = real::exported(Symbol::cuCtxRecordEvent);
    for context in known {
        let drained = capture::relaxed(|| {
            let Some(copy_streams) = enter_if_there(context)? else {
                return Ok(());
            };
            if whole {
                record_all(context, copy_streams.event)?;
                // SAFETY: our own event.
                poll(deadline_ns, given_up, || unsafe {
                    real::cuEventQuery(copy_streams.event)
                })
            } else {
                // What is marked first, which can be given up; then the driver's own wait, for what
                // no mark covers.
                poll(deadline_ns, given_up, marked_work)?;
                // SAFETY: the context is current.
                done(unsafe { real::cuCtxSynchronize() })
            }
        });
        drained.map_err(|stopped| stopped.reason)?;
    }
    Ok(())
}

/// Whether the devices have passed every completion mark.
fn marked_work() -> CUresult {
    let busy = client::current().is_some_and(|attached| {
        (0..channel::MAX_DEVICES).any(|device| attached.end.client.in_flight(device).marks != 0)
    });
    if busy {
        CUresult::CUDA_ERROR_NOT_READY
    } else {
        CUresult::CUDA_SUCCESS
    }
}

/// TIMEOUT: no link is slower than 100 MB/s, and the device may be somebody else's for a while.
fn copy_deadline_ns(bytes: u64) -> u64 {
    now_ns() + bytes * 10 + 30_000_000_000
}

/// Waits until a stream of ours is done.
pub(super) fn settle(stream: CUstream, bytes: u64) -> Step<()> {
    // SAFETY: our own stream.
    poll(copy_deadline_ns(bytes), &|| false, || unsafe {
        real::cuStreamQuery(stream)
    })
}

/// A copy that is under way.
pub(super) struct Flight {
    pub(super) id: u64,
    pub(super) bytes: u64,
    event: CUevent,
}

impl Flight {
    /// Nothing is to be waited for.
    pub(super) fn of_nothing(id: u64) -> Self {
        Self {
            id,
            bytes: 0,
            event: CUevent::NULL,
        }
    }

    /// Notes where in the stream the copy ends. Where that cannot be had, the copy is waited for
    /// here and now.
    pub(super) fn begin(id: u64, bytes: u64, stream: CUstream) -> Step<Self> {
        let mut event = CUevent::NULL;
        // SAFETY: valid pointer to a local; our own stream and event in the current context.
        let marked = unsafe {
            real::cuEventCreate(&raw mut event, DISABLE_TIMING).is_ok()
                && real::cuEventRecord(event, stream).is_ok()
        };
        let mut flight = Self { id, bytes, event };
        if !marked {
            settle(stream, bytes)?;
            flight.give_back();
        }
        Ok(flight)
    }

    fn give_back(&mut self) {
        if !self.event.is_null() {
            // SAFETY: our own event; the driver keeps what it still needs of it.
            let _ = unsafe { real::cuEventDestroy_v2(self.event) };
            self.event = CUevent::NULL;
        }
    }

    pub(super) fn land(&self) -> Step<()> {
        self.land_while(&|| false)
    }

    /// The same, with something to look at meanwhile, which may give it up.
    pub(super) fn land_while(&self, given_up: &dyn Fn() -> bool) -> Step<()> {
        if self.event.is_null() {
            return Ok(());
        }
        // SAFETY: our own event.
        poll(copy_deadline_ns(self.bytes), given_up, || unsafe {
            real::cuEventQuery(self.event)
        })
    }

    /// Whether the copy is over, well or not.
    pub(super) fn has_landed(&self) -> bool {
        // SAFETY: our own event.
        self.event.is_null()
            || unsafe { real::cuEventQuery(self.event) } != CUresult::CUDA_ERROR_NOT_READY
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_that_was_noted_again_is_not_struck_out_for_the_one_that_had_its_handle() {
        const HANDLE: usize = 0x5150;
        let is_known = || contexts(|all| all.iter().any(|known| known.context == HANDLE));
        note_context(9, HANDLE);
        let (seen, number) = (notes(HANDLE), struck());
        // The agent finds it gone; before it says so, a thread has another one of that handle.
        note_context(9, HANDLE);
        assert!(!is_gone(HANDLE, seen));
        assert!(is_known());
        assert_eq!(struck(), number, "who has noted it need not do so again");
        assert!(is_gone(HANDLE, notes(HANDLE)));
        assert!(!is_known() && struck() != number);
        assert!(is_gone(HANDLE, None), "it is not there");
    }
}
