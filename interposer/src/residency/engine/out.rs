//! Out: pieces are copied to their shadows, unmapped and released.

use std::collections::VecDeque;

use channel::Reason;
use shim_ffi::*;

use super::{Outcome, in_place, look, restore};
use crate::capture;
use crate::client::{self, now_ns};
use crate::real;
use crate::residency::lanes::{Flight, Step, Stopped, done, enter, settle};
use crate::residency::permit::Permits;
use crate::residency::piece::{self, Place};
use crate::residency::shadow::Shadow;
use crate::residency::{digest, host, tuning};

/// Everything that can leaves `device`.
pub(in crate::residency) fn evict(device: usize, deadline_ns: u64) -> Outcome {
    let mut ids = in_place(device, Place::Resident);
    if ids.is_empty() {
        let out = !in_place(device, Place::Out).is_empty();
        return if out {
            Outcome::Done
        } else {
            Outcome::Refused(Reason::NothingEvictable)
        };
    }
    let permits = Permits::until(deadline_ns);
    if let Err(reason) = take_shadows(device, &ids, &permits) {
        return Outcome::Refused(reason);
    }
    if tuning::reuses() && have_left_before(&ids) {
        // What has changed, if anything has, is what was used last: its copies are under way while the device hashes the others.
        ids.reverse();
    }
    let moved = leave_by(&ids, &permits);
    drop(permits);
    piece::with(|pieces| pieces.publish(device));
    match moved {
        Ok(()) => Outcome::Done,
        Err(stopped) => undo(device, stopped),
    }
}

/// Whether it is known of any of them what its shadow holds.
fn have_left_before(ids: &[u64]) -> bool {
    piece::with(|pieces| {
        let shadows = ids
            .iter()
            .filter_map(|id| pieces.all.get(id)?.shadow.as_ref());
        shadows.into_iter().any(|shadow| shadow.digest.is_some())
    })
}

/// After an eviction that stopped half-way: what has left comes back.
fn undo(device: usize, stopped: Stopped) -> Outcome {
    let back = tuning::UNDO.as_nanos() as u64; // CAST: ten seconds.
    match restore(device, now_ns() + back, &|| false) {
        Outcome::Done => Outcome::Refused(stopped.reason),
        _ => Outcome::Failed(stopped.reason, stopped.status),
    }
}

/// Room in host memory for the contents of `ids`: within the budget, and there, page by page. All or nothing, before anything moves.
fn take_shadows(device: usize, ids: &[u64], permits: &Permits) -> Result<(), Reason> {
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
    let told = |short: host::Short| {
        if let Some(attached) = client::current() {
            short.tell(attached, device);
        }
        short.reason()
    };
    host::check(needed).map_err(told)?;
    let shadows: Result<Vec<(u64, Shadow)>, Reason> = missing
        .iter()
        .map(|(id, bytes)| {
            let mut shadow = Shadow::take(*bytes).ok_or(Reason::HostMemory)?;
            // One at a time, where the arbiter says whose turn it is; with a look before each step in any case.
            permits.have();
            shadow.take_pages().map_err(told)?;
            Ok((*id, shadow))
        })
        .collect();
    let shadows = shadows?;
    piece::with(|pieces| {
        for (id, shadow) in shadows {
            if let Some(piece) = pieces.all.get_mut(&id) {
                piece.shadow = Some(shadow);
            }
        }
    });
    Ok(())
}

/// Pins the shadow of a piece, in the current context. Not under the table's lock.
fn pin(id: u64, permits: &Permits) {
    let taken = piece::with(|pieces| pieces.all.get_mut(&id)?.shadow.take());
    if let Some(mut shadow) = taken {
        if !shadow.is_pinned() && permits.have() {
            shadow.pin();
        }
        piece::with(|pieces| {
            if let Some(piece) = pieces.all.get_mut(&id) {
                piece.shadow = Some(shadow);
            }
        });
    }
}

/// Copies pieces out, but for what their shadows hold already by `digests`, and releases each as soon as it is there. What needs no copy waits
/// for no other piece's.
fn copy_out(ids: &[u64], mut digests: Option<digest::Digests>, permits: &Permits) -> Step<()> {
    let mut flights = VecDeque::new();
    let mut last = CUstream::NULL;
    let most = if digests.is_some() {
        tuning::depth_past_unchanged()
    } else {
        tuning::depth()
    };
    let mut copies = || {
        for id in ids {
            let to = look(*id)?;
            let lanes = enter(to.context)?;
            last = lanes.out;
            pin(*id, permits);
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
            if bytes == 0 {
                leave(Flight::of_nothing(*id), now)?;
            } else {
                flights.push_back((Flight::begin(*id, bytes, lanes.out)?, now));
            }
            while flights.len() >= most
                || flights
                    .front()
                    .is_some_and(|(flight, _)| flight.has_landed())
            {
                land(&mut flights)?;
            }
        }
        while !flights.is_empty() {
            land(&mut flights)?;
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

/// Waits for the oldest copy.
fn land(flights: &mut VecDeque<(Flight, Option<digest::Digest>)>) -> Step<()> {
    match flights.pop_front() {
        Some((flight, digest)) => leave(flight, digest),
        None => Ok(()),
    }
}

/// Once a copy has arrived, its piece goes from the device.
fn leave(flight: Flight, digest: Option<digest::Digest>) -> Step<()> {
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

/// Copies pieces out, what has changed of them.
pub(super) fn leave_all(ids: &[u64]) -> Step<()> {
    leave_by(ids, &Permits::until(u64::MAX))
}

fn leave_by(ids: &[u64], permits: &Permits) -> Step<()> {
    capture::relaxed(|| {
        let digests = tuning::reuses().then(|| digest::begin(ids));
        copy_out(ids, digests, permits)
    })
}
