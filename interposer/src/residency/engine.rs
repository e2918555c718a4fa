//! Moving pieces: out of a device, back, and to host memory at the same address. The agent's thread alone comes here, with the latch
//! closed and nothing under way on the devices.
//!
//! Copies are pipelined (Bai et al., PipeSwitch, OSDI 2020): while the copy engine works on one piece, the one before is unmapped and
//! released, or the next one created and mapped. A piece that has left is released at once, so that another tenant's piece can be
//! created where it was: that is what makes evicting one tenant while restoring another as fast as the slower of both. The restoring
//! side asks again and again for memory that is not there yet.
//!
//! What was used last comes back first and leaves last.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use channel::Reason;
use shim_ffi::*;

use super::piece::{self, Mapping, Place};
use super::shadow::{Shadow, host_available_bytes};
use super::tuning;
use crate::client::{self, now_ns};
use crate::{capture, process, real};

/// How a move ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Done,
    /// Nothing has changed.
    Refused(Reason),
    /// Neither carried out nor undone: some of it is still out, its bytes are safe in host memory.
    Failed(Reason, CUresult),
}

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

// ---------------------------------------------------------------------------------------------------------------------
// Contexts, and what we keep in them
// ---------------------------------------------------------------------------------------------------------------------

/// A live context of the program's.
#[derive(Clone, Copy)]
struct Context {
    ordinal: i32,
    context: usize,
    lanes: Option<Lanes>,
}

/// Our own streams in a context, one per direction, and an event.
#[derive(Clone, Copy)]
pub(super) struct Lanes {
    pub(super) out: CUstream,
    back: CUstream,
    event: CUevent,
}

static CONTEXTS: Mutex<Vec<Context>> = Mutex::new(Vec::new());
/// Devices that may touch the memory of another one: (who touches, whose), by ordinal.
static PEERS: Mutex<Vec<(i32, i32)>> = Mutex::new(Vec::new());

fn contexts<T>(act: impl FnOnce(&mut Vec<Context>) -> T) -> T {
    act(&mut CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner))
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

/// A context in which the program works: its streams have to be done before anything moves.
pub(crate) fn note_context(ordinal: i32, context: usize) {
    contexts(|all| {
        if !all.iter().any(|known| known.context == context) {
            all.push(Context {
                ordinal,
                context,
                lanes: None,
            });
        }
    });
}

/// After a context has gone. Pieces that were copied in it are copied in another one of their device from now on.
pub(super) fn context_died(context: usize) {
    let left: Vec<(i32, usize)> = contexts(|all| {
        all.retain(|known| known.context != context);
        all.iter()
            .map(|known| (known.ordinal, known.context))
            .collect()
    });
    piece::with(|pieces| {
        for piece in pieces.all.values_mut() {
            if piece.context == context {
                let other = left.iter().find(|(ordinal, _)| *ordinal == piece.ordinal);
                piece.context = other.map_or(0, |(_, context)| *context);
            }
        }
    });
}

/// A live context of the device; 0: none is known.
pub(super) fn any_context(ordinal: i32) -> usize {
    contexts(|all| {
        let known = all.iter().find(|known| known.ordinal == ordinal);
        known.map_or(0, |known| known.context)
    })
}

/// Who may touch memory of the device `ordinal`.
pub(super) fn readers_of(ordinal: i32) -> Vec<CUmemAccessDesc> {
    let mut access = vec![piece::access_from(ordinal)];
    let peers = PEERS.lock().unwrap_or_else(PoisonError::into_inner);
    let others = peers.iter().filter(|(_, owner)| *owner == ordinal);
    access.extend(others.map(|(toucher, _)| piece::access_from(*toucher)));
    access
}

fn set_current(context: usize) -> Step<()> {
    let context = CUcontext(std::ptr::with_exposed_provenance_mut(context));
    // SAFETY: a context of the program's that is alive: whoever destroys one passes the latch. This is our own thread.
    done(unsafe { real::cuCtxSetCurrent(context) })
}

const NON_BLOCKING: u32 = 1;
const DISABLE_TIMING: u32 = 2;

