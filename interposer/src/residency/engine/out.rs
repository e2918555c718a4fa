//! Out: chunks are copied to their host copies, unmapped and released.

use std::collections::VecDeque;

use channel::Reason;
use shim_ffi::*;

use super::{Outcome, in_place, look, restore};
use crate::attachment::client;
use crate::driver::real;
use crate::gate::{capture, quiesce};
use crate::ground::clock::now_ns;
use crate::residency::chunk::{self, Place};
use crate::residency::copy_streams::{Flight, Step, Stopped, done, enter, settle};
use crate::residency::host_copy::{Digest, HostCopy};
use crate::residency::permit::Permits;
use crate::residency::{digest, endings, host, tuning};

/// Everything that can leaves `device`. Between two chunks it is looked whether that is given up:
/// then what has left comes back.
pub(in crate::residency) fn evict(
    device: usize,
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
) -> Outcome {
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
    if let Err(reason) = take_host_copies(device, &ids, &permits) {
        return Outcome::Refused(reason);
    }
    if tuning::reuses() && have_left_before(&ids) {
        // What has changed, if anything has, is what was used last: its copies are under way while
        // the device hashes the others.
        ids.reverse();
    }
    let moved = evict_by(&ids, &permits, given_up);
    drop(permits);
    chunk::with(|chunks| chunks.publish(device));
    match moved {
        Ok(()) => Outcome::Done,
        Err(stopped) => undo(device, stopped),
    }
}

/// Whether it is known of any of them what its host copy holds.
fn have_left_before(ids: &[u64]) -> bool {
    chunk::with(|chunks| {
        let host_copies = ids
            .iter()
            .filter_map(|id| chunks.all.get(id)?.host_copy.as_ref());
        host_copies
            .into_iter()
            .any(|host_copy| host_copy.digest.is_some())
    })
}

/// After an eviction that stopped half-way: what has left comes back. Where memory could not be
/// brought back before, that too waits for threads that end a context.
fn undo(device: usize, stopped: Stopped) -> Outcome {
    let back = tuning::UNDO.as_nanos() as u64; // CAST: ten seconds.
    let given_up = || quiesce::has_failed() && endings::is_awaited();
    match restore(device, now_ns() + back, &given_up) {
        Outcome::Done => Outcome::Refused(stopped.reason),
        _ => Outcome::Failed(stopped.reason, stopped.status),
    }
}

/// Space in host memory for the contents of `ids`: within the budget, and there, page by page. All
/// or nothing, before anything moves.
fn take_host_copies(device: usize, ids: &[u64], permits: &Permits) -> Result<(), Reason> {
    let budget = client::current().map_or(0, |attached| attached.end.arbiter.host_budget_bytes());
    let (missing, held) = chunk::with(|chunks| {
        let missing: Vec<(u64, u64)> = ids
            .iter()
            .filter_map(|id| Some((*id, chunks.all.get(id)?)))
            .filter(|(_, chunk)| chunk.host_copy.is_none())
            .map(|(id, chunk)| (id, chunk.bytes))
            .collect();
        (missing, chunks.host_bytes())
    });
    let needed: u64 = missing.iter().map(|(_, bytes)| bytes).sum();
    if held.saturating_add(needed) > budget {
        return Err(Reason::HostBudget);
    }
    let refused = |short: host::Short| {
        if let Some(attached) = client::current() {
            short.tell(attached, device);
        }
        short.reason()
    };
    host::check(needed).map_err(refused)?;
    let host_copies: Result<Vec<(u64, HostCopy)>, Reason> = missing
        .iter()
        .map(|(id, bytes)| {
            let mut host_copy = HostCopy::take(*bytes).ok_or(Reason::HostMemory)?;
            // One at a time, where the arbiter says whose turn it is; with a look before each step
            // in any case.
            permits.have();
            host_copy.take_pages().map_err(refused)?;
            Ok((*id, host_copy))
        })
        .collect();
    let host_copies = host_copies?;
    chunk::with(|chunks| {
        for (id, host_copy) in host_copies {
            if let Some(chunk) = chunks.all.get_mut(&id) {
                chunk.host_copy = Some(host_copy);
            }
        }
    });
    Ok(())
}

