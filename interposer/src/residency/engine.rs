//! Moving pieces: out of a device, back, and to host memory at the same address. The agent's thread alone comes here, with the latch
//! closed and nothing under way on the devices.
//!
//! Copies are pipelined (Bai et al., PipeSwitch, OSDI 2020): while the copy engine works on one piece, the one before is unmapped and
//! released, or the next one created and mapped. A piece that has left is released at once, so that another tenant's piece can be
//! created where it was: that is what makes evicting one tenant while restoring another as fast as the slower of both. The restoring
//! side asks again and again for memory that is not there yet.
//!
//! What was used last ([`last_use`]) comes back first and leaves last: a guess at what is used next, and no more.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use channel::Reason;
use shim_ffi::*;

use super::early::{self, Watch};
use super::lanes::{Flight, Step, Stopped, done, enter, settle};
use super::piece::{self, Mapping, Place};
use super::shadow::{Shadow, host_available_bytes};
use super::{digest, last_use, latch, tuning};
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

// ---------------------------------------------------------------------------------------------------------------------
// Out
// ---------------------------------------------------------------------------------------------------------------------

/// Pieces of `device` in `place`, what was used least recently first.
pub(super) fn in_place(device: usize, place: Place) -> Vec<u64> {
    last_use::settle();
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
    let moved = capture::relaxed(|| {
        let digests = tuning::reuses().then(|| digest::begin(&ids));
        copy_out(&ids, digests)
    });
    piece::with(|pieces| pieces.publish(device));
    match moved {
        Ok(()) => Outcome::Done,
        Err(stopped) => undo(device, stopped),
    }
}

/// After an eviction that stopped half-way: what has left comes back.
fn undo(device: usize, stopped: Stopped) -> Outcome {
    let back = tuning::UNDO.as_nanos() as u64; // CAST: ten seconds.
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
    /// Copies of it are to wait for their end.
    pub(super) sync_memops: bool,
    /// Its shadow; null: it has none.
    host: *mut c_void,
}