/// Makes `context` current, with our streams in it.
pub(super) fn enter(context: usize) -> Step<Lanes> {
    set_current(context)?;
    let known = contexts(|all| {
        all.iter()
            .find(|known| known.context == context)
            .and_then(|known| known.lanes)
    });
    if let Some(lanes) = known {
        return Ok(lanes);
    }
    let mut lanes = Lanes {
        out: CUstream::NULL,
        back: CUstream::NULL,
        event: CUevent::NULL,
    };
    // SAFETY: valid pointers to locals. They go with the context.
    unsafe {
        done(real::cuStreamCreate(&raw mut lanes.out, NON_BLOCKING))?;
        done(real::cuStreamCreate(&raw mut lanes.back, NON_BLOCKING))?;
        done(real::cuEventCreate(&raw mut lanes.event, DISABLE_TIMING))?;
    }
    contexts(|all| {
        if let Some(known) = all.iter_mut().find(|known| known.context == context) {
            known.lanes = Some(lanes);
        }
    });
    Ok(lanes)
}

// ---------------------------------------------------------------------------------------------------------------------
// Waiting for the device
// ---------------------------------------------------------------------------------------------------------------------

/// Asks until `ask` says something other than "not ready", with naps that grow a little.
fn poll(deadline_ns: u64, given_up: &dyn Fn() -> bool, ask: impl Fn() -> CUresult) -> Step<()> {
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
        client::pause(nap);
        nap = (nap * 2).min(Duration::from_micros(100));
    }
}