/// Pins the host copy of a chunk, in the current context. Not under the table's lock.
fn pin(id: u64, permits: &Permits) {
    let taken = chunk::with(|chunks| chunks.all.get_mut(&id)?.host_copy.take());
    if let Some(mut host_copy) = taken {
        if !host_copy.is_pinned() && permits.have() {
            host_copy.pin();
        }
        chunk::with(|chunks| {
            if let Some(chunk) = chunks.all.get_mut(&id) {
                chunk.host_copy = Some(host_copy);
            }
        });
    }
}

/// Copies chunks out, but for what their host copies hold already by `digests`, and releases each
/// as soon as it is there. What needs no copy waits for no other chunk's.
fn copy_out(
    ids: &[u64],
    mut digests: Option<digest::Digests>,
    permits: &Permits,
    given_up: &dyn Fn() -> bool,
) -> Step<()> {
    let mut flights = VecDeque::new();
    let mut last = CUstream::NULL;
    let most = if digests.is_some() {
        tuning::depth_past_unchanged()
    } else {
        tuning::depth()
    };
    let mut copies = || {
        for id in ids {
            if given_up() {
                return Err(Stopped {
                    reason: Reason::NotDrained,
                    status: CUresult::CUDA_ERROR_NOT_READY,
                });
            }
            let to = look(*id)?;
            let copy_streams = enter(to.context)?;
            last = copy_streams.out;
            pin(*id, permits);
            let now = digests.as_mut().and_then(|digests| digests.take(*id));
            let before = begin_copy(*id);
            let runs = digest::changed(to.bytes, before.as_ref(), now.as_ref());
            for (from, bytes) in &runs {
                // SAFETY: the chunk is mapped for its device, whose work is done; the host copy has
                // its size and lives on.
                done(unsafe {
                    real::cuMemcpyDtoHAsync_v2(
                        to.host.byte_add(*from as usize),
                        CUdeviceptr(to.address + from),
                        *bytes as usize,
                        copy_streams.out,
                    )
                })?;
            }
            let bytes = runs.iter().map(|(_, bytes)| bytes).sum();
            if bytes == 0 {
                evict_one(Flight::of_nothing(*id), now)?;
            } else {
                flights.push_back((Flight::begin(*id, bytes, copy_streams.out)?, now));
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
        // What is still under way reads memory that must not go, and writes host copies that may.
        if !last.is_null() {
            let _ = settle(last, 0);
        }
        for id in ids {
            chunk::with(|chunks| {
                if let Some(chunk) = chunks.all.get_mut(id)
                    && chunk.place == Place::CopyingOut
                {
                    chunk.place = Place::Resident;
                }
            });
        }
    }
    outcome
}

/// A chunk is about to be copied out; what its host copy held until now.
fn begin_copy(id: u64) -> Option<Digest> {
    chunk::with(|chunks| {
        let chunk = chunks.all.get_mut(&id)?;
        chunk.place = Place::CopyingOut;
        chunk.host_copy.as_mut()?.digest.take()
    })
}

/// Waits for the oldest copy.
fn land(flights: &mut VecDeque<(Flight, Option<Digest>)>) -> Step<()> {
    match flights.pop_front() {
        Some((flight, digest)) => evict_one(flight, digest),
        None => Ok(()),
    }
}

/// Once a copy has arrived, its chunk goes from the device.
fn evict_one(flight: Flight, digest: Option<Digest>) -> Step<()> {
    flight.land()?;
    chunk::with(|chunks| {
        if let Some(host_copy) = chunks
            .all
            .get_mut(&flight.id)
            .and_then(|chunk| chunk.host_copy.as_mut())
        {
            host_copy.digest = digest;
        }
    });
    let gone = look(flight.id)?;
    chunk::dismiss(gone.handle, gone.bytes, &gone.mappings).map_err(Stopped::by)?;
    chunk::with(|chunks| {
        let Some(chunk) = chunks.all.get_mut(&flight.id) else {
            return;
        };
        chunk.place = Place::Out;
        chunk.handle = 0;
        let device = chunk.device;
        if let Some(moved) = chunks.moved_out_bytes.get_mut(device) {
            *moved += flight.bytes;
        }
        chunks.publish(device);
    });
    Ok(())
}

/// Copies chunks out, what has changed of them.
pub(super) fn evict_all(ids: &[u64]) -> Step<()> {
    evict_by(ids, &Permits::until(u64::MAX), &|| false)
}

fn evict_by(ids: &[u64], permits: &Permits, given_up: &dyn Fn() -> bool) -> Step<()> {
    capture::relaxed(|| {
        let digests = tuning::reuses().then(|| digest::begin(ids));
        copy_out(ids, digests, permits, given_up)
    })
}