impl Move {
    /// What the driver has forgotten of a mapping that was made anew.
    pub(super) fn tell_again(&self) {
        if self.sync_memops {
            let on: i32 = 1;
            // SAFETY: valid pointer to a local; an address that is mapped.
            let _ = unsafe {
                real::cuPointerSetAttribute(
                    (&raw const on).cast(),
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
                    CUdeviceptr(self.address),
                )
            };
        }
    }
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
            sync_memops: piece.sync_memops,
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

/// Copies pieces out, but for what their shadows hold already by `digests`, and releases each as soon as it is there.
fn copy_out(ids: &[u64], mut digests: Option<digest::Digests>) -> Step<()> {
    let mut flights = VecDeque::new();
    let mut last = CUstream::NULL;
    let mut copies = || {
        for id in ids {
            let to = look(*id)?;
            let lanes = enter(to.context)?;
            last = lanes.out;
            pin(*id);
            let now = digests.as_mut().and_then(|digests| digests.take(*id));
            let before = begin_copy(*id);
            let runs = digest::changed(to.bytes, before.as_ref(), now.as_ref());
            for (from, bytes) in &runs {
                // SAFETY: the piece is mapped for its device, whose work is done; the shadow has its size and lives on.
                done(unsafe {
                    real::cuMemcpyDtoHAsync_v2(
                        to.host.byte_add(*from as usize),
                        CUdeviceptr(to.address + from),
                        *bytes as usize,
                        lanes.out,
                    )
                })?;
            }
            let bytes = runs.iter().map(|(_, bytes)| bytes).sum();
            let flight = if bytes == 0 {
                Flight::of_nothing(*id)
            } else {
                Flight::begin(*id, bytes, lanes.out)?
            };
            flights.push_back((flight, now));
            while flights.len() >= tuning::depth() {
                leave(flights.pop_front())?;
            }
        }
        while !flights.is_empty() {
            leave(flights.pop_front())?;
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

/// A piece is about to be copied out; what its shadow held until now.
fn begin_copy(id: u64) -> Option<digest::Digest> {
    piece::with(|pieces| {
        let piece = pieces.all.get_mut(&id)?;
        piece.place = Place::CopyingOut;
        piece.shadow.as_mut()?.digest.take()
    })
}

/// A copy has arrived: its piece goes from the device.
fn leave(flight: Option<(Flight, Option<digest::Digest>)>) -> Step<()> {
    let Some((flight, digest)) = flight else {
        return Ok(());
    };
    flight.land()?;
    piece::with(|pieces| {
        if let Some(shadow) = pieces
            .all
            .get_mut(&flight.id)
            .and_then(|piece| piece.shadow.as_mut())
        {
            shadow.digest = digest;
        }
    });
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
    bring_back(device, &ids, &Watch::nobody(), (deadline_ns, given_up))
}

/// The same, where the program may begin before the end: `begun` is called when a thread of it does.
pub(super) fn restore_early(
    device: usize,
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
    begun: &dyn Fn(),
) -> Outcome {
    let mut ids = in_place(device, Place::Out);
    ids.reverse();
    let watch = Watch::over(&mut ids, begun);
    bring_back(device, &ids, &watch, (deadline_ns, given_up))
}

fn bring_back(
    device: usize,
    ids: &[u64],
    watch: &Watch<'_>,
    (deadline_ns, given_up): (u64, &dyn Fn() -> bool),
) -> Outcome {
    let moved = capture::relaxed(|| copy_back(ids, watch, deadline_ns, given_up));
    let outcome = match moved {
        Ok(()) => Outcome::Done,
        Err(stopped) => {
            let undone = go_back(device, ids, watch);
            match undone {
                Ok(()) if stopped.reason != Reason::Driver => Outcome::Refused(stopped.reason),
                _ => Outcome::Failed(stopped.reason, stopped.status),
            }
        }
    };
    piece::with(|pieces| pieces.publish(device));
    outcome
}

/// After a restore that stopped half-way: what has come back leaves again. It goes without a copy, for its shadow still holds it, unless the
/// program has worked with it meanwhile; then it is waited for and copied. What the device does not finish with in time is
/// left there, for [`retreat`].
fn go_back(device: usize, ids: &[u64], watch: &Watch<'_>) -> Step<()> {
    let used = if watch.is_on() {
        early::settle(early::settle_by_ns(), &|| false)
    } else {
        Ok(false)
    };
    let (kept, dropped): (Vec<u64>, Vec<u64>) = piece::with(|pieces| {
        ids.iter().partition(|id| {
            let arrived = pieces.all.get(id).map(|piece| piece.place) == Some(Place::Resident);
            arrived && used != Ok(false)
        })
    });
    capture::relaxed(|| {
        dropped.iter().try_for_each(|id| {
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
    })?;
    if used.is_err() && !kept.is_empty() {
        LEFT.fetch_or(1 << device, Ordering::Relaxed);
        return Ok(());
    }
    leave_all(&kept)
}

/// Copies pieces out, what has changed of them.
fn leave_all(ids: &[u64]) -> Step<()> {
    capture::relaxed(|| {
        let digests = tuning::reuses().then(|| digest::begin(ids));
        copy_out(ids, digests)
    })
}

/// Devices, as bits, on which something was left that is to go: nobody may use it, and others may want its room.
static LEFT: AtomicU64 = AtomicU64::new(0);
const _: () = assert!(channel::MAX_DEVICES <= 64);

/// Whether [`retreat`] has anything to do.
pub(super) fn anything_left() -> bool {
    LEFT.load(Ordering::Relaxed) != 0
}

/// Nothing is to go any more: it may be used, or has gone.
pub(super) fn nothing_left(device: usize) {
    LEFT.fetch_and(!(1 << device), Ordering::Relaxed);
}

/// Calls of the program go on.
pub(super) fn all_is_back() {
    LEFT.store(0, Ordering::Relaxed);
    latch::open();
}

/// With the latch closed: what a restore that stopped had to leave on a device goes, if the device is done with it.
pub(super) fn retreat(deadline_ns: u64) {
    if early::settle(deadline_ns, &|| false).is_err() {
        return;
    }
    for device in (0..channel::MAX_DEVICES).filter(|at| LEFT.load(Ordering::Relaxed) >> at & 1 != 0)
    {
        if leave_all(&in_place(device, Place::Resident)).is_ok() {
            nothing_left(device);
        }
        piece::with(|pieces| pieces.publish(device));
    }
}

fn copy_back(
    ids: &[u64],
    watch: &Watch<'_>,
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
) -> Step<()> {
    // What the agent waits for it may wait for long; whoever was let go meanwhile is told of.
    let given_up = || {
        watch.look();
        given_up()
    };
    let mut flights: VecDeque<Flight> = VecDeque::new();
    let arrive = |flight: Option<Flight>| {
        flight.map_or(Ok(()), |flight| {
            arrive(&flight, watch)?;
            watch.arrived(flight.id);
            Ok(())
        })
    };
    let mut last = CUstream::NULL;
    let mut copies = || {
        for id in ids {
            let from = look(*id)?;
            let lanes = enter(from.context)?;
            last = lanes.back;
            // Where somebody may wait for just this piece, it is looked for while room for the next one is.
            let handle = bring(&from, deadline_ns, &given_up, &mut || {
                while watch.is_on() && flights.front().is_some_and(Flight::has_landed) {
                    arrive(flights.pop_front())?;
                }
                Ok(())
            })?;
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
            while flights.len() >= tuning::depth()
                || (watch.is_on() && flights.front().is_some_and(Flight::has_landed))
            {
                arrive(flights.pop_front())?;
            }
        }
        while !flights.is_empty() {
            arrive(flights.pop_front())?;
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
fn bring(
    of: &Move,
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
    meanwhile: &mut dyn FnMut() -> Step<()>,
) -> Step<u64> {
    let mut nap = Duration::from_micros(20);
    loop {
        match piece::bring(of.bytes, &of.properties, &of.mappings) {
            Ok(handle) => {
                of.tell_again();
                return Ok(handle);
            }
            Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
                if now_ns() < deadline_ns && !process::exiting() && !given_up() =>
            {
                meanwhile()?;
                client::pause(nap);
                nap = (nap * 2).min(Duration::from_micros(500));
            }
            Err(status) => return Err(Stopped::by(status)),
        }
    }
}

fn arrive(flight: &Flight, watch: &Watch<'_>) -> Step<()> {
    flight.land_while(&|| {
        watch.look();
        false
    })?;
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