/// Waits until the devices have done everything that this process has submitted, in all of its contexts.
pub(super) fn drain(deadline_ns: u64, given_up: &dyn Fn() -> bool) -> Result<(), Reason> {
    let known: Vec<usize> = contexts(|all| all.iter().map(|known| known.context).collect());
    let whole = real::exported(Symbol::cuCtxRecordEvent);
    for context in known {
        let drained = capture::relaxed(|| {
            let lanes = enter(context)?;
            if whole {
                let handle = CUcontext(std::ptr::with_exposed_provenance_mut(context));
                // SAFETY: a live context and an event of our own in it. It ends captures in this context; there are none.
                done(unsafe { real::cuCtxRecordEvent(handle, lanes.event) })?;
                // SAFETY: our own event.
                poll(deadline_ns, given_up, || unsafe {
                    real::cuEventQuery(lanes.event)
                })
            } else {
                // What is marked first, which can be given up; then the driver's own wait, for what no mark covers.
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
struct Flight {
    id: u64,
    bytes: u64,
    event: CUevent,
}

impl Flight {
    /// Notes where in the stream the copy ends. Where that cannot be had, the copy is waited for here and now.
    fn begin(id: u64, bytes: u64, stream: CUstream) -> Step<Self> {
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

    fn land(&self) -> Step<()> {
        if self.event.is_null() {
            return Ok(());
        }
        // SAFETY: our own event.
        poll(copy_deadline_ns(self.bytes), &|| false, || unsafe {
            real::cuEventQuery(self.event)
        })
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.give_back();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Out
// ---------------------------------------------------------------------------------------------------------------------

/// Pieces of `device` in `place`, what was used least recently first.
pub(super) fn in_place(device: usize, place: Place) -> Vec<u64> {
    let mut found: Vec<(u64, u64)> = piece::with(|pieces| {
        pieces
            .all
            .iter()
            .filter(|(_, piece)| piece.device == device && piece.place == place && piece.moves())
            .map(|(id, piece)| (piece.used, *id))
            .collect()
    });
    found.sort_unstable();
    found.into_iter().map(|(_, id)| id).collect()
}

/// Bytes of `device` that are in their shadows alone.
pub(super) fn out_bytes(device: usize) -> u64 {
    piece::with(|pieces| {
        let out = pieces
            .all
            .values()
            .filter(|piece| piece.device == device && piece.place == Place::Out);
        out.map(|piece| piece.bytes).sum()
    })
}

/// Whether something is neither on a device nor usable in host memory.
pub(super) fn anything_out() -> bool {
    piece::with(|pieces| pieces.all.values().any(|piece| piece.place == Place::Out))
}

/// Whether something of `device` lies in host memory, usable.
pub(super) fn anything_on_host(device: usize) -> bool {
    piece::with(|pieces| {
        pieces
            .all
            .values()
            .any(|piece| piece.device == device && piece.place == Place::Host)
    })
}

/// Everything that can leaves `device`.
pub(super) fn evict(device: usize) -> Outcome {
    let ids = in_place(device, Place::Resident);
    if ids.is_empty() {
        let out = !in_place(device, Place::Out).is_empty();
        return if out {
            Outcome::Done
        } else {
            Outcome::Refused(Reason::NothingEvictable)
        };
    }
    if let Err(reason) = take_shadows(&ids) {
        return Outcome::Refused(reason);
    }
    let moved = capture::relaxed(|| copy_out(&ids));
    piece::with(|pieces| pieces.publish(device));
    match moved {
        Ok(()) => Outcome::Done,
        Err(stopped) => undo(device, stopped),
    }
}

/// After an eviction that stopped half-way: what has left comes back.
fn undo(device: usize, stopped: Stopped) -> Outcome {
    let back = tuning::ROOM.as_nanos() as u64; // CAST: ten seconds.
    match restore(device, now_ns() + back, &|| false) {
        Outcome::Done => Outcome::Refused(stopped.reason),
        _ => Outcome::Failed(stopped.reason, stopped.status),
    }
}

/// Room in host memory for the contents of `ids`: within the budget, and there. All or nothing, before anything moves.
fn take_shadows(ids: &[u64]) -> Result<(), Reason> {
    let budget = client::current().map_or(0, |attached| attached.end.arbiter.host_budget_bytes());
    let (missing, held) = piece::with(|pieces| {
        let missing: Vec<(u64, u64)> = ids
            .iter()
            .filter_map(|id| Some((*id, pieces.all.get(id)?)))
            .filter(|(_, piece)| piece.shadow.is_none())
            .map(|(id, piece)| (id, piece.bytes))
            .collect();
        (missing, pieces.host_bytes())
    });
    let needed: u64 = missing.iter().map(|(_, bytes)| bytes).sum();
    if held.saturating_add(needed) > budget {
        return Err(Reason::HostBudget);
    }
    if host_available_bytes().is_some_and(|available| needed > available) {
        return Err(Reason::HostMemory);
    }
    let shadows: Option<Vec<(u64, Shadow)>> = missing
        .iter()
        .map(|(id, bytes)| Some((*id, Shadow::take(*bytes)?)))
        .collect();
    let shadows = shadows.ok_or(Reason::HostMemory)?;
    piece::with(|pieces| {
        for (id, shadow) in shadows {
            if let Some(piece) = pieces.all.get_mut(&id) {
                piece.shadow = Some(shadow);
            }
        }
    });
    Ok(())
}

/// What a move of a piece needs to know.
pub(super) struct Move {
    pub(super) bytes: u64,
    pub(super) ordinal: i32,
    pub(super) context: usize,
    pub(super) address: u64,
    pub(super) handle: u64,
    pub(super) mappings: Vec<Mapping>,
    pub(super) properties: CUmemAllocationProp,
    /// Its shadow; null: it has none.
    host: *mut c_void,
}

/// A piece as it is now.
pub(super) fn look_at(id: u64) -> Step<Move> {
    let found = piece::with(|pieces| {
        let piece = pieces.all.get(&id)?;
        let shadow = piece.shadow.as_ref();
        Some(Move {
            bytes: piece.bytes,
            ordinal: piece.ordinal,
            context: piece.context,
            address: piece.address(),
            handle: piece.handle,
            mappings: piece.mappings.clone(),
            properties: piece.properties,
            host: shadow.map_or(std::ptr::null_mut(), Shadow::pointer),
        })
    });
    found.ok_or(Stopped::by(CUresult::CUDA_ERROR_INVALID_VALUE))
}

/// The same, with a shadow to copy to or from.
fn look(id: u64) -> Step<Move> {
    look_at(id).and_then(|of| {
        if of.host.is_null() {
            Err(Stopped::by(CUresult::CUDA_ERROR_INVALID_VALUE))
        } else {
            Ok(of)
        }
    })
}

fn set_place(id: u64, place: Place) {
    piece::with(|pieces| {
        if let Some(piece) = pieces.all.get_mut(&id) {
            piece.place = place;
        }
    });
}

/// Pins the shadow of a piece, in the current context. Not under the table's lock.
fn pin(id: u64) {
    let taken = piece::with(|pieces| pieces.all.get_mut(&id)?.shadow.take());
    if let Some(mut shadow) = taken {
        shadow.pin();
        piece::with(|pieces| {
            if let Some(piece) = pieces.all.get_mut(&id) {
                piece.shadow = Some(shadow);
            }
        });
    }
}

fn copy_out(ids: &[u64]) -> Step<()> {
    let mut flights = VecDeque::new();
    let mut last = CUstream::NULL;
    let mut copies = || {
        for id in ids {
            let to = look(*id)?;
            let lanes = enter(to.context)?;
            last = lanes.out;
            pin(*id);
            set_place(*id, Place::CopyingOut);
            // SAFETY: the piece is mapped for its device, whose work is done; the shadow has its size and lives on.
            done(unsafe {
                real::cuMemcpyDtoHAsync_v2(
                    to.host,
                    CUdeviceptr(to.address),
                    to.bytes as usize,
                    lanes.out,
                )
            })?;
            flights.push_back(Flight::begin(*id, to.bytes, lanes.out)?);
            while flights.len() >= tuning::depth() {
                leave(&flights.pop_front())?;
            }
        }
        while !flights.is_empty() {
            leave(&flights.pop_front())?;
        }
        Ok(())
    };
    let outcome = copies();
    if outcome.is_err() {
        // What is still under way reads memory that must not go, and writes shadows that may.
        if !last.is_null() {
            let _ = settle(last, 0);
        }
        for id in ids {
            piece::with(|pieces| {
                if let Some(piece) = pieces.all.get_mut(id)
                    && piece.place == Place::CopyingOut
                {
                    piece.place = Place::Resident;
                }
            });
        }
    }
    outcome
}

/// A copy has arrived: its piece goes from the device.
fn leave(flight: &Option<Flight>) -> Step<()> {
    let Some(flight) = flight else {
        return Ok(());
    };
    flight.land()?;
    let gone = look(flight.id)?;
    piece::dismiss(gone.handle, gone.bytes, &gone.mappings).map_err(Stopped::by)?;
    piece::with(|pieces| {
        let Some(piece) = pieces.all.get_mut(&flight.id) else {
            return;
        };
        piece.place = Place::Out;
        piece.handle = 0;
        let device = piece.device;
        if let Some(moved) = pieces.moved_out_bytes.get_mut(device) {
            *moved += flight.bytes;
        }
        pieces.publish(device);
    });
    Ok(())
}

// ---------------------------------------------------------------------------------------------------------------------
// Back
// ---------------------------------------------------------------------------------------------------------------------

/// Everything that has left `device` comes back. Memory that is not there yet is asked for until `deadline_ns`; what has come
/// back by then leaves again, its shadow still holds it.
pub(super) fn restore(device: usize, deadline_ns: u64, given_up: &dyn Fn() -> bool) -> Outcome {
    let mut ids = in_place(device, Place::Out);
    ids.reverse();
    let moved = capture::relaxed(|| copy_back(&ids, deadline_ns, given_up));
    let outcome = match moved {
        Ok(()) => Outcome::Done,
        Err(stopped) => {
            let undone: Step<()> = capture::relaxed(|| {
                ids.iter().try_for_each(|id| {
                    let back = look(*id)?;
                    if back.handle == 0 {
                        return Ok(());
                    }
                    piece::dismiss(back.handle, back.bytes, &back.mappings).map_err(Stopped::by)?;
                    piece::with(|pieces| {
                        if let Some(piece) = pieces.all.get_mut(id) {
                            piece.place = Place::Out;
                            piece.handle = 0;
                        }
                    });
                    Ok(())
                })
            });
            match undone {
                Ok(()) if stopped.reason != Reason::Driver => Outcome::Refused(stopped.reason),
                _ => Outcome::Failed(stopped.reason, stopped.status),
            }
        }
    };
    piece::with(|pieces| pieces.publish(device));
    outcome
}

fn copy_back(ids: &[u64], deadline_ns: u64, given_up: &dyn Fn() -> bool) -> Step<()> {
    let mut flights = VecDeque::new();
    let mut last = CUstream::NULL;
    let mut copies = || {
        for id in ids {
            let from = look(*id)?;
            let lanes = enter(from.context)?;
            last = lanes.back;
            let handle = bring(&from, deadline_ns, given_up)?;
            piece::with(|pieces| {
                if let Some(piece) = pieces.all.get_mut(id) {
                    piece.handle = handle;
                    piece.place = Place::CopyingIn;
                    let device = piece.device;
                    pieces.publish(device);
                }
            });
            // SAFETY: mapped just now, for its device; the shadow holds as many bytes and lives on.
            done(unsafe {
                real::cuMemcpyHtoDAsync_v2(
                    CUdeviceptr(from.address),
                    from.host,
                    from.bytes as usize,
                    lanes.back,
                )
            })?;
            flights.push_back(Flight::begin(*id, from.bytes, lanes.back)?);
            while flights.len() >= tuning::depth() {
                arrive(&flights.pop_front())?;
            }
        }
        while !flights.is_empty() {
            arrive(&flights.pop_front())?;
        }
        Ok(())
    };
    let outcome = copies();
    if outcome.is_err() && !last.is_null() {
        let _ = settle(last, 0);
    }
    outcome
}

/// Creates and maps; where the device has no memory yet, again and again.
fn bring(of: &Move, deadline_ns: u64, given_up: &dyn Fn() -> bool) -> Step<u64> {
    let mut nap = Duration::from_micros(20);
    loop {
        match piece::bring(of.bytes, &of.properties, &of.mappings) {
            Ok(handle) => return Ok(handle),
            Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
                if now_ns() < deadline_ns && !process::exiting() && !given_up() =>
            {
                client::pause(nap);
                nap = (nap * 2).min(Duration::from_micros(500));
            }
            Err(status) => return Err(Stopped::by(status)),
        }
    }
}

fn arrive(flight: &Option<Flight>) -> Step<()> {
    let Some(flight) = flight else {
        return Ok(());
    };
    flight.land()?;
    piece::with(|pieces| {
        let Some(piece) = pieces.all.get_mut(&flight.id) else {
            return;
        };
        piece.place = Place::Resident;
        let device = piece.device;
        if let Some(moved) = pieces.moved_in_bytes.get_mut(device) {
            *moved += flight.bytes;
        }
        pieces.publish(device);
    });
    Ok(())
}

/// Host memory that the device reaches, mapped at `mappings`.
pub(super) fn bring_on_host(
    ordinal: i32,
    bytes: u64,
    mappings: &[Mapping],
) -> Result<u64, CUresult> {
    const HOST_NUMA_ID: CUdevice_attribute = CUdevice_attribute(134);
    let mut node = -1;
    // SAFETY: valid pointer to a local.
    let asked =
        unsafe { real::cuDeviceGetAttribute(&raw mut node, HOST_NUMA_ID, CUdevice(ordinal)) };
    let of = |location| CUmemAllocationProp {
        location,
        ..piece::on_device(ordinal)
    };
    let near = CUmemLocation {
        r#type: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA,
        id: node,
    };
    let any = CUmemLocation {
        r#type: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST,
        id: 0,
    };
    if asked.is_ok() && node >= 0 {
        match piece::bring(bytes, &of(near), mappings) {
            Ok(handle) => return Ok(handle),
            Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            }
            Err(_) => {}
        }
    }
    piece::bring(bytes, &of(any), mappings)
}
